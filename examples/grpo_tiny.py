"""Train a tiny causal language model by GRPO twice, with log-probabilities by TRL and by us, and draw both.

The model is transformers' Llama with random weights; nothing is downloaded. A completion's reward is the share of its
tokens that are even, so it rises from a half towards 1. TRL's GRPOTrainer trains the model. In the second run, after
`fused_softmax.trl.apply()`, `linear_log_prob` stands in the place of TRL's ChunkedLogProbFunction, which its trainers
call in the model's forward pass. Without TRL, a step of GRPO that is written here trains both, and the first takes
log_softmax.

It prints the first and the last reward of each run and its seconds, and of one batch the milliseconds and the most
memory of both passes through the model, and how far the results are apart. Then it prints the losses of both runs side
by side. Both runs begin with the same weights and random numbers, so losses and curves should coincide. It takes about
9 s on two CPU cores.

    python examples/grpo_tiny.py -o grpo_tiny.png
    python examples/grpo_tiny.py --vocab 151936 --hidden 1024 --length 256 --dtype bfloat16 -o grpo_gpu.png   # on a GPU

Needs transformers and altair, which the extra `dev` installs. Without a GPU linear_log_prob is torch's operations and
makes all logits, so the time and the memory show nothing of it. TRL's function has a buffer of 32768 columns, however
small the vocabulary.
"""

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import options
import torch
from options import whole
from torch import Tensor
from train_tiny import heads_of, make_model, peak_on_cpu

import fused_softmax.trl
from fused_softmax import linear_log_prob

LEARNING_RATE, OF_ENTROPY = 3e-3, 0.01
PROMPT, SPECIAL = 4, 3  # tokens of a prompt; the first tokens, which none has
OURS = "fused_softmax: linear_log_prob"

# Model, tokens, their mask and the length of completions to (log-probabilities, entropies) of their tokens.
Score = Callable[[Any, Tensor, Tensor, int], tuple[Tensor, Tensor]]


@dataclass
class Run:
    """rewards: the mean one of every step. losses: of every step. seconds: of all steps.

    ms, peak_bytes, found: of both passes of one batch.
    found: (log-probabilities, entropies, the gradient of the head's weight).
    """

    name: str
    rewards: list[float]
    losses: list[float]
    seconds: float
    ms: float
    peak_bytes: int
    found: tuple[Tensor, Tensor, Tensor]


def by_torch(model: Any, tokens: Tensor, mask: Tensor, length: int) -> tuple[Tensor, Tensor]:
    logits = model(input_ids=tokens, attention_mask=mask).logits[:, -length - 1 : -1]
    log_p = logits.log_softmax(-1, dtype=torch.float32)
    return log_p.gather(-1, tokens[:, -length:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def by_us(model: Any, tokens: Tensor, mask: Tensor, length: int) -> tuple[Tensor, Tensor]:
    hidden = model.model(input_ids=tokens, attention_mask=mask).last_hidden_state[:, -length - 1 : -1]
    out = linear_log_prob(hidden, model.lm_head.weight, tokens[:, -length:], return_entropy=True)
    return out.log_prob, out.entropy


@contextmanager
def by_us_in_trl() -> Iterator[None]:
    fused_softmax.trl.apply()
    try:
        yield
    finally:
        fused_softmax.trl.undo()


def rewards_of(completions: list[list[int]], length: int) -> list[float | None]:
    return [sum(token % 2 == 0 for token in tokens) / length for tokens in completions]


def prompts_of(given: argparse.Namespace) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(SPECIAL, given.vocab, (given.prompts, PROMPT), generator=generator)


def measure(name: str, score: Score, model: Any, given: argparse.Namespace) -> Run:
    """A run that has not begun: of both passes of one batch, what they find, their time and their memory."""
    generator, shape = torch.Generator().manual_seed(3), (given.prompts * given.generations, PROMPT + given.length)
    tokens = torch.randint(SPECIAL, given.vocab, shape, generator=generator).to(model.device)
    on_gpu, seconds = model.device.type != "cpu", []

    def both_passes() -> tuple[Tensor, Tensor]:
        log_probs, entropies = score(model, tokens, torch.ones_like(tokens), given.length)
        (log_probs.sum() + OF_ENTROPY * entropies.sum()).backward()
        return log_probs.detach(), entropies.detach()

    found = *both_passes(), model.lm_head.weight.grad.clone()
    for _ in range(3):
        model.zero_grad()
        start = time.perf_counter()
        both_passes()
        if on_gpu:
            torch.cuda.synchronize(model.device)
        seconds.append(time.perf_counter() - start)
    model.zero_grad()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(model.device)
        before = torch.cuda.memory_allocated(model.device)
        both_passes()
        peak = torch.cuda.max_memory_allocated(model.device) - before
    else:
        peak = peak_on_cpu(both_passes)
    model.zero_grad()
    return Run(name, [], [], 0.0, min(seconds) * 1e3, peak, found)


def by_hand(name: str, score: Score, given: argparse.Namespace) -> Run:
    """A run of GRPO as it is written here: one step for each batch, so that the ratio of the policies is 1."""
    model = model_of(given)
    model.generation_config.eos_token_id = None
    run, length = measure(name, score, model, given), given.length
    prompts = prompts_of(given).repeat_interleave(given.generations, 0).to(given.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    torch.manual_seed(1)
    start = time.perf_counter()
    for _ in range(given.steps):
        mask = torch.ones_like(prompts)
        tokens = model.generate(
            prompts, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=length, pad_token_id=0
        )
        rewards = torch.tensor(rewards_of(tokens[:, PROMPT:].tolist(), length), device=given.device)
        groups = rewards.view(-1, given.generations)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        log_probs, entropies = score(model, tokens, torch.ones_like(tokens), length)
        ratios = (log_probs - log_probs.detach()).exp()
        loss = -(ratios * advantages).mean() - OF_ENTROPY * entropies.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.rewards.append(rewards.mean().item())
        run.losses.append(loss.item())
    run.seconds = time.perf_counter() - start
    return run


def model_of(given: argparse.Namespace) -> Any:
    model = make_model(given.vocab, given.hidden, given.layers, PROMPT + given.length)
    return model.to(given.device, getattr(torch, given.dtype))


def tokenizer_of(vocab: int) -> Any:
    """Of words that are the numbers of their tokens, after three special ones."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<eos>"}
    words = *special.values(), *map(str, range(SPECIAL, vocab))
    tokenizer = Tokenizer(WordLevel({word: token for token, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def by_trl(name: str, given: argparse.Namespace) -> Run:
    """A run of TRL's trainer, by its own functions or with ours in their place."""
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    prompts = [" ".join(map(str, prompt)) for prompt in prompts_of(given).tolist()]

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        return rewards_of(completion_ids, given.length)

    with (
        tempfile.TemporaryDirectory() as folder,
        by_us_in_trl() if name == OURS else nullcontext(),
        warnings.catch_warnings(action="ignore", category=FutureWarning),  # of names that transformers will drop
    ):
        config = GRPOConfig(
            folder, max_steps=given.steps, num_generations=given.generations, max_completion_length=given.length,
            per_device_train_batch_size=given.prompts * given.generations, learning_rate=LEARNING_RATE, beta=0.0,
            entropy_coef=OF_ENTROPY, lr_scheduler_type="constant", bf16=False, gradient_checkpointing=False,
            use_cpu=given.device == "cpu", report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True,
            shuffle_dataset=False,
        )  # fmt: skip
        config._n_gpu = min(config.n_gpu, 1)  # of several, a trainer that torchrun has not started takes all
        trainer = GRPOTrainer(
            model=model_of(given), reward_funcs=reward, args=config, processing_class=tokenizer_of(given.vocab),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)

        def score(model: Any, tokens: Tensor, mask: Tensor, length: int) -> tuple[Tensor, Tensor]:
            labels = tokens.clone()
            labels[:, :-length] = -100
            out = model(input_ids=tokens, attention_mask=mask, labels=labels, fused_lm_head=True)
            return out.log_probs[:, -length:], out.entropy[:, -length:]

        run = measure(name, score, trainer.model, given)
        start = time.perf_counter()
        trainer.train()
        run.seconds = time.perf_counter() - start
        steps = [line for line in trainer.state.log_history if "reward" in line]
        run.rewards, run.losses = ([line[name] for line in steps] for name in ("reward", "loss"))
    return run


def draw(runs: list[Run], path: Path, on_gpu: bool) -> None:
    """Draw the picture, in the format of the path's suffix."""
    import pictures

    where = "GPU" if on_gpu else "CPU, which has no kernels"
    rewards = pictures.losses({run.name: run.rewards for run in runs}, "reward")
    peaks = {run.name.split(":")[0]: run.peak_bytes / 2**20 for run in runs}
    pictures.save(path, rewards, pictures.bars(peaks, "MiB", "peak memory of both passes", ".1f", where))


def main(arguments: list[str] | None = None) -> list[Run]:
    parser = options.Parser(__doc__, "grpo_tiny.png")
    parser.add_argument("--steps", type=whole(), default=30)
    parser.add_argument("--vocab", type=whole(8), default=64)
    parser.add_argument("--hidden", type=whole(2), default=64, help="in heads of 64 or more dims")
    parser.add_argument("--layers", type=whole(), default=2)
    parser.add_argument("--prompts", type=whole(), default=4)
    parser.add_argument("--generations", type=whole(2), default=8, help="completions of a prompt")
    parser.add_argument("--length", type=whole(), default=16, help="of a completion")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", type=options.device, default=options.BEST_DEVICE, help="TRL takes the first GPU")
    given = parser.parse(arguments)
    if given.hidden % (2 * heads_of(given.hidden)):
        parser.error(f"--hidden {given.hidden} is no sum of {heads_of(given.hidden)} heads of an even size")
    if find_spec("trl"):
        runs = [by_trl(name, given) for name in ("TRL: ChunkedLogProbFunction", OURS)]
    else:
        print("TRL is not installed: the steps are written here")
        ways = {"torch: log_softmax, gather": by_torch, OURS: by_us}
        runs = [by_hand(name, score, given) for name, score in ways.items()]
    for run in runs:
        trained = f"reward {run.rewards[0]:.3f} to {run.rewards[-1]:.3f} in {given.steps} steps, {run.seconds:.1f} s"
        print(f"{run.name}: {trained}; a batch {run.ms:.1f} ms, {run.peak_bytes / 2**20:.1f} MiB at most")
    apart = [f"{(a.float() - b.float()).abs().max():.2g}" for a, b in zip(runs[0].found, runs[1].found, strict=True)]
    print("at most apart: log-probabilities {}, entropies {}, gradients of the head {}".format(*apart))
    both = [run.name.partition(":")[0] for run in runs]
    for what, step in (("first", 0), ("last", -1)):
        losses = ", ".join(f"{name} {run.losses[step]:.5f}" for name, run in zip(both, runs, strict=True))
        print(f"loss of the {what} step: {losses}")
    differences = (abs(a - b) for a, b in zip(runs[0].losses, runs[1].losses, strict=True))
    print(f"losses at most {max(differences):.2g} apart")
    draw(runs, given.out, given.device != "cpu")
    print(f"wrote {given.out.name}")
    return runs


if __name__ == "__main__":
    torch.set_num_threads(1)  # work as small as this only waits for another one
    main()
