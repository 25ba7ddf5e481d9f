"""Launches of draws, together with the log-probabilities that a call asks for beside the token.

Log-probabilities of the logits as given, and of the greatest logits, take one launch more. It needs the states of a
row's stretches. Those of the draw serve where it read the same logits. Otherwise they take one more read.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fused_softmax.core.calls import allocator
from fused_softmax.core.device import device_of
from fused_softmax.core.launch import together
from fused_softmax.ops.sampling.kernels.spec import SampleSpec
from fused_softmax.ops.sampling.launches import (
    FEW,
    STRETCH,
    Arguments,
    Numbers,
    Written,
    of_a_call,
    prepare_draws,
    prepare_launches,
    readable,
    spec_of,
)
from fused_softmax.ops.sampling.options import Sampling
from fused_softmax.ops.sampling.plan import DrawPlan, plan_draws
from fused_softmax.ops.sampling.reference import SampleOutput


def prepare_sample(
    logits: Tensor, options: Sampling, seed: int | Tensor, position: int | Tensor | None, out: Tensor | None,
    plan: DrawPlan | None = None,
) -> Callable[[Tensor, Numbers, Tensor | None, Tensor | None, Tensor | None, Tensor | None], SampleOutput]:  # fmt: skip
    """What draws and reports for a call like this one: as `prepare_draws`, with at most FEW top_logprobs."""
    processed, n_top = options.return_logprobs == "processed", options.top_logprobs
    if options.return_logprobs is None or (processed and not (n_top or options.return_rank)):
        return prepare_draws(logits, options, seed, position, out, logprobs=processed, plan=plan)
    wanted = replace(options, return_kept=options.return_kept or processed)
    as_given = options.logit_bias is None and options.bitmask is None
    raws = as_given and not processed
    draw, spec = prepare_launches(logits, wanted, seed, position, out, logprobs=processed, raws=raws, plan=plan)
    layout = spec if processed or raws else None
    report = prepare_report(logits, options, seed, position, out, processed, plan, layout)
    returns_kept = options.return_kept  # a kept call holds no tensor, and so no options

    def call(logits, numbers, bias, bitmask, rows, out):
        drawn = draw(logits, numbers, bias, bitmask, rows, out)
        found = report(logits, numbers, bias, bitmask, rows, drawn)
        return found._replace(kept=drawn.output.kept if returns_kept else None)

    return call


def prepare_report(
    logits: Tensor, options: Sampling, seed: int | Tensor, position: int | Tensor | None, out: Tensor | None,
    processed: bool, plan: DrawPlan | None, layout: SampleSpec | None,
) -> Callable[..., SampleOutput]:  # fmt: skip
    """What finds, for draws like these, the log-probabilities of the token and of the greatest logits, and its rank.

    Its last argument is what the draw has written. layout: of the draw's scratch, if the states there serve; None if
    the logits are read again.
    """
    from fused_softmax.ops.sampling.kernels.kept import _stretches
    from fused_softmax.ops.sampling.kernels.report import _report

    n_rows, n_cols = logits.shape
    n_draws, n_top = n_rows if options.row_indices is None else len(options.row_indices), options.top_logprobs
    index, empty, returns_rank = logits.get_device(), allocator(logits.device), options.return_rank
    plan = plan or plan_draws(n_draws, n_cols, logits.element_size(), device_of(index))
    judged = options if processed else Sampling(row_indices=options.row_indices)
    spec = replace(
        spec_of(plan, replace(judged, top_k=1), index, True, logits.dtype), capacity=plan.capacity,
        candidates=2 * FEW, wide=True, listed=2 * FEW,
    )  # fmt: skip
    reads = layout is None

    def numbers_of(numbers: Numbers) -> Numbers:
        return Numbers(numbers.temperature if processed else 1.0, n_top, None, None, None, None)

    def read_of(logits, bias, bitmask, rows):
        return readable(logits, bias if processed else None, bitmask if processed else None, rows)

    def written(drawn: Written) -> Written:
        top = (n_draws, n_top), (n_top, 1)
        return Written(
            empty((n_draws * spec.scratch,), (1,), torch.int64) if reads else drawn.scratch,
            None if reads else drawn.raws,
            empty((n_draws * spec.candidates,), (1,), torch.int64) if n_top else None, drawn.tokens, drawn.valid,
            drawn.logprobs if processed else empty((n_draws,), (1,), torch.float32),
            drawn.kept if processed else None,
            empty(*top, torch.float32) if n_top else None, empty(*top, torch.int64) if n_top else None,
            empty((n_draws,), (1,), torch.int64) if returns_rank else None,
        )  # fmt: skip

    device = logits.device
    like = written(Written(
        torch.empty(n_draws, dtype=torch.int64, device=device),
        None if processed else torch.empty(n_draws, dtype=torch.int64, device=device), None,
        torch.empty(n_draws, dtype=torch.int64, device=device) if out is None else out,
        torch.empty(n_draws, dtype=torch.bool, device=device),
        torch.empty(n_draws, dtype=torch.float32, device=device),
        torch.empty(n_draws, 4 * -(-n_cols // 32), dtype=torch.uint8, device=device),
    ))  # fmt: skip
    read = read_of(logits, options.logit_bias, options.bitmask, options.row_indices)
    numbers = numbers_of(Numbers.of(options, seed, position))
    arguments = Arguments(read, like, numbers, n_rows, n_cols, plan)
    n_parts = -(-n_cols // (STRETCH * plan.stretches))
    of_report = replace(spec, stretches=plan.kept_warps)
    reading = [arguments.prepare(_stretches, n_draws * n_parts, spec, index, plan.num_warps)] if reads else []
    reporting = arguments.prepare(_report, n_draws, of_report, index, plan.kept_warps, layout=layout or spec)
    launches = together(*reading, reporting)

    def report(logits, numbers, bias, bitmask, rows, drawn):
        its = written(drawn)
        values = of_a_call(read_of(logits, bias, bitmask, rows), its, numbers_of(numbers))
        for launched, given in launches:
            launched(*given(values))
        return its.output

    return report
