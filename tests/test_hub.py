"""The folder that Hugging Face's `kernels` loads: it needs no installed package, and `kernelize` puts its layers into
models of transformers.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("hub_build", ROOT / "hub/build.py")
hub = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hub)

LOADS = """
import sys
from pathlib import Path
import torch
sys.modules["fused_softmax"] = None  # as where it is not installed
from kernels import get_local_kernel
PLACE = Path(sys.argv[1])
fused = get_local_kernel(PLACE)
"""
WITH_ANOTHER = LOADS.replace('sys.modules["fused_softmax"] = None', "import fused_softmax; fused_softmax.softmax")
# transformers names its layers so where it takes the version of `kernels` that is installed, and else not at all.
KERNELIZES = """
import warnings
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_forward_from_hub, use_kernel_mapping
from transformers import LagunaConfig, LagunaForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.laguna.modeling_laguna import LagunaTopKRouter
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter

for router in (LagunaTopKRouter, Qwen3_5MoeTopKRouter):
    if not hasattr(router, "kernel_layer_name"):
        use_kernel_forward_from_hub("SoftmaxTopKRouter")(router)
sizes = dict(
    vocab_size=96, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=8,
    num_experts_per_tok=3, max_position_embeddings=64,
)
models = {
    "qwen": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig(**sizes, layer_types=["full_attention"] * 2)),
    "laguna": (LagunaForCausalLM, LagunaConfig(**sizes, moe_router_logit_softcapping=1.5)),
}
of_class, config = models[sys.argv[2]]
torch.manual_seed(0)
model = of_class(config).to(getattr(torch, sys.argv[3]))
for name, parameter in model.named_parameters():
    if name.endswith(("gate.weight", "e_score_correction_bias")):
        torch.nn.init.normal_(parameter)
tokens = torch.randint(96, (2, 9))
tokens[1, 6:] = -100


def step(**more):
    model.zero_grad()
    out = model(input_ids=tokens.clamp(min=0), labels=tokens, **more)
    out.loss.backward()
    return out.loss, out.logits, [each.grad.clone() for each in model.parameters() if each.grad is not None]


asked = {}, {"num_items_in_batch": torch.tensor(5)}
before = [step(**each) for each in asked]
model._loss_function = use_kernel_forward_from_hub("ForCausalLMLoss")(ForCausalLMLoss)
layers = "SoftmaxTopKRouter", "ForCausalLMLoss"
with use_kernel_mapping(
    {name: {"cpu": LocalLayerRepository(PLACE, layer_name=name)} for name in layers}, inherit_mapping=False
):
    warnings.simplefilter("ignore")
    kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device="cpu")
with fused.explain() as said:
    after = [step(**each) for each in asked]
assert {each.function for each in said.records if each.route == "kernel"} >= {"route", "cross_entropy"}, said
near = {"atol": 2e-3, "rtol": 5e-2} if model.dtype == torch.bfloat16 else {}
torch.testing.assert_close(after, before, **near)
model.eval()
with torch.no_grad():
    nan = torch.full((1, 32), torch.nan, dtype=model.dtype)
    routers = [each for each in model.modules() if type(each).__name__.endswith("TopKRouter")]
    _, weights, experts = routers[0](nan)
assert weights.isnan().all() and (experts >= 0).all()
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return hub.build(tmp_path_factory.mktemp("hub"), "someone/fused-softmax")


def run(program, *arguments):
    pytest.importorskip("kernels", reason="kernels is not installed")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    environment |= {"FUSED_SOFTMAX_INTERPRET": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.guard
def test_kernels_takes_its_metadata_and_its_place(kernel):
    kernels = pytest.importorskip("kernels", reason="kernels is not installed")
    variants = pytest.importorskip("kernels.variants")
    about = kernels.Metadata.read_from_file(kernel / "metadata.json")
    assert (str(about.name), about.version, about.license) == ("fused-softmax", hub.VERSION, "mit")
    (found,) = variants.get_variants_local(kernel.parent)
    assert found.variant_str == "torch-cuda"
    assert re.fullmatch(r"_fused_softmax_cuda_[0-9a-f]{12}", about.id)


def test_a_build_depends_on_its_sources_alone(kernel, tmp_path):
    again = hub.build(tmp_path)
    files = {path.relative_to(kernel): path.read_bytes() for path in kernel.rglob("*") if path.is_file()}
    assert files == {path.relative_to(again): path.read_bytes() for path in again.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit, match="is not empty"):
        hub.build(tmp_path)


def test_the_card_names_the_repository(kernel):
    card = (kernel.parents[1] / "README.md").read_text()
    assert 'get_kernel("someone/fused-softmax", version=1' in card
    assert "OWNER" not in card
    assert json.loads((kernel / "metadata.json").read_text())["version"] == 1


@pytest.mark.parametrize(
    "line", ["import fused_softmax.core", "import fused_softmax", "if 1: from fused_softmax import nn"]
)
def test_an_import_that_stays_absolute_is_refused(line):
    with pytest.raises(SystemExit, match=r"core/one\.py:1: imports fused_softmax"):
        hub.relative("core/one.py", line + "\n", "_ours")


def test_what_is_named_by_the_package_is_named_by_the_kernel():
    source = 'Library("fused_softmax", 1)\nf"fused_softmax::{x}"\ntorch.ops.fused_softmax.y\n'
    found = hub.relative("ops/one.py", f"from fused_softmax.core import a\n{source}", "_ours")
    assert found == "from ..core import a\n" + source.replace("fused_softmax", "_ours")


@pytest.mark.guard
@pytest.mark.parametrize("program", [LOADS, WITH_ANOTHER], ids=["alone", "beside the package"])
def test_softmax_is_a_function_of_what_is_loaded(kernel, program):
    run(
        program
        + """
assert fused.__name__.startswith("_fused_softmax_cuda_")
x = torch.randn(4, 100, requires_grad=True)
with fused.explain() as said:
    y = fused.softmax(x, -1)
    (dx,) = torch.autograd.grad(y, x, y.detach() ** 2)
    traced = torch.compile(lambda x: fused.softmax(x, -1), backend="aot_eager", fullgraph=True)(x.detach())
assert {each.route for each in said.records} == {"kernel", "operator"}, said
expected = torch.softmax(x, -1)
torch.testing.assert_close(y, expected)
torch.testing.assert_close(traced, expected.detach())
torch.testing.assert_close(dx, torch.autograd.grad(expected, x, expected.detach() ** 2)[0])
torch.testing.assert_close(fused.nn.Softmax(-1)(x), expected)
assert "warmup" not in dir(fused)
if sys.modules["fused_softmax"]:
    theirs = sys.modules["fused_softmax"].softmax
    assert theirs is not fused.softmax
    torch.testing.assert_close(theirs(x, -1), expected)
""",
        kernel,
    )


@pytest.mark.guard
@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("laguna", "float32"),
        pytest.param("qwen", "float32", marks=pytest.mark.exhaustive),
        pytest.param("qwen", "bfloat16", marks=pytest.mark.exhaustive),
    ],
)
def test_kernelize_puts_both_layers_into_a_model(kernel, model, dtype):
    pytest.importorskip("transformers", reason="transformers is not installed")
    run(LOADS + KERNELIZES, kernel, model, dtype)
