"""The spool: every transition once, bounded, over restarts."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import cast

import msgspec
import pytest

from kvscope.monitor.detectors.findings import Findings, Transition
from kvscope.monitor.detectors.judgement import Judgement, Verdict
from kvscope.monitor.fleet.bus_messages import AnnotationMessage, FindingMessage, decode_message, finding_message
from kvscope.monitor.fleet.bus_spool import BusSpool, Spooled
from kvscope.monitor.outputs.alerting.message import AlertSelection
from tests.finding_transitions import ENGINE, AlertMessages
from tests.fleet.test_bus_messages import points


def sent(spool: BusSpool) -> list[Spooled]:
    """Everything that may be sent, in the order in which it is."""
    found: list[Spooled] = []
    while batch := spool.batch(1_000):
        found += batch
        spool.sent([each.number for each in batch])
    return found


def test_a_transition_waits_once_over_restarts_until_it_is_sent(tmp_path: Path) -> None:
    received_alerts = AlertMessages()
    reported = [finding_message(each, "a") for each in received_alerts.fire(1) + received_alerts.end(9)]
    path = tmp_path / "bus.sqlite"
    for _ in range(2):
        spool = BusSpool(path, "default", "a")
        spool.put(reported)
        assert [each.id for each in spool.batch(10)] == [reported[0].id]  # the other must not overtake it
        spool.close()
    spool = BusSpool(path, "default", "a")
    assert spool.messages == 2
    assert [each.id for each in sent(spool)] == [each.id for each in reported]
    assert (spool.messages, spool.bytes, spool.batch(10)) == (0, 0, [])
    assert path.stat().st_mode & 0o077 == 0
    spool.close()


def test_a_finding_that_is_open_on_the_bus_does_not_fire_there_again(tmp_path: Path) -> None:
    received_alerts = AlertMessages()
    (fired,) = received_alerts.fire(1)
    spool = BusSpool(tmp_path / "bus.sqlite", "default", "a")
    spool.put([finding_message(fired, "a")])
    spool.close()
    spool = BusSpool(tmp_path / "bus.sqlite", "default", "a")  # and after a restart it is judged anew
    spool.put([finding_message(fired._replace(at_ns=fired.at_ns + 5), "a")])
    assert len(spool.batch(10)) == 1
    (ended,) = received_alerts.end(9)
    (anew,) = received_alerts.fire(20)
    spool.put([finding_message(ended, "a"), finding_message(anew, "a")])
    assert spool.messages == 3
    spool.close()
    taken = BusSpool(None, "default", "a")
    taken.adopt(fired.finding.id, ENGINE)
    taken.put([finding_message(fired, "b")])
    assert taken.messages == 0
    taken.close()


def test_a_change_of_verdict_is_put_again_under_an_id_of_its_own() -> None:
    """A hub sends no finding that cannot tell, so that it has to learn when one can."""
    findings, changes = Findings(), AlertSelection("cannot-tell")
    spool, hub = BusSpool(None, "default", "a"), AlertSelection()
    sent_by_hub = []
    for second, verdict in enumerate(("cannot-tell", "cannot-tell", "likely", "likely"), 1):
        judged = Judgement("stuck.grammar", ENGINE, cast(Verdict, verdict), "because")
        new = changes.select(findings.update(ENGINE, second * 1_000_000_000, [judged]))
        spool.put([finding_message(each, "a") for each in new])
        for message in sent(spool):
            taken = decode_message("finding", message.body)
            assert isinstance(taken, FindingMessage)
            stored = taken.transition
            sent_by_hub += [
                (second, message.id) for _ in hub.select([Transition(stored.finding(), "firing", stored.at_ns)])
            ]
    assert [second for second, _ in sent_by_hub] == [3]
    spool.close()


def test_beyond_its_bound_the_oldest_points_go_first_and_each_loss_is_counted() -> None:
    (point,) = points()
    received_alerts = AlertMessages()
    fired = [finding_message(each, "a") for each in received_alerts.fire(1)]
    spool = BusSpool(None, "default", "a", most_bytes=20_000)
    spool.put(fired)
    spool.put([type(point)(id=str(n), agent="a", at_ns=n, engine=point.engine, open=[]) for n in range(100)])
    assert spool.bytes <= 20_000
    kept = [each.id for each in sent(spool)]
    assert kept[0] == fired[0].id
    assert kept[1:] == [str(n) for n in range(100 - len(kept) + 1, 100)]
    assert spool.dropped == {"point": 100 - len(kept) + 1}
    spool.put([finding_message(each, "a") for each in received_alerts.fire(2, "stuck.zero-token")])
    notes = [
        AnnotationMessage(id=f"n{n}", agent="a", at_ns=n, engine=ENGINE, kind="gap", text="x" * 1_000)
        for n in range(30)
    ]
    spool.put(notes)
    assert {each.kind for each in spool.batch(1_000)} == {"annotation"}
    assert spool.dropped["finding"] == 1
    spool.close()


def test_what_was_found_without_a_lease_is_confirmed_or_given_up() -> None:
    received_alerts = AlertMessages()
    first, second = received_alerts.fire(1), received_alerts.fire(2, "stuck.zero-token")
    spool = BusSpool(None, "default", "a")
    spool.put([finding_message(*first, "a")])
    spool.put([finding_message(*second, "a")], is_sure=False)
    assert len(sent(spool)) == 1
    spool.confirm(ENGINE)
    assert len(sent(spool)) == 1
    (third,) = received_alerts.fire(3, "collapse.prefix-hits")
    spool.put([finding_message(third, "a")], is_sure=False)
    assert spool.discard(ENGINE) == 1
    assert spool.messages == 0
    assert spool.dropped == {"finding": 1}
    spool.close()


def test_a_spool_that_cannot_be_written_keeps_nothing_of_it(tmp_path: Path) -> None:
    (fired,) = AlertMessages().fire(1)
    spool = BusSpool(tmp_path / "bus.sqlite", "default", "a")
    spool.database.execute("PRAGMA max_page_count = 8")
    big = AnnotationMessage(id="n", agent="a", at_ns=1, engine=ENGINE, kind="gap", text="x" * 100_000)
    with pytest.raises(sqlite3.Error):
        spool.put([finding_message(fired, "a"), big])
    assert (spool.messages, spool.batch(10)) == (0, [])
    spool.put([finding_message(fired, "a")])
    assert spool.messages == 1
    spool.close()


def test_messages_about_one_engine_go_one_after_the_other_and_those_of_others_beside_them() -> None:
    """A point from before a finding, stored after it, would tell a hub that the finding is over."""
    (point,) = points()
    here = [msgspec.structs.replace(point, id=f"here-{number}") for number in range(2)]
    there = msgspec.structs.replace(point, id="there", engine=msgspec.structs.replace(point.engine, engine="other"))
    (fired,) = AlertMessages().fire(1, engine=point.engine.engine)
    found = finding_message(fired, "a")
    spool = BusSpool(None, "default", "a")
    spool.put([here[0], found, there, here[1]])
    batches = []
    while batch := spool.batch(10):
        batches.append([each.id for each in batch])
        spool.sent([each.number for each in batch])
    assert batches == [["here-0", "there"], [found.id], ["here-1"]]
    spool.close()
