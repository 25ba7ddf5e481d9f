"""The ways to compute a pass of attention: their order, what each takes, why it leaves the rest, and who is told.

Passes are planned for tensors without memory, on an H200 that need not be present.
"""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from attention_cases import BF16, FP32, qkv
from click.testing import CliRunner
from launches import GPUS

import fused_softmax
from fused_softmax import explain, explanation
from fused_softmax.cli import main
from fused_softmax.core import launch
from fused_softmax.core.plan import H200
from fused_softmax.core.route import INTERPRET
from fused_softmax.ops.attention import calls, sdpa, ways
from fused_softmax.ops.attention.call import Backward, Forward, Inputs, Wanted
from fused_softmax.ops.attention.options import Attention
from fused_softmax.ops.attention.plan import tiles

interpreted = pytest.mark.skipif(not INTERPRET, reason="without the interpreter a call on a CPU prepares no kernel")
TABLES = {
    "FORWARD": ("cuDNN", "decode", "short", "window", "hopper", "plain"),
    "GRADIENTS": ("cuDNN", "short", "stored dS", "separate kernels"),
    "KEYS": ("hopper", "plain"),
    "QUERIES": ("hopper", "plain"),
}
OPTIONS = "softcap", "left", "right", "bottom_right", "entropy", "row_max", "deterministic", "scale"
SHARED = (1, 4, 49, 49)  # a bias of each head, that all batches share


def given(n_queries, n_keys, dim, lead=(2,), heads=4, key_heads=4, value_dim=None, dtype=BF16, laid_out=None, **beside):
    """Inputs without memory. beside: shapes of the others. laid_out: what is done to query, key and value."""
    shapes = (heads, n_queries, dim), (key_heads, n_keys, dim), (key_heads, n_keys, value_dim or dim)
    dense = [torch.empty(*lead, *shape, dtype=dtype, device="meta") for shape in shapes]
    kinds = {"attn_mask": torch.bool, "bias": dtype, "sinks": FP32, "alibi_slopes": FP32}
    others = {name: torch.empty(shape, dtype=kinds[name], device="meta") for name, shape in beside.items()}
    return Inputs(*(dense if laid_out is None else map(laid_out, dense)), **others)


def split(changes):
    """(of the inputs, of the options)"""
    how = {name: changes.pop(name) for name in OPTIONS if name in changes}
    return changes, Attention(**{"scale": 0.125, **how})


def forward(*sizes, gpu=H200, **changes):
    changes, how = split(changes)
    return ways.chosen("the forward pass", calls.FORWARD, Forward(given=given(*sizes, **changes), how=how, gpu=gpu))


def backward(*sizes, gpu=H200, table="GRADIENTS", lse=False, wanted=None, **changes):
    changes, how = split(changes)
    inputs = given(*sizes, **changes)
    q, v = inputs.query, inputs.value
    output = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device="meta")
    rows = torch.empty(q.shape[:-1], device="meta")
    asked = Backward(
        given=inputs, how=how, gpu=gpu, do=output, dlse=rows if lse else None, output=output, lse=rows,
        wanted=wanted or Wanted(True, True, True, False, inputs.bias is not None, inputs.sinks is not None),
    )  # fmt: skip
    return ways.chosen("the gradients", getattr(calls, table), asked)


@pytest.mark.parametrize("table", TABLES)
def test_the_order_of_ways(table):
    assert tuple(way.name for way in getattr(calls, table)) == TABLES[table]


TAKEN = {
    "cuDNN": ((1024, 1024, 64), {"right": 0, "lead": (8,)}),
    "decode": ((1, 8192, 128), {"key_heads": 1}),
    "short": ((49, 49, 32), {"lead": (600,)}),
    "window": ((4096, 4096, 64), {"lead": (2,), "heads": 64, "key_heads": 8, "left": 127, "right": 0}),
    "hopper": ((4096, 4096, 128), {"right": 0}),
    "plain": ((4096, 4096, 128), {"attn_mask": (4096, 4096)}),
}


@pytest.mark.parametrize("name", TAKEN)
def test_the_first_way_that_takes_a_forward_pass(name):
    """Each one before it says why it does not."""
    sizes, changes = TAKEN[name]
    choice = forward(*sizes, **changes)
    before = TABLES["FORWARD"][: TABLES["FORWARD"].index(name)]
    assert (choice.way.name, tuple(choice.refused)) == (name, before)
    assert all(type(why) is str and why for why in choice.refused.values())


GRADIENTS = {
    "cuDNN": ((2048, 2048, 128), {}),
    "short": ((49, 49, 32), {"lead": (600,), "bias": SHARED}),
    "stored dS": ((256, 256, 64), {"bias": (4, 256, 256)}),
    "separate kernels": ((2048, 2048, 64), {}),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_first_way_that_takes_the_gradients(name):
    sizes, changes = GRADIENTS[name]
    choice = backward(*sizes, **changes)
    before = TABLES["GRADIENTS"][: TABLES["GRADIENTS"].index(name)]
    assert (choice.way.name, tuple(choice.refused)) == (name, before)


@pytest.mark.parametrize("table", ["KEYS", "QUERIES"])
def test_parts_of_the_gradients(table):
    """Wide heads and narrow ones alike; a bias whose gradient is dS has one from the plain kernel of dQ."""
    for dim, wide in ((64, False), (256, True)):
        choice = backward(2048, 2048, dim, table=table)
        assert (choice.way.name, choice.refused, choice.plan.wide) == ("hopper", {}, wide)
    assert backward(2048, 2048, 64, table=table, gpu=GPUS["sm_80"]).refused == {"hopper": "NVIDIA A100 is no sm_90"}
    full = backward(256, 256, 64, table=table, bias=(2, 4, 256, 256))
    assert full.way.name == {"KEYS": "hopper", "QUERIES": "plain"}[table]


def off_a_boundary(tensor):
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="meta")[1:].view(tensor.shape)


# Why a way does not take what it would take but for a change: the pass, what differs, and the reason.
REFUSED = [
    ("cuDNN", {"deterministic": True}, "the same bits are asked for at every run"),
    ("cuDNN", {"attn_mask": (1024, 1024), "sinks": (4,)}, "it has attn_mask and sinks"),
    ("cuDNN", {"bias": (4, 1024, 1024)}, "it has bias"),
    ("cuDNN", {"alibi_slopes": (4,)}, "it has alibi_slopes"),
    ("cuDNN", {"left": 5}, "its window is not top-left causality"),
    ("cuDNN", {"softcap": 5.0}, "it has a softcap"),
    ("cuDNN", {"entropy": True}, "statistics are asked for"),
    ("cuDNN", {"scale": -1.0}, "its scale is not positive"),
    ("cuDNN", {"lead": (2, 3)}, "its tensors do not have four dims"),
    ("cuDNN", {"laid_out": lambda each: each[:1].expand(each.shape)}, "a tensor is broadcast"),
    ("cuDNN", {"laid_out": lambda each: each[..., :40]}, "heads of 40 dims and 1024 queries"),
    ("cuDNN", {"laid_out": lambda each: each.new_empty((*each.shape[:-1], 68))[..., :64]}, "not begin on 16 bytes"),
    ("cuDNN", {"dtype": FP32}, "elements have 4 bytes, not 2"),
    ("cuDNN", {"value_dim": 32}, "heads of 64 dims have values of 32"),
    ("cuDNN", {"gpu": GPUS["sm_80"]}, "nothing was measured on NVIDIA A100"),
    ("decode", {"heads": 128}, "128 rows share a head of keys, more than 64"),
    ("decode", {"row_max": True}, "its kernel computes no row_max"),
    ("decode", {"left": 0, "right": 10}, "11 keys are seen, fewer than 256"),
    ("decode", {"key_heads": 4, "lead": (600,)}, "no heads share keys"),
    ("short", {"lead": (2,)}, "8 heads of all batches are fewer than 1056"),
    ("short", {"entropy": True}, "its kernel computes no entropy"),
    ("short", {"dtype": FP32}, "elements have 4 bytes, not 2"),
    ("short", {"value_dim": 128}, "heads have more than 64 dims"),
    ("window", {"softcap": 5.0}, "its scores are query times key"),
    ("window", {"left": None}, "no window has a bound on both sides"),
    ("window", {"left": 500}, "windows of 501 keys are not narrow"),
    ("window", {"value_dim": 256}, "heads have more than 128 dims"),
    ("window", {"lead": (1,), "heads": 8, "key_heads": 8}, "4096 queries of 8 heads are too few"),
    ("window", {"lead": (2, 2), "laid_out": lambda each: each.transpose(0, 1).contiguous().transpose(0, 1)},
     "batches lie in two dims"),
    ("hopper", {"scale": -1.0}, "the scale is not positive"),
    ("hopper", {"attn_mask": (4096, 4096)}, "attn_mask"),
    ("hopper", {"entropy": True, "row_max": True}, "its kernel computes no entropy and no row_max"),
    ("hopper", {"alibi_slopes": (2, 4), "softcap": 5.0}, "more than one of a bias, a softcap and slopes is added"),
    ("hopper", {"bias": (4096, 1)}, "TMA does not read the bias as it lies"),
    ("hopper", {"value_dim": 256}, "heads of 128 dims have values of 256"),
    ("hopper", {"dtype": FP32}, "elements have 4 bytes, not 2"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "why"), REFUSED, ids=[f"{name}, {why}" for name, _, why in REFUSED])
def test_why_a_way_does_not_take_a_forward_pass(name, changes, why):
    sizes, options = TAKEN[name]
    choice = forward(*sizes, **options | changes)
    assert choice.way.name != name
    assert why in choice.refused[name]


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("cuDNN", {"lse": True}, "lse has a gradient"),
        ("cuDNN", {"wanted": Wanted(True, True, False, False, False, False)}, "do not all have a gradient"),
        ("cuDNN", {"deterministic": True}, "the same bits"),
        ("short", {"key_heads": 2}, "no sinks, and no heads that share keys"),
        ("short", {"sinks": (4,)}, "no sinks, and no heads that share keys"),
        ("short", {"bias": (49, 49)}, "the bias, which has a gradient, is not one of each head"),
        ("short", {"attn_mask": SHARED, "wanted": Wanted(*[True] * 5, False)}, "mask and bias both have a gradient"),
        ("stored dS", {"gpu": GPUS["sm_80"]}, "NVIDIA A100 is no sm_90"),
        (
            "stored dS",
            {"wanted": Wanted(True, True, True, False, False, False)},
            "it is for a bias that has a gradient",
        ),
        ("stored dS", {"lead": (65536,)}, "dS of a head of keys takes more than"),
    ],
    ids=str,
)
def test_why_a_way_does_not_take_the_gradients(name, changes, why):
    sizes, options = GRADIENTS[name]
    choice = backward(*sizes, **options | changes)
    assert choice.way.name != name
    assert why in choice.refused[name]


def test_torch_may_keep_a_call_from_cudnn(monkeypatch):
    """As where the user has switched it off. It is not asked of tensors without memory."""
    sizes, options = TAKEN["cuDNN"]
    changes, how = split(dict(options))
    asked = Forward(given=given(*sizes, **changes), how=how)
    monkeypatch.setattr(sdpa, "_has_cudnn", lambda *_: False)
    assert "torch does not let cuDNN have the call" in sdpa.forward_plan(asked)


@interpreted
def test_explain_says_which_way_and_why(monkeypatch):
    """Of calls that the interpreter runs, by the ways whose kernels it can run."""
    monkeypatch.setattr(tiles, "LEAST_HEADS", 0)
    with explain() as explained:
        fused_softmax.attention(*qkv(1, 300, heads=4, key_heads=1), enable_gqa=True)
        fused_softmax.attention(*qkv(20, 20, dtype=BF16))
        leaves = [each.requires_grad_() for each in qkv(20, 100)]
        fused_softmax.attention(*leaves).sum().backward()
    decode, short, plain, gradients = explained
    assert [(each.of, each.name) for record in (decode, short, plain) for each in record.ways] == [
        ("the forward pass", "decode"), ("the forward pass", "short"), ("the forward pass", "plain"),
    ]  # fmt: skip
    assert [(each.of, each.name) for each in gradients.ways] == [
        ("the gradients", "separate kernels"), ("dK and dV", "plain"), ("dQ", "plain"),
    ]  # fmt: skip
    assert plain.ways[0].refused["decode"] == "20 rows share a head of keys, more than 16"
    assert gradients.ways[1].refused == {"hopper": "the tensors are on no GPU"}
    assert "torch does not let cuDNN have the call" in plain.ways[0].refused["cuDNN"]
    lines = str(plain).splitlines()
    assert lines[1] == "  the forward pass: by plain"
    assert lines[3] == "    not by decode: 20 rows share a head of keys, more than 16"


@pytest.mark.parametrize("name", TAKEN)
def test_explain_hears_of_each_way(name):
    """Those of kernels that no interpreter runs too."""
    sizes, options = TAKEN[name]
    with explain() as explained, explanation._opened("attention", ()):
        forward(*sizes, **options)
    (record,) = explained
    assert record.ways[0].name == name
    assert f"the forward pass: by {name}" in str(record)
    assert str(record).count("not by ") == TABLES["FORWARD"].index(name)
    assert (record.route == "cuDNN") == (name == "cuDNN")


def test_the_plan_command_prints_the_ways():
    done = CliRunner().invoke(main, ["plan", "4", "32", "4096", "64", "--dtype", "float32"])
    assert done.exit_code == 0
    said = [" ".join(line.split()) for line in done.output.splitlines()]
    expected = [
        "the forward pass, by plain", "not by cuDNN elements have 4 bytes, not 2",
        "not by decode 4096 rows share a head of keys, more than 16", "the gradients, by separate kernels",
        "dK and dV, by plain", "dQ, by plain",
    ]  # fmt: skip
    places = [said.index(line) for line in expected]
    assert all(before < after for before, after in pairwise(places))


def test_arguments_are_found_by_the_names_of_parameters(monkeypatch):
    """Tensors and descriptors by theirs; a launch's own numbers come before the call's; the rest is None."""
    prepared = []
    monkeypatch.setattr(launch, "prepare", lambda *given, **_: prepared.append(given) or print)

    class kernel:
        arg_names = "mask_ptr", "own_ptr", "v_ptr", "q_map", "bias_map", "v_strides", "scale", "n_keys", "K"

    call = Forward(given=given(5, 7, 16), how=Attention(scale=0.5), gpu=H200).call
    tensors = {"q": torch.empty(1), "k": torch.empty(2), "v": torch.empty(3), "mask": None}
    own = {"own": torch.empty(4)}
    found = call.launch(kernel, 9, "spec", tensors, {"scale": 2.0}, plan=None, own=own, maps={"q": "map of q"})
    ((_, programs, arguments, scalars, constants),) = prepared
    assert (programs, constants) == (9, {"K": "spec"})
    assert [each if each is None or type(each) is str else each.numel() for each in arguments] == [
        None, 4, 3, "map of q", None,
    ]  # fmt: skip
    assert scalars == (call.strides["v"], 2.0, 7)
    assert found.takes(("q", "k", "v", None)) == ("v", "q")


@interpreted
def test_what_is_kept_holds_none_of_the_tensors_it_was_prepared_for():
    import gc
    import weakref

    leaves = [each.requires_grad_() for each in qkv(20, 100, heads=4, key_heads=2)]
    bias = torch.zeros(4, 20, 100).requires_grad_()
    fused_softmax.attention(*leaves, bias=bias, enable_gqa=True).sum().backward()
    there = [weakref.ref(each) for each in (*leaves, bias)]
    del leaves, bias
    gc.collect()
    assert [each() for each in there] == [None] * 4


def test_gradients_by_stored_ds_are_told_of_a_coarse_lse_and_leave_no_word_of_it():
    coarse, told = torch.zeros(1, dtype=torch.int64), []

    def by_ds(tensors, key):
        told.append(coarse.item())
        return None, None, None, torch.zeros(SHARED)

    query, bias = torch.zeros(1, 4, 49, 16), torch.zeros(SHARED)
    call = SimpleNamespace(readied=lambda given: given, of=lambda name, tensor: tensor)
    marks = SimpleNamespace(takes=lambda tensors: (), run=lambda: coarse.fill_(1))
    makers = calls._Own(None, lambda: coarse, None, None, None, None, None)
    wanted = Wanted(query=False, key=False, value=False, attn_mask=False, bias=True, sinks=False)
    pass_ = calls._ByLaunches(call, wanted, makers, [marks], by_ds, {}, [], True)
    pass_(query, None, query, query[..., 0], query, query, query, None, bias, None, None)
    assert (told, coarse.item()) == ([1], 0)
