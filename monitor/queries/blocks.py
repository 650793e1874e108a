"""The state of every block, and why one is held."""

from __future__ import annotations

from collections.abc import Iterable
from operator import truth

from kvscope.monitor.analysis.event_history import block_history, request_names
from kvscope.monitor.analysis.ownership import because
from kvscope.monitor.errors import NotKnown
from kvscope.monitor.events.wire import Batch
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.fragmentation import tokens_in
from kvscope.monitor.queries.event_rows import history_entry
from kvscope.monitor.schema import BLOCK_STATES, BlockDetail, BlockMap
from kvscope.monitor.text import timestamp


def block_map(ledger: EngineLedger) -> BlockMap:
    """Return the state of every block."""
    return BlockMap(ledger.engine, timestamp(ledger.now_ns), ledger.state.total, bytes(_block_states(ledger)))


def block_detail(ledger: EngineLedger, block: int, batches: Iterable[Batch]) -> BlockDetail:
    """Return one block, with its event history from `batches`. Raises NotKnown."""
    try:
        chains = because(ledger, block)
    except ValueError as error:
        raise NotKnown(str(error)) from None
    names = request_names(ledger)
    state = ledger.state
    return BlockDetail(
        engine=ledger.engine,
        block=block,
        state=BLOCK_STATES[_block_states(ledger)[block]],
        references=state.refs[block],
        owners=[names.get(number, f"#{number}") for number in state.owners(block)],
        hashed=bool(state.hashes[block]),
        ownership_chains=chains,
        event_history=[history_entry(line) for line in block_history(batches, block, names)],
        tokens=tokens_in(state, ledger.description, block),
    )


def _block_states(ledger: EngineLedger) -> bytearray:
    """Return an index into BLOCK_STATES for each block."""
    state = ledger.state
    _, cached, running, waiting, finished, reserved, unaccounted = range(7)
    states = bytearray(map(truth, state.hashes)).translate(bytes([0, cached]).ljust(256))
    states[: state.reserved] = bytes([reserved]) * state.reserved
    # The state has the owners by name, so the other blocks need no check.
    for block in state.unaccounted():
        states[block] = unaccounted
    # Liveliest last, so that it is what a shared block shows.
    for deferral in state.deferrals.values():
        for block in deferral.blocks:
            states[block] = finished
    for status in (waiting, running):
        for record in state.requests.values():
            if not record.is_finished and record.is_running == (status == running):
                for block in record.blocks:
                    states[block] = status
    return states


def liveliest(ledger: EngineLedger) -> list[int]:
    """Return for each block the number of its most active owner: one that runs, or else waits, or else has ended (-1:
    none).
    """
    owners = [-1] * ledger.state.total
    for record in sorted(ledger.state.requests.values(), key=lambda r: (not r.is_finished, r.is_running)):
        for block in record.blocks:
            owners[block] = record.number
    for block, former in ledger.state.detached.items():
        if owners[block] < 0 and former:
            owners[block] = former[0]
    return owners
