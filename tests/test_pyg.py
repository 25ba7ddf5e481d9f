"""PyTorch Geometric's softmax and layers by ours: its results and gradients, wherever the name is bound."""

import importlib
import os
import re
import subprocess
import sys

import pytest
import torch

import fused_softmax

torch_geometric = pytest.importorskip("torch_geometric", reason="these compare with torch_geometric")

from torch_geometric import nn as layers  # noqa: E402
from torch_geometric.nn.conv import gat_conv, rgat_conv, transformer_conv  # noqa: E402
from torch_geometric.nn.pool.select import topk  # noqa: E402
from torch_geometric.utils import softmax as imported_before  # noqa: E402

from fused_softmax import pyg  # noqa: E402
from fused_softmax.register import patch  # noqa: E402
from fused_softmax.register import pyg as of_pyg  # noqa: E402

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
KEPT = (imported_before,)  # by a tuple, for enable() finds what a module has bound
taken = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="without a GPU or the interpreter, CPU tensors stay PyG's"
)
MODULES = (gat_conv, transformer_conv, topk, rgat_conv)


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    assert patch._depth == 0
    assert all(module.softmax is KEPT[0] for module in (torch_geometric.utils, *MODULES))


def graph(n_nodes=12, n_edges=60, seed=0):
    """Some nodes have no edge, one has many."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(n_nodes - 2, (2, n_edges), generator=generator)
    ends[1, ::3] = 4
    return ends


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("shape", "dim", "way"),
    [
        ((60,), 0, "index"), ((60, 4), 0, "index and number"), ((60, 4), 0, "ptr"), ((3, 60), -1, "index"),
        ((60, 4), 0, "ptr and index"), ((60, 4), -2, "index of a torch_geometric.Index"),
    ],
)  # fmt: skip
def test_results_and_gradients_are_pygs(shape, dim, way, dtype, device):
    index = graph()[1].to(device)
    if "ptr" in way:
        index = index.sort().values
    ptr = torch._convert_indices_from_coo_to_csr(index, 12) if "ptr" in way else None
    arguments = {
        "index": (index, None, None), "index and number": (index, None, 12), "ptr": (None, ptr, None),
        "ptr and index": (torch.zeros_like(index), ptr, 12),  # the index is not read
        "index of a torch_geometric.Index": (torch_geometric.Index(index, dim_size=12), None, None),
    }[way]  # fmt: skip
    src, found = numbers(*shape).to(device, dtype).mul(5), []
    for softmax in (pyg.softmax, KEPT[0]):
        leaf = src.clone().requires_grad_()
        y = softmax(leaf, *arguments, dim)
        dy = torch.linspace(-1, 1, y.numel(), device=device, dtype=dtype).view(y.shape)
        found.append((y, *torch.autograd.grad(y, leaf, dy)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_no_edges(device):
    empty = torch.empty(0, dtype=torch.int64, device=device)
    assert pyg.softmax(torch.empty(0, 3, device=device), empty).shape == (0, 3)
    assert pyg.softmax(torch.empty(0, 3, device=device), empty, num_nodes=4).shape == (0, 3)
    assert pyg.softmax(
        torch.empty(0, 3, device=device), ptr=torch.zeros(5, dtype=torch.int64, device=device)
    ).shape == (0, 3)


def test_neither_raises_as_pygs():
    for softmax in (pyg.softmax, KEPT[0]):
        with pytest.raises(NotImplementedError, match="index"):
            softmax(torch.ones(3))


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({}, NotImplementedError, "give index or ptr for src of shape (3,), got neither"),
        ({"ptr": [0, 3]}, TypeError, "ptr must be a Tensor of int64 or int32, not list ([0, 3])"),
        (
            {"ptr": torch.zeros(2)},
            TypeError,
            "ptr must be of int64 or int32, got Tensor of shape (2,), torch.float32 on cpu",
        ),
        (
            {"index": torch.tensor([0, 1])},
            ValueError,
            "index must have shape (3,), one for each element of dim 0 of src of shape (3,), got (2,)",
        ),
        (
            {"index": torch.tensor([0, 0, 0]), "num_nodes": -1},
            ValueError,
            "num_nodes must be at least 0 and below 2**63 - 1 for src of shape (3,), got -1",
        ),
        ({"index": torch.tensor([0, 0, 0]), "num_nodes": 1.5}, TypeError, "num_nodes must be an int, not float (1.5)"),
        ({"index": torch.tensor([0, 0, 0]), "src": [1.0]}, TypeError, "src must be a Tensor, not list ([1.0])"),
        ({"ptr": torch.tensor([0, 3]), "dim": 1}, IndexError, "dim 1 is out of range [-1, 0] for src of shape (3,)"),
    ],
    ids=str,
)
def test_errors_have_the_names_of_pygs_arguments(arguments, error, said):
    with pytest.raises(error, match=rf"^{re.escape('pyg.softmax: ' + said)}"):
        pyg.softmax(**{"src": torch.ones(3), **arguments})


LAYERS = {
    "GATConv": lambda: layers.GATConv(8, 4, heads=2),
    "GATv2Conv": lambda: layers.GATv2Conv(8, 4, heads=2),
    "TransformerConv": lambda: layers.TransformerConv(8, 4, heads=2),
    "RGATConv": lambda: layers.RGATConv(8, 4, num_relations=3, heads=2),
    "RGATConv, across relations": lambda: layers.RGATConv(8, 4, num_relations=3, attention_mechanism="within-relation"),
    "TopKPooling": lambda: layers.TopKPooling(8, ratio=0.5, min_score=None),
    "TopKPooling of a score": lambda: layers.TopKPooling(8, min_score=0.05),
    "SoftmaxAggregation": lambda: layers.SoftmaxAggregation(learn=True),
    "AttentionalAggregation": lambda: layers.AttentionalAggregation(torch.nn.Linear(8, 1)),
}
CALLED_IN = {"TopKPooling": 0, "RGATConv, across relations": 3}  # how often softmax is called, where that is not once


def run(name, device):
    torch.manual_seed(0)
    layer, x, ends = LAYERS[name]().to(device), numbers(12, 8).to(device).requires_grad_(), graph().to(device)
    batch = torch.arange(12, device=device) // 5
    if name.startswith("RGAT"):
        y = layer(x, ends, torch.arange(60, device=device) % 3)
    elif name.startswith("TopK"):
        y = layer(x, ends, batch=batch)[0]
    elif name.endswith("Aggregation"):
        y = layer(x, batch)
    else:
        y = layer(x, ends)
    gradients = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()], allow_unused=True)
    return [y, *[each for each in gradients if each is not None]]


@taken
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_pygs_and_ours_runs(name, device):
    wanted = run(name, device)
    with fused_softmax.enabled(pyg=True), fused_softmax.explain() as explained:
        found = run(name, device)
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    of_pygs = [each for each in explained if each.function == "torch_geometric.utils.softmax"]
    ours_within = [each for each in explained if each.function == "segment_softmax"]
    assert len(of_pygs) == len(ours_within) == CALLED_IN.get(name, 1)
    assert all((each.route, each.depth) == ("kernel", 0) for each in of_pygs)
    assert all((each.route, each.depth) == ("kernel", 1) for each in ours_within)


@taken
def test_every_name_that_is_bound_is_ours_until_it_is_disabled(device, monkeypatch):
    src, index = numbers(6).to(device), torch.tensor([0, 1, 0, 2, 2, 0], device=device)
    fused_softmax.enable(pyg=True)
    fused_softmax.enable()
    fused_softmax.enable(pyg=True)
    here = torch_geometric.utils.softmax
    assert here is not KEPT[0]
    assert here.__name__ == KEPT[0].__name__
    assert all(module.softmax is here for module in MODULES)
    monkeypatch.delitem(sys.modules, "torch_geometric.nn.conv.han_conv")
    later = importlib.import_module("torch_geometric.nn.conv.han_conv")
    assert later.softmax is here
    fused_softmax.disable()
    fused_softmax.disable()
    assert torch_geometric.utils.softmax is here
    fused_softmax.disable()
    assert torch_geometric.utils.softmax is KEPT[0]
    assert later.softmax is KEPT[0]
    assert pyg.softmax is not KEPT[0]
    with fused_softmax.explain() as explained:
        torch.testing.assert_close(here(src, index), KEPT[0](src, index))  # whoever kept it gets PyG's own
    assert not list(explained)


LEFT = {
    "src is no tensor of floats with a dim": (torch.tensor([1, 2, 3]), torch.tensor([0, 1, 0])),
    "index is not one of each element": (torch.tensor([1.0, 2, 3]), torch.tensor([0])),
    "num_nodes is a Tensor": (torch.tensor([1.0, 2, 3]), torch.tensor([0, 1, 0]), None, torch.tensor(2)),
}


@taken
@pytest.mark.parametrize("reason", LEFT)
def test_what_is_left_to_pyg(reason, device):
    given = [each if each is None else each.to(device) for each in LEFT[reason]]
    wanted = KEPT[0](*given)
    with fused_softmax.enabled(pyg=True), fused_softmax.explain() as explained:
        found = torch_geometric.utils.softmax(*given)
    assert torch.equal(found, wanted)
    (record,) = explained
    assert (record.function, record.route, record.reason) == ("torch_geometric.utils.softmax", "PyG", reason)


def _called(src: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch_geometric.utils.softmax(src, index)


@taken
def test_scripted_code_keeps_pygs(device):
    src, index = numbers(6).to(device), torch.tensor([0, 1, 0, 2, 2, 0], device=device)
    with fused_softmax.enabled(pyg=True), fused_softmax.explain() as explained:
        torch.testing.assert_close(torch.jit.script(_called)(src, index), KEPT[0](src, index))
    assert not list(explained)


@taken
def test_compiled_code_keeps_pygs(device):
    src, index = numbers(6).to(device), torch.tensor([0, 1, 0, 2, 2, 0], device=device)
    wanted = KEPT[0](src, index, num_nodes=3)
    torch._dynamo.reset()
    with fused_softmax.enabled(pyg=True):
        compiled = torch.compile(
            lambda src, index: torch_geometric.utils.softmax(src, index, num_nodes=3), backend="eager"
        )
        torch.testing.assert_close(compiled(src, index), wanted)


@pytest.mark.skipif(INTERPRETED, reason="interpreted, CPU tensors are taken as those of a GPU")
def test_cpu_tensors_stay_pygs():
    src, index = numbers(6), torch.tensor([0, 1, 0, 2, 2, 0])
    with fused_softmax.enabled(pyg=True), fused_softmax.explain() as explained:
        assert torch.equal(torch_geometric.utils.softmax(src, index), KEPT[0](src, index))
    assert [(each.function, each.route) for each in explained] == [("torch_geometric.utils.softmax", "PyG")]


def test_without_torch_geometric(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch_geometric")
    monkeypatch.setattr(of_pyg, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"enable\(pyg=True\) needs torch_geometric.*pip install torch_geometric"):
        fused_softmax.enable(pyg=True)


def test_our_softmax_imports_no_torch_geometric():
    script = "import sys; from fused_softmax.pyg import softmax; assert 'torch_geometric' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
