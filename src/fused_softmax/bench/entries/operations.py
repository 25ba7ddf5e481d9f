"""The operations that can be measured, of all families. Sweeps name them."""

from collections.abc import Mapping
from dataclasses import replace

from fused_softmax.bench import catalog
from fused_softmax.bench.cases import Case
from fused_softmax.bench.entries import attention, layers, losses, routing, sampling, segments, softmaxes
from fused_softmax.bench.entries.operation import Operation
from fused_softmax.register.table import OPERATORS

FAMILIES = (softmaxes, losses, layers, sampling, routing, segments, attention)


def operation_of(case: Case) -> Operation:
    return OPERATIONS[case.operation]


def _as_registered(entries: Mapping[str, Operation]) -> dict[str, Operation]:
    """The entries with their peers, in the order of the operators that they are of; each is named by one operator."""
    named = [name for operator in OPERATORS for name in operator.bench]
    if sorted(named) != sorted(entries):
        raise ValueError(f"operators name {sorted(named)} for the bench, and its entries are {sorted(entries)}")
    return {name: replace(entries[name], peers=catalog.makers(name)) for name in named}


OPERATIONS = _as_registered({name: entry for family in FAMILIES for name, entry in family.ENTRIES.items()})
