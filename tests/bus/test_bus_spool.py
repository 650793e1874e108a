"""The spool: every transition once, bounded, over restarts."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from kvscope.monitor.bus.bus_messages import AnnotationMessage, finding_message
from kvscope.monitor.bus.bus_spool import BusSpool
from tests.bus.test_bus_messages import points
from tests.finding_transitions import ENGINE, AlertMessages


def test_a_transition_waits_once_over_restarts_until_it_is_sent(tmp_path: Path) -> None:
    received_alerts = AlertMessages()
    reported = [finding_message(each, "a") for each in received_alerts.fire(1) + received_alerts.end(9)]
    path = tmp_path / "bus.sqlite"
    for _ in range(2):
        spool = BusSpool(path, "default")
        spool.put(reported)
        assert [each.id for each in spool.batch(10)] == [each.id for each in reported]
        spool.close()
    spool = BusSpool(path, "default")
    assert spool.messages == 2
    spool.sent([each.number for each in spool.batch(10)])
    assert (spool.messages, spool.bytes, spool.batch(10)) == (0, 0, [])
    assert path.stat().st_mode & 0o077 == 0
    spool.close()


def test_a_finding_that_is_open_on_the_bus_does_not_fire_there_again(tmp_path: Path) -> None:
    received_alerts = AlertMessages()
    (fired,) = received_alerts.fire(1)
    spool = BusSpool(tmp_path / "bus.sqlite", "default")
    spool.put([finding_message(fired, "a")])
    spool.close()
    spool = BusSpool(tmp_path / "bus.sqlite", "default")  # and after a restart it is judged anew
    spool.put([finding_message(fired._replace(at_ns=fired.at_ns + 5), "a")])
    assert len(spool.batch(10)) == 1
    (ended,) = received_alerts.end(9)
    (anew,) = received_alerts.fire(20)
    spool.put([finding_message(ended, "a"), finding_message(anew, "a")])
    assert len(spool.batch(10)) == 3
    spool.close()
    taken = BusSpool(None, "default")
    taken.adopt(fired.finding.id, ENGINE)
    taken.put([finding_message(fired, "b")])
    assert taken.messages == 0
    taken.close()


def test_beyond_its_bound_the_oldest_points_go_first_and_each_loss_is_counted() -> None:
    (point,) = points()
    received_alerts = AlertMessages()
    fired = [finding_message(each, "a") for each in received_alerts.fire(1)]
    spool = BusSpool(None, "default", most_bytes=20_000)
    spool.put(fired)
    spool.put([type(point)(id=str(n), agent="a", at_ns=n, engine=point.engine, open=[]) for n in range(100)])
    kept = [each.id for each in spool.batch(1_000)]
    assert kept[0] == fired[0].id
    assert kept[1:] == [str(n) for n in range(100 - len(kept) + 1, 100)]
    assert spool.dropped == {"point": 100 - len(kept) + 1}
    assert spool.bytes <= 20_000
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
    spool = BusSpool(None, "default")
    spool.put([finding_message(*first, "a")])
    spool.put([finding_message(*second, "a")], is_sure=False)
    assert len(spool.batch(10)) == 1
    spool.confirm(ENGINE)
    assert len(spool.batch(10)) == 2
    (third,) = received_alerts.fire(3, "collapse.prefix-hits")
    spool.put([finding_message(third, "a")], is_sure=False)
    assert spool.discard(ENGINE) == 1
    assert len(spool.batch(10)) == 2
    assert spool.dropped == {"finding": 1}
    spool.close()


def test_a_spool_that_cannot_be_written_keeps_nothing_of_it(tmp_path: Path) -> None:
    (fired,) = AlertMessages().fire(1)
    spool = BusSpool(tmp_path / "bus.sqlite", "default")
    spool.database.execute("PRAGMA max_page_count = 8")
    big = AnnotationMessage(id="n", agent="a", at_ns=1, engine=ENGINE, kind="gap", text="x" * 100_000)
    with pytest.raises(sqlite3.Error):
        spool.put([finding_message(fired, "a"), big])
    assert (spool.messages, spool.batch(10)) == (0, [])
    spool.put([finding_message(fired, "a")])
    assert spool.messages == 1
    spool.close()
