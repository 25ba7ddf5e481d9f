"""The softmax family, a row a function, and what its results and gradients are held to, on any device.

test_contract.py and test_backward.py ask every question of every row, so a new function of rows needs a row here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import fused_softmax
from fused_softmax.ops.softmax import reference

# One rounding of the output is all that 16 bits can show. Results of fp32 and fp64 show the arithmetic too: a GPU's exp
# and its division are right to 2 ** -22, and the sum and the reciprocal are each rounded.
ROUNDINGS = {torch.float16: 1, torch.bfloat16: 1, torch.float32: 4, torch.float64: 4}


@dataclass(frozen=True)
class Function:
    """A row of the table. fused_softmax, torch and reference.py have the function by its name.

    size: of what a result is a rounding, from the truth, the sink's probability and the scores, rows last. relative:
    whether a score that moves changes the result in proportion. terms: what the gradient adds up, from (y, dy, p, dim),
    where p are the probabilities and dy is expanded. of_sink: what the gradient of a sink sums, from (y, dy).
    nothing: the result of a row of which a sink alone is kept, from the sink. own_checks: whether it checks its input,
    dim and out itself, and names itself where it refuses them, instead of leaving that to torch.
    """

    name: str
    size: Callable
    terms: Callable
    of_sink: Callable
    nothing: Callable
    relative: bool = False
    takes_dtype: bool = True
    reduces: bool = False
    own_checks: bool = True

    @property
    def ours(self) -> Callable:
        return getattr(fused_softmax, self.name)

    @property
    def torchs(self) -> Callable:
        return getattr(torch, self.name)

    @property
    def reference(self) -> Callable:
        return getattr(reference, self.name)

    @property
    def keepdim(self) -> dict[str, bool]:
        """The argument by which a result has all dims of the input."""
        return {"keepdim": True} if self.reduces else {}


FAMILY = {
    row.name: row
    for row in (
        Function(
            "softmax",
            size=lambda truth, beside, z: torch.maximum(truth.abs(), beside).amax(-1, keepdim=True),
            terms=lambda y, dy, p, dim: p * (dy.abs() + (y * dy).abs().sum(dim, keepdim=True)),
            of_sink=lambda y, dy: y * dy,
            nothing=lambda sink: 0.0,
            relative=True,
        ),
        Function(
            "log_softmax",
            size=lambda truth, beside, z: truth.abs() + 1,
            terms=lambda y, dy, p, dim: dy.abs() + p * dy.abs().sum(dim, keepdim=True),
            of_sink=lambda y, dy: dy,
            nothing=lambda sink: -math.inf,
        ),
        Function(
            "logsumexp",
            size=lambda truth, beside, z: truth.abs() + z.abs().where(z.isfinite(), 0.0).amax(-1, keepdim=True) + 1,
            terms=lambda y, dy, p, dim: p * (dy * (1 + y.abs())).abs(),
            of_sink=lambda y, dy: dy,
            nothing=lambda sink: sink,
            takes_dtype=False,
            reduces=True,
            own_checks=False,
        ),
    )
}
# As parameters of tests: all functions, those that keep the input's shape, and those with dtype=.
every_function = pytest.mark.parametrize("function", FAMILY)
keeping_shape = pytest.mark.parametrize("function", [name for name, row in FAMILY.items() if not row.reduces])
taking_dtype = pytest.mark.parametrize("function", [name for name, row in FAMILY.items() if row.takes_dtype])


def assert_softmax(y: torch.Tensor, x: torch.Tensor, dim: int = -1, *, dtype: torch.dtype | None = None) -> None:
    """y is softmax of x along `dim` in the dtype of the result.

    NaN stands where torch puts NaN. In each other row, the largest |y - truth| is at most torch's own, in the same
    dtype on the same device, and ROUNDINGS times eps times the row's largest output. The truth is fp64's, of the values
    that torch rounds the input to; for fp64 outputs it is that of 80 bits.
    """
    theirs = torch.softmax(x, dim, dtype=dtype)
    assert (y.dtype, y.device, y.shape) == (theirs.dtype, theirs.device, theirs.shape)
    if y.numel() == 0:
        return
    x = x.to(theirs.dtype)
    y, x, theirs = (t.movedim(dim, -1).reshape(-1, t.shape[dim]) if t.ndim else t.view(1, 1) for t in (y, x, theirs))
    bad = theirs.isnan()
    assert torch.equal(y.isnan(), bad), f"NaN at {_where(y.isnan() != bad)}, against torch's"
    good = ~bad.any(dim=-1)
    y, x, theirs = y[good], x[good], theirs[good]
    if len(y) == 0:
        return
    if y.dtype == torch.float64:
        truth = _softmax_80_bits(x)
        ours, torchs, top = (
            torch.from_numpy(abs(a).max(axis=-1).astype(np.float64))
            for a in (_numpy(y) - truth, _numpy(theirs) - truth, truth)
        )
    else:
        truth = torch.softmax(x.double(), -1)
        ours, torchs, top = (a.abs().amax(-1) for a in (y.double() - truth, theirs.double() - truth, truth))
    allowed = torchs + ROUNDINGS[y.dtype] * torch.finfo(y.dtype).eps * top
    assert (ours <= allowed).all(), (
        f"row {(ours / allowed).argmax()}: error {ours[(ours / allowed).argmax()]:.3g}, "
        f"{(ours / allowed).max():.3g} times what is allowed; {(ours > allowed).sum()} of {len(ours)} rows"
    )


def assert_scores(y: torch.Tensor, function: str, x: torch.Tensor, dim: int = -1, *, dtype=None, **scored) -> None:
    """y is a function of the family of the scores of x, as reference.py has it.

    NaN and infinities stand where the same of torch's operations puts them, computed in the dtype of the arithmetic.
    Every other element is off the truth, fp64's, by no more than that is in the worst element of its row, ROUNDINGS
    times eps, and what the rounding of a score moves it by: scale, product, mask and sum are each rounded. A sink's own
    probability counts among its row's.
    """
    row = FAMILY[function]
    result = x.dtype if dtype is None else dtype
    arithmetic = torch.float64 if result == torch.float64 else torch.float32
    of, keepdim = row.reference, row.keepdim
    if keepdim and y.ndim < x.ndim:
        y = y.unsqueeze(dim)
    theirs = of(x, dim, **keepdim, dtype=result, arithmetic=arithmetic, **scored)
    assert (y.dtype, y.device, y.shape) == (result, x.device, theirs.shape)
    if x.numel() == 0:
        torch.testing.assert_close(y, theirs, rtol=0, atol=0, equal_nan=True)  # a sink alone may be NaN
        return
    exact = x.to(result).double()
    scale, mask, is_causal = (scored.get(name) for name in ("scale", "mask", "is_causal"))
    truth = of(exact, dim, **keepdim, **scored)
    z = reference.scores(exact, dim, scale, mask, bool(is_causal))
    rounded = torch.zeros_like(z)
    if scale is not None:
        greedy = torch.as_tensor(scale, device=x.device).double() == 0
        # Which of two sums of a score and a mask is the greater is a question to the dtype they are held in.
        truth = torch.where(greedy, theirs.double(), truth)
        rounded = torch.maximum(
            rounded, (exact * torch.where(greedy, 1.0, torch.as_tensor(scale, device=x.device))).abs()
        )
    if mask is not None and mask.dtype != torch.bool:
        rounded = torch.maximum(rounded, torch.maximum(mask.double().abs(), z.abs()))
    rounded = torch.where(z.isfinite() & rounded.isfinite(), rounded, 0.0)
    beside = torch.zeros_like(z)
    if row.relative and scored.get("sink") is not None:
        beside = (sink_probability(exact, dim, scored).nan_to_num() + beside).view(z.shape)
    y, theirs, truth, z, rounded, beside = (
        t.movedim(dim, -1).reshape(-1, t.shape[dim]) if t.ndim else t.view(1, 1)
        for t in (y, theirs, truth, z, rounded, beside)
    )  # fmt: skip
    for name, ours, torchs in (("NaN", y.isnan(), theirs.isnan()), ("an infinity", y.isinf(), theirs.isinf())):
        assert torch.equal(ours, torchs), f"{name} at {_where(ours != torchs)}, against torch's"
    finite = theirs.isfinite()
    assert torch.equal(y.isinf() & (y > 0), theirs.isinf() & (theirs > 0)), "an infinity of the other sign"
    size = row.size(truth, beside, z)
    error = torch.where(finite, (y.double() - truth).abs(), 0.0)
    torchs = torch.where(finite, (theirs.double() - truth).abs(), 0.0).amax(-1, keepdim=True)
    moved = 2 * torch.finfo(arithmetic).eps * rounded.amax(-1, keepdim=True)
    if row.relative:
        moved = moved * size
    roundings = ROUNDINGS[result] * (2 if result == torch.float64 else 1)  # the truth is then as rounded as the result
    allowed = torchs + roundings * torch.finfo(result).eps * size + moved + torch.finfo(result).tiny
    bad = finite & ~(error <= allowed)
    assert not bad.any(), (
        f"{function}: error {error[bad].max():.3g}, {(error / allowed)[bad].max():.3g} times what is allowed, "
        f"at {_where(bad)}; {bad.sum()} of {bad.numel()} elements"
    )


def sink_probability(x, dim, scored):
    """exp(sink - lse) of every row, `dim` kept; 1 of a row of which nothing else is kept."""
    lse = reference.logsumexp(x, dim, keepdim=True, **scored)
    return torch.exp(torch.as_tensor(scored["sink"], dtype=x.dtype, device=x.device) - lse)


def assert_result(y, function, x, dim=-1, *, dtype=None, **scored):
    """The same of any public call. Without scores a softmax is held to torch's own, which is closer in fp64."""
    if function == "softmax" and not scored:
        assert_softmax(y, x, dim, dtype=dtype)
    else:
        assert_scores(y, function, x, dim, dtype=dtype, **scored)


def public(function: str, x, dim=-1, **arguments):
    return FAMILY[function].ours(x, dim, **arguments)


def composed(function: str, x, dim=-1, **arguments):
    return FAMILY[function].reference(x, dim, **arguments)


def gradients(function, arguments, dy, dim=-1, of=public, **options):
    """Those of the arguments that require one, by name."""
    leaves = {
        name: value.detach().clone().requires_grad_() if value.is_floating_point() else value
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor)
    }
    x = leaves["x"]
    others = {name: leaves.get(name, value) for name, value in arguments.items() if name != "x"}
    y = of(function, x, dim, **others, **options)
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    found = torch.autograd.grad(y, list(wanted.values()), dy.to(y.dtype))
    return dict(zip(wanted, found, strict=True))


def assert_gradients(function, arguments, dy, dim=-1, **options):
    """Each as torch's operations have it in fp64, to what the dtypes hold that it went through.

    Every gradient is a sum, or a difference of one, and its error is to what is added up.
    """
    ours = gradients(function, arguments, dy, dim, **options)
    exact = {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }
    dtype = options.pop("dtype", None) or arguments["x"].dtype
    exact["x"] = arguments["x"].to(dtype).double()
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    truth = gradients(function, exact, dy, dim, of=composed, **options)
    x, scale = exact["x"], torch.as_tensor(arguments.get("scale", 1.0), dtype=torch.float64, device=dy.device)
    scored = {name: value for name, value in exact.items() if name != "x"} | options
    y, dy = composed(function, x, dim, **scored), dy.double()
    row, whole = FAMILY[function], [each.unsqueeze(dim) if each.ndim < x.ndim else each for each in (y, dy)]
    # A probability too small for a normal number may be 0 on a GPU.
    flushed = torch.finfo(arithmetic).tiny / torch.finfo(arithmetic).eps
    terms = row.terms(*whole, composed("softmax", x, dim, **scored) + flushed, dim)
    terms = terms.nan_to_num()
    sizes = {"x": terms * scale.abs(), "mask": terms, "scale": terms * x.abs().nan_to_num(0.0, 0.0, 0.0)}
    if isinstance(arguments.get("sink"), torch.Tensor):
        lse = composed("logsumexp", x, dim, keepdim=True, **scored)
        sums = row.of_sink(*whole)
        sums = sums.abs().nan_to_num().sum(dim, keepdim=True)
        sizes["sink"] = (sink_probability(x, dim, scored) * (1 + lse.abs()) * sums).nan_to_num()
    assert ours.keys() == truth.keys()
    for name in truth:
        given = arguments[name]
        assert (ours[name].dtype, ours[name].shape, ours[name].device) == (given.dtype, given.shape, given.device)
        assert torch.equal(ours[name].isnan(), truth[name].isnan()), f"NaN in the gradient of {name}"
        held = [torch.finfo(each) for each in (arguments["x"].dtype, dtype, given.dtype)]
        eps, least = max(each.eps for each in held), max(each.tiny for each in held)
        # The output is a rounding of what a rounding of its scores gives.
        greatest = (x * scale).nan_to_num(0.0, 0.0, 0.0).abs().max()
        if arguments.get("sink") is not None:  # one of the scores
            greatest = torch.maximum(greatest, torch.as_tensor(arguments["sink"]).to(x).abs().max())
        moved = greatest * torch.finfo(arithmetic).eps
        allowed = (4 * eps + 2 * moved) * sizes[name].sum_to_size(given.shape) + least
        error = (ours[name].double() - truth[name]).abs().nan_to_num()
        assert (error <= allowed).all(), f"of {name}: {(error / allowed).max():.3g} times what is allowed"


def _softmax_80_bits(x):
    x = _numpy(x)
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def _numpy(x):
    return x.cpu().numpy().astype(np.longdouble)


def _where(mask):
    return [tuple(i) for i in mask.nonzero()[:5].tolist()]
