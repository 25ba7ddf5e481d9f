"""What launches the kernels of draws: which of the two ways a call takes, how rows meet the chip, what is allocated.

Without filters a draw is one launch that reads each logit once. With filters, logprobs or kept bits it is two: one
reads each logit once and leaves every stretch's state and every lane's maximum, the other reads the lanes that matter.
Three launches more, which do nothing where these are enough, follow unless top-k is a small number.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax import launch, workspace
from fused_softmax.device import device_of
from fused_softmax.kernels.draw import RECORD
from fused_softmax.kernels.sample import _draw
from fused_softmax.kernels.sample_kept import _choose, _stretches
from fused_softmax.kernels.sample_wide import _bound, _draw_within, _weigh
from fused_softmax.kernels.spec import SampleSpec
from fused_softmax.options_sampling import Sampling
from fused_softmax.plan import DrawPlan, plan_draws
from fused_softmax.reference_sampling import unpacked
from fused_softmax.runner import has_ptx

MOST_COLUMNS = 2**24  # a column's number and its logit share 56 bits
_DRAWS = 2  # the use of slots
_UNIT, STRETCH = 2.0**40, 1024  # kernels/draw.py
FEW = 64  # of top-k, which the lanes of the greatest maxima always hold
_MIN_P_CAPACITY = 512


class Drawn(NamedTuple):
    """tokens, valid, log-probabilities of the distribution drawn from, and kept bits; the last two if asked for."""

    tokens: Tensor
    valid: Tensor
    logprobs: Tensor | None = None
    kept: Tensor | None = None


NUMBERS = "temperature", "top_k", "top_p", "min_p", "seed", "position"
_DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 0}
_INTS = "seed", "position"


def is_few(top_k: Any) -> bool:
    """Whether the lanes of the greatest maxima hold all that top-k keeps."""
    return isinstance(top_k, int) and 0 < top_k <= FEW


class _Arguments:
    """A kernel's arguments by name, of a call's tensors and numbers; and which of them every call gives anew."""

    def __init__(self, tensors: Mapping[str, Tensor | None], scalars: Mapping[str, Any], parameters: Mapping[str, Any]):
        self.tensors: dict[str, Tensor | None] = {"record_ptr": None}
        self.tensors |= {f"{name}_ptr": tensor for name, tensor in tensors.items()}
        self.scalars = dict(scalars)
        self.anew: set[str] = set()  # of the parameters
        for name in NUMBERS:
            value = parameters.get(name)
            is_tensor = isinstance(value, Tensor)
            self.tensors[f"{name}_ptr"] = value if is_tensor else None
            self.scalars[f"{name}_stride"] = value.stride(0) if isinstance(value, Tensor) and value.ndim else 0
            number = _DEFAULTS[name] if is_tensor or value is None else value
            if name in _INTS:
                self.scalars[f"{name}_low"], self.scalars[f"{name}_high"] = _halves(int(number))
            else:
                self.scalars[name] = number
            if value is not None:
                self.anew.add(name)

    def prepare(
        self, kernel: Any, programs: int, spec: SampleSpec, device: int, num_warps: int
    ) -> tuple[Callable[..., None], Callable[[Mapping[str, Any]], tuple[Any, ...]]]:
        """(what launches a kernel for others like these, what finds its arguments among those that `_given` names)."""
        names = [name for name in kernel.arg_names if name != "K"]
        tensors = [self.tensors[name] for name in names if name.endswith("_ptr")]
        wanted = [name[:-4] for name in names if name.endswith("_ptr") and self.tensors[name] is not None]
        rest = [name for name in names if not name.endswith("_ptr")]
        numbers = [
            name for name in rest
            if name.removesuffix("_low").removesuffix("_high") in self.anew
            and self.tensors[f"{name.removesuffix('_low').removesuffix('_high')}_ptr"] is None
        ]  # fmt: skip
        launched = launch.prepare(
            kernel, programs, tensors, [self.scalars[name] for name in rest], {"K": spec}, device=device,
            num_warps=num_warps, numbers=tuple(rest.index(name) for name in numbers),
        )  # fmt: skip
        return launched.__call__, itemgetter(*wanted, *numbers)


def _halves(number: int) -> tuple[int, int]:
    """The low and the high 32 bits of an integer of 64, signed."""
    return (number + 2**31) % 2**32 - 2**31, ((number >> 32) + 2**31) % 2**32 - 2**31


class Numbers(NamedTuple):
    """What a call has for temperature, top_k, top_p and min_p, its seed and position: numbers, tensors, or None."""

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seed: Any
    position: Any

    @classmethod
    def of(cls, options: Sampling, seed: int | Tensor, position: int | Tensor) -> "Numbers":
        return cls(options.temperature, options.top_k, options.top_p, options.min_p, seed, position)


def _given(numbers: Numbers) -> dict[str, Any]:
    """What launches take of a call's numbers, by name."""
    given = dict(zip(NUMBERS, numbers, strict=True))
    _, _, _, _, seed, position = numbers
    if seed.__class__ is int:
        given["seed_low"], given["seed_high"] = _halves(seed)
    if position.__class__ is int:
        given["position_low"], given["position_high"] = _halves(position)
    return given


def prepare_draws(
    logits: Tensor, options: Sampling, seed: int | Tensor, position: int | Tensor, out: Tensor | None,
    *, logprobs: bool = False, plan: DrawPlan | None = None,
) -> Callable[[Tensor, Numbers, Tensor | None, Tensor | None, Tensor | None, Tensor | None], Drawn]:  # fmt: skip
    """What draws for a call like this one, whose arguments were checked: of logits, numbers, bias, bitmask, rows, out.

    logprobs: of the distribution drawn from.
    """
    n_rows, n_cols = logits.shape
    n_draws = n_rows if options.row_indices is None else options.row_indices.shape[0]
    index, device, itemsize = logits.get_device(), logits.device, logits.element_size()
    filtered = any(each is not None for each in (options.top_k, options.top_p, options.min_p))
    filtered |= logprobs or options.return_kept
    ranked = options.top_k is not None or options.top_p is not None
    wide = not is_few(options.top_k)
    words, keeps = -(-n_cols // 32), options.return_kept

    def allocated(out: Tensor | None) -> tuple[Tensor, Tensor]:
        tokens = torch.empty(n_draws, dtype=torch.int64, device=device) if out is None else out
        return tokens, torch.empty(n_draws, dtype=torch.bool, device=device)

    if not n_draws:
        return lambda logits, numbers, bias, bitmask, rows, out: Drawn(*allocated(out))
    plan = plan or plan_draws(n_draws, n_cols, itemsize, device_of(index))
    n_stretches = -(-n_cols // STRETCH)
    capacity = plan.capacity if not wide else 2 * plan.capacity if ranked else max(plan.capacity, _MIN_P_CAPACITY)
    choosing_warps = plan.kept_warps if ranked else 2 * plan.kept_warps
    spec = SampleSpec(
        stretches=plan.stretches, whole_groups=n_cols % 8 == 0, split=plan.parts > 1 and not filtered,
        all_stretches=plan.all_stretches, capacity=capacity,
        candidates=2 * capacity if ranked else 1, ranked=ranked, joint=options.order == "joint", wide=wide,
        listed=plan.listed, ptx=has_ptx(index),
    )  # fmt: skip

    def slots() -> Tensor:
        if index < 0:
            return torch.zeros(2 * n_draws, dtype=torch.int64)
        return workspace.slots(index, n_draws, 2, _DRAWS)

    # Each a whole number of 16 bytes, one after another in one allocation.
    shares: list[tuple[str, torch.dtype, int]] = [
        ("s", torch.int64, n_stretches), ("ranked", torch.int64, spec.candidates), ("m", torch.float32, n_stretches),
        ("tops", torch.float32, 32 * n_stretches), ("lanes", torch.int32, spec.capacity),
    ]  # fmt: skip
    if wide:
        shares += [("record", torch.int64, RECORD), ("list", torch.int32, plan.listed)]
    sizes_of = [-(-n_draws * each * dtype.itemsize // 16) * 16 for _, dtype, each in shares]
    total, shared = sum(sizes_of), [name for name, _, _ in shares]

    def scratch(typed: bool = index < 0) -> dict[str, Tensor | None]:
        """The parts by name. typed: as what the kernels take them for, which only a first launch has to know."""
        parts = torch.empty(total, dtype=torch.uint8, device=device).split(sizes_of)
        if typed:
            parts = [part.view(dtype) for part, (_, dtype, _) in zip(parts, shares, strict=True)]
        return dict(zip(shared, parts, strict=True))

    def results(tokens: Tensor, valid: Tensor) -> dict[str, Tensor | None]:
        of_tokens = torch.empty(n_draws, dtype=torch.float32, device=device) if logprobs else None
        kept = torch.zeros(n_draws, 4 * words, dtype=torch.uint8, device=device) if keeps else None
        return {"tokens": tokens, "valid": valid, "logprobs": of_tokens, "kept": kept}

    tokens, valid = allocated(out)
    given = logits, options.logit_bias, options.bitmask, options.row_indices
    read, strides = _read(*given)
    as_given = all(a is b for a, b in zip(read.values(), given, strict=True))
    sizes = {
        **strides, "n_rows": n_rows, "n_cols": n_cols, "tokens_stride": tokens.stride(0), "n_parts": plan.parts,
        "part_stretches": plan.part_stretches, "kept_row_stride": 4 * words,
    }  # fmt: skip
    parameters = _given(Numbers.of(options, seed, position))
    tensors: dict[str, Tensor | None] = {**read, **results(tokens, valid)}
    if not filtered:
        arguments = _Arguments({**tensors, "state": slots()}, sizes, parameters)
        drawing, its = arguments.prepare(_draw, n_draws * plan.parts, spec, index, plan.num_warps)

        def draw(logits, numbers, bias, bitmask, rows, out):
            tokens, valid = allocated(out)
            given = _given(numbers)
            given["logits"], given["bias"], given["bitmask"], given["rows"] = logits, bias, bitmask, rows
            if not as_given:
                given |= _read(logits, bias, bitmask, rows)[0]
            given["state"], given["tokens"], given["valid"] = slots(), tokens, valid
            drawing(*its(given))
            return Drawn(tokens, valid)

        return draw

    arguments = _Arguments({**tensors, **scratch(True)}, sizes, parameters)
    launches = [
        arguments.prepare(_stretches, n_draws * -(-n_stretches // plan.stretches), spec, index, plan.num_warps),
        arguments.prepare(_choose, n_draws, replace(spec, stretches=choosing_warps), index, choosing_warps),
    ]
    if wide:
        of_bound = replace(spec, stretches=plan.bound_warps)
        cut = {"n_parts": plan.wide_parts, "part_stretches": plan.wide_stretches}
        of_parts = _Arguments({**tensors, **scratch(True)}, {**sizes, **cut}, parameters)
        launches += [
            of_parts.prepare(_weigh, n_draws * plan.wide_parts, spec, index, plan.num_warps),
            of_parts.prepare(_bound, n_draws, of_bound, index, plan.bound_warps),
            of_parts.prepare(_draw_within, n_draws * plan.wide_parts, spec, index, plan.num_warps),
        ]

    def draw_kept(logits, numbers, bias, bitmask, rows, out):
        tokens, valid = allocated(out)
        written = results(tokens, valid)
        given = _given(numbers) | scratch() | written
        given["logits"], given["bias"], given["bitmask"], given["rows"] = logits, bias, bitmask, rows
        if not as_given:
            given |= _read(logits, bias, bitmask, rows)[0]
        for launched, its in launches:
            launched(*its(given))
        kept = written["kept"]
        return Drawn(tokens, valid, written["logprobs"], None if kept is None else kept.view(torch.int32))

    return draw_kept


def log_probs_at(x: Tensor, lse: Tensor) -> Tensor:
    """x - lse in float64; 0 where both are inf."""
    return torch.where(x == lse, 0.0, x.double() - lse)


def raw_lse(logits: Tensor, options: Sampling, x: Tensor) -> Tensor:
    """float64 [n_draws], the log-sum-exp of the logits as given, of the row of each draw; NaN of a row with two inf.

    x: these rows in float32.
    """
    n_draws, n_cols = x.shape
    index, n_stretches = logits.get_device(), -(-n_cols // STRETCH)
    plan = plan_draws(n_draws, n_cols, logits.element_size(), device_of(index))
    spec = SampleSpec(stretches=plan.stretches, whole_groups=n_cols % 8 == 0, ptx=has_ptx(index))
    m = torch.empty(n_draws, n_stretches, dtype=torch.float32, device=x.device)
    s = torch.empty(n_draws, n_stretches, dtype=torch.int64, device=x.device)
    tops = torch.empty(n_draws, 32 * n_stretches, dtype=torch.float32, device=x.device)
    read, strides = _read(logits, None, None, options.row_indices)
    sizes = {**strides, "n_rows": logits.shape[0], "n_cols": n_cols}
    tensors = {**read, "m": m, "s": s, "tops": tops}
    arguments = _Arguments(tensors, sizes, {"temperature": 1.0})
    if n_draws:
        programs = n_draws * -(-n_stretches // plan.stretches)
        launched, its = arguments.prepare(_stretches, programs, spec, index, plan.num_warps)
        launched(*its({**tensors, "temperature": 1.0}))
    top = m.amax(1, keepdim=True)
    total = (s.double() / _UNIT * (m.double() - top.double()).exp()).sum(1)
    lse = top.squeeze(1).double() + total.log()
    one_inf = ((x == math.inf).sum(1) == 1) & ~x.isnan().any(1)
    return lse.masked_fill((s < 0).any(1), math.nan).masked_fill(one_inf, math.inf)


def rows_of(logits: Tensor, options: Sampling) -> Tensor:
    """The row of each draw, in float32."""
    if options.row_indices is not None:
        logits = logits.index_select(0, options.row_indices.clamp(0, logits.shape[0] - 1))
    return logits.float() + 0.0  # -0.0 is 0.0 wherever columns are ordered


def judged_rows(x: Tensor, options: Sampling) -> Tensor:
    """Rows in float32 as filters judge them, less the bitmask, which is in the kept bits."""
    return x if options.logit_bias is None else x + options.logit_bias.float()


def greatest(x: Tensor, n: int, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(values, columns) [n_draws, n] of the greatest of each row, of equal ones the lowest column first.

    kept: an int32 bitmask of those that count; -inf stands for the others.
    """
    if kept is not None:
        x = torch.where(unpacked(kept, x.shape[1]), x, -math.inf)
    bits = x.contiguous().view(torch.int32)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    cols = torch.arange(x.shape[1], device=x.device)
    code = (order.long() << 24) | (MOST_COLUMNS - 1 - cols)
    cols = MOST_COLUMNS - 1 - (code.topk(n, dim=1).values & (MOST_COLUMNS - 1))
    return x.gather(1, cols), cols


def _read(
    logits: Tensor, bias: Tensor | None, bitmask: Tensor | None, rows: Tensor | None
) -> tuple[dict[str, Tensor | None], dict[str, int]]:
    """The tensors that kernels read, their last dims contiguous, and their row strides."""
    logits = logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()
    if bias is not None and bias.stride(-1) != 1:
        bias = bias.contiguous()
    if bitmask is not None:
        bitmask = (bitmask if bitmask.stride(1) == 1 else bitmask.contiguous()).view(torch.uint8)
    rows = rows if rows is None or rows.is_contiguous() else rows.contiguous()
    return {"logits": logits, "bias": bias, "bitmask": bitmask, "rows": rows}, {
        "logits_row_stride": logits.stride(0),
        "bias_row_stride": 0 if bias is None or bias.ndim == 1 else bias.stride(0),
        "bitmask_row_stride": 0 if bitmask is None else bitmask.stride(0),
    }
