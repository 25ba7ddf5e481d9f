"""Train a small encoder with a learned relative position bias twice, by torch's attention and by ours, and draw both.

The bias is T5's: a table gives each head a number for every distance between two tokens, and each layer adds it to its
scores. Each target is the token some places before, and tokens know no positions. So only the bias can tell where to
look, and the loss falls only as far as its gradient is right. Both runs begin with the same weights and see the same
tokens. Their curves should coincide; the picture also shows the table that was learnt, a line for each head.

It prints the first and the last loss of each run and the milliseconds of a step, and how far losses and tables are
apart. It takes about 5 s on two CPU cores.

    python examples/attention_bias.py -o attention_bias.png
    python examples/attention_bias.py --length 1024 --heads 12 --dim 64 --batch 16 --dtype bfloat16   # T5's, on a GPU

Needs altair, which the extra `cli` installs. Without a GPU both are torch's operations, and the time shows nothing.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import options
import torch
from options import whole
from torch import Tensor, nn

from fused_softmax import attention

BACK = 3  # the places between a target and the token that it is
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass
class Run:
    """The loss of every step, the seconds of a step at the median, and the table as learnt, [heads, distances]."""

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    table: Tensor = field(default_factory=lambda: torch.empty(0))


def by_torch(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """A bias is a float mask here."""
    return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0)


def by_us(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return attention(query, key, value, bias=bias, scale=1.0)


WAYS: dict[str, Attend] = {"torch: scaled_dot_product_attention": by_torch, "fused_softmax: attention": by_us}


class Layer(nn.Module):
    def __init__(self, heads: int, dim: int):
        super().__init__()
        width = heads * dim
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.projections = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, bias: Tensor, attend: Attend) -> Tensor:
        heads = self.projections(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        x = x + self.out(attend(query, key, value, bias).transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class Encoder(nn.Module):
    """Tokens [batch, length] to logits [batch, length, vocab]; table: [heads, 2 * furthest + 1], a bias by distance."""

    def __init__(self, vocab: int, heads: int, dim: int, layers: int, furthest: int):
        super().__init__()
        self.furthest = furthest
        self.embedding = nn.Embedding(vocab, heads * dim)
        self.table = nn.Parameter(torch.zeros(heads, 2 * furthest + 1))
        self.layers = nn.ModuleList(Layer(heads, dim) for _ in range(layers))
        self.head = nn.Linear(heads * dim, vocab)

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device)
        distances = (at[None, :] - at[:, None]).clamp(-self.furthest, self.furthest) + self.furthest
        bias = self.table[:, distances].unsqueeze(0)  # [1, heads, queries, keys]: one for the batch and all layers
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, bias, attend)
        return self.head(x)


def train(name: str, given: argparse.Namespace) -> Run:
    """Train for given.steps steps of AdamW, by the attention of that name."""
    torch.manual_seed(0)
    model = Encoder(given.vocab, given.heads, given.dim, given.layers, given.furthest)
    model.to(given.device, getattr(torch, given.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    generator, times, losses = torch.Generator().manual_seed(1), [], []
    for _ in range(given.steps):
        tokens = torch.randint(given.vocab, (given.batch, given.length), generator=generator).to(given.device)
        start = time.perf_counter()
        logits = model(tokens, WAYS[name])[:, BACK:].flatten(0, 1)
        loss = nn.functional.cross_entropy(logits.float(), tokens[:, :-BACK].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the GPU
        times.append(time.perf_counter() - start)
    return Run(name, losses, sorted(times)[len(times) // 2], model.table.detach().float().cpu())


def draw(runs: list[Run], furthest: int, path: Path) -> None:
    """Draw the picture, in the format of the path's suffix."""
    import altair as alt
    import pictures

    rows = [
        {"name": run.name, "head": head, "distance": i - furthest, "bias": bias}
        for run in runs
        for head, biases in enumerate(run.table.tolist())
        for i, bias in enumerate(biases)
    ]
    table = pictures.data(rows).mark_line().encode(
        x=alt.X("distance:Q", title="distance from query to key"), y="bias:Q", detail="head:N", **pictures.by_name()
    )  # fmt: skip
    back = pictures.data([{"distance": -BACK}]).mark_rule(color="#b3b3b3").encode(x="distance:Q")
    learnt = (back + table).properties(title=f"the table learnt: look {BACK} back", width=300)
    pictures.save(path, pictures.losses({run.name: run.losses for run in runs}), learnt)


def main(arguments: list[str] | None = None) -> list[Run]:
    parser = options.Parser(__doc__, "attention_bias.png")
    parser.add_argument("--steps", type=whole(), default=150)
    parser.add_argument("--vocab", type=whole(2), default=32)
    parser.add_argument("--batch", type=whole(), default=8)
    parser.add_argument("--length", type=whole(BACK + 1), default=32)
    parser.add_argument("--heads", type=whole(), default=2)
    parser.add_argument("--dim", type=whole(1, 256), default=16, help="of a head")
    parser.add_argument("--layers", type=whole(), default=2)
    parser.add_argument("--furthest", type=whole(), default=8, help="the distance beyond which all share a bias")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", type=options.device, default=options.BEST_DEVICE)
    given = parser.parse(arguments)
    runs = [train(name, given) for name in WAYS]
    for run in runs:
        first, last = run.losses[0], run.losses[-1]
        print(f"{run.name}: loss {first:.4f} to {last:.4f} in {given.steps} steps of {1000 * run.seconds:.1f} ms")
    apart = max(abs(a - b) for a, b in zip(runs[0].losses, runs[1].losses, strict=True))
    tables = (runs[0].table - runs[1].table).abs().max().item()
    print(f"losses are at most {apart:.2g} apart, and the tables {tables:.2g}")
    draw(runs, given.furthest, given.out)
    print(f"wrote {given.out.name}")
    return runs


if __name__ == "__main__":
    main()
