"""What is told and what is not, in time that the test makes: reminders, silences, flapping, restarts."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvscope.monitor.detectors.findings import Transition
from kvscope.monitor.outputs.alerting.alerting import REPEAT_S
from kvscope.monitor.outputs.alerting.message import CHANGED_S, MATCHABLE, MOST_REQUESTS, BadSilence, Message, silence
from kvscope.monitor.outputs.alerting.outbox import CALM_S, FIRES, Outbox
from kvscope.monitor.outputs.alerting.receivers import RENEW_S, receiver_of
from tests.finding_transitions import ENGINE, AlertMessages

LOOK_AGAIN_S = 300.0
WEBHOOK = receiver_of("https://example.org/hook")
ALERTMANAGER = receiver_of("alertmanager+https://example.org")

Open = Callable[..., Outbox]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """An outbox at `now`; the one before it is closed, as if its process had ended."""
    outboxes: list[Outbox] = []

    def start(now: float = 0.0, *receivers: object, repeat_s: float = REPEAT_S) -> Outbox:
        for outbox in outboxes:
            outbox.close()
        chosen = receivers or (WEBHOOK,)
        outboxes.append(Outbox(tmp_path / "alerts.sqlite", chosen, repeat_s, LOOK_AGAIN_S, now))  # type: ignore[arg-type]
        return outboxes[-1]

    yield start
    for outbox in outboxes:
        outbox.close()


def reported(outbox: Outbox, now: float, receiver: str = WEBHOOK.name) -> list[Message]:
    """What is sent by then, all of it taken."""
    outbox.tick(now)
    messages = []
    while due := outbox.due(receiver, now):
        for delivery in due:
            outbox.delivered(delivery.number, now, "answered 204")
            messages.append(delivery.message)
    return messages


def kinds(messages: list[Message]) -> list[str]:
    return [message.kind for message in messages]


def test_what_still_fires_is_told_again_until_it_is_over(opened: Open) -> None:
    outbox, received_alerts = opened(), AlertMessages()
    outbox.put(received_alerts.fire(0), 0.0)
    first = reported(outbox, 0.0)
    assert kinds(first) == ["firing"]
    hourly = [message for hour in range(1, 25) for message in reported(outbox, hour * 3600.0)]
    assert [message.repeat for message in hourly] == list(range(1, int(24 * 3600 / REPEAT_S) + 1))
    assert {message.finding.id for message in hourly} == {first[0].finding.id}
    assert len({message.id for message in [*first, *hourly]}) == 1 + len(hourly)
    outbox.put(received_alerts.end(0), 90_000.0)
    assert kinds(reported(outbox, 90_000.0)) == ["resolved"]
    assert reported(outbox, 200_000.0) == []


def test_it_can_be_told_once_and_never_again(opened: Open) -> None:
    outbox = opened(repeat_s=0)
    outbox.put(AlertMessages().fire(0), 0.0)
    assert kinds(reported(outbox, 0.0) + reported(outbox, 1e6)) == ["firing"]


def test_an_alertmanager_is_told_every_minute_and_the_log_does_not_fill_with_it(opened: Open) -> None:
    outbox = opened(0.0, ALERTMANAGER)
    outbox.put(AlertMessages().fire(0), 0.0)
    minutes = [reported(outbox, minute * RENEW_S, ALERTMANAGER.name) for minute in range(60)]
    assert [len(messages) for messages in minutes] == [1] * 60
    assert len(outbox.view(0.0).deliveries) == 2


def test_a_receiver_that_is_new_learns_what_is_open(opened: Open) -> None:
    received_alerts = AlertMessages()
    opened().put(received_alerts.fire(0), 0.0)
    outbox = opened(10.0, WEBHOOK, ALERTMANAGER)
    outbox.put(received_alerts.fire(10), 10.0)
    outbox.put([Transition(received_alerts.findings.firing()[0], "firing", 10)], 10.0)  # the new life finds it too
    assert kinds(reported(outbox, 10.0, ALERTMANAGER.name)) == ["firing"]
    # One that is not a receiver any more is not waited for.
    outbox = opened(20.0, ALERTMANAGER)
    assert [one.answer for one in outbox.view(20.0).deliveries if one.receiver == WEBHOOK.name] == [
        "not a receiver any more"
    ]
    assert outbox.pending() == 0


def test_what_changes_is_told_at_most_every_five_minutes_with_what_has_changed(opened: Open) -> None:
    outbox, received_alerts = opened(), AlertMessages()
    outbox.put(received_alerts.fire(0, blocks=tuple(range(20)), severity="warning"), 0.0)
    (first,) = reported(outbox, 0.0)

    def grow(second: int, blocks: int, **fields: object) -> None:
        received_alerts.fire(second, blocks=tuple(range(blocks)), explanation=f"{blocks} blocks", **fields)
        (finding,) = received_alerts.findings.firing()
        outbox.put([Transition(finding, "firing", second * 10**9)], second)

    grow(10, 24, severity="warning")
    assert reported(outbox, CHANGED_S) == []  # less than a quarter more
    grow(400, 40, severity="error")
    (changed,) = reported(outbox, 400.0)
    assert (changed.kind, changed.finding.id, changed.finding.explanation) == ("changed", first.finding.id, "40 blocks")
    assert changed.changes == ["severity was warning, is error", "size was 20, is 40"]
    grow(410, 80)
    grow(420, 90)
    assert reported(outbox, 400 + CHANGED_S - 1) == []
    (last,) = reported(outbox, 400 + CHANGED_S)
    assert last.changes == ["size was 40, is 90"]
    grow(1_500, 20)
    outbox.silence(silence(["code=*"], 600, "", 1_500.0))
    assert reported(outbox, 1_500.0) == []
    assert [message.changes for message in reported(outbox, 2_100.0)] == [["size was 90, is 20"]]
    assert [message.repeat for message in reported(outbox, 2_100 + REPEAT_S)] == [1]


def test_an_alertmanager_gets_the_text_of_now_and_the_end_of_the_severity_before(opened: Open) -> None:
    outbox, received_alerts = opened(0.0, ALERTMANAGER), AlertMessages()
    outbox.put(received_alerts.fire(0, severity="warning"), 0.0)
    assert len(reported(outbox, 0.0, ALERTMANAGER.name)) == 1
    received_alerts.fire(5, severity="error", explanation="it got worse")
    (finding,) = received_alerts.findings.firing()
    outbox.put([Transition(finding, "firing", 5 * 10**9)], 5.0)
    (changed,) = reported(outbox, RENEW_S, ALERTMANAGER.name)
    now = datetime.fromtimestamp(RENEW_S, UTC)
    before, after = json.loads(ALERTMANAGER.post(changed, now).body)
    assert before["labels"] == {**after["labels"], "severity": "warning"}
    assert (after["labels"]["severity"], after["annotations"]["description"]) == ("error", "it got worse")
    assert before["endsAt"] == "1970-01-01T00:01:00.000Z" < after["endsAt"]
    (renewed,) = reported(outbox, 2 * RENEW_S, ALERTMANAGER.name)
    assert (renewed.kind, len(json.loads(ALERTMANAGER.post(renewed, now).body))) == ("firing", 1)


def test_one_that_returns_soon_is_the_same_alert_with_two_intervals(opened: Open) -> None:
    outbox, received_alerts = opened(), AlertMessages()
    outbox.put(received_alerts.fire(0, since_ns=10**9), 0.0)
    outbox.put(received_alerts.end(20), 20.0)
    first, ended = reported(outbox, 20.0)
    outbox.put(received_alerts.fire(20 + CALM_S - 1), 20 + CALM_S - 1)
    (again,) = reported(outbox, 20 + CALM_S - 1)
    assert (again.kind, again.finding.id) == ("firing", first.finding.id)
    (interval,) = again.finding.earlier
    assert (interval.since, interval.resolved_at) == (first.finding.since, ended.finding.resolved_at)
    (finding,) = received_alerts.findings.firing()
    assert finding.id != first.finding.id
    outbox.put(received_alerts.end(1_000), 1_000.0)
    (over,) = reported(outbox, 1_000.0)
    assert (over.kind, over.finding.id, over.finding.earlier) == ("resolved", first.finding.id, [interval])
    assert {one.alert for one in outbox.about(finding.id, 1_000.0).deliveries} == {first.finding.id}
    outbox.put(received_alerts.fire(1_000 + CALM_S), 1_000 + CALM_S)
    (another,) = reported(outbox, 1_000 + CALM_S)
    assert (another.finding.id != first.finding.id, another.finding.earlier) == (True, [])


# -------------------------------------------------------------------- silences


def test_what_fires_behind_a_silence_is_told_when_that_ends(opened: Open) -> None:
    outbox, received_alerts = opened(), AlertMessages()
    outbox.silence(silence(["code=leak.*", f"engine={ENGINE}"], 600, "we know", 0.0))
    outbox.put(received_alerts.fire(0) + received_alerts.fire(0, "stuck.engine-stalled"), 0.0)
    assert [message.finding.code for message in reported(outbox, 0.0)] == ["stuck.engine-stalled"]
    assert reported(outbox, 599.0) == []
    assert [message.finding.code for message in reported(outbox, 600.0)] == ["leak.finished-held"]
    assert outbox.view(600.0).silences == []


def test_what_is_over_before_its_silence_ends_is_not_told_at_all(opened: Open) -> None:
    outbox, received_alerts = opened(), AlertMessages()
    number = outbox.silence(silence(["severity=error"], 600, "", 0.0))
    outbox.put(received_alerts.fire(0), 0.0)
    outbox.put(received_alerts.end(0), 5.0)
    assert outbox.unsilence(number)
    assert not outbox.unsilence(number)
    assert reported(outbox, 10.0) == []
    assert [one.state for one in outbox.view(10.0).deliveries] == ["silenced"] * 2


def test_a_silence_holds_back_reminders_and_no_end(opened: Open) -> None:
    outbox, received_alerts = opened(), AlertMessages()
    outbox.put(received_alerts.fire(0), 0.0)
    assert kinds(reported(outbox, 0.0)) == ["firing"]
    outbox.silence(silence(["code=*"], 2 * REPEAT_S, "", 0.0))
    assert reported(outbox, REPEAT_S) == []
    outbox.put(received_alerts.end(0), REPEAT_S + 60)
    assert kinds(reported(outbox, REPEAT_S + 60)) == ["resolved"]
    assert reported(outbox, 3 * REPEAT_S) == []


def test_silences_outlive_the_process(opened: Open) -> None:
    number = opened().silence(silence(["code=leak.*"], 600, "we know", 0.0))
    (kept,) = opened(10.0).view(10.0).silences
    assert (kept.number, kept.matchers, kept.comment) == (number, ["code=leak.*"], "we know")


@pytest.mark.parametrize(
    ("matchers", "seconds"),
    [([], 60), (["leak.*"], 60), (["code="], 60), (["state=firing"], 60), (["code=*"], 0), (["code=*"], float("inf"))],
)
def test_a_silence_that_cannot_be_is_refused(matchers: list[str], seconds: float) -> None:
    with pytest.raises(BadSilence):
        silence(matchers, seconds, "", 0.0)


def test_a_silence_matches_by_all_of_its_patterns() -> None:
    received_alerts = AlertMessages()
    outbox = Outbox(None, [WEBHOOK], 0, LOOK_AGAIN_S, 0.0)
    try:
        outbox.put(received_alerts.fire(0, key="held by x"), 0.0)
        (message,) = reported(outbox, 0.0)
    finally:
        outbox.close()
    for name in MATCHABLE:
        value = getattr(message.finding, name)
        assert silence([f"{name}={value}"], 1, "", 0).matches(message.finding)
        assert silence([f"{name}={value[:3]}*", "code=*"], 1, "", 0).matches(message.finding)
        assert not silence([f"{name}={value}x", "code=*"], 1, "", 0).matches(message.finding)


# -------------------------------------------------------------------- flapping


def test_one_that_flaps_is_damped_and_its_end_is_told_once_it_is_calm(opened: Open) -> None:
    outbox, received_alerts = opened(), AlertMessages()
    messages: list[Message] = []
    for second in range(0, 400, 10):
        outbox.put(received_alerts.fire(second), second)
        messages += reported(outbox, second)
        outbox.put(received_alerts.end(second), second + 5)
        messages += reported(outbox, second + 5)
    assert kinds(messages) == ["firing", "resolved"] * FIRES + ["firing"]
    assert [message.flapping for message in messages] == [False] * (2 * FIRES) + [True]
    assert reported(outbox, 395 + CALM_S - 1) == []
    (last,) = reported(outbox, 395 + CALM_S)
    assert (last.kind, last.finding.id) == ("resolved", messages[-1].finding.id)
    assert outbox.view(395 + CALM_S).open == []
    # Nothing is lost from the log: each of the transitions is in it.
    states = [one.state for one in outbox.view(1000.0).deliveries]
    assert (states.count("delivered"), states.count("damped")) == (2 * FIRES + 2, 80 - 2 * FIRES - 1)
    outbox.put(received_alerts.fire(5000), 5000.0)
    assert [message.flapping for message in reported(outbox, 5000.0)] == [False]


def test_one_that_flapped_and_stays_is_open(opened: Open) -> None:
    outbox, received_alerts = opened(), AlertMessages()
    for second in range(0, 50, 10):
        outbox.put(received_alerts.fire(second), second)
        reported(outbox, second)
        if second < 40:
            outbox.put(received_alerts.end(second), second + 5)
    assert kinds(reported(outbox, 40 + CALM_S)) == []
    (still,) = outbox.view(40 + CALM_S).open
    assert kinds(reported(outbox, 30 + REPEAT_S)) == ["firing"]
    outbox.put(received_alerts.end(60), 40 + REPEAT_S)
    (end,) = reported(outbox, 40 + REPEAT_S)
    assert (end.kind, end.finding.id) == ("resolved", still.id)


# -------------------------------------------------------------------- restarts


def test_the_same_trouble_after_a_restart_is_the_same_alert(opened: Open) -> None:
    before, after = AlertMessages(), AlertMessages()
    outbox = opened()
    outbox.put(before.fire(1), 1.0)
    (first,) = reported(outbox, 1.0)
    outbox = opened(10.0)
    after.findings.remember(outbox.known(), round((10 + LOOK_AGAIN_S) * 1e9))
    found = after.fire(12)
    assert found[0].finding.id == first.finding.id
    outbox.put(found, 12.0)
    assert reported(outbox, 12.0 + LOOK_AGAIN_S) == []
    outbox.put(after.end(400), 400.0)
    (end,) = reported(outbox, 400.0)
    assert (end.kind, end.finding.id) == ("resolved", first.finding.id)


def test_a_trouble_that_is_not_seen_again_after_a_restart_is_told_to_be_over(opened: Open) -> None:
    outbox = opened()
    outbox.put(AlertMessages().fire(1), 1.0)
    reported(outbox, 1.0)
    outbox = opened(10.0)
    assert reported(outbox, 10.0 + LOOK_AGAIN_S - 1) == []
    (end,) = reported(outbox, 10.0 + LOOK_AGAIN_S)
    assert end.kind == "resolved"
    assert end.finding.explanation.startswith("Not seen since 1970-01-01T00:00:10.000Z, when kvscope restarted")
    assert outbox.known() == {}


def test_an_engine_that_is_not_watched_any_more_is_not_reminded_of_and_its_alert_ends_with_the_reason(
    opened: Open,
) -> None:
    outbox = opened(repeat_s=10.0)
    outbox.put(AlertMessages().fire(1), 1.0)
    reported(outbox, 1.0)
    assert kinds(reported(outbox, 20.0)) == ["firing"]
    outbox.stop_watching([ENGINE], 25.0)
    outbox.stop_watching([ENGINE], 100.0)
    assert reported(outbox, 24.0 + LOOK_AGAIN_S) == []
    (end,) = reported(outbox, 25.0 + LOOK_AGAIN_S)
    assert end.kind == "resolved"
    assert f"stopped watching {ENGINE}. This does not show that it is resolved" in end.finding.explanation


def test_an_engine_that_another_agent_watches_is_told_of_by_that_one_alone(opened: Open) -> None:
    outbox, received_alerts = opened(repeat_s=10.0), AlertMessages()
    outbox.put(received_alerts.fire(1), 1.0)
    reported(outbox, 1.0)
    outbox.hand_over([ENGINE])
    assert reported(outbox, 5_000.0) == []
    assert outbox.view(5_000.0).open == []
    outbox.put(received_alerts.end(5_001), 5_001.0)
    assert reported(outbox, 10_000.0) == []


def test_an_engine_that_is_watched_again_keeps_its_alert(opened: Open) -> None:
    outbox, received_alerts = opened(), AlertMessages()
    fired = received_alerts.fire(1)
    outbox.put(fired, 1.0)
    reported(outbox, 1.0)
    outbox.stop_watching([ENGINE], 25.0)
    outbox.put(fired, 60.0)
    assert reported(outbox, 100.0 + LOOK_AGAIN_S) == []
    outbox.put(received_alerts.end(500), 500.0)
    assert kinds(reported(outbox, 500.0)) == ["resolved"]


def test_a_trouble_that_comes_long_after_a_restart_is_another(opened: Open) -> None:
    before, after = AlertMessages(), AlertMessages()
    outbox = opened()
    outbox.put(before.fire(1), 1.0)
    after.findings.remember(outbox.known(), round(LOOK_AGAIN_S * 1e9))
    assert after.fire(LOOK_AGAIN_S)[0].finding.id != before.findings.firing()[0].id


def test_what_is_put_is_kept_and_put_twice_is_one(opened: Open) -> None:
    received_alerts = AlertMessages()
    both = [*received_alerts.fire(1), *received_alerts.end(1)]
    outbox = opened()
    outbox.put(both, 1.0)
    outbox = opened(2.0)
    outbox.put(both, 2.0)
    assert kinds(reported(outbox, 2.0)) == ["firing", "resolved"]
    outbox.put(both, 3.0)
    assert reported(outbox, 3.0) == []


def test_what_a_full_disk_does_not_take_is_taken_later_as_a_whole(opened: Open) -> None:
    outbox, received_alerts = opened(), AlertMessages()
    found = [t for n in range(20) for t in received_alerts.fire(1, key=str(n), explanation="x" * 1000)]
    (pages,) = outbox.database.execute("PRAGMA page_count").fetchone()
    outbox.database.execute(f"PRAGMA max_page_count = {pages}")
    for _ in range(2):
        with pytest.raises(sqlite3.OperationalError, match="full"):
            outbox.put(found, 1.0)
        assert (outbox.view(1.0).open, outbox.view(1.0).deliveries) == ([], [])
    outbox.database.execute(f"PRAGMA max_page_count = {pages + 100}")
    outbox.put(found, 2.0)
    assert kinds(reported(outbox, 2.0)) == ["firing"] * len(found)


# -------------------------------------------------------------------- what a message holds


def test_a_message_says_what_else_fires_on_the_engine(opened: Open) -> None:
    outbox, received_alerts = opened(), AlertMessages()
    outbox.put(received_alerts.fire(0, "leak.unaccounted"), 0.0)
    outbox.put(received_alerts.fire(0, "corrupt.double-free", engine="another@1/0"), 0.0)
    outbox.put(received_alerts.fire(0, "corrupt.double-free"), 0.0)
    assert [message.firing for message in reported(outbox, 0.0)] == [
        ["leak.unaccounted"],
        ["corrupt.double-free"],
        ["corrupt.double-free", "leak.unaccounted"],
    ]


def test_a_message_stays_small_whatever_a_finding_holds(opened: Open) -> None:
    outbox = opened()
    requests = tuple(f"r-{n}-{'x' * 5000}" for n in range(1000))
    huge = "y" * 100_000
    outbox.put(
        AlertMessages().fire(
            0, requests=requests, blocks=tuple(range(100_000)), explanation=huge, do_now=(huge,) * 50, key=huge
        ),
        0.0,
    )
    (message,) = reported(outbox, 0.0)
    assert message.finding.culprits.requests_in_all == len(requests)
    assert message.finding.culprits.requests[0].startswith("r-0-x")
    assert len(message.finding.culprits.requests) == MOST_REQUESTS
    assert message.finding.culprits.blocks_in_all == 100_000


def test_figures_are_of_what_waits_and_of_how_messages_ended(opened: Open) -> None:
    outbox, received_alerts = opened(0.0, WEBHOOK, ALERTMANAGER), AlertMessages()
    assert {one.oldest_pending_s for one in outbox.figures(5.0).receivers} == {0.0}
    outbox.put(received_alerts.fire(0) + received_alerts.fire(0, "stuck.never-fits"), 0.0)
    first, second = outbox.due(WEBHOOK.name, 1.0)
    outbox.try_again(first.number, 60.0, "answered 503")
    outbox.delivered(second.number, 1.0, "answered 204")
    outbox.give_up(outbox.due(ALERTMANAGER.name, 1.0)[0].number, 1.0, "answered 400")
    outbox.disable(ALERTMANAGER.name, 1.0, "answered 410")
    outbox.silence(silence(["code=leak.*"], 60.0, "", 1.0))
    figures = outbox.figures(30.0)
    hook, manager = figures.receivers
    assert (figures.open, figures.silences) == (2, 1)
    assert (hook.pending, hook.oldest_pending_s, hook.failed_tries, hook.disabled) == (1, 30.0, 1, False)
    assert +Counter(hook.ended) == {"delivered": 1}
    assert (manager.pending, manager.oldest_pending_s, manager.disabled) == (0, 0.0, True)
    assert +Counter(manager.ended) == {"given-up": 1, "disabled": 1}
    assert outbox.figures(70.0).silences == 0
