"""Reads the GPU's clocks while it is timed, through NVML if that is installed. Changes nothing."""

import contextlib
from collections.abc import Iterable
from typing import Any

# Bits of nvmlDeviceGetCurrentClocksEventReasons that say why the clocks are lowered.
THROTTLE_REASONS = {
    0x004: "software power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "power brake",
    0x100: "display clocks",
}


class Clocks:
    """Readings of one GPU. Without NVML, or if it refuses, there are none and no error."""

    def __init__(self, uuid: str | None = None, index: int = 0):
        """uuid: the GPU's, from torch. An index does not do: NVML counts GPUs that CUDA_VISIBLE_DEVICES hides."""
        self._handle: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = self._find(pynvml, uuid, index)
            self._nvml = pynvml
        except Exception:  # NVMLError exists only where pynvml does; without a driver nothing can be read
            self._handle = None

    @staticmethod
    def _find(nvml: Any, uuid: str | None, index: int) -> Any:
        if uuid is None:
            return nvml.nvmlDeviceGetHandleByIndex(index)
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}".encode())

    def read(self) -> dict[str, Any]:
        """MHz of the multiprocessors and the memory now, degrees Celsius, watts, and reasons for lower clocks."""
        if self._handle is None:
            return {}
        nvml, handle = self._nvml, self._handle
        sources = {
            "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "mem_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "throttled": lambda: reasons(_event_reasons(nvml, handle)),
        }
        found: dict[str, Any] = {}
        for name, source in sources.items():
            with contextlib.suppress(Exception):  # not every GPU has every sensor
                found[name] = source()
        return found


def _event_reasons(nvml: Any, handle: Any) -> int:
    """Reads the reasons by their newer name if the driver's library has it."""
    for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
        if hasattr(nvml, name):
            with contextlib.suppress(Exception):
                return int(getattr(nvml, name)(handle))
    raise LookupError("no reasons")


def reasons(bits: int) -> list[str]:
    return [name for bit, name in THROTTLE_REASONS.items() if bits & bit]


def summary(readings: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """The lowest clocks, highest temperature and power, and all reasons of several readings. None for none."""
    seen = [reading for reading in readings if reading]
    if not seen:
        return None
    ends = {"sm_mhz": min, "mem_mhz": min, "celsius": max, "watts": max}
    found: dict[str, Any] = {}
    for name, end in ends.items():
        if values := [reading[name] for reading in seen if name in reading]:
            found[name] = end(values)
    if any("throttled" in reading for reading in seen):
        found["throttled"] = sorted({reason for reading in seen for reason in reading.get("throttled", ())})
    return found
