"""The gradients of a call whose bias has one, on sm_90: which heads' dS is kept at a time, and what is made of it.

The kernel that stores dS runs on such a GPU alone (`test_attention_hopper.py`). Here torch stands in for it.
"""

import math
from operator import itemgetter

import pytest
import torch
from attention_cases import assert_attention, qkv
from hopper_cases import on_hopper

from fused_softmax.core.route import INTERPRET
from fused_softmax.ops.attention import hopper as attention_hopper
from fused_softmax.ops.attention import hopper_bias as attention_hopper_bias
from fused_softmax.ops.attention.call import Launch
from fused_softmax.ops.attention.plan.hopper import HopperTiles

PLAN = HopperTiles(2, 64, 2, 240, 64, 64)  # of a kernel that torch stands in for


def keys_by_torch(c, plan, tensors, first_head):
    """In place of the kernel of dK and dV for sm_90: what it stores, and NaN where it stores nothing."""
    of_keys = slice(first_head, first_head + tensors["ds"].shape[1] // c.group)
    of_queries = slice(of_keys.start * c.group, of_keys.stop * c.group)

    def run(q, k, v, bias, do, rows, record, coarse, dk, dv, ds):
        k, v = (each[:, of_keys].repeat_interleave(c.group, 1) for each in (k, v))
        q, do, added = q[:, of_queries], do[:, of_queries], bias.expand(c.shape)[:, of_queries]
        lse, delta = rows.view(len(q), c.n_heads, 2, -1)[:, of_queries, :, : c.n_queries, None].unbind(2)
        hidden = torch.ones(c.n_queries, c.n_keys).triu(1).bool() & c.how.bounded
        z = ((q @ k.mT * c.how.scale + added) / math.log(2)).masked_fill(hidden, -torch.inf)
        p = torch.exp2(z - lse)
        found = p * (do @ v.mT - delta)
        ds[..., c.n_keys :] = torch.nan
        torch.where(hidden, ds[..., : c.n_keys], found, out=ds[..., : c.n_keys])
        for into, each in ((dk, found.mT @ q * c.how.scale), (dv, p.mT @ do)):
            into[:, of_keys] = each.unflatten(1, (-1, c.group)).sum(2)

    names = "q", "k", "v", "bias", "do", "rows", "record", "coarse", "dk", "dv", "ds"
    launch = Launch(run, itemgetter(*[list(tensors).index(name) for name in names]))
    return [lambda: launch]


@pytest.mark.skipif(not INTERPRET, reason="torch stands in for a kernel beside interpreted ones")
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["full", "causal"])
@pytest.mark.parametrize("shape", [(1, 6), (2, 6), (2, 1), ()], ids=str)
@pytest.mark.parametrize("room", [1, 2, 3])
def test_gradients_by_the_sum_of_ds(monkeypatch, room, shape, options):
    """Room for so many of 3 heads of keys; the last turn may have fewer."""
    turns = []

    def prepare(c, plan, tensors, first_head):
        turns.append(tensors["ds"].shape[1])
        return keys_by_torch(c, plan, tensors, first_head)

    monkeypatch.setattr(attention_hopper, "prepare_keys", prepare)
    monkeypatch.setattr(attention_hopper, "keys_plan", lambda asked: PLAN)
    monkeypatch.setattr(attention_hopper_bias, "_DS_BYTES", room * 2 * 2 * 20 * 40 * 4)
    bias = torch.randn(*shape, 20, 35, generator=torch.Generator().manual_seed(3))
    assert_attention(*qkv(20, 35, heads=6, key_heads=3), enable_gqa=True, bias=bias, **options)
    assert len(turns) == -(-3 // room)
    assert sum(turns) == 6


@pytest.mark.skipif(not INTERPRET, reason="torch stands in for a kernel beside interpreted ones")
@pytest.mark.parametrize(
    ("n_keys", "room", "shape", "options"),
    [
        (35, 1, (6,), {}), (35, 2, (1,), {"is_causal": True}), (128, 3, (1, 6), {"is_causal": True}),
        (130, 2, (6,), {}), (384, 3, (1,), {}), (384, 1, (6,), {"is_causal": True}),
    ],
    ids=str,
)  # fmt: skip
def test_few_keys_and_many_batches_take_one_read_of_ds(monkeypatch, n_keys, room, shape, options):
    """Keys in one tile, in whole ones, in tiles of which the last has 2, and more than a program goes through."""
    found, batches = [], 9

    def watched(*given):
        found.append(prepare_both(*given))
        return found[-1]

    prepare_both = attention_hopper_bias._prepare_both
    monkeypatch.setattr(attention_hopper_bias, "_prepare_both", watched)
    monkeypatch.setattr(attention_hopper, "prepare_keys", keys_by_torch)
    monkeypatch.setattr(attention_hopper, "keys_plan", lambda asked: PLAN)
    width = -(-n_keys // 8) * 8
    monkeypatch.setattr(attention_hopper_bias, "_DS_BYTES", room * batches * 2 * 70 * width * 4)
    bias = torch.randn(*shape, 70, n_keys, generator=torch.Generator().manual_seed(3))
    q, k, v = qkv(70, n_keys, lead=(batches,), heads=6, key_heads=3)
    assert_attention(q, k, v, enable_gqa=True, bias=bias, **options)
    assert len(found) == -(-3 // room)
    assert None not in found


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("shape", [(4,), (1,)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("n_keys", "dim"), [(384, 32), (300, 32), (131, 16), (256, 64), (200, 40)])
def test_one_read_of_ds_on_sm_90(monkeypatch, n_keys, dim, is_causal, shape):
    found = []
    prepare_both = attention_hopper_bias._prepare_both
    monkeypatch.setattr(
        attention_hopper_bias, "_prepare_both", lambda *of: found.append(prepare_both(*of)) or found[-1]
    )
    q, k, v = qkv(200, n_keys, lead=(9,), heads=4, dim=dim, dtype=torch.bfloat16, device="cuda")
    bias = torch.randn(*shape, 200, 384, device="cuda").bfloat16()[..., :n_keys]
    assert_attention(q, k, v, bias=bias, is_causal=is_causal)
    assert found
    assert None not in found


@pytest.mark.skipif(not INTERPRET, reason="without the interpreter a call on a CPU prepares no kernel")
def test_where_other_kernels_compute_no_room_is_made(monkeypatch):
    """It may be a GiB, on a GPU that has no kernel for it."""
    monkeypatch.setattr(attention_hopper_bias, "torch", None)
    assert_attention(*qkv(20, 35), bias=torch.randn(2, 20, 35))
