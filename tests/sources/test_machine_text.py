"""Lines that a program prints are read as what they are: dumps, pages, access lines, components' own warnings."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from kvscope.monitor.contract.samples import Sample
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.engine_log import Log
from kvscope.monitor.sources.pasted_pages import MOST_PAGES

PAGE = (
    "# HELP vllm:inter_token_latency_seconds Histogram of inter-token latency in seconds.",
    'vllm:num_requests_running{{engine="0",model_name="m"}} 0.0',
    'vllm:num_requests_waiting{{engine="0",model_name="m"}} 4.0',
    'vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.97',
    'vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}',
)


def found(*lines: str) -> dict[str, FindingReport]:
    watch = Pipeline()
    watch.feed(Log("report.txt", datetime(2026, 11, 21, tzinfo=UTC)).records(lines))
    watch.settle()
    return {finding.code: finding for finding in watch.findings()}


def page(tokens: float) -> list[str]:
    return [line.format(tokens=tokens) for line in PAGE]


@pytest.mark.parametrize(("tokens", "held"), [(5_000.0, True), (5_001.0, False)])
@pytest.mark.parametrize(
    "dates",
    [
        ("Mon Nov  2 10:00:00 UTC 2026", "Mon Nov  2 10:05:00 UTC 2026"),
        ("2026-11-02T10:00:00+00:00", "2026-11-02T10:05:00+00:00"),
    ],
)
def test_two_pages_hold_a_full_pool_unless_a_token_came_between(
    dates: tuple[str, str], tokens: float, held: bool
) -> None:
    judged = found(dates[0], *page(5_000.0), dates[1], *page(tokens))
    assert [finding.verdict for code, finding in judged.items() if code == "leak.finished-held"] == ["likely"] * held
    assert not any(code.startswith("stuck.") for code in judged)


def test_two_pages_without_times_are_one_moment() -> None:
    assert "leak.finished-held" not in found(*page(5_000.0), *page(5_000.0))


def test_of_very_many_pages_the_last_are_read_and_the_others_are_counted() -> None:
    log = Log("report.txt", datetime(2026, 11, 21, tzinfo=UTC))
    records = list(log.records(line for number in range(MOST_PAGES + 2) for line in page(number)))
    samples = [record for record in records if isinstance(record, Sample)]
    assert [sample.generation_tokens for sample in samples] == list(range(2, MOST_PAGES + 2))
    assert log.notes == ["it has 1,002 metrics pages, of which the last 1,000 are read"]


def test_the_dump_of_a_scheduler_is_a_sample() -> None:
    dump = (
        "ERROR 11-02 10:05:13 [dump_input.py:81] Dumping scheduler stats: SchedulerStats(num_running_reqs=3,"
        " num_waiting_reqs=2, kv_cache_usage=0.25, prefix_cache_stats=None)"
    )
    judged = found("Requests hang for ever.", dump)
    evidence = {one.name: one.value for one in judged["stuck.engine-stalled"].evidence}
    assert judged["stuck.engine-stalled"].verdict == "likely"
    assert "quoted_text" in evidence


@pytest.mark.parametrize("status", [400, 404, 422, 429])
def test_a_request_that_the_server_refuses_is_no_hang(status: int) -> None:
    access = f'INFO:     127.0.0.1:36804 - "POST /v1/completions HTTP/1.1" {status} Refused'
    assert "stuck.engine-stalled" in found("My client hangs and gets no response.")
    assert not found("My client hangs and gets no response.", access)


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (["LMCache WARNING: Force unpinned 3 timeout objects in 8 pinned_objects within 300 seconds"], "pins"),
        (["LMCache WARNING: Pin timeout detected for MemoryObj 1. Pin count: 1, Elapsed time: 301.0s."], "pins"),
        (["LMCache WARNING: Local cpu memory under pressure so choosing to not store the KV cache."], ""),
    ],
)
def test_pins_that_a_tier_ends_by_itself_were_never_taken_off(lines: list[str], code: str) -> None:
    assert ("leak.external-pins" in found(*lines)) is bool(code)


@pytest.mark.parametrize(
    ("complaint", "is_stale"),
    [
        ("After that the decode side returns garbage.", True),
        ("D节点拿到脏KV，输出乱码。", True),
        ("Blocks are fetched after they were released.", True),
        ("Decoding is slow.", False),
    ],
)
def test_wrong_answers_after_a_forced_release_are_a_stale_read(complaint: str, is_stale: bool) -> None:
    released = (
        "ERROR 11-02 10:00:47 [mooncake_connector.py:233] Force freed expired request: cmpl-1. Reason: Request exceeded"
        " timeout threshold (10 seconds)."
    )
    assert ("corrupt.stale-remote-read" in found(complaint, released)) is is_stale


@pytest.mark.parametrize(
    ("sentence", "code"),
    [
        ("With prefix caching the answers are garbled once blocks are shared.", "corrupt.use-after-free"),
        ("A block is given to another request while its first owner still uses it.", "corrupt.use-after-free"),
        ("KV缓存被其他请求覆盖，模型胡言乱语。", "corrupt.use-after-free"),
        ("The DP ranks are badly imbalanced.", "imbalance.ranks"),
    ],
)
def test_wrong_output_and_unequal_ranks_are_topics(sentence: str, code: str) -> None:
    judged = found(sentence)
    assert next(iter(judged)) == code
    assert judged[code].verdict == "cannot-tell"


@pytest.mark.parametrize(
    ("sentence", "is_cause"),
    [
        ("The decode request hangs although its KV transfer succeeded.", False),
        ("The decode request hangs: KV传输已完成。", False),
        ("The decode request hangs: its KV transfer never completes.", True),
        ("The decode request hangs before the KV transfer is done.", True),
    ],
)
def test_a_transfer_that_a_person_says_succeeded_is_no_cause(sentence: str, is_cause: bool) -> None:
    assert ("stuck.remote-load" in found(sentence)) is is_cause


def test_an_estimate_that_the_operator_turned_off_reserves_nothing() -> None:
    profile = (
        "INFO 11-02 10:00:00 [gpu_model_runner.py:6798] Estimated CUDA graph memory: 2.00 GiB total",
        "INFO 11-02 10:00:09 [gpu_worker.py:805] Free memory on device (22.93/23.56 GiB) on startup. Desired GPU memory"
        " utilization is (0.93, 21.91 GiB). Actual usage is 17.4 GiB for consumed memory (weights + non-torch), 0.6 GiB"
        " for peak activation, and 0.1 GiB for CUDAGraph memory. Current kv cache memory in use is 3.91 GiB.",
    )
    off = "WARNING 11-02 10:00:00 [gpu_worker.py:595] CUDA graph memory profiling is disabled (ESTIMATE=0)."
    assert "sizing.overreserved" in found(*profile)
    assert "sizing.overreserved" not in found(off, *profile)
