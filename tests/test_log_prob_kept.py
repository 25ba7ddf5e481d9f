"""log_prob over kept columns against float64: lists and bitmasks, hard sets, long rows, gradients, and wrong lists."""

import math
from itertools import pairwise as neighbours

import pytest
import torch
from conftest import kernels, peaked
from products import pairwise
from test_log_prob import ALL, TRANSFORMS, compiled, every_dtype, gradients_like
from torch._subclasses.fake_tensor import FakeTensorMode

from fused_softmax import linear_log_prob, log_prob, nn
from fused_softmax.core import calls, route
from fused_softmax.ops.losses import log_prob as ops
from fused_softmax.ops.sampling.reference import packed

pytestmark = kernels
FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
INT32, INT64 = torch.int32, torch.int64
NAN, INF = math.nan, math.inf
WAYS = {"int64": (INT64, INT64), "int32": (INT32, INT32), "int32, int64": (INT32, INT64), "bitmask": None}
every_way = pytest.mark.parametrize("way", WAYS)


def given(columns, way, seed=0):
    """kept= of columns, bool [..., n_classes]: a list in any order with more behind it, or a bitmask with more bits."""
    rows = columns.reshape(-1, columns.shape[-1])
    if WAYS[way] is None:
        more = torch.ones(len(rows), -rows.shape[1] % 32, dtype=torch.bool, device=rows.device)
        return packed(torch.cat([rows, more], 1)).view(*columns.shape[:-1], -(-rows.shape[1] // 32))
    generator, (of_ids, of_offsets) = torch.Generator().manual_seed(seed), WAYS[way]
    lists = [each.nonzero().flatten() for each in rows.cpu()]
    lists = [each[torch.randperm(len(each), generator=generator)] for each in lists]
    offsets = torch.tensor([0, *[len(each) for each in lists]]).cumsum(0)
    return torch.cat([*lists, torch.tensor([-9])]).to(columns.device, of_ids), offsets.to(columns.device, of_offsets)


def sets(n_classes, seed=0):
    """Six rows of columns: none, all, one, and any."""
    columns = torch.rand(6, n_classes, generator=torch.Generator().manual_seed(seed)) < 0.3
    columns[0], columns[1], columns[2] = False, True, False
    columns[2, n_classes // 2] = True
    return columns


def poisoned(x, columns):
    """x, of which no column that is not kept can be looked at."""
    poison = torch.tensor([NAN, INF, -INF], dtype=x.dtype, device=x.device)
    return torch.where(columns, x, poison[torch.arange(x.shape[-1], device=x.device) % 3])


def truth(x, target, columns, *, scale=None, softcap=None, temperature=None, ignore_index=-100):
    """(log_prob, entropy, lse, log_sum_sq_probs, mean_logits, is_top1) of rows [n, n_classes], one by one."""
    rows = []
    for r, t in enumerate(target.view(len(x), -1).tolist()):
        here = columns[r].nonzero().flatten()
        z = x[r, here] if scale is None else x[r, here] * scale
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        if temperature is not None:
            z = z / (temperature[r].double() if isinstance(temperature, torch.Tensor) else temperature)
        zero, place = x.new_zeros(()), {c: i for i, c in enumerate(here.tolist())}
        if all(each == ignore_index for each in t):
            rows.append(([zero] * len(t), zero, zero, zero, zero, [False] * len(t)))
            continue
        nothing = not len(here) or bool((z == -INF).all())
        log_p = torch.log_softmax(z, 0)
        p = torch.where(log_p == -INF, 0.0, log_p).exp() * (log_p != -INF)
        entropy = zero if nothing else -(p * torch.where(log_p == -INF, 0.0, log_p)).sum()
        top = None if nothing else int(here[z == z.max()].min())
        rows.append((
            [zero if c == ignore_index else zero - INF if nothing or c not in place else log_p[place[c]] for c in t],
            entropy, zero - INF if nothing else z.logsumexp(0), zero - INF if nothing else p.square().sum().log(),
            z.mean() if len(here) else zero, [c == top and c != ignore_index for c in t],
        ))  # fmt: skip
    of_targets, entropy, lse, log_sq, mean, top = zip(*rows, strict=True)
    of_targets = torch.stack([torch.stack(each) for each in of_targets]).view(target.shape)
    of_rows = (torch.stack(each) for each in (entropy, lse, log_sq, mean))
    return of_targets, *of_rows, torch.tensor(top, device=x.device).view(target.shape)


def assert_right(x, target, columns, way, *, dtype=None, of=log_prob, inplace=False, **options):
    """Results and the gradient of log_prob, entropy and lse together, in rows that say NaN where nobody may look."""
    x, how = poisoned(x, columns), {"kept": given(columns, way), "inplace_backward": inplace}
    leaf, exact = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    found = of(leaf * 1 if inplace else leaf, target, dtype=dtype, **how, **ALL, **options)
    wanted = truth(exact, target, columns, **options)
    result_dtype = dtype or (FP64 if x.dtype == FP64 else FP32)
    near = max(64 * torch.finfo(result_dtype).eps, 1e-5 if x.dtype != FP64 else 1e-12)
    for ours, theirs in zip((*found[:3], *found.stats), wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=near, atol=near)
    of_results = gradients_like(wanted[:3])
    (dx,) = torch.autograd.grad(found[:3], leaf, [each.to(result_dtype) for each in of_results])
    outside = wanted[0].isneginf()
    of_results[0] = of_results[0].masked_fill(outside, 0.0)
    finite = [(y, g) for y, g in zip(wanted[:3], of_results, strict=True) if y.requires_grad]
    outputs, of_outputs = zip(*finite, strict=True)
    (true_dx,) = torch.autograd.grad(outputs, exact, of_outputs)
    assert (dx[~columns] == 0).all()
    near = max(near, 4 * torch.finfo(x.dtype).eps)
    most = true_dx.abs().amax(-1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(dx.double() / most, true_dx / most, rtol=near, atol=near)
    return dx


def any_targets(columns, k=None, seed=0):
    """Of each row one of its columns and others, one of them ignored; the fourth row counts nothing."""
    n, n_classes = columns.shape
    t = torch.randint(n_classes, (n, k or 1), generator=torch.Generator().manual_seed(seed))
    for r in range(1, n, 2):
        t[r, 0] = columns[r].nonzero()[-1, 0] if columns[r].any() else 0
    t[3:4] = -100
    if k and k > 2:
        t[:, 1], t[:, 2] = t[:, 0], -100
    return (t if k else t[:, 0]).to(columns.device)


@pairwise(("way", "dtype", "softcap"))
@every_way
@pytest.mark.parametrize("dtype", [FP32, BF16, FP64], ids=str)
@pytest.mark.parametrize("scale", [None, -0.5])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("temperature", [None, 0.7, "of rows"])
@pytest.mark.parametrize("k", [None, 1, 5])
@pytest.mark.parametrize("ignore_index", [-100, 3])
@pytest.mark.parametrize("result", [None, BF16])
@pytest.mark.parametrize("n_classes", [40, 613])
@pytest.mark.parametrize("inplace", [False, True])
def test_options(way, dtype, scale, softcap, temperature, k, ignore_index, result, n_classes, inplace, device):
    x, columns = (peaked(6, n_classes) / 2).to(dtype).to(device), sets(n_classes).to(device)
    if temperature == "of rows":
        temperature = torch.tensor([0.3, 1.0, 2.0, 0.9, 5.0, 1.5], device=device)
    t = any_targets(columns, k)
    t = torch.where(t == -100, ignore_index, t)
    assert_right(
        x, t, columns, way, dtype=result, scale=scale, softcap=softcap, temperature=temperature,
        ignore_index=ignore_index, inplace=inplace,
    )  # fmt: skip


@pairwise()
@every_way
@every_dtype
@pytest.mark.parametrize("n_classes", [1, 2, 3, 7, 8, 9, 31, 33, 65, 127, 1000, 2051, 4097])
def test_vocabularies(n_classes, dtype, way, device):
    columns = sets(n_classes).to(device)
    assert_right(peaked(6, n_classes).to(dtype).to(device), any_targets(columns, 3), columns, way)


@pairwise()
@every_way
@pytest.mark.parametrize("k", [None, 5, 20])
@pytest.mark.parametrize("inplace", [False, True])
def test_lists_longer_than_a_tile(way, k, inplace, device):
    columns = torch.rand(4, 5003, generator=torch.Generator().manual_seed(1)).to(device) < 0.6
    columns[3, 0], columns[3, 5002] = True, True
    assert_right(peaked(4, 5003).to(device), any_targets(columns, k), columns, way, inplace=inplace)


@pairwise()
@every_way
@pytest.mark.parametrize("n_classes", [70001, 70008])
@pytest.mark.parametrize("inplace", [False, True])
def test_rows_of_several_parts(n_classes, way, inplace, device):
    """Rows that start off 16 bytes, and whose first and last columns are kept too."""
    columns = torch.rand(3, n_classes, generator=torch.Generator().manual_seed(1)).to(device) < 0.02
    columns[1:, 0], columns[:2, -1], columns[:, -2] = True, True, False
    t = torch.tensor([[n_classes - 1, 5, -100], [0, n_classes - 1, 0], [-100, 0, n_classes - 2]], device=device)
    assert_right(peaked(3, n_classes).to(BF16).to(device), t, columns, way, inplace=inplace, temperature=0.8)


@every_way
@pytest.mark.parametrize("n_classes", [50257, 151937])
def test_vocabularies_of_today(n_classes, way, device):
    columns = torch.rand(3, n_classes, generator=torch.Generator().manual_seed(1)).to(device) < 0.01
    columns[:, 0], columns[1:, -1], columns[2, 1:-1] = True, True, False
    assert_right(peaked(3, n_classes).to(BF16).to(device), any_targets(columns, 3), columns, way)


@pairwise()
@every_way
@pytest.mark.parametrize("n_classes", [33, 613, 616])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_every_kept_column_is_a_target(n_classes, dtype, way, device):
    columns = sets(n_classes)[3:].to(device)
    every = torch.arange(n_classes, device=device).expand(3, -1)
    assert_right((peaked(3, n_classes) / 4).to(dtype).to(device), every, columns, way)


LAYOUTS = {
    "a dim more": lambda x: x.view(2, 3, -1),
    "columns apart": lambda x: x.t().contiguous().t(),
    "rows apart": lambda x: x.repeat_interleave(2, 0)[::2],
    "one element past 16 bytes": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}


@every_way
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, way, device):
    x, columns = peaked(6, 76).to(device), sets(76).to(device)
    t, kept = any_targets(columns), given(columns, way)
    wanted = log_prob(x, t, kept=kept, **ALL)
    of_rows = LAYOUTS[layout](x)
    kept = kept.view(*of_rows.shape[:-1], -1) if isinstance(kept, torch.Tensor) else kept
    apart = (
        kept.repeat_interleave(2, -1)[..., ::2]
        if isinstance(kept, torch.Tensor)
        else tuple(each.repeat_interleave(2)[::2] for each in kept)
    )  # fmt: skip
    for each in (kept, apart):
        out = log_prob(of_rows, t.view(of_rows.shape[:-1]), kept=each, **ALL)
        for ours, theirs in zip((*out[:3], *out.stats), (*wanted[:3], *wanted.stats), strict=True):
            assert torch.equal(ours, theirs.view(ours.shape))


@every_way
def test_one_row_without_leading_dims(way, device):
    x, columns = peaked(1, 40)[0].to(device), sets(40)[4].to(device)
    t, kept = columns.nonzero()[1, 0], given(columns, way)
    wanted = truth(x.double()[None], t[None], columns[None])
    torch.testing.assert_close(log_prob(x, t, kept=kept).double(), wanted[0][0], rtol=1e-5, atol=1e-5)
    several = columns.nonzero()[:3, 0]
    wanted = truth(x.double()[None], several[None], columns[None])
    torch.testing.assert_close(log_prob(x, several, kept=kept).double(), wanted[0][0], rtol=1e-5, atol=1e-5)


@every_way
def test_no_rows(way, device):
    x, columns = torch.empty(0, 40, device=device, requires_grad=True), sets(40)[:0].to(device)
    out = log_prob(x, torch.zeros(0, dtype=INT64, device=device), kept=given(columns, way), **ALL)
    out.log_prob.sum().backward()
    assert (out.log_prob.shape, out.entropy.shape, x.grad.shape) == ((0,), (0,), (0, 40))


# Sets that are hard.


@every_way
@pytest.mark.parametrize("n_classes", [40, 5003, 40000])
def test_kept_logits_of_minus_infinity(way, n_classes, device):
    """Alone they are as nothing; beside others they have probability 0."""
    x, columns = peaked(3, n_classes).to(device), torch.zeros(3, n_classes, dtype=torch.bool, device=device)
    columns[:, [1, 7, n_classes - 1]] = True
    x[0, [1, 7, n_classes - 1]] = -INF
    x[1, [1, 7]] = -INF
    leaf = poisoned(x, columns).requires_grad_()
    out = log_prob(leaf, torch.tensor([[1, 2], [1, 2], [1, 2]], device=device), kept=given(columns, way), **ALL)
    assert out.log_prob[:2].tolist() == [[-INF] * 2] * 2
    assert (out.entropy[:2].tolist(), out.lse[0].item(), out.stats.log_sum_sq_probs[:2].tolist()) == (
        [0.0, 0.0], -INF, [-INF, 0.0],
    )  # fmt: skip
    assert not out.stats.is_top1[:2].any()
    (dx,) = torch.autograd.grad(out[:3], leaf, [torch.ones_like(each) for each in out[:3]])
    assert (dx[0] == 0).all()
    assert dx.isfinite().all()


@every_way
def test_the_gradient_of_a_target_outside_is_ignored(way, device):
    x, columns = peaked(2, 613).to(device), sets(613)[4:].to(device)
    outside = (~columns).nonzero()
    t = torch.stack([columns[0].nonzero()[:2, 0], outside[outside[:, 0] == 1][:2, 1]]).to(device)
    t[0, 1] = outside[0, 1]
    for fill in (1.0, NAN, INF):
        leaf = poisoned(x, columns).requires_grad_()
        y = log_prob(leaf, t, kept=given(columns, way))
        assert (y == -INF).tolist() == [[False, True], [True, True]]
        (dx,) = torch.autograd.grad(y, leaf, torch.tensor([[0.5, fill], [fill, fill]], device=device))
        assert (dx[1] == 0).all()
        p = torch.where(columns[0], x[0].double(), -INF).softmax(0)
        p[t[0, 0]] -= 1.0
        torch.testing.assert_close(dx[0].double(), -0.5 * p, rtol=1e-4, atol=1e-6)


@every_way
def test_ignored_rows_of_nan(way, device):
    x, columns = peaked(4, 613).to(device), sets(613)[1:5].to(device)
    x[1], x[2, 3] = NAN, INF
    leaf = x.requires_grad_()
    t = torch.tensor([3, -100, -100, columns[3].nonzero()[0, 0]], device=device)
    out = log_prob(leaf, t, kept=given(columns, way), **ALL)
    (dx,) = torch.autograd.grad(out[:3], leaf, [torch.where(t == -100, NAN, 1.0)] * 3)
    for each in (*out[:3], *out.stats, dx):
        assert (each[1:3] == 0).all()
        assert not each[[0, 3]].isnan().any()


@every_way
@pytest.mark.parametrize("what", [NAN, INF])
def test_kept_nan_and_infinity_make_the_row_nan(way, what, device):
    x, columns = peaked(2, 613).to(device), sets(613)[4:].to(device)
    c = columns[0].nonzero()[3, 0]
    x[0, c] = what
    outside = (~columns[0]).nonzero()[0, 0]
    leaf = poisoned(x, columns).requires_grad_()
    out = log_prob(leaf, torch.tensor([[c, outside]] * 2, device=device), kept=given(columns, way), return_entropy=True)
    assert out.log_prob[0].isnan().all()
    assert out.entropy.isnan().tolist() == [True, False]
    (dx,) = torch.autograd.grad(out.entropy.sum(), leaf)
    assert (dx[~columns] == 0).all()
    assert dx[0][columns[0]].isnan().all()
    assert dx[1].isfinite().all()


@every_way
def test_a_target_that_is_no_class(way, device):
    x, columns = peaked(2, 40).to(device), sets(40)[4:].to(device)
    leaf, t = poisoned(x, columns).requires_grad_(), torch.tensor([[40, -100], [-100, -1]], device=device)
    out = log_prob(leaf, t, kept=given(columns, way), return_lse=True)
    assert out.log_prob.isnan().tolist() == [[True, False], [False, True]]
    assert out.lse.isfinite().all()
    (dx,) = torch.autograd.grad(out.log_prob.sum(), leaf)
    assert dx[columns].isnan().all()


@pytest.mark.parametrize("n_classes", [40, 5003])
@every_way
def test_the_likeliest_of_kept_columns(way, n_classes, device):
    x = torch.zeros(1, n_classes, device=device)
    columns = torch.zeros_like(x, dtype=torch.bool)
    x[0, [2, 5, 30, n_classes - 1]] = 4.0
    columns[0, [1, 5, 30, n_classes - 1]] = True
    t = torch.tensor([[2, n_classes - 1, 30, 5, 1, -100]], device=device)
    out = log_prob(x, t, kept=given(columns, way), return_stats=("is_top1",))
    assert out.stats.is_top1.tolist() == [[False, False, False, True, False, False]]


# Lists that cannot be right.

WRONGS = {
    "falling": ([0, 3, 2, 5], [1]), "all fall": ([9, 6, 3, 0], [0, 1, 2]), "not from 0": ([1, 2, 3, 5], [0]),
    "negative": ([-2, 2, 3, 5], [0]), "past the end": ([0, 2, 3, 13], [2]),
    "far": ([0, 2, 2**31 - 1, 2**31 - 1], [1, 2]),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONGS)
@pytest.mark.parametrize("kind", [INT32, INT64], ids=str)
@pytest.mark.parametrize("n_classes", [40, 20001])
def test_wrong_offsets_make_their_rows_nan(wrong, kind, n_classes, device):
    offsets, bad = WRONGS[wrong]
    ids = torch.arange(12, device=device).flip(0).to(kind)
    x = peaked(3, n_classes).to(device).requires_grad_()
    t = ids[[0, 2, 4]].long()
    out = log_prob(x, t, kept=(ids, torch.tensor(offsets, device=device, dtype=kind)), **ALL)
    (dx,) = torch.autograd.grad(out.entropy.sum(), x)
    wanted = [r in bad for r in range(3)]
    for each in (*out[:3], *out.stats[:2], dx[:, 0], dx[:, -1]):
        assert each.isnan().tolist() == wanted
    for r, (begin, end) in enumerate(neighbours(offsets)):
        if r not in bad:
            columns = torch.zeros(1, n_classes, dtype=torch.bool, device=device)
            columns[0, ids[begin:end].long()] = True
            lse = truth(x[r : r + 1].detach().double(), t[r : r + 1], columns)[2][0]
            torch.testing.assert_close(out.lse[r].double(), lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("offsets", [[0, 3, 2, 5], [0, 4, 0, 4], [0, 2, 3, 5]], ids=str)
def test_rows_that_share_places_of_a_list_get_no_gradient_of_each_other(offsets, inplace, device):
    """Where offsets fall, the row before the fall and the one after it may both be readable, and share ids."""
    x, ids, t = peaked(3, 40).to(device), torch.arange(12, device=device), torch.tensor([1, 2, 3], device=device)
    leaf = x.clone().requires_grad_()
    out = log_prob(leaf * 1, t, kept=(ids, torch.tensor(offsets, device=device)), inplace_backward=inplace)
    (dx,) = torch.autograd.grad(out.sum(), leaf)
    for r, (begin, end) in enumerate(neighbours(offsets)):
        if begin <= end:
            p = x[r, begin:end].double().softmax(0)
            wanted = torch.zeros(40, dtype=torch.float64, device=device)
            wanted[begin:end] = (torch.arange(begin, end, device=device) == t[r]).double() - p
            wanted = wanted if begin <= t[r] < end else wanted * 0
            off = (dx[r].double() - wanted).abs()
            assert (off < 1e-5).all() or (dx[r, begin:end].isnan().all() and offsets != sorted(offsets))
        else:
            assert dx[r].isnan().all()


@pytest.mark.parametrize("wrong", [40, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("inplace", [False, True])
def test_ids_out_of_range_make_their_rows_nan(wrong, inplace, device):
    ids, offsets = torch.tensor([1, 2, 3, wrong, 5, 6]), torch.tensor([0, 2, 4, 6])
    x = peaked(3, 40).to(device).requires_grad_()
    t = torch.tensor([1, 3, 6], device=device)
    for ignored in (False, True):
        t = torch.where(torch.arange(3, device=device) == 1, -100, t) if ignored else t
        out = log_prob(x * 1, t, kept=(ids.to(device), offsets.to(device)), inplace_backward=inplace, **ALL)
        (dx,) = torch.autograd.grad(out.log_prob.sum() + out.lse.sum(), x)
        for each in (*out[:3], *out.stats[:2], *dx.unbind(1)):
            assert each.isnan().tolist() == [False, not ignored, False]


def wrong_lists(device):
    ids = torch.arange(6, device=device)
    make = lambda *offsets: torch.tensor(offsets, device=device)  # noqa: E731
    return {
        "kept offsets must start at 0, got 1": (ids, make(1, 2, 4, 6)),
        "kept offsets must rise, up to the number of ids 6, got 4 and 2 of row 1": (ids, make(0, 4, 2, 6)),
        "kept offsets must rise, up to the number of ids 6, got 4 and 7 of row 2": (ids, make(0, 2, 4, 7)),
        r"kept id 6 at 5 is out of range \[0, 5\]": (ids + 1, make(0, 2, 4, 6)),
        r"kept id -1 at 0 is out of range \[0, 5\]": (ids - 1, make(0, 2, 4, 6)),
    }


@pytest.mark.parametrize("way", ["check", "torch"])
def test_wrong_lists_raise_where_they_can_be_read(way, device, monkeypatch):
    if way == "torch" and device != "cpu":
        pytest.skip("of CPU tensors")
    if way == "torch":
        monkeypatch.setattr(route, "INTERPRET", False)
    else:
        monkeypatch.setattr(route, "CHECK", True)
    x, t = peaked(3, 6).to(device), torch.tensor([1, 3, 5], device=device)
    for message, kept in wrong_lists(device).items():
        with pytest.raises(IndexError, match=f"log_prob: {message}"):
            log_prob(x, t, kept=kept)
    log_prob(x, t, kept=(torch.tensor([0, 5, 9], device=device), torch.tensor([0, 0, 1, 2], device=device)))


def test_what_is_refused(device):
    x, t = peaked(6, 40).view(2, 3, 40).to(device).requires_grad_(), torch.zeros(2, 3, dtype=INT64, device=device)
    ids, offsets = torch.arange(7, device=device), torch.arange(7, device=device)
    bits = torch.zeros(2, 3, 2, dtype=INT32, device=device)
    cases = [
        ([ids, offsets], TypeError, r"kept must be a tuple \(ids, offsets\) or a Tensor that is a bitmask, not \["),
        ((ids,), TypeError, r"kept must be a tuple \(ids, offsets\) or a Tensor that is a bitmask"),
        (3, TypeError, "kept must be a tuple .* not 3"), ((ids, 3), TypeError, "kept offsets must be a Tensor, not 3"),
        ((ids.float(), offsets), TypeError, "kept ids must be of int32 or int64, got torch.float32"),
        ((ids, offsets.short()), TypeError, "kept offsets must be of int32 or int64, got torch.int16"),
        ((ids.view(7, 1), offsets), ValueError, r"kept ids must have shape \(n_kept,\), got \(7, 1\)"),
        ((ids, offsets[1:]), ValueError, r"kept offsets must have shape \(7,\) for 6 rows of logits, got \(6,\)"),
        ((ids.to("meta"), offsets), RuntimeError, "kept ids must be on the input's device cpu, got meta"),
        (bits.long(), TypeError, "kept must be of int32 as a bitmask, got torch.int64"),
        (bits[..., :1], ValueError, r"kept must have shape \(2, 3, 2\), a bit for each of 40 classes, got \(2, 3, 1\)"),
        (bits.view(6, 2), ValueError, r"kept must have shape \(2, 3, 2\), .* got \(6, 2\)"),
        (bits.to("meta"), RuntimeError, "kept must be on the input's device"),
        (bits.to_sparse(), RuntimeError, "kept must be a dense strided tensor"),
    ]  # fmt: skip
    weight = torch.zeros(40, 40, device=device)
    for kept, error, message in cases:
        message = message.replace("device cpu", f"device {x.device}")
        with pytest.raises(error, match=f"log_prob: {message}"):
            log_prob(x, t, kept=kept)
        with pytest.raises(error, match=f"linear_log_prob: {message}"):
            linear_log_prob(x, weight, t, kept=kept)


@pytest.mark.parametrize("n", [1, 3])
def test_the_one_word_of_a_row_may_lie_anywhere(n, device):
    """Torch calls it contiguous, whatever the stride of a dim of one element, but then refuses to view it as bytes."""
    x, t, word = peaked(n, 20).to(device), torch.arange(n, device=device), torch.full((n, 1), 0b1011, dtype=torch.int32)
    apart = torch.zeros(2 * n, dtype=torch.int32, device=device).as_strided((n, 1), (2 if n == 1 else 1, 2))
    apart.copy_(word)
    torch.testing.assert_close(log_prob(x, t, kept=apart), log_prob(x, t, kept=word.to(device)))


# Derivatives.


@pytest.mark.parametrize("way", ["int32, int64", "bitmask"])
def test_second_derivatives(way, device):
    x, columns = (peaked(4, 7) / 4).double().to(device), sets(7)[[0, 4, 5, 1]].to(device)
    columns[1:3, [1, 4]] = True
    t, kept = any_targets(columns, 3), given(columns, way)
    seen = torch.where(columns, 0.0, NAN)

    def call(x):
        out = log_prob(x + seen, t, kept=kept, softcap=3.0, temperature=0.7, return_entropy=True, return_lse=True)
        return tuple(torch.where(each.isneginf(), 0.0, each) for each in out[:3])

    leaf = x.requires_grad_()
    assert torch.autograd.gradcheck(call, leaf)
    assert torch.autograd.gradgradcheck(call, leaf)


@pairwise()
@every_way
@every_dtype
@pytest.mark.parametrize("n_classes", [8, 33, 613, 2056, 20001])
@pytest.mark.parametrize("options", ["plain", "softcap"])
@pytest.mark.parametrize("shift", [0, 1])
def test_inplace_backward(n_classes, dtype, options, shift, way, device):
    """The same bits, in the memory of the logits, of rows of every alignment."""
    options = {"plain": {}, "softcap": {"softcap": 3.0, "temperature": 0.5}}[options]
    flat = peaked(1, 6 * n_classes + shift).to(dtype).to(device).view(-1)
    columns, found = sets(n_classes).to(device), []
    columns[1:, -1], columns[:3, 0] = True, True
    t = any_targets(columns, 5)
    t[:, -1], t[:, -2], t[3] = n_classes - 1, 0, -100
    for inplace in (False, True):
        logits = (flat.clone().requires_grad_() * 1)[shift:].view(6, n_classes)
        out = log_prob(
            logits, t, kept=given(columns, way), return_entropy=True, inplace_backward=inplace, **options
        )  # fmt: skip
        total = (out.log_prob * torch.arange(1.0, 6.0, device=device)).sum() + out.entropy.sum()
        (dx,) = torch.autograd.grad(total, logits)
        found.append(dx)
        assert (dx.data_ptr() == logits.data_ptr()) == inplace
    assert torch.equal(*found)


@every_way
def test_gradients_in_a_batch(way, device):
    columns = sets(40).to(device)
    x, t = peaked(6, 40).to(device).requires_grad_(), any_targets(columns)
    y = log_prob(x, t, kept=given(columns, way))
    g = torch.stack([torch.ones_like(y), torch.arange(6.0, device=device)])
    (found,) = torch.autograd.grad(y, x, g, is_grads_batched=True, retain_graph=True)
    wanted = [torch.autograd.grad(y, x, each, retain_graph=True)[0] for each in g]
    torch.testing.assert_close(found, torch.stack(wanted))


# The same bits, and kept calls.


@pytest.mark.parametrize("way", ["int32, int64", "bitmask"])
@pytest.mark.parametrize(("n_classes", "dtype"), [(613, FP32), (5003, BF16), (40000, BF16), (20001, FP32)], ids=str)
def test_a_row_has_the_same_bits_in_any_batch(n_classes, dtype, way, device):
    n = 7
    x = peaked(n, n_classes).to(dtype).to(device)
    columns = torch.rand(n, n_classes, generator=torch.Generator().manual_seed(0)).to(device) < 0.3
    columns[2], columns[5] = False, True
    t = torch.randint(n_classes, (n, 3), generator=torch.Generator().manual_seed(0)).to(device)
    lists = given(columns, way)
    rows = lists.unbind() if WAYS[way] is None else [lists[0][a:b] for a, b in neighbours(lists[1].tolist())]

    def results(x, which, grad=False):
        here = [rows[i] for i in which]
        if WAYS[way] is None:
            kept = torch.stack(here)
        else:
            ends = torch.tensor([0, *[len(each) for each in here]]).cumsum(0)
            kept = torch.cat(here), ends.to(device, lists[1].dtype)
        leaf = x.detach().requires_grad_()
        out = log_prob(leaf, t[which], kept=kept, temperature=0.7, **ALL)
        (dx,) = torch.autograd.grad(out.entropy.sum() + out.lse.nan_to_num(0, 0, 0).sum(), leaf)
        return [each.detach() for each in (*out[:3], *out.stats, dx)]

    wanted = results(x, list(range(n)))
    moved = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    shuffled = [3, 5, 0, 6, 2, 4, 1]
    for of, which in [(x[2:3], [2]), (x[shuffled], shuffled), (moved[3:], [3, 4, 5, 6])]:
        for a, b in zip(results(of, which), wanted, strict=True):
            assert torch.equal(a, b[which])


@pytest.mark.parametrize("seed", range(3))
def test_kept_calls_answer_for_their_like_alone(seed, device):
    generator = torch.Generator().manual_seed(seed)
    pick = lambda values: values[int(torch.randint(len(values), (), generator=generator))]  # noqa: E731
    calls.forget()
    for step in range(40):
        way, n, grad, inplace = pick([None, *WAYS]), pick([2, 6]), pick([False, True]), pick([False, True])
        x, columns = peaked(6, 40, seed=step)[-n:].to(device), sets(40, seed=step)[-n:].to(device)
        t = columns.long().argmax(-1)
        leaf = x.clone().requires_grad_(grad)
        kept = None if way is None else given(columns, way, seed=step)
        columns = torch.ones_like(columns) if way is None else columns
        y = log_prob(leaf * 1, t, kept=kept, inplace_backward=inplace)
        exact = x.double().requires_grad_()
        wanted = truth(exact, t, columns)[0]
        torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)
        if grad:
            (dx,) = torch.autograd.grad(y.sum(), leaf)
            (true_dx,) = torch.autograd.grad(wanted.sum(), exact)
            torch.testing.assert_close(dx.double(), true_dx, rtol=1e-4, atol=1e-5)


@every_way
def test_lists_of_other_lengths_and_rows_find_the_kept_call(way, device, monkeypatch):
    columns = sets(40).to(device)

    def call(n, columns):
        return log_prob(peaked(n, 40).to(device), columns[:n].long().argmax(-1), kept=given(columns[:n], way))

    calls.forget()
    call(6, columns)
    monkeypatch.setattr(ops, "_prepare_call", None)
    for n, others in ((6, ~columns), (6, columns), (4, columns), (5, ~columns)):
        wanted = truth(peaked(n, 40).double(), others[:n].long().argmax(-1).cpu(), others[:n].cpu())[0]
        torch.testing.assert_close(call(n, others).double().cpu(), wanted, rtol=1e-5, atol=1e-5)


# Compilers and transforms.


@pairwise()
@every_way
@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("temperature", [None, "of rows"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_compiled(way, k, temperature, dtype, device):
    columns = sets(70).to(device)
    if temperature == "of rows":
        temperature = torch.linspace(0.5, 2.0, 6, device=device)
    x, t = peaked(6, 70).to(dtype).to(device), any_targets(columns, k)

    def call(x, target, kept, inplace_backward, **options):
        return log_prob(x * 1, target, kept=kept, inplace_backward=inplace_backward, **options)

    assert_right(x, t, columns, way, of=compiled(call), softcap=4.0, temperature=temperature)


@every_way
def test_the_operator(way, device):
    columns = sets(20)[3:].to(device)
    kept, x = given(columns, way), peaked(3, 20).to(device).requires_grad_()
    of_kept = (None, None, kept) if isinstance(kept, torch.Tensor) else (*kept, None)
    options, t = [-100, 1.0, None, 1.0, None], columns.long().argmax(-1)[:, None]
    torch.library.opcheck(torch.ops.fused_softmax.log_prob.default, (x, t, *options, [True] * 5, *of_kept))


@every_way
def test_an_exported_program_keeps_the_operator(way, device):
    class Module(torch.nn.Module):
        def forward(self, x, target, kept):
            return log_prob(x, target, kept=kept, return_entropy=True).entropy

    columns = sets(40).to(device)
    given_to, x = (any_targets(columns), given(columns, way)), peaked(6, 40).to(device)
    program = torch.export.export(Module(), (x, *given_to)).run_decompositions()
    assert "fused_softmax.log_prob.default" in {str(node.target) for node in program.graph.nodes}
    torch.testing.assert_close(program.module()(x + 1, *given_to), Module()(x + 1, *given_to))


@every_way
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_functorchs_transforms(transform, way, device):
    columns = sets(20)[3:].to(device)
    x, t = (peaked(6, 20) / 4).view(2, 3, 20).to(device), any_targets(columns.roll(1, 0), 3)
    t[0], kept = columns[0].nonzero()[0, 0], given(columns, way)

    def ours(x):
        out = log_prob(torch.where(columns, x, NAN), t, kept=kept, temperature=0.7, return_entropy=True)
        return torch.where(out.log_prob.isneginf(), 0.0, out.log_prob).sum(-1) + out.entropy

    def theirs(x):
        z = torch.where(columns, x / 0.7, -30.0)
        log_p = z - torch.where(columns, z.exp(), 0.0).sum(-1, keepdim=True).log()
        inside = (t != -100) & columns.gather(-1, t.clamp(min=0))
        of_targets = torch.where(inside, log_p.gather(-1, t.clamp(min=0)), 0.0).sum(-1)
        entropy = -torch.where(columns, log_p * log_p.exp(), 0.0).sum(-1)
        return of_targets + torch.where((t != -100).any(-1), entropy, 0.0)

    found, wanted = (TRANSFORMS[transform](of)(x.to(dtype)) for of, dtype in ((ours, FP32), (theirs, FP64)))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


@every_way
def test_fake_tensors(way, device):
    columns = sets(40).to(device)
    x, t, kept = peaked(6, 40).to(device).half().requires_grad_(), any_targets(columns), given(columns, way)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = tuple(map(mode.from_tensor, kept)) if isinstance(kept, tuple) else mode.from_tensor(kept)
        out = log_prob(mode.from_tensor(x), mode.from_tensor(t), kept=fake, **ALL)
        assert [tuple(each.shape) for each in (*out[:3], *out.stats)] == [(6,)] * 6


@pytest.mark.parametrize("dtype", [FP32, BF16, FP64], ids=str)
@every_way
def test_torchs_path_says_the_same(way, dtype, device, monkeypatch):
    if device != "cpu":
        pytest.skip("of CPU tensors")
    monkeypatch.setattr(route, "INTERPRET", False)
    columns = sets(613)
    for k in (None, 3):
        assert_right((peaked(6, 613) / 2).to(dtype), any_targets(columns, k), columns, way, softcap=5.0, scale=-0.5)


@pytest.mark.parametrize("leading", [(), (1,), (6, 1), (2, 3), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("k", [None, 3])
@every_way
def test_torchs_path_of_leading_dims(way, k, leading, monkeypatch):
    monkeypatch.setattr(route, "INTERPRET", False)
    n = math.prod(leading)
    columns, x = sets(40)[-n:], peaked(n, 40)
    t = any_targets(columns, k)
    kept = given(columns.view(*leading, 40), way)
    found = log_prob(x.view(*leading, 40), t.view(leading + t.shape[1:]), kept=kept, **ALL)
    for ours, theirs in zip((*found[:3], *found.stats), truth(x.double(), t, columns), strict=True):
        wanted = theirs.view(leading + theirs.shape[1:]).double()
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", ["offsets", "ids", "neither"])
def test_torchs_path_of_wrong_lists(wrong, device):
    """Where nobody may read them, as under a transform."""
    ids = torch.tensor([1, 2, 3, 4, 5, 40 if wrong == "ids" else 6], device=device)
    offsets = torch.tensor([0, 2, 1 if wrong == "offsets" else 4, 6], device=device)
    x, t = peaked(6, 40).view(2, 3, 40).to(device), torch.tensor([1, 3, 5], device=device)
    y = torch.vmap(lambda x: log_prob(x, t, kept=(ids, offsets)))(x)
    bad = {"offsets": [False, True, True], "ids": [False, False, True], "neither": [False] * 3}[wrong]
    assert y.isnan().tolist() == [bad] * 2
    dx = torch.func.grad(lambda x: log_prob(x, t, kept=(ids, offsets)).sum())(x[0])
    assert dx.isnan().all(-1).tolist() == bad
    assert dx.isnan().any(-1).tolist() == bad


# From hidden states.


@pairwise()
@every_way
@pytest.mark.parametrize("logits", ["keep", "recompute"])
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("k", [None, 3])
def test_linear(way, logits, chunk_size, k, device):
    columns = sets(70).to(device)
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*shape, generator=generator).to(device) for shape in ((6, 16), (70, 16)))
    t, kept = any_targets(columns, k), given(columns, way)
    how = {"logits": logits, "chunk_size": chunk_size}
    found, wanted = [], []
    for results, of in ((found, linear_log_prob), (wanted, None)):
        leaves = [each.clone().requires_grad_() for each in (x, w)]
        if of is None:
            out = log_prob(leaves[0] @ leaves[1].t(), t, kept=kept, **ALL)
        else:
            out = of(*leaves, t, kept=kept, **how, **ALL)
        results += [*out[:3], *out.stats, *torch.autograd.grad((out.log_prob, out.entropy), leaves, gradients_of(out))]
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def gradients_of(out):
    return [each.to(FP32) for each in gradients_like(out[:2])]


def test_wrong_offsets_of_later_chunks(device):
    """Those of a later chunk do not start at 0; those of the first have to."""
    x, w, t = torch.randn(4, 16), torch.randn(40, 16), torch.tensor([1, 3, 5, 7])
    x, w, t, ids = (each.to(device) for each in (x, w, t, torch.arange(8)))
    for offsets, bad in (([0, 2, 4, 6, 8], []), ([1, 2, 4, 6, 8], [0]), ([0, 2, 4, 3, 8], [2])):
        out = linear_log_prob(
            x, w, t, kept=(ids, torch.tensor(offsets, device=device)), chunk_size=2, logits="recompute", return_lse=True
        )  # fmt: skip
        assert out.lse.isnan().tolist() == [r in bad for r in range(4)]


def test_the_module(device):
    module, columns = nn.LinearLogProb(16, 40).to(device), sets(40)[3:].to(device)
    x, t = torch.randn(3, 16, device=device), columns.long().argmax(-1)
    found = module(x, t, kept=given(columns, "int64"))
    torch.testing.assert_close(
        found, linear_log_prob(x, module.linear_weight, t, kept=given(columns, "bitmask")), rtol=1e-5, atol=1e-5
    )
