"""A continuous-batching engine on paper, second by second, and what its log and metrics page show of it.

It stands for engines that the lab does not have: hours of long generations, agents whose contexts grow, sides of a
disaggregated pair, steps of many seconds. Requests hold what their tokens need and free it at their end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from kvscope.monitor.contract.samples import Fact, ReportedEvent, Sample
from kvscope.monitor.sources.engine_log import Log
from kvscope.monitor.sources.exposition import ExposedEngine, Sampler

BEGAN: Final = datetime(2026, 11, 20, 12, tzinfo=UTC)


class Moment(NamedTuple):
    """An engine's gauges and counters, `t` seconds after it began."""

    t: float
    running: int
    waiting: int
    deferred: int
    usage: float
    prompt_tokens: float
    generation_tokens: float
    steps: int
    finished: int
    aborted: int = 0
    preemptions: int = 0
    prefix_queries: float = 0.0
    prefix_hits: float = 0.0

    @property
    def process_cpu_s(self) -> float:
        """What a front end takes that answers a scrape now and then."""
        return 0.02 * self.t


@dataclass
class PaperRequest:
    """One request: its prompt and the output that it will have, in tokens; `then` is called at its end."""

    prompt: int
    output: int
    then: Callable[[], None] | None = None
    done: float = 0.0


@dataclass
class PaperEngine:
    """capacity: tokens; prefill, decode: tokens a second of all prompts and of one request; step_s: of one step.

    hold_s: how long a connector keeps a finished request's blocks, drawn up to this.
    """

    seed: int
    capacity: int = 100_000
    max_running: int = 64
    prefill: int = 20_000
    decode: float = 30.0
    step_s: float = 0.03
    hold_s: float = 0.0
    rng: random.Random = field(init=False)
    moments: list[Moment] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.running: list[PaperRequest] = []
        self.queue: list[PaperRequest] = []
        self.held: list[tuple[float, int]] = []
        self.later: list[tuple[float, PaperRequest]] = []
        self.paused = False
        self.t = 0.0
        self._prompts = self._generated = self._stepped_s = 0.0
        self._finished = 0

    def ask(self, prompt: int, output: int, then: Callable[[], None] | None = None, after_s: float = 0.0) -> None:
        """Let a client come, now or later."""
        self.later.append((self.t + after_s, PaperRequest(prompt, output, then)))

    def tokens_held(self) -> float:
        return sum(r.prompt + r.done for r in self.running) + sum(tokens for _, tokens in self.held)

    def run(self, seconds: int, arrivals: Callable[[], None] | None = None) -> PaperEngine:
        """Let so many seconds pass, `arrivals` called at each."""
        for _ in range(seconds):
            if arrivals is not None:
                arrivals()
            self._second()
        return self

    def _second(self) -> None:
        self.queue += [request for at, request in self.later if at <= self.t]
        self.later = [(at, request) for at, request in self.later if at > self.t]
        self.held = [(until, tokens) for until, tokens in self.held if until > self.t]
        if not self.paused:
            self._work()
        self.t += 1.0
        # A step shows only when it ends.
        steps = int(self._stepped_s / self.step_s)
        self.moments.append(
            Moment(
                self.t,
                len(self.running),
                len(self.queue),
                0,
                min(1.0, self.tokens_held() / self.capacity),
                self._prompts,
                self._generated,
                steps,
                self._finished,
            )
        )

    def _work(self) -> None:
        budget = float(self.prefill)
        while self.queue and len(self.running) < self.max_running and budget > 0:
            request = self.queue[0]
            if self.tokens_held() + request.prompt > 0.98 * self.capacity:
                break
            budget -= request.prompt
            self._prompts += request.prompt
            self.running.append(self.queue.pop(0))
        self._stepped_s += 1.0 if self.running else 0.0
        for request in list(self.running):
            new = min(self.decode * self.rng.uniform(0.9, 1.1), request.output - request.done)
            request.done += new
            self._generated += new
            if request.done >= request.output:
                self._end(request)

    def _end(self, request: PaperRequest) -> None:
        self.running.remove(request)
        self._finished += 1
        if self.hold_s:
            self.held.append((self.t + self.rng.uniform(0, self.hold_s), request.prompt + request.output))
        if request.then is not None:
            request.then()


# -------------------------------------------------------------------- what there is to read of it


def every(moments: Sequence[Moment], seconds: int, first: int = 0) -> list[Moment]:
    """One of so many."""
    return list(moments[first::seconds])


def as_metrics(moments: Sequence[Moment], *hidden: str, source: str = "metrics") -> list[Sample]:
    """As a page shows them that was read at these moments; `hidden`: fields that this release does not have."""
    sampler = Sampler(ExposedEngine("paper", "x:1", "0"), source)
    return [
        sampler.sample(
            round((BEGAN.timestamp() + moment.t) * 1e9),
            f"scrape {number}",
            {
                name: float(value)
                for name, value in (*moment._asdict().items(), ("process_cpu_s", moment.process_cpu_s))
                if name != "t" and name not in hidden
            },
        )
        for number, moment in enumerate(moments, 1)
    ]


def log_lines(moments: Sequence[Moment], *, while_still: bool = True) -> list[str]:
    """Return the lines of these moments.

    while_still: lines go on while requests run without a token. vLLM since 0.10.2 logs one such line, and then none.
    """
    lines: list[str] = []
    before = Moment(0.0, 0, 0, 0, 0.0, 0.0, 0.0, 0, 0)
    was_quiet = True
    for moment in moments:
        seconds = moment.t - before.t
        prompt = (moment.prompt_tokens - before.prompt_tokens) / seconds
        generated = (moment.generation_tokens - before.generation_tokens) / seconds
        quiet = not (prompt or generated or (while_still and moment.running))
        if not (quiet and was_quiet):
            deferred = f", Deferred: {moment.deferred} reqs" if moment.deferred else ""
            lines.append(
                f"INFO {(BEGAN + timedelta(seconds=moment.t)):%m-%d %H:%M:%S} [loggers.py:123] Engine 000: Avg prompt"
                f" throughput: {prompt:.1f} tokens/s, Avg generation throughput: {generated:.1f} tokens/s, Running:"
                f" {moment.running} reqs, Waiting: {moment.waiting} reqs{deferred}, GPU KV cache usage:"
                f" {100 * moment.usage:.1f}%, Prefix cache hit rate: 0.0%"
            )
        was_quiet, before = quiet, moment
    return lines


def as_log(moments: Sequence[Moment]) -> list[Sample | Fact | ReportedEvent]:
    """Return what the log source reads from these moments' log lines."""
    return list(Log("paper.log", BEGAN + timedelta(days=1)).records(log_lines(moments)))


# -------------------------------------------------------------------- healthy shapes


def long_generations(seed: int) -> list[Moment]:
    """32 long answers, and a trickle of short prompts that come and go."""
    engine = PaperEngine(seed, capacity=400_000, decode=20.0)
    for _ in range(32):
        engine.ask(200, 100_000)
    trickle = engine.rng.uniform(0.0, 1.0)

    def arrive() -> None:
        if engine.rng.random() < trickle:
            engine.ask(engine.rng.randint(10, 400), engine.rng.randint(5, 200))

    return engine.run(400, arrive).moments


def one_endless_answer(seed: int) -> list[Moment]:
    """One answer grows without end while a crowd of short ones comes, and leaves at last."""
    engine = PaperEngine(seed, capacity=40_000, decode=60.0)
    engine.ask(100, 1_000_000)

    def arrive() -> None:
        if engine.t < 300 and engine.rng.random() < 0.7:
            engine.ask(engine.rng.randint(10, 300), engine.rng.randint(50, 900))

    return engine.run(420, arrive).moments


def growing_agents(seed: int) -> list[Moment]:
    """16 agents whose contexts grow turn by turn, with tools that take a while between the turns."""
    engine = PaperEngine(seed, capacity=300_000, decode=40.0)
    pause_s = engine.rng.choice((0.0, 2.0, 10.0))

    def turn(context: int) -> None:
        output = engine.rng.randint(50, 600)

        def again() -> None:
            turn(min(context + output + engine.rng.randint(100, 1500), 18_000))

        engine.ask(context, output, again, after_s=engine.rng.uniform(0, pause_s))

    for _ in range(16):
        turn(engine.rng.randint(500, 3000))
    return engine.run(500).moments


def documents_stay(seed: int) -> list[Moment]:
    """Long documents come one by one and are worked on for long, amid a crowd of short requests that leaves."""
    engine = PaperEngine(seed, capacity=200_000, decode=15.0)

    def arrive() -> None:
        if engine.t % 40 == 0 and engine.t < 320:
            engine.ask(engine.rng.randint(15_000, 25_000), 20_000)
        if engine.t < 340 and engine.rng.random() < 0.9:
            engine.ask(engine.rng.randint(10, 200), engine.rng.randint(100, 500))

    return engine.run(420, arrive).moments


def chat(seed: int) -> list[Moment]:
    """Chats at a rate that changes, down to none."""
    engine = PaperEngine(seed, capacity=60_000)

    def arrive() -> None:
        rate = max(0.0, 1.2 * (1 + random.Random(int(engine.t / 60) + 1000 * seed).uniform(-1, 0.6)))
        if engine.rng.random() < rate:
            engine.ask(engine.rng.randint(20, 1500), engine.rng.randint(20, 800))

    return engine.run(600, arrive).moments


def batches(seed: int) -> list[Moment]:
    """Offline batches of unlike requests, one after the other."""
    engine = PaperEngine(seed, capacity=120_000)

    def arrive() -> None:
        if engine.t % 150 == 5:
            for _ in range(engine.rng.randint(20, 60)):
                engine.ask(engine.rng.randint(100, 3000), engine.rng.randint(50, 2500))

    return engine.run(600, arrive).moments


def prefill_side(seed: int) -> list[Moment]:
    """The prefill side of a pair: one token each, and blocks that wait until a consumer has fetched them."""
    engine = PaperEngine(seed, capacity=150_000, hold_s=20.0, decode=1.0)

    def arrive() -> None:
        if engine.t % 120 < 90 and engine.rng.random() < 0.6:
            engine.ask(engine.rng.randint(500, 8000), 1)

    return engine.run(500, arrive).moments


def slow_steps(seed: int) -> list[Moment]:
    """Steps of 3 to 30 s each."""
    engine = PaperEngine(seed, capacity=60_000, decode=0.2)
    engine.step_s = engine.rng.uniform(3.0, 30.0)

    def arrive() -> None:
        if engine.rng.random() < 0.02:
            engine.ask(engine.rng.randint(20, 3000), engine.rng.randint(5, 40))

    moments = engine.run(900, arrive).moments
    shown = moments[0]
    found = []
    for moment in moments:  # what a step does shows at its end
        shown = moment if moment.steps != shown.steps or not moment.running else shown
        found.append(shown._replace(t=moment.t))
    return found


HEALTHY_ON_PAPER: Final = (
    long_generations,
    one_endless_answer,
    growing_agents,
    documents_stay,
    chat,
    batches,
    prefill_side,
    slow_steps,
)
