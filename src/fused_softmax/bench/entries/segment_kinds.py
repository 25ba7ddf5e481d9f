"""The segments that are measured, by how long they are. Standard library only."""

from dataclasses import dataclass, replace

from fused_softmax.bench.cases import Case


@dataclass(frozen=True)
class Kind:
    """Segments of elements, of which all have the same number of columns, such as heads.

    title: for people. mean: elements of a segment. even: lengths lie evenly within so many of the mean.
    deviation: of a lognormal distribution of lengths, instead. greatest: which one segment then has, and none exceeds.
    share: of all elements, which one more segment has.
    unsorted: an index says of each element in which segment it is, in any order. gradient: of softmax, by its result.
    """

    title: str
    mean: float = 1.0
    even: float = 0.0
    deviation: float = 0.0
    greatest: int = 0
    share: float = 0.0
    unsorted: bool = False
    gradient: bool = False

    def count(self, case: Case) -> int:
        """How many segments a case has."""
        return max(1, round((1 - self.share) * case.n_rows / self.mean) + (self.share > 0))


# Means: edges over nodes, ogbn-arxiv's directed, of Hu et al., "Open Graph Benchmark" (arXiv 2005.00687), and of Reddit
# in Hamilton et al., "Inductive Representation Learning on Large Graphs" (arXiv 1706.02216). Greatest degrees: of these
# graphs, taken over and not counted here. Deviations: chosen, for the papers have none.
ARXIV = Kind("ogbn-arxiv's degrees", mean=7, deviation=20, greatest=13161)
PRODUCTS = Kind("ogbn-products' degrees", mean=50.5, deviation=95, greatest=17481)
REDDIT = Kind("Reddit's degrees", mean=492, deviation=800, greatest=21657)

_KINDS = {
    "segment_softmax_arxiv": ARXIV,
    "segment_softmax_products": PRODUCTS,
    "segment_softmax_reddit": REDDIT,
    "segment_softmax_texts": Kind("texts of 20 to 2000 tokens", mean=1010, even=990),
    "segment_softmax_short": Kind("segments of 1 to 8", mean=4.5, even=3.5),
    "segment_softmax_hub": Kind("half of all in one, others of 1", share=0.5),
    "segment_softmax_one": Kind("all in one", share=1.0),
    "segment_softmax_unsorted": replace(PRODUCTS, title=f"{PRODUCTS.title}, unsorted", unsorted=True),
}
KINDS = {
    name + suffix: replace(kind, gradient=bool(suffix)) for name, kind in _KINDS.items() for suffix in ("", "_gradient")
}
TITLES = {
    name: f"softmax of segments, {kind.title}" + (", gradient" if kind.gradient else "") for name, kind in KINDS.items()
}
