"""The messages: points, transitions of findings and annotations, as JSON with a version.

A reader skips fields that it does not know and refuses a newer major version (NewerBus). Fields are only appended, each
with a default. Any other change raises BUS_MAJOR.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import msgspec

from ..base import limits
from ..base.errors import ContractError
from ..detectors.findings import Transition
from ..history.findings_log import LoggedTransition, logged_transition
from ..outputs.alerting.message import message_id
from ..questions.schema import EngineView
from .bus_subjects import BusKind

BUS_MAJOR: Final = 1
BUS_MINOR: Final = 1
MAX_LISTED_IDS: Final = 1_000
"""Requests and blocks of one finding, and open findings of one engine."""
MAX_TEXT: Final = 10_000
CLOCK_OFF_S: Final = 5.0
"""A message whose time is further ahead of its receipt gets the time of its receipt. Synchronized clocks differ by
milliseconds.
"""

AnnotationKind = Literal["taken-over", "handed-over", "gap"]


class NewerBus(ContractError):
    """The message has a newer major version than this release reads."""


class TooLong(ContractError):
    """The message is longer than the bus takes, even without its lists."""


class PointMessage(msgspec.Struct, frozen=True, kw_only=True):
    """An engine as it was at one time, and the ids of its open findings. Times are wall ns.

    zone, node: the location of the agent, if configured. service, kv_role: of its engines, if configured. usage: the
    strip of the last ten minutes (fleet_schema.py).
    """

    id: str
    agent: str
    at_ns: int
    engine: EngineView
    open: list[str]
    major: int = BUS_MAJOR
    minor: int = BUS_MINOR
    zone: str = ""
    node: str = ""
    usage: list[int] = []
    service: str = ""
    kv_role: str = ""


class FindingMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A finding began to fire or was resolved. `id` is the same however often the transition is sent."""

    id: str
    agent: str
    transition: LoggedTransition
    major: int = BUS_MAJOR
    minor: int = BUS_MINOR


class AnnotationMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Something about an engine that is no finding: it changed hands, or what was sent meanwhile is missing."""

    id: str
    agent: str
    at_ns: int
    engine: str
    kind: AnnotationKind
    text: str
    major: int = BUS_MAJOR
    minor: int = BUS_MINOR


BusMessage: TypeAlias = PointMessage | FindingMessage | AnnotationMessage
MESSAGE_TYPES: Final[dict[BusKind, type[BusMessage]]] = {
    "point": PointMessage,
    "finding": FindingMessage,
    "annotation": AnnotationMessage,
}
MESSAGE_KINDS: Final[dict[type[BusMessage], BusKind]] = {type_: kind for kind, type_ in MESSAGE_TYPES.items()}


class _Version(msgspec.Struct):
    major: int
    agent: str = ""


_BUS_ENCODER: Final = msgspec.json.Encoder()
_VERSION_DECODER: Final = msgspec.json.Decoder(_Version)
_BUS_DECODERS: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    kind: msgspec.json.Decoder(type_) for kind, type_ in MESSAGE_TYPES.items()
}


def finding_message(transition: Transition, agent: str) -> FindingMessage:
    """Return the message of a transition, with as many requests and blocks as the bus takes."""
    logged = logged_transition(transition)
    judged = msgspec.structs.replace(
        logged.judgement,
        requests=logged.judgement.requests[:MAX_LISTED_IDS],
        blocks=logged.judgement.blocks[:MAX_LISTED_IDS],
        explanation=logged.judgement.explanation[:MAX_TEXT],
    )
    logged = msgspec.structs.replace(logged, judgement=judged)
    return FindingMessage(
        id=message_id(logged.id, transition.to, transition.at_ns),
        agent=agent,
        transition=logged,
    )


def engine_named_by(message: BusMessage) -> str:
    """Return the name of the engine that a message is about."""
    match message:
        case PointMessage():
            return message.engine.engine
        case FindingMessage():
            return message.transition.judgement.engine
        case AnnotationMessage():
            return message.engine


def time_of(message: BusMessage) -> int:
    """Return when a message was written, by its agent's clock (wall ns)."""
    return message.transition.at_ns if isinstance(message, FindingMessage) else message.at_ns


def at_receipt(message: BusMessage, stored_ns: int) -> BusMessage:
    """Return a message without times after its receipt (wall ns), if its agent's clock was ahead. Its ids stay."""
    if time_of(message) <= stored_ns + CLOCK_OFF_S * 1e9:
        return message
    if not isinstance(message, FindingMessage):
        return msgspec.structs.replace(message, at_ns=stored_ns)
    told = message.transition
    since_ns = min(told.judgement.since_ns or told.first_seen_ns, stored_ns)
    corrected = msgspec.structs.replace(
        told,
        at_ns=stored_ns,
        fired_ns=min(told.fired_ns, stored_ns),
        resolved_ns=min(told.resolved_ns, stored_ns),
        judgement=msgspec.structs.replace(told.judgement, since_ns=since_ns),
    )
    return msgspec.structs.replace(message, transition=corrected)


def encode_message(message: BusMessage) -> bytes:
    """Return the message as bytes. A message that is too long goes without its lists. Raises TooLong."""
    payload = _BUS_ENCODER.encode(message)
    if len(payload) > limits.BUS_PAYLOAD_BYTES:
        payload = _BUS_ENCODER.encode(_without_lists(message))
    if len(payload) > limits.BUS_PAYLOAD_BYTES:
        raise TooLong(f"a message of {len(payload):,} bytes: {limits.BUS_PAYLOAD_BYTES:,} are allowed")
    return payload


def _without_lists(message: BusMessage) -> BusMessage:
    if isinstance(message, FindingMessage):
        judged = msgspec.structs.replace(
            message.transition.judgement, requests=(), blocks=(), evidence=message.transition.judgement.evidence[:20]
        )
        return msgspec.structs.replace(
            message, transition=msgspec.structs.replace(message.transition, judgement=judged)
        )
    if isinstance(message, PointMessage):
        return msgspec.structs.replace(message, engine=msgspec.structs.replace(message.engine, configuration={}))
    return message


def decode_message(kind: str, payload: bytes) -> BusMessage:
    """Return the message in `payload`. Raises NewerBus, and ContractError for what is no message of that kind."""
    if len(payload) > limits.BUS_PAYLOAD_BYTES:
        raise ContractError(f"a {kind} of {len(payload):,} bytes: {limits.BUS_PAYLOAD_BYTES:,} are allowed")
    try:
        version = _VERSION_DECODER.decode(payload)
        if version.major > BUS_MAJOR:
            raise NewerBus(
                f"agent {version.agent[:MAX_TEXT]} sends version {version.major} of the bus and this release reads"
                f" {BUS_MAJOR}: update this one first, agents afterwards"
            )
        message: BusMessage = _BUS_DECODERS[kind].decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError) as error:
        raise ContractError(f"not a {kind} of the bus: {error}") from error
    return message


def bus_schema() -> dict[str, Any]:
    """Return the JSON schema of every message, by kind."""
    kinds = list(MESSAGE_TYPES)
    schemas, definitions = msgspec.json.schema_components(
        [MESSAGE_TYPES[kind] for kind in kinds], ref_template="#/$defs/{name}"
    )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Messages of kvscope's bus, version {BUS_MAJOR}.{BUS_MINOR}",
        "oneOf": list(schemas),
        "$defs": definitions,
    }
