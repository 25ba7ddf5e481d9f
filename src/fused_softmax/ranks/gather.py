"""What ranks tell each other of rows by memory that their GPUs write into each other's: an all_gather in one launch.

It stands for the group's backend in whatever `distributed.gather` is called for.
"""

import zlib
from functools import partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fused_softmax.core.calls import kept
from fused_softmax.core.kernels.spec import Spec
from fused_softmax.core.launched import Launched
from fused_softmax.core.route import watcher_of
from fused_softmax.core.runner import has_ptx, prepare
from fused_softmax.ranks.groups import Shards
from fused_softmax.ranks.launches import allocator
from fused_softmax.ranks.peers import Peers, choose

_LANES = 512  # numbers of 32 bits a program


def peers_of(name: str, transport: Any, group: Any, *tensors: Tensor) -> Peers | None:
    """By which memory the ranks of a call, which begins here, tell each other of its tensors; None for a collective."""
    if transport == "collective":
        return None
    watcher = watcher_of(*tensors)
    hindrance = None if watcher is None else watcher.reason
    peers = choose(name, transport, group, tensors[0].device, hindrance)
    if peers is not None:
        peers.ready(name)
    return peers


def told_by(peers: Peers | None, name: str, shards: Shards) -> Shards:
    """These shards, whose ranks tell each other by peers."""
    return shards if peers is None else shards._replace(by_peers=partial(_gathered, peers, name))


def _gathered(peers: Peers, name: str, message: Tensor, shards: Shards) -> Tensor:
    """[ranks, *message.shape], as `distributed.gather`; NaN where a rank says nothing, or asks for something else."""
    peers.in_turn()
    words = message.contiguous().view(-1).view(torch.int32)
    asked = name, shards.sizes, shards.n_classes, shards.digest, message.shape, message.dtype
    options = peers.number, *asked
    call = kept("gather by peers", options, (words,), _prepare, words, message, asked, peers, shards.group)
    return call(peers, shards.group, words).view(-1).view(message.dtype).view(-1, *message.shape)


def _prepare(words: Tensor, message: Tensor, asked: tuple, peers: Peers, group: Any) -> Launched:
    """call(peers, group, words) -> those of all ranks [ranks, n]"""
    from fused_softmax.ranks.kernels import _peer_gather

    device, n, empty = words.get_device(), len(words), allocator(words.device)
    programs, slots_per_program = -(-n // _LANES), peers.ranks * _LANES
    spec = Spec(
        block_cols=1, pieces=1, vector=1, cast_dtype=tl.float32, ptx=has_ptx(device), lanes=_LANES, peers=True
    )  # fmt: skip
    region = peers.region(group, slots_per_program, programs)
    values = {
        "n": n, "n_rows": message.shape[-1], "words": n // message.numel(), "rank": peers.rank,
        "ranks": peers.ranks, "digest": zlib.crc32(repr(asked).encode()) & 0x7FFFFFFF, "set_size": region.set_size,
    }  # fmt: skip
    heard = empty((peers.ranks, n), (n, 1), torch.int32)
    tensors = {"slots": region.slots, "bases": region.bases, "asked": region.asked, "own": words, "heard": heard}
    run = prepare(
        _peer_gather, None, spec, tensors, values, device=device, numbers=("set_size",),
        programs=lambda plan: programs, num_warps=4,
    ).__call__  # fmt: skip

    def call(peers, group, words):
        region = peers.of_launch(group, slots_per_program, programs)
        heard = empty((peers.ranks, n), (n, 1), torch.int32)
        run(region.slots, region.bases, region.asked, words, heard, region.set_size)
        return heard

    return Launched(call)
