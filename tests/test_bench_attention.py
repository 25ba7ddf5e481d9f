"""attention in the bench: what its one tensor of gradients shows, its figures, and who is said to compute."""

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from fused_softmax.bench.cases import Case
from fused_softmax.bench.entries import attention
from fused_softmax.bench.entries.attention_kinds import KINDS, flops
from fused_softmax.bench.entries.operations import OPERATIONS
from fused_softmax.bench.measure import check
from fused_softmax.bench.results import record
from fused_softmax.bench.show import report
from fused_softmax.core.plan import H200
from fused_softmax.ops.attention.plan.sdpa import entry_of


def sample(name, **changes):
    return replace(OPERATIONS[name].sample, operation=name, **changes)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.gradient])
def test_every_gradient_of_attention_is_judged(name):
    """One that is lost, or scaled, shows in the one tensor that is compared."""
    case, kind = sample(name), KINDS[name]
    inputs = check.inputs(case, 1, "cpu", seed=0)[0]
    judge = check.Judge(case, inputs)
    right = attention.by_torch(case)
    assert judge.complaint(right(*inputs), judge.allowed(own=True))[0] == ""
    in_one = attention.in_one
    there = {0, 1, 2} | ({3} if kind.bias else set()) | ({4} if kind.sinks else set())
    for i in there:

        def scaled(*found, i=i):
            return in_one(*[each * 1.5 if j == i else each for j, each in enumerate(found)])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "in_one", scaled)
            y = right(*inputs)
        assert judge.complaint(y, judge.allowed(own=False))[0].startswith("largest error"), i


@pytest.mark.parametrize("name", ["attention_biased_gradient", "attention_sinks_gradient", "attention_decode"])
def test_the_truth_is_the_same_whatever_part_of_a_batch_a_step_takes(name, monkeypatch):
    case = sample(name, shape=(5, *sample(name).shape[1:]))
    inputs = [x.double() for x in check.inputs(case, 1, "cpu", seed=0)[0]]
    found = []
    for batches in (1, 2, 5):
        monkeypatch.setattr(attention, "batches_at_once", lambda scores, n=batches: n)
        found.append(attention.by_heads(case)(*inputs))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=1e-12)


def test_a_step_takes_as_many_of_a_batch_as_its_scores_allow():
    assert attention.batches_at_once(49 * 49) == 27950
    assert attention.batches_at_once(8 * 8192 * 8192) == 1


def test_figures_of_attention_are_of_its_products():
    """By a product of matrices, whose own bytes are such that both ratios are one."""
    case = Case((4, 32, 4096, 128), "bfloat16", "attention_causal_gradient")
    assert flops(case) == 3.5 * 2 * 4 * 32 * 4096**2 * 128
    assert flops(replace(case, operation="attention_sinks", shape=(1, 8, 130, 64))) == 4 * 8 * 64 * (
        sum(range(1, 129)) + 2 * 128
    )
    assert flops(replace(case, operation="attention_decode")) is None
    small = sample("attention", dtype="bfloat16")
    inputs = check.inputs(small, 1, "cpu", seed=0)[0]
    (square,) = OPERATIONS["attention"].ceilings(small)
    side = square(*inputs).shape[0]
    ratio = square.moved_bytes(*inputs) / OPERATIONS["attention"].floor_bytes(small)
    assert ratio == pytest.approx(2 * side**3 / flops(small), rel=1e-3)


def test_tables_have_tflops_of_attention_and_say_what_is_handed_over():
    figure = record.Figure(900.0, 1000.0, 1100.0, 500.0)
    case = Case((4, 32, 4096, 128), "bfloat16", "attention")
    who = OPERATIONS["attention"].who(case, H200)
    parameters = case.parameters | OPERATIONS["attention"].parameters(case)
    point = record.Point(
        case.n_rows, 128, "bfloat16", "fused_softmax", "ok", operation="attention", parameters=parameters,
        kernel=figure, ratio=0.5, ceiling=record.Ceiling("cuBLAS", 10.0, 1000.0), plan={"who": who},
    )  # fmt: skip
    run = record.Run({"gpu": {"name": "GPU", "l2_bytes": 2**20}}, "fused-softmax bench", [point], complete=True)
    report.print_run(run, console := Console(file=io.StringIO(), width=200))
    said = console.file.getvalue()
    assert f"{flops(case) * 1e-9:.0f} TFLOP/s 0.500" in said
    assert f"{flops(case) * 2e-9:.0f} TFLOP/s cuBLAS" in said
    handed = not isinstance(entry_of("forward", 128, 128, 2, 128, 4096, 4096, H200), str)
    assert ("hands attention 4 x 32 x 4096 x 128 bfloat16 to cuDNN: forward." in said) == handed
    assert OPERATIONS["attention_sinks"].who(case, H200) == {"forward": "own kernels"}
