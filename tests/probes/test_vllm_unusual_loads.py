"""Verdicts on vLLM's bare scheduler under loads and faults that the detectors were not written for.

The loads are functions of tests.probes.bare_unusual_loads: healthy ones that could be mistaken for incidents must stay
silent, and each fault must be named with the requests that it hit, beside requests that are served.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscope.lab.vllm_python import needs_vllm, run, save_model
from tests.probes.played_frames import Played

pytestmark = [needs_vllm, pytest.mark.slow]

HEALTHY = (
    "long_chunks_beside_decodes",
    "abort_storm",
    "resets_under_load",
    "samples_of_one_prompt",
    "long_pause",
    "grammars_take_their_time",
    "drafts_never_accepted",
    "burst_into_a_small_pool",
    "slow_fetches",
    "agents_that_grow",
    "sessions_that_think",
    "aborts_a_step_ahead",
    "one_rank_is_idle",
    "clients_leave_while_fetching",
    "very_slow_steps",
    "high_class_preempts_the_low",
    "scores_of_one_prompt",
)
LOSING = {f"leaves-{number}" for number in range(12)}
STARVES = "low_class_waits_its_turn"
STALLS = "a_step_of_forty_seconds"
NAMED = {
    "one_send_never_reported": ("leak.finished-held", "likely", {"keep-0"}),
    "one_request_passed_over": ("stuck.lost-request", "confirmed", {"skipped"}),
    "a_block_lost_at_each_abort": ("leak.unaccounted", "confirmed", LOSING),
    "one_fetch_never_ends": ("stuck.remote-load", "likely", {"load-lost"}),
    "one_grammar_never_compiled": ("stuck.grammar", "likely", {"hangs"}),
    "a_preempted_request_forgotten": ("stuck.lost-request", "confirmed", {"chat-3"}),
    "lookups_that_miss": ("collapse.prefix-hits", "likely", {f"missed-{number}" for number in range(1, 12, 2)}),
    "tokens_never_given": ("stuck.zero-token", "confirmed", {"starves"}),
    "tokens_never_given_in_full_steps": ("stuck.zero-token", "confirmed", {"starves"}),
}
"""By fault: the code that fires at the end, its verdict, and the requests that it names."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All loads: one process, since vLLM takes ten seconds to import."""
    directory = tmp_path_factory.mktemp("loads")
    run(
        "tests.probes.bare_incidents",
        str(save_model(directory / "model")),
        str(directory),
        *HEALTHY,
        *NAMED,
        STARVES,
        STALLS,
    )
    return directory


@pytest.mark.parametrize("name", HEALTHY)
def test_an_unusual_load_is_no_finding(name: str, directory: Path) -> None:
    played = Played(directory / name)
    assert not played.fired
    assert all(played.is_exact() and len(ledger.ended) > 3 for ledger in played.ledgers)


@pytest.mark.parametrize("name", NAMED)
def test_a_fault_beside_a_load_is_named_and_nothing_else(name: str, directory: Path) -> None:
    played = Played(directory / name)
    code, verdict, requests = NAMED[name]
    assert played.fired.keys() == {code}
    finding = played.firing()[code]
    assert (finding.verdict, set(finding.culprits.requests)) == (verdict, requests)


def test_a_class_that_the_policy_starves_is_told_while_it_waits(directory: Path) -> None:
    played = Played(directory / STARVES)
    assert played.fired.keys() == {"harm.overtaken"}
    finding = played.fired["harm.overtaken"]
    assert (finding.verdict, finding.severity) == ("confirmed", "warning")
    assert set(finding.culprits.requests) == {f"low-{number}" for number in range(6)}
    assert "the policy starves it" in finding.explanation
    assert not played.firing()


def test_a_step_of_forty_seconds_is_a_stall_while_it_lasts(directory: Path) -> None:
    played = Played(directory / STALLS)
    assert played.fired.keys() == {"stuck.engine-stalled"}
    assert played.fired["stuck.engine-stalled"].verdict == "confirmed"
    assert 20 < played.fired_s["stuck.engine-stalled"] < 30
    assert not played.firing()
