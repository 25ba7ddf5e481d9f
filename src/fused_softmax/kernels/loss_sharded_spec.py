"""What the kernels of losses whose classes lie over ranks are compiled for."""

from dataclasses import dataclass

from fused_softmax.kernels.loss_spec import LossSpec


@dataclass(frozen=True, kw_only=True)
class LossShardSpec(LossSpec):
    """Of the numbers that ranks tell each other of rows, and of what follows from them."""

    @property
    def numbers(self):
        """Of a row in a message."""
        return 3 + int(self.weighted) + 2 * int(self.smooth) + 2 * int(self.stats)
