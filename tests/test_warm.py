"""Kernels that are compiled ahead: who makes the calls later compiles nothing, and errors name what is wrong."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import stub_driver
import torch
import warm_calls
from commands import fused_softmax as command
from triton import knobs
from triton.runtime.cache import FileCacheManager

import fused_softmax
from fused_softmax import ahead
from fused_softmax.ahead import Warmed, warmup
from fused_softmax.core import cached
from fused_softmax.core.route import INTERPRET

MADE = warm_calls.made
compiling = pytest.mark.skipif(INTERPRET, reason="the interpreter compiles nothing")


def later(folder, cache="triton", bench=()):
    """(kernels, compiled) of a process that makes the calls over a driver that does nothing. cache: its folder's.

    bench: arguments of the measurement whose calls these are, in place of `warm_calls.calls`.
    """
    environment = stub_driver.environment(folder) | {"TRITON_CACHE_DIR": str(folder / cache)}
    script = Path(__file__).with_name("warm_calls.py")
    done = subprocess.run([sys.executable, str(script), *bench], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "could not be loaded" not in done.stderr  # of what is no kernel
    kernels, compiled, _ = done.stdout.split(" ", 2)
    return int(kernels), int(compiled), done.stdout


@pytest.mark.compiles
@pytest.mark.timeout(900)
def test_a_process_that_makes_the_calls_later_compiles_nothing(tmp_path):
    found = warmup(warm_calls.calls().values(), device="h100", processes=2, folder=tmp_path / "triton")
    assert found.compiled == found.kernels >= 9
    kernels, compiled, said = later(tmp_path)
    assert (compiled, kernels) == (0, kernels), said
    assert kernels >= len(warm_calls.calls())
    again = warmup(warm_calls.calls().values(), device="h100", processes=2, folder=tmp_path / "triton")
    assert again == Warmed(found.kernels, 0, again.seconds)
    (tmp_path / "triton").rename(tmp_path / "moved")
    kernels, compiled, said = later(tmp_path, "moved")
    assert (compiled, kernels) == (0, kernels), said


@pytest.mark.compiles
@pytest.mark.one_triton
def test_a_folder_is_of_use_where_it_was_moved_and_where_files_of_it_are_gone(tmp_path):
    calls = [partial(fused_softmax.softmax, MADE(4, n), 1) for n in (1024, 32000)]

    def of(folder):
        return [each.found for each in ahead.compiling(calls, "h200", 1, folder)]

    assert of(tmp_path / "one") == [False] * 2
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    next((tmp_path / "one").glob("*/*.cubin")).unlink()  # which the copy's notes name
    assert of(tmp_path / "other") == [True] * 2
    assert sorted(of(tmp_path / "one")) == [False, True]
    next((tmp_path / "other").glob("*/__grp__*")).write_text("{")
    assert sorted(of(tmp_path / "other")) == [False, True]
    assert of(tmp_path / "other") == [True] * 2


def test_the_users_own_cache_of_kernels_stays(monkeypatch):
    class Remote(FileCacheManager):
        pass

    with cached.wherever_it_lies():
        assert knobs.cache.manager_class is cached.Beside
    assert knobs.cache.manager_class is None
    monkeypatch.setattr(knobs.cache, "manager_class", Remote)
    with cached.wherever_it_lies():
        assert knobs.cache.manager_class is Remote
    assert knobs.cache.manager_class is Remote


PLANNED = """
from functools import partial
import torch
from warm_calls import calls, made, qkv
import fused_softmax
from fused_softmax.ahead import standing_in
from fused_softmax.core.elsewhere import run, stand_in_for
from fused_softmax.core.plan import H200

def refuse(name):
    def refused(*arguments, **options):
        raise AssertionError(f"{name} was asked")
    return refused

def narrow(multiply):
    def multiplied(*factors, out_dtype=None, **options):
        if out_dtype is not None and factors[0].is_meta:
            raise TypeError("torch 2.11 has no such product of tensors without memory")
        wide = {} if out_dtype is None else {"out_dtype": out_dtype}
        return multiply(*factors, **wide, **options)
    return multiplied

x, w, target = made(4096, 512, grad=True), made(32000, 512, grad=True), made(4096, dtype=torch.int64)
given = list(map(standing_in, [
    *calls().values(),
    partial(fused_softmax.attention, *qkv(2, 4, 512, 128, grad=True), is_causal=True),
    partial(fused_softmax.linear_cross_entropy, x, w, target, chunk_size=1024),
    partial(fused_softmax.linear_cross_entropy, x, w, target, chunk_size=32),
    partial(fused_softmax.linear_log_prob, x, w, target, logits="recompute"),
    partial(fused_softmax.linear_divergence, x, w, x.detach(), w.detach()),
]))
found = []
stand_in_for(H200, found)
of_driver = "_lazy_init", "current_device", "get_device_properties", "current_stream", "is_current_stream_capturing"
for module, names in ((torch.cuda, of_driver), (torch.backends.cuda, ("can_use_cudnn_attention",))):
    for name in names:
        setattr(module, name, refuse(name))
torch.mm, torch.addmm = narrow(torch.mm), narrow(torch.addmm)
for call in given:
    run(call)
names = {each.kernel.__name__ for each in found}
assert names >= {"_part_loss", "_attention_hopper", "_keys_gradient_hopper"}, names
"""


@compiling
@pytest.mark.compiles
def test_calls_are_planned_without_a_driver_and_without_what_torch_2_11_lacks():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    done = subprocess.run([sys.executable, "-c", PLANNED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.compiles
@pytest.mark.one_triton
def test_calls_alike_are_compiled_once(tmp_path):
    calls = [partial(fused_softmax.softmax, MADE(n, 32000), 1) for n in (1, 7, 64, 65, 512)]
    kernels = list(ahead.compiling([*calls, *calls], "h200", 2, tmp_path))
    assert len(kernels) <= len(calls)
    assert {each.name for each in kernels} == {"_part_forward"}
    assert not any(each.found for each in kernels)


def over_logits(x, target, inplace):
    return fused_softmax.cross_entropy(x * 1.0, target, inplace_backward=inplace)


@pytest.mark.compiles
@pytest.mark.one_triton
def test_a_gradient_of_its_own_and_one_over_the_logits_are_two_kernels(tmp_path):
    call = partial(over_logits, MADE(512, 32000, grad=True), MADE(512, dtype=torch.int64))
    kernels = ahead.compiling([partial(call, inplace) for inplace in (False, True)], "h100", 2, tmp_path)
    assert [each.name for each in kernels].count("_part_loss") == 2


@compiling
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (partial(fused_softmax.softmax, MADE(4, 5), 7), "call 1: IndexError: .*dim"),
        (partial(fused_softmax.cross_entropy, MADE(4, 5), MADE(3, dtype=torch.int64)), "call 1: ValueError: .*target"),
        (lambda: fused_softmax.softmax(MADE(4, 5), 1), "call 1 cannot go to another process"),
        ("softmax", "call 1 must be callable without arguments, got str"),
        (partial(fused_softmax.softmax, torch.eye(3).to_sparse(), 1), "call 1 cannot go to another process: a tensor"),
    ],
    ids=["a wrong dim", "a wrong shape", "a lambda", "a name", "a sparse tensor"],
)
def test_a_call_that_cannot_be_made_is_named(call, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        warmup([partial(fused_softmax.softmax, MADE(4, 5), 1), call], device="h100", processes=1, folder=tmp_path)


def of_main():
    pass


def test_a_function_of_the_script_itself_is_refused(monkeypatch):
    monkeypatch.setattr(of_main, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "of_main", of_main, raising=False)
    with pytest.raises(ValueError, match="call 0 needs what __main__ defines, which other processes cannot"):
        ahead.standing_in(of_main)


@pytest.mark.compiles
def test_what_keeps_kernels_from_the_cache_is_an_error_of_one_line(monkeypatch, capfd):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/self/none")
    with pytest.raises(RuntimeError, match=r"^warmup: FileNotFoundError: .*/proc/self/none"):
        warmup([partial(fused_softmax.softmax, MADE(4, 5), 1)], device="h100", processes=1)
    assert "Traceback" not in capfd.readouterr().err


@compiling
@pytest.mark.parametrize(
    ("shell", "said"),
    [
        ("""echo '{"failed": "OSError: No space left on device"}'; exit 1""", "OSError: No space left on device"),
        ("exit 3", "the process that compiles ended with exit code 3; its error is above"),
        ("kill -9 $$", "the process that compiles was ended by signal 9"),
    ],
)
def test_how_the_process_that_compiles_ended_is_said(monkeypatch, tmp_path, shell, said):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{shell}\n")
    program.chmod(0o755)
    monkeypatch.setattr(ahead.sys, "executable", str(program))
    with pytest.raises(RuntimeError, match=rf"^warmup: {said}$"):
        warmup([partial(fused_softmax.softmax, MADE(4, 5), 1)], device="h100", processes=1)


def working_in(group):
    """Processes of a group that are no zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, in_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(in_group) == group and state != "Z":
                found.append(path.parent.name)
    return found


@compiling
@pytest.mark.compiles
@pytest.mark.one_triton
def test_who_listens_no_more_leaves_no_process_at_work(monkeypatch, tmp_path):
    started, popen = [], ahead.subprocess.Popen
    monkeypatch.setattr(ahead.subprocess, "Popen", lambda *of, **how: started.append(popen(*of, **how)) or started[-1])
    kernels = ahead.compiling(warm_calls.calls().values(), "h100", 2, tmp_path)
    assert next(kernels).name
    kernels.close()
    (work,) = started
    assert work.returncode == -signal.SIGKILL
    end = time.monotonic() + 10
    while working_in(work.pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert not working_in(work.pid)


@compiling
@pytest.mark.compiles
def test_what_is_asked_for_is_checked_before_any_work(monkeypatch, tmp_path):
    monkeypatch.setattr(ahead.subprocess, "Popen", lambda *_, **__: pytest.fail("worked"))
    with pytest.raises(ValueError, match="device must be one of h100, h200, got 'h300'"):
        warmup([], device="h300")
    with pytest.raises(ValueError, match="processes must be a positive int, got 0"):
        warmup([], device="h100", processes=0)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="no GPU here; name one by device=: h100, h200"):
            warmup([])
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        warmup([], device="h100", folder=tmp_path / "file")


@pytest.mark.skipif(not INTERPRET, reason="of the interpreter")
def test_the_interpreter_compiles_nothing():
    with pytest.raises(RuntimeError, match="interpreted in this process"):
        warmup([], device="h100")


@pytest.fixture
def asked(monkeypatch):
    """What the command asks `compiling` for, which compiles nothing."""
    found = []

    def compiling(calls, *how):
        found.append((list(calls), how))
        yield ahead.Kernel("one", 1.0, False)
        yield ahead.Kernel("two", 1.0, True)

    monkeypatch.setattr(ahead, "compiling", compiling)
    return found


def shapes(calls, function):
    return [tuple(each.args[0].shape) for each in calls if each.func is function]


def test_the_command_compiles_what_training_and_serving_call(asked, tmp_path):
    sizes = ["--vocab", "1000", "--hidden", "64", "--heads", "4", "--key-heads", "2", "--context", "128"]
    how = ["--device", "h100", "--processes", "3", "--folder", str(tmp_path)]
    result = command("warm", "--for", "train", "--for", "serve", "--dtype", "fp16", *sizes, *how)
    assert result.exit_code == 0, result.output
    (calls, given), *none = asked
    assert not none
    assert given == ("h100", 3, tmp_path)
    assert result.output.startswith(f"{len(calls)} calls take 2 kernels: 1 compiled in ")
    assert shapes(calls, fused_softmax.cross_entropy) == [(8192, 1000)]
    assert shapes(calls, fused_softmax.linear_cross_entropy) == [(8192, 64)]
    assert {n for n, _ in shapes(calls, fused_softmax.sample)} == {2**i for i in range(10)}
    assert (1, 4, 128, 128) in shapes(calls, fused_softmax.attention)
    assert (512, 4, 1, 128) in shapes(calls, fused_softmax.attention)
    first = next(each for each in calls if each.func is fused_softmax.cross_entropy)
    assert first.args[0].dtype == torch.float16
    assert first.args[0].requires_grad


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--for", "play", "--device", "h100"], "'play' is not one of 'train', 'serve'"),
        (["--for", "train", "--device", "h300"], "'h300' is not one of 'h100', 'h200'"),
        (["--for", "train", "--device", "h100", "--vocab", "0"], "0 is not in the range"),
        (["--for", "train", "--device", "h100", "--heads", "7"], "--heads 7 is not a multiple of --key-heads 8"),
        (["--for", "train", "--device", "h100", "--dtype", "int8"], "int8"),
        (["--for", "train", "--device", "h100", "--folder", "/proc/x"], "cannot write into /proc/x"),
        (["--device", "h100"], "Missing option '--for'"),
    ],
    ids=lambda each: " ".join(each[-2:]) if isinstance(each, list) else "",
)
def test_the_command_refuses_what_it_cannot_do_in_one_line(asked, given, said):
    result = command("warm", *given)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert not asked


def test_the_command_names_a_cache_that_cannot_be_written(asked, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/none")
    result = command("warm", "--for", "serve", "--device", "h100")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("Error: cannot write into /proc/none: ")
    assert not asked


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_the_command_wants_a_card_where_there_is_none(asked):
    result = command("warm", "--for", "serve")
    assert (result.exit_code, result.stderr) == (2, "Error: there is no GPU here: name the card by --device\n")
    assert not asked


def test_a_call_that_fails_is_one_line_without_the_number_that_nobody_gave(monkeypatch):
    def failing(*_):
        raise ValueError("warmup: call 3: TypeError: no such dtype")
        yield

    monkeypatch.setattr(ahead, "compiling", failing)
    result = command("warm", "--for", "serve", "--device", "h100")
    assert (result.exit_code, result.stderr) == (2, "Error: no such dtype\n")
