"""Memory through which programs of one launch talk, kept between launches: zeroed once, then never reset.

Launches on one stream never overlap, so they share that stream's slots. A captured graph may be replayed on any stream,
beside anything. So the launches captured into it on one stream share slots of their own. Those live as long as the
process, because nobody tells when a graph is gone. They are small: 8 bytes a part of a row.
"""

import ctypes
from contextlib import contextmanager
from functools import cache
from threading import Lock

import torch
from torch import Tensor

_TICKETS = 1

_slots: dict[tuple[int, int, int, int, int], Tensor] = {}
_outgrown: list[Tensor] = []  # launches that were captured go on using what they were captured with
_lock = Lock()


def ticket(device: int) -> Tensor:
    """int64 [1] on `device`, 0 before and after each launch, for a launch on its current stream that draws tickets."""
    return slots(device, 1, 1, _TICKETS)


def slots(device: int, n_rows: int, slots_per_row: int, of: int = 0) -> Tensor:
    """int64 [at least n_rows * slots_per_row] on `device`, for one launch on its current stream.

    Slots belong to one slots_per_row, so that every launch that uses a row writes all of its slots. of: a number for
    each other use.
    """
    stream = torch._C._cuda_getCurrentRawStream(device)
    capture = _capture_of(stream) if torch.cuda.is_current_stream_capturing() else 0
    key = (device, stream, capture, slots_per_row, of)
    kept = _slots.get(key)
    if kept is None or kept.numel() < n_rows * slots_per_row:
        # A quarter more than needed, so that slowly growing batches do not allocate each time.
        size = (n_rows + n_rows // 4) * slots_per_row
        with _lock:
            if not capture:
                _slots[key] = _zeros(size, device)
            else:
                if kept is not None:
                    _outgrown.append(kept)
                # Outside the capture: zeroed now and not by each replay, and not from the graph's own pool.
                with _uncaptured(), torch.cuda.stream(_aside(device)):
                    _slots[key] = _zeros(size, device)
                    _aside(device).synchronize()  # nothing else orders the zeros before the graph's first replay
            kept = _slots[key]
    return kept


def _zeros(size: int, device: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int64, device=f"cuda:{device}")


@cache
def _aside(device: int) -> torch.cuda.Stream:
    """A stream nobody else has: torch's own come from a pool of 32, and one of those may be under capture itself."""
    stream = ctypes.c_void_p()
    with torch.cuda.device(device):
        if _driver().cuStreamCreate(ctypes.byref(stream), 1):  # CU_STREAM_NON_BLOCKING
            raise RuntimeError(f"softmax: no stream can be made on device {device}")
    return torch.cuda.ExternalStream(stream.value, device=f"cuda:{device}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _capture_of(stream: int) -> int:
    """The driver's number of the capture in progress on a stream; no other capture of the process has it."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    ask = _driver().cuStreamGetCaptureInfo_v2
    if ask(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None):
        raise RuntimeError("softmax: the CUDA driver does not say which graph this stream is captured into")
    return number.value


@contextmanager
def _uncaptured():
    """Lets this thread allocate on other streams while one is being captured (CU_STREAM_CAPTURE_MODE_RELAXED)."""
    mode = ctypes.c_int(2)
    exchange = _driver().cuThreadExchangeStreamCaptureMode
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))
