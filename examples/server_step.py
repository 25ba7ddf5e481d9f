"""A server's loop: continuous batching of requests, each with its own filters, penalties, grammar and seed.

Requests arrive over time, take a place in a batch of fixed size, and leave it when they have their tokens. What they
ask for stands in tensors on the device, a row a place, so a step is the same few launches whoever is there. It waits
for the device only to read the tokens. On a GPU the model and the sampler are a CUDA graph each.

There are two batches. In one, `sample` draws a token for each place. In the other, the model judges several drafts of a
place at once, and `speculative_sample` keeps those that `sample` would have drawn. A draft costs no model: it is what
last followed the same token.

A token depends on its request's logits, parameters, seed and position alone: a request gets the same tokens in a full
batch, with drafts, and alone without them, which this program shows. It prints the tokens of each request, tokens per
second, and how much of a step's time the sampler takes. It takes about 4 s on two CPU cores.

    python examples/server_step.py
    python examples/server_step.py --places 64 --requests 256 --steps 100 --vocab 128256 --hidden 4096   # on a GPU

The model is an embedding and a linear layer, as large as a real model's last one if --hidden and --vocab are. Its
weights are random multiples of a power of two, so its sums are exact, and its logits do not depend on the batch. A real
model's do, a little. On a CPU `sample` is torch's operations, and its time is not that of the kernels.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import options
import torch
from options import whole
from torch import Tensor

from fused_softmax import sample, speculative_sample

FILTERS = "seed", "temperature", "top_k", "top_p", "min_p"
PENALTIES = "repetition", "presence", "frequency"


@dataclass
class Request:
    """What one user asks for, and gets. The numbers are `sample`'s; these here are off.

    prompt: at least one id. arrives: the step in which it does. forbidden: ids that the grammar rules out.
    """

    prompt: tuple[int, ...]
    n_tokens: int
    arrives: int = 0
    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    forbidden: tuple[int, ...] = ()
    wants_logprobs: bool = False
    speculative: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.speculative and self.penalized:
            raise ValueError("a speculative request has no penalties, which would change from draft to draft")

    @property
    def penalized(self) -> bool:
        return any(getattr(self, name) != getattr(Request, name) for name in PENALTIES)


class Batch:
    """n places for requests, and the step that gives each of them a token, or with n_drafts up to as many more.

    longest: tokens that a prompt and its output may have together; `length` has how many they are, which is the next
    one's position. valid: whether a step's last token could be drawn, which NaN logits or an empty grammar prevent.
    """

    def __init__(self, n: int, model: torch.nn.Sequential, longest: int, n_drafts: int = 0):
        self.model, self.n_drafts = model, n_drafts
        self.vocab, self.device = (weight := model.get_parameter("1.weight")).shape[0], weight.device
        self.there: list[Request | None] = [None] * n
        self.last, self.length = self.full(0, n), self.full(0, n)
        self.numbers = {name: self.full(getattr(Request, name), n) for name in FILTERS + PENALTIES}
        self.possible = self.full(-1, n, -(-self.vocab // 32)).int()
        self.ids = self.full(-1, n, longest)
        # What followed each token, -1 where nothing did. The last entry, which -1 finds, stays -1.
        self.followed = self.full(-1, self.vocab + 1)
        self.tokens, self.logprobs = self.full(-1, n, n_drafts + 1), self.full(0.0, n, n_drafts + 1)
        self.valid = self.full(True, n)
        self.calls: Counter[tuple] = Counter()
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] = {}

    def full(self, value: float, *shape: int) -> Tensor:
        return torch.full(shape, value, device=self.device)

    def put(self, request: Request) -> bool:
        """A request into a free place, if there is one."""
        if None not in self.there:
            return False
        place, ids = self.there.index(None), torch.tensor([*request.prompt, *request.tokens], device=self.device)
        self.there[place], self.last[place], self.length[place] = request, ids[-1], len(ids)
        for name, numbers in self.numbers.items():
            numbers[place] = getattr(request, name)
        self.possible[place] = bitmask(request.forbidden, self.vocab)
        self.ids[place] = torch.nn.functional.pad(ids, (0, self.ids.shape[1] - len(ids)), value=-1)
        self.followed[ids[:-1]] = ids[1:]
        return True

    def launch(self) -> bool:
        """Start a step if somebody is there. Nothing here waits for the device."""
        there = [each for each in self.there if each is not None]
        if there:
            self.is_warm, self.marks = True, [mark(self.device)]
            self.run(self.forward)
            # What nobody there asks for is not computed: each such combination is a graph of its own.
            self.run(self.draw, any(each.penalized for each in there), any(each.wants_logprobs for each in there))
        return bool(there)

    def run(self, part: Callable[..., None], *asked: bool) -> None:
        """Call a part of a step. On a GPU its first call is as it is, and compiles; the later ones are a CUDA graph."""
        key, captures = (part.__name__, *asked), self.device.type == "cuda"
        self.calls[key] += 1
        if captures and self.calls[key] > 1:
            if key not in self.graphs:
                with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
                    part(*asked)
                self.graphs[key] = graph
            self.graphs[key].replay()
        else:
            part(*asked)
        self.is_warm &= self.calls[key] > 1 + captures
        self.marks.append(mark(self.device))

    def forward(self) -> None:
        given = [self.last]
        for _ in range(self.n_drafts):
            given.append(self.followed[given[-1]])
        self.given = torch.stack(given, 1)
        self.logits = self.model(self.given.clamp(min=0))  # [n, n_drafts + 1, vocab]

    def draw(self, penalized: bool, wants_logprobs: bool) -> None:
        asked: dict[str, Any] = {name: self.numbers[name] for name in FILTERS}
        asked |= {"position": self.length, "bitmask": self.possible}
        asked |= {"return_logprobs": "raw"} if wants_logprobs else {}
        if self.n_drafts:
            drawn = speculative_sample(self.logits, self.given[:, 1:], **asked)
            tokens, logprobs, valid = drawn.tokens, drawn.logprobs, drawn.valid
            before = torch.cat((self.last[:, None], tokens[:, :-1]), 1)
            self.followed[torch.where(tokens < 0, -1, before)] = tokens
            self.last.copy_(tokens.gather(1, drawn.n_accepted[:, None]).squeeze(1))
            self.length += drawn.n_accepted + 1
        else:
            asked |= {"token_ids": self.ids} | {name: self.numbers[name] for name in PENALTIES} if penalized else {}
            out = sample(self.logits[:, 0], **asked, out=self.last)
            tokens, logprobs = out.tokens[:, None], None if out.logprobs is None else out.logprobs[:, None]
            valid = out.valid
            # A place that nobody has goes on, and stays within its row.
            self.ids.scatter_(1, self.length.clamp(max=self.ids.shape[1] - 1)[:, None], tokens)
            self.length += 1
        if logprobs is not None:
            self.logprobs.copy_(logprobs)
        self.tokens.copy_(tokens)
        self.valid.copy_(valid)

    def collect(self) -> Counter[str]:
        """Give each request its tokens, and let go of those that are done: how many tokens, and the parts' seconds."""
        n_tokens, found = 0, (self.tokens.tolist(), self.valid.tolist(), self.logprobs.tolist())  # here the host waits
        for place, (request, row, valid, logprobs) in enumerate(zip(self.there, *found, strict=True)):
            if request is not None:
                n_new = min(sum(token >= 0 for token in row) - (not valid), request.n_tokens - len(request.tokens))
                request.tokens += row[:n_new]
                request.logprobs += logprobs[:n_new] if request.wants_logprobs else []
                n_tokens += n_new
                if len(request.tokens) == request.n_tokens or not valid:
                    self.there[place] = None
        spans = [b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(self.marks)]
        return Counter(tokens=n_tokens, model=spans[0], sampler=spans[1])


def bitmask(forbidden: tuple[int, ...], vocab: int) -> Tensor:
    """int32 [ceil(vocab / 32)]: bit c % 32 of word c // 32 is 1 where column c is possible."""
    possible = torch.ones(-(-vocab // 32), 32, dtype=torch.int64)
    possible.view(-1)[list(forbidden)] = 0
    return (possible << torch.arange(32)).sum(1).to(torch.int32)


def mark(device: torch.device) -> Any:
    """A moment: of the device's work on a GPU, of the host's on a CPU."""
    if device.type != "cuda":
        return time.perf_counter()
    return torch.cuda.current_stream(device).record_event(torch.cuda.Event(enable_timing=True))


def serve(requests: list[Request], n_places: int, model: torch.nn.Sequential, n_drafts: int) -> Counter[str]:
    """Give all requests their tokens. Returns counts and seconds of the steps that had nothing to compile."""
    longest = max(len(each.prompt) + each.n_tokens for each in requests)
    batches = Batch(n_places, model, longest), Batch(n_places, model, longest, n_drafts)
    waiting, spent = requests, Counter[str]()
    for step in itertools.count():
        start = time.perf_counter()
        waiting = [each for each in waiting if each.arrives > step or not batches[each.speculative].put(each)]
        launched = [batch for batch in batches if batch.launch()]
        found = sum((batch.collect() for batch in launched), Counter())
        if not launched and not waiting:
            break
        if launched and all(batch.is_warm for batch in launched):
            spent.update(found | {"steps": 1, "all": time.perf_counter() - start})
    return spent


def model_of(vocab: int, hidden: int, device: str) -> torch.nn.Sequential:
    """Logits [..., vocab] of last tokens [...]."""
    model = torch.nn.Sequential(torch.nn.Embedding(vocab, hidden), torch.nn.Linear(hidden, vocab, bias=False))
    generator = torch.Generator(device).manual_seed(0)
    for weight in model.to(device).requires_grad_(False).parameters():
        weight.random_(-8, 9, generator=generator).div_(8)
    # Logits are about as wide apart for any width.
    model.get_parameter("0.weight").mul_(2.0 ** (3 - hidden.bit_length() // 2))
    return model


def users(n: int, vocab: int, most_tokens: int) -> list[Request]:
    """n requests of every kind. Two arrive in each step, and they stay for different times."""
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0.0, "speculative": True}, {"top_k": 5}, {"top_p": 0.9, "temperature": 0.7},
        {"temperature": 0.3, "top_p": 0.9, "speculative": True, "wants_logprobs": True},
        {"min_p": 0.1, "wants_logprobs": True},
        {"forbidden": tuple(range(vocab // 2)), "temperature": 0.8},
        {"repetition": 1.3, "presence": 0.5, "frequency": 0.2, "top_k": 20, "wants_logprobs": True},
        {"temperature": 0.5, "top_k": 8, "min_p": 0.05, "forbidden": (0, vocab - 1), "speculative": True},
    ]  # fmt: skip
    return [
        Request((i % vocab, 7 * i % vocab), max(1, most_tokens - i % 3), i // 2, seed=100 + i, **kinds[i % len(kinds)])
        for i in range(n)
    ]


def main(arguments: list[str] | None = None) -> list[Request]:
    parser = options.Parser(__doc__)
    parser.add_argument("--places", type=whole(), default=4, help="of each of the two batches")
    parser.add_argument("--requests", type=whole(), default=18)
    parser.add_argument("--steps", type=whole(), default=12, help="the most tokens of a request")
    parser.add_argument("--drafts", type=whole(0), default=3, help="of a speculative request in a step")
    parser.add_argument("--vocab", type=whole(), default=61)
    parser.add_argument("--hidden", type=whole(), default=64, help="the width of the model")
    parser.add_argument("--device", type=options.device, default=options.BEST_DEVICE)
    given = parser.parse(arguments)
    model = model_of(given.vocab, given.hidden, given.device)
    together = users(given.requests, given.vocab, given.steps)
    spent = serve(together, given.places, model, given.drafts)
    for one in together:
        alone = replace(one, arrives=0, speculative=False, tokens=[], logprobs=[])
        serve([alone], 1, model, 0)
        print(one.tokens, "as alone" if one.tokens == alone.tokens else f"but alone {alone.tokens}")
    if spent:
        rate, step = spent["tokens"] / spent["all"], spent["all"] / spent["steps"] * 1e3
        share = spent["sampler"] / (spent["model"] + spent["sampler"])
        print(f"{rate:.0f} tokens/s, {step:.3g} ms a step; of model and sampler, the sampler takes {share:.0%}")
    return together


if __name__ == "__main__":
    main()
