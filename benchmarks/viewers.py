"""Viewers of the web app without a browser, as `benchmarks.web` starts them in a process of their own.

    python -m benchmarks.viewers URL PATH [PATH ...]

Each connects as the page does, sends its path, and receives the content, until stdin is closed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import httpx2
import websockets


async def look(url: str, path: str, push: str, reported: asyncio.Event) -> None:
    """Be a viewer: answer where one is, and take what is pushed."""
    address = url.replace("http", "ws", 1) + "/_dash-ws-callback"
    async with websockets.connect(address, origin=websockets.Origin(url), max_size=None) as socket:
        asks = {"output": push, "outputs": [], "inputs": [], "state": [], "changedPropIds": []}
        await socket.send(
            json.dumps({"type": "callback_request", "requestId": path, "rendererId": "", "payload": asks})
        )
        async for text in socket:
            stated = json.loads(text)
            for one in stated if isinstance(stated, list) else [stated]:
                await _answer(socket, url + path, one)
            reported.set()


async def _answer(socket: websockets.ClientConnection, address: str, stated: dict[str, Any]) -> None:
    if stated["type"] == "get_props_request":
        answer = {"type": "get_props_response", "requestId": stated["requestId"], "payload": {"href": address}}
        await socket.send(json.dumps(answer))
    elif stated["type"] != "set_props":
        raise SystemExit(f"the page's push ended: {stated}")


async def main() -> None:
    url, *paths = sys.argv[1:]
    async with httpx2.AsyncClient() as client:
        callbacks = (await client.get(f"{url}/_dash-dependencies")).json()
    push = next(callback["output"] for callback in callbacks if callback["persistent"])
    reported = [asyncio.Event() for _ in paths]
    async with asyncio.TaskGroup() as group:
        viewers = [group.create_task(look(url, path, push, one)) for path, one in zip(paths, reported, strict=True)]
        await asyncio.gather(*(one.wait() for one in reported))
        print("all are told", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for viewer in viewers:
            viewer.cancel()


if __name__ == "__main__":
    asyncio.run(main())
