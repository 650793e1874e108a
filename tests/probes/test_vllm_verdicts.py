"""Verdicts on a real vLLM whose engine core, executor and model share one process, as on one GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvscope.lab.vllm_python import free_ports, needs_vllm, save_model
from kvscope.monitor.contract.kinds import EngineMode
from kvscope.monitor.detectors.detector import Settings
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.ledger.balance import balance_of
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.probes.stall_capture import stack_file
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.live_stream import LiveStream
from tests.probes.forked_vllm import ForkedVllm
from tests.probes.one_process_engine import GO_ON, METRICS_PORT

pytestmark = [needs_vllm, pytest.mark.slow]

INSTANT_COPIES = Settings({"leak.finished-held.unseen_times": 0})
"""The connectors of these incidents would send at once."""
PATIENCE_S = 240
HELD, STALLED, LOST = "leak.finished-held", "stuck.engine-stalled", "stuck.lost-request"


class OneProcess:
    """That engine, in which one thing happens, under a Pipeline. How long something lasts is counted on the engine's
    clock: this process may not be scheduled for seconds.
    """

    MODULE = "tests.probes.one_process_engine"

    def __init__(self, forked_vllm: ForkedVllm, directory: Path, event: str) -> None:
        self.forked_vllm = forked_vllm
        self.events = f"tcp://127.0.0.1:{free_ports()}"
        self.metrics_port = free_ports()
        self.directory = directory
        self.log = directory / "engine.log"
        self.fired: dict[str, FindingReport] = {}
        """By code, what has ever fired, as it was at first; info left out."""
        self.stream = LiveStream(self.events)
        self.watch = Pipeline(INSTANT_COPIES)
        save_model(directory / "model")
        self.start(event)

    def start(self, event: str) -> None:
        self.process = self.forked_vllm.start(
            self.MODULE,
            str(self.directory / "model"),
            event,
            log=self.log,
            KVSCOPE_EVENTS=self.events,
            **{METRICS_PORT: str(self.metrics_port)},
        )

    def restart(self, event: str) -> None:
        """Kill the engine, and start another one at the same address."""
        self.process.kill()
        self.process.wait()
        self.start(event)

    def let_go_on(self) -> None:
        """Let an incident go on that waits for that."""
        (self.directory / GO_ON).touch()

    @property
    def ledger(self) -> EngineLedger | None:
        return next(iter(self.watch.fleet.engines.values()), None)

    @property
    def ready_ledger(self) -> EngineLedger:
        ledger = self.ledger
        assert ledger is not None
        return ledger

    def look(self) -> None:
        self.watch.feed([received.frame for received in self.stream.receive(0.1)])
        for transition in self.watch.take_transitions():
            report = transition.finding.report()
            if transition.to == "firing" and report.severity != "info":
                self.fired.setdefault(report.code, report)

    def firing(self) -> dict[str, FindingReport]:
        return {finding.code: finding for finding in self.watch.findings("firing") if finding.severity != "info"}

    def wait_for(self, seen: Callable[[], object]) -> None:
        """Feed the Pipeline until that is so."""
        deadline = time.monotonic() + PATIENCE_S
        while not seen():
            assert time.monotonic() < deadline, (self.firing(), self.log.read_text()[-3000:])
            assert self.process.is_running(), self.log.read_text()[-3000:]
            self.look()

    def until(self, code: str) -> FindingReport:
        """Feed the Pipeline until that fires."""
        self.wait_for(lambda: code in self.firing())
        return self.firing()[code]

    def until_ledger(self, shows: Callable[[EngineLedger], object]) -> EngineLedger:
        """Feed the Pipeline until the ledger shows that."""
        self.wait_for(lambda: self.ledger is not None and self.ledger.ready and shows(self.ledger))
        return self.ready_ledger

    def go_on(self, seconds: float) -> None:
        """Feed the Pipeline for so long, by the engine's clock."""
        until = self.ready_ledger.now_ns + seconds * 1e9
        self.wait_for(lambda: self.ready_ledger.now_ns >= until)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.stream.close()
        stack_file(self.events).unlink(missing_ok=True)


@pytest.fixture
def engine(forked_vllm: ForkedVllm, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[OneProcess]:
    one = OneProcess(forked_vllm, tmp_path, request.param)
    try:
        yield one
    finally:
        one.close()
        assert "is off after an error" not in one.log.read_text(), os.linesep


def happens(event: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("engine", [event], indirect=True)


@happens("leak")
def test_blocks_lost_to_a_connector_are_found_and_stay_found_while_a_request_waits(engine: OneProcess) -> None:
    finding = engine.until(HELD)
    assert finding.verdict == "likely"  # the connector shows no lease
    kept = {f"keep-{number}" for number in range(6)}
    engine.wait_for(lambda: set(engine.firing()[HELD].culprits.requests) == kept)  # the last ones came later
    engine.go_on(12)
    assert engine.firing()[HELD].id == finding.id
    assert not engine.watch.findings("resolved")
    ledger = engine.ready_ledger
    assert ledger.unpolled_s() < 3
    head = ledger.head()
    assert head is not None
    assert (head.id, head.blocks_needed > head.blocks_free_then) == ("big", True)
    assert balance_of(ledger.state).holds


@happens("leak_then_idle")
def test_an_idle_engine_that_asks_its_connector_is_not_said_not_to(engine: OneProcess) -> None:
    finding = engine.until(HELD)
    engine.go_on(15)
    assert engine.firing().keys() == {HELD}
    assert engine.firing()[HELD].id == finding.id


@happens("pause")
def test_a_paused_engine_is_not_stalled(engine: OneProcess) -> None:
    ledger = engine.until_ledger(lambda ledger: ledger.state.mode == EngineMode.PAUSED_ALL)
    engine.go_on(15)
    assert STALLED not in engine.fired
    assert any(record.is_running for record in ledger.state.requests.values())


@happens("lose")
def test_a_request_lost_from_the_queues_is_named_while_others_are_served(engine: OneProcess) -> None:
    finding = engine.until(LOST)
    assert (finding.verdict, finding.culprits.requests) == ("confirmed", ["lost"])
    assert finding.culprits.blocks
    assert STALLED not in engine.firing()


@happens("free_twice")
def test_a_block_freed_twice_by_the_scheduler_is_corruption_and_no_loss(engine: OneProcess) -> None:
    finding = engine.until("corrupt.double-free")
    assert finding.verdict == "confirmed"
    assert len(finding.culprits.blocks) == 2
    assert not engine.ready_ledger.losses


@pytest.mark.parametrize(
    ("engine", "layer", "function"),
    [
        ("stall_in_model", "MODEL", "<lambda>"),
        ("stall_in_connector", "CONNECTOR", "get_num_new_matched_tokens"),
        ("stall_in_scheduler", "SCHEDULER", "<lambda>"),
        ("stall_with_the_gil", "SCHEDULER", "<lambda>"),
    ],
    indirect=["engine"],
)
def test_a_stall_names_the_layer_in_which_the_engine_stands(engine: OneProcess, layer: str, function: str) -> None:
    engine.until(STALLED)
    evidence: dict[str, object] = {}

    def is_located() -> bool:
        nonlocal evidence
        evidence = {each.name: each.value for each in reversed(engine.firing()[STALLED].evidence)}
        return "stalled_layer" in evidence

    engine.wait_for(is_located)
    assert evidence["stalled_layer"] == layer
    assert str(evidence["stack_frame"]).startswith(f"{function} (")
