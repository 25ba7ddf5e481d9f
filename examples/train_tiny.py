"""Train a small causal language model twice, with torch's loss and with linear_cross_entropy, and draw both.

The model is transformers' Llama with random weights. Each token is a fixed function of the one before it, with a little
noise, so the loss falls from log(vocabulary) towards the noise's entropy. Both runs begin with the same weights and see
the same tokens. Their curves should coincide, and their memory peaks should differ.

It prints the first and the last loss of each run, its seconds and its memory peak, and how far the losses are apart. It
takes about 7 s on two CPU cores.

    python examples/train_tiny.py -o train_tiny.png
    python examples/train_tiny.py --vocab 128256 --tokens 8192 --hidden 1024 -o train_gpu.png   # on a GPU

Needs transformers and altair, which the extra `dev` installs. Without a GPU both losses are torch's operations, and
linear_cross_entropy makes all logits. The curves then show that the results agree; the memory shows nothing.
"""

import gc
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import options
import torch
from options import whole
from torch import Tensor

from fused_softmax import linear_cross_entropy

NOISE = 0.05  # the share of tokens that are random


@dataclass
class Curve:
    """One run: the loss of every step, the seconds it took, and its peak of allocated bytes.

    peak_bytes: on a GPU of the whole run, with model and optimizer; on a CPU allocated within the last step.
    """

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    peak_bytes: int = 0


def torchs(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The usual way: all logits, then their loss."""
    logits = torch.nn.functional.linear(hidden, weight)
    return torch.nn.functional.cross_entropy(logits.float(), target)


def ours(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, target, dtype=torch.float32)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "torch: linear, cross_entropy": torchs,
    "fused_softmax: linear_cross_entropy": ours,
}


def sequences(batch: int, length: int, vocab: int, generator: torch.Generator) -> Tensor:
    """Tokens [batch, length]. A fixed table maps each token to the next, except for the noise."""
    table = torch.randperm(vocab, generator=torch.Generator().manual_seed(7))
    tokens = torch.empty(batch, length, dtype=torch.int64)
    tokens[:, 0] = torch.randint(vocab, (batch,), generator=generator)
    for i in range(1, length):
        follows = table[tokens[:, i - 1]]
        stray = torch.randint(vocab, (batch,), generator=generator)
        tokens[:, i] = torch.where(torch.rand(batch, generator=generator) < NOISE, stray, follows)
    return tokens


def heads_of(hidden: int) -> int:
    return max(1, hidden // 64)


def make_model(vocab: int, hidden: int, layers: int, length: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = heads_of(hidden)
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=length,
            tie_word_embeddings=True,
        )
    )  # fmt: skip


def train(
    name: str, *, steps: int, vocab: int, hidden: int, layers: int, batch: int, length: int, device: str,
    dtype: torch.dtype,
) -> Curve:  # fmt: skip
    """Train for `steps` steps of AdamW with the loss of that name."""
    model = make_model(vocab, hidden, layers, length).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    generator, curve, loss_of = torch.Generator().manual_seed(1), Curve(name), LOSSES[name]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    losses = []

    def step() -> None:
        tokens = sequences(batch, length, vocab, generator).to(device)
        states = model.model(input_ids=tokens[:, :-1]).last_hidden_state
        loss = loss_of(states.flatten(0, 1), model.lm_head.weight, tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())  # read at the end, because reading a number waits for the GPU

    for _ in range(steps - 1):
        step()
    if device == "cuda":
        step()
    else:
        curve.peak_bytes = peak_on_cpu(step)
    curve.losses = torch.stack(losses).tolist()
    curve.seconds = time.perf_counter() - start
    if device == "cuda":
        curve.peak_bytes = torch.cuda.max_memory_allocated()
    return curve


def peak_on_cpu(step: Callable[[], object]) -> int:
    """The most bytes that a call of `step` allocates at once, from PyTorch's profiler."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler logs its start and end, which no lower level hides
    gc.collect()  # otherwise it warns that the step frees memory from before it
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        step()
    profiler: Any = profile.profiler
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes), default=0)


def draw(curves: list[Curve], path: Path, on_gpu: bool) -> None:
    """Draw the picture, in the format of the path's suffix."""
    import pictures

    peaks = {curve.name.split(":")[0]: curve.peak_bytes / 2**20 for curve in curves}
    where = "GPU" if on_gpu else "CPU, which has no kernels"
    losses = pictures.losses({curve.name: curve.losses for curve in curves})
    pictures.save(path, losses, pictures.bars(peaks, "MiB", "peak memory", ".1f", where))


def main(arguments: list[str] | None = None) -> list[Curve]:
    parser = options.Parser(__doc__, "train_tiny.png")
    parser.add_argument("--steps", type=whole(), default=200)
    parser.add_argument("--vocab", type=whole(2), default=256)
    parser.add_argument("--hidden", type=whole(2), default=64, help="in heads of 64 or more dims")
    parser.add_argument("--layers", type=whole(), default=2)
    parser.add_argument("--tokens", type=whole(), default=256, help="tokens of a step, in sequences of --length")
    parser.add_argument("--length", type=whole(2), default=32)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", type=options.device, default=options.BEST_DEVICE)
    given = parser.parse(arguments)
    if given.hidden % (2 * heads_of(given.hidden)):
        parser.error(f"--hidden {given.hidden} is no sum of {heads_of(given.hidden)} heads of an even size")
    batch = max(1, given.tokens // given.length)
    curves = []
    for name in LOSSES:
        curve = train(
            name, steps=given.steps, vocab=given.vocab, hidden=given.hidden, layers=given.layers, batch=batch,
            length=given.length, device=given.device, dtype=getattr(torch, given.dtype),
        )  # fmt: skip
        curves.append(curve)
        memory = f"{curve.peak_bytes / 2**20:.1f} MiB at most"
        first, last = curve.losses[0], curve.losses[-1]
        print(f"{name}: loss {first:.4f} to {last:.4f} in {given.steps} steps, {curve.seconds:.1f} s, {memory}")
    apart = max(abs(a - b) for a, b in zip(curves[0].losses, curves[1].losses, strict=True))
    print(f"losses are at most {apart:.2g} apart")
    draw(curves, given.out, given.device != "cpu")
    print(f"wrote {given.out.name}")
    return curves


if __name__ == "__main__":
    main()
