"""TRL's trainers on log_prob, linear_log_prob and divergence, from `apply()` until `undo()`.

A stand-in takes the place of each function of `_SEAMS` in every module that has bound it: in those that were imported
before, and, since they import it from there, in those that come later. `undo()` looks for the stand-ins in all modules
again. What still has one then, such as a local variable, gets TRL's own by it.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from inspect import getattr_static, signature
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fused_softmax.core.route import is_plain
from fused_softmax.ops.losses.divergence import divergence
from fused_softmax.ops.losses.linear_by_classes import add_product, write_product
from fused_softmax.ops.losses.linear_log_prob import linear_log_prob
from fused_softmax.ops.losses.log_prob import log_prob
from fused_softmax.register.names import rebind

_KNOWN = "1.16"
_NO_CLASS = -(2**31)  # an index that nobody gives, of rows that a mask leaves out
_LOGITS = 2**27  # of each model in memory at a time, for divergences: half a GiB in float32
_ROWS = 128  # a multiple that matrix products like
_DEVICES = ("cuda", "cpu")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STATS = ("log_sum_sq_probs", "mean_logits", "is_top1")

_lock = threading.Lock()
_replaced: list["_Replaced"] = []
listener: Callable[..., Any] | None = None  # hears of calls: listener(name, run, args, kwargs)


class _Replaced(NamedTuple):
    """TRL's own and what stands in for it. owner: the class that has it by that name; None where modules have it."""

    own: Any
    stand_in: Any
    owner: Any = None
    name: str = ""


def apply() -> None:
    """Run the trainers of TRL 1.16 on log_prob, linear_log_prob and divergence, from now on, in all threads.

    | of TRL | by | whose |
    |---|---|---|
    | `trl.trainer.utils._ChunkedLogProbFunction` | `linear_log_prob` | SFT, DPO, GRPO, KTO and RLOO trainers |
    | `trl.trainer.utils.selective_log_softmax` | `log_prob` | experimental trainers, such as CPO, ORPO and SDPO |
    | `trl.trainer.utils.selective_log_softmax_and_entropy` | `log_prob` | the experimental TPO trainer |
    | `trl.kernels.chunked_divergence.ChunkedDivergenceFunction` | `divergence` | DistillationTrainer |
    | `generalized_jsd_loss` of `trl.experimental.gkd.GKDTrainer` | `divergence` | GKDTrainer |

    It imports these modules, and replaces all but the last wherever their names are bound. Trainers may exist already.
    A call that ours does not take as it stands goes to TRL's own: of other devices or subclasses of Tensor, of
    parameters that DeepSpeed's ZeRO-3 shards, with a reduction to no number, or with options that ours refuses, such as
    a temperature of 0. `explain()` lists both. Where a compiler traces the model, it breaks its graph at those from
    hidden states, which would hold all logits in it.

    Results are float32, also of 16-bit logits. Statistics have no gradient, as TRL's. A second call changes nothing.

    Raises ImportError if TRL is not installed, and RuntimeError, before anything is replaced, if one of these is not
    there or takes other arguments than in TRL 1.16, which names it.

    >>> fused_softmax.trl.apply()
    >>> GRPOTrainer(model, reward_funcs=reward, args=args, train_dataset=prompts).train()
    """
    if find_spec("trl") is None:
        raise ImportError(
            "fused_softmax.trl.apply() needs the trl package, which is not installed: pip install 'fused-softmax[trl]'"
        )
    with _lock:
        if not _replaced:
            found = [_find(*each) for each in _SEAMS.items()]
            _replaced.extend(found)
            rebind({id(each.own): each.stand_in for each in found if each.owner is None}, __name__)
            for each in found:
                if each.owner is not None:
                    setattr(each.owner, each.name, each.stand_in)


def undo() -> None:
    """Give TRL its own functions back, everywhere.

    Raises RuntimeError if apply() has not been called.

    >>> fused_softmax.trl.apply()
    >>> fused_softmax.trl.undo()
    """
    with _lock:
        if not _replaced:
            raise RuntimeError("fused_softmax.trl.undo() without an apply() before it")
        rebind({id(each.stand_in): each.own for each in _replaced if each.owner is None}, __name__)
        for each in _replaced:
            if each.owner is not None and getattr_static(each.owner, each.name) is each.stand_in:
                setattr(each.owner, each.name, each.own)
        _replaced.clear()


def _find(path: str, take: Callable) -> _Replaced:
    """What stands in for one of TRL's, or a RuntimeError that names it."""
    module, name = path.split(":")
    owner, _, of_class = name.rpartition(".")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You are importing from 'trl.experimental'")
            there = import_module(module)
        there = getattr(there, owner) if owner else there
        own = getattr(there, of_class)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not f"{error.name}.".startswith("trl."):
            raise  # a package that TRL needs
        raise _unknown(path, "does not have it") from error
    is_class = isinstance(own, type)
    if not callable(getattr(own, "apply" if is_class else "__call__", None)):
        raise _unknown(path, "has something else there")
    theirs = _parameters(own.forward)[1:] if is_class else _parameters(own)
    if theirs != _parameters(take):
        raise _unknown(path, f"has it with other arguments: {', '.join(name for name, _ in theirs)}")
    name = path.replace(":", ".")
    if is_class:
        # All that it holds of what it computes would be one graph's.
        run = torch.compiler.disable(_standing_in(name, own.apply, take))
        return _Replaced(own, SimpleNamespace(apply=run))
    stand_in = wraps(own)(_standing_in(name, own, take))
    if not owner:
        return _Replaced(own, stand_in)
    return _Replaced(getattr_static(there, of_class), staticmethod(stand_in), there, of_class)


def _parameters(function: Callable) -> list[tuple[str, Any]]:
    """Their names and defaults."""
    return [(name, each.default) for name, each in signature(function).parameters.items()]


def _unknown(path: str, what: str) -> RuntimeError:
    return RuntimeError(
        f"fused_softmax.trl.apply() replaces {path.replace(':', '.')} of TRL {_KNOWN}, and TRL {version('trl')} "
        f"{what}; nothing was replaced"
    )


def left_to_trl(own: Callable, refused: str) -> Callable:
    """TRL's own, for a call that is not taken. refused: why, for `explain()`, which listens here."""
    return own


def _standing_in(name: str, own: Callable, take: Callable) -> Callable:
    """take: with the arguments of TRL's; it returns a str, why it does not take a call."""

    def taken(*args: Any, **kwargs: Any) -> Any:
        found = take(*args, **kwargs)
        return left_to_trl(own, found)(*args, **kwargs) if isinstance(found, str) else found

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if not _replaced:
            return own(*args, **kwargs)
        if listener is None or torch.compiler.is_compiling():
            return taken(*args, **kwargs)
        return listener(name, taken, args, kwargs)

    return stand_in


# What stands in: each has the arguments and results of one of TRL's.


def _log_probs_of_hidden(
    hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping=None, logit_scale=1.0,
    outputs=("entropy", *_STATS),
):  # fmt: skip
    """chunk_size: of the vocabulary; ours are of rows."""
    refused = _refused_layer(hidden, weight, bias) or _refused_numbers(
        temperature=temperature, softcap=final_logit_softcapping, scale=logit_scale
    )
    if refused or targets.shape != hidden.shape[:1] or targets.device != hidden.device:
        return refused or "targets are not one of each row"
    x, w, b = _as_products(hidden, weight, bias)
    with torch.autocast(hidden.device.type, enabled=False):
        out: Any = linear_log_prob(
            x, w, targets, linear_bias=b, scale=float(logit_scale), softcap=final_logit_softcapping,
            temperature=float(temperature), ignore_index=_NO_CLASS, return_entropy="entropy" in outputs,
            return_stats=tuple(each for each in _STATS if each in outputs), dtype=torch.float32,
        )  # fmt: skip
    if isinstance(out, Tensor):
        return out, None, None, None, None
    stats = (None,) * 3 if out.stats is None else [each if each is None else each.detach() for each in out.stats]
    return out.log_prob, out.entropy, *stats


def _log_probs(logits, index, temperature=1.0, row_mask=None):
    refused = _refused_rows(logits, index, temperature, row_mask)
    return refused or log_prob(
        logits, _left_out(index, row_mask), temperature=float(temperature), ignore_index=_NO_CLASS
    )


def _log_probs_and_entropies(logits, index, entropy_requires_grad=True, temperature=1.0, row_mask=None):
    refused = _refused_rows(logits, index, temperature, row_mask)
    if refused:
        return refused
    out: Any = log_prob(
        logits, _left_out(index, row_mask), temperature=float(temperature), ignore_index=_NO_CLASS, return_entropy=True
    )
    return out.log_prob, out.entropy if entropy_requires_grad else out.entropy.detach()


def _left_out(index: Tensor, row_mask: Tensor | None) -> Tensor:
    return index if row_mask is None else index.masked_fill(row_mask == 0, _NO_CLASS)


def _jsd_of_logits(
    student_logits, teacher_logits, labels=None, beta=0.5, temperature=1.0, reduction="batchmean",
    num_items_in_batch=None,
):  # fmt: skip
    refused = _refused_pair(student_logits, teacher_logits, labels) or _refused_numbers(temperature=temperature)
    if not refused and not _is_share(beta):
        refused = f"beta is {beta!r}"
    if not refused and num_items_in_batch is None and reduction not in ("batchmean", "sum"):
        refused = f"reduction is {reduction!r}"
    if refused:
        return refused
    weight = None if labels is None else (labels != -100).float()
    total = divergence(
        student_logits, teacher_logits, kind="jsd", beta=float(beta), temperature=float(temperature),
        target_temperature=float(temperature), weight=weight, reduction="sum",
    )  # fmt: skip
    if num_items_in_batch is not None:
        n = num_items_in_batch
        return total / (n.to(total.device) if isinstance(n, Tensor) else n)
    if reduction == "sum":
        return total
    return total / (len(student_logits) if weight is None else weight.sum().clamp_min(1))


def _divergences_of_hidden(
    student_hidden, student_weight, student_bias, teacher_hidden, teacher_weight, teacher_bias, beta, temperature=1.0,
    student_logit_scale=1.0, student_final_logit_softcapping=None, teacher_logit_scale=1.0,
    teacher_final_logit_softcapping=None,
):  # fmt: skip
    student, teacher = (student_hidden, student_weight, student_bias), (teacher_hidden, teacher_weight, teacher_bias)
    refused = _refused_layer(*student) or _refused_layer(*teacher) or _refused_numbers(
        temperature=temperature, softcap=student_final_logit_softcapping, scale=student_logit_scale
    )  # fmt: skip
    refused = refused or _refused_numbers(softcap=teacher_final_logit_softcapping, scale=teacher_logit_scale)
    if not refused and not _is_share(beta):
        refused = f"beta is {beta!r}"
    if not refused and (len(student_hidden), len(student_weight)) != (len(teacher_hidden), len(teacher_weight)):
        refused = "the teacher has other rows or classes"
    if refused or student_hidden.device != teacher_hidden.device:
        return refused or "the teacher is on another device"
    of_student = {"scale": float(student_logit_scale), "softcap": student_final_logit_softcapping}
    of_teacher = {"target_scale": float(teacher_logit_scale), "target_softcap": teacher_final_logit_softcapping}
    t = float(temperature)
    of_pair = {"kind": "jsd", "beta": float(beta), "target_temperature": t, **of_teacher}
    dtypes = _products(student_hidden), _products(teacher_hidden)
    return _Divergences.apply(*student, *teacher, (dtypes, {**of_student, "temperature": t}, of_pair))


class _Divergences(torch.autograd.Function):
    """(divergences, the student's entropies) of rows [n], from hidden states, with the gradient of the first.

    Logits are float32 sums of 16-bit products, as TRL has them: rounded, they would add what rounding of the student's
    and of the teacher's differ by. They exist by chunks of rows, and the backward pass makes them again.
    """

    @staticmethod
    def forward(ctx, *given):
        *tensors, (dtypes, of_student, of_pair) = given
        hidden = tensors[0]
        values, entropies = (torch.empty(len(hidden), dtype=torch.float32, device=hidden.device) for _ in range(2))
        for here, x, y in _pairs(tensors, dtypes):
            values[here] = divergence(x, y, reduction="none", **of_student, **of_pair)
            first = torch.zeros(len(x), dtype=torch.int64, device=x.device)
            out: Any = log_prob(x, first, return_entropy=True, **of_student)
            entropies[here] = out.entropy
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.how = given[-1]
        ctx.mark_non_differentiable(entropies)
        return values, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, dvalues, _):
        if dvalues is None:
            return (None,) * 7
        tensors, (dtypes, of_student, of_pair) = ctx.saved_tensors, ctx.how
        hidden, weight, bias, *_ = tensors
        wanted = zip(ctx.needs_input_grad[:3], (hidden, weight, bias), strict=True)
        dx, dw, db = (
            torch.zeros(each.shape, dtype=torch.float32, device=each.device) if w else None for w, each in wanted
        )
        dtype = dtypes[0]
        lowered = weight.to(dtype)
        for here, x, y in _pairs((hidden, lowered, *tensors[2:]), dtypes):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                total = divergence(x, y, weight=dvalues[here], reduction="sum", **of_student, **of_pair)
            (dlogits,) = torch.autograd.grad(total, x)
            rounded = dlogits.to(dtype)
            if dx is not None:
                write_product(rounded, lowered, dx[here])
            if dw is not None:
                add_product(dw, rounded.t(), hidden[here].to(dtype), torch.float32)
            if db is not None:
                db += dlogits.sum(0)
        found = zip((dx, dw, db), (hidden, weight, bias), strict=True)
        return *(None if d is None else d.to(each.dtype) for d, each in found), *(None,) * 4


def _pairs(tensors: Any, dtypes: tuple[torch.dtype, torch.dtype]) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(rows, the student's logits, the teacher's) of each chunk, in the same two buffers."""
    hidden, weight, *_ = tensors
    step = _LOGITS // max(len(weight), 1)
    step = max(min(step // _ROWS * _ROWS or step, len(hidden)), 1)
    layers = [
        (x, w.to(dtype).t(), bias, torch.empty(step, len(weight), dtype=torch.float32, device=hidden.device))
        for (x, w, bias), dtype in zip((tensors[:3], tensors[3:6]), dtypes, strict=True)
    ]
    for start in range(0, len(hidden), step):
        here = slice(start, min(start + step, len(hidden)))
        both = [write_product(x[here].to(w.dtype), w, buffer[: here.stop - start]) for x, w, _, buffer in layers]
        for logits, (_, _, bias, _) in zip(both, layers, strict=True):
            if bias is not None:
                logits += bias
        yield here, both[0], both[1]


def _products(hidden: Tensor) -> torch.dtype:
    """The dtype of what is multiplied, as autocast has it."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _as_products(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """As linear_log_prob takes them: float32 beside 16 bits is a master, with a gradient of float32."""
    dtype = _products(hidden)
    masters = (dtype,) if dtype == torch.float32 else (dtype, torch.float32)
    w, b = (each if each is None or each.dtype in masters else each.to(dtype) for each in (weight, bias))
    return hidden.to(dtype), w, b  # type: ignore[return-value]


# Why a call is not taken; "" if it is.


def _refused_tensors(device: torch.device, *tensors: Any) -> str:
    for each in tensors:
        if not isinstance(each, Tensor) or not is_plain(type(each)):
            return f"an argument is a {type(each).__name__}, not a plain tensor"
        if each.device.type not in _DEVICES or each.device != device:
            return f"a tensor is on {each.device}"
    return ""


def _refused_layer(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    tensors = [each for each in (hidden, weight, bias) if each is not None]
    refused = _refused_tensors(hidden.device, *tensors)
    for each in tensors:
        if hasattr(each, "ds_id"):
            return "DeepSpeed's ZeRO-3 shards a parameter, which has to be gathered again for the backward pass"
        if not refused and each.dtype not in _DTYPES:
            refused = f"a tensor has {each.dtype}"
    if not refused and (hidden.ndim, weight.ndim) != (2, 2):
        refused = "hidden states are no rows"
    return refused


def _refused_rows(logits: Any, index: Any, temperature: Any, row_mask: Any) -> str:
    if not isinstance(logits, Tensor):
        return "logits are no tensor"
    given = [each for each in (logits, index, row_mask) if each is not None]
    refused = _refused_tensors(logits.device, *given) or _refused_numbers(temperature=temperature)
    if refused:
        return refused
    if logits.dtype not in (*_DTYPES, torch.float64) or index.dtype not in (torch.int64, torch.int32):
        return f"logits have {logits.dtype} and indices {index.dtype}"
    leading = logits.shape[:-1]
    alone = index.shape == leading
    several = row_mask is None and index.ndim == logits.ndim and index.shape[:-1] == leading
    if not logits.numel() or not index.numel() or not (alone or several):
        return "indices are not one or several of each row"
    return "" if row_mask is None or row_mask.shape == leading else "row_mask is not of the rows"


def _refused_pair(student: Any, teacher: Any, labels: Any) -> str:
    if not isinstance(student, Tensor):
        return "logits are no tensor"
    refused = _refused_tensors(student.device, *[each for each in (student, teacher, labels) if each is not None])
    if refused:
        return refused
    if student.dtype not in _DTYPES or teacher.dtype not in _DTYPES:
        return f"logits have {student.dtype} and {teacher.dtype}"
    if student.ndim < 2 or not student.numel() or student.shape != teacher.shape:
        return "logits are not rows of both"
    if labels is not None and labels.shape != student.shape[:-1]:
        return "labels are not of the rows"
    return "the teacher's logits require grad" if torch.is_grad_enabled() and teacher.requires_grad else ""


def _refused_numbers(temperature: Any = 1.0, softcap: Any = None, scale: Any = 1.0) -> str:
    for name, value in {"temperature": temperature, "softcap": 1.0 if softcap is None else softcap}.items():
        if not _is_finite(value) or value <= 0:
            return f"{name} is {value!r}"
    return "" if _is_finite(scale) and scale != 0 else f"scale is {scale!r}"


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < float("inf")


def _is_share(beta: Any) -> bool:
    return _is_finite(beta) and 0 <= beta <= 1


# By module and name. Their modules import them from there.
_SEAMS: dict[str, Callable] = {
    "trl.trainer.utils:_ChunkedLogProbFunction": _log_probs_of_hidden,
    "trl.trainer.utils:selective_log_softmax": _log_probs,
    "trl.trainer.utils:selective_log_softmax_and_entropy": _log_probs_and_entropies,
    "trl.kernels.chunked_divergence:ChunkedDivergenceFunction": _divergences_of_hidden,
    "trl.experimental.gkd.gkd_trainer:GKDTrainer.generalized_jsd_loss": _jsd_of_logits,
}
