"""Entries of the registry: a draw from rows of logits."""

from typing import Any

import torch
from torch import Tensor

from fused_softmax.ops.sampling.launches import Numbers, prepare_draws
from fused_softmax.ops.sampling.options import Sampling
from fused_softmax.trace.entries.kernel import NARROW, Formula, Kernel
from fused_softmax.trace.recorder.memory import Role
from fused_softmax.trace.recorder.recorder import Recorder
from fused_softmax.trace.recorder.story import Story, Told

SEED = 3

_PLACES = frozenset({
    "calls_of", "column_of", "draw_of", "group_of", "key_of", "log2_of", "logits_of", "noise_of", "score_at",
    "score_of", "sum_of_8", "weight_at", "words_of",
})  # fmt: skip
_ROLES: dict[str, Role] = {"tokens_ptr": "output", "valid_ptr": "scratch", "scratch_ptr": "scratch"}


def _run_draw(recorder: Recorder, x: Tensor, block: int) -> dict[str, Any]:
    tokens = torch.empty(x.shape[0], dtype=torch.int64)
    draw = prepare_draws(x, Sampling(), SEED, None, tokens)
    recorder.memory.hold("x", x, "input")
    recorder.memory.hold("tokens", tokens, "output")
    with recorder:
        draw(x, Numbers(1.0, None, None, None, SEED, None), None, None, None, tokens)
    return {"temperature": 1.0, "seed": SEED, "position": "i in row i"}


DRAWS = (
    Kernel(
        name="draw",
        title="a token from a row of logits",
        summary="The row is read once. Eight columns are one group: it is drawn by the logarithm of its weights' sum "
        "and noise of its own, so that eight columns share one. The greatest score wins. Its group's columns are read "
        "again and drawn alike, by noise that the seed, the position and the column give. A lane has the same eight "
        "columns in each of four quarters of 1024; a row of up to 1024 columns lies in the first.",
        operation="sample",
        run=_run_draw,
        formula=Formula(1, 0, read_m=9, written_m=1),
        story=Story(
            {
                "_draw": Told(
                    {"find the row": "program = tl.program_id", "token": "if K.split"},
                    row="draw",
                    m=(),
                    s=(),
                    notes={
                        "origin = tl.where": "Scores are differences from one logit of the row: it need not be the "
                        "maximum, which nobody knows yet."
                    },
                    silent=("part = ", "start = ", "end = "),
                ),
                "best_group": Told(
                    {"load": "best = tl.full", "best group": "most = tl.where"},
                    notes={"key = tl.max": "A key orders scores, and of equal ones takes the lower group."},
                    silent=("best = tl.full", "at = tl.zeros", "odd = tl.zeros", "whole = ", "most = "),
                ),
                "take_groups": Told(
                    {"load": "words = words_of", "sum": "m = tl.max", "noise": "score = (m", "keep": "odd = tl.where"},
                    notes={
                        "s = sum_of_8": "The weights of a group's eight columns, added up.",
                        "score = (m": "Gumbel noise: a group wins as often as its weights are of the whole sum.",
                    },
                    silent=("all_words = ", "score = tl.where", "odd = tl.where"),
                ),
                "with_token": Told({"draw in the group": "if (key"}, silent=("key = ",)),
                "member_of": Told(
                    {"draw in the group": "cols = group"},
                    notes={"drawn = tl.where(x == NEG_INF": "Each column of the group has noise of its own."},
                    silent=("drawn = tl.where(D.temperature",),
                ),
                "finish_draw": Told(
                    {"token": "valid = D.valid"}, silent=("valid = D.valid", "token = tl.zeros", "score = score_of")
                ),
            },
            phases=("find the row", "load", "sum", "noise", "keep", "best group", "draw in the group", "token"),
            roles=_ROLES,
            unset=frozenset({"valid_ptr"}),
            step_over=_PLACES,
        ),
        block=False,
        dtypes=NARROW,
    ),
)
