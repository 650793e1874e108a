"""vLLM's host tier with a worker for the CPU, which vLLM imports by name: the stock one needs an accelerator.

Its manager, its metrics and its scheduler's half are vLLM's own. `seconds_a_block` of kv_connector_extra_config makes
it slow.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class CopyingTierSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        return CopyingWorker(kv_caches, self.num_chunks, float(self.extra_config.get("seconds_a_block", 0)))


class CopyingWorker(OffloadingWorker):
    """Copies at once, and says so when a device of that speed would have."""

    def __init__(self, kv_caches: Any, chunks: int, seconds_a_block: float) -> None:
        self._caches = kv_caches
        self._host = [
            torch.zeros_like(each.tensor[:1]).repeat(chunks, *[1] * (each.tensor.dim() - 1))
            for each in kv_caches.tensors
        ]
        self._seconds_a_block = seconds_a_block
        self._free_at = 0.0
        self._due: dict[int, tuple[float, TransferResult]] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec.block_ids, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec.block_ids, store=False)

    def _copy(self, job_id: int, gpu: Any, chunks: Any, store: bool) -> bool:
        moved, first = 0, 0
        for group, size in enumerate(gpu.group_sizes):
            here = torch.from_numpy(gpu.block_ids[first : first + size]).long()
            there = torch.from_numpy(chunks[first : first + size]).long()
            for ref in self._caches.group_data_refs[group]:
                pool, host = self._caches.tensors[ref.tensor_idx].tensor, self._host[ref.tensor_idx]
                if store:
                    host[there] = pool[here]
                else:
                    pool[here] = host[there]
                moved += size * ref.page_size_bytes
            first += size
        takes_s = self._seconds_a_block * len(gpu.block_ids)
        self._free_at = max(self._free_at, time.monotonic()) + takes_s
        self._due[job_id] = self._free_at, TransferResult(job_id, True, moved, max(takes_s, 1e-4))
        return True

    def get_finished(self) -> list[TransferResult]:
        now = time.monotonic()
        return [self._due.pop(job)[1] for job, (at, _) in list(self._due.items()) if at <= now]

    def wait(self, job_ids: set[int]) -> None:
        time.sleep(
            max(0.0, max((self._due[job][0] for job in job_ids if job in self._due), default=0.0) - time.monotonic())
        )
