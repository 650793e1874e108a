"""The verdicts of test_vllm_bare_verdicts on vLLM's LLMEngine, whose executor and model share its process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvscope.lab.vllm_python import needs_vllm
from kvscope.monitor.contract.kinds import Cause, EngineMode
from kvscope.monitor.detectors.detector import Settings
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.records import RequestState
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.metrics_page import MetricsPage
from tests.probes.forked_vllm import ForkedVllm
from tests.probes.test_vllm_verdicts import HELD, STALLED, OneProcess

pytestmark = needs_vllm

LOST_BLOCKS, NEVER_FITS, TOO_SMALL = "leak.unaccounted", "stuck.never-fits", "sizing.kv-too-small"
INSTANT_COPIES = Settings({"leak.finished-held.unseen_times": 0})
"""The connectors of these incidents would send at once."""
LOCKSTEP = "collapse.lockstep"
SCRAPED_S = 0.5
EARLY_STEPS = 60
"""The slow one is among them."""
NIXL_LEASE_S = 30


class Incident(OneProcess):
    """An incident of tests.probes.one_process_incidents."""

    MODULE = "tests.probes.one_process_incidents"


@pytest.fixture
def engine(forked_vllm: ForkedVllm, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Incident]:
    one = Incident(forked_vllm, tmp_path, request.param)
    try:
        yield one
    finally:
        one.close()
        assert "is off after an error" not in one.log.read_text()


def incident(event: str, tier: pytest.MarkDecorator = pytest.mark.slow) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("engine", [pytest.param(event, marks=tier)], indirect=True)


def long_incident(event: str) -> pytest.MarkDecorator:
    """One that lasts for half a minute or more, which its twin in test_vllm_bare_verdicts spends in virtual time."""
    return incident(event, pytest.mark.prove)


def hit_by(finding: FindingReport) -> dict[str, set[str]]:
    """By code, the requests that the finding's effects hit."""
    return {effect.code: set(effect.requests) for effect in finding.effects}


def waiting(ledger: EngineLedger) -> list[RequestState]:
    return [record for record in ledger.state.requests.values() if record.is_waiting]


def has_ended(ledger: EngineLedger, name: str) -> bool:
    return name in {record.id for record in ledger.ended}


# ---------------------------------------------------------------- requests that a leak starves


@incident("lost_blocks")
def test_requests_that_wait_for_lost_blocks_are_effects_of_the_leak(engine: Incident) -> None:
    engine.wait_for(lambda: LOST_BLOCKS in engine.firing() and engine.firing()[LOST_BLOCKS].effects)
    finding = engine.firing()[LOST_BLOCKS]
    assert set(finding.culprits.requests) == {"forgotten-0", "forgotten-1"}
    assert hit_by(finding) == {NEVER_FITS: {"big", "small"}}
    engine.go_on(8)
    assert engine.firing().keys() == engine.fired.keys() == {LOST_BLOCKS}


@long_incident("lost_blocks_and_room")
def test_requests_that_fit_beside_lost_blocks_are_not_starved_by_them(engine: Incident) -> None:
    engine.until(LOST_BLOCKS)
    ended = engine.ready_ledger.state.totals.finished.copy()
    engine.until_ledger(lambda ledger: ledger.state.totals.finished != ended)
    engine.go_on(10)
    assert engine.fired.keys() == {LOST_BLOCKS}
    assert not hit_by(engine.firing()[LOST_BLOCKS])


@incident("dropped_table")
def test_a_table_that_a_preemption_drops_is_one_leak_of_exactly_its_blocks(engine: Incident) -> None:
    engine.wait_for(lambda: LOST_BLOCKS in engine.firing() and engine.firing()[LOST_BLOCKS].verdict == "confirmed")
    (line,) = [line for line in engine.log.read_text().splitlines() if line.startswith("dropped ")]
    _, request_id, *blocks = line.split()
    engine.until_ledger(lambda ledger: any(request_id.startswith(record.id) for record in ledger.ended))
    engine.go_on(5)
    finding = engine.firing()[LOST_BLOCKS]
    assert len(finding.culprits.requests) == 1
    assert request_id.startswith(finding.culprits.requests[0])
    assert finding.culprits.blocks == sorted(map(int, blocks))
    assert not {code for code in engine.fired if code.startswith("corrupt.")}
    assert engine.ready_ledger.balance().holds
    assert not engine.ready_ledger.anomalies


# ---------------------------------------------------------------- pauses, slow steps, heartbeats


@incident("pause_new")
def test_new_requests_that_a_pause_holds_back_are_no_finding(engine: Incident) -> None:
    ledger = engine.until_ledger(lambda ledger: len(waiting(ledger)) == 2)
    assert ledger.state.mode == EngineMode.PAUSED_NEW
    engine.go_on(15)
    assert not engine.fired


@long_incident("slow_early_step")
def test_an_early_step_that_is_slow_is_no_stall_in_one_process(engine: Incident) -> None:
    engine.until_ledger(lambda ledger: ledger.state.last_step > EARLY_STEPS)
    assert not engine.fired


@incident("late_heartbeats")
def test_a_second_without_a_pass_is_no_stall_in_one_process(engine: Incident) -> None:
    engine.until(HELD)
    engine.go_on(20)
    assert STALLED not in engine.fired
    (starved,) = engine.watch.findings("suppressed")
    assert (starved.code, starved.culprits.requests) == (NEVER_FITS, ["big"])


# ---------------------------------------------------------------- a pool that is too small


@incident("crowd_beside_leak")
def test_preemptions_of_a_leak_are_not_blamed_on_the_pool_nor_on_the_next_engine(engine: Incident) -> None:
    engine.until(HELD)
    engine.let_go_on()
    ledger = engine.until_ledger(lambda ledger: len(ledger.preempted) > 6)
    engine.wait_for(lambda: TOO_SMALL in hit_by(engine.firing()[HELD]))
    assert engine.fired.keys() == {HELD}
    epoch = ledger.epoch
    engine.restart("few_at_a_time")
    ledger = engine.until_ledger(lambda ledger: ledger.epoch != epoch and ledger.state.last_step > 0)
    engine.wait_for(lambda: not engine.firing())  # a killed engine is stalled until the next one is there
    engine.go_on(15)
    assert not engine.firing()
    assert engine.fired.keys() <= {HELD, STALLED}


@long_incident("crowd_alone")
def test_a_pool_that_is_too_small_is_found_until_the_engine_is_another(engine: Incident) -> None:
    finding = engine.until(TOO_SMALL)
    assert finding.verdict == "confirmed"
    epoch = engine.ready_ledger.epoch
    engine.restart("few_at_a_time")
    engine.until_ledger(lambda ledger: ledger.epoch != epoch and ledger.state.last_step > 0)
    engine.wait_for(lambda: TOO_SMALL not in engine.firing())
    engine.go_on(10)
    assert not engine.firing()


# ---------------------------------------------------------------- leases


@incident("lease_shown_nowhere")
def test_blocks_under_a_lease_that_nothing_shows_are_likely_held_until_they_are_taken(engine: Incident) -> None:
    # Enough blocks for a minute are a harm before it is known how long this consumer takes.
    engine.wait_for(lambda: HELD in engine.firing() and engine.firing()[HELD].verdict == "likely")
    finding = engine.firing()[HELD]
    assert "lease" in finding.missing
    assert "restart" not in " ".join(finding.do_now).lower()
    engine.let_go_on()
    engine.wait_for(lambda: not engine.firing())
    assert engine.fired.keys() == {HELD}


@long_incident("nixl_lease_kept")
def test_blocks_within_a_lease_of_the_configuration_are_no_finding_and_beyond_it_they_are(engine: Incident) -> None:
    ledger = engine.until_ledger(lambda ledger: len(ledger.state.deferrals) == 6)
    ended_ns = min(record.finished_ns for record in ledger.state.requests.values() if record.is_finished)
    engine.until(HELD)
    assert engine.fired.keys() == {HELD}
    assert engine.ready_ledger.now_ns - ended_ns > NIXL_LEASE_S * 1e9
    kept = {f"keep-{number}" for number in range(6)}
    engine.wait_for(lambda: set(engine.firing()[HELD].culprits.requests) == kept)
    engine.let_go_on()
    engine.wait_for(lambda: not engine.firing())


# ---------------------------------------------------------------- several KV cache groups


@incident("windows_fit")
def test_a_prompt_that_fits_because_windows_recycle_blocks_is_no_finding_in_one_process(engine: Incident) -> None:
    ledger = engine.until_ledger(lambda ledger: "long-doc" in {record.id for record in waiting(ledger)})
    assert len(ledger.description.groups) == 3
    engine.until_ledger(lambda ledger: has_ended(ledger, "long-doc"))
    assert not engine.fired


# ---------------------------------------------------------------- queues of requests that are ready


@long_incident("full_instance")
def test_what_is_ready_and_waits_for_its_turn_is_no_finding(engine: Incident) -> None:
    def is_full(ledger: EngineLedger) -> bool:
        closed = {record.id for record in waiting(ledger) if record.cause == Cause.MAX_NUM_SEQS}
        return sum(record.is_running for record in ledger.state.requests.values()) == 4 and closed == {"json", "load-0"}

    engine.until_ledger(is_full)
    engine.go_on(35)
    assert not engine.fired


@incident("grammar_hangs")
def test_a_grammar_whose_compiler_hangs_is_found_in_one_process(engine: Incident) -> None:
    assert engine.until("stuck.grammar").culprits.requests == ["json"]
    assert engine.fired.keys() == {"stuck.grammar"}


@incident("promotion_never_comes")
def test_delivered_kv_that_others_overtake_is_found_in_one_process(engine: Incident) -> None:
    assert engine.until("stuck.promotion-starved").culprits.requests == ["load-0"]
    assert engine.fired.keys() == {"stuck.promotion-starved"}


@incident("pins")
def test_pins_of_a_connector_hide_no_leak(engine: Incident) -> None:
    assert engine.until(LOST_BLOCKS).culprits.requests == ["forgotten"]
    engine.go_on(5)
    assert engine.firing().keys() == engine.fired.keys() == {LOST_BLOCKS}
    assert not engine.ready_ledger.losses


@long_incident("adapters_in_use")
def test_a_request_without_an_adapter_slot_waits_for_that_in_one_process(engine: Incident) -> None:
    def waits_for_slot(ledger: EngineLedger) -> bool:
        return [(record.id, record.cause) for record in waiting(ledger)] == [("third", Cause.LORA)]

    ledger = engine.until_ledger(waits_for_slot)
    engine.go_on(35)
    assert waits_for_slot(ledger)
    assert not ledger.state.totals.allocation_failures
    assert not engine.fired


# ---------------------------------------------------------------- lock-step, by the stream and by the metrics page


class Scraped:
    """What the metrics page of that engine shows to a Pipeline of its own."""

    def __init__(self, engine: Incident) -> None:
        self.engine = engine
        self.watch = Pipeline(INSTANT_COPIES)
        self.page = MetricsPage(f"http://127.0.0.1:{engine.metrics_port}/metrics", every_s=SCRAPED_S)

    def look(self) -> bool:
        """Whether lock-step fires."""
        self.watch.feed(self.page.poll(0))
        return LOCKSTEP in {finding.code for finding in self.watch.findings("firing")}


@incident("waves")
def test_waves_are_lock_step_in_the_stream_and_on_the_metrics_page(engine: Incident) -> None:
    scraped = Scraped(engine)
    engine.wait_for(lambda: scraped.look() and LOCKSTEP in engine.firing())
    assert engine.firing()[LOCKSTEP].verdict == "confirmed"
    assert engine.fired.keys() == {LOCKSTEP}


@long_incident("by_priority")
def test_a_healthy_load_by_priority_is_no_lock_step_in_one_process(engine: Incident) -> None:
    scraped = Scraped(engine)
    engine.until_ledger(lambda ledger: ledger.state.last_step > 100)
    until = engine.ready_ledger.now_ns + 60e9

    def is_over() -> bool:
        assert not scraped.look()
        return engine.ready_ledger.now_ns >= until

    engine.wait_for(is_over)
    assert scraped.page.scrapes - scraped.page.failed_scrapes > 20
    assert not engine.fired
