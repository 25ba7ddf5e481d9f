"""Errors of route name the argument, the shape and the value, and come before anything runs."""

import math
import re

import numpy as np
import pytest
import torch

import fused_softmax
from fused_softmax import route
from fused_softmax.ops.routing.options import Routing

INF, NAN = math.inf, math.nan
X = torch.zeros(4, 8)
IDS = torch.arange(12).view(4, 3) % 8
MASK = torch.ones(4, dtype=torch.bool)
OF = "logits of shape (4, 8)"
ONE_EACH = f"(4,), one for each row of {OF}"
BAD = {  # of each argument its wrong values, the error, and what it says after "route: "
    "logits": [
        ([1.0], TypeError, "logits must be a Tensor, not list ([1.0])"),
        *[
            (
                X.to(dtype), TypeError,
                f"logits must be of float32, float16 or bfloat16, got Tensor of shape (4, 8), {dtype} on DEVICE",
            )
            for dtype in (torch.int64, torch.bool, torch.float64, torch.complex64, torch.float8_e5m2)
        ],
        (torch.zeros(()), ValueError, "logits must have shape [..., n_experts] with at least one expert, got ()"),
        (X[:, :0], ValueError, "logits must have shape [..., n_experts] with at least one expert, got (4, 0)"),
        (
            X.to_sparse(), RuntimeError,
            "logits must be a dense strided tensor, got a torch.sparse_coo one of shape (4, 8)",
        ),
    ],
    "k": [
        *[
            (k, ValueError, f"k must be from 1 to 8, the experts of {OF}, got {k}")
            for k in (0, -1, 9, 10**30)
        ],
        (2.0, TypeError, "k must be an int, not float (2.0)"),
        (True, TypeError, "k must be an int, not bool (True)"),
        (None, TypeError, "k must be an int, not NoneType (None)"),
        ([3], TypeError, "k must be an int, not list ([3])"),
        (torch.tensor(3), TypeError, "k must be an int, not Tensor of shape (), torch.int64 on DEVICE"),
    ],
    "score": [
        (value, ValueError, f'score must be "softmax", "sigmoid" or "sqrtsoftplus", got {said}')
        for value, said in [("tanh", "'tanh'"), (None, "None"), (X.numpy(), "ndarray of shape (4, 8), float32")]
    ],
    "score_first": [(1, TypeError, "score_first must be a bool, not int (1)")],
    "bias": [
        (0.5, TypeError, f"bias must be a Tensor of shape (8,), one for each expert of {OF}, not float (0.5)"),
        *[
            (
                torch.zeros(shape), ValueError,
                f"bias must have shape (8,), one for each expert of {OF}, got {shape}",
            )
            for shape in [(), (1,), (7,), (1, 8)]
        ],
        (
            X[0].int(), TypeError,
            "bias must be of 16 to 64 bit floats, got Tensor of shape (8,), torch.int32 on DEVICE",
        ),
        (
            X[0].to("meta"), RuntimeError,
            "bias must be on the device of the logits, DEVICE, got Tensor of shape (8,), torch.float32 on meta",
        ),
        (
            X[0].to_sparse(), RuntimeError,
            "bias must be a dense strided tensor, got a torch.sparse_coo one of shape (8,)",
        ),
        (
            X[0].clone().requires_grad_(), RuntimeError,
            "bias of shape (8,) requires grad, and is a constant that gets none; give bias.detach()",
        ),
    ],
    "n_groups": [
        *[
            (n, ValueError, f"n_groups must be at least 1 and divide the 8 experts of {OF}, got {n}")
            for n in (3, 0, -4, 16)
        ],
        (2.0, TypeError, "n_groups must be an int, not float (2.0)"),
    ],
    "groups_kept": [
        *[
            (kept, ValueError, f"groups_kept must be from 1 to n_groups=4 for {OF}, got {kept}")
            for kept in (5, 0, -1)
        ],
        (
            1, ValueError,
            f"k must be at most 2, the experts in groups_kept=1 groups of 2, for {OF} with n_groups=4, got 3",
        ),
        (True, TypeError, "groups_kept must be an int, not bool (True)"),
    ],
    "group_score": [
        (value, ValueError, f'group_score must be "top2" or "max", got {said}')
        for value, said in [("mean", "'mean'"), (X.numpy(), "ndarray of shape (4, 8), float32")]
    ],
    "renormalize": [(None, TypeError, "renormalize must be a bool, not NoneType (None)")],
    "scale": [
        (INF, ValueError, "scale must be finite, got inf"),
        (NAN, ValueError, "scale must be finite, got nan"),
        (-(10**400), ValueError, "scale must be finite, got -1000"),
        ("1", TypeError, "scale must be a number, not str ('1')"),
        (X, TypeError, "scale must be a number, not Tensor of shape (4, 8), torch.float32 on DEVICE"),
    ],
    "noise": [
        (0.5, TypeError, f"noise must be a Tensor of shape (4, 8), that of {OF}, not float (0.5)"),
        *[
            (torch.zeros(shape), ValueError, f"noise must have shape (4, 8), that of {OF}, got {shape}")
            for shape in [(), (8,), (4, 1), (1, 4, 8)]
        ],
        (
            X.bool(), TypeError,
            "noise must be of 16 to 64 bit floats, got Tensor of shape (4, 8), torch.bool on DEVICE",
        ),
        (
            X.clone().requires_grad_(), RuntimeError,
            "noise of shape (4, 8) requires grad, and is a constant that gets none; give noise.detach()",
        ),
    ],
    "indices": [
        ([0], TypeError, f"indices must be a Tensor of shape (4, 3), k for each row of {OF}, not list ([0])"),
        *[
            (
                torch.zeros(shape, dtype=torch.int64), ValueError,
                f"indices must have shape (4, 3), k for each row of {OF}, got {shape}",
            )
            for shape in [(), (4, 2), (12,), (3, 4), (1, 4, 3)]
        ],
        *[
            (
                IDS.to(dtype), TypeError,
                f"indices must be of int32 or int64, got Tensor of shape (4, 3), {dtype} on DEVICE",
            )
            for dtype in (torch.float32, torch.int16, torch.bool)
        ],
        (
            IDS.to("meta"), RuntimeError,
            "indices must be on the device of the logits, DEVICE, got Tensor of shape (4, 3), torch.int64 on meta",
        ),
    ],
    "row_mask": [
        (True, TypeError, f"row_mask must be a Tensor of shape {ONE_EACH}, not bool (True)"),
        *[
            (torch.ones(shape).bool(), ValueError, f"row_mask must have shape {ONE_EACH}, got {shape}")
            for shape in [(), (3,), (4, 1)]
        ],
        (MASK.float(), TypeError, "row_mask must be of bool, got Tensor of shape (4,), torch.float32 on DEVICE"),
    ],
    "dense": [("yes", TypeError, "dense must be a bool, not str ('yes')")],
    "return_aux_loss": [(1, TypeError, "return_aux_loss must be a bool, not int (1)")],
    "return_z_loss": [(1e-3, TypeError, "return_z_loss must be a bool, not float (0.001)")],
    "return_counts": [(None, TypeError, "return_counts must be a bool, not NoneType (None)")],
    "sequence_length": [
        *[
            (n, ValueError, f"sequence_length must be at least 1 and divide the 4 rows of {OF}, got {n}")
            for n in (3, 0, -4, 8)
        ],
        (2.0, TypeError, "sequence_length must be an int, not float (2.0)"),
    ],
}  # fmt: skip
BAD_IDS = {
    "beyond": (
        [[0, 1, 2], [3, 8, 4]], [True, True], "must be from -1 to 7, for 8 experts, got 8 at [1, 1]",
    ),
    "below -1": ([[-2, 1, 2], [3, 8, 4]], [True, True], "must be from -1 to 7, for 8 experts, got -2 at [0, 0]"),
    "beyond, in a row that counts": (
        [[0, 9, 2], [3, 5, 2**40]], [False, True], f"must be from -1 to 7, for 8 experts, got {2**40} at [1, 2]",
    ),
    "twice": (
        [[0, 1, 2], [5, 3, 5]], [True, True], "must have an expert at most once in each row, got 5 twice in row [1]",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("argument", "case"),
    [(argument, case) for argument, cases in BAD.items() for case in cases],
    ids=lambda each: each if isinstance(each, str) else None,
)
def test_bad_arguments(argument, case, device, monkeypatch):
    """The error names the argument, the shape and the value, and nothing runs before it."""
    value, error, words = case
    right = {"logits": X.to(device), "k": 3, "n_groups": 4 if argument == "groups_kept" else 1}
    if isinstance(value, torch.Tensor) and not value.is_meta and not value.requires_grad:
        value = value.to(device)
    elif isinstance(value, torch.Tensor) and value.requires_grad:
        value = value.detach().to(device).requires_grad_()
    monkeypatch.setattr(fused_softmax.ops.routing.route, "route_of", None)
    with pytest.raises(error, match="^" + re.escape(f"route: {words}".replace("DEVICE", str(X.to(device).device)))):
        route(**right | {argument: value})


@pytest.mark.parametrize("case", BAD_IDS)
def test_bad_ids(case, device, monkeypatch):
    ids, mask, words = BAD_IDS[case]
    monkeypatch.setattr(fused_softmax.core.route, "CHECK", True)
    x, indices, mask = (torch.tensor(each, device=device) for each in ([[0.0] * 8] * 2, ids, mask))
    with pytest.raises(IndexError, match="^" + re.escape(f"route: indices of shape (2, 3) {words}")):
        route(x, 3, indices=indices, row_mask=mask)
    words = "must have an expert at most once in each row"
    with pytest.raises(IndexError, match=re.escape(f"route: indices of shape (3,) {words}")):
        route(x[0], 3, indices=torch.tensor([1, 4, 1], device=device))


def test_every_option_has_a_bad_value():
    assert set(BAD) == {"logits", *Routing.OPTIONS} - {"examples"}  # of vmap


def test_numbers_of_numpy_are_numbers(device):
    x = torch.randn(4, 8).to(device)
    options = {"n_groups": np.int64(4), "groups_kept": np.int32(2), "scale": np.float32(0.5)}
    found = route(x, np.int64(3), **options, sequence_length=np.int64(2), return_aux_loss=True)
    wanted = route(x, 3, n_groups=4, groups_kept=2, scale=0.5, sequence_length=2, return_aux_loss=True)
    for ours, theirs in zip(found[:5], wanted[:5], strict=True):
        assert torch.equal(ours, theirs)
