"""What a cross-entropy is held to, on any device, of whatever logits."""

from dataclasses import dataclass

import torch

from fused_softmax.core.checks import arithmetic_of
from fused_softmax.ops.losses import reference

ROUNDINGS = 16  # of the arithmetic, in a loss or a gradient, of the greatest term that is added up in it


@dataclass
class Wanted:
    """A loss, lse, z-loss and gradient of the logits: fp64's, torch's own in the arithmetic, and what may be between.

    `wrong` and `kept` say of every row whether its target is no class, and whether it counts.
    """

    truth: dict[str, torch.Tensor]
    theirs: dict[str, torch.Tensor]
    allowed: dict[str, torch.Tensor]
    kept: torch.Tensor
    wrong: torch.Tensor
    seen: bool  # whether rows that do not count are read all the same
    undefined: torch.Tensor  # which rows have a gradient of an infinite lse alone: 0 by the reference, NaN by kernels

    def check(self, name: str, ours: torch.Tensor, *, spoilt: bool = False) -> None:
        """ours is the truth to what is allowed, and NaN and infinite where torch's is; spoilt: all of it is NaN."""
        truth, theirs = self.truth[name], self.theirs[name].double()
        assert ours.shape == truth.shape, name
        nan, found = theirs.isnan() | spoilt, ours.double()
        if name in ("lse", "z"):  # of a row of which a logit is infinite, as is its loss
            nan = torch.where(theirs == float("inf"), found.isnan(), nan)
        if name == "dx":
            # Rows that do not count are not read; torch's are NaN where a logit is.
            rows = torch.ones_like(nan) & (self.kept | self.wrong | self.seen)[:, None]
            nan = (nan | self.wrong[:, None]) & rows
            nan = torch.where(self.undefined[:, None], found.isnan(), nan)
        assert torch.equal(found.isnan(), nan), f"NaN in {name}:\n{found}\nagainst\n{theirs}"
        # What overflows the dtype of ours need not overflow that of the truth.
        finite = theirs.isfinite() & ~nan & (theirs.to(ours.dtype).isfinite())
        infinite = theirs.isinf() & ~nan
        assert torch.equal(found[infinite], theirs[infinite]), f"infinities in {name}"
        rounding = torch.finfo(ours.dtype)
        allowed = self.allowed[name] + rounding.eps * truth.abs() + rounding.tiny
        bad = finite & ~((found - truth).abs() <= allowed) & ~nan
        assert not bad.any(), (
            f"{name}: {((found - truth).abs() / allowed)[bad].max():.3g} times what is allowed at {bad.nonzero()[:4]}: "
            f"{found[bad][:4]} is not {truth[bad][:4]}, torch's {theirs[bad][:4]}"
        )


def wanted(
    x: torch.Tensor, target: torch.Tensor, reduction: str = "mean", *, dy=None, dlse=None, dz=None, weight=None,
    ignore_index: int = -100, label_smoothing: float = 0.0, softcap: float | None = None, scale: float = 1.0,
    lse_square_scale: float = 0.0,
) -> Wanted:  # fmt: skip
    """Of rows x [n, n_classes] by target [n]; dy, dlse and dz are the gradients of loss, lse and z-loss."""
    arithmetic = arithmetic_of(x)
    eps = torch.finfo(arithmetic).eps
    n_classes = x.shape[1]
    x, target = x.detach(), target.long()
    how = {"reduction": reduction, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    how["lse_square_scale"] = lse_square_scale
    weight = None if weight is None else weight.to(arithmetic)

    def run(z, weight, **options):
        z = z.detach().requires_grad_()
        loss, lse, z_loss = reference.cross_entropy(z, target, weight, arithmetic=z.dtype, **how, **options)
        pairs = [(loss, torch.ones_like(loss) if dy is None else dy), (lse, dlse), (z_loss, dz)]
        outputs, gradients = zip(
            *[(o, g.to(o.dtype)) for o, g in pairs if g is not None and o.requires_grad], strict=True
        )
        (dx,) = torch.autograd.grad(outputs, z, gradients)
        return {"loss": loss.detach(), "lse": lse.detach(), "z": z_loss.detach(), "dx": dx}

    theirs = run(x.to(arithmetic), weight, softcap=softcap, scale=scale)
    # A product is rounded, ours and torch's alike: the truth is that of the rounded one.
    z = (x.to(arithmetic) * scale).double()
    slope = torch.full_like(z, scale)
    if softcap is not None:
        slope = scale / torch.cosh(z / softcap).square()  # 1 - tanh ** 2 less its cancellation
        slope = torch.where(z.isinf(), 0.0, slope)
        z = softcap * torch.tanh(z / softcap)
    truth = run(z, None if weight is None else weight.double())
    gradient_of_z = truth["dx"]
    truth["dx"] = torch.where(gradient_of_z == 0, 0.0, gradient_of_z * slope)  # an ignored row's slope may be NaN

    counts = target != ignore_index
    wrong = counts & ((target < 0) | (target >= n_classes))
    kept = counts & ~wrong
    t = torch.where(kept, target, 0)
    weights = torch.ones(n_classes, dtype=torch.float64, device=x.device) if weight is None else weight.double()
    w = weights[t].abs()
    log_p, p, lse = torch.log_softmax(z, -1), torch.softmax(z, -1), truth["lse"]
    share = label_smoothing / n_classes
    heights = torch.where(z.isfinite(), z, 0.0).abs().amax(-1)
    moved = 8 * eps * heights if softcap is not None else torch.zeros_like(heights)
    per_weight = (1 - label_smoothing) * w + share * weights.abs().sum()
    size = (1 - label_smoothing) * w * (log_p.gather(-1, t[:, None])[:, 0].abs() + 1)
    size = size + share * (weights.abs() * (log_p.abs() + 1)).sum(-1)
    z_size = 3 * abs(lse_square_scale) * (lse.square() + lse.abs())
    of_z = ROUNDINGS * eps * z_size + moved * 2 * abs(lse_square_scale) * lse.abs()
    of_loss = ROUNDINGS * eps * size + moved * per_weight
    of_loss, of_z = (torch.where(kept, each, 0.0).nan_to_num(0.0, 0.0, 0.0) for each in (of_loss + of_z, of_z))
    of_lse = (ROUNDINGS * eps * (1 + heights) + moved).nan_to_num()
    if reduction != "none":
        of_loss, of_z = of_loss.sum(), of_z.sum()
    g = torch.ones_like(heights)
    g_z = g.clone()
    if reduction == "mean":
        total, number = torch.where(kept, w, 0.0).sum() if weight is not None else counts.sum(), counts.sum()
        of_loss, of_z = of_loss / min(total, number), of_z / number
        g, g_z = g / total, g_z / number
    g, g_z = g * (1.0 if dy is None else dy.double().abs()), g_z * (1.0 if dy is None else dy.double().abs())
    g_z = g_z + (0.0 if dz is None else dz.double().abs() / (counts.sum() if reduction == "mean" else 1))
    a = g * per_weight + 2 * abs(lse_square_scale) * lse.abs() * g_z
    a = torch.where(kept, a, 0.0) + (0.0 if dlse is None else dlse.double().abs())
    terms = p * a[:, None] + torch.where(kept, g, 0.0)[:, None] * share * weights.abs()
    terms = terms.scatter_add(-1, t[:, None], torch.where(kept, g * w, 0.0)[:, None])
    terms = terms.amax(-1, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
    of_truth = 4 * torch.finfo(torch.float64).eps * heights[:, None]  # logsumexp's gradient is exp(z - lse)
    of_dx = (ROUNDINGS * eps + 2 * moved[:, None] + of_truth) * terms * (slope.abs() + 8 * eps * abs(scale))
    allowed = {"loss": of_loss, "lse": of_lse, "z": of_z, "dx": of_dx}
    for name in allowed:  # and torch's own error
        error = (theirs[name].double() - truth[name]).abs()
        error = torch.where(error.isfinite(), error, 0.0)
        allowed[name] = allowed[name].nan_to_num(0.0, 0.0, 0.0) + (
            error.amax(-1, keepdim=True) if name == "dx" else error
        )
    undefined = ~counts & ~lse.isfinite() & (dlse != 0) if dlse is not None else torch.zeros_like(counts)
    return Wanted(truth, theirs, allowed, kept, wrong, dlse is not None, undefined)
