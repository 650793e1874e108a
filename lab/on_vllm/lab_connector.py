"""A KV connector that vLLM imports by name: the lab decides what it fetches and keeps.

`lab` is set once the scheduler is there. It stands in for the other engine of a prefill/decode pair.
"""

from __future__ import annotations

import inspect
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class LabConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Fetches the prompts and keeps the blocks of the requests that its lab names."""

    lab: Any = None

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        up_to_0_10 = "kv_cache_config" not in inspect.signature(KVConnectorBase_V1).parameters
        super().__init__(vllm_config, role, *(() if up_to_0_10 else (kv_cache_config,)))
        self._block_size = vllm_config.cache_config.block_size
        self._asked: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens of the prompt the other engine has, once for each request."""
        whole = (request.num_prompt_tokens - 1) // self._block_size * self._block_size
        if self.lab is None or request.request_id in self._asked or whole <= num_computed_tokens:
            return 0, False
        return (whole - num_computed_tokens, True) if self.lab.fetches(request) else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Begin the fetch."""
        if num_external_tokens:
            self._asked.add(request.request_id)
            self.lab.fetch_begins(request, -(-num_external_tokens // self._block_size))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return nothing of interest: the lab has the worker's part."""
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Return whether the blocks are kept for the other engine."""
        if request.status.name == "FINISHED_ABORTED" or not self.lab.keeps(request):
            return False, None
        self.lab.keeping_begins(request, len(block_ids))
        return True, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: there is no model."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: there is no model."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: there is no model."""

    def wait_for_save(self) -> None:
        """Do nothing: there is no model."""


class MooncakeLabConnector(LabConnector):
    """The same with a lease as Mooncake's connector has it: vLLM's environment shows how long it lasts."""


class NixlLabConnector(LabConnector):
    """The same with a lease as NIXL's connector has it, which consumers renew: vLLM's settings show its length."""
