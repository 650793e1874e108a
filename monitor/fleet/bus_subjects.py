"""Names of subjects, streams and buckets, and what each role's credentials may do.

Subjects are `kvscope.v1.TENANT.KIND.AGENT.ENGINE` and, for messages that are kept one by one, the message's id behind
it. NATS compares subjects with permissions and looks at nothing else, so the name of the agent is a part of every
subject that only this agent may publish to. A tenant has streams and buckets of its own, so that permissions by name
separate tenants.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple
from urllib.parse import quote

BusKind = Literal["point", "finding", "annotation"]
BusRole = Literal["agent", "hub", "reader", "setup"]
KINDS: Final[tuple[BusKind, ...]] = ("point", "finding", "annotation")

SUBJECT_PREFIX: Final = "kvscope.v1"
ANY: Final = "*"
"""Any one token of a subject."""
MAX_TOKEN_CHARS: Final = 200
"""Bound of a name in a subject. A longer one is replaced by its hash."""


def subject_token(name: str) -> str:
    """Return a name as one token of a subject: percent-encoded, dots too."""
    token = quote(name, safe="@:").replace(".", "%2E").replace("~", "%7E")
    return token if 0 < len(token) <= MAX_TOKEN_CHARS else f"hash-{short_hash(name)}"


def short_hash(text: str) -> str:
    """Return 16 hexadecimal digits for a name that may be long or have any characters."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def subject_of(tenant: str, kind: BusKind, agent: str, engine: str, message: str = "") -> str:
    """Return the subject of a message of an agent about an engine. `message` is its id if each one is kept."""
    return ".".join(filter(None, (_kind_prefix(tenant, kind), subject_token(agent), subject_token(engine), message)))


def pattern_of(tenant: str, kind: BusKind, engine: str) -> str:
    """Return the pattern of all agents' messages about an engine."""
    each_kept = kind != "point"
    return ".".join((_kind_prefix(tenant, kind), ANY, subject_token(engine), *([ANY] if each_kept else [])))


def subjects_of(tenant: str, *kinds: BusKind) -> list[str]:
    """Return the patterns of all subjects of these kinds."""
    return [f"{_kind_prefix(tenant, kind)}.>" for kind in kinds]


class SubjectNames(NamedTuple):
    """The parts of a subject: the kind of its messages, and the tokens of the agent and the engine."""

    kind: str
    agent: str
    engine: str


def names_of(subject: str) -> SubjectNames:
    """Return the parts of a subject of `subject_of`, empty ones for any other."""
    parts = subject.split(".")
    return SubjectNames(*parts[3:6]) if len(parts) in (6, 7) else SubjectNames("", "", "")


def _kind_prefix(tenant: str, kind: str) -> str:
    return f"{SUBJECT_PREFIX}.{tenant}.{kind}"


def events_stream(tenant: str) -> str:
    """Return the name of the stream of transitions and annotations."""
    return f"kvscope-{tenant}-events"


def points_stream(tenant: str) -> str:
    """Return the name of the stream of points."""
    return f"kvscope-{tenant}-points"


def leases_bucket(tenant: str) -> str:
    """Return the name of the key-value bucket of agents: heartbeats and the leases of engines."""
    return f"kvscope-{tenant}-leases"


def hubs_bucket(tenant: str) -> str:
    """Return the name of the key-value bucket of hubs: the lease of alerts, and the owners of engines. Agents can
    neither write nor fill it.
    """
    return f"kvscope-{tenant}-hubs"


def stream_of_bucket(bucket: str) -> str:
    """Return the name of the stream that keeps a bucket."""
    return f"KV_{bucket}"


def question_subject(tenant: str, agent: str) -> str:
    """Return the subject on which an agent takes questions. No stream keeps them."""
    return f"{_kind_prefix(tenant, 'ask')}.{subject_token(agent)}"


def answer_prefix(tenant: str, agent: str) -> str:
    """Return the prefix of the subjects on which an agent, and no other, answers."""
    return f"{_kind_prefix(tenant, 'answer')}.{subject_token(agent)}"


def inbox_prefix(tenant: str, role: BusRole, agent: str) -> str:
    """Return the prefix of the subjects on which NATS itself answers: each agent has one, and each other role."""
    own = f".{_token_or_any(agent)}" if role == "agent" else ""
    return f"_INBOX_kvscope.{tenant}.{role}{own}"


def permissions_of(
    tenant: str, role: BusRole = "agent", agent: str = ANY, *, share: bool = False
) -> dict[str, Sequence[str]]:
    """Return the subjects that credentials may publish and subscribe to, as nats-server's `allow` lists.

    An agent writes and answers in its own name. `share`: it also writes the leases of engines that several agents could
    read. With `agent` ANY the credentials are for several agents, and NATS cannot tell these apart. A hub asks, holds
    the lease of alerts and records who owns an engine. A reader writes nothing. Setup makes the streams, and no other
    role does: one with another tenant's stream as its source would copy it.

    None may read by `$JS.API.DIRECT.GET`: its answer goes to any subject that the request names, and would be stored
    there in the name of another agent.
    """
    leases, hubs = leases_bucket(tenant), hubs_bucket(tenant)
    streams = [events_stream(tenant), points_stream(tenant), stream_of_bucket(leases)]
    if role != "agent":
        streams.append(stream_of_bucket(hubs))
    subscribe = [f"{inbox_prefix(tenant, role, agent)}.>"]
    publish = [f"$JS.API.STREAM.INFO.{stream}" for stream in streams]
    if role == "setup":
        publish += [f"$JS.API.STREAM.{verb}.{stream}" for stream in streams for verb in ("CREATE", "UPDATE")]
        return {"publish": publish, "subscribe": subscribe}
    for stream in streams:
        reading = (f"CREATE.{stream}", f"CREATE.{stream}.>", f"INFO.{stream}.>", f"MSG.NEXT.{stream}.>")
        publish += [f"$JS.API.CONSUMER.{each}" for each in reading]
    if role == "agent":
        own = _token_or_any(agent)
        publish += [f"{_kind_prefix(tenant, kind)}.{own}.>" for kind in (*KINDS, "answer")]
        publish += [f"$KV.{leases}.agent.{own}", *([f"$KV.{leases}.engine.*"] if share else [])]
        subscribe.append(f"{_kind_prefix(tenant, 'ask')}.{own}")
    elif role == "hub":
        publish += [f"{_kind_prefix(tenant, 'ask')}.*", f"$KV.{hubs}.>"]
        subscribe.append(f"{_kind_prefix(tenant, 'answer')}.>")
    return {"publish": publish, "subscribe": subscribe}


def _token_or_any(agent: str) -> str:
    return ANY if agent == ANY else subject_token(agent)
