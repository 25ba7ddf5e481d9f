"""The filters of the benchmarks of sampling, and the rows that they are measured on."""

from dataclasses import asdict, dataclass
from typing import Any

DEVIATION, PEAKED = 2.0, 6.0  # of logits: nuclei of tens of thousands of columns, and of some ten

VOCABULARY = 256  # of the row that is drawn from many times


@dataclass(frozen=True)
class Filters:
    """What a sampler is asked for, the same for all rows; None where a filter is off. deviation: of its logits."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    deviation: float = DEVIATION

    @property
    def given(self) -> dict[str, Any]:
        """By the names that `sample` has for them."""
        return {name: value for name, value in asdict(self).items() if name != "deviation" and value is not None}


FILTERS = {
    "sample": Filters(),
    "sample_greedy": Filters(temperature=0.0),
    "sample_top_k": Filters(top_k=50),
    "sample_top_p": Filters(top_p=0.9),
    "sample_top_p_peaked": Filters(top_p=0.9, deviation=PEAKED),
    "sample_top_k_top_p": Filters(top_k=50, top_p=0.9),
    "sample_min_p": Filters(min_p=0.05),
}
