"""Judgement from figures alone: logs of a real vLLM, and the one that a person asked about."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from kvscope.monitor.base.text import timestamp
from kvscope.monitor.contract.samples import Fact, Sample
from kvscope.monitor.sources.engine_log import Log
from kvscope.monitor.sources.log_file import read_log
from tests.detectors.scenes import Observer, value

DATA = Path(__file__).parent.parent / "data"
FINISHED_HELD = "leak.finished-held"
LOCKSTEP = "collapse.lockstep"


def judged(records: Sequence[Sample | Fact]) -> Observer:
    observer = Observer()
    observer.watch.feed(records)
    observer.watch.settle()
    return observer


def log(name: str) -> list[Sample | Fact]:
    return read_log(DATA / name)[1]


def samples(name: str) -> list[Sample]:
    return [record for record in log(name) if isinstance(record, Sample)]


def line(running: int, usage: float, prompt: float = 100.0, waiting: int = 0) -> Sample:
    return Sample(
        "made-up@x/0",
        "x:1",
        running=running,
        waiting=waiting,
        usage=usage,
        prompt_tokens_per_s=prompt,
        generation_tokens_per_s=1.0,
    )


# -------------------------------------------------------------------- seed 000


def test_seed_000() -> None:
    finding = judged(log("seed-000.log")).only(FINISHED_HELD)
    assert (finding.severity, finding.verdict) == ("error", "likely")
    assert value(finding, "usage_per_1000_prompt_tokens") == pytest.approx(0.98, abs=0.005)
    assert value(finding, "r_squared") == pytest.approx(0.998, abs=0.0005)
    assert value(finding, "correlation_with_running") == pytest.approx(-0.1, abs=0.05)
    assert value(finding, "usage_per_running_first") == pytest.approx(2.3, abs=0.05)
    assert value(finding, "usage_per_running_last") == pytest.approx(99.3, abs=0.05)
    assert value(finding, "correlation_of_changes_with_prompts") == pytest.approx(0.96, abs=0.005)
    assert (value(finding, "running_most"), value(finding, "running_last")) == (13, 1)
    assert "event stream" in finding.missing
    assert not finding.culprits.requests
    assert not finding.culprits.blocks
    assert (finding.since, finding.position) == (None, "seed-000.log:1")


def test_seed_000s_fit_by_another_hand() -> None:
    """Slope, R² and correlation by the textbook's sums, from the lines themselves."""
    taken, total = [], 0.0
    lines = samples("seed-000.log")
    for sample in lines:
        assert sample.prompt_tokens_per_s is not None
        total += sample.prompt_tokens_per_s * 10
        taken.append(total)
    usage = [s.usage for s in lines if s.usage is not None]
    running = [float(s.running) for s in lines if s.running is not None]

    def covariance(xs: list[float], ys: list[float]) -> float:
        x, y = sum(xs) / len(xs), sum(ys) / len(ys)
        return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True))

    finding = judged(log("seed-000.log")).only(FINISHED_HELD)
    slope = covariance(taken, usage) / covariance(taken, taken)
    assert value(finding, "usage_per_1000_prompt_tokens") == round(slope * 1000 * 100, 3)
    r = covariance(taken, usage) / math.sqrt(covariance(taken, taken) * covariance(usage, usage))
    assert value(finding, "r_squared") == round(r * r, 4)
    r = covariance(running, usage) / math.sqrt(covariance(running, running) * covariance(usage, usage))
    assert value(finding, "correlation_with_running") == round(r, 3)


# -------------------------------------------------------------------- recordings of vLLM 0.32


def test_never_freed() -> None:
    finding = judged(log("never-freed.log.gz")).only(FINISHED_HELD)
    assert (finding.severity, finding.verdict) == ("error", "likely")
    last = samples("never-freed.log.gz")[-1]
    assert last.usage is not None
    assert last.running == 0
    assert value(finding, "idle_usage") == round(100 * last.usage, 1)
    assert finding.engine == "tiny@127.0.0.1:8100/0"
    assert finding.since is not None


def test_lockstep_collapse() -> None:
    """A log does not show how requests ended: clients that time out together look the same."""
    finding = judged(log("lockstep-collapse.log.gz")).only(LOCKSTEP)
    assert (finding.severity, finding.verdict) == ("warning", "cannot-tell")
    assert value(finding, "usage_before") == pytest.approx(82, abs=1)
    assert value(finding, "usage_after") == 0
    assert value(finding, "running_before") == 15
    assert "preempt" in finding.missing


@pytest.mark.parametrize(
    "name", ["healthy-shared-prefix", "kv-events", "startup", "decode-growth-preempts", "frozen-engine"]
)
def test_nothing_wrong(name: str) -> None:
    assert judged(log(f"{name}.log.gz")).alarms() == []


def each(lines: list[Sample], seconds: int, first: int) -> list[Sample]:
    """As the engine would have logged each so many seconds: gauges as they are, throughput averaged since last time."""
    thinned, start = [], 0
    for index in range(first, len(lines), seconds):
        rates = [s.prompt_tokens_per_s or 0.0 for s in lines[start : index + 1]]
        thinned.append(msgspec.structs.replace(lines[index], prompt_tokens_per_s=sum(rates) / len(rates)))
        start = index + 1
    return thinned


@pytest.mark.parametrize("seconds", [1, 3, 10])
@pytest.mark.parametrize("name", ["healthy-shared-prefix", "decode-growth-preempts", "kv-events"])
def test_nothing_wrong_in_any_part_of_it(name: str, seconds: int) -> None:
    """A log is read at any moment, is rotated, and vLLM's default is a line each 10 s: from any line to any other (each
    is judged as it comes).
    """
    lines = samples(f"{name}.log.gz")
    for first in range(seconds):
        thinned = each(lines, seconds, first)
        for start in range(len(thinned)):
            assert judged(thinned[start : start + 40]).alarms() == [], thinned[start : start + 40]


@pytest.mark.parametrize("seconds", [1, 3, 10])
def test_a_collapse_is_never_taken_for_a_leak(seconds: int) -> None:
    lines = samples("lockstep-collapse.log.gz")
    for first in range(seconds):
        thinned = each(lines, seconds, first)
        assert FINISHED_HELD not in judged(thinned).alarms()


def test_a_load_that_does_not_go_away_shows_no_leak_until_it_drains() -> None:
    """Usage climbs and Running stands still: so it does under long generations. A drain decides."""
    climbing = [line(8 - n % 2, 0.1 + 0.02 * (n + n % 3), prompt=100.0 + 100 * (n % 3)) for n in range(30)]
    by_prompts, usage = [], 0.1
    for n in range(30):
        prompt = 100.0 + 150 * (n * 7 % 5)
        usage += prompt / 12_000
        by_prompts.append(line(8 - n % 2, usage, prompt=prompt))
    assert not judged(climbing).alarms()
    assert not judged(by_prompts).alarms()
    assert judged([*by_prompts, line(1, usage, prompt=0.0)]).only(FINISHED_HELD).verdict == "likely"
    assert not judged([*by_prompts, line(1, usage - 0.1, prompt=0.0)]).alarms()


# -------------------------------------------------------------------- what a reset says


def reset(*running: int, blocks: int = 12, seconds: int = 5) -> list[Sample | Fact]:
    """A line each ten seconds with so many running, and the warning so long after the second."""
    lines = [f"INFO 11-20 12:00:{10 * n:02} Engine 000: {figures(count)}" for n, count in enumerate(running)]
    warning = f"Failed to reset prefix cache because some blocks ({blocks}) are not freed yet"
    lines.insert(2, f"WARNING 11-20 12:00:{10 + seconds} {warning}")
    return list(Log("a.log", datetime(2026, 11, 21, tzinfo=UTC)).records(lines))


def figures(running: int) -> str:
    rates = "Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 1.0 tokens/s"
    return f"{rates}, Running: {running} reqs, Waiting: 0 reqs, GPU KV cache usage: 0.5%"


def test_blocks_that_an_idle_engine_has_not_freed() -> None:
    finding = judged(reset(3, 0)).only(FINISHED_HELD)
    assert finding.verdict == "likely"
    assert value(finding, "blocks_not_freed") == 12
    assert finding.position == "a.log:3"
    assert "event stream" in finding.missing
    assert judged(reset(3, 0, 0)).only(FINISHED_HELD)
    assert judged(reset(3, 0, seconds=0)).only(FINISHED_HELD)  # in the second of the line above it


@pytest.mark.parametrize("running", [(0, 3), (3, 0, 1)], ids=["just before", "just after"])
def test_blocks_that_a_running_request_has_not_freed(running: tuple[int, ...]) -> None:
    assert judged(reset(*running)).alarms() == []


# -------------------------------------------------------------------- figures that look like a leak


def test_usage_that_follows_running_is_load() -> None:
    climbing = [line(n, 0.03 * n) for n in range(1, 31)]
    assert not judged(climbing).alarms()
    assert not judged(climbing + climbing[::-1]).alarms()


def test_one_request_that_grows_is_no_leak() -> None:
    """Usage climbs with nothing else coming in: a long generation."""
    assert not judged([line(1, 0.01 * n, prompt=0.0) for n in range(1, 99)]).alarms()


@pytest.mark.parametrize("new_work", [True, False])
def test_all_preempted_at_once_is_no_lockstep(new_work: bool) -> None:
    """The same picture but for one thing: what is computed again is not counted as prompt tokens again."""
    full = [line(15, 0.8, prompt=0.0) for _ in range(5)]
    empty = [line(1 + n, 0.05 * n, prompt=900.0 if new_work else 0.0, waiting=14 - n) for n in range(14)]
    assert judged(full + empty).alarms() == ([LOCKSTEP] if new_work else [])


def test_usage_that_comes_back_is_no_leak() -> None:
    saw = [line(n % 7, 0.1 * (n % 7)) for n in range(60)]
    assert not judged(saw).alarms()


def test_a_handful_of_lines_is_not_enough() -> None:
    """The first lines of seed 000: four points fit any line."""
    assert not judged(samples("seed-000.log")[:4]).alarms()


def test_a_pause_with_a_drained_pool_is_no_leak() -> None:
    assert not judged([line(3, 0.5), *[line(0, 0.0, prompt=0.0) for _ in range(30)]]).alarms()


def test_figures_that_were_not_said_are_not_0() -> None:
    """Without usage there is nothing to judge, and nothing is claimed."""
    blind = [Sample("made-up@x/0", "x:1", running=0, waiting=0, prompt_tokens_per_s=0.0) for _ in range(50)]
    observer = judged(blind)
    assert observer.alarms() == []
    (engine,) = observer.watch.engines()
    assert engine.usage is None
    assert engine.balance is None


# -------------------------------------------------------------------- more in use than live requests can hold


@pytest.mark.parametrize(
    ("live", "exceeds"),
    [
        ({"waiting": None}, True),  # not exposed
        ({"waiting": 34}, True),
        ({"waiting": 35}, False),  # with the one that runs they fill 88 % of the 40 that fit
        ({"deferred": 34}, True),
        ({"deferred": 35}, False),
        ({"running": 0}, False),
    ],
)
def test_usage_that_live_requests_of_the_greatest_length_cannot_reach_is_a_leak(
    live: dict[str, int | None], exceeds: bool
) -> None:
    full = line(1, 0.9)
    fits = Fact(full.engine, "x:0", "max_concurrency", 40.0)
    lines = [msgspec.structs.replace(full, at_ns=1_700_000_000_000_000_000 + n * 10**10, **live) for n in range(100)]
    codes = {(f.code, f.verdict) for f in judged([fits, *lines]).firing()}
    assert ((FINISHED_HELD, "likely") in codes) is exceeds


def test_usage_beyond_what_live_requests_can_hold_is_dated_from_its_first_line() -> None:
    began = 1_700_000_000_000_000_000
    usages = [0.04, *[0.9] * 101]
    lines = [msgspec.structs.replace(line(1, usage), at_ns=began + n * 10**10) for n, usage in enumerate(usages)]
    fits = Fact(lines[0].engine, "x:0", "max_concurrency", 40.0)
    (finding,) = judged([fits, *lines]).firing(FINISHED_HELD)
    assert finding.since == timestamp(began + 10**10)


@pytest.mark.parametrize(("left", "fires"), [(2, True), (3, False)])
def test_a_drain_leaves_a_quarter_of_the_requests_at_most(left: int, fires: bool) -> None:
    usage, lines = 0.1, []
    for n in range(12):
        prompt = 100.0 + 150 * (n * 7 % 5)
        usage += prompt / 6_000
        at_ns = 1_700_000_000_000_000_000 + n * 10**10
        lines.append(msgspec.structs.replace(line(left if n == 11 else 8, usage, prompt=prompt), at_ns=at_ns))
    assert bool(judged(lines).firing(FINISHED_HELD)) is fires
