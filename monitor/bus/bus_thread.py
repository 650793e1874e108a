"""A thread with a connection to NATS, from its start until it is stopped."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress
from typing import Final

from nats.aio.client import Client
from nats.js import JetStreamContext

from kvscope.monitor.bus.bus_config import BusConfig
from kvscope.monitor.bus.bus_connection import NATS_ERRORS, REQUEST_TIMEOUT_S, StreamFull, connect_bus
from kvscope.monitor.errors import CannotTell

logger = logging.getLogger(__name__)

STOP_S: Final = 5.0
"""So long what a subclass does at the end may take."""
BEGIN_AGAIN_S: Final = 5.0


class BusThread:
    """Connects, runs `work` until stopped, then `finish`. A failure that nothing expects is logged, and work resumes.

    Subclasses implement `work`, and `before` and `finish` if they need to.
    """

    def __init__(self, config: BusConfig, name: str) -> None:
        self.config = config
        self._client: Client | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name=name, daemon=True)

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def stop(self) -> None:
        """Finish, disconnect, and wait until that is done."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def is_connected(self) -> bool:
        """Whether a server answers now."""
        return self._client is not None and self._client.is_connected

    async def before(self) -> None:
        """Run beside everything else, connected or not."""

    async def work(self, streams: JetStreamContext) -> None:
        """Run while connected; never return."""
        raise NotImplementedError

    async def finish(self, streams: JetStreamContext) -> None:
        """Run once at the end, if there ever was a connection."""

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        working = asyncio.create_task(self._work())
        await asyncio.to_thread(self._stopping.wait)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        if self._client is not None:
            with suppress(*NATS_ERRORS, CannotTell, StreamFull):
                await asyncio.wait_for(self.finish(self._streams(self._client)), STOP_S)
            with suppress(*NATS_ERRORS):
                await self._client.close()

    async def _work(self) -> None:
        while True:
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self.before())
                    tasks.create_task(self._connected())
            except Exception:
                logger.exception("the connection to NATS begins anew")
            await asyncio.sleep(BEGIN_AGAIN_S)

    async def _connected(self) -> None:
        if self._client is None:
            self._client = await connect_bus(self.config)
        await self.work(self._streams(self._client))

    def _streams(self, client: Client) -> JetStreamContext:
        return client.jetstream(timeout=REQUEST_TIMEOUT_S)
