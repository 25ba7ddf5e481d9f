"""Every row of the table of operators: what is registered, faked, differentiated, batched, measured and recorded."""

import pytest
import torch
from conftest import kernels, peaked
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map, tree_map_only

import fused_softmax
from fused_softmax.bench.entries.operations import OPERATIONS
from fused_softmax.ops.attention import reference as reference_attention
from fused_softmax.ops.losses import reference as reference_losses
from fused_softmax.ops.routing import reference as reference_routing
from fused_softmax.ops.sampling import reference as reference_sampling
from fused_softmax.ops.segments import reference as reference_segments
from fused_softmax.ops.softmax import reference
from fused_softmax.register.table import OPERATORS
from fused_softmax.trace.entries.attention import ATTENTION
from fused_softmax.trace.entries.routing import ROUTES
from fused_softmax.trace.entries.rows import OURS
from fused_softmax.trace.entries.sampling import DRAWS
from fused_softmax.trace.entries.segments import SEGMENTS

FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
NAMES = [each.name for each in OPERATORS]
BY_NAME = dict(zip(NAMES, OPERATORS, strict=True))
PUBLIC = [each.name for each in OPERATORS if each.public is not None]
DIFFERENTIABLE = [name for name in PUBLIC if BY_NAME[name].gradient is not None]
every_operator = pytest.mark.parametrize("name", NAMES)


def logits(*shape, seed=0):
    return (peaked(shape[0], shape[1], seed=seed) / 4).requires_grad_()


def softmax_samples():
    x, y, keep = logits(3, 8), logits(3, 8, seed=1), torch.arange(8) > 2
    scale, added = torch.tensor([[0.5], [2.0], [-1.0]]), logits(1, 8, seed=2).detach()[0].requires_grad_()
    sink, unscored = torch.tensor([[3.0], [0.5], [-1.0]]).requires_grad_(), (None, None, None, False, "nan", None)
    return {
        "softmax": [
            (x, -1),
            (logits(6, 8).detach().view(2, 3, 8).requires_grad_(), 2, FP64, 0.5, None, keep),
            (x, 0, BF16),
            (x, -1, FP64, None, None, keep, False, "nan", None, sink),
            (x, -1, None, *unscored, None, True),
        ],
        "log_softmax": [
            (x, 0),
            (x, 1, None, None, scale.clone().requires_grad_(), added, True),
            (x, -1, None, 0.5, None, None, True, "nan", 2.0),
            (x, -1, None, -0.5, None, None, False, "nan", None, sink),
        ],
        "logsumexp": [
            (x, [0, 1]),
            (x, [-1], True, None, scale, keep, False, "zero"),
            (x, [0, 1], False, *unscored, None, FP64),
            (x, [-1], False, None, scale, keep, False, "nan", None, sink),
            (x, [-1], True, *unscored, sink, FP64),
            (x, [0], False, *unscored, None, None, True),
        ],
        "softmax_backward": [(x, y, 1), (x, y, 0, FP16, 0.5), (x, y, 1, None, None, True)],
        "log_softmax_backward": [(x, y, 1), (x, y, 1, FP16, 2.0)],
    }


def loss_samples():
    x, target, weight = logits(3, 8), torch.tensor([5, -100, 0]), torch.linspace(0.1, 1.0, 8)
    m = x.detach().amax(-1)
    ls = (x.detach() - m[:, None]).exp().sum(-1).log()
    dy, rows = torch.tensor(2.0).requires_grad_(), torch.tensor([0.2, 0.9, -0.5]).requires_grad_()
    hidden, w, b = logits(3, 5, seed=3), logits(8, 5, seed=4), torch.linspace(-1.0, 1.0, 8).requires_grad_()
    layer = [each.detach() for each in (hidden, w, b)]
    second = (-100, "none", 0.1, 5.0, 2.0, 0.1)
    several, given = torch.tensor([[5, 5], [-100, 3], [0, 7]]), logits(3, 2, seed=5)
    of_linear = (None, -100, "mean", 0.1, None, 1.0, 0.0, 2, "fp32", [True] * 3)
    plain, bits = (-100, 1.0, None, 1.0, None), torch.tensor([[255], [12], [0]], dtype=torch.int32)
    lists = torch.tensor([7, 5, 0, 3, 1]), torch.tensor([0, 3, 4, 5], dtype=torch.int32)
    states, incoming = (m, ls, rows.detach()), (given.detach(), rows.detach(), rows.detach())
    teacher = logits(3, 4, seed=7).detach(), logits(8, 4, seed=8).detach()
    of_rows = ("jsd", 0.3, 0.5, 4.0, 0.7, rows.detach() + 1, 2.0, 5.0, 1.0, rows.detach() + 2, "logits")
    of_rows = (*of_rows, None, 0.0, 2, "input")
    y, of_pair = logits(3, 8, seed=6).detach(), (0.5, 1.0, None, 1.0, None, 1.0, None, 1.0, None)
    of_loss = (None, None, "cross", *of_pair, "probs", weight, 0.1, 2)
    return {
        "cross_entropy": [
            (x, target),
            (x, target, weight, -100, "sum", 0.1, 5.0, 2.0, 0.1, FP64, True),
            (x, target, None, *second, BF16),
            (x, target, weight, -100, "none", 0.1, 5.0, 2.0, 0.1, None, False, True),
        ],
        "cross_entropy_given_lse": [
            (x, target, m + ls + 0.5),
            (x, target, (m + ls).double(), weight, -100, "sum", 5.0, 2.0, FP64),
            (x, target, m + ls, None, -100, "none", None, -0.5, BF16),
        ],
        "cross_entropy_backward": [
            (x, target, m, ls, dy, None, None),
            (x, target, m, ls, None, rows, rows, weight, *second[:2]),
        ],
        "linear_cross_entropy": [
            (hidden, w, target, b, *of_linear), (hidden, w, target, None, None, -100, "none"),
            (hidden, w, target, b, *of_linear, True, True, True),
            (hidden, w, target, b, weight, *second, None, "input", [True] * 3, True, False, True),
        ],
        "linear_cross_entropy_backward": [
            (dy.detach(), *layer[:2], target, layer[2], *of_linear),
            (dy.detach(), *layer[:2], target, layer[2], *of_linear, rows.detach(), dy.detach()),
        ],
        "log_prob": [
            (x, target[:, None]),
            (x, several, -100, 0.5, 4.0, 0.7, None, [True] * 5),
            (x, several, -100, -2.0, None, 1.0, rows.detach() + 1, [False, True, False, False, True]),
            (x, several, *plain, [True] * 5, *lists),
            (x, several, *plain, [True, False, False, True, True], None, None, bits),
        ],
        "log_prob_backward": [
            (x, target[:, None], m, ls, rows[:0], rows[:, None], None, None),
            (x, several, m, ls, rows, given, rows, rows, -100, 0.5, 4.0, 1.0, rows.detach() + 1),
            (x, several, m, ls, rows, given, rows, rows, *plain, *lists),
            (x, several, m, ls, rows, given, rows, rows, *plain, None, None, bits),
        ],
        "linear_log_prob": [
            (hidden, w, None, target[:, None]),
            (hidden, w, b, several, -100, 0.5, 4.0, 0.7, None, [True] * 5),
            (hidden, w, b, several, *plain[:3], 1.0, rows.detach() + 1, [False, True, False, False, True], None, None,
             None, 2, "input"),
            (hidden, w, None, several, *plain, [True] * 5, *lists, None, 2),
            (hidden, w, None, several, *plain, [True, False, False, True, True], None, None, bits, 1),
        ],
        "linear_log_prob_backward": [
            (*layer, several, *states, *incoming, -100, 0.5, 4.0, 1.0, rows.detach() + 1, [True, True],
             None, None, None, 2, "fp32", [True] * 3),
            (*layer[:2], None, target[:, None], *states, rows.detach()[:, None], None, None, *plain, [], None, None,
             None, None, "input", [False, True, False]),
            (*layer[:2], None, several, *states, *incoming, *plain, [True, True], *lists, None, 1, "fp32",
             [True, True, False]),
            (*layer[:2], None, several, *states, incoming[0], None, incoming[2], *plain, [], None, None, bits, None,
             "fp32", [True, False, False]),
        ],
        "divergence": [
            (x, y),
            (x, y, "jsd", 0.3, 0.5, 4.0, 0.7, rows.detach() + 1, 2.0, 5.0, 1.0, rows.detach() + 2),
            (x, y.log_softmax(-1), "reverse_kl", *of_pair, "log_probs"),
            (x, y.softmax(-1), "tvd", *of_pair, "probs"),
            (x, y.softmax(-1).requires_grad_(), *of_loss[2:-1]),
        ],
        "divergence_backward": [
            (x.detach(), y, m, m, ls, m, ls, ls, rows.detach()),
            (x.detach(), y, m, m, ls, m, ls, ls, rows.detach(), "jsd", 0.3, 0.5, 4.0, 0.7, rows.detach() + 1),
            (x.detach(), y.softmax(-1), m, m, ls, m[:0], ls[:0], ls, rows.detach(), "kl", *of_pair, "probs"),
            (x.detach(), y.softmax(-1), m, m, ls, m[:0], ls[:0], ls, rows.detach(), *of_loss[2:-1], [True, True]),
            (x.detach(), y.softmax(-1), m, m, ls, m[:0], ls[:0], ls, rows.detach(), *of_loss[2:-1], [True, True],
             rows.detach() + 1),
            (x.detach(), y.softmax(-1), m, m, ls, m[:0], ls[:0], ls, rows.detach(), *of_loss[2:-1], [False, True]),
        ],
        "linear_divergence": [
            (hidden, w, None, *teacher, None), (hidden, w, b, *teacher, layer[2], *of_rows),
            (hidden, w, b, x.softmax(-1), *of_loss, "input"), (hidden, w, b, x.softmax(-1), *of_loss, "input", True),
        ],
        "linear_divergence_backward": [
            (rows.detach(), *layer, *teacher, layer[2], *of_rows, [True, True, True, False]),
            (rows.detach(), *layer[:2], None, *teacher, None, *of_rows, [False, True, False, False]),
            (rows.detach(), *layer, y.softmax(-1), *of_loss, "input", [True] * 4),
            (rows.detach(), *layer, y.softmax(-1), *of_loss, "input", [True] * 4, rows.detach() + 1),
        ],
    }  # fmt: skip


def sampling_samples():
    x, seed, position = logits(3, 8).detach(), torch.tensor([5, -7, 2**62]), torch.tensor([2**40, 0, -1])
    bias, bits = torch.linspace(-1.0, 1.0, 8, dtype=BF16), torch.tensor([[255], [-256 + 7], [0]], dtype=torch.int32)
    of_rows = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([3, 0, 1]), torch.tensor([0.9, 0.5, 1.0], dtype=FP16)
    temperature, top_k, top_p = of_rows
    more = torch.arange(4), torch.arange(4) + 2**33  # draws than rows
    return {
        "sample": [
            (x, seed, position),
            (x.bfloat16(), seed, position, 0.7, None, 5, None, 0.9, None, 0.05, None, "joint", bias, bits),
            (x, seed, position, 1.0, temperature, None, top_k, None, top_p, None, top_p, "sequential", None, None,
             torch.tensor([2, 0, 0], dtype=torch.int32), "processed", 3, True),
            (x, *more, 1.0, torch.tensor([0.0, 1.0, 2.0, -0.5]), *[None] * 6, "joint", None, None,
             torch.tensor([1, 9, 2, 1]), None, 0, True),
            (x, seed, position, *[1.0, None, 3, *[None] * 5], "sequential", bias.expand(3, 8), None, None, "raw"),
        ]
    }  # fmt: skip


def routing_samples():
    x, bias = logits(3, 8), torch.linspace(-0.1, 0.1, 8)
    noise, mask = logits(3, 8, seed=1).detach(), torch.tensor([True, False, True])
    ids = torch.tensor([[1, 0], [-1, 2], [5, 3]], dtype=torch.int32)
    whole = (2, "sigmoid", True, bias, 4, 2, "top2", True, 2.5, noise, None, mask, True, True, True)
    replay = (2, "softmax", False, None, 1, None, "top2", True, 1.0, None, ids, None, True)
    many = (*whole[:3], None, *whole[4:])
    m, of_scores = torch.zeros(3, 2) + 2, torch.ones(3, 3)
    weights, counts, shares = ids / 8, torch.arange(8, dtype=torch.int32), torch.tensor([0.5, 1.0, 0.25])
    of_sequences, of_each = counts.expand(3, 8).contiguous(), torch.tensor([0.5, 1.0, 0.25, 0.5, 1.0])
    of_weights, of_losses = (weights, None, None, None, None), (None, bias, torch.tensor(2.0), torch.tensor(0.5), x * 1)
    return {
        "route": [
            (x, 2),
            (x, *whole),
            (x, *whole, 1),
            (x, *many, None, True, 3),
            (x, *many, 1, True, 1),
            (x, *replay, False, False, None, False),
            (x, 3, "softmax", True, None, 1, None, "top2", False),
        ],
        "route_backward": [
            (x.detach(), weights, ids, m[:0], counts[:0], shares[:0], *of_weights, 2),
            (x.detach(), weights, ids, of_scores, counts, shares, weights, *[each.detach() for each in of_losses[1:]],
             *whole),
            (x.detach(), weights, ids, of_scores, of_sequences, of_each, weights,
             *[each.detach() for each in of_losses[1:]], *whole, 1),
            (x.detach(), weights, ids, m, counts, shares, *of_weights, *replay),
            (x.detach(), weights, ids, of_scores, of_sequences, of_each[None], weights, noise[:1] / 4, torch.ones(1),
             torch.ones(1) / 2, x.detach() * 1, *many, 1, True, 1),
        ],
    }  # fmt: skip


def attention_samples():
    q, k, v, b = (logits(6, 8, seed=i).detach().view(3, 1, 2, 8).requires_grad_() for i in range(4))
    keep, sinks, slopes = torch.arange(2) > 0, torch.tensor([0.5]).requires_grad_(), torch.tensor([0.25])
    bias = b.detach()[:, :, :, :2].clone().requires_grad_()
    options = 0.5, 4.0, 1, 0, True
    o, lse = q.detach() / 2, torch.full((3, 1, 2), 3.0)
    given = [each.detach() for each in (q, k, v)]
    return {
        "attention": [
            (q, k, v, None, None, None, None, 0.25),
            (q, k, v, keep, bias, sinks, slopes, *options, False, True, True, True),
        ],
        "attention_backward": [
            (o, None, o, lse, *given, None, None, None, None, [True, False, True] + [False] * 3, 0.25),
            (o, lse, o, lse, *given, keep, bias.detach(), sinks.detach(), slopes, [True] * 3 + [False, True, True],
             *options),
        ],
    }  # fmt: skip


def segment_samples():
    x, y, offsets = logits(3, 8), logits(3, 8, seed=1).detach(), torch.tensor([0, 1, 2, 2, 3])
    by_order = torch.tensor([0, 2, 2, 3, 3, 3], dtype=torch.int32), torch.tensor([2, 0, 1])  # the last is of none
    of_cols = torch.tensor([0, 3, 5, 6, 8])
    forward = [(x, offsets), (x, *by_order, 0, -0.5, BF16), (x, of_cols, None, 1, 2.0)]
    backward = [(y, y, offsets), (y, y, *by_order, 0, -0.5, FP16), (y, y, of_cols, None, 1)]
    lse = torch.full((4, 8), 3.0)
    of_rows = lse[:3, :4]
    return dict.fromkeys(("segment_softmax", "segment_log_softmax", "segment_logsumexp"), forward) | {
        "segment_softmax_backward": backward,
        "segment_log_softmax_backward": backward,
        "segment_logsumexp_backward": [
            (lse, y, lse, offsets), (lse, y, lse, *by_order, 0, -0.5), (of_rows, y, of_rows, of_cols, None, 1),
        ],
    }  # fmt: skip


def no_gradient_samples():
    statistic, beside = logits(3, 8).detach(), torch.linspace(0.1, 1.0, 3)
    return {
        "no_gradient": [(statistic, beside, "it has no gradient")],
        "no_gradient_backward": [(torch.zeros(3, 8), beside, "it has no gradient")],
    }


SAMPLES = softmax_samples() | loss_samples() | sampling_samples() | routing_samples() | attention_samples()
SAMPLES |= segment_samples() | no_gradient_samples()


def samples(name, device):
    """Arguments of the operator, tensors of their own on the device."""

    def own(t):
        return t.detach().to(device, copy=True).requires_grad_(t.requires_grad)

    return [tree_map_only(torch.Tensor, own, arguments) for arguments in SAMPLES[name]]


def operator(name):
    return getattr(torch.ops.fused_softmax, name).default


def test_every_operator_has_samples():
    assert SAMPLES.keys() == BY_NAME.keys()
    assert len(BY_NAME) == len(OPERATORS)


@every_operator
def test_its_schema_is_registered(name):
    assert operator(name)._schema == torch._C.parse_schema(f"fused_softmax::{name}{BY_NAME[name].schema}")


@kernels
@every_operator
def test_opcheck(name, device):
    for arguments in samples(name, device):
        torch.library.opcheck(operator(name), arguments)


@kernels
@every_operator
def test_no_rows(name, device):
    """Every sample has 3 rows, and tensors of one value a row."""
    for arguments in samples(name, device):
        if any(type(each) is torch.Tensor and each.shape[:1] == (6,) for each in arguments):
            continue
        none = tree_map_only(torch.Tensor, lambda t: t.detach()[:0] if t.shape[:1] == (3,) else t.detach(), arguments)
        found = operator(name)(*none)
        with FakeTensorMode() as mode:
            wanted = operator(name)(*tree_map_only(torch.Tensor, mode.from_tensor, none))
        for a, b in zip(*(each if type(each) is tuple else (each,) for each in (found, wanted)), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)


@kernels
@pytest.mark.parametrize("strided", [False, True])
@every_operator
def test_what_runs_and_its_fake_agree(name, strided, device):
    def facts(results):
        results = (results,) if isinstance(results, torch.Tensor) else results
        return [(each.shape, each.dtype, each.stride(), each.device) for each in results]

    for arguments in samples(name, device):
        arguments = tree_map_only(torch.Tensor, torch.Tensor.detach, arguments)
        if strided:
            arguments = tree_map_only(torch.Tensor, apart, arguments)
        ran = facts(BY_NAME[name].run(*arguments))
        assert ran == facts(BY_NAME[name].fake(*arguments))
        with FakeTensorMode() as mode:
            assert ran == facts(operator(name)(*tree_map_only(torch.Tensor, mode.from_tensor, arguments)))


@kernels
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
def test_fakes_of_losses_of_half_precision(name, dtype, device):
    """What stands beside a loss is of the dtype of the arithmetic."""
    for x, *rest in samples(name, device):
        layer = [each.to(dtype) if isinstance(each, torch.Tensor) and each.requires_grad else each for each in rest]
        arguments = tree_map_only(torch.Tensor, torch.Tensor.detach, (x.to(dtype), *layer))
        ran, fake = BY_NAME[name].run(*arguments), BY_NAME[name].fake(*arguments)
        assert [(each.dtype, each.shape) for each in ran] == [(each.dtype, each.shape) for each in fake]


def apart(t):
    """The same values, no two of them side by side."""
    return t.repeat_interleave(2, -1)[..., ::2] if t.ndim else t


@kernels
@pytest.mark.parametrize("name", [each.name for each in OPERATORS if each.batched is not None])
def test_vmap(name, device):
    """Of all its tensors, and of the first alone."""
    for arguments in samples(name, device):
        arguments = tree_map_only(torch.Tensor, torch.Tensor.detach, arguments)
        tensors = [i for i, each in enumerate(arguments) if isinstance(each, torch.Tensor)]
        for batched in (tensors, tensors[:1]):
            both = [torch.stack((arguments[i], arguments[i].roll(1, *[-1][: arguments[i].ndim]))) for i in batched]

            def call(*given, arguments=arguments, batched=batched):
                one = list(arguments)
                for i, each in zip(batched, given, strict=True):
                    one[i] = each
                return operator(name)(*one)

            singles = [call(*given) for given in zip(*both, strict=True)]
            expected = tree_map(lambda *each: torch.stack(each), *singles)
            torch.testing.assert_close(torch.vmap(call)(*both), expected, equal_nan=True)


# The functions that users call.


def test_the_public_functions_are_those_of_the_table():
    assert set(PUBLIC) == BY_NAME.keys() & set(fused_softmax.__all__)
    for name in PUBLIC:
        assert BY_NAME[name].public is getattr(fused_softmax, name)
        homes = (
            reference, reference_losses, reference_routing, reference_sampling, reference_segments, reference_attention,
        )  # fmt: skip
        assert BY_NAME[name].reference in [getattr(home, name, None) for home in homes]


def public_samples(device):
    x, keep = peaked(5, 70, FP64).to(device), (torch.arange(70) % 3 > 0).to(device)
    scored = [{}, {"scale": 0.5, "mask": keep}, {"scale": -0.25, "is_causal": True}, {"mask": x.flip(0) / 8}]
    scored += [{"sink": 9.0}, {"sink": x[:, :1], "mask": keep}]
    of_scores = [((x, -1), options) for options in scored] + [((x, 0), {})]
    target = torch.tensor([3, -100, 69, 0, 12], device=device)
    hidden, w = peaked(5, 6, FP64).to(device) / 4, (peaked(70, 6, FP64, seed=1) / 4).to(device)
    weight = torch.linspace(0.1, 1.0, 70, dtype=FP64, device=device)
    losses = [
        {}, {"reduction": "none", "softcap": 5.0}, {"reduction": "sum", "weight": weight, "scale": -0.5},
        {"weight": weight, "label_smoothing": 0.1, "lse_square_scale": 1e-2},
    ]  # fmt: skip
    bias, whole = {"linear_bias": weight}, torch.arange(6, device=device) * 70
    return {
        "softmax": of_scores,
        "log_softmax": of_scores,
        "logsumexp": [*of_scores, ((x, (0, 1), True), {})],
        "cross_entropy": [((x, target), options) for options in losses],
        "linear_cross_entropy": [((hidden, w, target), options | bias) for options in losses],
        "log_prob": [
            ((x, target), {}),
            ((x, target.view(5, 1).expand(5, 3)), {"scale": -0.5, "softcap": 5.0, "temperature": weight[:5]}),
            ((x, target), {"softcap": 5.0, "kept": (torch.arange(350, device=device) % 70, whole)}),
        ],
        "linear_log_prob": [
            ((hidden, w, target), options | bias)
            for options in ({}, {"scale": -0.5, "softcap": 5.0, "temperature": weight[:5]})
        ],
        "divergence": [
            ((x[0],), {"target": x[1] / 2, "kind": kind, **options})  # of one row, the mean
            for kind in ("kl", "reverse_kl", "jsd", "tvd")
            for options in ({}, {"softcap": 5.0, "temperature": 0.7, "target_scale": 2.0, "beta": 0.3})
        ],
        "linear_divergence": [
            ((hidden[0], w), {"target_input": hidden[1, :4], "target_weight": w[:, :4].detach(), **options, **of_bias})
            for of_bias in ({}, {"linear_bias": x[1].detach(), "target_bias": x[2].detach()})
            for options in ({}, {"kind": "jsd", "softcap": 5.0, "temperature": 0.7, "target_scale": 2.0})
        ],
        "attention": [
            ((x.view(5, 1, 7, 10) / 4, x.view(5, 1, 7, 10), x.view(5, 1, 7, 10)), options)
            for options in ({"is_causal": True}, {"softcap": 3.0, "window": (2, 1)})
        ],
        **{
            name: [((x, torch.tensor([0, 3, 5], device=device)), {}), ((x,), {"index": target % 70, "n_segments": 70})]
            for name in ("segment_softmax", "segment_log_softmax")
        },
        "segment_logsumexp": [
            ((x, torch.tensor([0, 3, 70], device=device)), {"dim": 1, "scale": -0.5}),
            ((x,), {"index": torch.arange(5, device=device) % 2, "n_segments": 2}),
        ],
    }


@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if name != "route"])  # which takes no float64
def test_the_public_function_agrees_with_its_reference_in_float64(name, device):
    for arguments, options in public_samples(device)[name]:
        found = []
        for of in (BY_NAME[name].public, BY_NAME[name].reference):
            leaves = [each.clone().requires_grad_() if _is_float(each) else each for each in arguments]
            y = of(*leaves, **options)
            y = y if isinstance(y, torch.Tensor) else y[0]
            dy = torch.linspace(0.5, 1.5, y.numel(), dtype=FP64, device=device).view(y.shape)
            found.append((y.detach(), *torch.autograd.grad(y, [each for each in leaves if _is_float(each)], dy)))
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def _is_float(each):
    return isinstance(each, torch.Tensor) and each.is_floating_point()


# What measures and records them.


def test_every_entry_of_the_bench_belongs_to_one_operator():
    measured = [entry for each in OPERATORS for entry in each.bench]
    assert len(measured) == len(set(measured))
    assert set(measured) == OPERATIONS.keys()


def test_every_recording_belongs_to_one_operator():
    recorded = [kernel for each in OPERATORS for kernel in each.recordings]
    assert len(recorded) == len(set(recorded))
    assert set(recorded) == {kernel.name for kernel in (*OURS, *DRAWS, *ATTENTION, *ROUTES, *SEGMENTS)}


# Faults.


@kernels
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_gradient_of_no_rows_is_empty(reduction, device):
    """The planner divided by the number of rows."""
    x, rows = torch.empty(0, 5, device=device), torch.empty(0, device=device)
    target = torch.empty(0, dtype=torch.int64, device=device)
    dy = rows if reduction == "none" else torch.ones((), device=device)
    for weight in (None, torch.ones(5, device=device)):
        of_loss = weight, -100, reduction, 0.1
        for given in ((dy, None, None), (None, dy, rows), (None, None, rows)):
            dx = operator("cross_entropy_backward")(x, target, rows, rows, *given, *of_loss)
            assert (dx.shape, dx.dtype, dx.device) == (x.shape, x.dtype, x.device)
