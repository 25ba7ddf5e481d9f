"""Steps of training a whole model: forward and backward, without an optimizer, whose work no provider changes.

A provider's maker takes an `At`, and returns a context manager that yields a `Step`. At its end the manager puts back
the functions of other projects that it replaced.
"""

import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fused_softmax.bench.cases import Case

OF_ENTROPY = 0.01  # of GRPO's loss
OF_PROMPT = 4  # one token in so many belongs to the prompt, in a sequence of GRPO


class Sizes(NamedTuple):
    """Of a Llama, beside its vocabulary."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int


LLAMA_1B = Sizes(2048, 16, 32, 8, 8192)  # Llama 3.2 1B
SMALL = Sizes(64, 2, 4, 2, 128)  # where there is no GPU


@dataclass(frozen=True)
class At:
    """What a step is made for. case: batch x length x vocabulary; its dtype is that of the weights."""

    case: Case
    device: str
    seed: int = 0

    @property
    def sizes(self) -> Sizes:
        return SMALL if self.device == "cpu" else LLAMA_1B

    def generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed)

    def tokens(self) -> Tensor:
        batch, length, classes = self.case.shape
        return torch.randint(classes, (batch, length), device=self.device, generator=self.generator())


@dataclass(frozen=True)
class Step:
    """model: what is trained. loss: runs its forward pass, with the same tokens at each call."""

    model: nn.Module
    loss: Callable[[], Tensor]


def parameters_of(at: At) -> int:
    """How many numbers the model has."""
    hidden, layers, heads, kv_heads, intermediate = at.sizes
    of_attention = 2 * hidden * hidden * (heads + kv_heads) // heads
    return hidden * (at.case.n_cols + 1) + layers * (of_attention + 3 * hidden * intermediate + 2 * hidden)


def llama(at: At) -> Any:
    """A Llama of transformers. Its random weights are rounded to bfloat16, and then have the case's dtype."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = at.sizes
    config = LlamaConfig(
        vocab_size=at.case.n_cols, hidden_size=sizes.hidden, num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads, intermediate_size=sizes.intermediate,
        max_position_embeddings=at.case.shape[1], tie_word_embeddings=True, use_cache=False,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(), torch.device(at.device):
        torch.manual_seed(at.seed)
        model: Any = LlamaForCausalLM(config)
    if at.case.dtype == "float32":  # torch then makes all scores, too many to keep
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.to(torch.bfloat16).to(getattr(torch, at.case.dtype)).train()


def _step(model: Any, call: Callable[..., Any], at: At) -> Step:
    tokens = at.tokens()
    return Step(model, lambda: call(input_ids=tokens, labels=tokens).loss)


@contextmanager
def _of(model: Any, at: At, compiles: bool) -> Iterator[Step]:
    """The step of a model as it is, or compiled for these sizes alone."""
    if not compiles:
        yield _step(model, model, at)
        return
    torch.compiler.reset()
    try:
        yield _step(model, torch.compile(model, dynamic=False), at)
    finally:
        torch.compiler.reset()


@contextmanager
def plain(at: At, compiles: bool = False) -> Iterator[Step]:
    with _of(llama(at), at, compiles) as step:
        yield step


@contextmanager
def own(at: At, compiles: bool = False, **options: Any) -> Iterator[Step]:
    """options: those of `fused_softmax.hf.apply`."""
    from fused_softmax import hf

    model = llama(at)
    hf.apply(model, **options)
    with _of(model, at, compiles) as step:
        yield step


@contextmanager
def liger(at: At, **options: Any) -> Iterator[Step]:
    """options: those of `apply_liger_kernel_to_llama`."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama

    model, held = llama(at), dict(vars(modeling_llama))
    try:
        apply_liger_kernel_to_llama(model=model, **options)
        yield _step(model, model, at)
    finally:
        vars(modeling_llama).update(held)


@contextmanager
def beside_liger(at: At) -> Iterator[Step]:
    """Liger's norms, rotary embeddings and MLPs, and the loss of this package."""
    from fused_softmax import hf

    with liger(at, fused_linear_cross_entropy=False, cross_entropy=False) as step:
        hf.apply(step.model)
        yield step


@contextmanager
def trl(at: At) -> Iterator[Step]:
    """The loss of TRL's GRPOTrainer for given completions, with an entropy bonus."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    batch, length, _ = at.case.shape
    prompt = length // OF_PROMPT
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of names that transformers will drop
        config = GRPOConfig(
            folder, per_device_train_batch_size=batch, num_generations=batch, max_completion_length=length - prompt,
            loss_type="grpo", beta=0.0, entropy_coef=OF_ENTROPY, bf16=False, gradient_checkpointing=False,
            use_cpu=at.device == "cpu", report_to="none", save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        config._n_gpu = min(config.n_gpu, 1)  # without torchrun, a trainer takes all GPUs
        trainer = GRPOTrainer(
            model=llama(at), reward_funcs=_no_reward, args=config, processing_class=_tokenizer(),
            train_dataset=Dataset.from_dict({"prompt": ["1"] * batch}),
        )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1  # as train() sets it
    model: Any = trainer.model
    inputs = _completions(at, prompt)
    yield Step(model, lambda: trainer.compute_loss(model, inputs))


@contextmanager
def own_of_trl(at: At) -> Iterator[Step]:
    import fused_softmax.trl

    fused_softmax.trl.apply()
    try:
        with trl(at) as step:
            yield step
    finally:
        fused_softmax.trl.undo()


def _completions(at: At, prompt: int) -> dict[str, Tensor]:
    """What a trainer has of prompts and their completions, none of which is cut short."""
    tokens = at.tokens()
    parts = {"prompt": tokens[:, :prompt], "completion": tokens[:, prompt:]}
    masks = {f"{name}_mask": torch.ones_like(each) for name, each in parts.items()}
    advantages = torch.randn(len(tokens), device=at.device, generator=at.generator())
    return {**{f"{name}_ids": each for name, each in parts.items()}, **masks, "advantages": advantages}


def _no_reward(completions: list[Any], **_: Any) -> list[float | None]:
    return [0.0] * len(completions)


def _tokenizer() -> Any:
    """A tokenizer of three words, because a trainer needs one. No text is read."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<eos>"}
    words = {word: number for number, word in enumerate(special.values())}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), **special)


SAMPLE = 2**16  # so many numbers of a parameter's gradient are compared, at most


@dataclass(frozen=True)
class Result:
    """What a step computes. gradients: of each parameter some numbers in float32, the head's first."""

    loss: float
    gradients: list[Tensor]


@dataclass(frozen=True)
class Errors:
    """How far a result is from the true one, each as a share of it: the loss, the head's gradient, and the rest.

    rest: the root mean square of the other gradients' distances.
    """

    loss: float
    head: float
    rest: float


def result_of(step: Step) -> Result:
    """What one step computes. It leaves the model without gradients."""
    step.model.zero_grad(set_to_none=True)
    loss = step.loss()
    loss.backward()
    head: Any = step.model.get_output_embeddings()  # type: ignore[operator]
    others = [each for each in step.model.parameters() if each is not head.weight]
    gradients = []
    for each in (head.weight, *others):
        if each.grad is None:
            raise RuntimeError("a parameter has no gradient")
        stride = math.ceil(each.numel() / SAMPLE) | 1  # odd, so that all columns have their turn
        gradients.append(each.grad.flatten()[::stride].float().cpu())
    step.model.zero_grad(set_to_none=True)
    return Result(loss.item(), gradients)


def errors_of(found: Result, truth: Result) -> Errors:
    head, *rest = (
        float((mine - true).norm() / true.norm()) for mine, true in zip(found.gradients, truth.gradients, strict=True)
    )
    return Errors(abs(found.loss - truth.loss) / abs(truth.loss), head, math.hypot(*rest) / math.sqrt(len(rest)))
