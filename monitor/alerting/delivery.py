"""Sends messages: `send` tries one once, a `Sender` tries those of the outbox for one receiver until they are
delivered.
"""

from __future__ import annotations

import logging
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final, NamedTuple

import httpx

from kvscope.monitor.alerting.addresses import NotAllowed, public_address_of
from kvscope.monitor.alerting.alert_store import Delivery
from kvscope.monitor.alerting.message import Message
from kvscope.monitor.alerting.outbox import Outbox
from kvscope.monitor.alerting.receivers.receiver import Receiver, ReceiverFailed
from kvscope.monitor.bounded_http import bounded_client
from kvscope.monitor.events import limits

logger = logging.getLogger(__name__)
# It logs each URL in full, and a receiver's URL often is a secret.
logging.getLogger("httpx").setLevel(logging.WARNING)

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
        return httpx.codes.is_success(self.status)


def client() -> httpx.Client:
    """Return the client that `send` needs: no redirects, no proxies from the environment."""
    return bounded_client(SEND_TIMEOUT_S, limits.RECEIPT_BYTES)


def send(client: httpx.Client, receiver: Receiver, message: Message, allow_private: bool) -> DeliveryAnswer:
    """Try once. The body of the answer is not read: nothing is to be learnt from it, and it may be long."""
    now = datetime.now(UTC)
    try:
        headers, body = receiver.post(message, now)
    except ReceiverFailed as error:
        return DeliveryAnswer(str(error))
    url = receiver.url
    try:
        address = public_address_of(url.host, url.port or (443 if url.scheme == "https" else 80), allow_private)
        request = client.build_request(
            "POST",
            url.copy_with(host=address),
            headers={**headers, "host": url.netloc.decode(), "user-agent": "kvscope"},
            content=body,
            extensions={"sni_hostname": url.host},  # whose certificate it must have, too
        )
        response = client.send(request, stream=True, auth=receiver.auth)
        response.close()
    except NotAllowed as error:
        return DeliveryAnswer(str(error))
    except OSError as error:
        return DeliveryAnswer(f"{url.host} was not found ({error.strerror})")
    except httpx.HTTPError as error:
        return DeliveryAnswer(f"no answer ({type(error).__name__})")
    status = response.status_code
    return DeliveryAnswer(
        f"answered {status}", status, _retry_after_seconds(response.headers.get("retry-after", ""), now)
    )


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


class AlertSender(threading.Thread):
    """Sends to one receiver, so that one that is slow holds up no other. `schedule` are the seconds before each try."""

    def __init__(
        self,
        outbox: Outbox,
        receiver: Receiver,
        schedule: Sequence[float],
        allow_private: bool,
        may_send: Callable[[], bool],
    ) -> None:
        super().__init__(name=f"kvscope-alerts {receiver.name}", daemon=True)
        self.receiver = receiver
        self._outbox = outbox
        self._schedule = tuple(schedule)
        self._allow_private = allow_private
        self._may_send = may_send
        self._wake = threading.Event()
        self._closing = False

    def wake(self) -> None:
        """Wake the sender for a new message."""
        self._wake.set()

    def close(self) -> None:
        """Stop after the current try. Unsent messages stay in the outbox."""
        self._closing = True
        self._wake.set()
        if self.ident is not None:
            self.join()

    def run(self) -> None:
        """Until closed."""
        with client() as connection:
            while not self._closing:
                self._wake.clear()
                try:
                    wait = self._send_due(connection)
                except sqlite3.Error as error:
                    logger.error("the outbox of alerts cannot be used and is tried again: %s", error)
                    wait = NO_DISK_S
                self._wake.wait(wait)

    def _send_due(self, connection: httpx.Client) -> float:
        """Try what is due. Return the seconds until something may be due again."""
        if not self._may_send():
            return WAKE_S
        self._outbox.tick(time.time())
        for delivery in self._outbox.due(self.receiver.name, time.time()):
            if self._closing or not self._may_send():
                return 0.0
            answer = send(connection, self.receiver, delivery.message, self._allow_private)
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
        elif answer.status == httpx.codes.GONE:
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
