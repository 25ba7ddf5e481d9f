"""Draw the tokens of Hugging Face's generate() by fused_softmax.sample.

`Sampler` is a LogitsProcessor. It draws a token of each row and leaves it as the only one that is possible, so
generate() takes it where it would take the greatest logit: call it with do_sample=False and without warpers of its own.
A sequence has a seed, and a token's position is its place in the sequence. So a prompt gives the same tokens whatever
other prompts are generated beside it.

    python examples/generate.py
    python examples/generate.py --model gpt2 --prompt "The sea" --prompt "Once" --top-p 0.9   # a model of your own

Needs transformers, which the extra `dev` installs. Without --model, a small Llama with random weights says nothing.
"""

import argparse
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.generation import LogitsProcessor, LogitsProcessorList

from fused_softmax import sample


class Sampler(LogitsProcessor):
    """A row's draw in place of its scores.

    seeds: int64 [n_rows], one a sequence. filters: temperature, top_k, top_p and min_p, as `sample` takes them.
    """

    def __init__(self, seeds: Tensor, **filters: Any):
        self.seeds, self.filters = seeds, filters

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids: int64 [n_rows, length]. scores: [n_rows, vocab]. Returns -inf, and 0 at each row's token."""
        tokens = sample(scores, **self.filters, seed=self.seeds, position=input_ids.shape[1]).tokens
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)


def generate(model: Any, input_ids: Tensor, seeds: Tensor, new_tokens: int, **filters: Any) -> Tensor:
    """Tokens [n_rows, length + new_tokens] of prompts [n_rows, length]."""
    return model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        logits_processor=LogitsProcessorList([Sampler(seeds, **filters)]),
        pad_token_id=model.config.eos_token_id,
    )


def tiny_model(vocab: int = 97) -> LlamaForCausalLM:
    """Two layers of random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def main(arguments: list[str] | None = None) -> list[list[int]]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="a causal model that transformers finds; default: random weights")
    parser.add_argument("--prompt", action="append", default=[], help="a prompt of --model; give it several times")
    parser.add_argument("--new-tokens", type=int, default=12)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--min-p", type=float)
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt; the next one has the next seed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    filters = {name: getattr(given, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    tokenizer = AutoTokenizer.from_pretrained(given.model) if given.model else None
    model = AutoModelForCausalLM.from_pretrained(given.model) if given.model else tiny_model()
    model = model.to(given.device).eval()
    if tokenizer is None:
        prompts = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    else:
        prompts = [tokenizer(text, return_tensors="pt").input_ids[0] for text in given.prompt or ["The sea"]]
    found = []
    for i, prompt in enumerate(prompts):
        seeds = torch.tensor([given.seed + i], device=given.device)
        found += generate(model, prompt[None].to(given.device), seeds, given.new_tokens, **filters).tolist()
        print(tokenizer.decode(found[-1]) if tokenizer else found[-1])
    return found


if __name__ == "__main__":
    main()
