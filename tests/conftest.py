import os

import numpy as np
import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    """The GPU where there is one; the CPU, for Triton's interpreter, where there is none or where it was asked for."""
    interpreting = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
    return "cuda" if torch.cuda.is_available() and not interpreting else "cpu"


def peaked(n_rows: int, n_cols: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Logits as a trained model gives them, on the CPU: a wide spread, and three columns a row that stand far above it.

    Outputs run from near 1 to near 0, so a wrong maximum, a lost tile or a sum in the wrong scale shows.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n_rows, n_cols, generator=generator, dtype=torch.float64) * 3
    if x.numel():
        outliers = torch.randint(n_cols, (n_rows, 3), generator=generator)
        heights = 10 + 4 * torch.rand(n_rows, 3, generator=generator, dtype=torch.float64)
        x.scatter_(1, outliers, heights)
    return x.to(dtype)


@pytest.fixture(scope="session", autouse=True)
def _maximum_as_on_a_gpu():
    """A GPU's maximum of a NaN and a number is the number; the interpreter's would be NaN, and hide a NaN that is lost."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    from fused_softmax import rowwise

    if os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1":
        InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
        InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
        rowwise.POLL_LIMIT = tl.constexpr(100)  # in turn, programs wait for nothing, and a bug should not take hours
    np.seterr(all="ignore")  # NaN and infinity are asked for, and NumPy warns of them
