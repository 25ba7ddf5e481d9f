"""linear_log_prob whose gradients are made by blocks of classes: when, in how much memory, and what by float64."""

import os

import pytest
import torch
from products import pairwise
from test_linear_log_prob import formula

from fused_softmax import explain, linear_log_prob
from fused_softmax.ops.losses import linear_by_classes, linear_by_rows, log_prob_by_classes
from fused_softmax.ops.losses.linear_by_rows import linear_of
from fused_softmax.ops.losses.log_prob_by_classes import way_of
from fused_softmax.ops.losses.options import EVERY, Kept

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="without a GPU or the interpreter, CPU tensors take ATen"
)
FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
N, FEATURES, CLASSES = 7, 16, 141  # blocks of 64, 64 and 13 classes
MIB = 2**20


@pytest.mark.parametrize(
    ("rows", "options", "classes"),
    [
        (8192, {}, 50688),
        (8192, {"masters": True}, 50688),
        (8192, {"dtype": FP16}, 50688),
        (8192, {"chunk_size": 1024}, 16896),
        (8192, {"chunk_size": 8}, None),  # blocks of 128 classes
        (8192, {"accumulate": "input"}, None),  # chunks of rows have no accumulator either
        (8192, {"dtype": FP32}, None),
        (2048, {}, None),  # one chunk
        (131072, {}, None),  # whose rows' gradient would take more
    ],
    ids=str,
)
def test_it_takes_the_way_of_less_memory(rows, options, classes):
    given = {"chunk_size": None, "accumulate": "fp32", "dtype": BF16, "masters": False} | options
    dtype, chunk_size = given["dtype"], given["chunk_size"]
    x = torch.empty(1, dtype=dtype).expand(rows, 4096)
    w = torch.empty(1, dtype=FP32 if given["masters"] else dtype).expand(151936, 4096)
    linear = linear_of(x, w, chunk_size, given["accumulate"], True)
    way = way_of(x, w, linear, [True] * 3, False, EVERY, False, chunk_size)
    assert way.classes == classes
    assert way.reason.startswith(
        f"gradients are made by {'chunks of rows' if classes is None else 'blocks of classes'}"
    )


def test_what_goes_by_rows_whatever_it_takes():
    x, w = (torch.empty(1, dtype=BF16).expand(n, 4096) for n in (8192, 151936))
    linear, lists = linear_of(x, w, None, "fp32", True), Kept(torch.zeros(3), torch.zeros(8193))

    def way(asked=True, keeps=False, columns=EVERY, of_ranks=False):
        return way_of(x, w, linear, [True, asked, False], keeps, columns, of_ranks, None)

    assert way().classes == 50688
    for of, word in (({"asked": False}, "gets none"), ({"keeps": True}, "kept"), ({"columns": lists}, "lists")):
        found = way(**of)
        assert found.classes is None
        assert word in found.reason
    assert way(of_ranks=True).classes is None


@pytest.fixture
def small(monkeypatch):
    """Blocks of few classes, and how often gradients were made of them."""
    taken = []
    monkeypatch.setattr(linear_by_classes, "_CLASSES", 1)
    monkeypatch.setattr(linear_by_classes, "MULTIPLE", 64)

    def watched(*given):
        taken.append(log_prob_by_classes.gradients_by_classes(*given))
        return taken[-1]

    monkeypatch.setattr("fused_softmax.ops.losses.linear_log_prob.gradients_by_classes", watched)
    monkeypatch.setattr(linear_by_rows, "_CHUNK_BYTES", 2 * N * 64)
    monkeypatch.setattr("fused_softmax.ops.losses.linear_log_prob.way_of", _by_classes(64))
    return taken


def _by_classes(classes):
    def way(*given):
        found = way_of(*given)
        return found._replace(classes=classes if ":" in found.reason else None)

    return way


def layer(device, dtype=FP32, weight_dtype=None):
    generator = torch.Generator().manual_seed(0)
    shapes = (N, FEATURES), (CLASSES, FEATURES), (CLASSES,)
    x, w, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    w[::7] *= 3  # peaks
    return x.to(device, dtype), w.to(device, weight_dtype or dtype), bias.to(device, weight_dtype or dtype)


def targets(device, k=None):
    """In every block; of several, two that name one class, and one that is ignored beside another."""
    found = torch.tensor([[0, 140], [63, 63], [-100, -100], [64, -100], [127, 3], [128, 128], [140, 70]])
    return (found if k else found[:, 0].contiguous()).to(device)


def bits_of(device, target):
    """About half of the columns, the second row's target not among them, none of the last block for the first row."""
    on = torch.rand(N, CLASSES, generator=torch.Generator().manual_seed(3)) < 0.5
    on.scatter_(1, target.cpu().reshape(N, -1).clamp_min(0), True)
    on[1, 63] = False
    on[0, 128:] = False
    words = torch.zeros(N, -(-CLASSES // 32) * 32, dtype=torch.int64)
    words[:, :CLASSES] = on
    words = (words.view(N, -1, 32) << torch.arange(32)).sum(-1)
    return on.to(device), torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).to(device)


OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 5.0, "scale": -0.7},
    "temperature": {"temperature": 0.6},
    "temperatures": {"temperature": torch.linspace(0.5, 2, N)},
}


@kernels
@pairwise(("dtypes", "accumulate"), ("k", "masked"), strength=1)
@pytest.mark.parametrize("dtypes", [(FP32, None), (BF16, None), (BF16, FP32), (FP64, None)], ids=str)
@pytest.mark.parametrize("accumulate", ["fp32", "input"])
@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_results_and_gradients(dtypes, accumulate, k, biased, masked, name, device, small):
    """Made twice, with the same bits. An ignored row of the input holds NaN."""
    x, w, bias = layer(device, *dtypes)
    target, options = targets(device, k), dict(OPTIONS[name])
    if isinstance(options.get("temperature"), torch.Tensor):
        options["temperature"] = options["temperature"].to(device)
    exact = [each.double().clone().requires_grad_() for each in (x, w, bias)][: 3 if biased else 2]
    x[2] = float("nan")
    given = [each.requires_grad_() for each in (x, w, bias)][: 3 if biased else 2]
    more, hidden = {}, None
    if masked:
        on, more["kept"] = bits_of(device, target)
        hidden = torch.zeros(N, CLASSES, device=device, dtype=FP64).masked_fill(~on, -1e5)
    expected = truth_of(exact, target, hidden, options)
    found = linear_log_prob(
        given[0], given[1], target, linear_bias=given[2] if biased else None, return_entropy=True, return_lse=True,
        logits="recompute", accumulate=accumulate, **options, **more,
    )[:3]  # fmt: skip
    rough = 2**-5 if x.dtype == BF16 else 1e-5
    outside = torch.zeros_like(target, dtype=torch.bool)
    if masked:
        t = target.reshape(N, -1)
        outside = (~on.gather(1, t.clamp_min(0)) & (t != -100)).view(target.shape)
        assert found[0][outside].eq(-torch.inf).all()
    for i, (ours, truth) in enumerate(zip(found, expected, strict=True)):
        ours, truth = (each.masked_fill(outside, 0) if i == 0 else each for each in (ours, truth))
        torch.testing.assert_close(ours.double(), truth, rtol=rough, atol=4 * rough)
    generator = torch.Generator().manual_seed(2)
    incoming = [torch.randn(each.shape, generator=generator, dtype=FP64).to(device) for each in expected]
    of_truth = [incoming[0].masked_fill(outside, 0), *incoming[1:]]
    truths = torch.autograd.grad(expected, exact, of_truth)
    both = [
        torch.autograd.grad(found, given, [each.to(found[0].dtype) for each in incoming], retain_graph=True)
        for _ in range(2)
    ]
    assert len(small) == 2
    for ours, again, truth, of in zip(*both, truths, given, strict=True):
        assert ours.dtype == of.dtype
        assert torch.equal(ours, again)
        torch.testing.assert_close(ours.double(), truth, rtol=rough, atol=rough * float(truth.abs().max()))


def truth_of(exact, target, hidden, options):
    """`formula`, of columns that -1e5 takes away."""
    x, w, *bias = exact
    if hidden is None:
        return formula(x, w, *(bias or [None]), target, **options)
    z = torch.nn.functional.linear(x, w, *bias) * options.get("scale", 1.0)
    cap = options.get("softcap")
    z = z if cap is None else cap * torch.tanh(z / cap)
    t = torch.as_tensor(options.get("temperature", 1.0), dtype=FP64, device=z.device).view(-1, 1)
    one = torch.eye(CLASSES, dtype=FP64, device=z.device)
    return formula(z / t + hidden, one, None, target)


@kernels
def test_the_same_as_by_rows_and_a_target_that_is_no_class(device, small, monkeypatch):
    given = [each.requires_grad_() for each in layer(device)]
    target = targets(device, 2)
    target[4, 1] = CLASSES

    def made():
        found = linear_log_prob(*given[:2], target, linear_bias=given[2], return_entropy=True, logits="recompute")
        return torch.autograd.grad(found[:2], given, [each.detach() * 0 + 1 for each in found[:2]])

    by_classes = made()
    monkeypatch.setattr("fused_softmax.ops.losses.linear_log_prob.way_of", _by_classes(None))
    by_rows = made()
    assert len(small) == 1
    assert by_classes[0][4].isnan().all()
    assert not by_classes[0][:4].isnan().any()
    for one, other in zip(by_classes, by_rows, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, equal_nan=True)


@kernels
@pytest.mark.parametrize("frozen", [(0,), (2,), (0, 2), (1,)], ids=str)
def test_only_what_requires_a_gradient_gets_one(frozen, device, small):
    """A frozen weight, as beside low-rank adapters, has no gradient to take memory, and goes by rows."""
    given = layer(device, BF16)
    wants = [each.requires_grad_(i not in frozen) for i, each in enumerate(given)]
    exact = [each.detach().double().requires_grad_() for each in given]
    target = targets(device)
    linear_log_prob(*given[:2], target, linear_bias=given[2], logits="recompute").sum().backward()
    truths = torch.autograd.grad(formula(*exact, target)[0].sum(), exact)
    assert len(small) == (1 not in frozen)
    for each, truth in zip(wants, truths, strict=True):
        if each.requires_grad:
            torch.testing.assert_close(each.grad.double(), truth, rtol=2**-5, atol=2**-5 * float(truth.abs().max()))
        else:
            assert each.grad is None


@kernels
def test_a_list_of_kept_columns_goes_by_rows(device, small):
    x, w, _ = (each.requires_grad_() for each in layer(device))
    target = targets(device)
    on, bits = bits_of(device, target)
    offsets = torch.cat([on.new_zeros(1, dtype=torch.int64), on.sum(1).cumsum(0)])
    found = []
    for kept in ((on.nonzero()[:, 1], offsets), bits):
        y = linear_log_prob(x, w, target, kept=kept, logits="recompute", return_entropy=True)
        found.append(torch.autograd.grad((y[0][3:].sum() + y[1].sum()), (x, w)))
    assert len(small) == 1
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@kernels
def test_four_products(device, small, monkeypatch):
    """Each of all rows and classes, whatever the number of blocks."""
    made = []
    mm, addmm = torch.mm, torch.addmm

    def size_of(a, b):
        made.append(a.shape[0] * a.shape[1] * b.shape[1])

    monkeypatch.setattr(torch, "mm", lambda a, b, **more: size_of(a, b) or mm(a, b, **more))
    monkeypatch.setattr(torch, "addmm", lambda c, a, b, **more: size_of(a, b) or addmm(c, a, b, **more))
    x, w, _ = (each.requires_grad_() for each in layer(device))
    linear_log_prob(x, w, targets(device), logits="recompute").sum().backward()
    assert len(small) == 1
    assert sum(made) == 4 * N * FEATURES * CLASSES


def peak_of(call):
    """(the most bytes that are there at once beside those from before, what the call returns)."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        found = call()
    total = peak = 0
    operation = ""
    for each in sorted(profiled.profiler.kineto_results.events(), key=lambda each: each.start_ns()):
        if each.name() != "[memory]":
            operation = each.name()
        elif operation != "aten::resolve_conj":  # by which products on a CPU take memory of their own
            total += each.nbytes()
            peak = max(peak, total)
    return peak, found


@pytest.mark.guard
@kernels
@pytest.mark.skipif(not INTERPRETED, reason="allocations are those of a CPU")
@pytest.mark.parametrize("masters", [False, True])
def test_memory_beside_inputs_and_gradients(masters, device, monkeypatch):
    """8192 x 4096 -> 151936 in bf16, 128 times smaller each way: then a byte for every 16 KiB."""
    rows, features, classes = 64, 32, 1187
    monkeypatch.setattr(linear_by_classes, "MULTIPLE", 32)
    monkeypatch.setattr(linear_by_rows, "_CHUNK_BYTES", 2**16)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, features, generator=generator).to(BF16).requires_grad_()
    w = torch.randn(classes, features, generator=generator).to(FP32 if masters else BF16).requires_grad_()
    target = torch.randint(classes, (rows,), generator=generator)
    mm = torch.mm  # on a GPU they widen what they sum, and no factor
    monkeypatch.setattr(linear_by_classes, "_factors", lambda a, b, dtype: (a, b, {}))
    monkeypatch.setattr(
        torch, "mm", lambda a, b, out: mm(a, b, out=out) if out.dtype == a.dtype else out.copy_(mm(a, b))
    )
    monkeypatch.setattr(torch, "addmm", lambda c, a, b, out: out.add_(mm(a, b)))
    gradients = sum(each.numel() * each.element_size() for each in (x, w))

    def forward():
        return linear_log_prob(x, w, target, return_entropy=True, logits="recompute")[:2]

    def backward(found):
        return torch.autograd.grad(found, (x, w), [torch.ones_like(each) for each in found])

    def peaks():
        backward(forward())  # prepares the launches
        of_forward, found = peak_of(forward)
        linear_log_prob(x[:1], w, target[:1])  # the interpreter keeps what it was given last
        return max(of_forward, peak_of(lambda: backward(found))[0] - gradients)

    with explain() as calls:
        forward()
    assert "made by blocks of classes" in calls[0].reason
    allowed = 2048 * MIB // 2**14 + (w.numel() * 2 if masters else 0)  # a copy in the dtype of products
    assert peaks() <= allowed
    monkeypatch.setattr("fused_softmax.ops.losses.linear_log_prob.way_of", _by_classes(None))
    assert peaks() > allowed


@kernels
def test_explain_says_which_way_it_went(device, small):
    x, w, _ = (each.requires_grad_() for each in layer(device))
    with explain() as calls:
        linear_log_prob(x, w, targets(device), logits="recompute")
        linear_log_prob(x, w.detach(), targets(device), logits="recompute")
        linear_log_prob(x, w, targets(device), logits="keep")
    assert [each.reason.partition("; ")[2].partition(":")[0] for each in calls if not each.depth] == [
        "gradients are made by chunks of rows", "gradients are made by chunks of rows, for linear_weight gets none",
        "all logits are kept for the backward pass",
    ]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("masters", [False, True])
def test_a_large_layer_on_a_gpu(masters):
    """At most 2 GiB beside the inputs and gradients, the same bits at every run, and as with all logits kept."""
    rows, features, classes = 8192, 4096, 151936
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(rows, features, generator=generator, device="cuda", dtype=BF16).requires_grad_()
    w = torch.randn(classes, features, generator=generator, device="cuda", dtype=FP32 if masters else BF16)
    w = (w / features**0.5).requires_grad_()
    target = torch.randint(0, classes, (rows,), generator=generator, device="cuda")
    target[::5] = -100

    def call(logits):
        found = linear_log_prob(x, w, target, return_entropy=True, logits=logits)[:2]
        return *found, *torch.autograd.grad(found, (x, w), [torch.ones_like(each) for each in found])

    first = call("recompute")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    second = call("recompute")
    extra = torch.cuda.max_memory_allocated() - before - sum(each.numel() * each.element_size() for each in (x, w))
    assert extra <= 2048 * MIB + (2 * w.numel() if masters else 0)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    del second
    for found, want in zip(first, call("keep"), strict=True):
        assert (found.float() - want.float()).norm() <= 1e-2 * want.float().norm()
