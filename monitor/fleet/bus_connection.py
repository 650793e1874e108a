"""One connection to NATS: credentials, TLS, publishing exactly once, and following a stream over reconnects."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, NamedTuple

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error
from nats.errors import TimeoutError as NatsTimeout
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, NoStreamResponseError

from ..base.errors import CannotTell
from .bus_config import BusConfig
from .bus_subjects import inbox_prefix

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 3
ATTEMPT_S: Final = 10.0
"""Three servers that do not answer take CONNECT_TIMEOUT_S each."""
REQUEST_TIMEOUT_S: Final = 3.0
PING_S: Final = 2
LOST_PINGS: Final = 2
"""A server that hangs is left after two pings without an answer, 4 to 6 s, well within a lease."""
FETCH_MESSAGES: Final = 256
FETCH_WAIT_S: Final = 1.0
FOLLOW_AGAIN_S: Final = 1.0
CONSUMER_GONE_S: Final = 30.0
STALLED_S: Final = 15.0
"""After so long without a message the stream is followed by a new consumer. A server that hung for a few seconds can
leave a consumer that answers and delivers nothing any more.
"""
SENT_HEADER: Final = "kvscope-sent"
"""When a message is sent (wall ns). Compared with the time at which it is stored, it shows how far a clock is off."""
MAX_TIME_DIGITS: Final = 20
SUBJECT_TAKEN: Final = 10071
"""Error of a server that has stored a message under a subject that should have none."""
SUBJECT_IN_FLIGHT: Final = 10164
"""Error of a leader that has a message for the subject in flight. It may never be stored, if the leader loses its
quorum: nats-server, checkMsgHeadersPreClusteredProposal.
"""
NATS_ERRORS: Final = (Error, OSError, TimeoutError, ssl.SSLError)


class StreamFull(Exception):
    """The stream takes no more. The message names the stream and the remedy."""


class StreamMessage(NamedTuple):
    """A message of a stream. `pending` counts those that follow it already. stored_s: when it was stored, wall time by
    the server's clock. is_backlog: whether it was stored before the reader had caught up, so that it arrived late.
    sent_ns: when its agent sent it, wall time by the agent's clock, 0 if unknown.
    """

    sequence: int
    subject: str
    body: bytes
    is_deleted: bool
    pending: int
    stored_s: float
    is_backlog: bool = False
    sent_ns: int = 0

    def arrived_s(self) -> float:
        """Return when the message came to be stored, in seconds of this machine's monotonic clock. Only for what was
        stored before this reader had caught up are two wall clocks compared: the server's and this machine's.
        """
        late_s = max(0.0, time.time() - self.stored_s) if self.is_backlog else 0.0
        return time.monotonic() - late_s


async def connect_bus(
    config: BusConfig, *, wait: bool = True, on_error: Callable[[str], None] = logger.debug
) -> Client:
    """Connect, and go on reconnecting until closed. wait: retry the first connection too, instead of raising.

    `on_error` gets the reason of each attempt that fails. Raises CannotTell if not waiting, and ValueError for
    credentials or TLS files that cannot be read.
    """
    is_first = True

    async def report(error: Exception) -> None:
        on_error(nats_error_text(error))
        if is_first and isinstance(error, ssl.SSLError):
            raise error  # the client would wait for the end of a connection that never was

    options = _identity(config)
    while True:
        try:
            connecting = nats.connect(
                servers=list(config.urls),
                name=f"kvscope {config.agent}",
                connect_timeout=CONNECT_TIMEOUT_S,
                reconnect_time_wait=1,
                max_reconnect_attempts=-1 if wait else 1,
                ping_interval=PING_S,
                max_outstanding_pings=LOST_PINGS,
                pending_size=0,  # what cannot be sent fails at once: the spool keeps it, not the client
                inbox_prefix=inbox_prefix(config.tenant, config.role, config.agent),
                error_cb=report,
                **options,
            )
            client = await asyncio.wait_for(connecting, ATTEMPT_S)
        except NATS_ERRORS as error:
            if not wait:
                raise CannotTell(
                    f"NATS at {', '.join(config.urls)} does not take the connection ({nats_error_text(error)}). Does it"
                    " run there, and do --nats-creds, --nats-ca, --nats-cert and --nats-key belong to it?"
                ) from error
            await asyncio.sleep(FOLLOW_AGAIN_S)
        else:
            is_first = False
            return client


def _identity(config: BusConfig) -> dict[str, Any]:
    """Return the options of nats.connect for credentials and TLS. Raises ValueError."""
    options: dict[str, Any] = {}
    if config.credentials is not None:
        text = config.credentials.read_text(encoding="utf-8", errors="replace")
        if "BEGIN NATS USER JWT" in text:
            options["user_credentials"] = str(config.credentials)
        elif text.strip().startswith("SU"):
            options["nkeys_seed_str"] = text.strip()
        else:
            raise ValueError(
                f"--nats-creds {config.credentials} holds neither a NATS user JWT nor the seed of a user's nkey (SU…)"
            )
    if config.tls_ca or config.tls_cert or any(url.startswith("tls:") for url in config.urls):
        options["tls"] = tls_context(config)
    return options


class RenewedContext(ssl.SSLContext):
    """Reads its files at each handshake, so that a renewed certificate needs no restart."""

    config: BusConfig

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        """Begin a handshake. Raises ssl.SSLError and OSError for files that cannot be used."""
        self.read_files()
        return super().wrap_bio(*arguments, **named)

    def read_files(self) -> None:
        """Read the authority, and this agent's certificate and key. Raises ssl.SSLError and OSError."""
        if self.config.tls_ca is None:
            self.load_default_certs()
        else:
            self.load_verify_locations(self.config.tls_ca)
        if self.config.tls_cert is not None:
            self.load_cert_chain(self.config.tls_cert, self.config.tls_key)


def tls_context(config: BusConfig) -> ssl.SSLContext:
    """Return the context of a configuration. Raises ValueError for files that cannot be used."""
    context = RenewedContext(ssl.PROTOCOL_TLS_CLIENT)
    context.config = config
    try:
        context.read_files()
    except (ssl.SSLError, OSError) as error:
        raise ValueError(f"--nats-ca, --nats-cert or --nats-key cannot be used: {error}") from error
    return context


def nats_error_text(error: BaseException) -> str:
    """Return an error in words without its class's prefix."""
    return str(error).removeprefix("nats: ") or type(error).__name__


async def publish_once(streams: JetStreamContext, subject: str, body: bytes, id: str, *, alone: bool) -> None:
    """Publish, and wait until the stream has stored it. alone: the subject is this message's own.

    `Nats-Msg-Id` lets the stream pass over a repetition within its window of two minutes. A subject of its own,
    with "no message so far" as a condition, lets it pass over one however late it comes. Raises StreamFull and
    NATS_ERRORS, which include SUBJECT_IN_FLIGHT: such a message is sent again until it is known to be stored.
    """
    headers = {api.Header.MSG_ID.value: id, SENT_HEADER: str(time.time_ns())}
    if alone:
        headers[api.Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value] = "0"
    try:
        await streams.publish(subject, body, timeout=REQUEST_TIMEOUT_S, headers=headers)
    except NoStreamResponseError as error:
        raise CannotTell(
            f"no stream takes {subject}: `monitor bus setup` makes the streams of a tenant, or this one is without a"
            " leader just now"
        ) from error
    except APIError as error:
        if alone and error.err_code == SUBJECT_TAKEN:
            return
        if "exceeded" in (error.description or ""):
            raise StreamFull(
                f"the stream of {subject} is full ({error.description}): raise its bytes with `monitor bus setup"
                " --bytes`, or purge what is old"
            ) from error
        raise


async def follow(
    streams: JetStreamContext, stream: str, subject: str, *, last_per_subject: bool
) -> AsyncIterator[list[StreamMessage]]:
    """Yield what is stored and what follows, in order and without gaps, without an end. An empty list means that
    nothing is new. Over lost connections and servers it goes on behind the last message.

    last_per_subject: begin with the last message of each subject.
    """
    after = 0
    while True:
        try:
            consumer = await streams.pull_subscribe(subject, stream=stream, config=_consumer(after, last_per_subject))
            received_s = time.monotonic()
            is_behind = bool((await consumer.consumer_info()).num_pending)
            if not is_behind:
                yield []
            while time.monotonic() - received_s <= STALLED_S:
                batch = await _fetched(consumer, is_backlog=is_behind)
                is_behind = is_behind and bool(batch) and batch[-1].pending > 0
                if batch:
                    after, received_s = batch[-1].sequence, time.monotonic()
                yield batch
            await consumer.unsubscribe()
        except NATS_ERRORS as error:
            logger.debug("following %s again: %s", stream, nats_error_text(error))
            await asyncio.sleep(FOLLOW_AGAIN_S)


async def read_all(streams: JetStreamContext, stream: str, subject: str) -> AsyncIterator[StreamMessage]:
    """Yield what is stored under a subject now. Raises NATS_ERRORS."""
    consumer = await streams.pull_subscribe(subject, stream=stream, config=_consumer(0, last_per_subject=False))
    pending = (await consumer.consumer_info()).num_pending or 0
    while pending:
        for message in await _fetched(consumer, is_backlog=True):
            pending = message.pending
            yield message
    await consumer.unsubscribe()


def _consumer(after: int, last_per_subject: bool) -> api.ConsumerConfig:
    config = api.ConsumerConfig(
        ack_policy=api.AckPolicy.NONE,
        inactive_threshold=CONSUMER_GONE_S,
        mem_storage=True,
        num_replicas=1,
    )
    if after:
        config.deliver_policy, config.opt_start_seq = api.DeliverPolicy.BY_START_SEQUENCE, after + 1
    elif last_per_subject:
        config.deliver_policy = api.DeliverPolicy.LAST_PER_SUBJECT
    return config


async def _fetched(consumer: JetStreamContext.PullSubscription, *, is_backlog: bool) -> list[StreamMessage]:
    try:
        messages = await consumer.fetch(FETCH_MESSAGES, timeout=FETCH_WAIT_S)
    except NatsTimeout:
        await consumer.consumer_info()  # raises if the consumer is gone, which a fetch does not
        return []
    return [
        StreamMessage(
            message.metadata.sequence.stream,
            message.subject,
            message.data,
            bool(message.headers and ("KV-Operation" in message.headers or "Nats-Marker-Reason" in message.headers)),
            message.metadata.num_pending,
            message.metadata.timestamp.timestamp(),
            is_backlog,
            _sent_ns(message),
        )
        for message in messages
    ]


def _sent_ns(message: Msg) -> int:
    text = (message.headers or {}).get(SENT_HEADER, "")
    return int(text) if text.isdecimal() and len(text) < MAX_TIME_DIGITS else 0


async def compare_and_put(streams: JetStreamContext, bucket: str, key: str, value: bytes, revision: int) -> int:
    """Write a key if its last revision still is `revision` (0: it does not exist). Return the new revision, or 0 if
    another was quicker. An empty value deletes the key. Raises NATS_ERRORS.
    """
    headers = {api.Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(revision)}
    if not value:
        headers["KV-Operation"] = "DEL"
    try:
        acknowledged = await streams.publish(f"$KV.{bucket}.{key}", value, timeout=REQUEST_TIMEOUT_S, headers=headers)
    except APIError as error:
        if error.err_code in (SUBJECT_TAKEN, SUBJECT_IN_FLIGHT):
            return 0
        raise
    return acknowledged.seq
