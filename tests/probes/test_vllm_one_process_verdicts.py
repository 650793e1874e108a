"""The verdicts of test_vllm_bare_verdicts on vLLM's LLMEngine, whose executor and model share its process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvscope.monitor.events.kinds import Cause, EngineMode
from kvscope.monitor.findings import FindingReport
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from tests.probes.test_vllm_verdicts import PATIENCE_S, OneProcess
from tests.probes.vllm_python import needs_vllm

pytestmark = [needs_vllm, pytest.mark.slow]


class Incident(OneProcess):
    """An incident of tests.probes.one_process_incidents."""

    MODULE = "tests.probes.one_process_incidents"

    def until_ledger(self, condition: str) -> EngineLedger:
        """Feed the Pipeline until the ledger shows what is named."""
        deadline = time.monotonic() + PATIENCE_S
        while self.ledger is None or not getattr(self, condition)(self.ledger):
            assert time.monotonic() < deadline, (condition, self.log.read_text()[-3000:])
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            self.look()
        return self.ledger

    @staticmethod
    def paused_with_two(ledger: EngineLedger) -> bool:
        waiting = [record for record in ledger.state.requests.values() if record.is_waiting]
        return ledger.state.mode == EngineMode.PAUSED_NEW and len(waiting) == 2

    @staticmethod
    def past_the_slow_step(ledger: EngineLedger) -> bool:
        return ledger.state.last_step > 60

    @staticmethod
    def full_with_two_ready(ledger: EngineLedger) -> bool:
        records = ledger.state.requests.values()
        closed = [record for record in records if record.is_waiting and record.cause == Cause.MAX_NUM_SEQS]
        return sum(record.is_running for record in records) == 4 and len(closed) == 2


@pytest.fixture
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Incident]:
    one = Incident(tmp_path, request.param)
    try:
        yield one
    finally:
        one.close()
        assert "is off after an error" not in one.log.read_text()


def incident(event: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("engine", [event], indirect=True)


def hit_by(finding: FindingReport) -> dict[str, set[str]]:
    """By code, the requests that the finding's effects hit."""
    return {effect.code: set(effect.requests) for effect in finding.effects}


@incident("lost_blocks")
def test_requests_that_wait_for_lost_blocks_are_effects_of_the_leak(engine: Incident) -> None:
    engine.until("leak.unaccounted")
    deadline = time.monotonic() + 60
    while not engine.firing()["leak.unaccounted"].effects and time.monotonic() < deadline:
        engine.look()
    finding = engine.firing()["leak.unaccounted"]
    assert set(finding.culprits.requests) == {"forgotten-0", "forgotten-1"}
    assert hit_by(finding) == {"stuck.never-fits": {"big", "small"}}
    engine.go_on(8)
    assert engine.firing().keys() == {"leak.unaccounted"}


@incident("pause_new")
def test_new_requests_that_a_pause_holds_back_are_no_finding(engine: Incident) -> None:
    engine.until_ledger("paused_with_two")
    engine.go_on(15)
    assert not engine.firing()


@incident("slow_early_step")
def test_an_early_step_that_is_slow_is_no_stall_in_one_process(engine: Incident) -> None:
    engine.until_ledger("past_the_slow_step")
    assert not engine.firing()
    assert not engine.watch.findings("resolved")


@incident("late_heartbeats")
def test_a_second_without_a_pass_is_no_stall_in_one_process(engine: Incident) -> None:
    engine.until("leak.finished-held")
    for _ in range(5):
        engine.go_on(4)
        assert "stuck.engine-stalled" not in engine.firing()
    (starved,) = engine.watch.findings("suppressed")
    assert (starved.code, starved.culprits.requests) == ("stuck.never-fits", ["big"])


@incident("full_instance")
def test_what_is_ready_and_waits_for_its_turn_is_no_finding(engine: Incident) -> None:
    engine.until_ledger("full_with_two_ready")
    engine.go_on(35)
    assert not engine.firing()


@incident("grammar_hangs")
def test_a_grammar_whose_compiler_hangs_is_found_in_one_process(engine: Incident) -> None:
    assert engine.until("stuck.grammar").culprits.requests == ["json"]


@incident("pins")
def test_pins_of_a_connector_hide_no_leak(engine: Incident) -> None:
    finding = engine.until("leak.unaccounted")
    assert finding.culprits.requests == ["forgotten"]
    engine.go_on(5)
    assert "leak.unaccounted" in engine.firing()
    assert engine.ledger is not None
    assert not engine.ledger.losses
