"""What a softmax is held to, on any device."""

import numpy as np
import torch

# One rounding of the output is all that 16 bits can show. Results of fp32 and fp64 show the arithmetic too: a GPU's exp
# and its division are right to 2 ** -22, and the sum and the reciprocal are each rounded.
ROUNDINGS = {torch.float16: 1, torch.bfloat16: 1, torch.float32: 4, torch.float64: 4}


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


def _softmax_80_bits(x):
    x = _numpy(x)
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def _numpy(x):
    return x.cpu().numpy().astype(np.longdouble)


def _where(mask):
    return [tuple(i) for i in mask.nonzero()[:5].tolist()]
