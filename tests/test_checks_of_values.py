"""FUSED_SOFTMAX_CHECK=1, in one table of functions: wrong values are errors, and what has no values is not read."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from fused_softmax import (
    cross_entropy,
    divergence,
    linear_cross_entropy,
    linear_log_prob,
    log_prob,
    route,
    segment_log_softmax,
    segment_logsumexp,
    segment_softmax,
)
from fused_softmax.core import route as of_calls

BATCH, N, CLASSES = (2, 2), 3, 5
SEGMENTS = segment_softmax, segment_log_softmax, segment_logsumexp
TARGET, OFFSETS, INDEX = [0, 4, -100], [0, 2, 3], [1, 0, 1]
KEPT = [4, 0, 1, 4], [0, 2, 3, 4]  # ids and offsets
IDS, MASK = [[1, 4], [0, 3], [2, -1]], [True, False, True]


def of_kept(function):
    return lambda *given: function(*given[:-2], kept=given[-2:])


# A call of logits and what else it takes, which of these is read, and what is wrong there.
CASES = {
    "cross_entropy": (cross_entropy, [TARGET], 0, [0, 5, 1]),
    "log_prob": (log_prob, [TARGET], 0, [0, 5, 1]),
    "log_prob, kept ids": (of_kept(log_prob), [TARGET, *KEPT], 1, [4, 0, 5, 4]),
    "log_prob, kept offsets": (of_kept(log_prob), [TARGET, *KEPT], 2, [0, 3, 2, 4]),
    "linear_cross_entropy": (linear_cross_entropy, ["weight", TARGET], 1, [0, 5, 1]),
    "linear_log_prob": (linear_log_prob, ["weight", TARGET], 1, [0, 5, 1]),
    "linear_log_prob, kept": (of_kept(linear_log_prob), ["weight", TARGET, *KEPT], 2, [4, 0, 5, 4]),
    "divergence": (
        lambda x, t, columns: divergence(x, t, columns=columns, target_is="probs"),
        [[[0.25, 0.5]] * N, [[1, 4], [0, 3], [2, 1]]], 1, [[1, 4], [0, 5], [2, 1]],
    ),
    "route": (lambda x, ids: route(x, 2, indices=ids).weights, [IDS], 0, [[1, 4], [0, 5], [2, -1]]),
    "route, masked": (
        lambda x, ids, mask: route(x, 2, indices=ids, row_mask=mask).weights,
        [IDS, MASK], 0, [[1, 1], [0, 3], [2, -1]],
    ),
    **{f"{each.__name__}, offsets": (each, [OFFSETS], 0, [0, 4, 3]) for each in SEGMENTS},
    **{
        f"{each.__name__}, index": (lambda x, i, each=each: each(x, index=i, n_segments=2), [INDEX], 0, [0, 2, 1])
        for each in SEGMENTS
    },
}  # fmt: skip


def given(case, device, wrong=False):
    """The arguments of each of a batch [2, 2]."""
    function, beside, at, bad = CASES[case]
    beside = [bad if wrong and i == at else each for i, each in enumerate(beside)]
    x, weight = torch.randn(*BATCH, N, CLASSES), torch.randn(CLASSES, CLASSES)
    tensors = [weight if isinstance(each, str) else torch.tensor(each) for each in beside]
    return function, [each.to(device) for each in (x, *[each.repeat(*BATCH, *[1] * each.ndim) for each in tensors])]


def gradient(function):
    return torch.func.grad(lambda *given: function(*given).sum())


def counted(function):
    """Under a mode that hides no values."""

    def call(*given):
        with FlopCounterMode(display=False):
            return function(*given)

    return call


def faked(function, *given):
    mode = FakeTensorMode()
    given = [mode.from_tensor(each) for each in given]
    with mode:
        return function(*given)


def exported(function, *given):
    class Module(torch.nn.Module):
        def forward(self, *given):
            return function(*given)

    return torch.export.export(Module(), given, strict=False).module()(*given)


WAYS = {
    "compile": lambda function, *given: torch.compile(function, backend="eager", fullgraph=True)(*given),
    "export": exported,
    "make_fx": lambda function, *given: make_fx(lambda *each: function(*each))(*given)(*given),
    "fake": faked,
    "meta": lambda function, *given: function(*[each.to("meta") for each in given]),
}


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    monkeypatch.setattr(of_calls, "CHECK", True)
    torch.compiler.reset()


def each_of(function, given):
    return torch.stack([function(*of_one) for of_one in zip(*given, strict=True)])


@pytest.mark.parametrize("case", CASES)
def test_what_is_batched_is_not_looked_at(case, device):
    function, tensors = given(case, device)
    wanted = each_of(lambda *of_some: each_of(function, of_some), tensors)
    assert torch.allclose(torch.vmap(torch.vmap(function))(*tensors), wanted, rtol=1e-4, atol=1e-5, equal_nan=True)
    tensors = [each[0] for each in tensors]
    assert torch.allclose(torch.vmap(function)(*tensors), wanted[0], rtol=1e-4, atol=1e-5, equal_nan=True)
    found, wanted = torch.vmap(gradient(function))(*tensors), each_of(gradient(function), tensors)
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_what_is_traced_is_not_looked_at(case, way, device):
    function, tensors = given(case, device)
    tensors = [each[0, 0] for each in tensors]
    found, wanted = WAYS[way](function, *tensors), function(*tensors)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    if way not in ("fake", "meta"):
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("way", ["as it is", "differentiated", "counted"])
@pytest.mark.parametrize("case", CASES)
def test_what_can_be_read_is_an_error(case, way, device):
    function, tensors = given(case, device, wrong=True)
    tensors = [each[0, 0] for each in tensors]
    call = {"as it is": function, "differentiated": gradient(function), "counted": counted(function)}[way]
    with pytest.raises((IndexError, ValueError), match=f"^{case.partition(',')[0]}: "):
        call(*tensors)


def test_nothing_is_read_while_a_graph_is_captured(monkeypatch):
    class OnDevice(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl
        is_cuda = True

    target = torch.tensor(TARGET).as_subclass(OnDevice)
    for captures in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captures=captures: captures)
        assert of_calls.checks_values(target, target) is not captures
