"""Messages of the bus: versions, bounds and names."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvscope.monitor.base import limits
from kvscope.monitor.base.errors import ContractError
from kvscope.monitor.detectors.findings import Findings
from kvscope.monitor.fleet.bus_config import BusConfig
from kvscope.monitor.fleet.bus_messages import (
    FindingMessage,
    NewerBus,
    PointMessage,
    bus_schema,
    decode_message,
    encode_message,
    finding_message,
)
from kvscope.monitor.fleet.bus_subjects import BusRole, names_of, permissions_of, subject_of, subject_token
from tests.detectors.scenes import finished_held
from tests.finding_transitions import AlertMessages, leak


def points() -> list[PointMessage]:
    scene = finished_held("leak.finished-held:limit=2")
    scene.live(5)
    return [PointMessage(id="p", agent="a", at_ns=1, engine=view, open=["f" * 16]) for view in scene.watch.engines()]


def test_a_transition_survives_the_way_with_its_identity() -> None:
    firing, resolved = leak()[:2]
    for transition in (firing, resolved):
        sent = finding_message(transition, "agent-1")
        received = decode_message("finding", encode_message(sent))
        assert isinstance(received, FindingMessage)
        assert received.id == sent.id
        finding = received.transition.finding()
        assert finding.id == transition.finding.id
        assert finding.state == transition.to
        assert finding.report().explanation == transition.finding.report().explanation


def test_messages_follow_the_schema() -> None:
    checker = jsonschema.Draft202012Validator(bus_schema())
    for message in (*points(), finding_message(leak()[0], "a")):
        checker.validate(json.loads(encode_message(message)))
    assert not checker.is_valid({"id": "x"})


def test_unknown_fields_are_skipped_and_a_newer_major_is_refused() -> None:
    payload = json.loads(encode_message(finding_message(leak()[0], "agent-1")))
    payload |= {"minor": 7, "mood": "good"}
    payload["transition"]["judgement"]["colour"] = [1]
    assert isinstance(decode_message("finding", json.dumps(payload).encode()), FindingMessage)
    payload["major"] = 2
    with pytest.raises(NewerBus, match=r"agent agent-1 sends version 2 .* update this one first"):
        decode_message("finding", json.dumps(payload).encode())


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_anything_else_is_a_clear_error(payload: bytes) -> None:
    for kind in ("finding", "point", "annotation"):
        with pytest.raises(ContractError):
            decode_message(kind, payload)


def test_a_message_is_cut_to_what_the_bus_takes() -> None:
    many = tuple(f"request-{number}-{'x' * 900}" for number in range(2_000))
    (fired,) = AlertMessages().fire(1, requests=many, explanation="e" * 100_000)
    payload = encode_message(finding_message(fired, "a"))
    assert len(payload) <= limits.BUS_PAYLOAD_BYTES
    received = decode_message("finding", payload)
    assert isinstance(received, FindingMessage)
    assert received.transition.id == fired.finding.id
    with pytest.raises(ContractError, match="allowed"):
        decode_message("finding", b" " * (limits.BUS_PAYLOAD_BYTES + 1))


@settings(deadline=None)
@given(st.text(min_size=1, max_size=300))
def test_an_engine_is_one_token_of_a_subject(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        return
    token = subject_token(name)
    assert token
    assert not set(token) & set(".*> \t\r\n\0")
    assert names_of(subject_of("t", "finding", "a.b", name, "m")) == ("finding", "a%2Eb", token)


def test_different_engines_have_different_tokens() -> None:
    names = ["a.b", "a%2Eb", "a_b", "a b", "a>b", "x" * 201, "x" * 202]
    assert len({subject_token(name) for name in names}) == len(names)


@pytest.mark.parametrize("role", ["agent", "hub", "reader", "setup"])
def test_what_a_role_may_do_names_no_other_tenant_or_agent_and_only_setup_makes_streams(role: BusRole) -> None:
    allowed = permissions_of("team-a", role, "agent.1", share=True)
    subjects = [each for listed in allowed.values() for each in listed]
    assert all("team-a" in each for each in subjects)
    assert any("STREAM.CREATE" in each for each in subjects) == (role == "setup")
    assert not any("DIRECT.GET" in each for each in subjects)
    written = [each for each in allowed["publish"] if each.startswith(("kvscope.", "$KV."))]
    match role:
        case "agent":
            own = [each for each in written if "agent%2E1" in each]
            assert set(written) - set(own) == {"$KV.kvscope-team-a-leases.engine.*"}
            assert not any("hubs" in each for each in subjects)
        case "hub":
            assert set(written) == {"kvscope.v1.team-a.ask.*", "$KV.kvscope-team-a-hubs.>"}
        case _:
            assert written == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"urls": ()}, "names no server"),
        ({"urls": ("http://127.0.0.1:4222",)}, "is no NATS server"),
        ({"urls": ("nats://user:secret@127.0.0.1",)}, "--nats-creds"),
        ({"urls": ("nats://nats.example:4222",)}, "use tls://"),
        ({"urls": ("tls://nats.example:4222",)}, "--nats-creds FILE"),
        ({"tenant": "Team A"}, "not a tenant's name"),
        ({"tenant": "a" * 33}, "not a tenant's name"),
        ({"agent": "\n"}, "--nats-agent"),
        ({"agent": "*"}, "--nats-agent"),
        ({"credentials": Path("/nowhere")}, "--nats-creds /nowhere is not a file"),
        ({"tls_cert": Path(__file__)}, "belong together"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        BusConfig(**({"urls": ("nats://127.0.0.1:4222",)} | fields))  # type: ignore[arg-type]
    assert "secret" not in str(refused.value)


def test_a_finding_that_is_expected_neither_fires_anew_nor_ends_before_its_time() -> None:
    """What a takeover rests on, in virtual time."""
    second = 1_000_000_000
    received_alerts = AlertMessages()
    (fired,) = received_alerts.fire(100)
    taken = decode_message("finding", encode_message(finding_message(fired, "a")))
    assert isinstance(taken, FindingMessage)
    here = AlertMessages()
    here.findings.expect(fired.finding.judgement.engine, [taken.transition.finding()])
    assert here.findings.update(fired.finding.judgement.engine, 120 * second, []) == []
    assert [each.id for each in here.findings.firing()] == [fired.finding.id]
    again = here.fire(130)
    assert {each.finding.id for each in again} <= {fired.finding.id}
    (ended,) = here.end(140)
    assert (ended.to, ended.finding.id) == ("resolved", fired.finding.id)
    unseen = Findings()
    unseen.expect(fired.finding.judgement.engine, [taken.transition.finding()])
    unseen.update(fired.finding.judgement.engine, 120 * second, [])
    (over,) = unseen.update(fired.finding.judgement.engine, 430 * second, [])
    assert (over.to, over.finding.id) == ("resolved", fired.finding.id)
    assert msgspec.json.encode(over.finding.report())
