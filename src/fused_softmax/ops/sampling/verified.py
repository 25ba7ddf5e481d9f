"""Launches by which drafts are verified: rows of target and draft are judged, and then followed and drawn from."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fused_softmax.core import launch
from fused_softmax.core.device import device_of
from fused_softmax.core.runner import has_ptx
from fused_softmax.ops.sampling.judged import Rows, judge_rows
from fused_softmax.ops.sampling.kernels.spec import VerifySpec
from fused_softmax.ops.sampling.kernels.verified import _climb, _draw_left, _follow, _report_tokens, _settle, _sum_left
from fused_softmax.ops.sampling.options import Sampling
from fused_softmax.ops.sampling.plan import DrawPlan, plan_draws
from fused_softmax.ops.sampling.reference import Number
from fused_softmax.ops.sampling.verification import SpeculativeOutput, Verify, of_rows

_NUMBERS = 8  # int64 of a sequence: ops/sampling/kernels/verified.py
_CLIMB_WARPS = 8  # of the program that follows a tree, and reads rows alone


def verify_drafts(
    target: Rows, draft: Rows, draft_tokens: Tensor, lengths: Tensor | None, parents: Tensor | None, seed: Tensor,
    position: Tensor, verify: Verify, reported: Rows | None = None,
) -> SpeculativeOutput:  # fmt: skip
    """The output for judged rows [n * (k + 1)] of the target and [n * k] of what was drafted.

    reported: rows of the target, judged as log-probabilities are asked for.
    """
    (n, k), device, index = draft_tokens.shape, draft_tokens.device, draft_tokens.get_device()
    plan, n_rows = target.plan, k + 1
    spec = VerifySpec(
        target=target.spec, draft=draft.spec, rows=n_rows, stretches=plan.stretches, block=verify == "block",
        ptx=has_ptx(index),
    )  # fmt: skip
    empty = lambda *shape, dtype=torch.int64: torch.empty(shape, dtype=dtype, device=device)  # noqa: E731
    given = {
        "drafts": draft_tokens, "lengths": lengths, "parents": parents, "seed": seed, "position": position,
        "tokens": empty(n, n_rows), "nodes": empty(n, k), "numbers": empty(n, _NUMBERS),
        "scales": empty(n, spec.scales, dtype=torch.float32), "lefts": empty(n, spec.most),
        **target.tensors, **{f"draft_{name}": each for name, each in draft.tensors.items()},
    }  # fmt: skip
    strides = (
        seed.stride(0), position.stride(0), *draft_tokens.stride(), 0 if lengths is None else lengths.stride(0),
        *((0, 0) if parents is None else parents.stride()),
    )  # fmt: skip
    scalars = {
        "strides": target.scalars["strides"], "draft_strides": draft.scalars["strides"], "sequence_strides": strides,
        "target_rows": target.scalars["n_rows"], "draft_rows": draft.scalars["n_rows"], "n_cols": plan.n_cols,
        "temperature": target.scalars["temperature"],
    }  # fmt: skip

    def run(kernel: Any, programs: int, spec: VerifySpec, num_warps: int, **parts: int) -> None:
        names = [name for name in kernel.arg_names if name != "K"]
        tensors = [given[name.removesuffix("_ptr")] for name in names if name.endswith("_ptr")]
        values = [(scalars | parts)[name] for name in names if not name.endswith("_ptr")]
        launched = launch.prepare(
            kernel, programs, tensors, values, {"K": spec}, device=index, num_warps=num_warps, plan=plan
        )
        launched(*(each for each in tensors if each is not None))

    if verify == "tree":
        warps = min(_CLIMB_WARPS, plan.all_stretches)
        run(_climb, n, replace(spec, stretches=warps), warps)
    else:
        run(_follow, n, spec, 1)
        if verify == "block":
            if k > 1:
                cut = _cut(plan, n * (k - 1), index)
                run(_sum_left, n * (k - 1) * cut["n_parts"], spec, plan.num_warps, **cut)
            run(_settle, n, spec, 1)
    cut = _cut(plan, n, index)
    run(_draw_left, n * cut["n_parts"], spec, plan.num_warps, **cut)
    if verify != "tree":
        given["nodes"] = None
    logprobs = None
    if reported is not None:
        logprobs = given["logprobs"] = empty(n, n_rows, dtype=torch.float32)
        given |= reported.tensors
        scalars |= {"strides": reported.scalars["strides"], "temperature": reported.scalars["temperature"]}
        run(_report_tokens, n, replace(spec, target=reported.spec), 1)
    numbers = given["numbers"]
    return SpeculativeOutput(given["tokens"], numbers[:, 1].clone(), numbers[:, 2] > 0, logprobs, given["nodes"])


def _cut(plan: DrawPlan, n: int, index: int) -> dict[str, int]:
    """How n rows are cut among programs."""
    own = plan_draws(n, plan.n_cols, 2, device_of(index))
    return {"n_parts": own.parts, "part_stretches": own.part_stretches}


def flattened(logits: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rows [n, m, n_cols] as [rows, n_cols], and which of them they are; all in turn if None. Slices are not copied."""
    n, m, n_cols = logits.shape
    of_sequence, of_row, _ = logits.stride()
    if of_row > 0 and of_sequence % of_row == 0 and of_sequence > of_row * m and n:  # of more rows, some
        apart = of_sequence // of_row
        at = torch.arange(m, device=logits.device)
        rows = torch.arange(n, device=logits.device)[:, None] * apart + at
        return logits.as_strided(((n - 1) * apart + m, n_cols), logits.stride()[1:]), rows.flatten()
    return logits.reshape(n * m, n_cols), None


def rows_of_masks(mask: Tensor | None, n: int, n_rows: int) -> Tensor | None:
    """A mask of columns, of sequences or of rows, [n_cols], [n, ...] or [n, n_rows, ...], for each row."""
    if mask is None or mask.ndim == 1:
        return mask
    return (mask[:, None] if mask.ndim == 2 else mask).expand(n, n_rows, -1).flatten(0, 1)


def speculative_sample(
    target_logits: Tensor, draft_tokens: Tensor, draft_logits: Tensor | None, draft_probs: Tensor | None,
    draft_lengths: Tensor | None, parents: Tensor | None, logit_bias: Tensor | None, bitmask: Tensor | None,
    seed: Tensor, position: Tensor, temperature: Number = 1.0, top_k: Number | None = None,
    top_p: Number | None = None, min_p: Number | None = None, *, order: Any = "sequential", verify: Verify = "chain",
    return_logprobs: str | None = None,
) -> SpeculativeOutput:  # fmt: skip
    """As `verification.speculative_sample`, of drafts with a distribution."""
    n, n_rows, _ = target_logits.shape
    logits, rows = flattened(target_logits)
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    of_target: Any = {name: of_rows(each, n, n_rows) for name, each in given.items()}
    bias, bits = rows_of_masks(logit_bias, n, n_rows), rows_of_masks(bitmask, n, n_rows)
    target = judge_rows(
        logits, Sampling(**of_target, order=order, logit_bias=bias, bitmask=bits, row_indices=rows)
    )  # fmt: skip
    if draft_probs is None:
        assert draft_logits is not None
        logits, rows = flattened(draft_logits)
        of_draft: Any = {name: of_rows(each, n, n_rows, n_rows - 1) for name, each in given.items()}
        draft = judge_rows(logits, Sampling(**of_draft, order=order, row_indices=rows))
    else:
        logits, rows = flattened(draft_probs)
        draft = judge_rows(logits, Sampling(row_indices=rows), of_probs=True)
    reported = target if return_logprobs == "processed" else None
    if return_logprobs == "raw":
        reported = judge_rows(*_raw_rows(target_logits))
    return verify_drafts(
        target, draft, draft_tokens, draft_lengths, parents, seed, position, verify, reported
    )  # fmt: skip


def _raw_rows(target_logits: Tensor) -> tuple[Tensor, Sampling]:
    logits, rows = flattened(target_logits)
    return logits, Sampling(row_indices=rows)
