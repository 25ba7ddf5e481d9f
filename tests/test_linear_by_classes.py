"""linear_cross_entropy by blocks of classes: what it leaves in memory when, its kernels, and its result by float64."""

import os

import pytest
import torch
import torch.nn.functional as F
from conftest import peaked
from losses import wanted
from products import pairwise
from test_cross_entropy import OPTIONS, named
from test_losses_fuzz import check_statistics

from fused_softmax import linear_cross_entropy
from fused_softmax.ops.losses import linear_by_classes as by_classes
from fused_softmax.ops.losses import reference
from fused_softmax.ops.losses.linear_by_classes import steps_of
from fused_softmax.ops.losses.options import Loss
from fused_softmax.ops.losses.sums import totals_of

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="needs a GPU or FUSED_SOFTMAX_INTERPRET=1: without, CPU tensors take torch's operators",
)
FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
SHAPES = [  # classes, features, tokens, elements apart
    (128256, 4096, 8192, 256 * 128256), (128256, 4096, 4096, 256 * 128256), (128256, 4096, 2048, 64 * 128256),
    (128256, 4096, 16384, 1024 * 128256), (32000, 2048, 65536, 1024 * 32000), (50257, 768, 8200, 512 * 50257),
    (40, 8, 24, 24), (40, 8, 24, 400), (40, 8, 8, 8), (40, 16, 8, 16), (37, 8, 12, 40), (37, 5, 28, 30), (1, 1, 1, 1),
    (1000, 300, 304, 304 * 300), (300, 1000, 8, 2000),
]  # fmt: skip


@pytest.mark.parametrize("multiple", [128, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_is_written_where_something_is_still_to_be_read(shape, multiple, monkeypatch):
    monkeypatch.setattr(by_classes, "MULTIPLE", multiple)
    n_classes, features, tokens, most = shape
    steps = steps_of(*shape)
    assert steps.scratch <= most
    blocks = steps.states
    assert [block.first for block in blocks] == [0, *[block.stop for block in blocks[:-1]]]
    assert blocks[-1].stop == n_classes
    assert all(0 < (block.stop - block.first) * tokens <= n_classes * features for block in blocks)
    first = blocks[-1].first
    written = n_classes  # rows of the gradient from here on
    for block in steps.kept:
        assert first <= block.first < block.stop == written
        read = (block.first if block.apart else block.stop) - first  # a copy follows what was made of the logits
        assert block.first * features >= read * tokens
        assert not block.apart or (block.stop - block.first) * features <= steps.scratch
        written = block.first
    assert written == first
    for block in steps.again:
        assert 0 <= block.first < block.stop == written
        room = steps.scratch if block.apart else block.first * features
        assert (block.stop - block.first) * tokens <= room
        written = block.first
    assert written == 0


def test_a_layer_of_128256_classes_is_made_in_few_and_large_products():
    steps = steps_of(128256, 4096, 8192, 256 * 128256)
    assert [block.stop - block.first for block in steps.states] == [64128, 64128]
    assert [(block.stop - block.first, block.apart) for block in steps.kept] == [
        (8016, True), (8016, False), (16032, False), (32064, False),
    ]  # fmt: skip
    assert len(steps.again) <= 9
    assert min(block.stop - block.first for block in steps.again) > 2500


@pytest.mark.parametrize(
    ("rows", "chunk_size", "shape", "goes"),
    [
        (8192, 256, (128256, 4096), True),
        (8192, 1024, (128256, 4096), True),
        (8192, 256, (128256, 4096, FP32), False),  # products take ten times longer, and so does what is made again
        (8192, 2048, (128256, 4096), False),  # four chunks
        (65536, 4096, (128256, 4096), False),  # sixteen, whose sum costs less than logits made again
        (8192, 256, (128256, 128), False),  # a small gradient of the weight
        (8192, 256, (4096, 4096), False),  # few classes at a time
        (8192, 8, (128256, 4096), False),
    ],
    ids=str,
)
def test_when_it_is_taken(rows, chunk_size, shape, goes):
    one = torch.empty(1, dtype=shape[2] if len(shape) > 2 else BF16)
    x, w = one.expand(rows, shape[1]), one.expand(shape[:2])
    assert by_classes.goes_by_classes(x, w, chunk_size) is goes


def test_a_master_weight_takes_scratch_for_its_wider_gradient():
    x, w = torch.empty(1, dtype=BF16).expand(2048, 4096), torch.empty(1, dtype=BF16).expand(16384, 4096)
    assert by_classes.goes_by_classes(x, w, 64)
    master = torch.empty(1).expand(w.shape)
    assert not by_classes.goes_by_classes(x, master, 64)
    assert by_classes.goes_by_classes(x, master, 128)


KERNEL_OPTIONS = OPTIONS | {"smoothing alone": {"label_smoothing": 1.0}, "large scale": {"scale": 100.0}}


@kernels
@pairwise(("options", "mean"), ("options", "biased"), ("dtype", "mean", "multiple"), ("dtype", "biased"), strength=1)
@pytest.mark.parametrize("options", KERNEL_OPTIONS)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP64], ids=str)
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("shift", "programs", "multiple"), [(0.0, 16, 32), (0.0, 16, 128), (1000.0, 0, 128)])
def test_losses_and_gradients_of_transposed_logits(
    options, dtype, mean, biased, shift, programs, multiple, device, nvidia, monkeypatch
):  # fmt: skip
    """Blocks of many parts, of few or of one; peaks in any of them, parts of nothing but -inf, NaN and infinity."""
    monkeypatch.setattr(by_classes, "_PROGRAMS", programs)
    monkeypatch.setattr(by_classes, "MULTIPLE", multiple)
    n_tokens, sizes = 12, (300, 130, 7)
    n_classes = sum(sizes)
    x = peaked(n_tokens, n_classes) / 2 + shift
    x[3, :200] = -1e4
    x[4, 150:] = float("-inf")
    x[6] = float("nan")
    x[7, 70] = float("nan")
    x[11, 9] = float("inf")
    x = x.to(dtype).to(device)
    target = torch.tensor([0, 299, 300, 436, 3, -100, -100, 5, n_classes, -1, 2**40, 8], device=device)
    if mean:  # what is wrong makes all of it NaN
        target, x = target[:7].clone(), x[:7]
        n_tokens = 7
    options = named(KERNEL_OPTIONS[options], n_classes, device=device)
    weight = options.get("weight")
    if weight is not None:
        options["weight"] = weight.to(FP64 if dtype == FP64 else FP32)
    loss = Loss(reduction="mean" if mean else "sum", stats=not mean, **options)
    totals = totals_of(target, loss, n_classes, FP64 if dtype == FP64 else FP32) if mean else None
    bias = (4 * torch.randn(n_classes, device=device)).to(dtype) if biased else None
    tokens = by_classes.Tokens(x, target, loss, totals, n_classes, bias)
    tokens.make_room(list(sizes))
    blocks, first = [], 0
    for size in sizes:
        memory = torch.full((size, tokens.padded), float("nan"), dtype=dtype, device=device)
        block = memory[:, :n_tokens]
        block.copy_(x[:, first : first + size].t())
        tokens.read(block, first)
        blocks.append(block)
        first += size
    rows, lse = tokens.finish(with_lse=True)
    first = 0
    for block in blocks:
        tokens.write_gradient(block, first)
        first += len(block)
    if biased:  # the sum is no longer rounded to the dtype of x
        x = x.to(tokens.dtype) + bias.to(tokens.dtype)
    scale = options.pop("scale", 1.0)
    held = wanted(x, target, "mean" if mean else "sum", scale=scale, **options)
    of_rows = wanted(x, target, "none", scale=scale, **options)
    of_rows.check("loss", rows.loss if rows.z is None else rows.loss + rows.z)
    of_rows.check("lse", lse)
    held.check("dx", torch.cat(blocks).t())
    if not mean:
        check_statistics(rows.entropy, rows.predicted, x, of_rows, {"scale": scale, "softcap": None} | options)


LAYERS = {  # tokens, classes, features, chunk_size
    "all kept, less than half": (5, 40, 24, 1),
    "all kept": (8, 40, 8, 2),
    "a part kept": (24, 40, 8, 2),
    "little kept": (43, 40, 8, 3),
    "made again in the gradient's memory": (19, 61, 16, 1),
}


def layer(name, dtype, device, requires_grad=True):
    n_tokens, n_classes, features, chunk_size = LAYERS[name]
    generator = torch.Generator().manual_seed(0)
    shapes = (n_tokens, features), (n_classes, features), (n_classes,)
    tensors = [torch.randn(*shape, generator=generator) for shape in shapes]
    tensors[1][::7] *= 3  # peaks
    target = torch.randint(0, n_classes, (n_tokens,), generator=generator)
    target[1::3] = -100
    return [each.to(device, dtype).requires_grad_(requires_grad) for each in tensors], target.to(device), chunk_size


@pytest.fixture
def small(monkeypatch):
    """Blocks of few classes, and which were made."""
    taken = []
    monkeypatch.setattr(by_classes, "_CHUNKS", 2)
    monkeypatch.setattr(by_classes, "_CLASSES", 1)
    monkeypatch.setattr(by_classes, "MULTIPLE", 4)

    def watched(*sizes):
        taken.append(steps_of(*sizes))
        return taken[-1]

    monkeypatch.setattr(by_classes, "steps_of", watched)
    return taken


@kernels
@pairwise(("name", "dtype"), ("options", "reduction"), strength=1)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP64], ids=str)
@pytest.mark.parametrize(("reduction", "accumulate"), [("mean", "fp32"), ("sum", "input")])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_loss_and_gradients(name, options, dtype, reduction, accumulate, device, small):
    """Held to a few roundings of the largest, and to the way by rows, which a second backward takes."""
    tensors, target, chunk_size = layer(name, dtype, device)
    options = named(OPTIONS[options], len(tensors[1]), device=device)
    exact = [each.detach().double().requires_grad_() for each in tensors]
    weight = {"weight": options["weight"].double()} if "weight" in options else {}
    truth = reference.cross_entropy(F.linear(*exact), target, reduction=reduction, **options | weight)[0]
    expected = (truth, *torch.autograd.grad(truth, exact, torch.full_like(truth, 1.5)))
    x, w, bias = tensors
    loss = linear_cross_entropy(
        x, w, target, linear_bias=bias, reduction=reduction, chunk_size=chunk_size, accumulate=accumulate, **options
    )  # fmt: skip
    assert len(small) == 1
    for way in ("by classes", "by rows"):
        gradients = torch.autograd.grad(loss, tensors, torch.full_like(loss, 1.5), retain_graph=True)
        for found, want in zip((loss, *gradients), expected, strict=True):
            assert found.dtype == dtype
            sums = 3 if accumulate == "input" else 1  # each rounded
            least = 0 if dtype == FP64 else 1e-7
            allowed = 8 * sums * torch.finfo(dtype).eps * want.abs().max() + least
            assert (found.double() - want).abs().max() <= allowed, way
    assert len(small) == 1


@kernels
@pairwise()
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize(("reduction", "accumulate"), [("sum", "fp32"), ("sum", "input"), ("mean", "fp32")])
@pytest.mark.parametrize("of_bias", [None, FP32, "low"], ids=str)
def test_the_gradient_of_a_master_weight_is_twice_the_room_for_logits(
    name, dtype, reduction, accumulate, of_bias, device, small
):
    """In float32, of products that were not rounded; a mean of float16 goes by rows."""
    (x, w, bias), target, chunk_size = layer(name, dtype, device)
    exact = [each.detach().double().requires_grad_() for each in (x, w, bias)][: 2 if of_bias is None else 3]
    given = [x, w.detach().float().requires_grad_()]
    given += [] if of_bias is None else [bias if of_bias == "low" else bias.detach().float().requires_grad_()]
    truth = F.cross_entropy(F.linear(*exact), target, reduction=reduction)
    expected = (truth, *torch.autograd.grad(truth, exact, torch.full_like(truth, 1.5)))
    loss = linear_cross_entropy(
        *given[:2], target, linear_bias=given[2] if len(given) > 2 else None, reduction=reduction,
        chunk_size=2 * chunk_size, accumulate=accumulate, dtype=FP32,
    )  # fmt: skip
    gradients = torch.autograd.grad(loss, given, torch.full_like(loss, 1.5))
    assert len(small) == (dtype == BF16 or reduction == "sum")
    for found, want, of in zip((loss, *gradients), expected, (loss, *given), strict=True):
        assert found.dtype == of.dtype
        sums = 3 if accumulate == "input" else 1
        assert (found.double() - want).abs().max() <= 8 * sums * torch.finfo(dtype).eps * want.abs().max() + 1e-7
    assert not torch.equal(gradients[1].to(dtype).float(), gradients[1])


@kernels
@pytest.mark.parametrize("name", ["little kept", "all kept"])
def test_logits_in_memory_are_rounded_once(name, device, small, monkeypatch):
    """With their bias, which a product that adds it to what it has rounded would round again."""
    (x, w, bias), target, chunk_size = layer(name, BF16, device)
    read, begun = [], by_classes.Tokens.read

    def watched(tokens, logits, first):
        read.append((first, logits.clone()))
        begun(tokens, logits, first)

    monkeypatch.setattr(by_classes, "_WIDENED", 96)
    monkeypatch.setattr(by_classes.Tokens, "read", watched)
    linear_cross_entropy(x, w, target, linear_bias=bias, chunk_size=chunk_size).backward()
    assert len(small) == 1
    assert sum(len(logits) for _, logits in read) == len(w)
    for first, logits in read:
        here = slice(first, first + len(logits))
        exact = w[here].double() @ x.double().t() + bias[here, None].double()
        torch.testing.assert_close(logits.double(), exact, rtol=torch.finfo(BF16).eps / 2, atol=1e-4)


@pytest.mark.guard
@kernels
def test_a_bias_that_takes_most_of_the_product_back(device, small):
    """As of a layer whose tokens have a part in common: products are four times as large as logits."""
    generator = torch.Generator().manual_seed(0)
    common, x, w = (torch.randn(*shape, generator=generator) for shape in ((64,), (256, 64), (320, 64)))
    tensors = [common * 2 + x / 2, w / 2, -(w / 2) @ common * 2]
    x, w, bias = (each.to(device, BF16).requires_grad_() for each in tensors)
    target = torch.randint(0, 320, (256,), generator=generator).to(device)

    def composed(tensors, dtype):
        losses = F.cross_entropy(F.linear(*tensors).to(dtype), target, reduction="none")
        return losses.detach(), *torch.autograd.grad(losses.mean(), tensors)

    truth = composed([each.detach().double().requires_grad_() for each in (x, w, bias)], FP64)
    theirs = composed([x, w, bias], FP32)
    found = linear_cross_entropy(x, w, target, linear_bias=bias, chunk_size=64, return_token_stats=True)
    ours = found.token_stats.loss, *torch.autograd.grad(found.loss, (x, w, bias))
    assert len(small) == 1
    for what, exact, one, other in zip(("losses", "x", "w", "bias"), truth, ours, theirs, strict=True):
        assert (one.double() - exact).norm() <= 1.1 * (other.double() - exact).norm(), what


@pytest.mark.guard
@kernels
@pytest.mark.parametrize(
    "options",
    [{"scale": 0.1}, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ({}, {"softcap": 90.0}))],
    ids=str,
)
def test_with_a_bias_it_is_no_further_from_float64_than_torch(options, device, small):
    """Of logits of 45, whose bfloat16 has one or two bits left behind the point."""
    generator = torch.Generator().manual_seed(0)
    x, w, bias = (torch.randn(*shape, generator=generator) for shape in ((256, 64), (320, 64), (320,)))
    tensors = [each.to(device, BF16).requires_grad_() for each in (x, w * 4, bias * 32)]
    target = torch.randint(0, 320, (256,), generator=generator).to(device)

    def composed(tensors, dtype):
        z = F.linear(*tensors).to(dtype) * options.get("scale", 1.0)
        if "softcap" in options:
            z = options["softcap"] * torch.tanh(z / options["softcap"])
        losses = F.cross_entropy(z, target, reduction="none")
        return losses.detach(), *torch.autograd.grad(losses.mean(), tensors)

    truth = composed([each.detach().double().requires_grad_() for each in tensors], FP64)
    theirs = composed(tensors, FP32)
    x, w, bias = tensors
    found = linear_cross_entropy(
        x, w, target, linear_bias=bias, chunk_size=64, return_token_stats=True, **options
    )  # fmt: skip
    ours = found.token_stats.loss, *torch.autograd.grad(found.loss, tensors)
    assert len(small) == 1
    for what, exact, one, other in zip(("losses", "x", "w", "bias"), truth, ours, theirs, strict=True):
        assert (one.double() - exact).norm() <= 1.1 * (other.double() - exact).norm(), what


@kernels
def test_a_strided_bias_that_leaves_classes_out(device, small):
    (x, w, _), target, chunk_size = layer("little kept", BF16, device)
    bias = torch.linspace(-3, 3, 2 * len(w), device=device).to(BF16)[::2]
    bias[[7, 39]] = float("-inf")
    target[(target == 7) | (target == 39)] = 0
    tensors = x, w, bias.requires_grad_()
    found = linear_cross_entropy(x, w, target, linear_bias=bias, chunk_size=chunk_size)
    exact = [each.detach().double().requires_grad_() for each in tensors]
    truth = F.cross_entropy(F.linear(*exact), target)
    gradients, expected = torch.autograd.grad(found, tensors), torch.autograd.grad(truth, exact)
    assert len(small) == 1
    for one, want in zip((found, *gradients), (truth, *expected), strict=True):
        assert (one.double() - want).abs().max() <= 8 * torch.finfo(BF16).eps * want.abs().max()
    assert gradients[2][[7, 39]].eq(0).all()


@kernels
@pairwise(strength=1)
@pytest.mark.parametrize("frozen", [(), (0,), (2,), (0, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_only_what_requires_a_gradient_gets_one(frozen, dtype, device, small):
    tensors, target, chunk_size = layer("a part kept", FP32, device)
    target[:] = torch.where(target == -100, 1, target)
    exact = [each.detach().double().requires_grad_() for each in tensors]
    truth = F.cross_entropy(F.linear(*exact), target, ignore_index=1)
    wanted_of = [i for i in range(3) if i not in frozen]
    expected = torch.autograd.grad(truth, [exact[i] for i in wanted_of])
    for i in frozen:
        tensors[i].requires_grad_(False)
    x, w, bias = tensors
    loss = linear_cross_entropy(x, w, target.to(dtype), linear_bias=bias, chunk_size=chunk_size, ignore_index=1)
    loss.backward()
    assert len(small) == 1
    torch.testing.assert_close(loss.double(), truth)
    for i, want in zip(wanted_of, expected, strict=True):
        torch.testing.assert_close(tensors[i].grad.double(), want, rtol=1e-5, atol=1e-6)
    assert all(tensors[i].grad is None for i in frozen)


@kernels
def test_without_a_gradient_of_the_weight_it_goes_by_rows(device, small):
    (x, w, bias), target, chunk_size = layer("a part kept", FP32, device)
    linear_cross_entropy(x, w.detach(), target, linear_bias=bias, chunk_size=chunk_size).backward()
    linear_cross_entropy(x, w, target, reduction="none", chunk_size=chunk_size).sum().backward()
    linear_cross_entropy(x.half(), w.half(), target, chunk_size=chunk_size).backward()
    with torch.no_grad():
        linear_cross_entropy(x, w, target, chunk_size=chunk_size)
    assert not small
    linear_cross_entropy(x.half(), w.half(), target, chunk_size=chunk_size, reduction="sum").backward()
    assert len(small) == 1


@kernels
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ignored_and_wrong_targets(reduction, device, small):
    (x, w, bias), target, chunk_size = layer("a part kept", FP32, device)
    options = {"linear_bias": bias, "chunk_size": chunk_size, "reduction": reduction}
    nothing = linear_cross_entropy(x, w, torch.full_like(target, -100), **options)
    gradients = torch.autograd.grad(nothing, (x, w, bias))
    assert nothing.isnan() if reduction == "mean" else nothing == 0
    assert all(each.eq(0).all() for each in gradients)
    for wrong in (-1, len(w), 2**62, -(2**62)):
        target[3] = wrong
        loss = linear_cross_entropy(x, w, target, **options)
        of_x, of_w, of_bias = torch.autograd.grad(loss, (x, w, bias))
        assert all(each.isnan().all() for each in (loss, of_x[3], of_w, of_bias))
        assert of_x[1].eq(0).all()
        others = torch.arange(len(x), device=device) != 3
        assert not of_x[others].isnan().any()
    assert len(small) == 5


@kernels
def test_a_tied_weight_strided_rows_and_rows_left_out(device, small):
    (_, w, _), _, _ = layer("a part kept", FP32, device)
    generator = torch.Generator().manual_seed(1)
    tokens, target = (torch.randint(0, len(w), (4, 9), generator=generator).to(device) for _ in range(2))
    target[:, ::2] = -100
    found = linear_cross_entropy(
        F.embedding(tokens, w).transpose(0, 1), w, target.t(), chunk_size=2, skip_ignored=True
    )  # fmt: skip
    want = F.cross_entropy(F.linear(F.embedding(tokens, w), w).flatten(0, 1), target.flatten())
    torch.testing.assert_close(found, want)
    (found,), (want,) = torch.autograd.grad(found, w), torch.autograd.grad(want, w)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
    assert len(small) == 1


@kernels
@pytest.mark.parametrize("accumulate", ["fp32", "input"])
def test_memory(accumulate, device, small, monkeypatch):
    """Beside the gradients: the scratch of the chunk's size, and of each token what its states are."""
    (x, w, bias), target, chunk_size = layer("little kept", BF16, device)
    made = []
    empty = torch.empty

    def watched(*shape, **options):
        made.append(empty(*shape, **options))
        return made[-1]

    monkeypatch.setattr(torch, "empty", watched)
    loss = linear_cross_entropy(x, w, target, linear_bias=bias, chunk_size=chunk_size, accumulate=accumulate)
    monkeypatch.undo()
    sizes = sorted(each.numel() for each in made if each.shape not in (w.shape, bias.shape))
    padded = -(-len(x) // 8) * 8
    assert any(each.shape == w.shape and each.dtype == BF16 for each in made)
    assert max(sizes) <= max(chunk_size * len(w), 2 * padded * (len(small[0].states) if small else 8))
    (of_w,) = torch.autograd.grad(loss, w)
    assert any(of_w.data_ptr() == each.data_ptr() for each in made)  # summed where it is given away


@kernels
@pytest.mark.parametrize("accumulate", ["fp32", "input"])
def test_compiled_it_goes_the_same_way(accumulate, device, small):
    torch._dynamo.reset()
    tensors, target, chunk_size = layer("a part kept", FP32, device)
    x, w, bias = tensors

    def call(x, w, bias):
        return linear_cross_entropy(x, w, target, linear_bias=bias, chunk_size=chunk_size, accumulate=accumulate)

    results = []
    for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        loss = function(x, w, bias)
        results.append((loss, *torch.autograd.grad(loss, tensors)))
    assert len(small) == 2
    for found, want in zip(*results, strict=True):
        assert torch.equal(found, want)


@pytest.mark.gpu
@pytest.mark.parametrize("n_tokens", [4096, 4001])
@pytest.mark.parametrize("accumulate", ["fp32", "input"])
def test_a_large_layer_on_a_gpu(accumulate, n_tokens):
    """Its memory beside the gradients, the same bits at every run, and the way by rows."""
    chunk_size, n_classes, features = 256, 32000, 1024
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (n_tokens, features), (n_classes, features)
    x, w = (torch.randn(*shape, generator=generator, device="cuda").bfloat16().requires_grad_() for shape in shapes)
    w.data /= features**0.5
    target = torch.randint(0, n_classes, (n_tokens,), generator=generator, device="cuda")
    target[::5] = -100

    def call():
        loss = linear_cross_entropy(x, w, target, chunk_size=chunk_size, accumulate=accumulate)
        return loss, *torch.autograd.grad(loss, (x, w))

    first = call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    second = call()
    extra = torch.cuda.max_memory_allocated() - before - 2 * (x.numel() + w.numel())
    of_x = 2 * x.numel()  # a copy, with 0 for ignored tokens
    allowed = 2 * chunk_size * n_classes + of_x + (2 * of_x if accumulate == "fp32" else 0)
    assert extra <= allowed + 8 * 2**20
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    by_rows = linear_cross_entropy(x, w, target, chunk_size=2048)
    for found, want in zip(first, (by_rows, *torch.autograd.grad(by_rows, (x, w))), strict=True):
        assert (found.float() - want.float()).norm() <= 1e-2 * want.float().norm()
