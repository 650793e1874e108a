"""A vLLM plug-in for tests: what its KV connectors need where two engines share a few cores and no accelerator."""

from __future__ import annotations

import os
from typing import Any, Final

BETWEEN_LOOKS_US: Final = 1
"""Of the thread that carries NIXL's transfers out."""


def register() -> None:
    """Have several engines share a few cores: no worker is pinned to the last one, and no thread of NIXL's spins.

    Name a device: Mooncake asks for the accelerator's number.
    """
    import torch
    from nixl_cu12 import _bindings

    make_agent = _bindings.nixlAgent

    def nixl_agent(name: str, config: Any) -> Any:
        config.pthrDelay = BETWEEN_LOOKS_US
        return make_agent(name, config)

    _bindings.nixlAgent = nixl_agent
    os.sched_setaffinity = lambda _process, _cores: None
    torch.accelerator.current_device_index = lambda: 0
