"""Healthy engines by their log lines and metrics alone, however often they are read: no finding, nothing claimed.

The shapes of the lab run on the real scheduler and pool in virtual time; those on paper stand for what it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import pytest

from kvscope.engine.bench.simulated_engine import SimulatedEngine, StepTime
from kvscope.engine.config import EngineConfig
from kvscope.engine.models import LoadedModel, load_model
from kvscope.lab.client_load import Crowd
from kvscope.lab.paper_engine import HEALTHY_ON_PAPER, Moment, as_log, as_metrics, every
from kvscope.lab.scenarios.healthy_engines import HEALTHY
from kvscope.lab.scenarios.scenario import Scenario
from kvscope.monitor.contract.kinds import Status
from kvscope.monitor.contract.samples import Fact, ReportedEvent, Sample
from kvscope.monitor.detectors.findings import severity_at_least
from kvscope.monitor.questions.pipeline import Pipeline

INTERVALS_S = (1, 5, 15, 30, 60)
SAMPLE_S = (5, 30)
"""In `make test`; all of them in `make prove`."""
OLDER_FROM_S = 5
"""A page of an older release is a part of the other: it is read at these intervals only, for time."""
SEEDS = 50
Shape = Callable[[int], list[Moment]]


def found_in(records: Sequence[Sample | Fact | ReportedEvent]) -> list[str]:
    """Codes of warning or above that ever fired, each with its verdict and text."""
    watch = Pipeline()
    watch.feed(records)
    watch.settle()
    return [
        f"{finding.code} {finding.verdict}: {finding.explanation}"
        for finding in watch.findings()
        if severity_at_least(finding.severity, "warning")
    ]


def lab_moments(scenario: Scenario, seed: int) -> list[Moment]:
    """The gauges and counters of a scenario's engine each second, and for two minutes after its load."""
    config = EngineConfig(**{"seed": seed, **scenario.engine})
    engine = SimulatedEngine(config, lab_model(config.max_model_len), step_time=StepTime(base_s=scenario.step_s))
    crowd = Crowd(engine, scenario.load, seed)
    moments: list[Moment] = []

    def read() -> None:
        scheduler, counts = engine.scheduler, engine.counts
        ended = [counts.finished[status] for status in (Status.FINISHED_STOPPED, Status.FINISHED_LENGTH_CAPPED)]
        moments.append(
            Moment(
                float(len(moments) + 1),
                len(scheduler.running),
                scheduler.num_waiting,
                len(scheduler.parked),
                engine.usage,
                counts.prompt_tokens,
                counts.generation_tokens,
                scheduler.step,
                sum(ended),
                sum(counts.finished.values()) - sum(ended),
                scheduler.num_preemptions,
            )
        )

    engine.time.every(1.0, read)
    engine.run(scenario.seconds + 120, crowd.receive)
    engine.close()
    return moments


@cache
def lab_model(max_model_len: int | None) -> LoadedModel:
    """What the engine pretends to run; only its settings count."""
    return load_model(EngineConfig(max_model_len=max_model_len))


def readings(
    moments: list[Moment], seed: int, intervals: Sequence[int] = INTERVALS_S
) -> Iterator[tuple[str, list[str]]]:
    for seconds in intervals:
        some = every(moments, seconds, seed % seconds)
        yield f"log each {seconds} s", found_in(as_log(some))
        yield f"metrics each {seconds} s", found_in(as_metrics(some))
        if seconds >= OLDER_FROM_S:
            older = ("deferred", "steps", "finished", "aborted")
            yield f"an older release each {seconds} s", found_in(as_metrics(some, *older))


def alarms_of(shape: Shape, seeds: range, intervals: Sequence[int] = INTERVALS_S) -> dict[str, list[str]]:
    return {
        f"seed {seed}, {how}": found for seed in seeds for how, found in readings(shape(seed), seed, intervals) if found
    }


ON_PAPER = pytest.mark.parametrize("shape", HEALTHY_ON_PAPER, ids=lambda shape: shape.__name__)
IN_THE_LAB = pytest.mark.parametrize("scenario", HEALTHY, ids=lambda scenario: scenario.name)


@ON_PAPER
def test_nothing_is_found(shape: Shape) -> None:
    assert not alarms_of(shape, range(1), SAMPLE_S)


@IN_THE_LAB
def test_nothing_is_found_in_the_lab(scenario: Scenario) -> None:
    assert not alarms_of(partial(lab_moments, scenario), range(1), SAMPLE_S)


@pytest.mark.prove
@ON_PAPER
def test_nothing_is_found_in_fifty_runs(shape: Shape) -> None:
    assert not alarms_of(shape, range(SEEDS))


@pytest.mark.prove
@IN_THE_LAB
def test_nothing_is_found_in_fifty_runs_of_the_lab(scenario: Scenario) -> None:
    assert not alarms_of(partial(lab_moments, scenario), range(SEEDS))
