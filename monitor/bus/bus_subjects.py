"""Names of subjects, streams and buckets, and what a tenant's credentials may do.

Subjects are `kvscope.v1.TENANT.KIND.ENGINE` and, for messages that are kept one by one, the message's id behind it. A
tenant has streams, a bucket and an inbox prefix of its own, so that permissions by name separate tenants.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, Literal
from urllib.parse import quote

BusKind = Literal["point", "finding", "annotation"]
BusRole = Literal["agent", "hub", "reader"]
KINDS: Final[tuple[BusKind, ...]] = ("point", "finding", "annotation")

SUBJECT_PREFIX: Final = "kvscope.v1"
MAX_TOKEN_CHARS: Final = 200
"""Bound of an engine's name in a subject. A longer one is replaced by its hash."""


def subject_token(name: str) -> str:
    """Return a name as one token of a subject: percent-encoded, dots too."""
    token = quote(name, safe="@:").replace(".", "%2E").replace("~", "%7E")
    return token if 0 < len(token) <= MAX_TOKEN_CHARS else f"hash-{short_hash(name)}"


def short_hash(text: str) -> str:
    """Return 16 hexadecimal digits for a name that may be long or have any characters."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def subject_of(tenant: str, kind: BusKind, engine: str, message: str = "") -> str:
    """Return the subject of a message about an engine. `message` is its id if each one is kept."""
    return ".".join(filter(None, (SUBJECT_PREFIX, tenant, kind, subject_token(engine), message)))


def subjects_of(tenant: str, *kinds: BusKind) -> list[str]:
    """Return the patterns of all subjects of these kinds."""
    return [f"{SUBJECT_PREFIX}.{tenant}.{kind}.>" for kind in kinds]


def events_stream(tenant: str) -> str:
    """Return the name of the stream of transitions and annotations."""
    return f"kvscope-{tenant}-events"


def points_stream(tenant: str) -> str:
    """Return the name of the stream of points."""
    return f"kvscope-{tenant}-points"


def leases_bucket(tenant: str) -> str:
    """Return the name of the key-value bucket of leases."""
    return f"kvscope-{tenant}-leases"


def leases_stream(tenant: str) -> str:
    """Return the name of the stream that keeps the bucket."""
    return f"KV_{leases_bucket(tenant)}"


def question_subject(tenant: str, agent: str) -> str:
    """Return the subject on which an agent takes questions. No stream keeps them."""
    return f"{SUBJECT_PREFIX}.{tenant}.ask.{subject_token(agent)}"


def inbox_prefix(tenant: str) -> str:
    """Return the prefix of the subjects that answers to this tenant come on."""
    return f"_INBOX_kvscope_{tenant}"


def permissions_of(tenant: str, role: BusRole = "agent") -> dict[str, Sequence[str]]:
    """Return the subjects that a tenant's credentials may publish and subscribe to, as nats-server's `allow` lists.

    An agent writes and answers questions, a hub asks them and holds the lease of alerts, a reader does neither. None
    may create a stream: one with another tenant's stream as its source would copy it.
    """
    streams = (events_stream(tenant), points_stream(tenant), leases_stream(tenant))
    publish = [
        pattern
        for stream in streams
        for pattern in (
            f"$JS.API.STREAM.INFO.{stream}",
            f"$JS.API.CONSUMER.CREATE.{stream}",
            f"$JS.API.CONSUMER.CREATE.{stream}.>",
            f"$JS.API.CONSUMER.INFO.{stream}.>",
            f"$JS.API.CONSUMER.MSG.NEXT.{stream}.>",
            f"$JS.API.DIRECT.GET.{stream}.>",
        )
    ]
    subscribe = [f"{inbox_prefix(tenant)}.>"]
    if role == "agent":
        publish += [f"{SUBJECT_PREFIX}.{tenant}.{kind}.>" for kind in KINDS]
        publish += [f"$KV.{leases_bucket(tenant)}.>", f"{inbox_prefix(tenant)}.>"]
        subscribe.append(f"{SUBJECT_PREFIX}.{tenant}.ask.>")
    elif role == "hub":
        publish += [f"{SUBJECT_PREFIX}.{tenant}.ask.>", f"$KV.{leases_bucket(tenant)}.hub.>"]
    return {"publish": publish, "subscribe": subscribe}
