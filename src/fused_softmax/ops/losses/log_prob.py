"""Log-probabilities of chosen classes, with the entropy and the lse of each row, and the gradient of all three.

log_prob_i = z_(t_i) - lse,  entropy = lse - sum_c p_c z_c,  z = softcap(x * scale) / temperature.
Traffic: the logits are read once in the forward pass (MN), read once and written once in the backward pass (2MN).
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.core.calls import bump_version, find, keep
from fused_softmax.core.checks import DTYPES, arithmetic_of
from fused_softmax.core.described import described, shape_of
from fused_softmax.core.launched import Launched, compose
from fused_softmax.core.no_gradient import refuse, refusing, unpacked
from fused_softmax.core.route import Route, batched, checks_values, needs_grad, resolved, route_of
from fused_softmax.ops.losses import reference
from fused_softmax.ops.losses.cross_entropy import CHECK, check_targets, check_targets_of_all
from fused_softmax.ops.losses.launches import with_whole_rows
from fused_softmax.ops.losses.log_prob_launches import (
    HAVE,
    STATISTICS,
    STATS,
    Asked,
    GivenLogits,
    Gradients,
    aligned,
    backward,
    given_of,
    gradient_key,
    prepare_log_probs,
)
from fused_softmax.ops.losses.options import (
    EVERY,
    Kept,
    LogProb,
    check_kept,
    check_lists,
    check_of_rows,
)
from fused_softmax.ops.losses.output import shaped
from fused_softmax.ops.losses.over_ranks.dtensor import log_prob_on_shards
from fused_softmax.ops.losses.over_ranks.log_prob import LogProbOverRanks, OfCall
from fused_softmax.ops.losses.overwritten import check_overwritten
from fused_softmax.ops.softmax.scores import kind_of_scale
from fused_softmax.ranks.dtensor import as_dtensor, mesh_of
from fused_softmax.ranks.gather import peers_of, told_by
from fused_softmax.ranks.groups import (
    Over,
    Refusing,
    Shards,
    Transport,
    check_over,
    checksum,
    over_of,
    shards_of,
    sizes_of,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # which PyTorch may be built without

_NAME = "log_prob"
_NOTHING_MORE = (None,) * 5  # entropy, lse and statistics
_INDICES = (torch.int64, torch.int32, torch.uint8)


class LogProbStats(NamedTuple):
    """Facts of every row, without a gradient; None for those that nobody asked for. 0 where no target of a row counts.

    log_sum_sq_probs: log sum_c p_c ** 2, in the leading shape. mean_logits: the mean of the finished logits, likewise.
    is_top1: bool in the targets' shape, whether a target is the likeliest class; of equals the first is.

    >>> log_prob(torch.tensor([[0.0, 2.0]]), torch.tensor([1]), return_stats=("is_top1",)).stats.is_top1
    tensor([True])
    """

    # `| Any`, and not `| None`: a type checker then lets callers who asked for it use it.
    log_sum_sq_probs: Tensor | Any = None
    mean_logits: Tensor | Any = None
    is_top1: Tensor | Any = None


class LogProbOutput(NamedTuple):
    """The log-probabilities, and what else was asked for; None for the rest.

    log_prob: of the targets' shape. entropy, lse: of the leading shape. stats: a LogProbStats.

    >>> log_prob(torch.tensor([[0.0, 2.0]]), torch.tensor([1]), return_entropy=True).entropy
    tensor([0.3653])
    """

    log_prob: Tensor
    # `| Any`, and not `| None`: a type checker then lets callers who asked for it use it.
    entropy: Tensor | Any = None
    lse: Tensor | Any = None
    stats: LogProbStats | Any = None


def log_prob(
    input: Tensor,
    target: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    temperature: float | Tensor | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    return_lse: bool = False,
    return_stats: Sequence[str] = (),
    kept: tuple[Tensor, Tensor] | Tensor | None = None,
    inplace_backward: bool = False,
    dtype: torch.dtype | None = None,
    group: "ProcessGroup | None" = None,
    n_classes: int | None = None,
    shard_sizes: Sequence[int] | None = None,
    transport: Transport | None = None,
) -> Tensor | LogProbOutput:
    """The log-probability of a chosen class of each row of logits, and on request the entropy and lse of the row.

    The same as log_softmax(logits).gather(-1, target), which reads and writes all logits several times.
    Log-probabilities, entropy and lse all have a gradient. The backward pass makes the logits' gradient from all three,
    in one read and one write.

    input: logits [..., n_classes]; float32, float16, bfloat16 or float64.
    target: class indices of the leading shape, of int64, int32 or uint8; or [..., k], for k classes of each row. One
        that is neither a class nor ignore_index makes its log-probability and its row of the gradient NaN, with kept
        at the kept columns. On a CPU, and with FUSED_SOFTMAX_CHECK=1 in the environment, it raises IndexError.
    scale, softcap, temperature: the logits are input * scale, then softcap * tanh(of that / softcap), then divided by
        the temperature. That is a number above 0, or a tensor of the leading shape, which gets no gradient. Where a
        tensor's temperature is not above 0, the row's results are NaN.
    ignore_index: targets of this value have log-probability 0 and no gradient. A row all of whose targets are ignored
        has entropy, lse, statistics and gradient 0, whatever its logits hold.
    return_entropy: adds the entropy of every row in nats, of the leading shape; a logit of -inf adds 0 to it.
    return_lse: adds log sum exp of every row, after scale, softcap and temperature.
    return_stats: adds a LogProbStats with those named of "log_sum_sq_probs", "mean_logits" and "is_top1". A backward
        pass through one raises RuntimeError.
    kept: the columns over which each row is normalised, as what a sampler left of it; all others have probability 0 and
        gradient 0, and are not looked at. Either a pair (ids, offsets), each int64 or int32: row r, of all leading dims
        flattened, has ids[offsets[r]:offsets[r + 1]], distinct and in any order; ids is [n_kept], offsets [n_rows + 1]
        from 0 on. Or an int32 bitmask [..., ceil(n_classes / 32)]: bit c % 32 of word c // 32 is column c. A target
        outside has log-probability -inf and no gradient. A row over nothing, or over logits of -inf alone, has lse
        -inf, and entropy and gradient 0; its log_sum_sq_probs is -inf, is_top1 False, and mean_logits over nothing 0.
        Offsets that do not rise from 0 to at most n_kept, or ids that are no class, make the row's results and gradient
        NaN. On a CPU, and with FUSED_SOFTMAX_CHECK=1 in the environment, they raise IndexError.
    inplace_backward: the backward pass writes the gradient over the logits and allocates nothing. They are then lost:
        there is one backward pass and no second derivative. A leaf raises, as for torch's operations in place. Compiled
        code allocates it all the same.
    dtype: of the results; float32 if None, or float64 for float64.

    group: of torch.distributed, over whose ranks the classes lie in shards: each rank gives its own columns of the
        logits, in rank order, as many as it has. Targets and kept are of the classes of all, the same on all ranks; so
        are a tensor of temperatures and all results, which have the same bits. Each rank's incoming gradients are those
        of these results, which are never summed over ranks. Every rank of the group makes the same call. There is no
        second derivative.
    n_classes, shard_sizes: as cross_entropy's.
    transport: with group: how ranks tell each other at most 6 numbers a row and 2 a target: "collective" by one
        all_gather of the group's backend; "peer" by memory that GPUs of one host write into each other's, in a launch
        of its own. None takes "peer" on up to four GPUs where it can.

    A DTensor may lie in shards of its classes or rows. Results are DTensors too, which lie as the rows do. Targets,
    temperatures and kept may be plain tensors, the same on all ranks, where no rows lie in shards. A list of kept
    columns is of all rows, and the same on all ranks, wherever rows lie.

    The forward pass gives a row the same bits in any batch: how it is summed depends on its length, its dtype and the
    options alone. Rows whose size is no multiple of 16 bytes are read element by element, which takes longer.
    Returns a Tensor of the targets' shape; a LogProbOutput if more was asked for.
    Raises TypeError, ValueError or RuntimeError for arguments that do not fit, naming the argument; with group, also as
    cross_entropy where ranks differ.

    A use: Schulman et al., "Proximal Policy Optimization Algorithms" (arXiv 1707.06347).

    >>> log_prob(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([2]))
    tensor([-0.4076])
    >>> log_prob(logits, tokens, temperature=0.7, return_entropy=True).entropy  # [8, 1024, 151936], [8, 1024]
    >>> log_prob(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([1]), kept=(torch.tensor([0, 1]), torch.tensor([0, 2])))
    tensor([-0.3133])
    """
    if group is not None or n_classes is not None or shard_sizes is not None or transport is not None:
        options = {"scale": scale, "softcap": softcap, "temperature": temperature, "ignore_index": ignore_index}
        asked, over = (return_entropy, return_lse, return_stats), over_of(group, n_classes, shard_sizes, transport)
        return _of_shards(input, target, options, asked, kept, inplace_backward, dtype, over)
    key = None
    numbers = kind_of_numbers(scale, softcap, temperature)
    of_kept = () if kept is None else _kind_of_kept(kept, input)
    told = type(ignore_index) is int and type(return_stats) is tuple
    if numbers is not None and of_kept is not None and told and not CHECK:
        of_call = ignore_index, return_entropy, return_lse, return_stats, inplace_backward, dtype
        key = numbers, of_call, of_kept, torch.is_grad_enabled()
        of_rows = temperature if isinstance(temperature, Tensor) else None
        call = find(_NAME, key, input, target, of_rows, kept if isinstance(kept, Tensor) else None)
        if call is not None:
            return call(input, target, scale, softcap, temperature, kept)
    options = {"scale": scale, "softcap": softcap, "temperature": temperature, "ignore_index": ignore_index}
    wanted = wanted_of(return_entropy, return_lse, return_stats, _NAME)
    return _log_prob(input, target, options, wanted, kept, inplace_backward, dtype, key)


def kind_of_numbers(scale: Any, softcap: Any, temperature: Any) -> tuple | None:
    """What a kept call depends on of numbers that change from call to call; None if one has to be checked."""
    if scale is None and softcap is None and temperature is None:
        return ()
    of_all = 1.0 if temperature is None or isinstance(temperature, Tensor) else temperature
    numbers = of_all, 1.0 if scale is None else scale, 1.0 if softcap is None else softcap
    if not all(type(each) is float and 0.0 < abs(each) < float("inf") for each in numbers):
        return None
    if of_all < 0 or numbers[2] < 0:
        return None
    return kind_of_scale(numbers[1] / of_all), softcap is not None


def _kind_of_kept(kept: Any, input: Any) -> tuple | None:
    """What a kept call depends on of the columns over which rows are normalised; None where they want a check.

    Of a bitmask the guard sees the rest. The length of a list is another in each call. Where it lies does not matter:
    no access to it is wider than an element.
    """
    if isinstance(kept, Tensor):
        return ()
    if torch.compiler.is_compiling() or type(kept) is not tuple or len(kept) != 2:
        return None
    ids, offsets = kept
    if type(ids) is not Tensor or type(offsets) is not Tensor or not isinstance(input, Tensor) or not input.numel():
        return None
    fits = ids.ndim == offsets.ndim == 1 and offsets.shape[0] == input.numel() // input.shape[-1] + 1
    return Kept(ids, offsets).kind if fits and ids.device == offsets.device == input.device else None


def wanted_of(entropy: bool, lse: bool, stats: Any, name: str) -> Asked:
    """What the call of a function wants beside log-probabilities."""
    if isinstance(stats, str) or not isinstance(stats, Sequence):
        raise TypeError(f"{name}: return_stats must be a sequence of names, not {described(stats)}")
    for each in stats:
        if each not in STATS:
            raise ValueError(f"{name}: return_stats must be names among {', '.join(STATS)}, got {described(each)}")
    return Asked(bool(entropy), bool(lse), *(each in stats for each in STATS))


def _of_shards(input, target, given, asked, kept, inplace, dtype, over: Over) -> Tensor | LogProbOutput:
    """A call whose classes lie over the ranks of a group."""
    with Refusing(_NAME, over, input, target):
        check_over(_NAME, over, input, target, given["temperature"], *tensors_of_kept(kept).values())
        entropy, lse, stats = asked
        wanted = wanted_of(entropy, lse, stats, _NAME)
        options = _checked(input, target, given, dtype, over)
        (input,) = resolved(input)
        if inplace and needs_grad(input):
            _check_inplace(input)
        sizes = sizes_of(_NAME, over, input.shape[-1])
        if checks_values(input, target):
            check_targets_of_all(_NAME, target, sizes, over, options.ignore_index)
        columns = checked_kept(_NAME, kept, input, (*input.shape[:-1], over.n_classes or sum(sizes)))
    alike = {"operation": _NAME, "dtype": input.dtype, **options.asked(), "wanted": tuple(wanted), "result": dtype}
    alike["targets"] = target.shape[-1] if target.ndim == input.ndim else None
    alike["kept"] = told_of_kept(columns)
    shards = shards_of(_NAME, sizes, prod(input.shape[:-1]), over, input.device, alike, target)
    peers = peers_of(_NAME, over.transport, over.group, input, target)
    return over_ranks(input, target, options, columns, wanted, inplace, dtype, told_by(peers, _NAME, shards))


def tensors_of_kept(kept: Any) -> dict[str, Any]:
    """The tensors of kept by the names that errors give them, unchecked."""
    return dict(zip(("kept ids", "kept offsets"), kept, strict=False)) if isinstance(kept, tuple) else {"kept": kept}


def checked_kept(name: str, kept: Any, input: Tensor, shape: tuple[int, ...]) -> Kept:
    """The Kept of whole logits of a shape, made of the input or equal to it. It checks values that it may read."""
    if kept is None:
        return EVERY
    check_kept(name, kept, input, shape)
    columns = Kept.of(kept)
    if checks_values(input, *columns[:2]):
        check_lists(name, columns, shape[-1])
    return columns


def told_of_kept(columns: Kept) -> tuple | None:
    """What every rank of a group has to give alike of kept; under FUSED_SOFTMAX_CHECK=1 also its values."""
    given = [each for each in columns[:3] if each is not None]
    if not given:
        return None
    return "bitmask" if columns.ids is None else "list", *([checksum(each) for each in given] if CHECK else ())


def over_ranks(
    input: Tensor, target: Tensor, options: LogProb, columns: Kept, wanted: Asked, inplace: bool,
    dtype: torch.dtype | None, shards: Shards,
) -> Tensor | LogProbOutput:  # fmt: skip
    """The results for logits [..., columns] of this rank's shard, with targets and kept columns of whole rows."""
    leading, (options, temperature) = input.shape[:-1], split(options, input)
    n, k = prod(leading), target.shape[-1] if target.ndim == input.ndim else 1
    rows, targets = input.reshape(n, input.shape[-1]), target.reshape(n, k).contiguous()
    of_call = OfCall(options, shards, wanted, inplace and needs_grad(input))
    found = LogProbOverRanks.apply(rows, targets, temperature, columns, of_call)
    return output_of(found, wanted, target.shape, leading, dtype or arithmetic_of(input))


def of_checked(input, target, given, wanted, dtype, kept=None, inplace: bool = False) -> Tensor | LogProbOutput:
    """The public function, for options that were checked."""
    return log_prob(
        input, target, **given, return_entropy=wanted.entropy, return_lse=wanted.lse,
        return_stats=tuple(name for name in STATS if getattr(wanted, name)), kept=kept, inplace_backward=inplace,
        dtype=dtype,
    )  # fmt: skip


def _log_prob(input, target, given, wanted, kept, inplace, dtype, key):
    options = _checked(input, target, given, dtype)
    of_rows = {"target": target, "temperature": options.temperature, **tensors_of_kept(kept)}
    mesh = mesh_of(_NAME, {"input": input}, of_rows)
    columns = checked_kept(_NAME, kept, input, tuple(input.shape))
    if mesh is not None:
        if checks_values(input, target):
            check_targets(_NAME, target, input.shape[-1], options.ignore_index)
        if inplace and needs_grad(input):
            check_overwritten(_NAME, input)

        def of_rank(input, target, temperature, kept, shards):
            if shards is None:
                return of_checked(input, target, given | {"temperature": temperature}, wanted, dtype, kept, inplace)
            of_shard = replace(options, temperature=temperature)
            columns = checked_kept(_NAME, kept, input, (*input.shape[:-1], shards.n_classes))
            return over_ranks(input, target, of_shard, columns, wanted, inplace, dtype, shards)

        return log_prob_on_shards(of_rank, as_dtensor(input, mesh), target, options.temperature, kept)
    result_dtype = dtype or arithmetic_of(input)
    if inplace and needs_grad(input):
        _check_inplace(input)
    temperature = options.temperature if isinstance(options.temperature, Tensor) else None
    tensors = [each for each in (input, target, temperature, *columns[:3]) if each is not None]
    route = route_of(_NAME, *tensors, refused=refused(input, target, options), batches=False)
    if checks_values(input, target):
        check_targets(_NAME, target, input.shape[-1], options.ignore_index)
    if route is Route.OPERATOR:
        return _traced(input, target, options, columns, wanted, result_dtype)
    if route is Route.COMPOSED:
        return _composed(input, target, options, columns, wanted, result_dtype)
    call = _prepare_call(input, target, options, columns, wanted, inplace, result_dtype)
    if key is not None:
        keep(call, _NAME, key, input, target, temperature, kept if isinstance(kept, Tensor) else None)
    return call(input, target, given["scale"], given["softcap"], given["temperature"], kept)


def _checked(input, target, given, dtype, over: Over | None = None) -> LogProb:
    if not isinstance(input, Tensor):
        raise TypeError(f"{_NAME}: input must be a Tensor, not {type(input).__name__}")
    if input.is_nested or input.layout != torch.strided:
        raise RuntimeError(f"{_NAME}: input must be a dense strided tensor, got {input.layout}")
    if not input.dtype.is_floating_point:
        raise NotImplementedError(f"{_NAME}: input must be of a float dtype, got {input.dtype}")
    if input.ndim == 0:
        raise ValueError(f"{_NAME}: input must have a class dim, got shape ()")
    columns = input.shape[-1] if over is None else sum(sizes_of(_NAME, over, input.shape[-1]))
    return checked(input, (*input.shape[:-1], columns), target, given, dtype, _NAME)


def checked(
    input: Tensor, shape: tuple[int, ...], target: Any, given: dict[str, Any], dtype: Any, name: str
) -> LogProb:
    """The options of a call of logits of a shape, made of the input or these; or an error that names the argument."""
    if shape[-1] == 0:
        raise ValueError(f"{name}: input must have at least one class, got shape {shape}")
    if not isinstance(target, Tensor):
        raise TypeError(f"{name}: target must be a Tensor, not {type(target).__name__}")
    if target.is_nested or target.layout != torch.strided:
        raise RuntimeError(f"{name}: target must be a dense strided tensor, got {target.layout}")
    if target.dtype not in _INDICES:
        raise RuntimeError(f"{name}: target must be of int64, int32 or uint8, got {target.dtype}")
    leading = shape[:-1]
    several = target.ndim == len(shape) and target.shape[-1] > 0
    if tuple(target.shape[: len(leading)]) != leading or not (target.ndim == len(leading) or several):
        raise ValueError(
            f"{name}: target must have shape {leading} or {shape_of(*leading, 'k')} for logits of shape {shape}, "
            f"got {tuple(target.shape)}"
        )
    if target.device != input.device:
        raise RuntimeError(f"{name}: target must be on the input's device {input.device}, got {target.device}")
    for argument, option in LogProb.OPTIONS.items():
        if option.check is not None:
            option.check(name, argument, given[argument])
    temperature = given["temperature"]
    check_of_rows(name, input, shape, "temperature", temperature)
    if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
        raise TypeError(f"{name}: dtype must be a float torch.dtype, got {described(dtype)}")
    return _options(given["ignore_index"], given["scale"], given["softcap"], temperature)


def _options(ignore_index, scale, softcap, temperature) -> LogProb:
    """The options with numbers for those that were left out, and with numbers as floats."""
    if not isinstance(temperature, Tensor):
        temperature = 1.0 if temperature is None else float(temperature)
    scale = 1.0 if scale is None else float(scale)
    return LogProb(ignore_index, scale, None if softcap is None else float(softcap), temperature)


def refused(input: Tensor, target: Tensor, options: LogProb) -> str:
    """Why the kernels do not take a call; "" if they do."""
    if input.dtype not in DTYPES:
        return f"no kernel has {input.dtype}"
    if options.scale == 0:
        return "scale is 0"
    return "" if input.numel() and target.numel() else "there are no logits"


def _check_inplace(input: Tensor) -> None:
    check_overwritten(_NAME, input)
    if not input.is_contiguous():
        raise RuntimeError(f"{_NAME}: inplace_backward takes contiguous logits")


def _prepare_call(
    input: Tensor, target: Tensor, options: LogProb, columns: Kept, wanted: Asked, inplace: bool, dtype: torch.dtype
) -> Launched:
    """The call for tensors like these: call(input, target, scale, softcap, temperature, kept)."""
    differentiates, n_classes, ignore_index = needs_grad(input), input.shape[-1], options.ignore_index
    asked, several, alone = wanted._replace(states=differentiates), target.ndim == input.ndim, not any(wanted[:-1])
    temperature = options.temperature if isinstance(options.temperature, Tensor) else None
    alike = options.with_number()
    flat = input.ndim == 2
    given = given_of(*_as_rows(input, target, temperature, columns), alike, columns)
    is_aligned = given.x.data_ptr() == input.data_ptr()
    overwrites = inplace and differentiates
    as_is = alone and flat and dtype == arithmetic_of(input)

    def build(n, run):
        def call(input, target, scale, softcap, temperature, kept):
            if overwrites:  # of two tensors alike, one may be a leaf
                _check_inplace(input)
            options, of_rows = alike, None
            if scale is not None or softcap is not None or temperature is not None:
                options, of_rows = _split(_options(ignore_index, scale, softcap, temperature))
            if flat:  # targets of a shape in which those of the prepared call are
                rows, targets = input, target
            else:
                rows, targets = input.reshape(-1, n_classes), target.reshape(-1, target.shape[-1] if several else 1)
            how = run, options, is_aligned, inplace, alone
            columns = EVERY if kept is None else Kept.of(kept)
            if differentiates:
                found = _apply(rows, targets, of_rows, columns, how)
                if alone:
                    found = (found, *_NOTHING_MORE)
            else:
                found = _run(rows, targets, of_rows, columns, how)[1][2:]
            if as_is:
                return found[0]
            leading = input.shape[:-1]
            return output_of(found, wanted, target.shape if several else leading, leading, dtype)

        return call

    prepared = prepare_log_probs(given, alike, asked)
    return compose(build, prepared, n=input.shape[0] if input.ndim == 2 else None, by_row=True)


def _as_rows(
    input: Tensor, target: Tensor, temperature: Tensor | None, columns: Kept
) -> tuple[Tensor, Tensor, Tensor | None]:
    rows = input.reshape(-1, input.shape[-1])
    if temperature is not None:
        temperature = temperature.detach().reshape(-1).to(arithmetic_of(input)).contiguous()
    if input.ndim != 2:
        target = target.reshape(len(rows), -1)
    return aligned(rows, columns), target.contiguous(), temperature


def _split(options: LogProb) -> tuple[LogProb, Tensor | None]:
    """(options whose temperature is a number, the temperatures of rows or None)."""
    return options.with_number(), options.temperature if isinstance(options.temperature, Tensor) else None


def split(options: LogProb, x: Tensor) -> tuple[LogProb, Tensor | None]:
    """`_split`, with temperatures of all rows [n] as kernels take them. x: the logits, or what they are made of."""
    options, of_rows = _split(options)
    if of_rows is None:
        return options, None
    return options, of_rows.detach().resolve_neg().reshape(-1).to(arithmetic_of(x)).contiguous()


def _run(rows: Tensor, targets: Tensor, temperature: Tensor | None, columns: Kept, how: tuple):
    """(the tensors as kernels took them, what they gave)."""
    run, options, is_aligned, *_ = how
    if temperature is None and is_aligned:
        given = given_of(rows, targets.contiguous(), None, options, columns)
    else:
        given = given_of(*_as_rows(rows, targets, temperature, columns), options, columns)
    return given, run(given, options.numbers[0])


def output_of(found, wanted: Asked, shape, leading, dtype: torch.dtype) -> Tensor | LogProbOutput:
    """What the caller asked for, in its shapes and dtype. found: log_prob, entropy, lse and statistics of rows."""
    of_targets, *of_rows, top = found
    of_targets = shaped(of_targets, shape, dtype)
    if not any(wanted[:-1]):
        return of_targets
    wants = wanted.entropy, wanted.lse, wanted.log_sum_sq_probs, wanted.mean_logits
    entropy, lse, log_sq, mean = (
        shaped(each, leading, dtype) if asks else None for each, asks in zip(of_rows, wants, strict=True)
    )
    top = top.view(shape) if wanted.is_top1 else None
    stats = LogProbStats(log_sq, mean, top) if any(wanted[2:-1]) else None
    return LogProbOutput(of_targets, entropy, lse, stats)


class _LogProb(torch.autograd.Function):
    """(log_prob, entropy, lse, statistics) of rows, in the dtype of the arithmetic; None for what is not asked for.

    log_prob alone, if nothing more is asked for.
    """

    @staticmethod
    def forward(ctx, x, target, temperature, columns, how):
        ctx.set_materialize_grads(False)
        given, found = _run(x, target, temperature, columns, how)
        _, ctx.options, _, ctx.inplace, alone = how
        quick = not ctx.inplace and columns.bits is None and given.numbers is None
        ctx.quick = gradient_key(ctx.options, given.kind) if quick else None
        ctx.save_for_backward(x, given.target, given.temperature, found.m, found.ls, found.entropy, *columns[:3])
        if alone:
            return found.log_prob
        if found.is_top1 is not None:
            ctx.mark_non_differentiable(found.is_top1)
        return found[2:]

    @staticmethod
    def backward(ctx, dlog_prob, dentropy=None, dlse=None, *of_stats):
        refuse(_NAME, STATISTICS, of_stats, HAVE)
        nothing = (None,) * 4
        if dlog_prob is None and dentropy is None and dlse is None:
            return None, *nothing
        saved = unpacked(ctx, _NAME)
        if ctx.quick is not None:
            dx = _found_gradient(ctx, saved, dlog_prob, dentropy, dlse)
            if dx is not None:
                return dx, None, None, None, None
        gradients = Gradients(*resolved(dlog_prob, dentropy, dlse))
        x, target, temperature, m, ls, entropy, *of_kept = resolved(*saved)
        columns = Kept(*of_kept)
        # Hooks of saved tensors may return other strides.
        target, m, ls = (each.contiguous() for each in (target, m, ls))
        entropy, temperature = (each if each is None else each.contiguous() for each in (entropy, temperature))
        if torch.is_grad_enabled() or batched(*gradients):
            if ctx.inplace and torch.is_grad_enabled():
                raise RuntimeError(f"{_NAME}: inplace_backward leaves no logits for a second derivative")
            return differentiable_gradient(x, target, temperature, ctx.options, gradients, columns), *nothing
        rows = with_whole_rows(x)
        given = given_of(rows, target, temperature, ctx.options, columns)
        dx = rows.detach() if ctx.inplace else None  # or of a copy, if a hook gave back other strides
        dx = backward(given, m, ls, entropy, gradients, ctx.options, dx)
        if ctx.inplace:  # whoever else keeps the logits is told by autograd
            bump_version(x)
        return dx, *nothing


def _found_gradient(
    ctx, saved: tuple, dlog_prob: Tensor | None, dentropy: Tensor | None, dlse: Tensor | None
) -> Tensor | None:
    """The gradient by a kept call, with little Python, which takes long in autograd's thread; None if none is kept."""
    if torch.is_grad_enabled():
        return None
    x, target, temperature, m, ls, entropy, ids, offsets, _ = saved
    if dentropy is None:
        entropy = None
    # No guard looks at what hooks of saved tensors return.
    for each in (m, ls) if ids is None else (m, ls, ids, offsets):
        if each.is_neg() or not each.is_contiguous():
            return None
    dtype = m.dtype
    if dlog_prob is not None:
        dlog_prob = shaped(dlog_prob, dlog_prob.shape, dtype).contiguous()
    if dentropy is not None:
        dentropy = shaped(dentropy, dentropy.shape, dtype).contiguous()
    if dlse is not None:
        dlse = shaped(dlse, dlse.shape, dtype).contiguous()
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    call = find(*ctx.quick, x, dx, target, temperature, entropy, dlog_prob, dentropy, dlse, None)
    if call is None:
        return None
    given = GivenLogits(x, target, temperature, None, EVERY if ids is None else Kept(ids, offsets))
    return call(given, dx, (m, ls, entropy, dlog_prob, dentropy, dlse), ctx.options.numbers[1])


# As its apply, without its search for functorch's wrappers: a call under a transform does not come here.
_apply = super(torch.autograd.Function, _LogProb).apply


def differentiable_gradient(
    x, target, temperature, options: LogProb, gradients: Gradients, columns: Kept = EVERY
) -> Tensor:
    """The gradient by torch's operations, for a second derivative or a batch of gradients."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        results = referred(x, target, options, temperature, columns)[:3]
    pairs = [(y, g.to(y.dtype)) for y, g in zip(results, gradients, strict=True) if g is not None]
    outputs, of_outputs = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, [x], of_outputs, create_graph=torch.is_grad_enabled())[0]


def referred(x, target, options: LogProb, temperature=None, columns: Kept = EVERY):
    """`reference.log_prob` in the dtype of the arithmetic. temperature: of rows, where the options have none."""
    return reference.log_prob(
        x, target, scale=options.scale, softcap=options.softcap, ignore_index=options.ignore_index,
        temperature=options.temperature if temperature is None else temperature, kept=columns.given,
        arithmetic=arithmetic_of(x),
    )  # fmt: skip


def _composed(input, target, options: LogProb, columns: Kept, wanted: Asked, dtype) -> Tensor | LogProbOutput:
    """By torch's operations: on devices without kernels, and under functorch's transforms."""
    of_targets, entropy, lse, stats = referred(input, target, *_split(options), columns)
    found = [stats[name] for name in STATS]
    if any(wanted[2:-1]):
        found = refusing(_NAME, STATISTICS, found, of_targets, HAVE)
    return output_of((of_targets, entropy, lse, *found), wanted, target.shape, input.shape[:-1], dtype)


def _traced(input, target, options: LogProb, columns: Kept, wanted: Asked, dtype) -> Tensor | LogProbOutput:
    """One registered operator. It cannot write the gradient over the logits, and allocates one."""
    rows = input.reshape(-1, input.shape[-1])
    if isinstance(options.temperature, Tensor):
        options = replace(options, temperature=options.temperature.detach().reshape(-1))
    found = torch.ops.fused_softmax.log_prob.default(
        rows, target.reshape(rows.shape[0], -1), *options.traced(), list(wanted[:-1]), *columns[:3]
    )
    return output_of_operator(_NAME, found, wanted, target.shape, input.shape[:-1], dtype)


def output_of_operator(name: str, found, wanted: Asked, shape, leading, dtype) -> Tensor | LogProbOutput:
    """`output_of` for what an operator gave."""
    of_targets, _, _, *of_rows = found
    of_rows, stats = of_rows[:2], of_rows[2:]
    stats = refusing(name, STATISTICS, stats, of_targets, HAVE) if any(wanted[2:-1]) else stats
    return output_of((of_targets, *of_rows, *stats), wanted, shape, leading, dtype)
