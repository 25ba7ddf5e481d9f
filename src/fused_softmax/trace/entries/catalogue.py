"""All kernels that can be recorded."""

from fused_softmax.trace.entries.kernel import Kernel


def kernels() -> dict[str, Kernel]:
    """All kernels by name, in the order in which to learn them."""
    from fused_softmax.trace.entries.attention import ATTENTION
    from fused_softmax.trace.entries.classic import CLASSIC
    from fused_softmax.trace.entries.rows import OURS
    from fused_softmax.trace.entries.sampling import DRAWS

    return {kernel.name: kernel for kernel in (*CLASSIC, *OURS, *DRAWS, *ATTENTION)}
