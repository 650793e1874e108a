"""A thread with a connection to NATS, from its start until it is stopped."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Final

from nats.aio.client import Client
from nats.js import JetStreamContext

from ..base.errors import CannotTell
from ..base.supervision import SupervisedThread, Supervisor
from .bus_config import BusConfig
from .bus_connection import NATS_ERRORS, REQUEST_TIMEOUT_S, StreamFull, connect_bus

logger = logging.getLogger(__name__)

STOP_S: Final = 5.0
"""So long what a subclass does at the end may take."""
BEGIN_AGAIN_S: Final = 5.0
STOP_LOOK_S: Final = 0.25
BUS_TURN_WITHIN_S: Final = 10.0
CLOSED_LOOK_S: Final = 1.0
CANCEL_AGAIN_S: Final = 0.5


class ClosedByServer(Exception):
    """The client gave up for good, as it does when credentials expire. The next connection reads them again."""


class BusThread:
    """Connects, runs `work` until stopped, then `finish`. A failure that nothing expects is logged, and work resumes.

    Subclasses implement `work`, and `before` and `finish` if they need to.
    """

    def __init__(self, config: BusConfig, name: str, supervisor: Supervisor | None = None) -> None:
        self.config = config
        self.supervisor = supervisor or Supervisor()
        self._client: Client | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection_error = ""
        self._thread = SupervisedThread(name, "delivery", self._turn, self.supervisor, within_s=BUS_TURN_WITHIN_S)

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def stop(self) -> None:
        """Finish, disconnect, and wait until that is done."""
        self._thread.stop()

    @property
    def is_connected(self) -> bool:
        """Whether a server answers now."""
        return self._client is not None and self._client.is_connected

    @property
    def connection_error(self) -> str:
        """Why there is no connection now, empty if there is one."""
        return "" if self.is_connected else self._connection_error

    def lost(self, reason: str) -> None:
        """Take the reason of each attempt to connect that fails."""

    async def before(self) -> None:
        """Run beside everything else, connected or not."""

    async def work(self, streams: JetStreamContext) -> None:
        """Run while connected, and never return."""
        raise NotImplementedError

    async def finish(self, streams: JetStreamContext) -> None:
        """Run once at the end, if there ever was a connection."""

    def _turn(self) -> None:
        """Run a loop until stopped. After a failure of the loop itself, the next turn begins with a new one."""
        self._client = None
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        working = asyncio.create_task(self._work())
        while not self._thread.is_stopping:
            self._thread.beat()
            await asyncio.sleep(STOP_LOOK_S)
        working.cancel()
        while not working.done():  # Python 3.11 loses a cancellation that comes as what is waited for is done
            await asyncio.wait({working}, timeout=CANCEL_AGAIN_S)
            for task in asyncio.all_tasks():
                if task.cancelling():
                    task.cancel()
        if self._client is not None:
            with suppress(*NATS_ERRORS, CannotTell, StreamFull):
                await asyncio.wait_for(self.finish(self._streams(self._client)), STOP_S)
            with suppress(*NATS_ERRORS):
                await asyncio.wait_for(self._client.close(), STOP_S)

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
        while True:
            if self._client is None or self._client.is_closed:
                self._client = await connect_bus(self.config, on_error=self._note_error)
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self.work(self._streams(self._client)))
                    tasks.create_task(_until_closed(self._client))
            except* ClosedByServer:
                logger.warning("NATS ended the connection: %s", self.connection_error)

    def _note_error(self, text: str) -> None:
        self._connection_error = text
        if not self.is_connected:
            self.lost(text)

    def _streams(self, client: Client) -> JetStreamContext:
        return client.jetstream(timeout=REQUEST_TIMEOUT_S)


async def _until_closed(client: Client) -> None:
    """Raise ClosedByServer once the client has given up."""
    while not client.is_closed:  # noqa: ASYNC110 (a client reports its end to no event)
        await asyncio.sleep(CLOSED_LOOK_S)
    raise ClosedByServer
