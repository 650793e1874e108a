"""Rules on what a log or a report states, and hypotheses on its words.

They are in written/: refusals.py, planned_settings.py, pool_pressure.py.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvscope.monitor.contract.samples import ReportedEvent
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.detectors.written import RULES, RULES_WITHOUT_LINES
from kvscope.monitor.detectors.written.hypotheses import hypotheses
from kvscope.monitor.detectors.written.written_view import WrittenView
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.engine_log import Log
from kvscope.monitor.sources.log_file import read_log
from tests.detectors.scenes import value

DATA = Path(__file__).parent.parent / "data"
PROFILE = (DATA / "seed-002.log").read_text()


def found(*lines: str) -> list[FindingReport]:
    """All findings from a text of these lines."""
    watch = Pipeline()
    watch.feed(Log("report.txt", datetime(2026, 11, 21, tzinfo=UTC)).records(lines))
    watch.settle()
    return watch.findings()


def verdicts(code: str, *lines: str) -> list[str]:
    return [finding.verdict for finding in found(*lines) if finding.code == code]


def statistics(second: int, running: int, waiting: int, usage: float, generated: float = 45.7) -> str:
    """A line of vLLM's statistics."""
    return (
        f"INFO 11-20 10:00:{second:02} [loggers.py:123] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation"
        f" throughput: {generated} tokens/s, Running: {running} reqs, Waiting: {waiting} reqs, GPU KV cache usage:"
        f" {usage}%, Prefix cache hit rate: 0.0%"
    )


# -------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "refusal",
    [
        "INFO 11-20 15:51:18 llm_engine.py:275] # GPU blocks: 0, # CPU blocks: 512",
        "ValueError: Free memory on device (7.62/23.57 GiB) on startup is less than desired GPU memory utilization"
        " (0.9, 21.21 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
    ],
)
def test_a_refusal_whose_own_numbers_show_the_shortage_is_confirmed(refusal: str) -> None:
    (finding,) = [each for each in found(refusal) if each.code == "sizing.refused-start"]
    assert (finding.verdict, finding.missing) == ("confirmed", "")


def test_a_profile_above_the_share_gets_the_share_that_leaves_a_pool() -> None:
    """The sum of its lines is 1.27 GiB above the 12 GiB of half of the device."""
    (finding,) = [
        each
        for each in found(
            "INFO 11-20 15:51:10 [worker.py:267] the current vLLM instance can use total_gpu_memory (24.00GiB) x"
            " gpu_memory_utilization (0.50) = 12.00GiB",
            "INFO 11-20 15:51:10 [worker.py:267] model weights take 12.50GiB; non_torch_memory takes 0.10GiB; PyTorch"
            " activation peak memory takes 0.67GiB; the rest of the memory reserved for KV Cache is -1.27GiB.",
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when"
            " initializing the engine.",
        )
        if each.code == "sizing.refused-start"
    ]
    assert any("--gpu-memory-utilization 0.56 leaves the first block" in step for step in finding.do_now)


# -------------------------------------------------------------------- graphs beside the pool


CAPTURE = (
    "It runs out of memory during CUDA graph capture.",
    "INFO 11-20 20:25:40 [worker.py:267] the rest of the memory reserved for KV Cache is 1.57GiB.",
    "INFO 11-20 20:25:49 model_runner.py:1413] Capturing cudagraphs for decoding. This may lead to unexpected",
)


@pytest.mark.parametrize("counted", [False, True])
def test_graphs_that_a_profile_counts_do_not_come_on_top(counted: bool) -> None:
    profile = ["Actual usage is 8.58 GiB for weight, and 0.65 GiB for CUDAGraph memory."] * counted
    assert verdicts("sizing.kv-too-large", *CAPTURE, *profile)[:1] == ["cannot-tell" if counted else "likely"]


@pytest.mark.parametrize(("graphs", "verdict"), [("0.65", ["likely"]), ("0.00", [])])
def test_what_a_profile_without_graphs_has_above_its_share_is_not_theirs(graphs: str, verdict: list[str]) -> None:
    """The pool is about a GB larger than the lines leave for it."""
    profile = PROFILE.replace("0.65 GiB for CUDAGraph", f"{graphs} GiB for CUDAGraph").replace("152379", "153379")
    assert verdicts("sizing.kv-too-large", "It is OOM with CUDA graphs.", profile) == verdict


# -------------------------------------------------------------------- pressure on the pool


@pytest.mark.parametrize(("generated", "holds"), [(45.7, True), (0.0, False)])
def test_one_request_holds_much_of_the_pool_while_it_gets_tokens(generated: float, holds: bool) -> None:
    lines = [statistics(10 * n, 1, 3, 80.0, generated) for n in range(5)]
    assert ("likely" in verdicts("held.long-request", *lines)) is holds


@pytest.mark.parametrize(("waiting", "likely"), [(0, True), (2, False)])
def test_a_pool_with_room_is_not_what_is_slow_unless_requests_wait(waiting: int, likely: bool) -> None:
    lines = [statistics(10 * n, 2, waiting, 3.1) for n in range(4)]
    assert ("likely" in verdicts("held.not-memory", "The server is very slow.", *lines)) is likely


@pytest.mark.parametrize(("serves", "verdict"), [(False, ["likely"]), (True, [])])
def test_a_question_about_memory_above_a_log_of_requests_is_about_these(serves: bool, verdict: list[str]) -> None:
    pool = "INFO 11-20 09:58:00 [gpu_worker.py:456] Available KV cache memory: 47.36 GiB"
    lines = [statistics(10 * n, 2, 0, 13.1) for n in range(4)] * serves
    assert verdicts("held.pool-reserved", "How can it be that 60 GB of memory are in use?", pool, *lines) == verdict


def test_what_a_person_writes_of_host_memory_is_shown_from_the_first_sentence_on() -> None:
    finding = found("The host RAM keeps growing.", "In the end the pod is OOMKilled.")[0]
    assert (finding.code, finding.verdict, finding.position) == ("held.not-memory", "likely", "report.txt:1")
    assert value(finding, "quoted_text")


# -------------------------------------------------------------------- prefixes, and words alone


@pytest.mark.parametrize(("looked_up", "hits", "never"), [(8211, 0, True), (8211, 160, False), (0, 0, False)])
def test_counters_of_lookups_without_a_hit_show_a_cache_that_never_hits(looked_up: int, hits: int, never: bool) -> None:
    lines = (
        "Prompts share the same system prompt.",
        f'vllm:prefix_cache_queries_total{{engine="0",model_name="m"}} {looked_up}.0',
        f'vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} {hits}.0',
    )
    assert ("likely" in verdicts("collapse.prefix-hits", *lines)) is never


def test_words_that_fit_one_cause_give_one_hypothesis() -> None:
    (finding,) = found("One LoRA permanently fills the adapter cache and blocks later requests.")
    assert (finding.code, finding.verdict) == ("stuck.slots-exhausted", "cannot-tell")


# -------------------------------------------------------------------- rules without lines


TEXTS = sorted([*DATA.glob("reports/*/report.txt"), *DATA.glob("*.log.gz"), *DATA.glob("seed-*")])


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.parent.name if path.stem == "report" else path.name)
def test_rules_that_are_passed_over_where_there_is_no_line_have_nothing_to_say_there(path: Path) -> None:
    ledger = EngineLedger("engine")
    for record in read_log(path)[1]:
        if not isinstance(record, ReportedEvent):
            ledger.apply(record)
    view = WrittenView(ledger)
    assert [rule.__name__ for rule in RULES if rule not in RULES_WITHOUT_LINES and [*rule(view)]] == []
    assert [*hypotheses(view, (), {})] == []
