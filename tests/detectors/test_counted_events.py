"""Events that an engine counts on its page: transfers that failed, leases that expired, late reads, a full tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscope.lab.recorded_pages import BEGAN_S, At, served, whole_page
from kvscope.monitor.contract.samples import Fact, Sample
from kvscope.monitor.detectors.detector import Settings
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.metrics_page import MetricsPage
from kvscope.monitor.terminal.report import examine

STALE, BURST, FETCH, TIER, HITS = (
    "corrupt.stale-remote-read",
    "leak.lease-burst",
    "stuck.remote-load",
    "stuck.outer-tier",
    "collapse.outer-hits",
)
CODES = frozenset((STALE, BURST, FETCH, TIER, HITS))
LABELS = 'engine="0",model_name="tiny"'
COUNTERS = {
    "vllm:nixl_num_failed_transfers_total": FETCH,
    "vllm:nixl_num_failed_notifications_total": FETCH,
    "vllm:kv_offload_tiering_promotion_job_failures_total": FETCH,
    "vllm:nixl_num_kv_expired_reqs_total": BURST,
    "vllm:nixl_num_notifications_after_expiry_total": STALE,
    "vllm:kv_offload_allocation_failure_total": TIER,
}
FETCHING = f'vllm:num_requests_kv_fetch_by_stage{{{LABELS},stage="in_progress"}}'
IDLE = {"vllm:num_requests_running": 0.0, "vllm:num_requests_waiting": 3.0}


def with_figures(figures: dict[str, float]) -> str:
    """vLLM's page with other values, and with series that it has on a pair or with an outer tier."""
    lines = [line for line in whole_page().splitlines() if line.partition("{")[0] not in figures]
    added = (f"{name} {value}" if "{" in name else f"{name}{{{LABELS}}} {value}" for name, value in figures.items())
    return "\n".join((*lines, *added)) + "\n"


def found(*pages: dict[str, float], every_s: float = 15.0) -> list[FindingReport]:
    """The findings of this module's codes, after pages with these figures were scraped one after the other."""
    watch, clock = Pipeline(), At(BEGAN_S)
    with served() as server:
        reader = MetricsPage(server.url, clock=clock)
        for figures in pages:
            server.answer = with_figures(figures)
            records: list[Sample | Fact] = reader.scrape()
            watch.feed(records)
            clock.seconds += every_s
        reader.close()
    watch.settle()
    return [each for each in watch.findings("firing") if each.code in CODES]


@pytest.mark.parametrize("series", COUNTERS)
def test_many_events_are_found_on_one_page_and_none_is_silence(series: str) -> None:
    (finding,) = found({series: 40.0, "vllm:request_success_total": 400.0})
    assert finding.code == COUNTERS[series]
    assert finding.verdict == "likely"
    assert finding.severity in ("warning", "critical")
    assert "since it started" in finding.explanation
    assert found({series: 0.0}, {series: 0.0}) == []


@pytest.mark.parametrize("series", [name for name in COUNTERS if "after_expiry" not in name])
def test_few_events_among_many_requests_are_information(series: str) -> None:
    for count, ended in ((2.0, 10.0), (40.0, 4001.0)):
        (finding,) = found({series: count, "vllm:request_success_total": ended})
        assert finding.severity == "info", finding.explanation


def test_saves_that_a_full_store_refuses_are_no_failed_transfers() -> None:
    refused = f'vllm:mooncake_store_operation_failed_keys_total{{{LABELS},operation="save_put"}}'
    assert found({refused: 9_000.0}) == []


def test_one_late_read_is_critical_whatever_the_load() -> None:
    series = "vllm:nixl_num_notifications_after_expiry_total"
    (finding,) = found({series: 1.0, "vllm:request_success_total": 1e6})
    assert (finding.code, finding.severity, finding.verdict) == (STALE, "critical", "likely")


def test_events_of_the_past_resolve_and_new_ones_have_a_time() -> None:
    series = "vllm:nixl_num_kv_expired_reqs_total"
    assert found(*[{series: 40.0}] * 42) == []  # ten minutes and a half without another
    (finding,) = found(*[{series: 0.0}] * 50, *[{series: 40.0}] * 2)
    assert finding.since is not None
    assert "in the last 10 min" in finding.explanation


def test_leases_are_not_to_be_shortened_while_blocks_are_read_after_them() -> None:
    expired, late = "vllm:nixl_num_kv_expired_reqs_total", "vllm:nixl_num_notifications_after_expiry_total"
    advice = {each.code: each.change for each in found({expired: 40.0, late: 10.0})}
    assert not any("Shorten the lease" in text for text in advice[BURST])
    (alone,) = found({expired: 40.0})
    assert any("Shorten the lease" in text for text in alone.change)


def test_fetches_of_which_none_ends_are_found_while_nothing_runs() -> None:
    (finding,) = found(*[{FETCHING: 3.0, **IDLE}] * 6)
    assert (finding.code, finding.verdict) == (FETCH, "likely")
    assert [each.value for each in finding.evidence if each.name == "requests_fetching"] == [3]


@pytest.mark.parametrize(
    "ends", ["vllm:generation_tokens_total", f'vllm:request_success_total{{{LABELS},finished_reason="stop"}}']
)
def test_fetches_that_end_are_none(ends: str) -> None:
    assert found(*[{FETCHING: 3.0, **IDLE, ends: 1e6 + n} for n in range(6)]) == []
    assert found(*[{FETCHING: 3.0, **IDLE, "vllm:num_requests_running": 1.0}] * 6) == []
    assert found(*[{FETCHING: 3.0, **IDLE}] * 4) == []  # not a minute yet


@pytest.mark.parametrize(("idle_of_six", "slow"), [(4, True), (3, False)])
def test_a_tier_is_slow_where_nothing_runs_for_its_loads_most_of_the_time(idle_of_six: int, slow: bool) -> None:
    loading = {FETCHING: 5.0, "vllm:num_requests_waiting": 5.0}
    pages = [
        loading
        | {"vllm:num_requests_running": float(number >= idle_of_six)}
        | {"vllm:kv_offload_load_bytes_total": 1e6 * number, "vllm:generation_tokens_total": 1e4 + number}
        for number in range(6)
    ]
    findings = found(*pages)
    assert [each.code for each in findings] == [TIER] * slow
    if slow:
        assert (findings[0].severity, findings[0].verdict) == ("warning", "likely")
    assert found(*(page | {"vllm:kv_offload_load_bytes_total": 1e6} for page in pages)) == []


def test_a_tier_without_a_hit_is_named_once_more_than_the_pool_holds_has_missed() -> None:
    looked_up, hits = "vllm:external_prefix_cache_queries_total", "vllm:external_prefix_cache_hits_total"
    local = {"vllm:prefix_cache_queries_total": 1e6, "vllm:prefix_cache_hits_total": 4e5}
    stored = {"vllm:kv_offload_store_bytes_total": 1e9, hits: 0.0, looked_up: 6e5, **local}
    (finding,) = found(stored)
    assert (finding.code, finding.verdict, finding.severity) == (HITS, "cannot-tell", "info")
    assert found({**stored, hits: 1.0}) == []
    assert found({**stored, looked_up: 100.0}) == []
    assert found({**stored, "vllm:kv_offload_store_bytes_total": 0.0}) == []
    assert found({**stored, "vllm:prefix_cache_hits_total": 1e4}) == []


def test_a_page_in_a_file_is_read_as_the_page_itself(tmp_path: Path) -> None:
    """One page of a pair: reads after expiry, and its healthy twin."""
    page = tmp_path / "page.txt"
    late = "vllm:nixl_num_notifications_after_expiry_total"
    page.write_text(with_figures({late: 10.0}))
    report = examine([str(page)], Settings())
    assert [finding.code for finding in report.findings if finding.severity == "critical"] == [STALE]
    assert report.exit_code("warning") == 1
    page.write_text(with_figures({late: 0.0}))
    assert examine([str(page)], Settings()).exit_code("warning") == 3  # one page shows no progress


def test_the_lines_of_a_connector_are_summed(tmp_path: Path) -> None:
    line = (
        "INFO 11-20 10:0{minute}:00 [metrics.py:100] KV Transfer metrics: Num successful transfers=3, Avg xfer time"
        " (ms)=5.0, Num failed transfers={failed}, Num KV expired reqs={expired}, Num notifs after expiry={late}\n"
    )
    log = tmp_path / "server.log"
    log.write_text("".join(line.format(minute=n, failed=2, expired=3, late=1) for n in range(3)))
    codes = {each.code: each for each in examine([str(log)], Settings()).findings}
    assert {code: codes[code].severity for code in (STALE, BURST, FETCH)} == {
        STALE: "critical",
        BURST: "warning",
        FETCH: "warning",
    }
    assert [item.value for item in codes[BURST].evidence if item.name == "expired_leases"] == [9]
    log.write_text("".join(line.format(minute=n, failed=0, expired=0, late=0) for n in range(3)))
    assert not CODES & {each.code for each in examine([str(log)], Settings()).findings}
