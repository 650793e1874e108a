"""The settings of the engine. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .faults import Faults
from .requests.request import check_endpoint

TINY: Final = "tiny"
"""The name of the model that the engine brings itself: random weights from the seed, one token a byte."""
SCHEDULING_POLICIES: Final = ("fcfs", "priority")
AUTO: Final = "auto"
GPU_NODES: Final = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""One of these is there where a process can use a GPU: NVIDIA's driver, AMD's, and both under WSL."""
DTYPES: Final = (AUTO, "float32", "float16", "bfloat16")
KV_CONNECTORS: Final = ("", "host", "peer")
KV_LEASE_SECONDS: Final = {"": 0.0, "host": 0.0, "peer": 30.0}
"""By connector: a copy within the process always ends, another engine may be gone."""
MAX_HASH_KEY_BYTES: Final = 64
DEFAULT_KV_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class EngineConfig:
    """One engine's settings, in the field's own names. Raises ValueError, naming the setting and what it may be.

    model: `tiny`, or a local Hugging Face directory. served_model_name: what clients call it; the model's own name
    unless given. num_gpu_blocks_override: blocks of the pool, the reserved one included (None: as many as
    kv_cache_memory_bytes hold). If that is None too, the size follows from gpu_memory_utilization, a share of the
    device's memory, or on the CPU from memory_budget, the bytes that the process is to stay within, or DEFAULT_KV_BYTES
    without a budget. max_model_len: None is the model's own. hash_key: of the prefix hashes (empty: random).
    kv_connector: `host` keeps the KV of finished requests in host memory, `peer` hands it to another engine, which may
    fetch it at kv_transfer_endpoint (a port of * picks a free one). kv_lease_seconds: how long the connector may keep a
    finished request's blocks: 0 is until it reports completion, None the connector's own (KV_LEASE_SECONDS).
    device: `auto` is `cuda` where there is a GPU. dtype: `auto` is the checkpoint's own on a GPU, float32 on the CPU.
    async_scheduling: plan a step while the one before it runs. enforce_eager: capture no decodes as graphs. None: only
    on the CPU, which has no graphs: with False, decodes are copied and padded there as for a replay, and computed.
    """

    model: str = TINY
    served_model_name: str = ""
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    memory_budget: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    scheduling_policy: str = "fcfs"
    enable_prefix_caching: bool = True
    dtype: str = AUTO
    device: str = AUTO
    seed: int = 0
    async_scheduling: bool = False
    enforce_eager: bool | None = None
    kv_connector: str = ""
    kv_lease_seconds: float | None = None
    kv_transfer_endpoint: str = "tcp://127.0.0.1:*"
    faults: tuple[str, ...] = ()
    hash_key: bytes = b""

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError(f"model is empty: give {TINY!r} or a local Hugging Face directory")
        if not self.served_model_name:
            name = self.model if self.model == TINY else Path(self.model).resolve().name
            object.__setattr__(self, "served_model_name", name)
        if self.device == AUTO:
            has_gpu = os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(Path(node).exists() for node in GPU_NODES)
            object.__setattr__(self, "device", "cuda" if has_gpu else "cpu")
        if self.dtype == AUTO and self.device == "cpu":
            object.__setattr__(self, "dtype", "float32")
        self._check_sizes()
        self._check_choices()
        if self.kv_lease_seconds is None:
            object.__setattr__(self, "kv_lease_seconds", KV_LEASE_SECONDS[self.kv_connector])
        if not 0 <= (self.kv_lease_seconds or 0) < 1e9:
            raise ValueError(f"kv_lease_seconds is {self.kv_lease_seconds} and must be 0 (no lease) or above")
        if self.device != "cpu" and self.device.partition(":")[0] != "cuda":
            raise ValueError(f"device is {self.device!r} and must be 'auto', 'cpu', 'cuda' or 'cuda:N'")
        if self.kv_connector == "host" and not self.enable_prefix_caching:
            raise ValueError("kv_connector 'host' finds KV by prefix hashes: it needs enable_prefix_caching")
        check_endpoint(self.kv_transfer_endpoint)
        if len(self.hash_key) > MAX_HASH_KEY_BYTES:
            raise ValueError(f"hash_key has {len(self.hash_key)} bytes and may have {MAX_HASH_KEY_BYTES} at most")
        object.__setattr__(self, "faults", tuple(self.faults))
        Faults.parse(self.faults)

    def _check_sizes(self) -> None:
        for name in ("block_size", "kv_cache_memory_bytes", "memory_budget", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value} and must be at least 1")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization} and must be above 0 and at most 1: a share"
            )
        if self.memory_budget is not None and self.device != "cpu":
            raise ValueError(
                f"memory_budget is {self.memory_budget} and is for the CPU: of {self.device!r} the engine takes a"
                " share, gpu_memory_utilization"
            )
        if self.num_gpu_blocks_override is not None and self.num_gpu_blocks_override < 2:
            raise ValueError(
                f"num_gpu_blocks_override is {self.num_gpu_blocks_override} and must be at least 2, one of which is"
                " reserved. Leave it out to let the memory decide"
            )
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(
                f"max_model_len is {self.max_model_len} and must be at least 2, a token of prompt and one of output."
                " Leave it out for the model's own"
            )

    def _check_choices(self) -> None:
        for name, choices in (
            ("scheduling_policy", SCHEDULING_POLICIES),
            ("dtype", DTYPES),
            ("kv_connector", KV_CONNECTORS),
        ):
            if getattr(self, name) not in choices:
                known = ", ".join(repr(choice) for choice in choices)
                raise ValueError(f"{name} is {getattr(self, name)!r} and must be one of {known}")

    @property
    def captures_graphs(self) -> bool:
        """Whether decodes are captured at the start, and replayed."""
        return self.device != "cpu" if self.enforce_eager is None else not self.enforce_eager
