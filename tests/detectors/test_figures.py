"""Judgement from figures of a metrics page: recordings of a real vLLM, scraped over HTTP, and pages that lack some."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest

from kvscope.lab.recorded_pages import rows, scraped
from kvscope.monitor.contract.samples import Fact, Sample
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.detectors.registry import THRESHOLDS
from kvscope.monitor.sources.exposition import COUNTERS, ExposedEngine, ExposedFigures, Sampler
from tests.detectors.scenes import Observer, value

FINISHED_HELD = "leak.finished-held"
LOCKSTEP = "collapse.lockstep"
ENGINE_STALLED = "stuck.engine-stalled"
NEVER_FITS = "stuck.never-fits"
NOT_EXPOSED = "blind.not-exposed"
COUNTER_LAG = "blind.counter-lag"
HEALTHY = ("healthy-shared-prefix", "decode-growth-preempts")


def judged(records: Sequence[Sample | Fact]) -> Observer:
    observer = Observer()
    observer.watch.feed(records)
    observer.watch.settle()
    return observer


def replayed(name: str) -> Observer:
    return judged(scraped(rows(name)))


def past(observer: Observer, code: str) -> FindingReport:
    """The one finding of warning or above that there ever was."""
    (finding,) = [f for f in observer.watch.findings() if f.severity != "info"]
    assert finding.code == code
    return finding


def only_info(observer: Observer, code: str) -> FindingReport:
    (finding,) = observer.firing(code)
    assert finding.severity == "info"
    return finding


# -------------------------------------------------------------------- recordings


def test_never_freed() -> None:
    finding = replayed("never-freed").only(FINISHED_HELD)
    assert finding.verdict == "likely"
    assert value(finding, "idle_usage") == round(100 * rows("never-freed")[-1]["kv_usage"], 1)
    assert {evidence.source for evidence in finding.evidence} == {"metrics"}
    assert "event stream" in finding.missing


def test_lockstep_collapse() -> None:
    finding = replayed("lockstep-collapse").only(LOCKSTEP)
    assert finding.verdict == "likely"
    assert value(finding, "running_before") == value(finding, "finished_during_drop") == 15
    assert value(finding, "preemptions_during_drop") == 0
    assert "preempt" in finding.missing


def test_frozen_engine() -> None:
    """It was stopped and went on: over by the end, and found all the same."""
    observer = replayed("frozen-engine")
    finding = past(observer, ENGINE_STALLED)
    assert (finding.severity, finding.verdict, finding.state) == ("critical", "cannot-tell", "resolved")
    assert "pause" in finding.missing  # it lasted 7 s
    assert not any("estart" in step for step in finding.do_now)
    before = max(row["iter_count"] for row in rows("frozen-engine") if row["t"] < 10)
    assert value(finding, "steps") == before
    assert value(finding, "running") == 6
    assert float(value(finding, "stalled_s")) > float(value(finding, "allowed_s"))
    assert "still responds" in finding.explanation


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_wrong(name: str) -> None:
    assert replayed(name).alarms() == []


def test_what_its_own_metrics_hide_is_said() -> None:
    observer = replayed("decode-growth-preempts")
    finding = only_info(observer, COUNTER_LAG)
    assert value(finding, "preemptions_counted") == rows("decode-growth-preempts")[-1]["preemptions"] == 3
    assert "counted nowhere" in finding.explanation
    assert not observer.firing(NOT_EXPOSED)


# -------------------------------------------------------------------- however often it is scraped, and from whenever on


def figures(name: str, every_s: float, first: int = 0) -> list[Sample]:
    """The recording's samples without a page."""
    sampler = Sampler(ExposedEngine("tiny", "x:1", "0"), "prometheus")
    return [
        sampler.sample(
            round((1.79e9 + row["t"]) * 1e9),
            f"{row['t']}",
            {
                "running": row["running"],
                "waiting": row["waiting"],
                "deferred": row["wait_deferred"],
                "usage": row["kv_usage"],
                "steps": row["iter_count"],
                "preemptions": row["preemptions"],
                "finished": row["ok_stop"] + row["ok_length"] + row["ok_abort"] + row["ok_error"],
                "prompt_tokens": row["prompt_tokens"],
                "generation_tokens": row["gen_tokens"],
            },
        )
        for row in rows(name, every_s, first)
    ]


@pytest.mark.parametrize("every_s", [0.2, 1.0, 3.0, 10.0, 15.0])
@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_wrong_however_it_is_scraped(name: str, every_s: float) -> None:
    for first in range(0, round(every_s / 0.2), 3):
        samples = figures(name, every_s, first)
        for start in range(0, len(samples), max(1, len(samples) // 10)):
            assert judged(samples[start:]).alarms() == []


@pytest.mark.parametrize("every_s", [0.2, 1.0, 5.0])
@pytest.mark.parametrize(("name", "code"), [("lockstep-collapse", LOCKSTEP), ("never-freed", FINISHED_HELD)])
def test_found_however_it_is_scraped(name: str, code: str, every_s: float) -> None:
    for first in range(0, round(every_s / 0.2), 6):
        assert judged(figures(name, every_s, first)).only(code).verdict == "likely"


# -------------------------------------------------------------------- judgement with less


def without(*names: str) -> Callable[[str], str]:
    """A page that does not have these."""
    return lambda text: "".join(
        line for line in text.splitlines(keepends=True) if not re.match(rf"vllm:({'|'.join(names)})\b", line)
    )


def test_without_the_count_of_steps_a_stall_is_not_told() -> None:
    """No token for a while is what a long prefill looks like too; after a minute it is said, as what it is."""
    change = without("iteration_tokens_total_count")
    observer = judged(scraped(rows("frozen-engine"), change))
    assert observer.alarms() == []
    finding = only_info(observer, NOT_EXPOSED)
    assert value(finding, "vllm:iteration_tokens_total_count") == "not exposed"
    assert ENGINE_STALLED in finding.explanation
    stopped = [dict(row) for row in rows("frozen-engine") if 5.2 < row["t"] < 12]
    stopped.append({**stopped[-1], "t": stopped[0]["t"] + THRESHOLDS[f"{ENGINE_STALLED}.first_step_s"].value + 1})
    stalled = judged(scraped(stopped, change)).only(ENGINE_STALLED)
    assert stalled.verdict == "cannot-tell"
    assert "vllm:iteration_tokens_total_count" in stalled.missing


def test_without_usage_nothing_is_said_of_the_pool() -> None:
    observer = judged(scraped(rows("never-freed"), without("kv_cache_usage_perc")))
    assert observer.alarms() == []
    assert FINISHED_HELD in only_info(observer, NOT_EXPOSED).explanation


def test_an_older_vllm_is_judged_by_what_it_has() -> None:
    change = without("num_requests_waiting_by_reason", "iteration_tokens_total_count", "request_success_total")
    observer = judged(scraped(rows("lockstep-collapse"), change))
    finding = observer.only(LOCKSTEP)
    assert finding.verdict == "cannot-tell"
    assert value(finding, "finished_during_drop") == "not exposed"
    assert len(only_info(observer, NOT_EXPOSED).evidence) == 3


# -------------------------------------------------------------------- made up

QUIET: ExposedFigures = dict.fromkeys((*COUNTERS, "running", "waiting", "deferred", "usage"), 0.0)


def spoken(*moments: ExposedFigures, every_s: float = 1.0, again: int = 1) -> list[Sample]:
    """Samples of these figures, `again` times the last."""
    sampler = Sampler(ExposedEngine("made-up", "x:1", "0"), "metrics")
    stated = [*moments, *[moments[-1]] * (again - 1)]
    return [
        sampler.sample(round((1.79e9 + n * every_s) * 1e9), str(n), {**QUIET, "process_cpu_s": 0.02 * n, **s})
        for n, s in enumerate(stated)
    ]


def test_a_queue_in_front_of_an_empty_pool() -> None:
    grace = round(THRESHOLDS[f"{NEVER_FITS}.figures_grace_s"].value)
    wedged: ExposedFigures = {"waiting": 4, "steps": 50}
    before: ExposedFigures = {"running": 1, "usage": 0.3, "steps": 49}
    assert judged(spoken(before, wedged, again=grace)).alarms() == [NEVER_FITS]  # not yet
    assert not judged(spoken(before, wedged, again=grace)).firing(NEVER_FITS)
    finding = judged(spoken(before, wedged, again=grace + 1)).only(NEVER_FITS)
    assert (finding.verdict, value(finding, "waiting_for_blocks")) == ("cannot-tell", 4)
    assert "paused" in finding.explanation
    assert not judged(spoken(before, {**wedged, "deferred": 4}, again=99)).alarms()  # for KV from elsewhere, say
    assert not judged(spoken(before, {**wedged, "usage": 0.5}, again=grace + 1)).firing(NEVER_FITS)
    assert not judged(spoken(before, {**wedged, "usage": 0.02}, again=grace + 1)).firing(NEVER_FITS)
    assert not judged(spoken(before, {**wedged, "awake": 0}, again=99)).alarms()


def test_a_queue_is_not_told_from_another_wait_where_that_is_not_exposed() -> None:
    samples = spoken({"waiting": 4}, again=60)
    sampler = Sampler(ExposedEngine("made-up", "x:1", "0"), "metrics")
    told_less = {name: value for name, value in QUIET.items() if name != "deferred"} | {"waiting": 4}
    samples = [sampler.sample(sample.at_ns or 0, sample.position, told_less) for sample in samples]
    finding = judged(samples).only(NEVER_FITS)
    assert finding.verdict == "cannot-tell"
    assert "num_requests_waiting_by_reason" in finding.missing


def test_a_step_may_take_as_long_as_others_did_and_more() -> None:
    """Steps of 10 s each, seen to end: one of 25 s is no stall, one of 40 s may be, one of 70 s is likely to be."""
    steps: list[ExposedFigures] = [{"running": 1, "waiting": 9, "usage": 0.5, "steps": n // 10} for n in range(41)]
    assert not judged(spoken(*steps, again=25)).firing(ENGINE_STALLED)
    assert judged(spoken(*steps, again=40)).only(ENGINE_STALLED).verdict == "cannot-tell"
    assert judged(spoken(*steps, again=70)).only(ENGINE_STALLED).verdict == "likely"


def test_an_idle_engine_is_not_stalled() -> None:
    assert judged(spoken({"steps": 9}, again=100)).alarms() == []


def test_a_restart_ends_what_was() -> None:
    """The leak is over; so are its figures: the new life starts with none of them."""
    leaking: ExposedFigures = {"usage": 0.5, "steps": 900, "generation_tokens": 9000, "finished": 90}
    anew: ExposedFigures = {"usage": 0.1, "running": 1, "steps": 5, "generation_tokens": 5}
    lease_s = THRESHOLDS[f"{FINISHED_HELD}.lease_s"].value
    observer = judged(spoken(*[leaking] * 20, anew, again=2, every_s=lease_s / 10))
    assert not observer.firing(FINISHED_HELD)
    assert past(observer, FINISHED_HELD).state == "resolved"
    (engine,) = observer.watch.engines()
    assert engine.restarts == 1


def test_work_between_two_looks_is_not_idleness() -> None:
    """Nothing runs at either, but tokens were generated in between: the blocks were held by whoever ran."""
    samples = [{"usage": 0.2, "generation_tokens": 100.0 * n, "steps": 100.0 * n} for n in range(30)]
    assert not judged(spoken(*samples, every_s=15.0)).firing(FINISHED_HELD)
