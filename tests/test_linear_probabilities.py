"""linear_cross_entropy of targets that are probabilities, against float64 of the layer and torch's loss."""

import pytest
import torch
import torch.nn.functional as F
from conftest import kernels, peaked
from products import pairwise

import fused_softmax
from fused_softmax import cross_entropy, linear_cross_entropy
from fused_softmax.ops.losses import linear_pairs

pytestmark = kernels
FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
ROWS, FEATURES = 7, 8


def layer(n_classes, device, dtype=FP32, master=None, of_target=None):
    """(input, weight, bias, target), leaves."""
    generator = torch.Generator().manual_seed(0)
    shapes = (ROWS, FEATURES), (n_classes, FEATURES), (n_classes,)
    x, w, bias = (torch.randn(*shape, generator=generator) for shape in shapes)
    t = peaked(ROWS, n_classes, seed=3).softmax(-1) * torch.linspace(0.5, 1.5, ROWS)[:, None]  # need not sum to 1
    t[2] = 0  # of a row that does not count
    dtypes = dtype, master or dtype, master or dtype, of_target or dtype
    return [each.to(device, of).requires_grad_() for each, of in zip((x, w, bias, t), dtypes, strict=True)]


def truth_of(leaves, options):
    """(the loss in float64, what it is of), as torch computes both of what the leaves hold in the input's dtype."""
    x, w, bias, t = leaves
    exact = [each.detach().to(x.dtype).double().requires_grad_() for each in (x, w, bias)]
    exact.append(t.detach().double().requires_grad_())
    z = F.linear(*exact[:3]) * options.get("scale", 1.0)
    z = z if "softcap" not in options else options["softcap"] * torch.tanh(z / options["softcap"])
    weight = options.get("weight")
    of_torch = {"reduction": options["reduction"], "label_smoothing": options.get("label_smoothing", 0.0)}
    return F.cross_entropy(z, exact[3], None if weight is None else weight.double(), **of_torch), exact


def assert_near(found, wanted, near):
    assert found.shape == wanted.shape
    assert (found.double() - wanted).abs().max() <= near * wanted.abs().max() + 1e-7


@pairwise(("reduction", "chunk_size", "dtypes"), ("smoothed", "weighted"))
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("n_classes", [40, 37])
@pytest.mark.parametrize("smoothed", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("accumulate", ["fp32", "input"])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "scale": -0.7}], ids=len)
@pytest.mark.parametrize(
    "dtypes", [(FP32,), (BF16,), (FP16,), (BF16, FP32), (FP16, FP32), (BF16, None, FP32), (FP32, None, BF16)], ids=str
)
def test_loss_and_gradients(reduction, chunk_size, n_classes, smoothed, weighted, accumulate, options, dtypes, device):
    """Made twice, of which the second backward pass makes the logits again; a row of no probability adds nothing."""
    leaves = layer(n_classes, device, *dtypes)
    options = options | {"reduction": reduction} | ({"label_smoothing": 0.1} if smoothed else {})
    options |= {"weight": torch.linspace(0.0, 2.0, n_classes, device=device)} if weighted else {}
    x, w, bias, t = leaves
    y = linear_cross_entropy(x, w, t, linear_bias=bias, chunk_size=chunk_size, accumulate=accumulate, **options)
    assert y.dtype == torch.promote_types(x.dtype, t.dtype)
    truth, exact = truth_of(leaves, options)
    eps = max(torch.finfo(x.dtype).eps, torch.finfo(t.dtype).eps, 1e-6)
    assert_near(y, truth, 8 * eps)
    dy = torch.linspace(0.5, 1.5, y.numel(), device=device).view(y.shape).to(y.dtype)
    wanted = torch.autograd.grad(truth, exact, dy.double())
    for _ in range(2):
        found = torch.autograd.grad(y, leaves, dy, retain_graph=True)
        for ours, of, exactly in zip(found, leaves, wanted, strict=True):
            assert ours.dtype == of.dtype
            assert_near(ours, exactly, 16 * eps)
        assert smoothed or not found[0][2].any()
    if len(dtypes) == 2:  # that of a master is never rounded
        assert not torch.equal(found[1].to(x.dtype).float(), found[1])


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("asked", [(0,), (1,), (2,), (3,), (0, 3), ()], ids=str)
def test_only_what_requires_a_gradient_gets_one(asked, reduction, device, monkeypatch):
    """One product is made for the logits, and one for each gradient of the input or the weight."""
    leaves = layer(40, device)
    wanted = torch.autograd.grad(*(lambda y, exact: (y.sum(), exact))(*truth_of(leaves, {"reduction": reduction})))
    products = []
    for name in ("mm", "addmm"):
        of_torch = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, of=of_torch, **more: products.append(0) or of(*a, **more))
    x, w, bias, t = (each.detach().requires_grad_(i in asked) for i, each in enumerate(leaves))
    y = linear_cross_entropy(x, w, t, linear_bias=bias, reduction=reduction).sum()
    assert y.requires_grad == bool(asked)
    given = [(x, w, bias, t)[i] for i in asked]
    found = torch.autograd.grad(y, given) if asked else ()
    again = reduction == "none" and bool(asked)
    assert len(products) == 1 + again + len({0, 1} & set(asked))
    for i, ours in zip(asked, found, strict=True):
        assert_near(ours, wanted[i], 1e-5)


def test_without_gradients_the_logits_alone_are_made(device, monkeypatch):
    x, w, _, t = layer(40, device)
    products, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *given, **more: products.append(0) or mm(*given, **more))
    with torch.no_grad():
        assert not linear_cross_entropy(x, w, t).requires_grad
    assert len(products) == 1


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_more_logits_exist_than_a_chunk_has(reduction, device, monkeypatch):
    x, w, _, t = layer(40, device)
    made, empty = [], torch.empty

    def watched(*shape, **options):
        made.append(empty(*shape, **options))
        return made[-1]

    monkeypatch.setattr(torch, "empty", watched)
    t = t.detach()
    linear_cross_entropy(x, w, t, chunk_size=2, reduction=reduction).sum().backward()
    of_classes = [each for each in made if each.ndim == 2 and each.shape[1] == 40]
    assert max(len(each) for each in of_classes) == 2


def test_it_is_the_loss_of_the_layers_logits(device):
    """Of a vocabulary, in bfloat16: the same logits, and the same results but for the sums over chunks."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 16, generator=generator).to(device, BF16).requires_grad_() for n in (9, 4001))
    t = torch.randn(9, 4001, generator=generator).softmax(-1).to(device).requires_grad_()
    found, wanted = linear_cross_entropy(x, w, t, chunk_size=4), cross_entropy(F.linear(x, w), t)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    pairs = zip(torch.autograd.grad(found, (x, w, t)), torch.autograd.grad(wanted, (x, w, t)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=2e-2 if ours.dtype == BF16 else 1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (3, 2), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_leading_dims(shape, reduction, device):
    n = torch.Size(shape).numel()
    x, w, bias, t = layer(37, device)
    rows, probabilities = x.detach()[:n], t.detach()[:n]
    found = linear_cross_entropy(
        rows.reshape(*shape, FEATURES), w, probabilities.reshape(*shape, 37), linear_bias=bias, reduction=reduction
    )  # fmt: skip
    wanted = F.cross_entropy(F.linear(rows, w, bias), probabilities, reduction=reduction)
    torch.testing.assert_close(found, wanted if reduction == "mean" else wanted.view(shape), rtol=1e-5, atol=1e-6)


def test_tensors_that_lie_otherwise(device):
    """Columns of others, targets of one row for all, and a class weight with gaps."""
    x, w, _, t = (each.detach() for each in layer(40, device))
    wide = torch.randn(ROWS, 2 * FEATURES, device=device)
    wide[:, ::2] = x
    weight = torch.linspace(0, 2, 80, device=device)[::2]
    for target in (t[1].expand(ROWS, 40), t.t().contiguous().t(), F.pad(t, (1, 2))[:, 1:-2]):
        leaves = wide.clone().requires_grad_(), w.clone().requires_grad_()
        found = linear_cross_entropy(leaves[0][:, ::2], leaves[1], target, weight=weight, chunk_size=3)
        wanted = F.cross_entropy(F.linear(leaves[0][:, ::2], leaves[1]), target, weight)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        ours, theirs = (torch.autograd.grad(each, leaves) for each in (found, wanted))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_second_derivatives_and_batched_gradients(device):
    seconds = []
    for of_layer in (True, False):
        leaves = layer(20, device)
        x, w, bias, t = leaves
        options = {"weight": torch.linspace(0.5, 2, 20, device=device), "label_smoothing": 0.1, "reduction": "none"}
        if of_layer:
            y = linear_cross_entropy(x, w, t, linear_bias=bias, **options)
        else:
            y = F.cross_entropy(F.linear(x, w, bias), t, **options)
        batch = torch.eye(ROWS, device=device)[:3]
        rows = torch.autograd.grad(y, leaves, batch, is_grads_batched=True, retain_graph=True)
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        seconds.append((rows, torch.autograd.grad(sum(each.square().sum() for each in first), leaves)))
    torch.testing.assert_close(*seconds, rtol=1e-4, atol=1e-4)


def test_a_gradient_of_a_weight_that_is_the_target_too(device):
    """One tensor in two places, whose second derivative counts both."""
    x = torch.randn(5, 5, generator=torch.Generator().manual_seed(0)).softmax(-1).to(device)
    leaf = x.clone().requires_grad_()
    found = torch.autograd.grad(linear_cross_entropy(x, leaf, leaf), leaf, create_graph=True)[0]
    wanted = torch.autograd.grad(F.cross_entropy(F.linear(x, leaf), leaf), leaf)[0]
    torch.testing.assert_close(found, wanted)


def test_what_scales_a_mean_of_float16_is_in_its_gradients(device):
    """As loss scaling has it: gradients that float16 could not hold before they are scaled."""
    x, w, bias, t = layer(40, device, FP16, of_target=FP32)
    t = (t.detach() * 2.0**-20).requires_grad_()
    truth, exact = truth_of((x, w, bias, t), {"reduction": "mean"})
    found = torch.autograd.grad(linear_cross_entropy(x, w, t, linear_bias=bias) * 2.0**18, (x, w, bias))
    for ours, wanted in zip(found, torch.autograd.grad(truth * 2.0**18, exact[:3]), strict=True):
        assert_near(ours, wanted, 16 * torch.finfo(FP16).eps)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtypes", [(FP32,), (BF16, FP32, FP32)], ids=str)
@pytest.mark.parametrize("asked", [(0, 1, 2, 3), (1,), (3,)], ids=str)
def test_compiled_it_is_one_operator_and_has_chunks_too(reduction, dtypes, asked, device, monkeypatch):
    """Of whole graphs, with weights of classes."""
    leaves = [each.detach().requires_grad_(i in asked) for i, each in enumerate(layer(40, device, *dtypes))]
    given, weight = [leaves[i] for i in asked], torch.linspace(0, 2, 40, device=device)
    made, shapes = [], []

    def call(x, w, bias, t, weight):
        return linear_cross_entropy(
            x * 1, w, t, linear_bias=bias, weight=weight, label_smoothing=0.1, softcap=5.0, scale=-0.7, chunk_size=3,
            reduction=reduction,
        ).sum()  # fmt: skip

    def backend(module, _):
        made.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module

    real = linear_pairs.chunks
    watched = lambda *of: (shapes.append(each[1].shape) or each for each in real(*of))  # noqa: E731
    monkeypatch.setattr(linear_pairs, "chunks", watched)
    torch._dynamo.reset()
    expected = call(*leaves, weight)
    wanted = torch.autograd.grad(expected, given)
    rough = {"rtol": 2**-6, "atol": 2**-6} if dtypes[0] == BF16 else {}
    for each in (backend, "aot_eager"):
        shapes.clear()
        found = torch.compile(call, backend=each, fullgraph=True)(*leaves, weight)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, given), wanted, **rough)
        assert max(shape[0] for shape in shapes) == 3
    assert made.count("fused_softmax.linear_divergence.default") == 1


def test_another_number_of_rows_and_smoothing_compile_too(device):
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    x, w, _, t = layer(40, device)
    for n, smoothing in ((7, 0.1), (5, 0.2), (3, 0.3)):
        found = compiled(x[:n], w, t[:n], label_smoothing=smoothing)
        torch.testing.assert_close(found, linear_cross_entropy(x[:n], w, t[:n], label_smoothing=smoothing))


def test_transformed_it_says_the_same(device):
    x, w, bias, t = layer(40, device)
    call = lambda x, w, b, t: linear_cross_entropy(x, w, t, linear_bias=b, label_smoothing=0.1)  # noqa: E731
    expected = torch.autograd.grad(call(x, w, bias, t), (x, w, bias, t))
    plain = [each.detach() for each in (x, w, bias, t)]
    torch.testing.assert_close(torch.func.grad(call, argnums=(0, 1, 2, 3))(*plain), expected)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_under_autocast_the_layer_is_lowered(dtype, device):
    x, w, bias, t = layer(40, device, dtype, of_target=FP32)
    with torch.autocast(torch.device(device).type, BF16):
        found = linear_cross_entropy(x, w, t, linear_bias=bias)
        theirs = F.cross_entropy(F.linear(x, w, bias), t)
    assert found.dtype == theirs.dtype
    torch.testing.assert_close(found, theirs, rtol=2e-2, atol=1e-2)
    assert [each.dtype for each in torch.autograd.grad(found, (x, w, bias, t))] == [dtype] * 3 + [FP32]


def test_it_takes_the_kernels(device):
    x, w, _, t = layer(40, device)
    with fused_softmax.explain() as explained:
        linear_cross_entropy(x, w, t)
    assert [each.route for each in explained] == ["kernel"]
    assert {"_pair_states", "_pair_gradient"} <= set(explained[0].kernels)


def test_a_row_of_infinite_or_no_logits_is_as_torchs(device):
    x, w, _, t = (each.detach() for each in layer(40, device))
    x[1], x[4] = float("nan"), float("inf")
    found = linear_cross_entropy(x, w, t, reduction="none")
    wanted = F.cross_entropy(F.linear(x, w), t, reduction="none")
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


ALL_LOGITS = {
    "statistics": ({"return_token_stats": True}, "targets are probabilities, and token statistics are wanted"),
    "a gradient of class weights": (
        {"weight": torch.ones(40, requires_grad=True)},
        "targets are probabilities, and class weights require a gradient",
    ),
    "a scale of 0": ({"scale": 0}, "scale is 0"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*ALL_LOGITS, "float64"])
def test_chunks_are_refused_where_all_logits_exist_at_once(name, device):
    options, why = ALL_LOGITS.get(name, ({}, "no kernel has torch.float64|targets are probabilities of torch.float64"))
    if "weight" in options:
        options = {"weight": options["weight"].detach().to(device).requires_grad_()}
    x, w, _, t = layer(40, device, FP64 if name == "float64" else FP32)
    said = f"^linear_cross_entropy: chunk_size=2 takes no probabilities here, for which all logits exist at once: {why}"
    with pytest.raises(ValueError, match=said):
        linear_cross_entropy(x, w, t, chunk_size=2, **options)
    found = linear_cross_entropy(x, w, t, **options)
    loss = found if isinstance(found, torch.Tensor) else found.loss
    assert torch.autograd.grad(loss, w)[0].isfinite().all()
