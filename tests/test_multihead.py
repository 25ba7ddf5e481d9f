"""MultiheadAttention, held to torch.nn.MultiheadAttention: outputs, weights, gradients, state."""

import copy
import math
import pickle

import pytest
import torch

from fused_softmax import nn
from fused_softmax.core.route import Route
from fused_softmax.ops.attention import attention as attention_ops

WIDTH, HEADS, BATCH, QUERIES, KEYS = 8, 2, 3, 5, 7
MODULES = {
    "plain": {},
    "batch first, no bias": {"batch_first": True, "bias": False},
    "widths": {"kdim": 6, "vdim": 4},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True, "batch_first": True},
    "all": {"kdim": 6, "vdim": 4, "add_bias_kv": True, "add_zero_attn": True},
}
KEEPS = torch.tensor([[True] * 7, [True] * 4 + [False] * 3, [False] * 2 + [True] * 5])
PADDINGS = {"none": None, "bool": ~KEEPS, "float": torch.where(KEEPS, 0.5, -math.inf)}
MASKS = ["none", "bool", "float", "bool of heads", "float of heads"]


@pytest.fixture
def torchs(monkeypatch):
    """attention of torch's operations, by which many small calls take little time."""
    monkeypatch.setattr(attention_ops, "route_of", lambda *tensors, **_: Route.COMPOSED)


def pair(device, dtype=torch.float32, **options):
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(WIDTH, HEADS, **options)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    ours = nn.MultiheadAttention(WIDTH, HEADS, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours.to(device, dtype), theirs.to(device, dtype)


def inputs(module, device, lead=(BATCH,), alike=False):
    """Query, key and value as the module takes them, and one tensor for all three where they are alike."""

    def made(length, width):
        x = torch.randn(*lead, length, width, device=device)
        return (x if module.batch_first or not lead else x.transpose(0, 1)).requires_grad_()

    if alike:
        x = made(KEYS, WIDTH)
        return x, x, x
    return made(QUERIES, WIDTH), made(KEYS, module.kdim), made(KEYS, module.vdim)


def mask_of(kind, n_queries, device, n_batch=BATCH):
    if kind == "none":
        return None
    shape = (n_batch * HEADS, n_queries, KEYS) if "heads" in kind else (n_queries, KEYS)
    values = torch.randn(shape)
    hides = (values > 0.5) & (torch.arange(KEYS) != 2)  # a key that all see
    mask = hides if "bool" in kind else torch.where(hides, -math.inf, values)
    return mask.to(device)


def check(modules, given, /, **options):
    ours, theirs = modules
    outcomes = []
    mask = options.get("attn_mask")
    for module in (ours, theirs):
        leaves = [*module.parameters(), *{id(each): each for each in given}.values()]
        if mask is not None and mask.is_floating_point():
            leaves.append(mask.requires_grad_())
        output, weights = module(*given, **options)
        generator = torch.Generator().manual_seed(1)
        do = torch.randn(output.shape, generator=generator).to(output.device, output.dtype)
        loss = (output * do).sum()
        if weights is not None:
            loss = loss + (weights * weights).sum()
        gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
        outcomes.append((output.detach(), None if weights is None else weights.detach(), gradients))
    torch.testing.assert_close(*outcomes, rtol=1e-3, atol=1e-4)
    return outcomes[0]


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
def test_masks(name, kind, padding, need_weights, torchs, device):
    """torch warns of a bool beside a float, and takes both."""
    modules = pair(device, **MODULES[name])
    padding = PADDINGS[padding] if PADDINGS[padding] is None else PADDINGS[padding].to(device)
    mask = mask_of(kind, QUERIES, device)
    check(modules, inputs(modules[0], device), key_padding_mask=padding, attn_mask=mask, need_weights=need_weights)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_modules(name, need_weights, torchs, device):
    modules = pair(device, **MODULES[name])
    check(modules, inputs(modules[0], device), need_weights=need_weights)
    if "kdim" not in MODULES[name]:
        check(modules, inputs(modules[0], device, alike=True), need_weights=need_weights)
    if need_weights:
        _, weights, _ = check(modules, inputs(modules[0], device), average_attn_weights=False)
        assert weights.shape[:3] == (BATCH, HEADS, QUERIES)


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
def test_by_the_kernels(name, device):
    modules = pair(device, **MODULES[name])
    given = inputs(modules[0], device)
    check(modules, given, need_weights=False)
    mask = mask_of("float of heads", QUERIES, device)
    check(modules, given, need_weights=False, attn_mask=mask, key_padding_mask=PADDINGS["bool"].to(device))
    check(modules, given, attn_mask=mask)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("name", ["plain", "zero_attn", "all"])
def test_without_a_batch(name, need_weights, torchs, device):
    modules = pair(device, **MODULES[name])
    given, padding = inputs(modules[0], device, lead=()), PADDINGS["bool"][1].to(device)
    for kind in ("none", "bool of heads"):
        mask = mask_of(kind, QUERIES, device, 1)
        check(modules, given, need_weights=need_weights, key_padding_mask=padding, attn_mask=mask)
    assert modules[0](*given, average_attn_weights=False)[1].shape[:2] == (HEADS, QUERIES)


@pytest.mark.parametrize("need_weights", [False, True])
def test_causality_is_applied_in_place_of_its_mask(need_weights, torchs, device, monkeypatch):
    modules = pair(device)
    given = inputs(modules[0], device, alike=True)
    causal = torch.ones(KEYS, KEYS, dtype=torch.bool, device=device).triu(1)
    windows = []
    attention = nn.attention
    monkeypatch.setattr(
        nn,
        "attention",
        lambda *given, **named: windows.append((given[3], named["window"])) or attention(*given, **named),
    )
    for padding in (None, PADDINGS["bool"].to(device)):
        options = {"attn_mask": causal, "key_padding_mask": padding, "is_causal": True, "need_weights": need_weights}
        if padding is not None:
            padding[2, :2] = False  # so that every query sees a key
        check(modules, given, **options)
    if not need_weights:
        assert [window for _, window in windows] == [(None, 0)] * 2
        assert [None if mask is None else tuple(mask.shape) for mask, _ in windows] == [None, (BATCH, 1, 1, KEYS)]


def test_causality_beside_a_position_that_all_see(torchs, device):
    """Every query sees what add_bias_kv and add_zero_attn add, as by the mask alone."""
    ours, theirs = pair(device, **MODULES["bias_kv"], add_zero_attn=True)
    given = inputs(ours, device, alike=True)
    causal = torch.ones(KEYS, KEYS, dtype=torch.bool, device=device).triu(1)
    found, _ = ours(*given, attn_mask=causal, is_causal=True, need_weights=False)
    expected, _ = theirs(*given, attn_mask=causal, need_weights=False)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_query_that_sees_no_key_is_torchs(torchs, device):
    ours, theirs = pair(device)
    given, padding = inputs(ours, device), torch.zeros(BATCH, KEYS, dtype=torch.bool, device=device)
    padding[1] = True
    for need_weights in (False, True):
        found, expected = (
            module(*given, key_padding_mask=padding, need_weights=need_weights) for module in (ours, theirs)
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
        assert found[0][:, 1].isnan().all() == need_weights


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("sizes", [(0, 5, 7), (3, 0, 7)])
def test_empty_batches(sizes, need_weights, torchs, device):
    n_batch, n_queries, n_keys = sizes
    modules = pair(device, batch_first=True)
    given = [torch.randn(n_batch, n, WIDTH, device=device).requires_grad_() for n in (n_queries, n_keys, n_keys)]
    check(modules, given, need_weights=need_weights)


@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_drops_weights_in_training_alone(need_weights, device):
    ours, theirs = pair(device, dropout=0.5, batch_first=True)
    given = inputs(ours, device)
    outputs = []
    for module in (ours, theirs):
        torch.manual_seed(3)
        outputs.append(module(*given, need_weights=True))
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    assert (outputs[0][1] == 0).any()
    torch.manual_seed(3)
    torch.testing.assert_close(ours(*given, need_weights=False)[0], outputs[0][0])
    check((ours.eval(), theirs.eval()), given, need_weights=need_weights)


def test_wide_heads_take_torchs_operations(device):
    theirs = torch.nn.MultiheadAttention(520, 2, device=device)
    ours = nn.MultiheadAttention(520, 2, device=device)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(4, 1, 520, device=device, requires_grad=True)
    check((ours, theirs), (x, x, x), need_weights=False)


@pytest.mark.parametrize("name", MODULES)
def test_state_and_copies_are_torchs(name, device):
    ours, theirs = pair(device, **MODULES[name])
    assert isinstance(ours, torch.nn.MultiheadAttention)
    assert repr(ours) == repr(theirs)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(2.0)
    theirs.load_state_dict(ours.state_dict())
    given = inputs(ours, device)
    for other in (theirs, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        torch.testing.assert_close(other(*given)[0], ours(*given)[0], rtol=1e-4, atol=1e-5)


def test_half_precision_and_factory_arguments(torchs, device):
    ours, theirs = pair(device, torch.bfloat16)
    assert (
        nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.bfloat16, device=device).in_proj_weight.dtype == torch.bfloat16
    )
    x = torch.randn(QUERIES, BATCH, WIDTH, device=device, dtype=torch.bfloat16)
    padding = PADDINGS["float"][:, :QUERIES].to(device)
    for need_weights in (False, True):  # and masks in float32
        mask = mask_of("float", QUERIES, device)[:, :QUERIES]
        found, _ = ours(x, x, x, padding, need_weights, mask)
        expected, _ = theirs(x, x, x, padding.bfloat16(), need_weights, mask.bfloat16())
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


def test_in_torchs_encoder(torchs, device):
    """Its own kernels of inference aside."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True, device=device)
    x, padding = torch.randn(BATCH, KEYS, WIDTH, device=device), PADDINGS["bool"].to(device)
    expected = layer(x, src_key_padding_mask=padding)
    ours = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, device=device)
    ours.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = ours
    torch.testing.assert_close(layer(x, src_key_padding_mask=padding), expected, rtol=1e-4, atol=1e-5)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": zeros(5, 3, 9)}, RuntimeError, r"query must have 3 dims, the last of 8, got \(5, 3, 9\)"),
        ({"query": zeros(1, 5, 3, 8)}, RuntimeError, r"query must have 2 or 3 dims, the last of 8, got \(1, 5, 3, 8\)"),
        ({"key": zeros(7, 8)}, RuntimeError, r"key must have 3 dims, the last of 8, got \(7, 8\)"),
        ({"value": zeros(6, 3, 8)}, RuntimeError, r"value must have the key's leading sizes \(7, 3\), got \(6, 3, 8\)"),
        ({"query": zeros(5, 2, 8)}, RuntimeError, r"key must have the query's batch of 2, got \(7, 3, 8\)"),
        ({"key_padding_mask": zeros(7, 3)}, RuntimeError, r"key_padding_mask must have shape \(3, 7\), got \(7, 3\)"),
        ({"attn_mask": zeros(3, 5, 7)}, RuntimeError,
         r"attn_mask must have shape \(5, 7\) or \(6, 5, 7\), got \(3, 5, 7\)"),
        ({"attn_mask": zeros(5, 7, dtype=torch.int64)}, TypeError,
         "attn_mask must be of bool or a float dtype, got torch.int64"),
        ({"is_causal": True}, RuntimeError, "is_causal=True says that attn_mask is causal, got attn_mask=None"),
    ],
)  # fmt: skip
def test_errors_name_the_argument_and_its_value(change, error, message):
    given = {"query": zeros(5, 3, 8), "key": zeros(7, 3, 8), "value": zeros(7, 3, 8)} | change
    with pytest.raises(error, match=f"MultiheadAttention: {message}"):
        nn.MultiheadAttention(WIDTH, HEADS)(**given)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([zeros(5, 8), zeros(3, 8)])
    with pytest.raises(RuntimeError, match="query must be a dense tensor, got a nested one"):
        nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)(nested, nested, nested)
