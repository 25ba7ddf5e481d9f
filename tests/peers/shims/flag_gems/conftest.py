"""Its conftest.py fills a table of results where tests run, and reads it where pytest-xdist reports them."""

import sys

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_logreport(report):
    results = sys.modules["tests.conftest"].test_results
    results.setdefault(report.nodeid, {"params": None, "result": None, "opname": None})
    return (yield)
