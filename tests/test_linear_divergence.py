"""linear_divergence against float64: reductions, dtypes, chunks, weights, gradients, and what it refuses."""

import pytest
import torch
from conftest import kernels
from torch.utils.flop_counter import FlopCounterMode

from fused_softmax import explain, linear_divergence
from fused_softmax.core import route
from fused_softmax.nn import LinearDivergence
from fused_softmax.ops.losses import linear_by_rows

pytestmark = kernels
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
ROWS, CLASSES = 13, 50
KINDS = ["kl", "reverse_kl", "jsd", "tvd"]
WHERE = {"device": "cpu"}  # of the tensors that tests make


@pytest.fixture(autouse=True)
def _on_the_device(device, monkeypatch):
    monkeypatch.setitem(WHERE, "device", device)


def layers(dtype=FP32, *, bias=False, teacher=None, classes=CLASSES):
    """(the student's tensors, the teacher's): input, weight, and a bias or None."""
    generator = torch.Generator().manual_seed(0)

    def made(*shape, dtype):
        return torch.randn(shape, generator=generator).to(**WHERE, dtype=dtype)

    student = [made(ROWS, 8, dtype=dtype), made(classes, 8, dtype=dtype), made(classes, dtype=dtype) if bias else None]
    of = teacher or dtype
    return student, [made(ROWS, 6, dtype=of), made(classes, 6, dtype=of), made(classes, dtype=of) if bias else None]


def log_softmax_of(x, w, bias, temperature):
    z = torch.nn.functional.linear(x, w, bias) / temperature
    return torch.log_softmax(z, -1)


def rows_of(kind, log_q, log_t, beta=0.5):
    q, t = log_q.exp(), log_t.exp()
    if kind == "kl":
        return (t * (log_t - log_q)).sum(-1)
    if kind == "reverse_kl":
        return (q * (log_q - log_t)).sum(-1)
    if kind == "tvd":
        return 0.5 * (q - t).abs().sum(-1)
    log_m = (beta * t + (1 - beta) * q).log()
    return beta * (t * (log_t - log_m)).sum(-1) + (1 - beta) * (q * (log_q - log_m)).sum(-1)


def truth(kind, student, teacher, weight, reduction, temperature=1.5):
    """(the divergence in float64, the student's tensors that it is of)"""
    student = [None if each is None else each.detach().double().requires_grad_() for each in student]
    teacher = [None if each is None else each.double() for each in teacher]
    rows = rows_of(kind, log_softmax_of(*student, temperature), log_softmax_of(*teacher, 1.0))
    rows = rows if weight is None else rows * weight.double()
    if reduction == "mean":
        rows = rows.sum() / (len(rows) if weight is None else weight.double().sum())
    return rows.sum() if reduction == "sum" else rows, student


def require_grad(tensors):
    return [None if each is None else each.requires_grad_() for each in tensors]


@pytest.mark.parametrize("chunk_size", [None, 5])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind, reduction, chunk_size):
    student, teacher = layers(bias=True)
    weight = torch.linspace(0.0, 2.0, ROWS, **WHERE)
    student = require_grad(student)
    x, w, b = student
    y = linear_divergence(
        x, w, *teacher[:2], linear_bias=b, target_bias=teacher[2], kind=kind, reduction=reduction, weight=weight,
        chunk_size=chunk_size, temperature=1.5,
    )  # fmt: skip
    wanted, of = truth(kind, student, teacher, weight, reduction)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-6)
    dy = torch.linspace(-1.0, 2.0, y.numel(), **WHERE).view(y.shape)
    for ours, exact in zip(
        torch.autograd.grad(y, student, dy), torch.autograd.grad(wanted, of, dy.double()), strict=True
    ):
        assert (ours.double() - exact).norm() <= 2e-5 * exact.norm()


@pytest.mark.parametrize("n_classes", [50257, 151937])
@pytest.mark.parametrize("kind", KINDS)
def test_vocabularies_of_today(kind, n_classes):
    student, teacher = layers(classes=n_classes)
    student, teacher = [student[0][:2], student[1], None], [teacher[0][:2], teacher[1], None]
    x, w, _ = require_grad(student)
    y = linear_divergence(x, w, *teacher[:2], kind=kind, chunk_size=1, temperature=1.5)
    wanted, of = truth(kind, student, teacher, None, "mean")
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-6)
    near = 5e-4 if kind == "tvd" else 2e-5  # where both probabilities are almost equal, rounding decides the sign
    for ours, exact in zip(torch.autograd.grad(y, [x, w]), torch.autograd.grad(wanted, of[:2]), strict=True):
        assert (ours.double() - exact).norm() <= near * exact.norm()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_sixteen_bits(dtype, reduction):
    student, teacher = layers(dtype)
    student = require_grad(student[:2])
    y = linear_divergence(*student, *teacher[:2], reduction=reduction, temperature=1.5)
    assert y.dtype == FP32
    wanted, of = truth("kl", [*student, None], teacher, None, reduction)
    torch.testing.assert_close(y.double(), wanted, rtol=3e-2, atol=3e-2)
    dy = torch.ones(y.shape, **WHERE)
    pairs = zip(torch.autograd.grad(y, student, dy), torch.autograd.grad(wanted, of[:2], dy.double()), strict=True)
    for ours, exact in pairs:
        assert ours.dtype == dtype
        assert (ours.double() - exact).norm() < 3e-2 * exact.norm()


def test_master_weights_get_gradients_of_their_own_dtype():
    student, teacher = layers(BF16)
    x, w = student[0].requires_grad_(), student[1].float().requires_grad_()
    dx, dw = torch.autograd.grad(linear_divergence(x, w, *teacher[:2]), [x, w])
    assert (dx.dtype, dw.dtype) == (BF16, FP32)


@pytest.mark.parametrize("way", ["kernels", "torch"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_rows_of_weight_0_may_hold_anything(reduction, way, device, monkeypatch):
    if way == "torch":
        if device != "cpu":
            pytest.skip("of CPU tensors")
        monkeypatch.setattr(route, "INTERPRET", False)
    student, teacher = layers()
    weight = torch.ones(ROWS, **WHERE)
    weight[3] = 0
    student[0][3] = float("nan")
    x, w = require_grad(student[:2])
    y = linear_divergence(x, w, *teacher[:2], weight=weight, reduction=reduction)
    dx, dw = torch.autograd.grad(y.sum(), [x, w])
    assert all(each.isfinite().all() for each in (y, dx, dw))
    assert not dx[3].any()


def test_no_weight_at_all_has_no_mean_and_no_gradient():
    student, teacher = layers()
    x, w = require_grad(student[:2])
    y = linear_divergence(x, w, *teacher[:2], weight=torch.zeros(ROWS, **WHERE))
    assert y.isnan()
    assert not any(each.any() for each in torch.autograd.grad(y, [x, w]))


def test_the_teachers_hidden_size_and_dtype_may_differ():
    student, teacher = layers(FP32, teacher=BF16)
    wanted, _ = truth("kl", student, teacher, None, "mean")
    y = linear_divergence(*student[:2], *teacher[:2], temperature=1.5)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-2, atol=1e-2)


def test_leading_dims_and_no_reduction():
    student, teacher = layers()
    x, h = student[0][:12].view(3, 4, 8), teacher[0][:12].view(3, 4, 6)
    y = linear_divergence(x, student[1], h, teacher[1], reduction="none")
    flat = linear_divergence(student[0][:12], student[1], teacher[0][:12], teacher[1], reduction="none")
    assert torch.equal(y, flat.view(3, 4))


def test_two_backward_passes_give_the_same():
    student, teacher = layers()
    x, w = require_grad(student[:2])
    y = linear_divergence(x, w, *teacher[:2])
    of = torch.tensor(2.0, **WHERE)
    first = torch.autograd.grad(y, [x, w], of, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(y, [x, w], of), strict=True))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives(reduction):
    student, teacher = layers()
    x, w = require_grad(student[:2])
    y = linear_divergence(x, w, *teacher[:2], temperature=1.5, reduction=reduction).sum()
    wanted, of = truth("kl", [x, w, None], teacher, None, reduction)
    found = []
    for value, inputs in ((y, [x, w]), (wanted.sum(), of[:2])):
        first = torch.autograd.grad(value, inputs, create_graph=True)
        found.append(torch.autograd.grad(sum(each.square().sum() for each in first), inputs))
    for ours, exact in zip(*found, strict=True):
        assert (ours.double() - exact).norm() < 1e-4 * exact.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_first_and_second_derivatives_of_float64(kind, reduction):
    """Which torch's operations compute: the kernels' second derivatives are compared with float64 above."""
    student, teacher = layers(torch.float64, bias=True, classes=5)
    student = require_grad([student[0][:3], *student[1:]])
    weight = torch.tensor([0.5, 0.0, 2.0], **WHERE)

    def call(x, w, bias):
        return linear_divergence(
            x, w, teacher[0][:3], teacher[1], linear_bias=bias, target_bias=teacher[2], kind=kind, beta=0.3,
            temperature=1.5, softcap=4.0, weight=weight, reduction=reduction, chunk_size=2,
        )  # fmt: skip

    with explain() as calls:
        call(*student)
    assert calls[0].route == "composed"
    assert torch.autograd.gradcheck(call, student, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, student, fast_mode=True)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, FP32)], ids=str)
def test_compiled_it_is_one_operator_and_has_chunks_too(reduction, dtypes, monkeypatch):
    """Of whole graphs, with temperatures of rows, a bias, weights of which some are 0, and float32 masters."""
    student, teacher = layers(dtypes[0], bias=True)
    student[1:] = [each.to(dtypes[1]) for each in student[1:]]
    leaves = require_grad(student)
    weight, t = torch.arange(ROWS, **WHERE) / 4, torch.linspace(0.5, 2, ROWS, **WHERE)
    made, shapes = [], []

    def call(x, w, bias, t, weight):
        return linear_divergence(
            x, w, *teacher[:2], linear_bias=bias, target_bias=teacher[2], kind="jsd", temperature=t, weight=weight,
            reduction=reduction, chunk_size=5,
        ).sum()  # fmt: skip

    def backend(module, _):
        made.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module

    real = linear_by_rows.chunks
    watched = lambda *given: (shapes.append(each[1].shape) or each for each in real(*given))  # noqa: E731
    monkeypatch.setattr("fused_softmax.ops.losses.linear_pairs.chunks", watched)
    torch._dynamo.reset()
    rough = {"rtol": 2**-6, "atol": 2**-6} if dtypes[0] == BF16 else {}
    expected = call(*leaves, t, weight)
    wanted = torch.autograd.grad(expected, leaves)
    for each in (backend, "aot_eager"):
        shapes.clear()
        found = torch.compile(call, backend=each, fullgraph=True)(*leaves, t, weight)
        torch.testing.assert_close(found, expected)
        gradients = torch.autograd.grad(found, leaves)
        assert max(shape[0] for shape in shapes) == 5
        for ours, other in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(ours, other, **rough)
    assert made.count("fused_softmax.linear_divergence.default") == 1
    assert not any("linear.default" in each or "matmul" in each for each in made)


def test_a_second_derivative_of_the_operator():
    student, teacher = layers()
    x, w = require_grad(student[:2])
    operator = torch.ops.fused_softmax.linear_divergence.default
    found = []
    for rows in (
        operator(x, w, None, *teacher[:2], None)[0],
        linear_divergence(x, w, *teacher[:2], reduction="none"),
    ):
        first = torch.autograd.grad(rows.square().sum(), [x, w], create_graph=True)
        found.append(torch.autograd.grad(sum(each.square().sum() for each in first), [x, w]))
    for ours, other in zip(*found, strict=True):
        torch.testing.assert_close(ours, other)


def test_its_products_are_counted():
    student, teacher = layers()
    x, w = require_grad(student[:2])
    counter = FlopCounterMode(display=False)
    with counter:
        linear_divergence(x, w, *teacher[:2], reduction="none").sum().backward()
    of_student, of_teacher = 2 * ROWS * CLASSES * 8, 2 * ROWS * CLASSES * 6
    assert counter.get_total_flops() == 4 * of_student + 2 * of_teacher


@pytest.mark.parametrize(("chunk_size", "reduction", "said"), [
    (None, "mean", "all rows are one chunk, and their gradients are made with them"),
    (5, "none", "rows go by 3 chunks of 5, and their gradients are made in the backward pass"),
])  # fmt: skip
def test_explain_says_how_it_went(chunk_size, reduction, said):
    student, teacher = layers()
    x, w = require_grad(student[:2])
    with explain() as calls:
        linear_divergence(x, w, *teacher[:2], reduction=reduction, chunk_size=chunk_size)
    assert calls[0].reason.endswith(f"; {said}")


def test_the_module():
    layer = LinearDivergence(8, CLASSES, kind="tvd", bias=True).to(**WHERE)
    student, teacher = layers()
    y = layer(student[0], *teacher[:2], weight=torch.ones(ROWS, **WHERE))
    y.backward()
    assert all(each.grad.any() for each in layer.parameters())


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        (
            {"target_weight": torch.zeros(CLASSES, 5)},
            ValueError,
            r"target_weight must have shape \(50, 6\)",
        ),
        ({"target_weight": torch.zeros(CLASSES + 1, 6)}, ValueError, "target_weight must have shape"),
        ({"target_input": torch.zeros(ROWS - 1, 6)}, ValueError, "target_input must have shape"),
        ({"target_input": torch.zeros(ROWS, 6, requires_grad=True)}, RuntimeError, "target_input requires grad"),
        (
            {"target_weight": torch.zeros(CLASSES, 6).half()},
            RuntimeError,
            "target_weight must be of",
        ),
        ({"target_bias": torch.zeros(3)}, ValueError, "target_bias must have shape"),
        ({"target_input": [1]}, TypeError, "target_input must be a Tensor"),
        ({"kind": "js"}, ValueError, "kind is one of"),
        ({"reduction": "avg"}, ValueError, "reduction must be"),
        ({"weight": torch.ones(2)}, ValueError, r"weight must have shape \(13,\)"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1"),
        ({"temperature": 0.0}, ValueError, "temperature must be more than 0"),
    ],
)
def test_bad_input(changed, error, said):
    student, teacher = layers()
    given = {
        "input": student[0], "linear_weight": student[1], "target_input": teacher[0], "target_weight": teacher[1],
    }  # fmt: skip
    moved = {name: v.to(**WHERE) if isinstance(v, torch.Tensor) else v for name, v in changed.items()}
    with pytest.raises(error, match=f"linear_divergence: .*{said}"):
        linear_divergence(**given | moved)


def test_a_sum_of_rows_of_weight_0_has_gradients_of_0_whatever_it_is_divided_by():
    student, teacher = layers()
    leaves = [each.requires_grad_() for each in student[:2]]
    total = linear_divergence(*leaves, *teacher[:2], weight=torch.zeros(ROWS, **WHERE), reduction="sum")
    for gradient in torch.autograd.grad(total / 0, leaves):
        assert (gradient == 0).all()
