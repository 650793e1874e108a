"""Servers of data-parallel ranks in the lab: whole engines with clients of their own, and one monitor of all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvscope.lab.draws import FAULT_CODES, draw_run
from kvscope.lab.episode import make_ranks, ranks_of
from kvscope.lab.lab_watch import unmarked_records
from kvscope.lab.on_vllm.vllm_draws import draw_vllm_run
from kvscope.lab.trial import Trial, run_trial
from kvscope.lab.truth.episode_end import EpisodeEnd
from kvscope.lab.truth.what_happened import decide_of_ranks

SEED = 5
HANGS = FAULT_CODES.index("stuck.engine-stalled") + 6 * len(FAULT_CODES)
HEALTHY = 44
"""Runs of this seed that are quick."""


def end(hangs_since_s: float | None) -> EpisodeEnd:
    return EpisodeEnd(
        watched_s=90.0,
        drained_s=9.0,
        busy_s=80.0,
        steps=100,
        short_steps=0,
        usable_blocks=100,
        asked=9,
        tokens_computed=10,
        request_s=1.0,
        hangs_since_s=hangs_since_s,
    )


def kinds(*hang_since_s: float | None) -> list[str]:
    return [harm.kind for harm in decide_of_ranks([end(since_s) for since_s in hang_since_s])]


def test_a_rank_that_hangs_beside_others_is_no_server_that_hangs() -> None:
    assert kinds(None, 20.0) == ["rank-hangs"]
    assert kinds(10.0, 20.0) == ["engine-hangs", "engine-hangs"]
    assert kinds(20.0) == ["engine-hangs"]
    assert kinds(None, None) == []


def test_each_rank_has_the_same_engine_and_clients_of_its_own() -> None:
    first = draw_run(3, SEED, "stuck.engine-stalled")
    assert first.of_rank(0) is first
    third = first.of_rank(2)
    assert (third.engine, third.step_time, third.seconds) == (first.engine, first.step_time, first.seconds)
    assert third.seed != first.seed
    assert not {clients.name for clients in third.load} & {clients.name for clients in first.load}
    assert first.faults
    assert not third.faults, "the fault is in one rank"
    on_vllm = draw_vllm_run(3, SEED, "0.32.0", "step-hangs")
    assert (on_vllm.of_rank(0).fault, on_vllm.of_rank(1).fault) == ("step-hangs", "")


def test_a_server_has_two_to_four_ranks_and_an_engine_alone_has_one() -> None:
    assert {ranks_of("own-ranks", number, SEED) for number in range(50)} == {2, 3, 4}
    assert {ranks_of("vllm-ranks 0.32.0", number, SEED) for number in range(50)} == {2, 3, 4}
    assert {ranks_of("vllm 0.32.0", number, SEED) for number in range(9)} == {1}


def test_every_rank_writes_a_recording_under_its_own_name(tmp_path: Path) -> None:
    ranks = make_ranks("own-ranks", HEALTHY, SEED, tmp_path, "all")
    for rank in ranks.values():
        rank.watch()
        rank.drain()
    named = [{record.engine for record in unmarked_records(directory)} for directory in ranks]
    assert named == [{f"lab@127.0.0.1:0/{rank}"} for rank in range(len(ranks))]


def run_of_ranks(number: int) -> Trial:
    trial = run_trial(number, SEED, "own-ranks", drawn_from="faults")
    assert not trial.error
    return trial


def test_a_rank_that_hangs_is_found_beside_those_that_go_on() -> None:
    trial = run_of_ranks(HANGS)
    assert "rank-hangs" in trial.kinds
    (harm,) = [harm for harm in trial.results["stream"].harms if harm.kind == "rank-hangs"]
    assert (harm.code, harm.found_s is not None) == ("stuck.rank-diverged", True)
    assert all(claim.right for claim in trial.results["stream"].claims)
    assert "metrics" not in trial.results, "pages are those of one engine"


def test_ranks_of_a_healthy_server_are_all_counted_and_none_is_named() -> None:
    alone, server = run_trial(HEALTHY, SEED, "own"), run_trial(HEALTHY, SEED, "own-ranks")
    assert (alone.healthy, server.healthy, server.error) == (True, True, "")
    assert server.busy_s > alone.busy_s
    assert server.steps > alone.steps
    assert not [claim for claim in server.results["stream"].claims if not claim.right]


def test_a_draw_of_a_rank_keeps_what_was_lost_of_the_stream() -> None:
    draw = replace(draw_run(3, SEED), lost=((10.0, 2),))
    assert draw.of_rank(1).lost == draw.lost
