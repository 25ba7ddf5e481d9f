"""The faults of tests/faults.py fit the source; `make faults` sees whether the suite notices them."""

from collections import Counter

import pytest
from faults import FAULTS, ROOT, SOURCE, faulty


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_one_place_of_the_source(fault):
    source = (ROOT / SOURCE / fault.file).read_text()
    changed = faulty(fault, source)
    assert changed != source
    if fault.file.endswith(".py"):
        compile(changed, fault.file, "exec")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_its_nearest_tests_are_there(fault):
    assert fault.nearest
    for test in fault.nearest:
        file, _, name = test.partition("::")
        name = name.partition("[")[0]
        assert not name or f"\ndef {name}(" in (ROOT / "tests" / file).read_text(), test


def test_every_layer_has_faults_of_its_own():
    assert max(Counter(each.name for each in FAULTS).values()) == 1
    layers = Counter(each.layer for each in FAULTS)
    assert set(layers) == {
        "kernels", "help", "plan", "runner", "calls", "ops", "register", "attention", "shards", "route", "explain",
        "trace", "routing", "segments", "hf", "bench",
    }  # fmt: skip
    assert min(layers.values()) >= 6
