"""Minutes of an engine in virtual time: what a fault does to it, and the same life from the same load."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path

import pytest

from kvscope.engine.bench.clock import VirtualClock
from kvscope.engine.bench.load_bench import BenchLoad
from kvscope.engine.bench.simulated_bench import bench_simulated
from kvscope.engine.bench.simulated_engine import SimulatedEngine, StepTime
from kvscope.engine.config import EngineConfig
from kvscope.engine.models import load_model
from kvscope.engine.requests.request import Output, SamplingParams
from kvscope.engine.requests.structured_output import StructuredOutputs
from kvscope.monitor.contract import journal
from kvscope.monitor.contract.kinds import Kind
from kvscope.monitor.contract.wire import Batch, decode
from kvscope.monitor.questions.pipeline import Pipeline

LEASE_S = 180.0


def engine(*faults: str, journal: Path | None = None, **settings: object) -> SimulatedEngine:
    given = {"num_gpu_blocks_override": 200, "hash_key": b"always the same", **settings, "faults": faults}
    config = EngineConfig(**given)  # type: ignore[arg-type]
    return SimulatedEngine(config, load_model(config), journal=journal)


def clients(engine: SimulatedEngine, count: int, every_s: float) -> None:
    """So many requests, with other prompts each, one after the other."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)

    def come(number: int) -> Callable[[], None]:
        return lambda: void(engine.submit(f"r-{number}", [number] * 100, params))

    for number in range(count):
        engine.at(number * every_s, come(number))


def void(_: object) -> None:
    """What is done with it is of no interest."""


@pytest.mark.parametrize("fault", [True, False])
def test_ten_minutes_of_completions_that_are_not_delivered(fault: bool) -> None:
    """Usage climbs with each request that ends, stays while nothing runs, and falls when the leases end."""
    faults = ["leak.finished-held"] if fault else []
    with closing(engine(*faults, kv_connector="host", kv_lease_seconds=LEASE_S)) as e:
        clients(e, 20, every_s=3)
        usage = []
        for _ in range(10):
            e.run(60)
            usage.append(e.usage)
        assert e.counts.generation_tokens == 20 * 20
        assert e.now_s >= 600
    lease_minutes = round(LEASE_S / 60)
    assert all((used > 0.5) == fault for used in usage[: lease_minutes - 1])
    assert usage[lease_minutes + 1 :] == [0] * (10 - lease_minutes - 1)


def test_an_engine_that_only_polls_its_connector_says_little(tmp_path: Path) -> None:
    """What it holds is read out a few times, and then a slice a second: a night of it must not fill a disk."""
    with closing(engine("leak.finished-held", kv_connector="host", kv_lease_seconds=3600, journal=tmp_path)) as e:
        clients(e, 3, every_s=1)
        e.run(60)
        assert e.scheduler.deferred
        assert e.auditor.cycles > 3
        slices, minutes = sliced(tmp_path), 5
        e.run(60 * minutes)
    assert 0 < sliced(tmp_path) - slices <= 60 * minutes + 1


def sliced(directory: Path) -> int:
    """How many slices of the block tables were read out."""
    frames = map(decode, chain.from_iterable(map(journal.read_segment, sorted(directory.iterdir()))))
    events = (event for frame in frames if isinstance(frame, Batch) for event in frame.events())
    return sum(event.kind == Kind.AUDIT_BLOCKS for event in events)


@pytest.mark.parametrize("fault", [True, False])
def test_ten_minutes_of_an_engine_that_asks_its_connector_nothing_when_idle(fault: bool, tmp_path: Path) -> None:
    """The last request's blocks are held all the time, and the monitor says so from what the engine kept of itself."""
    faults = ["leak.idle-not-polled"] if fault else []
    with closing(engine(*faults, kv_connector="host", journal=tmp_path)) as e:
        clients(e, 3, every_s=1)
        e.run(10)
        connector = e.connector
        assert connector is not None
        polls = connector.polls
        e.run(590)
        assert (e.usage > 0) == fault
        assert connector.polls == polls or not fault
    watch = Pipeline()
    watch.feed(decode(payload) for payload in journal.read(tmp_path))
    alarms = [finding for finding in watch.findings("firing") if finding.severity != "info"]
    assert bool(alarms) == fault
    assert all("r-2" in str(finding.culprits.requests) for finding in alarms)


def test_the_same_load_lives_the_same_life() -> None:
    def life() -> list[tuple[float, Output]]:
        seen: list[tuple[float, Output]] = []
        with closing(engine(num_gpu_blocks_override=16)) as e:
            clients(e, 10, every_s=0.01)
            e.run(5, lambda outputs: seen.extend((e.now_s, output) for output in outputs))
            assert e.scheduler.num_preemptions > 0
        return seen

    first = life()
    assert sum(output.status is not None for _, output in first) == 10
    assert life() == first


def test_a_step_lasts_as_long_as_its_tokens_and_what_they_read() -> None:
    config = EngineConfig(num_gpu_blocks_override=200)
    step = StepTime(base_s=1.0, per_token_s=0.01, per_kv_token_s=0.0001)
    ends: list[float] = []
    with closing(SimulatedEngine(config, load_model(config), step_time=step)) as e:
        began = e.now_s
        e.submit("r", [1] * 100, SamplingParams(max_tokens=2, ignore_eos=True))
        e.run(10, lambda outputs: ends.extend(e.now_s - began for _ in outputs))
    prompt, decode = step.seconds(100, 100), step.seconds(1, 101)
    assert ends == pytest.approx([prompt, prompt + decode])


def test_a_load_in_virtual_time_is_reported_in_virtual_time(tmp_path: Path) -> None:
    """Clients that time out, wait for a place, or are refused, as they are by a server."""
    load = BenchLoad(num_prompts=10, max_concurrency=2, input_len=100, output_len=50, timeout_s=1.0)
    config = EngineConfig(num_gpu_blocks_override=200)
    seen = bench_simulated(load, config, 600, tmp_path)
    assert [client.outcome for client in seen] == ["completed"] * 10
    assert all(client.output_tokens == len(client.came) == 50 for client in seen)
    assert max(sum(a.began <= b.began < a.ended for a in seen) for b in seen) == 2
    stuck = bench_simulated(load, EngineConfig(num_gpu_blocks_override=200, faults=("stuck.front-end",)), 600, None)
    assert {(client.outcome, round(client.ended - client.began, 6)) for client in stuck} == {("timed out", 1.0)}
    refused = bench_simulated(load, EngineConfig(num_gpu_blocks_override=4), 600, None)
    assert {client.outcome for client in refused} == {"failed"}
    assert all("the whole pool has 3" in client.error for client in refused)


def test_with_a_step_planned_ahead_what_is_lost_meanwhile_is_fenced(tmp_path: Path) -> None:
    """Steps take as long as without, one after the other, and what is aborted between two waits for the later one."""

    def life(ahead: bool) -> list[float]:
        seen: list[float] = []
        with closing(engine(async_scheduling=ahead, journal=tmp_path / str(ahead))) as e:
            survivor = e.submit("stays", [1] * 100, SamplingParams(max_tokens=20, ignore_eos=True))
            goes = e.submit("goes", [2] * 100, SamplingParams(max_tokens=200, ignore_eos=True))
            e.at(0.05, partial(e.client_gone, goes))
            while e.in_flight:
                e.run(0.01, lambda outputs: seen.extend(e.now_s for each in outputs if each.number == survivor))
        frames = [decode(payload) for payload in journal.read(tmp_path / str(ahead))]
        kinds = [event.kind for frame in frames if isinstance(frame, Batch) for event in frame.events()]
        assert (Kind.RECLAIMED in kinds) == ahead
        return seen

    assert life(True) == pytest.approx(life(False), abs=0.01)


def test_a_step_that_hangs_does_so_while_time_passes(tmp_path: Path) -> None:
    with closing(engine("stuck.engine-stalled:after=5:limit=1", journal=tmp_path)) as e:
        number = e.submit("r", [1] * 100, SamplingParams(max_tokens=20, ignore_eos=True))
        e.run(120)
        step, since_ns = e.launched
        assert (step, e.in_flight) == (5, 1)
        assert e.now_s - since_ns / 1e9 > 100
        assert number in e.watchdog.stalled
    watch = Pipeline()
    watch.feed(decode(payload) for payload in journal.read(tmp_path))
    assert "stuck.engine-stalled" in [finding.code for finding in watch.findings()]


def test_a_grammar_is_compiled_within_no_time() -> None:
    grammar = StructuredOutputs(regex="[ab]{9}")
    with closing(engine()) as e:
        e.submit("r", [1] * 10, SamplingParams(max_tokens=3, ignore_eos=True, structured_outputs=grammar))
        e.run(1)
        assert e.in_flight == 0


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"kv_connector": "peer"}, "another engine"),
    ],
)
def test_what_takes_real_time_is_refused(settings: dict[str, object], why: str) -> None:
    config = EngineConfig(num_gpu_blocks_override=20, **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=why):
        SimulatedEngine(config, load_model(config))
    with pytest.raises(ValueError, match="base_s"):
        StepTime(base_s=0)


def test_what_is_due_is_done_when_its_time_has_come() -> None:
    clock = VirtualClock()
    began = clock.ns
    done: list[tuple[str, int]] = []
    clock.every(2.0, lambda: done.append(("every", clock.ns - began)))
    clock.at(began + 3_000_000_000, lambda: done.append(("at", clock.ns - began)))
    clock.sleep(5.0)
    assert done == [("every", 2_000_000_000), ("at", 3_000_000_000), ("every", 4_000_000_000)]
    assert clock.ns - began == 5_000_000_000
