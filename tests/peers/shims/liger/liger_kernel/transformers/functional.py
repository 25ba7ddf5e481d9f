from dataclasses import make_dataclass

import fused_softmax
from liger_kernel.ops import LigerCrossEntropyFunction, LigerFusedLinearCrossEntropyFunction

CrossEntropyOutput = make_dataclass("CrossEntropyOutput", ["loss", "z_loss", "token_accuracy", "predicted_tokens"])


def _result(found, *asked):
    return CrossEntropyOutput(*found) if any(asked) else found[0]


def liger_cross_entropy(
    input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean",
    label_smoothing=0.0, lse_square_scale=0.0, softcap=None, return_z_loss=False, return_token_accuracy=False,
    return_predicted_tokens=False,
):  # fmt: skip
    found = LigerCrossEntropyFunction.apply(
        input, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss,
        return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip
    return _result(found, return_z_loss, return_token_accuracy, return_predicted_tokens)


def liger_fused_linear_cross_entropy(
    input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
    reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False,
    return_token_accuracy=False, return_predicted_tokens=False,
):  # fmt: skip
    found = LigerFusedLinearCrossEntropyFunction.apply(
        input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap,
        return_z_loss, accum_dtype, use_token_scaling, return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip
    return _result(found, return_z_loss, return_token_accuracy, return_predicted_tokens)


def liger_softmax(x):
    return fused_softmax.softmax(x, -1)
