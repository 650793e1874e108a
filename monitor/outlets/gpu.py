"""The devices' own memory figures, by NVML. Where there is no NVIDIA driver there is nothing, and no error."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pynvml
from prometheus_client.core import GaugeMetricFamily, Metric


@cache
def _has_nvml() -> bool:
    """Whether a driver answers; asked once."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


def _count() -> int:
    """How many devices; none while the driver is being reloaded."""
    try:
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0


def gpu_memory() -> Iterator[Metric]:
    """kvscope_gpu_memory_bytes by device and state; no family at all without a GPU."""
    if not _has_nvml():
        return
    family = GaugeMetricFamily(
        "kvscope_gpu_memory_bytes",
        "Device memory as the driver counts it; used and free add up to what the device has.",
        labels=("gpu", "uuid", "state"),
    )
    for index in range(_count()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            uuid = pynvml.nvmlDeviceGetUUID(handle)
        except pynvml.NVMLError:
            continue  # a device that fell off the bus must not take the page with it
        for state in ("used", "free"):
            family.add_metric((str(index), uuid, state), getattr(memory, state))
    yield family
