# `python tests/test_types.py` makes this file.
# fmt: off
# ruff: noqa: E501, I001
from collections.abc import Sequence
from fused_softmax import nn as nn
from fused_softmax.ahead import warmup as warmup
from fused_softmax.explanation import explain as explain
from fused_softmax.ops.attention.attention import AttentionOutput as AttentionOutput
from fused_softmax.ops.losses.divergence import divergence as divergence
from fused_softmax.ops.losses.linear_divergence import linear_divergence as linear_divergence
from fused_softmax.ops.losses.log_prob import LogProbOutput as LogProbOutput
from fused_softmax.ops.losses.log_prob import LogProbStats as LogProbStats
from fused_softmax.ops.losses.output import CrossEntropyOutput as CrossEntropyOutput
from fused_softmax.ops.losses.output import TokenStats as TokenStats
from fused_softmax.ops.routing.route import RouteOutput as RouteOutput
from fused_softmax.ops.routing.route import route as route
from fused_softmax.ops.sampling.filters import min_p_mask_logits as min_p_mask_logits
from fused_softmax.ops.sampling.filters import penalize as penalize
from fused_softmax.ops.sampling.filters import top_k_mask_logits as top_k_mask_logits
from fused_softmax.ops.sampling.filters import top_k_renorm_probs as top_k_renorm_probs
from fused_softmax.ops.sampling.filters import top_p_mask_logits as top_p_mask_logits
from fused_softmax.ops.sampling.filters import top_p_renorm_probs as top_p_renorm_probs
from fused_softmax.ops.sampling.sample import SampleOutput as SampleOutput
from fused_softmax.ops.sampling.sample import sample as sample
from fused_softmax.ops.sampling.speculative import SpeculativeOutput as SpeculativeOutput
from fused_softmax.ops.sampling.speculative import speculative_sample as speculative_sample
from fused_softmax.ops.segments.segments import segment_log_softmax as segment_log_softmax
from fused_softmax.ops.segments.segments import segment_logsumexp as segment_logsumexp
from fused_softmax.ops.segments.segments import segment_softmax as segment_softmax
from fused_softmax.ops.softmax.logsumexp import logsumexp as logsumexp
from fused_softmax.ops.softmax.softmax import log_softmax as log_softmax
from fused_softmax.ops.softmax.softmax import softmax as softmax
from fused_softmax.ranks.groups import Transport
from fused_softmax.register.patch import disable as disable
from fused_softmax.register.patch import enable as enable
from fused_softmax.register.patch import enabled as enabled
from torch import Tensor
from torch.distributed import ProcessGroup
from typing import Literal, overload
import torch

__all__ = ['AttentionOutput', 'CrossEntropyOutput', 'LogProbOutput', 'LogProbStats', 'RouteOutput', 'SampleOutput', 'SpeculativeOutput', 'TokenStats', 'attention', 'cross_entropy', 'disable', 'divergence', 'enable', 'enabled', 'explain', 'linear_cross_entropy', 'linear_divergence', 'linear_log_prob', 'log_prob', 'log_softmax', 'logsumexp', 'min_p_mask_logits', 'nn', 'penalize', 'route', 'sample', 'segment_log_softmax', 'segment_logsumexp', 'segment_softmax', 'softmax', 'speculative_sample', 'top_k_mask_logits', 'top_k_renorm_probs', 'top_p_mask_logits', 'top_p_renorm_probs', 'warmup']
__version__: str

@overload
def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None=None, *, bias: Tensor | None=None,
    is_causal: bool=False, causal_align: str='top_left', scale: float | None=None, enable_gqa: bool=False,
    window: tuple[int | None, int | None] | None=None, softcap: float | None=None, sinks: Tensor | None=None,
    alibi_slopes: Tensor | None=None, dropout_p: float=0.0, deterministic: bool=False, return_lse: Literal[False]=False,
    return_stats: tuple[()]=()) -> Tensor: ...
@overload
def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None=None, *, bias: Tensor | None=None,
    is_causal: bool=False, causal_align: str='top_left', scale: float | None=None, enable_gqa: bool=False,
    window: tuple[int | None, int | None] | None=None, softcap: float | None=None, sinks: Tensor | None=None,
    alibi_slopes: Tensor | None=None, dropout_p: float=0.0, deterministic: bool=False, return_lse: Literal[True],
    return_stats: str | tuple[str, ...]=()) -> AttentionOutput: ...
@overload
def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None=None, *, bias: Tensor | None=None,
    is_causal: bool=False, causal_align: str='top_left', scale: float | None=None, enable_gqa: bool=False,
    window: tuple[int | None, int | None] | None=None, softcap: float | None=None, sinks: Tensor | None=None,
    alibi_slopes: Tensor | None=None, dropout_p: float=0.0, deterministic: bool=False, return_lse: bool=False,
    return_stats: str | tuple[str, *tuple[str, ...]]) -> AttentionOutput: ...
@overload
def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None=None, *, bias: Tensor | None=None,
    is_causal: bool=False, causal_align: str='top_left', scale: float | None=None, enable_gqa: bool=False,
    window: tuple[int | None, int | None] | None=None, softcap: float | None=None, sinks: Tensor | None=None,
    alibi_slopes: Tensor | None=None, dropout_p: float=0.0, deterministic: bool=False, return_lse: bool=False,
    return_stats: str | tuple[str, ...]=()) -> Tensor | AttentionOutput: ...

@overload
def cross_entropy(input: Tensor, target: Tensor, weight: Tensor | None=None, ignore_index: int=-100,
    reduction: str='mean', label_smoothing: float=0.0, *, softcap: float | None=None, scale: float | None=None,
    lse_square_scale: float=0.0, return_lse: Literal[False]=False, return_z_loss: Literal[False]=False,
    return_token_stats: Literal[False]=False, inplace_backward: bool=False, dtype: torch.dtype | None=None,
    lse: Tensor | None=None, batch_invariant: bool | None=None, group: ProcessGroup | None=None,
    n_classes: int | None=None, shard_sizes: Sequence[int] | None=None, transport: Transport | None=None) -> Tensor: ...
@overload
def cross_entropy(input: Tensor, target: Tensor, weight: Tensor | None=None, ignore_index: int=-100,
    reduction: str='mean', label_smoothing: float=0.0, *, softcap: float | None=None, scale: float | None=None,
    lse_square_scale: float=0.0, return_lse: Literal[True], return_z_loss: bool=False, return_token_stats: bool=False,
    inplace_backward: bool=False, dtype: torch.dtype | None=None, lse: Tensor | None=None,
    batch_invariant: bool | None=None, group: ProcessGroup | None=None, n_classes: int | None=None,
    shard_sizes: Sequence[int] | None=None, transport: Transport | None=None) -> CrossEntropyOutput: ...
@overload
def cross_entropy(input: Tensor, target: Tensor, weight: Tensor | None=None, ignore_index: int=-100,
    reduction: str='mean', label_smoothing: float=0.0, *, softcap: float | None=None, scale: float | None=None,
    lse_square_scale: float=0.0, return_lse: bool=False, return_z_loss: Literal[True], return_token_stats: bool=False,
    inplace_backward: bool=False, dtype: torch.dtype | None=None, lse: Tensor | None=None,
    batch_invariant: bool | None=None, group: ProcessGroup | None=None, n_classes: int | None=None,
    shard_sizes: Sequence[int] | None=None, transport: Transport | None=None) -> CrossEntropyOutput: ...
@overload
def cross_entropy(input: Tensor, target: Tensor, weight: Tensor | None=None, ignore_index: int=-100,
    reduction: str='mean', label_smoothing: float=0.0, *, softcap: float | None=None, scale: float | None=None,
    lse_square_scale: float=0.0, return_lse: bool=False, return_z_loss: bool=False, return_token_stats: Literal[True],
    inplace_backward: bool=False, dtype: torch.dtype | None=None, lse: Tensor | None=None,
    batch_invariant: bool | None=None, group: ProcessGroup | None=None, n_classes: int | None=None,
    shard_sizes: Sequence[int] | None=None, transport: Transport | None=None) -> CrossEntropyOutput: ...
@overload
def cross_entropy(input: Tensor, target: Tensor, weight: Tensor | None=None, ignore_index: int=-100,
    reduction: str='mean', label_smoothing: float=0.0, *, softcap: float | None=None, scale: float | None=None,
    lse_square_scale: float=0.0, return_lse: bool=False, return_z_loss: bool=False, return_token_stats: bool=False,
    inplace_backward: bool=False, dtype: torch.dtype | None=None, lse: Tensor | None=None,
    batch_invariant: bool | None=None, group: ProcessGroup | None=None, n_classes: int | None=None,
    shard_sizes: Sequence[int] | None=None, transport: Transport | None=None) -> Tensor | CrossEntropyOutput: ...

@overload
def linear_cross_entropy(input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None=None,
    weight: Tensor | None=None, reduction: str='mean', ignore_index: int=-100, label_smoothing: float=0.0,
    softcap: float | None=None, scale: float | None=None, lse_square_scale: float=0.0, return_lse: Literal[False]=False,
    return_z_loss: Literal[False]=False, return_token_stats: Literal[False]=False, chunk_size: int | None=None,
    accumulate: str='fp32', skip_ignored: bool=False, dtype: torch.dtype | None=None, batch_invariant: bool | None=None,
    group: ProcessGroup | None=None, n_classes: int | None=None, shard_sizes: Sequence[int] | None=None,
    transport: Transport | None=None, input_sharded: bool=False) -> Tensor: ...
@overload
def linear_cross_entropy(input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None=None,
    weight: Tensor | None=None, reduction: str='mean', ignore_index: int=-100, label_smoothing: float=0.0,
    softcap: float | None=None, scale: float | None=None, lse_square_scale: float=0.0, return_lse: Literal[True],
    return_z_loss: bool=False, return_token_stats: bool=False, chunk_size: int | None=None, accumulate: str='fp32',
    skip_ignored: bool=False, dtype: torch.dtype | None=None, batch_invariant: bool | None=None,
    group: ProcessGroup | None=None, n_classes: int | None=None, shard_sizes: Sequence[int] | None=None,
    transport: Transport | None=None, input_sharded: bool=False) -> CrossEntropyOutput: ...
@overload
def linear_cross_entropy(input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None=None,
    weight: Tensor | None=None, reduction: str='mean', ignore_index: int=-100, label_smoothing: float=0.0,
    softcap: float | None=None, scale: float | None=None, lse_square_scale: float=0.0, return_lse: bool=False,
    return_z_loss: Literal[True], return_token_stats: bool=False, chunk_size: int | None=None, accumulate: str='fp32',
    skip_ignored: bool=False, dtype: torch.dtype | None=None, batch_invariant: bool | None=None,
    group: ProcessGroup | None=None, n_classes: int | None=None, shard_sizes: Sequence[int] | None=None,
    transport: Transport | None=None, input_sharded: bool=False) -> CrossEntropyOutput: ...
@overload
def linear_cross_entropy(input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None=None,
    weight: Tensor | None=None, reduction: str='mean', ignore_index: int=-100, label_smoothing: float=0.0,
    softcap: float | None=None, scale: float | None=None, lse_square_scale: float=0.0, return_lse: bool=False,
    return_z_loss: bool=False, return_token_stats: Literal[True], chunk_size: int | None=None, accumulate: str='fp32',
    skip_ignored: bool=False, dtype: torch.dtype | None=None, batch_invariant: bool | None=None,
    group: ProcessGroup | None=None, n_classes: int | None=None, shard_sizes: Sequence[int] | None=None,
    transport: Transport | None=None, input_sharded: bool=False) -> CrossEntropyOutput: ...
@overload
def linear_cross_entropy(input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None=None,
    weight: Tensor | None=None, reduction: str='mean', ignore_index: int=-100, label_smoothing: float=0.0,
    softcap: float | None=None, scale: float | None=None, lse_square_scale: float=0.0, return_lse: bool=False,
    return_z_loss: bool=False, return_token_stats: bool=False, chunk_size: int | None=None, accumulate: str='fp32',
    skip_ignored: bool=False, dtype: torch.dtype | None=None, batch_invariant: bool | None=None,
    group: ProcessGroup | None=None, n_classes: int | None=None, shard_sizes: Sequence[int] | None=None,
    transport: Transport | None=None, input_sharded: bool=False) -> Tensor | CrossEntropyOutput: ...

@overload
def linear_log_prob(input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None=None,
    scale: float | None=None, softcap: float | None=None, temperature: float | Tensor | None=None,
    ignore_index: int=-100, return_entropy: Literal[False]=False, return_lse: Literal[False]=False,
    return_stats: tuple[()]=(), kept: tuple[Tensor, Tensor] | Tensor | None=None, chunk_size: int | None=None,
    logits: str='auto', accumulate: str='fp32', dtype: torch.dtype | None=None, group: ProcessGroup | None=None,
    n_classes: int | None=None, shard_sizes: Sequence[int] | None=None, transport: Transport | None=None,
    skip_ignored: bool=False, input_sharded: bool=False) -> Tensor: ...
@overload
def linear_log_prob(input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None=None,
    scale: float | None=None, softcap: float | None=None, temperature: float | Tensor | None=None,
    ignore_index: int=-100, return_entropy: Literal[True], return_lse: bool=False, return_stats: Sequence[str]=(),
    kept: tuple[Tensor, Tensor] | Tensor | None=None, chunk_size: int | None=None, logits: str='auto',
    accumulate: str='fp32', dtype: torch.dtype | None=None, group: ProcessGroup | None=None, n_classes: int | None=None,
    shard_sizes: Sequence[int] | None=None, transport: Transport | None=None, skip_ignored: bool=False,
    input_sharded: bool=False) -> LogProbOutput: ...
@overload
def linear_log_prob(input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None=None,
    scale: float | None=None, softcap: float | None=None, temperature: float | Tensor | None=None,
    ignore_index: int=-100, return_entropy: bool=False, return_lse: Literal[True], return_stats: Sequence[str]=(),
    kept: tuple[Tensor, Tensor] | Tensor | None=None, chunk_size: int | None=None, logits: str='auto',
    accumulate: str='fp32', dtype: torch.dtype | None=None, group: ProcessGroup | None=None, n_classes: int | None=None,
    shard_sizes: Sequence[int] | None=None, transport: Transport | None=None, skip_ignored: bool=False,
    input_sharded: bool=False) -> LogProbOutput: ...
@overload
def linear_log_prob(input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None=None,
    scale: float | None=None, softcap: float | None=None, temperature: float | Tensor | None=None,
    ignore_index: int=-100, return_entropy: bool=False, return_lse: bool=False, return_stats: tuple[str, *tuple[str,
    ...]], kept: tuple[Tensor, Tensor] | Tensor | None=None, chunk_size: int | None=None, logits: str='auto',
    accumulate: str='fp32', dtype: torch.dtype | None=None, group: ProcessGroup | None=None, n_classes: int | None=None,
    shard_sizes: Sequence[int] | None=None, transport: Transport | None=None, skip_ignored: bool=False,
    input_sharded: bool=False) -> LogProbOutput: ...
@overload
def linear_log_prob(input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None=None,
    scale: float | None=None, softcap: float | None=None, temperature: float | Tensor | None=None,
    ignore_index: int=-100, return_entropy: bool=False, return_lse: bool=False, return_stats: Sequence[str]=(),
    kept: tuple[Tensor, Tensor] | Tensor | None=None, chunk_size: int | None=None, logits: str='auto',
    accumulate: str='fp32', dtype: torch.dtype | None=None, group: ProcessGroup | None=None, n_classes: int | None=None,
    shard_sizes: Sequence[int] | None=None, transport: Transport | None=None, skip_ignored: bool=False,
    input_sharded: bool=False) -> Tensor | LogProbOutput: ...

@overload
def log_prob(input: Tensor, target: Tensor, *, scale: float | None=None, softcap: float | None=None,
    temperature: float | Tensor | None=None, ignore_index: int=-100, return_entropy: Literal[False]=False,
    return_lse: Literal[False]=False, return_stats: tuple[()]=(), kept: tuple[Tensor, Tensor] | Tensor | None=None,
    inplace_backward: bool=False, dtype: torch.dtype | None=None, group: ProcessGroup | None=None,
    n_classes: int | None=None, shard_sizes: Sequence[int] | None=None, transport: Transport | None=None) -> Tensor: ...
@overload
def log_prob(input: Tensor, target: Tensor, *, scale: float | None=None, softcap: float | None=None,
    temperature: float | Tensor | None=None, ignore_index: int=-100, return_entropy: Literal[True],
    return_lse: bool=False, return_stats: Sequence[str]=(), kept: tuple[Tensor, Tensor] | Tensor | None=None,
    inplace_backward: bool=False, dtype: torch.dtype | None=None, group: ProcessGroup | None=None,
    n_classes: int | None=None, shard_sizes: Sequence[int] | None=None,
    transport: Transport | None=None) -> LogProbOutput: ...
@overload
def log_prob(input: Tensor, target: Tensor, *, scale: float | None=None, softcap: float | None=None,
    temperature: float | Tensor | None=None, ignore_index: int=-100, return_entropy: bool=False,
    return_lse: Literal[True], return_stats: Sequence[str]=(), kept: tuple[Tensor, Tensor] | Tensor | None=None,
    inplace_backward: bool=False, dtype: torch.dtype | None=None, group: ProcessGroup | None=None,
    n_classes: int | None=None, shard_sizes: Sequence[int] | None=None,
    transport: Transport | None=None) -> LogProbOutput: ...
@overload
def log_prob(input: Tensor, target: Tensor, *, scale: float | None=None, softcap: float | None=None,
    temperature: float | Tensor | None=None, ignore_index: int=-100, return_entropy: bool=False, return_lse: bool=False,
    return_stats: tuple[str, *tuple[str, ...]], kept: tuple[Tensor, Tensor] | Tensor | None=None,
    inplace_backward: bool=False, dtype: torch.dtype | None=None, group: ProcessGroup | None=None,
    n_classes: int | None=None, shard_sizes: Sequence[int] | None=None,
    transport: Transport | None=None) -> LogProbOutput: ...
@overload
def log_prob(input: Tensor, target: Tensor, *, scale: float | None=None, softcap: float | None=None,
    temperature: float | Tensor | None=None, ignore_index: int=-100, return_entropy: bool=False, return_lse: bool=False,
    return_stats: Sequence[str]=(), kept: tuple[Tensor, Tensor] | Tensor | None=None, inplace_backward: bool=False,
    dtype: torch.dtype | None=None, group: ProcessGroup | None=None, n_classes: int | None=None,
    shard_sizes: Sequence[int] | None=None, transport: Transport | None=None) -> Tensor | LogProbOutput: ...
