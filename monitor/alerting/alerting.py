"""Alerts as the service has them: transitions in, messages out, and what can be asked and done about them."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from kvscope.monitor.alert_state import AlertStateView
from kvscope.monitor.alerting import delivery
from kvscope.monitor.alerting.alert_schema import AlertFigures, AlertsView, TriedView
from kvscope.monitor.alerting.delivery import AlertSender
from kvscope.monitor.alerting.message import AlertedFinding, Message, MessageCulprits, message_id
from kvscope.monitor.alerting.outbox import Outbox
from kvscope.monitor.alerting.receivers.parse import receiver_of
from kvscope.monitor.alerting.receivers.receiver import Receiver
from kvscope.monitor.alerting.silences import silence
from kvscope.monitor.alerting.verdict_selection import VerdictSelection
from kvscope.monitor.detectors.judgement import Verdict
from kvscope.monitor.errors import KvscopeError
from kvscope.monitor.findings import LOOK_AGAIN_S, Place, Transition
from kvscope.monitor.schema import NotificationsView
from kvscope.monitor.text import timestamp

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
    least_verdict: Verdict = "cannot-tell"
    """Findings below it are held back until they reach it."""
    schedule: tuple[float, ...] = SCHEDULE
    path: Path | None = None


class NoSuchThing(KvscopeError, LookupError):
    """No such receiver, delivery or silence. The message names it."""


class Alerts:
    """Notifies every receiver, each from a thread of its own, until closed. Raises BadReceiver, and ValueError if
    `path` cannot be used. may_send: asked before each message. Nothing is sent and no time passes while it is false.
    """

    def __init__(self, config: AlertsConfig, may_send: Callable[[], bool] = lambda: True) -> None:
        self.config = config
        self._may_send = may_send
        self.receivers = self._receivers_of(config.receivers)
        try:
            if config.path is not None:
                config.path.parent.mkdir(parents=True, exist_ok=True)
            self.outbox = Outbox(config.path, self.receivers, config.repeat_s, config.look_again_s, time.time())
        except (OSError, sqlite3.Error) as error:
            raise ValueError(
                f"--data: alerts cannot be kept in {config.path} ({error}). Name another directory"
            ) from error
        self._selection = VerdictSelection(config.least_verdict)
        self._senders = [self._sender_of(receiver) for receiver in self.receivers]
        self._is_running = False

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
        return AlertSender(self.outbox, receiver, self.config.schedule, self.config.allow_private, self._may_send)

    def close(self) -> None:
        """Stop. Unsent messages stay in the outbox."""
        self.stop_sending()
        self.outbox.close()

    def stop_sending(self) -> None:
        """End every try that runs, and begin no other."""
        for one in self._senders:
            one.close()

    def restore_deleted(self) -> bool:
        """Write the outbox again if its file was deleted, and return whether it was. Raises OSError and
        sqlite3.Error.
        """
        is_deleted = self.outbox.is_deleted()
        if is_deleted:
            self.outbox.write_again()
        return is_deleted

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
        """Stop reminders for engines that were removed (see AlertPolicy). Raises sqlite3.Error."""
        self.outbox.stop_watching(engines, time.time())

    def hand_over(self, engines: Iterable[str]) -> None:
        """Close alerts of engines that another agent watches now (see AlertPolicy). Raises sqlite3.Error."""
        self.outbox.hand_over(engines)

    def select(self, transitions: Sequence[Transition]) -> list[Transition]:
        """Return those that become or change an alert now, by the verdicts that were asked for."""
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
        with delivery.client() as connection:
            message = _test_message()
            answer = delivery.send(connection, receiver, message, self.config.allow_private)
            if answer.is_success and receiver.ends_tests:
                end = msgspec.structs.replace(message, kind="resolved")
                answer = delivery.send(connection, receiver, end, self.config.allow_private)
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
