"""How large a kernel's boundary may be: what grows past it belongs into its Spec, or is a kernel of its own."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src/fused_softmax"
KERNELS = sorted(
    path for path in PACKAGE.rglob("*.py") if "kernels" in (path.parent.name, path.parents[1].name, path.stem)
)
MOST_PARAMETERS, MOST_CONSTEXPRS = 28, 3
# Those that have more: attention's, of up to eight tensors with strides, and those of log-probabilities, whose results
# and kept columns are up to eighteen tensors.
LARGER = {
    "_climb": 29, "_route": 30,
    "_delta": 32, "_peer_loss": 29, "_keys_gradient": 29, "_queries_gradient": 29, "_bias_gradient": 32, "_decode": 29,
    "_short_gradient": 33, "_log_probs": 34, "_pair_peers": 31,
}  # fmt: skip


def kernels():
    for path in KERNELS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("_") and node.decorator_list:
                decorator = ast.unparse(node.decorator_list[0]).split("(")[0]
                if decorator == "constexpr_function":
                    continue
                assert decorator in ("triton.jit", "jit"), node.name  # Gluon's is imported by its own name
                yield pytest.param(node.name, node.args, id=node.name)


@pytest.mark.parametrize(("name", "arguments"), list(kernels()))
def test_a_kernel_has_few_parameters(name, arguments):
    assert not arguments.vararg
    assert not arguments.kwarg
    parameters = arguments.posonlyargs + arguments.args + arguments.kwonlyargs
    constexprs = [each for each in parameters if each.annotation and "constexpr" in ast.unparse(each.annotation)]
    assert len(parameters) <= LARGER.get(name, MOST_PARAMETERS)
    assert len(constexprs) <= MOST_CONSTEXPRS


def test_every_file_of_kernels_was_looked_through():
    assert len(list(kernels())) >= 20
