"""A vLLM plug-in for tests: the client of the engine's process loses requests with `vanish` in their id."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def register() -> None:
    """Wrap the method that sends requests to the engine's process."""
    from vllm.v1.engine.core_client import AsyncMPClient

    send = AsyncMPClient.add_request_async

    async def add_request_async(self: Any, request: Any) -> None:
        if "vanish" not in request.request_id:
            await send(self, request)

    AsyncMPClient.add_request_async = add_request_async


def announce_losing(directory: Path) -> None:
    """What an installation of this plug-in would leave for a vLLM that is started there."""
    info = directory / "found" / "losing_front_end-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: losing-front-end\nVersion: 1.0\n")
    entry = "losing = tests.probes.losing_front_end:register"
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry}\n")
