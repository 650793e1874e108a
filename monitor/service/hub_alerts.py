"""Sends alerts for all engines of a tenant from whichever hub holds the lease, each once.

The lease carries what every receiver was sent, as sequences of the events stream, and is written right after a
delivery. A hub that takes over reads the stream, takes those as delivered, and sends the rest under the same ids. A
delivery that was under way when a hub died, or that its last write missed, is sent again with its id.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
from nats.js import JetStreamContext

from ..base import limits
from ..base.errors import NotKnown
from ..detectors.findings import Transition
from ..detectors.registry import catalogue
from ..fleet.bus_connection import NATS_ERRORS, StreamMessage, compare_and_put, nats_error_text
from ..fleet.bus_messages import BUS_MAJOR
from ..fleet.bus_subjects import hubs_bucket
from ..fleet.fleet_fold import ToldFinding
from ..fleet.fleet_link import FleetLink
from ..fleet.hub_lease import ALERTS_KEY, HubLease, HubRecord, SentUpTo
from ..outputs.alerting.alerting import Alerts, AlertsConfig, NoSuchThing
from ..outputs.alerting.message import Silence, message_id
from ..questions.schema import AlertStateView, NotificationsView
from .hub_findings import HubFindings

logger = logging.getLogger(__name__)

ALERTS_TURN_S: Final = 0.25
RECENT_S: Final = 3_600.0
"""Transitions so far back are replayed at a takeover, so that what flaps is known to flap."""
MOST_BEYOND: Final = 500


class _StoredTransition(NamedTuple):
    """A transition of the stream: its place there, the id of its message, and when it was stored (wall s)."""

    sequence: int
    id: str
    transition: Transition
    stored_s: float


class HubAlerts:
    """The alerts of one hub: idle until it holds the lease. `take` and the coroutines belong to the link's thread."""

    def __init__(self, config: AlertsConfig, link: FleetLink, own: HubFindings) -> None:
        self.alerts: Alerts | None = None
        """The sender, while this hub holds the lease."""
        self._config = config
        self._link = link
        self._own = own
        self._lease = HubLease(link.config.agent, uuid.uuid4().hex)
        self._bucket = hubs_bucket(link.config.tenant)
        self._seen: deque[_StoredTransition] = deque(maxlen=limits.BUS_FINDINGS)
        self._new: deque[_StoredTransition] = deque()
        self._fed = 0
        self._places: dict[str, int] = {}
        """The sequence of each message that was fed."""
        self._taken_over: dict[str, SentUpTo] = {}
        """What the last holder sent. It may have read more of the stream than this hub."""
        self._turning: asyncio.Task[None] | None = None

    # ---------------------------------------------------------------- what the link receives

    def take(self, told: ToldFinding) -> None:
        """Take a transition that counts."""
        logged = told.message.transition
        if logged.judgement.code in catalogue():
            transition = Transition(logged.finding(), logged.to, logged.at_ns)
            id = message_id(logged.id, logged.to, logged.at_ns)
            stored = _StoredTransition(told.sequence, id, transition, told.stored_s)
            self._seen.append(stored)
            self._new.append(stored)

    def take_record(self, key: str, message: StreamMessage) -> None:
        """Take the lease from the bucket."""
        if key != ALERTS_KEY or not message.body:
            return
        try:
            record = msgspec.json.decode(message.body, type=HubRecord)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            logger.error("the lease of alerts cannot be read: %s", error)
            return
        if record.major > BUS_MAJOR:
            logger.error("hub %s writes a newer lease than this release reads: update this one", record.hub)
            return
        self._lease.receive(record, message.sequence, time.monotonic())

    # ---------------------------------------------------------------- the lease

    async def keep(self, streams: JetStreamContext) -> None:
        """Hold the lease when it is free, and send while it is held, for good."""
        while True:
            await self._end_of_turn()
            self._turning = asyncio.create_task(self._turn(streams))
            await asyncio.shield(self._turning)
            await asyncio.sleep(ALERTS_TURN_S)

    async def _end_of_turn(self) -> None:
        """Wait for a turn that outlived its task: it may yet send, or write a revision that the next write needs."""
        if self._turning is not None and self._turning.get_loop() is asyncio.get_running_loop():
            await asyncio.wait({self._turning})

    async def _turn(self, streams: JetStreamContext) -> None:
        try:
            await self._send_and_renew(streams)
        except (*NATS_ERRORS, sqlite3.Error) as error:
            logger.error("the lease of alerts cannot be written just now: %s", nats_error_text(error))

    async def _send_and_renew(self, streams: JetStreamContext) -> None:
        if not self._link.is_complete:
            return
        if self.alerts is not None and not self.holds():
            logger.warning("this hub has lost the lease of alerts, to %s", self._lease.record.hub or "none yet")
            await asyncio.to_thread(self._end)
        found_here = self._own.take_transitions()
        if self.alerts is not None:
            await asyncio.to_thread(self._feed, self.alerts)
            # No stream has what this hub found itself: each hub finds it, and the one that sends sends it.
            self.alerts.put(self.alerts.select(found_here))
        sent, silences = await asyncio.to_thread(self._state)
        changed = (sent, silences) != (self._lease.record.sent, self._lease.record.silences)
        if self._lease.should_write(time.monotonic(), changed=changed):
            await self._write(streams, self._lease.to_write(sent, silences))
        if self.alerts is None and self.holds():
            seen = tuple(self._seen)  # here: `take` adds to both while the thread works
            self._new.clear()
            await asyncio.to_thread(self._begin, self._lease.record, seen)

    async def _write(self, streams: JetStreamContext, record: HubRecord) -> None:
        began_s = time.monotonic()
        body = msgspec.json.encode(record)
        revision = await compare_and_put(streams, self._bucket, ALERTS_KEY, body, self._lease.revision)
        if revision:
            self._lease.written(record, revision, began_s)

    async def hand_over(self, streams: JetStreamContext) -> None:
        """Stop sending and give the lease up: this hub ends. Raises NATS_ERRORS."""
        await self._end_of_turn()
        if self.alerts is not None:
            sent, silences = await asyncio.to_thread(self._stopped)
            await self._write(streams, self._lease.to_write(sent, silences, leaving=True))

    def close(self) -> None:
        """Stop sending."""
        self._end()

    def holds(self) -> bool:
        """Whether this hub may send alerts now."""
        return self._lease.holds(time.monotonic())

    # ---------------------------------------------------------------- alerts

    def _begin(self, record: HubRecord, seen: Sequence[_StoredTransition]) -> None:
        """Begin where the last holder stopped. `seen`: the transitions of the stream until now."""
        alerts = Alerts(self._config, self.holds, self._link.supervisor)
        now_s = time.time()
        open_ids: dict[str, str] = {}
        for stored in seen:
            if stored.transition.to == "firing":
                open_ids[stored.transition.finding.id] = stored.id
            else:
                open_ids.pop(stored.transition.finding.id, None)
        last = max((stored.sequence for stored in seen), default=0)
        still_open = set(open_ids.values())
        lowest = min((sent.sequence for sent in record.sent.values()), default=0) if record.sent else last
        chosen = [
            stored
            for stored in seen
            if stored.sequence > lowest or stored.id in still_open or stored.stored_s > now_s - RECENT_S
        ]
        self._taken_over = record.sent
        sent_to = {receiver.name: record.sent.get(receiver.name) for receiver in alerts.receivers}
        for stored in chosen:
            is_past = all(_was_sent(stored, sent, still_open) for sent in sent_to.values())
            at_s = min(now_s, stored.stored_s) if is_past else now_s
            alerts.outbox.put(alerts.select([stored.transition]), at_s)
        for name, sent in sent_to.items():
            ids = [stored.id for stored in chosen if _was_sent(stored, sent, still_open)]
            alerts.outbox.assume_delivered(name, ids, now_s)
        for silence in record.silences:
            alerts.outbox.silence(silence)
        self._places = {stored.id: stored.sequence for stored in chosen}
        self._fed = last
        alerts.start()
        self.alerts = alerts
        logger.info("this hub holds the lease of alerts, and sends them")

    def _feed(self, alerts: Alerts) -> None:
        """Hand on what is new. Raises sqlite3.Error."""
        while self._new:
            stored = self._new[0]
            sent_by_last_holder = [name for name, sent in self._taken_over.items() if sent.has(stored.sequence)]
            with alerts.outbox.lock:  # senders see it only after it is known who has it
                alerts.put(alerts.select([stored.transition]))
                for name in sent_by_last_holder:
                    alerts.outbox.assume_delivered(name, [stored.id], time.time())
            self._places[stored.id] = stored.sequence
            self._fed = max(self._fed, stored.sequence)
            self._new.popleft()

    def _state(self) -> tuple[dict[str, SentUpTo], list[Silence]]:
        """Return what was sent by receiver, and the silences, as the lease carries them."""
        alerts = self.alerts
        if alerts is None:
            return self._lease.record.sent, self._lease.record.silences
        sent = {receiver.name: self._sent(alerts, receiver.name) for receiver in alerts.receivers}
        lowest = min((each.sequence for each in sent.values()), default=0)
        self._places = {id: place for id, place in self._places.items() if place > lowest}
        return sent, list(alerts.outbox.silences(time.time()).values())

    def _sent(self, alerts: Alerts, receiver: str) -> SentUpTo:
        waiting = {self._places[id] for id in alerts.outbox.pending_ids(receiver) if id in self._places}
        if not waiting:
            return SentUpTo(max(self._fed, self._taken_over.get(receiver, SentUpTo()).sequence))
        first = min(waiting)
        beyond = sorted(place for place in self._places.values() if place > first and place not in waiting)
        return SentUpTo(first - 1, beyond[:MOST_BEYOND])

    def _stopped(self) -> tuple[dict[str, SentUpTo], list[Silence]]:
        alerts = self.alerts
        assert alerts is not None
        alerts.stop_sending()
        return self._state()

    def _end(self) -> None:
        alerts, self.alerts = self.alerts, None
        if alerts is not None:
            alerts.close()

    # ---------------------------------------------------------------- what can be asked

    def sending(self) -> Alerts:
        """Return the alerts of this hub. Raises NoSuchThing that names the hub that sends them."""
        if not self._config.receivers:
            raise NoSuchThing("this hub sends no alerts: start `monitor hub` with --alert URL")
        if self.alerts is None:
            holder = self._lease.record.hub
            raise NoSuchThing(f"hub {holder} sends the alerts: ask that one" if holder else "no hub sends alerts yet")
        return self.alerts

    def state(self) -> AlertStateView:
        """Return alerts as a whole. Raises NotKnown where another hub sends them."""
        if not self._config.receivers:
            return AlertStateView()
        try:
            return self.sending().state()
        except NoSuchThing as error:
            raise NotKnown(str(error)) from error

    def about(self, finding: str) -> NotificationsView:
        """Return the notifications of one finding. None where another hub sends alerts."""
        alerts = self.alerts
        return alerts.about(finding) if alerts is not None else NotificationsView()


def _was_sent(stored: _StoredTransition, sent: SentUpTo | None, still_open: set[str]) -> bool:
    """Return whether a receiver has a message. A new receiver gets the findings that still fire and no past ones."""
    if sent is None:
        return stored.id not in still_open
    return sent.has(stored.sequence)
