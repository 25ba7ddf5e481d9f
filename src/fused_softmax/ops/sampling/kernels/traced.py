"""Drafts whose distribution is not given: the noise of their rows, and which drafts are the target's own tokens."""

import triton
import triton.language as tl

from fused_softmax.ops.sampling.kernels.verified import (
    PARENT,
    PARENTS,
    SEEDS,
    drafts_of,
    position_of,
)


@triton.jit
def _place(parents_ptr, seed_ptr, position_ptr, seeds_ptr, positions_ptr, strides, K: tl.constexpr):
    """The seed and the position of each row of the target.

    The position is that of the sequence plus the number of drafts that lead to the row.
    """
    sequence = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, K.most)
    depth = i
    if parents_ptr is not None:
        depth = i * 0
        for j in range(K.rows - 1):
            parent = tl.load(parents_ptr + sequence * strides[PARENTS] + j * strides[PARENT]).to(tl.int32)
            row = tl.where((parent >= -1) & (parent < j), parent + 1, 0)
            depth = tl.where(i == j + 1, tl.sum(tl.where(i == row, depth, 0), axis=0) + 1, depth)
    seed = tl.load(seed_ptr + sequence * strides[SEEDS])
    tl.store(seeds_ptr + sequence * K.rows + i, seed + tl.full([K.most], 0, tl.int64), mask=i < K.rows)
    at = position_of(position_ptr, sequence, strides) + depth
    tl.store(positions_ptr + sequence * K.rows + i, at, mask=i < K.rows)


@triton.jit(do_not_specialize=["n_cols"])
def _trace(
    own_ptr, own_valid_ptr, own_logprobs_ptr, drafts_ptr, lengths_ptr, parents_ptr, tokens_ptr, n_accepted_ptr,
    valid_ptr, logprobs_ptr, nodes_ptr, strides, n_cols, K: tl.constexpr,
):  # fmt: skip
    """The drafts that are the target's own tokens, and the token after them; of a tree, the path of these."""
    sequence = tl.program_id(0).to(tl.int64)
    F = drafts_of(drafts_ptr, lengths_ptr, parents_ptr, strides, sequence, n_cols, K)
    i = F.i
    at, on = sequence * K.rows + i, i < K.rows
    own = tl.load(own_ptr + at, mask=on, other=0)
    valid = ((tl.load(own_valid_ptr + at, mask=on, other=0) > 0) & F.right).to(tl.int32)
    path = i
    if parents_ptr is None:
        accepted = F.there & (valid > 0) & (own == F.col)
        n = tl.min(tl.where(accepted, K.most, i), axis=0)
    else:
        parent = tl.load(
            parents_ptr + sequence * strides[PARENTS] + i * strides[PARENT], mask=i < K.rows - 1, other=-1
        )  # fmt: skip
        of_row = tl.where(F.there, parent.to(tl.int32) + 1, -1)
        path = i * 0
        n, row = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
        for j in range(K.rows - 1):
            here = i == row
            its_own = tl.sum(tl.where(here, own, 0), axis=0) == tl.sum(tl.where(i == j, F.col, 0), axis=0)
            taken = its_own & (tl.max(tl.where(i == j, of_row, -1), axis=0) == row)
            taken = taken & (tl.sum(tl.where(here, valid, 0), axis=0) > 0)
            n = tl.where(taken, n + 1, n)
            row = tl.where(taken, j + 1, row)
            path = tl.where(taken & (i == n), row, path)
        nodes = tl.where(i < n, tl.gather(path, tl.minimum(i + 1, K.most - 1), axis=0) - 1, -1)
        tl.store(nodes_ptr + sequence * (K.rows - 1) + i, nodes.to(tl.int64), mask=i < K.rows - 1)
    own, valid = tl.gather(own, path, axis=0), tl.gather(valid, path, axis=0)
    tokens = tl.where(i < n, own, tl.where(i == n, tl.where(valid > 0, own, 0), -1))
    tl.store(tokens_ptr + at, tokens, mask=on)
    there = tl.sum(tl.where(i == n, valid, 0), axis=0)
    tl.store(n_accepted_ptr + sequence, n.to(tl.int64))
    tl.store(valid_ptr + sequence, (there > 0).to(tl.int8))
    if logprobs_ptr is not None:
        logprobs = tl.gather(tl.load(own_logprobs_ptr + at, mask=on, other=0.0), path, axis=0)
        told = (i < n) | ((i == n) & (there > 0))
        tl.store(logprobs_ptr + at, tl.where(told, logprobs, float("nan")), mask=on)
