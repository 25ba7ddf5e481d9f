"""Time a training step of a Llama of transformers, plain and after fused_softmax.hf.apply(), and compare the losses.

The model has random weights; nothing is downloaded. A step is a forward and a backward pass. The peak is of the
memory beside weights and gradients, and is measured on a GPU alone.

It prints what apply() put in place of what, and of each model the loss and the milliseconds of a step. It takes about
4 s on two CPU cores.

    python examples/apply_llama.py
    python examples/apply_llama.py --hidden 2048 --layers 4 --vocab 128256 --tokens 8192   # on a GPU: Llama 3.2 1B's

Needs transformers, which the extra `hf` installs. Without a GPU the loss is torch's operations.
"""

import time
from typing import NamedTuple

import options
import torch
from options import whole

from fused_softmax import hf


class Step(NamedTuple):
    """Of one way to train: the loss, the fastest step in seconds, and the bytes beside weights and gradients."""

    loss: float
    seconds: float
    peak_bytes: int


def make_model(vocab: int, hidden: int, layers: int, tokens: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(1, hidden // 64)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 4 or 1, max_position_embeddings=tokens,
        tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def timed(model: torch.nn.Module, tokens: torch.Tensor, steps: int) -> Step:
    on_gpu, before, loss, seconds = tokens.is_cuda, 0, torch.zeros(()), []
    for i in range(steps + 1):  # of which the first compiles kernels and allocates gradients
        model.zero_grad(set_to_none=False)
        if on_gpu:
            torch.cuda.synchronize()
            if i == 1:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    return Step(loss.item(), min(seconds[1:]), peak)


def main(arguments: list[str] | None = None) -> dict[str, Step]:
    parser = options.Parser(__doc__)
    parser.add_argument("--hidden", type=whole(64), default=64)
    parser.add_argument("--layers", type=whole(), default=2)
    parser.add_argument("--vocab", type=whole(2), default=2000)
    parser.add_argument("--tokens", type=whole(2), default=256)
    parser.add_argument("--steps", type=whole(), default=3)
    given = parser.parse(arguments)
    dtype = torch.bfloat16 if options.BEST_DEVICE == "cuda" else torch.float32
    model = make_model(given.vocab, given.hidden, given.layers, given.tokens).to(options.BEST_DEVICE, dtype)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(given.vocab, (1, given.tokens), generator=generator).to(options.BEST_DEVICE)
    found = {"plain": timed(model, tokens, given.steps)}
    print(hf.apply(model))
    found["apply"] = timed(model, tokens, given.steps)
    for name, step in found.items():
        peak = f", {step.peak_bytes / 2**20:.0f} MiB" if step.peak_bytes else ""
        print(f"{name}: loss {step.loss:.4f}, {step.seconds * 1e3:.1f} ms a step{peak}")
    return found


if __name__ == "__main__":
    main()
