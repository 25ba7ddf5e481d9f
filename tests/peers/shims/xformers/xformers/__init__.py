"""xformers' names on fused_softmax."""


def _is_triton_available():
    return True
