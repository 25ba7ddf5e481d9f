"""Memory that programs of one launch talk through, kept between launches: zeroed once, then never reset.

Whoever launches on a stream owns that stream's slots until the launch ends, and launches on one stream never overlap.
A captured graph may be replayed on any stream, beside anything, so each captured launch gets slots of its own.
"""

from threading import Lock

import torch
from torch import Tensor

_RESERVE = 2**19  # 64-bit slots set aside on each device for launches that are captured: 4 MiB
_by_stream: dict[tuple[int, int, int], Tensor] = {}
_reserves: dict[int, Tensor] = {}
_lock = Lock()


def slots(device: int, n_rows: int, slots_per_row: int) -> Tensor:
    """int64 [at least n_rows * slots_per_row], on `device`, for one launch on its current stream.

    The layout belongs to slots_per_row: all slots of a row are written by every launch that uses the row, or by none.
    """
    if torch.cuda.is_current_stream_capturing():
        return _captured(device, n_rows * slots_per_row)
    key = (device, torch._C._cuda_getCurrentRawStream(device), slots_per_row)
    kept = _by_stream.get(key)
    if kept is None or kept.numel() < n_rows * slots_per_row:
        with _lock:
            if device not in _reserves:
                _reserves[device] = torch.zeros(_RESERVE, dtype=torch.int64, device=f"cuda:{device}")
            # A quarter more than asked, so that slowly growing batches do not allocate each time.
            rows = n_rows + n_rows // 4
            kept = torch.zeros(rows * slots_per_row, dtype=torch.int64, device=f"cuda:{device}")
            _by_stream[key] = kept
    return kept


def _captured(device: int, size: int) -> Tensor:
    """Slots of the graph's own: from the reserve, or, where that is used up, zeroed again by each replay."""
    size = -(-size // 16) * 16  # the next slots stay as aligned as the first
    with _lock:
        reserve = _reserves.get(device)
        if reserve is not None and reserve.numel() >= size:
            _reserves[device] = reserve[size:]
            return reserve[:size]
    return torch.zeros(size, dtype=torch.int64, device=f"cuda:{device}")
