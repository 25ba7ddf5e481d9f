"""What tests of ranks that write into each other's memory share: shards of several parts, and calls."""

import torch
import torch.distributed as dist

import fused_softmax
from fused_softmax.core import route
from fused_softmax.ranks.launches import PARTS

# Of 331 columns; parts of 128.
WIDE = {1: (331,), 2: (201, 130), 3: (130, 1, 200), 4: (130, 0, 1, 200), 8: (40, 1, 0, 129, 30, 64, 3, 64)}
PART_COLS = 128


def wide_shard(whole, group):
    rank, sizes = dist.get_rank(group), WIDE[dist.get_world_size(group)]
    return whole[..., sum(sizes[:rank]) : sum(sizes[: rank + 1])].clone()


def in_parts(part_cols=PART_COLS):
    """Whether this process runs kernels, and how long the parts of a row are: None for as long as the plan has them."""
    route.INTERPRET = True
    PARTS.clear()
    if part_cols:
        PARTS["cols"] = part_cols


def over(group, columns):
    """The arguments of a call by peers, whose columns `wide_shard` has cut if they are as many."""
    sizes = WIDE[dist.get_world_size(group)]
    given = {"shard_sizes": sizes} if sizes[dist.get_rank(group)] == columns else {}
    return {"group": group, "transport": "peer", **given}


def softmax(x, group, name="softmax", **options):
    return getattr(fused_softmax, name)(x, -1, **over(group, x.shape[-1]) | options)


def loss(x, target, group, **options):
    return fused_softmax.cross_entropy(x, target, **over(group, x.shape[-1]) | options)


def finite(x):
    return bool(torch.isfinite(x).all())
