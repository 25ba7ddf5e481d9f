"""Draws of filtered rows that need no boundary, of torch's operations: the first arrival that the filters keep.

The 32 columns of a Philox call (`noise`) are a lane. A lane is a Poisson process of arrivals whose rate is the weight w
of its columns. The time of its first arrival is the least E / (sum of w) of its four groups. The time from each arrival
to the next is drawn in the same way, with the noise of another turn. An arrival's column is drawn from its group.
Arrivals of all lanes in the order of time are independent draws from w (Kingman, "Poisson Processes", 1993,
superposition and marking), and the first is what `noise.draw` gives. The first that is kept is a draw from what is kept
(rejection sampling, von Neumann, 1951).

ARRIVALS of a row are drawn. An arrival is judged if it is above all earlier ones in the order of the filters, because
what is below a rejected column is rejected too; RECORDS are judged at most. If all are rejected, the row is drawn from
again, above the last one that was rejected, which has the same distribution. After RETRIES such draws, what is kept is
computed and drawn from.
"""

import torch
from torch import Tensor

from fused_softmax.core.route import readable
from fused_softmax.ops.sampling import noise

ARRIVALS, RECORDS, RETRIES = 8, 4, 16
_LANE, _QUARTER, _STRETCH = noise.APART, noise.APART * noise.GROUP, noise.APART * noise.GROUP * noise.WORDS


def draw_first(
    x: Tensor, weights: Tensor, kept: Tensor, possible: Tensor, seed: Tensor, position: Tensor
) -> Tensor:  # fmt: skip
    """A column of each row for seeds and positions [n]: int64 [n].

    x [n, n_cols]: the order of columns, descending; of equal ones the lowest first. weights: float64, not negative, of
    all columns. kept: which of them filters keep, a prefix of that order. possible: a prefix too, as long or longer.
    Columns beyond it, such as those that min-p rejects, are not judged. A row is drawn from it again if all arrivals
    are rejected.
    """
    tokens, cut, is_cut, open_ = _first_arrivals(x, weights, kept, possible, seed, position)
    here = readable(open_)
    for turn in range(ARRIVALS, ARRIVALS + RETRIES + 1):
        if here and not open_.any():  # on a device this would wait
            break
        within = kept if turn == ARRIVALS + RETRIES else possible & (_is_above(x, cut) | ~is_cut[:, None])
        drawn = noise.draw(torch.where(within, weights, 0.0), seed, position, turn=turn)
        tokens = torch.where(open_, drawn, tokens)
        cut, is_cut = torch.where(open_, drawn, cut), is_cut | open_
        open_ = open_ & ~kept.gather(1, drawn[:, None]).squeeze(1)
    return tokens


def _first_arrivals(
    x: Tensor, weights: Tensor, kept: Tensor, possible: Tensor, seed: Tensor, position: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(the first kept arrival, the greatest judged and rejected one, whether one is kept, whether all were judged).

    Each is [n].
    """
    n_stretches = -(-weights.shape[1] // _STRETCH)
    padded = torch.nn.functional.pad(weights, (0, n_stretches * _STRETCH - weights.shape[1]))
    groups = noise.sum_of_groups(padded.unflatten(1, (n_stretches, noise.WORDS, _LANE, noise.GROUP)))
    groups = groups.transpose(2, 3).flatten(1, 2)  # [n, lanes, words]
    lanes = torch.arange(groups.shape[1], device=weights.device)
    words = noise.words_at(seed, position, lanes, noise.GROUPS)
    gaps = torch.stack([noise.exponential(words, j) for j in range(noise.WORDS)], -1) / groups
    time, which = gaps.min(2)
    turns = torch.zeros_like(which)
    tokens = cut = torch.zeros_like(seed)
    open_ = torch.ones_like(seed, dtype=torch.bool)
    n_records = torch.zeros_like(seed)
    for _ in range(ARRIVALS):
        lane = time.argmin(1, keepdim=True)
        turn = turns.gather(1, lane)
        first = lane // _LANE * _STRETCH + which.gather(1, lane) * _QUARTER + lane % _LANE * noise.GROUP
        cols = first + torch.arange(noise.GROUP, device=lane.device)
        words = noise.words_at(seed, position, cols, noise.MEMBERS, turn.expand_as(cols))
        member = (padded.gather(1, cols) / noise.exponential(words, 0)).argmax(1, keepdim=True)
        col = cols.gather(1, member)
        is_above = (n_records == 0) | _is_above(x, cut).gather(1, col).squeeze(1)
        is_record = open_ & is_above & (n_records < RECORDS) & possible.gather(1, col).squeeze(1)
        col = col.squeeze(1)
        tokens = torch.where(is_record, col, tokens)
        cut = torch.where(is_record, col, cut)
        n_records = n_records + is_record
        open_ = open_ & ~(is_record & kept.gather(1, col[:, None]).squeeze(1))
        words = noise.words_at(seed, position, lane, noise.GROUPS, turn + 1)
        gap = torch.cat([noise.exponential(words, j) for j in range(noise.WORDS)], 1)
        gap, word = (gap / groups.gather(1, lane[:, :, None].expand(-1, -1, noise.WORDS)).squeeze(1)).min(
            1, keepdim=True
        )
        time = time.scatter_add(1, lane, gap)
        which, turns = which.scatter(1, lane, word), turns.scatter(1, lane, turn + 1)
    return tokens, cut, n_records > 0, open_


def _is_above(x: Tensor, col: Tensor) -> Tensor:
    """Bool [n, n_cols]: which columns come before a column of each row."""
    value = x.gather(1, col[:, None])
    before = torch.arange(x.shape[1], device=x.device) < col[:, None]
    return (x > value) | ((x == value) & before)
