import torch

import fused_softmax


class LigerVocabParallelCrossEntropy(torch.nn.Module):
    FORMULA, MODE = "pytorch", "global"

    def __init__(
        self, ignore_index=-100, label_smoothing=0.0, reduction="none", label_smoothing_formula=None,
        label_smoothing_mode=None,
    ):  # fmt: skip
        super().__init__()
        formula = self.FORMULA if label_smoothing_formula is None else label_smoothing_formula
        mode = self.MODE if label_smoothing_mode is None else label_smoothing_mode
        if reduction != "none":
            raise ValueError("reduction must be 'none'")
        if formula not in ("pytorch", "megatron"):
            raise ValueError("label_smoothing_formula must be 'pytorch' or 'megatron'")
        if mode not in ("global", "partition"):
            raise ValueError("label_smoothing_mode must be 'global' or 'partition'")
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError("label_smoothing must be in [0, 1)")
        self.ignore_index, self.label_smoothing, self.reduction = ignore_index, label_smoothing, reduction
        self.label_smoothing_formula, self.label_smoothing_mode = formula, mode

    def extra_repr(self):
        names = "ignore_index", "label_smoothing", "reduction", "label_smoothing_formula", "label_smoothing_mode"
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)

    def forward(self, logits, target, tp_group=None):
        if logits.ndim != 3:
            raise ValueError("logits must be 3-D, [s, b, v]")
        v, alpha = logits.shape[-1], self.label_smoothing
        if self.label_smoothing_formula == "megatron":
            alpha = alpha * v / (v - 1)
        over = {} if tp_group is None or tp_group.size() == 1 else {"group": tp_group}
        losses = fused_softmax.cross_entropy(
            logits.reshape(-1, v), target.reshape(-1), ignore_index=self.ignore_index, reduction="none",
            label_smoothing=alpha, dtype=torch.float32, **over,
        )  # fmt: skip
        return losses.view(target.shape)


class LigerMegatronCrossEntropy(LigerVocabParallelCrossEntropy):
    FORMULA, MODE = "megatron", "partition"
