"""softmax and log_softmax of scaled, masked and causal scores: every strategy and layout, held to float64."""

import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import peaked
from contract import assert_scores, composed, public
from products import pairwise
from shapes import ALIGNMENTS, DTYPES, STRATEGIES, framed, small

from fused_softmax.core import launch
from fused_softmax.core.layout import alignment_of
from fused_softmax.core.plan import H200, candidate
from fused_softmax.ops.softmax import reference
from fused_softmax.ops.softmax.calls import forward_by_plan
from fused_softmax.ops.softmax.launches import prepare_forward
from fused_softmax.ops.softmax.scores import Scores, scores_against

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="without a GPU or the interpreter, CPU tensors take ATen"
)

FP32, FP16, BF16, FP64 = DTYPES
FUNCTIONS = ("softmax", "log_softmax")

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
every_alignment = pytest.mark.parametrize("alignment", ALIGNMENTS)
every_function = pytest.mark.parametrize("function", FUNCTIONS)
reducing_too = pytest.mark.parametrize("function", [*FUNCTIONS, "logsumexp"])


def held_itemsize(x, y, scored):
    """Of what a program holds: what it reads, or what it has added a mask to, or what the arithmetic is of."""
    mask = scored.get("mask")
    added = mask is not None and mask.dtype != torch.bool
    return 8 if y.dtype == FP64 else max(x.element_size(), 4 if added else 0)


def given_with(scores):
    """What a launch takes after its rows."""
    return [each for each in (scores.mask, scores.scale) if each is not None]


def run(strategy, function, source, target, leading=None, *, choices=None, **scored):
    """`function` by a named strategy, in small pieces and parts, from one frame into the other: nothing else changes.

    leading: how the frames' rows count as more than one dim, against which mask and scale broadcast.
    """
    x, y = source.rows, target.rows
    itemsize = held_itemsize(x, y, scored)
    plan = small(strategy, x, y, itemsize=itemsize, **(choices or {}))
    assert plan.strategy == strategy
    if leading:
        x, y = x.unflatten(0, leading), y.unflatten(0, leading)
    forward_by_plan(x, plan, y=y, log=function == "log_softmax", scores=Scores(**scored))
    assert not source.changed(outside=False), "the input was written, or what lies around it"
    assert not target.changed(), "something outside the output's rows was written"
    return x, y


def skip_impossible(strategy, *dtypes):
    if strategy == "split" and FP64 in dtypes:
        pytest.skip("programs exchange fp32 states, so the planner never splits rows computed in fp64")


def hide(x, scored):
    """x with NaN and +inf where a bool mask or causality hides, neither of which may be seen."""
    mask = scored.get("mask")
    keeps = mask if mask is not None and mask.dtype == torch.bool else None
    hidden = reference.scores(torch.zeros_like(x), -1, None, keeps, scored.get("is_causal", False)) == -math.inf
    poison = torch.full_like(x, math.nan)
    poison[..., 1::2] = math.inf
    return torch.where(hidden, poison, x)


def kept(*shape, of=0.6, seed=1):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < of


def added(*shape, dtype=FP32, seed=2):
    """A bias with -inf in it."""
    generator = torch.Generator().manual_seed(seed)
    bias = torch.randn(shape, generator=generator) * 3
    return bias.masked_fill(torch.rand(shape, generator=generator) < 0.2, -math.inf).to(dtype)


# Strategies, by name. Rows are [2, 2, n]: two of each sort of broadcasting.


def _tiles(n):
    """Whole tiles hidden in front, in the middle, at the end; and the fourth row is empty."""
    mask = kept(2, 2, n, of=0.9)
    mask[0, 0, :260] = mask[0, 1, 128:520] = mask[1, 0, 250:] = mask[1, 1] = False
    return mask


SCORES = {
    "scale": lambda n: {"scale": 0.37},
    "negative scale": lambda n: {"scale": -1.5},
    "scale 0": lambda n: {"scale": 0.0},
    "scale a row": lambda n: {"scale": torch.tensor([[0.5, 2.0], [-1.25, 0.0]]).unsqueeze(-1)},
    "scale a query": lambda n: {"scale": torch.tensor([[0.0], [-2.0]])},
    "scale a batch, masked": lambda n: {"scale": torch.tensor([-0.7, 0.0]).view(2, 1, 1), "mask": _tiles(n)},
    "mask": lambda n: {"mask": _tiles(n)},
    "mask, empty rows zero": lambda n: {"mask": _tiles(n), "masked_rows": "zero"},
    "mask of keys, scaled": lambda n: {"mask": kept(n), "scale": -3.0},
    "mask a batch, scale 0, empty rows zero": lambda n: {
        "mask": kept(2, 1, n) & torch.tensor([True, False]).view(2, 1, 1), "scale": 0.0, "masked_rows": "zero",
    },
    "mask a query": lambda n: {"mask": torch.tensor([[True], [False]]), "masked_rows": "zero"},
    "added": lambda n: {"mask": added(2, n)},
    "added, scaled": lambda n: {"mask": added(2, 1, n, dtype=BF16), "scale": -2.0},
    "added, scale a row": lambda n: {
        "mask": added(n).masked_fill(torch.arange(n) < 300, -math.inf),
        "scale": torch.tensor([[0.5, 0.0], [-1.25, 3.0]]).unsqueeze(-1),
    },
    "added, empty rows zero": lambda n: {
        "mask": added(2, 2, n).masked_fill(torch.tensor([[1, 0], [0, 0]]).bool().unsqueeze(-1), -math.inf),
        "masked_rows": "zero",
    },
    "empty rows zero": lambda n: {"masked_rows": "zero"},
}  # fmt: skip


@pairwise()
@every_strategy
@pytest.mark.parametrize(
    ("alignment", "function", "dtype"),
    [
        ("even", "softmax", FP32), ("even", "log_softmax", BF16), ("shifted", "softmax", BF16),
        ("shifted", "log_softmax", FP32), ("scalar", "softmax", FP32),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", SCORES)
def test_every_strategy(strategy, alignment, function, dtype, name, device):
    n_cols = 616 if alignment == "even" else 613
    scored = SCORES[name](n_cols)
    x = peaked(4, n_cols).unflatten(0, (2, 2))
    if name == "empty rows zero":
        x[1, 0] = -math.inf
    x = hide(x, scored).flatten(0, 1).to(dtype)
    scored = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in scored.items()}
    source, target = framed(alignment, x, device=device)
    choices = {"block_rows": 2} if strategy == "tile" else {}
    x, y = run(strategy, function, source, target, (2, 2), choices=choices, **scored)
    assert_scores(y, function, x, **scored)


@pairwise()
@every_strategy
@every_alignment
@pytest.mark.parametrize("scored", [{}, {"scale": -0.5}, {"masked_rows": "zero"}], ids=["plain", "scaled", "zero"])
def test_causal_by_every_strategy(strategy, alignment, scored, device):
    """Two rows anywhere among the queries of a square or rectangular input: the first that see few keys, or none."""
    n_cols = 616 if alignment == "even" else 613
    dtype = FP32 if scored else BF16
    for first_sees in (-1, 127, 256, 597):
        n_queries = n_cols + 1 - first_sees
        mask = (torch.arange(n_cols) < first_sees + torch.arange(2).unsqueeze(1)).to(device)
        x = hide(peaked(2, n_cols), {"mask": mask.cpu()}).to(dtype)
        source, target = framed(alignment, x, device=device)
        x, y = source.rows, target.rows
        scores = Scores(is_causal=True, **scored)
        run_rows = prepare_forward(x, y, small(strategy, x, y), scores_against(scores, (n_queries, n_cols)))
        run_rows(x, y, *given_with(scores))
        assert not target.changed(), first_sees
        assert_scores(y, "softmax", x, mask=mask, **scored)


@pytest.mark.parametrize(
    ("shape", "of_mask"),
    [((2, 2, 3), (1, 2, 3)), ((2, 2, 3), (1, 1, 3)), ((2, 2, 3), (1, 2, 1)), ((2, 5), (1, 5)), ((2, 3, 2), (1, 3, 2))],
)  # fmt: skip
def test_rows_that_share_a_large_mask_follow_each_other(shape, of_mask, device, monkeypatch):
    """Another order of the rows, in which a mask that L2 would not keep comes from memory once."""
    monkeypatch.setattr("fused_softmax.ops.softmax.scores._KEPT_BYTES", 0)
    for n_cols in (700, 2048):
        for mask in (added(math.prod(of_mask), n_cols), kept(math.prod(of_mask), n_cols)):
            x, mask = peaked(math.prod(shape), n_cols), mask.view(*of_mask, n_cols).to(device)
            x = x.view(*shape, n_cols).to(device)
            assert scores_against(Scores(mask=mask), tuple(x.shape)).shared_dims
            plan = candidate("row", math.prod(shape), n_cols, 4, H200, num_warps=2, prefetch=2)
            y = forward_by_plan(x, plan, scores=Scores(mask=mask, scale=0.5))
            assert_scores(y, "softmax", x, mask=mask, scale=0.5)


@pairwise(strength=1)
@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
@pytest.mark.parametrize("n_keys", [2048, 1900, 1893])
def test_causal_rows_of_every_length(function, n_keys, device):
    """A row has code of its own for each quarter that its diagonal may lie in, and for what causality hides of it."""
    sees = (-3, 0, 1, 255, 256, 257, 511, 512, 513, 1024, 1025, 1536, 1537, n_keys - 1, n_keys)
    mask = kept(n_keys)
    mask[0] = True
    for scored in ({}, {"scale": -0.7}, {"mask": mask}, {"mask": added(n_keys), "masked_rows": "zero"}):
        scored = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in scored.items()
        }
        for spoilt in (0.0, math.nan, math.inf) if not scored else (0.0,):
            x = peaked(len(sees), n_keys)
            x[:, 0] += spoilt  # seen by every row that sees anything
            for i, n_seen in enumerate(sees):
                # One query alone, of as many that it sees so many keys.
                source, target = framed("even" if n_keys % 4 == 0 else "shifted", x[i : i + 1], device=device)
                n_queries = n_keys + 1 - n_seen
                plan = candidate(
                    "row", 1, n_keys, 4, H200, alignment=alignment_of(source.rows, target.rows), num_warps=4
                )
                scores = Scores(is_causal=True, **scored)
                prepare_forward(
                    source.rows, target.rows, plan, scores_against(scores, (n_queries, n_keys)),
                    log=function == "log_softmax",
                )(source.rows, target.rows, *given_with(scores))  # fmt: skip
                assert not target.changed(), n_seen
                seen = (torch.arange(n_keys) < n_seen).to(device)
                hides = dict(scored)
                if scored.get("mask") is None or scored["mask"].dtype == torch.bool:
                    hides["mask"] = seen & scored["mask"] if "mask" in scored else seen
                else:
                    hides["mask"] = scored["mask"].masked_fill(~seen, -math.inf)
                assert_scores(target.rows, function, source.rows, **hides)


@pairwise(strength=1)
@every_strategy
@pytest.mark.parametrize(("n_queries", "n_keys"), [(20, 12), (12, 20), (17, 17), (5, 131), (1, 70)])
def test_causal_of_every_shape(strategy, n_queries, n_keys, device):
    scored = {"is_causal": True, "scale": 1.5, "masked_rows": "zero"}
    x = hide(peaked(2 * n_queries, n_keys).unflatten(0, (2, n_queries)), scored).flatten(0, 1)
    source, target = framed("even" if n_keys % 4 == 0 else "shifted", x, device=device)
    choices = {"part_cols": 64} if strategy == "split" else {}
    x, y = run(strategy, "log_softmax", source, target, (2, n_queries), choices=choices, **scored)
    assert_scores(y, "log_softmax", x, **scored)


DTYPE_PAIRS = [
    (FP32, FP32), (FP16, FP16), (BF16, BF16), (FP64, FP64), (FP16, FP32), (BF16, FP32), (FP32, BF16), (FP32, FP16),
    (BF16, FP16), (FP64, FP32), (FP32, FP64), (BF16, FP64),
]  # fmt: skip


@pairwise()
@every_strategy
@pytest.mark.parametrize("alignment", ["even", "shifted"])
@pytest.mark.parametrize(("given", "wanted"), DTYPE_PAIRS, ids=str)
def test_dtypes_by_every_strategy(strategy, alignment, given, wanted, device):
    """The input is rounded to the dtype of the result first; masks of any float dtype are added after."""
    skip_impossible(strategy, given, wanted)
    n_cols = 600 if alignment == "even" else 597
    x = peaked(2, n_cols, given)
    scale = torch.tensor([[-0.8], [0.0]]).to(device)
    for function, scored in (
        ("softmax", {"mask": kept(n_cols).to(device), "scale": scale}),
        ("log_softmax", {"mask": added(2, n_cols, dtype=wanted).to(device), "scale": scale.to(FP64)}),
    ):
        source, target = framed(alignment, x, wanted, device=device)
        x_rows, y = run(strategy, function, source, target, **scored)
        assert_scores(y, function, x_rows, dtype=wanted, **scored)


# Values.


@pairwise()
@every_strategy
@every_alignment
@pytest.mark.parametrize("where", [slice(0, 512), slice(128, 600), slice(256, None), slice(0, -1), slice(1, None)])
def test_hidden_tiles_leave_the_row_finite(strategy, alignment, where, device):
    """Leading, in the middle, trailing; all but the last and all but the first column."""
    n_cols = 616 if alignment == "even" else 613
    mask = torch.ones(n_cols, dtype=torch.bool)
    mask[where] = False
    bias = torch.zeros(n_cols).masked_fill(~mask, -math.inf)
    for scored in ({"mask": mask.to(device)}, {"mask": bias.to(device), "scale": -2.0}):
        x = peaked(2, n_cols)
        if scored["mask"].dtype == torch.bool:
            x = hide(x, {"mask": mask})
        source, target = framed(alignment, x, device=device)
        x, y = run(strategy, "softmax", source, target, **scored)
        assert y.isfinite().all()
        assert (y[:, where] == 0).all()
        assert_scores(y, "softmax", x, **scored)


VALUES = {
    "NaN": ((300, math.nan),),
    "nothing": (),
    "NaN in the last column": ((-1, math.nan),),
    "-inf": ((slice(0, 520), -math.inf),),
    "+inf": ((300, math.inf),),
    "all -inf": ((slice(None), -math.inf),),
    "two +inf": ((3, math.inf), (-1, math.inf)),
    "all the lowest": ((slice(None), torch.finfo(FP32).min / 4),),
    "-inf and +inf": ((slice(None), -math.inf), (300, math.inf)),
    "thousands": ((slice(None, None, 5), 12345.678), (77, 12346.5)),
    "-inf and NaN": ((slice(None), -math.inf), (300, math.nan)),
    "zeros of both signs": ((slice(None), 0.0), (slice(None, None, 2), -0.0)),
}


@pairwise()
@every_strategy
@pytest.mark.parametrize("alignment", ["even", "shifted"])
@pytest.mark.parametrize(
    "scored",
    [
        {"scale": 0.5}, {"scale": -1.0}, {"scale": 0.0}, {"masked_rows": "zero"}, {"scale": 0.0, "masked_rows": "zero"},
        {"mask": "bool", "masked_rows": "zero"}, {"mask": "added", "scale": 2.0},
    ],
    ids=str,
)  # fmt: skip
def test_special_values(strategy, alignment, scored, device):
    """One row of each kind, no two neighbours of which are alike, so that what leaves its row shows."""
    n_cols = 616 if alignment == "even" else 613
    x = peaked(len(VALUES), n_cols)
    for row, changes in enumerate(VALUES.values()):
        for cols, value in changes:
            x[row, cols] = value
    masks = {"bool": kept(n_cols), "added": added(n_cols)}
    scored = scored | ({"mask": masks[scored["mask"]].to(device)} if "mask" in scored else {})
    function = "log_softmax" if scored.get("scale") == 0.5 else "softmax"
    source, target = framed(alignment, x, device=device)
    x, y = run(strategy, function, source, target, **scored)
    for row, name in enumerate(VALUES):
        try:
            assert_scores(y[row], function, x[row], **scored)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pairwise()
@pytest.mark.parametrize("arithmetic", ["nvidia", "other"])
@every_strategy
@every_alignment
@every_function
def test_scale_0_takes_the_first_of_equal_maxima(strategy, alignment, function, arithmetic, device, request):
    """Wherever they stand: in one tile or two, at both ends of a row, as zeros of both signs, among the hidden."""
    if arithmetic == "nvidia":  # where exp(m - m) is 1 but for a residue, which s has to share
        request.getfixturevalue("nvidia")
    n_cols = 616 if alignment == "even" else 613
    places = [(0, 1), (0, n_cols - 1), (5, 300), (127, 128), (256, 511), (2, 255, 256)]
    x = peaked(len(places), n_cols).clamp(max=-1.0)
    for row, columns in enumerate(places):
        x[row, list(columns)] = torch.tensor([-0.0, 0.0, -0.0])[: len(columns)] if row % 2 else 20.0
    first = torch.tensor([columns[0] for columns in places], device=device)
    source, target = framed(alignment, x, device=device)
    _, y = run(strategy, function, source, target, scale=0.0)
    y = y if function == "softmax" else y.exp()
    assert torch.equal(y, torch.nn.functional.one_hot(first, n_cols).float())


@every_strategy
def test_scale_0_adds_a_mask_to_the_input_as_it_is(strategy, device):
    """4 + 0 is less than 3 + 1.5, and so would it not be of their doubles."""
    x, mask = torch.zeros(2, 600), torch.zeros(600)
    x[:, 5], x[:, 500], mask[500] = 4.0, 3.0, 1.5
    for scale in (0.0, torch.zeros(2, 1, device=device)):
        source, target = framed("even", x, device=device)
        _, y = run(strategy, "softmax", source, target, scale=scale, mask=mask.to(device))
        assert y.argmax(-1).tolist() == [500, 500]


@pytest.mark.parametrize("strategy", ["tile", "row", "split"])
def test_scale_0_compares_sums_with_a_mask_as_they_are_and_not_rounded_to_the_result(strategy, device):
    """256 and 256.5 are one number in bf16."""
    x = torch.zeros(2, 600, dtype=BF16)
    x[:, 5] = x[:, 500] = 256.0
    mask = torch.zeros(600)
    mask[500] = 0.5
    source, target = framed("even", x, device=device)
    _, y = run(strategy, "softmax", source, target, scale=0.0, mask=mask.to(device))
    assert y.argmax(-1).tolist() == [500, 500]
    assert (y.sum(-1) == 1).all()


@pairwise()
@every_strategy
@every_function
@pytest.mark.parametrize("scale", [1e3, -1e3, 1e30, 1e-30, 1e-42], ids=str)
def test_huge_and_tiny_scales(strategy, function, scale, device):
    source, target = framed("even", peaked(3, 600), device=device)
    x, y = run(strategy, function, source, target, scale=scale)
    assert_scores(y, function, x, scale=scale)


@pytest.mark.parametrize("scale", [1e-46, 1e-50, -1e-300], ids=str)
def test_a_number_that_vanishes_in_fp32_is_no_scale_of_0(scale, device):
    """0 stands for the first maximum, and what is next to 0 for equal probabilities."""
    x = peaked(3, 60).to(device)
    torch.testing.assert_close(public("softmax", x, scale=scale), torch.full_like(x, 1 / 60))


HEIGHTS = [0.0, 100.0, 12345.0, 3e8, 2.0**31]


@pairwise()
@every_strategy
@every_alignment
@pytest.mark.parametrize("height", HEIGHTS)
def test_high_rows_in_the_arithmetic_of_nvidia(strategy, alignment, height, nvidia, device):
    """How far a row stands from 0 costs nothing: z - m is exact."""
    n_cols = 616 if alignment == "even" else 613
    source, target = framed(alignment, peaked(2, n_cols) + height, device=device)
    x, y = run(strategy, "softmax", source, target)
    assert_scores(y, "softmax", x)


@pytest.mark.parametrize("height", HEIGHTS)
def test_logsumexp_of_high_rows_in_the_arithmetic_of_nvidia(height, nvidia, device):
    x = (peaked(3, 619) + height).to(device)
    assert_scores(public("logsumexp", x), "logsumexp", x)


@pairwise()
@every_strategy
@every_alignment
@pytest.mark.parametrize("name", ["scale a row", "mask, empty rows zero", "added, scale a row"])
def test_scores_in_the_arithmetic_of_nvidia(strategy, alignment, name, nvidia, device):
    n_cols = 616 if alignment == "even" else 613
    scored = SCORES[name](n_cols)
    x = hide(peaked(4, n_cols).unflatten(0, (2, 2)), scored).flatten(0, 1)
    scored = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in scored.items()}
    for function, dtype in (("log_softmax", FP32), ("softmax", BF16)):
        source, target = framed(alignment, x.to(dtype), device=device)
        rows, y = run(strategy, function, source, target, (2, 2), **scored)
        assert_scores(y, function, rows, **scored)


@every_strategy
@every_alignment
def test_scale_0_of_rows_that_are_all_equal_takes_the_first_that_is_kept(strategy, alignment, device):
    """Though the last columns of a row that starts off 16 bytes are the work of its first part."""
    n_cols = 616 if alignment == "even" else 613
    firsts = torch.tensor([0, 1, 3, 128, 255, 256, 511, 600, n_cols - 1])
    mask = torch.arange(n_cols) >= firsts.unsqueeze(1)
    source, target = framed(alignment, torch.zeros(len(firsts), n_cols), device=device)
    _, y = run(strategy, "softmax", source, target, scale=0.0, mask=mask.to(device))
    assert torch.equal(y.cpu(), torch.nn.functional.one_hot(firsts, n_cols).float())


@every_alignment
def test_scale_0_of_rows_that_stream_compares_sums_with_a_mask_as_they_are(alignment, device):
    """256 and 256.5 are one number in bf16, in which nothing is added."""
    n_cols = 616 if alignment == "even" else 613
    x = torch.zeros(2, n_cols, dtype=BF16)
    x[:, 5] = x[:, 500] = 256.0
    mask = torch.zeros(n_cols)
    mask[500] = 0.5
    source, target = framed(alignment, x, device=device)
    _, y = run("stream", "softmax", source, target, scale=0.0, mask=mask.to(device))
    assert y.argmax(-1).tolist() == [500, 500]


@pytest.mark.parametrize("scale", [1e-46, 1e-50, -1e-300], ids=str)
def test_a_scale_tensor_that_vanishes_in_fp32_is_no_scale_of_0(scale, device):
    x = peaked(3, 60).to(device)
    scale = torch.tensor([[scale]], dtype=FP64, device=device)
    torch.testing.assert_close(public("softmax", x, scale=scale), torch.full_like(x, 1 / 60))


@pairwise()
@every_strategy
@every_alignment
@pytest.mark.parametrize("height", HEIGHTS)
def test_log_softmax_of_high_rows_in_the_arithmetic_of_nvidia(strategy, alignment, height, nvidia, device):
    """z - m is exact, and log s no more than log n_cols: nothing of either is to the row's height."""
    n_cols = 616 if alignment == "even" else 613
    source, target = framed(alignment, peaked(2, n_cols) + height, device=device)
    x, y = run(strategy, "log_softmax", source, target)
    assert_scores(y, "log_softmax", x)


@pytest.mark.parametrize("height", HEIGHTS)
def test_log_softmax_along_a_strided_dim_of_high_columns_in_the_arithmetic_of_nvidia(height, nvidia, device):
    x = (peaked(601, 9).t().contiguous().t() + height).to(device).contiguous()
    assert_scores(public("log_softmax", x, 0), "log_softmax", x, 0)


@pytest.mark.gpu
@pytest.mark.parametrize(("n_cols", "strategy"), [(512, "tile"), (700, "row"), (9000, "split")])
def test_a_mask_whose_columns_lie_far_apart(n_cols, strategy):
    """From the first to the last more than 2^31 elements, as in a transposed mask of 65536 queries and keys."""
    column_stride = 2**32 // n_cols
    # What lies where an offset of 32 bits would wrap to hides everything.
    buffer = torch.zeros(2**31 + 2**32, dtype=torch.bool, device="cuda")
    mask = buffer.as_strided((n_cols,), (column_stride,), 2**31)
    mask.fill_(True)
    x = peaked(2, n_cols).to("cuda")
    y = torch.empty_like(x)
    forward_by_plan(x, small(strategy, x, y), y=y, scores=Scores(mask=mask))
    torch.testing.assert_close(y, torch.softmax(x, -1))


# Layouts, through the public functions.

LAYOUTS = {  # of what broadcasts to [2, 3, 2, 3, 20], from what makes a tensor of a shape
    "one value": lambda make: make(),
    "one value of one dim": lambda make: make(1),
    "keys": lambda make: make(20),
    "queries": lambda make: make(3, 1),
    "queries and keys": lambda make: make(3, 20),
    "first and third dim": lambda make: make(2, 1, 2, 1, 20),
    "second and fourth dim": lambda make: make(3, 1, 3, 20),
    "second and fourth dim, no keys": lambda make: make(3, 1, 3, 1),
    "first, second and fourth dim": lambda make: make(2, 3, 1, 3, 20),
    "all": lambda make: make(2, 3, 2, 3, 20),
    "all but keys": lambda make: make(2, 3, 2, 3, 1),
    "transposed": lambda make: make(20, 3).t(),
    "reversed dims": lambda make: make(20, 3, 2, 3, 2).permute(4, 3, 2, 1, 0),
    "swapped batches": lambda make: make(3, 2, 2, 3, 20).transpose(0, 1),
    "expanded": lambda make: make(2, 1, 2, 1, 20).expand(2, 3, 2, 3, 20),
    "expanded keys": lambda make: make(2, 1, 1, 3, 1).expand(2, 3, 2, 3, 20),
    "every second key": lambda make: make(2, 3, 40)[..., ::2],
    "every second query, shifted": lambda make: make(2, 6, 25)[:, 1::2, 3:23],
    "windows": lambda make: make(25).unfold(0, 20, 1)[1:4],
}


def layout_inputs(device):
    x = peaked(36, 20).view(2, 3, 2, 3, 20).to(device)
    return x, lambda *shape: kept(*shape, of=0.7).to(device), lambda *shape: added(*shape).clamp(-1e4).to(device)


@pairwise(strength=1)
@reducing_too
@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks_of_every_layout(layout, function, device):
    """Four leading dims, which no three strides describe where a mask has some of them and not their neighbours."""
    x, keep, bias = layout_inputs(device)
    for make in (keep, bias):
        mask = LAYOUTS[layout](make)
        before = mask.clone()
        # A scale that has other dims than the mask.
        scale = (torch.arange(2.0, device=device) - 0.4).view(2, 1, 1)
        for scored in ({"mask": mask}, {"mask": mask, "scale": scale, "masked_rows": "zero"}):
            assert_scores(public(function, x, **scored), function, x, **scored)
        assert torch.equal(mask, before)


@pairwise(strength=1)
@reducing_too
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "keys" not in name or "no keys" in name])
def test_scales_of_every_layout(layout, function, device):
    x, keep, _ = layout_inputs(device)

    def make(*shape):
        values = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0])
        return values[torch.arange(math.prod(shape)) % 5].view(shape).to(device)

    scale = LAYOUTS[layout](make)
    if scale.ndim and scale.shape[-1] == 20:
        scale = scale[..., 3:4]
    before = scale.clone()
    for scored in (
        {"scale": scale},
        {"scale": scale, "mask": keep(3, 1, 1, 20)},
        {"scale": scale.expand(*x.shape[:-1], 1)},
    ):
        assert_scores(public(function, x, **scored), function, x, **scored)
    assert torch.equal(scale, before)


def test_a_scale_with_dims_that_do_not_coalesce_is_expanded_along_no_key(device):
    scale = torch.ones(2, 1, 2, 1, 1, device=device)
    laid_out = scores_against(Scores(scale=scale), (2, 3, 2, 3, 5000)).scale
    assert laid_out.untyped_storage().nbytes() == 36 * 4


@reducing_too
def test_any_dim(function, device):
    x = peaked(12, 35).view(3, 4, 5, 7).to(device)
    for dim in range(-4, 4):
        along = [1 if i == dim % 4 else size for i, size in enumerate(x.shape)]
        scale = (torch.arange(math.prod(along)) % 4 - 1.0).view(along).to(device)
        for scored in (
            {"scale": -0.3},
            {"scale": scale},
            {"mask": kept(4, 1, 7).to(device)},
            {"mask": added(3, 1, 5, 1).clamp(-9).to(device), "scale": scale},
            {"mask": kept(*x.shape, of=0.3).to(device), "scale": 0.0, "masked_rows": "zero"},
        ):
            y = public(function, x, dim, **scored)
            assert_scores(y, function, x, dim, **scored)
            assert y.is_contiguous()


@every_function
def test_input_layouts(function, device):
    buffer = peaked(12, 64).to(device)
    scored = {"mask": kept(3, 1, of=0.8).to(device), "scale": torch.tensor([-2.0, 0.5], device=device).view(2, 1, 1)}
    for x in (
        buffer[:6, :60].view(2, 3, 60),
        buffer[:6, 3:].unflatten(0, (2, 3)),
        buffer.view(2, 6, 64)[:, ::2],
        buffer[:, ::2].view(2, 6, 32)[:, :3],
        buffer.t()[:6].reshape(2, 3, 12),
        buffer[:2].unsqueeze(1).expand(2, 3, 64),
        buffer[:6].view(3, 2, 64).transpose(0, 1),
        buffer.view(64, 12)[:60].view(20, 3, 12).permute(2, 1, 0)[:2],
    ):
        before = x.clone()
        assert_scores(public(function, x, **scored), function, x, **scored)
        assert_scores(public(function, x, 0, mask=scored["mask"]), function, x, 0, mask=scored["mask"])
        assert torch.equal(x, before)


@pairwise()
@reducing_too
@pytest.mark.parametrize("n_keys", [1, 2, 40, 700])
@pytest.mark.parametrize("n_queries", [1, 2, 5, 41])
def test_causal(function, n_queries, n_keys, device):
    if n_queries * n_keys > 5000 and INTERPRETED:
        pytest.skip("a program a row, for seconds")
    x = hide(peaked(2 * n_queries, n_keys).view(2, n_queries, n_keys), {"is_causal": True}).to(device)
    scored = {"is_causal": True, "masked_rows": "zero" if n_keys % 2 else "nan"}
    assert_scores(public(function, x, **scored), function, x, **scored)
    if n_queries * n_keys < 100:
        for scale in (-0.3, torch.rand(2, n_queries, 1, device=device), 0.0):
            for mask in (kept(n_queries, n_keys), kept(2, 1, 1)):
                more = scored | {"scale": scale, "mask": mask.to(device)}
                assert_scores(public(function, x, **more), function, x, **more)


@reducing_too
@pytest.mark.parametrize("dim", [-1, 0])
def test_a_number_in_fp64_has_64_bits(function, dim, device):
    x = peaked(5, 40, FP64).to(device)
    ours, truth = public(function, x, dim, scale=0.1), getattr(torch, function)(x * 0.1, dim)
    torch.testing.assert_close(ours, truth, rtol=1e-13, atol=1e-13)


@reducing_too
@pytest.mark.parametrize(("n_cols", "dtype"), [(700, FP32), (700, BF16), (9000, FP16), (17000, FP64)], ids=str)
def test_what_the_planner_chooses_for_long_rows(function, dtype, n_cols, device):
    """A row a program, few rows split into parts, and fp64 streamed; as the operator plans them with scores."""
    x = peaked(2, n_cols, dtype)
    x[0, 5] = x[1, -2] = math.nan
    mask = kept(2, n_cols)
    mask[0, 5] = mask[1, -2] = False
    x, scored = x.to(device), {"mask": mask.to(device), "scale": torch.tensor([[-0.5], [0.0]], device=device)}
    assert_scores(public(function, x, **scored), function, x, **scored)
    x = x.nan_to_num(1.0)
    scored = {"mask": added(n_cols).to(device), "scale": 0.5, "is_causal": True}
    assert_scores(public(function, x, **scored), function, x, **scored)


@reducing_too
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 1), (0, 5), (5, 0), (2, 0, 3)], ids=str)
def test_no_dims_one_column_and_empty(shape, function, device):
    x = torch.full(shape, 3.0, device=device)
    ones = [1] * x.ndim
    for scored in (
        {"scale": 2.0},
        {"scale": 0.0},
        {"scale": torch.tensor(-0.5, device=device)},
        {"scale": torch.zeros(ones, device=device)},
        {"mask": torch.tensor(False, device=device), "masked_rows": "zero"},
        {"mask": torch.tensor(False, device=device)},
        {"mask": torch.full(shape, -math.inf, device=device)},
        {"mask": torch.ones(ones, dtype=torch.bool, device=device), "scale": 2.0},
        *([{"is_causal": True}] if x.ndim > 1 else []),
    ):
        assert_scores(public(function, x, **scored), function, x, **scored)


# dtype= and out=


@pairwise()
@every_function
@pytest.mark.parametrize("wanted", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("given", [FP32, BF16, torch.int64, torch.float8_e4m3fn], ids=str)
def test_dtype(given, wanted, function, device):
    if wanted is None and given not in DTYPES:
        pytest.skip("refused")
    x = peaked(6, 70).view(2, 3, 70).to(given).to(device)
    for scored in (
        {"scale": -0.5},
        {"mask": kept(3, 70).to(device)},
        {"mask": added(70).to(device), "is_causal": True},
    ):
        y = public(function, x, dtype=wanted, **scored)
        assert_scores(y, function, x, dtype=wanted or given, **scored)


@every_function
@pytest.mark.parametrize("wanted", [FP32, FP16], ids=str)
def test_out(function, wanted, device):
    x = peaked(6, 70).view(2, 3, 70).to(device)
    scored = {"scale": -0.5, "mask": kept(3, 70, of=0.9).to(device)}
    views = {
        "contiguous": lambda b: b[:420].view(2, 3, 70),
        "row-strided": lambda b: b[:480].view(2, 3, 80)[..., 3:73],
        "every second column": lambda b: b[:840].view(2, 3, 140)[..., ::2],
        "reversed dims": lambda b: b[:420].view(70, 3, 2).permute(2, 1, 0),
        "one off": lambda b: b[1:421].view(2, 3, 70),
    }
    for name, view in views.items():
        for dim in (-1, 0):
            buffer = torch.full((900,), math.nan, dtype=wanted, device=device)
            out = view(buffer)
            assert public(function, x, dim, dtype=wanted, out=out, **scored) is out
            assert_scores(out, function, x, dim, dtype=wanted, **scored)
            out.fill_(math.nan)
            assert buffer.isnan().all(), name
    out = torch.empty(0, device=device, dtype=wanted)
    assert public(function, x, dtype=wanted, out=out, **scored) is out
    assert_scores(out, function, x, dtype=wanted, **scored)


@every_function
@pytest.mark.parametrize("n_cols", [20, 700])
def test_out_that_is_or_overlaps_an_argument(function, n_cols, device):
    """All that a row reads is read before any of it is overwritten, whoever else reads it too."""
    values = peaked(4, n_cols).to(device)
    x = values.clone()
    theirs = composed(function, x, scale=0.5)
    assert public(function, x, scale=0.5, out=x) is x
    torch.testing.assert_close(x, theirs, rtol=1e-5, atol=1e-6)
    buffer = torch.linspace(-2, 2, 5 * n_cols, device=device)
    for mask, out in (
        (buffer[:n_cols], buffer[: 4 * n_cols].view(4, n_cols)),
        (buffer[n_cols - 3 : 2 * n_cols - 3], buffer[: 4 * n_cols].view(4, n_cols)),
        (buffer[: 4 * n_cols].view(n_cols, 4).t(), buffer[: 4 * n_cols].view(4, n_cols)),
    ):
        buffer.copy_(torch.linspace(-2, 2, 5 * n_cols, device=device))
        theirs = composed(function, values, mask=mask.clone())
        public(function, values, mask=mask, out=out)
        torch.testing.assert_close(out, theirs, rtol=1e-5, atol=1e-6)
    scale = torch.ones(4 * n_cols, device=device)
    theirs = composed(function, values, scale=torch.full((4, 1), 0.5))
    scale[::n_cols] = 0.5
    public(function, values, scale=scale.view(4, n_cols)[:, :1], out=scale.view(4, n_cols))
    torch.testing.assert_close(scale.view(4, n_cols), theirs, rtol=1e-5, atol=1e-6)


def test_out_counts_as_written_for_autograd(device):
    out = torch.randn(3, 70, device=device)
    weight = torch.ones(3, 70, device=device, requires_grad=True)
    loss = (weight * out).sum()
    public("softmax", torch.randn(3, 70, device=device), scale=2.0, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Calls one after another, and those that torch's own machinery listens to.


@every_function
def test_calls_of_one_shape_are_kept_apart(function, device):
    x = peaked(6, 70).view(2, 3, 70).to(device)
    calls = [
        {}, {"scale": 0.5}, {"scale": 2.0}, {"scale": 0.0}, {"scale": -0.0}, {"is_causal": True},
        {"mask": kept(3, 70, seed=3).to(device)}, {"mask": kept(3, 70, seed=4).to(device)},
        {"mask": added(70, seed=5).to(device)}, {"mask": added(70, seed=5).double().to(device)},
        {"masked_rows": "zero"}, {"scale": 1.0}, {"scale": 1}, {"scale": True + 1},
    ]  # fmt: skip
    for _ in range(2):
        for scored in calls:
            assert_scores(public(function, x, **scored), function, x, **scored)
        calls.reverse()


@every_function
def test_same_inputs_give_the_same_bits(function, device):
    x = peaked(2, 3000).to(device)
    scored = {"mask": added(3000).to(device), "scale": torch.tensor([[0.3], [0.0]], device=device)}
    first = public(function, x, **scored)
    for _ in range(2 if INTERPRETED else 50):
        assert torch.equal(public(function, x, **scored), first)


def test_numbers_of_numpy_are_scales(device):
    x = peaked(2, 9).to(device)
    for scale in (np.float32(0.5), np.float64(0.5), np.int64(2)):
        assert_scores(public("softmax", x, scale=scale), "softmax", x, scale=float(scale))


def test_a_scale_of_no_dims_may_be_on_the_cpu_as_with_torchs_operators(device):
    x = peaked(2, 9).to(device)
    for scale in (torch.tensor(0.5), torch.tensor(-2.0, dtype=FP64), torch.tensor(0.0)):
        assert_scores(public("softmax", x, scale=scale), "softmax", x, scale=scale.item())


@reducing_too
def test_functorch_and_forward_mode(function, device):
    from torch.autograd import forward_ad

    x, mask, scale = peaked(12, 20).view(4, 3, 20).to(device), kept(4, 3, 20).to(device), torch.rand(4, 3, 1).to(device)
    ours = torch.vmap(lambda x, mask, scale: public(function, x, mask=mask, scale=scale))(x, mask, scale)
    torch.testing.assert_close(ours, public(function, x, mask=mask, scale=scale))
    of = torch.func.jacrev(lambda scale: public(function, x[0], mask=mask[0], scale=scale))(scale[0])
    in_front = torch.func.jacfwd(lambda scale: public(function, x[0], mask=mask[0], scale=scale))(scale[0])
    torch.testing.assert_close(of, in_front, equal_nan=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        tangent = forward_ad.unpack_dual(public(function, dual, scale=scale)).tangent
    expected = torch.zeros_like(x) if function != "logsumexp" else scale.squeeze(-1)
    torch.testing.assert_close(tangent, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_compile_sees_through_it_without_a_graph_break(function, device):
    torch._dynamo.reset()
    x, mask = peaked(6, 20).view(2, 3, 20).to(device), kept(20).to(device)
    scored = {"mask": mask, "scale": 0.5, "is_causal": True}
    compiled = torch.compile(lambda x: public(function, x, **scored), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), public(function, x, **scored), rtol=1e-5, atol=1e-6)


@reducing_too
def test_tensor_subclasses_stay_what_they_are(function, device):
    class Mine(torch.Tensor):
        pass

    x = peaked(2, 20).to(device)
    y = public(function, x.as_subclass(Mine), scale=2.0)
    assert type(y) is Mine
    assert_scores(y.as_subclass(torch.Tensor), function, x, scale=2.0)


@reducing_too
def test_views_with_the_negative_bit(function, device):
    x, mask = peaked(2, 20).to(device), added(20).to(device)
    for scored in (
        {"mask": torch._neg_view(mask)},
        {"mask": mask, "scale": torch._neg_view(torch.ones(2, 1).to(device))},
    ):
        plain = {name: value.resolve_neg() for name, value in scored.items()}
        plain["mask"] = plain["mask"].nan_to_num(posinf=1.0)
        scored["mask"] = torch._neg_view(-plain["mask"]) if scored["mask"].is_neg() else plain["mask"]
        assert_scores(public(function, x, **scored), function, x, **plain)


@every_function
def test_meta_and_fake_tensors(function, device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.ones(2, 3, 20, device="meta")
    y = public(function, x, dtype=FP16, mask=torch.ones(20, device="meta"), scale=2.0, is_causal=True)
    assert (y.shape, y.dtype, y.device.type) == ((2, 3, 20), FP16, "meta")
    with FakeTensorMode() as mode:
        x, mask = (mode.from_tensor(torch.ones(shape, device=device)) for shape in ((3, 20), (20,)))
        y = public(function, x, dtype=FP16, mask=mask, scale=2.0)
    assert (y.shape, y.dtype) == ((3, 20), FP16)


@every_function
def test_autocast_gives_fp32_as_torchs_softmax_does(function, device):
    if device == "cpu":
        pytest.skip("of CUDA tensors")
    x = peaked(3, 70, FP16).to(device)
    with torch.autocast("cuda"):
        assert_scores(public(function, x, scale=0.5), function, x, dtype=FP32, scale=0.5)
        y = torch.vmap(lambda x: public(function, x, scale=0.5))(x)
    assert_scores(y, function, x, dtype=FP32, scale=0.5)


def test_cpu_tensors_take_the_same_of_torchs_operations_without_the_interpreter():
    script = """
import torch, fused_softmax
from fused_softmax.core import launch; from fused_softmax.ops.softmax import reference
def fail(*a, **k): raise AssertionError("a kernel was prepared")
launch.prepare = fail
x = torch.randn(2, 3, 40)
keep, scale = torch.rand(3, 40) > 0.5, torch.tensor([[0.5], [0.0], [-2.0]])
for name in ("softmax", "log_softmax", "logsumexp"):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for scored in (
            {"scale": 0.5}, {"scale": 0.0}, {"scale": scale}, {"mask": keep}, {"scale": 2.0, "is_causal": True},
            {"mask": torch.randn(40), "is_causal": True}, {"mask": torch.zeros(3, 1) > 0, "masked_rows": "zero"},
        ):
            ours = getattr(fused_softmax, name)(x.to(dtype), -1, **scored)
            theirs = getattr(reference, name)(x.to(dtype), -1, **scored)
            torch.testing.assert_close(ours, theirs, equal_nan=True)
            out = torch.empty(0, dtype=dtype)
            assert getattr(fused_softmax, name)(x.to(dtype), -1, out=out, **scored) is out
            assert torch.equal(out.nan_to_num(), ours.nan_to_num())
"""
    environment = {k: v for k, v in os.environ.items() if k not in ("FUSED_SOFTMAX_INTERPRET", "TRITON_INTERPRET")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Bad input.


@pytest.fixture
def no_launch(monkeypatch):
    def fail(*args, **options):
        pytest.fail("a kernel was prepared for a call that is refused")

    monkeypatch.setattr(launch, "prepare", fail)
    for torchs in (*FUNCTIONS, "logsumexp"):
        monkeypatch.setattr(reference, torchs, fail)


X = (2, 3, 4)
BAD = {
    "mask of integers": (
        {"mask": lambda d: torch.ones(4, dtype=torch.int64, device=d)}, TypeError, "mask.*bool.*int64",
    ),
    "mask of bytes": ({"mask": lambda d: torch.ones(4, dtype=torch.uint8, device=d)}, TypeError, "mask.*bool.*uint8"),
    "mask of complex numbers": (
        {"mask": lambda d: torch.ones(4, dtype=torch.complex64, device=d)}, TypeError, "mask.*bool.*complex64",
    ),
    "mask a list": ({"mask": [True] * 4}, TypeError, "mask.*Tensor.*list"),
    "mask True": ({"mask": True}, TypeError, "mask.*Tensor.*bool"),
    "mask too long": (
        {"mask": lambda d: torch.ones(5, device=d)}, ValueError, r"mask.*broadcast.*\(2, 3, 4\).*\(5,\)",
    ),
    "mask of a wrong leading dim": (
        {"mask": lambda d: torch.ones(2, 4, device=d)}, ValueError, r"mask.*broadcast.*\(2, 3, 4\).*\(2, 4\)",
    ),
    "mask of more dims": (
        {"mask": lambda d: torch.ones(1, 2, 3, 4, device=d)}, ValueError, r"mask.*broadcast.*\(2, 3, 4\).*\(1, 2, 3",
    ),
    "mask empty": ({"mask": lambda d: torch.ones(0, device=d)}, ValueError, r"mask.*broadcast.*\(2, 3, 4\).*\(0,\)"),
    "mask of another device": ({"mask": lambda d: torch.ones(4, device="meta")}, RuntimeError, "mask.*device.*meta"),
    "mask of no dims of another device": (
        {"mask": lambda d: torch.tensor(True, device="meta")}, RuntimeError, "mask.*device.*meta",
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
    "scale along dim": (
        {"scale": lambda d: torch.ones(4, device=d)}, ValueError, r"scale.*a row.*\(2, 3, 1\).*\(4,\)",
    ),
    "scale for every element": (
        {"scale": lambda d: torch.ones(2, 3, 4, device=d)}, ValueError, r"scale.*a row.*\(2, 3, 1\).*\(2, 3, 4\)",
    ),
    "scale that does not broadcast": (
        {"scale": lambda d: torch.ones(3, device=d)}, ValueError, r"scale.*broadcast.*\(2, 3, 4\).*\(3,\)",
    ),
    "scale of a wrong leading dim": (
        {"scale": lambda d: torch.ones(3, 3, 1, device=d)}, ValueError, r"scale.*broadcast.*\(2, 3, 4\).*\(3, 3, 1\)",
    ),
    "scale of another device": (
        {"scale": lambda d: torch.ones(3, 1, device="meta")}, RuntimeError, "scale.*device.*meta",
    ),
    "scale of no dims of another device": (
        {"scale": lambda d: torch.tensor(2.0, device="meta")}, RuntimeError, "scale.*device.*meta",
    ),
    "scale of 8-bit floats": (
        {"scale": lambda d: torch.ones(3, 1, device=d).to(torch.float8_e4m3fn)}, TypeError, "scale.*float8_e4m3fn",
    ),
    "is_causal 1": ({"is_causal": 1}, TypeError, "is_causal.*bool.*int"),
    "is_causal None": ({"is_causal": None}, TypeError, "is_causal.*bool.*NoneType"),
    "is_causal over another dim": (
        {"is_causal": True, "dim": 1}, ValueError, r"is_causal.*last dim.*dim=1.*\(2, 3, 4\)",
    ),
    "masked_rows a word": ({"masked_rows": "one"}, ValueError, 'masked_rows.*"nan".*"zero".*one'),
    "masked_rows None": ({"masked_rows": None}, ValueError, 'masked_rows.*"nan".*"zero".*None'),
    "masked_rows a number": ({"masked_rows": 0}, ValueError, 'masked_rows.*"nan".*"zero".*0'),
    "dim out of range": ({"dim": 3, "scale": 2.0}, IndexError, r"dim 3.*\[-3, 2\].*\(2, 3, 4\)"),
    "dtype of integers": ({"dtype": torch.int64, "scale": 2.0}, NotImplementedError, "dtype=torch.int64"),
    "out of another dtype": (
        {"scale": 2.0, "out": lambda d: torch.ones(X, dtype=FP16, device=d)}, RuntimeError, "out.*float32.*float16",
    ),
    "out of another shape": (
        {"scale": 2.0, "out": lambda d: torch.ones(4, device=d)}, RuntimeError, r"out.*\(2, 3, 4\).*\(4,\)",
    ),
}  # fmt: skip


@every_function
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_any_launch(name, function, no_launch, device):
    arguments, error, message = BAD[name]
    arguments = {key: value(device) if callable(value) else value for key, value in arguments.items()}
    with pytest.raises(error, match=f"(?s)^{function}: .*{message}"):
        public(function, torch.ones(X, device=device), **({"dim": -1} | arguments))


@every_function
@pytest.mark.parametrize("shape", [(), (5,)], ids=str)
def test_causal_needs_queries_and_keys(function, shape, no_launch, device):
    with pytest.raises(ValueError, match=rf"{function}: is_causal.*2 dims.*queries, keys.*{re.escape(str(shape))}"):
        public(function, torch.ones(shape, device=device), is_causal=True)


@every_function
@pytest.mark.parametrize("given", [torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_inputs_that_need_a_dtype_say_so(function, given, no_launch, device):
    with pytest.raises(NotImplementedError, match=f"{function}: .*{given}.*dtype"):
        public(function, torch.ones(X, device=device).to(given), scale=2.0)


@every_function
def test_out_takes_no_part_in_autograd(function, no_launch, device):
    ones = torch.ones(X, device=device)
    for x, scored in (
        (ones.clone().requires_grad_(), {"scale": 2.0}),
        (ones, {"scale": torch.ones(3, 1, device=device, requires_grad=True)}),
        (ones, {"mask": torch.ones(4, device=device, requires_grad=True)}),
        (torch._neg_view(ones.clone().requires_grad_()), {"scale": 2.0}),
    ):
        with pytest.raises(RuntimeError, match=f"{function}: out.*autograd"):
            public(function, x, out=torch.empty(X, device=device), **scored)


# Of logsumexp alone.


def test_logsumexp_into_what_its_input_is_read_from(device):
    """All that a row reads is read before any of it is overwritten, whoever else reads it too."""
    x = peaked(200, 300).to(device)
    theirs = torch.logsumexp(x, -1)
    public("logsumexp", x, out=x[-1, :200])
    torch.testing.assert_close(x[-1, :200], theirs)
    x, mask = peaked(200, 300).to(device), peaked(200, 300, seed=1).to(device)
    theirs = torch.logsumexp(x + mask, -1)
    public("logsumexp", x, mask=mask, out=mask[-1, :200])
    torch.testing.assert_close(mask[-1, :200], theirs)


@pytest.mark.parametrize("scored", [{}, {"scale": 2.0}], ids=str)
def test_logsumexp_refuses_an_out_of_another_device_before_any_launch(scored, no_launch, device):
    with pytest.raises(RuntimeError, match=r"logsumexp: out.*device.*meta"):
        public("logsumexp", torch.ones(X, device=device), out=torch.empty(2, 3, device="meta"), **scored)


def test_logsumexp_takes_no_out_where_a_gradient_is_asked_for(no_launch, device):
    x = torch._neg_view(torch.ones(X, device=device)).requires_grad_()
    with pytest.raises(RuntimeError, match=r"logsumexp: out.*autograd"):
        public("logsumexp", x, scale=2.0, out=torch.empty(2, 3, device=device))


def test_logsumexp_takes_a_dim_of_numpy_as_torch_does(device):
    x = peaked(3, 70).to(device)
    torch.testing.assert_close(public("logsumexp", x, np.int64(1)), torch.logsumexp(x, np.int64(1)))


def test_logsumexp_of_integers_with_scores_is_of_the_default_dtype_too(device):
    x = torch.arange(70, device=device).view(7, 10) % 6
    torch.testing.assert_close(public("logsumexp", x, scale=0.5), torch.logsumexp(x * 0.5, -1))
