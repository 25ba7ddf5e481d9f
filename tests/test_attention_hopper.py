"""attention's kernels for sm_90, held to float64 on one; and which calls and shares of tiles their plan has."""

from dataclasses import replace

import pytest
import torch
from attention_cases import BF16, FP16, assert_attention
from hopper_cases import assert_near, given, on_hopper, watched

import fused_softmax
from fused_softmax.core.plan import H200
from fused_softmax.ops.attention import hopper as attention_hopper
from fused_softmax.ops.attention import hopper_bias as attention_hopper_bias
from fused_softmax.ops.attention.plan.hopper import most_work, plan_hopper, shift_of

OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "bottom right": {"is_causal": True, "causal_align": "bottom_right"},
    "window": {"window": (100, 30)},
    "left bound": {"window": (100, None)},
    "softcap": {"softcap": 3.0},
    "causal softcap": {"softcap": 20.0, "is_causal": True},
    "window softcap": {"softcap": 20.0, "window": (100, 30)},
}
PLAIN_OPTIONS = [option for option in OPTIONS if "softcap" not in option]


@pytest.fixture
def taken(monkeypatch):
    """Whether each call that was prepared went to these kernels."""
    return watched(monkeypatch, "hopper", "the forward pass")


@pytest.fixture
def gradients_taken(monkeypatch):
    """As `taken`, of the two kernels of the gradients, and of each turn of heads whose dS is kept."""
    found = watched(monkeypatch, "hopper", "dK and dV", "dQ")
    prepare_keys = attention_hopper.prepare_keys
    monkeypatch.setattr(attention_hopper, "prepare_keys", lambda *of: found.append(prepare_keys(*of)) or found[-1])
    return found


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("dim", [32, 64, 72, 128, 256])
@pytest.mark.parametrize("length", [1, 63, 192, 257, 383])
def test_forward(taken, length, dim, dtype, option):
    assert_near(*given(length, length, dim, dtype), **OPTIONS[option])
    assert_near(*given(length, 250, dim, dtype, heads=4), **OPTIONS[option])
    assert len(taken) == 2
    if None not in OPTIONS[option].get("window", (None,)) and dim <= 64:
        # What is narrow goes to the plain kernel, unless it bounds nothing.
        assert None in taken or length == 1
    else:
        assert None not in taken


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("dim", [32, 64, 72, 128, 192, 256])
@pytest.mark.parametrize("length", [1, 63, 192, 257, 383])
def test_gradients(gradients_taken, length, dim, dtype, option):
    """With a gradient of lse, so that cuDNN takes none of them."""
    assert_attention(*given(length, length, dim, dtype), **OPTIONS[option])
    assert_attention(*given(length, 300, dim, dtype, heads=4), enable_gqa=True, **OPTIONS[option])
    assert len(gradients_taken) == 4
    assert None not in gradients_taken


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "softcap": 20.0}, {"window": (700, 300)}], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_gradients_of_more_tiles_than_programs(gradients_taken, dim, options):
    """Programs go on to a second tile and a third, and heads of queries share keys."""
    assert_attention(*given(2049, 2100, dim, BF16, heads=16, key_heads=8), enable_gqa=True, **options)
    assert None not in gradients_taken


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("option", PLAIN_OPTIONS)
@pytest.mark.parametrize("of_batches", [False, True])
@pytest.mark.parametrize("dim", [64, 72, 128, 256])
@pytest.mark.parametrize("lengths", [(200, 264), (383, 320), (129, 700)], ids=str)
def test_alibi(taken, gradients_taken, lengths, dim, of_batches, option):
    """Slopes of heads that share keys, of each batch or of all; one is 0."""
    slopes = torch.tensor([[0.5, 0.0, 0.25, 0.01], [1.0, 0.125, 0.0, 0.3]], device="cuda")
    slopes = slopes if of_batches else slopes[0]
    q, k, v = given(*lengths, dim, BF16, heads=4)
    assert_attention(q, k, v, enable_gqa=True, alibi_slopes=slopes, **OPTIONS[option])
    assert None not in gradients_taken
    assert None not in taken or dim == 64  # where what is narrow goes to the plain kernel


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("beside", ["bias", "softcap", "strided slopes"])
def test_alibi_beside_others_goes_to_the_plain_kernels(gradients_taken, beside):
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device="cuda")[:: 2 if beside == "strided slopes" else 1][:2]
    options = {"bias": {"bias": torch.zeros(192, 192, device="cuda", dtype=BF16)}, "softcap": {"softcap": 5.0}}
    assert_attention(*given(192, 192, 64, BF16), alibi_slopes=slopes, **options.get(beside, {}))
    assert set(gradients_taken) == {None}


BIASES = {"heads": (1, 4), "batches and heads": (2, 4), "shared": ()}


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("shape", BIASES)
@pytest.mark.parametrize("option", PLAIN_OPTIONS)
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("dim", [64, 72, 128])
@pytest.mark.parametrize("lengths", [(200, 264), (383, 320)], ids=str)
def test_bias(gradients_taken, lengths, dim, dtype, option, shape):
    """Some of it is -inf. The kernel of dK and dV stores dS, of which dQ and the gradient of the bias are made."""
    bias = torch.randn(*BIASES[shape], *lengths, device="cuda").to(dtype)
    bias[..., :3, 5] = -float("inf")
    assert_attention(*given(*lengths, dim, dtype, heads=4), enable_gqa=True, bias=bias, **OPTIONS[option])
    assert len(gradients_taken) == 1
    assert None not in gradients_taken


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("option", ["full", "causal"])
@pytest.mark.parametrize("shape", [(1, 6), (2, 6), (2, 1), ()], ids=str)
@pytest.mark.parametrize("room", [1, 2])
def test_a_bias_whose_ds_is_made_for_some_heads_at_a_time(gradients_taken, monkeypatch, room, shape, option):
    monkeypatch.setattr(attention_hopper_bias, "_DS_BYTES", room * 2 * 2 * 200 * 264 * 2)  # of 3 heads of keys
    bias = torch.randn(*shape, 200, 264, device="cuda").to(BF16)[..., :261]
    assert_attention(*given(200, 261, 64, BF16, 6, 3), enable_gqa=True, bias=bias, **OPTIONS[option])
    assert len(gradients_taken) == (3 if room == 1 else 2)
    assert None not in gradients_taken


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("shape", BIASES)
def test_a_bias_whose_ds_has_no_room(gradients_taken, monkeypatch, shape):
    """A kernel of its own computes its gradient, or where nothing is broadcast the plain kernel of dQ."""
    monkeypatch.setattr(attention_hopper_bias, "_DS_BYTES", 0)
    bias = torch.randn(*BIASES[shape], 200, 264, device="cuda").to(BF16)
    assert_attention(*given(200, 264, 64, BF16, heads=4), enable_gqa=True, bias=bias)
    assert [each is None for each in gradients_taken] == [False, shape == "batches and heads"]


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("hidden", [float("nan"), float("inf")], ids=str)
def test_the_bias_of_a_hidden_key_is_not_looked_at(gradients_taken, hidden):
    bias = torch.randn(4, 192, 192, device="cuda").to(BF16)
    bias[:, torch.ones(192, 192).triu(1).bool().cuda()] = hidden
    q, k, v = (each.requires_grad_() for each in given(192, 192, 64, BF16, heads=4))
    bias.requires_grad_()
    y = fused_softmax.attention(q, k, v, is_causal=True, enable_gqa=True, bias=bias)
    found = torch.autograd.grad(y, (q, k, v, bias), torch.ones_like(y))
    clean = bias.detach().nan_to_num(0, 0).requires_grad_()
    y_clean = fused_softmax.attention(q, k, v, is_causal=True, enable_gqa=True, bias=clean)
    assert torch.equal(y, y_clean)
    assert all(map(torch.equal, found, torch.autograd.grad(y_clean, (q, k, v, clean), torch.ones_like(y))))
    assert len(gradients_taken) == 1  # prepared once for both
    assert None not in gradients_taken


@pytest.mark.gpu
@on_hopper
def test_the_gradient_of_a_bias_has_the_same_bits_on_every_run(gradients_taken):
    q, k, v = given(700, 520, 128, BF16, heads=4)
    bias = torch.randn(4, 700, 520, device="cuda").to(BF16).requires_grad_()

    def gradient():
        y = fused_softmax.attention(q, k, v, enable_gqa=True, bias=bias)
        return torch.autograd.grad(y, bias, torch.ones_like(y))[0]

    first = gradient()
    assert all(torch.equal(first, gradient()) for _ in range(10))
    assert gradients_taken[0] is not None


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("case", ["dtype", "rows", "stride"])
def test_biases_that_tma_does_not_read_go_to_the_plain_kernels(gradients_taken, case):
    shape, dtype = {"dtype": ((192, 192), torch.float32), "rows": ((1, 192), BF16), "stride": ((192, 196), BF16)}[case]
    bias = torch.randn(shape, device="cuda").to(dtype)[..., :192]
    assert_attention(*given(192, 192, 64, BF16), bias=bias)
    assert set(gradients_taken) == {None}


@pytest.mark.gpu
@on_hopper
def test_gradients_with_sinks_and_other_value_dims(gradients_taken):
    q, k, v = given(300, 420, 128, BF16, heads=4)
    sinks = torch.randn(4, device="cuda")
    assert_attention(q, k, v[..., :64], enable_gqa=True, sinks=sinks, window=(50, 0), causal_align="bottom_right")
    assert None not in gradients_taken


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("dim", [128, 256])
def test_the_same_bits_of_gradients_on_every_run(gradients_taken, dim, softcap):
    q, k, v = (each.requires_grad_() for each in given(1025, 1025, dim, BF16))

    def gradients():
        found = fused_softmax.attention(q, k, v, is_causal=True, softcap=softcap, deterministic=True)
        return torch.autograd.grad(found, (q, k, v), torch.ones_like(found))

    first = gradients()
    for _ in range(10):
        assert all(map(torch.equal, first, gradients()))
    assert None not in gradients_taken


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("dim", "value_dim", "taken"), [(128, 64, 2), (256, 128, 0)])
def test_gradients_of_capped_scores_with_other_value_dims(gradients_taken, dim, value_dim, taken):
    q, k, v = given(300, 420, dim, BF16)
    assert_attention(q, k, v[..., :value_dim], softcap=20.0, is_causal=True)
    assert len([each for each in gradients_taken if each is not None]) == taken


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dim", [64, 256])
def test_scores_far_beyond_a_softcap(gradients_taken, dim):
    """Where tanh is 1, no gradient of scores is left."""
    q, k, v = (100 * each if i < 2 else each for i, each in enumerate(given(200, 260, dim, BF16)))
    found = assert_attention(q, k, v, softcap=2.0, with_lse=False)
    assert not found["query"].isnan().any()
    assert None not in gradients_taken


@pytest.mark.gpu
@on_hopper
def test_what_tma_does_not_read_goes_to_the_plain_kernel(taken):
    q, k, v = given(65, 65, 64, BF16)
    assert_near(q, k[:, :1].expand_as(k), v)
    assert taken == [None]


@pytest.mark.gpu
@on_hopper
def test_the_same_bits_on_every_run():
    q, k, v = given(2049, 2049, 64, BF16)
    first = fused_softmax.attention(q, k, v, is_causal=True, deterministic=True)
    for _ in range(10):
        assert torch.equal(first, fused_softmax.attention(q, k, v, is_causal=True, deterministic=True))


def test_which_calls_are_taken():
    assert not isinstance(plan_hopper(128, 128, 2, 4096, H200), str)
    assert isinstance(plan_hopper(128, 128, 4, 4096, H200), str)
    assert isinstance(plan_hopper(100, 128, 2, 4096, H200), str)
    assert isinstance(plan_hopper(256, 64, 2, 4096, H200), str)
    assert isinstance(plan_hopper(128, 128, 2, 4096, replace(H200, capability=(10, 0))), str)
    for kernel in ("keys", "queries"):
        assert not isinstance(plan_hopper(128, 64, 2, 4096, H200, kernel), str)
        assert not isinstance(plan_hopper(256, 256, 2, 4096, H200, kernel), str)
    assert plan_hopper(64, 64, 2, 4096, H200, "keys", left=True).block == 64
    assert plan_hopper(64, 64, 2, 4096, H200, "keys", softcap=True).block == 64
    assert plan_hopper(256, 256, 2, 4096, H200, "keys", left=True, softcap=True).wide
    assert isinstance(plan_hopper(256, 128, 2, 4096, H200, "keys"), str)
    assert not isinstance(plan_hopper(128, 128, 2, 4096, H200, softcap=True), str)
    assert isinstance(plan_hopper(128, 128, 2, 4096, H200, bias=True, softcap=True), str)
    assert not isinstance(plan_hopper(128, 128, 2, 4096, H200, alibi=True), str)
    assert isinstance(plan_hopper(64, 64, 2, 4096, H200, alibi=True), str)
    assert not isinstance(plan_hopper(64, 64, 2, 4096, H200, "keys", alibi=True), str)
    assert isinstance(plan_hopper(128, 128, 2, 4096, H200, bias=True, alibi=True), str)
    assert plan_hopper(128, 128, 2, 4096, H200, "queries", alibi=True).block == 64
    assert isinstance(plan_hopper(64, 64, 2, 8192, H200, left=True, window=128), str)
    assert not isinstance(plan_hopper(128, 128, 2, 8192, H200, left=True, window=128), str)
    assert not isinstance(plan_hopper(64, 64, 2, 8192, H200, left=True, window=1024), str)
    for kernel in ("forward", "keys", "queries"):
        assert not isinstance(plan_hopper(128, 128, 2, 4096, H200, kernel, bias=True), str)
        assert isinstance(plan_hopper(256, 256, 2, 4096, H200, kernel, bias=True), str)
    assert isinstance(plan_hopper(32, 32, 2, 384, H200, bias=True), str)
    assert not isinstance(plan_hopper(32, 32, 2, 384, H200, "keys", bias=True), str)


@pytest.mark.parametrize(("head_tiles", "heads"), [(2, 1024), (6, 256), (22, 128), (32, 128), (64, 64), (128, 32)])
def test_programs_get_equal_shares(head_tiles, heads):
    """Without a shift, 22 tiles a head give one of 132 programs 1.9 times the mean."""
    shift = shift_of(head_tiles, heads, 132)
    mean = heads * head_tiles * (1 + (head_tiles + 1) / 2) / 132
    assert most_work(head_tiles, heads, 132, shift) <= 1.035 * mean
