"""The thread of a service that publishes what it finds, and holds the leases of the engines that it processes.

Readers hand over transitions with `put`, which writes them to the spool. The thread sends the spool, takes a point of
each engine every POINT_EVERY_S, and keeps heartbeat and leases. While NATS is away the service works on as before, and
the spool grows up to its bound.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from nats.errors import TimeoutError as NatsTimeout
from nats.js import JetStreamContext

from ..base.errors import CannotTell
from ..detectors.findings import Transition
from ..questions.fleet_schema import STRIP_BUCKET_S, STRIP_BUCKETS, BusFigures, usage_strip
from ..questions.pipeline import Pipeline
from ..questions.schema import EngineView
from .agent_answers import AgentAnswers, Extra
from .bus_config import BusConfig
from .bus_connection import NATS_ERRORS, StreamFull, nats_error_text, publish_once
from .bus_messages import MAX_LISTED_IDS, AnnotationKind, AnnotationMessage, PointMessage, finding_message
from .bus_spool import BusSpool, Spooled
from .bus_thread import BusThread
from .lease_keeper import LEASE_TURN_S, LeaseKeeper, ShareEngines
from .open_findings import left_behind

logger = logging.getLogger(__name__)

POINT_EVERY_S: Final = 5.0
"""A fleet view needs no more. The agent's own history has a point of every batch."""
STRIP_POINTS: Final = round(STRIP_BUCKETS * STRIP_BUCKET_S / POINT_EVERY_S)
SEND_MESSAGES: Final = 64
"""Sent together, each acknowledged by itself."""
IDLE_S: Final = 0.2
PAUSE_S: Final = 1.0
"""After an attempt to send that failed."""
MAX_UNSPOOLED: Final = 1_000
REFUSED: Final = "permissions violation"
NOT_YET: Final = "no connection yet"


class BusLink(BusThread):
    """Publishes what `watch` finds for `config.tenant`. `path` is the spool's file (None: in memory).

    share: how the engines of leases begin and end here, or None if every engine is this agent's own. extras: questions
    of hubs beside those of `Query`. Raises ValueError if the spool cannot be used, or for credentials that cannot be
    read.
    """

    def __init__(
        self,
        config: BusConfig,
        watch: Pipeline,
        path: Path | None = None,
        share: ShareEngines | None = None,
        extras: dict[str, Extra] | None = None,
    ) -> None:
        super().__init__(config, "the link to NATS", watch.supervisor)
        self._watch = watch
        try:
            if path is not None:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.spool = BusSpool(path, config.tenant, config.agent)
        except (OSError, sqlite3.Error) as error:
            raise ValueError(
                f"--data: messages to NATS cannot be kept in {path} ({error}). Name another directory"
            ) from error
        self.leases = LeaseKeeper(config, uuid.uuid4().hex, self.spool, share, self.annotate) if share else None
        self._published: Counter[str] = Counter()
        self._error = NOT_YET
        self._away_since_s = time.monotonic()
        self._unspooled: list[Transition] = []
        self._put_lock = threading.Lock()
        self._greeted: set[str] = set()
        self._answers = AgentAnswers(config, watch, extras)
        self._strips: dict[str, deque[tuple[int, float | None]]] = {}

    def stop(self) -> None:
        """Send what is left for a moment, hand the leases over, and disconnect. Unsent messages stay in the spool."""
        super().stop()
        self._answers.close()
        self.spool.close()

    # ---------------------------------------------------------------- called by other threads

    def put(self, transitions: Sequence[Transition]) -> None:
        """Take transitions. When this returns they are in the spool, or kept for the next call if it cannot be written.

        Transitions of an engine wait while its lease is in doubt.
        """
        with self._put_lock:
            self._unspooled += transitions
            if not self._unspooled:
                return
            try:
                for transition in self._unspooled:
                    message = finding_message(transition, self.config.agent)
                    self.spool.put([message], is_sure=self._is_sure(transition.finding.judgement.engine))
                self._unspooled = []
            except sqlite3.Error as error:
                if transitions:
                    logger.error("transitions cannot be kept for NATS, and are tried again: %s", error)
                self.spool.dropped["finding"] += len(self._unspooled[:-MAX_UNSPOOLED])
                del self._unspooled[:-MAX_UNSPOOLED]

    def annotate(self, engine: str, kind: AnnotationKind, text: str) -> None:
        """Publish something about an engine that is no finding."""
        message = AnnotationMessage(
            id=uuid.uuid4().hex, agent=self.config.agent, at_ns=time.time_ns(), engine=engine, kind=kind, text=text
        )
        with suppress(sqlite3.Error):
            self.spool.put([message])

    def figures(self) -> BusFigures:
        """Return how the bus is."""
        error = self._error
        if self.leases is not None and self.leases.namesake:
            error = f"another process uses --nats-agent {self.config.agent} too: give each agent a name of its own"
        return BusFigures(
            agent=self.config.agent,
            tenant=self.config.tenant,
            connected=self.is_connected,
            error=error,
            away_s=round(time.monotonic() - self._away_since_s, 1) if error else 0.0,
            spooled=self.spool.messages,
            spooled_bytes=self.spool.bytes,
            published=dict(self._published),
            dropped=dict(self.spool.dropped),
            leases=len(self.leases.held()) if self.leases is not None else 0,
            taken_over=self.leases.taken_over if self.leases is not None else 0,
            answered=dict(self._answers.counts),
        )

    def _is_sure(self, engine: str) -> bool:
        return self.leases is None or engine in self._watch.own_names or self.leases.relies_on(engine)

    # ---------------------------------------------------------------- the thread

    async def before(self) -> None:
        """Take points. While NATS is away they wait in the spool."""
        while True:
            with suppress(sqlite3.Error):  # the next ones are as good
                self.spool.put(await asyncio.to_thread(self._points))
            await asyncio.sleep(POINT_EVERY_S)

    async def work(self, streams: JetStreamContext) -> None:
        """Send the spool, and keep the leases."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._forever(self._send, streams, IDLE_S))
            tasks.create_task(self._forever(self._greet, streams, IDLE_S))
            if self._client is not None:
                tasks.create_task(self._answers.serve(self._client))
            if self.leases is not None:
                tasks.create_task(self.leases.follow(streams))
                tasks.create_task(self._forever(self.leases.turn, streams, LEASE_TURN_S))

    async def _greet(self, streams: JetStreamContext) -> None:
        """Go on with the open findings on the bus for each engine that is new here, after a restart for example. What
        another agent left was read with the lease.
        """
        engines = set(self._watch.fleet.engines)
        self._greeted &= engines
        for engine in engines - self._greeted:
            if self.leases is None or not self.leases.has_read(engine):
                left = await left_behind(streams, self.config, engine, self.config.agent, self.spool)
                if left.findings:
                    self._watch.expect(engine, left.findings)
            self._greeted.add(engine)

    def lost(self, reason: str) -> None:
        """Show why there is no connection."""
        self._failed(self._no_server(reason))

    def _no_server(self, reason: str) -> CannotTell:
        return CannotTell(f"no server of {', '.join(self.config.urls)} answers" + (f" ({reason})" if reason else ""))

    async def finish(self, streams: JetStreamContext) -> None:
        """Send what is left, and hand the leases over."""
        while await self._send(streams):
            pass
        if self.leases is not None:
            await self.leases.hand_over_all(streams)
            await self._send(streams)

    async def _forever(
        self, call: Callable[[JetStreamContext], Awaitable[object]], streams: JetStreamContext, pause_s: float
    ) -> None:
        """Call again and again. A failure is reported, and the next call follows."""
        while True:
            try:
                is_more = await call(streams)
                await asyncio.sleep(0 if is_more else pause_s)
            except (*NATS_ERRORS, CannotTell, StreamFull, sqlite3.Error) as error:
                self._failed(error)
                await asyncio.sleep(PAUSE_S)

    async def _send(self, streams: JetStreamContext) -> bool:
        """Send a batch of the spool. Return whether the spool had one. Raises the first error, after all have ended."""
        batch = self.spool.batch(SEND_MESSAGES)
        if not batch:
            if not self.is_connected:
                raise self._no_server(self.connection_error)
            self._works()
            return False
        doubtful = {each.engine for each in batch if each.kind == "finding" and not self._is_sure(each.engine)}
        if doubtful:  # another agent may process them by now
            self.spool.doubt(doubtful)
            return True
        outcomes = await asyncio.gather(*(self._send_one(streams, each) for each in batch), return_exceptions=True)
        stored = [each for each, outcome in zip(batch, outcomes, strict=True) if outcome is None]
        self.spool.sent([each.number for each in stored])
        self._published.update(each.kind for each in stored)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        self._works()
        return True

    async def _send_one(self, streams: JetStreamContext, message: Spooled) -> None:
        await publish_once(streams, message.subject, message.body, message.id, alone=message.kind != "point")

    def _points(self) -> list[PointMessage]:
        at_ns = time.time_ns()
        with self._watch.locked():
            engines = self._watch.engines()
            self._strips = {name: kept for name, kept in self._strips.items() if name in self._watch.fleet.engines}
            open_ids: dict[str, list[str]] = {}
            for finding in (*self._watch.lifecycle.firing(), *self._watch.lifecycle.set_aside_since(0)):
                open_ids.setdefault(finding.judgement.engine, []).append(finding.id)
        return [
            PointMessage(
                id=f"{self.config.agent}/{each.engine}/{at_ns}",
                agent=self.config.agent,
                at_ns=at_ns,
                engine=each,
                open=open_ids.get(each.engine, [])[:MAX_LISTED_IDS],
                zone=self.config.zone,
                node=self.config.node,
                service=self.config.service,
                kv_role=self.config.kv_role,
                usage=self._strip(each, at_ns),
            )
            for each in engines
            if self._is_sure(each.engine) and each.engine in self._greeted  # it lists what goes on from before
        ]

    def _strip(self, engine: EngineView, at_ns: int) -> list[int]:
        kept = self._strips.setdefault(engine.engine, deque(maxlen=STRIP_POINTS))
        kept.append((at_ns, engine.usage))
        return usage_strip(kept, at_ns)

    def _failed(self, error: BaseException) -> None:
        text = nats_error_text(error)
        if isinstance(error, NatsTimeout) and REFUSED in self._connection_error.lower():
            # NATS answers a request that it does not allow with an error of the connection, and not with an answer.
            text = (
                f"these credentials may not do what agent {self.config.agent} does ({self._connection_error}): give"
                f" them what `monitor bus permissions --agent {self.config.agent}` prints"
            )
        if not self._error:
            self._away_since_s = time.monotonic()
            logger.error("NATS takes nothing just now, and messages wait in the spool: %s", text)
        self._error = text

    def _works(self) -> None:
        if self._error and self._error != NOT_YET:
            logger.info("NATS takes messages again")
        self._error = ""
