"""Requests that do not move while the engine does: what is stuck, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvscope.engine.requests.request import Request
from kvscope.monitor.contract.kinds import Cause, Limit, Status
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.detectors.registry import THRESHOLDS
from tests.detectors import stuck
from tests.detectors.leaks import fetching
from tests.detectors.scenes import Spoken, Watched, never_fits, value


def affected(scene: Watched, code: str) -> list[str]:
    return scene.lab.faults.on[code].affected


def table(scene: Watched, name: str) -> list[int]:
    """The blocks of a request, as the engine has them."""
    numbers = [number for number, request in scene.lab.scheduler.requests.items() if request.id == name]
    tables = [group for number in numbers for group in scene.lab.manager.tables.get(number, [])]
    return sorted(block for table in tables for block in table)


BY_TIME_ALONE = {"stuck.remote-load", "stuck.grammar", "stuck.front-end"}
"""Codes that a slow but sound wait looks like, so that no time makes them more than likely."""


def fires_after(scene: Watched, code: str, name: str = "grace_s") -> FindingReport:
    """Pending within its grace, and firing when that has passed."""
    grace = scene.watch.settings(THRESHOLDS[f"{code}.{name}"])
    scene.live(grace - 1)
    assert not scene.firing(code)
    assert code in [finding.code for finding in scene.watch.findings("pending")]
    scene.live(3)
    finding = scene.only(code)
    only_likely = scene.ledger.state.damaged or code in BY_TIME_ALONE
    assert finding.verdict == ("likely" if only_likely else "confirmed")
    assert bool(finding.missing) == only_likely
    assert all((finding.do_now, finding.change, finding.wont_help, finding.since))
    return finding


def is_resolved(scene: Watched, fired: FindingReport) -> None:
    scene.live(4)
    assert not scene.firing(fired.code)
    assert fired.id in [finding.id for finding in scene.watch.findings("resolved")]


# -------------------------------------------------------------------- stuck.remote-load


def test_a_fetch_that_does_not_end() -> None:
    scene = stuck.remote_load(keys=":every=2")
    finding = fires_after(scene, "stuck.remote-load")
    names = affected(scene, "stuck.remote-load")
    assert finding.culprits.requests == names
    assert len(names) == 2
    assert finding.culprits.blocks == sorted(block for name in names for block in table(scene, name))
    assert value(finding, "blocks_held") == len(finding.culprits.blocks) > 0
    for request in list(scene.lab.scheduler.parked.values()):
        scene.lab.abort(request)
    scene.live(4)
    assert not scene.firing("stuck.remote-load")


def test_a_slow_fetch_within_its_grace_is_not_stuck() -> None:
    """For 25 s it is fetched, and then it runs; an engine that sleeps meanwhile is not stalled either."""
    scene = fetching()
    assert scene.lab.connector is not None
    scene.lab.connector.polls_needed = 1
    request = scene.lab.arrive(40)
    while request.number not in scene.lab.scheduler.parked:
        scene.steps(1)
    scene.beat(25)
    scene.run_until_idle()
    scene.steps(60)
    scene.live(5)
    assert request.is_finished
    assert not scene.alarms()


def fetch_reported(seats: int) -> tuple[Watched, Request, Request]:
    """One waits for KV that comes slowly, another runs for long, and the connector says that the fetch has ended."""
    scene = fetching(total=4_001, max_num_seqs=seats)
    assert scene.lab.connector is not None
    scene.lab.connector.polls_needed = 1 << 40
    fetched = scene.lab.arrive(40)
    while fetched.number not in scene.lab.scheduler.parked:
        scene.steps(1)
    scene.lab.connector.load_share = 0
    running = scene.lab.arrive(8, max_tokens=9_000)
    scene.live(25)
    scene.lab.log.fetch_ended(fetched.number)
    scene.live(1)
    return scene, fetched, running


def test_a_fetch_that_has_ended_counts_from_its_end() -> None:
    """It took 25 s, and is not overdue 6 s after its end. If the engine then goes on without it, it is stuck."""
    scene, fetched, _ = fetch_reported(seats=8)
    scene.live(6)
    assert not scene.firing("stuck.remote-load")
    scene.live(30)
    (finding,) = scene.firing("stuck.remote-load")
    assert (finding.verdict, finding.culprits.requests) == ("confirmed", [fetched.id])


@pytest.mark.parametrize("overtaken", [False, True])
def test_a_fetch_that_has_ended_waits_its_turn_behind_the_head(overtaken: bool) -> None:
    """While all seats are taken the scheduler comes to nobody. Who came later and was let in has passed this one."""
    scene, _, running = fetch_reported(seats=1)
    for _ in range(2):
        scene.lab.arrive(8, max_tokens=9_000)
    if overtaken:
        scene.lab.abort(running)
    scene.live(60)
    assert bool(scene.firing("stuck.remote-load")) == overtaken


def test_a_fetch_is_not_stuck_while_the_engine_is() -> None:
    """A step hangs, and nobody can take in what has been fetched: that is one trouble."""
    scene = stuck.remote_load(fault=False)
    assert scene.lab.connector is not None
    scene.lab.connector.polls_needed = 1_000
    scene.lab.arrive(40)
    while not scene.lab.scheduler.parked:
        scene.steps(1)
    scene.lab.connector.load_share = 0
    scene.lab.arrive(8, max_tokens=100)
    scene.steps(3)
    scene.launch()
    scene.beat(60)
    assert "stuck.engine-stalled" in scene.alarms()
    assert set(scene.alarms()) <= {"stuck.engine-stalled", "harm.no-progress"}, "what its clients suffer comes first"


# -------------------------------------------------------------------- stuck.lost-wakeup


def test_an_engine_that_is_not_woken() -> None:
    """Asleep for 12 s, it was no trouble; since the fetch has ended it is, and it is not a stalled engine."""
    scene, request = stuck.lost_wakeup()
    assert not scene.alarms()
    grace = scene.watch.settings(THRESHOLDS["stuck.lost-wakeup.grace_s"])
    scene.beat(grace - 1)
    assert not scene.firing()
    scene.beat(3)
    finding = scene.only("stuck.lost-wakeup")
    assert (finding.verdict, finding.culprits.requests) == ("confirmed", [request.id])
    assert finding.culprits.blocks == table(scene, request.id)
    scene.beat(30)
    assert scene.only("stuck.lost-wakeup").id == finding.id
    assert scene.lab.connector is not None
    scene.lab.connector._loading[request.number] = 0
    scene.run_until_idle()
    scene.steps(20)
    assert request.is_finished
    is_resolved(scene, finding)


def test_an_engine_that_passes_its_queue_without_a_step_is_awake() -> None:
    """It looks for work again and again and finds none that is ready: nothing has to wake it."""
    scene, request = stuck.lost_wakeup()
    assert scene.lab.connector is not None
    scene.live(40)
    finding = scene.only("stuck.remote-load")
    assert finding.culprits.requests == [request.id]
    assert scene.firing("stuck.lost-wakeup") == []


def test_an_engine_that_goes_on_without_what_was_fetched_is_awake() -> None:
    """The same word of the connector, and steps: the fetch is what is stuck."""
    scene, request = stuck.lost_wakeup()
    assert scene.lab.connector is not None
    scene.lab.connector.load_share = 0
    scene.lab.arrive(8, max_tokens=100)
    scene.live(40)
    finding = scene.only("stuck.remote-load")
    assert finding.culprits.requests == [request.id]
    assert value(finding, "fetches_reported_complete") == 1


def test_an_engine_with_nothing_to_do_is_idle() -> None:
    scene = Watched()
    scene.lab.arrive(8, max_tokens=4)
    scene.run_until_idle()
    scene.beat(100)
    assert not scene.alarms()


# -------------------------------------------------------------------- stuck.promotion-starved


def test_a_request_that_is_ready_and_not_looked_at() -> None:
    scene = stuck.promotion_starved()
    finding = fires_after(scene, "stuck.promotion-starved")
    assert finding.culprits.requests == affected(scene, "stuck.promotion-starved") == ["r-1"]
    assert finding.culprits.blocks == table(scene, "r-1")
    scene.lab.abort(next(iter(scene.lab.scheduler.requests.values())))
    is_resolved(scene, finding)


def test_who_is_ready_and_behind_a_head_that_waits_is_not_starved() -> None:
    """An engine that says no more after READY than that it is let in: until then it stands in its queue."""
    scene = Spoken()
    log = scene.log
    scene.arrive(1, list(range(1, 30)))
    for number in (2, 3):
        log.arrived(number, f"r-{number}", 40, 8, 0, 10, 12)
        log.queued(number, Cause.NEW)
    log.waiting_on(3, Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
    log.allocation_failed(2, 10, 3)
    log.not_scheduled(2, Cause.KV_BLOCKS, 1)
    log.ready(3)
    for step in range(40):
        log.tick()
        log.step_launched(step, [1], [1])
        scene.say()
        scene.wait(0.5)
        log.progressed([1], [116 + step], [step])
        log.step_completed(step, 500_000_000, Limit.KV, 3, 0, 29)
    assert not scene.alarms()


def test_a_loss_in_which_it_may_have_been_looked_at() -> None:
    scene = stuck.promotion_starved()
    scene.lab.log.tick()
    scene.lab.flush()
    scene.skip()
    scene.live(20)
    assert not scene.firing("stuck.promotion-starved")


# -------------------------------------------------------------------- stuck.grammar


def test_a_grammar_that_does_not_come() -> None:
    scene, request = stuck.grammar()
    finding = fires_after(scene, "stuck.grammar")
    assert finding.culprits.requests == [request.id]
    assert not finding.culprits.blocks
    scene.lab.scheduler.ready(request)
    scene.run_until_idle()
    is_resolved(scene, finding)


# -------------------------------------------------------------------- stuck.parked-loads


def test_fetched_requests_behind_a_head_that_lacks_their_blocks() -> None:
    scene = stuck.parked_loads()
    finding = fires_after(scene, "stuck.parked-loads")
    head = scene.lab.scheduler.waiting.head()
    assert set(affected(scene, "stuck.parked-loads")) == {head.id} == {value(finding, "head_request")}
    parked = [request for request in scene.lab.scheduler.waiting if request is not head]
    assert finding.culprits.requests == [request.id for request in parked]
    assert finding.culprits.blocks == table(scene, parked[0].id)
    assert head.shortage == (value(finding, "blocks_needed"), value(finding, "blocks_free_for_it"))
    scene.lab.abort(parked[0])
    scene.run_until_idle()
    is_resolved(scene, finding)


# -------------------------------------------------------------------- stuck.zero-token


def test_a_running_request_that_is_given_nothing() -> None:
    scene = stuck.zero_token()
    finding = fires_after(scene, "stuck.zero-token")
    assert finding.culprits.requests == affected(scene, "stuck.zero-token") == ["r-1"]
    assert finding.explanation.startswith("Request r-1 runs and is given 0 tokens at every step, since ")
    assert finding.culprits.blocks == table(scene, "r-1")
    assert value(finding, "blocks_free") == scene.lab.pool.num_free
    scene.lab.abort(scene.lab.scheduler.running[0])
    scene.run_until_idle()
    is_resolved(scene, finding)


@pytest.mark.parametrize("gets", [0, 1])
def test_a_step_that_gives_a_request_nothing_does_not_end_its_wait(gets: int) -> None:
    """vLLM loses its sampled tokens (#55427): the request is in every second step and gets nothing from it."""
    scene = Spoken()
    for number, block in ((1, 3), (2, 4)):
        scene.arrive(number, [block])
    for step in range(60):
        scene.log.step_launched(step, [1, 2], [1, 1])
        scene.log.progressed([1, 2], [8 + gets * step, 8 + step], [1 + gets * step, 1 + step])
        scene.log.step_completed(step, 1, Limit.NONE, -1, -1, -1)
        scene.log.not_scheduled(1, Cause.ZERO_TOKENS, step + 1)
        scene.wait(0.5)
    assert bool(scene.firing("stuck.zero-token")) == (not gets)


def test_a_request_that_waits_for_its_share_of_full_steps_is_not_at_zero() -> None:
    """A prompt of many steps takes all of each; who decodes has its turn all the same."""
    scene = Watched(total=401, max_num_batched_tokens=4, max_num_seqs=16)
    for _ in range(12):
        scene.lab.arrive(60, max_tokens=40)
    scene.live(120)
    assert not scene.alarms()


# -------------------------------------------------------------------- stuck.encoder-budget


def test_an_item_that_the_encoder_has_no_room_for() -> None:
    """It is likely only: the stream does not tell an item that is too large from a cache that others keep full."""
    scene, request = stuck.encoder_budget()
    scene.live(scene.watch.settings(THRESHOLDS["stuck.encoder-budget.grace_s"]) + 2)
    finding = scene.only("stuck.encoder-budget")
    assert (finding.verdict, finding.culprits.requests) == ("likely", [request.id])
    assert "encoder cache" in finding.missing
    assert value(finding, "blocks_free") == scene.lab.pool.num_free
    scene.lab.scheduler.waiting.put_back(request)
    scene.run_until_idle()
    is_resolved(scene, finding)


# -------------------------------------------------------------------- stuck.self-preempt


def test_a_request_that_preempts_itself_for_ever() -> None:
    scene, request = stuck.self_preempt()
    least = scene.watch.settings(THRESHOLDS["stuck.self-preempt.min_times"])
    while request.num_preemptions < least - 1:
        scene.steps(1)
        scene.watch.settle()
        assert not scene.firing("stuck.self-preempt")
    scene.live(3)
    finding = scene.only("stuck.self-preempt")
    assert finding.culprits.requests == affected(scene, "stuck.self-preempt") == [request.id]
    assert value(finding, "self_preemptions") == request.num_preemptions > least
    assert value(finding, "peak_blocks") == value(finding, "blocks_usable") == scene.lab.pool.usable
    assert f"--max-model-len {scene.lab.pool.usable * scene.lab.manager.block_size}" in finding.change[0]
    scene.lab.abort(request)
    scene.run_until_idle()
    is_resolved(scene, finding)


# -------------------------------------------------------------------- stuck.head-of-line


def test_a_head_that_holds_back_what_would_fit() -> None:
    scene, head = stuck.head_of_line()
    grace = scene.watch.settings(THRESHOLDS["stuck.head-of-line.grace_s"])
    scene.live(grace / 2 - 4, every=2)
    assert not scene.alarms()
    scene.live(grace / 2, every=2)
    assert "stuck.head-of-line" in [finding.code for finding in scene.watch.findings("pending")]
    scene.live(8, every=2)
    finding = scene.only("stuck.head-of-line")
    assert (finding.severity, finding.verdict) == ("warning", "confirmed")
    assert finding.culprits.requests == affected(scene, "stuck.head-of-line") == [head.id]
    assert head.shortage == (value(finding, "blocks_needed"), value(finding, "blocks_free_for_it"))
    assert value(finding, "waiting_that_fit") == 1
    assert "short" in finding.explanation
    assert f"need only {scene.lab.manager.blocks_for(head.num_tokens)}" in finding.change[2]
    scene.lab.abort(head)
    scene.run_until_idle()
    is_resolved(scene, finding)


# -------------------------------------------------------------------- stuck.front-end


def test_a_request_that_never_reaches_the_scheduler() -> None:
    scene = stuck.front_end()
    finding = fires_after(scene, "stuck.front-end")
    assert finding.culprits.requests == ["lost"]
    scene.lab.log.client_gone(2)
    is_resolved(scene, finding)


@pytest.mark.parametrize("beats", [True, False])
def test_the_only_request_of_an_engine_that_sleeps(beats: bool) -> None:
    """Nothing else is said but heartbeats; and of a silent engine nobody knows what it has taken in."""
    scene = Watched()
    scene.lab.log.received(1, "lost", 8)
    scene.lab.take()
    scene.look()
    (scene.beat if beats else scene.silence)(1)
    scene.lab.log.received(2, "lost too", 8)
    (scene.beat if beats else scene.silence)(8)
    assert bool(scene.firing("stuck.front-end")) == beats


def test_what_a_long_step_keeps_waiting_is_not_lost() -> None:
    scene = Watched()
    scene.lab.arrive(20, max_tokens=100)
    scene.steps(20)
    scene.launch()
    scene.lab.log.received(2, "r-2", 8)
    scene.beat(60)
    assert {each.code for each in scene.watch.findings("firing")} == {"stuck.engine-stalled"}
    assert set(scene.alarms()) == {"stuck.engine-stalled", "harm.no-progress"}, "what its client suffers is told before"


# -------------------------------------------------------------------- told apart


def test_a_fetch_that_does_not_end_beside_one_that_did_and_is_not_looked_at() -> None:
    scene = fetching(faults=["stuck.remote-load:limit=1", "stuck.promotion-starved:limit=1"])
    for _ in range(3):
        scene.lab.arrive(40)
    scene.live(40)
    (fetch,), (starved,) = scene.firing("stuck.remote-load"), scene.firing("stuck.promotion-starved")
    assert fetch.culprits.requests == affected(scene, fetch.code)
    assert starved.culprits.requests == affected(scene, starved.code)
    assert not set(fetch.culprits.requests) & set(starved.culprits.requests)


def test_a_request_that_never_fits_behind_fetched_ones_that_block_each_other() -> None:
    """Both wait with nothing running, each for a reason of its own."""
    scene = stuck.parked_loads()
    big = scene.lab.arrive(200, name="the-big-one")
    scene.live(30)
    (large,), (parked,) = scene.firing("stuck.never-fits"), scene.firing("stuck.parked-loads")
    assert large.culprits.requests == [big.id]
    assert value(parked, "head_request") in affected(scene, parked.code)
    assert not {big.id, value(parked, "head_request")} & set(parked.culprits.requests)


def parked() -> Watched:
    return stuck.parked_loads()


def too_large() -> Watched:
    return never_fits()[0]


def heavy() -> Watched:
    return stuck.head_of_line()[0]


def outgrown() -> Watched:
    return stuck.self_preempt()[0]


@pytest.mark.parametrize(
    ("scene", "code"),
    [
        (too_large, "stuck.never-fits"),
        (parked, "stuck.parked-loads"),
        (heavy, "stuck.head-of-line"),
        (outgrown, "stuck.self-preempt"),
        (stuck.promotion_starved, "stuck.promotion-starved"),
        (stuck.remote_load, "stuck.remote-load"),
        (stuck.zero_token, "stuck.zero-token"),
        (stuck.front_end, "stuck.front-end"),
    ],
)
def test_each_is_told_as_itself_and_nothing_else(scene: Callable[[], Watched], code: str) -> None:
    watched = scene()
    watched.live(150, every=2)
    assert watched.alarms() == [code]


@pytest.mark.parametrize(
    "sound",
    [
        lambda: stuck.promotion_starved(fault=False),
        lambda: stuck.remote_load(fault=False),
        lambda: stuck.parked_loads(fault=False),
        lambda: stuck.zero_token(fault=False),
        lambda: stuck.self_preempt(fault=False)[0],
        lambda: stuck.head_of_line(fault=False)[0],
    ],
)
def test_the_same_load_without_the_fault(sound: Callable[[], Watched]) -> None:
    scene = sound()
    scene.live(150, every=2)
    assert scene.alarms() == []


def test_who_joined_late_sees_the_same() -> None:
    scene = stuck.zero_token()
    scene.live(30)
    joined = Watched()
    joined.watch.fleet.engines.clear()
    joined.watch.feed([scene.lab.keyframe()])
    seen = len(scene.lab.frames)
    scene.live(2)
    joined.watch.feed(scene.lab.frames[seen:])
    joined.watch.settle()
    late, early = joined.only("stuck.zero-token"), scene.only("stuck.zero-token")
    assert (late.culprits, late.since, late.verdict) == (early.culprits, early.since, early.verdict)
