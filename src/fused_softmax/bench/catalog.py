"""What is measured, by name: operations, and a row for each provider. Of the standard library alone.

A row has all that the bench knows of a provider, so that a new one needs no other place. Its call is made by a function
in a file of `entries`, which is imported when it is first called: help and a wrong name need no PyTorch. That function
is given a case, or, over ranks, a rank's `Place`. It imports what it needs, and returns `call(*inputs)`. For a step it
returns what `entries/steps.py` says. If the import fails, the provider is absent, and the error is shown as the reason.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, Literal, NamedTuple

from fused_softmax.bench.entries.attention_kinds import KINDS
from fused_softmax.bench.entries.filters import FILTERS
from fused_softmax.bench.entries.segment_kinds import KINDS as SEGMENTS
from fused_softmax.bench.entries.segment_kinds import TITLES as TITLES_OF_SEGMENTS

OWN, TORCH, COMPILED = "fused_softmax", "torch", "torch.compile"  # which every operation has
ONE_GPU = "one GPU"  # beside the ranks of a group

# The kind of each operation of two models' logits.
DIVERGENCES = {
    "divergence": "kl",
    "divergence_reverse_kl": "reverse_kl",
    "divergence_jsd": "jsd",
    "divergence_tvd": "tvd",
}
_PASSES = {"": "", "_gradient": ", gradient"}

# Each with its title, in the order in which a report has them.
OPERATIONS = {
    "softmax": "softmax",
    "softmax_dim": "softmax over a strided dim",
    "softmax_float32": "softmax to float32",
    "softmax_causal": "softmax, causal",
    "softmax_masked": "softmax, bool mask",
    "softmax_biased": "softmax, added mask",
    "softmax_backward": "softmax's gradient",
    "log_softmax_backward": "log_softmax's gradient",
    "logsumexp": "logsumexp",
    "cross_entropy": "cross_entropy",
    "cross_entropy_gradient": "cross_entropy, gradient",
    "linear_cross_entropy": "linear_cross_entropy, gradient",
    "log_prob": "log_prob with entropy",
    "log_prob_gradient": "log_prob with entropy, gradient",
    "linear_log_prob": "linear_log_prob with entropy, gradient",
    **{
        f"{name}{end}": f"divergence, {kind.replace('_', ' ')}{of}"
        for name, kind in DIVERGENCES.items()
        for end, of in _PASSES.items()
    },
    "linear_divergence": "linear_divergence, jsd, gradient",
    "sample": "sample",
    "sample_greedy": "sample, the greatest",
    "sample_top_k": "sample, top-k 50",
    "sample_top_p": "sample, top-p 0.9",
    "sample_top_p_peaked": "sample, top-p 0.9, peaked rows",
    "sample_top_k_top_p": "sample, top-k 50 and top-p 0.9",
    "sample_min_p": "sample, min-p 0.05",
    "route": "a router's choice and weights",
    "route_losses": "a router with counts and both losses",
    "route_groups": "a router of 8 groups, sigmoid, bias",
    "route_gradient": "a router with both losses, gradient",
    **TITLES_OF_SEGMENTS,
    "attention": "attention, plain",
    "attention_gradient": "attention, plain, gradient",
    "attention_causal": "attention, causal",
    "attention_causal_gradient": "attention, causal, gradient",
    "attention_biased": "attention, bias",
    "attention_biased_gradient": "attention, bias, gradient",
    "attention_softcap": "attention, softcap",
    "attention_softcap_gradient": "attention, softcap, gradient",
    "attention_sinks": "attention, sinks and window",
    "attention_sinks_gradient": "attention, sinks and window, gradient",
    "attention_decode": "attention, one query",
}


class Step(NamedTuple):
    """A step of training a whole model.

    operation: the one that this package computes in it, by whose kernels its figures are current or not.
    baseline: the provider whose own errors bound the others'.
    """

    title: str
    operation: str
    baseline: str


STEPS = {
    "step_llama": Step("a training step of a Llama", "linear_cross_entropy", TORCH),
    "step_grpo": Step("a step of GRPO with a Llama", "linear_log_prob", "trl"),
}
COMPILING = (COMPILED, "own compiled")  # their first step takes a minute or more

Maker = Callable[[Any], Any]  # a case, a rank's place, or what a step is made for, to a call


@dataclass(frozen=True)
class Look:
    """How it looks in every chart. shape: a mark of Vega's, by name or as a path. dash: of a line, in pixels.

    dark: the colour on a dark page, if it is another.
    """

    colour: str
    shape: str
    dash: tuple[int, ...]
    dark: str = ""


UNKNOWN = Look("#777777", "wedge", (15, 6))  # of a provider that a results file names and nobody knows


@dataclass(frozen=True)
class Provider:
    """An implementation that is measured.

    makes: what makes its call, for each operation that it has. over_ranks: the same for rows in shards over ranks.
    steps: the same for steps of training.
    needs_gpu: it has no CPU path.
    kind: a peer; a kernel that this project grew from; or this package with other options than the default.
    aliases: its other spellings. heading: what the README's table calls it, if that names it.
    """

    name: str
    look: Look = UNKNOWN
    makes: Mapping[str, Maker] = field(default_factory=dict)
    over_ranks: Mapping[str, Maker] = field(default_factory=dict)
    steps: Mapping[str, Maker] = field(default_factory=dict)
    needs_gpu: bool = False
    kind: Literal["peer", "classic", "variant"] = "peer"
    aliases: tuple[str, ...] = ()
    heading: str = ""


def by(function: str, **options: Any) -> Maker:
    """The maker `file.function` of `entries`, with options."""
    return partial(_make, function, options)


def _make(function: str, options: Mapping[str, Any], at: Any) -> Any:
    file, _, name = function.partition(".")
    return getattr(import_module(f"fused_softmax.bench.entries.{file}"), name)(at, **options)


def _attention(maker: Maker, **facts: Any) -> dict[str, Maker]:
    """The maker for every kind of attention of which these facts hold."""
    return {name: maker for name, kind in KINDS.items() if all(getattr(kind, k) == v for k, v in facts.items())}


def _segments(maker: Maker, **facts: Any) -> dict[str, Maker]:
    """The maker for all kinds of segments of which these facts hold."""
    return {name: maker for name, kind in SEGMENTS.items() if all(getattr(kind, k) == v for k, v in facts.items())}


def _by_trl(betas: Mapping[str, float]) -> dict[str, Maker]:
    """The divergences that TRL's generalized JSD is, by its beta."""
    passes = {"": False, "_gradient": True}
    return {
        f"{name}{end}": by("losses.trl_divergence", beta=beta, gradient=gradient)
        for name, beta in betas.items()
        for end, gradient in passes.items()
    }


def _over_ranks(maker: Maker) -> dict[str, Maker]:
    return dict.fromkeys(("softmax", "cross_entropy_gradient", "linear_cross_entropy"), maker)


# In the order in which tables and charts have them. Okabe and Ito's colours can be told apart without colour vision.
PROVIDERS = (
    Provider(
        OWN,
        Look("#D55E00", "circle", (1, 0), dark="#ff8740"),
        steps={"step_llama": by("steps.own"), "step_grpo": by("steps.own_of_trl")},
        aliases=("fused", "triton"),
    ),
    Provider(f"{OWN} collective", over_ranks=_over_ranks(by("shards.own", transport="collective"))),
    Provider(f"{OWN} peer", over_ranks=_over_ranks(by("shards.own", transport="peer"))),
    Provider(ONE_GPU, over_ranks=_over_ranks(by("shards.one_gpu"))),
    Provider(
        TORCH,
        Look("#0072B2", "square", (6, 2), dark="#6f8dff"),
        steps={"step_llama": by("steps.plain")},
        heading="torch",
    ),
    Provider(
        COMPILED,
        Look("#56B4E9", "diamond", (2, 2)),
        steps={"step_llama": by("steps.plain", compiles=True)},
        aliases=("compile",),
        heading="torch.compile",
    ),
    Provider(
        "loss_parallel",
        over_ranks={
            "cross_entropy_gradient": by("shards.loss_parallel"),
            "linear_cross_entropy": by("shards.loss_parallel_of_layer"),
        },
    ),
    Provider("torch DTensor", over_ranks={"softmax": by("shards.gathered")}),
    Provider(
        "naive",
        Look("#999999", "M-1,-.7L-.7,-1L0,-.3L.7,-1L1,-.7L.3,0L1,.7L.7,1L0,.3L-.7,1L-1,.7L-.3,0Z", (8, 2, 2, 2)),
        {"softmax": by("softmaxes.classic", name="naive_softmax")},
        kind="classic",
    ),
    Provider(
        "persistent",
        Look("#009E73", "triangle-up", (4, 4)),
        {"softmax": by("softmaxes.classic", name="persistent_softmax")},
        needs_gpu=True,
        kind="classic",
    ),
    Provider(
        "hybrid",
        Look("#CC79A7", "triangle-down", (10, 3)),
        {"softmax": by("softmaxes.classic", name="hybrid_softmax")},
        needs_gpu=True,
        kind="classic",
    ),
    Provider(
        "online",
        Look("#E69F00", "cross", (1, 3)),
        {"softmax": by("softmaxes.classic", name="online_softmax")},
        needs_gpu=True,
        kind="classic",
    ),
    Provider(
        "liger",
        Look(
            "#8B6D05", "M0,-1L.25,-.35L.95,-.3L.4,.15L.6,.8L0,.45L-.6,.8L-.4,.15L-.95,-.3L-.25,-.35Z",
            (5, 1, 1, 1), dark="#cdaa33",
        ),
        {
            "softmax": by("softmaxes.liger"),
            "softmax_backward": by("softmaxes.liger_backward"),
            "linear_cross_entropy": by("layers.liger"),
            "linear_log_prob": by("layers.liger_log_prob"),
            **{f"{name}_gradient": by("losses.liger_divergence", kind=kind) for name, kind in DIVERGENCES.items()},
            "linear_divergence": by("layers.liger_jsd"),
        },
        over_ranks={"cross_entropy_gradient": by("shards.liger")},
        steps={"step_llama": by("steps.liger")},
        needs_gpu=True,
        heading="Liger",
    ),
    Provider(
        "quack",
        Look("#5D3A9B", "triangle-left", (12, 2, 2, 2, 2, 2), dark="#b39ae0"),
        {
            "softmax": by("softmaxes.quack"),
            "softmax_backward": by("softmaxes.quack_backward"),
            "cross_entropy_gradient": by("losses.quack"),
            "route": by("routing.quack"),
        },
        needs_gpu=True,
        heading="QuACK",
    ),
    Provider("megatron", over_ranks={"cross_entropy_gradient": by("shards.megatron")}),
    Provider("flash-attn", over_ranks={"cross_entropy_gradient": by("shards.flash_attn")}),
    Provider(
        "torch chunked",
        Look("#1B3A57", "triangle-right", (3, 3, 1, 3), dark="#7fa9d6"),
        {"linear_cross_entropy": by("layers.torch_chunked")},
    ),
    Provider(
        "cce",
        Look("#6A6A00", "M-.4,-.95L.4,-.95L.95,-.4L.95,.4L.4,.95L-.4,.95L-.95,.4L-.95,-.4Z", (14, 4)),
        {"linear_cross_entropy": by("layers.cut_cross_entropy")},
        heading="cut-cross-entropy",
    ),
    Provider(
        "trl",
        Look("#7A4E2D", "M-.9,-.9L.9,-.9L.9,-.5L.2,-.5L.2,.9L-.2,.9L-.2,-.5L-.9,-.5Z", (8, 1, 1, 1), dark="#c08a5e"),
        {
            "log_prob": by("losses.trl"),
            "log_prob_gradient": by("losses.trl", gradient=True),
            "linear_log_prob": by("layers.trl"),
            **_by_trl({"divergence": 0.0, "divergence_reverse_kl": 1.0, "divergence_jsd": 0.5}),
            "linear_divergence": by("layers.trl_jsd"),
        },
        steps={"step_grpo": by("steps.trl")},
        needs_gpu=True,
        heading="TRL",
    ),
    Provider(
        "verl",
        Look("#2A7F8E", "M-.9,-.9L-.45,-.9L0,.3L.45,-.9L.9,-.9L.2,.9L-.2,.9Z", (3, 4, 9, 4), dark="#5bb8c8"),
        {
            "log_prob": by("losses.verl"),
            "log_prob_gradient": by("losses.verl", gradient=True),
            "linear_log_prob": by("layers.verl"),
        },
        needs_gpu=True,
        heading="verl",
    ),
    Provider(
        "transformers",
        Look(
            "#FFB000",
            "M-.15,-1L.15,-1L.15,-.15L1,-.15L1,.15L.15,.15L.15,1L-.15,1L-.15,.15L-1,.15L-1,-.15L-.15,-.15Z", (7, 5),
        ),
        dict.fromkeys(FILTERS, by("sampling.by_transformers")),
    ),
    Provider(
        "vllm",
        Look("#648FFF", "M-.15,1L-.15,.1L-.9,-.6L-.7,-.85L0,-.2L.7,-.85L.9,-.6L.15,.1L.15,1Z", (2, 5)),
        {**dict.fromkeys(FILTERS, by("sampling.by_vllm")), "route": by("routing.vllm")},
        heading="vLLM",
    ),
    Provider(
        "flashinfer",
        Look("#76B900", "M-.15,-1L-.15,-.1L-.9,.6L-.7,.85L0,.2L.7,.85L.9,.6L.15,-.1L.15,-1Z", (9, 1, 3, 1)),
        # It has no sampler that takes the greatest.
        {name: by("sampling.by_flashinfer") for name, filters in FILTERS.items() if filters.temperature},
        heading="FlashInfer",
    ),
    Provider(
        "transformer_engine",
        Look("#3E6B00", "M-.9,-.9L.9,-.9L.9,-.6L-.6,-.6L-.6,-.15L.5,-.15L.5,.15L-.6,.15L-.6,.9L-.9,.9Z", (10, 2, 2, 4)),
        {
            "route": by("routing.transformer_engine"),
            "route_losses": by("routing.transformer_engine_losses"),
            "route_gradient": by("routing.transformer_engine_losses", passes=True),
        },
        needs_gpu=True,
        heading="Transformer Engine",
    ),
    Provider(
        "pyg",
        Look("#D81B60", "M-.9,-.2L-.2,-.9L.9,.2L.2,.9Z", (6, 1, 1, 3)),
        # It has no gradient but autograd's, which needs the forward pass.
        _segments(by("segments.by_pyg"), gradient=False),
        heading="PyG",
    ),
    Provider(
        "torch_scatter",
        Look("#B07AA1", "M-.9,.2L.2,-.9L.9,-.2L-.2,.9Z", (2, 3, 5, 3)),
        _segments(by("segments.by_torch_scatter"), gradient=False),
        heading="torch_scatter",
    ),
    Provider(
        "padded",
        Look("#117A65", "M-1,-.8L1,-.8L1,-.4L-.2,-.4L-.2,.8L-1,.8Z", (4, 6), dark="#45c0a5"),
        _segments(by("segments.by_padding"), unsorted=False),
    ),
    Provider(
        "padded compiled",
        Look("#76D7C4", "M-1,.8L1,.8L1,.4L-.2,.4L-.2,-.8L-1,-.8Z", (1, 4)),
        _segments(by("segments.by_padding_compiled"), unsorted=False),
    ),
    Provider(
        "sdpa cudnn",
        Look("#3B7A00", "M1,-.15L.1,-.15L-.6,-.9L-.85,-.7L-.2,0L-.85,.7L-.6,.9L.1,.15L1,.15Z", (16, 2, 2, 2)),
        _attention(by("attention.by_sdpa", backend="CUDNN_ATTENTION"), plain=True),
        needs_gpu=True,
        heading="cuDNN",
    ),
    Provider(
        "sdpa flash",
        Look("#0B559F", "M-1,-.15L-.1,-.15L.6,-.9L.85,-.7L.2,0L.85,.7L.6,.9L-.1,.15L-1,.15Z", (1, 1)),
        _attention(by("attention.by_sdpa", backend="FLASH_ATTENTION"), plain=True),
    ),
    Provider(
        "sdpa efficient",
        Look("#6BAED6", "M-.15,-1L.15,-1L.15,1L-.15,1Z", (5, 5, 1, 5)),
        _attention(by("attention.by_sdpa", backend="EFFICIENT_ATTENTION"), plain=True),
        needs_gpu=True,
    ),
    Provider(
        "sdpa math",
        Look("#525252", "M-1,-.3L1,-.3L1,.3L-1,.3Z", (11, 2, 5, 2)),
        _attention(by("attention.by_sdpa", backend="MATH"), plain=True),
    ),
    Provider(
        "flex",
        Look("#AA4499", "M-.6,-1L.6,-1L.6,-.7L-.3,-.7L-.3,-.1L.4,-.1L.4,.2L-.3,.2L-.3,1L-.6,1Z", (2, 2, 6, 2)),
        _attention(by("attention.by_flex")),
        needs_gpu=True,
        heading="FlexAttention",
    ),
    Provider(
        "xformers",
        Look(
            "#DDCC77", "M-.8,-.6L-.6,-.8L0,-.2L.6,-.8L.8,-.6L.2,0L.8,.6L.6,.8L0,.2L-.6,.8L-.8,.6L-.2,0Z", (8, 5),
        ),
        _attention(by("attention.by_xformers"), plain=True, group=1),
        needs_gpu=True,
    ),
    Provider(
        "flash-attn 3",
        Look(
            "#117733",
            "M-.6,-1L.6,-1L.6,1L-.6,1L-.6,.7L.3,.7L.3,.15L-.4,.15L-.4,-.15L.3,-.15L.3,-.7L-.6,-.7Z", (4, 1, 4, 5),
        ),
        _attention(by("attention.by_flash_attention_3"), bias=False, window=None),
        needs_gpu=True,
        heading="FlashAttention 3",
    ),
    Provider(
        "cuequivariance",
        Look("#882255", "M.6,-.8L-.6,-.8L-.6,.8L.6,.8L.6,.5L-.3,.5L-.3,-.5L.6,-.5Z", (6, 6)),
        _attention(by("attention.by_cuequivariance"), bias=True),
        needs_gpu=True,
    ),
    Provider(
        "in one chunk",
        Look("#7F2704", "M0,-1L.95,-.31L.59,.81L-.59,.81L-.95,-.31Z", (13, 2), dark="#c96a3a"),
        {"linear_cross_entropy": by("layers.own_in_one_chunk")},
        kind="variant",
    ),
    Provider(
        "chunks of 1024",
        Look("#F4A582", "M0,-1L.55,0L0,1L-.55,0Z", (3, 1, 1, 1)),
        {"linear_cross_entropy": by("layers.own", chunk_size=1024)},
        kind="variant",
    ),
    Provider(
        "chunks of 256",
        Look("#C51B7D", "M-1,-.5L-.5,-1L0,-.5L.5,-1L1,-.5L.5,0L1,.5L.5,1L0,.5L-.5,1L-1,.5L-.5,0Z", (7, 1)),
        {"linear_cross_entropy": by("layers.own", chunk_size=256)},
        kind="variant",
    ),
    Provider(
        "summed in place",
        Look("#4D9221", "M0,-1L.87,-.5L.87,.5L0,1L-.87,.5L-.87,-.5Z", (1, 5)),
        {"linear_cross_entropy": by("layers.own", accumulate="input")},
        kind="variant",
    ),
    Provider(
        "32 in place",
        Look("#00441B", "M-1,0L-.5,-.87L.5,-.87L1,0L.5,.87L-.5,.87Z", (9, 3, 3, 3), dark="#3db46d"),
        {"linear_cross_entropy": by("layers.own", chunk_size=32, accumulate="input")},
        steps={"step_llama": by("steps.own", chunk_size=32, accumulate="input")},
        kind="variant",
    ),
    Provider(
        "beside Liger",
        Look("#3F007D", "M0,-1L.6,0L0,1L-.6,0ZM-1,-.2L-.7,-.2L-.7,.2L-1,.2Z", (8, 2, 2, 2), dark="#9e8ac8"),
        steps={"step_llama": by("steps.beside_liger")},
        kind="variant",
        needs_gpu=True,
    ),
    Provider(
        "own compiled",
        Look("#A63603", "M-1,-.2L.2,-.2L.2,-1L.6,-1L.6,.2L-.6,.2L-.6,1L-1,1Z", (5, 2, 1, 2), dark="#e07a45"),
        steps={"step_llama": by("steps.own", compiles=True)},
        kind="variant",
    ),
    Provider(
        "logits kept",
        Look("#6A51A3", "M-1,-.6L1,-.6L1,.6L.6,.6L.6,-.2L-.6,-.2L-.6,.6L-1,.6Z", (6, 3, 6, 1), dark="#a58be0"),
        {"linear_log_prob": by("layers.own_log_prob", logits="keep")},
        kind="variant",
    ),
    Provider(
        "logits recomputed",
        Look("#BCBDDC", "M-1,.6L1,.6L1,-.6L.6,-.6L.6,.2L-.6,.2L-.6,-.6L-1,-.6Z", (2, 1, 5, 1)),
        {"linear_log_prob": by("layers.own_log_prob", logits="recompute")},
        kind="variant",
    ),
    Provider(
        "own kernels",
        Look("#FB6A4A", "M-.4,-.4L.4,-.4L.4,.4L-.4,.4Z", (4, 2, 1, 2)),
        _attention(by("attention.own", deterministic=True)),
        kind="variant",
    ),
)  # fmt: skip

NAMED = {each.name: each for each in PROVIDERS}
PROVIDER_ALIASES = {alias: each.name for each in PROVIDERS for alias in each.aliases}
CLASSICS = tuple(each.name for each in PROVIDERS if each.kind == "classic")
NEEDS_GPU = frozenset(each.name for each in PROVIDERS if each.needs_gpu)
VARIANTS = frozenset(each.name for each in PROVIDERS if each.kind == "variant")
# Of each operation, the providers beside this package, torch and torch.compile, which all have.
PEERS = {operation: tuple(each.name for each in PROVIDERS if operation in each.makes) for operation in OPERATIONS}
# Of rows in shards over ranks: each operation that `bench shards` measures, and all of its providers.
PEERS_OF_SHARDS = {
    operation: names
    for operation in OPERATIONS
    if (names := tuple(each.name for each in PROVIDERS if operation in each.over_ranks))
}
# Of a step of training, all of its providers.
PEERS_OF_STEPS = {step: tuple(each.name for each in PROVIDERS if step in each.steps) for step in STEPS}
BY_TRANSPORT = tuple(name for name in NAMED if name.startswith(f"{OWN} "))


def makers(operation: str) -> dict[str, Maker]:
    """Of an operation's providers beside the three that all have, what makes the call of each."""
    return {name: NAMED[name].makes[operation] for name in PEERS[operation]}


def provider_names(operations: Iterable[str] = ()) -> list[str]:
    """The providers of the named operations, or of all operations."""
    peers = (name for operation in operations or PEERS for name in PEERS[operation])
    return list(dict.fromkeys((OWN, TORCH, COMPILED, *peers)))


def look_of(name: str) -> Look:
    return NAMED[name].look if name in NAMED else UNKNOWN


def in_order(names: Collection[str]) -> list[str]:
    """The names of providers in the order of their rows, then those that nobody knows."""
    return [*(name for name in NAMED if name in names), *sorted(set(names) - NAMED.keys())]
