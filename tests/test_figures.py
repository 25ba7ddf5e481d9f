"""The figures in the prose of README and docs are those of the results, of measured/ or of the source."""

import pytest
from figures import PAGES, SOURCES, agree, blocks

FIGURES = [pytest.param(page, block, id=f"{page.name}: {block.words[:50]}") for page in PAGES for block in blocks(page)]


def sources_of(page, block):
    return [sources for about, sources in SOURCES.get(page.name, {}).items() if about in block.words]


@pytest.mark.parametrize(("page", "block"), FIGURES)
def test_a_figure_is_that_of_its_source(page, block):
    (sources,) = sources_of(page, block) or pytest.fail(f"no source of {block.figures}: tests/figures.py names it")
    assert agree(block.figures, sources), f"{block.figures} are not those of {[each.path for each in sources]}"


@pytest.mark.parametrize(("page", "block"), FIGURES)
def test_a_changed_digit_is_noticed(page, block):
    (sources,) = sources_of(page, block)
    for i, figure in enumerate(block.figures):
        for place in (place for place, digit in enumerate(figure) if digit.isdigit()):
            changed = figure[:place] + str((int(figure[place]) + 1) % 10) + figure[place + 1 :]
            others = [*block.figures[:i], changed, *block.figures[i + 1 :]]
            assert not agree(others, sources), f"{changed} would pass for {figure}"


def test_every_source_has_its_figures():
    for page in PAGES:
        words = [block.words for block in blocks(page)]
        for about in SOURCES.get(page.name, {}):
            assert sum(about in each for each in words) == 1, f"{page.name}: {about}"
