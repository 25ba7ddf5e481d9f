"""The operations that can be measured. Each is one entry of OPERATIONS; sweeps name them."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor

from fused_softmax import cross_entropy, linear_cross_entropy, logsumexp, softmax
from fused_softmax.bench import attention, ceiling, providers, sampling
from fused_softmax.bench.attention_kinds import KINDS, flops
from fused_softmax.bench.cases import Case
from fused_softmax.bench.providers import COMPILED, NEEDS_GPU, OWN, TORCH, Call, Provider, compiled
from fused_softmax.ops import softmax_calls
from fused_softmax.plan import Device
from fused_softmax.register.table import OPERATORS

Inputs = tuple[Tensor, ...]
SAMPLE = Case((61, 781))  # the tutorial's irregular 1823 x 781 with fewer rows, for seconds of interpreting
SCALE = 0.125  # of causal scores; a power of two, so that scaling rounds nothing


@dataclass(frozen=True)
class Operation:
    """Everything the bench knows about an operation.

    inputs: the tensors of one call, on the generator's device. The first has the case's dtype, and its shape or first
        dims.
    own: this package's call.
    formula: the same in torch's functions. On float64 tensors it is the truth; compiled, it is the provider
        torch.compile.
    eager: torch's own call, if it is not the formula. peers: the other providers.
    held_bytes: bytes of the inputs and the result. unread_bytes: the part that need not move; the rest is the floor.
    ceilings: the plain kernels that the figures are compared with, called with the same inputs.
    parameters: facts that the case does not give, for the record.
    planned: how many inputs the planner counts, if `plan_rows` alone decides the launch. 0 records no plan.
    whole: a row of the result depends on more than its row of inputs, so the whole result is compared at once.
    checking_bytes: bytes of the comparison beside inputs and results, if the case's elements do not give them.
    own_needs_gpu: our call has no CPU path.
    of_torchs: how many times torch's error is accepted.
    who: of our call, who computes each pass on a device, for the record; None where the kernels do.
    draws: the filters of a sampler, whose tokens no formula gives; its formula is a sampler of torch's operations.
    sample: the case that is checked under Triton's interpreter.
    """

    inputs: Callable[[Case, torch.Generator], Inputs]
    own: Provider
    formula: Provider
    held_bytes: Callable[[Case], int]
    ceilings: Callable[[Case], list[ceiling.Ceiling]]
    eager: Provider | None = None
    peers: Mapping[str, Provider] = field(default_factory=dict)
    unread_bytes: Callable[[Case], int] = lambda case: 0
    parameters: Callable[[Case], dict[str, Any]] = lambda case: {}
    planned: int = 0
    whole: bool = False
    checking_bytes: Callable[[Case], int] | None = None
    own_needs_gpu: bool = False
    of_torchs: float = 1.0
    who: Callable[[Case, Device], dict[str, str]] | None = None
    draws: sampling.Filters | None = None
    sample: Case = SAMPLE

    @cached_property
    def providers(self) -> dict[str, Provider]:
        return {OWN: self.own, TORCH: self.baseline, COMPILED: compiled(self.formula), **self.peers}

    @property
    def baseline(self) -> Provider:
        """torch's own call. Its errors in the case's dtype bound the others'."""
        return self.eager or self.formula

    def floor_bytes(self, case: Case) -> int:
        """The bytes that every call must move; the same for every provider."""
        return self.held_bytes(case) - self.unread_bytes(case)

    def needs_gpu(self, name: str) -> bool:
        return name in NEEDS_GPU or (name == OWN and self.own_needs_gpu)


def operation_of(case: Case) -> Operation:
    return OPERATIONS[case.operation]


def provider_names(names: Iterable[str] = ()) -> list[str]:
    """The providers of the named operations, or of all operations."""
    return list(dict.fromkeys(who for name in names or OPERATIONS for who in OPERATIONS[name].providers))


def logits(case: Case, generator: torch.Generator) -> Tensor:
    """Peaked logits: normal with deviation 2, and one value in every row far above the rest."""
    device, dtype = generator.device, getattr(torch, case.dtype)
    one_a_row = [1 if axis == case.dim % len(case.shape) else size for axis, size in enumerate(case.shape)]
    x = torch.randn(case.shape, device=device, dtype=dtype, generator=generator).mul_(2)
    column = torch.randint(case.n_cols, one_a_row, device=device, generator=generator)
    height = torch.rand(one_a_row, device=device, generator=generator) * 12 + 4
    return x.scatter_(case.dim, column, height.to(dtype))


def along(function: Call) -> Provider:
    def provide(case: Case) -> Call:
        dim = case.dim
        return lambda x: function(x, dim=dim)

    return provide


def alone(case: Case, generator: torch.Generator) -> Inputs:
    return (logits(case, generator),)


def output_and_gradient(function: Call, mean: float) -> Callable[[Case, torch.Generator], Inputs]:
    """(dy, y): normal values around `mean`, and `function` of peaked logits."""

    def inputs(case: Case, generator: torch.Generator) -> Inputs:
        y = function(logits(case, generator), dim=-1)
        return torch.randn(y.shape, device=y.device, dtype=y.dtype, generator=generator).add_(mean), y

    return inputs


def own_backward(log: bool) -> Provider:
    return lambda case: lambda dy, y: softmax_calls.backward(dy, y, -1, y.dtype, log, False, 1.0)


def torch_backward(function: Call) -> Provider:
    return lambda case: lambda dy, y: function(dy, y, -1, y.dtype)


def softmax_gradient(case: Case) -> Call:
    def call(dy, y):
        dy, y, dtype = dy.to(widest(y)), y.to(widest(y)), y.dtype
        return (y * (dy - (y * dy).sum(-1, keepdim=True))).to(dtype)

    return call


def log_softmax_gradient(case: Case) -> Call:
    def call(dy, y):
        dy, y, dtype = dy.to(widest(y)), y.to(widest(y)), y.dtype
        return (dy - y.exp() * dy.sum(-1, keepdim=True)).to(dtype)

    return call


def widest(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic: at least float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def scores(case: Case, generator: torch.Generator) -> Inputs:
    """Logits that are peaked after scaling."""
    return (logits(case, generator).div_(SCALE),)


def causal(case: Case) -> Call:
    """Causal softmax with a mask made from indices, which torch.compile can fuse."""
    n_queries, n_keys = case.shape[-2:]

    def call(x):
        last = torch.arange(n_keys - n_queries, n_keys, device=x.device)[:, None]
        hidden = torch.arange(n_keys, device=x.device) > last
        return torch.softmax((x * SCALE).masked_fill(hidden, -math.inf), -1)

    return call


def causal_eager(case: Case) -> Call:
    """Causal softmax with a mask made beforehand."""
    n_queries, n_keys = case.shape[-2:]

    def call(x):
        return torch.softmax((x * SCALE).masked_fill(above_diagonal(n_queries, n_keys, x.device), -math.inf), -1)

    return call


@cache
def above_diagonal(n_queries: int, n_keys: int, device: torch.device) -> Tensor:
    return torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).triu(n_keys - n_queries + 1)


def above_diagonal_elements(case: Case) -> int:
    """How many elements causality hides: no key from the last query, one more from each query before it."""
    n_queries, n_keys = case.shape[-2:]
    return case.elements // (n_queries * n_keys) * sum(min(i, n_keys) for i in range(n_queries))


def mask_shape(case: Case) -> list[int]:
    """One mask for all heads of a sequence: [batch, 1, queries, keys]."""
    return [case.shape[0], 1, *case.shape[2:]]


def bias_shape(case: Case) -> list[int]:
    """One bias for each head, shared by all sequences: [1, heads, queries, keys]."""
    return [1, *case.shape[1:]]


def with_targets(case: Case, generator: torch.Generator) -> Inputs:
    """Logits and one class for every row; no row is ignored."""
    device = generator.device
    return logits(case, generator), torch.randint(case.n_cols, (case.n_rows,), device=device, generator=generator)


def losses(case: Case) -> Call:
    return lambda x, target: x.logsumexp(-1) - x.gather(-1, target.unsqueeze(-1)).squeeze(-1)


def loss_gradient(function: Call) -> Provider:
    """The gradient of the mean loss, including the forward pass."""

    def call(x, target):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(function(x, target), x)[0]

    return lambda case: call


def loss_gradient_formula(case: Case) -> Call:
    def call(x, target):
        dx = torch.softmax(x, -1, dtype=widest(x))
        one = torch.arange(case.n_cols, device=x.device) == target.unsqueeze(-1)
        return ((dx - one.to(dx.dtype)) / case.n_rows).to(x.dtype)

    return call


def layer(case: Case, generator: torch.Generator) -> Inputs:
    """Tokens [tokens, hidden] and weights [classes, hidden], scaled for logits of deviation 2; a class a token."""
    n, n_features, n_classes = case.shape
    options: dict[str, Any] = {"device": generator.device, "generator": generator}
    scale = math.sqrt(2) * n_features**-0.25
    x, w = (torch.randn(rows, n_features, dtype=getattr(torch, case.dtype), **options) for rows in (n, n_classes))
    return x.mul_(scale), w.mul_(scale), torch.randint(n_classes, (n,), **options)


def layer_gradient(function: Call) -> Provider:
    """The gradients of a linear layer's mean loss as one result: the tokens' is summed into the weights' first row.

    An error in either gradient shows in it, and nothing is copied.
    """

    def call(x, w, target):
        with torch.enable_grad():
            x, w = (each.detach().requires_grad_() for each in (x, w))
            dx, dw = torch.autograd.grad(function(x, w, target), (x, w))
        return with_sum(dx, dw)

    return lambda case: call


def with_sum(dx: Tensor, dw: Tensor) -> Tensor:
    dw[0] += dx.sum(0, dtype=widest(dx)) * dx.shape[0] ** -0.5  # as large as the other rows
    return dw


def layer_gradient_formula(case: Case) -> Call:
    def call(x, w, target):
        dlogits = loss_gradient_formula(Case((case.shape[0], case.n_cols)))(x @ w.t(), target)
        return with_sum(dlogits @ w, dlogits.t() @ x)

    return call


def linear_then_loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, w), target)


def layer_bytes(case: Case) -> int:
    """Bytes of the tokens, weights, targets and the weights' gradient."""
    n, n_features, n_classes = case.shape
    return (n + 2 * n_classes) * n_features * case.itemsize + 8 * n


def layer_checking_bytes(case: Case) -> int:
    """Bytes in float64 of the logits, the formula's intermediates and the other tensors."""
    n, n_features, n_classes = case.shape
    return 8 * (5 * n * n_classes + 4 * (n + n_classes) * n_features)


def with_mask(case: Case, generator: torch.Generator) -> Inputs:
    """Logits and a mask that keeps three keys in four, always the first one, so that no row is empty."""
    mask = torch.rand(mask_shape(case), device=generator.device, generator=generator) > 0.25
    mask[..., 0] = True
    return logits(case, generator), mask


def with_bias(case: Case, generator: torch.Generator) -> Inputs:
    dtype = getattr(torch, case.dtype)
    bias = torch.randn(bias_shape(case), device=generator.device, dtype=dtype, generator=generator)
    return logits(case, generator), bias


def ceiling_of_attention(name: str) -> Callable[[Case], list[ceiling.Ceiling]]:
    """A product of matrices; of a single query a kernel that reads as much."""

    def ceilings(case: Case) -> list[ceiling.Ceiling]:
        done = flops(case)
        if done is None:
            return ceiling.reads()
        return [ceiling.Square(attention.bytes_of(KINDS[name])(case), done)]

    return ceilings


_ENTRIES = {
    "softmax": Operation(
        inputs=alone,
        own=lambda case: softmax,
        formula=along(torch.softmax),
        peers={**providers.CLASSIC, "liger": providers.liger, "quack": providers.quack},
        held_bytes=lambda case: 2 * case.tensor_bytes,
        ceilings=lambda case: ceiling.copies(),
        planned=1,
    ),
    "softmax_dim": Operation(
        inputs=alone,
        own=along(softmax),
        formula=along(torch.softmax),
        held_bytes=lambda case: 2 * case.tensor_bytes,
        ceilings=lambda case: ceiling.copies(),
        sample=Case((3, 131, 37), dim=1),
    ),
    "softmax_float32": Operation(
        inputs=alone,
        own=lambda case: lambda x: softmax(x, dtype=torch.float32),
        formula=lambda case: lambda x: torch.softmax(x, dim=-1, dtype=widest(x)),
        held_bytes=lambda case: case.tensor_bytes + 4 * case.elements,
        ceilings=lambda case: ceiling.copies(torch.float32),
        parameters=lambda case: {"result": "float32"},
        sample=Case((61, 781), "float16"),
    ),
    "softmax_causal": Operation(
        inputs=scores,
        own=lambda case: lambda x: softmax(x, scale=SCALE, is_causal=True),
        formula=causal,
        eager=causal_eager,
        held_bytes=lambda case: 2 * case.tensor_bytes,
        unread_bytes=lambda case: above_diagonal_elements(case) * case.itemsize,
        ceilings=lambda case: ceiling.copies(share=1 - above_diagonal_elements(case) / case.elements),
        parameters=lambda case: {"scale": SCALE},
        sample=Case((1, 3, 61, 131)),
    ),
    "softmax_masked": Operation(
        inputs=with_mask,
        own=lambda case: lambda x, mask: softmax(x, mask=mask),
        formula=lambda case: lambda x, mask: torch.softmax(x.masked_fill(~mask, -math.inf), -1),
        held_bytes=lambda case: 2 * case.tensor_bytes + math.prod(mask_shape(case)),
        ceilings=lambda case: ceiling.copies(),
        parameters=lambda case: {"mask": mask_shape(case)},
        sample=Case((2, 3, 17, 131)),
    ),
    "softmax_biased": Operation(
        inputs=with_bias,
        own=lambda case: lambda x, bias: softmax(x, mask=bias),
        formula=lambda case: lambda x, bias: torch.softmax(x + bias, -1),
        held_bytes=lambda case: 2 * case.tensor_bytes + math.prod(bias_shape(case)) * case.itemsize,
        ceilings=lambda case: ceiling.copies(),
        parameters=lambda case: {"bias": bias_shape(case)},
        sample=Case((2, 3, 17, 131)),
    ),
    "softmax_backward": Operation(
        inputs=output_and_gradient(torch.softmax, mean=1),  # a lost part of sum y * dy then shows in every row
        own=own_backward(log=False),
        formula=softmax_gradient,
        eager=torch_backward(torch._softmax_backward_data),
        peers={"liger": providers.liger_backward, "quack": providers.quack_backward},
        held_bytes=lambda case: 3 * case.tensor_bytes,
        ceilings=lambda case: ceiling.adds(),
        planned=2,
        own_needs_gpu=True,
    ),
    "log_softmax_backward": Operation(
        inputs=output_and_gradient(torch.log_softmax, mean=0),
        own=own_backward(log=True),
        formula=log_softmax_gradient,
        eager=torch_backward(torch._log_softmax_backward_data),
        held_bytes=lambda case: 3 * case.tensor_bytes,
        ceilings=lambda case: ceiling.adds(),
        planned=2,
        own_needs_gpu=True,
    ),
    "logsumexp": Operation(
        inputs=alone,
        own=along(logsumexp),
        formula=along(torch.logsumexp),
        held_bytes=lambda case: case.tensor_bytes + case.n_rows * case.itemsize,
        ceilings=lambda case: ceiling.reads(),
        sample=Case((3, 131, 37), dim=1),
    ),
    "cross_entropy": Operation(
        inputs=with_targets,
        own=lambda case: lambda x, target: cross_entropy(x, target, reduction="none"),
        formula=losses,
        eager=lambda case: lambda x, target: torch.nn.functional.cross_entropy(x, target, reduction="none"),
        held_bytes=lambda case: case.tensor_bytes + case.n_rows * (8 + case.itemsize),
        ceilings=lambda case: ceiling.reads(),
        parameters=lambda case: {"reduction": "none"},
    ),
    "cross_entropy_gradient": Operation(
        inputs=with_targets,
        own=loss_gradient(cross_entropy),
        formula=loss_gradient_formula,
        eager=loss_gradient(torch.nn.functional.cross_entropy),
        peers={"quack": providers.quack_cross_entropy_gradient},
        held_bytes=lambda case: 2 * case.tensor_bytes + 8 * case.n_rows,
        ceilings=lambda case: ceiling.copies(),
        parameters=lambda case: {"reduction": "mean"},
    ),
    "linear_cross_entropy": Operation(
        inputs=layer,
        own=layer_gradient(linear_cross_entropy),
        formula=layer_gradient_formula,
        eager=layer_gradient(linear_then_loss),
        peers={
            "torch chunked": providers.torch_chunked,
            "liger": providers.liger_linear_cross_entropy,
            "cce": providers.cut_cross_entropy,
            "in one chunk": lambda case: layer_gradient(partial(linear_cross_entropy, chunk_size=case.shape[0]))(case),
            "chunks of 1024": layer_gradient(partial(linear_cross_entropy, chunk_size=1024)),
            "chunks of 256": layer_gradient(partial(linear_cross_entropy, chunk_size=256)),
            "summed in place": layer_gradient(partial(linear_cross_entropy, accumulate="input")),
            "32 in place": layer_gradient(partial(linear_cross_entropy, chunk_size=32, accumulate="input")),
        },
        held_bytes=layer_bytes,
        ceilings=lambda case: ceiling.products(),
        parameters=lambda case: {"reduction": "mean"},
        whole=True,
        checking_bytes=layer_checking_bytes,
        sample=Case((61, 24, 781)),
    ),
}


_ENTRIES |= {
    name: Operation(
        inputs=sampling.inputs_of(filters),
        own=sampling.own(filters),
        formula=sampling.by_torch(filters),
        peers=sampling.peers(filters),
        held_bytes=sampling.bytes_of,
        ceilings=lambda case: ceiling.reads(),
        parameters=lambda case, filters=filters: {**filters.given, "deviation": filters.deviation},  # type: ignore[misc]
        draws=filters,
        sample=Case((3, 781)),
    )
    for name, filters in sampling.FILTERS.items()
}


# One query for each of four heads of keys, or as many rows as a tile of the interpreted kernels takes.
_SAMPLES = {"attention_decode": Case((2, 2, 70, 16)), "attention_sinks": Case((2, 8, 140, 16))}

_ENTRIES |= {
    name: Operation(
        inputs=attention.inputs_of(kind),
        own=attention.own(kind),
        formula=attention.formula(kind),
        eager=attention.by_torch(kind),
        peers=attention.peers(kind),
        held_bytes=attention.bytes_of(kind),
        ceilings=ceiling_of_attention(name),
        parameters=lambda case, kind=kind: kind.parameters,  # type: ignore[misc]
        whole=True,
        checking_bytes=attention.checking_bytes(kind),
        of_torchs=2.0,
        who=partial(attention.handed_over, kind),
        sample=_SAMPLES.get(name.removesuffix("_gradient"), Case((2, 2, 41, 16))),
    )
    for name, kind in KINDS.items()
}


def _as_registered(entries: Mapping[str, Operation]) -> dict[str, Operation]:
    """The entries in the order of the operators that they are of; each is named by one operator."""
    named = [name for operator in OPERATORS for name in operator.bench]
    if sorted(named) != sorted(entries):
        raise ValueError(f"operators name {sorted(named)} for the bench, and its entries are {sorted(entries)}")
    return {name: entries[name] for name in named}


OPERATIONS = _as_registered(_ENTRIES)
