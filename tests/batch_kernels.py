"""Which calls take another kernel in another batch on an H100, which need not be here: this script prints them as JSON.

A kernel is all that Triton compiles: its Spec, its warps, and what it sees of addresses, strides and numbers. Where one
is launched for every batch, with another grid, a row of it has the same bits. With "ptx" it compiles the kernels, which
takes a second each, and compares their instructions. The widths may follow; without them it takes a few.
"""

import json
import re
import sys
from dataclasses import replace

import torch

import fused_softmax as ours
import fused_softmax.nn
from fused_softmax.core import calls
from fused_softmax.core.elsewhere import like, run, stand_in_for
from fused_softmax.core.plan import H100
from fused_softmax.profile.compiled import Listed
from fused_softmax.warm.work import key_of

BATCHES = [(1, 0), (1, 3), (7, 0), (7, 5), (64, 1), (512, 0), (8192, 0)]  # (rows, rows of the same tensor before them)
WIDTHS = (5, 40, 130, 1000, 1001, 4096, 8200, 32000, 50257, 128256, 151937, 262144, 2**22)
COMPILED = (130, 50257, 128256)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Of what they write, no element is a sum.
NO_SUMS = {"_multiply", "_logsumexp_backward", "_gradient", "_totals", "_finish"}


def made(n, before, *sizes, dtype, grad=False):
    return torch.empty(before + n, *sizes, dtype=dtype, device="meta")[before:].detach().requires_grad_(grad)


def one_dim(function, *, dtype, grad=True, **options):
    def call(n, before, n_cols, how):
        values = {}
        if "scale" in options:
            values["scale"] = made(n, before, 1, dtype=torch.float32)
        if "mask" in options:
            values["mask"] = made(n, before, n_cols, dtype=options["mask"])
        if "sink" in options:
            values["sink"] = made(n, before, 1, dtype=dtype)
        return function(made(n, before, n_cols, dtype=dtype, grad=grad), -1, **values, **how)

    return call


def columns(n, before, n_cols, how):
    x = made(n, before, n_cols, dtype=torch.bfloat16, grad=True).t()
    return ours.softmax(x, 0, **how)


def loss(*, dtype, grad, **options):
    def call(n, before, n_cols, how):
        x, target = made(n, before, n_cols, dtype=dtype, grad=grad), made(n, before, dtype=torch.int64)
        return ours.cross_entropy(x, target, **options, **how)

    return call


def apart(function):
    """Of rows that lie in longer ones, which begin on 16 elements."""

    def call(n, before, n_cols, how):
        room = -(-(n_cols + 1) // 16) * 16
        return function(made(n, before, room, dtype=torch.bfloat16, grad=True)[:, :n_cols], -1, **how)

    return call


CALLS = {"softmax over dim 0": columns, "softmax, apart": apart(ours.softmax), "lse, apart": apart(ours.logsumexp)}
for name, dtype in DTYPES.items():
    for function in (ours.softmax, ours.log_softmax, ours.logsumexp):
        CALLS[f"{function.__name__}, {name}"] = one_dim(function, dtype=dtype)
    CALLS[f"softmax with scales and a sink, {name}"] = one_dim(ours.softmax, dtype=dtype, grad=False, scale=1, sink=1)
    for mask in (torch.bool, torch.float32):
        CALLS[f"softmax with a mask of {mask}, {name}"] = one_dim(ours.softmax, dtype=dtype, mask=mask)
    for reduction in ("none", "sum"):
        CALLS[f"cross_entropy, {reduction}, {name}"] = loss(dtype=dtype, grad=True, reduction=reduction)
    CALLS[f"losses alone, {name}"] = loss(dtype=dtype, grad=False, reduction="none")
    CALLS[f"smoothed and capped, {name}"] = loss(
        dtype=dtype, grad=True, reduction="sum", label_smoothing=0.1, softcap=5.0
    )


def seen(tensor):
    """A tensor as a kernel sees it whose order of sums is asked for: where addresses are read one by one, on 16 bytes.

    The addresses of such elements follow from no vector, wherever the tensor starts.
    """
    if tensor is None or (len(tensor.shape) > 1 and tensor.shape[-1] * tensor.element_size() % 16 == 0):
        return tensor
    return like(tensor.shape, tensor.stride(), tensor.dtype)


def kind(job):
    return key_of(replace(job, tensors=[seen(each) for each in job.tensors]))


def instructions(ptx):
    """What a GPU runs of PTX: debug information names the checkout that Triton's cache has a kernel from."""
    code = re.split(r"(?m)^\s*\.section\s+\.debug", ptx, maxsplit=1)[0]
    return re.sub(r"(?m)^\s*(//|\.loc|\.file).*$", "", code)


def compiled(job, found={}):  # noqa: B006
    """The name of a kernel, and its instructions."""
    key = key_of(job)
    if key not in found:
        ptx = Listed(**vars(job)).compile("sm_90").ptx
        found[key] = job.kernel.fn.__name__, instructions(ptx)
    return found[key]


def main():
    found, apart, (how, *ptx) = [], {}, sys.argv[1:]
    compiled_at = [int(each) for each in ptx[1:]] or COMPILED
    stand_in_for(H100, found)
    for name, call in CALLS.items():
        if ptx and name.endswith("fp32"):
            continue
        for n_cols in compiled_at if ptx else WIDTHS:
            kinds = set()
            for n, before in BATCHES:
                found.clear()
                calls.forget()
                run(lambda: call(n, before, n_cols, {"batch_invariant": how == "alone"}))  # noqa: B023
                of = compiled if ptx else kind
                kinds.add(frozenset(of(each) for each in found if each.kernel.fn.__name__ not in NO_SUMS))
            if len(kinds) > 1:
                apart.setdefault(name, []).append(n_cols)
    print(json.dumps(apart))


if __name__ == "__main__":
    main()
