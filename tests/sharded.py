"""What tests of rows in shards share: the shards, logits, and comparisons with one process."""

import math

import torch
import torch.distributed as dist

from fused_softmax.core import route

INF = math.inf

# Uneven, and of 0 and 1 columns.
SIZES = {1: (37,), 2: (30, 7), 3: (12, 1, 24), 4: (5, 0, 15, 17)}
ALL_SIZES = SIZES | {8: (5, 0, 1, 9, 7, 0, 3, 12)}  # eight ranks have tests of their own

N_ROWS, N_CLASSES = 9, 37

WAYS = ["kernels", "torch"]
INDICES = torch.zeros(2, dtype=torch.long)


def shard(whole, group, dim):
    """This rank's columns, as memory of its own."""
    rank, sizes = dist.get_rank(group), ALL_SIZES[dist.get_world_size(group)]
    return whole.narrow(dim, sum(sizes[:rank]), sizes[rank]).clone()


def over(group):
    """The arguments of a call whose columns `shard` has cut."""
    return {"group": group, "shard_sizes": ALL_SIZES[dist.get_world_size(group)]}


def by(way):
    """Whether this process runs kernels, from here on."""
    route.INTERPRET = way == "kernels"


def logits(rows=N_ROWS, columns=N_CLASSES, seed=0):
    return 3 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(found, wanted, tolerance=1e-5):
    torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def same_on_all(found):
    """What the ranks gave, which is one and the same to the bit."""
    for each in found[1:]:
        for ours, first in zip(each, found[0], strict=True):
            assert torch.equal(ours.isnan(), first.isnan())
            assert torch.equal(ours.nan_to_num(), first.nan_to_num())
    return found[0]


def flat(output):
    """The tensors that a loss gave, the differentiable ones first."""
    if isinstance(output, torch.Tensor):
        return [output]
    return [each for each in (*output[:3], *(output.token_stats or ())) if each is not None]


def graded_of(output):
    """The tensors that a loss gave and that have a gradient: statistics only say that they have none."""
    of_loss = [output] if isinstance(output, torch.Tensor) else output[:3]
    return [each for each in of_loss if each is not None and each.requires_grad]


def differentiated(output, x, of):
    """What a loss gave, and the gradient of x by numbers that tell its parts apart."""
    tensors = flat(output)
    graded = graded_of(output)
    parts = [of * torch.linspace(0.5, 1.5, each.numel()).view(each.shape).to(each) for each in graded]
    (dx,) = torch.autograd.grad(graded, [x], parts)
    return *[each.detach() for each in tensors], dx
