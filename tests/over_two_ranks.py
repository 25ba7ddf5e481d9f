"""The operators on a DTensor over two ranks, on CPU tensors in Triton's interpreter; run by test_library."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import fused_softmax
from fused_softmax.core import calls, launch


def run(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        check(init_device_mesh("cpu", (2,)))
    finally:
        dist.destroy_process_group()


def tiny(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


def check(mesh):
    x = tiny(3, 4, 6)  # three rows are shards of two and of one
    ran, prepare = [], launch.prepare
    launch.prepare = lambda kernel, *a, **k: ran.append(kernel) or prepare(kernel, *a, **k)

    def outcome(function, placement, dim):
        shards = distribute_tensor(x, mesh, [placement]).requires_grad_()
        with CommDebugMode() as communication:
            y = function(shards, dim)
        dy = distribute_tensor(tiny(*y.shape, seed=1), mesh, y.placements)
        return y, *torch.autograd.grad(y, shards, dy), communication.get_total_counts()

    for name in ("softmax", "log_softmax", "logsumexp"):
        for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
            calls.forget()
            ours, dx_ours, moves = outcome(getattr(fused_softmax, name), placement, 1)
            assert ran, "no kernel ran"
            ran.clear()
            theirs, dx_theirs, torchs = outcome(getattr(torch, name), placement, 1)
            where = f"{name}, {placement}"
            assert ours.placements == theirs.placements, where
            assert moves == torchs == (placement == Shard(1)), where
            assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride()), where
            assert dx_ours.placements == (placement,), where
            torch.testing.assert_close(ours.full_tensor(), theirs.full_tensor())
            torch.testing.assert_close(dx_ours.full_tensor(), dx_theirs.full_tensor())

    shards = distribute_tensor(x, mesh, [Shard(1)])
    causal = fused_softmax.softmax(shards, -1, scale=0.5, is_causal=True)  # a row needs its number among all queries
    torch.testing.assert_close(causal.full_tensor(), fused_softmax.softmax(x, -1, scale=0.5, is_causal=True))
    assert fused_softmax.logsumexp(shards, (0, 2), keepdim=True).placements == (Shard(1),)
    assert fused_softmax.logsumexp(shards, (0, 2)).placements == (Shard(0),)
    sums = shards.sum(1)
    assert sums.placements == (Partial(),)
    torch.testing.assert_close(fused_softmax.softmax(sums, -1).full_tensor(), torch.softmax(x.sum(1), -1))
