"""What decides a draw: random words by counter, exponential noise of them, and the columns it chooses.

Words. Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) gives four
words of 32 bits for a key and a counter; triton.language.philox(seed, c0, c1, c2, c3) gives the same. Here

    key      the seed, 64 bits, low word first
    counter  c0  which call: of a group, 32 * (group // 128) + group % 32; of a column, the column
             c1  the stream, below, and 8 times the turn: a draw that is judged afterwards may take several turns
             c2  the position's low 32 bits
             c3  the position's high 32 bits

A group is 8 neighbouring columns. A call serves four groups that are 32 groups (256 columns) apart: group g takes word
(g // 32) % 4. So a thread that holds 8 neighbouring columns in each of four coalesced loads pays one call for its 32
columns.

Draw. With weights w (exp of the scores, 0 where nothing is kept) and independent E of the exponential distribution of
rate 1, the column of the least E / w has probability w / sum w (Efraimidis, Spirakis, "Weighted random sampling with a
reservoir", 2006); log w - log E is the Gumbel-max trick. The least of a group is E' / (sum of its w), with E'
exponential too, and which member it is does not depend on E'. So a group is drawn with one E', and its member by E of a
second stream (Maddison, Tarlow, Minka, "A* sampling", NeurIPS 2014, section 3). One E' for 8 columns is what lets a
kernel draw as fast as it reads. Maxima may be taken in any order: a token does not depend on how a row is split.

Noise. Of the words w0 to w3 of a call, word j with the others gives

    u = (wj * 2**32 + (the xor of the other three) + 1/2) / 2**64,  at most 1 - 2**-24,  and  E = -log(1 - u)

A column that is r times as likely as the likeliest wins where its E is less than r times the other's, so its frequency
is right if the distribution of E is right near 0, relative to E. At a gap of 22 between logits r is 2**-31.7, and the
least E of 2**20 columns is near 2**-20. Steps of 2**-24 or 2**-32 are too coarse for that; here they are 2**-64.
Near 0, E is u, so floats keep it. Large E only lose: their cut at 16.6 moves no ratio by more than 1e-6. u is never 0
or 1, so E is never 0 or infinite and a column of weight 0 is never drawn. The high words of groups are independent;
their low words are independent of any two other high words, and matter where wj is nearly 0 alone.

All is computed in float64. A kernel that computes in float32 draws the same column, except where the best two scores
differ by less than its rounding.
"""

import torch
from torch import Tensor

GROUP = 8  # columns of a group, which share one E
APART = 32  # groups from one group of a call to its next
WORDS = 4
GROUPS, MEMBERS, ACCEPTED, RESIDUAL_GROUPS, RESIDUAL_MEMBERS = range(5)  # streams of a turn
STREAMS = 8  # that a turn has

_MASK = 0xFFFFFFFF
_A, _B = 0xD2511F53, 0xCD9E8D57  # multipliers, and what each round adds to the key
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_MOST = 1.0 - 2.0**-24


def philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, ...]:
    """Four words in [0, 2^32), int64, of the broadcast of an int64 seed and counter words in [0, 2^32)."""
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        (high_a, low_a), (high_b, low_b) = _product(_A, c0), _product(_B, c2)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    return c0, c1, c2, c3


# One node for a compiler: every round uses each word twice, so what TorchInductor inlines would double ten times.
_library = torch.library.Library("fused_softmax", "FRAGMENT")
_library.define("philox(Tensor seed, Tensor c0, Tensor c1, Tensor c2, Tensor c3) -> Tensor[]")
_library.impl("philox", lambda *words: list(philox(*words)), "CompositeExplicitAutograd")


def _philox_of_many(info, in_dims, *words):
    """Under vmap: the dim that is mapped over comes first, before as many dims as any of the words has."""
    ndim = max(word.ndim - (d is not None) for word, d in zip(words, in_dims, strict=True))
    moved = []
    for word, d in zip(words, in_dims, strict=True):
        own = word if d is None else word.movedim(d, 0)
        moved.append(own if d is None else own.reshape(len(own), *(1,) * (ndim + 1 - own.ndim), *own.shape[1:]))
    return torch.ops.fused_softmax.philox(*moved), [0] * WORDS


torch.library.register_vmap("fused_softmax::philox", _philox_of_many, lib=_library)


def _product(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low word of a product of two."""
    less = word * (factor - 2**32)  # above -2**62, where factor * word may pass int64
    return word + (less >> 32), less & _MASK


def words_at(
    seed: Tensor, position: Tensor, call: Tensor, stream: int, turn: int | Tensor = 0
) -> tuple[Tensor, ...]:  # fmt: skip
    """The four words [n, calls] of calls [n, calls] or [calls], for seeds and positions [n]. turn: for each call."""
    seed, position = seed[:, None], position[:, None]
    words = seed, call, torch.zeros_like(call) + turn * STREAMS + stream, position & _MASK, (position >> 32) & _MASK
    return tuple(torch.ops.fused_softmax.philox(*words)) if torch.compiler.is_compiling() else philox(*words)


def uniform(words: tuple[Tensor, ...], which: int) -> Tensor:
    """u of one of four words, float64, above 0 and at most 1 - 2^-24."""
    first, second, third = (word for j, word in enumerate(words) if j != which)
    low = (first ^ second ^ third).double() + 0.5
    return (words[which].double() * 2.0**-32 + low * 2.0**-64).clamp(max=_MOST)


def exponential(words: tuple[Tensor, ...], which: int) -> Tensor:
    """E of one of four words, float64, at least 2^-65."""
    return -torch.log1p(-uniform(words, which))


def exponential_of_groups(seed: Tensor, position: Tensor, n_groups: int, stream: int, turn: int = 0) -> Tensor:
    """E [n, n_groups] for seeds and positions [n]."""
    blocks = -(-n_groups // (APART * WORDS))
    call = torch.arange(blocks * APART, device=seed.device)
    words = words_at(seed, position, call, stream, turn)
    of_words = [exponential(words, j).unflatten(1, (blocks, APART)) for j in range(WORDS)]
    return torch.stack(of_words, 2).flatten(1)[:, :n_groups]


def draw(
    weights: Tensor, seed: Tensor, position: Tensor, groups: int = GROUPS, members: int = MEMBERS, turn: int = 0
) -> Tensor:  # fmt: skip
    """A column of each row of weights [n, n_cols], float64 and not negative, for seeds and positions [n]: int64 [n].

    Of equal scores the lowest column; 0 for a row without weight.
    """
    n_groups = -(-weights.shape[1] // GROUP)
    weights = torch.nn.functional.pad(weights, (0, n_groups * GROUP - weights.shape[1]))
    of_group = sum_of_groups(weights.unflatten(1, (n_groups, GROUP)))
    group = (of_group / exponential_of_groups(seed, position, n_groups, groups, turn)).argmax(1, keepdim=True)
    cols = group * GROUP + torch.arange(GROUP, device=group.device)
    noise = exponential(words_at(seed, position, cols, members, turn), 0)
    member = (weights.gather(1, cols) / noise).argmax(1, keepdim=True)
    return cols.gather(1, member).squeeze(1)


def sum_of_groups(weights: Tensor) -> Tensor:
    """The sums over the last dim of [..., 8], by pairs of neighbours: one order, so one result."""
    while weights.shape[-1] > 1:
        weights = weights[..., ::2] + weights[..., 1::2]
    return weights.squeeze(-1)
