"""Logits whose memory their gradient takes: autograd is told of the write, and each memory is given away once.

A tensor's version counts the writes into all views of its memory. This file knows its own writes, with the place of
each, so losses of other rows or columns of one memory do not disturb each other. Any other write to the memory counts
as one over the gradient.
"""

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fused_softmax.core.calls import bump_version


class _Place(NamedTuple):
    """Rows of `width` bytes, `step` apart, in the memory from `start` to `stop`."""

    start: int
    stop: int
    step: int
    width: int

    def meets(self, other: "_Place") -> bool:
        if self.stop <= other.start or other.stop <= self.start:
            return False
        if self.step != other.step:
            return True
        offset = (other.start - self.start) % self.step
        return offset < self.width or offset + other.width > self.step


class _Memory:
    """The memory of a tensor and its views: how many versions of it are ours, and what was given away at which one."""

    def __init__(self) -> None:
        self.ours = 0
        self.given: list[tuple[int, _Place]] = []


_memories: Any = WeakTensorKeyDictionary()


class Claim:
    """The claim that a memory of logits belongs to one loss. It holds the memory until it is dropped."""

    def __init__(self, base: Tensor, memory: _Memory, place: _Place) -> None:
        self._base, self._memory, self._place = base.detach(), memory, place
        self._others = base._version - memory.ours

    def take(self) -> None:
        """Take the memory. Nobody else gets it until somebody has written to it."""
        self._memory.given.append((self._others, self._place))

    def bump(self) -> None:
        """Tell autograd that we write."""
        self._memory.ours += 1
        bump_version((self._base,))

    def check(self) -> None:
        """RuntimeError where somebody else has written to the memory since."""
        if self._base._version - self._memory.ours != self._others:
            raise RuntimeError(
                "cross_entropy: inplace_backward left the gradient in the logits' memory, and that was written to "
                "since; change the logits before the loss or after its backward pass, or leave inplace_backward out"
            )


def check_claim(ctx: Any) -> None:
    """`Claim.check` of the logits that a Function has overwritten, if it has; nothing holds them from then on."""
    claim, ctx.claim = ctx.claim, None
    if claim is not None:
        claim.check()


def check_overwritten(name: str, input: Tensor) -> None:
    """RuntimeError where autograd would refuse a write in place: a leaf that requires grad, or a view of one."""
    base = input._base
    if input.is_leaf or (base is not None and base.is_leaf and base.requires_grad):
        raise RuntimeError(f"{name}: inplace_backward overwrites the logits, and these are a leaf that requires grad")


def begin_overwriting(input: Tensor) -> Claim:
    """Tell autograd of the write that a call is about to do. RuntimeError where autograd would refuse one.

    Marked as dirty, logits would have to be returned, which autograd refuses for a view. A view gets another node when
    its version changes. If that happens before the call, this node is the one that the loss leads to: its gradient can
    be asked for, and hooks may follow. The hooks of the old node are moved to it, and so is retain_grad.
    """
    check_overwritten("cross_entropy", input)
    hooks = input._backward_hooks
    claim = claim_of(input)
    claim.bump()
    if input._base is not None:
        node = input.grad_fn  # made here; autograd refuses a view that is one of several results
        if hooks and node is not None:
            input.register_hook(partial(_by_hooks, hooks))
    claim.take()
    return claim


def claim_of(input: Tensor) -> Claim:
    """The claim of one loss to the memory of logits, or RuntimeError where another has taken it."""
    base = input if input._base is None else input._base
    memory = _memories.get(base)
    if memory is None:
        memory = _memories[base] = _Memory()
    place, now = _place_of(input), base._version - memory.ours
    if any(version == now and place.meets(given) for version, given in memory.given):
        raise RuntimeError(
            "cross_entropy: inplace_backward has given the memory of these logits to the gradient of another loss, "
            "and they are gone; give each loss a copy of them, or leave inplace_backward out"
        )
    return Claim(base, memory, place)


def _place_of(x: Tensor) -> _Place:
    """The place of logits [n_classes], [n, n_classes] or with more dims, whose rows are contiguous."""
    size, class_dim = x.element_size(), min(1, x.ndim - 1)
    if not x.numel():
        return _Place(0, 0, 1, 0)
    extent = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    start, of_rows = x.data_ptr(), [i for i in range(x.ndim) if i != class_dim and x.shape[i] > 1]
    step = min((x.stride(i) for i in of_rows), default=extent)
    return _Place(start, start + extent * size, step * size, x.shape[class_dim] * size)


def _by_hooks(hooks: dict, gradient: Tensor) -> Tensor:
    for hook in list(hooks.values()):
        found = hook(gradient)
        gradient = gradient if found is None else found
    return gradient


class Overwritten:
    """Logits that are read and written over in the backward pass, once; autograd does not keep them."""

    def __init__(self, x: Tensor) -> None:
        self._x: Tensor | None = x.detach()
        self._claim: Claim | None = claim_of(x)
        self._claim.take()

    def memory(self) -> Tensor:
        """The logits. From now on their memory is the gradient's. RuntimeError if they are gone or were changed."""
        x, claim = self._x, self._claim
        if x is None or claim is None:
            raise RuntimeError("cross_entropy: inplace_backward has one backward")
        claim.check()
        claim.bump()  # autograd then refuses whoever reads them
        self._x = self._claim = None
        return x.data
