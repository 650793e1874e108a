"""An engine's description of itself at start: the text that goes with STARTED."""

from __future__ import annotations

from typing import Any

import msgspec

from .wire import NotAFrame


class KVGroup(msgspec.Struct, omit_defaults=True):
    """One KV cache group: the layers that share block tables. `window` in tokens, 0 for full attention."""

    kind: str = "full_attention"
    layers: int = 0
    window: int = 0


class EngineDescription(msgspec.Struct, omit_defaults=True):
    """The engine's configuration in the field's own names. An empty string or 0 means not reported."""

    engine: str = ""
    version: str = ""
    model: str = ""
    served_model_name: str = ""
    device: str = ""
    pid: int = 0
    block_size: int = 0
    num_gpu_blocks: int = 0
    max_model_len: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    enable_prefix_caching: bool = False
    scheduling_policy: str = ""
    kv_connector: str = ""
    kv_role: str = ""
    """The connector's, in vLLM's words: kv_producer, kv_consumer or kv_both."""
    kv_lease_s: float = 0
    """How long the connector keeps a finished request's blocks at the least, where consumers may renew that."""
    kv_bytes_per_block: int = 0
    reports_modes: bool = False
    """Whether the stream has ENGINE_MODE events. Without them, a paused vLLM looks like one that stands still."""
    queues_ready: bool = False
    """Whether each pass puts the requests that are READY back in the queue, and reports each of them as QUEUED."""
    groups: list[KVGroup] = []
    faults: list[str] = []
    """Faults that were switched on by hand, as given to `--fault`. Every page shows them."""
    other: dict[str, Any] = {}

    def to_json(self) -> str:
        """Return the text for STARTED."""
        return msgspec.json.encode(self).decode()


def parse_description(text: str) -> EngineDescription:
    """Return the description in `text`, without fields from a newer release. Raises NotAFrame if it is none."""
    if not text:
        return EngineDescription()
    try:
        return msgspec.json.decode(text, type=EngineDescription)
    except (msgspec.DecodeError, RecursionError) as error:
        raise NotAFrame(f"the engine's description does not follow the contract: {error}") from error
