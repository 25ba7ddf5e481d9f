import gc
import os
from dataclasses import replace

import interpreter
import numpy as np
import products
import pytest
import torch

from fused_softmax.core import calls, launch

collect_ignore = ["peers"]  # what runs other projects' tests; test_peers_runner.py is its test


INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
# torch.manual_seed notes where it was called, once for each kind of accelerator, which takes a millisecond.
SEED = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
# A mark of what kernels must compute.
kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="without a GPU or the interpreter, CPU tensors take ATen"
)


@pytest.fixture(scope="session")
def device() -> str:
    """The GPU where there is one; the CPU, for Triton's interpreter, where there is none or where it was asked for."""
    return "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"


def pytest_configure(config):
    products.QUICK = "not exhaustive" in config.option.markexpr
    gc.disable()  # until all tests are collected: the collector would take a third of that time, and free little


def pytest_collection_finish():
    gc.freeze()  # so that the collector does not look at the tests again
    gc.enable()


def pytest_ignore_collect(collection_path, config):
    """Leave out files of which a run asks for nothing: their imports take much of it."""
    asked, name = config.option.markexpr, collection_path.stem.removeprefix("test_")
    if collection_path.suffix != ".py":
        return None
    if "not guard" in asked and "not exhaustive" in asked and name in products.GUARDS:
        return True
    return True if asked.startswith("compiles") and "mark.compiles" not in collection_path.read_text() else None


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc):
    result = yield  # once all parameters are known
    products.choose(metafunc)
    return result


@pytest.hookimpl(tryfirst=True)  # before `-m` takes out what it does not ask for
def pytest_collection_modifyitems(items):
    for item in items:
        products.mark_item(item)


def pytest_runtest_setup(item):
    SEED(0)  # what fails once fails again
    calls.forget()  # a test that replaces a part is not to find a call that was kept with the old one


@pytest.fixture(scope="session")
def ranks():
    """Processes that are ranks of gloo groups, for all tests of a worker."""
    from ranks import pool

    with pool() as found:
        yield found


@pytest.fixture
def default_dtype():
    """A function that sets torch's default dtype until the end of the test."""
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@pytest.fixture
def way(request, monkeypatch) -> str:
    """Who draws, as the test's parameter says: "torch", by which many draws take little time, or "kernels"."""
    from fused_softmax.core.route import Route
    from fused_softmax.ops.sampling import sample as sampling
    from fused_softmax.ops.sampling import speculative

    if request.param == "torch":
        for each in (sampling, speculative):
            monkeypatch.setattr(each, "route_of", lambda *tensors, **_: Route.COMPOSED)
    return request.param


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
def _interpreter_as_a_gpu():
    import triton.language as tl

    from fused_softmax.core.kernels import exchange

    if INTERPRETED:
        interpreter.as_a_gpu()
        interpreter.check_launches()
        exchange.POLLS = tl.constexpr(100)  # in turn, programs wait for nothing, and a bug should not take hours
    np.seterr(all="ignore")  # NaN and infinity are asked for, and NumPy warns of them


@pytest.fixture
def nvidia(monkeypatch):
    """The arithmetic of NVIDIA's GPUs wherever the kernels run: exp as one fused multiply-add and exp2."""
    from fused_softmax.core.kernels.spec import Spec

    prepare = launch.prepare

    def with_ptx(kernel, grid, tensors, scalars, constexprs, **options):
        specs = {k: replace(v, ptx=True) if isinstance(v, Spec) else v for k, v in constexprs.items()}
        return prepare(kernel, grid, tensors, scalars, specs, **options)

    if os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1":
        monkeypatch.setattr(launch, "prepare", with_ptx)
