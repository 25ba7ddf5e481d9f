"""The losses' kernels compiled for GPUs that need not be present: no spill, wide accesses."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from launches import ABOUT_THE_CALL, GPUS, launched
from products import pairwise

from fused_softmax.core import calls
from fused_softmax.core.launch import MOST_SPILLED
from fused_softmax.ops.losses import divergence_launches as divergences
from fused_softmax.ops.losses import launches as losses
from fused_softmax.ops.losses import linear_by_classes as by_classes
from fused_softmax.ops.losses import log_prob_launches as log_probs
from fused_softmax.ops.losses.given_lse import forward_given_lse
from fused_softmax.ops.losses.options import Divergence, Kept, LogProb, Loss
from fused_softmax.ops.losses.sums import multiply

pytestmark = pytest.mark.compiles
FP32, BF16 = torch.float32, torch.bfloat16
KINDS = {
    "plain": {}, "smoothing": {"label_smoothing": 0.1}, "softcap": {"softcap": 30.0},
    "weights, z-loss": {"lse_square_scale": 1e-4, "weight": True},
}  # fmt: skip


def binaries(target, run):
    """Of what `run` launches, as of tensors on a GPU, by the names of the kernels; of two launches the last."""
    calls.forget()
    on_gpu = mock.patch.object(torch.Tensor, "get_device", return_value=0)
    of_classes, of_rows, of_pairs = (
        mock.patch.object(module, "device_of", return_value=GPUS[target])
        for module in (by_classes, log_probs, divergences)
    )
    with on_gpu, of_classes, of_rows, of_pairs:
        recorded = launched(GPUS[target], run)
    calls.forget()  # what was kept launches nothing
    cuda = GPUS[target].backend == "cuda"
    specs = [spec for launch in recorded if (spec := dict(launch.constexprs).get("K")) is not None]
    assert all(spec.publish and spec.collect and (cuda or not spec.ptx) for spec in specs)
    return {launch.kernel.__name__: launch.compile(target) for launch in recorded}


@pairwise()
@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_losses(target, dtype, kind):
    for n_cols in (128, 1000, 4096, 32000, 128256):
        loss = Loss(**KINDS[kind] | ({"weight": torch.ones(n_cols)} if "weight" in KINDS[kind] else {}))
        x, targets = torch.empty(512, n_cols, dtype=dtype), torch.zeros(512, dtype=torch.int64)
        totals, row = torch.ones(2, 1), torch.ones(512)

        def run():
            losses.forward(x, targets, loss, totals, torch.empty_like(x))  # noqa: B023
            losses.forward(x, targets, loss)  # noqa: B023
            losses.backward(x, targets, row, row, loss, totals=totals, dy=row)  # noqa: B023

        for name, binary in binaries(target, run).items():
            # About the call of what stands in for parts that are missing. sm_100 by Triton 3.6: 32 with a softcap.
            about = max(ABOUT_THE_CALL, 32 if target == "sm_100" else 0)
            assert binary.spilled_bytes <= (about if name == "_part_loss" else 0), (n_cols, name)
            if target != "gfx942" and name in ("_part_loss", "_online_loss", "_gradient"):
                assert max(binary.load_widths) >= (8 if kind == "softcap" and dtype == BF16 else 16), (n_cols, name)


@pairwise()
@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [*KINDS, "all"])
@pytest.mark.parametrize("biased", [False, True])
def test_losses_of_transposed_logits(target, dtype, kind, biased):
    """Of any number of tokens: a row of logits is a whole number of vectors."""
    arithmetic = torch.float64 if dtype == torch.float64 else FP32
    how = {name: value for each in KINDS.values() for name, value in each.items()} if kind == "all" else KINDS[kind]
    weight = {"weight": torch.ones(1000, dtype=arithmetic)} if "weight" in how else {}
    loss, n_tokens = Loss(stats=kind == "all", **how | weight), 501
    x, targets = torch.empty(n_tokens, 64, dtype=dtype), torch.zeros(n_tokens, dtype=torch.int64)
    bias = torch.ones(1000, dtype=dtype) if biased else None

    def run():
        tokens = by_classes.Tokens(x, targets, loss, torch.ones(2, 1, dtype=arithmetic), 1000, bias)
        logits = torch.empty(1000, tokens.padded, dtype=dtype)[:, :n_tokens]
        tokens.make_room([1000])
        tokens.read(logits, 0)
        tokens.finish()
        tokens.write_gradient(logits, 0)

    found = binaries(target, run)
    of_stats = ("_token_stats", "_merge_token_stats") if loss.stats else ()
    assert found.keys() == {"_token_states", "_token_losses", "_token_gradient", *of_stats}
    for name, binary in found.items():  # of the statistics Triton 3.9 keeps one word in memory for sm_80
        assert binary.spilled_bytes <= (8 if (name, target) == ("_token_stats", "sm_80") else 0), name
        if target != "gfx942" and name not in ("_token_losses", "_merge_token_stats"):
            assert max(binary.load_widths) == 16, name
        if target != "gfx942" and name == "_token_gradient":
            assert set(binary.store_widths) == {16}, name


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("kind", ["plain", "softcap"])
def test_losses_of_which_lse_is_given(target, kind):
    """A row is 8 bytes of a target, 4 of its lse and a logit."""
    x, targets, lse = torch.empty(512, 32000, dtype=BF16), torch.zeros(512, dtype=torch.int64), torch.ones(512)
    loss = Loss(weight=torch.ones(32000), **KINDS[kind])
    (binary,) = binaries(target, lambda: forward_given_lse(x, targets, lse, loss, None)).values()
    assert binary.spilled_bytes == 0


@pytest.mark.parametrize("n", [1, 5, 4096])
def test_a_gradient_of_any_size_is_multiplied(n):
    """Of one element too, whose number Triton makes a constant of the kernel."""
    dx = torch.empty(n)
    (binary,) = binaries("sm_90", lambda: multiply(dx, torch.ones(1))).values()
    assert binary.spilled_bytes == 0
    assert (max(binary.store_widths) == 16) == (n == 4096)


@pairwise()
@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("k", [1, 5, 300])
def test_log_probabilities(target, dtype, softcap, k):
    options, row = LogProb(softcap=softcap), torch.ones(512)
    for n_cols in (1024, 50257, 128256):
        x, targets = torch.empty(512, n_cols, dtype=dtype), torch.zeros(512, k, dtype=torch.int64)

        def run():
            given = log_probs.given_of(x, targets, row, options)  # noqa: B023
            log_probs.forward(given, options, log_probs.Asked(*[True] * 6))
            gradients = log_probs.Gradients(torch.ones(512, k), row, row)
            log_probs.backward(given, row, row, row, gradients, options)

        found = binaries(target, run)
        assert ("_merge_log_probs" in found) == (n_cols > 1024)
        for name, binary in found.items():
            assert binary.spilled_bytes <= ABOUT_THE_CALL, (n_cols, name)


LISTS = Kept(torch.zeros(1000, dtype=torch.int32), torch.zeros(513, dtype=torch.int64))


@pairwise(("target", "kind", "inplace"), ("target", "kind", "origin"))
@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("k", [1, 5, 300])
@pytest.mark.parametrize("kind", ["list", "bitmask"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("origin", [None, 1024, 1029])
def test_log_probabilities_over_kept_columns(target, dtype, softcap, k, kind, inplace, origin):
    """What is not listed is written in whole vectors, and no bitmask takes the registers that its logits need.

    origin: of a shard, whose bits begin with a byte or within one.
    """
    options, row = LogProb(softcap=softcap), torch.ones(512)
    for n_cols in (1024, 50257, 128256):
        x, targets = torch.empty(512, n_cols, dtype=dtype), torch.zeros(512, k, dtype=torch.int64)
        shard = None if origin is None else (origin, 2 * n_cols)
        bits = torch.zeros(512, -(-2 * n_cols // 32), dtype=torch.int32)
        kept = LISTS if kind == "list" else Kept(bits=bits)

        def run():
            given = log_probs.given_of(x, targets, row, options, kept, shard)  # noqa: B023
            log_probs.forward(given, options, log_probs.Asked(*[True] * 6))
            gradients = log_probs.Gradients(torch.ones(512, k), row, row)
            log_probs.backward(given, row, row, row, gradients, options, x if inplace else None)  # noqa: B023

        found = binaries(target, run)
        assert ("_merge_log_probs" in found) == (n_cols > 1024 and kind == "bitmask")
        if target.startswith("sm_"):  # AMD's have 8 bytes or less of a short row, and beside a bitmask
            writes = "_write_listed" if kind == "list" else "_log_prob_gradient"
            assert max(found[writes].store_widths) == 16
        for name, binary in found.items():
            assert binary.spilled_bytes <= ABOUT_THE_CALL, (n_cols, name)


@pairwise(("kind", "given"))
@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16), (BF16, FP32)], ids=str)
@pytest.mark.parametrize("kind", ["kl", "reverse_kl", "jsd", "tvd", "cross"])
@pytest.mark.parametrize("given", ["logits", "log_probs", "probs"])
@pytest.mark.parametrize("how", ["plain", "of rows", "softcap"])
def test_divergences(target, dtypes, kind, given, how):
    given = "probs" if kind == "cross" else given
    options = Divergence(kind=kind, target_is=given)
    if how == "softcap":
        options = replace(options, softcap=30.0, target_softcap=30.0 if given == "logits" else None)
    if kind == "cross" and how == "of rows":
        options = replace(options, label_smoothing=0.1)
    row = torch.ones(512)
    for n_cols in (128, 1000, 4096, 50257, 151936):
        x, y = (torch.empty(512, n_cols, dtype=dtype) for dtype in dtypes)
        pair = divergences.Pair(x, y)
        if kind == "cross":
            pair = pair._replace(weight=torch.ones(n_cols))
        elif how == "of rows":
            pair = pair._replace(temperature=row, target_temperature=row if given == "logits" else None)

        def run():
            states = (row, row) if given == "logits" else (None, None)
            divergences.forward(pair, options)  # noqa: B023
            rows = divergences.PairRows(row, row, *states, row, row)
            divergences.backward(pair, rows, row, options, of_target=kind == "cross")  # noqa: B023
            if n_cols % 8 == 0:  # noqa: B023
                divergences.at_once(pair, row, 1.0, options, kind == "cross")  # noqa: B023

        found = binaries(target, run)
        twice = {"_pair_sums", "_merge_sums"} if options.twice else set()
        merged = {"_merge_pairs"} if n_cols > 16384 else set()
        held = {"_pair_held"} if n_cols % 8 == 0 else set()
        assert found.keys() == {"_pair_states", "_pair_gradient"} | twice | merged | held, n_cols
        for name, binary in found.items():
            assert binary.spilled_bytes <= (MOST_SPILLED if name == "_pair_held" else 0), (n_cols, name)
            if target != "gfx942" and n_cols % 8 == 0 and not name.startswith("_merge"):
                assert max(binary.load_widths) == 16, (n_cols, name)
                if name in ("_pair_gradient", "_pair_held"):  # one may write as many columns as it reads of the wider
                    narrow = name == "_pair_held" and dtypes == (BF16, FP32)
                    assert max(binary.store_widths) >= (8 if narrow else 16), (n_cols, name)
