"""Parameters of a transfer between two engines, in vLLM's words (kv_transfer_params). Imports no torch.

The one that computes the prompt gets `do_remote_decode`, keeps the blocks when it is done, and answers with the
parameters for the other one: `do_remote_prefill`, and where the KV lies.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

import msgspec


class KVTransferParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which of the two is asked, and for the second where the KV of the prompt's first blocks can be fetched."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_endpoint: str = ""
    remote_request_id: str = ""
    remote_num_blocks: int = 0

    def check(self) -> None:
        """Raise ValueError for values that contradict each other, or an endpoint that is not of this machine."""
        if self.do_remote_decode == self.do_remote_prefill:
            raise ValueError("kv_transfer_params: one of do_remote_decode and do_remote_prefill must be true")
        if self.do_remote_prefill:
            if not self.remote_request_id or self.remote_num_blocks < 0:
                raise ValueError("kv_transfer_params: do_remote_prefill needs what the other engine answered with")
            check_endpoint(self.remote_endpoint)


def check_endpoint(endpoint: str) -> None:
    """Raise ValueError unless it is on this machine: the KV of prompts goes over it in the clear."""
    parts = urlsplit(endpoint)
    if parts.scheme == "ipc" and endpoint != "ipc://":
        return
    try:
        local = parts.scheme == "tcp" and ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        local = False
    if not local:
        raise ValueError(
            f"{endpoint!r} is not an endpoint for KV: it must be on this machine, tcp://127.0.0.1:PORT or ipc://PATH"
        )
