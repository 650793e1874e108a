"""Words of engines' descriptions that identify no company or host: vLLM, SGLang and kvscope define them."""

from __future__ import annotations

import re
from typing import Final

ENGINES: Final = frozenset(("", "kvscope", "vllm", "sglang", "tensorrt-llm"))
DEVICES: Final = frozenset(("", "cuda", "cpu", "rocm", "hip", "xpu", "hpu", "tpu", "npu", "neuron", "mps", "auto"))
POLICIES: Final = frozenset(("", "fcfs", "priority", "lpm", "dfs-weight", "lof", "random"))
CONNECTORS: Final = frozenset(
    (
        "",
        "host",
        "peer",
        "DecodeBenchConnector",
        "ExampleConnector",
        "ExampleHiddenStatesConnector",
        "FlexKVConnectorV1",
        "HF3FSKVConnector",
        "HiSparseConnector",
        "LMCacheConnector",
        "LMCacheConnectorV1",
        "LMCacheMPConnector",
        "MoRIIOConnector",
        "MooncakeConnector",
        "MooncakeStoreConnector",
        "MultiConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
        "OffloadingConnector",
        "P2pNcclConnector",
        "SharedStorageConnector",
        "SimpleCPUOffloadConnector",
    )
)
GROUP_KINDS: Final = frozenset(
    (
        "full_attention",
        "sliding_window",
        "AttentionSpec",
        "ChunkedLocalAttentionSpec",
        "CircularBufferSpec",
        "CrossAttentionSpec",
        "EncoderOnlyAttentionSpec",
        "FullAttentionSpec",
        "HiSparseHotSpec",
        "HiSparseResidentSpec",
        "HiddenStateCacheSpec",
        "KVCacheSpec",
        "MLAAttentionSpec",
        "MambaSpec",
        "RSWASpec",
        "SinkFullAttentionSpec",
        "SlidingWindowMLASpec",
        "SlidingWindowSpec",
        "TQFullAttentionSpec",
        "UniformTypeKVCacheSpecs",
    )
)
FAULT_SETTING: Final = re.compile(r"(?P<code>[a-z]+\.[a-z-]+)(?P<keys>(?::(?:every|after|limit)=\d{1,12})*)")
"""A fault of kvscope's own engine, as `--fault` takes it."""
RELEASE_NUMBER: Final = re.compile(r"\d{1,6}(?:\.\d{1,6}){0,3}(?:(?:a|b|rc|\.dev|\.post)\d{1,6}){0,3}")
"""A release's number. A build's suffix, such as `+acme.3`, may name a company."""
PORT_AND_RANK: Final = re.compile(r"\d{1,5}(?:/\d{1,5})?")
"""The end of an engine's name: its port, and its rank."""
