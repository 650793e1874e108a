"""A vLLM plug-in for tests: the client of the engine's process loses requests with `vanish` in their id."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Wrap the method that sends requests to the engine's process."""
    from vllm.v1.engine.core_client import AsyncMPClient

    send = AsyncMPClient.add_request_async

    async def add_request_async(self: Any, request: Any) -> None:
        if "vanish" not in request.request_id:
            await send(self, request)

    AsyncMPClient.add_request_async = add_request_async
