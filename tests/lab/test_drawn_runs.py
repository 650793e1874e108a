"""Drawn runs: the range, the truth of an engine in virtual time, the verdict on findings, and the command."""

from __future__ import annotations

import io
import json
import math
import subprocess
import tempfile
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec
import pytest
from rich.console import Console

from kvscope.engine.bench.latencies import OutsideTimes
from kvscope.engine.bench.simulated_engine import StepTime
from kvscope.engine.config import EngineConfig
from kvscope.engine.faults import PLACES
from kvscope.lab import own_episode as own_episode_module
from kvscope.lab.__main__ import main
from kvscope.lab.accuracy import accuracy_of, accuracy_page, show_accuracy
from kvscope.lab.client_load import Clients
from kvscope.lab.cross_check.checked_runs import end_of_draw
from kvscope.lab.draws import FAULT_CODES, LONG_WATCH, Draw, draw_run, fault_in_turn
from kvscope.lab.episode import own_episode
from kvscope.lab.lab_watch import FoundCode, find_in_recordings, unmarked_records
from kvscope.lab.needed_loads import (
    ADMITTED_IN_CHUNKS,
    FETCHED_AGAIN,
    FILLING_THE_POOL,
    IDLE_BETWEEN,
    OUTGROWING,
    PARKING,
    SIDE_BY_SIDE,
    STEP_S,
)
from kvscope.lab.own_episode import OwnEpisode
from kvscope.lab.trial import Trial, judge_claim, note_outcome, seen_harms
from kvscope.lab.trial_batch import read_trials
from kvscope.lab.truth.claims import codes_named
from kvscope.lab.truth.episode_end import EpisodeEnd
from kvscope.lab.truth.what_happened import Harm, decide
from kvscope.monitor.contract.wire import Batch
from tests.lab.test_lab import INCIDENTS_COMMAND

CHEAP_RUN = 9
"""A drawn run that takes a second or two."""

CHAT = Clients("c", rate=1.0, until_s=30, prompt=(40, 120), output=(5, 30), leave=0.5)


def small(fault: str = "", **changed: object) -> Draw:
    """A small engine under chat; `engine` is merged."""
    engine = {"num_gpu_blocks_override": 101, "max_num_seqs": 8, "max_num_batched_tokens": 256, "block_size": 16}
    engine |= changed.pop("engine", {})  # type: ignore[arg-type, call-overload]
    drawn = Draw(
        number=0,
        seed=1,
        faults=(fault,) if fault else (),
        engine=engine,
        load=(CHAT,),
        step_time=StepTime(base_s=0.02),
        latencies=OutsideTimes(),
        max_model_len=4096,
        seconds=40,
        steps=5_000,
        scrape_s=5.0,
    )
    return replace(drawn, **changed)  # type: ignore[arg-type]


def ended(draw: Draw) -> EpisodeEnd:
    """Run an episode to its end, and drop its recording."""
    with tempfile.TemporaryDirectory() as directory:
        return end_of_draw(draw, Path(directory))


# -------------------------------------------------------------------- the range


def test_the_same_number_is_the_same_draw_and_all_are_engines() -> None:
    drawn = [draw_run(number) for number in range(150)]
    assert drawn[:3] == [draw_run(number) for number in range(3)]
    for each in drawn:
        EngineConfig(**each.engine, faults=each.faults, max_model_len=each.max_model_len)
    blocks = [each.engine.get("num_gpu_blocks_override", 0) for each in drawn]
    steps = [each.step_time.base_s for each in drawn]
    assert min(filter(None, blocks)) < 100 < 100_000 < max(blocks)
    assert min(steps) < 0.005 < 5 < max(steps)
    assert max(each.load[0].prompt[1] for each in drawn) > 100_000
    assert 0.25 < sum(not each.faults for each in drawn) / len(drawn) < 0.55
    assert {each.engine.get("block_size") for each in drawn} > {1, 16, 256}
    assert any(len(each.faults) == 2 for each in drawn)


def test_healthy_engines_are_watched_for_up_to_an_hour() -> None:
    drawn = [draw_run(number, 0, "", LONG_WATCH) for number in range(150)]
    assert not any(each.faults for each in drawn)
    assert min(each.seconds for each in drawn) == 900
    assert max(each.seconds for each in drawn) == 3600
    assert 20_000 < max(each.steps for each in drawn) <= 50_000


def test_no_step_of_a_drawn_engine_takes_longer_than_the_range() -> None:
    shortest = longest = 1.0
    for number in range(400):
        drawn = draw_run(number)
        if "num_gpu_blocks_override" not in drawn.engine:
            continue  # its pool follows from a memory plan
        times, budget = drawn.step_time, drawn.engine["max_num_batched_tokens"]
        pool = (drawn.engine["num_gpu_blocks_override"] - 1) * drawn.engine["block_size"]
        context = max(each.prompt[1] + each.prefix + each.output[1] + each.context for each in drawn.load)
        worst_s = times.seconds(budget, pool) + times.per_attended_s * budget * context
        longest = max(longest, worst_s * math.exp(2 * times.jitter) * times.slow_factor)
        shortest = min(shortest, times.base_s)
    assert shortest < 0.002
    assert 20 < longest <= STEP_S[1] * (1 + 1e-9)


RARE: Final = FILLING_THE_POOL | ADMITTED_IN_CHUNKS | OUTGROWING | PARKING | FETCHED_AGAIN | IDLE_BETWEEN | SIDE_BY_SIDE


QUICK: Final = {"corrupt.use-after-free", "leak.idle-not-polled", "sizing.kv-too-small"}
"""The draws of the other rare faults take 20 to 80 s of CPU time."""


def test_engines_of_rare_harms_are_as_different_as_others() -> None:
    assert set(FAULT_CODES) > RARE
    drawn = [draw_run(number, 0, code) for code in sorted(RARE) for number in range(40)]
    for each in drawn:
        EngineConfig(**each.engine, faults=each.faults, max_model_len=each.max_model_len)
    blocks = [each.engine["num_gpu_blocks_override"] for each in drawn if "num_gpu_blocks_override" in each.engine]
    assert min(blocks) < 100 < 20_000 < max(blocks)
    steps = [each.step_time.base_s for each in drawn]
    assert min(steps) < 0.002 < 10 < max(steps)
    assert {each.engine.get("block_size") for each in drawn} > {1, 16, 256}
    assert {each.engine["scheduling_policy"] for each in drawn} == {"fcfs", "priority"}
    assert max(each.engine["max_num_seqs"] for each in drawn) > 500


@pytest.mark.parametrize(
    "code",
    [pytest.param(code, marks=pytest.mark.slow if code in QUICK else pytest.mark.prove) for code in sorted(RARE)],
)
def test_a_rare_harm_is_done_in_half_of_the_runs_of_its_fault(code: str, tmp_path: Path) -> None:
    ends = (end_of_draw(draw_run(number, 7, code), tmp_path / str(number)) for number in range(6))
    done = (end for end in ends if code in codes_named(decide(end)))
    assert len(list(islice(done, 3))) == 3


# -------------------------------------------------------------------- the truth


@pytest.mark.parametrize("fault", ["", "stuck.self-preempt"])
def test_a_request_that_preempts_itself_is_doomed_from_its_last_token_on(fault: str) -> None:
    load = (Clients("c", times=(5.0,), prompt=(1_500, 1_500), output=(400, 400)),)
    harms = {harm.kind: harm for harm in decide(ended(small(fault, load=load)))}
    if not fault:
        assert harms == {}
        return
    assert 7 < harms["preempts-itself"].since_s < 15  # 100 tokens fill the pool
    assert harms["preempts-itself"].requests == {"c-0"}


@pytest.mark.parametrize(
    ("fault", "kind", "engine"),
    [
        ("leak.unaccounted", "lost-at-abort", {}),
        ("leak.rising-floor", "lost-at-end", {}),
        ("leak.finished-held", "kept-by-connector", {"kv_connector": "host"}),
        ("stuck.front-end:limit=1", "never-reaches-the-scheduler", {}),
        ("stuck.zero-token:limit=1", "runs-without-tokens", {}),
        ("stuck.engine-stalled:after=50:limit=1", "engine-hangs", {}),
        ("corrupt.counter-drift:limit=1", "counters-differ", {}),
        ("collapse.prefix-hits", "prefix-missed", {}),
        ("corrupt.use-after-free", "fence-broken", {"async_scheduling": True}),
        ("leak.idle-not-polled", "sent-while-asleep", {"kv_connector": "host"}),
    ],
)
def test_a_fault_is_a_harm_and_undone_it_is_none(fault: str, kind: str, engine: dict[str, object]) -> None:
    load = (replace(CHAT, prefixes=2, prefix=64),)
    faulty, sound = (ended(draw) for draw in (small(fault, engine=engine, load=load), small(load=load)))
    assert kind in {harm.kind for harm in decide(faulty)}
    assert kind not in {harm.kind for harm in decide(sound)}
    assert (sound.unfinished, sound.kept) == ([], [])


def test_a_prefix_that_all_groups_have_is_missed_though_one_has_a_window() -> None:
    """Of 64 tokens at the beginning, a window of 32 leaves half behind. One of 512 reaches them all."""
    load = (replace(CHAT, prefixes=2, prefix=64),)
    kinds = [
        {harm.kind for harm in decide(ended(replace(small(fault, load=load), window=window)))}
        for fault, window in (("collapse.prefix-hits", 512), ("", 512), ("", 32))
    ]
    assert ["prefix-missed" in each for each in kinds] == [True, False, False]


HELD_WHILE_OTHERS_STILL_RAN = (2134, 20261212)  # from 55 s on for good, and small ones get past them until 98 s
TAKEN_IN_LATE, PINNED_BESIDE_A_FETCH, PASSED_OVER = (194, 780), (246, 20261125), (58, 780)
"""Runs of each fault in turn, with their seed. A fetch ends while the engine sleeps: only the next request wakes it.
The pins of a fetch outlive it while others are fetched. A fetch ends, and the engine, which is busy, is not told.
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "kind", "since_s"),
    [
        (TAKEN_IN_LATE, "fetched-while-asleep", 200),
        (PINNED_BESIDE_A_FETCH, "outer-pin", 612),
        (PASSED_OVER, "fetched-and-passed-over", 23),
        (HELD_WHILE_OTHERS_STILL_RAN, "waits-with-blocks", 55),
    ],
)
def test_harms_of_fetches_begin_with_the_fetch_that_they_concern(
    run: tuple[int, int], kind: str, since_s: int, tmp_path: Path
) -> None:
    number, seed = run
    draw = draw_run(number, seed, fault_in_turn(number))
    harms = {harm.kind: harm for harm in decide(end_of_draw(draw, tmp_path / "faulty"))}
    assert harms[kind].since_s == pytest.approx(since_s, abs=1)
    assert kind not in {harm.kind for harm in decide(end_of_draw(replace(draw, faults=()), tmp_path / "sound"))}


def test_a_slow_copy_is_no_leak_and_a_slow_engine_no_stall() -> None:
    engine = {"kv_connector": "host"}
    end = ended(small(engine=engine, latencies=OutsideTimes(copy_s=50.0)))
    assert end.drained_s > 100
    assert (end.kept, end.unfinished) == ([], [])
    slow = ended(small(step_time=StepTime(base_s=20.0, jitter=0.3), seconds=600))
    assert decide(slow) == []


def test_a_drain_ends_though_the_engine_hangs_with_a_copy_on_its_way() -> None:
    engine = {"kv_connector": "host"}
    end = ended(small("stuck.engine-stalled:after=50:limit=1", engine=engine, latencies=OutsideTimes(copy_s=5)))
    assert end.hangs_since_s is not None
    assert end.drained_s < 200
    assert [harm.kind for harm in decide(end)] == ["engine-hangs"]


def test_blocks_whose_free_was_skipped_wait_behind_no_step() -> None:
    skipped = ended(small("leak.unaccounted", engine={"async_scheduling": True}))
    assert "lost-at-abort" in {harm.kind for harm in decide(skipped)} - {"lost-behind-fence"}
    assert {kept.by for kept in skipped.kept if kept.freed_by == "fence"} == set()
    missed = ended(small("leak.deferred-free-stalled", engine={"async_scheduling": True}))
    assert "lost-behind-fence" in {harm.kind for harm in decide(missed)}


@pytest.mark.parametrize(("fault", "left"), [("", set()), ("stuck.zero-token:limit=1", {"runs-without-tokens"})])
def test_a_long_drain_cuts_short_only_what_still_gets_tokens(
    monkeypatch: pytest.MonkeyPatch, fault: str, left: set[str]
) -> None:
    monkeypatch.setattr(own_episode_module, "PATIENT_STEPS", 20)
    monkeypatch.setattr(own_episode_module, "MOST_DRAIN_STEPS", 200)
    load = (Clients("c", at_once=12, until_s=30, prompt=(40, 60), output=(300, 400)),)
    end = ended(small(fault, load=load, seconds=31))
    assert {harm.kind for harm in decide(end) if harm.kind == "runs-without-tokens"} == left
    assert len(end.unfinished) == len(left)


def test_a_counter_that_drifts_makes_no_eviction_needless() -> None:
    load = (replace(CHAT, prefixes=6, prefix=320, until_s=80, leave=0.0, prompt=(100, 100), output=(5, 6)),)
    drawn = small(load=load, seconds=90, engine={"num_gpu_blocks_override": 91})
    sound, drifting = (decide(ended(one)) for one in (drawn, replace(drawn, faults=("corrupt.counter-drift",))))
    assert [harm.kind for harm in sound] == ["prefix-evicted"]
    assert sorted(harm.kind for harm in drifting) == ["counters-differ", "prefix-evicted"]


@pytest.mark.parametrize(
    ("fault", "in_vain"), [("thrash.cascade", True), ("leak.deferred-free-stalled:every=3:limit=1", False), ("", False)]
)
def test_a_preemption_is_in_vain_only_while_a_step_in_flight_fences_blocks(fault: str, in_vain: bool) -> None:
    load = (Clients("c", at_once=12, until_s=30, prompt=(40, 60), output=(300, 400)),)
    kinds = {
        harm.kind for harm in decide(ended(small(fault, load=load, seconds=31, engine={"async_scheduling": True})))
    }
    assert "recomputed-after-preemption" in kinds
    assert ("preempted-behind-fence" in kinds) == in_vain


def test_none_wait_behind_a_head_that_no_pool_could_hold() -> None:
    load = (replace(CHAT, prompt=(200, 300)), Clients("l", at_once=1, until_s=30, prompt=(1_700, 1_800), output=(5, 9)))
    beyond = ended(small("stuck.never-fits", load=load))
    assert "needs-more-than-the-pool" in {harm.kind for harm in decide(beyond)}
    assert "head-of-line" not in {harm.kind for harm in decide(beyond)}
    held_back = ended(small(load=load, engine={"num_gpu_blocks_override": 131}))
    assert "head-of-line" in {harm.kind for harm in decide(held_back)}


@pytest.mark.parametrize(("places", "queues"), [(6, True), (8, False)])
def test_a_wave_counts_as_ended_together_if_some_of_the_next_must_wait(places: int, queues: bool) -> None:
    waves = (0.1,) * 6 + (6.0,) + (9.0,) * 8  # after the first wave one of its clients is back before the others
    load = (Clients("w", times=waves, until_s=20, prompt=(24, 24), output=(20, 20)),)
    end = ended(small(load=load, engine={"max_num_seqs": places}))
    assert [harm.since_s < 9 for harm in decide(end) if harm.kind == "ended-together"] == [True] * queues


def test_preemptions_are_work_done_twice() -> None:
    load = (Clients("c", at_once=8, until_s=30, prompt=(200, 300), output=(100, 200)),)
    end = ended(small(load=load, engine={"enable_prefix_caching": False}))
    harm = next(harm for harm in decide(end) if harm.kind == "recomputed-after-preemption")
    assert 0 < harm.size < 1
    assert harm.requests


# -------------------------------------------------------------------- the monitor's side


def test_the_recording_ends_with_the_watched_part_and_names_no_fault(tmp_path: Path) -> None:
    episode = OwnEpisode(small("leak.unaccounted", lost=((10.0, 2),)), tmp_path)
    episode.watch()
    found = find_in_recordings([tmp_path])
    records = [*unmarked_records(tmp_path)]
    end = episode.drain()
    assert [*unmarked_records(tmp_path)] == records
    assert "leak.unaccounted" in {one.code for one in found}
    assert end.lost_batches == 2
    sequences = [record.sequence for record in records if isinstance(record, Batch)]
    assert sorted(set(range(sequences[-1])) - set(sequences))
    assert not any(b"leak.unaccounted" in str(record.texts).encode() for record in records if isinstance(record, Batch))


def test_a_finding_is_right_only_if_its_harm_had_begun_and_concerns_whom_it_names() -> None:
    harms = [Harm("lost-at-abort", 10.0, 0.1, frozenset({"r"}), frozenset({1, 2}))]

    def judged(code: str, at_s: float, *blocks: int, requests: tuple[str, ...] = ()) -> str:
        claim = judge_claim(FoundCode(code, at_s, "confirmed", "", list(requests), list(blocks)), harms)
        assert claim.right != bool(claim.wrong_because)
        return claim.wrong_because

    assert judged("leak.unaccounted", 20.0, 1, 2) == ""
    assert judged("leak.rising-floor", 20.0) == ""
    assert "before" in judged("leak.unaccounted", 5.0)
    assert "nothing of the kind" in judged("stuck.grammar", 20.0)
    assert "not concerned" in judged("leak.unaccounted", 20.0, requests=("other",))
    assert judged("leak.unaccounted", 20.0, 1, requests=("other",)) == ""


@pytest.mark.parametrize(("surest_s", "verdict"), [(15.0, "likely"), (8.0, "confirmed")])
def test_a_finding_that_fires_too_early_is_wrong_as_sure_as_it_was_then(surest_s: float, verdict: str) -> None:
    found = FoundCode("leak.unaccounted", 5.0, "confirmed", "", first_verdict="likely", surest_s=surest_s)
    claim = judge_claim(found, [Harm("lost-at-abort", 10.0, 0.1)])
    assert (claim.right, claim.verdict) == (False, verdict)


@pytest.mark.parametrize(
    ("kind", "code"), [("lost-at-abort", "leak.finished-held"), ("runs-without-tokens", "stuck.engine-stalled")]
)
def test_metrics_name_the_code_that_only_the_stream_tells_apart(kind: str, code: str) -> None:
    harms, found = [Harm(kind, 10.0, 0.1)], FoundCode(code, 30.0, "likely", "")
    assert judge_claim(found, harms, "metrics").right
    assert not judge_claim(found, harms, "stream").right
    assert not judge_claim(found, [Harm("grammar-not-taken", 10.0, 0.1)], "metrics").right


def test_copies_of_the_longest_request_take_a_minute_at_most() -> None:
    longest_s = 0.0
    for drawn in map(draw_run, range(400)):
        tokens = max(each.prompt[1] + each.prefix + each.output[1] + each.context for each in drawn.load)
        blocks = -(-tokens // drawn.engine.get("block_size", 16))
        longest_s = max(longest_s, drawn.latencies.copy_s + drawn.latencies.copy_block_s * blocks)
    assert 50 < longest_s <= 60 * (1 + 1e-9)


def test_a_harm_is_found_by_the_code_that_names_it_and_others_are_noted() -> None:
    harms = [Harm("lost-at-abort", 10.0, 0.1)]
    other = FoundCode("leak.rising-floor", 30.0, "confirmed", "")
    (seen,) = seen_harms(harms, [other], 100.0)
    assert (seen.code, seen.found_s, seen.also, seen.left_s) == ("leak.unaccounted", None, ["leak.rising-floor"], 90.0)


# -------------------------------------------------------------------- the figures


def outcome(number: int, *found: FoundCode, healthy: bool = False) -> Trial:
    trial = Trial(number, 0, [] if healthy else ["leak.unaccounted"])
    waste = [] if healthy else [{"kind": "freed-by-lease", "first_s": 5.0, "last_s": 6.0, "amount": 3.0}]
    end = {"watched_s": 3600, "drained_s": 9, "busy_s": 1800, "steps": 100, "short_steps": 40, "usable_blocks": 100}
    end |= {"asked": 9, "tokens_computed": 10, "request_s": 1, "observed": waste}
    note_outcome(trial, [msgspec.convert(end, EpisodeEnd)], {"stream": list(found), "metrics": []})
    return trial


def test_misses_and_false_findings_cost_recall_and_hours() -> None:
    right = FoundCode("leak.lease-burst", 15.0, "confirmed", "")
    wrong = FoundCode("stuck.grammar", 15.0, "likely", "")
    trials = [outcome(0, right), outcome(1), outcome(2, wrong, healthy=True), outcome(3, healthy=True)]
    accuracy = accuracy_of([*trials, Trial(4, 0, error="it broke")])
    (stream, _) = accuracy.recalls
    assert (stream.code, stream.found, stream.trials, stream.median_s) == ("leak.lease-burst", 1, 2, 10.0)
    verdicts = {(each.source, each.verdict): (each.right, each.findings) for each in accuracy.verdicts}
    assert verdicts["stream", "confirmed"] == (1, 1)
    assert verdicts["stream", "likely"] == (0, 1)
    every, grammar, *_ = accuracy.false_rates
    assert (every.findings, every.hours, every.per_hour) == (1, 1.0, 1.0)
    assert (grammar.code, grammar.trials) == ("stuck.grammar", [2])
    assert (accuracy.failed, accuracy.healthy_trials, accuracy.wrong_trials) == (1, 2, [2])
    assert accuracy.reach == {"leak.lease-burst": ["stream"]}
    out = io.StringIO()
    show_accuracy(accuracy, Console(file=out, width=160))
    assert "1 of 2" in out.getvalue()
    assert "| stream | likely | 0 of 1 | 0.000 |" in accuracy_page(accuracy, "here")


# -------------------------------------------------------------------- the command


@pytest.mark.slow
def test_runs_are_kept_resumed_written_and_explained(tmp_path: Path) -> None:
    kept, written = tmp_path / "kept", tmp_path / "written" / "page.md"
    flags = ["--first", str(CHEAP_RUN), "--runs", "1", "--jobs", "1", "--resume", str(kept), "--write", str(written)]
    subprocess.run([*INCIDENTS_COMMAND, *flags], check=True, capture_output=True)
    (line,) = (kept / "trials.jsonl").read_text().splitlines()
    with (kept / "trials.jsonl").open("a") as file:
        file.write('{"number": 8, "seed"')  # the process was killed here
    subprocess.run([*INCIDENTS_COMMAND, *flags], check=True, capture_output=True)
    assert [each for each in (kept / "trials.jsonl").read_text().splitlines() if each == line] == [line]
    assert json.loads(written.with_suffix(".json").read_bytes())["trials"] == 1
    flags = ["--explain", str(CHEAP_RUN), "--keep", str(tmp_path)]
    explained = subprocess.run([*INCIDENTS_COMMAND, *flags], capture_output=True, text=True)
    assert "what happened:" in explained.stdout
    assert explained.returncode == ("is wrong" in explained.stdout)
    assert any((tmp_path / f"run {CHEAP_RUN}").iterdir())


@pytest.mark.slow
def test_healthy_runs_are_kept_apart_from_others_of_the_same_seed(tmp_path: Path) -> None:
    flags = ["--first", str(CHEAP_RUN), "--runs", "1", "--jobs", "1", "--resume", str(tmp_path)]
    for also in (["--healthy"], [], ["--healthy"]):
        subprocess.run([*INCIDENTS_COMMAND, *flags, *also], check=True, capture_output=True)
    healthy, other = map(json.loads, (tmp_path / "trials.jsonl").read_text().splitlines())
    assert healthy["only_healthy"]
    assert healthy["faults"] == []
    assert healthy["watched_s"] >= 900 > other["watched_s"]


@pytest.mark.slow
def test_each_fault_has_its_turn_and_its_runs_are_kept_apart(tmp_path: Path) -> None:
    fault = fault_in_turn(CHEAP_RUN)
    flags = ["--per-fault", "1", "--fault", fault, "--jobs", "1", "--seed", "5", "--run-seconds", "0.01"]
    written = tmp_path / "page.md"
    command = [*INCIDENTS_COMMAND, *flags, "--resume", str(tmp_path), "--write", str(written)]
    subprocess.run(command, check=True, capture_output=True)
    (trial,) = read_trials(tmp_path, 5, "own", "faults").values()
    assert trial.number == FAULT_CODES.index(fault)
    assert read_trials(tmp_path, 5, "own") == {}
    assert "Each fault was drawn equally often" in written.read_text()
    assert f"--per-fault 1 --seed 5 --fault {fault}" in written.read_text()


def test_a_run_in_turn_has_one_fault(tmp_path: Path) -> None:
    assert [fault_in_turn(number) for number in range(len(FAULT_CODES))] == sorted(PLACES)
    for number in (3, 3 + len(FAULT_CODES)):
        episode = own_episode(number, 5, tmp_path / str(number), "faults")
        assert episode.draw.codes == (FAULT_CODES[3],)
        episode.engine.close()


def test_a_page_of_mixed_runs_claims_no_turns() -> None:
    assert "equally often" not in accuracy_page(accuracy_of([outcome(0)]), "here")


def test_the_command_refuses_no_runs_and_unknown_engines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--runs", "0"]) == 2
    assert "--runs 0: at least 1" in capsys.readouterr().err
    assert main(["--per-fault", "-1"]) == 2
    assert "--per-fault -1: at least 1" in capsys.readouterr().err
    assert main(["--fault", "leak.unaccounted"]) == 2
    assert "--fault leak.unaccounted needs --per-fault N" in capsys.readouterr().err
    assert main(["--per-fault", "1", "--healthy"]) == 2
    assert "exclude each other" in capsys.readouterr().err
    assert main(["--per-fault", "1", "--fault", "none"]) == 2
    assert "--fault none: there are collapse." in capsys.readouterr().err
    assert main(["--engine", "none"]) == 2
    assert "--engine none: there are own" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sample_of_drawn_runs(tmp_path: Path) -> None:
    subprocess.run([*INCIDENTS_COMMAND, "--runs", "12", "--resume", str(tmp_path)], check=True)
    trials = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert [trial["error"] for trial in trials] == [""] * 12
