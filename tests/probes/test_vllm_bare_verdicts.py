"""Verdicts on vLLM's bare scheduler in virtual time: each false alarm that was seen, and the incident beside it.

The incidents are functions of tests.probes.bare_incidents. A healthy twin shows that a rule does not cry wolf, and an
incident that its first clause still holds. Test names give the mode in which the misjudgement was first found.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscope.lab.vllm_python import needs_vllm, run, save_model
from kvscope.monitor.contract.kinds import Cause, EngineMode
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.questions.pipeline import Pipeline
from tests.probes.played_frames import INSTANT_COPIES, Played, sampled

pytestmark = [needs_vllm, pytest.mark.slow]

HELD, LOST_BLOCKS = "leak.finished-held", "leak.unaccounted"
NEVER_FITS, HEAD_OF_LINE = "stuck.never-fits", "stuck.head-of-line"
STALLED, TOO_SMALL, LOCKSTEP = "stuck.engine-stalled", "sizing.kv-too-small", "collapse.lockstep"
KEPT = {f"keep-{number}" for number in range(6)}
FORGOTTEN = {f"forgotten-{number}" for number in range(6)}
SELDOM_AUDITED = ("while_idle", "in_slow_steps")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All incidents: one process, since vLLM takes ten seconds to import."""
    directory = tmp_path_factory.mktemp("incidents")
    run("tests.probes.bare_incidents", str(save_model(directory / "model")), str(directory))
    return directory


@pytest.fixture
def played(directory: Path, request: pytest.FixtureRequest) -> Played:
    return Played(directory / request.param)


def incident(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("played", [name], indirect=True)


def effects(finding: FindingReport) -> dict[str, set[str]]:
    """By code, the requests that the finding's effects hit."""
    return {effect.code: set(effect.requests) for effect in finding.effects}


def advice(finding: FindingReport) -> str:
    return " ".join((*finding.do_now, *finding.change)).lower()


# ---------------------------------------------------------------- polls (found with LLMEngine in one process)


@incident("leak_while_idle")
def test_a_leak_of_an_idle_engine_fires_once_and_stays(played: Played) -> None:
    assert played.firing().keys() == played.fired.keys() == {HELD}
    assert set(played.firing()[HELD].culprits.requests) == KEPT
    assert played.fired_s[HELD] < 12


# ---------------------------------------------------------------- requests that a leak starves (one process, server)


@incident("leak_and_big")
def test_requests_that_wait_for_kept_blocks_are_the_leaks_effects(played: Played) -> None:
    assert played.firing().keys() == {HELD}
    assert effects(played.firing()[HELD]) == {NEVER_FITS: {"big", "small"}, HEAD_OF_LINE: {"big"}}
    (starved,) = [each for each in played.watch.findings("suppressed") if each.code == NEVER_FITS]
    assert "Request big needs 100 blocks" in starved.explanation
    assert played.is_exact()


@incident("lost_blocks_and_big")
def test_requests_that_wait_for_lost_blocks_are_the_leaks_effects(played: Played) -> None:
    finding = played.firing()[LOST_BLOCKS]
    assert (finding.verdict, set(finding.culprits.requests)) == ("confirmed", FORGOTTEN)
    assert effects(finding) == {NEVER_FITS: {"big", "small"}, HEAD_OF_LINE: {"big"}}
    assert played.firing().keys() == {LOST_BLOCKS}


@pytest.mark.parametrize("played", [f"lost_blocks_of_a_large_pool_{when}" for when in SELDOM_AUDITED], indirect=True)
def test_lost_blocks_are_confirmed_of_an_engine_that_makes_few_passes_or_none(played: Played) -> None:
    finding = played.firing()[LOST_BLOCKS]
    assert (finding.verdict, set(finding.culprits.requests)) == ("confirmed", FORGOTTEN)
    assert played.ledger.state.audit_cycles > 0
    assert played.is_exact()


@incident("idle_now_and_then")
def test_audits_of_an_idle_engine_that_is_woken_agree_with_the_events(played: Played) -> None:
    assert played.fired == {}
    assert played.ledger.state.audit_cycles >= 2
    assert played.is_exact()


@incident("leak_of_all")
def test_every_request_that_an_exhausted_pool_starves_is_named(played: Played) -> None:
    assert effects(played.firing()[HELD]) == {NEVER_FITS: {f"starved-{number}" for number in range(6)}}


@incident("leak_and_room")
def test_requests_that_fit_beside_a_leak_are_not_said_to_be_starved_by_it(played: Played) -> None:
    assert NEVER_FITS not in effects(played.firing()[HELD])
    assert NEVER_FITS not in played.fired


@incident("big_without_leak")
def test_a_large_request_that_waits_for_others_to_end_is_no_finding(played: Played) -> None:
    assert not played.fired
    assert {record.id for record in played.ledger.ended} >= {"big", "small"}


# ---------------------------------------------------------------- pauses (one process, server)


@incident("paused")
def test_no_pause_is_a_stall(played: Played) -> None:
    assert not played.fired
    assert played.ledger.state.mode == EngineMode.UNPAUSED


@incident("paused_new_and_idle")
def test_requests_that_a_pause_holds_back_are_no_finding(played: Played) -> None:
    assert not played.fired
    assert {record.id for record in played.ledger.state.requests.values() if record.is_waiting} == {"new-0", "new-1"}


@incident("hang_after_pause")
def test_a_stall_after_a_pause_is_found(played: Played) -> None:
    assert played.firing()[STALLED].verdict == "confirmed"


# ---------------------------------------------------------------- lost requests (one process)


@incident("lost_from_queue")
def test_requests_in_no_queue_are_named_under_load(played: Played) -> None:
    finding = played.firing()["stuck.lost-request"]
    assert (finding.verdict, set(finding.culprits.requests)) == ("confirmed", {"lost-running", "lost-waiting"})
    assert played.fired.keys() == {"stuck.lost-request"}
    assert played.fired_s["stuck.lost-request"] < 6


# ---------------------------------------------------------------- heartbeats (one process)


@incident("one_slow_heartbeat")
def test_one_second_without_a_pass_is_no_stall(played: Played) -> None:
    assert STALLED not in played.fired


@incident("no_pass_at_all")
def test_an_engine_that_makes_no_pass_is_stalled(played: Played) -> None:
    assert played.firing()[STALLED].culprits.requests == ["big"]
    assert 20 <= played.fired_s[STALLED] <= 24


# ---------------------------------------------------------------- a pool that is too small (one process)


@incident("leak_then_restart")
def test_a_restarted_engine_is_not_blamed_for_the_preemptions_of_a_leak(played: Played) -> None:
    assert played.fired.keys() == {LOST_BLOCKS}
    assert not played.firing()


@incident("leak_that_ends")
def test_preemptions_of_a_leak_stay_its_effects_when_it_has_ended(played: Played) -> None:
    assert played.fired.keys() == {HELD}
    (leak,) = [finding for finding in played.watch.findings("resolved") if finding.code == HELD]
    assert TOO_SMALL in effects(leak)


@incident("too_small_then_restart")
def test_a_pool_that_was_too_small_is_not_so_in_the_next_epoch(played: Played) -> None:
    assert played.fired.keys() == {TOO_SMALL}
    assert not played.firing()


@incident("pool_too_small")
def test_a_pool_that_is_too_small_is_found(played: Played) -> None:
    assert played.firing()[TOO_SMALL].verdict == "confirmed"


# ---------------------------------------------------------------- frees by others (one process)


@incident("free_twice")
def test_a_block_freed_twice_by_the_scheduler_is_corruption(played: Played) -> None:
    assert played.firing()["corrupt.double-free"].verdict == "confirmed"
    assert not played.ledger.losses


@incident("unpinned_blocks")
def test_pins_neither_count_as_losses_nor_hide_a_leak(played: Played) -> None:
    assert set(played.firing()[LOST_BLOCKS].culprits.requests) == FORGOTTEN
    assert not played.ledger.losses
    assert played.fired_s[LOST_BLOCKS] < 8
    assert played.firing()[LOST_BLOCKS].verdict == "confirmed"


# ---------------------------------------------------------------- early steps (server)


@incident("slow_early_step")
def test_a_slow_early_step_is_no_stall(played: Played) -> None:
    assert STALLED not in played.fired
    assert not played.firing()


@incident("late_hang")
def test_a_late_step_that_hangs_is_a_stall(played: Played) -> None:
    finding = played.fired[STALLED]
    assert finding.verdict == "confirmed"
    assert "restart" in advice(finding)


# ---------------------------------------------------------------- leases (one process, and NIXL)


@incident("renewed_lease")
def test_blocks_under_an_unknown_lease_are_never_surely_a_leak(played: Played) -> None:
    finding = played.fired[HELD]
    assert finding.verdict == "likely"
    assert "lease" in finding.missing
    assert "restart" not in " ".join(finding.do_now).lower()
    assert not played.firing()


@incident("nixl_lease")
def test_blocks_within_a_lease_that_the_configuration_shows_are_no_finding(played: Played) -> None:
    assert not played.fired


@incident("nixl_consumer_gone")
def test_blocks_beyond_that_lease_are(played: Played) -> None:
    assert set(played.firing()[HELD].culprits.requests) == KEPT
    assert 30 < played.fired_s[HELD] < 45


# ---------------------------------------------------------------- several KV cache groups


@incident("windows_fit")
def test_a_prompt_that_fits_because_windows_recycle_blocks_is_no_finding(played: Played) -> None:
    assert not played.fired
    assert "long-doc" in {record.id for record in played.ledger.ended}


@incident("windows_never_fit")
def test_a_prompt_that_fits_no_pool_of_several_groups_is_found(played: Played) -> None:
    assert played.firing()[NEVER_FITS].culprits.requests == ["long-doc"]


# ---------------------------------------------------------------- queues of requests that are ready


@incident("grammar_in_the_queue")
def test_a_compiled_grammar_behind_max_num_seqs_is_no_finding(played: Played) -> None:
    assert not played.fired
    waiting = played.ledger.request("json")
    assert waiting is not None
    assert (waiting.is_waiting, waiting.cause) == (True, Cause.MAX_NUM_SEQS)


@incident("grammar_never_compiled")
def test_a_grammar_that_is_never_compiled_is_found(played: Played) -> None:
    assert played.firing()["stuck.grammar"].culprits.requests == ["json"]


@incident("full_decode_instance")
def test_delivered_kv_that_waits_for_its_turn_is_no_finding(played: Played) -> None:
    assert not played.fired
    assert {record.id for record in played.ledger.state.requests.values() if record.is_waiting} == {"load-0"}


@incident("promotion_never_comes")
def test_delivered_kv_that_others_overtake_is_found(played: Played) -> None:
    assert played.firing()["stuck.promotion-starved"].culprits.requests == ["load-0"]
    assert played.fired.keys() == {"stuck.promotion-starved"}


@incident("adapters_in_use")
def test_a_request_without_an_adapter_slot_waits_for_that_and_not_for_blocks(played: Played) -> None:
    waiting = played.ledger.request("third")
    assert waiting is not None
    assert (waiting.is_waiting, waiting.cause) == (True, Cause.LORA)
    assert not played.ledger.state.totals.allocation_failures
    assert not played.fired


@incident("aligned_block_too_large")
def test_a_prompt_whose_share_of_each_step_is_nothing_is_found_with_nothing_running(played: Played) -> None:
    finding = played.firing()["stuck.zero-token"]
    assert (finding.verdict, finding.culprits.requests) == ("confirmed", ["aligned"])
    assert "no other request runs" in finding.explanation
    assert played.fired.keys() == {"stuck.zero-token"}


@incident("aligned_block_beside_others")
def test_a_prompt_that_waits_for_a_whole_step_beside_others_is_no_finding(played: Played) -> None:
    assert not played.fired
    assert "aligned" in {record.id for record in played.ledger.ended}


# ---------------------------------------------------------------- data-parallel ranks (server)


@incident("one_rank_stands")
def test_a_rank_that_stands_still_is_named_by_the_names_the_probe_gives(played: Played) -> None:
    names = {ledger.engine for ledger in played.ledgers}
    assert names == {"model@127.0.0.1:5757/0", "model@127.0.0.1:5757/1"}
    finding = played.firing()["stuck.rank-diverged"]
    assert (finding.engine, finding.culprits.requests) == ("model@127.0.0.1:5757/1", ["runs"])
    assert played.fired.keys() == {"stuck.rank-diverged"}


@incident("ranks_under_one_name")
def test_ranks_under_one_engine_id_both_appear(played: Played) -> None:
    requests = {ledger.engine: {record.id for record in ledger.state.requests.values()} for ledger in played.ledgers}
    assert requests == {"prod/0": {"of-rank-0"}, "prod/1": {"of-rank-1"}}
    assert not played.fired
    assert played.is_exact()


# ---------------------------------------------------------------- lock-step from metrics (server)


@pytest.mark.parametrize("every_s", [1, 2, 5, 10, 15])
def test_a_healthy_load_by_priority_is_no_lock_step_on_its_metrics_page(directory: Path, every_s: int) -> None:
    for offset in range(6):
        watch = Pipeline(INSTANT_COPIES)
        watch.feed(sampled(directory / "by_priority", every_s, offset * every_s / 6))
        assert not [finding for finding in watch.findings() if finding.code == LOCKSTEP]


def test_waves_are_lock_step_on_their_metrics_page(directory: Path) -> None:
    watch = Pipeline(INSTANT_COPIES)
    watch.feed(sampled(directory / "waves", 0.5, 0))
    assert LOCKSTEP in {finding.code for finding in watch.findings()}


@incident("waves")
def test_waves_are_lock_step_in_the_stream(played: Played) -> None:
    assert played.fired[LOCKSTEP].verdict == "confirmed"


@incident("by_priority")
def test_a_healthy_load_by_priority_is_no_finding_in_the_stream(played: Played) -> None:
    assert not played.fired
