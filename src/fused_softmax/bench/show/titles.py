"""The titles of result files, and the lines of the overview."""

from typing import NamedTuple

# What a report calls them.
TITLES = {
    "h200_softmax": "softmax, 128 to 2 Mi columns, beside torch.compile",
    "h200_cross_entropy": "Cross entropy and its gradient",
    "h200_linear_cross_entropy": "Cross entropy of a linear layer",
    "h200_tutorial": "softmax of 4096 rows, 256 to 12672 columns",
    "h200_backward": "Gradients of softmax and log_softmax",
    "h200_logsumexp": "logsumexp",
    "h200_masked": "softmax of attention scores: causal, masked, biased",
    "h200_dims": "softmax over strided dims",
    "h200_few_rows": "softmax of 1 to 132 rows",
    "h200_batch": "softmax of 4096 columns, few to many rows",
    "h200_small": "softmax of short rows and of few rows",
    "h200_vocab": "softmax of real vocabularies, also to float32",
    "h200_float16": "softmax in float16, 128 to 2 Mi columns",
    "h200_long_bf16": "softmax of long bfloat16 rows",
    "h200_long_rows": "softmax of 512 Mi bfloat16 elements",
    "h200_sweep_fp32": "softmax of float32, every 256 columns",
    "h200_sweep_bf16": "softmax of bfloat16, every 128 columns",
    "h200_sweep_fp16": "softmax of float16, every 1024 columns",
    "h200_peaks": "Widths around each of the planner's thresholds",
    "h200_sampling": "Tokens drawn from logits, by filter",
    "h200_attention": "Attention and its gradient, also with a bias, softcap or sinks",
}


class Line(NamedTuple):
    """A row of the table: its title, the file it is made of, and the operation in it."""

    title: str
    file: str
    operation: str


LINES = (
    Line("softmax", "h200_softmax", "softmax"),
    Line("softmax, few rows", "h200_few_rows", "softmax"),
    Line("softmax, bf16 to fp32", "h200_vocab", "softmax_float32"),
    Line("softmax over a strided dim", "h200_dims", "softmax_dim"),
    Line("softmax, causal", "h200_masked", "softmax_causal"),
    Line("softmax, bool mask", "h200_masked", "softmax_masked"),
    Line("softmax, added mask", "h200_masked", "softmax_biased"),
    Line("softmax's gradient", "h200_backward", "softmax_backward"),
    Line("log_softmax's gradient", "h200_backward", "log_softmax_backward"),
    Line("logsumexp", "h200_logsumexp", "logsumexp"),
    Line("cross_entropy", "h200_cross_entropy", "cross_entropy"),
    Line("cross_entropy, gradient", "h200_cross_entropy", "cross_entropy_gradient"),
    Line("linear_cross_entropy, gradient", "h200_linear_cross_entropy", "linear_cross_entropy"),
    Line("sample", "h200_sampling", "sample"),
    Line("sample, top-k 50", "h200_sampling", "sample_top_k"),
    Line("sample, top-p 0.9", "h200_sampling", "sample_top_p"),
    Line("sample, top-p 0.9, peaked rows", "h200_sampling", "sample_top_p_peaked"),
    Line("sample, min-p 0.05", "h200_sampling", "sample_min_p"),
    Line("attention, causal", "h200_attention", "attention_causal"),
    Line("attention, causal, gradient", "h200_attention", "attention_causal_gradient"),
    Line("attention, bias", "h200_attention", "attention_biased"),
    Line("attention, bias, gradient", "h200_attention", "attention_biased_gradient"),
    Line("attention, softcap, gradient", "h200_attention", "attention_softcap_gradient"),
    Line("attention, sinks and window, gradient", "h200_attention", "attention_sinks_gradient"),
    Line("attention, one query", "h200_attention", "attention_decode"),
)
