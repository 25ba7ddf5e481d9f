"""Segments in the bench: which they are, how results are compared, and what other projects' calls are asked for."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from fused_softmax.bench import catalog
from fused_softmax.bench.cases import Case
from fused_softmax.bench.entries import ceiling, segments
from fused_softmax.bench.entries.operations import OPERATIONS
from fused_softmax.bench.entries.segment_kinds import KINDS, PRODUCTS, REDDIT
from fused_softmax.bench.measure import check, sweeps


def sample(name, **changes):
    return replace(OPERATIONS[name].sample, operation=name, **changes)


def judged(case):
    given = check.inputs(case, 1, "cpu", seed=0)[0]
    return given, check.Judge(case, given)


@pytest.mark.parametrize("case", sweeps.build("segments")[::2], ids=str)
def test_segments_are_of_the_size_that_their_kind_says(case):
    kind, offsets = KINDS[case.operation], segments.offsets_of(case)
    lengths = offsets.diff()
    assert (int(offsets[0]), int(offsets[-1]), len(lengths)) == (0, case.n_rows, kind.count(case))
    assert int(lengths.min()) >= 0
    assert offsets.equal(segments.offsets_of.__wrapped__(case))
    if kind.greatest:
        assert segments.longest(case) == kind.greatest
        assert lengths.float().mean() == pytest.approx(kind.mean, rel=1e-3)
        most, others = int(lengths.argmax()), lengths.double()
        others[most] = kind.mean  # the one hub has most of the deviation of a small graph
        assert others.std() == pytest.approx(kind.deviation, rel=0.1)
    if kind.even:
        assert lengths.min() == kind.mean - kind.even
        assert lengths.max() == pytest.approx(kind.mean + kind.even, abs=0.02 * kind.mean + 1)
    if kind.share:
        assert segments.longest(case) == round(kind.share * case.n_rows)
        assert int((lengths == 1).sum()) == len(lengths) - 1


def test_graphs_have_as_many_nodes_as_the_published_ones():
    nodes = {
        case.operation: KINDS[case.operation].count(case)
        for case in sweeps.build("segments")
        if case.shape[1] in (1, 4)
    }
    published = {"arxiv": 169343, "reddit": 232965}
    for name, count in published.items():
        assert nodes[f"segment_softmax_{name}"] == pytest.approx(count, rel=0.02)
    assert PRODUCTS.mean * 2449029 == pytest.approx(2 * 61859140, rel=1e-3)  # both ends of an edge
    assert REDDIT.mean * 232965 == pytest.approx(114615892, rel=1e-3)


@pytest.mark.parametrize("name", KINDS)
def test_a_call_must_move_its_elements_and_what_says_where_they_are(name):
    case, kind = sample(name, shape=(1000, 2), dtype="bfloat16"), KINDS[name]
    where = 8 * (1000 if kind.unsorted else kind.count(case) + 1)
    of_order = 8 * (kind.count(case) + 2) if kind.unsorted and kind.gradient else 0  # the gradient needs its offsets
    assert OPERATIONS[name].floor_bytes(case) == (3 if kind.gradient else 2) * 1000 * 2 * 2 + where + of_order


@pytest.mark.parametrize("name", KINDS)
def test_parts_of_a_comparison_have_whole_segments_and_each_element_once(name, monkeypatch):
    case = sample(name)
    given, judge = judged(case)
    y = OPERATIONS[name].formula(case)(*given)
    monkeypatch.setattr(segments, "CHUNK", 40)
    seen, ids = [], segments.ids_of(segments.offsets_of(case), case.n_rows)
    for at, _ in segments.parts(case, given):
        places = torch.arange(case.n_rows)[at]
        seen.append(places)
        here = given[2 if KINDS[name].gradient else 1][places] if KINDS[name].unsorted else ids[places]
        assert len(places) <= 40 or len(here.unique()) == 1
    assert torch.cat(seen).sort().values.equal(torch.arange(case.n_rows))
    assert len(seen) > 1 or "one" in name
    assert judge.errors(y) == judge.torch_errors


@pytest.mark.parametrize("name", ["segment_softmax_hub", "segment_softmax_hub_gradient"])
def test_small_errors_of_a_hub_beside_segments_of_one_are_found(name):
    case = Case((2**20, 1), "float32", name)
    given, judge = judged(case)
    in_float64 = (each.double() if each.is_floating_point() else each for each in given)
    y = OPERATIONS[name].formula(case)(*in_float64).float()
    most = int(segments.offsets_of(case).diff().argmax())
    hub = slice(*segments.offsets_of(case)[most : most + 2].tolist())
    limits = judge.allowed(own=True)
    assert judge.complaint(y, limits)[0] == ""
    for wrong in (y[hub] * (1 + 4e-5), y[hub].roll(1)):
        spoilt = y.clone()
        spoilt[hub] = wrong
        assert judge.complaint(spoilt, limits)[0].startswith("largest error")
    assert (y[hub] * 4e-5).abs().max() < 2.0**-22  # less than the rounding of a result of 1, which is beside it


def test_our_own_error_is_not_measured_by_torchs():
    """torch adds up a hub's numbers in float32 one after another: what it misses by says nothing of ours."""
    case = Case((4000, 1), "float32", "segment_softmax_one")
    _, judge = judged(case)
    judge.torch_errors = replace(judge.torch_errors, largest=0.3, row_sum=0.3)
    assert judge.allowed(own=True)[0] < 2e-5
    assert judge.allowed(own=False)[0] > 0.3


@pytest.fixture
def torch_scatter(monkeypatch):
    """A module under torch_scatter's name, with what the bench calls of it, of torch's operations."""
    module = ModuleType("torch_scatter")

    def scatter_softmax(x, index, dim, dim_size):
        assert dim == 0
        return segments.softmax_of(x, index, dim_size)

    module.segment_csr = lambda x, ptr, reduce: segments.reduced(x, ptr, None, reduce)
    module.gather_csr = lambda x, ptr: segments.spread(x, ptr, None, int(ptr[-1]))
    module.scatter_softmax = scatter_softmax
    monkeypatch.setitem(sys.modules, "torch_scatter", module)


@pytest.mark.parametrize("name", KINDS)
def test_other_providers_are_judged_as_ours(name, torch_scatter):
    case = sample(name)
    _, judge = judged(case)
    pytest.importorskip("torch_geometric")
    peers, kind = set(catalog.PEERS[name]), KINDS[name]
    assert peers == {
        *([] if kind.gradient else ["pyg", "torch_scatter"]),
        *([] if kind.unsorted else ["padded", "padded compiled"]),
    }
    for peer in peers - {"padded compiled"}:
        assert check.verdict(judge, OPERATIONS[name].providers[peer](case), own=False)[0] == "", peer


def test_what_does_not_fit_is_not_padded():
    case = Case((2**17, 1), "float32", "segment_softmax_hub")
    given, _ = judged(case)
    with pytest.raises(RuntimeError, match="65537 segments padded to 65536 take 16 GiB"):
        OPERATIONS[case.operation].providers["padded"](case)(*given)


def test_the_ceiling_of_a_gradient_reads_twice():
    for name, kind in KINDS.items():
        wanted = ceiling.Add if kind.gradient else ceiling.Copy
        assert {type(each) for each in OPERATIONS[name].ceilings(sample(name))} == {wanted}
