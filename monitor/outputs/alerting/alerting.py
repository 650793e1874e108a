"""Alerts as the service uses them: transitions in, messages out, and what can be asked and done about them.

Each receiver has an AlertSender, which tries the messages of the outbox until they are delivered.
"""

from __future__ import annotations

import logging
import random
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ...base.bounded_http import BoundedClient, HttpFailed, addresses_of
from ...base.errors import KvscopeError
from ...base.http_url import HttpUrl
from ...base.supervision import SupervisedThread, Supervisor
from ...base.text import timestamp
from ...detectors.findings import LOOK_AGAIN_S, Place, Transition
from ...detectors.judgement import Verdict
from ...history.retention import REPORT_DELETION_S
from ...questions.schema import AlertStateView, NotificationsView
from .alert_store import Delivery
from .message import (
    LEAST_VERDICT,
    AlertedFinding,
    AlertFigures,
    AlertSelection,
    AlertsView,
    Message,
    MessageCulprits,
    TriedView,
    message_id,
    silence,
)
from .outbox import Outbox
from .receivers import Receiver, ReceiverFailed, public_addresses_of, receiver_of

logger = logging.getLogger(__name__)

SEND_TIMEOUT_S: Final = 15.0
WAKE_S: Final = 1.0
"""The clock of reminders and silences."""
NO_DISK_S: Final = 5.0
LONGEST_PAUSE_S: Final = 86_400.0


class DeliveryAnswer(NamedTuple):
    """The result of one try, in words without a secret. `status` is 0 if there was no answer."""

    text: str
    status: int = 0
    retry_after_s: float = 0.0

    @property
    def is_success(self) -> bool:
        """Told."""
        return self.status // 100 == 2


def client(allow_private: bool) -> BoundedClient:
    """Return the client that `send` needs. It reads no body: nothing is to be learnt from it, and it may be long."""
    return BoundedClient(SEND_TIMEOUT_S, max_bytes=0, resolve=addresses_of if allow_private else public_addresses_of)


def send(client: BoundedClient, receiver: Receiver, message: Message) -> DeliveryAnswer:
    """Try once."""
    now = datetime.now(UTC)
    try:
        headers, body = receiver.post(message, now)
        answer = client.ask("POST", receiver.url, headers, body)
    except ReceiverFailed as error:
        return DeliveryAnswer(str(error))
    except HttpFailed as error:
        return DeliveryAnswer(f"{receiver.url.host} {error}")
    text = f"answered {answer.status}"
    if answer.status // 100 == 3:
        text += ": redirects are not followed, so name the address that it leads to"
    return DeliveryAnswer(text, answer.status, _retry_after_seconds(answer.headers.get("retry-after", ""), now))


def _retry_after_seconds(retry_after: str, now: datetime) -> float:
    """Return the seconds of Retry-After, which is a number or a date, or 0 for neither."""
    if retry_after.isdecimal():
        wanted = float(retry_after)
    else:
        try:
            wanted = (parsedate_to_datetime(retry_after).astimezone(UTC) - now).total_seconds()
        except (ValueError, OverflowError):
            return 0.0
    return min(max(wanted, 0.0), LONGEST_PAUSE_S)


class AlertSender:
    """Sends to one receiver, in a thread of its own, so that one that is slow holds up no other. `schedule` are the
    seconds before each try.
    """

    def __init__(
        self,
        outbox: Outbox,
        receiver: Receiver,
        schedule: Sequence[float],
        allow_private: bool,
        may_send: Callable[[], bool],
        supervisor: Supervisor,
    ) -> None:
        self.receiver = receiver
        self._outbox = outbox
        self._schedule = tuple(schedule)
        self._may_send = may_send
        self._connection = client(allow_private)
        self._thread = SupervisedThread(
            f"alerts to {receiver.name}", "delivery", self._turn, supervisor, within_s=SEND_TIMEOUT_S + 5
        )
        self.start = self._thread.start
        self.wake = self._thread.wake

    def close(self) -> None:
        """Stop after the current try. Unsent messages stay in the outbox."""
        self._thread.stop()
        self._connection.close()

    def _turn(self) -> float:
        try:
            return self._send_due(self._connection)
        except sqlite3.Error as error:
            logger.error("the outbox of alerts cannot be used and is tried again: %s", error)
            return NO_DISK_S

    def _send_due(self, connection: BoundedClient) -> float:
        """Try what is due. Return the seconds until something may be due again."""
        if not self._may_send():
            return WAKE_S
        self._outbox.tick(time.time())
        for delivery in self._outbox.due(self.receiver.name, time.time()):
            if self._thread.is_stopping or not self._may_send():
                return 0.0
            self._thread.beat()
            answer = send(connection, self.receiver, delivery.message)
            if not self._settle(delivery, answer):
                return 0.0  # it asked for a pause, or is gone
        due = self._outbox.next_due(self.receiver.name)
        return WAKE_S if due is None else min(WAKE_S, max(0.0, due - time.time()))

    def _settle(self, delivery: Delivery, answer: DeliveryAnswer) -> bool:
        """Record the result of a try. Return whether the receiver may get more."""
        now = time.time()
        number, name = delivery.number, self.receiver.name
        if answer.is_success:
            self._outbox.delivered(number, now, answer.text)
        elif answer.status == HTTPStatus.GONE:
            logger.warning("%s %s: it is gone, and is sent no more until a test succeeds", name, answer.text)
            self._outbox.disable(name, now, answer.text)
            return False
        elif answer.status in self.receiver.refuses or delivery.tries + 1 >= len(self._schedule):
            logger.warning("%s to %s: %s, and will not be tried again", delivery.message.id, name, answer.text)
            self._outbox.give_up(number, now, answer.text)
        else:
            wait = max(answer.retry_after_s, self._schedule[delivery.tries + 1] * random.uniform(1.0, 1.2))
            logger.info("%s to %s: %s. Next attempt in %.1f s", delivery.message.id, name, answer.text, wait)
            self._outbox.try_again(number, now + wait, answer.text)
            if answer.retry_after_s:
                self._outbox.pause(name, now + answer.retry_after_s)
                return False
        return True


SCHEDULE: Final = (0, 5, 15, 60, 300, 900, 1800, 7200, 18000, 36000, 50400, 72000, 86400)
"""Seconds before each try: three days in all, as the Standard Webhooks specification proposes, and closer together at
first, since the alert may have to wake its reader.
"""
REPEAT_S: Final = 4 * 3600.0
"""Alertmanager's default."""


@dataclass(frozen=True)
class AlertsConfig:
    """The alert settings. `receivers` are --alert URLs, `secret` signs what goes to webhooks, `path` is the outbox's
    (None: in memory). `repeat_s`: the time between reminders of an alert that still fires (0: none).
    """

    receivers: tuple[str, ...] = ()
    secret: str = ""
    allow_private: bool = False
    repeat_s: float = REPEAT_S
    look_again_s: float = LOOK_AGAIN_S
    least_verdict: Verdict = LEAST_VERDICT
    """Findings below it are held back until they reach it."""
    engines_only: bool = False
    """Whether findings about kvscope itself (blind.*) are not sent."""
    schedule: tuple[float, ...] = SCHEDULE
    path: Path | None = None
    page: HttpUrl | None = None
    """Where people open the page of kvscope, for the links in messages."""


class NoSuchThing(KvscopeError, LookupError):
    """No such receiver, delivery or silence. The message names it."""


class Alerts:
    """Notifies every receiver, each from a thread of its own, until closed. Raises BadReceiver, and ValueError if
    `path` cannot be used. may_send: asked before each message. Nothing is sent and no time passes while it is false.
    """

    def __init__(
        self,
        config: AlertsConfig,
        may_send: Callable[[], bool] = lambda: True,
        supervisor: Supervisor | None = None,
    ) -> None:
        self.config = config
        self._may_send = may_send
        self._supervisor = supervisor or Supervisor()
        self.receivers = self._receivers_of(config.receivers)
        try:
            if config.path is not None:
                config.path.parent.mkdir(parents=True, exist_ok=True)
            self.outbox = Outbox(
                config.path, self.receivers, config.repeat_s, config.look_again_s, time.time(), config.page
            )
        except (OSError, sqlite3.Error) as error:
            raise ValueError(
                f"--data: alerts cannot be kept in {config.path} ({error}). Name another directory"
            ) from error
        self._selection = AlertSelection(config.least_verdict, engines_only=config.engines_only)
        self._senders = [self._sender_of(receiver) for receiver in self.receivers]
        self._is_running = False
        self._restored_s = 0.0

    def start(self) -> None:
        """Begin to send, what an earlier life left over first."""
        self._is_running = True
        for one in self._senders:
            one.start()

    def replace_receivers(self, urls: Sequence[str]) -> None:
        """Send to these receivers from now on. One thread only. Raises BadReceiver, which changes nothing, and
        sqlite3.Error.
        """
        receivers = self._receivers_of(urls)
        names = {receiver.name for receiver in receivers}
        staying = [sender for sender in self._senders if sender.receiver.name in names]
        for sender in self._senders:
            if sender not in staying:
                sender.close()
        self.outbox.replace_receivers(receivers, time.time())
        known = {sender.receiver.name for sender in staying}
        new = [self._sender_of(receiver) for receiver in receivers if receiver.name not in known]
        self.receivers, self._senders = receivers, [*staying, *new]
        if self._is_running:
            for sender in new:
                sender.start()

    def _receivers_of(self, urls: Sequence[str]) -> list[Receiver]:
        found = [receiver_of(url, self.config.secret, self.config.allow_private) for url in urls]
        return list({receiver.name: receiver for receiver in found}.values())

    def _sender_of(self, receiver: Receiver) -> AlertSender:
        config = self.config
        return AlertSender(
            self.outbox, receiver, config.schedule, config.allow_private, self._may_send, self._supervisor
        )

    def close(self) -> None:
        """Stop. Unsent messages stay in the outbox."""
        self.stop_sending()
        self.outbox.close()

    def stop_sending(self) -> None:
        """End every try that runs, and begin no other."""
        for one in self._senders:
            one.close()

    def problem(self) -> str:
        """Write the outbox again if its file was deleted, and return that it was within the last minute, or that it
        cannot be written. One thread only.
        """
        try:
            if self.outbox.is_deleted():
                self.outbox.write_again()
                self._restored_s = time.monotonic()
        except (OSError, sqlite3.Error) as error:
            return f"the outbox was deleted and cannot be written again: {error}"
        if self._restored_s and time.monotonic() - self._restored_s < REPORT_DELETION_S:
            return "the outbox was deleted and was written again, with all alerts"
        return ""

    def _wake(self) -> None:
        for one in self._senders:
            one.wake()

    def known(self) -> dict[Place, int]:
        """Return the alerts open since an earlier run, and when each was first seen (wall ns)."""
        return self.outbox.known()

    def put(self, transitions: Sequence[Transition]) -> None:
        """Take transitions. When this returns, they are kept. Raises sqlite3.Error if they cannot be."""
        if transitions:
            self.outbox.put(transitions, time.time())
            self._wake()

    def stop_watching(self, engines: Iterable[str]) -> None:
        """Stop reminders for engines that were removed. Raises sqlite3.Error."""
        self.outbox.stop_watching(engines, time.time())

    def hand_over(self, engines: Iterable[str]) -> None:
        """Close alerts of engines that another agent watches now. Raises sqlite3.Error."""
        self.outbox.hand_over(engines)

    def resume(self, transitions: Sequence[Transition]) -> None:
        """Take what fired again as the service took up an earlier life of it: what was not told then still may be."""
        self._selection.resume(transitions, self.known())

    def select(self, transitions: Sequence[Transition]) -> list[Transition]:
        """Return those that become or change an alert now, by what was asked for (see AlertSelection)."""
        return self._selection.select(transitions)

    def view(self) -> AlertsView:
        """Receivers, open alerts, silences, and the latest deliveries."""
        return self.outbox.view(time.time())

    def state(self) -> AlertStateView:
        """Return the same for the web app."""
        view = self.view()
        return AlertStateView(view.receivers, view.open, view.silences, view.deliveries)

    def about(self, finding: str) -> NotificationsView:
        """Return the notifications of one finding, and the reasons that hold others back."""
        return self.outbox.about(finding, time.time())

    def figures(self) -> AlertFigures:
        """Return the counts of messages that wait, arrived and failed. None of it while the outbox cannot be read."""
        try:
            return self.outbox.figures(time.time())
        except sqlite3.Error:
            return AlertFigures()

    def test(self, name: str = "") -> list[TriedView]:
        """Send a test to that receiver, or to all, now and once. Return the answers. One that was disabled and takes it
        is enabled again. Raises NoSuchThing.
        """
        chosen = [receiver for receiver in self.receivers if name in ("", receiver.name)]
        if not chosen:
            known = ", ".join(receiver.name for receiver in self.receivers) or "none"
            raise NoSuchThing(f"there is no receiver {name or 'at all'} here; there are: {known}")
        return [self._test(receiver) for receiver in chosen]

    def _test(self, receiver: Receiver) -> TriedView:
        with client(self.config.allow_private) as connection:
            message = _test_message()
            answer = send(connection, receiver, message)
            if answer.is_success and receiver.ends_tests:
                end = msgspec.structs.replace(message, kind="resolved")
                answer = send(connection, receiver, end)
        self.outbox.log_test(message, receiver.name, time.time(), answer.is_success, answer.text)
        if answer.is_success:
            self.outbox.enable(receiver.name)
            self._wake()
        return TriedView(receiver.name, answer.is_success, answer.text)

    def replay(self, number: int) -> None:
        """Send a message of the delivery log again. Raises NoSuchThing."""
        if not self.outbox.replay(number, time.time()):
            raise NoSuchThing(f"there is no delivery {number} to a receiver that takes messages")
        self._wake()

    def silence(self, matchers: Sequence[str], seconds: float, comment: str = "") -> int:
        """Send nothing about alerts that match, for that long. Return the silence's number. Raises BadSilence."""
        return self.outbox.silence(silence(matchers, seconds, comment, time.time()))

    def unsilence(self, number: int) -> None:
        """End a silence. Raises NoSuchThing."""
        if not self.outbox.unsilence(number):
            raise NoSuchThing(f"there is no silence {number}")


def _test_message() -> Message:
    now_ns = time.time_ns()
    at = timestamp(now_ns) or ""
    identity = message_id("kvscope", "test", now_ns)
    alerted = AlertedFinding(
        id=identity.replace("msg_", "test_"),
        code="kvscope.test",
        title="A test of kvscope's alerts",
        severity="info",
        verdict="confirmed",
        state="firing",
        engine="no engine",
        key="",
        since=at,
        resolved_at=None,
        culprits=MessageCulprits([], 0, 0),
        explanation="This is a test of alert delivery. Nothing is wrong.",
        effects=[],
        do_now=[],
        runbook="",
    )
    return Message(identity, "test", at, alerted)
