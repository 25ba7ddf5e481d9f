"""linear_log_prob, keeping logits or making them again, against float64 of a layer and its log-probabilities."""

import os

import pytest
import torch
import torch.nn.functional as F
from products import pairwise
from test_log_prob_kept import given

import fused_softmax
from fused_softmax import linear_log_prob

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="without a GPU or the interpreter, CPU tensors take ATen"
)
FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
N, FEATURES, CLASSES = 7, 16, 45


def layer(device, dtype=FP32, weight_dtype=None, n=N):
    generator = torch.Generator().manual_seed(0)
    shapes = (n, FEATURES), (CLASSES, FEATURES), (CLASSES,)
    x, w, bias = (torch.randn(shape, generator=generator) / 2 for shape in shapes)
    of_weights = weight_dtype or dtype
    return x.to(device, dtype), w.to(device, of_weights), bias.to(device, of_weights)


def targets(device, k=None, n=N):
    found = torch.randint(CLASSES, (n, k or 1), generator=torch.Generator().manual_seed(1))
    found[2] = -100
    return (found if k else found[:, 0]).to(device)


def formula(x, w, bias, target, temperature=None, softcap=None, scale=1.0):
    """(log-probabilities, entropy, lse) of float64, 0 where every target is ignored."""
    z = F.linear(x, w, bias) * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    z = z if temperature is None else z / torch.as_tensor(temperature, dtype=FP64, device=z.device).view(-1, 1)
    log_p, t = torch.log_softmax(z, -1), target if target.ndim == 2 else target[:, None]
    counts = t != -100
    found = log_p.gather(-1, t.clamp_min(0)).masked_fill(~counts, 0).view(target.shape)
    off = ~counts.any(-1)
    return found, *(each.masked_fill(off, 0) for each in (-(log_p.exp() * log_p).sum(-1), z.logsumexp(-1)))


@pairwise()
@pytest.mark.parametrize("dtypes", [(FP32, None), (BF16, None), (BF16, FP32), (FP64, None)], ids=str)
@pytest.mark.parametrize("logits", ["auto", "keep", "recompute"])
@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("accumulate", ["fp32", "input"])
@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "scale": -0.7}, {"temperature": 0.6}], ids=str)
def test_results_and_gradients(dtypes, logits, chunk_size, accumulate, k, biased, options, device):
    """Made twice: the second backward pass makes the logits again. An ignored row of the input holds NaN."""
    x, w, bias = layer(device, *dtypes)
    target = targets(device, k)
    exact = [each.double().clone().requires_grad_() for each in (x, w, bias)][: 3 if biased else 2]
    x[2] = float("nan")
    given = [each.requires_grad_() for each in (x, w, bias)][: 3 if biased else 2]
    expected = formula(*exact, *([] if biased else [None]), target, **options)
    found = linear_log_prob(
        given[0], given[1], target, linear_bias=given[2] if biased else None, return_entropy=True, return_lse=True,
        chunk_size=chunk_size, logits=logits, accumulate=accumulate, **options,
    )[:3]  # fmt: skip
    rough = 2**-6 if x.dtype == BF16 else 1e-5
    for ours, truth in zip(found, expected, strict=True):
        assert ours.dtype == (FP64 if x.dtype == FP64 else FP32)
        torch.testing.assert_close(ours.double(), truth, rtol=rough, atol=4 * rough)
    generator = torch.Generator().manual_seed(2)
    incoming = [torch.randn(each.shape, generator=generator, dtype=FP64).to(device) for each in expected]
    truths = torch.autograd.grad(expected, exact, incoming)
    for _ in range(2):
        gradients = torch.autograd.grad(found, given, [each.to(found[0].dtype) for each in incoming], retain_graph=True)
        for ours, truth, of in zip(gradients, truths, given, strict=True):
            assert ours.dtype == of.dtype
            torch.testing.assert_close(ours.double(), truth, rtol=rough, atol=4 * rough)


@pytest.mark.parametrize("n_classes", [50257, 151937])
@pytest.mark.parametrize("logits", ["keep", "recompute"])
def test_vocabularies_of_today(n_classes, logits, device):
    generator = torch.Generator().manual_seed(0)
    x, w = given = [torch.randn(n, 4, generator=generator).to(device).requires_grad_() for n in (2, n_classes)]
    exact = [each.detach().double().requires_grad_() for each in given]
    target = torch.tensor([n_classes - 1, 7], device=device)
    found = linear_log_prob(x, w, target, return_entropy=True, logits=logits, chunk_size=1)[:2]
    expected = formula(*exact, None, target)[:2]
    incoming = [torch.tensor(each, dtype=FP64, device=device) for each in ([1.0, -2.0], [0.5, 3.0])]
    truths = torch.autograd.grad(expected, exact, incoming)
    gradients = torch.autograd.grad(found, given, [each.float() for each in incoming])
    near = 1e-6, 1e-6, 4e-4, 2e-6  # the input's gradient is one float32 sum over all classes, which torch makes
    for ours, truth, most in zip((*found, *gradients), (*expected, *truths), near, strict=True):
        assert (ours.double() - truth).norm() <= most * truth.norm()


def test_logits_are_kept_or_made_again(device, monkeypatch):
    """Three products or four; one without a gradient costs none."""
    products, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *given, **more: products.append(0) or mm(*given, **more))

    def made(logits, n=N, frozen=False):
        x, w, _ = layer(device, n=n)
        products.clear()
        y = linear_log_prob(x.requires_grad_(), w.requires_grad_(not frozen), targets(device, n=n), logits=logits)
        y.sum().backward()
        return len(products)

    assert made("keep") == made("auto") == 3
    assert made("recompute") == 4
    assert made("keep", frozen=True) == 2
    assert made("auto", n=300) == 3  # as many as fill a chunk
    with torch.no_grad():
        products.clear()
        x, w, _ = layer(device)
        linear_log_prob(x, w, targets(device), logits="keep")
        assert len(products) == 1


def test_statistics_and_leading_dims(device):
    x, w, bias = layer(device, n=12)
    target = targets(device, n=12)
    names = ("log_sum_sq_probs", "mean_logits", "is_top1")
    found = linear_log_prob(x.view(3, 4, -1), w, target.view(3, 4), linear_bias=bias, chunk_size=5, return_stats=names)
    expected = fused_softmax.log_prob(F.linear(x, w, bias), target, return_stats=names)
    torch.testing.assert_close(found.log_prob, expected.log_prob.view(3, 4))
    for ours, alone in zip(found.stats, expected.stats, strict=True):
        torch.testing.assert_close(ours, alone.view(3, 4))
    x, w = x.requires_grad_(), w
    with pytest.raises(RuntimeError, match=r"stats\.mean_logits has no gradient"):
        linear_log_prob(x, w, target, return_stats=names).stats.mean_logits.sum().backward()


@pairwise(("k", "kept", "temperature"))
@pytest.mark.parametrize("dtypes", [(FP32, None), (BF16, FP32), (FP64, None)], ids=str)
@pytest.mark.parametrize("logits", ["keep", "recompute"])
@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("kept", [None, "int64", "int32", "bitmask"])
@pytest.mark.parametrize("temperature", [None, 0.6, "of rows"])
@pytest.mark.parametrize("shape", [(12,), (3, 4)], ids=str)
@pytest.mark.parametrize("counting", ["some", "all", "none"])
def test_rows_that_are_left_out(dtypes, logits, chunk_size, k, kept, temperature, shape, counting, device, monkeypatch):
    """They are in no product, and results and gradients are those of a call that makes their logits too."""
    x, w, bias = layer(device, *dtypes, n=12)
    target = targets(device, k, n=12)
    target.view(12, -1)[{"some": [0, 3, 4, 5, 9, 11], "all": [], "none": range(12)}[counting]] = -100
    if k and counting == "some":
        target[1, 0] = -100  # the row has another target, which counts
    counts = (target.view(12, -1) != -100).any(-1)
    x[~counts] = float("nan")
    of_rows = torch.linspace(0.5, 2, 12, device=device).view(shape)
    options = {"temperature": of_rows if temperature == "of rows" else temperature}
    if kept is not None:
        columns = torch.rand(12, CLASSES, generator=torch.Generator().manual_seed(3)) < 0.5
        columns[6], columns[7] = False, True
        options["kept"] = given(columns.view(*shape, CLASSES).to(device), kept)
    leaves = [each.requires_grad_() for each in (x, w, bias)]
    products, addmm = [], torch.addmm

    def watched(bias, rows, *others, **more):
        if rows.shape[1] == FEATURES:
            products.append(len(rows))
        return addmm(bias, rows, *others, **more)

    def call(skip_ignored):
        return linear_log_prob(
            x.view(*shape, -1), w, target.view(*shape, *([k] if k else [])), linear_bias=bias, return_entropy=True,
            return_lse=True, return_stats=("log_sum_sq_probs", "mean_logits", "is_top1"), chunk_size=chunk_size,
            logits=logits, skip_ignored=skip_ignored, **options,
        )  # fmt: skip

    wanted = call(False)
    monkeypatch.setattr(torch, "addmm", watched)
    found = call(True)
    monkeypatch.undo()
    assert sum(products) == (int(counts.sum()) or 12)
    for ours, theirs in zip((*found[:3], *found.stats), (*wanted[:3], *wanted.stats), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert not ours.view(12, -1)[~counts].any()
    generator = torch.Generator().manual_seed(2)
    incoming = [torch.randn(each.shape, generator=generator, dtype=FP64).to(device, each.dtype) for each in found[:3]]
    rough = 2**-7 if x.dtype == BF16 else 1e-5
    for again in (True, False):
        ours, theirs = (torch.autograd.grad(each[:3], leaves, incoming, retain_graph=again) for each in (found, wanted))
        assert not ours[0][~counts].any()
        torch.testing.assert_close(ours, theirs, rtol=rough, atol=rough)
    with pytest.raises(RuntimeError, match=r"stats\.mean_logits has no gradient"):
        call(True).stats.mean_logits.sum().backward()


@pytest.mark.parametrize(
    "offsets", [[0, 3, 2, 5, 7], [9, 6, 3, 0, 0], [1, 2, 3, 5, 7], [0, 2, 3, 13, 13], [-2, 2, 3, 5, 9]], ids=str
)
def test_rows_left_out_among_lists_that_cannot_be_read(offsets, device):
    """A row that is NaN stays so, and one that is not is NaN or as it was."""
    x, w, _ = layer(device, n=4)
    target, ids = torch.tensor([3, -100, 4, 5], device=device), torch.arange(12, device=device)
    how = {"kept": (ids, torch.tensor(offsets, device=device)), "return_lse": True}
    wanted, found = (linear_log_prob(x, w, target, skip_ignored=skip, **how).lse for skip in (False, True))
    assert found[1] == 0
    assert found.isnan().any()
    assert found[wanted.isnan()].isnan().all()
    torch.testing.assert_close(found[found.isfinite()], wanted[found.isfinite()])


def test_the_second_derivative_of_rows_that_are_left_out(device):
    x, w, bias = (each.requires_grad_() for each in layer(device, FP64))
    target = targets(device)

    def call(x, w, bias):
        return linear_log_prob(x, w, target, linear_bias=bias, return_entropy=True, skip_ignored=True)[:2]

    assert torch.autograd.gradgradcheck(call, (x, w, bias), fast_mode=True)


def test_compiled_and_transformed_rows_are_left_out_of_results(device):
    x, w, _ = layer(device)
    x, target = x.requires_grad_(), targets(device)
    call = lambda x: linear_log_prob(x, w, target, return_entropy=True, skip_ignored=True)[:2]  # noqa: E731
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), call(x))
    torch.testing.assert_close(*(torch.autograd.grad(sum(each.sum() for each in of(x)), x) for of in (compiled, call)))
    both = torch.stack((x, x.flip(0))).detach()
    expected = tuple(torch.stack(each) for each in zip(*map(call, both), strict=True))
    torch.testing.assert_close(torch.vmap(call)(both), expected)


def test_second_derivatives(device):
    x, w, bias = (each.requires_grad_() for each in layer(device, FP64))
    target, temperature = targets(device), torch.linspace(0.5, 2, N, device=device, dtype=FP64)

    def call(x, w, bias):
        return linear_log_prob(x, w, target, linear_bias=bias, temperature=temperature, return_entropy=True)[:2]

    assert torch.autograd.gradcheck(call, (x, w, bias), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (x, w, bias), fast_mode=True)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("logits", ["keep", "recompute"])
def test_a_gradient_of_tied_weights_counts_once(logits, batched, device):
    """Of hidden states that were made of the weight, also where torch's operations make the gradient."""
    weight, target = layer(device, FP64)[1].requires_grad_(), targets(device)

    def gradient(of, **given):
        x = weight[target.clamp_min(0)].tanh()
        return torch.autograd.grad(of(x).sum().view(1), weight, **given)[0]

    expected = gradient(lambda x: formula(x, weight, None, target)[0])
    twice = {"grad_outputs": weight.new_ones(2, 1), "is_grads_batched": True} if batched else {"create_graph": True}
    found = gradient(lambda x: linear_log_prob(x, weight, target, logits=logits), **twice)
    torch.testing.assert_close(found, expected.expand_as(found))


def test_a_layer_without_features(device):
    nothing = torch.ones(4, 0, device=device)
    y = linear_log_prob(nothing, nothing, torch.arange(4, device=device))
    torch.testing.assert_close(y, torch.full_like(y, 0.25).log())


def test_compiled_and_transformed_it_says_the_same(device):
    x, w, _ = layer(device)
    target = targets(device)

    def loss(x, w):
        found = linear_log_prob(x, w, target, return_entropy=True)
        return (found.log_prob + 0.1 * found.entropy).sum()

    given = x.requires_grad_(), w.requires_grad_()
    expected = torch.autograd.grad(loss(*given), given)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(*given), given), expected)
    plain = x.detach(), w.detach()
    torch.testing.assert_close(torch.func.grad(loss, argnums=(0, 1))(*plain), expected)


@pytest.mark.parametrize("kept", [None, "int32, int64", "bitmask"], ids=str)
@pytest.mark.parametrize("dtypes", [(FP32, None), (BF16, FP32)], ids=str)
def test_compiled_it_is_one_operator_and_has_chunks_too(kept, dtypes, device, monkeypatch):
    """In one graph, with temperatures of rows, a bias, several targets, an ignored row of NaN, float32 masters."""
    x, w, bias = layer(device, *dtypes)
    x[2], columns = float("nan"), torch.arange(CLASSES).expand(N, -1) % 3 > 0
    leaves, target = [each.requires_grad_() for each in (x, w, bias)], targets(device, 2)
    columns = None if kept is None else given(columns.clone().scatter_(1, target.cpu().clamp_min(0), True), kept)
    columns = tuple(each.to(device) for each in columns) if isinstance(columns, tuple) else columns
    columns = columns.to(device) if isinstance(columns, torch.Tensor) else columns
    temperature, made, shapes = torch.linspace(0.5, 2.0, N, device=device), [], []

    def call(x, w, bias, target, temperature, columns, logits="recompute"):
        return linear_log_prob(
            x, w, target, linear_bias=bias, temperature=temperature, softcap=5.0, kept=columns, return_entropy=True,
            return_lse=True, return_stats=("is_top1", "mean_logits"), chunk_size=3, logits=logits,
        )  # fmt: skip

    def backend(module, _):
        made.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module

    def gradients(found):
        return torch.autograd.grad((found.log_prob * found.entropy[:, None]).sum() + found.lse.square().sum(), leaves)

    real = fused_softmax.ops.losses.linear_by_rows.chunks
    watched = lambda *given: (shapes.append(each[1].shape) or each for each in real(*given))  # noqa: E731
    monkeypatch.setattr("fused_softmax.ops.losses.linear_log_prob.chunks", watched)
    torch._dynamo.reset()
    arguments = *leaves, target, temperature, columns
    expected = call(*arguments)
    wanted = gradients(expected)
    rough = {"rtol": 2**-6, "atol": 2**-5} if dtypes[0] == BF16 else {}
    for each in (backend, "aot_eager"):
        shapes.clear()
        found = torch.compile(call, backend=each, fullgraph=True)(*arguments)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(gradients(found), wanted, **rough)
        assert max(shape[0] for shape in shapes) == 3
    assert [each for each in made if "linear" in each or "mm" in each] == ["fused_softmax.linear_log_prob.default"]
    made.clear()
    found = torch.compile(call, backend=backend, fullgraph=True)(*arguments, logits="keep")
    torch.testing.assert_close(found, expected, **rough)
    assert "fused_softmax.linear_log_prob.default" not in made
    assert "fused_softmax.log_prob.default" in made


def test_more_rows_than_features_have_chunks_where_compiled(device):
    x, w, _ = layer(device, n=3 * FEATURES)
    w.requires_grad_()
    made = []

    def backend(module, _):
        made.append({str(node.target) for node in module.graph.nodes})
        return module

    torch._dynamo.reset()
    compiled = torch.compile(linear_log_prob, backend=backend, fullgraph=True, dynamic=True)
    for n in (3 * FEATURES, FEATURES + 1, FEATURES, 2):
        rows, target = (each[:n].detach().clone() for each in (x, targets(device, n=3 * FEATURES)))
        rows.requires_grad_()
        torch.testing.assert_close(compiled(rows, w, target), linear_log_prob(rows, w, target))
    assert ["fused_softmax.linear_log_prob.default" in each for each in made] == [
        True,
        False,
    ]  # a graph of many, of few


def test_exported_it_is_one_operator(device):
    class Module(torch.nn.Module):
        def forward(self, x, w, target):
            return linear_log_prob(x, w, target, logits="recompute", return_entropy=True)[:2]

    x, w, _ = layer(device)
    exported = torch.export.export(Module(), (x, w, targets(device)), strict=True).module()
    torch.testing.assert_close(exported(x, w, targets(device)), Module()(x, w, targets(device)))
    assert "fused_softmax.linear_log_prob.default" in {str(node.target) for node in exported.graph.nodes}


@pytest.mark.parametrize("temperature", [0.7, "of rows"])
def test_a_second_derivative_of_the_operator(temperature, device):
    x, w, bias = (each.requires_grad_() for each in layer(device, FP64))
    target, by_row = targets(device), torch.linspace(0.5, 2.0, N, dtype=FP64, device=device)
    t = by_row if temperature == "of rows" else temperature
    operator, both = torch.ops.fused_softmax.linear_log_prob.default, []
    of_call = (1.0, by_row) if temperature == "of rows" else (t, None)
    for found in (
        operator(x, w, bias, target[:, None], -100, 1.0, 5.0, *of_call, [True, True]),
        linear_log_prob(
            x, w, target, linear_bias=bias, softcap=5.0, temperature=t, return_entropy=True, return_lse=True
        ),
    ):
        of_targets, *_, entropy, lse = found[:5] if len(found) > 4 else found[:3]
        value = (of_targets.view(N) * entropy).sum() + lse.square().sum()
        first = torch.autograd.grad(value, [x, w, bias], create_graph=True)
        both.append((*first, *torch.autograd.grad(sum(each.square().sum() for each in first), [x, w, bias])))
    torch.testing.assert_close(*both)


def test_under_autocast_the_layer_is_lowered(device):
    x, w, bias = (each.requires_grad_() for each in layer(device))
    target = targets(device)
    with torch.autocast(torch.device(device).type, BF16):
        found = linear_log_prob(x, w, target, linear_bias=bias)
    expected = formula(*(each.detach().bfloat16().double() for each in (x, w, bias)), target)[0]
    torch.testing.assert_close(found.double(), expected, rtol=2**-6, atol=2**-4)
    assert [each.dtype for each in torch.autograd.grad(found.sum(), (x, w, bias))] == [FP32] * 3


def test_a_second_derivative_within_autocast_keeps_its_arithmetic(device):
    given = [each.requires_grad_() for each in layer(device)[:2]]
    y = linear_log_prob(*given, targets(device)).sum()
    expected = torch.autograd.grad(y, given, retain_graph=True)
    with torch.autocast(torch.device(device).type, BF16):
        torch.testing.assert_close(torch.autograd.grad(y, given, create_graph=True), expected)


def test_weights_that_change_before_the_backward_pass_raise(device):
    x, w, _ = layer(device)
    x.requires_grad_()
    w = w.requires_grad_() * 1
    y = linear_log_prob(x, w, targets(device))
    w.add_(1)
    with pytest.raises(RuntimeError, match=r"^linear_log_prob: .*modified by an inplace operation"):
        y.sum().backward()


WRONG = {
    "features": ({"linear_weight": torch.ones(4, 2)}, ValueError, r"linear_weight.*\(2, 3\).*\(4, 2\)"),
    "bias": ({"linear_bias": torch.ones(3)}, ValueError, r"linear_bias.*\(4,\).*\(3,\)"),
    "bias type": ({"linear_bias": 1.0}, TypeError, "linear_bias.*float"),
    "dtypes": ({"linear_weight": torch.ones(4, 3).half()}, RuntimeError, "linear_weight.*float32.*float16"),
    "target": ({"target": torch.zeros(3, dtype=torch.int64)}, ValueError, r"target.*\(2,\).*\(3,\)"),
    "target type": ({"target": [0, 1]}, TypeError, "target.*list"),
    "chunk_size": ({"chunk_size": 0}, ValueError, "chunk_size.*0"),
    "logits": ({"logits": "all"}, ValueError, "logits.*all"),
    "accumulate": ({"accumulate": "fp16"}, ValueError, "accumulate.*fp16"),
    "temperature": ({"temperature": 0.0}, ValueError, "temperature.*0.0"),
    "temperatures": ({"temperature": torch.ones(3)}, ValueError, r"temperature.*\(2,\).*\(3,\)"),
    "input_sharded": ({"input_sharded": True}, ValueError, "input_sharded needs group, got group=None"),
    "return_stats": ({"return_stats": ("mean",)}, ValueError, "return_stats.*mean"),
    "input": ({"input": torch.ones(2, 3, dtype=torch.int32)}, NotImplementedError, "input.*int32"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name, device):
    arguments, error, message = WRONG[name]
    given = {"input": torch.ones(2, 3), "linear_weight": torch.ones(4, 3), "target": torch.zeros(2, dtype=torch.int64)}
    given = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in (given | arguments).items()}
    with pytest.raises(error, match=f"^linear_log_prob: {message}"):
        linear_log_prob(**given)
