"""The instruments: cases, the comparison before every figure, the record, and timing over a stand-in for the GPU."""

import contextlib
import io
import itertools
import json
import sys
import time
from dataclasses import astuple, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy
import pytest
import torch
from products import one_in
from rich.console import Console

from fused_softmax import route
from fused_softmax.bench import cases, catalog
from fused_softmax.bench.cases import Case
from fused_softmax.bench.entries import ceiling, layers, losses, makers, routing, sampling, softmaxes
from fused_softmax.bench.entries import filters as entries_filters
from fused_softmax.bench.entries.attention_kinds import KINDS
from fused_softmax.bench.entries.operations import OPERATIONS
from fused_softmax.bench.measure import check, clocks, measure, sweeps, timing, verify
from fused_softmax.bench.results import compare, record
from fused_softmax.bench.results import record as resume
from fused_softmax.bench.results.record import Ceiling, Figure, Point, Run
from fused_softmax.bench.show import charts, plot, report
from fused_softmax.core.plan import H200, plan_rows
from fused_softmax.register.table import OPERATORS

ROOT = Path(__file__).parents[1]
needs_gpu = pytest.mark.skipif(not measure.on_gpu(), reason="needs a CUDA GPU")


def run_of(*points):
    environment = {"torch": "2", "triton": "3", "python": "3", "gpu": {"name": "GPU", "l2_bytes": 2**20}}
    return Run(environment, "fused-softmax bench", list(points), complete=True)


def point(n_cols=256, provider="fused_softmax", gb_per_s=3000.0, **more):
    kernel, best = Figure(1.0, 2.0, 3.0, gb_per_s), Ceiling("copy 2048 w4", 1.9, 3700.0)
    return Point(64, n_cols, "float32", provider, "ok", kernel=kernel, ceiling=best, ratio=gb_per_s / 3700, **more)


def test_the_default_sweep_is_the_tutorials():
    sweep = sweeps.build()
    assert len(sweep) == 98
    assert sweep[0] == Case((4096, 256), "float32")
    assert sweep[-1] == Case((4096, 12672), "float32")


def test_cases_from_rows_columns_shapes_and_elements():
    assert sweeps.build(rows=[2, 3], cols=[5], dtypes=["float16"]) == [Case((2, 5), "float16"), Case((3, 5), "float16")]
    assert sweeps.build(shapes=[Case((7, 8))]) == [Case((7, 8))]
    assert sweeps.build(cols=[300], elements=1000) == [Case((4, 300))]
    assert sweeps.build(cols=[2**20]) == [Case((128, 2**20))]
    assert sweeps.build(quick=True, dtypes=["float16"])[0].dtype == "float16"
    assert sweeps.cut([Case((4096, 256)), Case((4, 10**6))], 2**10) == [Case((4, 256)), Case((1, 10**6))]


def test_operations_are_those_of_the_table_of_operators_in_its_order():
    assert list(OPERATIONS) == [name for each in OPERATORS for name in each.bench]
    assert verify.STRATEGIES == ("tile", "row", "split", "stream")


STANDING = [name for name in sweeps.SWEEPS if name != sweeps.CUSTOM]


@pytest.mark.parametrize("name", STANDING)
def test_a_sweep_is_made_of_known_operations_and_fits_a_cpu_when_cut(name):
    chosen = sweeps.build(name)
    assert chosen
    assert {case.operation for case in chosen} == set(sweeps.SWEEPS[name].dtypes) <= set(OPERATIONS)
    assert set(sweeps.build(name, quick=True)) <= set(chosen) or name == sweeps.TUTORIAL
    for case in sweeps.cut(chosen, 2**20):
        assert case.elements <= max(2**20, case.n_cols)
    assert {case.dtype for case in sweeps.build(name, dtypes=["float16"])} == {"float16"}


def test_options_replace_what_a_sweep_measures():
    vocab = sweeps.build("vocab", rows=[8])
    assert {case.n_rows for case in vocab} == {8}
    assert {case.n_cols for case in vocab} == set(sweeps.VOCABULARIES)
    batch = sweeps.build("batch", cols=[128256], dtypes=["bfloat16"])
    assert [case.n_rows for case in batch] == [2**i for i in range(17)]
    assert {case.n_cols for case in batch} == {128256}
    backward = sweeps.build("backward", cols=[300], elements=1000)
    assert {case.shape for case in backward} == {(4, 300)}
    assert len(backward) == 4
    assert sweeps.build("logsumexp", cases.parse_shapes("4x8x2:1"), dtypes=["float32"]) == [
        Case((4, 8, 2), operation="logsumexp", dim=1)
    ]
    both = sweeps.build("vocab", dtypes=["float32", "float16"])
    assert {case.dtype for case in both if case.operation == sweeps.WIDENING} == {"float16"}
    for name, shape in (("tutorial", "8x4:0"), ("backward", "4x8x2"), ("masked", "64x64")):
        with pytest.raises(ValueError, match=f"{name} takes shapes of"):
            sweeps.build(name, cases.parse_shapes(shape))


def test_custom_takes_any_operation_and_the_dims_it_takes():
    shapes = cases.parse_shapes("8x128:0,4x8x16")
    assert sweeps.build("custom", shapes, operations=["logsumexp"]) == [
        Case((8, 128), operation="logsumexp", dim=0),
        Case((4, 8, 16), operation="logsumexp"),
    ]
    assert sweeps.build("custom", cols=[100], elements=1000) == [Case((10, 100))]
    with pytest.raises(ValueError, match="custom has no shapes of its own"):
        sweeps.build("custom", rows=[4])
    with pytest.raises(ValueError, match="custom takes shapes of 4 dims"):
        sweeps.build("custom", cases.parse_shapes("8x128"), operations=["softmax_causal"])


def test_of_a_sweep_some_operations_can_be_measured_and_no_others():
    assert {case.operation for case in sweeps.build("peaks", operations=["logsumexp"])} == {"logsumexp"}
    with pytest.raises(ValueError, match="batch has no operation 'logsumexp'; it has softmax"):
        sweeps.build("batch", operations=["logsumexp"])


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_peaks_hold_both_sides_of_every_change_of_strategy(dtype, itemsize):
    cols = sorted(case.n_cols for case in sweeps.build("peaks", operations=["softmax"], dtypes=[dtype]))
    vector = 16 // itemsize

    def plan(n_cols):
        rows = 2**27 // n_cols + 133
        return plan_rows(rows, n_cols, itemsize, H200, alignment=makers.alignment(n_cols, itemsize))

    changes = []
    for step in (1, vector):  # odd lengths among them, then even ones alone
        lengths = [*range(step, 12000, step), *range(32768 - 4 * step, 32768 + 5 * step, step)]
        for before, after in itertools.pairwise(lengths):
            if after - before == step and len({plan(n).alignment for n in (before, after)}) == 1:
                one, other = plan(before), plan(after)
                if (one.strategy, one.num_warps) != (other.strategy, other.num_warps):
                    changes.append((before, after))
    assert len(changes) > 5
    assert all({before, after} & set(cols) for before, after in changes)
    assert {n + d for n in (512, 8192) for d in (-vector, -1, 0, 1, vector)} <= set(cols)
    assert {plan(n).strategy for n in cols} == {"tile", "row", "split", "stream"}


def test_sizes_and_ranges():
    assert cases.parse_sizes("3,256:1024:256,2Ki") == [3, 256, 512, 768, 2048]
    assert cases.parse_shapes("4096x32768,1X7") == [Case((4096, 32768)), Case((1, 7))]
    assert cases.parse_shapes("64x4096x512:1,2x3:1") == [Case((64, 4096, 512), dim=1), Case((2, 3))]
    assert cases.parse_dtype("bf16") == cases.parse_dtype("torch.bfloat16") == "bfloat16"


@pytest.mark.parametrize("text", ["0", "-4", "x", "", "8:4", "1:2:3:4", "1:8:0", "1.5"])
def test_malformed_sizes_are_refused(text):
    with pytest.raises(ValueError, match=r"is not|is empty"):
        cases.parse_sizes(text)


def test_inputs_are_peaked_and_differ():
    (first,), (second,) = check.inputs(Case((64, 1000)), 2, "cpu", seed=3)
    assert not first.equal(second)
    assert torch.softmax(first, -1).amax() > 0.5
    assert first.equal(check.inputs(Case((64, 1000)), 1, "cpu", seed=3)[0][0])


@pytest.mark.parametrize(
    ("softmax", "complaint"),
    [
        (lambda x: torch.softmax(x, -1), ""),
        (lambda x: torch.softmax(x, -1).mul(1.001), "largest error"),
        (lambda x: torch.softmax(x, -1).index_fill(0, torch.tensor(3), float("nan")), "NaN in 1 of 16 rows"),
        (lambda x: torch.softmax(x, -1)[:, :-1], "returned"),
        (lambda x: torch.softmax(x, -1).double(), "returned"),
        (lambda x: torch.where(x < x.mean(), 0, torch.softmax(x, -1)), "a row's sum"),
    ],
)
def test_a_wrong_result_is_found(softmax, complaint):
    x = torch.zeros(16, 50000) + torch.linspace(0, 1e-3, 50000)
    judge = check.Judge(Case((16, 50000)), (x,))
    limits = judge.allowed(own=True)
    limits = (max(limits[0], 1e-4), limits[1]) if complaint.startswith("a row") else limits
    assert judge.complaint(softmax(x), limits)[0].startswith(complaint)
    assert bool(judge.complaint(softmax(x), limits)[0]) == bool(complaint)


def sample(name, **changes):
    return replace(OPERATIONS[name].sample, operation=name, **changes)


SAMPLERS = [name for name, operation in OPERATIONS.items() if operation.draws is not None]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in SAMPLERS])
def test_an_operation_counts_its_bytes_and_tells_a_right_result_from_a_wrong_one(monkeypatch, name, dtype):
    case = sample(name, dtype=dtype)
    inputs = check.inputs(case, 1, "cpu", seed=0)[0]
    judge = check.Judge(case, inputs)
    y = OPERATIONS[name].baseline(case)(*inputs)
    assert (tuple(inputs[0].shape), inputs[0].dtype) == (case.shape[: inputs[0].ndim], getattr(torch, dtype))
    results = y if isinstance(y, tuple) else (y,)
    assert OPERATIONS[name].held_bytes(case) == sum(each.nbytes for each in (*inputs, *results))
    assert judge.complaint(y, judge.allowed(own=True))[0] == ""
    if (join := OPERATIONS[name].joined) is not None:
        y = join(case, y)
    formula = OPERATIONS[name].formula(case)(*inputs)
    assert judge.complaint(formula, judge.allowed(own=False))[0] == ""
    assert judge.complaint(y * (1 + 2**-4), judge.allowed(own=False))[0].startswith("largest error")
    y_nan = y.clone(memory_format=torch.contiguous_format)
    y_nan.view(-1)[7] = float("nan")
    assert judge.complaint(y_nan, judge.allowed(own=False))[0].startswith(f"NaN in 1 of {case.n_rows} rows")
    monkeypatch.setattr(check, "CHUNK", 1000)
    assert judge.errors(y) == judge.torch_errors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_is_told_from_one_that_draws_what_is_not_kept_or_too_often(name, dtype):
    case, operation = sample(name, dtype=dtype), OPERATIONS[name]
    inputs = check.inputs(case, 1, "cpu", seed=0)[0]
    x = inputs[0]
    judge = check.judge_of(case, inputs)
    y = operation.baseline(case)(*inputs)
    assert operation.held_bytes(case) == sum(each.nbytes for each in (*inputs, y))
    limits = judge.allowed(own=True)
    for who in ("torch", "transformers"):
        call = operation.providers[who](case)
        assert judge.complaint(call(*inputs), judge.allowed(own=False))[0] == ""
        assert judge.habit(call, own=False) == ""
    assert judge.complaint(y.int(), limits)[0] == ""
    for wrong in (y[:-1], y.float(), (y, y)):
        assert judge.complaint(wrong, limits)[0].startswith("returned")
    for column in (-1, case.n_cols):
        y_out = y.clone()
        y_out[2] = column
        assert judge.complaint(y_out, limits)[0] == "1 of 3 tokens are none that the filters keep"
    if name == "sample":
        flat = lambda x, *_: torch.multinomial((x / 1.2).softmax(-1), 1).squeeze(1)  # noqa: E731
        assert "chi-square" in judge.habit(flat, own=False)
        return
    assert judge.complaint(x.argmin(1), limits)[0] == "3 of 3 tokens are none that the filters keep"
    if name != "sample_greedy":
        plain = lambda x, *_: torch.multinomial(x.float().softmax(-1), 1).squeeze(1)  # noqa: E731
        assert "no probability" in judge.habit(plain, own=False)
        assert "chi-square" in judge.habit(lambda x, *_: x.argmax(1), own=False)


def test_sweeps_name_the_samplers_that_are_measured():
    assert list(entries_filters.FILTERS) == SAMPLERS
    assert sweeps.build("sampling")[0] == Case((8, 128256), "float32", "sample")


def test_of_equal_logits_others_may_draw_any():
    x, filters = torch.tensor([[1.0, 0.0, 1.0, 1.0]]).expand(4, 4), entries_filters.Filters(top_k=2)
    tokens = torch.arange(4)
    ours, others = (sampling.kept(filters, x, slack) for slack in (sampling.OWN_SLACK, sampling.OTHERS_SLACK))
    assert sampling.strays(ours, tokens).tolist() == [False, True, False, True]
    assert sampling.strays(others, tokens).tolist() == [False, True, False, False]


@pytest.mark.parametrize("name", ["attention", "sample_top_p"])
def test_what_is_right_is_computed_once_for_all_providers(name, monkeypatch):
    case = replace(OPERATIONS[name].sample, operation=name)
    judge = check.judge_of(case, check.inputs(case, 1, "cpu", seed=0)[0])
    call = OPERATIONS[name].providers["torch"](case)
    first = judge.complaint(judge.poisoned(call), judge.allowed(own=False))
    for where, what in ((check.Judge, "truth"), (sampling, "kept")):
        monkeypatch.setattr(where, what, lambda *_: pytest.fail("computed again"))
    assert judge.complaint(judge.poisoned(call), judge.allowed(own=False))[0] == first[0] == ""


@pytest.mark.parametrize("n", [2, 3, 7, 12])
def test_no_provider_follows_the_same_one_in_every_round(n):
    """What ran before decides the clock that a provider meets under a power cap."""
    orders = [timing.in_turn(n, turn) for turn in range(3)]
    assert all(sorted(order) == list(range(n)) for order in orders)
    assert orders == [timing.in_turn(n, turn) for turn in range(3)]
    before = [{b: a for a, b in zip([None, *order], order, strict=False)} for order in orders]
    assert all(len({each[i] for each in before}) > 1 for i in range(n))


def test_a_slow_providers_pass_is_a_few_rounds_of_the_sets():
    order = [0, 1, 2] * 10
    assert timing.shortened(order, 3, 1e-6) == order
    assert timing.shortened(order, 3, 2e-3) == [0, 1, 2] * 3
    assert timing.shortened(order, 3, 1.0) == [0, 1, 2]


def test_floor_bytes():
    def floor(name, *shape, dtype="bfloat16", dim=-1):
        return OPERATIONS[name].floor_bytes(Case(shape, dtype, name, dim))

    rows = 8 * 16 * 2048
    assert floor("softmax", 4096, 1000) == 2 * 2 * 4096 * 1000
    assert floor("softmax_float32", 4096, 1000) == 6 * 4096 * 1000
    assert floor("softmax_backward", 4096, 1000, dtype="float32") == 3 * 4 * 4096 * 1000
    assert floor("logsumexp", 64, 4096, 512, dim=1) == 2 * 64 * 512 * (4096 + 1)
    assert floor("softmax_causal", 8, 16, 2048, 2048) == 2 * (8 * 16 * 2048 * 2049 // 2 + rows * 2048)
    assert floor("softmax_causal", 1, 1, 2, 5, dtype="float32") == 4 * (4 + 5 + 2 * 5)
    assert floor("softmax_masked", 8, 16, 2048, 2048) == 2 * 2 * rows * 2048 + 8 * 2048 * 2048
    assert floor("softmax_biased", 8, 16, 2048, 2048) == 2 * 2 * rows * 2048 + 2 * 16 * 2048 * 2048


def test_of_a_linear_layers_loss_both_gradients_are_judged():
    case = sample("linear_cross_entropy")
    x, w, target = check.inputs(case, 1, "cpu", seed=0)[0]
    judge = check.Judge(case, (x, w, target))
    limits = judge.allowed(own=False)
    plain = layers.linear_then_loss
    for wrong in (
        lambda x, w, target: plain(x.detach(), w, target) + 0 * x.square().sum(),
        lambda x, w, target: plain(x, w.detach(), target) + 0 * w.square().sum(),
        lambda x, w, target: plain(x[:-1], w, target[:-1]),
    ):
        y = layers.layer_gradient(wrong)(case)(x, w, target)
        assert judge.complaint(y, limits)[0].startswith("largest error")
    assert layers.layer_checking_bytes(case) > 8 * 61 * 781
    assert OPERATIONS["linear_cross_entropy"].floor_bytes(case) == ceiling.Products().moved_bytes(x, w, target)
    assert ceiling.Products()(x, w, target).shape == w.shape


def test_of_a_layers_log_probabilities_both_gradients_of_both_results_are_judged():
    case = sample("linear_log_prob")
    x, w, target = check.inputs(case, 1, "cpu", seed=0)[0]
    judge = check.Judge(case, (x, w, target))
    plain = layers.linear_then_log_prob
    for wrong in (
        lambda x, w, target: (plain(x.detach(), w, target)[0], plain(x, w, target)[1]),
        lambda x, w, target: (plain(x, w.detach(), target)[0], plain(x, w, target)[1]),
        lambda x, w, target: (plain(x, w, target)[0], plain(x, w, target)[1].detach() + 0 * w.sum()),
        lambda x, w, target: (plain(x, w, target)[0] + 0 * w.sum(), -plain(x, w, target)[1]),
    ):
        y = layers.log_prob_gradient(wrong)(x, w, target)
        assert judge.complaint(y, judge.allowed(own=False))[0].startswith("largest error")


def test_of_two_layers_the_students_gradients_are_judged():
    case = sample("linear_divergence")
    given = check.inputs(case, 1, "cpu", seed=0)[0]
    judge = check.Judge(case, given)
    assert OPERATIONS["linear_divergence"].floor_bytes(case) == ceiling.Products().moved_bytes(*given)
    assert ceiling.Products()(*given).shape == given[1].shape
    for wrong in (
        lambda x, w, h, v: layers.jsd(x.detach(), w, h, v) + 0 * x.square().sum(),
        lambda x, w, h, v: layers.jsd(x, w.detach(), h, v) + 0 * w.square().sum(),
        lambda x, w, h, v: layers.jsd(h, v, x, w) * 2,
        lambda x, w, h, v: layers.jsd(x[:-1], w, h[:-1], v),
    ):
        y = layers.divergence_gradient(wrong)(case)(*given)
        assert judge.complaint(y, judge.allowed(own=False))[0].startswith("largest error")


def put_modules(monkeypatch, stand_ins):
    """Put modules in the place of installed ones, with what each has, and empty packages around them."""
    for name, has in stand_ins.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            package = ".".join(parts[:i])
            if package not in stand_ins:
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
        module = ModuleType(name)
        module.__dict__.update(has)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def stand_ins(monkeypatch):
    """Modules under the names of TRL, Liger and verl, with what the bench calls of them, of torch's operations."""

    class Applied:
        def __init__(self, apply):
            self.apply = apply

    def of_layer(x, w, target):
        return layers.linear_then_log_prob(x, w, target)

    def of_trl(x, w, bias, target, temperature, chunk_size, softcap, scale, outputs):
        assert (bias, temperature, chunk_size, softcap, scale, outputs) == (None, 1.0, 5, None, 1.0, ("entropy",))
        return *of_layer(x, w, target), None, None, None

    def of_liger(x, w, target, temperature, ignore_index, tiles, return_entropy):
        assert (temperature, ignore_index, tiles, return_entropy) == (1.0, -100, 1, True)
        of_targets, entropy = of_layer(x, w, target)
        return -of_targets, entropy

    def of_verl(x, w, target, temperature, reduction):
        assert (temperature, reduction) == (1.0, "none")
        return of_layer(x, w, target)

    stand_ins = {
        "trl.kernels": {
            "selective_log_softmax_and_entropy": losses.eager_log_prob, "ChunkedLogProbFunction": Applied(of_trl)
        },
        "trl.trainer.utils": {"_CHUNKED_LOGPROB_CHUNK_SIZE": 5},
        "liger_kernel.ops": {"LigerFusedLinearScaledCrossEntropyFunction": Applied(of_liger)},
        "verl.utils.torch_functional": {
            "logprobs_from_logits": lambda x, target, inplace_backward: losses.eager_log_prob(x, target)[0],
            "entropy_from_logits": lambda x: losses.eager_log_prob(x, x.argmax(-1))[1],
        },
        "verl.utils.kernel.linear_cross_entropy": {"linear_cross_entropy": of_verl},
    }  # fmt: skip
    put_modules(monkeypatch, stand_ins)


@pytest.mark.parametrize("name", ["log_prob", "log_prob_gradient", "linear_log_prob"])
def test_calls_of_other_projects_log_probabilities_are_judged_as_ours(name, stand_ins):
    case = sample(name)
    inputs = check.inputs(case, 1, "cpu", seed=0)[0]
    judge = check.Judge(case, inputs)
    peers = set(catalog.PEERS[name]) - catalog.VARIANTS
    assert peers == {"trl", "verl", *(["liger"] if name == "linear_log_prob" else [])}
    for peer in peers:
        assert check.verdict(judge, OPERATIONS[name].providers[peer](case), own=False)[0] == "", peer


class OfTRL:
    """Has GKDTrainer's function and ChunkedDivergenceFunction's, of torch's operations."""

    @staticmethod
    def generalized_jsd_loss(x, y, beta, reduction):
        return losses.divergence_by_torch(x, y, {0.0: "kl", 1.0: "reverse_kl", 0.5: "jsd"}[beta], reduction)

    @staticmethod
    def apply(x, w, bias, h, v, target_bias, beta):
        assert (bias, target_bias, beta) == (None, None, 0.5)
        x, y = torch.nn.functional.linear(x, w), torch.nn.functional.linear(h, v)
        return losses.divergence_by_torch(x, y, "jsd", "none").sum(-1), None


class OfLiger:
    """Its functions, which take logarithms, and of tvd probabilities, of float32."""

    @staticmethod
    def liger_kl_div(log_q, log_t, reduction, log_target):
        return torch.nn.functional.kl_div(log_q, log_t, reduction=reduction, log_target=log_target)

    @staticmethod
    def liger_jsd(log_q, log_t, beta):
        assert log_q.dtype == log_t.dtype == torch.float32
        return losses.divergence_by_torch(log_q, log_t, {1.0: "reverse_kl", 0.5: "jsd"}[beta])

    @staticmethod
    def liger_tvd(q, t, reduction):
        assert reduction == "batchmean"
        return losses.divergence_by_torch(q.log(), t.log(), "tvd")

    liger_fused_linear_jsd = staticmethod(layers.jsd)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in OPERATIONS if "divergence" in name])
def test_calls_of_other_projects_divergences_are_judged_as_ours(name, dtype, monkeypatch):
    """TRL has no tvd, and Liger's losses of logits are scalars."""
    put_modules(monkeypatch, {
        "trl.experimental.gkd.gkd_trainer": {"GKDTrainer": OfTRL},
        "trl.trainer.distillation_trainer": {"ChunkedDivergenceFunction": OfTRL},
        "liger_kernel.transformers": {"functional": OfLiger},
        "liger_kernel.transformers.functional": {"liger_fused_linear_jsd": layers.jsd},
    })  # fmt: skip
    case = sample(name, dtype=dtype)
    judge = check.Judge(case, check.inputs(case, 1, "cpu", seed=0)[0])
    peers = {"trl": "tvd" not in name, "liger": name.endswith("_gradient") or "linear" in name}
    assert set(catalog.PEERS[name]) == {peer for peer, has in peers.items() if has}
    for peer in catalog.PEERS[name]:
        assert check.verdict(judge, OPERATIONS[name].providers[peer](case), own=False)[0] == "", peer


@pytest.fixture
def stand_ins_of_routers(monkeypatch):
    """Modules under the names of QuACK, vLLM and Transformer Engine, with what the bench calls of them."""

    def topk(x, k, softmax):
        assert softmax
        values, ids = x.topk(k)
        return torch.softmax(values.float(), -1).to(x.dtype), ids.int()

    def topk_softmax(weights, ids, rows, x, renormalize):
        assert (weights.dtype, ids.dtype, rows.dtype, renormalize) == (torch.float32, torch.int32, torch.int32, True)
        of_k, found = routing.best(x, ids.shape[1])[1:]
        weights.copy_(of_k)
        ids.copy_(found)

    def fused_topk_with_score_function(
        x, k, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias
    ):
        assert (x.dtype, use_pre_softmax, score_function) == (torch.float32, False, "softmax")
        assert num_groups is group_topk is scaling_factor is expert_bias is None
        weights, ids = routing.best(x, k)[1:]
        return torch.zeros_like(x).scatter(1, ids, weights), torch.zeros_like(x).scatter(1, ids, 1).bool()

    def fused_moe_aux_loss(probs, tokens_per_expert, total_num_tokens, num_experts, topk, coeff):
        assert (len(probs), tokens_per_expert.dtype) == (total_num_tokens, torch.int32)
        shares = tokens_per_expert / (total_num_tokens * topk)
        return coeff * num_experts * (shares * probs.sum(0) / total_num_tokens).sum()

    put_modules(monkeypatch, {
        "quack.topk": {"topk": topk},
        "vllm": {"_custom_ops": SimpleNamespace(topk_softmax=topk_softmax)},
        "transformer_engine.pytorch.router": {
            "fused_topk_with_score_function": fused_topk_with_score_function,
            "fused_compute_score_for_moe_aux_loss": lambda x, k, score: (None, torch.softmax(x.float(), -1)),
            "fused_moe_aux_loss": fused_moe_aux_loss,
        },
    })  # fmt: skip


@pytest.mark.parametrize("name", ["route", "route_losses", "route_gradient"])
def test_other_projects_routers_are_judged_as_ours(name, stand_ins_of_routers):
    case = sample(name)
    judge = check.Judge(case, check.inputs(case, 1, "cpu", seed=0)[0])
    peers = set(catalog.PEERS[name])
    assert peers == {"transformer_engine", *(["quack", "vllm"] if name == "route" else [])}
    for peer in peers:
        assert check.verdict(judge, OPERATIONS[name].providers[peer](case), own=False)[0] == "", peer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "wrong",
    [
        {"bias": None},
        {"n_groups": 1, "groups_kept": None},
        {"groups_kept": 3},
        {"scale": 1.0},
        {"score": "sqrtsoftplus"},
    ],
    ids=str,
)
def test_a_router_of_groups_that_leaves_something_out_is_found(wrong, dtype):
    case = Case((8, 256), dtype, "route_groups")
    judge = check.Judge(case, given := check.inputs(case, 1, "cpu", seed=0)[0])
    options = {"score": "sigmoid", "n_groups": 8, "groups_kept": 4, "scale": 2.5, "bias": given[1]}
    assert check.verdict(judge, lambda x, _: route(x, 8, **options).weights, own=True)[0] == ""
    assert check.verdict(judge, lambda x, _: route(x, 8, **options | wrong).weights, own=True)[0] != ""


@pytest.mark.parametrize("name", ["weights", "aux_loss", "z_loss", "counts"])
def test_each_result_of_a_router_with_losses_is_compared(name):
    case = Case((40, 96), "float32", "route_losses")
    judge = check.Judge(case, check.inputs(case, 1, "cpu", seed=0)[0])

    def call(x, by=1):
        results = dict(zip(("weights", "aux_loss", "z_loss", "counts"), routing.own_losses(x, 8), strict=True))
        results[name].view(-1)[0] += by if name == "counts" else by * 1e-4
        return (*results.values(),)

    assert check.verdict(judge, lambda x: call(x, 0), own=True)[0] == ""
    assert check.verdict(judge, call, own=True)[0].startswith("largest error")


def test_a_module_is_imported_without_the_packages_around_it(tmp_path, monkeypatch):
    folder = tmp_path / "made_up_around" / "inner"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("import no_such_package")
    (folder / "__init__.py").write_text("import no_such_package")
    (folder / "beside.py").write_text("number = 7")
    (folder / "module.py").write_text("from made_up_around.inner.beside import number\nfrom . import beside")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("made_up_around", "made_up_around.inner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert makers.without_init("made_up_around.inner.module").number == 7
    for name in ("no_such_package.module", "made_up_around.missing.module"):
        with pytest.raises(ModuleNotFoundError, match=name.rpartition(".")[0]):
            makers.without_init(name)
    for name in [name for name in sys.modules if name.startswith("made_up_around")]:
        del sys.modules[name]


def test_memory_is_printed_of_losses(tmp_path):
    names = "cross_entropy_gradient", "linear_log_prob"
    of_loss, of_layer = (replace(point(), operation=name, memory_bytes=3 * 2**20) for name in names)
    for points, expected in (([of_loss], True), ([of_layer], True), ([point(memory_bytes=2**20)], False)):
        report.print_run(run_of(*points), console := Console(file=io.StringIO(), width=200))
        assert ("memory: MiB" in console.file.getvalue()) == expected
        assert ("3.0" in console.file.getvalue()) == expected


def test_causal_and_masked_inputs_empty_no_row():
    for name in ("softmax_causal", "softmax_masked"):
        case = sample(name)
        y = OPERATIONS[name].formula(case)(*check.inputs(case, 1, "cpu", seed=0)[0])
        assert not y.isnan().any()
        assert (y == 0).any()
    hidden = softmaxes.above_diagonal_elements(sample("softmax_causal"))
    assert hidden == 3 * softmaxes.above_diagonal(61, 131, torch.device("cpu")).sum()


def test_a_provider_that_writes_its_input_spoils_nobody_elses(monkeypatch):
    def careless(x):
        y = torch.softmax(x, -1)
        x.zero_()
        return y

    monkeypatch.setitem(OPERATIONS["softmax"].providers, "careless", lambda case: careless)
    found = measure.measure(Case((8, 100)), ["careless", "torch"], measure.Effort(time=False))
    assert [p.status for p in found] == ["wrong", "untimed"]
    assert found[1].error is not None


def test_figures_are_quantiles_over_floor_bytes():
    figure = timing.figure(8_000_000, [5e-6, 1e-6, 2e-6, 4e-6, 3e-6])
    assert (figure.p20_us, figure.p50_us, figure.p80_us) == pytest.approx((2, 3, 4))
    assert figure.gb_per_s == pytest.approx(8e6 / 3e-6 * 1e-9)


def test_rotation_is_colder_than_l2_or_says_so():
    l2 = 60 * 2**20
    for floor in (8 * 4096 * 4096, 8 * 65536 * 256, 8 * 8 * 32000):
        assert timing.rotation(floor, l2) * floor > 4 * l2
    assert timing.rotation(8 * 2**34, l2) == 2
    assert timing.rotation(8 * 4096, l2) == timing.MAX_BUFFERS


def test_records_round_trip_and_replace_the_file_whole(tmp_path):
    path = tmp_path / "results.json"
    other = point(operation="logsumexp", parameters={"shape": [4, 256, 16], "dim": 1})
    run = run_of(point(plan={"strategy": "row"}), Point(1, 2, "float32", "quack", "absent", "no module"), other)
    run.checks.append(record.Check("tile", 3, 5, "float32", "ok", 1e-7))
    record.save(run, path)
    assert record.load(path) == run
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize(
    "path", one_in(4, sorted((ROOT / "benchmarks/results").glob("*.json"))), ids=lambda path: path.stem
)
def test_committed_results_are_still_read_printed_and_drawn(tmp_path, path):
    run = record.load(path)
    assert {point.operation for point in run.points} <= set(OPERATIONS)
    assert [measure.point(point.case, point.provider, "ok").case for point in run.points] == [
        point.case for point in run.points
    ]
    report.print_run(run, console := Console(file=io.StringIO(), width=200))
    if run.first_calls:
        assert "slowest kernel" in console.file.getvalue()
        return
    assert f"the best {record.ceiling_of(run)}" in console.file.getvalue()
    plot.plot(run, tmp_path / "plot.png")


def test_a_case_goes_through_its_point():
    deep = Case((2, 3, 4, 5), operation="softmax_causal")
    for case in (Case((4, 8)), Case((4, 8), "bfloat16", "logsumexp", 0), deep):
        assert measure.point(case, "torch", "ok").case == case
    assert str(Case((4, 8, 2), "float16", "logsumexp", 1)) == "logsumexp 4 x 8 x 2 dim 1 float16"
    assert measure.point(Case((2, 3, 4, 5), operation="softmax_masked"), "torch", "ok").parameters == {
        "shape": [2, 3, 4, 5], "dim": -1, "mask": [2, 1, 4, 5],
    }  # fmt: skip


def test_an_interrupt_while_a_file_is_written_leaves_the_earlier_one_and_nothing_beside_it(monkeypatch, tmp_path):
    path = tmp_path / "results.json"
    record.save(run_of(point()), path)
    before = path.read_bytes()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(record.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        record.save(run_of(point(512)), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_runs_of_one_source_on_one_machine_match_and_no_others():
    def run(gpu=None, options=None, **environment):
        facts = {"torch": "2.11.0", "commit": "abc", "source": "1", "gpu": {"name": "H200", "clocks_sm": "345"}}
        return Run(
            facts | {"gpu": facts["gpu"] | (gpu or {})} | environment, "bench", options={"seed": 0} | (options or {})
        )

    assert resume.mismatch(run(), run({"clocks_sm": "1980"})) == ""
    assert resume.mismatch(run(), run(commit="def")) == "commit abc then, def now"
    assert resume.mismatch(run(), run({"name": "H100"})) == "GPU name H200 then, H100 now"
    assert resume.mismatch(run(), run(options={"seed": 1})) == "seed 0 then, 1 now"
    assert (
        resume.mismatch(run(source="2"), run(torch="2.12.0")) == "source 2 then, 1 now; torch 2.11.0 then, 2.12.0 now"
    )
    assert "GPU name H200 then, none now" in resume.mismatch(run(), Run({**run().environment, "gpu": None}, "bench"))


def test_what_another_try_can_change_is_measured_again():
    statuses = ("ok", "wrong", "untimed", "refused", "absent", "skipped")
    held = resume.Held(Point(4, 8, "float32", status, status) for status in statuses)
    assert held.missing(Case((4, 8)), [*statuses, "new"]) == ["refused", "absent", "skipped", "new"]
    assert held.missing(Case((4, 9)), ["ok"]) == ["ok"]
    new = [Point(4, 9, "float32", "ok", "ok"), Point(4, 8, "float32", "new", "ok")]
    assert [(p.n_cols, p.provider) for p in held.merged(new)] == [
        (8, "ok"), (8, "wrong"), (8, "untimed"), (8, "new"), (9, "ok"),
    ]  # fmt: skip


class Nvml:
    """NVIDIA's management library, as pynvml wraps it, with one GPU."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, reasons=0x1, refuses=()):
        self.reasons, self.refuses, self.asked = reasons, refuses, []

    def nvmlInit(self):
        if "init" in self.refuses:
            raise RuntimeError("NVML Shared Library Not Found")

    def nvmlDeviceGetHandleByIndex(self, index):
        self.asked.append(index)
        return "handle"

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self.asked.append(uuid)
        return "handle"

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetTemperature(self, handle, sensor):
        if "temperature" in self.refuses:
            raise RuntimeError("Not Supported")
        return 41

    def nvmlDeviceGetPowerUsage(self, handle):
        return 612345

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self.reasons


def test_clocks_are_read_where_nvml_is_and_nowhere_else(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", library := Nvml(reasons=0x1 | 0x4 | 0x40))
    assert clocks.Clocks("abc-1").read() == {
        "sm_mhz": 1980, "mem_mhz": 3201, "celsius": 41, "watts": 612.345,
        "throttled": ["software power cap", "hardware thermal slowdown"],
    }  # fmt: skip
    assert library.asked == [b"GPU-abc-1"]
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(refuses=("temperature",)))
    assert clocks.Clocks().read().keys() == {"sm_mhz", "mem_mhz", "watts", "throttled"}
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(refuses=("init",)))
    assert clocks.Clocks().read() == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert clocks.Clocks().read() == {}


def test_of_several_readings_the_worst_is_kept():
    readings = [{"sm_mhz": 1980, "celsius": 40, "throttled": []}, {}, {"sm_mhz": 1700, "throttled": ["power brake"]}]
    assert clocks.summary(readings) == {"sm_mhz": 1700, "celsius": 40, "throttled": ["power brake"]}
    assert clocks.summary([{}]) is None


def timed(p50, spread=0.01, n_cols=256, top=3700.0, **more):
    kernel = Figure(p50 * (1 - spread), p50, p50 * (1 + spread), 1e6 / p50)
    return replace(point(n_cols), kernel=kernel, ceiling=Ceiling("copy", 1.0, top), ratio=1e6 / p50 / top, **more)


@pytest.mark.parametrize(
    ("before", "after", "verdict", "factor"),
    [
        (timed(100), timed(110), "slower", 1.1),
        (timed(100), timed(90), "faster", 0.9),
        (timed(100), timed(101, 0.001), "same", 1.01),
        (timed(100, 0.1), timed(110), "same", 1.1),
        (timed(100), timed(110, 0.1), "same", 1.1),
        (timed(110), timed(100, 0.1), "same", 1 / 1.1),
    ],
)
def test_a_change_counts_beyond_the_spread_of_both_runs_and_the_tolerance(before, after, verdict, factor):
    (change,) = compare.compare(run_of(before), run_of(after)).changes
    assert (change.verdict, change.clock) == (verdict, "kernel")
    assert change.factor == pytest.approx(factor)
    code = compare.compare(run_of(before), run_of(after)).exit_code
    assert code == (verdict == "slower")


def test_by_ratio_a_slower_machine_is_no_slower_kernel():
    before, after = run_of(timed(100, top=4000.0)), run_of(timed(110, top=4000.0 / 1.1))
    assert compare.compare(before, after).changes[0].verdict == "slower"
    (change,) = compare.compare(before, after, by="ratio").changes
    assert (change.verdict, change.factor) == ("same", pytest.approx(1))
    assert "the ceilings are 0.909 of what they were" in compare.compare(before, after).differences[0]
    assert compare.compare(before, run_of(timed(110, top=4000.0)), by="ratio").changes[0].verdict == "slower"


def test_kernel_and_call_are_never_compared_with_each_other():
    call = replace(point(), kernel=None, ceiling=None, call=Figure(1, 2, 3, 10))
    assert compare.compare(run_of(timed(100)), run_of(call)).exit_code == 2
    both = replace(timed(100), call=Figure(1, 2, 3, 10))
    assert [c.clock for c in compare.compare(run_of(both), run_of(both)).changes] == ["kernel"]
    assert [c.clock for c in compare.compare(run_of(both), run_of(call)).changes] == ["call"]
    assert [c.clock for c in compare.compare(run_of(both), run_of(both), clock="call").changes] == ["call"]


def test_what_lost_its_figure_is_worse_and_what_stands_alone_is_counted():
    wrong = Point(64, 256, "float32", "fused_softmax", "wrong", "largest error 1")
    found = compare.compare(run_of(timed(100), timed(5, n_cols=512)), run_of(wrong, timed(5, n_cols=1024)))
    assert (found.exit_code, found.only_before, found.only_after) == (1, 1, 1)
    assert found.lost[0].message == "largest error 1"
    assert compare.compare(run_of(wrong), run_of(timed(100))).exit_code == 2


def test_geometric_means_are_by_operation_dtype_provider_and_clock():
    before = run_of(timed(100), timed(100, n_cols=512), timed(100, dtype="bfloat16"))
    after = run_of(timed(50), timed(200, n_cols=512), timed(300, dtype="bfloat16"))
    means = compare.compare(before, after).means()
    assert means["softmax", "float32", "fused_softmax", "kernel"] == (pytest.approx(1), 2, 1, 1)
    assert means["softmax", "bfloat16", "fused_softmax", "kernel"] == (pytest.approx(3), 1, 0, 1)


def test_an_unknown_schema_is_refused(tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"schema": 99}))
    with pytest.raises(ValueError, match="is not what `fused-softmax bench --out` writes"):
        record.load(path)


def test_a_record_holds_no_paths():
    assert (
        record.one_line(RuntimeError("cannot open /some/where/file.py:3\nmore"))
        == "RuntimeError: cannot open file.py:3"
    )
    assert record.one_line("12/34 rows at 3 GB/s") == "12/34 rows at 3 GB/s"
    assert record.one_line("\x1b[91m\x1b[1merror:\x1b[0m no") == "error: no"
    assert record.command_line(["bench", "--out=/some/where/r.json"]) == "fused-softmax bench --out=r.json"


@pytest.mark.parametrize("cols", [(256, 384, 512), (128, 131072)])
def test_a_plot_has_every_provider_and_the_ceiling(tmp_path, cols):
    run = run_of(*(point(n, name) for n in cols for name in ("fused_softmax", "torch", "mine")))
    plot.plot(run, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    looks = [catalog.look_of(name) for name in [*catalog.provider_names(), "mine"]]
    for each in zip(*[astuple(replace(look, dark=look.colour)) for look in looks], strict=True):
        assert len(set(each)) == len(each)


def test_a_plot_stands_on_what_varies(tmp_path):
    def axis(*cases):
        return charts.axis_of(cases)[0]

    assert axis(Case((64, 256)), Case((128, 512))) == "n_cols"
    assert axis(Case((64, 256)), Case((128, 256))) == "n_rows"
    assert axis(Case((64, 256)), Case((64, 512)), Case((128, 256))) == "shape"
    assert axis(Case((4, 8, 2), dim=1)) == "shape"
    mixed = run_of(point(), point(operation="logsumexp", parameters={"shape": [4, 256, 16], "dim": 1}))
    plot.plot(mixed, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert "logsumexp" in text
    assert "4 x 256 x 16 dim 1" in text


def test_a_plot_has_the_figures_of_another_run_below_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(charts, "VALIDATE", True)
    here = run_of(*(replace(point(n, "torch"), kernel=None, call=Figure(1, 2, 3, 5.0), ceiling=None) for n in (8, 16)))
    there = run_of(*(point(n, name) for n in (8, 16) for name in ("fused_softmax", "torch")))
    here.environment["gpu"], there.environment["gpu"]["name"] = None, "Other GPU"
    above, below = charts.pictures([here, there])["vconcat"]
    assert above["title"].startswith("torch on a CPU")
    assert below["title"].startswith("Other GPU")
    assert "fused_softmax" not in json.dumps(above)
    plot.plot(here, tmp_path / "plot.svg", there)
    text = (tmp_path / "plot.svg").read_text()
    assert all(each in text for each in ("torch on a CPU", "Other GPU", "best copy kernel"))
    assert plot.shows(tmp_path / "plot.svg", here)


def test_of_kernels_those_of_the_named_providers_are_checked():
    assert list(verify.kernels(["softmax"], ["fused_softmax", "torch"])) == list(verify.STRATEGIES)
    assert list(verify.kernels(["softmax", "logsumexp"], ["naive", "torch"])) == ["naive"]
    assert list(verify.kernels(["logsumexp"], ["fused_softmax"])) == ["logsumexp"]
    assert set(verify.kernels(["softmax"])) == {*verify.STRATEGIES, *catalog.CLASSICS}
    assert list(verify.verify(["softmax"], ["torch"])) == []


def test_interpreter_checks_not_reached_are_named():
    names = ["softmax", "logsumexp"]
    assert {c.kernel: c.status for c in verify.verify(names, seconds=0.01)} == dict.fromkeys(
        verify.kernels(names), "not run"
    )


@pytest.mark.skipif(not verify.interpreting(), reason="runs where kernels are interpreted")
@pytest.mark.parametrize("kernel", verify.kernels(list(OPERATIONS)))
def test_every_kernel_passes_under_the_interpreter(kernel):
    small = None if kernel in OPERATIONS else Case((3, 781))
    assert verify.check_kernel(kernel, small).status == "ok"


@pytest.fixture
def stand_in(monkeypatch):
    """A torch.cuda whose graphs run their calls again when replayed, on the CPU."""
    calls = []
    state = SimpleNamespace(replaying=False)

    class Graph:
        def replay(self):
            state.replaying = True
            for call in self.calls:
                call()

    @contextlib.contextmanager
    def graph(graph, **_):
        calls.clear()
        yield
        graph.calls = list(calls)

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            self.at = time.perf_counter()

        def elapsed_time(self, end):
            return (end.at - self.at) * 1e3

    def captured(work, result=lambda *inputs: torch.empty_like(inputs[0])):
        """A provider writing into an output that stays, as a captured kernel does."""

        def call(*inputs):
            y = result(*inputs)
            calls.append(lambda: work(*inputs, y))
            work(*inputs, y)
            return y

        return call

    stream = SimpleNamespace(wait_stream=lambda other: None)
    facts = SimpleNamespace(L2_cache_size=2**16)
    stubs = {
        "CUDAGraph": Graph, "graph": graph, "Event": Event, "Stream": lambda: stream, "graph_pool_handle": object,
        "current_stream": lambda: stream, "set_stream": lambda s: None, "stream": contextlib.nullcontext,
        "synchronize": lambda: None, "empty_cache": lambda: None, "mem_get_info": lambda: (2**40, 2**40),
        "get_device_properties": lambda index: facts,
    }  # fmt: skip
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(timing, "_streams", [])
    monkeypatch.setattr(timing, "MAX_CALLS", 1)  # of each set one call is enough
    monkeypatch.setattr(measure, "on_gpu", lambda: True)
    inputs = check.inputs
    monkeypatch.setattr(check, "inputs", lambda case, count, device, seed: inputs(case, count, "cpu", seed))

    class Plain:
        def __init__(self, name):
            self.name, self.work = name, captured(lambda *tensors: tensors[-1].copy_(tensors[0]))

        def moved_bytes(self, x, *_):
            return 2 * x.nbytes

        def __call__(self, *inputs):
            return self.work(*inputs)

    for kind in ("copies", "adds", "reads"):
        plain = [Plain(f"{kind} {i}") for i in range(4)]
        monkeypatch.setattr(ceiling, kind, lambda *_, plain=plain, **__: plain)

    def add(name, work, operation="softmax"):
        monkeypatch.setitem(OPERATIONS[operation].providers, name, lambda case: captured(work))

    def add_baseline(name, operation):
        def provide(case):
            call = OPERATIONS[operation].baseline(case)

            def work(*tensors):
                *given, y = tensors
                found = call(*given)
                for part, each in zip(y, found, strict=True) if isinstance(y, tuple) else [(y, found)]:
                    part.copy_(each)

            return captured(work, call)

        monkeypatch.setitem(OPERATIONS[operation].providers, name, provide)

    state.add, state.add_baseline = add, add_baseline
    return state


def softmax_into(x, y):
    torch.softmax(x, -1, out=y)


EFFORT = measure.Effort(rounds=2, budget_ms=1)


def test_graph_timing_gives_both_figures_and_the_ceiling(stand_in):
    stand_in.add("good", softmax_into)
    (found,) = measure.measure(Case((8, 100)), ["good"], EFFORT)
    assert (found.status, found.method, found.message) == ("ok", "graph", "")
    assert found.kernel.p20_us <= found.kernel.p50_us <= found.kernel.p80_us
    assert found.ratio == pytest.approx(found.kernel.gb_per_s / found.ceiling.gb_per_s)
    assert found.call.p50_us > 0
    assert found.rotated_bytes == found.buffers * 2 * 8 * 100 * 4 > 4 * 2**16


def test_a_point_says_what_the_clocks_did_while_it_was_timed(stand_in, monkeypatch):
    nvml = Nvml(reasons=0x4)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(measure, "_clocks", lambda: clocks.Clocks())
    stand_in.add("good", softmax_into)
    (found,) = measure.measure(Case((8, 100)), ["good"], EFFORT)
    assert found.clocks["throttled"] == ["software power cap"]
    assert found.clocks["sm_mhz"] == 1980
    run = run_of(found)
    report.print_run(run, console := Console(file=io.StringIO(), width=200))
    assert "The GPU lowered its clocks while it was timed: software power cap." in console.file.getvalue()


def test_all_inputs_rotate_and_the_ceiling_is_the_operations(stand_in):
    seen = []

    def backward(dy, y, dx):
        seen.append((dy.data_ptr(), y.data_ptr()))
        dx.copy_(torch._softmax_backward_data(dy, y, -1, y.dtype))

    stand_in.add("good", backward, "softmax_backward")
    (found,) = measure.measure(Case((8, 100), operation="softmax_backward"), ["good", "naive"], EFFORT)
    assert (found.status, found.operation, found.method) == ("ok", "softmax_backward", "graph")
    assert found.ceiling.name.startswith("adds")
    assert found.ceiling.gb_per_s == pytest.approx(2 * 8 * 100 * 4 / found.ceiling.p50_us * 1e-3)
    assert found.rotated_bytes == found.buffers * 3 * 8 * 100 * 4 > 4 * 2**16
    assert len(set(seen)) == found.buffers
    assert len({dy for dy, _ in seen}) == len({y for _, y in seen}) == found.buffers


OF_SEVERAL = "route_losses"  # results, as a tuple


@pytest.mark.parametrize("name", [*one_in(3, [name for name in OPERATIONS if name != OF_SEVERAL]), OF_SEVERAL])
def test_every_operation_is_timed(stand_in, name):
    case = sample(name, dtype="bfloat16")
    stand_in.add_baseline("good", name)
    (found,) = measure.measure(case, ["good"], EFFORT)
    assert (found.status, found.method, found.message) == ("ok", "graph", "")
    assert found.case == case
    assert found.kernel.gb_per_s == pytest.approx(OPERATIONS[name].floor_bytes(case) / found.kernel.p50_us * 1e-3)
    assert found.ratio == pytest.approx(found.kernel.gb_per_s / found.ceiling.gb_per_s)


def test_a_provider_wrong_only_on_replay_gets_no_speed(stand_in):
    stand_in.add("once", lambda x, y: None if stand_in.replaying else softmax_into(x, y))
    (found,) = measure.measure(Case((8, 100)), ["once"], EFFORT)
    assert (found.status, found.kernel, found.call) == ("wrong", None, None)
    assert found.message.startswith("on replay: NaN")


def test_a_provider_that_cannot_be_captured_is_timed_by_events_and_marked(stand_in, monkeypatch):
    @contextlib.contextmanager
    def refusing(graph, **options):
        raise RuntimeError("operation not permitted")
        yield

    stand_in.add("good", softmax_into)
    monkeypatch.setattr(torch.cuda, "graph", refusing)
    (found,) = measure.measure(Case((8, 100)), ["good"], EFFORT)
    assert (found.status, found.method) == ("ok", "events")
    assert "not captured: RuntimeError: operation not permitted" in found.message


def test_a_shape_that_does_not_fit_is_skipped_before_it_is_allocated(stand_in, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**20, 2**40))
    (found,) = measure.measure(Case((2**20, 2**10)), ["torch"], EFFORT)
    assert (found.status, found.kernel) == ("skipped", None)
    assert "GiB are free" in found.message


SHAPES = [ceiling.Shape(64, 1), ceiling.Shape(32, 1, streaming=True), ceiling.Shape(16, 1, waves=1)]


def words(x):
    return x.view(-1).view(torch.int32)


def exclusive_or(x):
    return int(numpy.bitwise_xor.reduce(words(x).cpu().numpy()))


def hold_ceilings_to_what_they_move(copies, converting, adds, reads, a, b):
    for copy in copies:
        assert copy(a).equal(a), copy.name
        assert copy.moved_bytes(a) == 2 * a.nbytes
    for copy in converting:
        assert copy(a).equal(a.float()), copy.name
        assert copy.moved_bytes(a) == a.nbytes + 4 * a.numel()
    for add in adds:
        assert add(a, b).equal(a + b), add.name
        assert add.moved_bytes(a, b) == 3 * a.nbytes
    for read in reads:
        results = read(a)
        assert exclusive_or(results) == exclusive_or(a), read.name
        assert read.moved_bytes(a) == a.nbytes + results.nbytes


@pytest.mark.skipif(not verify.interpreting(), reason="runs where kernels are interpreted")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_ceilings_move_all_bytes(dtype):
    a, b = torch.randn(2, 33, 144).to(getattr(torch, dtype))
    # 132 programs stand for a GPU's, fewer than the blocks of the last shape, which strides.
    assert SHAPES[-1].programs(a.numel(), a) == 132
    of_shapes = [[kind(shape) for shape in SHAPES] for kind in (ceiling.Copy, ceiling.Add, ceiling.Read)]
    converting = [ceiling.Copy(shape, torch.float32) for shape in SHAPES]
    hold_ceilings_to_what_they_move(of_shapes[0], converting, *of_shapes[1:], a, b)


@pytest.mark.skipif(not verify.interpreting(), reason="runs where kernels are interpreted")
def test_a_copy_that_reads_a_share_reads_those_blocks_alone():
    x = torch.rand(64 * 64 * 4) + 1
    for shape in SHAPES:
        y = ceiling.Copy(shape, share=16)(x)
        read = y != 0
        assert y.equal(torch.where(read, x, 0))
        assert read.view(-1, 64 * shape.block).sum(1).unique().tolist() == [16 * shape.block]
        assert ceiling.Copy(shape, share=16).moved_bytes(x) == x.nbytes // 4 + x.nbytes


def test_ceilings_differ_in_name_and_the_causal_one_reads_a_half():
    for kernels in (ceiling.copies(), ceiling.copies(torch.float32), ceiling.adds(), ceiling.reads()):
        assert len({kernel.name for kernel in kernels}) == len(kernels)
    (share,) = {copy.share for copy in OPERATIONS["softmax_causal"].ceilings(Case((8, 16, 2048, 2048)))}
    assert share == ceiling.SHARES // 2


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ceilings_move_all_bytes_on_a_gpu(dtype):
    a, b = torch.randn(2, 33, 8192, device="cuda").to(getattr(torch, dtype))
    converting = ceiling.copies(torch.float32)
    hold_ceilings_to_what_they_move(ceiling.copies(), converting, ceiling.adds(), ceiling.reads(), a, b)


@pytest.mark.gpu
@needs_gpu
def test_real_figures():
    names = ["fused_softmax", "torch"]
    for found in measure.measure(Case((4096, 4096), "float32"), names, measure.Effort(2, 5)):
        assert (found.status, found.method) == ("ok", "graph"), found.message
        assert 0.1 < found.ratio < 1.2
        assert found.rotated_bytes > 4 * torch.cuda.get_device_properties(0).L2_cache_size
        assert (found.plan is not None) == (found.provider == "fused_softmax")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", OPERATIONS)
def test_real_figures_of_every_operation(name):
    shape = (4, 8, 512, 512) if len(OPERATIONS[name].sample.shape) == 4 else (2048, 4096)
    shape = (2048, 512, 8192) if name.startswith("linear_") else shape
    shape = (2, 8, 512, 64) if name in KINDS else shape
    case = sample(name, shape=shape, dtype="bfloat16", dim=0 if name == "softmax_dim" else -1)
    for found in measure.measure(case, ["fused_softmax", "torch", "torch.compile"], measure.Effort(2, 5)):
        assert found.status == "ok", f"{found.provider}: {found.message}"
        # multinomial may wait for the device, which no graph captures; sorting reads and writes a row many times.
        draws = name in SAMPLERS and found.provider != "fused_softmax"
        assert found.method == "graph" or draws, f"{found.provider}: {found.message}"
        # Of what torch has no function for, it takes one head after another.
        assert (1e-5 if name in KINDS else 0.0005 if draws else 0.005) < found.ratio < 1.3


def test_a_tvd_is_measured_where_its_gradient_does_not_jump():
    for dtype in ("float32", "bfloat16"):
        case = Case((64, 32000), dtype)
        x, y = OPERATIONS["divergence_tvd_gradient"].inputs(case, torch.Generator().manual_seed(0))
        log_q, log_t = (torch.log_softmax(each.double(), -1) for each in (x, y))
        assert (log_q - log_t).abs().min() > 5e-5
