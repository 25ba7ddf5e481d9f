"""The sampling step of a server: one call for requests that each have filters, a seed and a grammar of their own.

A batch is a fixed number of places. Requests come and go, so what they ask for stands in tensors on the device, a row a
place. A step is the same few launches whoever is there: it never waits for the device, and on a GPU it is captured once
as a CUDA graph. Each token depends on its request's logits, filters, seed and position alone, so a request gets the
same tokens in a full batch and alone, which this program shows.

    python examples/server_step.py
    python examples/server_step.py --places 64 --vocab 128256 --steps 50   # on a GPU

The model is a table of random logits, a row for each last token.
"""

from dataclasses import dataclass, field

import options
import torch
from options import whole
from torch import Tensor

from fused_softmax import sample


@dataclass
class Request:
    """What one user asks for. top_k 0 and top_p 1 are off. forbidden: ids that the grammar rules out."""

    prompt: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    forbidden: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)


class Places:
    """The state of a batch of n places on one device, and its step."""

    def __init__(self, n: int, table: Tensor):
        vocab, device = table.shape[1], table.device
        self.table = table
        self.last = torch.zeros(n, dtype=torch.int64, device=device)
        self.position = torch.zeros(n, dtype=torch.int64, device=device)
        self.seed = torch.zeros(n, dtype=torch.int64, device=device)
        self.temperature = torch.ones(n, device=device)
        self.top_k = torch.zeros(n, dtype=torch.int64, device=device)
        self.top_p = torch.ones(n, device=device)
        self.possible = torch.full((n, -(-vocab // 32)), -1, dtype=torch.int32, device=device)
        self.valid = torch.ones(n, dtype=torch.bool, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def put(self, place: int, request: Request) -> None:
        """A request into a place. Its position is the number of tokens that it has."""
        self.last[place] = request.tokens[-1] if request.tokens else request.prompt
        self.position[place] = len(request.tokens)
        self.seed[place], self.temperature[place] = request.seed, request.temperature
        self.top_k[place], self.top_p[place] = request.top_k, request.top_p
        self.possible[place] = bitmask(request.forbidden, self.table.shape[1])

    def step(self) -> None:
        """A token for every place, over its last one."""
        logits = self.table[self.last % len(self.table)]  # stands for the model
        drawn = sample(
            logits, self.temperature, self.top_k, self.top_p, seed=self.seed, position=self.position,
            bitmask=self.possible, out=self.last,
        )  # fmt: skip
        self.valid.copy_(drawn.valid)  # False where nothing can be drawn: NaN logits, an empty grammar
        self.position += 1

    def replay(self) -> None:
        """As `step`, by a graph where the device has them."""
        if not self.table.is_cuda:
            return self.step()
        if self.graph is None:
            kept = [each.clone() for each in (self.last, self.position, self.valid)]
            self.step()  # compiles what the graph launches
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.step()
            for each, before in zip((self.last, self.position, self.valid), kept, strict=True):
                each.copy_(before)
        return self.graph.replay()


def bitmask(forbidden: tuple[int, ...], vocab: int) -> Tensor:
    """int32 [ceil(vocab / 32)]: bit c % 32 of word c // 32 is 1 where column c is possible."""
    words = [0xFFFFFFFF] * -(-vocab // 32)
    for column in forbidden:
        words[column // 32] &= ~(1 << column % 32)
    return torch.tensor([word - 2**32 if word >= 2**31 else word for word in words], dtype=torch.int32)


def serve(requests: list[Request], n_places: int, steps: int, table: Tensor) -> None:
    """Give each request `steps` tokens, as many at a time as there are places; the others wait."""
    places, waiting = Places(n_places, table), list(requests)
    there: list[Request | None] = [None] * n_places
    while waiting or any(there):
        for place, request in enumerate(there):
            if request is None and waiting:
                there[place] = waiting.pop(0)
                places.put(place, there[place])
        places.replay()
        tokens, valid = places.last.tolist(), places.valid.tolist()  # the server waits here, once a step
        for place, request in enumerate(there):
            if request is not None:
                request.tokens.append(tokens[place])
                if len(request.tokens) == steps or not valid[place]:
                    there[place] = None


def users(n: int, vocab: int) -> list[Request]:
    """n requests with filters of every kind."""
    kinds = [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.9, "temperature": 0.7}, {"forbidden": (0, vocab - 1)}]
    return [Request(prompt=i % vocab, seed=100 + i, **kinds[i % len(kinds)]) for i in range(n)]


def main(arguments: list[str] | None = None) -> list[Request]:
    parser = options.Parser(__doc__)
    parser.add_argument("--places", type=whole(), default=4)
    parser.add_argument("--requests", type=whole(), default=7)
    parser.add_argument("--steps", type=whole(), default=8)
    parser.add_argument("--vocab", type=whole(), default=61)
    parser.add_argument("--device", type=options.device, default=options.BEST_DEVICE)
    given = parser.parse(arguments)
    generator = torch.Generator(given.device).manual_seed(0)
    n_logits = min(given.vocab, 4096), given.vocab  # a row for each last token, by its remainder
    table = torch.randn(n_logits, device=given.device, generator=generator) * 2
    together, alone = users(given.requests, given.vocab), users(given.requests, given.vocab)
    serve(together, given.places, given.steps, table)
    for request in alone:
        serve([request], 1, given.steps, table)
    for one, other in zip(together, alone, strict=True):
        print(one.tokens, "as alone" if one.tokens == other.tokens else f"but alone {other.tokens}")
    return together


if __name__ == "__main__":
    main()
