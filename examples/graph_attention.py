"""Train a small graph attention network, whose nodes must find out which of their neighbours tell the truth.

Each node has a colour that nobody tells it. Its neighbours say one each: those that have a badge say the right one, and
the others any. A mean over all neighbours is wrong often; attention learns to look at badges. It is a softmax over the
edges that end at each node, of which some have one and some have hundreds: segment_softmax, without padding.

It prints the loss and the share of the nodes that know their colour, before the first step and after the last. It takes
about 3 s on two CPU cores.

    python examples/graph_attention.py
    python examples/graph_attention.py --nodes 100000 --edges 5000000 --heads 8   # on a GPU
"""

import argparse
from dataclasses import dataclass

import options
import torch
from options import whole
from torch import Tensor, nn

from fused_softmax import segment_softmax

COLOURS, BADGES = 5, 0.3  # how many there are, and the part of the neighbours that have one


@dataclass
class Graph:
    """said: [edges, COLOURS + 1], what comes along each edge, and whether with a badge. Edges are in order of `end`.

    offsets: [nodes + 1], where each node's edges begin. colours: [nodes].
    """

    said: Tensor
    end: Tensor
    offsets: Tensor
    colours: Tensor


def graph(nodes: int, edges: int, device: str) -> Graph:
    """Few nodes have most of the edges, as in graphs of citations; every node has one with a badge."""
    generator = torch.Generator().manual_seed(0)
    hubs = (torch.rand(edges, generator=generator) ** 3 * nodes).long().clamp(max=nodes - 1)
    end = torch.cat([torch.arange(nodes), hubs]).sort().values
    colours = torch.randint(COLOURS, (nodes,), generator=generator)
    badge = torch.rand(len(end), generator=generator) < BADGES
    badge[torch.searchsorted(end, torch.arange(nodes))] = True
    anything = torch.randint(COLOURS, (len(end),), generator=generator)
    said = nn.functional.one_hot(torch.where(badge, colours[end], anything), COLOURS)
    offsets = torch.searchsorted(end, torch.arange(nodes + 1))
    said = torch.cat([said, badge[:, None]], 1).float()
    return Graph(*(each.to(device) for each in (said, end, offsets, colours)))


class Attention(nn.Module):
    """What comes along the edges of a node, weighted by a softmax of scores: [nodes, COLOURS]."""

    def __init__(self, heads: int):
        super().__init__()
        self.scores = nn.Linear(COLOURS + 1, heads)
        self.values = nn.Linear(COLOURS + 1, COLOURS * heads)
        nn.init.zeros_(self.scores.weight)  # a mean over all neighbours, to begin with

    def forward(self, graph: Graph) -> Tensor:
        weights = segment_softmax(self.scores(graph.said), graph.offsets)  # [edges, heads]
        values = self.values(graph.said).unflatten(1, (-1, COLOURS))
        told = (weights[..., None] * values).sum(1)
        return torch.zeros(len(graph.colours), COLOURS, device=told.device).index_add(0, graph.end, told)


def train(given: argparse.Namespace) -> tuple[float, float]:
    """The parts of the nodes that knew their colours before and after."""
    torch.manual_seed(0)
    of = graph(given.nodes, given.edges, given.device)
    model = Attention(given.heads).to(given.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    right = []
    for step in range(given.steps + 1):
        logits = model(of)
        loss = nn.functional.cross_entropy(logits, of.colours)
        if step in (0, given.steps):
            right.append((logits.argmax(1) == of.colours).float().mean().item())
            print(f"step {step}: loss {loss.item():.4f}, {right[-1]:.1%} of the nodes know their colour")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return right[0], right[-1]


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    parser = options.Parser(__doc__)
    parser.add_argument("--steps", type=whole(), default=100)
    parser.add_argument("--nodes", type=whole(), default=500)
    parser.add_argument("--edges", type=whole(), default=5000)
    parser.add_argument("--heads", type=whole(), default=2)
    parser.add_argument("--device", type=options.device, default=options.BEST_DEVICE)
    return train(parser.parse(arguments))


if __name__ == "__main__":
    main()
