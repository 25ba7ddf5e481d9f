"""The package where Triton is not installed."""

import os
import subprocess
import sys

WITHOUT = """
import sys, warnings
sys.modules["triton"] = None  # as if it were not installed
warnings.simplefilter("error")
import torch
import fused_softmax
from torch.utils._triton import has_triton_package

x, weight, target = torch.randn(4, 8, requires_grad=True), torch.randn(9, 8), torch.arange(4)
CALLS = {
    "softmax": lambda x: fused_softmax.softmax(x),
    "columns": lambda x: fused_softmax.log_softmax(x, 0),
    "logsumexp": lambda x: fused_softmax.logsumexp(x, -1),
    "cross_entropy": lambda x: fused_softmax.cross_entropy(x, target),
    "linear_cross_entropy": lambda x: fused_softmax.linear_cross_entropy(x, weight, target),
    "log_prob": lambda x: fused_softmax.log_prob(x, target),
    "sample": lambda x: fused_softmax.sample(x.detach()),
}
"""


def run(script, **environment):
    given = {k: v for k, v in os.environ.items() if k not in ("FUSED_SOFTMAX_INTERPRET", "TRITON_INTERPRET")}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + script], env=given | environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_explain_lists_calls():
    shown = run("""
with fused_softmax.explain() as explained:
    for call in CALLS.values():
        call(x)
print({each.route for each in explained}, {each.reason for each in explained}, len(explained))
with fused_softmax.explain() as explained:
    pass
print(explained)
""")
    said = "{'composed'} {'there are no kernels for tensors on cpu'} 7\nno call of fused_softmax\n"
    assert shown == said


def test_torchs_path_works():
    run("""
for name, call in CALLS.items():
    call(x)
assert torch.equal(fused_softmax.softmax(x), x.softmax(-1))
fused_softmax.cross_entropy(x, target).backward()
with fused_softmax.enabled():
    x.softmax(-1)
torch.compile(fused_softmax.softmax, backend="eager")(x)
assert fused_softmax.nn.Softmax(-1)(x).shape == x.shape
""")


def test_nobody_else_sees_the_stand_in():
    run("""
assert not has_triton_package()
assert not [name for name, module in sys.modules.items() if name.split(".")[0] == "triton" and module]
try:
    import triton
except ModuleNotFoundError as error:
    assert "fused_softmax" not in str(error)
""")


def test_a_kernel_says_what_it_needs():
    said = run(
        """
for name, call in CALLS.items():
    try:
        call(x)
    except ModuleNotFoundError as error:
        assert error.name == "triton"
        print(error)
    else:
        raise AssertionError(name)
try:
    import fused_softmax.classic
except ModuleNotFoundError as error:
    print(error)
""",
        FUSED_SOFTMAX_INTERPRET="1",
    )
    assert len(said.splitlines()) == 8
    assert set(said.splitlines()) == {
        "the kernels of fused_softmax need Triton, which is not installed: pip install triton (on Linux). "
        "Tensors on the CPU need none: torch computes them"
    }
