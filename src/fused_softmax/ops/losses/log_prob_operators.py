"""The rules of log-probabilities as a registered operator and its gradient: what runs, fakes, autograd.

Of rows [n, n_classes] and targets [n, k]; what is not asked for is empty. lse and its gradient are those of ls.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fused_softmax.core.checks import arithmetic_of
from fused_softmax.core.route import on_device
from fused_softmax.ops.losses import log_prob as ops
from fused_softmax.ops.losses.launches import with_whole_rows
from fused_softmax.ops.losses.log_prob_launches import Asked, Gradients, backward, forward, given_of
from fused_softmax.ops.losses.options import EVERY, Kept, LogProb

_OPTIONS = LogProb.schema()
_N_OPTIONS = len(LogProb().traced())
_KEPT = ", ".join(f"Tensor? kept_{name}=None" for name in ("ids", "offsets", "bits"))
GIVEN = f"{_OPTIONS}, bool[] asked=[], {_KEPT}"
N_GIVEN = _N_OPTIONS + 4
RESULTS = (
    "(Tensor log_prob, Tensor m, Tensor ls, Tensor entropy, Tensor lse, Tensor log_sum_sq_probs, Tensor mean_logits, "
    "Tensor is_top1)"
)
STATES = "Tensor m, Tensor ls, Tensor entropy, Tensor? dlog_prob, Tensor? dentropy, Tensor? dlse"
LOG_PROB = f"(Tensor input, Tensor target, {GIVEN}) -> {RESULTS}"
BACKWARD = f"(Tensor input, Tensor target, {STATES}, {_OPTIONS}, {_KEPT}) -> Tensor"


def split(given: Sequence) -> tuple[LogProb, Asked, Kept]:
    options, (asked, *kept) = given[:_N_OPTIONS], given[_N_OPTIONS:] or ((),)
    return LogProb.of_traced(options), Asked(*asked)._replace(states=True), Kept(*kept)


def _temperature(options: LogProb, x: Tensor) -> Tensor | None:
    t = options.temperature
    return t.to(arithmetic_of(x)).contiguous() if isinstance(t, Tensor) else None


def log_prob(input, target, *given):
    with torch._C.DisableTorchFunction():  # a mode of functions has seen the call
        options, asked, kept = split(given)
        if on_device(input) and input.numel() and target.numel():
            x = ops.aligned(input, kept)
            t, alike = _temperature(options, x), options.with_number()
            return results_of(forward(given_of(x, target.contiguous(), t, alike, kept), alike, asked), input)
        t = options.temperature if isinstance(options.temperature, Tensor) else None
        kept = kept if input.numel() else EVERY  # whose offsets may be of rows that are not there
        of_targets, entropy, lse, stats = ops.referred(input, target, options.with_number(), t, kept)
        results = [of_targets, entropy, lse, *stats.values()]
        wants = True, *asked[:-1]
        results = [each if wanted else None for each, wanted in zip(results, wants, strict=True)]
        return results_of((lse.clone(), torch.zeros_like(lse), *results), input)


def results_of(found: Sequence, input: Tensor) -> tuple:
    """What is known of rows, empty where it was not asked for. found: as a LogProbRows has it."""
    m, ls, *results = found
    dtypes = (*[arithmetic_of(input)] * (len(results) - 1), torch.bool)
    results = [input.new_empty(0, dtype=d) if each is None else each for each, d in zip(results, dtypes, strict=True)]
    return results[0], m, ls, *results[1:]


def fake_log_prob(input, target, *given):
    _, asked, _ = split(given)
    n, dtype = input.shape[0], arithmetic_of(input)

    def of_row(wanted):
        return input.new_empty([n] if wanted else [0], dtype=dtype)

    top = input.new_empty(target.shape if asked.is_top1 else [0], dtype=torch.bool)
    states = of_row(True), of_row(True)
    return input.new_empty(target.shape, dtype=dtype), *states, *[of_row(each) for each in asked[:4]], top


def save_log_prob(ctx, inputs, output):
    input, target, *given = inputs
    _, m, ls, entropy, _, *stats = output
    options, asked, kept = split(given)
    temperature = options.temperature if isinstance(options.temperature, Tensor) else None
    ctx.options, ctx.asked = options.with_number(), asked
    ctx.save_for_backward(input, target, m, ls, entropy, temperature, *kept[:3])
    ctx.mark_non_differentiable(m, ls, *stats)
    ctx.set_materialize_grads(False)


def log_prob_gradient(ctx, dlog_prob, dm, dls, dentropy, dlse, *_):
    input, target, m, ls, entropy, temperature, *kept = ctx.saved_tensors
    dentropy, dlse = dentropy if ctx.asked.entropy else None, dlse if ctx.asked.lse else None
    gradients = Gradients(dlog_prob, dentropy, dlse)
    dx, of_call = None, len(ctx.needs_input_grad)
    options = ctx.options if temperature is None else replace(ctx.options, temperature=temperature)
    if ctx.needs_input_grad[0] and any(each is not None for each in gradients):
        if torch.is_grad_enabled():
            dx = ops.differentiable_gradient(input, target, temperature, ctx.options, gradients, Kept(*kept))
        else:
            operator = torch.ops.fused_softmax.log_prob_backward.default
            dx = operator(input, target, m, ls, entropy, *gradients, *options.traced(), *kept)
    return (dx, *[None] * (of_call - 1))


def log_prob_backward(input, target, m, ls, entropy, dlog_prob, dentropy, dlse, *given):
    with torch._C.DisableTorchFunction():
        options, kept = LogProb.of_traced(given[:_N_OPTIONS]), Kept(*given[_N_OPTIONS:])
        gradients, temperature = Gradients(dlog_prob, dentropy, dlse), _temperature(options, input)
        options = options.with_number()
        if not (on_device(input) and input.numel()):
            kept = kept if input.numel() else EVERY
            return ops.differentiable_gradient(input, target, temperature, options, gradients, kept)
        rows = with_whole_rows(input)
        # Hooks of saved tensors may return other strides.
        m, ls, entropy = m.contiguous(), ls.contiguous(), entropy.contiguous()
        of_call = given_of(rows, target.contiguous(), temperature, options, kept)
        return backward(of_call, m, ls, entropy, gradients, options)


def fake_log_prob_backward(input, *given):
    return input.new_empty(input.shape)
