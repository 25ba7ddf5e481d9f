"""Draw the tokens of Hugging Face's generate() by fused_softmax.sample.

It takes one argument more: custom_generate=hf.sampler(seed). All else is generate()'s own, such as its filters. A
sequence has a seed, and a token's position is its place in the sequence. So a prompt gives the same tokens whatever
other prompts are generated beside it.

Beside the tokens it prints two figures, and draws both: how long a new token takes with this sampler and with Hugging
Face's own, and how far the share of each next token, in many draws, is from the probability that Hugging Face's filters
give it. On a CPU both samplers are torch's operations, and the times say nothing about the kernels. It takes about 6 s
on two CPU cores.

    python examples/generate.py -o generate.png
    python examples/generate.py --model gpt2 --prompt "The sea" --prompt "Once" --top-p 0.9   # a model of your own

Needs transformers and altair, which the extra `dev` installs. Without --model, a small Llama with random weights
says nothing.
"""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import options
import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from options import real, whole
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.generation import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fused_softmax import hf, sample


def generate(model: Any, input_ids: Tensor, new_tokens: int, filters: dict[str, Any], by: Any = None) -> Tensor:
    """Tokens [n_rows, length + new_tokens] of prompts [n_rows, length]. by: a sampler; None is generate()'s own."""
    return model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=new_tokens,
        do_sample=True,
        pad_token_id=model.config.eos_token_id,
        custom_generate=by,
        **{"top_k": 0, "top_p": 1.0} | filters,  # or it takes the model's own
    )


def tiny_model(vocab: int = 97) -> LlamaForCausalLM:
    """Two layers of random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@dataclass
class Figures:
    """us of a new token by each sampler, and of one next token the probabilities and the shares of the draws."""

    us: dict[str, float]
    expected: Tensor
    drawn: Tensor

    @property
    def distance(self) -> float:
        """Total variation: 0 where the draws have exactly the probabilities, 1 where they have nothing in common."""
        return (self.expected - self.drawn).abs().sum().item() / 2


def measure(model: Any, prompt: Tensor, new_tokens: int, draws: int, filters: dict[str, Any]) -> Figures:
    """prompt: [1, length]. filters: as generate() takes them."""
    samplers = {"fused_softmax": hf.sampler(0), "transformers": None}
    us = {
        name: seconds_of(partial(generate, model, prompt, new_tokens, filters, by)) / new_tokens * 1e6
        for name, by in samplers.items()
    }
    with torch.no_grad():
        scores = model(prompt).logits[:, -1].float()
    tokens = sample(scores.expand(draws, -1), **filters, seed=0).tokens  # row i has position i
    drawn = torch.bincount(tokens, minlength=scores.shape[1]) / draws
    kinds = {
        "temperature": TemperatureLogitsWarper, "top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }  # fmt: skip
    for name, kind in kinds.items():
        if name in filters:
            scores = kind(filters[name])(prompt, scores)
    return Figures(us, scores.softmax(-1)[0].cpu(), drawn.cpu())


def seconds_of(call: Any) -> float:
    """The least of three calls, after one that prepares what comes first."""
    call()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call().tolist()  # waits for the device
        times.append(time.perf_counter() - start)
    return min(times)


def draw(figures: Figures, path: Path) -> None:
    """Draw the picture, in the format of the path's suffix."""
    import altair as alt
    import pictures

    order = figures.expected.argsort(descending=True)[:40]
    expected, drawn = "probability, by Hugging Face's filters", "share of our draws"
    rows = [
        {"name": name, "token": i, "value": value}
        for name, values in ((expected, figures.expected), (drawn, figures.drawn))
        for i, value in enumerate(values[order].tolist())
    ]
    tokens = pictures.data(rows).encode(
        x=alt.X("token:O", title="tokens, the likeliest first", axis=alt.Axis(labels=False)),
        y=alt.Y("value:Q", title=None),
        color=pictures.by_name()["color"],
    )
    bars = tokens.mark_bar().transform_filter(alt.datum.name == expected)
    points = tokens.mark_circle(opacity=1, size=40).transform_filter(alt.datum.name == drawn)
    both = (bars + points).properties(title="the next token after the first prompt", width=450)
    pictures.save(path, both, pictures.bars(figures.us, "us", "a new token, model included", ".0f"))


def require_model(name: str) -> None:
    """Raise OSError if there is no such model. The hub is asked once; transformers asks for a minute, and prints it."""
    if Path(name).is_dir():
        if not Path(name, "config.json").is_file():
            raise OSError("the folder has no config.json")
        return
    if isinstance(try_to_load_from_cache(name, "config.json"), str):  # another value says that it is nowhere
        return
    try:
        HfApi().model_info(name, timeout=10)
    except Exception as error:  # of whichever HTTP library the hub's package uses
        raise OSError(
            f"it is no folder, not in the cache, and the hub did not give it: {type(error).__name__}"
        ) from None


def main(arguments: list[str] | None = None) -> list[list[int]]:
    parser = options.Parser(__doc__, "generate.png")
    parser.add_argument("--model", help="a causal model that transformers finds; default: random weights")
    parser.add_argument("--prompt", action="append", default=[], help="a prompt of --model; give it several times")
    parser.add_argument("--new-tokens", type=whole(), default=12)
    parser.add_argument("--temperature", type=real(0.01, 100), default=0.8)
    parser.add_argument("--top-k", type=whole())
    parser.add_argument("--top-p", type=real(0.001, 1), default=0.95)
    parser.add_argument("--min-p", type=real(0, 1))
    parser.add_argument("--seed", type=whole(0), default=0, help="of the first prompt; the next one has the next seed")
    parser.add_argument("--draws", type=whole(), default=2000, help="draws of one next token, for the picture")
    parser.add_argument("--device", type=options.device, default=options.BEST_DEVICE)
    given = parser.parse(arguments)
    if given.model == "":
        parser.error("--model must have a name")
    if given.prompt and not given.model:
        parser.error("--prompt is one of --model, which is not given")
    if not all(given.prompt):
        parser.error("--prompt must have text")
    names = "temperature", "top_k", "top_p", "min_p"
    filters = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    try:
        if given.model:
            require_model(given.model)
        tokenizer = AutoTokenizer.from_pretrained(given.model) if given.model else None
        model = AutoModelForCausalLM.from_pretrained(given.model) if given.model else tiny_model()
    except (OSError, ValueError) as error:
        parser.error(f"--model {given.model}: {str(error).splitlines()[0]}")
    model = model.to(given.device).eval()
    if tokenizer is None:
        prompts = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    else:
        prompts = [tokenizer(text, return_tensors="pt").input_ids[0] for text in given.prompt or ["The sea"]]
    found = []
    for i, prompt in enumerate(prompts):
        by = hf.sampler(given.seed + i)
        found += generate(model, prompt[None].to(given.device), given.new_tokens, filters, by).tolist()
        print(tokenizer.decode(found[-1]) if tokenizer else found[-1])
    figures = measure(model, prompts[0][None].to(given.device), given.new_tokens, given.draws, filters)
    print("a new token takes " + ", ".join(f"{us:.0f} us by {name}" for name, us in figures.us.items()))
    print(f"the shares of {given.draws} draws are {figures.distance:.3f} from the probabilities (total variation)")
    draw(figures, given.out)
    print(f"wrote {given.out.name}")
    return found


if __name__ == "__main__":
    main()
