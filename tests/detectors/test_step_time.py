"""A slow step is no stall and a stopped one is, on engines of any speed.

How long a step takes is known to the test only: `StepCost` is the engine's truth, and the monitor sees its events.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from kvscope.monitor.contract.kinds import Limit, Status
from kvscope.monitor.contract.wire import decode, encode
from kvscope.monitor.probes.packer import Vitals
from kvscope.monitor.questions.pipeline import Pipeline
from tests.detectors.spoken import Spoken, value

STALLED = "stuck.engine-stalled"


class StepCost(NamedTuple):
    """Seconds: fixed, for each token, for each KV token read, and for each pair of a prompt's attention."""

    fixed: float
    token: float = 0.0
    context: float = 0.0
    pair: float = 0.0
    jitter: float = 0.0

    def seconds(self, work: list[tuple[int, int]], rng: random.Random) -> float:
        """Of a step with these (tokens, tokens computed before) for each request."""
        tokens = sum(count for count, _ in work)
        context = sum(count + before for count, before in work)
        pairs = sum(count * (before + count / 2) for count, before in work if count > 1)
        seconds = self.fixed + self.token * tokens + self.context * context + self.pair * pairs
        return seconds * math.exp(rng.gauss(0, self.jitter))


class Timed(Spoken):
    """An engine whose steps take what `cost` says. Heartbeats come each second."""

    def __init__(self, cost: StepCost, seed: int = 1) -> None:
        super().__init__(total=1_000)
        self.cost, self.rng = cost, random.Random(seed)
        self.computed: dict[int, int] = {}
        self.step_number = 0

    def enter(self, number: int, computed: int = 0) -> None:
        """Admit a request that has so many tokens computed."""
        self.log.arrived(number, f"r-{number}", 1_000_000, 1000, 0, 1, 2)
        self.log.admitted(number, computed)
        self.computed[number] = computed

    def leave(self, number: int) -> None:
        """Finish a request."""
        self.log.finished(number, Status.FINISHED_STOPPED)
        del self.computed[number]

    def launch(self, tokens: dict[int, int]) -> float:
        """Launch a step with so many tokens of each request; return the seconds that it takes."""
        self.step_number += 1
        self.log.step_launched(self.step_number, list(tokens), list(tokens.values()))
        self.say()
        return self.cost.seconds([(count, self.computed[number]) for number, count in tokens.items()], self.rng)

    def run(self, tokens: dict[int, int], most_looks: int = 8) -> float:
        """Run a step to its end, and return its seconds."""
        seconds = self.launch(tokens)
        self.hang(seconds, most_looks)
        self.log.step_completed(self.step_number, round(seconds * 1e9), Limit.NONE, -1, -1, -1)
        for number, count in tokens.items():
            self.computed[number] += count
        computed = [self.computed[number] for number in tokens]
        self.log.progressed(list(tokens), computed, [1 + self.step_number] * len(tokens))
        self.say()
        return seconds

    def hang(self, seconds: float, most_looks: int = 8) -> None:
        """Time passes in a step: the drain thread sends a heartbeat each second, and more often if that is looks."""
        looks = max(min(math.ceil(seconds / 0.5), most_looks), math.ceil(seconds))
        for _ in range(looks):
            self.clock.sleep(seconds / looks)
            self.packer._vitals = lambda: Vitals(self.step_number, 1, len(self.computed), 0, 0, 0, self.step_number)
            self.watch.feed([decode(encode(self.packer.heartbeat()))])
            self.watch.settle()

    def found_after(self, most_s: float) -> float:
        """Hang for so long at most; return after how many seconds the stall was found."""
        waited = 0.0
        while waited < most_s:
            self.hang(0.5)
            waited += 0.5
            if self.firing(STALLED):
                return waited
        raise AssertionError(f"not found within {most_s} s")

    def never_alarmed(self) -> bool:
        """Whether the stall never fired."""
        return not [f for f in self.watch.findings() if f.code == STALLED]


def mixed_steps(scene: Timed, count: int) -> Iterator[dict[int, int]]:
    """Chats that decode, and prompts in chunks of many sizes among them."""
    rng, number = scene.rng, 0
    for _ in range(12):
        number += 1
        scene.enter(number, rng.randrange(100, 4000))
    for _ in range(count):
        step = dict.fromkeys(rng.sample(sorted(scene.computed), min(len(scene.computed), 12)), 1)
        if rng.random() < 0.4:
            number += 1
            scene.enter(number, rng.choice([0, rng.randrange(20_000)]))
            step[number] = int(2 ** rng.uniform(4, 13))
        yield step
        if len(scene.computed) > 24:
            scene.leave(min(scene.computed))


def engines() -> Iterator[StepCost]:
    """Engines whose shortest step takes 1 ms to 30 s and whose longest at most 60 s; which term matters is drawn."""
    rng = random.Random(7)
    for fixed in (0.001, 0.02, 0.3, 2.0, 8.0, 30.0):
        rest = min(60.0, fixed * 10 ** rng.uniform(0.5, 2.5)) - fixed
        by_token, by_context, by_pair = (share / 3 for share in (rng.random(), rng.random(), rng.random()))
        yield StepCost(
            fixed,
            token=rest * by_token / 8192,
            context=rest * by_context / 100_000,
            pair=rest * by_pair / (8192 * 24_000),
            jitter=rng.choice([0.02, 0.1, 0.2]),
        )


@pytest.mark.parametrize("cost", list(engines()), ids=lambda cost: f"{cost.fixed:g}s")
def test_on_an_engine_of_any_speed_slow_steps_are_no_stall_and_a_hang_is_found_in_time(cost: StepCost) -> None:
    scene = Timed(cost)
    steps = mixed_steps(scene, 121)
    for _ in range(120):
        scene.run(next(steps))
    assert scene.never_alarmed()
    takes = scene.launch(next(steps))
    assert scene.found_after(3 * takes + 60) <= max(5.0, 3 * takes) + 0.5  # the monitor looks twice a second
    expected = value(scene.firing(STALLED)[0], "expected_step_s")
    assert isinstance(expected, float)
    assert takes / 2 < expected < takes * 2


@pytest.mark.parametrize("step_s", [6.0, 20.0])
def test_slow_steps_leave_a_request_time_to_reach_the_scheduler_and_a_lost_one_is_found(step_s: float) -> None:
    scene = Timed(StepCost(step_s))
    scene.enter(1, 100)
    for _ in range(60):
        scene.run({1: 1})
    scene.log.received(9, "on-its-way", 8)
    for _ in range(2):
        scene.run({1: 1})
    assert not scene.firing("stuck.front-end")
    for _ in range(4):
        scene.run({1: 1})
    (finding,) = scene.firing("stuck.front-end")
    assert finding.culprits.requests == ["on-its-way"]


@pytest.mark.parametrize("step_s", [0.002, 1.0, 6.0, 20.0])
def test_before_fifty_steps_a_hang_is_likely_within_a_minute_and_a_compilation_is_no_stall(step_s: float) -> None:
    scene = Timed(StepCost(step_s))
    scene.enter(1)
    for _ in range(10):
        scene.run({1: 1})
    scene.cost = StepCost(40.0)  # the first request of a kind
    scene.run({1: 1})
    scene.cost = StepCost(step_s)
    assert scene.never_alarmed()
    for _ in range(5):
        scene.run({1: 1})
    scene.launch({1: 1})
    assert scene.found_after(200) <= max(60.0, 3 * 40.0)
    (finding,) = scene.firing(STALLED)
    assert finding.verdict == "likely"
    assert "compil" in finding.explanation
    assert not any("then restart" in step for step in finding.do_now)


def test_a_step_a_third_slower_than_expected_is_no_stall_and_one_twice_as_slow_is() -> None:
    scene = Timed(StepCost(10.0))
    scene.enter(1)
    for _ in range(60):
        scene.run({1: 1}, most_looks=1)
    scene.launch({1: 1})
    scene.hang(13.5)
    assert scene.never_alarmed()
    assert scene.found_after(10.0) <= 6.5


def test_a_step_without_tokens_is_not_expected_to_take_as_long_as_the_prompt_behind_it() -> None:
    """The engine schedules ahead. By step_expectation, the launch of a step says that nothing is computed in it."""
    scene = Timed(StepCost(0.02, 2e-3, 0))
    scene.enter(1, 500)
    for _ in range(30):
        scene.run({1: 1}, most_looks=1)
        scene.run({1: 8192}, most_looks=1)
    scene.launch({})
    scene.launch({1: 8192})
    scene.step_number -= 1  # heartbeats name the one that runs
    assert scene.found_after(60) < 20


def test_a_chunk_of_a_million_tokens_after_chats_is_no_stall() -> None:
    """Attention over a context that no step had before: 8,192 tokens over 900,000 take 12 s."""
    scene = Timed(StepCost(0.02, 1e-5, 0, pair=12 / (8192 * 900_000)))
    for number in range(1, 9):
        scene.enter(number, 500)
    for _ in range(60):
        scene.run(dict.fromkeys(range(1, 9), 1))
    scene.enter(9, 900_000)
    assert scene.run({**dict.fromkeys(range(1, 9), 1), 9: 8192}) > 10
    assert scene.never_alarmed()


def test_a_prompt_that_hangs_after_quiet_decoding_is_found_within_a_minute() -> None:
    """Nothing has shown how long a prompt takes. 50 times the decode step's tokens must not make it 50 minutes."""
    scene = Timed(StepCost(0.02))
    scene.enter(1, 500)
    for _ in range(60):
        scene.run({1: 1})
    scene.enter(2)
    scene.launch({1: 1, 2: 8192})
    assert scene.found_after(120) <= 60
    (finding,) = scene.firing(STALLED)
    assert finding.verdict == "likely"
    assert "no step seen so far" in finding.explanation


def test_a_step_scheduled_ahead_counts_from_the_end_of_the_one_before() -> None:
    """Two steps of 4 s in flight: each is launched while the other runs, so that 8 s pass from launch to end."""
    scene = Timed(StepCost(4.0))
    scene.enter(1, 100)
    for _ in range(80):
        scene.step_number += 1
        scene.log.step_launched(scene.step_number, [1], [1])
        scene.say()
        scene.hang(4.0)
        if scene.step_number > 1:
            scene.log.step_completed(scene.step_number - 1, 8_000_000_000, Limit.NONE, -1, -1, -1)
            scene.say()
    assert scene.never_alarmed()
    assert scene.found_after(60) <= 12


def test_a_step_whose_predecessor_may_have_ended_in_a_loss_counts_from_the_loss() -> None:
    scene = Timed(StepCost(4.0))
    scene.enter(1, 100)
    for _ in range(80):
        scene.run({1: 1})
    scene.log.step_launched(81, [1], [1])
    scene.log.step_launched(82, [1], [1])
    scene.say()
    scene.step_number = 82  # heartbeats name the later of the two
    scene.hang(4.0)
    scene.log.step_completed(81, 4_000_000_000, Limit.NONE, -1, -1, -1)
    scene.log.flush(-1, -1, (-1, -1, -1, -1))
    assert [*scene.packer.pack()], "its end is lost"
    scene.log.progressed([1], [181], [82])
    scene.say()
    scene.hang(5.0)
    assert scene.ledger.state.damaged
    assert not scene.firing(STALLED)
    assert scene.found_after(30) <= 8


def test_an_engine_with_rare_slow_steps_stalls_only_likely_until_a_step_takes_three_times_the_longest() -> None:
    scene = Timed(StepCost(0.1))
    scene.enter(1, 100)
    for step in range(120):
        scene.cost = StepCost(9.0 if step == 70 else 0.1)
        scene.run({1: 1})
    assert not scene.firing(STALLED)
    scene.launch({1: 1})
    assert scene.found_after(20) <= 5
    assert scene.firing(STALLED)[0].verdict == "likely"
    scene.hang(20)
    assert scene.firing(STALLED)[0].verdict == "likely"
    scene.hang(6)
    assert scene.firing(STALLED)[0].verdict == "confirmed"


def test_a_step_of_an_engine_that_schedules_ahead_reads_what_the_step_before_it_computes() -> None:
    """The request's computed tokens lag by the step in flight: its context counts all the same."""
    scene = Timed(StepCost(0.5))
    scene.enter(1)
    scene.launch({1: 400})
    scene.launch({1: 1})
    works = scene.ledger.step_times
    assert works.work_of(1) == (400, 400, 400 * 200)
    assert works.work_of(2) == (1, 401, 0)


@pytest.mark.parametrize("first_s", [50.0, 200.0])
def test_a_first_step_that_hangs_is_information_within_a_minute_and_critical_after_five(first_s: float) -> None:
    """Whether it compiles for minutes or hangs, it looks the same."""
    scene = Timed(StepCost(first_s))
    scene.enter(1)
    scene.run({1: 64})
    assert {finding.severity for finding in scene.watch.findings() if finding.code == STALLED} <= {"info"}
    hung = Timed(StepCost(1.0))
    hung.enter(1)
    hung.launch({1: 64})
    assert hung.found_after(60) <= 60
    (finding,) = hung.firing(STALLED)
    assert (finding.verdict, finding.severity) == ("likely", "info")
    hung.hang(250)
    (finding,) = hung.firing(STALLED)
    assert (finding.verdict, finding.severity) == ("likely", "critical")
    assert "the first may load, compile or capture" in finding.explanation


def test_a_hang_that_a_late_reader_finds_is_critical_as_the_engine_had_compiled_before() -> None:
    """The second clause of a first step: the engine made steps, though this reader received none."""
    scene = Timed(StepCost(0.1))
    scene.enter(1)
    for _ in range(60):
        scene.run({1: 1})
    scene.watch = Pipeline()
    scene.watch.feed([decode(encode(scene.packer.keyframe()))])
    scene.launch({1: 1})
    assert scene.found_after(60) >= 40  # how long its steps take is not known
    (finding,) = scene.firing(STALLED)
    assert (finding.verdict, finding.severity) == ("likely", "critical")
    assert "the first may load" not in finding.explanation


def test_an_engine_whose_steps_differ_much_is_not_stalled_by_its_slow_ones() -> None:
    scene = Timed(StepCost(2.0, jitter=0.5), seed=5)
    for number in range(1, 5):
        scene.enter(number, 500)
    for _ in range(400):
        scene.run(dict.fromkeys(range(1, 5), 1))
    assert scene.never_alarmed()
    takes = scene.launch(dict.fromkeys(range(1, 5), 1))
    assert scene.found_after(120) <= max(60.0, 3 * takes)


def second_of_two_in_flight() -> Timed:
    """Two steps in flight, of which the first has just ended after 8 s: heartbeats name the second from now on."""
    scene = Timed(StepCost(0.1))
    scene.enter(1, 100)
    for _ in range(60):
        scene.run({1: 1})
    scene.launch({1: 150})
    scene.log.step_launched(scene.step_number + 1, [1], [1])
    scene.say()
    scene.hang(8.0)
    scene.step_number += 1
    return scene


def test_a_heartbeat_that_overtakes_the_end_of_a_step_does_not_make_the_next_one_late() -> None:
    """Two steps in flight. The heartbeat that names the second arrives before the events that end the first."""
    scene = second_of_two_in_flight()
    scene.hang(0.1)
    assert not scene.firing(STALLED)
    assert scene.found_after(30) <= 8


def test_a_keyframe_that_follows_lost_heartbeats_does_not_make_the_step_it_names_late() -> None:
    """Two steps in flight. The heartbeats after the end of the first are lost, and a keyframe names the second."""
    scene = second_of_two_in_flight()
    scene.clock.sleep(0.1)
    scene.packer._vitals = lambda: Vitals(scene.step_number, 1, 1, 0, 0, 0, scene.step_number)
    scene.packer.heartbeat()
    scene.watch.feed([decode(encode(scene.packer.keyframe()))])
    scene.watch.settle()
    assert not scene.firing(STALLED)
    assert scene.found_after(10) >= 4
