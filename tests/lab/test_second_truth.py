"""The second method for the truth: it names harms by the raw events, and differs from a truth that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscope.lab.client_load import Clients
from kvscope.lab.cross_check.checked_runs import KeptRun, RunToCheck, drawn_at_random, end_of_draw
from kvscope.lab.cross_check.second_truth import SecondHarm, SecondTruth
from kvscope.lab.cross_check.truth_check import RANDOM_RUNS, RANDOM_SEED, Checked, check_run, disagreements, fifty_runs
from kvscope.lab.draws import draw_run, fault_in_turn
from kvscope.lab.truth.what_happened import Harm, decide
from tests.lab.test_drawn_runs import small
from tests.lab.test_truth import SOUND

QUEUE_BEFORE_A_FREE, LEASE_AFTER_A_SHARED_PREFIX = (98939, RANDOM_SEED), (229, RANDOM_SEED)
FENCE_BEFORE_A_HANG = 177, 173205
"""Runs on which the truth was wrong. It asked only after a step who would have fitted behind the head, and dated the
queue from there. It dated a hold by a free of another request. It took blocks behind a step that had returned for an
effect of a later hang.
"""


@pytest.mark.parametrize(("number", "seed"), [QUEUE_BEFORE_A_FREE, LEASE_AFTER_A_SHARED_PREFIX, FENCE_BEFORE_A_HANG])
def test_the_methods_agree_where_the_truth_was_wrong(number: int, seed: int, tmp_path: Path) -> None:
    assert [*disagreements(check_run(RunToCheck("own", number, seed), tmp_path))] == []


def test_a_request_that_waits_with_some_blocks_lacks_only_the_others(tmp_path: Path) -> None:
    """f-29 stands at the head, short of blocks. Behind it p-3 needs 19, and has kept 7 since its fetch: 12 are free."""
    end = end_of_draw(draw_run(96, 20261206, fault_in_turn(96)), tmp_path)
    second = SecondTruth(tmp_path, end.watched_s).harms["head-of-line"].requests
    assert "f-29" in second & {harm.kind: harm for harm in decide(end)}["head-of-line"].requests


CROWDED = (Clients("c", at_once=8, until_s=30, prompt=(200, 300), output=(100, 200)),)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("", ""),
        ("leak.unaccounted", "lost-at-abort"),
        ("leak.rising-floor", "lost-at-end"),
        ("leak.deferred-free-stalled", "lost-behind-fence"),
        ("corrupt.double-free:after=2:limit=1", "freed-twice"),
        ("corrupt.counter-drift", "counters-differ"),
        ("corrupt.use-after-free", "fence-broken"),
        ("stuck.zero-token:after=2:limit=1", "runs-without-tokens"),
        ("stuck.front-end:every=3", "never-reaches-the-scheduler"),
        ("stuck.engine-stalled:after=20:limit=1", "engine-hangs"),
        ("collapse.preempt-all", "preempted-all"),
        ("collapse.lockstep", "decode-starved"),
    ],
)
def test_events_show_each_harm_and_none_in_a_sound_engine(fault: str, kind: str, tmp_path: Path) -> None:
    load = {"load": CROWDED, "engine": {"enable_prefix_caching": False}} if kind == "preempted-all" else {}
    ahead = {"engine": {"async_scheduling": kind in ("lost-behind-fence", "fence-broken")}} if not load else {}
    end = end_of_draw(small(fault, **load, **ahead), tmp_path)
    named = SecondTruth(tmp_path, end.watched_s).harms.keys()
    assert kind in named if kind else not named
    assert named == {harm.kind for harm in decide(end)}


def test_both_methods_date_what_preempts_itself_by_its_last_token(tmp_path: Path) -> None:
    load = (Clients("c", times=(5.0,), prompt=(1_500, 1_500), output=(400, 400)),)
    end = end_of_draw(small("stuck.self-preempt", load=load), tmp_path)
    second = SecondTruth(tmp_path, end.watched_s).harms["preempts-itself"]
    (harm,) = (harm for harm in decide(end) if harm.kind == "preempts-itself")
    assert second.first_s == pytest.approx(harm.since_s, abs=0.1)
    assert second.requests == harm.requests


def checked(harms: dict[str, Harm], second: dict[str, SecondHarm], left: frozenset[str] = frozenset()) -> Checked:
    kept = KeptRun(RunToCheck("own", 0, 0), (), by_load=False, lease_s=0.0, recording=Path(), end=SOUND, undone=None)
    return Checked(kept, harms, second, set(left))


def test_a_truth_that_misses_adds_dates_or_blames_wrongly_is_shown() -> None:
    harm = Harm("lost-at-end", 5.0, 0.1, frozenset("r"), frozenset((1,)))
    same = SecondHarm(5.5, 1.0, {"r"}, {1})
    assert [*disagreements(checked({"lost-at-end": harm}, {"lost-at-end": same}))] == []
    assert "not in the truth" in next(disagreements(checked({}, {"lost-at-end": same})))
    assert "not by the events" in next(disagreements(checked({"lost-at-end": harm}, {})))
    for other, shown in (
        (SecondHarm(6.5, 1.0, {"r"}, {1}), "by the events from 6.5 s on"),
        (SecondHarm(5.0, 1.0, {"r", "s"}, {1}), "by the events 2"),
        (SecondHarm(5.0, 1.0, {"r"}, {1, 2}), "2"),
    ):
        assert shown in next(disagreements(checked({"lost-at-end": harm}, {"lost-at-end": other})))
    assert "without the faults" in next(disagreements(checked({}, {}, frozenset(("lost-at-end",)))))


def test_the_fifty_runs_are_always_the_same_and_half_are_vllms() -> None:
    runs = fifty_runs()
    assert (len(runs), len(set(runs)), sum(run.engine == "vllm" for run in runs)) == (50, 50, 17)
    assert drawn_at_random(RANDOM_RUNS, RANDOM_SEED) == runs[17:]
    assert drawn_at_random(RANDOM_RUNS, RANDOM_SEED + 1) != runs[17:]
