"""What is found of an incident rests on events: each figure of the stream's has the position of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscope.lab.lab_run import frames, inject_fault
from kvscope.lab.scenarios import INCIDENTS
from kvscope.monitor.contract.kinds import Kind
from kvscope.monitor.contract.wire import Run
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.ledger.event_history import BLOCK_KINDS
from kvscope.monitor.questions.pipeline import Pipeline
from tests.lab.test_lab import SMALL_SAMPLE, scenario

OF_NOBODY = frozenset(
    (
        Kind.STARTED,
        Kind.STEP_LAUNCHED,
        Kind.STEP_COMPLETED,
        Kind.PROGRESSED,
        Kind.HEARTBEAT,
        Kind.MEMORY,
        Kind.EVICTED,
        Kind.RECLAIMED,
        Kind.TIER,
        Kind.AUDIT_END,
        Kind.STOPPED,
    )
)
"""What such an event says is of the engine, its pool, or a step."""


def tier(name: str) -> tuple[pytest.MarkDecorator, ...]:
    """A scenario of each code runs with the slow tests, and the others of a code with `make prove`."""
    if name in SMALL_SAMPLE:
        return ()
    first = {each.code: each.name for each in reversed(INCIDENTS)}
    return (pytest.mark.slow if name in first.values() else pytest.mark.prove,)


@pytest.mark.parametrize("name", [pytest.param(each.name, marks=tier(each.name)) for each in INCIDENTS])
def test_each_finding_has_the_positions_of_events_about_its_culprits_or_the_pool(name: str, tmp_path: Path) -> None:
    _, life = inject_fault(scenario(name), 0, tmp_path)
    life.engine.close()
    batches = list(frames(tmp_path))
    watch = Pipeline()
    watch.feed(batches)
    watch.settle()
    stated = {
        f"{batch.epoch}/{batch.sequence}/{index}": event
        for batch in batches
        for index, event in enumerate(batch.events())
    }
    numbers = {text: number for batch in batches for number, text in batch.texts.items() if number >= 0}
    found = [finding for finding in watch.findings() if finding.code == scenario(name).code]
    assert found
    for finding in watch.findings():
        spoken = [item for item in finding.evidence if item.value != "has not spoken"]
        assert all(item.position for item in spoken), [item for item in spoken if not item.position]
        named = [stated[item.position] for item in spoken]
        assert stated[finding.position]
        assert any(is_about(event, finding, numbers) for event in named), finding


def is_about(event: Run, finding: FindingReport, numbers: dict[str, int]) -> bool:
    """Whether the event is about a culprit; of a finding that names nobody, about the pool or the engine."""
    requests, blocks = finding.culprits.requests, finding.culprits.blocks
    if not (requests or blocks):
        return event.request < 0 or event.kind in BLOCK_KINDS
    own = {numbers[name] for name in requests}
    if event.request in own or (event.kind in OF_NOBODY and own.intersection(event.ids)):
        return True
    return event.kind not in OF_NOBODY and not set(blocks).isdisjoint(event.ids)
