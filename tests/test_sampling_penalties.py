"""Penalties by their kernel, alone and in a call of sample: against the reference, at every border of a block."""

import math
from dataclasses import replace

import pytest
import torch
from products import pairwise
from sampling_cases import columns
from torch.testing import assert_close

import fused_softmax
from fused_softmax import penalize, sample
from fused_softmax.core import calls
from fused_softmax.ops.sampling import penalties, reference
from fused_softmax.ops.sampling.kernels.spec import PenaltySpec

INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BLOCK, TILE = 64, 32
GIVEN = {"repetition": 1.3, "presence": 0.5, "frequency": 0.25}


@pytest.fixture(autouse=True)
def narrow(monkeypatch, device):
    """Blocks and tiles that short rows have several of."""
    widths = {"_BLOCK": BLOCK, "_TILE": TILE, "_BLOCK_TILE": TILE, "_WARPS": 1, "_ROW_WARPS": 1}
    for name, value in widths.items():
        monkeypatch.setattr(penalties, name, value)
    calls.forget()
    yield
    calls.forget()


def assert_same(found, wanted):
    """The interpreter cuts what it rounds to bfloat16."""
    rtol = 2**-7 if wanted.dtype == torch.bfloat16 else 0
    assert found.dtype == wanted.dtype
    assert_close(found, wanted, rtol=rtol, atol=0, equal_nan=True)


def logits_and_ids(n_cols, length, dtype=torch.float32, device="cpu", n_rows=3):
    x = (torch.randn(n_rows, n_cols) * 4).to(dtype)
    return x.to(device), torch.randint(-2, n_cols + 2, (n_rows, length)).to(device)


@pytest.fixture(params=["a part a block", "rows in turns"])
def parts(request, monkeypatch):
    """Of a row that a launch goes through; and how many rows take both launches before the next ones."""
    if request.param == "rows in turns":
        real = penalties.device_of
        monkeypatch.setattr(penalties, "device_of", lambda index: replace(real(index), sm_count=3))
        monkeypatch.setattr(penalties, "_SHARE", 2000 / real(-1).l2_bytes)


@pytest.fixture
def specs(monkeypatch):
    """The specs of kernels, as they are prepared."""
    prepared, real = [], penalties.launch.prepare
    monkeypatch.setattr(penalties.launch, "prepare", lambda *a, **k: (prepared.append(a[4]["K"]), real(*a, **k))[1])
    return prepared


@pairwise()
@pytest.mark.parametrize("parts", ["a part a block", "rows in turns"], indirect=True)
@pytest.mark.parametrize("into", ["new", "in place", "apart"])
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [0, 1, TILE, 3 * TILE + 5])
@pytest.mark.parametrize("n_cols", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 8])
def test_the_kernel_gives_what_the_reference_does(n_cols, length, dtype, ids_dtype, into, parts, device):
    x, ids = logits_and_ids(n_cols, length, dtype, device)
    ids = ids.to(ids_dtype)
    wanted = reference.penalize(x, ids, **GIVEN)
    for _ in range(2):  # the second call is kept
        given = x.clone()
        out = {"new": None, "in place": given, "apart": torch.full_like(x, NAN)}[into]
        with fused_softmax.explain() as explained:
            y = penalize(given, ids, **GIVEN, out=out)
        launches = 1 if into == "in place" else 2
        assert [each.kernels for each in explained] == [["_penalize"] * launches]
        assert_same(y, wanted)
        assert out is None or y is out
        assert torch.equal(penalize(x, ids, **GIVEN), y)
        assert into == "in place" or torch.equal(given, x)


def test_repeats_are_counted_over_tiles_and_borders_of_blocks(parts, device):
    ids = [[0, BLOCK - 1, BLOCK, BLOCK - 1, 2 * BLOCK - 1], [BLOCK] * 5, [-1, 3 * BLOCK, 2**40, -(2**40), 2**32]]
    ids = torch.tensor(ids, device=device).repeat(1, TILE)
    x = torch.zeros(3, 3 * BLOCK, device=device)
    wanted = torch.zeros_like(x)
    for column, count in ((0, TILE), (BLOCK - 1, 2 * TILE), (BLOCK, TILE), (2 * BLOCK - 1, TILE)):
        wanted[0, column] = -float(count)
    wanted[1, BLOCK] = -5.0 * TILE
    assert torch.equal(penalize(x, ids, frequency=1.0), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("more", [0, 1, PenaltySpec.counted, PenaltySpec.counted + 5])
def test_a_count_of_16_bits_carries_to_no_neighbour(more, dtype, specs, monkeypatch, device):
    """In float16 so many ids are counted at a time as 16 bits can count."""
    for name, value in {"_TILE": 8192, "_BLOCK_TILE": 8192, "_WARPS": 8, "_ROW_WARPS": 8}.items():
        monkeypatch.setattr(penalties, name, value)
    n = PenaltySpec.counted + more
    ids = torch.full((1, n + 1), 2, device=device)
    ids[0, :2] = torch.tensor([3, 1])
    x = torch.zeros(1, 5, device=device, dtype=dtype)
    for ids_now, counts in ((ids[:, 1:], [0, 1, n - 1, 0, 0]), (ids[:, [0, *range(2, n + 1)]], [0, 0, n - 1, 1, 0])):
        y = penalize(x, ids_now, frequency=2.0**-10)
        assert torch.equal(y, (-torch.tensor([counts], device=device) * 2.0**-10).to(dtype))
    assert {each.by_block for each in specs} == {more > 0}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("into", ["new", "in place"])
def test_as_many_ids_as_lanes_mark_or_hold_and_one_more(into, dtype, parts, specs, device):
    """Up to then columns are counted alone, and then by whole blocks: of either, some have no id."""
    most = {"new": 64, "in place": 16 // dtype.itemsize}[into] * TILE
    x = torch.randn(1, 2 * BLOCK + 3).to(dtype).to(device)
    ids = torch.randint(BLOCK, 2 * BLOCK, (1, most + 1)).to(device)
    ids[:, most - 1] = 2 * BLOCK + 1  # which only the last tile's last id has
    for length in (most, most + 1):
        given = x.clone()
        y = penalize(given, ids[:, :length], **GIVEN, out=given if into == "in place" else None)
        assert_same(y, reference.penalize(x, ids[:, :length], **GIVEN))
        assert torch.equal(y[:, :BLOCK], x[:, :BLOCK])
    assert list(dict.fromkeys(each.by_block for each in specs)) == [False, True]


@pytest.mark.parametrize("into", ["new", "in place"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("begin", [0, 1])
def test_neighbours_of_one_word_have_counts_of_their_own(begin, dtype, into, device):
    """Two columns of 16 bits stand in 32, of which one or both are counted, within a tile and over tiles."""
    memory = torch.randn(5, 2 * BLOCK + 2).to(dtype).to(device)
    x = memory[:, begin : begin + 2 * BLOCK]
    ids = torch.tensor([[2, 3], [3, 3], [2, 2], [3, 4], [BLOCK - 1, BLOCK]], device=device).repeat(1, TILE)
    ids[:3, 1::2] = torch.tensor([[3], [-1], [2]], device=device)
    wanted = memory.clone()
    wanted[:, begin : begin + 2 * BLOCK] = reference.penalize(x, ids, **GIVEN)
    found = memory.clone()
    out = found[:, begin : begin + 2 * BLOCK]
    penalize(out if into == "in place" else x, ids, **GIVEN, out=out)
    assert_same(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_logits_and_wrong_rows(dtype, device):
    row = [0.0, -0.0, INF, -INF, NAN, -1.0, 3.0]
    x = torch.tensor([row] * 6, dtype=dtype, device=device)
    ids = torch.tensor([[0, 1, 2, 3, 4]] * 6, device=device)
    r = torch.tensor([2.0, 0.0, NAN, INF, 1.0, 1.0], device=device)
    once = torch.tensor([0.0, 0.0, 0.0, 0.0, NAN, 0.0], device=device)
    each = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, -INF], device=device, dtype=torch.float64)
    wanted = reference.penalize(x, ids, r, once, each)
    given = x.clone()
    for y in (penalize(x, ids, r, once, each), penalize(given, ids, r, once, each, out=given)):
        assert_same(y, wanted)
        assert y.isnan().all(1).tolist() == [False] + [True] * 5
        assert torch.equal(y[0].signbit(), wanted[0].signbit())
    given = x.clone()
    assert penalize(given, ids[:, :0], 0.5 * r, out=given)[1:4].isnan().all()


def test_rows_and_ids_at_any_stride(device):
    wide = torch.randn(4, 200, device=device)
    ids = torch.randint(130, (40, 4), device=device, dtype=torch.int32)
    wanted = reference.penalize(wide[:, 3:133], ids.T, **GIVEN)
    assert torch.equal(penalize(wide[:, 3:133], ids.T, **GIVEN), wanted)
    assert torch.equal(penalize(wide[:, 3:133].T.contiguous().T, ids.T[:, ::1], **GIVEN), wanted)
    assert torch.equal(
        penalize(wide[1:2, 3:133].expand(4, 130), ids.T, **GIVEN),
        reference.penalize(wide[1:2, 3:133].expand(4, 130), ids.T, **GIVEN),
    )
    out = torch.full((4, 200), 7.0, device=device)
    penalize(wide[:, 3:133], ids.T, **GIVEN, out=out[:, 5:135])
    assert torch.equal(out[:, 5:135], wanted)
    assert (out[:, :5] == 7).all()
    assert (out[:, 135:] == 7).all()
    of_columns = torch.zeros(130, 4, device=device).T
    assert torch.equal(penalize(wide[:, 3:133], ids.T, **GIVEN, out=of_columns), wanted)
    penalize(wide[:, 3:133], ids.T, **GIVEN, out=wide[:, 3:133])  # another tensor of the same memory
    assert torch.equal(wide[:, 3:133], wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neighbours_of_a_row_in_place_stay_as_they_are(dtype, device):
    """Counts of 16 bits are added by words that may reach beyond the row, and leave what is there."""
    memory = torch.randn(3, 13).to(dtype).to(device)
    for begin, end in ((1, 4), (0, 3), (5, 6), (2, 13)):
        wanted = memory.clone()
        wanted[:, begin:end] = penalize(memory[:, begin:end].clone(), ids := torch.zeros(3, 4, device=device).long())
        wanted[:, begin:end] = penalize(wanted[:, begin:end].clone(), ids, **GIVEN)
        found = memory.clone()
        penalize(found[:, begin:end], ids, **GIVEN, out=found[:, begin:end])
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("length", [3 * TILE, 64 * TILE + 1])
def test_bits_and_biases_of_every_block(length, specs, device):
    """As a draw has them; columns with an id and without, with a bit and without."""
    n_cols = 2 * BLOCK + 9
    x, ids = logits_and_ids(n_cols, length, torch.bfloat16, device, n_rows=2)
    ids = torch.where(ids % 3 == 1, ids, -1)
    bias, rows = torch.randn(2, n_cols, device=device), torch.tensor([1, 0], device=device)
    bits = torch.randint(-(2**31), 2**31 - 1, (2, -(-n_cols // 32)), device=device).int()
    numbers = penalties.Penalties(*GIVEN.values())
    arguments = x, ids, numbers, None, bias, bits, rows
    y = penalties.prepare_penalties(*arguments, torch.float32)(*arguments)
    given = (x[rows] + bias).masked_fill(~reference.unpacked(bits, n_cols), -INF)
    assert torch.equal(y, reference.penalize(given, ids, **GIVEN))
    assert [each.by_block for each in specs[:1]] == [length > 64 * TILE]


@pytest.mark.parametrize("argument", ["logits", "token_ids", "repetition"])
def test_out_may_share_memory_with_an_argument(argument, device):
    memory = torch.rand(3 * 40 + 60, device=device) + 0.5
    given = {
        "logits": memory[:120].view(3, 40), "token_ids": torch.randint(40, (3, 6), device=device),
        "repetition": torch.full((3,), 1.5, device=device),
    }  # fmt: skip
    if argument == "token_ids":
        given["logits"] = torch.randn(3, 40, device=device)
        memory.view(torch.int32)[:18] = given["token_ids"].flatten().int()
        given["token_ids"] = memory.view(torch.int32)[:18].view(3, 6)
    if argument == "repetition":
        given |= {"logits": torch.randn(3, 40, device=device), "repetition": memory[10:13]}
    wanted = reference.penalize(**{name: each.clone() for name, each in given.items()}, frequency=0.5)
    out = memory[1:121].view(3, 40)
    assert penalize(**given, frequency=0.5, out=out) is out
    assert torch.equal(out, wanted)


def test_autograd_is_told_of_what_is_written(device):
    x, ids = logits_and_ids(20, 5, device=device)
    for turn in range(2):  # the second call is kept
        version = x._version
        penalize(x, ids, **GIVEN, out=x)
        assert x._version == version + 1, turn


def test_a_row_is_the_same_in_every_batch(device):
    x, ids = logits_and_ids(150, 30, device=device, n_rows=5)
    r = torch.rand(5, device=device) + 0.5
    whole = penalize(x, ids, r, 0.1, 0.3)
    for row in range(5):
        here = slice(row, row + 1)
        assert torch.equal(penalize(x[here], ids[here], r[row], 0.1, 0.3), whole[here])
        assert torch.equal(penalize(x[here], ids[here].flip(1), r[row].item(), 0.1, 0.3), whole[here])


def test_numbers_and_lengths_prepare_nothing_anew(device, specs):
    x, ids = logits_and_ids(50, 40, device=device)
    after_first = None
    for length, r in ((40, 1.5), (7, 1.0), (1, 0.3), (0, 2)):
        at = ids[:, :length].contiguous()
        assert torch.equal(penalize(x, at, r, 0.5, 0), reference.penalize(x, at, float(r), 0.5, 0.0))
        after_first = after_first or len(specs)
    assert len(specs) == after_first > 0


# sample


ASKED = {
    "no filter": {},
    "filters": {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "greedy": {"temperature": 0.0},
    "raw": {"return_logprobs": "raw", "top_logprobs": 3},
    "processed": {"top_p": 0.9, "return_logprobs": "processed", "top_logprobs": 3, "return_kept": True},
    "many raw": {"return_logprobs": "raw", "top_logprobs": 90, "return_kept": True},
    "many processed": {"return_logprobs": "processed", "top_logprobs": 90},
}


def step(device, length=20, n_cols=150):
    """What a server gives one step."""
    generator = torch.Generator().manual_seed(3)
    n = 6
    given = {
        "logits": torch.randn(4, n_cols, generator=generator) * 3,
        "token_ids": torch.randint(-1, n_cols, (n, length), generator=generator),
        "row_indices": torch.tensor([3, 0, 2, 1, 1, 0]),
        "logit_bias": torch.randn(n, n_cols, generator=generator),
        "bitmask": torch.randint(-(2**31), 2**31 - 1, (n, -(-n_cols // 32)), generator=generator).int(),
        "repetition": torch.rand(n, generator=generator) + 0.7, "presence": torch.randn(n, generator=generator),
    }  # fmt: skip
    return {name: each.to(device) for name, each in given.items()} | {"frequency": 0.25}


def by_reference(given, options):
    n = len(given["token_ids"])
    seeds, positions = torch.full((n,), 5), torch.arange(n)
    return reference.sample(
        given["logits"], seeds.to(given["logits"].device), positions.to(given["logits"].device),
        **{name: each for name, each in given.items() if name != "logits"}, **options,
    )  # fmt: skip


def assert_drawn(found, wanted):
    for name, ours, each in zip(found._fields, found, wanted, strict=True):
        assert (ours is None) == (each is None), name
        if each is not None:
            assert_close(ours, each, rtol=1e-5, atol=2e-5, equal_nan=True, msg=name)  # as GPUs compute logarithms


@pairwise()
@pytest.mark.parametrize("way", ["torch", "kernels"], indirect=True)
@pytest.mark.parametrize("without", [(), ("logit_bias",), ("bitmask",), ("row_indices",), ("bitmask", "logit_bias")])
@pytest.mark.parametrize("asked", ASKED)
def test_a_step_in_one_call_is_that_of_the_reference(asked, without, way, device):
    given, options = step(device), ASKED[asked]
    if "row_indices" in without:
        given["logits"] = given["logits"][given["row_indices"]]
    for name in without:
        del given[name]
    for length in (20, 17):  # the second call is kept
        given["token_ids"] = given["token_ids"][:, :length]
        assert_drawn(sample(**given, **options, seed=5), by_reference(given, options))


def test_a_step_is_its_parts(device):
    given = step(device)
    rows, bits, bias = given.pop("row_indices"), given.pop("bitmask"), given.pop("logit_bias")
    x = given.pop("logits")[rows] + bias
    x = x.masked_fill(~reference.unpacked(bits, 150), -INF)
    drawn = sample(penalize(x, **given), 0.8, top_p=0.9, seed=1, return_kept=True)
    whole = sample(step(device)["logits"], 0.8, top_p=0.9, seed=1, return_kept=True, logit_bias=bias, bitmask=bits,
                   row_indices=rows, **given)  # fmt: skip
    assert torch.equal(drawn.tokens, whole.tokens)
    assert [columns(a) for a in drawn.kept] == [columns(b) for b in whole.kept]


@pytest.mark.parametrize("asked", ["no filter", "raw", "processed"])
def test_rows_that_cannot_be_drawn_from(asked, device):
    given = step(device)
    given["row_indices"] = torch.tensor([3, 0, 2, 9, -1, 0], device=device)
    given["repetition"] = torch.tensor([1.0, 0.0, 1.5, 1.0, 1.0, NAN], device=device)
    given["presence"][2] = INF
    for _ in range(2):
        drawn = sample(**given, **ASKED[asked], seed=5)
        assert drawn.valid.tolist() == [True] + [False] * 5
        assert drawn.tokens[1:].tolist() == [0] * 5
        assert drawn.logprobs is None or drawn.logprobs.isnan().tolist() == [False] + [True] * 5
        assert_drawn(drawn, by_reference(given, ASKED[asked]))


@pytest.mark.parametrize("asked", ["no filter", "raw", "processed", "many raw"])
def test_out_may_be_the_ids_or_lie_in_the_logits(asked, device):
    given = step(device)
    wanted = sample(**given, **ASKED[asked], seed=5)
    for _ in range(2):
        now = {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in given.items()}
        for out in (now["token_ids"][:, 0], now["logits"].view(torch.int64)[0, :6]):
            fresh = {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in given.items()}
            now["token_ids"].copy_(fresh["token_ids"])
            now["logits"].copy_(fresh["logits"])
            found = sample(**now, **ASKED[asked], seed=5, out=out)
            assert found.tokens is out
            assert_drawn(found, wanted)


def test_draws_of_no_row_and_rows_without_a_draw(device):
    ids = torch.zeros(2, 3, dtype=torch.int64, device=device)
    none = torch.empty(0, 9, device=device)
    drawn = sample(none, seed=1, row_indices=torch.tensor([0, -1], device=device), token_ids=ids, presence=1.0)
    assert drawn.valid.tolist() == [False, False]
    assert len(sample(none, seed=1, token_ids=ids[:0]).tokens) == 0
    assert penalize(none, ids[:0]).shape == (0, 9)


@pytest.mark.parametrize("kind", ["raw", "processed"])
def test_log_probabilities_are_differentiated(kind, device):
    given = step(device)
    del given["bitmask"]
    given["repetition"][2] = -1.0  # whose row has gradient 0
    names = "logits", "logit_bias", "repetition", "presence"
    for name in names:
        given[name].requires_grad_()
    drawn = sample(**given, seed=5, top_k=40, return_logprobs=kind, return_kept=True)
    drawn.logprobs[drawn.valid].sum().backward()
    with torch.no_grad():
        assert_drawn(sample(**given, seed=5, top_k=40, return_logprobs=kind, return_kept=True), drawn)
    for name in names:
        there = given[name].grad
        assert (there is None) == (kind == "raw" and name != "logits"), name
        if there is not None:
            assert there.isfinite().all()
            assert there.any()
            assert name == "logits" or not there[2].any()


def test_compiled_code_holds_one_operator(device):
    if not fused_softmax.core.route.on_device(torch.empty(0, device=device)):
        pytest.skip("without a GPU or the interpreter, calls are composed")
    given, graphs = step(device), []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(lambda **given: sample(**given, seed=5, return_logprobs="raw"), backend=backend)
    assert_drawn(compiled(**given), sample(**given, seed=5, return_logprobs="raw"))
    targets = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert [target for target in targets if target.startswith("fused_softmax.")] == ["fused_softmax.sample.default"]


def test_vmap_is_composed_of_torchs_operations(device):
    x, ids = logits_and_ids(40, 6, device=device, n_rows=6)
    x, ids, position = x.view(2, 3, 40), ids.view(2, 3, 6), torch.arange(3, device=device)

    def one(x, ids):
        return sample(x, seed=5, position=position, token_ids=ids, **GIVEN).tokens, penalize(x, ids, **GIVEN)

    for found, wanted in zip(torch.vmap(one)(x, ids), zip(*map(one, x, ids), strict=True), strict=True):
        assert torch.equal(found, torch.stack(wanted))


X, IDS = torch.zeros(3, 40), torch.zeros(3, 5, dtype=torch.int64)
REFUSED = [
    ({"token_ids": [1]}, TypeError, "token_ids must be a Tensor, not list"),
    ({"token_ids": X}, TypeError, "token_ids must be of int64 or int32, got torch.float32"),
    ({"token_ids": IDS[:2]}, ValueError, r"token_ids must have shape \(3, length\), got \(2, 5\)"),
    ({"token_ids": IDS[0]}, ValueError, r"token_ids must have shape \(3, length\), got \(5,\)"),
    ({"token_ids": IDS, "row_indices": IDS[0]}, ValueError, r"token_ids must have shape \(5, length\), got \(3, 5\)"),
    ({"token_ids": IDS.to("meta")}, RuntimeError, "token_ids must be on the logits' device cpu, got meta"),
    ({"token_ids": IDS, "repetition": 0.0}, ValueError, "repetition must be more than 0 and finite, got 0.0"),
    ({"token_ids": IDS, "repetition": -1}, ValueError, "repetition must be more than 0 and finite, got -1"),
    ({"token_ids": IDS, "presence": INF}, ValueError, "presence must be finite, got inf"),
    ({"token_ids": IDS, "frequency": "1"}, TypeError, "frequency must be a number or a Tensor, not str"),
    ({"token_ids": IDS, "frequency": X[0]}, ValueError, r"frequency must have shape \(\) or \(3,\), got \(40,\)"),
    ({"repetition": 1.5}, ValueError, "repetition needs token_ids, got token_ids=None"),
    ({"presence": torch.zeros(3)}, ValueError, "presence needs token_ids, got token_ids=None"),
    ({"frequency": -0.5}, ValueError, "frequency needs token_ids, got token_ids=None"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "error", "message"), REFUSED, ids=lambda each: str(each)[:40])
def test_a_wrong_argument_is_named(given, error, message, monkeypatch):
    sample(X, seed=1)  # by a call that is kept, nothing is overlooked
    sample(X, seed=1, token_ids=IDS)
    monkeypatch.setattr("fused_softmax.ops.sampling.reference.sample", None)  # nothing has run by then
    monkeypatch.setattr("fused_softmax.ops.sampling.penalties._prepare", None)
    with pytest.raises(error, match=f"sample: {message}"):
        sample(X, seed=1, **given)


def test_penalties_that_change_nothing_need_no_ids(device):
    x = torch.randn(3, 40, device=device)
    wanted = sample(x, seed=1).tokens
    assert torch.equal(sample(x, seed=1, repetition=1, presence=0, frequency=-0.0).tokens, wanted)
    assert torch.equal(sample(x, seed=1, token_ids=torch.zeros(3, 4, device=device).long()).tokens, wanted)


def test_out_whose_elements_share_a_place_is_refused(device):
    x, ids = torch.randn(3, 40, device=device), torch.zeros(3, 2, dtype=torch.int64, device=device)
    with pytest.raises(RuntimeError, match="out must have a place for each element"):
        penalize(x, ids, presence=1.0, out=torch.empty(43, device=device).as_strided((3, 40), (1, 1)))
    out = torch.empty(130, device=device).as_strided((3, 40), (1, 3))
    assert torch.equal(penalize(x, ids, presence=1.0, out=out), penalize(x, ids, presence=1.0))


def test_sparse_ids_are_refused_by_name(device):
    x, ids = torch.randn(3, 40, device=device), torch.zeros(3, 2, dtype=torch.int64, device=device)
    penalize(x, ids, 1.5)
    with pytest.raises((TypeError, ValueError, RuntimeError), match="token_ids"):
        penalize(x, ids.to_sparse(), 1.5)
