"""explain(): each route with its reason, plans and kernels; and nothing of it once the block is left."""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import peaked
from torch.overrides import TorchFunctionMode
from triton import knobs

import fused_softmax
from fused_softmax import explain, explanation
from fused_softmax.core import calls, launch, route
from fused_softmax.core.plan import RowPlan
from fused_softmax.ops.attention import reference as reference_attention
from fused_softmax.ops.attention import sdpa as attention_sdpa
from fused_softmax.ops.attention import ways
from fused_softmax.ops.attention.plan import sdpa as sdpa_plan
from fused_softmax.ops.attention.plan.sdpa import LEAST_LENGTH, Entry
from fused_softmax.ops.attention.plan.tiles import DecodePlan, Tiles
from fused_softmax.ops.sampling.penalties import PenaltyPlan
from fused_softmax.ops.sampling.plan import DrawPlan
from fused_softmax.ops.softmax.column_plan import ColumnPlan
from fused_softmax.register import library, patch

F = torch.nn.functional
PLAIN = "plain tensors, with nothing watching"


def shown(explained):
    return [(each.function, each.route) for each in explained]


@pytest.fixture
def x(device):
    return peaked(6, 40).to(device)


@pytest.fixture
def target(device):
    return torch.tensor([0, 39, 4, 20, 7, 7], device=device)


@pytest.fixture
def q(device):
    return peaked(24, 16).view(1, 2, 12, 16).to(device) / 4


def test_a_call_of_the_kernels(x):
    with explain() as explained:
        y = fused_softmax.softmax(x)
    (record,) = explained
    assert (record.function, record.shapes, record.route, record.reason) == ("softmax", ((6, 40),), "kernel", PLAIN)
    assert record.kernels == ["_tile_forward"]
    assert [type(each) for each in record.plan] == [RowPlan]
    assert record.plan[0].strategy == "tile"
    assert record.plan[0].n_rows == 6
    assert record.compile_seconds >= 0
    torch.testing.assert_close(y, torch.softmax(x, -1))


def test_it_is_the_plan_by_which_the_host_launched(x, monkeypatch):
    planned, given = [], []
    real, prepare = fused_softmax.ops.softmax.launches.plan_rows, launch.prepare

    def plan_rows(*arguments, **options):
        planned.append(real(*arguments, **options))
        return planned[-1]

    def noting(*arguments, plan=None, **options):
        given.append(plan)
        return prepare(*arguments, plan=plan, **options)

    monkeypatch.setattr(fused_softmax.ops.softmax.launches, "plan_rows", plan_rows)
    monkeypatch.setattr(launch, "prepare", noting)
    with explain() as explained:
        fused_softmax.softmax(x)
    assert explained[0].plan[0] is given[-1]
    assert any(each is given[-1] for each in planned)


FUNCTIONS = {
    "softmax": (lambda x, t, q: fused_softmax.softmax(x, 0), ColumnPlan),
    "log_softmax": (lambda x, t, q: fused_softmax.log_softmax(x, scale=2.0), RowPlan),
    "logsumexp": (lambda x, t, q: fused_softmax.logsumexp(x, 1), RowPlan),
    "cross_entropy": (lambda x, t, q: fused_softmax.cross_entropy(x, t), RowPlan),
    "linear_cross_entropy": (lambda x, t, q: fused_softmax.linear_cross_entropy(x, x.repeat(8, 1), t), RowPlan),
    "log_prob": (lambda x, t, q: fused_softmax.log_prob(x, t), RowPlan),
    "divergence": (lambda x, t, q: fused_softmax.divergence(x, x.flip(0), kind="jsd"), RowPlan),
    "attention": (lambda x, t, q: fused_softmax.attention(q, q, q, q @ q.mT), Tiles),
    "sample": (lambda x, t, q: fused_softmax.sample(x, top_k=3, seed=1), DrawPlan),
}


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_is_listed_whether_it_was_kept_or_not(name, kept, x, target, q):
    call, kind = FUNCTIONS[name]
    if kept:
        call(x, target, q)
    with explain() as explained:
        call(x, target, q)
        call(x, target, q)
    assert shown(explained) == [(name, "kernel")] * 2
    for record in explained:
        assert record.reason == PLAIN
        assert record.kernels
        assert all(type(each) is kind for each in record.plan)
        assert record.plan


def test_plans_of_decoding_and_of_streams(device, q):
    with explain() as explained:
        fused_softmax.attention(q[:, :, -1:], q.repeat(1, 1, 100, 1), q.repeat(1, 1, 100, 1))
    assert type(explained[0].plan[0]) is DecodePlan
    assert explained[0].kernels == ["_decode"]


def test_drafts_and_masks_have_kernels(x):
    drafts = torch.ones(2, 2, dtype=torch.int64, device=x.device)
    with explain() as explained:
        fused_softmax.top_k_mask_logits(x, 1)
        fused_softmax.top_p_mask_logits(x.clone().requires_grad_(), 0.5)
        fused_softmax.top_p_renorm_probs(x.softmax(-1), 0.5)
        fused_softmax.speculative_sample(x.view(2, 3, 40), drafts, x.view(2, 3, 40)[:, :2], 0.5)
        fused_softmax.speculative_sample(x.view(2, 3, 40), drafts)
    masked, by_torch, renormalised, verified, traced = explained
    assert (masked.route, masked.kernels) == ("kernel", ["_stretches", "_judge", "_write_kept"])
    assert (by_torch.route, by_torch.reason) == ("composed", "a gradient is wanted, which torch's operations have")
    assert renormalised.kernels == ["_stretches", "_judge", "_weigh", "_bound", "_write_kept"]
    assert (verified.function, verified.route) == ("speculative_sample", "kernel")
    assert verified.kernels == [*["_stretches", "_judge"] * 2, "_follow", "_draw_left"]
    assert (traced.route, traced.kernels) == ("kernel", ["_place", "_draw", "_trace"])


def test_penalties_are_a_kernel_and_with_a_gradient_torchs(x):
    ids = torch.ones(6, 2, dtype=torch.int64, device=x.device)
    with explain() as explained:
        fused_softmax.penalize(x, ids, 1.5)
        fused_softmax.penalize(x.clone().requires_grad_(), ids, 1.5)
        fused_softmax.sample(x, seed=1, token_ids=ids, repetition=1.5)
    by_kernel, by_torch, drawn = explained
    assert (by_kernel.function, by_kernel.route, by_kernel.kernels) == ("penalize", "kernel", ["_penalize"] * 2)
    assert type(by_kernel.plan[0]) is PenaltyPlan
    assert (by_torch.route, by_torch.kernels) == ("composed", [])
    assert by_torch.reason == "a gradient is wanted, which torch's operations have"
    assert (drawn.route, drawn.kernels) == ("kernel", ["_penalize", "_penalize", "_draw"])


def within_a_function_mode(x):
    class Tracer(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Tracer():
        fused_softmax.softmax(x)


def within_a_dispatch_mode(x):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        fused_softmax.softmax(x)


def of_a_subclass(x):
    fused_softmax.softmax(x.as_subclass(type("Mine", (torch.Tensor,), {})))


def negated(x):
    fused_softmax.softmax(torch._neg_view(x))


def forward_ad(x):
    with torch.autograd.forward_ad.dual_level():
        fused_softmax.softmax(torch.autograd.forward_ad.make_dual(x, x))


def of_gradients_in_a_batch(x):
    leaf = x.clone().requires_grad_()
    y = fused_softmax.softmax(leaf)
    torch.autograd.grad(y, leaf, torch.ones(3, *y.shape, device=x.device), is_grads_batched=True)


OTHERS = {
    "no kernel writes torch.complex64": (lambda x: fused_softmax.softmax(x.to(torch.complex64)), "composed"),
    "Tracer, a TorchFunctionMode, watches the call": (within_a_function_mode, "composed"),
    "an argument is a Mine, not a plain tensor": (of_a_subclass, "composed"),
    "a tensor has torch's neg bit": (negated, "composed"),
    "forward-mode AD": (forward_ad, "composed"),
    "torch.func.grad, jvp or forward-mode AD differentiates it": (
        lambda x: torch.func.grad(lambda x: fused_softmax.softmax(x)[0, 0])(x), "composed",
    ),
    "torch.jit traces the call": (lambda x: torch.jit.trace(fused_softmax.softmax, x, check_trace=False), "composed"),
    "_FlopCounterMode, a TorchDispatchMode, watches the call": (within_a_dispatch_mode, "operator"),
    "torch.func transforms the call": (lambda x: torch.func.vmap(fused_softmax.softmax)(x), "operator"),
    "torch.func transforms the call, and the operator has no rule for it": (
        lambda x: torch.func.vmap(lambda x: fused_softmax.sample(x[None], seed=1).tokens)(x), "composed",
    ),
    "there is no dim to sum over": (lambda x: fused_softmax.logsumexp(x[0, 0], 0), "composed"),
    "there are no logits": (
        lambda x: fused_softmax.cross_entropy(x[:0], torch.zeros(0, dtype=torch.int64, device=x.device)), "composed",
    ),
    "targets are probabilities, and token statistics are wanted": (
        lambda x: fused_softmax.cross_entropy(x, x.softmax(-1), return_token_stats=True), "composed",
    ),
    "scale is 0": (
        lambda x: fused_softmax.cross_entropy(x, torch.zeros(6, dtype=torch.int64, device=x.device), scale=0.0),
        "composed",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reason", OTHERS)
def test_what_keeps_a_call_from_the_kernels(reason, x):
    call, way = OTHERS[reason]
    if "complex" in reason:
        with explain() as explained, pytest.raises((RuntimeError, NotImplementedError)):
            call(x)
        assert explained[0].route in (way, "none")
        return
    with explain() as explained:
        call(x)
    assert explained[0].route == way
    assert explained[0].reason.startswith(reason)
    assert bool(explained[0].kernels) == (way == "operator")


def test_where_there_are_no_kernels(x, monkeypatch):
    monkeypatch.setattr(route, "INTERPRET", False)
    with explain() as explained:
        fused_softmax.softmax(x.cpu())
    assert (explained[0].route, explained[0].reason) == ("composed", "there are no kernels for tensors on cpu")
    assert explained[0].kernels == []


def test_a_call_that_raises_says_what(x):
    with explain() as explained, pytest.raises(IndexError):
        fused_softmax.softmax(x, 7)
    assert (explained[0].route, explained[0].reason) == ("none", "IndexError was raised")


@pytest.mark.parametrize("name", ["softmax", "logsumexp", "cross_entropy", "linear_cross_entropy", "attention"])
@pytest.mark.parametrize("forward_within", [False, True])
def test_backward_passes_are_records_of_their_own(name, forward_within, x, target, q):
    call, _ = FUNCTIONS[name]
    leaves = x.clone().requires_grad_(), target, q.clone().requires_grad_()
    if forward_within:
        with explain() as explained:
            call(*leaves).sum().backward()
        forward, *backward = explained
        assert (forward.function, forward.route) == (name, "kernel")
        assert [each.function for each in backward] == [f"{name} backward"]
    else:
        y = call(*leaves).sum()
        with explain() as explained:
            y.backward()
        (record,) = explained
        assert record.function.endswith("backward")
        assert record.function == f"{name} backward"
        backward = [record]
    for record in backward:
        assert record.route == "kernel"
        # What the forward pass had prepared is not heard.
        assert record.kernels or record.reason == "its forward pass, which came before the block, has prepared it"
        assert record.depth == 0


def test_a_second_derivative_is_composed(x):
    leaf = x.clone().requires_grad_()
    with explain() as explained:
        torch.autograd.grad(fused_softmax.softmax(leaf).square().sum(), leaf, create_graph=True)
    assert shown(explained) == [("softmax", "kernel"), ("softmax backward", "composed")]
    assert explained[1].reason == "a gradient of the gradient is asked for"


def test_chunks_are_kernels_of_their_call(x, target):
    with explain() as explained:
        fused_softmax.linear_cross_entropy(x, x.repeat(8, 1), target, chunk_size=2, reduction="none")
    (record,) = explained
    assert record.kernels.count("_tile_loss") == 3
    assert "_tile_loss x 3" in str(explained)


def test_torchs_names_under_enable(x, target):
    leaf = x.clone().requires_grad_()
    with fused_softmax.enabled(attention=True), explain() as explained:
        F.softmax(leaf, -1).sum().backward()
        F.cross_entropy(leaf, target).backward()
        torch.logsumexp(leaf.detach(), -1)
    assert shown(explained) == [
        ("aten::softmax", "kernel"), ("aten::softmax_backward", "kernel"), ("aten::cross_entropy", "kernel"),
        ("aten::cross_entropy backward", "kernel"), ("aten::logsumexp", "kernel"),
    ]  # fmt: skip
    assert explained[0].reason == "enable() has the kernels in the place of ATen's"


def test_what_enable_leaves_to_aten_says_why(x, target, q):
    with fused_softmax.enabled(attention=True), explain() as explained:
        torch.logsumexp(x.new_zeros(3, 0), 1)
        F.cross_entropy(x[:, :, None], target[:, None])
        F.scaled_dot_product_attention(q, q, q)
        F.scaled_dot_product_attention(q.half(), q.half(), q.half(), dropout_p=0.5)
    left = [(each.function, each.reason) for each in explained if each.route == "ATen" and not each.depth]
    assert left == [
        ("aten::logsumexp", "there is nothing to sum over"),
        ("aten::cross_entropy", "logits of 3 dims: log_softmax is taken as they lie"),
        ("aten::scaled_dot_product_attention", "no kernel was measured for torch.float32"),
        ("aten::scaled_dot_product_attention", "dropout_p is not 0"),
    ]
    within = [each for each in explained if each.depth]
    assert ("aten::log_softmax", "kernel") in shown(within)


def test_a_call_of_torchs_that_attention_takes_over(q, monkeypatch):
    monkeypatch.setattr(attention_sdpa, "takes_over", lambda *_: True)
    with fused_softmax.enabled(attention=True), explain() as explained:
        F.scaled_dot_product_attention(q.half(), q.half(), q.half())
    assert shown(explained) == [("aten::scaled_dot_product_attention", "kernel"), ("attention", "kernel")]
    assert [each.depth for each in explained] == [0, 1]


def forward_by_the_reference(query, key, value, *rest, scale):
    found = reference_attention.attention(query, key, value, scale=scale, return_lse=True, arithmetic=torch.float32)
    return found.output, found.lse.contiguous()


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_a_pass_that_is_handed_to_cudnn(which, device, monkeypatch):
    monkeypatch.setattr(attention_sdpa, "_has_cudnn", lambda *_: True)
    monkeypatch.setattr(attention_sdpa, "_forward", forward_by_the_reference)
    monkeypatch.setattr(attention_sdpa, "_backward", lambda do, *given, **_: given[:3])
    few = tuple(replace(each, scores=0) for each in sdpa_plan.ENTRIES)
    monkeypatch.setattr(sdpa_plan, "ENTRIES", few)
    dim, of = {"forward": (64, "the forward pass"), "backward": (128, "the gradients")}[which]
    leaves = [torch.randn(1, 1, LEAST_LENGTH, dim, device=device).half().requires_grad_() for _ in range(3)]
    with explain() as explained:
        fused_softmax.attention(*leaves).sum().backward()
    forward, backward = explained
    handed, other = (forward, backward) if which == "forward" else (backward, forward)
    assert (handed.route, handed.reason) == ("cuDNN", f"cuDNN was measured to be faster at {of}")
    assert [type(each) for each in handed.plan] == [Entry]
    assert handed.plan[0].which == which
    assert handed.kernels == []
    assert other.route == "kernel"


@pytest.mark.gpu
def test_cudnn_on_a_gpu(device):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the plan hands passes over on sm_90 alone")
    q, k, v = torch.randn(3, 16, 16, 2048, 64, device=device, dtype=torch.bfloat16)
    with explain() as explained:
        fused_softmax.attention(q, k, v, is_causal=True)
        fused_softmax.attention(q, k, v, is_causal=True, deterministic=True)
        leaves = [torch.randn(4, 8, 4096, 128, device=device, dtype=q.dtype, requires_grad=True) for _ in range(3)]
        fused_softmax.attention(*leaves, is_causal=True).sum().backward()
    assert shown(explained) == [
        ("attention", "cuDNN"), ("attention", "kernel"), ("attention", "kernel"), ("attention backward", "cuDNN"),
    ]  # fmt: skip


@pytest.mark.gpu
def test_what_is_compiled_on_a_gpu_takes_seconds(device):
    x = torch.randn(5, 30011, device=device)
    with explain() as explained:
        fused_softmax.softmax(x, scale=0.123, mask=torch.ones(5, 30011, dtype=torch.bool, device=device))
        fused_softmax.softmax(x, scale=0.123, mask=torch.ones(5, 30011, dtype=torch.bool, device=device))
    assert explained[1].compile_seconds == 0
    assert explained[0].compile_seconds < 60


@pytest.mark.gpu
def test_it_listens_while_a_graph_is_captured(device):
    x = torch.randn(64, 1000, device=device)
    fused_softmax.softmax(x)
    graph = torch.cuda.CUDAGraph()
    with explain() as explained, torch.cuda.graph(graph):
        y = fused_softmax.softmax(x)
    graph.replay()
    assert shown(explained) == [("softmax", "kernel")]
    torch.testing.assert_close(y, torch.softmax(x, -1))


@pytest.mark.gpu
def test_the_engines_own_thread_on_a_gpu(device):
    x = torch.randn(64, 1000, device=device, requires_grad=True)
    with explain() as explained:
        fused_softmax.softmax(x).square().sum().backward()
    assert shown(explained) == [("softmax", "kernel"), ("softmax backward", "kernel")]


@pytest.mark.parametrize("cache_hit", [False, True])
def test_what_triton_says_of_compiling_is_the_calls_that_compiles(cache_hit, x, monkeypatch):
    heard, load = [], launch._load

    def theirs(**told):
        heard.append(told["cache_hit"])

    def compiling(*arguments):
        knobs.compilation.listener(
            src=None, metadata={}, metadata_group={}, times=SimpleNamespace(total=2_500_000), cache_hit=cache_hit
        )
        return load(*arguments)

    monkeypatch.setattr(knobs.compilation, "listener", theirs)
    monkeypatch.setattr(launch, "_load", compiling)
    monkeypatch.setattr(launch, "_loaded", {})
    with explain() as explained:
        fused_softmax.softmax(x)
        fused_softmax.softmax(x)
    assert [each.compile_seconds for each in explained] == [0.0 if cache_hit else 2.5, 0.0]
    assert ("compiled for 2.50 s" in str(explained)) != cache_hit
    assert heard == [cache_hit]  # who listened before still does
    assert knobs.compilation.listener is theirs


def sharded(group, x, target):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    part = x.chunk(2, 1)[torch.distributed.get_rank(group)]
    with explain() as explained:
        fused_softmax.softmax(part, group=group)
        fused_softmax.logsumexp(part, 1, group=group)
        fused_softmax.cross_entropy(part, target, group=group)
        fused_softmax.linear_cross_entropy(x, part.mT[:, :1].expand(20, 40), target % 20, group=group)
        fused_softmax.log_prob(part, target, group=group)
        fused_softmax.linear_log_prob(x, part.mT[:, :1].expand(20, 40), target % 20, group=group)
        fused_softmax.divergence(part, part, group=group)
        fused_softmax.sample(part, seed=1, group=group)
        fused_softmax.softmax(distribute_tensor(x, mesh, [Shard(0)]))
        fused_softmax.cross_entropy(distribute_tensor(x, mesh, [Shard(1)]), target)
        rows = distribute_tensor(x, mesh, [Shard(0)])
        likely, layer = rows.softmax(-1), distribute_tensor(x[:, :40].mT.contiguous(), mesh, [Shard(0)])
        features, heads = distribute_tensor(x[:, :6].contiguous(), mesh, [Replicate()]), rows.view(6, 1, 5, 8)
        fused_softmax.cross_entropy(rows, likely)
        fused_softmax.linear_cross_entropy(features, layer, target)
        fused_softmax.linear_cross_entropy(features, layer, likely)
        fused_softmax.log_prob(distribute_tensor(x, mesh, [Shard(1)]), target)
        fused_softmax.linear_log_prob(features, layer, target)
        fused_softmax.divergence(rows, rows)
        fused_softmax.attention(heads, heads, heads)
        fused_softmax.sample(rows, seed=1)
        fused_softmax.speculative_sample(
            rows.view(6, 1, 40), distribute_tensor(target[:, None][:, :0], mesh, [Shard(0)])
        )
        fused_softmax.top_k_mask_logits(rows, 3)
        fused_softmax.penalize(rows, distribute_tensor(target[:, None], mesh, [Shard(0)]), 1.5)
        fused_softmax.route(rows, 2)
    return [(each.function, each.route, each.reason, each.depth) for each in explained]


def test_sharded_calls(ranks):
    for found in ranks.values(2, sharded, peaked(6, 40), torch.tensor([0, 39, 4, 20, 7, 7])):
        outer = [each[:3] for each in found if not each[3]]
        over, of_shards = "group= is given: each rank has columns of its own", "the input is a DTensor"
        assert outer == [
            *[(name, "sharded", over) for name in ("softmax", "logsumexp", "cross_entropy", "linear_cross_entropy")],
            ("log_prob", "sharded", over), ("linear_log_prob", "sharded", over),
            ("divergence", "sharded", over), ("sample", "sharded", over), ("softmax", "sharded", of_shards),
            ("cross_entropy", "sharded", of_shards),
            ("cross_entropy", "sharded", of_shards),
            *[("linear_cross_entropy", "sharded", "an argument is a DTensor")] * 2, ("log_prob", "sharded", of_shards),
            *[
                (name, "sharded", "an argument is a DTensor")
                for name in (
                    "linear_log_prob", "divergence", "attention", "sample", "speculative_sample",
                    "top_k_mask_logits", "penalize",
                )
            ],
            ("route", "sharded", of_shards),
        ]  # fmt: skip
        assert ("softmax", 1) in [(each[0], each[3]) for each in found]


def test_compiled_code_shows_its_trace_and_its_operators(x):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: fused_softmax.softmax(x) * 2, backend="aot_eager", fullgraph=True)
    leaf = x.clone().requires_grad_()
    compiled(leaf)
    with explain() as explained:
        compiled(leaf).sum().backward()
    runs = "torch.ops.fused_softmax.{} runs in what was compiled or transformed"
    traced = [each for each in explained if not each.kernels]
    assert [(each.function, each.route, each.shapes) for each in traced] in ([("softmax", "operator", ())], [])
    assert [each.reason for each in explained if each.kernels] == [
        runs.format("softmax"),
        runs.format("softmax_backward"),
    ]
    with explain() as again:  # and is not compiled anew each time
        for _ in range(2):
            compiled(leaf)
    assert shown(again) == [("softmax", "operator")] * 2
    assert all(each.kernels for each in again)


def test_what_a_compiler_traces_first_within_the_block_is_an_operator(x):
    torch._dynamo.reset()
    with explain() as explained:
        torch.compile(lambda x: fused_softmax.logsumexp(x, 1), backend="aot_eager", fullgraph=True)(x)
    assert shown(explained) == [("logsumexp", "operator")] * 2
    assert explained[0].reason == "torch.compile or torch.export traces the call"


def test_all_threads_are_heard_each_with_its_own_calls(x):
    def work(n):
        leaf = x[:n].clone().requires_grad_()
        fused_softmax.softmax(leaf).sum().backward()
        return n

    with explain() as explained, ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, [2, 3, 4, 5])) == [2, 3, 4, 5]
    assert sorted(shown(explained)) == [("softmax", "kernel")] * 4 + [("softmax backward", "kernel")] * 4
    assert sorted(each.shapes[0][0] for each in explained) == [2, 2, 3, 3, 4, 4, 5, 5]
    assert all(each.depth == 0 for each in explained)
    assert all(len(each.kernels) == 1 for each in explained)


def places():
    """All that stands in a place of its own while somebody listens."""
    named = [(where, name) for where, name, *_ in (*explanation._CALLS, *explanation._SETTLING)]
    named += [
        (route, "decide"), (route, "watcher_of"), (patch, "watcher_of"), (patch, "left_to_aten"), (patch, "listener"),
        (library, "listener"), (launch, "prepare"), (knobs.compilation, "listener"), (calls, "_is_compiling"),
        (ways, "chosen"), (calls, "_look"),
    ]  # fmt: skip
    found = [(name, getattr(where, name)) for where, name in named]
    return found + [
        (f"{each.__qualname__}.{name}", each.__dict__[name])
        for each in explanation._functions()
        for name in ("forward", "backward")
    ]


def same(ours, theirs):
    return all(a == b and one is other for (a, one), (b, other) in zip(ours, theirs, strict=True))


def test_nothing_is_left_behind(x, target, q):
    for call, _ in FUNCTIONS.values():
        call(x, target, q)
    before, kept = places(), {key: list(entries) for key, entries in calls._kept.items()}
    leaf = x.clone().requires_grad_()
    with explain() as outer:
        assert not same(places(), before)
        with explain() as inner:
            fused_softmax.softmax(leaf).sum().backward()
        assert not same(places(), before)
        fused_softmax.softmax(x)
    assert same(places(), before)
    assert calls._kept == kept
    assert (len(outer), len(inner)) == (3, 2)
    with pytest.raises(ZeroDivisionError), explain():
        raise ZeroDivisionError
    assert same(places(), before)
    fused_softmax.softmax(x)
    assert len(outer) == 3


def test_a_kept_call_runs_no_line_of_it(x):
    with explain():
        fused_softmax.softmax(x)
    fused_softmax.softmax(x)
    seen = set()
    sys.setprofile(lambda frame, event, _: seen.add(frame.f_code.co_filename) if event == "call" else None)
    fused_softmax.softmax(x)
    sys.setprofile(None)
    assert any(name.endswith("calls.py") for name in seen)
    assert not any(name.endswith("explanation.py") for name in seen)


def test_what_was_prepared_within_and_runs_after_is_heard_by_nobody(x):
    leaf = x.clone().requires_grad_()
    with explain() as explained:
        loss = fused_softmax.cross_entropy(leaf, torch.zeros(6, dtype=torch.int64, device=x.device), reduction="none")
    loss.sum().backward()
    assert shown(explained) == [("cross_entropy", "kernel")]


def test_it_prints_a_call_a_paragraph(x, target):
    with explain() as explained:
        pass
    assert str(explained) == "no call of fused_softmax"
    with explain() as explained:
        fused_softmax.softmax(x)
        fused_softmax.cross_entropy(x, target)
    lines = str(explained).splitlines()
    assert lines[0] == f"softmax (6 x 40): kernel, {PLAIN}"
    assert lines[1].startswith("  plan: RowPlan(strategy='tile', n_rows=6, n_cols=40")
    assert lines[2] == "  kernels: _tile_forward"
    assert lines[3] == f"cross_entropy (6 x 40, 6): kernel, {PLAIN}"
    assert list(explained) == explained.records == explained[:]
