"""Divergences of a student's distribution from a teacher's, row by row, with the student's gradient.

Traffic: a mean or sum with a gradient reads both once and writes the gradient in the same pass, if rows are a whole
number of vectors, are not float16, and fit the chip. Over ranks, this needs "peer". Otherwise both are read once (kl,
reverse_kl) or twice (jsd, tvd), and once more in the backward pass, which writes the gradient.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fused_softmax.core.calls import find, keep
from fused_softmax.core.checks import arithmetic_of
from fused_softmax.core.described import described, shape_of
from fused_softmax.core.launched import Launched, compose
from fused_softmax.core.route import Route, checks_values, resolved, route_of
from fused_softmax.ops.losses.divergence_launches import Pair
from fused_softmax.ops.losses.divergence_rows import (
    differentiated,
    of_rows,
    pair_of,
    prepare_reduced,
    reduced,
    referred,
    refused,
    with_rows,
)
from fused_softmax.ops.losses.log_prob import kind_of_numbers
from fused_softmax.ops.losses.log_prob import log_prob as log_probs
from fused_softmax.ops.losses.log_prob import over_ranks as log_probs_over_ranks
from fused_softmax.ops.losses.log_prob_launches import Asked
from fused_softmax.ops.losses.options import EVERY, Divergence, LogProb, check_of_rows, is_reduction
from fused_softmax.ops.losses.over_ranks.divergence import ChosenLogits, rows_over_ranks
from fused_softmax.ops.losses.over_ranks.divergence_peers import summed_by_peers
from fused_softmax.ops.losses.over_ranks.dtensor import divergence_on_shards
from fused_softmax.ranks.dtensor import as_dtensor, mesh_of
from fused_softmax.ranks.gather import peers_of, told_by
from fused_softmax.ranks.groups import Over, Refusing, Shards, Transport, check_over, over_of, shards_of, sizes_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # which PyTorch may be built without

_NAME = "divergence"
_TARGETS = ("target_scale", "target_softcap", "target_temperature")
_NUMBERS = ("beta", "scale", "softcap", "temperature", *_TARGETS)


def divergence(
    input: Tensor,
    target: Tensor,
    *,
    kind: str = "kl",
    beta: float = 0.5,
    scale: float | None = None,
    softcap: float | None = None,
    temperature: float | Tensor | None = None,
    target_scale: float | None = None,
    target_softcap: float | None = None,
    target_temperature: float | Tensor | None = None,
    target_is: str = "logits",
    columns: Tensor | None = None,
    rest: str = "renormalize",
    weight: Tensor | None = None,
    reduction: str = "mean",
    dtype: torch.dtype | None = None,
    group: "ProcessGroup | None" = None,
    n_classes: int | None = None,
    shard_sizes: Sequence[int] | None = None,
    transport: Transport | None = None,
) -> Tensor:
    """The divergence of a student's distribution Q of each row from a teacher's T, as distillation minimises it.

    Neither distribution is ever in memory. The gradient is the student's alone.

    input: the student's logits [..., n_classes]; float32, float16, bfloat16 or float64.
    target: the teacher's rows, of the input's shape and any float dtype; with columns, of theirs. It gets no gradient:
        one that requires it raises RuntimeError.
    kind: "kl" is sum T (log T - log Q), KL(teacher || student); "reverse_kl" is sum Q (log Q - log T). "jsd" is
        beta KL(T || M) + (1 - beta) KL(Q || M) with M = beta T + (1 - beta) Q, and by beta 0 kl, by beta 1 reverse_kl.
        "tvd" is half the sum of |Q - T|. What has no probability adds nothing.
    beta: in [0, 1]; of jsd.
    scale, softcap, temperature: the student's logits are input * scale, then softcap * tanh(of that / softcap), then
        divided by the temperature. That is a number above 0, or a tensor of the leading shape, which gets no gradient.
        Where a tensor's temperature is not above 0, the row is NaN.
    target_scale, target_softcap, target_temperature: the same of the teacher's logits. Of probabilities they raise.
    target_is: whether the target is "logits", "log_probs" or "probs". Probabilities are taken as they are given.
    columns: the classes [..., k] of which the teacher has told, an index of each of the target's [..., k]. One that is
        no class makes the row NaN; on a CPU, and with FUSED_SOFTMAX_CHECK=1 in the environment, it raises IndexError.
    rest: with columns, what becomes of all other classes: "renormalize" drops them, and both distributions are of the
        columns alone; "lump" takes them together as one class more. That needs the teacher's probabilities, as
        "log_probs" or "probs".
    weight: of rows, of the leading shape. mean is sum w l / sum w, sum is sum w l, and none gives w l. A row of weight
        0 has divergence and gradient 0, whatever it holds.
    reduction: "mean", "sum" or "none". The gradient of a mean or sum is written in the forward pass where it can be.
    dtype: of the result; float32 if None, or float64 for float64.

    group: of torch.distributed, over whose ranks the classes lie in shards: each rank gives its own columns of the
        student's logits and of the teacher's rows, in rank order, as many as it has. With columns, these and the
        target's [..., k] are among all classes and whole, the same on all ranks; so are tensors of temperatures and the
        weight. The result is the same on all ranks, to the bit, and is never summed over them. Every rank of the group
        makes the same call. There is no second derivative.
    n_classes, shard_sizes: as cross_entropy's.
    transport: with group: how ranks tell each other at most 6 numbers a row, in two exchanges for jsd and tvd; with
        columns, one for each column, and 2 more for "lump": "collective" or "peer", as log_prob has them. By "peer", a
        mean or sum without columns takes one launch and also writes the gradient, provided that every rank's columns
        are a whole number of 16-byte vectors, at most 0.5 Mi, and neither tensor is float16 or float64.

    DTensors of both may lie in shards of classes or rows; the target goes where the input lies. Temperatures, weight
    and, with columns, these and the target may be plain tensors, the same on all ranks, where no rows lie in shards.
    Where they do, a mean and a sum are Partial.

    A row has the same bits in any batch: how it is summed depends on its length, its dtypes and the options alone.
    Returns the divergence, [] or of the leading shape.
    Raises TypeError, ValueError or RuntimeError for arguments that do not fit, naming the argument; with group, also as
    cross_entropy where ranks differ.

    Hinton et al., "Distilling the Knowledge in a Neural Network" (arXiv 1503.02531); Agarwal et al., "On-Policy
    Distillation of Language Models" (the generalised JSD, arXiv 2306.13649).

    >>> divergence(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, 2.0]]))
    tensor(0.0673)
    >>> divergence(student, teacher, kind="jsd", temperature=2.0, target_temperature=2.0)  # [8, 1024, 151936] each
    """
    key, over = None, None
    if group is not None or n_classes is not None or shard_sizes is not None or transport is not None:
        over = over_of(group, n_classes, shard_sizes, transport)
    numbers = (beta, scale, softcap, temperature, target_scale, target_softcap, target_temperature)
    kinds = _kind_of_numbers(kind, target_is, *numbers)
    if kinds is not None and columns is None and over is None:
        key = kinds, kind, target_is, rest, reduction, dtype, torch.is_grad_enabled()
        t, of_target = _of_rows(temperature), _of_rows(target_temperature)
        call = find(_NAME, key, input, target, weight, t, of_target)
        if call is not None:
            return call(input, target, weight, t, of_target, (kind, target_is, numbers) if kinds else None)
    given = {
        "kind": kind, "beta": beta, "scale": scale, "softcap": softcap, "temperature": temperature,
        "target_scale": target_scale, "target_softcap": target_softcap, "target_temperature": target_temperature,
        "target_is": target_is,
    }  # fmt: skip
    if over is not None:
        return _of_shards(input, target, given, columns, rest, weight, reduction, dtype, over)
    return _divergence(input, target, given, columns, rest, weight, reduction, dtype, key)


def _divergence(input, target, given, columns, rest, weight, reduction, dtype, key):
    options = _checked(input, target, given, columns, rest, weight, reduction, dtype)
    result_dtype = dtype or arithmetic_of(input)
    of_rows = {name: given[name] for name in ("temperature", "target_temperature")} | {"weight": weight}
    both, whole = {"input": input, "target": target}, of_rows
    if columns is not None:
        both, whole = {"input": input}, of_rows | {"target": target, "columns": columns}
    mesh = mesh_of(_NAME, both, whole)
    if mesh is not None:

        def of_rank(input, target, columns, of_rows, shards):
            temperatures = {name: of_rows.get(name, getattr(options, name)) for name in given if "temperature" in name}
            return _rows(input, target, replace(options, **temperatures), columns, rest, of_rows.get("weight"), shards)

        return divergence_on_shards(
            of_rank, as_dtensor(input, mesh), target.detach(), columns, of_rows, reduction, result_dtype
        )
    if columns is not None:
        input, target, options = _of_columns(input, target, columns, rest, options, weight, None)
    if _route_of(input, target, options) is not Route.KERNEL:
        return reduced(rows_of_pair(input, target, options, weight), weight, reduction).to(result_dtype)
    call = _prepare_call(input, target, weight, reduction, result_dtype, options)
    t, of_target = _of_rows(options.temperature), _of_rows(options.target_temperature)
    if key is not None:
        keep(call, _NAME, key, input, target, weight, t, of_target)
    return call(input, target, weight, t, of_target, None)


def _prepare_call(
    input: Tensor, target: Tensor, weight: Tensor | None, reduction: str, dtype: torch.dtype, options: Divergence
) -> Launched:
    """The call for tensors like these: call(input, target, weight, temperature, target_temperature, given).

    The temperatures are those of rows. given: the kind, what the target is and the numbers of a later call; None for
    those of the options.
    """
    flat, alike = input.ndim == 2, options.with_numbers()
    prepared = prepare_reduced(pair_of(*_as_rows(input, target), options), alike, weight, reduction)

    def build(_, run):
        def call(input, target, weight, temperature, target_temperature, given):
            x, y = (input, target) if flat else _as_rows(input, target)
            pair = Pair(x, y, None, of_rows(temperature), of_rows(target_temperature))
            found = run(pair, alike if given is None else _by_value(*given), weight)
            if reduction == "none" and not flat:
                found = found.view(input.shape[:-1])
            return found if found.dtype == dtype else found.to(dtype)

        return call

    return compose(build, prepared, n=input.shape[0] if flat else None, by_row=True)


def _as_rows(input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return input.reshape(-1, input.shape[-1]), target.reshape(-1, input.shape[-1])


def _by_value(kind: str, target_is: str, numbers: tuple) -> Divergence:
    """The options of a call whose numbers need no check, without temperatures of rows."""
    return _of_values(kind, target_is, *[None if isinstance(each, Tensor) else each for each in numbers])


@lru_cache(256)
def _of_values(kind: str, target_is: str, *numbers: Any) -> Divergence:
    return _options(dict(zip(_NUMBERS, numbers, strict=True)) | {"kind": kind, "target_is": target_is})


def _of_shards(input, target, given, columns, rest, weight, reduction, dtype, over: Over) -> Tensor:
    """A call whose classes lie over the ranks of a group."""
    with Refusing(_NAME, over, input, target):
        check_over(_NAME, over, input, target, columns, weight, given["temperature"], given["target_temperature"])
        options = _checked(input, target, given, columns, rest, weight, reduction, dtype, over)
        input, target = resolved(input, target)
        sizes = sizes_of(_NAME, over, input.shape[-1])
    alike = {"operation": _NAME, "dtype": input.dtype, "target_dtype": target.dtype, **options.asked(), "result": dtype}
    alike["columns_of_rows"] = None if columns is None else (columns.shape[-1], rest)
    shards = shards_of(_NAME, sizes, prod(input.shape[:-1]), over, input.device, alike, columns)
    peers, result_dtype = peers_of(_NAME, over.transport, over.group, input, target), dtype or arithmetic_of(input)
    if peers is not None and columns is None and reduction != "none":
        found = summed_by_peers(input, target, options, weight, reduction, result_dtype, shards, peers)
        if found is not None:
            return found
    rows = _rows(input, target, options, columns, rest, weight, told_by(peers, _NAME, shards))
    return reduced(rows, weight, reduction).to(result_dtype)


def _checked(input, target, given, columns, rest, weight, reduction, dtype, over: Over | None = None) -> Divergence:
    """The options of a call, with a group of this rank's columns; or an error that names the argument."""
    shape = _check_student(input, over)
    _check_target(input, target)
    options = check_divergence(_NAME, input, shape, given, weight, reduction, dtype)
    _check_shapes(input, shape, target, given, columns, rest)
    return options


def _rows(
    input: Tensor, target: Tensor, options: Divergence, columns: Tensor | None, rest: str, weight: Tensor | None,
    shards: Shards | None = None,
) -> Tensor:  # fmt: skip
    """The divergence of every row, in the leading shape. shards: of the classes, where this rank has a part of them."""
    if columns is not None:
        input, target, options = _of_columns(input, target, columns, rest, options, weight, shards)
    elif shards is not None:
        return rows_over_ranks(input, target, options, shards)
    return rows_of_pair(input, target, options, weight)


def _kind_of_numbers(
    kind, target_is, beta, scale, softcap, temperature, target_scale, target_softcap, target_temperature
) -> tuple | None:
    """What a kept call depends on of numbers that change from call to call; None if one has to be checked.

    (), if there is no number but a beta of 0.5, and no temperature.
    """
    if type(beta) is not float:
        return None
    of_teacher = target_scale is not None or target_softcap is not None or target_temperature is not None
    if beta == 0.5 and scale is None and softcap is None and temperature is None and not of_teacher:
        return ()
    if not 0.0 <= beta <= 1.0 or (kind == "jsd" and beta in (0.0, 1.0)) or (of_teacher and target_is != "logits"):
        return None
    student = kind_of_numbers(scale, softcap, temperature)
    teacher = kind_of_numbers(target_scale, target_softcap, target_temperature)
    return None if student is None or teacher is None else (student, teacher)


def _of_rows(temperature: Any) -> Tensor | None:
    """A temperature that is a tensor."""
    return temperature if isinstance(temperature, Tensor) else None


def _check_student(input: Any, over: Over | None = None) -> tuple[int, ...]:
    """The shape of logits, with a group that of whole rows; or an error."""
    if not isinstance(input, Tensor):
        raise TypeError(f"{_NAME}: input must be a Tensor, not {type(input).__name__}")
    if input.is_nested or input.layout != torch.strided:
        raise RuntimeError(f"{_NAME}: input must be a dense strided tensor, got {input.layout}")
    if not input.dtype.is_floating_point:
        raise NotImplementedError(f"{_NAME}: input must be of a float dtype, got {input.dtype}")
    columns = input.shape[-1] if input.ndim else 0
    if over is not None and input.ndim:
        columns = over.n_classes or sum(sizes_of(_NAME, over, columns))
    if columns == 0:
        raise ValueError(f"{_NAME}: input must have at least one class, got shape {tuple(input.shape)}")
    return *input.shape[:-1], columns


def _check_target(input: Tensor, target: Any) -> None:
    if not isinstance(target, Tensor):
        raise TypeError(f"{_NAME}: target must be a Tensor, not {type(target).__name__}")
    if target.is_nested or target.layout != torch.strided:
        raise RuntimeError(f"{_NAME}: target must be a dense strided tensor, got {target.layout}")
    if not target.is_floating_point():
        raise RuntimeError(f"{_NAME}: target must be of a float dtype, got {target.dtype}")
    if target.device != input.device:
        raise RuntimeError(f"{_NAME}: target must be on the input's device {input.device}, got {target.device}")
    if target.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{_NAME}: target requires grad, and a teacher gets none; give target.detach()")


def check_divergence(
    name: str, input: Tensor, shape: tuple[int, ...], given: dict[str, Any], weight: Any, reduction: Any, dtype: Any
) -> Divergence:
    """The options of a call of logits of a shape, made of the input or these; or an error that names the argument."""
    options = _checked_options(name, given)
    for argument in ("temperature", "target_temperature"):
        check_of_rows(name, input, shape, argument, given[argument])
    is_reduction(name, "reduction", reduction)
    if weight is not None and not isinstance(weight, Tensor):
        raise TypeError(f"{name}: weight must be a Tensor, not {type(weight).__name__}")
    if isinstance(weight, Tensor) and weight.dtype == torch.bool:
        raise RuntimeError(f"{name}: weight must be of a float dtype, got torch.bool; give mask.float()")
    check_of_rows(name, input, shape, "weight", weight)
    if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
        raise TypeError(f"{name}: dtype must be a float torch.dtype, got {described(dtype)}")
    return options


def _checked_options(name: str, given: dict[str, Any]) -> Divergence:
    """The options, whose tensors are yet to be checked; or an error that names the argument."""
    plain = all(each is None or type(each) in (float, str) for each in given.values())
    return (_found_options if plain else _made_options)(name, tuple(given.items()))


def _made_options(name: str, items: tuple[tuple[str, Any], ...]) -> Divergence:
    given = dict(items)
    for argument, option in Divergence.OPTIONS.items():
        if option.check is not None:
            option.check(name, argument, given[argument])
    if given["target_is"] != "logits":
        for argument in _TARGETS:
            if given[argument] is not None:
                raise ValueError(f'{name}: {argument} is for targets of logits, got target_is="{given["target_is"]}"')
    return _options(given)


_found_options = lru_cache(256)(_made_options)


def _check_shapes(input, shape, target, given, columns, rest) -> None:
    if rest not in ("renormalize", "lump"):
        raise ValueError(f'{_NAME}: rest must be "renormalize" or "lump", got {described(rest)}')
    expected = tuple(input.shape)
    if columns is not None:
        expected = _check_columns(input, shape, columns, rest, given)
    elif rest != "renormalize":
        raise ValueError(f"{_NAME}: rest needs columns, got columns=None")
    if tuple(target.shape) != expected:
        of = "the input's" if columns is None else "the columns'"
        raise ValueError(f"{_NAME}: target must have {of} shape {expected}, got {tuple(target.shape)}")


def _options(given: dict[str, Any]) -> Divergence:
    """The options with numbers for those that were left out, and with numbers as floats."""
    numbers = {
        name: value if isinstance(value, Tensor) else 1.0 if value is None else float(value)
        for name, value in given.items()
        if name.endswith(("scale", "temperature"))
    }
    beta = float(given["beta"])
    kind = {0.0: "kl", 1.0: "reverse_kl"}.get(beta, "jsd") if given["kind"] == "jsd" else given["kind"]
    caps = {name: None if given[name] is None else float(given[name]) for name in ("softcap", "target_softcap")}
    return Divergence(**(given | numbers | caps | {"beta": beta, "kind": kind}))


def _check_columns(input: Tensor, shape: tuple[int, ...], columns: Any, rest: str, given: dict) -> tuple[int, ...]:
    """The shape of the columns, or an error."""
    if not isinstance(columns, Tensor):
        raise TypeError(f"{_NAME}: columns must be a Tensor, not {type(columns).__name__}")
    if columns.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(f"{_NAME}: columns must be of int64 or int32, got {columns.dtype}")
    if columns.device != input.device:
        raise RuntimeError(f"{_NAME}: columns must be on the input's device {input.device}, got {columns.device}")
    found = tuple(columns.shape)
    if len(found) != len(shape) or found[:-1] != shape[:-1] or found[-1] == 0:
        raise ValueError(f"{_NAME}: columns must have shape {shape_of(*shape[:-1], 'k')}, got {found}")
    if rest == "lump" and given["target_is"] == "logits":
        raise ValueError(f'{_NAME}: rest="lump" takes a teacher\'s probabilities: target_is="log_probs" or "probs"')
    if checks_values(input, columns):
        wrong = (columns < 0) | (columns >= shape[-1])
        if wrong.any():
            worst = int(columns[wrong][0])
            raise IndexError(f"{_NAME}: columns has {worst}, which is out of range [0, {shape[-1] - 1}]")
    return found


def _of_columns(
    input, target, columns, rest, options: Divergence, weight: Tensor | None, shards: Shards | None
) -> tuple[Tensor, Tensor, Divergence]:
    """(the student's logits and the teacher's rows at some columns, and of the rest if it is lumped; their options).

    weight: of rows; those of weight 0 may hold anything.
    """
    columns = columns.long()
    if rest == "renormalize":
        if shards is not None:
            n = prod(input.shape[:-1])
            of_rows = input.reshape(n, input.shape[-1]), columns.reshape(n, columns.shape[-1])
            z: Any = ChosenLogits.apply(*of_rows, shards).view(columns.shape)
        else:
            inside = (columns >= 0) & (columns < input.shape[-1])
            z = input.gather(-1, torch.where(inside, columns, 0))
            z = torch.where(inside, z, float("nan"))
        if options.target_is != "logits":  # a softmax of these is their share among the columns
            target = target.to(arithmetic_of(target))
            target = target.log() if options.target_is == "probs" else target
        return z, target, replace(options, target_is="logits")
    of_student = LogProb(-1, options.scale, options.softcap, options.temperature)
    wrong = columns == -1
    if weight is not None:  # log_prob ignores such rows then, where 0 times NaN would be a gradient
        left_out = (weight.detach() == 0).unsqueeze(-1)
        columns, wrong = torch.where(left_out, -1, columns), wrong & ~left_out
    if shards is not None:
        log_q: Any = log_probs_over_ranks(input, columns, of_student, EVERY, Asked(), False, None, shards)
    else:
        log_q = log_probs(input, columns, **of_student.options())
    log_q = torch.where(wrong, float("nan"), log_q)
    log_q = torch.cat([log_q, _log_of_rest(log_q)], -1)
    t = target.to(log_q.dtype)
    t = t.exp() if options.target_is == "log_probs" else t
    # If a teacher leaves nothing, reverse_kl would be infinite because of what rounding hides.
    least = torch.finfo(t.dtype).eps if options.kind == "reverse_kl" else 0.0
    t = torch.cat([t, (1.0 - t.sum(-1, keepdim=True)).clamp_min(least)], -1)
    return log_q, t, Divergence(kind=options.kind, beta=options.beta, target_is="probs")


def _log_of_rest(log_q: Tensor) -> Tensor:
    """The logarithm of what columns leave of 1; if they leave nothing, of the least that rounding could hide."""
    left = 1.0 - log_q.exp().sum(-1, keepdim=True)
    return left.clamp_min(torch.finfo(log_q.dtype).eps).log()


def rows_of_pair(input: Tensor, target: Tensor, options: Divergence, weight: Tensor | None = None) -> Tensor:
    """The divergence of every row, in the leading shape. Rows of weight 0 are ignored."""
    target, shape = target.detach(), input.shape[:-1]
    route = _route_of(input, target, options)
    if route is Route.COMPOSED:
        return referred(input, target, options, None if weight is None else weight.detach() != 0)
    pair = pair_of(*_as_rows(input, target), options)
    if route is Route.OPERATOR:
        operator = torch.ops.fused_softmax.divergence.default
        return operator(pair.x, pair.y, *with_rows(options, pair).traced())[0].view(shape)
    return differentiated(pair, options.with_numbers()).view(shape)


def _route_of(input: Tensor, target: Tensor, options: Divergence) -> Route:
    temperatures = [each for each in (options.temperature, options.target_temperature) if isinstance(each, Tensor)]
    return route_of(_NAME, input, target, *temperatures, refused=refused(input, target, options), batches=False)
