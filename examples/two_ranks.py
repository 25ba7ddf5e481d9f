"""Train a small language model whose vocabulary lies over two ranks, and the same model on one rank, and draw both.

Embedding and output layer share one weight [vocab, hidden]. Each rank holds an equal part of its rows, the last one
with padding if need be, and makes the logits of these classes alone. The ranks tell each other a few numbers a token,
and so all of them get the loss of the whole vocabulary. The layers in between are the same on all ranks. Both runs
begin with the same weights and see the same tokens, so their curves should coincide. In float32 the two runs round
differently, and training makes such differences grow; with --dtype float64 they stay near 1e-14.

It prints the first and the last loss of each run and the memory of its logits, and how far the losses are apart. It
takes about 9 s on two CPU cores.

    python examples/two_ranks.py -o two_ranks.png
    python examples/two_ranks.py --ranks 3 --dtype float64 -o three_ranks.png
    python examples/two_ranks.py --vocab 128256 --tokens 8192 --hidden 1024   # with a GPU for each rank

Needs altair, which the extra `dev` installs. With a GPU for each rank the ranks talk by NCCL. Elsewhere they are
processes of the CPU and talk by gloo; the curves then show that the results agree, and nothing about speed.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import options
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from options import whole
from torch import Tensor

from fused_softmax import linear_cross_entropy

NOISE = 0.05  # the share of tokens that are random


@dataclass(frozen=True)
class Setup:
    """What both runs have in common. tokens: of a step, in sequences of `length`."""

    steps: int
    vocab: int
    hidden: int
    tokens: int
    length: int
    device: str
    dtype: torch.dtype

    @property
    def batch(self) -> int:
        return max(1, self.tokens // self.length)


@dataclass
class Curve:
    """One run: the loss of every step, on each rank, and the bytes of one rank's logits of a step."""

    name: str
    losses: list[list[float]]
    logits_bytes: int


class SumOverRanks(torch.autograd.Function):
    """The sum over the ranks of a group. What uses it is the same on all of them, and so is its gradient."""

    @staticmethod
    def forward(ctx, x, group):
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, dx):
        return dx, None


class Model(torch.nn.Module):
    """A transformer layer between an embedding and an output layer, of which this rank has some classes.

    group: over whose ranks the classes lie; None where one process has all of them.
    """

    def __init__(self, setup: Setup, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        torch.manual_seed(0)  # the same weights on every rank, and on one
        whole = torch.randn(setup.vocab, setup.hidden) * setup.hidden**-0.5
        positions = torch.randn(setup.length, setup.hidden) * setup.hidden**-0.5
        self.group, self.n_classes, self.columns = group, setup.vocab, -(-setup.vocab // ranks)
        self.first = rank * self.columns  # of this rank's classes
        padded = torch.nn.functional.pad(whole, (0, 0, 0, ranks * self.columns - setup.vocab))
        self.weight = torch.nn.Parameter(padded[self.first : self.first + self.columns].clone())
        self.positions = torch.nn.Parameter(positions)
        self.layer = torch.nn.TransformerEncoderLayer(
            setup.hidden, 1, 2 * setup.hidden, dropout=0.0, batch_first=True, norm_first=True
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """[batch, length, hidden]: a rank's own tokens, and 0 for others, summed over ranks."""
        at = tokens - self.first
        here = (at >= 0) & (at < self.columns)
        found = self.weight[torch.where(here, at, 0)] * here.unsqueeze(-1)
        return found if self.group is None else SumOverRanks.apply(found, self.group)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss of the tokens [batch, length] that follow others."""
        given, target = tokens[:, :-1], tokens[:, 1:]
        length = given.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        hidden = self.layer(self.embed(given) + self.positions[:length], src_mask=later)
        if self.group is None:
            return linear_cross_entropy(hidden, self.weight, target)
        return linear_cross_entropy(hidden, self.weight, target, group=self.group, n_classes=self.n_classes)


def sequences(setup: Setup, generator: torch.Generator) -> Tensor:
    """Tokens [batch, length]. A fixed table maps each token to the next, except for the noise."""
    batch, vocab = setup.batch, setup.vocab
    table = torch.randperm(vocab, generator=torch.Generator().manual_seed(7))
    tokens = torch.empty(batch, setup.length, dtype=torch.int64)
    tokens[:, 0] = torch.randint(vocab, (batch,), generator=generator)
    for i in range(1, setup.length):
        stray = torch.randint(vocab, (batch,), generator=generator)
        strays = torch.rand(batch, generator=generator) < NOISE
        tokens[:, i] = torch.where(strays, stray, table[tokens[:, i - 1]])
    return tokens


def train(setup: Setup, group: dist.ProcessGroup | None = None) -> list[float]:
    """The losses of `steps` steps of AdamW, on this rank."""
    model = Model(setup, group).to(setup.device, setup.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    generator, losses = torch.Generator().manual_seed(1), []  # the same tokens on every rank, and on one
    for _ in range(setup.steps):
        loss = model(sequences(setup, generator).to(setup.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())  # read at the end, because reading a number waits for the GPU
    return torch.stack(losses).tolist()


def train_rank(rank: int, ranks: int, setup: Setup, folder: str) -> None:
    """A process of its own: one rank of a group, which leaves its losses in the folder."""
    backend = "gloo"
    if setup.device == "cuda":
        backend = "nccl"
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    try:
        losses = train(setup, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(losses))


def train_over(ranks: int, setup: Setup) -> Curve:
    """The model with its vocabulary over so many ranks; the first that fails ends the others."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train_rank, (ranks, setup, folder), nprocs=ranks)
        losses = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    return Curve("1 rank of a group" if ranks == 1 else f"{ranks} ranks", losses, logits_bytes(setup, ranks))


def logits_bytes(setup: Setup, ranks: int) -> int:
    """Of logits: a row for each token that follows another, and one rank's columns."""
    return setup.dtype.itemsize * setup.batch * (setup.length - 1) * -(-setup.vocab // ranks)


def draw(curves: list[Curve], path: Path) -> None:
    """Draw the picture, in the format of the path's suffix."""
    import pictures

    logits = {curve.name: curve.logits_bytes / 2**20 for curve in curves}
    losses = pictures.losses({curve.name: curve.losses[0] for curve in curves})
    pictures.save(path, losses, pictures.bars(logits, "MiB", "a rank's logits of a step", ".3~g"))


def main(arguments: list[str] | None = None) -> list[Curve]:
    parser = options.Parser(__doc__, "two_ranks.png")
    parser.add_argument("--ranks", type=whole(1, 64), default=2)
    parser.add_argument("--steps", type=whole(), default=100)
    parser.add_argument("--vocab", type=whole(2), default=257)
    parser.add_argument("--hidden", type=whole(), default=64)
    parser.add_argument("--tokens", type=whole(), default=256, help="tokens of a step, in sequences of --length")
    parser.add_argument("--length", type=whole(2), default=32)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="cuda if there is a GPU for each rank, else cpu")
    given = parser.parse(arguments)
    gpus = torch.cuda.device_count()
    if given.device == "cuda" and gpus < given.ranks:
        parser.error(f"--device cuda takes a GPU for each of the {given.ranks} ranks, and {gpus} are there")
    device = given.device or ("cuda" if gpus >= given.ranks else "cpu")
    setup = Setup(
        steps=given.steps, vocab=given.vocab, hidden=given.hidden, tokens=given.tokens, length=given.length,
        device=device, dtype=getattr(torch, given.dtype),
    )  # fmt: skip
    alone = Curve("alone", [train(setup)], logits_bytes(setup, 1))
    curves = [alone, train_over(given.ranks, setup)]
    for curve in curves:
        first, last, memory = curve.losses[0][0], curve.losses[0][-1], curve.logits_bytes / 2**20
        print(f"{curve.name}: loss {first:.4f} to {last:.4f} in {given.steps} steps, {memory:.3g} MiB of logits a rank")
    apart = max(abs(a - b) for each in curves[1].losses for a, b in zip(alone.losses[0], each, strict=True))
    print(f"losses are at most {apart:.2g} apart")
    draw(curves, given.out)
    print(f"wrote {given.out.name}")
    return curves


if __name__ == "__main__":
    main()
