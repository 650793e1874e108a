"""The devices' own figures, by NVML. Where there is no NVIDIA driver there is nothing, and no error."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import pynvml
from prometheus_client.core import GaugeMetricFamily, Metric

OTHER_PROCESSES: Final = "others"
_PROC: Final = Path("/proc")


class Process(NamedTuple):
    """A process that may have memory of a device."""

    pid: int
    engine: str


def here(engine: str, pid: int) -> Process | None:
    """Return the process of the engine of that id (NAME@HOST:PORT/RANK), if it runs on this machine."""
    host = engine.rpartition("@")[2].rpartition(":")[0]
    local = host in ("localhost", "[::1]", socket.gethostname()) or host.startswith("127.")
    return Process(pid, engine) if pid and local else None


def gpu_families(engines: Iterable[Process]) -> Iterator[Metric]:
    """Yield kvscope_gpu_*: memory and utilization by device, and memory of each of these engines and of all others. No
    family at all without a GPU, and no figure that the driver does not give.
    """
    if not _has_nvml():
        return
    memory = _gauge(
        "memory_bytes", "Device memory as the driver counts it. used and free add up to the total.", "state"
    )
    busy = _gauge(
        "utilization_ratio",
        "Share of the driver's last sampling period (up to a second) in which a kernel ran or memory was moved.",
        "of",
    )
    by_owner = _gauge(
        "process_memory_bytes",
        "Device memory by process: a watched engine with its workers, or others. In a container, all processes"
        " count as others, because the driver reports the host's process ids.",
        "owner",
    )
    names = {process.pid: process.engine for process in engines}
    for index in range(_device_count()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            device = (str(index), str(pynvml.nvmlDeviceGetUUID(handle)))
            sizes = pynvml.nvmlDeviceGetMemoryInfo(handle)
        except pynvml.NVMLError:
            continue  # a device that fell off the bus must not take the page with it
        memory.add_metric((*device, "used"), sizes.used)
        memory.add_metric((*device, "free"), sizes.free)
        for of, share in _busy(handle).items():
            busy.add_metric((*device, of), share)
        for owner, used in by_engine(_processes(handle), names).items():
            by_owner.add_metric((*device, owner), used)
    yield from (memory, busy, by_owner)


def by_engine(used: Mapping[int, int], engines: Mapping[int, str]) -> Counter[str]:
    """Return bytes by engine, from those by process. Processes of no engine count for OTHERS."""
    totals: Counter[str] = Counter()
    for pid, size in used.items():
        owner = next((engines[one] for one in _with_parents(pid) if one in engines), OTHER_PROCESSES)
        totals[owner] += size
    return totals


def _with_parents(pid: int) -> Iterator[int]:
    """Yield a process, its parent, and so on: a worker belongs to the engine that started it."""
    while pid > 1:
        yield pid
        try:
            after_name = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2]
        except OSError:
            return
        pid = int(after_name.split()[1])


def _gauge(name: str, help: str, label: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvscope_gpu_{name}", help, labels=("gpu", "uuid", label))


@cache
def _has_nvml() -> bool:
    """Whether a driver answers, checked once."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


def _device_count() -> int:
    """Return the number of devices, or none while the driver is being reloaded."""
    try:
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0


def _busy(handle: Any) -> dict[str, float]:
    """Return the utilization, without a device that is cut into instances, which does not report it."""
    try:
        rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    except pynvml.NVMLError:
        return {}
    return {"kernels": rates.gpu / 100, "memory": rates.memory / 100}


def _processes(handle: Any) -> dict[int, int]:
    """Return bytes by process, of those whose size the driver reports."""
    try:
        found = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return {}
    return {process.pid: process.usedGpuMemory for process in found if process.usedGpuMemory is not None}
