"""Options of a call that torch.compile traces whole: numbers that change, `out=`, and torch's causal masks."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import fused_softmax
from fused_softmax.ops.softmax import reference

SEEDED = torch.Generator().manual_seed(3)
X, WEIGHT, Q = (torch.randn(shape, generator=SEEDED) for shape in ((4, 6), (9, 6), (1, 2, 6, 8)))
TARGET = torch.arange(4)

# Each with a number that a compiler makes a symbol of from its second value on, or at once.
NUMBERS = {
    "cross_entropy, softcap": lambda s: fused_softmax.cross_entropy(X, TARGET, softcap=s),
    "cross_entropy, scale": lambda s: fused_softmax.cross_entropy(X, TARGET, scale=s),
    "cross_entropy, smoothing": lambda s: fused_softmax.cross_entropy(X, TARGET, label_smoothing=s / 10),
    "cross_entropy, z-loss": lambda s: fused_softmax.cross_entropy(X, TARGET, lse_square_scale=s),
    "linear_cross_entropy, softcap": lambda s: fused_softmax.linear_cross_entropy(X, WEIGHT, TARGET, softcap=s),
    "linear_cross_entropy, scale": lambda s: fused_softmax.linear_cross_entropy(X, WEIGHT, TARGET, scale=s),
    "softmax, scale and sink": lambda s: fused_softmax.softmax(X, scale=s, sink=s),
    "log_softmax, scale and sink": lambda s: fused_softmax.log_softmax(X, scale=s, sink=s),
    "logsumexp, scale and sink": lambda s: fused_softmax.logsumexp(X, -1, scale=s, sink=s),
    "attention, scale and softcap": lambda s: fused_softmax.attention(Q, Q, Q, scale=s, softcap=s),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_changes_breaks_no_graph(name, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(NUMBERS[name], backend="eager", fullgraph=True, dynamic=dynamic)
    for value in (1.5, 2.0, 3.0, 4.0):
        torch.testing.assert_close(compiled(value), NUMBERS[name](value))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_scale_or_softcap_that_is_not_finite_is_refused(value):
    for option in ("scale", "softcap"):
        with pytest.raises(ValueError, match=f"{option} must be finite, got {value}"):
            fused_softmax.cross_entropy(X, TARGET, **{option: value})


OPTIONS = {
    "plain": {}, "mask": {"mask": X > 0}, "scale": {"scale": 0.5}, "sink": {"sink": 0.1}, "causal": {"is_causal": True},
}  # fmt: skip


def made_by(name):
    return torch.empty(4) if name == "logsumexp" else torch.empty(4, 6)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_out_breaks_no_graph(name, options):
    torch._dynamo.reset()
    function, given, x, out = getattr(fused_softmax, name), OPTIONS[options], X.clone(), made_by(name)
    run = torch.compile(lambda x, y: function(x, -1, out=y, **given), backend="eager", fullgraph=True)
    for _ in range(2):
        assert run(x, out.fill_(9.0)) is out
        torch.testing.assert_close(out, function(x, -1, **given))
        x += 1.0


@pytest.mark.parametrize("name", ["softmax", "logsumexp"])
def test_an_empty_out_is_resized_as_by_torch(name):
    """Beside a graph, for torch resizes none within one."""
    torch._dynamo.reset()
    for options in ({}, {"scale": 0.5}):
        out = torch.empty(0)
        function = getattr(fused_softmax, name)
        torch.compile(lambda x, y: function(x, -1, out=y, **options), backend="eager")(X, out)  # noqa: B023
        torch.testing.assert_close(out, function(X, -1, **options))


# torch.nn.attention.bias.


def given_of(lq, lk, device):
    generator = torch.Generator().manual_seed(lq)
    return [torch.randn(1, 2, n, 8, generator=generator).to(device) for n in (lq, lk, lk)]


@pytest.mark.parametrize("make", [causal_lower_right, causal_upper_left])
@pytest.mark.parametrize(("lq", "lk"), [(3, 5), (5, 3), (4, 4)])
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_a_causal_bias_gives_torchs_result(make, lq, lk, device):
    q, k, v = given_of(lq, lk, device)
    theirs = F.scaled_dot_product_attention(q, k, v, make(lq, lk)._materialize(device))
    for _ in range(2):
        for name in ("attn_mask", "bias"):
            ours = fused_softmax.attention(q, k, v, **{name: make(lq, lk)})
            assert type(ours) is torch.Tensor
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
    mask = make(lq, lk)
    compiled = torch.compile(lambda q: fused_softmax.attention(q, k, v, mask), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [causal_lower_right, causal_upper_left])
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_a_causal_bias_beside_what_is_aligned_as_causality_is(make, align, device):
    q, k, v = given_of(3, 5, device)
    dense = make(3, 5)._materialize(device)
    for options in (
        {"window": (1, None)}, {"alibi_slopes": torch.tensor([0.5, 1.0], device=device)}, {"softcap": 3.0},
        {"bias": torch.randn(2, 3, 5, device=device)}, {"sinks": torch.randn(2, device=device)},
    ):  # fmt: skip
        ours = fused_softmax.attention(q, k, v, make(3, 5), causal_align=align, **options)
        right = fused_softmax.attention(q, k, v, dense, causal_align=align, **options)
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
@pytest.mark.parametrize("make", [causal_lower_right, causal_upper_left])
def test_a_causal_bias_masks_a_softmax(name, make, device):
    x = torch.randn(1, 2, 3, 5, device=device)
    for _ in range(2):
        ours = getattr(fused_softmax, name)(x, -1, mask=make(3, 5))
        right = getattr(reference, name)(x, -1, mask=make(3, 5)._materialize(device))
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)


def test_causal_biases_that_do_not_fit_are_refused(device):
    q, k, v = given_of(4, 4, device)
    kept = torch.ones(4, 4, dtype=torch.bool, device=device)
    with pytest.raises(RuntimeError, match=r"must be made of \(queries, keys\), \(4, 4\), got \(3, 5\)"):
        fused_softmax.attention(q, k, v, causal_lower_right(3, 5))
    with pytest.raises(RuntimeError, match="is_causal=True takes no CausalBias"):
        fused_softmax.attention(q, k, v, causal_upper_left(4, 4), is_causal=True)
    with pytest.raises(TypeError, match="bias is a CausalBias beside an attn_mask"):
        fused_softmax.attention(q, k, v, kept, bias=causal_upper_left(4, 4))
    with pytest.raises(ValueError, match="mask must broadcast"):
        fused_softmax.softmax(q @ k.mT, mask=causal_upper_left(3, 5))


class OnDemand(torch.Tensor):
    """A mask of another library, which says what it stands for when it is asked."""

    def materialize(self):
        raise NotImplementedError


def test_masks_that_are_made_on_demand_are_refused(device):
    q, k, v = given_of(4, 4, device)
    mask = torch.empty(4, 4, device=device).as_subclass(OnDemand)
    calls = (
        lambda: fused_softmax.attention(q, k, v, mask),
        lambda: fused_softmax.attention(q, k, v, bias=mask),
        lambda: fused_softmax.softmax(q @ k.mT, mask=mask),
        lambda: fused_softmax.logsumexp(q @ k.mT, -1, mask=mask),
    )
    for call in calls:
        with pytest.raises(TypeError, match="is a OnDemand, whose elements are not in memory"):
            call()
    with pytest.raises(TypeError, match="is a UninitializedBuffer"):
        fused_softmax.softmax(q @ k.mT, mask=torch.nn.UninitializedBuffer(device=device))


def test_under_enable_a_causal_bias_is_torchs(device):
    q, k, v = given_of(3, 5, device)
    theirs = F.scaled_dot_product_attention(q, k, v, causal_lower_right(3, 5))
    with fused_softmax.enabled(attention=True):
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, causal_lower_right(3, 5)), theirs)
