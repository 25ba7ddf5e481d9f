"""PyTorch's own functions while `enabled`: torch's results, by kernels that ran, and ATen's again afterwards."""

import os
import sys
import threading
import time
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from conftest import peaked
from contract import assert_softmax
from products import QUICK
from torch.nn.functional import log_softmax as imported_log_softmax
from torch.nn.functional import softmax as imported_softmax
from torch.overrides import TorchFunctionMode

import fused_softmax
from fused_softmax.ops.softmax import calls as softmax_calls
from fused_softmax.ops.softmax import reference
from fused_softmax.register import patch

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="without a GPU or the interpreter, CPU tensors take ATen"
)
NAMES = ("softmax", "log_softmax", "logsumexp")
FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64


@pytest.fixture(autouse=True)
def ran(monkeypatch):
    """The calls of what launches kernels, by name; the test must leave nothing enabled."""
    calls = []

    def find(name, *arguments):
        call = plain_find(name, *arguments)
        if call is not None:
            known = {"aten::cross_entropy": "cross_entropy", "softmax_backward": "gradient"}
            calls.append(known.get(name.removeprefix("log_"), "softmax"))
        return call

    # The thread by which a worker of pytest-xdist hears from its master waits, in a place of its own.
    threads = [frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()]
    waiting = {(frame.f_globals["__name__"], frame.f_code.co_name) for frame in threads}
    monkeypatch.setattr(patch, "_IDLE", patch._IDLE | waiting)

    plain_find = patch.find
    monkeypatch.setattr(patch, "find", find)

    def count(module, function, name):
        plain = getattr(module, function)
        monkeypatch.setattr(module, function, lambda *args, **options: calls.append(name) or plain(*args, **options))

    forward = softmax_calls.forward

    def noted_by_name(of, *args, **options):
        calls.append("logsumexp" if of.reduces else "softmax")
        return forward(of, *args, **options)

    monkeypatch.setattr(softmax_calls, "forward", noted_by_name)
    count(softmax_calls, "backward", "gradient")
    count(softmax_calls, "backward_into", "gradient")
    count(patch, "prepare_plain", "cross_entropy")
    yield calls
    assert patch._depth == 0
    assert patch._library is None


def attention(x, **options):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(x, x, x, **options)


CALLS = {
    "torch.softmax": lambda x: torch.softmax(x, -1),
    "torch.softmax, dtype": lambda x: torch.softmax(x, 1, dtype=FP64),
    "torch.softmax, of integers": lambda x: torch.softmax(x.long(), 1, dtype=FP32),
    "F.softmax": lambda x: F.softmax(x, dim=0),
    "F.softmax, imported before": lambda x: imported_softmax(x, dim=0),
    "Tensor.softmax": lambda x: x.softmax(1),
    "torch.special.softmax": lambda x: torch.special.softmax(x, -1),
    "torch.nn.Softmax": lambda x: torch.nn.Softmax(dim=1)(x),
    "torch.log_softmax": lambda x: torch.log_softmax(x, -1),
    "F.log_softmax": lambda x: F.log_softmax(x, dim=1),
    "F.log_softmax, imported before": lambda x: imported_log_softmax(x, dim=1, dtype=FP32),
    "Tensor.log_softmax": lambda x: x.log_softmax(0),
    "torch.special.log_softmax": lambda x: torch.special.log_softmax(x, 0),
    "torch.nn.LogSoftmax": lambda x: torch.nn.LogSoftmax(dim=-1)(x),
    "torch.logsumexp": lambda x: torch.logsumexp(x, -1),
    "torch.logsumexp, of two dims": lambda x: torch.logsumexp(x, (0, -1), keepdim=True),
    "Tensor.logsumexp": lambda x: x.logsumexp(1, keepdim=True),
    "torch.special.logsumexp": lambda x: torch.special.logsumexp(x, 0),
    "softmin": lambda x: F.softmin(x, 1),
    "cross_entropy": lambda x: F.cross_entropy(x.flatten(0, 1), torch.arange(12, device=x.device) % 5),
    "scaled_dot_product_attention": attention,
    "causal scaled_dot_product_attention": lambda x: attention(x, is_causal=True),
    "ATen's operator": lambda x: torch._softmax(x, 2, False),
    "vmap": lambda x: torch.vmap(torch.vmap(lambda t: torch.softmax(t, 0)), in_dims=1)(x),
    "functional.jvp": lambda x: torch.func.jvp(lambda t: torch.softmax(t, 1), (x,), (x + 1,))[1],
    "no dims": lambda x: torch.softmax(x[0, 0, 0], 0),
    "a view": lambda x: torch.softmax(x.transpose(0, 2)[:, 1:], 1),
    "a parameter": lambda x: torch.softmax(torch.nn.Parameter(x), 1),
    "the negative bit": lambda x: torch.softmax(torch._neg_view(x), -1),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_way_to_call_it(name, ran, device):
    x = peaked(1, 60).view(3, 4, 5).to(device)
    expected = CALLS[name](x)
    assert not ran
    with fused_softmax.enabled():
        result = CALLS[name](x)
    assert ran
    assert (result.dtype, result.stride()) == (expected.dtype, expected.stride())
    torch.testing.assert_close(result, expected)
    ran.clear()
    assert torch.equal(CALLS[name](x), expected)
    assert not ran


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16, FP64], ids=str)
def test_accuracy_is_the_operators(dtype, ran, device):
    x = peaked(3, 700, dtype).to(device)
    with fused_softmax.enabled():
        results = [torch.softmax(x, -1) for _ in range(2)]  # the second by the launch that was kept
    assert ran == ["softmax", "softmax"]
    assert torch.equal(*results)
    assert_softmax(results[0], x)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_and_second_derivatives(name, ran, device):
    def derivatives():
        x = peaked(3, 20).to(device).requires_grad_()
        (dx,) = torch.autograd.grad(getattr(torch, name)(x, -1).square().sum(), x, create_graph=True)
        return dx, *torch.autograd.grad(dx.square().sum(), x)

    expected = derivatives()
    with fused_softmax.enabled():
        torch.testing.assert_close(derivatives(), expected, rtol=1e-4, atol=1e-4)
        if name != "logsumexp":  # whose gradient ATen composes, element by element
            assert ran.count("gradient") >= 1
        x = torch.randn(2, 5, dtype=FP64, device=device, requires_grad=True)
        assert torch.autograd.gradcheck(lambda t: getattr(torch, name)(t, 0), x, fast_mode=QUICK)
        assert torch.autograd.gradgradcheck(lambda t: getattr(torch, name)(t, 0), x, fast_mode=QUICK)


def test_half_to_float(device):
    """What ATen does on a GPU for dtype=float32 of halves: the output is fp32, its gradient is rounded to fp16."""
    x = peaked(3, 70, FP16).to(device)
    for ours, theirs, back in (
        (torch._softmax, torch.softmax, torch._softmax_backward_data),
        (torch._log_softmax, torch.log_softmax, torch._log_softmax_backward_data),
    ):
        with fused_softmax.enabled():
            y = ours(x, -1, True)
            dx = back(torch.ones_like(y) + y, y, -1, FP16)
        torch.testing.assert_close(y, theirs(x.float(), -1))
        expected = x.float().requires_grad_()
        (dx_expected,) = torch.autograd.grad(theirs(expected, -1), expected, torch.ones_like(y) + y)
        assert dx.dtype == FP16
        torch.testing.assert_close(dx, dx_expected.half(), rtol=2e-3, atol=1e-4)


def test_out(ran, device):
    x = peaked(3, 70).to(device)
    outs = {name: torch.full_like(getattr(torch, name)(x, -1), float("nan")) for name in NAMES}
    with fused_softmax.enabled():
        for name, out in outs.items():
            assert getattr(torch, name)(x, -1, out=out) is out
        assert len(ran) == 3
        for name, out in outs.items():
            torch.testing.assert_close(out, getattr(reference, name)(x, -1))
        empty = torch.empty(0, device=device)  # that ATen resizes
        torch.testing.assert_close(torch.softmax(x, -1, out=empty), torch.softmax(x, -1))
        torch.softmax(x, -1, out=x)
    torch.testing.assert_close(x.sum(-1), torch.ones(3, device=device))


@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
def test_gradients_with_out(dtype, dim, log, ran, device):
    """Contiguous, of rows apart, and of no rows; a second call of each is found."""
    y = (torch.log_softmax if log else torch.softmax)(peaked(6, 70), dim).to(dtype).to(device)
    dy = peaked(6, 70, seed=1).to(dtype).to(device)
    operator = torch.ops.aten._log_softmax_backward_data if log else torch.ops.aten._softmax_backward_data
    name = "out" if log else "grad_input"
    expected = operator(dy.double(), y.double(), dim, torch.float64).to(dtype)  # ATen rounds y * dy to fp16 on a GPU
    outs = [torch.empty_like(y), torch.full((6, 80), 7.0, dtype=dtype, device=device)[:, :70], y.new_empty(70, 6).T]
    with fused_softmax.enabled():
        for out in [*outs, *outs]:
            ran.clear()
            assert operator.out(dy, y, dim, dtype, **{name: out.fill_(float("nan"))}) is out
            assert ran == ["gradient"]
            torch.testing.assert_close(out, expected)
        assert (outs[1]._base[:, 70:] == 7.0).all()
        ran.clear()
        operator.out(dy, y, dim, dtype, **{name: dy})  # over what is read: ATen's
        assert not ran
        torch.testing.assert_close(dy, expected, rtol=1e-2, atol=1e-3)


REFUSED = {
    "dim too large": lambda x: torch.softmax(x, 5),
    "integers": lambda x: torch.log_softmax(x.long(), 0),
    "complex": lambda x: torch.softmax(x.to(torch.complex64), 0),
    "a dim twice": lambda x: torch.logsumexp(x, (0, -2)),
    "a dim of logsumexp too small": lambda x: torch.logsumexp(x, -3),
    "out of another dtype": lambda x: torch.softmax(x, 0, out=x.double()),
    "not halves to float": lambda x: torch._softmax(x.double(), 0, True),
    "gradients of another shape": lambda x: torch._softmax_backward_data(x, x[:1], 0, FP32),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_torchs(name, ran, device):
    x = peaked(3, 70).to(device)
    with pytest.raises(Exception) as theirs:  # noqa: PT011  whatever torch raises
        REFUSED[name](x)
    with fused_softmax.enabled(), pytest.raises(theirs.type) as ours:
        REFUSED[name](x)
    assert str(ours.value) == str(theirs.value)


def test_a_loss_that_was_kept_is_not_found_for_a_smoothing_out_of_range(ran, device):
    x, target = peaked(4, 50).to(device), torch.tensor([1, 2, 3, 4], device=device)
    with fused_softmax.enabled():
        F.cross_entropy(x, target, label_smoothing=0.1)
        with pytest.raises(RuntimeError, match="label_smoothing"):
            F.cross_entropy(x, target, label_smoothing=1.5)


def test_what_kernels_do_not_take_is_atens(ran, device):
    x = peaked(3, 70).to(device)
    with fused_softmax.enabled():
        torch.testing.assert_close(torch.logsumexp(x.long(), 0), torch.logsumexp(x.long().float(), 0))
        assert torch.logsumexp(x[:, :0], 1).tolist() == [-torch.inf] * 3
        assert torch.softmax(x.to("meta"), 0).device.type == "meta"
        assert torch.sparse.softmax(x.to_sparse(), 1).is_sparse
        if not INTERPRETED:
            ran.clear()
            torch.softmax(x.cpu(), -1)
            assert not ran


@pytest.mark.parametrize("name", NAMES)
def test_our_own_functions_end_within_it(name, ran, device):
    """Their fallbacks call torch's functions, which call the kernels, which call nothing more."""
    x = peaked(4, 6).to(device)
    masked = {"mask": x > 0, "masked_rows": "zero"}
    ours, theirs = getattr(fused_softmax, name), getattr(reference, name)
    calls = [
        (lambda f: f(x, -1)),
        (lambda f: f(torch.nn.Parameter(x), -1)),
        (lambda f: f(x, -1, **masked)),
        (lambda f: torch.func.grad(lambda t: f(t, -1).sum())(x)),
        (lambda f: torch.func.vmap(lambda t: f(t, -1, **masked), in_dims=0)(x.expand(2, 4, 6))),
    ]
    for call in calls:
        expected = call(theirs)
        with fused_softmax.enabled():
            torch.testing.assert_close(call(ours), expected)
            torch.testing.assert_close(call(theirs), expected)
    with fused_softmax.enabled():
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(ours(leaf, -1).square().sum(), leaf, create_graph=True)
        dx.square().sum().backward()
    assert ran


def test_modes_and_subclasses_see_the_call_and_nothing_of_the_kernels(device):
    seen = []

    class Listener(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    x = peaked(3, 70).to(device)
    with fused_softmax.enabled():
        with Listener():
            torch.softmax(x, -1)
        y = torch.softmax(x.as_subclass(Mine), -1)
    assert seen == [torch.softmax] * 2
    assert type(y) is Mine


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_goes_on_as_it_was_compiled(backend, device):
    torch._dynamo.reset()
    function = torch.compile(lambda x: torch.softmax(x * 2, -1) + 1, backend=backend, fullgraph=True)
    x = peaked(3, 70).to(device)
    expected = torch.softmax(x * 2, -1) + 1
    with fused_softmax.enabled():
        for t in (x, x.clone().requires_grad_()):
            torch.testing.assert_close(function(t), expected)
    torch.testing.assert_close(function(x), expected)


# cross_entropy, which is taken whole.


@pytest.fixture
def losses(monkeypatch):
    """The reductions of those calls that `patch` prepared of ours."""
    calls = []
    plain = patch.prepare_plain

    def counted(*args, **kwargs):
        calls.append(args[4])
        return plain(*args, **kwargs)

    monkeypatch.setattr(patch, "prepare_plain", counted)
    return calls


def logits_and_targets(device, n=6, n_classes=40, dtype=FP32):
    target = torch.randint(n_classes, (n,), generator=torch.Generator().manual_seed(0))
    target[1] = -100
    return peaked(n, n_classes, dtype).to(device), target.to(device)


LOSSES = {
    "F.cross_entropy": F.cross_entropy,
    "sum": lambda x, t: F.cross_entropy(x, t, reduction="sum"),
    "none": lambda x, t: F.cross_entropy(x, t, reduction="none"),
    "label smoothing": lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
    "weights": lambda x, t: F.cross_entropy(x, t, torch.linspace(0.5, 2, x.shape[-1], device=x.device)),
    "weights, smoothing": lambda x, t: F.cross_entropy(
        x, t, torch.linspace(0.5, 2, x.shape[-1], device=x.device), label_smoothing=0.2, reduction="sum"
    ),
    "another ignore_index": lambda x, t: F.cross_entropy(x, t.clamp(min=0), ignore_index=0),
    "torch.nn.CrossEntropyLoss": lambda x, t: torch.nn.CrossEntropyLoss()(x, t),
    "one row": lambda x, t: F.cross_entropy(x[0], t[0]),
    "ATen's operator": lambda x, t: torch.ops.aten.cross_entropy_loss(x, t, None, 2),
    "a sum of nothing over 0": lambda x, t: F.cross_entropy(x, t * 0 - 100, reduction="sum") / 0,
}


@pytest.mark.parametrize("mode", ["grad", "no grad", "inference"])
@pytest.mark.parametrize("name", LOSSES)
def test_cross_entropy_is_taken(name, mode, losses, device):
    def results():
        x, target = logits_and_targets(device)
        if mode == "grad":
            x.requires_grad_()
            loss = LOSSES[name](x, target)
            return loss.detach(), *torch.autograd.grad(loss.sum(), x)
        with torch.no_grad() if mode == "no grad" else torch.inference_mode():
            return LOSSES[name](x, target).clone()

    expected = results()
    with fused_softmax.enabled():
        found = results()
    assert len(losses) == 1
    torch.testing.assert_close(found, expected, equal_nan=True)
    torch.testing.assert_close(results(), expected, equal_nan=True)
    assert len(losses) == 1


LEFT = {
    "N-D logits": lambda x, t: F.cross_entropy(x.view(2, 3, -1).movedim(-1, 1), t.view(2, 3)),
    "probabilities": lambda x, t: F.cross_entropy(x, torch.softmax(x, -1)),
    "probabilities, smoothed": lambda x, t: F.cross_entropy(x, torch.softmax(x, -1), label_smoothing=0.1),
    "no rows": lambda x, t: F.cross_entropy(x[:0], t[:0], reduction="sum"),
    "vmap": lambda x, t: torch.vmap(F.cross_entropy)(x.view(2, 3, -1), t.view(2, 3)),
    "jvp": lambda x, t: torch.func.jvp(lambda x: F.cross_entropy(x, t), (x,), (x + 1,))[1],
    "nll_loss": lambda x, t: F.nll_loss(F.log_softmax(x, -1), t),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_losses_stay_torchs(name, losses, device):
    x, target = logits_and_targets(device)
    expected = LEFT[name](x, target)
    with fused_softmax.enabled():
        torch.testing.assert_close(LEFT[name](x, target), expected)
    assert not losses


def test_second_derivatives_of_cross_entropy(losses, device):
    x, target = torch.randn(3, 7, dtype=FP64, device=device, requires_grad=True), torch.tensor([1, -100, 6])
    with fused_softmax.enabled():
        for reduction in ("mean", "none"):
            call = lambda x, r=reduction: F.cross_entropy(x, target.to(device), reduction=r)  # noqa: E731
            assert torch.autograd.gradcheck(call, x, fast_mode=QUICK)
            assert torch.autograd.gradgradcheck(call, x, fast_mode=QUICK)
    assert losses


BAD_LOSSES = {
    "targets of another length": lambda x, t: F.cross_entropy(x, t[:-1]),
    "targets of floats": lambda x, t: F.cross_entropy(x, t.float()),
    "smoothing": lambda x, t: F.cross_entropy(x, t, label_smoothing=2.0),
    "weights of another length": lambda x, t: F.cross_entropy(x, t, x[0, :-1]),
    "weights of another dtype": lambda x, t: F.cross_entropy(x, t, x[0].double()),
    "reduction": lambda x, t: F.cross_entropy(x, t, reduction="avg"),
    "integers": lambda x, t: F.cross_entropy(x.long(), t),
}


@pytest.mark.parametrize("name", BAD_LOSSES)
def test_errors_of_cross_entropy_are_torchs(name, losses, device):
    x, target = logits_and_targets(device)
    with pytest.raises(Exception) as theirs:  # noqa: PT011  whatever torch raises
        BAD_LOSSES[name](x, target)
    with fused_softmax.enabled(), pytest.raises(theirs.type) as ours:
        BAD_LOSSES[name](x, target)
    assert str(ours.value) == str(theirs.value)
    assert not losses


def loss_registrations(device):
    keys = ("CPU", "AutogradCPU") if device == "cpu" else ("CUDA", "AutogradCUDA")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [has("aten::cross_entropy_loss", key) for key in keys]


def test_cross_entropys_own_registration_is_gone_afterwards(losses, device):
    assert loss_registrations(device) == [False, False]
    with fused_softmax.enabled():
        assert loss_registrations(device) == [True, True]
    assert loss_registrations(device) == [False, False]
    x, target = logits_and_targets(device)
    F.cross_entropy(x.requires_grad_(), target).backward()
    assert not losses


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_cross_entropy_under_it(backend, device):
    torch._dynamo.reset()
    function = torch.compile(F.cross_entropy, backend=backend, fullgraph=True)
    x, target = logits_and_targets(device)
    leaf = x.clone().requires_grad_()
    expected = F.cross_entropy(leaf, target)
    (gradient,) = torch.autograd.grad(expected, leaf)
    with fused_softmax.enabled():
        torch.testing.assert_close(torch.autograd.grad(function(leaf, target), leaf)[0], gradient)
        torch.testing.assert_close(function(x, target), expected.detach())
    torch.testing.assert_close(function(x, target), expected.detach())


# Enabling and disabling.


def registered(device):
    key = "CPU" if device == "cpu" else "CUDA"
    return {name: repr(torch.library.get_kernel(f"aten::{name}", key)) for name in patch._STAND_INS}


def test_atens_kernels_are_back_afterwards(device):
    before = registered(device)
    with fused_softmax.enabled():
        assert all(now != before[name] for name, now in registered(device).items())
    assert registered(device) == before
    with pytest.raises(ZeroDivisionError), fused_softmax.enabled():
        1 / 0  # noqa: B018
    assert registered(device) == before


def test_calls_nest(ran, device):
    x = peaked(3, 70).to(device)
    fused_softmax.enable()
    with fused_softmax.enabled():
        fused_softmax.enable()
        fused_softmax.disable()
    torch.softmax(x, -1)
    assert ran == ["softmax"]
    fused_softmax.disable()
    torch.softmax(x, -1)
    assert ran == ["softmax"]
    with pytest.raises(RuntimeError, match="without an enable"):
        fused_softmax.disable()
    with fused_softmax.enabled():
        torch.softmax(x, -1)
    assert len(ran) == 2


def test_nothing_is_said_of_replacing_operators():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fused_softmax.enabled():
            pass


@contextmanager
def another_thread(work=lambda: None):
    """A thread that does `work` and goes on running until the block ends."""
    done, end, errors = threading.Event(), threading.Event(), []

    def run():
        try:
            work()
        except Exception as error:
            errors.append(error)
        done.set()
        while not end.is_set():
            time.sleep(0.001)

    thread = threading.Thread(target=run)
    thread.start()
    done.wait()
    try:
        yield
    finally:
        end.set()
        thread.join()
    assert not errors


def test_it_holds_in_all_threads(ran, device):
    x = peaked(3, 70).to(device)
    with fused_softmax.enabled(), another_thread(lambda: torch.softmax(x, -1)):
        assert ran == ["softmax"]
    with another_thread(fused_softmax.enable):
        torch.softmax(x, -1)
        assert ran == ["softmax"] * 2
        fused_softmax.disable()
        torch.softmax(x, -1)
    assert ran == ["softmax"] * 2
    with fused_softmax.enabled():
        pass


def test_while_other_threads_run_atens_kernels_are_called_and_not_put_back(ran, device):
    """One that is within a call would find the operator half replaced."""
    x = peaked(3, 70).to(device)
    before, expected = registered(device), torch.softmax(x, -1)
    with another_thread():
        with fused_softmax.enabled():
            torch.softmax(x, -1)
        assert ran == ["softmax"]
        for name in NAMES:
            getattr(torch, name)(x.clone().requires_grad_(), -1).sum().backward()
        assert torch.equal(torch.softmax(x, -1), expected)
        assert torch.equal(torch.softmax(x, -1, out=torch.empty_like(x)), expected)
        assert ran == ["softmax"]
        assert registered(device) != before
    with fused_softmax.enabled():
        pass
    assert registered(device) == before


def test_threads_that_wait_do_not_matter(device):
    from concurrent.futures import ThreadPoolExecutor

    before, end = registered(device), threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    with ThreadPoolExecutor(2) as pool:
        pool.submit(int).result()
        with fused_softmax.enabled():
            pass
        assert registered(device) == before
    end.set()
    thread.join()


def test_threads_that_enable_and_disable_while_others_call(device):
    """ATen's kernels and these agree here to the last few bits, so any result is right; a crash or an error is not."""
    x = torch.zeros(
        1, 1, device=device
    )  # the interpreter's kernels cannot run in two threads: what is empty needs none
    x = x[:0] if INTERPRETED else x
    expected, errors, stop = torch.softmax(x, -1), [], threading.Event()

    def call():
        try:
            while not stop.is_set():
                torch.testing.assert_close(torch.softmax(x, -1), expected)
        except Exception as error:
            errors.append(error)

    def toggle():
        for _ in range(300):
            with fused_softmax.enabled():
                pass

    callers = [threading.Thread(target=call) for _ in range(2)]
    togglers = [threading.Thread(target=toggle) for _ in range(2)]
    for thread in (*callers, *togglers):
        thread.start()
    for thread in togglers:
        thread.join()
    stop.set()
    for thread in callers:
        thread.join()
    assert not errors
    with fused_softmax.enabled():
        pass


# Models.


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=2, n_head=2, n_embd=8, vocab_size=50, n_positions=16, attn_implementation="eager",
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            vocab_size=50, max_position_embeddings=16, attn_implementation="eager",
        )
    )  # fmt: skip


def outcome(model, tokens):
    model.zero_grad()
    result = model(tokens, labels=tokens)
    result.loss.backward()
    return result.logits.detach(), result.loss.detach(), [p.grad.clone() for p in model.parameters()]


def check_model(make, device, dtype, ran, tolerances):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = make().to(device, dtype)
    tokens = torch.randint(50, (2, 7), device=device)
    expected = outcome(model, tokens)
    assert not ran
    with fused_softmax.enabled():
        result = outcome(model, tokens)
    assert ran.count("softmax") == ran.count("gradient") == 2  # the attention of two layers
    assert ran.count("cross_entropy") == 1
    torch.testing.assert_close(result, expected, **tolerances)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_model(make, ran, device):
    check_model(make, device, FP32, ran, {"rtol": 1e-4, "atol": 1e-6})


@pytest.mark.gpu
@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_model_in_bf16(make, ran):
    check_model(make, "cuda", BF16, ran, {"rtol": 5e-2, "atol": 1e-2})


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
def test_autocast_is_torchs(name, dtype, ran):
    def results():
        leaf = x.clone().requires_grad_()
        with torch.autocast("cuda", dtype=FP16):
            y = getattr(torch, name)(leaf, -1)
        y.square().sum().backward()
        return y.detach(), leaf.grad

    x = peaked(4, 700, dtype).cuda()
    expected = results()
    with fused_softmax.enabled():
        result = results()
    assert result[0].dtype == FP32
    assert ran == ["softmax", "gradient"]
    torch.testing.assert_close(result, expected, rtol=1e-2 if dtype != FP32 else 1e-4, atol=1e-4)
