"""The memory bill: what vLLM's worker measured of its device when it sized the pool.

Nothing is measured here, and the device is asked nothing: the worker keeps its figures. It can be read where it is in
the scheduler's process, as vLLM has it when one worker is all. Values that a release, a setting or a device lacks are
reported as unknown.

    requested = weights + non-torch + peak activations + kept for graphs + available for KV

is how vLLM sizes its pool in all releases from 0.10.2 to 0.33. Only which of these it keeps one by one differs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

from kvscope.monitor.events.kinds import SCHEMA, Kind

UNKNOWN: Final = -1


def breakdown(scheduler: Any) -> list[int]:
    """Return the numbers of a MEMORY event in bytes, in the order of its schema, or nothing if there is no worker to
    read.

    Call it while `scheduler` is being made: its maker has the worker. Raises AttributeError or TypeError if the worker
    is not of the shape that is known.
    """
    worker = _worker(scheduler)
    if worker is None:
        return []
    known = {"kv_pool": _pool(worker)} | (_measured(worker) if hasattr(worker, "init_snapshot") else {})
    return [known.get(name, UNKNOWN) for name in SCHEMA[Kind.MEMORY].args]


def _worker(scheduler: Any) -> Any:
    """Return the worker that the calling engine has in this process, or None if there are others, or none."""
    if scheduler.vllm_config.parallel_config.world_size != 1:
        return None
    worker = getattr(getattr(calling_executor(), "driver_worker", None), "worker", None)
    return worker if hasattr(worker, "model_runner") else None


def calling_executor() -> Any:
    """Return the executor of the engine that is being made by a caller, or None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (executor := getattr(frame.f_locals.get("self"), "model_executor", None)) is not None:
            return executor
        frame = frame.f_back
    return None


def _pool(worker: Any) -> int:
    """Return the device memory of the KV tensors, each piece of memory once: layers may share one."""
    pieces = {}
    for tensor in _tensors(worker.model_runner.kv_caches):
        if tensor.device.type == worker.device.type:
            piece = tensor.untyped_storage()
            pieces[piece.data_ptr()] = piece.nbytes()
    return sum(pieces.values())


def _tensors(caches: Any) -> Iterator[Any]:
    """Yield the tensor or tensors of each layer."""
    for one in caches:
        if isinstance(one, list | tuple):
            yield from _tensors(one)
        elif one is not None:
            yield one


def _measured(worker: Any) -> dict[str, int]:
    weights = int(worker.model_runner.model_memory_usage)
    known = {"device_total": int(worker.init_snapshot.total_memory), "weights": weights}
    if worker.model_config.enforce_eager:
        known["graphs_actual"] = 0
    if not hasattr(worker, "available_kv_cache_memory_bytes"):
        return known  # its pool has a configured size, and it has not measured the rest
    kept = _kept_for_graphs(worker)
    if kept is not None:
        known["graphs_estimated"] = kept
    # Since 0.27 a figure of its own; what is not weights of it vLLM calls non-torch.
    together = getattr(worker, "total_consumed", None)
    non_torch = worker.non_torch_memory if together is None else together - weights
    peak = worker.requested_memory - worker.available_kv_cache_memory_bytes - (kept or 0) - weights - non_torch
    # It keeps the peak too, in some releases with what it keeps for graphs. Where that is not so, the sum is another.
    if any(abs(worker.peak_activation_memory - more - peak) < 1 for more in (0, kept or 0)):
        known |= {"non_torch": int(non_torch), "activations_peak": round(peak)}
    return known


def _kept_for_graphs(worker: Any) -> int | None:
    """Return the part of its estimate that it took off the pool, or None where it makes none."""
    import vllm.envs

    estimate = getattr(worker, "cudagraph_memory_estimate", None)
    if estimate is None:
        return None
    return int(estimate) if vllm.envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS else 0
