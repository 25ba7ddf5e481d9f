"""What `route` gives, by loops in float64, one row after another."""

import math

import torch

from fused_softmax.ops.routing.reference import RouteOutput


def scores_of(x, score):
    if score == "softmax":
        top = max(x)
        if top == -math.inf:
            return [0.0] * len(x)
        weights = [math.exp(each - top) for each in x]
        return [each / sum(weights) for each in weights]
    if score == "sigmoid":
        return [1 / (1 + math.exp(-each)) if each > -700 else 0.0 for each in x]
    return [math.sqrt(max(each, 0.0) + math.log1p(math.exp(-abs(each)))) for each in x]


def over_sum(values):
    total = sum(values)
    return [each / total if total > 0 else 0.0 for each in values]


def best_of(keys, k):
    """Places of the k greatest; Python's sort keeps equal ones in their order."""
    return sorted(range(len(keys)), key=lambda place: -keys[place])[:k]


def float32(values):
    return [float(each) for each in torch.tensor(values, dtype=torch.float64).float()]


def choice(x, scores, k, score_first, bias, n_groups, groups_kept, group_score):
    kept = groups_kept or n_groups
    keys = scores if score_first and (bias is not None or kept < n_groups) else x
    if bias is not None:
        keys = [key + each for key, each in zip(float32(keys), bias, strict=True)]
    keys = float32(keys)
    size = len(x) // n_groups
    best = [sorted(keys[group * size : group * size + size], reverse=True) for group in range(n_groups)]
    of_groups = float32([sum(each[:2]) if group_score == "top2" else each[0] for each in best])
    experts = [group * size + i for group in sorted(best_of(of_groups, kept)) for i in range(size)]
    return [experts[place] for place in best_of([keys[expert] for expert in experts], k)]


def naive(
    logits, k, *, score="softmax", score_first=True, bias=None, n_groups=1, groups_kept=None, group_score="top2",
    renormalize=True, scale=1.0, noise=None, indices=None, row_mask=None, dense=False, return_aux_loss=False,
    return_z_loss=False, sequence_length=None,
):  # fmt: skip
    n_experts, leading = logits.shape[-1], logits.shape[:-1]
    rows = logits.detach().float() if noise is None else logits.detach().float() + noise.float()
    rows = rows.reshape(-1, n_experts).tolist()
    bias = None if bias is None else bias.float().tolist()
    replayed = None if indices is None else indices.reshape(-1, k).tolist()
    masked = [True] * len(rows) if row_mask is None else row_mask.reshape(-1).tolist()
    weights, ids, of_all, probs, squares = [], [], [], [], []
    for i, x in enumerate(rows):
        if not masked[i] or any(math.isnan(each) or each == math.inf for each in x) or max(x) == -math.inf:
            weights.append([0.0] * k), ids.append([-1] * k), of_all.append([0.0] * n_experts)
            probs.append(None), squares.append(None)
            continue
        scores = scores_of(x, score)
        if replayed is None:
            chosen = choice(x, scores, k, score_first, bias, n_groups, groups_kept, group_score)
        else:
            chosen = replayed[i]
        there = [expert for expert in chosen if expert >= 0]
        of_there = [scores[each] for each in there] if score_first else None
        if of_there is None:
            of_there = scores_of([x[each] for each in there], score) if there else []
        of_there = [each * scale for each in (over_sum(of_there) if renormalize else of_there)]
        found = dict(zip(there, of_there, strict=True))
        weights.append([found.get(expert, 0.0) for expert in chosen]), ids.append(chosen)
        of_all.append([found.get(expert, 0.0) for expert in range(n_experts)])
        probs.append(scores if score == "softmax" else over_sum(scores))
        squares.append((max(x) + math.log(sum(math.exp(each - max(x)) for each in x))) ** 2)

    def balance(of):
        routed = [i for i in of if probs[i] is not None]
        shares = [sum(ids[i].count(e) for i in routed) / (len(routed) * k) for e in range(n_experts)]
        return n_experts * sum(f * sum(probs[i][e] for i in routed) / len(routed) for e, f in enumerate(shares))

    length = sequence_length or len(rows)
    sequences = [range(i, i + length) for i in range(0, len(rows), length)] if rows else []
    losses = [balance(of) for of in sequences if any(probs[i] is not None for i in of)]
    routed = [i for i, each in enumerate(probs) if each is not None]
    double = {"dtype": torch.float64}
    return RouteOutput(
        torch.tensor(weights, **double).view(*leading, k),
        torch.tensor(ids, dtype=torch.int32).view(*leading, k),
        torch.tensor([sum(each.count(e) for each in ids) for e in range(n_experts)], dtype=torch.int32),
        torch.tensor([sum(probs[i][e] for i in routed) for e in range(n_experts)], **double),
        torch.tensor(sum(losses) / max(1, len(losses)), **double) if return_aux_loss else None,
        torch.tensor(sum(squares[i] for i in routed) / max(1, len(routed)), **double) if return_z_loss else None,
        torch.tensor(of_all, **double).view(logits.shape) if dense else None,
    )
