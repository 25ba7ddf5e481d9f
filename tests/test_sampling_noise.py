"""The random words of a draw, the noise they make, and the columns it chooses."""

import math
import os

import pytest
import torch
import triton
import triton.language as tl

from fused_softmax.ops.sampling import noise

# Key and counter words, low word first, and the result: philox4x32-10 of Random123's kat_vectors.
KNOWN = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def signed(number):
    return (number + 2**63) % 2**64 - 2**63


def int64(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


@pytest.mark.parametrize(("key", "counter", "result"), KNOWN)
def test_words_are_those_of_the_known_answers(key, counter, result):
    seed = int64(signed(key[0] | key[1] << 32))
    assert tuple(word.item() for word in noise.philox(seed, *map(int64, counter))) == result


@triton.jit
def _philox(seed_ptr, c_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    c_0, c_1 = tl.load(c_ptr + i).to(tl.uint32), tl.load(c_ptr + N + i).to(tl.uint32)
    c_2, c_3 = tl.load(c_ptr + 2 * N + i).to(tl.uint32), tl.load(c_ptr + 3 * N + i).to(tl.uint32)
    words = tl.philox(tl.load(seed_ptr), c_0, c_1, c_2, c_3)
    for j in tl.static_range(4):
        tl.store(y_ptr + j * N + i, words[j].to(tl.int64))


@pytest.mark.skipif(
    os.environ.get("FUSED_SOFTMAX_INTERPRET") != "1" and not torch.cuda.is_available(), reason="runs a kernel"
)
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**40 + 7, -1, -(2**63)])
def test_words_are_those_of_triton(seed, device):
    n = 64
    counter = torch.randint(2**32, (4, n), device=device)
    seed, words = torch.tensor([seed], device=device), torch.empty_like(counter)
    _philox[(1,)](seed, counter, words, N=n)
    assert torch.equal(words, torch.stack(noise.philox(seed, *counter)))


def test_a_group_takes_its_word_of_its_call():
    seed, position = int64(3, -5), int64(2**40 + 9, -1)
    of_groups = noise.exponential_of_groups(seed, position, 300, noise.GROUPS)
    for row in range(2):
        low, high = position[row] & 0xFFFFFFFF, position[row] >> 32 & 0xFFFFFFFF
        for group in (0, 1, 31, 32, 95, 127, 128, 130, 299):
            call = int64(32 * (group // 128) + group % 32)
            words = noise.philox(seed[row], call, int64(noise.GROUPS), low, high)
            assert of_groups[row, group] == noise.exponential(words, group // 32 % 4)


def test_noise_is_relative_to_itself_where_it_is_small_and_finite_where_it_is_large():
    def of(*words):
        return noise.exponential(tuple(int64(word) for word in words), 0).item()

    assert of(0, 0, 0, 0) == 2.0**-65
    assert of(0, 5, 3, 0) == pytest.approx(6.5 * 2.0**-64, rel=1e-15)
    assert of(1, 0, 0, 0) == pytest.approx(2.0**-32, rel=1e-9)
    assert of(2**31, 0, 0, 0) == pytest.approx(math.log(2), rel=1e-9)
    assert of(2**32 - 1, 2**32 - 1, 0, 0) == pytest.approx(24 * math.log(2))
    many = torch.arange(1, 2**20, 997)
    zero = torch.zeros_like(many)
    assert (noise.exponential((many, zero, zero, zero), 0).diff() > 0).all()


def draws(n, seed=7):
    """E of n positions for 8 groups that share two calls."""
    words = noise.words_at(torch.full((n,), seed), torch.arange(n), int64(0, 1), noise.GROUPS)
    return torch.cat([noise.exponential(words, j) for j in range(4)], 1)


def test_noise_is_exponential():
    e = draws(40_000).flatten()
    # Bins of equal probability, then the tails: of 320 000 draws 39 and 20 are expected beyond the last ones.
    bins = (-torch.expm1(-e) * 100).long().bincount(minlength=100)
    expected = e.numel() / 100
    assert ((bins - expected).square() / expected).sum() < 99 + 5 * math.sqrt(2 * 99)
    for k in range(4, 14):
        for count, p in (((e < 2.0**-k).sum(), -math.expm1(-(2.0**-k))), ((e > k * math.log(2)).sum(), 2.0**-k)):
            assert abs(count - e.numel() * p) < 5 * math.sqrt(e.numel() * p)


def test_noise_of_columns_positions_and_seeds_is_independent():
    n = 40_000
    u = -torch.expm1(-draws(n).T)
    others = [*u, u[0].roll(1), *-torch.expm1(-draws(n, seed=8).T[:2]), *-torch.expm1(-draws(n, seed=7 + 2**32).T[:2])]
    for each in (lambda v: v, lambda v: v.square(), lambda v: (v < 2.0**-5).double()):
        correlation = torch.corrcoef(torch.stack([each(v) for v in others])).fill_diagonal_(0)
        assert correlation.abs().max() < 5 / math.sqrt(n)


def test_streams_differ():
    seed, position = int64(1), int64(2)
    words = [noise.words_at(seed, position, int64(0), stream)[0].item() for stream in range(5)]
    assert len(set(words)) == 5


@pytest.mark.parametrize("n_cols", [1, 7, 8, 9, 255, 257, 1025])
def test_a_column_without_weight_is_never_drawn(n_cols):
    n = 64
    column = torch.randint(n_cols, (n, 1))
    weights = torch.zeros(n, n_cols, dtype=torch.float64).scatter(1, column, 1e-300)
    assert torch.equal(noise.draw(weights, torch.zeros(n, dtype=torch.int64), torch.arange(n)), column.squeeze(1))


def test_a_group_is_added_by_pairs_of_neighbours():
    x = torch.rand(100, 8, dtype=torch.float64)
    a, b, c, d, e, f, g, h = x.unbind(1)
    assert torch.equal(noise.sum_of_groups(x), ((a + b) + (c + d)) + ((e + f) + (g + h)))
