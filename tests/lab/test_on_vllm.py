"""The lab on vLLM's scheduler: its draws, its table of faults and, with a Python that has vLLM, its episodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvscope.engine.bench.clock import VirtualClock
from kvscope.lab.cross_check.checked_runs import RunToCheck
from kvscope.lab.cross_check.truth_check import RANDOM_SEED, check_run, disagreements
from kvscope.lab.on_vllm.fault_table import FAULT_TABLE, release_tuple
from kvscope.lab.on_vllm.fork_server import EpisodeOrder
from kvscope.lab.on_vllm.vllm_draws import MOST_VLLM_BLOCKS, draw_vllm_run, faults_of, vllm_fault_in_turn
from kvscope.lab.on_vllm.vllm_episode import VllmEpisode
from kvscope.lab.on_vllm.vllm_faults import Breaker
from kvscope.lab.on_vllm.vllm_outside import OtherEngine
from kvscope.lab.on_vllm.vllm_witness import VllmWitness
from kvscope.lab.on_vllm.vllm_worker import VllmWorker, shared_worker
from kvscope.lab.truth.claims import CLAIMS
from kvscope.lab.truth.what_happened import decide
from kvscope.lab.vllm_python import needs_vllm
from kvscope.monitor.contract import journal
from kvscope.monitor.contract.wire import decode
from kvscope.monitor.ledger.durations import StepWork
from kvscope.monitor.ledger.engine_ledger import EngineLedger

BY_LOAD_ALONE = {
    "larger-than-pool",
    "preempts-itself",
    "chunks-admitted-without-room",
    "heavy-head",
    "cache-flushed",
    "alike-requests",
    "pool-too-small",
}
RELEASES_DRAWN = ("0.10.2", "0.18.0", "0.32.0", "0.33.0")


def test_the_same_number_draws_the_same_episode() -> None:
    assert draw_vllm_run(17, 3, "0.32.0") == draw_vllm_run(17, 3, "0.32.0")
    assert draw_vllm_run(17, 3, "0.32.0") != draw_vllm_run(17, 4, "0.32.0")


def test_each_fault_of_a_release_has_its_turn() -> None:
    of_release = faults_of((0, 10, 2))
    assert [vllm_fault_in_turn(number, "0.10.2") for number in range(len(of_release))] == [
        one.name for one in of_release
    ]
    assert vllm_fault_in_turn(len(of_release), "0.10.2") == of_release[0].name
    assert len(of_release) < len(FAULT_TABLE)


@pytest.mark.parametrize("asleep", [True, False])
def test_a_lease_that_ends_while_the_engine_sleeps_is_noted_as_such(asleep: bool) -> None:
    """The engine frees the blocks only when something wakes it."""
    draw = replace(draw_vllm_run(4, 1, "0.32.0", "consumer-gone-until-lease"), lease_s=20.0)
    clock, noted = VirtualClock(), []
    other = OtherEngine(draw, clock, lambda kind, name: noted.append((kind, name)))
    other.never_sent = lambda _request: True
    other.is_asleep = lambda: asleep
    other.keeping_begins(SimpleNamespace(request_id="r"), 3)
    clock.sleep(19)
    assert noted == []
    clock.sleep(2)
    assert noted == [("freed-by-lease", "r"), ("sent-while-asleep", "r")][: 1 + asleep]


def test_half_of_the_faults_are_public_reports_of_vllm() -> None:
    reported = [fault for fault in FAULT_TABLE.values() if "vllm-project/vllm/" in fault.report]
    assert len(reported) >= len(FAULT_TABLE) / 2


def test_each_fault_is_a_patch_or_a_load() -> None:
    patches = {name for name in FAULT_TABLE if hasattr(Breaker, name.replace("-", "_"))}
    assert patches | BY_LOAD_ALONE == FAULT_TABLE.keys()
    assert not patches & BY_LOAD_ALONE


@pytest.mark.parametrize("release", RELEASES_DRAWN)
def test_drawn_engines_are_those_that_vllm_starts(release: str) -> None:
    for number in range(60):
        draw = draw_vllm_run(number, 5, release)
        engine = draw.base.engine
        pool = (engine["num_gpu_blocks_override"] - 1) * engine["block_size"]
        assert engine["num_gpu_blocks_override"] <= MOST_VLLM_BLOCKS
        assert draw.base.max_model_len <= pool or FAULT_TABLE[draw.fault].beyond_pool
        assert engine["max_num_batched_tokens"] >= engine["max_num_seqs"]
        assert not (draw.drafts and engine["async_scheduling"])
        assert not draw.fault or FAULT_TABLE[draw.fault] in faults_of(release_tuple(release))


def test_faults_of_a_mechanism_are_drawn_only_where_the_release_has_it() -> None:
    assert "blocks-behind-fence" not in {fault.name for fault in faults_of((0, 18, 0))}
    assert "blocks-behind-fence" in {fault.name for fault in faults_of((0, 32, 0))}


def test_faults_that_are_not_mixed_leave_the_mixed_runs_as_they_were() -> None:
    drawn = {draw_vllm_run(number, 5, "0.32.0").fault for number in range(120)} - {""}
    assert len(drawn) > 15
    assert all(FAULT_TABLE[name].mixed for name in drawn)
    assert {
        "preempts-behind-fence",
        "loads-hold-the-pool",
        "freed-in-a-full-pool",
        "consumer-stops-renewing",
        "random-mutation",
    } == {f.name for f in FAULT_TABLE.values() if not f.mixed}


EXPECTED = {
    "load-never-ends": "fetch-never-ends",
    "grammar-never-compiled": "grammar-not-taken",
    "step-hangs": "engine-hangs",
    "counter-drifts": "counters-differ",
    "abort-skips-free": "lost-at-abort",
    "ends-leave-a-block": "lost-at-end",
    "lost-from-queue": "in-no-queue",
    "freed-twice": "freed-twice",
    "pins-never-dropped": "pinned-for-good",
    "preempts-itself": "preempts-itself",
    "loads-hold-the-pool": "waits-with-blocks",
    "preempts-behind-fence": "preempted-behind-fence",
    "freed-in-a-full-pool": "handed-out-in-use",
}
"""Faults that cannot fail to show, and the harm that the truth finds."""
WITH_ABORTS = 7
"""A run whose clients leave."""


def quick_number(fault: str) -> int:
    """Return the run of the smallest load among a few."""

    def size(number: int) -> int:
        base = draw_vllm_run(number, 99, "0.32.0", fault).base
        pool = base.engine["num_gpu_blocks_override"] * base.engine["block_size"]
        return int(max(pool, 20 * base.steps))

    return WITH_ABORTS if fault == "abort-skips-free" else min(range(12), key=size)


@needs_vllm
@pytest.mark.slow
@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("fault", sorted(EXPECTED))
def test_the_truth_on_vllms_scheduler(fault: str, tmp_path: Path) -> None:
    episode = VllmEpisode(quick_number(fault), 99, tmp_path, fault)
    episode.watch()
    kinds = {harm.kind for harm in decide(episode.drain())}
    assert EXPECTED[fault] in kinds
    assert kinds <= CLAIMS.keys()


FREED_WHILE_HELD, SENDS_WHILE_AWAKE = 6, 118
"""Runs of seed 141421: a request keeps what was freed until the watched part is over, and a transfer ends while an idle
engine has an empty pass in flight.
"""


@needs_vllm
@pytest.mark.slow
@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(
    ("number", "kinds"),
    [
        (FREED_WHILE_HELD, ["freed-twice"]),
        (SENDS_WHILE_AWAKE, []),
    ],
)
def test_harms_that_only_the_drain_brings_to_light(number: int, kinds: list[str], tmp_path: Path) -> None:
    episode = VllmEpisode(number, 141421, tmp_path)
    episode.watch()
    assert [harm.kind for harm in decide(episode.drain())] == kinds


BEGINS_S = {20: ("lost-from-queue", "in-no-queue", 377), 131: ("counter-drifts", "counters-differ", 315)}
"""Runs of seed 20261125 with their faults. A request is dropped and a counter set in the middle of a long step, whose
end is not when that began.
"""


@needs_vllm
@pytest.mark.slow
@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("number", BEGINS_S)
def test_a_harm_begins_when_the_engine_breaks(number: int, tmp_path: Path) -> None:
    fault, kind, since_s = BEGINS_S[number]
    episode = VllmEpisode(number, 20261125, tmp_path, fault)
    episode.watch()
    assert next(harm.since_s for harm in decide(episode.drain()) if harm.kind == kind) == pytest.approx(since_s, abs=1)


BOTH_HAVE_THE_BLOCK = 259
"""A run of seed 20261125: a block that was freed too often is given to p-1 while p-0 has it."""


@needs_vllm
@pytest.mark.slow
@pytest.mark.usefixtures("worker")
def test_a_block_of_two_requests_concerns_both(tmp_path: Path) -> None:
    episode = VllmEpisode(BOTH_HAVE_THE_BLOCK, 20261125, tmp_path, "freed-twice")
    episode.watch()
    harm = next(harm for harm in decide(episode.drain()) if harm.kind == "handed-out-in-use")
    assert harm.requests == {"p-0", "p-1"}


LOST_BEHIND_FENCES = 28
"""A run of seed 20261202: until 193 s preemptions free their blocks, and only those that are lost are fenced."""


@needs_vllm
@pytest.mark.slow
@pytest.mark.usefixtures("worker")
def test_a_preemption_beside_fences_that_never_end_frees_its_blocks(tmp_path: Path) -> None:
    episode = VllmEpisode(LOST_BEHIND_FENCES, 20261202, tmp_path, "blocks-behind-fence")
    episode.watch()
    began_s = {harm.kind: harm.since_s for harm in decide(episode.drain())}
    assert began_s["lost-behind-fence"] == pytest.approx(29.6, abs=1)
    assert began_s["preempted-behind-fence"] == pytest.approx(193.8, abs=1)


REFUSED_EARLIER = 32
"""A run of seed 20261207: the empty pool had no room for p-1, and at the end vLLM tries others first."""


@needs_vllm
@pytest.mark.slow
@pytest.mark.usefixtures("worker")
def test_a_request_that_the_empty_pool_was_too_small_for_never_fits(tmp_path: Path) -> None:
    episode = VllmEpisode(REFUSED_EARLIER, 20261207, tmp_path, "larger-than-pool")
    episode.watch()
    harms = {harm.kind: harm for harm in decide(episode.drain())}
    assert "p-1" in harms["needs-more-than-the-pool"].requests
    assert "p-2" in harms["waits-behind-another"].requests


PROMPTS_AHEAD = 51
"""A run of seed 20261212 whose steps are launched ahead, long enough that the probe reports requests in each, and read
much context.
"""


@needs_vllm
@pytest.mark.slow
@pytest.mark.usefixtures("worker")
def test_the_model_of_its_steps_is_the_one_that_the_draw_knows(tmp_path: Path) -> None:
    """A prompt is context to the steps that follow, before the probe reports that it is computed."""
    fault = "freed-in-a-full-pool"
    VllmEpisode(PROMPTS_AHEAD, 20261212, tmp_path, fault).watch()
    ledger = EngineLedger("vllm")
    for payload in journal.read(tmp_path):
        frame = decode(payload)
        assert frame is not None
        ledger.apply(frame)
    model = ledger.step_model()
    assert model is not None
    true = draw_vllm_run(PROMPTS_AHEAD, 20261212, shared_worker().release, fault).base.step_time
    for running, context in ((3, 5000), (5, 8300)):
        seconds = true.base_s + true.per_kv_token_s * context
        assert model.expected_s(StepWork(running, context, 0)) == pytest.approx(seconds, rel=0.1)
    assert model.jitter < 1.25 * true.jitter


@pytest.mark.parametrize(("adapter", "slots", "fits"), [(3, 2, False), (3, 3, True), (2, 2, True), (0, 2, True)])
def test_only_one_whose_adapter_has_a_slot_is_held_back_by_the_head(adapter: int, slots: int, fits: bool) -> None:
    running = [asking_for(1), asking_for(2), asking_for(0)]
    witness = SimpleNamespace(
        vllm=SimpleNamespace(running=running), engine=SimpleNamespace(draw=SimpleNamespace(loras=slots))
    )
    assert VllmWitness._has_slot(witness, asking_for(adapter)) == fits  # type: ignore[arg-type]


def asking_for(adapter: int) -> SimpleNamespace:
    """A request for this LoRA adapter, or for none if it is 0."""
    return SimpleNamespace(lora_request=SimpleNamespace(lora_int_id=adapter) if adapter else None)


LAST_TOKEN_IN_FLIGHT, TWO_GROUPS_IN_QUEUE = 5889, 88349
"""Runs on which the truth was wrong: a request whose last token is in flight counted as starved, and with two KV cache
groups the truth saw no queue for blocks.
"""


@needs_vllm
@pytest.mark.slow
@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("number", [LAST_TOKEN_IN_FLIGHT, TWO_GROUPS_IN_QUEUE])
def test_the_events_bear_the_truth_out_where_it_was_wrong(number: int, tmp_path: Path) -> None:
    assert [*disagreements(check_run(RunToCheck("vllm", number, RANDOM_SEED), tmp_path))] == []


@needs_vllm
@pytest.mark.slow
def test_an_episode_that_cannot_be_run_says_why(worker: VllmWorker, tmp_path: Path) -> None:
    order = EpisodeOrder(1, 1, worker.release, str(tmp_path), str(tmp_path), fault="no such fault")
    assert "KeyError" in worker.run(order).error
