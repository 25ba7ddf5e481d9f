"""Memory that programs of one launch talk through, kept between launches: zeroed once, then never reset.

Launches on one stream never overlap, so they share that stream's slots. A captured graph may be replayed on any stream,
beside anything: the launches captured into it on one stream share slots of their own, and those live as long as the
process, for nobody tells when a graph is gone. They are small: 8 bytes a part of a row.
"""

import ctypes
from functools import cache
from threading import Lock

import torch
from torch import Tensor

_slots: dict[tuple[int, int, int, int], Tensor] = {}
_lock = Lock()


def slots(device: int, n_rows: int, slots_per_row: int) -> Tensor:
    """int64 [at least n_rows * slots_per_row], on `device`, for one launch on its current stream.

    Slots belong to one slots_per_row: all of a row's are written by every launch that uses the row, or by none.
    """
    stream = torch._C._cuda_getCurrentRawStream(device)
    capture = _capture_id(stream) if torch.cuda.is_current_stream_capturing() else 0
    if capture is None:
        return torch.zeros(n_rows * slots_per_row, dtype=torch.int64, device=f"cuda:{device}")  # again by each replay
    key = (device, stream, capture, slots_per_row)
    kept = _slots.get(key)
    if kept is None or kept.numel() < n_rows * slots_per_row:
        # A quarter more than asked, so that slowly growing batches do not allocate each time.
        size = (n_rows + n_rows // 4) * slots_per_row
        with _lock:
            if capture:
                _replaced.append(kept)  # launches already captured go on using what they were captured with
                # On a stream outside the capture: zeroed now, not by each replay, and not from the graph's own pool.
                with torch.cuda.stream(_aside(device)):
                    kept = torch.zeros(size, dtype=torch.int64, device=f"cuda:{device}")
            else:
                kept = torch.zeros(size, dtype=torch.int64, device=f"cuda:{device}")
            _slots[key] = kept
    return kept


_replaced: list[Tensor | None] = []


@cache
def _aside(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _capture_id(stream: int) -> int | None:
    """The driver's number of the capture in progress on a stream, which no other capture of the process shares."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
        failed = ask(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None)
    except (OSError, AttributeError):
        return None
    return number.value if not failed and number.value else None
