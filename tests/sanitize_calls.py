"""Calls that launch every other family of kernels, compared with torch's float64: `sanitize.py` makes them too."""

import torch
import torch.nn.functional as F
from torch import Tensor

import fused_softmax
from fused_softmax import (
    attention,
    cross_entropy,
    divergence,
    linear_cross_entropy,
    log_prob,
    log_softmax,
    logsumexp,
    route,
    sample,
    segment_logsumexp,
    segment_softmax,
    softmax,
    speculative_sample,
)
from fused_softmax.ops.routing import reference as reference_routing
from fused_softmax.ops.sampling import reference, verification

ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of the greatest element


def targets(x, n_classes=None):
    return torch.arange(len(x), device=x.device) * 7 % (n_classes or x.shape[1])


def hidden(x):
    """A bool mask that leaves most of what lies along any dim visible."""
    return torch.arange(x[0].numel(), device=x.device).view(x.shape[1:]) % 9 != 3


def masked(x):
    return x.masked_fill(~hidden(x), -torch.inf)


def causal(x):
    return x.masked_fill(torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1), -torch.inf)


def loss(of):
    """A mean with class weights and smoothing, whose gradient is written with it."""
    return lambda x, w: of(x, targets(x), w.abs() + 0.1, label_smoothing=0.1)


def gathered(x):
    return torch.log_softmax(x, -1).gather(-1, targets(x).unsqueeze(-1)).squeeze(-1)


def lists_of(x, n):
    """The first n columns of each row."""
    return torch.arange(n, device=x.device).repeat(len(x)), torch.arange(len(x) + 1, device=x.device) * n


def diverged(x):
    log_q, log_t = (torch.log_softmax(each, -1) for each in (x, x.detach().flip(0)))
    return F.kl_div(log_q, log_t, reduction="batchmean", log_target=True)


def routed(of):
    """Weights in the places of their experts, beside both losses."""

    def call(x):
        out = of(x, 4, dense=True, return_aux_loss=True, return_z_loss=True)
        return out.dense + out.aux_loss + out.z_loss

    return call


def attended(of, name):
    return lambda q, k, v, bias: of(q, k, v, **{name: bias})


# What we compute, what torch does, and the shapes of the inputs, each of which has a gradient.
GRADIENTS = {
    "short rows": (softmax, torch.softmax, [(19, 376)]),
    "short odd rows": (log_softmax, torch.log_softmax, [(19, 49)]),
    "rows": (softmax, torch.softmax, [(5, 8120)]),
    "split rows": (log_softmax, torch.log_softmax, [(2, 40003)]),
    "logsumexp of short rows": (logsumexp, torch.logsumexp, [(19, 77)]),
    "logsumexp of split rows": (logsumexp, torch.logsumexp, [(2, 40003)]),
    "a strided dim": (lambda x, _: softmax(x, 1), lambda x, _: torch.softmax(x, 1), [(3, 21, 70)]),
    "logsumexp of a strided dim": (lambda x, _: logsumexp(x, 1), lambda x, _: torch.logsumexp(x, 1), [(3, 150, 70)]),
    "a long strided dim": (lambda x, _: softmax(x, 0), lambda x, _: torch.softmax(x, 0), [(3000, 33)]),
    "a masked strided dim": (
        lambda x, _: softmax(x, 1, mask=hidden(x)), lambda x, _: torch.softmax(masked(x), 1), [(3, 40, 70)]
    ),
    "masked rows": (
        lambda x, d: softmax(x, d, mask=hidden(x)), lambda x, d: torch.softmax(masked(x), d), [(3, 9, 500)]
    ),
    "causal rows": (
        lambda x, d: softmax(x, d, is_causal=True), lambda x, d: torch.softmax(causal(x), d), [(2, 70, 70)]
    ),
}  # fmt: skip
LOSSES = {
    "losses of few classes": (loss(cross_entropy), loss(F.cross_entropy), [(2100, 33), (33,)]),
    "losses in one launch": (loss(cross_entropy), loss(F.cross_entropy), [(19, 1030), (1030,)]),
    "losses of split rows": (loss(cross_entropy), loss(F.cross_entropy), [(3, 40003), (40003,)]),
    "log-probabilities": (lambda x: log_prob(x, targets(x)), gathered, [(19, 1030)]),
    "log-probabilities over lists": (
        lambda x: log_prob(x, targets(x), kept=lists_of(x, 512)), lambda x: gathered(x[:, :512]), [(19, 1030)],
    ),
    "log-probabilities of long rows": (lambda x: log_prob(x, targets(x)), gathered, [(3, 40008)]),
    "divergences": (lambda x: divergence(x, x.detach().flip(0)), diverged, [(19, 1030)]),
    "divergences of long rows": (lambda x: divergence(x, x.detach().flip(0)), diverged, [(3, 40008)]),
    "divergences of two passes": (
        lambda x: divergence(x, x.detach().flip(0), kind="tvd"),
        lambda x: (x.softmax(-1) - x.detach().flip(0).softmax(-1)).abs().sum(-1).mean() / 2, [(3, 40008)],
    ),
    "losses of probabilities": (
        lambda x, y: cross_entropy(x, y.softmax(-1)), lambda x, y: F.cross_entropy(x, y.softmax(-1)),
        [(19, 1030), (19, 1030)],
    ),
    "a linear layer's loss of probabilities": (
        lambda x, w, y: linear_cross_entropy(x, w, y.softmax(-1), chunk_size=32),
        lambda x, w, y: F.cross_entropy(x @ w.T, y.softmax(-1)), [(70, 64), (300, 64), (70, 300)],
    ),
    "a linear layer's loss": (
        lambda x, w: linear_cross_entropy(x, w, targets(x, len(w))),
        lambda x, w: F.cross_entropy(x @ w.T, targets(x, len(w))), [(70, 64), (300, 64)],
    ),
    "attention": (
        attended(attention, "bias"), attended(F.scaled_dot_product_attention, "attn_mask"),
        [(2, 2, 130, 64), (2, 2, 70, 64), (2, 2, 70, 64), (2, 130, 70)],
    ),
    "a router of few rows": (routed(route), routed(reference_routing.route), [(40, 300)]),
    "a router of many rows": (routed(route), routed(reference_routing.route), [(1200, 64)]),
    "attention of short heads": (
        attended(attention, "bias"), attended(F.scaled_dot_product_attention, "attn_mask"),
        [(5, 2, 49, 32), (5, 2, 49, 32), (5, 2, 49, 32), (2, 49, 49)],
    ),
    "attention of one query": (
        lambda q, k, v: attention(q, k, v), F.scaled_dot_product_attention,
        [(2, 2, 1, 64), (2, 2, 1500, 64), (2, 2, 1500, 64)],
    ),
}  # fmt: skip
SIZES = [3, 0, 1, 70, 2, 2500, 900, 1, 523]  # of 4000 positions, whose hubs lie in several blocks
SEGMENTS = {
    "segments": (lambda x: segment_softmax(x, cuts(x)), lambda x: by_segments(torch.softmax, x), [(4000, 8)]),
    "segments of single numbers": (
        lambda x: segment_softmax(x, cuts(x)), lambda x: by_segments(torch.softmax, x), [(4000, 1)]
    ),
    "logsumexp of segments": (
        lambda x: segment_logsumexp(x, cuts(x))[[0, 3, 5]],
        lambda x: torch.stack([torch.logsumexp(x.split(SIZES)[i], 0) for i in (0, 3, 5)]), [(4000, 3)],
    ),
    "segments by an index": (
        lambda x: segment_softmax(x, index=torch.arange(len(x), device=x.device) % 9, n_segments=9),
        lambda x: torch.softmax(x.view(-1, 9, 4), 0).view(-1, 4), [(3600, 4)],
    ),
}  # fmt: skip
IDS = torch.arange(3 * 1500).view(3, 1500) % 4100
DRAWS = {
    "a draw": {},
    "a draw of top-k": {"top_k": 20},
    "a draw of top-p": {"top_p": 0.9},
    "a draw of many by top-p": {"top_p": 0.9, "temperature": 9.0},
    "a draw of min-p": {"min_p": 0.05},
    "a draw with penalties": {"token_ids": IDS, "repetition": 1.3, "frequency": 0.5},
    "a draw and the greatest logits": {"top_k": 20, "return_logprobs": "raw", "top_logprobs": 5, "return_kept": True},
}
DRAFTS = torch.tensor([[5, 70, 4100, 9], [7, 7, 7, -1]])
PARENTS = torch.tensor([[-1, -1, 0, 1]])
SPECULATIONS = {
    "a chain of drafts": {"temperature": 0.8},
    "a chain of drafts by top-p": {"top_p": 0.9, "return_logprobs": "raw"},
    "a block of drafts": {"verify": "block", "min_p": 0.05},
    "a tree of drafts": {"verify": "tree", "parents": PARENTS, "top_k": 20, "return_logprobs": "processed"},
    "drafts without a distribution": {"told": False, "verify": "tree", "parents": PARENTS},
}
MASKS = {"a mask by top-p": 0.9, "a mask by min-p": 0.05, "a mask by top-k": 20}
NAMES = (*GRADIENTS, *LOSSES, *SEGMENTS, *DRAWS, *SPECULATIONS, *MASKS)


def cuts(x):
    return torch.tensor([0, *torch.tensor(SIZES).cumsum(0).tolist()], device=x.device)


def by_segments(function, x):
    return torch.cat([function(each, 0) for each in x.split(SIZES)])


def random(shape, dtype, seed) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


def call(name: str, dtype: torch.dtype, device: str) -> None:
    """The call, twice: the programs of a row exchange other tags the second time. AssertionError where it is wrong."""
    for _ in range(2):
        if name in SPECULATIONS:
            speculate(name, dtype, device)
        elif name in MASKS:
            mask(name, dtype, device)
        else:
            draw(name, dtype, device) if name in DRAWS else differentiate(name, dtype, device)


def differentiate(name, dtype, device):
    ours, torchs, shapes = {**GRADIENTS, **LOSSES, **SEGMENTS}[name]
    given = [random(shape, dtype, seed) for seed, shape in enumerate(shapes)]
    # A class weight that has a gradient takes torch's operations.
    kept = [i for i, shape in enumerate(shapes) if len(shape) > 1]
    dim = (-1,) if name in GRADIENTS else ()
    found = derived(ours, [each.to(device) for each in given], kept, dim)
    wanted = derived(torchs, [each.double() for each in given], kept, dim)
    for one, truth in zip(found, wanted, strict=True):
        error, size = (one.cpu().double() - truth).abs().max(), truth.abs().max()
        assert error <= ALLOWED[dtype] * (size + 1e-3), f"{name}: {error} off, of {size}"


def derived(function, tensors, kept, dim):
    for i in kept:
        tensors[i] = tensors[i].detach().requires_grad_()
    out = function(*tensors, *dim)
    weight = random(out.shape, torch.float32, 9).to(out.device, out.dtype)
    return out.detach(), *torch.autograd.grad(out, [tensors[i] for i in kept], weight)


def draw(name, dtype, device):
    x = random((3, 4200), dtype, 1)
    seed, position = torch.tensor([3, 4, 5]), torch.tensor([0, 2**33, 7])
    there = {name: each.to(device) if isinstance(each, Tensor) else each for name, each in DRAWS[name].items()}
    found = sample(x.to(device), seed=seed.to(device), position=position.to(device), **there)
    wanted = reference.sample(x, seed, position, **DRAWS[name])
    assert torch.equal(found.tokens.cpu(), wanted.tokens), name


def speculate(name, dtype, device):
    target, draft = random((2, 5, 4200), dtype, 1), random((2, 4, 4200), dtype, 2)
    named = dict(SPECULATIONS[name])
    draft = draft if named.pop("told", True) else None
    seed, position = torch.tensor([3, 4]), torch.tensor([0, 2**33])
    parents = named.pop("parents", None)
    parents = None if parents is None else parents.expand(2, -1)
    wanted = verification.speculative_sample(
        target, DRAFTS, draft, None, None, parents, None, None, seed, position, **named
    )  # fmt: skip
    target, tokens, draft, parents, seed, position = (
        None if each is None else each.to(device) for each in (target, DRAFTS, draft, parents, seed, position)
    )
    found = speculative_sample(target, tokens, draft, parents=parents, seed=seed, position=position, **named)
    assert torch.equal(found.tokens.cpu(), wanted.tokens), name


def mask(name, dtype, device):
    x, filter = random((3, 4200), dtype, 1), name.removeprefix("a mask by ").replace("-", "_")
    found = getattr(fused_softmax, f"{filter}_mask_logits")(x.to(device), MASKS[name])
    assert torch.equal(found.cpu(), reference.mask_logits(x, **{filter: MASKS[name]})), name
