"""Modules that mirror torch.nn's: the same constructor, repr and state, on these kernels."""

import torch
from torch import Tensor

from fused_softmax.ops.scores import MaskedRows
from fused_softmax.ops.softmax import log_softmax, softmax


class _Scored(torch.nn.Module):
    """What the modules below share: the arguments that torch's have not, and the call."""

    _function = staticmethod(softmax)
    dim: int | None

    def __init__(
        self,
        dim: int | None = None,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        masked_rows: MaskedRows = "nan",
    ) -> None:
        super().__init__(dim)
        self.scale, self.is_causal, self.masked_rows = scale, is_causal, masked_rows

    def forward(self, input: Tensor, *, mask: Tensor | None = None) -> Tensor:
        dim = self.dim
        if dim is None:  # the warning is for the line that calls the module, past two functions of Module
            dim = torch.nn.functional._get_softmax_dim(self._function.__name__, input.dim(), 5)  # type: ignore[attr-defined]
        return self._function(
            input, dim, scale=self.scale, mask=mask, is_causal=self.is_causal, masked_rows=self.masked_rows
        )

    def extra_repr(self) -> str:
        plain = {"scale": None, "is_causal": False, "masked_rows": "nan"}
        given = {name: getattr(self, name) for name, value in plain.items() if getattr(self, name) != value}
        return f"dim={self.dim}" + "".join(f", {name}={value!r}" for name, value in given.items())


class Softmax(_Scored, torch.nn.Softmax):
    """`fused_softmax.softmax` as a module; a torch.nn.Softmax to whoever asks, but not to torch.jit.script.

    dim: the dimension that sums to 1. None picks 0 or 1 by the input's rank and warns, as torch.nn.Softmax does.
    scale (a number), is_causal, masked_rows: those of `fused_softmax.softmax`, in each call.

    Called with the input, of any shape and a float dtype, and by keyword with the mask of that call. Errors are those
    of the function.

    >>> Softmax(dim=-1, scale=0.125, is_causal=True)
    Softmax(dim=-1, scale=0.125, is_causal=True)
    """


class LogSoftmax(_Scored, torch.nn.LogSoftmax):
    """`fused_softmax.log_softmax` as a module; arguments and errors are Softmax's.

    >>> LogSoftmax(dim=-1)
    LogSoftmax(dim=-1)
    """

    _function = staticmethod(log_softmax)
