"""stuck.engine-stalled from a metrics page: what moves in a long prefill, what a copy repeats, what a page lacks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvscope.lab.recorded_pages import Row, rows, scraped
from kvscope.monitor.contract.samples import Fact, Sample
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.exposition import COUNTERS, ExposedEngine, ExposedFigures, Sampler

ENGINE_STALLED = "stuck.engine-stalled"
PHASES = 3


def findings(records: list[Sample | Fact]) -> list[FindingReport]:
    """All stalls there ever were, whatever their severity."""
    watch = Pipeline()
    watch.feed(records)
    watch.settle()
    return [finding for finding in watch.findings() if finding.code == ENGINE_STALLED]


def seen(name: str, every_s: float, made_every_s: float, phase: float) -> Iterator[Row]:
    """A recording's figures as a scrape finds them, of a page that is made again every so many seconds (0: always)."""
    recorded = rows(name, 0.0)
    t = recorded[0]["t"] + phase * max(every_s, made_every_s)
    while t <= recorded[-1]["t"]:
        made = t - t % made_every_s if made_every_s else t
        row = ([each for each in recorded if each["t"] <= made] or recorded[:1])[-1]
        yield {**row, "cpu_s": 8.4 + 0.02 * made + 0.001 * row["iter_count"], "t": t}
        t += every_s


@pytest.mark.parametrize("every_s", [1.0, 5.0, 15.0])
def test_a_prefill_of_75_s_is_no_stall(every_s: float) -> None:
    """4,000 tokens in chunks of 64, 1.2 s each, by a real vLLM: no step is counted meanwhile, and usage rises."""
    for phase in range(PHASES):
        assert findings(scraped([*seen("long-prefill", every_s, 0.0, phase / PHASES)])) == []


@pytest.mark.parametrize("name", ["long-prefill", "healthy-shared-prefix", "decode-growth-preempts"])
@pytest.mark.parametrize(("every_s", "made_every_s"), [(1.0, 15.0), (5.0, 30.0)])
def test_a_page_that_is_made_again_now_and_then_is_no_stall(name: str, every_s: float, made_every_s: float) -> None:
    """As an agent that exports it again has it: the same bytes, CPU time and all, until it is made again."""
    for phase in range(PHASES):
        assert findings(scraped([*seen(name, every_s, made_every_s, phase / PHASES)])) == []


# -------------------------------------------------------------------- a stall, and what each value makes of it


def stalled(seconds: int, cores: float = 0.004, moving: int = 30, **changed: float | None) -> list[Sample | Fact]:
    """A page scraped every 5 s: an engine at work for `moving` scrapes, and then `seconds` in which nothing moves.

    cores: the CPU time that its server takes then. changed: what a value is throughout, or None for one not exposed.
    """
    sampler = Sampler(ExposedEngine("made-up", "x:1", "0"), "metrics")
    found: list[Sample | Fact] = []
    for n in range(moving + seconds // 5 + 1):
        at_work = min(n, moving)
        figures: ExposedFigures = dict.fromkeys((*COUNTERS, "waiting", "deferred"), 0.0)
        figures |= dict.fromkeys(("steps", "prompt_tokens", "generation_tokens"), 50.0 * at_work)
        cpu_s = 0.5 * at_work + 5 * cores * (n - at_work)
        figures |= {"running": 3.0, "usage": 0.3 + 0.01 * at_work, "process_cpu_s": cpu_s}
        values = {name: changed.get(name, value) for name, value in figures.items()}
        exposed = {name: value for name, value in values.items() if value is not None}
        found.append(sampler.sample(round((1.79e9 + 5 * n) * 1e9), str(n), exposed))
    return found


def test_an_engine_of_which_nothing_moves_behind_a_page_that_responds() -> None:
    assert findings(stalled(20)) == []
    (early,) = findings(stalled(40))
    assert (early.severity, early.verdict) == ("critical", "cannot-tell")
    (late,) = findings(stalled(90))
    assert (late.severity, late.verdict) == ("critical", "likely")
    assert [each.value for each in late.evidence if each.name == "server_cpu_s"] == [pytest.approx(0.36, abs=0.03)]


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("steps", "vllm:iteration_tokens_total_count"),
        ("usage", "vllm:kv_cache_usage_perc"),
        ("prompt_tokens", "vllm:prompt_tokens_total"),
        ("process_cpu_s", "process_cpu_seconds_total"),
    ],
)
def test_what_the_page_does_not_have_makes_the_claim_weaker(name: str, metric: str) -> None:
    (finding,) = findings(stalled(400, **{name: None}))
    assert finding.verdict == "cannot-tell"
    assert metric in finding.missing


def test_a_server_that_computes_may_be_in_a_long_step() -> None:
    (finding,) = findings(stalled(200, cores=1.0))
    assert (finding.severity, finding.verdict) == ("info", "cannot-tell")
    assert "it computes" in finding.explanation
    assert "a step of minutes looks the same" in finding.missing
    (later,) = findings(stalled(400, cores=1.0))
    assert (later.severity, later.verdict) == ("critical", "cannot-tell")


def test_a_page_that_repeats_itself_byte_by_byte_may_be_a_copy() -> None:
    (finding,) = findings(stalled(90, cores=0.0))
    assert (finding.severity, finding.verdict) == ("critical", "likely")
    assert "what responds has not been made again" in finding.explanation
    (never_moved,) = findings(stalled(400, cores=0.0, moving=0))
    assert never_moved.verdict == "cannot-tell"
    assert "whether the page is a copy" in never_moved.missing
