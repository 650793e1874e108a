"""Compares what the probe reported of a run of the bare scheduler with vLLM's own tables, after every call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvscope.monitor.contract.kinds import Cause, Status
from kvscope.monitor.contract.wire import PINS, Batch, decode
from kvscope.monitor.ledger.balance import balance_of
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from tests.probes.run_record import ENGINE

OUTSIDE = (
    Status.WAITING_FOR_REMOTE_KVS,
    Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
    Status.WAITING_FOR_STREAMING_REQ,
)
"""They wait for something outside the scheduler, which is a cause of its own."""


@dataclass
class CheckedRun:
    """What a run had: its ledger at the end, and how often each status, cause and mechanism was compared."""

    ledger: EngineLedger
    seen: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    """Calls of the scheduler after which everything was compared."""
    pinned: int = 0
    """Blocks that were pinned after a call, summed over calls."""
    fences: bool = False
    """Whether this release keeps blocks until the steps in flight that may write them are over."""


def records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        while size := file.read(4):
            yield msgspec.msgpack.decode(file.read(int.from_bytes(size, "little")))


def check_run(path: Path) -> CheckedRun:
    """Fail at the first call after which the ledger differs from vLLM's tables, or a cause from its decision."""
    run = CheckedRun(EngineLedger(ENGINE))
    for number, record in enumerate(records(path)):
        _check_blocks(run, record, number)
        _check_requests(run, record, number)
        run.fences = record["fences"]
        run.calls += 1
    return run


def _check_blocks(run: CheckedRun, record: dict[str, Any], number: int) -> None:
    ledger = run.ledger
    for payload in record["frames"]:
        frame = decode(payload)
        assert isinstance(frame, Batch)
        assert (frame.free, frame.used) == (record["free"], frame.total - 1 - record["free"]), number
        assert not frame.dropped_batches, number
        ledger.apply(frame)
    state = ledger.state
    assert not record["errors"], number
    assert not ledger.anomalies, (number, ledger.anomalies)
    # The null block is vLLM's own, and reserved.
    assert list(state.refs[1:]) == record["refs"][1:], number
    assert [bool(value) for value in state.hashes[1:]] == record["hashed"][1:], number
    assert state.used == state.total - 1 - record["free"], number
    balance = balance_of(state)
    assert balance.holds, (number, balance)
    assert not state.unexplained_references(), (number, state.unexplained_references())
    pinned = sum(PINS in holders for holders in state.detached.values())
    run.pinned += pinned
    run.seen["behind a fence"] += len(state.detached) - pinned


def _check_requests(run: CheckedRun, record: dict[str, Any], number: int) -> None:
    by_name = {request.id: request for request in run.ledger.state.requests.values()}
    tables = {name.rpartition("-")[0]: blocks for name, blocks in record["tables"].items() if blocks}
    assert {name: sorted(request.blocks) for name, request in by_name.items() if request.blocks} == {
        name: sorted(blocks) for name, blocks in tables.items()
    }, number
    unfinished = {name.rpartition("-")[0] for name, status in record["statuses"].items() if "FINISHED" not in status}
    assert {name for name, request in by_name.items() if not request.is_finished} == unfinished, number
    for name, status in record["statuses"].items():
        request = by_name.get(name.rpartition("-")[0])
        if request is None:
            assert status.startswith("FINISHED")  # it holds nothing any more; its connector has yet to report
            continue
        reported = Status(request.status)
        expected = status.replace("FSM", "STRUCTURED_OUTPUT_GRAMMAR")
        assert reported.name == expected, (number, name)
        run.seen[reported.name] += 1
        cause = record["decisions"].get(name)
        if record["scheduled"] and cause and request.is_waiting and reported not in OUTSIDE:
            found = Cause(request.cause).name
            assert found == cause, (number, name, request.blocks_needed, request.blocks_free_then)
            assert cause != "KV_BLOCKS" or request.blocks_needed > request.blocks_free_then, (number, name)
            run.causes[cause] += 1
