"""What every function of the softmax family is asked: any shape, strides, dtype, out= and error, and PyTorch around it.

The functions are the rows of contract.FAMILY. test_backward.py asks for their gradients, test_library.py for compiled
code and transforms. What one function alone promises stands in its own file.
"""

import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import kernels, peaked
from contract import (
    FAMILY,
    assert_result,
    assert_scores,
    composed,
    every_function,
    keeping_shape,
    public,
    taking_dtype,
)
from products import one_in, pairwise
from scored import added, any_scores, kept, on, sinks, weights
from shapes import DTYPES
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fused_softmax
from fused_softmax.core import launch, route
from fused_softmax.ops.softmax import reference

pytestmark = kernels

FP32, FP16, BF16, FP64 = DTYPES
LOWEST = torch.finfo(FP32).min
OTHERS = [torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool, torch.float8_e4m3fn]  # with dtype= alone


# Shapes and strides.

SHAPES = [(), (1,), (9, 1), (0, 5), (2, 3, 65), (4, 1, 8), (3, 4, 2, 1), (3, 4, 5, 7)]
MORE_SHAPES = [
    (7,), (0,), (70,), (3, 5), (1, 9), (3, 70), (40, 3), (5, 0), (0, 0), (4, 8, 1), (1, 8, 1), (2, 0, 3), (2, 3, 0),
    (2, 40, 5), (2, 1, 3, 5), (2, 3, 5, 40), (2, 3, 4, 3, 40),
]  # fmt: skip


def poisoned(like):
    return torch.full_like(like, math.nan)


@pairwise(strength=1)
@every_function
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    "shape", [*SHAPES, *[pytest.param(each, marks=pytest.mark.exhaustive) for each in MORE_SHAPES]], ids=str
)
def test_any_dim_of_any_shape(shape, dtype, function, device):
    x = peaked(1, math.prod(shape), dtype).view(shape).to(device)
    n = max(1, len(shape))
    for dim in range(-n, n):
        for i, (name, scored) in enumerate(any_scores(shape, dim, device).items()):
            if scored and (dim < 0) == (i + dim % n) % 2:
                continue  # of a dim and the same counted from the end, one takes every second of the scores
            y = public(function, x, dim, **scored)
            # The second call takes the launch that the first one kept.
            results = [y] if scored else [y, public(function, x, dim), public(function, x, dim, out=poisoned(y))]
            for result in results:
                try:
                    assert_result(result, function, x, dim, **scored)
                    assert result.is_contiguous()
                except AssertionError as error:
                    raise AssertionError(f"dim {dim}, {name}: {error}") from None


@pairwise(strength=1)
@every_function
@pytest.mark.parametrize("value", [3.0, -math.inf, math.inf, math.nan, LOWEST], ids=str)
def test_one_value_a_row(value, function, device):
    for shape in ((), (4, 1), (1,)):
        x = torch.full(shape, value, device=device)
        for dim in (0, -1) if shape != (4, 1) else (0, 1, -1):
            assert_result(public(function, x, dim), function, x, dim)


def _layouts(x):
    """Tensors of many strides made from x [6, 700], by name."""
    return {
        "contiguous": x,
        "columns from the second on": x[:, 1:],
        "columns to the last but one": x[:, :-1],
        "columns from the eighth on": x[:, 8:688],
        "every second row": x[::2],
        "every second column": x[:, ::2],
        "transposed": x.t()[:300],
        "expanded": x[:1].expand(4, -1),
        "expanded in the middle": x[:4].view(2, 2, 700)[:, :1].expand(2, 3, 700),
        "expanded first": x[:2].expand(3, 2, 700),
        "expanded columns": x[:, :1].expand(6, 50),
        "three dims": x.view(2, 3, 700),
        "three dims, sliced": x.view(2, 3, 700)[:, 1:, 3:],
        "three dims, every second": x.view(2, 3, 700)[:, ::2],
        "three dims, every second column": x[:, ::2].unflatten(0, (2, 3)),
        "three dims, permuted": x.view(2, 3, 700).permute(1, 0, 2),
        "three dims, dim in front": x.view(2, 3, 700).permute(2, 0, 1),
        "three dims, reversed": x.view(700, 3, 2).permute(2, 1, 0),
        "three dims, reversed, in part": x.view(350, 3, 4).permute(2, 1, 0)[:2],
        "four dims": x.view(2, 3, 7, 100),
        "four dims, permuted": x.view(2, 3, 7, 100).permute(0, 2, 1, 3),
        "windows": x.flatten().unfold(0, 500, 3)[:20],
        "one column": x[:, 3:4],
        "channels last": x.view(2, 3, 7, 100).contiguous(memory_format=torch.channels_last),
        "one element": x[0, 0],
        "one row": x[3],
        "strided row": x[:, 3],
    }


@pairwise(strength=1)
@every_function
@pytest.mark.parametrize("dtype", [FP32, FP16, FP64], ids=str)
@pytest.mark.parametrize("layout", one_in(4, _layouts(torch.empty(6, 700))))
def test_strides(layout, dtype, function, device):
    x = _layouts(peaked(6, 700, dtype).to(device))[layout]
    before = x.clone()
    for dim in dict.fromkeys((-1, 0, -max(1, x.ndim))):
        scores = ("mask", "added, scale a row", "sink a row") if dim in (-1, 0) else ()
        for name in ("plain", "plain", *scores):
            scored = any_scores(x.shape, dim, device)[name]
            assert_result(public(function, x, dim, **scored), function, x, dim, **scored)
    assert torch.equal(x, before)


# dtype= and out=


@pairwise(strength=1)
@taking_dtype
@pytest.mark.parametrize("wanted", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("given", [*DTYPES, *OTHERS], ids=str)
def test_dtype(given, wanted, function, device):
    if wanted is None and given in OTHERS:
        pytest.skip("without dtype= what is no float is refused, which other tests ask")
    x = peaked(6, 700).to(given).to(device)
    for dim in (-1, 0):
        y = public(function, x, dim, dtype=wanted)
        assert_result(y, function, x, dim, dtype=wanted or given)
        assert y.is_contiguous()
    x = x[:, :70].reshape(2, 3, 70)
    for scored in (
        {"scale": -0.5}, {"mask": kept(3, 70)}, {"mask": added(70), "is_causal": True}, {"sink": sinks(3, 1)},
    ):  # fmt: skip
        scored = on(device, scored)
        assert_scores(public(function, x, dtype=wanted, **scored), function, x, dtype=wanted or given, **scored)


@taking_dtype
def test_the_input_is_rounded_to_dtype_before_anything_else(function, device):
    x = torch.tensor([[1.0009765625, 1.0], [70000.0, 1.0], [-1e-30, 0.0]], device=device)
    for dtype in (FP16, BF16):
        y = public(function, x, dtype=dtype)
        assert torch.equal(y.isnan(), FAMILY[function].torchs(x, -1, dtype=dtype).isnan())
        assert_result(y, function, x, dtype=dtype)


def _view(buffer, shape, kind):
    """A tensor of a shape in a buffer, as `kind` says."""
    if kind == "rows apart":
        return buffer[: math.prod(shape[:-1]) * (shape[-1] + 20)].view(*shape[:-1], shape[-1] + 20)[..., : shape[-1]]
    if kind == "rows apart, shifted":
        return _view(buffer[3:], (*shape[:-1], shape[-1] + 15), "contiguous")[..., 5 : shape[-1] + 5]
    if kind == "every second column":
        return _view(buffer, (*shape[:-1], 2 * shape[-1]), "contiguous")[..., ::2]
    if kind == "reversed dims":
        return _view(buffer, shape[::-1], "contiguous").permute(*range(len(shape))[::-1])
    return buffer[kind == "one off" :][: math.prod(shape)].view(shape)


@pairwise(strength=1)
@every_function
@pytest.mark.parametrize(
    "kind",
    ["contiguous", "rows apart", "rows apart, shifted", "every second column", "reversed dims", "one off", "empty"],
)
@pytest.mark.parametrize(
    ("given", "wanted"), [(FP32, None), (BF16, None), (FP32, FP32), (BF16, FP32), (FP32, FP16), (BF16, FP16)], ids=str
)
def test_out(given, wanted, kind, function, device):
    """It is written, and nothing beside it."""
    row = FAMILY[function]
    if wanted is not None and not row.takes_dtype:
        pytest.skip("logsumexp has no dtype= to give")
    asked = {"dtype": wanted} if row.takes_dtype else {}
    for shape, dim in (((4, 300), -1), ((4, 300), 0), ((5, 700), 1), ((2, 3, 70), -1), ((2, 3, 70), 0)):
        x = peaked(1, math.prod(shape), given).view(shape).to(device)
        for scored in ({}, {"scale": -0.5, "mask": kept(shape[-1], of=0.9).to(device)}, {"sink": 3.0}):
            buffer = torch.full((2 * x.numel() + 300,), math.nan, dtype=wanted or given, device=device)
            out = buffer.new_empty(0) if kind == "empty" else _view(buffer, composed(function, x, dim).shape, kind)
            assert public(function, x, dim, out=out, **asked, **scored) is out
            assert_result(out, function, x, dim, dtype=wanted, **scored)
            out.fill_(math.nan)
            assert buffer.isnan().all()


@every_function
def test_out_of_zero_elements_takes_the_shape_of_the_result(function, device):
    for shape in ((3, 5), (0, 5), (5, 0), (2, 0, 3), ()):
        for empty in ((0,), (0, 5), (5, 0), (0, 7)):
            x = torch.randn(shape, device=device)
            out = torch.empty(empty, device=device)
            assert public(function, x, -1, out=out) is out
            assert out.shape == composed(function, x).shape
            assert_result(out, function, x)


@keeping_shape
@pytest.mark.parametrize("n_cols", [5, 20, 300, 700, 1100])
def test_out_that_is_the_input_or_overlaps_it(function, n_cols, device):
    for dim in (-1, 0):
        for scored in ({}, {"scale": 0.5}, {"sink": 3.0}):
            x = peaked(4, n_cols).to(device)
            theirs = composed(function, x, dim, **scored)
            assert public(function, x, dim, out=x, **scored) is x
            torch.testing.assert_close(x, theirs, rtol=1e-5, atol=1e-6)
            buffer = peaked(1, 5 * n_cols).flatten().to(device)
            x, out = buffer[: 4 * n_cols].view(4, -1), buffer[n_cols - 2 : 5 * n_cols - 2].view(4, -1)
            theirs = composed(function, x, dim, **scored)
            public(function, x, dim, out=out, **scored)
            torch.testing.assert_close(out, theirs, rtol=1e-5, atol=1e-6)


@keeping_shape
@pytest.mark.parametrize("n_cols", [20, 40, 700])
def test_out_that_overlaps_another_argument(function, n_cols, device):
    """All that a row reads is read before any of it is overwritten, whoever else reads it too."""
    values, size = peaked(4, n_cols).to(device), 4 * n_cols
    buffer = torch.empty(5 * n_cols, device=device)
    out = buffer[:size].view(4, n_cols)
    for name, given, result in (
        ("mask", buffer[:n_cols], out),
        ("mask", buffer[n_cols - 3 : 2 * n_cols - 3], out),
        ("mask", buffer[:size].view(n_cols, 4).t(), out),
        ("scale", out[:, :1], out),
        ("sink", out[:, :1], out),
        ("sink", buffer[: 4 * (n_cols + 1)].view(4, -1)[:, n_cols:], buffer[5 : size + 5].view(4, n_cols)),
    ):
        for _ in range(2):  # the second call is a kept one
            buffer.copy_(torch.linspace(-2, 2, 5 * n_cols, device=device))
            theirs = composed(function, values, **{name: given.clone()})
            public(function, values, out=result, **{name: given})
            torch.testing.assert_close(result, theirs, rtol=1e-5, atol=1e-6)


@every_function
@pytest.mark.parametrize("scored", [{}, {"scale": 2.0}, {"sink": 3.0}], ids=str)
def test_out_counts_as_written_for_autograd(scored, function, device):
    """What a backward pass saved must not be overwritten behind its back."""
    x = torch.randn(3, 700, device=device)
    out = torch.randn_like(composed(function, x))
    loss = (torch.ones_like(out).requires_grad_() * out).sum()
    public(function, x, out=out, **scored)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@every_function
def test_out_with_the_negative_bit_gets_the_result(function, device):
    x = peaked(3, 700).to(device)
    out = torch._neg_view(torch.zeros_like(composed(function, x)))
    public(function, x, out=out)
    assert_result(out, function, x)


@every_function
def test_out_that_overlaps_itself_is_refused_as_by_torch(function, device):
    x = torch.randn(3, 64, device=device)
    size = composed(function, x).shape
    out = torch.empty(1, *size[1:], device=device).expand(size)
    for of in (FAMILY[function].torchs, FAMILY[function].ours):
        with pytest.raises(RuntimeError, match="single memory location"):
            of(x, -1, out=out)


@every_function
def test_out_takes_no_part_in_autograd(function, no_launch, device):
    ones = torch.ones(X, device=device)
    leaf = ones.clone().requires_grad_()
    for x, scored in (
        (leaf, {"scale": 2.0}),
        (ones, {"scale": torch.ones(3, 1, device=device, requires_grad=True)}),
        (ones, {"mask": torch.ones(4, device=device, requires_grad=True)}),
        (ones, {"sink": torch.ones(3, 1, device=device, requires_grad=True)}),
        (torch._neg_view(leaf), {"scale": 2.0}),
    ):
        with pytest.raises(RuntimeError, match=f"{function}: out= takes no part in autograd"):
            public(function, x, out=torch.empty(X[:2] if FAMILY[function].reduces else X, device=device), **scored)


# Bad input.


@pytest.fixture
def no_launch(monkeypatch):
    def fail(*args, **options):
        pytest.fail("a kernel was prepared for a call that is refused")

    monkeypatch.setattr(launch, "prepare", fail)
    for name in FAMILY:
        monkeypatch.setattr(reference, name, fail)


def ones(*shape, **how):
    """What makes a tensor on a device."""
    return lambda device: torch.ones(shape, **{"device": device} | how)


def made(given, device):
    return given(device) if callable(given) else given


# What torch refuses: (the input, dim, options, what the error says).
REFUSED = {
    "a list": ([1.0, 2.0], -1, {}, "input.*list"),
    "None": (None, -1, {}, "input.*NoneType"),
    "a NumPy array": (np.ones(3), 0, {}, "input.*ndarray"),
    "int64": (ones(3, 4, dtype=torch.int64), -1, {}, "int64"),
    "int32": (ones(3, 4, dtype=torch.int32), -1, {}, "int32"),
    "uint8": (ones(3, 4, dtype=torch.uint8), -1, {}, "uint8"),
    "bool": (ones(3, 4, dtype=torch.bool), -1, {}, "bool"),
    "dtype int64": (ones(3, 4), -1, {"dtype": torch.int64}, "int64"),
    "dtype bool": (ones(3, 4), -1, {"dtype": torch.bool}, "bool"),
    "dtype a string": (ones(3, 4), -1, {"dtype": "float32"}, "dtype.*float32"),
    "dim too large": (ones(3, 4), 2, {}, r"dim 2.*\[-2, 1\].*\(3, 4\)"),
    "dim too small": (ones(3, 4), -3, {}, r"dim -3.*\[-2, 1\].*\(3, 4\)"),
    "dim of no dims": (ones(), 1, {}, r"dim 1.*\[-1, 0\]"),
    "dim a float": (ones(3, 4), 1.0, {}, "dim.*float.*1.0"),
    "dim a bool": (ones(3, 4), True, {}, "dim.*bool.*True"),
    "dim None": (ones(3, 4), None, {}, "dim.*NoneType"),
    "dim a list": (ones(3, 4), [1], {}, r"dim.*list.*\[1\]"),
    "dim a string": (ones(3, 4), "a", {}, "dim.*str"),
    "dims that repeat": (ones(3, 4), (0, 0), {}, "dim.*tuple"),
    "dims out of range": (ones(3, 4), (0, 2), {}, "dim.*tuple"),
    "out of another dtype": (ones(3, 4), -1, {"out": ones(3, 4, dtype=FP16)}, "out.*float32.*float16"),
    "out of the input's dtype and not dtype's": (
        ones(3, 4), -1, {"dtype": FP16, "out": ones(3, 4)}, "out.*float16.*float32",
    ),
    "out of integers": (ones(3, 4), -1, {"out": ones(3, 4, dtype=torch.int64)}, "out.*float32.*int64"),
    "out of another device": (ones(3, 4), -1, {"out": ones(3, 4, device="meta")}, "out.*meta"),
    "out a list": (ones(3, 4), -1, {"out": [1.0]}, "out.*list"),
    "sparse": (lambda d: torch.ones(3, 4, device=d).to_sparse(), -1, {"out": ones(3, 4)}, "sparse"),
    "sparse rows": (lambda d: torch.ones(3, 4, device=d).to_sparse_csr(), -1, {}, "sparse_csr"),
}  # fmt: skip


@every_function
@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_with_torchs_error_before_any_launch(name, function, no_launch, device):
    x, dim, options, message = REFUSED[name]
    row, options = FAMILY[function], {key: made(value, device) for key, value in options.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = made(x, device)
        try:
            row.torchs(x, dim, **options)
        except Exception as error:
            theirs = type(error)
        else:
            assert not row.own_checks
            pytest.skip("torch takes this input, so there is no error to compare")
        with pytest.raises(Exception, match=f"(?s){function}: .*{message}" if row.own_checks else "") as ours:
            row.ours(x, dim, **options)
    # torch 2.11 takes a dim that is no number for a name, and says RuntimeError.
    assert ours.type is theirs or (name in ("dim None", "dim a string") and ours.type is TypeError)


X = (2, 3, 4)
# What torch has no arguments for, on an input of the shape X: (options, the type of the error, what it says).
BAD = {
    "mask of integers": ({"mask": ones(4, dtype=torch.int64)}, TypeError, "mask.*bool.*int64"),
    "mask of bytes": ({"mask": ones(4, dtype=torch.uint8)}, TypeError, "mask.*bool.*uint8"),
    "mask of complex numbers": ({"mask": ones(4, dtype=torch.complex64)}, TypeError, "mask.*bool.*complex64"),
    "mask a list": ({"mask": [True] * 4}, TypeError, "mask.*Tensor.*list"),
    "mask True": ({"mask": True}, TypeError, "mask.*Tensor.*bool"),
    "mask too long": ({"mask": ones(5)}, ValueError, r"mask.*broadcast.*\(2, 3, 4\).*\(5,\)"),
    "mask of a wrong leading dim": ({"mask": ones(2, 4)}, ValueError, r"mask.*broadcast.*\(2, 3, 4\).*\(2, 4\)"),
    "mask of more dims": ({"mask": ones(1, 2, 3, 4)}, ValueError, r"mask.*broadcast.*\(2, 3, 4\).*\(1, 2, 3"),
    "mask empty": ({"mask": ones(0)}, ValueError, r"mask.*broadcast.*\(2, 3, 4\).*\(0,\)"),
    "mask of another device": ({"mask": ones(4, device="meta")}, RuntimeError, "mask.*device.*meta"),
    "mask of no dims of another device": (
        {"mask": torch.tensor(True, device="meta")}, RuntimeError, "mask.*device.*meta",
    ),
    "mask sparse": ({"mask": lambda d: torch.ones(3, 4, device=d).to_sparse()}, RuntimeError, "mask.*dense.*sparse"),
    "mask of 8-bit floats": (
        {"mask": lambda d: torch.ones(4, device=d).to(torch.float8_e4m3fn)}, TypeError, "mask.*float8_e4m3fn",
    ),
    "scale of integers": ({"scale": lambda d: torch.tensor(2, device=d)}, TypeError, "scale.*float.*int64"),
    "scale a string": ({"scale": "2"}, TypeError, "scale.*number.*str.*'2'"),
    "scale True": ({"scale": True}, TypeError, "scale.*number.*bool.*True"),
    "scale complex": ({"scale": 2j}, TypeError, "scale.*number.*complex"),
    "scale a list": ({"scale": [1.0, 2.0]}, TypeError, "scale.*number.*list"),
    "scale along dim": ({"scale": ones(4)}, ValueError, r"scale.*a row.*\(2, 3, 1\).*\(4,\)"),
    "scale for every element": ({"scale": ones(2, 3, 4)}, ValueError, r"scale.*a row.*\(2, 3, 1\).*\(2, 3, 4\)"),
    "scale that does not broadcast": ({"scale": ones(3)}, ValueError, r"scale.*broadcast.*\(2, 3, 4\).*\(3,\)"),
    "scale of a wrong leading dim": (
        {"scale": ones(3, 3, 1)}, ValueError, r"scale.*broadcast.*\(2, 3, 4\).*\(3, 3, 1\)",
    ),
    "scale of another device": ({"scale": ones(3, 1, device="meta")}, RuntimeError, "scale.*device.*meta"),
    "scale of no dims of another device": (
        {"scale": torch.tensor(2.0, device="meta")}, RuntimeError, "scale.*device.*meta",
    ),
    "scale of 8-bit floats": (
        {"scale": lambda d: torch.ones(3, 1, device=d).to(torch.float8_e4m3fn)}, TypeError, "scale.*float8_e4m3fn",
    ),
    "sink True": ({"sink": True}, TypeError, r"sink must be a number or a Tensor, not bool \(True\)"),
    "sink a string": ({"sink": "2"}, TypeError, r"sink must be a number or a Tensor, not str \('2'\)"),
    "sink of integers": (
        {"sink": ones(3, 1, dtype=torch.int64)}, TypeError, "sink must be of 16 to 64 bit floats, got torch.int64",
    ),
    "sink of a wrong leading dim": (
        {"sink": ones(2, 1)}, ValueError, r"sink must broadcast to the input's shape \(2, 3, 4\), got shape \(2, 1\)",
    ),
    "sink along dim": (
        {"sink": ones(4)}, ValueError,
        r"sink must have one value a row, in a shape that broadcasts to \(2, 3, 1\), got shape \(4,\)",
    ),
    "sink sparse": (
        {"sink": lambda d: torch.ones(3, 1, device=d).to_sparse()}, RuntimeError,
        "sink must be a dense strided tensor, got a torch.sparse_coo one",
    ),
    "sink of another device": (
        {"sink": ones(3, 1, device="meta")}, RuntimeError, "sink must be on the input's device",
    ),
    "is_causal 1": ({"is_causal": 1}, TypeError, "is_causal.*bool.*int"),
    "is_causal None": ({"is_causal": None}, TypeError, "is_causal.*bool.*NoneType"),
    "is_causal over another dim": (
        {"is_causal": True, "dim": 1}, ValueError, r"is_causal.*last dim.*dim=1.*\(2, 3, 4\)",
    ),
    "masked_rows a word": ({"masked_rows": "one"}, ValueError, 'masked_rows.*"nan".*"zero".*one'),
    "masked_rows None": ({"masked_rows": None}, ValueError, 'masked_rows.*"nan".*"zero".*None'),
    "masked_rows a number": ({"masked_rows": 0}, ValueError, 'masked_rows.*"nan".*"zero".*0'),
}  # fmt: skip
# Of functions that check these arguments themselves.
BAD_BESIDE_SCORES = {
    "dim out of range": ({"dim": 3, "scale": 2.0}, IndexError, r"dim 3.*\[-3, 2\].*\(2, 3, 4\)"),
    "dtype of integers": ({"dtype": torch.int64, "scale": 2.0}, NotImplementedError, "dtype=torch.int64"),
    "out of another dtype": ({"scale": 2.0, "out": ones(*X, dtype=FP16)}, RuntimeError, "out.*float32.*float16"),
    "out of another shape": ({"scale": 2.0, "out": ones(4)}, RuntimeError, r"out.*\(2, 3, 4\).*\(4,\)"),
}


@every_function
@pytest.mark.parametrize("name", BAD | BAD_BESIDE_SCORES)
def test_bad_scores_are_refused_before_any_launch(name, function, no_launch, device):
    if name in BAD_BESIDE_SCORES and not FAMILY[function].own_checks:
        pytest.skip("torch itself refuses this input of the function")
    arguments, error, message = (BAD | BAD_BESIDE_SCORES)[name]
    arguments = {key: made(value, device) for key, value in arguments.items()}
    with pytest.raises(error, match=f"(?s)^{function}: .*{message}"):
        public(function, torch.ones(X, device=device), **({"dim": -1} | arguments))


@every_function
@pytest.mark.parametrize("shape", [(), (5,)], ids=str)
def test_causal_needs_queries_and_keys(function, shape, no_launch, device):
    message = rf"{function}: is_causal.*2 dims.*queries, keys.*\({'5,' if shape else ''}\)"
    with pytest.raises(ValueError, match=message):
        public(function, torch.ones(shape, device=device), is_causal=True)


@taking_dtype
@pytest.mark.parametrize("given", [torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_inputs_that_need_a_dtype_say_so(function, given, no_launch, device):
    with pytest.raises(NotImplementedError, match=f"{function}: .*{given}.*dtype"):
        public(function, torch.ones(X, device=device).to(given), scale=2.0)


@keeping_shape
def test_a_dim_that_equals_another_is_not_taken_for_it(function, device):
    """True == 1.0 == 1, and all hash alike: a launch that was kept for 1 is not for them."""
    x = torch.randn(3, 4, device=device)
    public(function, x, 1)
    public(function, x, 0)
    for dim in (True, False, 1.0, 0.0, -1.0):
        with pytest.raises(TypeError, match=f"dim.*{type(dim).__name__}"):
            public(function, x, dim)


@every_function
def test_a_dim_of_numpy_is_an_int_as_for_torch(function, device):
    x = torch.randn(3, 4, device=device)
    assert_result(public(function, x, np.int64(0)), function, x, 0)
    assert_result(public(function, x, np.int32(-1)), function, x, -1)


@every_function
def test_numbers_of_numpy_are_scales(function, device):
    x = peaked(2, 9).to(device)
    for scale in (np.float32(0.5), np.float64(0.5), np.int64(2)):
        assert_scores(public(function, x, scale=scale), function, x, scale=float(scale))


@every_function
def test_a_scale_of_no_dims_may_be_on_the_cpu_as_with_torchs_operators(function, device):
    x = peaked(2, 9).to(device)
    for scale in (torch.tensor(0.5), torch.tensor(-2.0, dtype=FP64), torch.tensor(0.0)):
        assert_scores(public(function, x, scale=scale), function, x, scale=scale.item())


@keeping_shape
@pytest.mark.parametrize("shape", [(3,), (4, 3), (3, 5), (1, 3, 4), ()], ids=str)
def test_out_of_another_shape_is_refused(shape, function, no_launch, device):
    """torch resizes it with a warning that this will be an error."""
    with pytest.raises(RuntimeError, match=rf"{function}: out.*\(3, 4\)"):
        public(function, torch.ones(3, 4, device=device), out=torch.ones(shape, device=device))


@keeping_shape
def test_nested_is_refused(function, device):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device=device)
    with pytest.raises(RuntimeError, match=rf"{function}: .*nested"):
        public(function, nested, out=torch.ones(3))


@taking_dtype
def test_refused_calls_leave_the_output_alone(function, device):
    out = torch.full((3, 4), 7.0, device=device)
    with pytest.raises(NotImplementedError):
        public(function, torch.ones(3, 4, dtype=torch.int64, device=device), dtype=torch.int64, out=out)
    with pytest.raises(RuntimeError):
        public(function, torch.ones(4, 3, device=device), out=out)
    assert (out == 7).all()


# Calls that are kept, and everything that listens in or that is no plain tensor.


@every_function
def test_repeated_calls_take_the_launch_that_was_kept(function, monkeypatch, device):
    x = peaked(3, 700).to(device)
    sink = sinks(3, 1).to(device)
    first = [public(function, x, **scored) for scored in ({}, {"sink": sink}, {"sink": 2.0})]
    monkeypatch.setattr(launch, "prepare", lambda *arguments: pytest.fail("not by the kept launch"))
    monkeypatch.setattr(route, "decide", lambda *arguments, **options: pytest.fail("not by the kept call"))
    again = [public(function, x.clone(), **scored) for scored in ({}, {"sink": sink.clone()}, {"sink": 2})]
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)
        assert one.data_ptr() != other.data_ptr()
    for number in (3, 4.5):
        assert_scores(public(function, x, sink=number), function, x, sink=number)


@every_function
def test_complex_input_takes_torchs_path(function, device):
    x, row = torch.randn(3, 4, dtype=torch.complex64, device=device), FAMILY[function]
    try:
        theirs = row.torchs(x, -1)
    except Exception as error:
        with pytest.raises(type(error)):
            row.ours(x, -1)
    else:
        torch.testing.assert_close(row.ours(x, -1), theirs)


@every_function
def test_meta_and_fake_tensors(function, device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    asked = {"dtype": FP16} if FAMILY[function].takes_dtype else {}
    for scored in ({}, {"mask": ones(20), "scale": 2.0, "is_causal": True}, {"sink": ones(3, 1)}):
        x = torch.ones(2, 3, 20)
        for dim in (-1,) if scored else (-1, 0):
            size = composed(function, x, dim).shape
            given = {name: made(value, "meta") for name, value in scored.items()}
            y = public(function, x.to("meta"), dim, **asked, **given)
            assert (y.shape, y.dtype, y.device.type) == (size, asked.get("dtype", FP32), "meta")
            with FakeTensorMode() as mode:
                given = {name: made(value, device) for name, value in scored.items()}
                fake = mode.from_tensor(x.to(device))
                given = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
                y = public(function, fake, dim, **asked, **given)
            assert (y.shape, y.dtype, y.device.type) == (size, asked.get("dtype", FP32), torch.device(device).type)


@every_function
def test_requires_grad_gets_torchs_gradients(function, device):
    x, row = torch.randn(3, 700, device=device), FAMILY[function]
    dy = torch.randn_like(row.ours(x, -1))  # which keeps a launch for tensors like x
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    (row.ours(ours, -1) * dy).sum().backward()
    (row.torchs(theirs, -1) * dy).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    with torch.no_grad():
        assert not row.ours(ours, -1).requires_grad
        assert_result(row.ours(ours, -1), function, ours)
    with torch.inference_mode():
        assert row.ours(ours, -1).is_inference()


@every_function
def test_parameters_buffers_and_views_of_them(function, device):
    weight = torch.nn.Parameter(torch.randn(3, 700, device=device))
    assert public(function, weight).requires_grad
    with torch.no_grad():
        assert_result(public(function, weight), function, weight)
        assert type(public(function, weight)) is torch.Tensor
    assert_result(public(function, weight.data), function, weight.data)


@every_function
def test_forward_mode_gradients(function, device):
    """Of the input, an added mask, a scale and a sink, of which the kernels have no rule."""
    x, tangent = torch.randn(3, 70, device=device), torch.randn(3, 70, device=device)
    public(function, x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        ours, theirs = (of(dual, -1) for of in (FAMILY[function].ours, FAMILY[function].torchs))
        ours, theirs = (forward_ad.unpack_dual(each).tangent for each in (ours, theirs))
    assert ours is not None
    assert torch.equal(ours, theirs)
    x, keep = peaked(12, 20, FP64).view(4, 3, 20).to(device), kept(3, 20).to(device)
    scale, bias, sink = torch.rand(3, 1, dtype=FP64).to(device), weights(20, dtype=FP64), sinks(3, 1, dtype=FP64)
    tensors = {"scale": scale, "mask": bias.to(device), "sink": sink.to(device)}
    for names, beside in (
        (("scale",), {}), (("scale",), {"mask": keep}), (("mask", "scale"), {}), (("sink",), {}),
        (("sink", "mask", "scale"), {}),
    ):  # fmt: skip
        given = x, *(tensors[name] for name in names)
        tangents = [weights(*each.shape, dtype=FP64, seed=i).to(device) for i, each in enumerate(given)]
        found = [
            torch.func.jvp(
                lambda x, *each, of=of, names=names, beside=beside: of(
                    function, x, -1, **dict(zip(names, each, strict=True)), **beside
                ).nan_to_num(neginf=0.0),
                given,
                tuple(tangents),
            )
            for of in (public, composed)
        ]
        torch.testing.assert_close(*found)


@every_function
def test_jacobians_of_a_scale_by_both_modes(function, device):
    x, mask, scale = peaked(3, 20).to(device), kept(3, 20).to(device), torch.rand(3, 1).to(device)
    of, in_front = (
        mode(lambda scale: public(function, x, mask=mask, scale=scale))(scale)
        for mode in (torch.func.jacrev, torch.func.jacfwd)
    )
    torch.testing.assert_close(of, in_front, equal_nan=True)


@every_function
def test_modes_see_a_call(function, device):
    """A mode of dispatch, and one of torch's functions."""
    seen = []

    class Dispatches(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    x = torch.randn(3, 70, device=device)
    public(function, x)
    with Dispatches():
        y = public(function, x)
    assert any(function in name for name in seen)
    assert_result(y, function, x)
    with Functions():
        y = public(function, x)
    assert FAMILY[function].torchs in seen
    assert_result(y, function, x)


@every_function
def test_tensor_subclasses_stay_what_they_are(function, device):
    class Mine(torch.Tensor):
        pass

    x = torch.randn(3, 70, device=device)
    for scored in ({}, {"scale": 2.0}, {"sink": 3.0}):
        y = public(function, x.as_subclass(Mine), **scored)
        assert type(y) is Mine
        assert_result(y.as_subclass(torch.Tensor), function, x, **scored)


@every_function
def test_what_overrides_torch_functions_without_being_a_tensor_gets_its_say(function, device):
    class Wrapper:
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return function

    assert public(function, Wrapper(), -1) is FAMILY[function].torchs
    graph = torch.fx.symbolic_trace(lambda x: public(function, x, -1))
    x = torch.randn(3, 70, device=device)
    assert_result(graph(x), function, x)


@pairwise(strength=1)
@every_function
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_sees_through_it_without_a_graph_break(dynamic, function, device):
    mask = kept(3, 72, of=0.8).to(device)
    for scored in ({}, {"mask": mask, "scale": 0.5, "is_causal": True}):

        def call(x, scored=scored):
            given = scored | ({"mask": scored["mask"][:, : x.shape[-1]]} if scored else {})
            return public(function, x * 2, -1, **given) + 1

        torch._dynamo.reset()
        compiled = torch.compile(call, backend="eager", fullgraph=True, dynamic=dynamic)
        for n_cols in (70, 71):
            x = torch.randn(3, n_cols, device=device)
            expected = call(x)  # which keeps a call for tensors like those within
            torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-6)
        if not scored:
            torch.testing.assert_close(compiled(x), FAMILY[function].torchs(x * 2, -1) + 1)
            x = torch.randn(3, 70, device=device, requires_grad=True)
            compiled(x).square().sum().backward()
            assert x.grad is not None


@every_function
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace_records_a_call(function, device):
    x = torch.randn(3, 70, device=device)
    public(function, x)
    traced = torch.jit.trace(lambda t: public(function, t, -1), x)
    other = torch.randn(3, 70, device=device)
    assert_result(traced(other), function, other)


@every_function
def test_views_with_the_negative_bit(function, device):
    row, z = FAMILY[function], torch.randn(3, 70, dtype=torch.complex64, device=device)
    x = z.conj().imag
    assert x.is_neg()
    torch.testing.assert_close(row.ours(x, -1), row.torchs(-z.imag, -1))
    contiguous = torch.randn(3, 70, device=device)
    row.ours(contiguous, -1)
    torch.testing.assert_close(row.ours(torch._neg_view(contiguous), -1), row.torchs(-contiguous, -1))
    x, of_row = peaked(2, 20).to(device), torch.ones(2, 1).to(device)
    mask = added(20).nan_to_num(posinf=1.0).to(device)
    for plain in ({"mask": mask}, {"mask": mask, "scale": -of_row}, {"sink": -of_row}):
        name = list(plain)[-1]
        marked = plain | {name: torch._neg_view(-plain[name])}
        assert_scores(public(function, x, **marked), function, x, **plain)


@every_function
def test_vmap_over_any_dim_is_a_loop(function, device):
    row, x = FAMILY[function], torch.randn(4, 3, 70, device=device)
    torch.testing.assert_close(torch.vmap(row.ours, (0, None))(x, -1), row.torchs(x, -1))
    y = torch.vmap(lambda each: row.ours(each, 0), in_dims=2, out_dims=-1)(x)
    torch.testing.assert_close(y, row.torchs(x, 0))


@every_function
def test_autocast_gives_fp32_as_torchs_softmax_does(function, device):
    if device == "cpu":
        pytest.skip("of CUDA tensors")
    x = peaked(3, 70, FP16).to(device)
    with torch.autocast("cuda"):
        assert_scores(public(function, x, scale=0.5), function, x, dtype=FP32, scale=0.5)
        y = torch.vmap(lambda x: public(function, x, scale=0.5))(x)
    assert_scores(y, function, x, dtype=FP32, scale=0.5)


@pytest.mark.parametrize("scored", [{}, {"scale": 2.0}], ids=str)
def test_logsumexp_refuses_an_out_of_another_device_before_any_launch(scored, no_launch, device):
    with pytest.raises(RuntimeError, match=r"logsumexp: out.*device.*meta"):
        public("logsumexp", torch.ones(2, 3, 4, device=device), out=torch.empty(2, 3, device="meta"), **scored)


@pytest.mark.parametrize(("dim", "said"), [(None, r"NoneType \(None\)"), (0.5, r"float \(0.5\)"), ("1", "str")])
def test_logsumexp_names_the_dim_that_is_none(dim, said, no_launch, device):
    with pytest.raises(TypeError, match=rf"^logsumexp: dim must be an int or a sequence of ints, not {said}"):
        public("logsumexp", torch.ones(2, 3, device=device), dim)


def test_cpu_tensors_take_torchs_operations_without_the_interpreter():
    """Without scores bit for bit what ATen has, with scores the reference; so do the operators and their gradients."""
    script = """
import torch, fused_softmax
from contract import FAMILY
from fused_softmax.core import launch
def fail(*a, **k): raise AssertionError("a kernel was prepared")
launch.prepare = fail
x = torch.randn(5, 33, 40)
for row in FAMILY.values():
    for asked in ({}, {"dtype": torch.float64})[: 1 + row.takes_dtype]:
        half = [] if row.reduces else [x.bfloat16()]  # of which a logsumexp is the reference's
        for t in (x, x[:, 1:, 3:], *half, x.permute(2, 0, 1), x[:0], x[0, 0, 0]):
            for dim in range(-t.ndim, t.ndim):
                for _ in range(2):
                    assert torch.equal(row.ours(t, dim, **asked), row.torchs(t, dim, **asked))
    out = torch.empty(0)
    assert row.ours(x, -1, out=out) is out and torch.equal(out, row.torchs(x, -1))

x, scale = x[:2, :3], torch.tensor([[0.5], [0.0], [-2.0]])
scores = (
    {"scale": 0.5}, {"scale": 0.0}, {"scale": scale}, {"mask": torch.rand(3, 40) > 0.5}, {"sink": 2.0},
    {"scale": 2.0, "is_causal": True}, {"mask": torch.randn(40), "is_causal": True}, {"sink": scale, "scale": scale},
    {"mask": torch.zeros(3, 1) > 0, "masked_rows": "zero"},
)
for row in FAMILY.values():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for scored in scores:
            ours, theirs = (of(x.to(dtype), -1, **scored) for of in (row.ours, row.reference))
            torch.testing.assert_close(ours, theirs, equal_nan=True)
            out = torch.empty(0, dtype=dtype)
            assert row.ours(x.to(dtype), -1, out=out, **scored) is out
            assert torch.equal(out.nan_to_num(), ours.nan_to_num())

ops, x = torch.ops.fused_softmax, torch.randn(3, 5, requires_grad=True)
for ours, theirs in ((ops.softmax, torch.softmax), (ops.log_softmax, torch.log_softmax)):
    torch.testing.assert_close(ours(x, -1), theirs(x, -1))
    torch.testing.assert_close(ours(x, 0, torch.float64), theirs(x, 0, dtype=torch.float64))
    torch.testing.assert_close(*(torch.autograd.grad(f(x, -1).square().sum(), x)[0] for f in (ours, theirs)))
    torch.testing.assert_close(ours(x, -1, None, 0.5), theirs(x * 0.5, -1))
torch.testing.assert_close(ops.logsumexp(x, [0, 1]), torch.logsumexp(x, (0, 1)))
torch.testing.assert_close(ops.logsumexp(x.detach(), [1], True), torch.logsumexp(x.detach(), 1, True))
"""
    environment = {k: v for k, v in os.environ.items() if k not in ("FUSED_SOFTMAX_INTERPRET", "TRITON_INTERPRET")}
    source = Path(fused_softmax.__file__).parents[1]
    environment["PYTHONPATH"] = os.pathsep.join([str(source), str(Path(__file__).parent)])
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
