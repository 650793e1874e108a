"""Two data-parallel ranks of one server, each an engine of its own in virtual time, watched together."""

from __future__ import annotations

import heapq
from contextlib import closing
from functools import cache, partial
from pathlib import Path

import msgspec
import pytest

from kvscope.engine.bench.simulated_engine import SimulatedEngine, StepTime
from kvscope.engine.config import EngineConfig
from kvscope.engine.models import LoadedModel, load_model
from kvscope.engine.requests.request import SamplingParams
from kvscope.lab.lab_run import frames
from kvscope.monitor.contract.samples import Sample
from kvscope.monitor.questions.pipeline import Pipeline
from tests.detectors.scenes import Observer, value

ENGINE_STALLED = "stuck.engine-stalled"
RANK_DIVERGED = "stuck.rank-diverged"
UNEQUAL = "imbalance.ranks"
SECONDS = 20


@cache
def model() -> LoadedModel:
    return load_model(EngineConfig())


def rank(folder: Path, name: str, *, hangs: bool, busy: bool = True) -> Path:
    """A rank's life under a load that lasts to its end, or a single request; it may hang in its hundredth step."""
    faults = (f"{ENGINE_STALLED}:after=100:limit=1",) if hangs else ()
    config = EngineConfig(num_gpu_blocks_override=201, faults=faults, hash_key=b"ranks")
    with closing(SimulatedEngine(config, model(), step_time=StepTime(0.05), journal=folder, name=name)) as engine:
        for n in range(SECONDS if busy else 1):
            params = SamplingParams(max_tokens=30, ignore_eos=True)
            engine.at(float(n), partial(engine.submit, f"r-{n}", [n] * 20, params))
        engine.run(SECONDS)
    return folder


def watched(folder: Path, *names: str, hang: tuple[int, ...], busy: bool = True) -> Observer:
    """What all the ranks said, in the order of its time, without their ends; those in `hang`, by their place, do."""
    stated = [list(frames(rank(folder / str(n), name, hangs=n in hang, busy=busy))) for n, name in enumerate(names)]
    ends = max(batches[-1].wall_ns for batches in stated)
    observer = Observer()
    observer.watch.feed(
        batch
        for batch in heapq.merge(*stated, key=lambda batch: batch.wall_ns)
        if batch.wall_ns <= ends - 1_000_000_000
    )
    observer.watch.settle()
    return observer


def alarms(watch: Pipeline) -> dict[str, str]:
    return {finding.engine: finding.code for finding in watch.findings("firing") if finding.severity != "info"}


def test_one_of_two_ranks_stops(tmp_path: Path) -> None:
    observer = watched(tmp_path, "m@h:1/0", "m@h:1/1", hang=(1,))
    (finding,) = [f for f in observer.watch.findings() if f.severity != "info"]
    assert (finding.code, finding.engine, finding.verdict, finding.severity) == (
        RANK_DIVERGED,
        "m@h:1/1",
        "confirmed",
        "critical",
    )
    state = observer.watch.fleet.engines["m@h:1/1"].state
    assert set(finding.culprits.requests) == {r.id for r in state.requests.values() if r.is_running or r.is_waiting}
    assert value(finding, "ranks_stepping") == "0"
    assert value(finding, "step_in_flight") in state.in_flight
    assert finding.explanation.startswith("Rank 1 has stopped, while rank 0 of the same server keeps running.")


@pytest.mark.parametrize(
    ("names", "hang"),
    [
        (("m@h:1/0", "m@h:1/1"), (0, 1)),  # all of them
        (("m@h:1/0", "m@h:2/0"), (1,)),  # the one that goes on is of another server
        (("m@h:1/0",), (0,)),
    ],
)
def test_with_no_rank_that_goes_on_the_engine_is_stalled(
    names: tuple[str, ...], hang: tuple[int, ...], tmp_path: Path
) -> None:
    observer = watched(tmp_path, *names, hang=hang)
    assert alarms(observer.watch) == {names[n]: ENGINE_STALLED for n in hang}
    assert {f.code for f in observer.watch.findings() if f.severity != "info"} == {ENGINE_STALLED}


def test_an_idle_rank_beside_a_busy_one_is_no_trouble(tmp_path: Path) -> None:
    assert not watched(tmp_path, "m@h:1/0", "m@h:1/1", hang=(), busy=False).alarms()


def test_by_figures_it_is_likely() -> None:
    observer = Observer()
    for second in range(100):
        at_ns = (1_000 + second) * 1_000_000_000
        for name, steps in (("m@h:1/0", 10 * second), ("m@h:1/1", 10 * min(second, 20))):
            figures = Sample(name, f"{second}", at_ns, running=4, waiting=0, usage=0.5, steps=steps, source="metrics")
            sample = msgspec.structs.replace(figures, prompt_tokens=900, process_cpu_s=0.02 * second)
            observer.watch.feed([sample])
    observer.watch.settle()
    (finding,) = [f for f in observer.watch.findings() if f.severity != "info"]
    assert (finding.code, finding.engine, finding.verdict) == (RANK_DIVERGED, "m@h:1/1", "likely")
    assert value(finding, "steps") == 200
    assert {e.source for e in finding.evidence if e.name in ("steps", "ranks_stepping")} == {"metrics"}


def unequal(*ranks: tuple[int, float, int], samples: int = 3) -> Observer:
    """Ranks with so many requests waiting, such a usage and so many samples fewer, in this order."""
    observer = Observer()
    for second in range(samples):
        for number, (waiting, usage, fewer) in enumerate(ranks):
            if second >= fewer:
                at_ns = (1_000 + 15 * second) * 1_000_000_000
                name = f"m@h:1/{number}"
                observer.watch.feed([Sample(name, f"{second}", at_ns, running=4, waiting=waiting, usage=usage)])
    observer.watch.settle()
    return observer


def test_a_full_rank_beside_one_with_room_is_named_with_the_counts() -> None:
    (finding,) = unequal((9, 1.0, 0), (0, 0.1, 0), (0, 0.2, 0)).firing(UNEQUAL)
    assert (finding.engine, finding.verdict) == ("m@h:1/0", "likely")
    assert (value(finding, "full_ranks"), value(finding, "ranks_with_room")) == (1, 2)
    assert finding.explanation.startswith("1 rank of 3 are full")
    (two,) = unequal((9, 1.0, 0), (0, 0.1, 0), (3, 0.99, 0)).firing(UNEQUAL)
    assert (two.engine, value(two, "full_ranks")) == ("m@h:1/0", 2)


def test_unequal_ranks_are_shown_as_their_last_samples_have_them() -> None:
    observer = unequal((9, 1.0, 0), (0, 0.1, 0), samples=2)
    last = [("m@h:1/0", 7, 0.96), ("m@h:1/1", 0, 0.4)]
    observer.watch.feed([Sample(name, "2", 1_030_000_000_000, 4, waiting, usage=use) for name, waiting, use in last])
    observer.watch.settle()
    (finding,) = observer.firing(UNEQUAL)
    shown = [value(finding, name) for name in ("waiting", "usage", "usage_of_a_rank_with_room")]
    assert shown == [7, 96.0, 40.0]
    assert finding.position == "0"  # since when, of unequal_ranks


@pytest.mark.parametrize(
    ("ranks", "fires"),
    [
        (((1, 0.95, 0), (0, 0.5, 0)), True),
        (((1, 0.94, 0), (0, 0.5, 0)), False),  # it may still admit
        (((0, 0.95, 0), (0, 0.5, 0)), False),  # nothing waits
        (((1, 0.95, 0), (0, 0.51, 0)), False),
        (((1, 0.95, 0), (1, 0.5, 0)), False),  # the other queues too
        (((1, 0.95, 1), (0, 0.5, 0)), False),  # a burst
        (((1, 0.95, 0), (0, 0.5, 1)), False),
    ],
)
def test_ranks_are_unequal_if_one_is_full_for_some_samples_while_another_has_room(
    ranks: tuple[tuple[int, float, int], ...], fires: bool
) -> None:
    assert bool(unequal(*ranks).firing(UNEQUAL)) is fires
