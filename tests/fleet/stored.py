"""Messages as an agent publishes them, and as a stream gives them to a reader."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from nats.js import JetStreamContext

from kvscope.monitor.fleet.bus_config import BusConfig
from kvscope.monitor.fleet.bus_connection import StreamMessage, publish_once
from kvscope.monitor.fleet.bus_messages import (
    AnnotationMessage,
    BusMessage,
    FindingMessage,
    PointMessage,
    encode_message,
    engine_named_by,
)
from kvscope.monitor.fleet.bus_subjects import BusKind, subject_of
from tests.fleet.nats_servers import with_client

KIND_OF: Final[dict[type, BusKind]] = {
    PointMessage: "point",
    FindingMessage: "finding",
    AnnotationMessage: "annotation",
}


def subject_about(message: BusMessage, tenant: str = "default", agent: str = "") -> str:
    """The subject of a message, under the name of its own agent or of another."""
    kind = KIND_OF[type(message)]
    return subject_of(
        tenant, kind, agent or message.agent, engine_named_by(message), "" if kind == "point" else message.id
    )


def stored(
    message: BusMessage,
    sequence: int,
    *,
    agent: str = "",
    ago_s: float = 0.0,
    ahead_s: float = 0.0,
    is_backlog: bool = False,
) -> StreamMessage:
    """A message that a stream stored some time ago, sent by a clock that was ahead by so much."""
    stored_s = time.time() - ago_s
    subject, sent_ns = subject_about(message, agent=agent), round((stored_s + ahead_s) * 1e9)
    return StreamMessage(sequence, subject, encode_message(message), False, 0, stored_s, is_backlog, sent_ns)


def publish(config: BusConfig, messages: Sequence[BusMessage], agent: str = "") -> None:
    """Publish as an agent does, or as another `agent` does that forges them."""

    async def send(streams: JetStreamContext) -> None:
        for message in messages:
            subject = subject_about(message, config.tenant, agent)
            alone = not isinstance(message, PointMessage)
            await publish_once(streams, subject, encode_message(message), message.id, alone=alone)

    with ThreadPoolExecutor(1) as thread:  # a test may have a loop of its own in this one
        thread.submit(with_client, config, send).result()
