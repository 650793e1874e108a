"""The loop: its books equal the ledger's through the real stream, it survives a failing model, it rests when idle."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from kvscope.engine.config import EngineConfig
from kvscope.engine.core.assembly import EventStream
from kvscope.engine.core.engine_core import EngineCore
from kvscope.engine.core.intake import EngineDead, Refused
from kvscope.engine.models import load_model
from kvscope.engine.requests.request import Output, SamplingParams
from kvscope.monitor.contract.kinds import Status
from kvscope.monitor.ledger.balance import balance_of
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.sources.live_stream import LiveStream
from tests.engine.before import with_before
from tests.engine.process import follow, wait_for

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ANYWHERE = "tcp://127.0.0.1:*"
TAKEN_IN = ("stuck.never-fits",)


class Running:
    """A core whose thread runs, and everything it has handed out."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.outputs: list[Output] = []
        core.start(self.outputs.extend)

    def ends(self) -> dict[int, Status]:
        return {output.number: output.status for output in list(self.outputs) if output.status is not None}

    def tokens(self, number: int) -> list[int]:
        return [token for output in list(self.outputs) if output.number == number for token in output.token_ids]


@contextmanager
def running(core: EngineCore) -> Iterator[Running]:
    try:
        yield Running(core)
    finally:
        core.close()


def tiny(stream: EventStream | None = None, **settings: object) -> EngineCore:
    config = EngineConfig(**settings)  # type: ignore[arg-type]
    return EngineCore(config, load_model(config), stream)


def assert_books_equal(core: EngineCore, ledger: EngineLedger) -> None:
    """Every block of the pool, and of the ledger."""
    pool, state = core.pool, ledger.state
    assert list(state.refs) == pool.refs
    assert [bool(value) for value in state.hashes] == [digest is not None for digest in pool.digests]
    assert (state.free, state.cached_idle, state.used, state.total) == pool.counts()
    assert balance_of(state).holds
    assert state.unexplained_references() == {}
    assert list(ledger.anomalies) == []
    assert list(ledger.losses) == []


@pytest.mark.parametrize("settings", [{}, {"kv_connector": "host"}, {"enable_prefix_caching": False}])
def test_the_ledger_equals_the_pool_through_the_real_stream(settings: dict[str, object]) -> None:
    rng = random.Random(5)
    stream = EventStream("tiny@test/0", ANYWHERE, ANYWHERE)
    core = tiny(stream, num_gpu_blocks_override=24, block_size=4, max_num_batched_tokens=32, max_num_seqs=6, **settings)
    assert core.publisher is not None
    ledger = EngineLedger("tiny@test/0")
    live = LiveStream(core.publisher.events_endpoint, core.publisher.replay_endpoint)
    with closing(live), running(core) as engine:
        shared = [rng.randrange(256) for _ in range(20)]
        numbers = []
        for index in range(24):
            prompt = shared[: rng.randint(1, 20)] + [rng.randrange(256) for _ in range(rng.randint(1, 30))]
            params = SamplingParams(max_tokens=rng.randint(1, 30), seed=index)
            numbers.append(core.submit(f"r-{index}", prompt, params, priority=0))
        for number in numbers[::5]:
            core.client_gone(number)
        # At rest: every request has ended, the connector has let go, and a whole audit has been made of that.
        wait_for(lambda: len(engine.ends()) == len(numbers) and not core.scheduler.deferred)
        begun = core.auditor.cycles
        wait_for(lambda: core.auditor.cycles >= begun + 1)
        last = core.publisher.packer.next_sequence - 1
        follow(live, [ledger], lambda: ledger.state.audit_cycles > begun and ledger.sequence >= last)
        assert_books_equal(core, ledger)
        assert ledger.state.used == 0
        assert ledger.state.totals.arrived == len(numbers)
        assert ledger.state.totals.finished == {int(status): n for status, n in core.counts.finished.items() if n}
        assert sum(ledger.state.totals.preemptions.values()) == core.scheduler.num_preemptions > 0
        assert ledger.state.totals.output_tokens <= core.counts.generation_tokens
        assert ledger.description.num_gpu_blocks == core.pool.total


def test_a_step_that_fails_ends_its_requests_and_no_more() -> None:
    config = EngineConfig(num_gpu_blocks_override=20)
    failing: list[str] = []

    def fail() -> None:
        if failing:
            raise ArithmeticError(failing.pop())

    with running(EngineCore(config, with_before(load_model(config), fail))) as engine:
        before = engine.core.submit("r-before", [1, 2, 3], GREEDY)
        wait_for(lambda: before in engine.ends())
        failing.append("no such number")
        affected = engine.core.submit("r-struck", [1, 2, 3], GREEDY)
        wait_for(lambda: affected in engine.ends())
        after = engine.core.submit("r-after", [1, 2, 3], GREEDY)
        wait_for(lambda: after in engine.ends())
        assert engine.ends()[affected] == Status.FINISHED_ERROR
        assert "no such number" in next(o.error for o in engine.outputs if o.number == affected)
        assert engine.tokens(after) == engine.tokens(before)
        assert engine.core.pool.counts()[2] == 0
        assert engine.core.in_flight == 0


def test_an_engine_whose_books_fail_tells_every_client_and_refuses_the_next() -> None:
    go: list[bool] = []
    config = EngineConfig(num_gpu_blocks_override=20, max_num_seqs=1)
    core = EngineCore(config, with_before(load_model(config), lambda: wait_for(lambda: bool(go))))
    with running(core) as engine:
        first = core.submit("r-1", [1, 2, 3], GREEDY)
        waiting = core.submit("r-2", [1, 2, 3], GREEDY)
        wait_for(lambda: core.launched[0] >= 0)
        core.pool.refs.clear()
        go.append(True)
        wait_for(lambda: bool(core.failure))
        wait_for(lambda: engine.ends() == dict.fromkeys((first, waiting), Status.FINISHED_ERROR))
        with pytest.raises(EngineDead, match="IndexError"):
            core.submit("r-3", [1, 2, 3], GREEDY)


def test_an_engine_whose_device_is_lost_stops_and_one_whose_step_failed_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error of a kernel comes again with every later call, so nothing else would ever be answered."""
    broken: list[str] = []

    def before() -> None:
        if broken:
            raise RuntimeError(broken[0])

    config = EngineConfig(num_gpu_blocks_override=20)
    core = EngineCore(config, with_before(load_model(config), before))
    with running(core) as engine:
        broken.append("this step only")
        first = core.submit("r-1", [1, 2, 3], GREEDY)
        wait_for(lambda: engine.ends() == {first: Status.FINISHED_ERROR})
        broken.clear()
        second = core.submit("r-2", [1, 2, 3], GREEDY)
        wait_for(lambda: engine.ends().get(second) == Status.FINISHED_LENGTH_CAPPED)
        broken.append("CUDA error: an illegal memory access was encountered")
        monkeypatch.setattr(core.runner, "check", before)
        third = core.submit("r-3", [1, 2, 3], GREEDY)
        wait_for(lambda: engine.ends().get(third) == Status.FINISHED_ERROR)
        assert "illegal memory access" in core.failure
        with pytest.raises(EngineDead, match="illegal memory access"):
            core.submit("r-4", [1, 2, 3], GREEDY)


def test_an_idle_engine_makes_no_passes_once_its_rest_is_audited() -> None:
    stream = EventStream("tiny@test/0", ANYWHERE, ANYWHERE)
    with running(tiny(stream, num_gpu_blocks_override=20)) as engine:
        number = engine.core.submit("r", [1, 2, 3], GREEDY)
        wait_for(lambda: number in engine.ends())
        done = engine.core.auditor.cycles
        wait_for(lambda: engine.core.auditor.cycles >= done + 1)

        def at_rest() -> bool:
            passes = engine.core.scheduler.passes
            time.sleep(0.3)
            return engine.core.scheduler.passes == passes

        wait_for(at_rest)
        again = engine.core.submit("r-again", [1, 2, 3], GREEDY)
        wait_for(lambda: again in engine.ends())


def test_a_request_that_never_fits_waits_and_holds_back_those_behind_it_until_it_is_ended() -> None:
    with running(tiny(num_gpu_blocks_override=5, block_size=4, max_model_len=100, faults=TAKEN_IN)) as engine:
        too_large = engine.core.submit("r-large", [7] * 40, GREEDY)
        small = engine.core.submit("r-small", [7, 7], GREEDY)
        began, passes = time.monotonic(), engine.core.scheduler.passes
        wait_for(lambda: engine.core.scheduler.passes > passes + 20)
        assert engine.ends() == {}
        # A pass looks at the queue and rests: at least 0.01 s, less the clock's own grain.
        assert engine.core.scheduler.passes - passes <= (time.monotonic() - began) / 0.009 + 2
        engine.core.end(too_large)
        wait_for(lambda: len(engine.ends()) == 2)
        assert engine.ends() == {too_large: Status.FINISHED_ABORTED, small: Status.FINISHED_LENGTH_CAPPED}
        assert len(engine.tokens(small)) == GREEDY.max_tokens


def test_a_prompt_that_the_model_cannot_take_is_refused() -> None:
    core = tiny(num_gpu_blocks_override=9, max_model_len=20)
    try:
        for prompt, why in (([], "empty"), ([1] * 20, "max_model_len is 20"), ([1, 10_000], "vocabulary")):
            with pytest.raises(Refused, match=why):
                core.submit("r", prompt, GREEDY)
        assert core.in_flight == 0
    finally:
        core.close()


@pytest.mark.parametrize("over", [0, 1])
def test_a_prompt_is_refused_that_the_whole_pool_cannot_hold(over: int) -> None:
    """One that fills it to the last token is served, with the token that needs no more room."""
    core = tiny(num_gpu_blocks_override=5, block_size=4, max_model_len=100)
    holds = core.pool.usable * core.config.block_size
    try:
        if over:
            with pytest.raises(Refused, match=f"needs {core.pool.usable + 1} KV blocks.*at most {holds} tokens"):
                core.submit("r", [7] * (holds + over), GREEDY)
            assert core.in_flight == 0
        else:
            tokens, status = _run(core, [7] * holds, GREEDY)
            assert (len(tokens), status) == (1, Status.FINISHED_LENGTH_CAPPED)
    finally:
        core.close()


def test_what_ends_an_output() -> None:
    core = tiny(num_gpu_blocks_override=40)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    try:
        tokens = _run(core, [1, 2, 3], greedy)[0]
        assert len(tokens) == 12
        place = next(index for index in range(1, 12) if tokens[index] not in tokens[:index])
        stopping = dataclasses.replace(greedy, stop_token_ids=frozenset([tokens[place]]))
        assert _run(core, [1, 2, 3], stopping) == (tokens[: place + 1], Status.FINISHED_STOPPED)
        assert core.counts.prompt_tokens == 6
        assert core.counts.generation_tokens == 12 + place + 1
    finally:
        core.close()


def test_the_models_own_end_ends_an_output_unless_it_is_ignored() -> None:
    config = EngineConfig(num_gpu_blocks_override=40)
    loaded = load_model(config)
    ends = frozenset(range(0, loaded.config.vocab_size, 8))  # so many that one is drawn soon
    core = EngineCore(
        config, dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, eos_token_ids=ends)), None
    )
    try:
        params = SamplingParams(temperature=2.0, max_tokens=100, seed=1)
        tokens, status = _run(core, [1, 2, 3], params)
        assert status == Status.FINISHED_STOPPED
        assert [token in ends for token in tokens] == [False] * (len(tokens) - 1) + [True]
        ignoring = SamplingParams(temperature=2.0, max_tokens=100, seed=1, ignore_eos=True)
        beyond, status = _run(core, [1, 2, 3], ignoring)
        assert beyond[: len(tokens)] == tokens
        assert len(beyond) == 100
        assert status == Status.FINISHED_LENGTH_CAPPED
    finally:
        core.close()


def test_closing_ends_what_is_left() -> None:
    core = tiny(num_gpu_blocks_override=5, block_size=4, max_model_len=100, faults=TAKEN_IN)
    with running(core) as engine:
        number = core.submit("r-large", [7] * 40, GREEDY)
    assert engine.ends() == {number: Status.FINISHED_ABORTED}
    assert core.in_flight == 0


def _run(core: EngineCore, prompt: list[int], params: SamplingParams) -> tuple[list[int], Status | None]:
    """In this thread, until the request has ended."""
    core.submit("r", prompt, params)
    tokens: list[int] = []
    while True:
        for output in core.step():
            tokens += output.token_ids
            if output.status is not None:
                return tokens, output.status


def test_requests_are_taken_in_the_order_of_arrival_or_by_priority() -> None:
    core = tiny(num_gpu_blocks_override=40, max_num_seqs=1, scheduling_policy="priority")
    try:
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        numbers = [core.submit(f"r-{p}", [1, 2, 3], params, priority=p) for p in (5, 1, 3)]
        ended = [output.number for _ in numbers for output in core.step()]
        assert ended == [numbers[1], numbers[2], numbers[0]]
    finally:
        core.close()
