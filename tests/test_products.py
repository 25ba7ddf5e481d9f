"""What the quick suite takes of a product of parameters."""

from itertools import combinations, product
from pathlib import Path

import products
import pytest
from products import GUARDS, ONE_IN, cover

pytest_plugins = ["pytester"]
SIZES = {"strategy": 4, "alignment": 3, "dtype": 2, "option": 8}
CASES = [dict(zip(SIZES, values, strict=True)) for values in product(*map(range, SIZES.values()))]


def meet(cases, names):
    return {tuple(case[name] for name in names) for case in cases}


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_every_two_values_meet_in_few_cases(strength):
    chosen = [CASES[i] for i in cover(CASES, strength=strength)]
    for names in combinations(SIZES, strength):
        assert meet(chosen, names) == meet(CASES, names)
    assert len(chosen) <= {1: 8, 2: 36, 3: 110}[strength]


def test_a_group_is_covered_whole():
    chosen = [CASES[i] for i in cover(CASES, ("strategy", "alignment", "dtype"))]
    assert len(meet(chosen, ("strategy", "alignment", "dtype"))) == 24
    assert len(chosen) <= 40


def test_of_less_than_a_product_what_is_there_is_covered():
    possible = [case for case in CASES if case["strategy"] != 2 or case["dtype"] == 0]
    chosen = [possible[i] for i in cover(possible)]
    for names in combinations(SIZES, 2):
        assert meet(chosen, names) == meet(possible, names)
    assert cover([]) == []


def test_the_same_cases_every_time():
    assert cover(CASES) == cover(CASES) == sorted(cover(CASES))


@pytest.mark.parametrize(("expression", "n"), [("not exhaustive", 25), ("not gpu", 125)])
def test_a_quick_run_makes_no_items_of_what_is_exhaustive(expression, n, pytester, monkeypatch):
    monkeypatch.setattr(products, "QUICK", products.QUICK)  # which the run sets
    pytester.makeconftest((Path(__file__).parent / "conftest.py").read_text())
    pytester.makepyfile("""
        import pytest

        @pytest.mark.pairwise
        @pytest.mark.parametrize("a", "12345")
        @pytest.mark.parametrize("b", "12345")
        @pytest.mark.parametrize("c", "12345")
        def test_product(a, b, c): ...

        @pytest.mark.exhaustive
        @pytest.mark.parametrize("a", "12345")
        def test_whole(a): ...

        @pytest.mark.guard
        @pytest.mark.parametrize("a", "12345")
        def test_left_to_ci(a): ...
    """)
    items, _ = pytester.inline_genitems("-m", expression)
    cases = [item.callspec.params for item in items if item.name.startswith("test_product")]
    assert n <= len(cases) <= 1.4 * n
    for names in combinations("abc", 2):
        assert len(meet(cases, names)) == 25
    assert sum(item.name.startswith("test_whole") for item in items) == (5 if expression == "not gpu" else 1)
    kept = [item for item in items if item.name.startswith("test_left_to_ci")]
    assert [bool(item.get_closest_marker("exhaustive")) for item in kept] == [False] * 5


def test_files_that_are_named_are_there():
    """A file that is renamed would be run whole, and make the quick suite slow."""
    there = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert there >= GUARDS.keys() | ONE_IN.keys()
