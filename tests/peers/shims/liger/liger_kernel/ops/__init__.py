import torch

import fused_softmax


def _spread(out, target, ignore_index, reduction, z, accuracy, predicted):
    """Liger's four results from a CrossEntropyOutput, or from the loss alone."""
    if not isinstance(out, tuple):
        return out, None, None, None
    counts, stats = target != ignore_index, out.token_stats
    correct = tokens = None
    if accuracy:
        correct = stats.correct.float()
        correct = correct if reduction == "none" else correct.sum() / counts.sum()
    if predicted:
        tokens = torch.where(counts, stats.predicted, -1)
    return out.loss, out.z_loss.to(out.loss.dtype) if z else None, correct, tokens


class LigerCrossEntropyFunction:
    @staticmethod
    def apply(
        x, target, weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction="mean",
        softcap=None, return_z_loss=False, return_token_accuracy=False, return_predicted_tokens=False,
    ):  # fmt: skip
        counts = target != ignore_index
        assert (target * counts).max() < x.shape[-1], "Target is out of bounds."  # Liger's own check, of the host
        out = fused_softmax.cross_entropy(
            x, target, weight, ignore_index, reduction, label_smoothing, softcap=softcap,
            lse_square_scale=lse_square_scale, return_z_loss=return_z_loss,
            return_token_stats=return_token_accuracy or return_predicted_tokens,
        )  # fmt: skip
        return _spread(
            out, target, ignore_index, reduction, return_z_loss, return_token_accuracy, return_predicted_tokens
        )


class LigerFusedLinearCrossEntropyFunction:
    @staticmethod
    def apply(
        x, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
        reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False,
        return_token_accuracy=False, return_predicted_tokens=False,
    ):  # fmt: skip
        out = fused_softmax.linear_cross_entropy(
            x, weight, target, linear_bias=bias, weight=ce_weight, ignore_index=ignore_index,
            reduction="none" if use_token_scaling else reduction, label_smoothing=label_smoothing, softcap=softcap,
            lse_square_scale=lse_square_scale, return_z_loss=return_z_loss, dtype=torch.float32,
            accumulate="input" if accum_dtype is None else "fp32",
            return_token_stats=return_token_accuracy or return_predicted_tokens,
        )  # fmt: skip
        if use_token_scaling:
            out = out * (-out.detach()).exp()
            if reduction != "none":
                out = out.sum() / ((target != ignore_index).sum() if reduction == "mean" else 1)
        return _spread(
            out, target, ignore_index, reduction, return_z_loss, return_token_accuracy, return_predicted_tokens
        )
