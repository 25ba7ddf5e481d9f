"""PyTorch's own samples of cross_entropy, linear_cross_entropy and CrossEntropyLoss: what torch says, these say."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from test_opinfo import DIFFERENTIABLE, op_db, pytestmark  # noqa: F401  the same machines, the same warnings
from torch.testing._internal.common_modules import module_db

import fused_softmax

OPS = {}
for op in op_db:
    OPS.setdefault(op.name.removeprefix("nn.functional."), op)  # variants differ by options for torch's own chunks
every_dtype = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=pytest.mark.exhaustive) if dtype in (torch.float16, torch.float64) else dtype
        for dtype in DIFFERENTIABLE
    ],
    ids=str,
)


def samples(name, dtype, device):
    return list(OPS[name].sample_inputs(device, dtype, requires_grad=True)) if name in OPS else []


def results(function, sample, leaves):
    """The loss and its gradients, or the type of what is raised."""
    try:
        y = function(sample.input, *sample.args, **sample.kwargs)
    except Exception as error:
        return type(error)
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    dy = torch.linspace(0.5, 1.5, y.numel(), device=y.device).view(y.shape).to(y)
    return y.detach(), *torch.autograd.grad(y, leaves, dy, allow_unused=True)


def assert_same(ours, theirs, dtype):
    if isinstance(ours, type) or isinstance(theirs, type):
        assert ours is theirs
        return
    # torch rounds to 16 bits between log_softmax and the loss, and adds what classes or rows give.
    half = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            a, b, equal_nan=True, check_stride=False, **half if dtype in (torch.float16, torch.bfloat16) else {}
        )


@every_dtype
@pytest.mark.parametrize("contiguous", [True, False])
def test_samples(dtype, contiguous, device):
    found = samples("cross_entropy", dtype, device)
    assert len(found) > 10
    for sample in found:
        sample = sample if contiguous else sample.noncontiguous()
        leaves = [sample.input, *[each for each in sample.args if each.is_floating_point()]]
        ours, theirs = (results(of, sample, leaves) for of in (fused_softmax.cross_entropy, F.cross_entropy))
        assert_same(ours, theirs, dtype)


@every_dtype
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_linear_samples(dtype, chunk_size, device):
    """Of a layer [n_classes, in_features]; torch's may have several class dims."""
    found = samples("linear_cross_entropy", dtype, device)
    if not found:
        pytest.skip("torch has none yet")
    seen = 0
    for sample in found if dtype == torch.float32 else found[::4]:
        weight, options = sample.args[0], sample.kwargs
        if weight.ndim != 2 or sample.input.ndim > 2:
            continue
        seen += 1
        options.pop("options", None)
        leaves = [sample.input, weight, *[options[name] for name in ("linear_bias",) if options.get(name) is not None]]
        theirs = results(F.linear_cross_entropy, sample, leaves)
        if "ignore_index" in options and options["ignore_index"] is None:
            options.pop("ignore_index")
        options["chunk_size"] = chunk_size
        assert_same(results(fused_softmax.linear_cross_entropy, sample, leaves), theirs, dtype)
    assert seen > 10


@every_dtype
def test_modules(dtype, device):
    (info,) = [each for each in module_db if each.module_cls is torch.nn.CrossEntropyLoss]
    inputs = info.module_inputs_func(info, device=device, dtype=dtype, requires_grad=True, training=True)
    assert inputs
    for given in inputs:
        made, forward = given.constructor_input, given.forward_input
        ours, theirs = (
            of(*made.args, **made.kwargs).to(device)(*forward.args, **forward.kwargs)
            for of in (fused_softmax.nn.CrossEntropyLoss, torch.nn.CrossEntropyLoss)
        )
        (dx, dx_torch) = (torch.autograd.grad(each.sum(), forward.args[0])[0] for each in (ours, theirs))
        assert_same((ours.detach(), dx), (theirs.detach(), dx_torch), dtype)


def call(input=(2, 3), target=(2,), *, dtype=torch.float32, of_target=torch.int64, **options):
    return lambda d: (torch.ones(input, dtype=dtype, device=d), torch.zeros(target, dtype=of_target, device=d)), options


ERRORS = {
    "fewer targets": call((3, 5), (2,)),
    "more targets": call((3, 5), (4,)),
    "a target of one row": call((5,), (2,)),
    "no row and a batch": call((3, 5), ()),
    "no dims": call((), ()),
    "positions that differ": call((2, 3, 4), (2, 5)),
    "positions of another rank": call((2, 3, 4), (2,)),
    "images that differ": call((2, 3, 4, 5), (2, 4, 6)),
    "images in another batch": call((2, 3, 4, 5), (1, 4, 5)),
    "five dims that differ": call((2, 3, 2, 2, 2), (2, 2, 2, 3)),
    "probabilities of another shape": call((2, 3), (2, 4), of_target=torch.float32),
    "a bool target": call(of_target=torch.bool),
    "a target of 16 bits": call(of_target=torch.int16),
    "integers": call(dtype=torch.int64),
    "bools": call(dtype=torch.bool),
    "too much smoothing": call(label_smoothing=1.1),
    "an unknown reduction": call(reduction="average"),
    "weights of another length": call(weight=torch.ones(4)),
    "weights of two dims": call(weight=torch.ones(3, 1)),
    "weights of integers": call(weight=torch.ones(3, dtype=torch.int64)),
    "a float to ignore": call(ignore_index=1.5),
    "smoothing by a string": call(label_smoothing="a"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_what_torch_refuses_is_refused_with_its_type_of_error(error, device):
    make, options = ERRORS[error]
    options = {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in options.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Exception) as theirs:  # noqa: PT011  whatever torch raises
            F.cross_entropy(*make(device), **options)
        with pytest.raises(Exception) as ours:  # noqa: PT011
            fused_softmax.cross_entropy(*make(device), **options)
    assert ours.type is theirs.type
