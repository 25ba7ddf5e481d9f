"""torch's scaled_dot_product_attention while it is enabled: what is taken, what stays, and that it is back."""

import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from attention_cases import BF16, PLANS, qkv
from torch._subclasses.fake_tensor import FakeTensorMode

import fused_softmax
from fused_softmax.core.route import INTERPRET
from fused_softmax.ops.attention import call as attention_call
from fused_softmax.ops.attention.plan import sdpa as plan
from fused_softmax.register import patch

pytestmark = pytest.mark.skipif(not INTERPRET, reason="by interpreted kernels; who is faster depends on the GPU")


@pytest.fixture
def ran(monkeypatch):
    """The calls that ours takes, with entries for short lengths."""
    calls = []
    ours = patch.attention
    monkeypatch.setattr(patch, "attention", lambda *given, **more: calls.append(1) or ours(*given, **more))
    monkeypatch.setattr(plan, "BIASED", (plan.Biased((9, 0), 16, 128, "a test"),))
    monkeypatch.setattr(attention_call, "plan_attention", lambda *_: PLANS["square"])
    threads = [frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()]
    waiting = {(frame.f_globals["__name__"], frame.f_code.co_name) for frame in threads}
    monkeypatch.setattr(patch, "_IDLE", patch._IDLE | waiting)
    yield calls
    assert (patch._depth, patch._asked, patch._of_attention) == (0, [], None)


def biased():
    q, k, v = (each.requires_grad_() for each in qkv(20, 35, dtype=BF16))
    bias = torch.zeros(1, 2, 20, 35, dtype=BF16, requires_grad=True)
    y = F.scaled_dot_product_attention(q, k, v, bias)
    return y, *torch.autograd.grad(y.float().square().sum(), (q, k, v, bias))


def test_a_bias_with_a_gradient_is_taken_and_given_back(ran):
    expected = biased()
    with fused_softmax.enabled(attention=True):
        for each, exact in zip(biased(), expected, strict=True):
            torch.testing.assert_close(each, exact, rtol=3e-2, atol=3e-2)
        assert len(ran) == 1
        biased()  # a call that is kept
        assert len(ran) == 2
    biased()
    with fused_softmax.enabled():
        biased()
    assert len(ran) == 2


def test_all_else_stays(ran):
    q, k, v = qkv(20, 35, dtype=BF16)
    bias = torch.zeros(20, 35, dtype=BF16, requires_grad=True)
    with fused_softmax.enabled(attention=True):
        F.scaled_dot_product_attention(q, k, v, bias, dropout_p=0.5)
        F.scaled_dot_product_attention(q.float(), k.float(), v.float(), bias.float())
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            F.scaled_dot_product_attention(q, k, v, bias)
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(q, k, v, bias, is_causal=True)
    assert not ran


def test_the_latest_enable_is_undone_first(ran):
    fused_softmax.enable()
    with fused_softmax.enabled(attention=True):
        biased()
    assert len(ran) == 1
    biased()
    assert len(ran) == 1
    fused_softmax.disable()


@pytest.mark.filterwarnings("error:Accessing the data pointer of FakeTensor")
def test_a_fake_tensor_is_not_asked_for_its_address(ran):
    with fused_softmax.enabled(attention=True), FakeTensorMode():
        assert F.scaled_dot_product_attention(*(torch.empty(2, 2, n, 16) for n in (20, 35, 35))).shape == (2, 2, 20, 16)
