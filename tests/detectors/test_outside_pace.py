"""How long a transfer or a grammar may take: by the engine's own earlier ones, and in their order."""

from __future__ import annotations

import pytest

from kvscope.monitor.contract.kinds import Cause, EngineMode, Holder, Limit, Release, Status
from kvscope.monitor.detectors.detector import Settings
from tests.detectors.spoken import Spoken

HELD, GRAMMAR = "leak.finished-held", "stuck.grammar"


def send(scene: Spoken, number: int, *blocks: int) -> None:
    """A request ends, and the connector keeps its blocks."""
    scene.arrive(number, [*blocks])
    scene.log.finished(number, Status.FINISHED_STOPPED)
    scene.log.free_deferred(number, blocks, Holder.CONNECTOR)
    scene.say()


def send_renewed(scene: Spoken, number: int, *blocks: int) -> None:
    """The same, under a lease that the consumer renews: the engine does not see when it ends."""
    scene.arrive(number, [*blocks])
    scene.log.finished(number, Status.FINISHED_STOPPED)
    scene.log.free_deferred(number, blocks, Holder.CONNECTOR, lease_deadline_ns=-1)
    scene.say()


def sent(scene: Spoken, number: int, block: int) -> None:
    scene.log.released(number, [block], Release.TRANSFER_DONE)
    scene.say()


@pytest.mark.parametrize(("transfers", "seconds"), [(1, 600), (4, 150), (15, 60)])
def test_first_transfers_are_information_for_a_minute_and_until_they_waited_ten_minutes_together(
    transfers: int, seconds: float
) -> None:
    scene = Spoken(total=101, settings=Settings())
    for number in range(transfers):
        send(scene, 7 + number, 3 + number)
    scene.wait(seconds - 5)
    (finding,) = scene.firing(HELD)
    assert (finding.verdict, finding.severity) == ("cannot-tell", "info")
    assert "a slow transfer looks the same" in finding.missing
    scene.wait(10)
    (finding,) = scene.firing(HELD)
    assert (finding.verdict, finding.severity) == ("likely", "error")
    assert finding.culprits.requests == [f"r-{7 + number}" for number in range(transfers)]


@pytest.mark.parametrize(("transfers", "severity"), [(1, "info"), (16, "error")])
def test_consumers_that_renew_their_leases_may_queue_for_ten_minutes(transfers: int, severity: str) -> None:
    """One that died would have let its lease of 30 s end: what is kept beyond it, a living one waits to read. Half of
    the pool is out of use either way.
    """
    scene = Spoken(settings=Settings(), kv_lease_s=30)
    for number in range(transfers):
        send_renewed(scene, 7 + number, 3 + number)
    scene.wait(595)
    (finding,) = scene.firing(HELD)
    assert (finding.verdict, finding.severity) == ("cannot-tell", severity)
    scene.wait(10)
    (finding,) = scene.firing(HELD)
    assert (finding.verdict, finding.severity) == ("likely", "error")


@pytest.mark.parametrize(("took_s", "may_take_s"), [(1, 35), (50, 150)])
def test_others_that_ended_show_how_long_a_renewed_lease_lasts(took_s: int, may_take_s: float) -> None:
    """Never less than the lease itself, however quick the others were."""
    scene = Spoken(settings=Settings(), kv_lease_s=30)
    for number in range(20):
        send_renewed(scene, 100 + number, 20)
        scene.wait(took_s)
        sent(scene, 100 + number, 20)
    send_renewed(scene, 7, 3)
    scene.wait(may_take_s - 3)
    assert not scene.firing(HELD)
    scene.wait(10)
    (finding,) = scene.firing(HELD)
    assert (finding.verdict, finding.severity) == ("likely", "error")
    assert "its consumer may renew it" in finding.missing


@pytest.mark.parametrize(("ended", "seconds"), [(9, 60), (19, 30)])
def test_the_more_transfers_have_ended_the_sooner_one_that_has_not_is_likely_lost(ended: int, seconds: float) -> None:
    scene = Spoken(settings=Settings())
    quick_sends(scene, ended)
    send(scene, 7, 3)
    scene.wait(seconds - 5)
    (finding,) = scene.firing(HELD)
    assert (finding.verdict, finding.severity) == ("cannot-tell", "info")
    scene.wait(10)
    (finding,) = scene.firing(HELD)
    assert (finding.verdict, finding.severity) == ("likely", "error")


@pytest.mark.parametrize(
    ("transfers", "lacks", "verdict", "severity"),
    [
        (16, True, "likely", "error"),
        (8, True, "cannot-tell", "info"),  # the queue waits for them, and they may be as slow as that
        (16, False, "cannot-tell", "info"),
    ],
)
def test_many_first_transfers_are_no_information_once_a_request_lacks_the_half_of_the_pool_that_they_hold(
    transfers: int, lacks: bool, verdict: str, severity: str
) -> None:
    """Sixteen blocks of 32 are kept for 40 s, and not one transfer has ended."""
    scene = Spoken(settings=Settings())
    each = 16 // transfers
    for number in range(transfers):
        send(scene, 10 + number, *range(1 + each * number, 1 + each * (number + 1)))
    if lacks:
        scene.log.arrived(7, "r-7", 80, 8, 0, 20, 22)
        scene.log.allocation_failed(7, 20, 16)
    scene.wait(40)
    (finding,) = scene.firing(HELD)
    assert (finding.verdict, finding.severity) == (verdict, severity)


def test_a_first_transfer_that_ends_within_its_minute_was_information_only() -> None:
    scene = Spoken(settings=Settings())
    send(scene, 7, 3)
    scene.wait(30)
    sent(scene, 7, 3)
    scene.wait(5)
    assert not scene.firing(HELD)


def test_transfers_that_take_long_here_give_the_others_as_long() -> None:
    scene = Spoken(settings=Settings())
    send(scene, 7, 3)
    scene.wait(20)
    sent(scene, 7, 3)
    scene.wait(5)
    send(scene, 8, 4)
    scene.wait(55)
    assert not scene.firing(HELD)
    scene.wait(10)
    assert scene.firing(HELD)[0].culprits.requests == ["r-8"]


def test_quick_transfers_leave_the_lost_one_only_its_pending_period_and_a_queue_is_no_leak() -> None:
    scene = Spoken(settings=Settings())
    for number in range(4):
        send(scene, 10 + number, 3 + number)
    for number in range(3):  # one after the other over one link: the last waits for 24 s
        scene.wait(6)
        sent(scene, 10 + number, 3 + number)
        assert not scene.firing(HELD)
    scene.wait(6)
    sent(scene, 13, 6)
    for number in range(2):
        send(scene, 20 + number, 8 + number)
    scene.wait(3)
    sent(scene, 21, 9)  # the later of the two: nothing stands before the other
    scene.wait(80)
    assert scene.firing(HELD)[0].culprits.requests == ["r-20"]


def quick_sends(scene: Spoken, count: int = 10) -> None:
    """Enough transfers of a second to know the pace."""
    for number in range(count):
        send(scene, 100 + number, 20)
        scene.wait(1)
        sent(scene, 100 + number, 20)


def hangs(scene: Spoken, *numbers: int, seconds: float = 120) -> None:
    """These are sent together, and take that long."""
    for number in numbers:
        send(scene, number, number)
    scene.wait(seconds)
    for number in numbers:
        sent(scene, number, number)
    scene.wait(5)  # until a finding about these is resolved


@pytest.mark.parametrize("at_once", [1, 4])
def test_transfers_that_hung_once_do_not_hide_the_next_one_that_does(at_once: int) -> None:
    scene = Spoken(settings=Settings())
    quick_sends(scene)
    hangs(scene, *range(1, 1 + at_once))
    assert not scene.firing(HELD)
    send(scene, 9, 9)
    scene.wait(45)
    assert scene.firing(HELD)[0].culprits.requests == ["r-9"]


def test_transfers_that_take_as_long_again_and_again_are_usual_here() -> None:
    scene = Spoken(settings=Settings())
    quick_sends(scene)
    hangs(scene, 1)
    hangs(scene, 2)
    send(scene, 9, 9)
    scene.wait(300)
    assert not scene.firing(HELD)
    scene.wait(100)
    assert scene.firing(HELD)


def test_a_longer_one_shows_that_the_shorter_before_it_was_no_exception() -> None:
    scene = Spoken(settings=Settings())
    quick_sends(scene)
    hangs(scene, 1, seconds=30)
    hangs(scene, 2, seconds=120)
    send(scene, 9, 9)
    scene.wait(85)
    assert not scene.firing(HELD)
    scene.wait(45)
    assert scene.firing(HELD)


def test_a_large_transfer_is_no_exception_beside_small_ones() -> None:
    """Ten times the blocks take ten times as long, and show what the next large one may take."""
    scene = Spoken(total=101, settings=Settings())
    for number in range(10):
        send(scene, 100 + number, 90)
        scene.wait(4)
        sent(scene, 100 + number, 90)
    large = list(range(1, 11))
    for number in range(2):
        scene.arrive(number, large)
        scene.log.finished(number, Status.FINISHED_STOPPED)
        scene.log.free_deferred(number, large, Holder.CONNECTOR)
        scene.wait(80)
        assert not scene.firing(HELD)
        scene.log.released(number, large, Release.TRANSFER_DONE)
        scene.say()
    send(scene, 50, 50)
    scene.wait(100)
    assert not scene.firing(HELD)


def wants_grammar(scene: Spoken, number: int) -> None:
    scene.log.arrived(number, f"r-{number}", 8, 8, 0, 2, 4)
    scene.log.waiting_on(number, Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
    scene.log.not_scheduled(number, Cause.GRAMMAR, 1)
    scene.say()


def test_grammars_that_compile_one_after_the_other_are_not_stuck_and_one_that_was_overtaken_is() -> None:
    scene = Spoken()
    for number in range(1, 6):
        wants_grammar(scene, number)
    for number in range(1, 4):
        scene.wait(20)
        assert not scene.firing(GRAMMAR)
        scene.log.ready(number)
        scene.say()
    wants_grammar(scene, 9)
    scene.wait(10)
    scene.log.ready(9)
    scene.log.ready(5)
    scene.say()
    scene.wait(200)
    assert scene.firing(GRAMMAR)[0].culprits.requests == ["r-4"]


@pytest.mark.parametrize("code", [GRAMMAR, HELD])
@pytest.mark.parametrize("mode", [EngineMode.PAUSED_ALL, EngineMode.ASLEEP])
def test_what_ends_while_the_engine_is_paused_is_taken_up_after_it(code: str, mode: EngineMode) -> None:
    scene = Spoken()
    scene.log.step_launched(1, [], [])
    scene.log.step_completed(1, 1_000_000, Limit.NONE, -1, -1, -1)
    scene.log.engine_mode(mode)
    if code == GRAMMAR:
        wants_grammar(scene, 1)
    else:
        send(scene, 1, 8)
    for _ in range(3):
        scene.wait(50)
        assert not scene.alarms()
    scene.log.engine_mode(EngineMode.UNPAUSED)
    scene.wait(1)
    assert not scene.alarms()
    scene.log.step_launched(2, [], [])
    scene.log.step_completed(2, 1_000_000, Limit.NONE, -1, -1, -1)
    scene.wait(1)
    assert [finding.culprits.requests for finding in scene.firing(code)] == [["r-1"]]
