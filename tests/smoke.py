"""A first look at an installed package, outside any checkout: `python smoke.py VERSION`. Needs nothing but the package.

It exits with an error if a result is wrong, a file is missing, or the package is another one than asked for.
"""

import importlib.util
import os
import subprocess
import sys
from importlib import metadata, resources

import torch

import fused_softmax

INTERPRETED = "FUSED_SOFTMAX_INTERPRET"


def has(name):
    return importlib.util.find_spec(name) is not None


def check_results():
    """Results and gradients are torch's: of torch's path, or of the kernels where they are interpreted."""
    torch.manual_seed(0)
    x = torch.randn(5, 33, requires_grad=True)
    target = torch.randint(33, (5,))
    for ours, torchs in (
        (lambda: fused_softmax.softmax(x, -1), lambda: torch.softmax(x, -1)),
        (lambda: fused_softmax.log_softmax(x, 0), lambda: torch.log_softmax(x, 0)),
        (lambda: fused_softmax.logsumexp(x, -1), lambda: torch.logsumexp(x, -1)),
        (
            lambda: fused_softmax.cross_entropy(x, target),
            lambda: torch.nn.functional.cross_entropy(x, target),
        ),
        (
            lambda: fused_softmax.log_prob(x, target),
            lambda: torch.log_softmax(x, -1).gather(-1, target.unsqueeze(-1)).squeeze(-1),
        ),
        (
            lambda: fused_softmax.divergence(x, x.detach().flip(0), reduction="sum"),
            lambda: torch.nn.functional.kl_div(
                torch.log_softmax(x, -1), torch.log_softmax(x.detach().flip(0), -1), reduction="sum", log_target=True
            ),
        ),
        (
            lambda: fused_softmax.segment_softmax(x, torch.tensor([0, 3, 3, 5])),
            lambda: torch.cat([torch.softmax(x[:3], 0), torch.softmax(x[3:], 0)]),
        ),
    ):
        found, expected = ours(), torchs()
        torch.testing.assert_close(found, expected)
        weight = torch.randn_like(found)
        torch.testing.assert_close(
            *(torch.autograd.grad(each, x, weight, retain_graph=True) for each in (found, expected))
        )


def check_compiled_results():
    """Named tuples come out of code that torch compiles, also out of that of the oldest torch."""
    x, target = torch.randn(2, 8, 16, requires_grad=True), torch.tensor([0, -100] * 8)
    for call in (
        lambda x: fused_softmax.attention(x, x, x, return_lse=True),
        lambda x: fused_softmax.sample(x[0], seed=1, return_logprobs="raw"),
        lambda x: fused_softmax.linear_cross_entropy(x.flatten(0, 1), x[0], target, return_lse=True, skip_ignored=True),
    ):
        found = torch.compile(call, backend="eager", fullgraph=True)(x)
        torch.testing.assert_close(tuple(found)[:2], tuple(call(x))[:2])


def check_files(version):
    found = metadata.version("fused-softmax")
    assert found == fused_softmax.__version__ == version, f"{found}, {fused_softmax.__version__}: not {version}"
    for name in ("core/launcher.c", "core/lookup.c", "trace/page.html", "trace/presets.json", "trace/schema.json"):
        assert (resources.files("fused_softmax") / name).is_file(), f"{name} is missing"


def check_command(version):
    """The command says its version, or which extra it needs."""
    command = [sys.executable, "-m", "fused_softmax", "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    if not (has("click") and has("rich")):
        assert "pip install 'fused-softmax[cli]'" in done.stderr, done.stderr
    elif has("triton"):
        assert done.returncode == 0, done.stderr
        assert version in done.stdout, done.stdout


def check_kernels(version):
    """Under Triton's interpreter, in a process of its own: Triton's flag is read at the import."""
    environment = os.environ | {INTERPRETED: "1"}
    done = subprocess.run([sys.executable, __file__, version], env=environment, capture_output=True, text=True)
    if has("triton") and has("numpy"):
        assert done.returncode == 0, done.stderr
        return "kernels interpreted"
    assert done.returncode != 0
    if not has("triton"):
        assert "need Triton, which is not installed" in done.stderr, done.stderr
    return "no kernels: Triton and NumPy are not both installed"


def main():
    version = sys.argv[1]
    check_results()
    check_compiled_results()
    if os.environ.get(INTERPRETED) == "1":
        return
    check_files(version)
    check_command(version)
    kernels = check_kernels(version)
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "triton") if has(name))
    print(f"fused-softmax {version}: Python {sys.version.split()[0]}, {versions}, {kernels}")


if __name__ == "__main__":
    main()
