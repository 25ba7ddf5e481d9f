"""Entries of the registry: attention's forward pass, causal, of one head.

The planner's tiles have at least 16 rows, which tensor cores need. These have `block`, as the other entries' tiles do.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_softmax.ops.attention.kernels.forward import _attention
from fused_softmax.ops.attention.kernels.spec import AttentionSpec
from fused_softmax.ops.attention.options import MOST_DIM
from fused_softmax.trace.entries.kernel import NARROW, Kernel
from fused_softmax.trace.recorder.encode import dtype_name
from fused_softmax.trace.recorder.memory import MOST_ELEMENTS
from fused_softmax.trace.recorder.recorder import Recorder
from fused_softmax.trace.recorder.story import Story, Tile, Told

SCALE = math.log(2)  # scores count in powers of 2, so the kernel, which computes exp as exp2, holds them as they are
MOST_TOKENS = math.isqrt(MOST_ELEMENTS)

_PLACES = frozenset(
    {"dense_head", "keys_seen", "load_tile", "origin_in_log2", "place_of", "store_tile", "unit_at", "unit_of"}
)


def _check(x: Tensor) -> None:
    n_tokens, n_cols = x.shape
    if n_cols % 3 or n_cols > 3 * MOST_DIM:
        raise ValueError(
            f"attention takes a row for each token, with its query, key and value side by side: 3, 6, 9, ... columns, "
            f"{3 * MOST_DIM} at most, but the matrix has {n_cols}"
        )
    if n_tokens > MOST_TOKENS:
        raise ValueError(f"attention takes up to {MOST_TOKENS} tokens, one a row, but the matrix has {n_tokens}")


def _run(recorder: Recorder, x: Tensor, block: int) -> dict[str, Any]:
    (n, n_cols), memory = x.shape, recorder.memory
    dim = n_cols // 3
    q, k, v = (each.contiguous() for each in x.split(dim, 1))
    output, lse = torch.empty_like(v), torch.empty(n)
    memory.imagine("z", n, n)
    memory.hold("q", q, "input", along="rows")
    memory.hold("k", k, "input", along="cols")
    memory.hold("v", v, "input", along="cols")
    memory.imagine("o", n, dim)
    memory.hold("output", output, "output", along="rows")
    memory.hold("lse", lse, "output", along="rows")
    block_d = triton.next_power_of_2(dim)
    spec = AttentionSpec(
        block_m=block, block_n=block, head_dim=dim, value_dim=dim, block_d=block_d, block_v=block_d,
        dtype=getattr(tl, dtype_name(x.dtype)), right=n > 1, ragged=n % block != 0, folds=True,
    )  # fmt: skip
    strides = (n * dim, n * dim, n * dim, dim)
    with recorder:
        _attention[(triton.cdiv(n, block),)](
            q, k, v, None, None, None, None, output, lse, None, None, strides, strides, strides, None, None, None,
            1, 1, 1, n, n, 0, 0, 0, SCALE, 1.0, K=spec,
        )  # fmt: skip
    return {"causal": True, "scale": "ln 2", "base": 2}


ATTENTION = (
    Kernel(
        name="attention",
        title="causal, of rows that hold query, key and value side by side",
        summary="A program has a tile of queries, and the keys go by in blocks. Scores z stay in registers. Whenever "
        "their maximum m rises, the sum s and the output o so far are multiplied by one weight. Blocks after all "
        "queries of a tile are skipped. The scale is ln 2, so a weight is 2 to the power of its score. On a GPU tiles "
        "have at least 16 rows.",
        operation="attention",
        run=_run,
        check=_check,
        formula="q once; k and v once for each tile of queries that sees them; output and lse once",
        story=Story(
            {
                "_attention": Told(
                    {
                        "find the tile": "program = tl.program_id",
                        "query": "q = load_tile",
                        "keys": "begin, cut, end",
                        "output": "store_rows(",
                    },
                    row="first + rows",
                    m=("top",),
                    notes={
                        "tile = n_tiles": "The last tile of queries sees most keys, so it goes first.",
                        "top = tl.full": "No key is known yet: the maximum is -inf, the sum and the output are 0.",
                        "begin, cut, end": "All queries of the tile see the keys before `cut`, none of them sees those "
                        "from `end` on: their blocks are skipped.",
                    },
                    silent=(
                        "BLOCK_M",
                        "BLOCK_V",
                        "A = Added",
                        "S = Sizes",
                        "place = ",
                        "q_head",
                        "k_head",
                        "v_head",
                        "m = top",
                        "t = tl.zeros",
                        "at = ",
                        "valid = ",
                    ),
                    unused=("m", "t"),
                ),
                "visit": Told(
                    {"keys": "for start in"},
                    row="first + rows",
                    m=("top",),
                    silent=("BLOCK_N", "top, m, s, t, o = add_keys", "return top, m, s, t, o"),
                    unused=("m", "t", "EDGE"),
                    state=True,
                    tiles={"o": Tile("o", "first + rows")},
                ),
                "add_keys": Told(
                    {
                        "keys": "k = load_tile",
                        "scores": "T = Tile",
                        "maximum": "top = ",
                        "weights": "unit = ",
                        "sum": "s = s * weight",
                        "values": "v = load_tile",
                        "rescaled output": "o = tl.dot",
                    },
                    row="first + rows",
                    m=("top",),
                    notes={
                        "top = ": "The maximum of the scores so far, this block's among them.",
                        "unit = ": "What turns scores into powers of 2: 1, because the scale is ln 2.",
                        "new = top * unit": "The maximum in powers of 2, here the maximum itself. The next block has "
                        "it as `m`.",
                        "p = ": "What each key counts: 2 to the power of its score, against the maximum.",
                        "weight = ": "What has been added up so far is of the old maximum. This corrects it; it is 1 "
                        "where the maximum has not risen.",
                        "s = s * weight": "The old sum, corrected, and this block's weights.",
                        "o = tl.dot": "The old output, corrected as the sum is, and this block's values by their "
                        "weights.",
                    },
                    silent=("BLOCK_N", "GUARD", "T = Tile", "return top, new, s, t, o"),
                    unused=("t", "EDGE", "S.n_keys", "_"),
                    state=True,
                    tiles={"o": Tile("o", "first + rows")},
                ),
                "scores_of": Told(
                    {"scores": "rows, cols = "},
                    notes={
                        "z = tl.where(cols <= rows": "A key after its query is hidden: its score becomes -inf, so that "
                        "its weight is 0.",
                    },
                    silent=("c = qk", "return z, c"),
                    unused=("A.scale", "A.cap", "S.left", "S.n_queries"),
                    tiles={"z": Tile("z", "rows", "cols")},
                ),
                "store_rows": Told(
                    {"output": "o = o / "},
                    notes={"o = o / ": "The sum divides once, at the end, and not in every block."},
                    silent=("rows = ",),
                    unused=("n", "unit"),
                ),
            },
            step_over=_PLACES,
        ),
        dtypes=NARROW,
    ),
)
