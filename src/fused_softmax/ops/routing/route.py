"""Which experts each row of a router's logits goes to, with what weights, and the losses that keep experts balanced.

Traffic: logits are read once, and 8 bytes are written for each choice; counts and losses read a row again while its
multiprocessor has it. The gradient is written once; logits are read for it unless weights alone have one, and follow
from the chosen experts.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fused_softmax.core.calls import find, keep
from fused_softmax.core.launched import Launched, compose
from fused_softmax.core.route import Route, checks_values, needs_grad, route_of
from fused_softmax.ops.routing.dtensor import route_on_shards
from fused_softmax.ops.routing.launches import prepare_route, read, refused_sizes, rows_of_call
from fused_softmax.ops.routing.options import GroupScore, Routing, Score, check_ids, check_logits, routing_of
from fused_softmax.ops.routing.reference import RouteOutput, output_of, rows_of
from fused_softmax.ops.routing.rows import output_of as output_of_rows
from fused_softmax.ops.routing.rows import with_gradient
from fused_softmax.ranks.dtensor import mesh_of

_NAME = "route"


def route(
    logits: Tensor,
    k: int,
    *,
    score: Score = "softmax",
    score_first: bool = True,
    bias: Tensor | None = None,
    n_groups: int = 1,
    groups_kept: int | None = None,
    group_score: GroupScore = "top2",
    renormalize: bool = True,
    scale: float = 1.0,
    noise: Tensor | None = None,
    indices: Tensor | None = None,
    row_mask: Tensor | None = None,
    dense: bool = False,
    return_aux_loss: bool = False,
    return_z_loss: bool = False,
    sequence_length: int | None = None,
    return_counts: bool = True,
) -> RouteOutput:
    """The k experts that each row of a router's logits goes to, their weights, and the losses that balance experts.

    Weights, dense, prob_sums and both losses have a gradient, that of the logits. Which experts are chosen has none.

    logits: [..., n_experts], float32, float16 or bfloat16, at any strides. Arithmetic is float32 or better.
    k: how many experts a row goes to, 1 to n_experts.
    score: of an expert, "softmax" over all, "sigmoid" of its logit, or "sqrtsoftplus", sqrt(log(1 + exp(logit))).
    score_first: True chooses by the scores of all experts, and weights are scores of that softmax. False chooses by
        the logits, and scores are of the k chosen logits alone, as gpt-oss has it.
    bias: [n_experts], 16 to 64 bit floats, added to what the choice compares and never to a weight, as DeepSeek-V3
        has it. It counts as float32, and gets no gradient: one that requires it raises RuntimeError.
    n_groups, groups_kept: experts lie in n_groups groups of neighbours, and are chosen of the groups_kept best alone;
        all without groups_kept. Of equal groups the lowest are kept.
    group_score: a group is as good as the sum of its "top2" best experts, bias included (DeepSeek-V3), or as the "max"
        of them (DeepSeek-V2).
    renormalize: weights sum up to 1, or are 0 where their sum is 0. It comes before the scale.
    scale: a number that weights are multiplied by.
    noise: of the logits' shape, 16 to 64 bit floats, added to the logits before all else. It gets no gradient, as bias.
    indices: int32 or int64 [..., k], experts to take in place of a choice (replay); -1 takes none, and has weight 0.
        A row with another id that is no expert, or with one twice, has weights NaN and indices -1, and is in no count
        and no loss. On a CPU, and with FUSED_SOFTMAX_CHECK=1 in the environment, it raises IndexError.
    row_mask: bool [...], True for rows that are routed.
    dense: whether to return the weights as [..., n_experts] too.
    return_aux_loss: whether to return n_experts * sum(f * P), which is 1 where experts are balanced. Of each expert f
        is counts / (rows * k), and P the mean of its probability: its softmax, or its score over the sum of all scores.
    return_z_loss: whether to return the mean of the square of the rows' log-sum-exp.
    sequence_length: the aux loss is the mean of that of every so many rows, of sequences one behind another. It divides
        the number of rows. A sequence without rows that are routed is left out. Counts and prob_sums are of all rows.
    return_counts: whether to return counts and prob_sums. Without them, and without losses, no rows are added up.

    The choice compares logits. With a bias or with groups that leave experts out it compares scores, as float32. Of
    equal ones the lowest expert stands first. A row is routed nowhere if it is not in row_mask, or has a NaN, an inf or
    nothing above -inf, or where a NaN in the bias leaves no order: its indices are -1, its weights and gradient 0, and
    it is in no count and no loss. Losses of no rows are 0. An expert of logit -inf is chosen after all others, with
    weight 0, unless a bias says otherwise.

    A row is routed the same in any batch, and results are the same on every run. Nothing waits for the device, but for
    the check of indices.

    DTensors may lie in shards of rows, and then every tensor is a DTensor. Weights, indices and dense lie as the
    logits. Counts, prob_sums and losses are of all ranks' rows, and the same on all ranks.

    Returns a RouteOutput; what was not asked for is None.
    Raises TypeError, ValueError or RuntimeError for arguments that do not fit, naming the argument.

    Fedus et al., "Switch Transformers" (the aux loss, arXiv 2101.03961); Zoph et al., "ST-MoE" (the z-loss, arXiv
    2202.08906); DeepSeek-AI, "DeepSeek-V2" (groups, arXiv 2405.04434) and "DeepSeek-V3" (sigmoid, bias, the two best of
    a group, the loss of sequences, arXiv 2412.19437); OpenAI, "gpt-oss" (score_first=False, arXiv 2508.10925).

    >>> route(torch.tensor([[0.0, 2.0, 1.0]]), 2)[:2]
    (tensor([[0.7311, 0.2689]]), tensor([[1, 2]], dtype=torch.int32))
    >>> out = route(logits, 8, score="sigmoid", bias=bias, n_groups=8, groups_kept=4, scale=2.5)  # [16384, 256], [256]
    """
    given = {
        "k": k, "score": score, "score_first": score_first, "bias": bias, "n_groups": n_groups,
        "groups_kept": groups_kept, "group_score": group_score, "renormalize": renormalize, "scale": scale,
        "noise": noise, "indices": indices, "row_mask": row_mask, "dense": dense, "return_aux_loss": return_aux_loss,
        "return_z_loss": return_z_loss, "sequence_length": sequence_length, "return_counts": return_counts,
    }  # fmt: skip
    key: tuple[Any, ...] = (
        k, score, score_first, n_groups, groups_kept, group_score, renormalize, scale, dense, return_aux_loss,
        return_z_loss, sequence_length, return_counts,
    )  # fmt: skip
    key = *key, *map(type, key), torch.is_grad_enabled()
    call = find(_NAME, key, logits, bias, noise, indices, row_mask)
    if call is not None:
        return call(logits, bias, noise, indices, row_mask)
    return _route(logits, given, key)


def _route(logits: Any, given: dict[str, Any], key: tuple) -> RouteOutput:
    check_logits(_NAME, logits)
    options = routing_of(_NAME, logits, given)
    mesh_of(_NAME, {"logits": logits, **options.tensors})
    of_call = logits, *options.tensors.values()
    refused = refused_sizes(logits.shape[:-1].numel(), logits.shape[-1], options)
    way = route_of(_NAME, *of_call, refused=refused, shards=True)
    if way is Route.SHARDS:
        return route_on_shards(_NAME, rows_of, logits, options)
    indices = options.indices
    reads = False
    if indices is not None and checks_values(logits, indices, options.row_mask):
        reads = True
        check_ids(_NAME, indices, options.row_mask, logits.shape[-1])
    if way is Route.COMPOSED:
        return output_of(rows_of(logits, options), logits, options)
    if way is Route.OPERATOR:
        return _by_operator(logits, options)
    call = _prepare_call(logits, options)
    if not reads:
        keep(call, _NAME, key, logits, options.bias, options.noise, indices, options.row_mask)
    return call(logits, options.bias, options.noise, indices, options.row_mask)


def _by_operator(logits: Tensor, options: Routing) -> RouteOutput:
    leading, n_rows = logits.shape[:-1], logits.shape[:-1].numel()
    of_rows = {"indices": options.k, "noise": logits.shape[-1]}
    flat = {name: getattr(options, name) for name in ("indices", "noise")}
    flat = {name: each if each is None else each.reshape(n_rows, of_rows[name]) for name, each in flat.items()}
    mask = options.row_mask
    options = replace(options, **flat, row_mask=None if mask is None else mask.reshape(n_rows))
    found = torch.ops.fused_softmax.route.default(logits.reshape(n_rows, logits.shape[-1]), *options.traced())
    weights, indices, counts, prob_sums, aux_loss, z_loss, dense, *_ = found
    return RouteOutput(
        weights.view(*leading, options.k),
        indices.view(*leading, options.k),
        counts if options.return_counts else None,
        prob_sums if options.return_counts else None,
        aux_loss if options.return_aux_loss else None,
        z_loss if options.return_z_loss else None,
        dense.view(logits.shape) if options.dense else None,
    )


def _prepare_call(logits: Tensor, options: Routing) -> Launched:
    """The call for tensors like these: call(logits, bias, noise, indices, row_mask)."""
    differentiated = needs_grad(logits)
    given = rows_of_call(logits.detach(), options)
    prepared = prepare_route(given, options, differentiated)
    # A call that is kept holds no tensor.
    alike = replace(options, bias=None, noise=None, indices=None, row_mask=None)

    def build(_, run):
        def call(logits, bias, noise, indices, row_mask):
            of_call = read(logits, bias, noise, indices, row_mask)
            rows = with_gradient(of_call, alike, run) if differentiated else run(*of_call)
            return output_of_rows(rows, logits.shape[:-1], alike)

        return call

    return compose(build, prepared, n=logits.shape[0] if logits.ndim == 2 else None, by_row=True)
