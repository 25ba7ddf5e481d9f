import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import products
import pytest
import torch

from fused_softmax.core import calls, launch

collect_ignore = ["peers"]  # what runs other projects' tests; test_peers_runner.py is its test


INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
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


def pytest_ignore_collect(collection_path, config):
    """Where only what compiles is asked for, leave out files without it: their imports take most of such a run."""
    alone = config.option.markexpr.startswith("compiles") and collection_path.suffix == ".py"
    return True if alone and "mark.compiles" not in collection_path.read_text() else None


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
    torch.manual_seed(0)  # what fails once fails again
    calls.forget()  # a test that replaces a part is not to find a call that was kept with the old one


@pytest.fixture(scope="session")
def ranks():
    """Processes that are ranks of gloo groups, for all tests of a worker."""
    from ranks import pool

    with pool() as found:
        yield found


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


def _patch_the_language_once():
    """Triton does and undoes it at every call of a function in a kernel: more than half of the interpreter's time."""
    from triton.runtime import interpreter

    patched = set()
    patch = interpreter._patch_lang

    def patch_once(fn):
        if id(fn.__globals__) not in patched:
            patched.add(id(fn.__globals__))
            patch(fn)
        return interpreter._LangPatchScope()  # with nothing to restore

    def call(self, *args, **kwargs):
        patch_once(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter._patch_lang = patch_once
    interpreter.InterpretedFunction.__call__ = call


@pytest.fixture(scope="session", autouse=True)
def _interpreter_as_a_gpu():
    """Of inline PTX the interpreter knows nothing: what `nvidia` needs is here, beside what recordings correct too."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from fused_softmax.core.kernels import exchange, state
    from fused_softmax.trace.recorder.as_a_gpu import CORRECTIONS
    from fused_softmax.trace.recorder.shortcuts import SHORTCUTS

    def inline_asm(self, asm, constraints, values, types, is_pure, pack):
        results = {
            state.HALVES.value: lambda a: TensorHandle((a.data.astype(np.uint32) << 16).view(np.float32), tl.float32),
            "mov.b32 $0, $1;": lambda a: a,
            "mov.b64 $0, $1;": lambda a: a,
            exchange.IN_ANY_WARP.value: lambda a: a,  # of one
        }
        return SimpleNamespace(get_result=lambda _: results[asm](*values))

    if INTERPRETED:
        for holder, name, wrap in (*CORRECTIONS, *SHORTCUTS):
            setattr(holder, name, wrap(holder.__dict__[name]))
        InterpreterBuilder.create_inline_asm = inline_asm
        _patch_the_language_once()
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
