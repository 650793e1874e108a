"""What the lab's operator and consumers do to vLLM's scheduler: pauses, sleep, new weights and renewed leases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvscope.engine.bench.clock import VirtualClock
from kvscope.lab.cross_check.checked_runs import RunToCheck
from kvscope.lab.cross_check.raw_account import RawAccount
from kvscope.lab.cross_check.truth_check import check_run, disagreements
from kvscope.lab.draws import LONG_WATCH
from kvscope.lab.lab_watch import find_in_records, unmarked_records
from kvscope.lab.on_vllm.vllm_draws import VllmDraw, draw_vllm_run
from kvscope.lab.on_vllm.vllm_episode import VllmEpisode
from kvscope.lab.on_vllm.vllm_outside import RENEWED_SHARE, OtherEngine
from kvscope.lab.truth.what_happened import decide
from kvscope.lab.vllm_python import needs_vllm
from kvscope.monitor.contract.kinds import EngineMode, Kind, Preempt, Status

SEED = 7
SLEEPS, NEW_WEIGHTS = 35, 304
"""Runs of this seed that are quick."""
RENEWS = replace(
    draw_vllm_run(4, 1, "0.32.0", "consumer-stops-renewing"), lease_s=30.0, renews=True, consumer_s=(100.0, 100.0)
)


def healthy(release: str, count: int = 200) -> list[VllmDraw]:
    return [draw_vllm_run(number, SEED, release, "", LONG_WATCH) for number in range(count)]


def test_only_releases_that_can_are_paused_and_renew_leases() -> None:
    for release, can in (("0.10.2", False), ("0.18.0", True), ("0.32.0", True)):
        assert any(draw.outages for draw in healthy(release)) is can
    assert not any(draw.renews for draw in healthy("0.18.0"))
    assert any(draw.renews for draw in healthy("0.32.0"))


def test_outages_do_not_overlap_and_no_cache_is_dropped_while_a_connector_keeps_blocks() -> None:
    drawn = healthy("0.32.0", 600)
    assert {one.kind for draw in drawn for one in draw.outages} == {"pause", "sleep", "weights"}
    for draw in drawn:
        ends = [0.0, *(one.at_s + one.seconds for one in draw.outages)]
        assert all(one.at_s > end for one, end in zip(draw.outages, ends, strict=False))
        assert not draw.has_connector or all(one.kind == "pause" for one in draw.outages)


def test_engines_have_up_to_five_groups_which_share_the_pool() -> None:
    drawn = healthy("0.32.0", 600)
    assert {draw.window_groups for draw in drawn} == {0, 1, 2, 3, 4}
    for draw in drawn:
        engine = draw.base.engine
        pool = (engine["num_gpu_blocks_override"] - 1) * engine["block_size"]
        assert bool(draw.base.window) is bool(draw.window_groups)
        assert draw.base.max_model_len * (1 + draw.window_groups) <= max(pool, 2 * (1 + draw.window_groups))


@pytest.mark.parametrize("dies", [True, False])
def test_a_consumer_renews_its_lease_until_it_has_read_the_blocks_or_dies(dies: bool) -> None:
    clock, noted = VirtualClock(), []
    other = OtherEngine(RENEWS, clock, lambda kind, name: noted.append((kind, name)))
    other.never_sent = lambda _request: dies
    other.keeping_begins(SimpleNamespace(request_id="r"), 3)
    clock.sleep(99)  # beyond three leases
    assert noted == []
    assert other.pending
    clock.sleep(2)
    assert noted == ([("moved", "r")] if dies else [])
    clock.sleep(RENEWED_SHARE * 30)
    assert noted == ([("moved", "r"), ("freed-by-lease", "r")] if dies else [])
    assert not other.pending


@needs_vllm
@pytest.mark.slow
@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(
    ("number", "modes", "ends"),
    [
        (SLEEPS, ["PAUSED_NEW", "ASLEEP", "PAUSED_NEW", "UNPAUSED"], Status.FINISHED_ABORTED),
        (NEW_WEIGHTS, ["PAUSED_ALL", "UNPAUSED"], None),
    ],
)
def test_what_the_operator_does_is_in_the_stream_and_is_no_harm(
    number: int, modes: list[str], ends: int | None, tmp_path: Path
) -> None:
    """A sleep aborts what runs. New weights preempt it: the blocks are computed again, as they must be."""
    episode = VllmEpisode(number, SEED, tmp_path, "", LONG_WATCH)
    episode.watch()
    heard, preempted, finished = [], set(), set()
    for event in RawAccount().replay(tmp_path):
        if event.kind == Kind.ENGINE_MODE:
            heard.append(EngineMode(event.args[1]).name)
        elif event.kind == Kind.PREEMPTED:
            preempted.add(event.args[0])
        elif event.kind == Kind.FINISHED:
            finished.add(event.args[0])
    assert heard[: len(modes)] == modes
    assert len(heard) % len(modes) == 0
    assert (Status.FINISHED_ABORTED in finished) is (ends is not None)
    assert (Preempt.RESET in preempted) is (ends is None)
    assert decide(episode.drain()) == []
    assert list(find_in_records(unmarked_records(tmp_path))) == []


RESETS = 162
"""A run of seed 31 whose operator gives new weights while requests run."""


@needs_vllm
@pytest.mark.slow
@pytest.mark.usefixtures("worker")
def test_the_events_bear_out_that_preemptions_by_the_operator_are_no_harm(tmp_path: Path) -> None:
    checked = check_run(RunToCheck("vllm", RESETS, 31), tmp_path)
    assert checked.kept.faults == ()
    assert [*disagreements(checked)] == []
    assert checked.harms == {}
