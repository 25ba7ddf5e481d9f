"""PyTorch's own samples of softmax, log_softmax and logsumexp, given to these functions: what torch says, they say."""

import contextlib
import math
import sys
import types
import unittest

import pytest
import torch
from conftest import kernels

import fused_softmax

try:
    import expecttest  # noqa: F401
except ModuleNotFoundError:  # PyTorch's test tools want the name of a base class, for tests that are not run here
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase
from torch.testing._internal.common_methods_invocations import op_db

pytestmark = [
    kernels,
    # Of complex numbers cast to real ones, by the samples with a dtype; of PyTorch's prototype of masked tensors.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]


def masked(function):
    """torch.masked's argument order, in which nothing is kept of a row as of torch's own -inf."""

    def call(input, dim, *, dtype=None, mask=None, sink=None):
        return function(input, dim, dtype=dtype, mask=mask, sink=sink)

    return call


OURS = {
    "softmax": fused_softmax.softmax,
    "log_softmax": fused_softmax.log_softmax,
    "logsumexp": fused_softmax.logsumexp,
    "masked.softmax": masked(fused_softmax.softmax),
    "masked.log_softmax": masked(fused_softmax.log_softmax),
}
OPS = {f"{op.name} {op.variant_test_name}".strip(): op for op in op_db if op.name in OURS}
DIFFERENTIABLE = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
CASES = [
    pytest.param(name, dtype, id=f"{name}-{dtype}")
    for name, op in OPS.items()
    for dtype in sorted(op.dtypes | op.dtypesIfCUDA, key=str)
]
every_case = pytest.mark.parametrize(("name", "dtype"), CASES)
every_differentiable_case = pytest.mark.parametrize(
    ("name", "dtype"), [case for case in CASES if case.values[1] in DIFFERENTIABLE]
)


def samples(name, dtype, device, **options):
    op = OPS[name]
    if dtype not in op.supported_dtypes(torch.device(device).type):
        pytest.skip("not torch's on this device")
    kinds = [op.sample_inputs] + [op.reference_inputs] * (op.reference_inputs_func is not None)
    return [sample for kind in kinds for sample in kind(device, dtype, **options)]


def both(name, sample, change=lambda tensor: tensor, **options):
    """What ours and torch's return, or the types of what they raise."""
    results = []
    for function in (OURS[OPS[name].name], OPS[name].op):
        call = sample.transform(lambda each: change(each) if isinstance(each, torch.Tensor) else each)
        try:
            results.append(function(call.input, *call.args, **call.kwargs, **options))
        except Exception as error:
            results.append(type(error))
    return results


def assert_same(ours, theirs):
    if isinstance(ours, type) or isinstance(theirs, type):
        assert ours is theirs
        return
    # In half precision torch's CPU kernels along strided dims round on the way.
    half = {"rtol": 2 * torch.finfo(theirs.dtype).eps, "atol": torch.finfo(theirs.dtype).eps}
    tolerances = half if theirs.dtype in (torch.float16, torch.bfloat16) else {}
    torch.testing.assert_close(ours, theirs, equal_nan=True, check_stride=False, **tolerances)


def test_torch_still_has_samples_of_all_these():
    assert {op.name for op in OPS.values()} == OURS.keys()
    assert all(len(list(op.sample_inputs("cpu", torch.float32))) > 5 for op in OPS.values())


@every_case
def test_samples(name, dtype, device):
    for sample in samples(name, dtype, device):
        assert_same(*both(name, sample))


@every_differentiable_case
def test_samples_that_are_not_contiguous(name, dtype, device):
    for sample in samples(name, dtype, device):
        assert_same(*both(name, sample.noncontiguous()))


@every_differentiable_case
def test_samples_with_a_sink_that_counts_nothing(name, dtype, device):
    for sample in samples(name, dtype, device):
        ours, theirs = both(name, sample)
        if not isinstance(ours, type) and not (ours.is_complex() or theirs.is_complex()):
            with contextlib.suppress(ValueError):  # over several dims
                ours = OURS[OPS[name].name](sample.input, *sample.args, **sample.kwargs, sink=-math.inf)
        assert_same(ours, theirs)


@every_differentiable_case
def test_samples_with_out(name, dtype, device):
    if name.startswith("masked"):
        pytest.skip("torch.masked has no out=")
    for sample in samples(name, dtype, device):
        _, like = both(name, sample)
        if isinstance(like, type):
            continue
        # One of the samples is on the CPU whatever the device asked for.
        for out in (torch.full_like(like, 7), torch.empty(0, dtype=like.dtype, device=sample.input.device)):
            result = OURS[OPS[name].name](sample.input, *sample.args, **sample.kwargs, out=out)
            assert result is out
            assert_same(out, like)


@every_differentiable_case
def test_gradients_of_samples(name, dtype, device):
    for sample in samples(name, dtype, device, requires_grad=True):
        gradients = []
        for function in (OURS[OPS[name].name], OPS[name].op):
            x = sample.input.detach().clone().requires_grad_()
            y = function(x, *sample.args, **sample.kwargs)
            dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y)
            # What a mask empties is NaN or -inf, of which torch's gradient is NaN or not as its formulas come.
            gradients.append(torch.autograd.grad(y, x, torch.where(y.detach().isfinite(), dy, 0))[0])
        seen = y.detach().isfinite() if y.shape == x.shape else True
        ours, theirs = (torch.where(torch.as_tensor(seen, device=device), each, 0) for each in gradients)
        tolerance = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=4 * tolerance, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in OPS if not name.startswith("masked")])
def test_derivatives_of_samples(name, device):
    """First, second and forward-mode, in fp64, against finite differences."""
    for sample in samples(name, torch.float64, device, requires_grad=True):
        if not 0 < sample.input.numel() <= 25 or not sample.input.requires_grad:
            continue

        def of(x, sample=sample):
            return OURS[OPS[name].name](x, *sample.args, **sample.kwargs)

        assert torch.autograd.gradcheck(of, sample.input, fast_mode=True, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(of, sample.input, fast_mode=True)
