"""Tensors that are permuted, sliced or expanded are read as they lie, to the bits of a contiguous copy's results."""

import math

import pytest
import torch
from conftest import INTERPRETED, kernels, peaked
from products import pairwise
from shapes import SMALL, STRATEGIES

import fused_softmax
from fused_softmax.core import launch
from fused_softmax.core.layout import alignment_of, columns_of, rows_of
from fused_softmax.core.plan import H200, candidate, plan_reduction
from fused_softmax.ops.softmax import launches as softmax_rows
from fused_softmax.ops.softmax.calls import backward_by_plan, forward_by_plan
from fused_softmax.ops.softmax.column_plan import plan_columns

pytestmark = kernels

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
FUNCTIONS = ("softmax", "log_softmax", "logsumexp")


def laid(*shape, dtype=FP32, seed=0):
    """On the device from the start: a tensor that moves there may lose its strides."""
    return peaked(1, math.prod(shape), dtype, seed).to(DEVICE).view(shape)


# Every one of them was copied before a kernel could read it: what makes it of n columns, and the dim that is reduced.
ROWS = {
    "heads and positions swapped": lambda n, **how: laid(2, 5, 3, n, **how).transpose(1, 2),
    "the first of four dims": lambda n, **how: laid(2, 6, 3, n, **how)[:, :4],
    "a part of each of four dims": lambda n, **how: laid(3, 4, 5, n + 16, **how)[:2, 1:, :3, :n],
    "every second of three dims": lambda n, **how: laid(3, 6, 4, n, **how)[:, ::2, ::2],
    "one head for all": lambda n, **how: laid(2, 1, 5, n, **how).expand(2, 3, 5, n),
    "one batch and one position for all": lambda n, **how: laid(1, 3, 1, n, **how).expand(2, 3, 4, n),
    "five dims, two of them in order": lambda n, **how: laid(2, 3, 2, 2, n, **how).permute(2, 0, 1, 3, 4),
}
COLUMNS = {
    "a part of each image": lambda n, **how: laid(2, n, 6, 24, **how)[:, :, :4, :16],
    "images and channels swapped": lambda n, **how: laid(n, 3, 4, 8, **how).transpose(0, 1),
    "rows of an image expanded": lambda n, **how: laid(2, n, 1, 8, **how).expand(2, n, 3, 8),
    "three outer dims": lambda n, **how: laid(2, n, 3, 6, 16, **how)[:, :, :, :4, :8],
    "a matrix turned": lambda n, **how: laid(3, n, 5, 8, **how).permute(2, 1, 0, 3),
}
every_rows = pytest.mark.parametrize("rows", ROWS)
every_columns = pytest.mark.parametrize("columns", COLUMNS)
every_function = pytest.mark.parametrize("function", FUNCTIONS)


@pytest.fixture
def launched(monkeypatch):
    """The tensors of every launch, none of which runs."""
    found = []

    class Launch:
        resources = None

        def __call__(self, *arguments):
            found.append([each for each in arguments if isinstance(each, torch.Tensor)])

        def again(self, grid, changed):
            return self

    monkeypatch.setattr(launch, "prepare", lambda *given, **how: Launch())
    return found


def assert_reads_as_it_lies(call, tensors, launched):
    """The call as it is kept copies nothing, and its kernels get the tensors themselves."""
    call()
    launched.clear()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        call()
    copies = {event.name for event in seen.events()} & {
        "aten::copy_",
        "aten::clone",
        "aten::contiguous",
        "aten::_to_copy",
    }
    assert not copies
    assert launched
    for given in launched:
        assert {each.data_ptr() for each in tensors} <= {each.data_ptr() for each in given}


@every_function
@pytest.mark.parametrize("name", [*ROWS, *COLUMNS])
def test_nothing_is_copied(name, function, launched, device):
    make, dim = (ROWS[name], -1) if name in ROWS else (COLUMNS[name], -3)
    x = make(24).to(device)
    dim = 1 if name in COLUMNS and x.ndim == 5 else dim
    assert rows_of(x.movedim(dim, -1)) is None or len(rows_of(x)[0].shape) == 4
    call = lambda: getattr(fused_softmax, function)(x, dim=dim)  # noqa: E731
    assert_reads_as_it_lies(call, [x], launched)


@every_function
@every_rows
def test_nothing_is_copied_for_a_gradient(rows, function, launched, device):
    x = ROWS[rows](24).to(device).requires_grad_()
    y = getattr(fused_softmax, function)(x, dim=-1)
    dy = torch.ones_like(y) if function == "logsumexp" else ROWS[rows](24, seed=1).to(device)
    read = [x, dy] if function == "logsumexp" else [y, dy]
    assert_reads_as_it_lies(lambda: torch.autograd.grad(y, x, dy, retain_graph=True), read, launched)


@pytest.mark.parametrize("function", FUNCTIONS[:2])
@every_columns
def test_nothing_is_copied_for_a_gradient_over_a_strided_dim(columns, function, launched, device):
    x = COLUMNS[columns](24).to(device).requires_grad_()
    dim = 1 if x.ndim == 5 else -3
    y = getattr(fused_softmax, function)(x, dim=dim)
    dy = COLUMNS[columns](24, seed=1).to(device)
    assert_reads_as_it_lies(lambda: torch.autograd.grad(y, x, dy, retain_graph=True), [y, dy], launched)


@pytest.mark.parametrize(
    "copied",
    [
        lambda: laid(3, 4, 5, 48)[..., ::2],  # columns apart
        lambda: laid(3, 4, 24).transpose(1, 2).transpose(0, 1),
        lambda: laid(4, 4, 4, 4, 32)[:2, :2, :2, :2, :24],  # four strides
    ],
)
def test_what_no_three_strides_describe_is_copied(copied, device):
    x = copied().to(device)
    assert rows_of(x) is None
    assert torch.equal(fused_softmax.softmax(x), fused_softmax.softmax(x.contiguous()))


# Bits.


def both(function, x, dim, dy=None, **options):
    """Results of x and of its copy, and their gradients where dy says so."""
    results = []
    for each in (x, x.contiguous()):
        each = each.detach().requires_grad_(dy is not None)
        y = getattr(fused_softmax, function)(each, dim=dim, **options)
        found = [y.detach()]
        if dy is not None:
            found += torch.autograd.grad(y, each, dy if each.stride() == x.stride() else dy.contiguous())
        results.append(found)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    return results[0]


@pairwise()
@every_function
@every_rows
@pytest.mark.parametrize("dtype", [FP32, BF16, FP64], ids=str)
@pytest.mark.parametrize("n_cols", [24, 256])
def test_bits_of_rows(rows, function, dtype, n_cols, device):
    x = ROWS[rows](n_cols, dtype=dtype).to(device)
    dy = ROWS[rows](n_cols, dtype=dtype, seed=1).to(device)
    before = x.clone()
    y = both(function, x, -1, dy.amax(-1) if function == "logsumexp" else dy)[0]
    assert y.is_contiguous()
    assert torch.equal(x, before)


@pairwise()
@every_function
@every_rows
@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.5}, {"is_causal": True, "scale": -2.0}, {"mask": laid(24) > 0},
        {"mask": laid(1, 24)}, {"sink": 1.5, "scale": 0.0},
    ],
    ids=lambda options: ", ".join(options),
)  # fmt: skip
def test_bits_of_scores(rows, function, options, device):
    x = ROWS[rows](24).to(device)
    options = {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in options.items()}
    both(function, x, -1, **options)


@every_function
@every_rows
def test_rows_of_odd_length(rows, function, device):
    x = ROWS[rows](37).to(device).requires_grad_()
    y = getattr(fused_softmax, function)(x, dim=-1)
    truth = getattr(torch, function)(x.double(), -1)
    torch.testing.assert_close(y.double(), truth, rtol=1e-6, atol=1e-6)
    dy = ROWS[rows](37, seed=1).to(device)
    dy = dy.amax(-1) if function == "logsumexp" else dy
    ours, theirs = (torch.autograd.grad(each, x, dy.to(each.dtype))[0] for each in (y, truth))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_bits_of_another_dtype(device):
    for rows in ROWS:
        both("log_softmax", ROWS[rows](256, dtype=BF16).to(device), -1, dtype=FP32)
        both("softmax", ROWS[rows](256).to(device), -1, dtype=BF16)


def chosen(strategy, alignment, x, inputs=1):
    choices = SMALL[strategy] | ({"block_rows": 4} if strategy == "tile" else {})
    n_rows, n_cols = math.prod(x.shape[:-1]), x.shape[-1]
    return candidate(strategy, n_rows, n_cols, x.element_size(), H200, alignment=alignment, inputs=inputs, **choices)


@pairwise(("strategy", "rows"))
@pytest.mark.parametrize("strategy", STRATEGIES)
@every_rows
@pytest.mark.parametrize("n_cols", [616, 613])
@pytest.mark.parametrize("log", [False, True])
def test_every_strategy(strategy, rows, n_cols, log, nvidia, device):
    x, alignment = ROWS[rows](n_cols).to(device), "even" if n_cols == 616 else "scalar"
    y = torch.full(x.shape, math.nan, device=device)
    (lies,) = rows_of(x)
    assert alignment_of(lies, y.flatten(0, -2)) == alignment
    plan = chosen(strategy, alignment, x)
    forward_by_plan(x, plan, y=y, log=log)
    copy = forward_by_plan(x.contiguous(), plan, log=log)
    assert torch.equal(y, copy)
    torch.testing.assert_close(y.double(), getattr(torch, FUNCTIONS[log])(x.double(), -1), rtol=1e-5, atol=1e-5)


@pairwise(("strategy", "rows"))
@pytest.mark.parametrize("strategy", STRATEGIES)
@every_rows
@pytest.mark.parametrize("n_cols", [616, 613])
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("lies", ["dy", "y", "both"])
def test_every_strategy_of_a_gradient(strategy, rows, n_cols, log, lies, nvidia, device):
    dy, y = ROWS[rows](n_cols, seed=1).to(device), ROWS[rows](n_cols).to(device)
    given = dy if lies != "y" else dy.contiguous(), y if lies != "dy" else y.contiguous()
    plan = chosen(strategy, "even" if n_cols == 616 else "scalar", y, inputs=2)
    dx, copy = (torch.full(y.shape, math.nan, device=device) for _ in range(2))
    backward_by_plan(*given, dx, plan, log=log)
    backward_by_plan(dy.contiguous(), y.contiguous(), copy, plan, log=log)
    assert torch.equal(dx, copy)


@pairwise()
@every_rows
@pytest.mark.parametrize("like", [4, 4096], ids=["few", "many"])
@pytest.mark.parametrize("n_cols", [40, 37, 2504])  # several rows a program, and parts of one
def test_logsumexp_by_every_strategy(rows, like, n_cols, device):
    x = ROWS[rows](n_cols).to(device)
    alignment = "even" if n_cols % 8 == 0 else "scalar"
    n_rows = math.prod(x.shape[:-1])
    plan = plan_reduction(like, n_cols, 4, H200, alignment=alignment)
    plan = plan.__class__(**{**plan.__dict__, "n_rows": n_rows})
    results = []
    for each in (x, x.contiguous()):
        (lies,) = rows_of(each)
        lse = torch.full((n_rows, 1), math.nan, device=device)
        softmax_rows.prepare_logsumexp(lies, lse, plan)(lies, lse)
        results.append(lse)
    assert torch.equal(*results)
    torch.testing.assert_close(results[0].view(x.shape[:-1]), torch.logsumexp(x, -1))


@pytest.mark.parametrize("held_bytes", [16384, 65536], ids=["parts", "one part"])
@pytest.mark.parametrize("log", [False, True])
def test_every_strategy_of_columns(held_bytes, log, device):
    """Against the copy whose outer dims are one, by the same plan."""
    n_cols = 700
    x, dy = (laid(2, n_cols, 3, 12, seed=seed).to(device)[:, :, :, :8] for seed in (0, 1))
    y, dx = (torch.full(x.shape, math.nan, device=device) for _ in range(2))
    one = lambda t: t.permute(0, 2, 1, 3).flatten(0, 1).contiguous()  # noqa: E731
    plan = plan_columns(6, n_cols, 8, 4, H200, held_bytes=held_bytes, access=4)
    assert (plan.parts > 1) == (held_bytes == 16384)
    lie = columns_of(1, x, y)
    assert [each.shape for each in lie] == [(2, 1, 3, n_cols, 8)] * 2
    softmax_rows.prepare_columns(*lie, log=log, plan=plan)(*lie)
    copy, of_copy = one(x), torch.empty_like(one(x))
    softmax_rows.prepare_columns(copy, of_copy, log=log, plan=plan)(copy, of_copy)
    assert torch.equal(one(y), of_copy)

    plan = plan_columns(6, n_cols, 8, 4, H200, inputs=2, held_bytes=held_bytes, access=4)
    lie = columns_of(1, dy, y, dx)
    softmax_rows.prepare_columns_backward(*lie, log=log, plan=plan)(*lie)
    dx_copy = torch.empty_like(of_copy)
    softmax_rows.prepare_columns_backward(one(dy), of_copy, dx_copy, log=log, plan=plan)(one(dy), of_copy, dx_copy)
    assert torch.equal(one(dx), dx_copy)

    plan = plan_columns(6, n_cols, 8, 4, H200, holds=False, access=4)
    lse, lse_copy = (torch.full((6, 1, 8), math.nan, device=device) for _ in range(2))
    softmax_rows.prepare_logsumexp_columns(lie[1], lse, plan=plan)(y, lse)
    softmax_rows.prepare_logsumexp_columns(of_copy, lse_copy, plan=plan)(of_copy, lse_copy)
    torch.testing.assert_close(lse, lse_copy, rtol=1e-6, atol=1e-6)  # a tile's sum is in the order of its layout


@every_function
@every_columns
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_columns(columns, function, dtype, device):
    x = COLUMNS[columns](24, dtype=dtype).to(device)
    dim = 1 if x.ndim == 5 else -3
    y = getattr(fused_softmax, function)(x, dim=dim)
    truth = getattr(torch, function)(x.double(), dim)
    assert y.is_contiguous()
    torch.testing.assert_close(y.double(), truth, rtol=3 * torch.finfo(dtype).eps, atol=3 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_several_dims_of_a_part(function, device):
    """logsumexp of neighbouring dims that one stride describes, and of those that none does."""
    x = laid(2, 3, 4, 5, 16).to(device)[:, :, :, :, :8]
    for dims in ((1, 2), (2, 3), (1, 3), (0, 1)) if function == "logsumexp" else (1, 2, 3):
        ours, theirs = (getattr(of, function)(x, dims) for of in (fused_softmax, torch))
        torch.testing.assert_close(ours, theirs)


@every_function
def test_another_batch_of_rows_of_two_strides(function, device):
    """Nothing but the number of rows changes with the leading size."""
    room = laid(9, 6, 24).to(device)
    for n in (2, 9, 5):
        both(function, room[:n, :4], -1)


def test_rows_past_32_bits_are_copied():
    x = torch.empty(1, 1, 8, device="meta").expand(2**16, 2**15, 8)
    assert rows_of(x) is not None
    swapped = torch.empty(2**16, 2, 8, device="meta").expand(2**16, 2, 8).unsqueeze(2).expand(2**16, 2, 2**14, 8)
    assert rows_of(swapped) is None
    assert rows_of(swapped[:-1]) is not None
