"""Scaled, masked and causal scores, with a sink or without: every strategy and layout, held to float64."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import INTERPRETED, kernels, peaked
from contract import FAMILY, assert_scores, composed, every_function, keeping_shape, public
from products import pairwise
from scored import SCORES, added, hide, kept, on, sinks
from shapes import ALIGNMENTS, DTYPES, STRATEGIES, framed, small

from fused_softmax.core.layout import alignment_of
from fused_softmax.core.plan import H200, candidate, plan_reduction
from fused_softmax.ops.softmax import launches as softmax_rows
from fused_softmax.ops.softmax.calls import forward_by_plan
from fused_softmax.ops.softmax.launches import prepare_forward
from fused_softmax.ops.softmax.scores import Scores, scores_against

pytestmark = kernels

FP32, FP16, BF16, FP64 = DTYPES
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
every_alignment = pytest.mark.parametrize("alignment", ALIGNMENTS)


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


# Strategies, by name. Rows are [2, 2, n]: two of each sort of broadcasting.


@pairwise()
@every_strategy
@pytest.mark.parametrize(
    ("alignment", "function", "dtype"),
    [
        ("even", "softmax", FP32), ("even", "log_softmax", BF16), ("shifted", "softmax", BF16),
        ("shifted", "log_softmax", FP32), ("scalar", "softmax", FP32), ("scalar", "log_softmax", BF16),
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
    x, scored = hide(x, scored).flatten(0, 1).to(dtype), on(device, scored)
    source, target = framed(alignment, x, device=device)
    choices = {"block_rows": 2} if strategy == "tile" else {}
    x, y = run(strategy, function, source, target, (2, 2), choices=choices, **scored)
    assert_scores(y, function, x, **scored)


@pairwise()
@pytest.mark.parametrize("n_cols", [40, 613, 2500])  # several rows a program, and parts of one
@pytest.mark.parametrize("like", [4, 4096], ids=["few", "many"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP64], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_logsumexp_by_every_strategy(n_cols, like, dtype, name, device):
    scored = SCORES[name](n_cols)
    x = hide(peaked(4, n_cols).unflatten(0, (2, 2)), scored).to(dtype).to(device)
    scored = on(device, scored)
    scores, lse = Scores(**scored).exact(dtype, x.device), torch.empty(2, 2, dtype=dtype, device=device)
    held = max(dtype.itemsize, 4 if scores.added else 0)
    alignment = "even" if n_cols % 8 == 0 else "scalar"
    plan = replace(plan_reduction(like, n_cols, held, H200, alignment=alignment), n_rows=4)
    layout = scores_against(scores, tuple(x.shape))
    number = (scores.number,) if isinstance(scores.scale, float) else ()
    rows = x.flatten(0, 1)
    launch = softmax_rows.prepare_logsumexp(rows, lse, plan, layout)
    launch(rows, lse, *layout.tensors, *number)
    assert_scores(lse, "logsumexp", x, **scored)


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
            plan = candidate("row", math.prod(shape), n_cols, 4, H200, num_warps=2, prefetch=2)
            for scored in ({"scale": 0.5}, {"sink": sinks(shape[-2], 1, 1).to(device)}):
                scores = Scores(mask=mask, **scored)
                assert scores_against(scores, tuple(x.shape)).shared_dims
                y = forward_by_plan(x, plan, scores=scores)
                assert_scores(y, "softmax", x, mask=mask, **scored)


@pairwise(strength=1)
@keeping_shape
@pytest.mark.parametrize("n_keys", [2048, 1900, 1893])
def test_causal_rows_of_every_length(function, n_keys, device):
    """A row has code of its own for each quarter that its diagonal may lie in, and for what causality hides of it."""
    sees = (-3, 0, 1, 255, 256, 257, 511, 512, 513, 1024, 1025, 1536, 1537, n_keys - 1, n_keys)
    mask = kept(n_keys)
    mask[0] = True
    for scored in ({}, {"scale": -0.7}, {"mask": mask}, {"mask": added(n_keys), "masked_rows": "zero"}):
        scored = on(device, scored)
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
@keeping_shape
@pytest.mark.parametrize(("n_queries", "n_keys"), [(20, 12), (12, 20), (17, 17), (5, 131), (1, 70), (5, 613)])
@pytest.mark.parametrize(
    "scored",
    [
        {"scale": 1.5, "masked_rows": "zero"}, {"sink": sinks(2, 1, 1)}, {"sink": sinks(2, 1, 1), "scale": 0.0},
        {"sink": sinks(2, 1, 1), "scale": -0.5, "masked_rows": "zero"},
    ],
    ids=lambda scored: ", ".join(scored),
)  # fmt: skip
def test_causal_of_every_shape(strategy, function, n_queries, n_keys, scored, device):
    """Queries that see no key have a sink all the same."""
    scored = on(device, scored) | {"is_causal": True}
    x = hide(peaked(2 * n_queries, n_keys).unflatten(0, (2, n_queries)), scored).flatten(0, 1)
    source, target = framed("even" if n_keys % 4 == 0 else "shifted", x, device=device)
    choices = {"part_cols": 64} if strategy == "split" else {}
    x, y = run(strategy, function, source, target, (2, n_queries), choices=choices, **scored)
    assert_scores(y, function, x, **scored)


DTYPE_PAIRS = [
    (FP32, FP32), (FP16, FP16), (BF16, BF16), (FP64, FP64), (FP16, FP32), (BF16, FP32), (FP32, BF16), (FP32, FP16),
    (BF16, FP16), (FP64, FP32), (FP32, FP64), (BF16, FP64),
]  # fmt: skip


@pairwise()
@every_strategy
@pytest.mark.parametrize("alignment", ["even", "shifted"])
@pytest.mark.parametrize(("given", "wanted"), DTYPE_PAIRS, ids=str)
@pytest.mark.parametrize("of_sink", DTYPES, ids=str)
def test_dtypes_by_every_strategy(strategy, alignment, given, wanted, of_sink, device):
    """The input is rounded to the dtype of the result first; masks of any float dtype are added after.

    A sink is rounded to the dtype of the arithmetic, whatever the input is rounded to.
    """
    skip_impossible(strategy, given, wanted)
    n_cols = 600 if alignment == "even" else 597
    x = peaked(2, n_cols, given)
    scale = torch.tensor([[-0.8], [0.0]]).to(device)
    for function, scored in (
        ("softmax", {"mask": kept(n_cols).to(device), "scale": scale}),
        ("log_softmax", {"mask": added(2, n_cols, dtype=wanted).to(device), "scale": scale.to(FP64)}),
        ("log_softmax", {"sink": sinks(2, 1, dtype=of_sink).to(device)}),
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


by_both_arithmetics = pytest.mark.parametrize("arithmetic", ["nvidia", "other"])


@pairwise()
@by_both_arithmetics
@every_strategy
@pytest.mark.parametrize("alignment", ["even", "shifted"])
@keeping_shape
@pytest.mark.parametrize(
    "scored",
    [
        {"scale": 0.5}, {"scale": -1.0}, {"scale": 0.0}, {"masked_rows": "zero"}, {"scale": 0.0, "masked_rows": "zero"},
        {"mask": "bool", "masked_rows": "zero"}, {"mask": "added", "scale": 2.0}, {"sink": -math.inf}, {"sink": 5.0},
        {"sink": math.inf}, {"sink": math.nan},
    ],
    ids=str,
)  # fmt: skip
def test_special_values(strategy, alignment, function, scored, arithmetic, device, request):
    """One row of each kind, no two neighbours of which are alike, so that what leaves its row shows."""
    if arithmetic == "nvidia":
        request.getfixturevalue("nvidia")
    n_cols = 616 if alignment == "even" else 613
    x = peaked(len(VALUES), n_cols)
    for row, changes in enumerate(VALUES.values()):
        for cols, value in changes:
            x[row, cols] = value
    masks = {"bool": kept(n_cols), "added": added(n_cols)}
    scored = scored | ({"mask": masks[scored["mask"]].to(device)} if "mask" in scored else {})
    source, target = framed(alignment, x, device=device)
    x, y = run(strategy, function, source, target, **scored)
    counts_nothing = scored.get("sink") == -math.inf
    for row, name in enumerate(VALUES):
        try:
            for held_to in (scored, {}) if counts_nothing else (scored,):
                assert_scores(y[row], function, x[row], **held_to)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pairwise()
@by_both_arithmetics
@every_strategy
@every_alignment
@keeping_shape
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
@keeping_shape
@pytest.mark.parametrize("scale", [1e3, -1e3, 1e30, 1e-30, 1e-42], ids=str)
def test_huge_and_tiny_scales(strategy, function, scale, device):
    source, target = framed("even", peaked(3, 600), device=device)
    x, y = run(strategy, function, source, target, scale=scale)
    assert_scores(y, function, x, scale=scale)


@pytest.mark.parametrize("scale", [1e-46, 1e-50, -1e-300], ids=str)
def test_a_number_that_vanishes_in_fp32_is_no_scale_of_0(scale, device):
    """0 stands for the first maximum, and what is next to 0 for equal probabilities."""
    x = peaked(3, 60).to(device)
    for each in (scale, torch.tensor([[scale]], dtype=FP64, device=device)):
        torch.testing.assert_close(public("softmax", x, scale=each), torch.full_like(x, 1 / 60))


HEIGHTS = [0.0, 100.0, 12345.0, 3e8, 2.0**31]


@pairwise()
@every_strategy
@every_alignment
@keeping_shape
@pytest.mark.parametrize("height", HEIGHTS)
def test_high_rows_in_the_arithmetic_of_nvidia(strategy, alignment, function, height, nvidia, device):
    """How far a row stands from 0 costs nothing: z - m is exact, and log s no more than log n_cols."""
    n_cols = 616 if alignment == "even" else 613
    source, target = framed(alignment, peaked(2, n_cols) + height, device=device)
    x, y = run(strategy, function, source, target)
    assert_scores(y, function, x)


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
    x, scored = hide(peaked(4, n_cols).unflatten(0, (2, 2)), scored).flatten(0, 1), on(device, scored)
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
@every_function
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
@every_function
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "keys" not in name or "no keys" in name])
def test_scales_and_sinks_of_every_layout(layout, function, device):
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
        {"sink": scale},
        {"sink": scale, "mask": keep(3, 1, 1, 20), "scale": torch.full_like(x[..., :1], 0.5)},
    ):
        assert_scores(public(function, x, **scored), function, x, **scored)
    assert torch.equal(scale, before)


def test_a_scale_with_dims_that_do_not_coalesce_is_expanded_along_no_key(device):
    scale = torch.ones(2, 1, 2, 1, 1, device=device)
    laid_out = scores_against(Scores(scale=scale), (2, 3, 2, 3, 5000)).scale
    assert laid_out.untyped_storage().nbytes() == 36 * 4


@pairwise()
@every_function
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


@every_function
@pytest.mark.parametrize("dim", [-1, 0])
def test_a_number_in_fp64_has_64_bits(function, dim, device):
    x = peaked(5, 40, FP64).to(device)
    ours, truth = public(function, x, dim, scale=0.1), FAMILY[function].torchs(x * 0.1, dim)
    torch.testing.assert_close(ours, truth, rtol=1e-13, atol=1e-13)


@every_function
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


@keeping_shape
def test_same_inputs_give_the_same_bits(function, device):
    x = peaked(2, 3000).to(device)
    scored = {"mask": added(3000).to(device), "scale": torch.tensor([[0.3], [0.0]], device=device)}
    first = public(function, x, **scored)
    for _ in range(2 if INTERPRETED else 50):
        assert torch.equal(public(function, x, **scored), first)


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


def test_logsumexp_of_integers_with_scores_is_of_the_default_dtype_too(device):
    x = torch.arange(70, device=device).view(7, 10) % 6
    torch.testing.assert_close(public("logsumexp", x, scale=0.5), torch.logsumexp(x * 0.5, -1))


@pytest.mark.parametrize("function", ["softmax", "log_softmax", "logsumexp"])
def test_a_small_scale_is_not_0_whatever_torchs_default_dtype(function, default_dtype, device):
    x, scale = peaked(3, 40).to(device), 1e-8
    calls = {
        "kernels": lambda x: public(function, x, scale=scale),
        "torch": lambda x: composed(function, x, scale=scale),
    }
    wanted = torch.autograd.functional.jacobian(lambda x: getattr(torch, function)(x * scale, -1), x)
    default_dtype(torch.float16)
    assert 0 < wanted.abs().max() < 1e-7
    for call in calls.values():
        found = torch.autograd.functional.jacobian(call, x)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-14)
        torch.testing.assert_close(torch.func.jacrev(call)(x), wanted, rtol=1e-4, atol=1e-14)
