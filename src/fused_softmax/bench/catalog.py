"""The names that commands take: operations, their providers, and other spellings. Of the standard library alone.

Help and a wrong name need no PyTorch, so the names are here, and a test holds `operations.OPERATIONS` to them.
"""

import re
from collections.abc import Iterable, Mapping

OWN, TORCH, COMPILED = "fused_softmax", "torch", "torch.compile"
PROVIDER_ALIASES = {"fused": OWN, "triton": OWN, "compile": COMPILED}
CLASSIC = ("naive", "persistent", "hybrid", "online")
SAMPLERS = ("transformers", "vllm", "flashinfer")

SDPA = ("sdpa cudnn", "sdpa flash", "sdpa efficient", "sdpa math")
PLAIN_ATTENTION = ("own kernels", *SDPA, "flex", "xformers", "flash-attn 3")
BIASED_ATTENTION = ("own kernels", *SDPA, "flex", "xformers", "cuequivariance")

# Of each operation, the providers beside this package, torch and torch.compile, which all have.
PEERS: dict[str, tuple[str, ...]] = {
    "softmax": (*CLASSIC, "liger", "quack"),
    "softmax_dim": (),
    "softmax_float32": (),
    "softmax_causal": (),
    "softmax_masked": (),
    "softmax_biased": (),
    "softmax_backward": ("liger", "quack"),
    "log_softmax_backward": (),
    "logsumexp": (),
    "cross_entropy": (),
    "cross_entropy_gradient": ("quack",),
    "linear_cross_entropy": (
        "torch chunked", "liger", "cce", "in one chunk", "chunks of 1024", "chunks of 256", "summed in place",
        "32 in place",
    ),
    "sample": SAMPLERS,
    "sample_greedy": ("transformers", "vllm"),
    "sample_top_k": SAMPLERS,
    "sample_top_p": SAMPLERS,
    "sample_top_p_peaked": SAMPLERS,
    "sample_top_k_top_p": SAMPLERS,
    "sample_min_p": SAMPLERS,
    "attention": PLAIN_ATTENTION,
    "attention_gradient": PLAIN_ATTENTION,
    "attention_causal": PLAIN_ATTENTION,
    "attention_causal_gradient": PLAIN_ATTENTION,
    "attention_biased": BIASED_ATTENTION,
    "attention_biased_gradient": BIASED_ATTENTION,
    "attention_softcap": ("own kernels", "flex", "flash-attn 3"),
    "attention_softcap_gradient": ("own kernels", "flex", "flash-attn 3"),
    "attention_sinks": ("own kernels", "flex"),
    "attention_sinks_gradient": ("own kernels", "flex"),
    "attention_decode": ("own kernels", *SDPA, "flex", "flash-attn 3"),
}  # fmt: skip

# Of rows in shards over ranks: each operation that `bench shards` measures, and all of its providers.
ONE_GPU = "one GPU"
BY_TRANSPORT = (f"{OWN} collective", f"{OWN} peer")
PEERS_OF_SHARDS: dict[str, tuple[str, ...]] = {
    "cross_entropy_gradient": (*BY_TRANSPORT, ONE_GPU, "loss_parallel", "liger", "megatron", "flash-attn"),
    "linear_cross_entropy": (*BY_TRANSPORT, ONE_GPU, "loss_parallel"),
    "softmax": (*BY_TRANSPORT, ONE_GPU, "torch DTensor"),
}


def provider_names(operations: Iterable[str] = ()) -> list[str]:
    """The providers of the named operations, or of all operations."""
    peers = (name for operation in operations or PEERS for name in PEERS[operation])
    return list(dict.fromkeys((OWN, TORCH, COMPILED, *peers)))


def find(what: str, text: str, known: Iterable[str], aliases: Mapping[str, str] | None = None) -> str:
    """The known name that a text spells, whatever its case, hyphens, underscores, dots and spaces, or by an alias.

    Raises ValueError, with all names, for a text that spells none.
    """
    names = list(known)
    spelled = {_key(name): name for name in names}
    spelled |= {_key(alias): name for alias, name in (aliases or {}).items() if name in names}
    if (found := spelled.get(_key(text))) is None:
        raise ValueError(f"unknown {what} {text.strip()!r}; known: {', '.join(names)}")
    return found


def _key(text: str) -> str:
    return re.sub(r"[-_. ]", "", text.lower())
