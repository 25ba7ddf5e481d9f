"""What the kernels of losses whose classes lie over ranks are compiled for."""

from dataclasses import dataclass

from fused_softmax.kernels.loss_spec import LossSpec


@dataclass(frozen=True, kw_only=True)
class LossShardSpec(LossSpec):
    """Of the numbers that ranks tell each other of rows, and of what follows from them."""

    @property
    def numbers(self):
        """Of a row in a message."""
        return numbers_of(weighted=self.weighted, smooth=self.smooth, stats=self.stats)


def numbers_of(*, weighted: bool, smooth: bool, stats: bool) -> int:
    """Of a row in a message: m, ls and the target's logit; a class weight; with smoothing two more, with stats too."""
    return 3 + int(weighted) + 2 * int(smooth) + 2 * int(stats)
