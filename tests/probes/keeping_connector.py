"""A KV connector for tests, which vLLM imports by name: it keeps the blocks of each request that was answered in full
for a while, and until RELEASES is set if its id has `keep` in it. Prompts of ids with `load` in it are fetched from
elsewhere, but for the last block. Of prompts with `slow` in their id it cannot tell at first how much it has.
"""

from __future__ import annotations

import inspect
import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

SLOW = 30
PASSES_OF_A_LOAD = 3
STUCK = False
RELEASES = False


class TransfersDone(KVConnectorMetadata):
    """Requests whose blocks the worker needs no longer, and those whose load has ended."""

    def __init__(self, sent: set[str], received: set[str]) -> None:
        self.sent = sent
        self.received = received


class KeepingConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        up_to_0_10 = "kv_cache_config" not in inspect.signature(KVConnectorBase_V1).parameters
        super().__init__(vllm_config, role, *(() if up_to_0_10 else (kv_cache_config,)))
        self._block_size = vllm_config.cache_config.block_size
        self._asked: set[str] = set()
        self._sent: set[str] = set()
        self._kept: set[str] = set()
        self._loads: dict[str, int] = {}
        """Passes until each load ends."""
        self._questions: dict[str, int] = {}

    # In the scheduler's process.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if STUCK:
            time.sleep(3600)
        if "slow" in request.request_id:
            self._questions[request.request_id] = self._questions.get(request.request_id, 0) + 1
            if self._questions[request.request_id] < SLOW:
                return None, False
        whole = (request.num_prompt_tokens - 1) // self._block_size * self._block_size
        if "load" not in request.request_id or request.request_id in self._asked or whole <= num_computed_tokens:
            return 0, False
        return whole - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._asked.add(request.request_id)
            self._loads[request.request_id] = PASSES_OF_A_LOAD

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        sent, self._sent = self._sent, set()
        if RELEASES:
            sent |= self._kept
            self._kept = set()
        self._loads = {name: passes - 1 for name, passes in self._loads.items()}
        received = {name for name, passes in self._loads.items() if passes <= 0}
        for name in received:
            del self._loads[name]
        return TransfersDone(sent, received)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        if request.status.name == "FINISHED_ABORTED":
            return False, None
        (self._kept if "keep" in request.request_id else self._sent).add(request.request_id)
        return True, None

    # In the worker.

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, TransfersDone)
        return metadata.sent or None, metadata.received or None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


class NixlKeepingConnector(KeepingConnector):
    """The same under a name by which its lease is known."""
