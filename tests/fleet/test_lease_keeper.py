"""A lease over a real nats-server: what is found before an agent can know that an engine is its own arrives, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvscope.monitor.fleet.bus_link import BusLink
from kvscope.monitor.fleet.bus_messages import FindingMessage, decode_message, finding_message
from kvscope.monitor.fleet.bus_spool import BusSpool
from kvscope.monitor.fleet.open_findings import LeftBehind, left_behind
from kvscope.monitor.questions.pipeline import Pipeline
from tests.finding_transitions import ENGINE, AlertMessages
from tests.fleet.nats_servers import bus_config_of, one_server, set_up, stored_findings, with_client
from tests.waiting import until

# nats-py leaves the writer of a connection that it lost to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function StreamWriter:pytest.PytestUnraisableExceptionWarning"
)


class OneTarget:
    """A target whose engine has not reported its name until `found`."""

    def __init__(self) -> None:
        self.found = self.reads = False

    def targets(self) -> Sequence[str]:
        return ["ipc:///engine"]

    def begin(self, target: str, expected: dict[str, LeftBehind]) -> None:
        self.reads = True

    def end(self, target: str) -> None:
        self.reads = False

    def engines(self, target: str) -> Sequence[str]:
        return [ENGINE] if self.found else []


@contextmanager
def sharing(tmp_path: Path, share: OneTarget) -> Iterator[BusLink]:
    """The link of an agent that shares engines. At the end, its one finding is in the stream, firing."""
    with one_server(tmp_path / "nats") as server:
        config = bus_config_of([server], share=True)
        set_up(config)
        link = BusLink(config, Pipeline(), share=share)
        try:
            yield link
            assert stored_findings(config) == []
            share.found = True
            until(lambda: link.spool.messages == 0, "it is sent")
        finally:
            link.stop()
        assert [each.transition.to for each in stored_findings(config)] == ["firing"]


def test_what_is_found_before_the_engine_is_known_to_be_ones_own_is_sent_after_the_next_renewal(tmp_path: Path) -> None:
    share = OneTarget()
    with sharing(tmp_path, share) as link:
        link.start()
        until(lambda: share.reads, "the lease is held")
        link.put(AlertMessages().fire(1))
        assert link.spool.holds_back()


def test_what_could_not_be_sent_before_the_lease_ended_waits_for_the_next_one(tmp_path: Path) -> None:
    with sharing(tmp_path, OneTarget()) as link:
        (found,) = AlertMessages().fire(1)
        link.spool.put([finding_message(found, link.config.agent)])
        link.start()
        until(link.spool.holds_back, "it is held back")


def test_a_finding_that_arrived_after_its_agent_lost_the_lease_ends(tmp_path: Path) -> None:
    """It would be open on the bus for good: the next agent has found the same under an id of its own."""
    late, found, other = (AlertMessages() for _ in range(3))
    with one_server(tmp_path / "nats") as server:
        config = bus_config_of([server])
        set_up(config)
        link = BusLink(config, Pipeline())
        for each in (*late.fire(1), *found.fire(5), *other.fire(2, "stuck.zero-token")):
            link.spool.put([finding_message(each, config.agent)])
        link.start()
        try:
            until(lambda: link.spool.messages == 0, "they are sent")
            spool = BusSpool(None, config.tenant, "heir")
            heir = bus_config_of([server], "heir")
            left = with_client(config, lambda streams: left_behind(streams, heir, ENGINE, config.agent, spool))
        finally:
            link.stop()
    (ended,), (kept,), (unlike,) = (each.findings.firing() for each in (late, found, other))
    assert {each.id for each in left.findings} == {kept.id, unlike.id}
    (message,) = spool.batch(10)
    resolved = decode_message("finding", message.body)
    assert isinstance(resolved, FindingMessage)
    assert (resolved.transition.to, resolved.transition.id) == ("resolved", ended.id)
