"""`out=` of softmax, log_softmax and logsumexp that overlaps what the call reads, in calls that are kept."""

import numpy as np
import pytest
import torch
from conftest import INTERPRETED, peaked
from contract import composed, public

from fused_softmax.core import calls

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
reducing_too = pytest.mark.parametrize("function", ["softmax", "log_softmax", "logsumexp"])

# What a launch depends on: rows in one piece, rows that stream, of which a scale tensor may pick the first maximum, and
# a strided dim. Of each an argument that out may lie over.
WRITTEN = {
    "rows": (700, FP32, -1, {}), "a number": (700, FP32, -1, {"scale": 0.5}),
    "rows of their own scale": (700, FP32, -1, {"scale": torch.tensor([[0.5], [0.0], [2.0]])}),
    "streamed": (20000, FP64, -1, {}),
    "streamed, of their own scale": (20000, FP64, -1, {"scale": torch.tensor([[0.5], [0.0], [2.0]])}),
    "columns": (40, FP32, 0, {"scale": 0.5}),
    "mask": (700, FP32, -1, {"mask": torch.arange(700) % 3 != 0}), "sink": (700, FP32, -1, {"sink": 3.0}),
}  # fmt: skip


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_kept_call_sees_that_out_overlaps_as_a_first_one_does(function, name, device):
    n_cols, dtype, dim, options = WRITTEN[name]
    options = {key: each.to(device) if isinstance(each, torch.Tensor) else each for key, each in options.items()}
    values = peaked(4, n_cols, dtype, seed=4).to(device)
    calls.forget()
    public(function, values[:3].clone(), dim, out=torch.empty_like(values[:3]), **options)
    for first, last in ((0, 1), (1, 0), (0, 0)):
        memory = values.clone()
        x, out = memory[first : first + 3], memory[last : last + 3]
        truth = composed(function, x.clone(), dim, **options)
        written = out._version
        assert public(function, x, dim, out=out, **options) is out
        torch.testing.assert_close(out, truth, rtol=1e-5, atol=1e-6)
        assert out._version > written


@pytest.mark.parametrize("n_cols", [700, 20000])
@reducing_too
def test_a_kept_call_sees_that_out_overlaps_a_scale_a_mask_or_a_sink(function, n_cols, device):
    dtype, shape = (FP64 if n_cols > 2000 else FP32), (3, n_cols)
    x = peaked(*shape, dtype).to(device)
    reduced = function == "logsumexp"
    size = 3 if reduced else x.numel()
    for name, like in (("scale", (3, 1)), ("mask", shape), ("sink", (3, 1))):
        calls.forget()
        for apart in (True, False, False):
            memory = torch.linspace(0.5, 2, 2 * x.numel(), dtype=dtype, device=device)
            given = memory[: 3 * like[1]].view(like)
            out = memory[-size:] if apart else memory[1 : size + 1]
            out = out.view(3) if reduced else out.view(shape)
            truth = composed(function, x, **{name: given.clone()})
            public(function, x, **{name: given}, out=out)
            torch.testing.assert_close(out, truth, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not INTERPRETED, reason="NumPy's memory is a CPU's")
@reducing_too
def test_out_may_overlap_by_a_storage_of_its_own(function, device):
    """NumPy's slices, like those of other libraries, come as storages that begin anywhere."""
    rows = np.linspace(-3, 3, 4 * 700, dtype=np.float32).reshape(4, 700)
    x = torch.from_numpy(rows[:3])
    out = torch.from_numpy(rows[1:].reshape(-1)[:3]) if function == "logsumexp" else torch.from_numpy(rows[1:])
    truth = composed(function, x.clone())
    public(function, x, out=out)
    torch.testing.assert_close(out, truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strides", [(0, 1), (1, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("options", [{}, {"scale": 0.5}, {"mask": torch.ones(6, 40, dtype=torch.bool)}], ids=str)
@pytest.mark.parametrize("dim", [-1, 0])
@reducing_too
def test_out_whose_elements_share_a_place_is_refused(function, dim, options, strides, device):
    options = {key: each.to(device) if isinstance(each, torch.Tensor) else each for key, each in options.items()}
    x, memory = peaked(6, 40).to(device), torch.full((40,), 7.0, device=device)
    reduced = torch.logsumexp(x, dim)
    out = memory.as_strided(*((reduced.shape, (0,)) if function == "logsumexp" else (x.shape, strides)))
    for given in (None, out, out):  # a call that is kept, too
        if given is None:
            public(function, x, dim, **options)
            continue
        with pytest.raises(RuntimeError, match="single memory location"):
            public(function, x, dim, out=given, **options)
    assert (memory == 7.0).all()


@pytest.mark.parametrize("options", [{}, {"scale": 0.5}], ids=str)
@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
def test_bf16_and_fp64_in_one_call(function, dim, options, device):
    """Triton's interpreter takes fp64 to bf16 bit by bit, so that way is by torch."""
    wide = peaked(3, 40, FP64).to(device)
    narrow = public(function, wide, dim, dtype=BF16, **options)
    torch.testing.assert_close(narrow, composed(function, wide.to(BF16), dim, **options), rtol=8e-3, atol=1e-5)
    x = wide.to(BF16).requires_grad_()
    leaf = x.detach().double().requires_grad_()
    (ours,) = torch.autograd.grad(public(function, x, dim, dtype=FP64, **options), x, wide)
    (right,) = torch.autograd.grad(composed(function, leaf, dim, **options), leaf, wide)
    torch.testing.assert_close(ours.double(), right, rtol=8e-3, atol=1e-5)


@reducing_too
@pytest.mark.parametrize("n_cols", [40, 700, 20000])
def test_a_sink_of_minus_infinity_is_none_also_of_rows_of_which_nothing_is_kept(function, n_cols, device):
    x, mask = peaked(2, n_cols, FP64 if n_cols > 2000 else FP32).to(device), torch.tensor([[True], [False]]).to(device)
    for masked_rows in ("nan", "zero"):
        options = {"mask": mask, "masked_rows": masked_rows}
        bare = public(function, x, **options)
        for sink in (-torch.inf, torch.full((2, 1), -torch.inf, dtype=x.dtype, device=device)):
            for way in (public, composed):
                sunk = way(function, x, sink=sink, **options)
                torch.testing.assert_close(sunk, bare, equal_nan=True)
