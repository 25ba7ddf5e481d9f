"""The gradients of a call whose bias has one, on sm_90: which heads' dS is kept at a time, and what is made of it.

The kernel that stores dS runs on such a GPU alone (`test_attention_hopper.py`). Here torch stands in for it.
"""

import math

import pytest
import torch
from attention_cases import assert_attention, qkv

from fused_softmax.ops import attention_hopper, attention_hopper_bias
from fused_softmax.route import INTERPRET


def keys_by_torch(c, read, bias, do, rows, dk, dv, ds=None, first_head=0):
    """In place of the kernel of dK and dV for sm_90: what it stores, and NaN where it stores nothing."""
    if ds is None:
        return None
    of_keys = slice(first_head, first_head + ds.shape[1] // c.group)
    of_queries = slice(of_keys.start * c.group, of_keys.stop * c.group)

    def run(q, k, v, bias, do, rows, dk, dv, ds):
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

    return run


@pytest.mark.skipif(not INTERPRET, reason="torch stands in for a kernel beside interpreted ones")
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["full", "causal"])
@pytest.mark.parametrize("shape", [(1, 6), (2, 6), (2, 1), ()], ids=str)
@pytest.mark.parametrize("room", [1, 2, 3])
def test_gradients_by_the_sum_of_ds(monkeypatch, room, shape, options):
    """Room for so many of 3 heads of keys; the last turn may have fewer."""
    turns = []

    def prepare(*given):
        turns.append(given[7:])
        return keys_by_torch(*given)

    monkeypatch.setattr(attention_hopper, "prepare_keys", prepare)
    monkeypatch.setattr(attention_hopper, "takes", lambda *_: True)
    monkeypatch.setattr(attention_hopper_bias, "_DS_BYTES", room * 2 * 2 * 20 * 40 * 4)
    bias = torch.randn(*shape, 20, 35, generator=torch.Generator().manual_seed(3))
    assert_attention(*qkv(20, 35, heads=6, key_heads=3), enable_gqa=True, bias=bias, **options)
    assert len(turns) == -(-3 // room)
    assert sum(ds.shape[1] for ds, _ in turns) == 6


@pytest.mark.skipif(not INTERPRET, reason="without the interpreter a call on a CPU prepares no kernel")
def test_where_other_kernels_compute_no_room_is_made(monkeypatch):
    """It may be a GiB, on a GPU that has no kernel for it."""
    monkeypatch.setattr(attention_hopper_bias, "torch", None)
    assert_attention(*qkv(20, 35), bias=torch.randn(2, 20, 35))
