"""What `launch` hands to the driver, and what that costs; run by test_launch over the stub driver.

With FUSED_SOFTMAX_PUBLIC_LAUNCH=1 the same must hold of the fallback, save what only the direct way promises.
"""

import io
import os
import struct
import sys
import timeit
from contextvars import ContextVar
from functools import partial
from threading import Barrier, Thread, current_thread, main_thread

import pytest
import stub_driver
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget

from fused_softmax.core import launch, progress
from fused_softmax.core.launch import prepare, together

stub = stub_driver.activate()
X = torch.zeros(64, 1024)
Y = torch.zeros_like(X)
direct_only = pytest.mark.skipif(os.environ.get("FUSED_SOFTMAX_PUBLIC_LAUNCH") == "1", reason="of the direct way")


@triton.jit(do_not_specialize=["n_rows"])
def _scale(x_ptr, y_ptr, x_row_stride, n_rows, n_cols, scale, BLOCK_COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_COLS)
    mask = (cols < n_cols) & (row < n_rows)
    tl.store(y_ptr + row * n_cols + cols, tl.load(x_ptr + row * x_row_stride + cols, mask=mask) * scale, mask=mask)


def prepare_scale(tensors=(X, Y), grid=64, stride=1024, n_rows=64, block_cols=1024, device=0, num_warps=4):
    scalars = (stride, n_rows, 1000, 1.5)
    return prepare(_scale, grid, tensors, scalars, {"BLOCK_COLS": block_cols}, device=device, num_warps=num_warps)


def function_of(launch, *tensors):
    return stub.record(lambda: launch(*tensors or (X, Y))).function


def test_the_driver_gets_the_grid_and_the_arguments():
    launch = prepare_scale(grid=(64, 3, 2))
    got = stub.record(lambda: launch(X, Y), n_arguments=6)
    assert (got.grid, got.block, got.stream, got.context) == ((64, 3, 2), (128, 1, 1), 7000, 1)
    assert got.arguments[:2] == (X.data_ptr(), Y.data_ptr())
    assert [argument & 0xFFFFFFFF for argument in got.arguments[2:5]] == [1024, 64, 1000]
    assert struct.unpack("f", struct.pack("I", got.arguments[5] & 0xFFFFFFFF)) == (1.5,)


def test_a_terminal_is_told_what_is_compiled(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "_AFTER", -1.0)  # at once
    monkeypatch.delenv("TERM", raising=False)
    prepare_scale(block_cols=4096)
    assert "a first call compiles _scale" in terminal.getvalue()
    said = terminal.getvalue()
    prepare_scale(block_cols=4096)
    assert terminal.getvalue() == said


def test_it_launches_what_kernel_grid_launches():
    launch = prepare_scale(grid=(64, 3))
    ours = stub.record(lambda: launch(X, Y), n_arguments=6)
    options = {"BLOCK_COLS": 1024, "num_warps": 4, "enable_fp_fusion": True}
    public = stub.record(lambda: _scale[(64, 3)](X, Y, 1024, 64, 1000, 1.5, **options), n_arguments=6)
    assert ours[:-1] == public[:-1]
    assert ours.arguments[:2] == public.arguments[:2]
    assert all((a ^ b) & 0xFFFFFFFF == 0 for a, b in zip(ours.arguments[2:], public.arguments[2:], strict=True))


def test_a_launch_may_begin_before_the_one_before_it_has_ended():
    """Only one that says so, for its kernel has to wait."""
    for asked in (False, True):
        launch = prepare(_scale, 64, (X, Y), (1024, 64, 1000, 1.5), {"BLOCK_COLS": 1024}, device=0, launch_pdl=asked)
        assert stub.record(lambda launch=launch: launch(X, Y)).overlaps == asked


def test_each_call_takes_its_own_tensors():
    launch = prepare_scale()
    other = torch.zeros_like(X)
    got = stub.record(lambda: launch(other, X), n_arguments=2)
    assert got.arguments == (other.data_ptr(), X.data_ptr())


def test_preparing_launches_nothing_and_loads_all():
    before = stub.launches
    launch = prepare_scale(block_cols=2048)
    assert stub.launches == before
    modules = stub.modules
    launch(X, Y)
    assert stub.modules == modules
    assert (launch.resources.n_regs, launch.resources.n_spills) == (40, 0)  # as the stub says
    assert launch._loaded.compiled.metadata.enable_fp_fusion


def test_another_row_count_compiles_nothing():
    launch, modules = prepare_scale(), stub.modules
    for n_rows in (1, 16, 65, 2**31 - 1):
        again = prepare_scale(grid=n_rows, n_rows=n_rows)
        got = stub.record(lambda again=again: again(X, Y), n_arguments=4)
        assert (got.grid[0], got.arguments[3] & 0xFFFFFFFF) == (n_rows, n_rows)
        assert got.function == function_of(launch)
    assert stub.modules == modules


def test_what_triton_specialises_gets_a_kernel_of_its_own():
    half, unaligned = X.half(), X.view(-1)[1:]
    functions = [
        function_of(prepare_scale()),
        function_of(prepare_scale((half, Y)), half, Y),
        function_of(prepare_scale((unaligned, Y)), unaligned, Y),
        function_of(prepare_scale(stride=1)),
        function_of(prepare_scale(stride=1000)),
        function_of(prepare_scale(n_rows=2**40)),
        function_of(prepare_scale(n_rows=2**63)),
        function_of(prepare_scale(n_rows=1.0)),
        function_of(prepare_scale(block_cols=512)),
        function_of(prepare_scale(num_warps=8)),
        function_of(prepare_scale(device=1)),
    ]
    assert len(set(functions)) == len(functions)


def test_a_wide_scalar_arrives_whole():
    launch = prepare_scale(n_rows=2**40 + 1)
    assert stub.record(lambda: launch(X, Y), n_arguments=4).arguments[3] == 2**40 + 1


def test_the_edge_of_32_bits_is_no_kernel_of_64():
    narrow, wide = prepare_scale(n_rows=-(2**31)), prepare_scale(n_rows=-(2**31) - 16)
    assert function_of(narrow) != function_of(wide)


def test_the_tensors_device_need_not_be_current():
    launch = prepare_scale(device=1)
    got = stub.record(lambda: launch(X, Y))
    assert (got.stream, got.context, stub.device) == (7001, 2, 0)


def test_another_device_may_be_current():
    launch = prepare_scale(device=0)
    with torch.cuda.device(1):
        got = stub.record(lambda: launch(X, Y))
    assert (got.stream, got.context, stub.device) == (7000, 1, 0)


@direct_only
@pytest.mark.parametrize(("number", "bits"), [(1e-60, 1), (-1e-60, 0x80000001), (0.0, 0), (2.75, 0x40300000)])
def test_a_number_of_a_call_is_0_only_where_it_is(number, bits):
    scalars, options = (1024, 64, 1000, 1.5), {"device": 0, "num_warps": 4, "numbers": (3,)}
    launch = prepare(_scale, 64, (X, Y), scalars, {"BLOCK_COLS": 1024}, **options)
    got = stub.record(lambda: launch(X, Y, number), n_arguments=6)
    assert got.arguments[5] & 0xFFFFFFFF == bits


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_launch_hooks_are_called(hook):
    launch = prepare_scale()
    chain, called = getattr(knobs.runtime, hook), []

    def note(metadata):
        called.append(metadata.get()["name"])

    chain.add(note)
    try:
        function_of(launch)
        assert called == ["_scale"]
    finally:
        chain.remove(note)
    function_of(launch)
    assert called == ["_scale"]

    setattr(knobs.runtime, hook, note)  # instead of adding to the chain, as older code does
    try:
        function_of(launch)
        assert called == ["_scale"] * 2
    finally:
        delattr(knobs.runtime, hook)


def test_a_kernel_taken_by_a_compile_hook_launches_once_it_is_gone():
    knobs.runtime.jit_cache_hook = lambda **_: True
    try:
        launch = prepare_scale(block_cols=256)
        assert launch.resources is None
    finally:
        knobs.runtime.jit_cache_hook = None
    function_of(launch)
    assert prepare_scale(block_cols=256).resources is not None


@direct_only
@pytest.mark.parametrize("surprise", ["version", "backend", "convention", "hooks", "instrumented"])
def test_what_is_untested_is_launched_the_public_way(surprise, monkeypatch):
    compiled = prepare_scale()._loaded.compiled
    assert launch._direct(_scale, compiled, 0) is not None
    metadata = compiled.metadata
    if surprise == "version":
        monkeypatch.setattr(launch, "_version", lambda: "3.10")
    elif surprise == "backend":
        monkeypatch.setattr(compiled, "metadata", metadata._replace(target=GPUTarget("hip", "gfx942", 64)))
    elif surprise == "convention":
        monkeypatch.setattr(compiled, "_run", lambda grid, stream, function, *arguments: None)
    elif surprise == "hooks":
        monkeypatch.setattr(knobs.runtime, "launch_enter_hook", None)
    elif surprise == "instrumented":
        monkeypatch.setattr(compiled, "metadata", metadata._replace(instrumentation_mode="consan"))
    assert launch._direct(_scale, compiled, 0) is None


def test_a_grid_the_launcher_would_drop_is_an_error():
    with pytest.raises(ValueError, match=r"\(65536, 32768, 1\)"):
        prepare_scale(grid=(65536, 32768))


@direct_only
def test_a_kernel_that_is_launched_directly_has_no_c_of_its_own(monkeypatch):
    """Triton 3.6 compiles a launcher for each kernel's types; it is made where hooks or others need it."""
    prepare_scale()  # builds what all kernels share
    built, build = [], triton.runtime.build._build
    monkeypatch.setattr(triton.runtime.build, "_build", lambda *of, **how: built.append(of[0]) or build(*of, **how))
    now = prepare_scale(n_rows=2**33)  # a type of its own
    directly = stub.record(lambda: now(X, Y), n_arguments=6)
    assert not built
    options = {"BLOCK_COLS": 1024, "num_warps": 4, "enable_fp_fusion": True}
    public = stub.record(lambda: _scale[(64,)](X, Y, 1024, 2**33, 1000, 1.5, **options), n_arguments=6)
    assert directly[:-1] == public[:-1]
    assert directly.arguments[:2] == public.arguments[:2]
    assert built == (["__triton_launcher"] if triton.__version__.startswith("3.6") else [])


def test_threads_share_one_kernel():
    n_threads, n_calls = 8, 200
    start, errors, modules, launches = Barrier(n_threads), [], stub.modules, stub.launches

    def work(thread):
        try:
            start.wait()
            launch = prepare_scale(n_rows=100 + thread, num_warps=2)
            for _ in range(n_calls):
                launch(X, Y)
        except Exception as error:
            errors.append(error)

    threads = [Thread(target=work, args=(thread,)) for thread in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert stub.launches == launches + n_threads * n_calls
    assert stub.modules == modules + 1


def of(block_cols, num_warps):
    return partial(prepare_scale, block_cols=block_cols, num_warps=num_warps)


def test_kernels_of_one_call_compile_at_the_same_time(monkeypatch):
    """From the first that had to be compiled. What compiles for a call is heard where the call was made."""
    heard, call, three = [], ContextVar("call", default=None), Barrier(3, timeout=60)

    def listener(**_):
        three.wait()
        heard.append((current_thread() is main_thread(), call.get()))

    monkeypatch.setattr(knobs.compilation, "listener", listener)
    call.set("mine")
    modules, functions = stub.modules, [of(1024, 4), of(2048, 2), of(256, 2), of(8192, 2)]
    launches = together(*functions)
    assert sorted(heard) == [(False, "mine"), (False, "mine"), (True, "mine")]
    assert stub.modules == modules + 3
    assert len({function_of(each) for each in launches}) == 4
    assert [function_of(each()) for each in functions] == [function_of(each) for each in launches]
    together(*functions)
    assert len(heard) == 3


def test_an_error_of_a_kernel_that_compiles_beside_others_is_raised():
    def fail():
        raise ValueError("this one")

    with pytest.raises(ValueError, match="this one"):
        together(of(128, 2), fail, of(64, 2))
    assert len(together(of(32, 2), of(64, 2), of(16, 2))) == 3


@direct_only
def test_a_launch_costs_the_host_little():
    launch = prepare_scale()
    options = {"BLOCK_COLS": 1024, "num_warps": 4, "enable_fp_fusion": True}
    costs = {
        "launch(x, y)": lambda: launch(X, Y),
        "kernel[grid](...)": lambda: _scale[(64,)](X, Y, 1024, 64, 1000, 1.5, **options),
        "prepare, another row count": lambda: prepare_scale(grid=65, n_rows=65),
        "kernel.warmup": lambda: _scale.warmup(X, Y, 1024, 65, 1000, 1.5, grid=(65,), **options),
    }
    costs = {name: min(timeit.repeat(call, number=2000, repeat=15)) / 2000 * 1e6 for name, call in costs.items()}
    print(f"\nhost time in us, Triton {triton.__version__}, over a driver that does nothing")
    for name, cost in costs.items():
        print(f"  {name:28}{cost:6.2f}")
    assert costs["launch(x, y)"] * 2.5 < costs["kernel[grid](...)"]


@triton.jit
def _nested(x_ptr, y_ptr, stride, n_cols, scale, BLOCK_COLS: tl.constexpr):
    n, stride_0, stride_1 = stride
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_COLS)
    x = tl.load(x_ptr + row // n * stride_0 + row % n * stride_1 + cols, mask=cols < n_cols)
    tl.store(y_ptr + row * n_cols + cols, x * scale, mask=cols < n_cols)


@pytest.mark.parametrize("stride", [(3, 100, 2**33), (3, 1, 16), (1, 1, 2)], ids=str)
def test_a_tuple_is_its_elements_to_the_driver(stride):
    """Less those of 1, which are compiled in, and numbers that a call gives keep their places after it."""
    scalars, block = (stride, 1000, 1.5), {"BLOCK_COLS": 1024}
    launch = prepare(_nested, 6, (X, Y), scalars, block, device=0, numbers=(2,), num_warps=4)
    elements = [each for each in stride if each != 1]
    got = stub.record(lambda: launch(X, Y, 2.5), n_arguments=4 + len(elements))
    expected = [*elements, 1000]
    found = [a & (0xFFFFFFFF if e < 2**31 else -1) for a, e in zip(got.arguments[2:], expected, strict=False)]
    assert found == expected
    assert struct.unpack("f", struct.pack("I", got.arguments[-1] & 0xFFFFFFFF)) == (2.5,)
    options = {**block, "num_warps": 4, "enable_fp_fusion": True}
    public = stub.record(lambda: _nested[(6,)](X, Y, *scalars[:2], 2.5, **options), n_arguments=4 + len(elements))
    assert public.function == got.function


def test_tuples_of_other_widths_are_other_kernels():
    function = {}
    for stride in ((3, 100, 7), (3, 101, 7), (3, 2**40, 7), (3, 96, 7), (1, 100, 7)):
        launch = prepare(_nested, 6, (X, Y), (stride, 1000, 1.5), {"BLOCK_COLS": 1024}, device=0, num_warps=4)
        function[stride] = function_of(launch)
    assert function[3, 100, 7] == function[3, 101, 7]
    assert len(set(function.values())) == 4
