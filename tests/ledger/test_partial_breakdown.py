"""Memory breakdowns that a text states in part, how graphs are counted, and sizes that contradict each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvscope.monitor.contract.samples import Fact
from kvscope.monitor.ledger.memory_breakdown import MemoryTerm, breakdown_terms, graph_accounting, size_contradictions
from kvscope.monitor.sources.log_file import read_log
from kvscope.monitor.terminal.cli import main

DATA = Path(__file__).parent.parent / "data"
GIB = 1 << 30


def facts_of(**values: float | str) -> dict[str, Fact]:
    return {name: Fact("m@log/0", "log:1", name, value) for name, value in values.items()}


def terms_of(are_graphs_counted: bool, **values: float | str) -> dict[str, MemoryTerm]:
    return {term.name: term for term in breakdown_terms(facts_of(**values).values(), are_graphs_counted)}


def test_the_one_missing_term_follows_from_the_others() -> None:
    found = terms_of(
        False,
        memory_total_gib=39.5,
        memory_requested_share=0.9,
        memory_weights_gib=14.96,
        memory_non_torch_gib=0.1,
        memory_activations_gib=9.37,
    )
    assert found["KV cache"].state == "follows"
    assert found["KV cache"].low <= 11.12 * GIB <= (found["KV cache"].high or 0)
    assert found["requested"].low <= 35.55 * GIB <= (found["requested"].high or 0)


def test_two_missing_terms_are_bounded_by_what_is_left() -> None:
    found = terms_of(False, memory_requested_gib=20.0, memory_weights_gib=8.0, available_kv_cache_gib=9.0)
    for name in ("peak activations", "non-torch"):
        assert found[name].state == "missing"
        assert found[name].low == 0
        assert (found[name].high or 0) == pytest.approx(3.0 * GIB, abs=0.02 * GIB)


@pytest.mark.parametrize("share", [90, 0, 1.01])
def test_a_number_that_is_no_share_bounds_nothing(share: float) -> None:
    """Such as a percentage."""
    assert terms_of(False, memory_total_gib=40.0, gpu_memory_utilization=0.9)["requested"].state == "follows"
    found = terms_of(False, memory_total_gib=40.0, gpu_memory_utilization=share)
    assert (found["requested"].state, found["requested"].low) == ("missing", 0)
    assert found["requested"].high == found["device"].high


def test_a_term_that_is_stated_as_zero_is_zero() -> None:
    assert terms_of(False, memory_graphs_gib=0.0)["graphs"].low == 0


def test_graphs_that_are_counted_share_the_rest_and_others_come_on_top() -> None:
    figures = {"memory_total_gib": 24.0, "memory_requested_gib": 20.0, "memory_weights_gib": 8.0}
    figures |= {"memory_activations_gib": 2.0, "memory_non_torch_gib": 0.5, "available_kv_cache_gib": 9.0}
    counted, on_top = terms_of(True, **figures)["graphs"], terms_of(False, **figures)["graphs"]
    assert counted.state == "follows"
    assert counted.low <= 0.5 * GIB <= (counted.high or 0)
    assert (on_top.high or 0) == pytest.approx(4.0 * GIB, abs=0.02 * GIB)


def test_a_pool_of_a_given_size_bounds_nothing() -> None:
    found = terms_of(
        False, memory_requested_gib=20.0, kv_cache_reserved_gib=4.0, kv_cache_memory_bytes=4 * GIB, block_size=16
    )
    assert found["weights"].high is None


def test_without_a_term_there_is_no_breakdown() -> None:
    assert breakdown_terms(facts_of(kv_cache_size_tokens=1000).values(), False) == []


@pytest.mark.parametrize(
    ("facts", "in_pool", "words"),
    [
        ({"version": "0.11.0"}, False, "does not count graphs"),
        ({"version": "0.18.0"}, False, "unless VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1"),
        ({"version": "0.18.0", "memory_graphs_are_reserved": "enabled"}, True, "twice in the --kv-cache-memory"),
        ({"version": "0.20.2"}, True, "counts graphs once, in the pool and"),
        ({"version": "0.26.0"}, True, "counts graphs once, in the pool and"),
        ({"version": "0.27.1"}, True, "twice in the --kv-cache-memory"),
        ({"version": "0.33.0"}, True, "twice in the --kv-cache-memory"),
        ({"version": "0.33.0", "enforce_eager": "True"}, False, "no graphs are captured"),
        ({"memory_consumed_gib": 56.0}, True, "wording of vLLM 0.27"),
        ({"memory_weights_gib": 7.5, "kv_cache_reserved_gib": 3.7}, False, "before 0.9"),
        ({"kv_cache_reserved_gib": 3.7}, None, "does not name the release"),
        ({"available_kv_cache_gib": 8.11}, None, "does not name the release"),
    ],
)
def test_graphs_are_counted_as_the_release_does(
    facts: dict[str, float | str], in_pool: bool | None, words: str
) -> None:
    found = graph_accounting(facts_of(**facts))
    assert found.in_pool is in_pool
    assert words in found.sentence


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            {"kv_cache_size_tokens": 290864, "max_concurrency": 33.04, "max_concurrency_tokens": 32768},
            "Plan with the concurrency",
        ),
        (
            {"num_gpu_blocks_override": 900, "block_size": 32, "kv_cache_size_tokens": 13858},
            "a request takes blocks in each of them",
        ),
        (
            {"memory_total_gib": 80.0, "memory_requested_share": 0.9, "memory_requested_gib": 36.0},
            "the lines may be from two devices",
        ),
        (
            {
                "memory_requested_gib": 35.55,
                "memory_weights_gib": 14.96,
                "memory_non_torch_gib": 0.1,
                "memory_activations_gib": 9.37,
                "available_kv_cache_gib": 8.0,
            },
            "two workers or two starts",
        ),
    ],
)
def test_sizes_that_contradict_each_other_are_named(facts: dict[str, float], words: str) -> None:
    (found,) = size_contradictions(facts_of(**facts), False)
    assert words in found


@pytest.mark.parametrize("name", ["startup.log.gz", "seed-002.log", "healthy-shared-prefix.log.gz"])
def test_a_consistent_start_up_has_no_contradiction(name: str) -> None:
    _, records = read_log(DATA / name)
    facts = {record.name: record for record in records if isinstance(record, Fact)}
    assert size_contradictions(facts, False) == []


@pytest.mark.parametrize("report", ["110-vllm-12330", "058-vllm-11251"])
def test_a_pasted_profile_is_explained_as_far_as_it_goes(report: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = DATA / "reports" / report / "report.txt"
    assert main(["explain", "memory", "--log", str(path), "--format", "json"]) == 3
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    states = {term["name"]: term["state"] for term in found["terms"]}
    assert states["weights"] == states["KV cache"] == "stated"
    assert states["graphs"] == "missing"
    assert found["contradictions"] == []
    assert "does not count graphs" in found["graphs_counted"].replace("which ", "")
    assert "for weight" not in printed.err
    main(["explain", "memory", "--log", str(path)])
    table = capsys.readouterr().out
    assert "BREAKDOWN, as far as the text states it" in table
    assert max(map(len, table.splitlines())) <= 80
