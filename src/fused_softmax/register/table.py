"""The operators of this package, one row each: whatever registers, replaces, measures, records or tests them reads it.

A new operator is a kernel file, an op file, a reference, its rules and a row here; CONTRIBUTING.md has the whole list.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fused_softmax.core import no_gradient_operator as no_gradient_rules
from fused_softmax.core import one_dim
from fused_softmax.ops.attention import operators as attention_rules
from fused_softmax.ops.attention import reference as reference_attention
from fused_softmax.ops.attention.attention import attention
from fused_softmax.ops.losses import divergence_operators as divergence_rules
from fused_softmax.ops.losses import linear_divergence_operators as linear_divergence_rules
from fused_softmax.ops.losses import linear_log_prob_operators as linear_log_prob_rules
from fused_softmax.ops.losses import log_prob_operators as log_prob_rules
from fused_softmax.ops.losses import operators as loss_rules
from fused_softmax.ops.losses import reference as losses_reference
from fused_softmax.ops.losses.cross_entropy import cross_entropy
from fused_softmax.ops.losses.divergence import divergence
from fused_softmax.ops.losses.linear_cross_entropy import linear_cross_entropy
from fused_softmax.ops.losses.linear_divergence import linear_divergence
from fused_softmax.ops.losses.linear_log_prob import linear_log_prob
from fused_softmax.ops.losses.log_prob import log_prob
from fused_softmax.ops.routing import operators as routing_rules
from fused_softmax.ops.routing import reference as routing_reference
from fused_softmax.ops.routing.route import route
from fused_softmax.ops.sampling import operators as sampling_rules
from fused_softmax.ops.sampling import reference as reference_sampling
from fused_softmax.ops.sampling.sample import sample
from fused_softmax.ops.segments import operators as segment_rules
from fused_softmax.ops.segments import reference as reference_segments
from fused_softmax.ops.segments import segments
from fused_softmax.ops.softmax import gradients as softmax_gradients
from fused_softmax.ops.softmax import logsumexp as lse_ops
from fused_softmax.ops.softmax import operators as softmax_rules
from fused_softmax.ops.softmax import reference
from fused_softmax.ops.softmax import softmax as softmax_ops


@dataclass(frozen=True)
class Operator:
    """One operator of torch.ops.fused_softmax.

    name, schema: as torch.library defines it. run: what computes it, on any device. fake: shapes and dtypes alone.
    save, gradient: autograd's setup_context and backward; None for an operator that nobody differentiates.
    batched: the rule for vmap, called with the operator first; None leaves vmap to torch's operations.
    flops: what torch.utils.flop_counter counts of a call, of its arguments and, as `out_val`, its results; None for an
        operator that makes no matrix product.
    public: the function that users call; None for a gradient. reference: the same in float64.
    bench: its entries of bench.operations.OPERATIONS. recordings: the kernels of it that the visualizer has.
    """

    name: str
    schema: str
    run: Callable[..., Any]
    fake: Callable[..., Any]
    save: Callable[..., Any] | None = None
    gradient: Callable[..., Any] | None = None
    batched: Callable[..., Any] | None = None
    flops: Callable[..., int] | None = None
    public: Callable[..., Any] | None = None
    reference: Callable[..., Any] | None = None
    bench: tuple[str, ...] = ()
    recordings: tuple[str, ...] = field(default=())


OPERATORS = (
    Operator(
        name="softmax",
        schema=softmax_rules.SOFTMAX,
        run=partial(softmax_rules.softmax, False),
        fake=one_dim.fake,
        save=partial(softmax_rules.save_softmax, False),
        gradient=partial(softmax_rules.gradients_of, softmax_gradients.gradients),
        batched=softmax_rules.batched_softmax,
        public=softmax_ops.softmax,
        reference=reference.softmax,
        bench=("softmax", "softmax_dim", "softmax_float32", "softmax_causal", "softmax_masked", "softmax_biased"),
        recordings=("tile", "row", "split", "stream", "column"),
    ),
    Operator(
        name="softmax_backward",
        schema=softmax_rules.BACKWARD,
        run=partial(softmax_rules.softmax_backward, False),
        fake=one_dim.fake_backward,
        save=softmax_rules.save_backward,
        gradient=softmax_rules.softmax_second,
        batched=one_dim.batched_backward,
        bench=("softmax_backward",),
        recordings=("backward",),
    ),
    Operator(
        name="log_softmax",
        schema=softmax_rules.SOFTMAX,
        run=partial(softmax_rules.softmax, True),
        fake=one_dim.fake,
        save=partial(softmax_rules.save_softmax, True),
        gradient=partial(softmax_rules.gradients_of, softmax_gradients.gradients),
        batched=softmax_rules.batched_softmax,
        public=softmax_ops.log_softmax,
        reference=reference.log_softmax,
    ),
    Operator(
        name="log_softmax_backward",
        schema=softmax_rules.BACKWARD,
        run=partial(softmax_rules.softmax_backward, True),
        fake=one_dim.fake_backward,
        save=softmax_rules.save_backward,
        gradient=softmax_rules.log_softmax_second,
        batched=one_dim.batched_backward,
        bench=("log_softmax_backward",),
    ),
    Operator(
        name="logsumexp",
        schema=softmax_rules.LOGSUMEXP,
        run=softmax_rules.logsumexp,
        fake=softmax_rules.fake_logsumexp,
        save=softmax_rules.save_logsumexp,
        gradient=partial(softmax_rules.gradients_of, lse_ops.gradients),
        batched=softmax_rules.batched_logsumexp,
        public=lse_ops.logsumexp,
        reference=reference.logsumexp,
        bench=("logsumexp",),
    ),
    Operator(
        name="cross_entropy",
        schema=loss_rules.CROSS_ENTROPY,
        run=loss_rules.cross_entropy,
        fake=loss_rules.fake_cross_entropy,
        save=loss_rules.save_cross_entropy,
        gradient=loss_rules.cross_entropy_gradient,
        public=cross_entropy,
        reference=losses_reference.cross_entropy,
        bench=("cross_entropy", "cross_entropy_gradient"),
        recordings=("cross-entropy",),
    ),
    Operator(
        name="cross_entropy_given_lse",
        schema=loss_rules.CROSS_ENTROPY_GIVEN_LSE,
        run=loss_rules.cross_entropy_given_lse,
        fake=loss_rules.fake_given_lse,
        save=loss_rules.save_given_lse,
        gradient=loss_rules.given_lse_gradient,
    ),
    Operator(
        name="cross_entropy_backward",
        schema=loss_rules.CROSS_ENTROPY_BACKWARD,
        run=loss_rules.cross_entropy_backward,
        fake=loss_rules.fake_backward,
        save=loss_rules.save_cross_entropy_backward,
        gradient=loss_rules.cross_entropy_second,
    ),
    Operator(
        name="linear_cross_entropy",
        schema=loss_rules.LINEAR_CROSS_ENTROPY,
        run=loss_rules.linear_cross_entropy,
        fake=loss_rules.fake_linear,
        save=loss_rules.save_linear,
        gradient=loss_rules.linear_gradient,
        flops=loss_rules.flops_of_linear,
        public=linear_cross_entropy,
        reference=losses_reference.linear_cross_entropy,
        bench=("linear_cross_entropy",),
    ),
    Operator(
        name="linear_cross_entropy_backward",
        schema=loss_rules.LINEAR_BACKWARD,
        run=loss_rules.linear_backward,
        fake=loss_rules.fake_linear_backward,
        flops=loss_rules.flops_of_linear_backward,
    ),
    Operator(
        name="log_prob",
        schema=log_prob_rules.LOG_PROB,
        run=log_prob_rules.log_prob,
        fake=log_prob_rules.fake_log_prob,
        save=log_prob_rules.save_log_prob,
        gradient=log_prob_rules.log_prob_gradient,
        public=log_prob,
        reference=losses_reference.log_prob,
        bench=("log_prob", "log_prob_gradient"),
    ),
    Operator(
        name="log_prob_backward",
        schema=log_prob_rules.BACKWARD,
        run=log_prob_rules.log_prob_backward,
        fake=log_prob_rules.fake_log_prob_backward,
    ),
    Operator(
        name="linear_log_prob",
        schema=linear_log_prob_rules.LINEAR_LOG_PROB,
        run=linear_log_prob_rules.linear_log_prob,
        fake=linear_log_prob_rules.fake_linear_log_prob,
        save=linear_log_prob_rules.save_linear_log_prob,
        gradient=linear_log_prob_rules.linear_log_prob_gradient,
        flops=linear_log_prob_rules.flops_of_linear_log_prob,
        public=linear_log_prob,
        reference=losses_reference.linear_log_prob,
        bench=("linear_log_prob",),
    ),
    Operator(
        name="linear_log_prob_backward",
        schema=linear_log_prob_rules.BACKWARD,
        run=linear_log_prob_rules.linear_log_prob_backward,
        fake=linear_log_prob_rules.fake_linear_log_prob_backward,
        flops=linear_log_prob_rules.flops_of_linear_log_prob_backward,
    ),
    Operator(
        name="divergence",
        schema=divergence_rules.DIVERGENCE,
        run=divergence_rules.divergence,
        fake=divergence_rules.fake_divergence,
        save=divergence_rules.save_divergence,
        gradient=divergence_rules.divergence_gradient,
        public=divergence,
        reference=losses_reference.divergence,
        bench=(
            "divergence",
            "divergence_gradient",
            "divergence_reverse_kl",
            "divergence_reverse_kl_gradient",
            "divergence_jsd",
            "divergence_jsd_gradient",
            "divergence_tvd",
            "divergence_tvd_gradient",
        ),
    ),
    Operator(
        name="divergence_backward",
        schema=divergence_rules.BACKWARD,
        run=divergence_rules.divergence_backward,
        fake=divergence_rules.fake_divergence_backward,
    ),
    Operator(
        name="linear_divergence",
        schema=linear_divergence_rules.LINEAR_DIVERGENCE,
        run=linear_divergence_rules.linear_divergence,
        fake=linear_divergence_rules.fake_linear_divergence,
        save=linear_divergence_rules.save_linear_divergence,
        gradient=linear_divergence_rules.linear_divergence_gradient,
        flops=linear_divergence_rules.flops_of_linear_divergence,
        public=linear_divergence,
        reference=losses_reference.linear_divergence,
        bench=("linear_divergence",),
    ),
    Operator(
        name="linear_divergence_backward",
        schema=linear_divergence_rules.BACKWARD,
        run=linear_divergence_rules.linear_divergence_backward,
        fake=linear_divergence_rules.fake_linear_divergence_backward,
        flops=linear_divergence_rules.flops_of_linear_divergence_backward,
    ),
    Operator(
        name="sample",
        schema=sampling_rules.SAMPLE,
        run=sampling_rules.sample,
        fake=sampling_rules.fake_sample,
        public=sample,
        reference=reference_sampling.sample,
        bench=(
            "sample",
            "sample_greedy",
            "sample_top_k",
            "sample_top_p",
            "sample_top_p_peaked",
            "sample_top_k_top_p",
            "sample_min_p",
        ),
        recordings=("draw",),
    ),
    Operator(
        name="route",
        schema=routing_rules.ROUTE,
        run=routing_rules.route,
        fake=routing_rules.fake_route,
        save=routing_rules.save_route,
        gradient=routing_rules.route_gradient,
        batched=routing_rules.batched_route,
        public=route,
        reference=routing_reference.route,
        bench=("route", "route_losses", "route_groups", "route_gradient"),
        recordings=("route",),
    ),
    Operator(
        name="route_backward",
        schema=routing_rules.BACKWARD,
        run=routing_rules.route_backward,
        fake=routing_rules.fake_route_backward,
        batched=routing_rules.batched_route_backward,
    ),
    Operator(
        **segment_rules.rules_of("segment_softmax"),
        public=segments.segment_softmax,
        reference=reference_segments.segment_softmax,
        bench=(
            "segment_softmax_arxiv",
            "segment_softmax_arxiv_gradient",
            "segment_softmax_products",
            "segment_softmax_products_gradient",
            "segment_softmax_reddit",
            "segment_softmax_reddit_gradient",
            "segment_softmax_texts",
            "segment_softmax_texts_gradient",
            "segment_softmax_short",
            "segment_softmax_short_gradient",
            "segment_softmax_hub",
            "segment_softmax_hub_gradient",
            "segment_softmax_one",
            "segment_softmax_one_gradient",
            "segment_softmax_unsorted",
            "segment_softmax_unsorted_gradient",
        ),
        recordings=("segments",),
    ),
    Operator(
        **segment_rules.rules_of("segment_log_softmax"),
        public=segments.segment_log_softmax,
        reference=reference_segments.segment_log_softmax,
    ),
    Operator(
        **segment_rules.rules_of("segment_logsumexp"),
        public=segments.segment_logsumexp,
        reference=reference_segments.segment_logsumexp,
    ),
    Operator(
        name="segment_softmax_backward",
        schema=segment_rules.BACKWARD,
        run=partial(segment_rules.backward, "segment_softmax"),
        fake=segment_rules.fake_backward,
    ),
    Operator(
        name="segment_log_softmax_backward",
        schema=segment_rules.BACKWARD,
        run=partial(segment_rules.backward, "segment_log_softmax"),
        fake=segment_rules.fake_backward,
    ),
    Operator(
        name="segment_logsumexp_backward",
        schema=segment_rules.LSE_BACKWARD,
        run=segment_rules.lse_backward,
        fake=segment_rules.fake_lse_backward,
    ),
    Operator(
        name="attention",
        schema=attention_rules.ATTENTION,
        run=attention_rules.attention,
        fake=attention_rules.fake_attention,
        save=attention_rules.save_attention,
        gradient=attention_rules.attention_gradient,
        batched=attention_rules.batched_attention,
        flops=attention_rules.flops_of_attention,
        public=attention,
        reference=reference_attention.attention,
        bench=(
            "attention",
            "attention_gradient",
            "attention_causal",
            "attention_causal_gradient",
            "attention_biased",
            "attention_biased_gradient",
            "attention_softcap",
            "attention_softcap_gradient",
            "attention_sinks",
            "attention_sinks_gradient",
            "attention_decode",
        ),
        recordings=("attention",),
    ),
    Operator(
        name="attention_backward",
        schema=attention_rules.ATTENTION_BACKWARD,
        run=attention_rules.attention_backward,
        fake=attention_rules.fake_attention_backward,
        batched=attention_rules.batched_attention_backward,
        flops=attention_rules.flops_of_attention_backward,
    ),
    Operator(
        name="no_gradient",
        schema=no_gradient_rules.NO_GRADIENT,
        run=no_gradient_rules.no_gradient,
        fake=no_gradient_rules.fake_no_gradient,
        save=no_gradient_rules.save,
        gradient=no_gradient_rules.gradient,
        batched=no_gradient_rules.batched_no_gradient,
    ),
    Operator(
        name="no_gradient_backward",
        schema=no_gradient_rules.REFUSED,
        run=no_gradient_rules.refused,
        fake=no_gradient_rules.fake_refused,
        batched=no_gradient_rules.batched_refused,
    ),
)
