"""Drafts with a distribution, and masks of filters, by the kernels: what torch's operations in float64 give."""

import math
from threading import Thread

import pytest
import torch
from products import pairwise
from sampling_cases import few, hard_rows

import fused_softmax
from fused_softmax import explain, sample, speculative_sample
from fused_softmax.core import calls
from fused_softmax.ops.sampling import judged, reference, speculative, turns, verification
from fused_softmax.ops.sampling.options import Sampling

FILTERS = [
    {}, {"temperature": 0.7}, {"temperature": 0.0}, {"min_p": 0.1}, {"top_k": 5}, {"top_k": 90}, {"top_p": 0.8},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.02}, {"top_k": 60, "top_p": 0.7, "order": "joint"},
]  # fmt: skip
MIB = 2**20
PARENTS = {2: [-1, -1], 3: [-1, 0, 0], 5: [-1, -1, 0, 1, 0]}


def rows_of(n, k, n_cols, dtype, device, seed=0, near=0.5):
    """(target logits, draft logits near them, drafts drawn from these)."""
    generator = torch.Generator().manual_seed(seed)
    target = (torch.randn(n, k + 1, n_cols, generator=generator) * 2).to(dtype)
    draft = (target[:, :k].float() + torch.randn(n, k, n_cols, generator=generator) * near).to(dtype)
    tokens = torch.multinomial(draft.float().softmax(2).flatten(0, 1), 1, generator=generator).view(n, k)
    return target.to(device), draft.to(device), tokens.to(device)


def both(target, tokens, draft_logits, draft_probs, given, options):
    """(the kernels' output, that of torch's operations) of one call, whose seeds and positions are its own."""
    n, device = len(target), target.device
    random = {"seed": torch.arange(n, device=device) * 7 + 1, "position": torch.arange(n, device=device) * 11}
    of_draft = {"draft_probs": draft_probs} if draft_logits is None else {"draft_logits": draft_logits}
    with explain() as explained:
        ours = speculative_sample(target, tokens, **of_draft, **given, **options, **random)
    assert {each.route for each in explained if each.function == "speculative_sample"} == {"kernel"}
    parents = given.get("parents")
    parents = None if parents is None else torch.as_tensor(parents, device=device).expand(n, -1)
    lengths = given.get("draft_lengths")
    lengths = None if lengths is None else torch.as_tensor(lengths, device=device).expand(n)
    masks = [given.get(name) for name in ("logit_bias", "bitmask")]
    masks = [None if each is None else each if each.ndim == 3 else each.expand(n, -1)[:, None] for each in masks]
    wanted = verification.speculative_sample(
        target, tokens, draft_logits, draft_probs, lengths, parents, *masks, random["seed"],
        random["position"], verify=given["verify"], return_logprobs=given.get("return_logprobs"), **options,
    )  # fmt: skip
    return ours, wanted


def same(ours, wanted, apart=0):
    """apart: how many sequences may differ, because two scores do by less than float32's rounding."""
    differs = torch.zeros(len(ours.tokens), dtype=torch.bool, device=ours.tokens.device)
    for one, other in zip(ours, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is None:
            continue
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        one, other = (each.unflatten(0, (-1, 1)).flatten(1) for each in (one, other))
        if one.dtype == torch.float32:
            near = torch.isclose(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)
            differs |= ~near.all(1)
        else:
            differs |= (one != other).any(1)
    assert differs.sum() <= apart


@pairwise(("verify", "filters"), ("verify", "told"), ("told", "dtype"))
@pytest.mark.parametrize("verify", ["chain", "block", "tree"])
@pytest.mark.parametrize("told", ["logits", "probs"])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("k", [2, 3, 5])
@pytest.mark.parametrize("n_cols", [7, 300, 1025])
@pytest.mark.parametrize("logprobs", [None, "raw", "processed"])
def test_drafts_are_verified_as_by_torch(verify, told, filters, dtype, k, n_cols, logprobs, device):
    n = 200 if device == "cuda" else 3
    target, draft, tokens = rows_of(n, k, n_cols, dtype, device)
    probs = (1.5 * draft.float().softmax(2)).to(dtype) if told == "probs" else None
    given = {"verify": verify, "return_logprobs": logprobs} | ({"parents": PARENTS[k]} if verify == "tree" else {})
    same(*both(target, tokens, None if told == "probs" else draft, probs, given, filters), apart=n // 100)


@pytest.mark.gpu
@pytest.mark.parametrize("verify", ["chain", "block", "tree"])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_long_rows_are_verified_as_by_torch(verify, filters, scale, device):
    target, draft, tokens = rows_of(24, 5, 128256, torch.bfloat16, device)
    given = {"verify": verify} | ({"parents": PARENTS[5]} if verify == "tree" else {})
    same(*both(target * scale, tokens, draft * scale, None, given, filters), apart=1)


@pytest.mark.parametrize("verify", ["chain", "block", "tree"])
def test_masks_and_numbers_of_rows(verify, device):
    n, k, n_cols = 4, 3, 70
    target, draft, tokens = rows_of(n, k, n_cols, torch.float32, device, seed=2)
    generator = torch.Generator().manual_seed(5)
    numbers = {
        "temperature": torch.linspace(0.4, 1.6, n * (k + 1), device=device).view(n, k + 1),
        "top_k": torch.randint(2, 20, (n, k + 1), generator=generator).to(device),
    }  # fmt: skip
    given = {
        "verify": verify, "logit_bias": torch.randn(n, k + 1, n_cols, generator=generator).to(device),
        "bitmask": torch.randint(-(2**31), 2**31, (n, k + 1, 3), generator=generator).int().to(device),
        "draft_lengths": torch.tensor([3, 2, 0, 4], device=device), "return_logprobs": "processed",
    } | ({"parents": PARENTS[3]} if verify == "tree" else {})  # fmt: skip
    same(*both(target, tokens, draft, None, given, numbers))


@pairwise()
@pytest.mark.parametrize("verify", ["chain", "block", "tree"])
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("bias", [None, "columns", "sequences", "rows"])
@pytest.mark.parametrize("bits", [None, "sequences", "rows"])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8}], ids=str)
def test_masks_of_sequences(verify, told, bias, bits, filters, device):
    """A bias and a bitmask may have a row for each row or for each sequence, and a bias one for all."""
    n, k, n_cols = 5, 3, 70
    target, draft, tokens = rows_of(n, k, n_cols, torch.float32, device, seed=2)
    generator = torch.Generator().manual_seed(5)
    shapes = {"columns": (), "sequences": (n,), "rows": (n, k + 1)}
    given = {"verify": verify} | ({"parents": PARENTS[3]} if verify == "tree" else {})
    if bias is not None:
        given["logit_bias"] = torch.randn(*shapes[bias], n_cols, generator=generator).to(device) * 3
    if bits is not None:
        words = torch.randint(-(2**31), 2**31, (*shapes[bits], 3), generator=generator)
        given["bitmask"] = words.int().to(device)
    same(*both(target, tokens, draft if told else None, None, given, filters))


@pytest.mark.parametrize("verify", ["chain", "block", "tree"])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}], ids=str)
def test_rows_that_cannot_be_drawn_from_and_equal_ones(verify, filters, device):
    """NaN, inf, -inf, drafts without a probability, and a draft that is the target, of which nothing is left."""
    n, k, n_cols = 8, 2, 40
    target, draft, tokens = rows_of(n, k, n_cols, torch.float32, device, seed=3)
    target[0, 1, 5], target[1, 0], target[2, 0, 7] = math.nan, -math.inf, math.inf
    draft[3, 1, 0], draft[4, 0] = math.nan, -math.inf
    draft[5] = target[5, :k]
    tokens[6, 0] = -1
    target[7, 0, tokens[7, 0]] = -math.inf
    given = {"verify": verify} | ({"parents": [-1, 0]} if verify == "tree" else {})
    ours, wanted = both(target, tokens, draft, None, given, filters)
    same(ours, wanted)
    assert ours.valid.tolist()[:2] == [False, False] or ours.n_accepted[0] == 0
    probs = draft.softmax(2).nan_to_num(0.0)
    probs[3, 0, 1], probs[4, 1, 2] = -0.1, math.inf
    same(*both(target, tokens, None, probs, given, filters))


def test_nothing_is_left_of_equal_distributions(device):
    """A draft that neither has is rejected; the target is then drawn from."""
    target = torch.randn(6, 2, 40, generator=torch.Generator().manual_seed(1))
    target[:, :, 5] = -math.inf
    target = target.to(device)
    tokens = torch.full((6, 1), 5, device=device)
    ours, wanted = both(target, tokens, target[:, :1], None, {"verify": "chain"}, {})
    same(ours, wanted)
    assert ours.n_accepted.eq(0).all()
    assert ours.tokens[:, 0].ne(0).any()


@pytest.mark.parametrize("verify", ["tree", "block", "chain"])
def test_many_siblings_and_few(verify, device):
    """What is left after several rejections, of drafts that are far from the target; of blocks, nearer ones."""
    n, k, n_cols = few(64, "kernels", 24), 4, 90
    near = 1.0 if verify == "block" else 3.0
    target, draft, tokens = rows_of(n, k, n_cols, torch.float32, device, seed=4, near=near)
    if verify != "block":
        draft = draft[:, :1].expand(n, k, n_cols)
        generator = torch.Generator().manual_seed(5)
        tokens = torch.multinomial(draft[:, 0].cpu().softmax(1), k, replacement=True, generator=generator).to(device)
    given = {"verify": verify} | ({"parents": [-1] * k} if verify == "tree" else {})
    ours, wanted = both(target, tokens, draft, None, given, {})
    same(ours, wanted)
    assert ours.nodes.max() > 0 if verify == "tree" else (ours.n_accepted == 0).any()
    assert verify == "tree" or ours.n_accepted.max() > 0


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_call_is_prepared_once(requires_grad, monkeypatch, device):
    target, draft, tokens = rows_of(2, 2, 40, torch.float32, device)
    target.requires_grad_(requires_grad)
    first = speculative_sample(target, tokens, draft, 0.8, seed=1)
    monkeypatch.setattr(speculative, "prepare_speculation", None)
    again = speculative_sample(target, tokens, draft, 0.7999, seed=1)
    same(again, first)


def test_slices_are_read_where_they_lie(device):
    n, k = 3, 2
    wide, draft, tokens = rows_of(n, 8, 60, torch.float32, device)
    given = {"verify": "chain"}
    for target in (wide[:, -k - 1 :], wide[:, :: 9 // (k + 1)][:, : k + 1], wide.mT.contiguous().mT[:, : k + 1]):
        ours, wanted = both(target, tokens[:, :k], draft[:, 1 : k + 1], None, given, {})
        same(ours, wanted)


PARENTS_OF = {
    "tree": [[-1, -1, 0, 1], [-1, 0, 1, 2], [-1, 3, 0, 0], [-1, -1, -1, -1], [-2, 0, 1, 0], [-1, 0, 0, 1]],
    "one tree": [-1, -1, 0, 0],
}


@pairwise(("verify", "lengths"), ("verify", "logprobs"), ("lengths", "options"))
@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_p": 0.8}, {"top_k": 5, "min_p": 0.1}], ids=str)
@pytest.mark.parametrize("logprobs", [None, "raw", "processed"])
@pytest.mark.parametrize("lengths", [None, 2, "of sequences"])
@pytest.mark.parametrize("verify", ["chain", "block", "tree", "one tree"])
def test_told_drafts_are_traced_as_by_torch(verify, lengths, logprobs, options, device):
    """Also of drafts that are none, lengths and parents out of range, and rows that cannot be drawn from."""
    n, k = 6, 4
    target, _, tokens = rows_of(n, k, 40, torch.float32, device, seed=3)
    target[:, :, 7] += 6.0  # so that drafts are accepted often
    tokens = torch.where(torch.rand(n, k, generator=torch.Generator().manual_seed(2)).to(device) < 0.8, 7, tokens)
    tokens[1, 2], tokens[2, 0], tokens[3, 1], target[3, 1] = -1, 40, 0, math.nan
    given = {"verify": verify.removeprefix("one "), "return_logprobs": logprobs}
    if verify in PARENTS_OF:
        given["parents"] = torch.tensor(PARENTS_OF[verify], device=device)
    if lengths is not None:
        given["draft_lengths"] = lengths if lengths == 2 else torch.tensor([4, 3, 5, 2, 0, -1], device=device)
    ours, wanted = both(target, tokens, None, None, given, options)
    same(ours, wanted)
    assert wanted.n_accepted.max() > 0


MASKS = [
    ("top_k", 1), ("top_k", 70), ("top_k", 0), ("top_k", "of rows"), ("top_p", 0.1), ("top_p", 0.9),
    ("top_p", "of rows"), ("min_p", 0.01), ("min_p", "of rows"),
]  # fmt: skip
OF_ROWS = {
    "top_k": lambda n: torch.arange(n) * 7, "top_p": lambda n: torch.linspace(-0.1, 1.1, n),
    "min_p": lambda n: torch.linspace(-0.1, 1.1, n),
}  # fmt: skip


def odd_rows(n_cols):
    """A NaN, nothing, one inf, two, an inf beside a NaN, few columns."""
    x = torch.randn(6, n_cols, generator=torch.Generator().manual_seed(1))
    x[0, 2], x[1], x[2, 3], x[4, 2], x[4, 3], x[5, 3:] = math.nan, -math.inf, math.inf, math.inf, math.nan, -math.inf
    x[3, [1, 4]] = math.inf
    return x


@pairwise(("mask", "dtype"), ("mask", "n_cols"))
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n_cols", [5, 300, 2500])
def test_rows_are_masked_as_by_torch(mask, dtype, n_cols, device):
    name, number = mask
    x = torch.cat([hard_rows(n_cols), odd_rows(n_cols)]).to(dtype).to(device)
    number = OF_ROWS[name](len(x)).to(device) if number == "of rows" else number
    with explain() as explained:
        y = getattr(fused_softmax, f"{name}_mask_logits")(x, number)
    assert explained[0].route == "kernel"
    off = name == "top_k" and isinstance(number, int) and not 0 < number < n_cols
    wanted = reference.mask_logits(x, **({} if off else {name: number}))
    assert (y.dtype, y.shape) == (wanted.dtype, wanted.shape)
    assert torch.equal(y.isnan(), wanted.isnan())
    assert torch.equal(y.nan_to_num(7.0), wanted.nan_to_num(7.0))


def test_few_rows_are_masked_at_a_time(monkeypatch, device):
    x = torch.randn(40, 60, device=device)
    top_p = torch.linspace(0.1, 0.9, 40, device=device)
    whole = fused_softmax.top_p_mask_logits(x, top_p)
    calls.forget()
    monkeypatch.setattr(judged, "_MOST_BYTES", 1)
    assert torch.equal(fused_softmax.top_p_mask_logits(x, top_p), whole)


def test_few_sequences_of_short_rows_are_verified_at_a_time(monkeypatch, device):
    """The notes of a row of 64 columns take about as much as those of a row of 16000."""
    target, draft, tokens = rows_of(7, 2, 64, torch.bfloat16, device)
    whole = speculative_sample(target, tokens, draft, top_p=0.9, seed=1)
    real, at_once = speculative.prepare_speculation, []
    watched = lambda given, *more, **asked: at_once.append(len(given[0])) or real(given, *more, **asked)  # noqa: E731
    monkeypatch.setattr(speculative, "prepare_speculation", watched)
    of_a_row = 2 * judged.bytes_of_a_row(7 * 3, target, Sampling(top_p=0.9))
    monkeypatch.setattr(turns, "_MOST_BYTES", 3 * 3 * of_a_row)
    calls.forget()
    found = speculative_sample(target, tokens, draft, top_p=0.9, seed=1)
    assert at_once == [3, 3, 1]
    assert all(torch.equal(a, b) for a, b in zip(found[:3], whole[:3], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_long_rows_are_masked_as_by_torch(mask, device):
    name, number = mask
    x = 2 * torch.randn(40, 151936, device=device, generator=torch.Generator(device).manual_seed(2))
    number = OF_ROWS[name](len(x)).to(device) if number == "of rows" else number
    off = name == "top_k" and isinstance(number, int) and number == 0
    for each in (x, (3 * x).bfloat16()):
        y = getattr(fused_softmax, f"{name}_mask_logits")(each, number)
        wanted = reference.mask_logits(each, **({} if off else {name: number}))
        assert torch.equal(y.isnan(), wanted.isnan())
        apart = y.nan_to_num(7.0) != wanted.nan_to_num(7.0)
        # A boundary moves by a column where float32's sums, and a share that reaches top-p, are off by some 4e-7 of the
        # nucleus: a column of these rows has 4.2e-6 of it.
        assert apart.sum(1).max() <= 1
        assert apart.sum() <= len(x) / 4


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "number"), [("top_k", 40), ("top_k", 3000), ("top_p", 0.5), ("top_p", 0.99)])
def test_long_rows_are_renormalised_as_by_torch(name, number, device):
    x = 2 * torch.randn(40, 151936, device=device, generator=torch.Generator(device).manual_seed(2))
    for each in (x.softmax(1), (3 * x).softmax(1).bfloat16(), 1 / 64 + x.softmax(1).half()):
        y, wanted = (
            getattr(fused_softmax, f"{name}_renorm_probs")(each, number),
            reference.renorm_probs(each, **{name: number}),
        )
        apart = ((y > 0) != (wanted > 0)).any(1)
        assert apart.sum() <= 2  # rows where a sum is within 2^-24 of what top-p asks for
        torch.testing.assert_close(y[~apart], wanted[~apart], rtol=torch.finfo(each.dtype).eps, atol=0)


def memory_of(call):
    """The bytes that a second call has allocated at most, with its result; the allocator rounds each up by 1 MiB."""
    call()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "number"), [("top_k", 100), ("top_p", 0.9), ("min_p", 0.05)])
def test_masks_take_little_memory_beside_the_result(name, number, device):
    x = torch.randn(512, 151936, device=device, dtype=torch.bfloat16)
    mask = getattr(fused_softmax, f"{name}_mask_logits")
    assert memory_of(lambda: mask(x, number)) < x.nbytes + (16 + 2) * MIB


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "number"), [("top_k", 100), ("top_p", 0.9)])
def test_renormalised_probabilities_take_little_memory_beside_the_result(name, number, device):
    x = torch.randn(512, 151936, device=device).softmax(1).bfloat16()
    renormalise = getattr(fused_softmax, f"{name}_renorm_probs")
    assert memory_of(lambda: renormalise(x, number)) < x.nbytes + (16 + 2) * MIB


@pytest.mark.gpu
@pytest.mark.parametrize("n_ids", [2000, 40_000], ids=["of ids", "of blocks"])
def test_penalties_take_no_memory_beside_the_result(n_ids, device):
    x = torch.randn(256, 151936, device=device, dtype=torch.bfloat16)
    ids = torch.randint(151936, (256, n_ids), device=device)
    assert memory_of(lambda: fused_softmax.penalize(x, ids, 1.1, frequency=0.2)) < x.nbytes + 2 * MIB
    assert memory_of(lambda: fused_softmax.penalize(x, ids, 1.1, frequency=0.2, out=x)) < MIB


@pytest.mark.gpu
@pytest.mark.parametrize("logprobs", [None, "raw", "processed"])
def test_a_step_takes_a_copy_and_notes(logprobs, device):
    """Rows in float32 as they are penalized, and less than a byte a column beside them."""
    n, n_cols = 64, 151936
    x = torch.randn(n, n_cols, device=device, dtype=torch.bfloat16)
    ids, bits = torch.randint(n_cols, (n, 2000), device=device), torch.full((n, n_cols // 32), -1, device=device).int()
    given = {"logit_bias": torch.zeros(n_cols, device=device), "bitmask": bits, "token_ids": ids, "repetition": 1.1}
    asked = {"return_logprobs": logprobs, "top_logprobs": 5 if logprobs else 0}
    call = lambda: sample(x, 0.7, top_p=0.9, **given, **asked, seed=1)  # noqa: E731
    assert memory_of(call) < (4 + 1) * x.numel() + 3 * MIB


@pytest.mark.gpu
@pytest.mark.parametrize(("filters", "notes"), [({"temperature": 0.8}, 13), ({"top_p": 0.9}, 41)], ids=str)
@pytest.mark.parametrize("verify", ["chain", "block", "tree"])
def test_they_take_no_memory_of_the_vocabulary(verify, filters, notes, device):
    target, draft, tokens = rows_of(64, 4, 151936, torch.bfloat16, device)
    options = {"verify": verify} | ({"parents": [-1, 0, 1, 2]} if verify == "tree" else {})
    call = lambda: speculative_sample(target, tokens, draft, **filters, **options, seed=1)  # noqa: E731
    assert memory_of(call) < (notes + 3) * MIB
    options["logit_bias"] = torch.zeros(64, 151936, device=device)
    options["bitmask"] = torch.full((64, 151936 // 32), -1, device=device, dtype=torch.int32)
    assert memory_of(call) < (notes + 3) * MIB


@pytest.mark.gpu
@pytest.mark.parametrize("verify", ["chain", "block"])
def test_many_short_rows_are_verified_in_bounded_memory(verify, device):
    """The notes of what filters keep of 49152 rows of target and draft would take 3.6 GB at once."""
    target, draft, tokens = rows_of(2**14, 1, 64, torch.bfloat16, device)
    call = lambda: speculative_sample(target, tokens, draft, top_p=0.9, verify=verify, seed=1)  # noqa: E731
    assert memory_of(call) < (512 + 64) * MIB


@pytest.mark.gpu
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.05}], ids=str)
@pytest.mark.parametrize("verify", ["chain", "block", "tree"])
def test_they_wait_for_what_was_launched_before_and_are_waited_for(verify, filters, device):
    """On whichever stream a call is made, whose inputs are made late and changed at once."""
    target, draft, tokens = rows_of(64, 4, 151936, torch.bfloat16, device)
    options = {"verify": verify, "seed": 1} | ({"parents": [-1, 0, 1, 2]} if verify == "tree" else {})
    call = lambda *rows: speculative_sample(rows[0], tokens, rows[1], **filters, **options)  # noqa: E731
    wanted = call(target, draft)
    torch.cuda.synchronize()
    found = []
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for _ in range(20):
                rows = torch.zeros_like(target), torch.zeros_like(draft)
                torch.cuda._sleep(200_000)
                for each, late in zip(rows, (target, draft), strict=True):
                    each.copy_(late)
                found.append(call(*rows))
                for each in rows:
                    each.zero_()
        stream.synchronize()
    assert all(torch.equal(a, b) for each in found for a, b in zip(each[:3], wanted[:3], strict=True))


@pytest.mark.gpu
def test_threads_draw_while_one_captures_a_graph(device):
    target, draft, tokens = rows_of(16, 3, 5000, torch.bfloat16, device)
    call = lambda: speculative_sample(target, tokens, draft, top_p=0.9, seed=1)  # noqa: E731
    wanted, found, graph = call(), [], torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    drawing = Thread(target=lambda: found.extend(call() for _ in range(200)))
    drawing.start()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = call()
    drawing.join()
    graph.replay()
    torch.cuda.synchronize()
    assert len(found) == 200
    assert all(torch.equal(a, b) for each in (captured, *found) for a, b in zip(each[:3], wanted[:3], strict=True))


@pytest.mark.gpu
def test_a_graph_of_them_follows_its_tensors(device):
    target, draft, tokens = rows_of(16, 3, 5000, torch.bfloat16, device)
    position = torch.zeros(16, dtype=torch.int64, device=device)
    call = lambda: speculative_sample(target, tokens, draft, top_p=0.9, seed=1, position=position)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for at in (0, 5, 17):
        position.fill_(at)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found[:3], call()[:3], strict=True))
