"""The verdicts of test_vllm_bare_verdicts on vLLM's LLMEngine, whose executor and model share its process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvscope.monitor.events.kinds import EngineMode
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


@incident("pause_new")
def test_new_requests_that_a_pause_holds_back_are_no_finding(engine: Incident) -> None:
    engine.until_ledger("paused_with_two")
    engine.go_on(15)
    assert not engine.firing()
