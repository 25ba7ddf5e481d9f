import os
import subprocess
import sys
from pathlib import Path

import pytest
import stub_driver
import torch
import triton
import triton.language as tl

from fused_softmax.core.launch import prepare

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
on_device = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="no GPU and no interpreter")


@triton.jit
def _double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + cols, tl.load(x_ptr + cols, mask=cols < n) * 2, mask=cols < n)


def prepare_double(x, y):
    n = x.numel()
    return prepare(_double, triton.cdiv(n, 64), (x, y), (n,), {"BLOCK": 64}, device=x.get_device(), num_warps=1)


@pytest.mark.compiles
@pytest.mark.parametrize("way", ["direct", "public"])
def test_over_the_stub_driver(way, tmp_path):
    environment = stub_driver.environment(tmp_path) | {"FUSED_SOFTMAX_PUBLIC_LAUNCH": "01"[way == "public"]}
    checks = Path(__file__).with_name("over_stub_launch.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-rP", str(checks)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    assert done.returncode == 0


def test_the_c_modules_are_built_while_the_interpreter_ends(tmp_path):
    """When it starts no thread any more."""
    code = (
        "import atexit; from fused_softmax.core import native\n"
        "atexit.register(lambda: (native.begin(), print(native.build('lookup').__name__)))"
    )
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("fused_softmax_lookup\n", "")


@pytest.mark.parametrize("gpu", [True, False])
def test_tritons_hash_is_begun_with_the_import_where_a_gpu_is(gpu):
    code = (
        "import os, signal, triton; from triton.runtime.cache import triton_key\n"
        f"os.path.exists = lambda path, exists=os.path.exists: {gpu} if path.startswith('/dev') else exists(path)\n"
        "from fused_softmax.core import launch\n"
        "if os.fork() == 0:\n"  # where the thread does not go on
        "    signal.alarm(60)\n"
        "    launch._hash.is_alive() and launch._hash.join()\n"
        "    os._exit(not triton_key())\n"
        "assert os.waitstatus_to_exitcode(os.wait()[1]) == 0\n"
        "launch._hash.is_alive() and launch._hash.join()\n"
        "print(triton_key.cache_info().currsize)"
    )
    environment = {name: value for name, value in os.environ.items() if "INTERPRET" not in name}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{int(gpu)}\n", "")


@on_device
def test_it_runs_the_kernel_on_the_tensors_of_each_call():
    x = torch.arange(200.0, device="cpu" if INTERPRETED else "cuda")
    y = torch.zeros_like(x)
    launch = prepare_double(x, y)
    assert not y.any()
    launch(x, y)
    assert torch.equal(y, 2 * x)
    launch(y, x)
    assert torch.equal(x, 2 * y)
    assert (launch.resources is None) == INTERPRETED


@on_device
def test_for_another_number_it_is_the_same_kernel_or_none():
    x = torch.arange(200.0, device="cpu" if INTERPRETED else "cuda")
    y = torch.zeros_like(x)
    launch = prepare_double(x, y)
    assert all(launch.again(1, {0: n}) is None for n in (1, 16, 2**31, -(2**31) - 1)), "Triton compiles these in"
    again = launch.again(1, {0: 50})
    again(x, y)
    assert torch.equal(y[:50], 2 * x[:50])
    assert not y[50:].any()


@pytest.mark.gpu
def test_it_runs_on_the_current_stream_and_is_captured():
    x = torch.arange(200.0, device="cuda")
    y = torch.zeros_like(x)
    launch = prepare_double(x, y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(x, y)
    assert not y.any()
    graph.replay()
    assert torch.equal(y, 2 * x)
    x += 1
    graph.replay()
    assert torch.equal(y, 2 * x)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_it_runs_on_the_device_of_the_tensors():
    x = torch.arange(200.0, device="cuda:1")
    y = torch.zeros_like(x)
    prepare_double(x, y)(x, y)
    assert torch.cuda.current_device() == 0
    assert torch.equal(y, 2 * x)
