"""Gradients of sampling's masks, renormalised probabilities and penalties, and of the log-probabilities of draws."""

import math

import pytest
import torch
from products import pairwise
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import fused_softmax
from fused_softmax import penalize, sample
from fused_softmax.ops.sampling import reference
from fused_softmax.ops.sampling import sample as sampling

INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FILTERS = [
    ("top_k", 3),
    ("top_k", torch.tensor([1, 4, 0, 9])),
    ("top_p", 0.7),
    ("top_p", torch.tensor([0.2, 0.6, 1.0, 0.9])),
    ("min_p", 0.2),
]
IDS = ["top_k", "top_k of a row", "top_p", "top_p of a row", "min_p"]


def on(device, value):
    return value.to(device) if isinstance(value, torch.Tensor) else value


def finite(x):
    """What is not -inf, whose numerical derivative is NaN."""
    return x.masked_fill(x == -INF, 0.0)


@pytest.mark.parametrize(("name", "value"), FILTERS, ids=IDS)
def test_gradients_in_float64(name, value, device):
    value = on(device, value)
    x = torch.randn(4, 9, dtype=torch.float64, device=device).requires_grad_()
    functions = [(lambda x: finite(reference.mask_logits(x, **{name: value})).sin(), x)]
    if name != "min_p":
        probs = (x.detach().softmax(1) * 3).requires_grad_()
        functions.append((lambda p: reference.renorm_probs(p, **{name: value}).sin(), probs))
    for function, given in functions:
        assert gradcheck(function, (given,), check_forward_ad=True, check_batched_grad=True)
        assert gradgradcheck(function, (given,))


@pairwise()
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "value"), FILTERS, ids=IDS)
def test_masks_pass_the_gradient_of_what_they_keep(name, value, dtype, compiled, device):
    x, dy = torch.randn(4, 9).to(dtype).to(device).requires_grad_(), torch.randn(4, 9).to(dtype).to(device)
    function = getattr(fused_softmax, f"{name}_mask_logits")
    function = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
    y = function(x, on(device, value))
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx, torch.where(y > -INF, dy, 0.0))


@pairwise()
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "value"), FILTERS[:4], ids=IDS[:4])
def test_renormalised_probabilities_are_differentiated_through_their_sum(name, value, dtype, compiled, device):
    p, dy = torch.rand(4, 9).to(dtype).to(device).requires_grad_(), torch.randn(4, 9).to(dtype).to(device)
    function = getattr(fused_softmax, f"{name}_renorm_probs")
    function = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
    y = function(p, on(device, value))
    (dx,) = torch.autograd.grad(y, p, dy)
    leaf = p.detach().double().requires_grad_()
    left = torch.where(y > 0, leaf, 0.0)
    (wanted,) = torch.autograd.grad(left / left.sum(1, keepdim=True), leaf, dy.double())
    assert_close(dx, wanted.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_of_functorch_and_of_a_batch_of_gradients(device):
    x, p = torch.randn(4, 9, device=device), torch.rand(4, 9, device=device)
    of_mask = torch.func.grad(lambda x: finite(fused_softmax.top_p_mask_logits(x, 0.7)).square().sum())(x)
    kept = fused_softmax.top_p_mask_logits(x, 0.7) > -INF
    assert_close(of_mask, torch.where(kept, 2 * x, 0.0))
    leaf = p.clone().requires_grad_()
    y = fused_softmax.top_k_renorm_probs(leaf, 3)
    many = torch.randn(5, 4, 9, device=device)
    (batched,) = torch.autograd.grad(y, leaf, many, is_grads_batched=True, retain_graph=True)
    assert_close(batched, torch.stack([torch.autograd.grad(y, leaf, dy, retain_graph=True)[0] for dy in many]))


@pytest.mark.parametrize(
    ("name", "row", "value"),
    [
        ("top_k_mask_logits", [NAN, 1.0, 2.0], 2),
        ("top_p_mask_logits", [0.0, 1.0, 2.0], torch.tensor([0.0, 0.5])),
        ("min_p_mask_logits", [0.0, 1.0, 2.0], torch.tensor([1.5, 0.5])),
        ("top_k_renorm_probs", [0.5, -0.5, 1.0], 2),
        ("top_p_renorm_probs", [0.5, 0.5, 0.0], torch.tensor([-1.0, 0.5])),
        ("top_p_renorm_probs", [0.5, INF, 0.0], 0.5),
    ],
)
def test_rows_that_are_nan_have_gradients_of_nan_and_no_other_row_has(name, row, value, device):
    x = torch.tensor([row, [0.25, 0.75, 0.5]], device=device, requires_grad=True)
    finite(getattr(fused_softmax, name)(x, on(device, value)))[:, :2].sum().backward()
    assert x.grad[0].isnan().all()
    assert x.grad[1].isfinite().all()


def penalized(x, ids, r, once, each):
    """As `penalize`, in float64, by one column after another."""
    counts = torch.stack([(ids == c).sum(1) for c in range(x.shape[1])], 1)
    x = torch.where((counts > 0) & (x < 0), x * r[:, None], torch.where(counts > 0, x / r[:, None], x))
    return x - counts * each[:, None] - (counts > 0) * once[:, None]


@pytest.mark.parametrize("compiled", [False, True])
def test_penalties_are_differentiated_by_all_that_they_take(compiled, device):
    ids = torch.randint(-1, 20, (5, 12)).to(device)
    given = [torch.randn(5, 20) * 4, torch.rand(5) + 0.5, torch.randn(5), torch.randn(5)]
    given = [each.to(device).requires_grad_() for each in given]
    dy = torch.randn(5, 20, device=device)
    function = torch.compile(penalize, backend="aot_eager", fullgraph=True) if compiled else penalize
    found = torch.autograd.grad(function(given[0], ids, *given[1:]), given, dy)
    truth = [each.detach().double().requires_grad_() for each in given]
    wanted = torch.autograd.grad(penalized(truth[0], ids, *truth[1:]), truth, dy.double())
    for ours, each in zip(found, wanted, strict=True):
        assert_close(ours.double(), each, rtol=1e-5, atol=1e-5)


def test_what_is_hidden_leaves_a_penalty_its_gradient(device):
    x = torch.tensor([[1.0, -INF, -2.0, -INF]], device=device)
    r = torch.tensor([1.5], device=device, requires_grad=True)
    y = penalize(x, torch.tensor([[0, 1, 2]], device=device), r)
    assert y.tolist() == [[pytest.approx(2 / 3), -INF, -3.0, -INF]]
    y.softmax(1)[0, 0].backward()
    assert r.grad.isfinite().all()
    assert r.grad != 0


def test_penalties_written_to_out_take_no_part_in_autograd(device):
    x, ids = torch.randn(2, 5, device=device, requires_grad=True), torch.zeros(2, 1, dtype=torch.int64, device=device)
    r = torch.full((2,), 1.5, device=device, requires_grad=True)
    for given in ((x, ids, 1.5), (x.detach(), ids, r)):
        with pytest.raises(RuntimeError, match="penalize: out= takes no part in autograd, but an argument requires"):
            penalize(*given, out=torch.empty(2, 5, device=device))
    with torch.no_grad():
        out = torch.empty(2, 5, device=device)
        assert penalize(x, ids, r, out=out) is out
    with pytest.raises(RuntimeError, match="penalize: out must have a place for each element"):
        penalize(x.detach(), ids, out=torch.empty(1, 5, device=device).expand(2, 5))


DRAWS = {
    "no filter": {},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.6},
    "all, joint": {"top_k": 9, "top_p": 0.8, "min_p": 0.05, "order": "joint"},
}
N, N_COLS = 4, 40


def drawn_of(x, bias, t, kind, **options):
    return sample(
        x, t, **options, logit_bias=bias, seed=3, position=5, return_logprobs=kind, top_logprobs=3,
        row_indices=torch.tensor([2, 0, 2, 7], device=x.device),
    )  # fmt: skip


def logprobs_of(x, bias, t, kind, drawn):
    """(of tokens, of the greatest) in float64, as formulas of what was drawn and kept."""
    x = x[[2, 0, 2, 0]]
    if kind == "processed":
        x = ((x + bias) / t[:, None]).masked_fill(~reference.unpacked(drawn.kept, N_COLS), -INF)
        x = torch.where(drawn.valid[:, None], x, 0.0)
    y = x.log_softmax(1)
    top = y.gather(1, drawn.top_tokens.clamp(min=0)).masked_fill(drawn.top_tokens < 0, -INF)
    return y.gather(1, drawn.tokens[:, None]).squeeze(1), top


@pairwise()
@pytest.mark.parametrize("way", ["torch", "kernels"], indirect=True)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["raw", "processed"])
@pytest.mark.parametrize("filters", DRAWS)
def test_log_probabilities_of_draws_have_gradients(filters, kind, compiled, way, device):
    """Of logits, a bias of all draws and temperatures; one of four draws is of a row that there is not."""
    given = [torch.randn(3, N_COLS) * 2, torch.randn(N_COLS), torch.tensor([0.5, 1.0, 2.0, 1.0])]
    given = [each.to(device).requires_grad_() for each in given]
    call = lambda *given: drawn_of(*given, kind, **DRAWS[filters])  # noqa: E731
    y = (torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call)(*given)
    with torch.no_grad():
        plain = drawn_of(*given, kind, **DRAWS[filters], return_kept=True)
    assert y.kept is None
    for ours, each in zip(y[:5], plain[:5], strict=True):
        assert_close(ours, each, rtol=1e-5, atol=2e-5, equal_nan=True)
    weights = torch.randn(N, device=device), torch.randn(N, 3, device=device)

    def loss(logprobs, top, dtype):
        of_tokens = (logprobs * weights[0].to(dtype))[plain.valid].sum()
        return of_tokens + (finite(top) * weights[1].to(dtype))[plain.valid].sum()

    taken = given[:1] if kind == "raw" else given
    found = torch.autograd.grad(loss(y.logprobs, y.top_logprobs, torch.float32), taken)
    truth = [each.detach().double().requires_grad_() for each in given]
    of_truth = truth[:1] if kind == "raw" else truth
    wanted = torch.autograd.grad(loss(*logprobs_of(*truth, kind, plain), torch.float64), of_truth)
    for ours, each in zip(found, wanted, strict=True):
        assert_close(ours.double(), each, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["raw", "processed"])
def test_log_probabilities_of_draws_under_transforms(kind, device):
    x = torch.randn(3, N_COLS, device=device)

    def logprob(x):
        return sample(x, 0.7, 9, seed=3, return_logprobs=kind).logprobs.sum()

    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(logprob(leaf), leaf)
    assert wanted.abs().max() > 0.1
    assert_close(torch.func.grad(logprob)(x), wanted)
    along = torch.randn_like(x)
    assert_close(torch.func.jvp(logprob, (x,), (along,))[1], (wanted * along).sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["raw", "processed"])
def test_rows_of_temperature_0_inf_and_none_have_finite_gradients(kind, device):
    x = torch.randn(5, N_COLS)
    x[1, 3], x[2, 3], x[3] = INF, NAN, -INF
    x[4, 1:] = -INF
    x = x.to(device).requires_grad_()
    t = torch.tensor([0.0, 1.0, 1.0, 1.0, 2.0], device=device, requires_grad=True)
    drawn = sample(x, t, seed=1, return_logprobs=kind, top_logprobs=2)
    assert drawn.valid.tolist() == [True, True, False, False, True]
    drawn.logprobs[drawn.valid].sum().backward()
    assert x.grad.isfinite().all()
    assert t.grad is None if kind == "raw" else t.grad.tolist() == [0.0] * 5
    assert (x.grad[1:] == 0).all()
    assert (x.grad[0] != 0).any() == (kind == "raw")


def test_draws_without_log_probabilities_record_nothing(monkeypatch, device):
    monkeypatch.setattr(sampling.reference, "with_gradients", None)
    x = torch.randn(3, N_COLS, device=device, requires_grad=True)
    assert not any(each.requires_grad for each in sample(x, seed=1, return_kept=True) if each is not None)
    with torch.no_grad():
        assert not sample(x, seed=1, return_logprobs="raw").logprobs.requires_grad
    assert not sample(x.detach(), seed=1, return_logprobs="raw").logprobs.requires_grad
