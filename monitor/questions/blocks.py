"""The state of every block, why one is held, and every block by its owner, age, references or prefix."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from ..base.errors import NotKnown
from ..base.text import duration, timestamp
from ..contract.wire import Batch
from ..ledger.engine_ledger import EngineLedger
from ..ledger.event_history import block_history, request_names
from ..ledger.ledger_records import tokens_in
from ..ledger.pool_account import block_parts, holders, share_of_pool
from ..ledger.wait_graph import because
from .event_list import history_entry
from .schema import BLOCK_STATES, BlockColours, BlockDetail, BlockMap, Colouring, ColourKey


def block_map(ledger: EngineLedger) -> BlockMap:
    """Return the state of every block."""
    return BlockMap(ledger.engine, timestamp(ledger.now_ns), ledger.state.total, bytes(block_parts(ledger.state)))


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
        state=BLOCK_STATES[block_parts(ledger.state)[block]],
        references=state.refs[block],
        owners=[names.get(number, f"#{number}") for number in state.owners(block)],
        hashed=bool(state.hashes[block]),
        ownership_chains=chains,
        event_history=[history_entry(line) for line in block_history(batches, block, names)],
        tokens=tokens_in(state, ledger.description, block),
    )


# -------------------------------------------------------------------- colours


MAX_COLOURED_OWNERS: Final = 14
"""Owners, or prefixes, with a colour of their own. All others share one."""
OTHER_OWNERS: Final = MAX_COLOURED_OWNERS + 1
AGES_S: Final = (1, 10, 60, 600, 3600)
REFERENCES: Final = (1, 2, 3, 5, 9)


def by_owner(ledger: EngineLedger) -> BlockColours:
    """Return the most active owner of each block. The owners with the most blocks have colours of their own."""
    owners = holders(ledger.state)
    counts = Counter(owner for owner in owners if owner >= 0)
    ranked = [owner for owner, _ in counts.most_common(MAX_COLOURED_OWNERS)]
    rank = {owner: value for value, owner in enumerate(ranked, start=1)}
    values = bytes(0 if owner < 0 else rank.get(owner, OTHER_OWNERS) for owner in owners)
    names = request_names(ledger)
    called = {rank[owner]: names.get(owner, f"#{owner}") for owner in ranked}
    labels = {0: "no request", OTHER_OWNERS: f"{len(counts) - len(ranked):,} others"} | called
    return _colours(ledger, "owner", values, labels, called)


def by_age(ledger: EngineLedger) -> BlockColours:
    """For how long each has been in use, or idle with its hash (0: free)."""
    state = ledger.state
    bounds = [ledger.now_ns - ledger.wall(1) + 1 - bound * 1_000_000_000 for bound in reversed(AGES_S)]
    values = bytes(
        len(AGES_S) + 1 - bisect_right(bounds, since) if refs > 0 or hashed else 0
        for refs, hashed, since in zip(state.refs, state.hashes, state.since, strict=True)
    )
    spans = [f"up to {duration(AGES_S[0])}", *(f"{duration(a)} to {duration(b)}" for a, b in pairwise(AGES_S))]
    labels = dict(enumerate(["free", *spans, f"over {duration(AGES_S[-1])}"]))
    return _colours(ledger, "age", values, labels)


def by_references(ledger: EngineLedger) -> BlockColours:
    """How many references each has."""
    values = bytes(bisect_right(REFERENCES, refs) for refs in ledger.state.refs)
    shown = [f"{a}" if b == a + 1 else f"{a} to {b - 1}" for a, b in pairwise(REFERENCES)]
    labels = dict(enumerate(["none", *shown, f"{REFERENCES[-1]} or more"]))
    return _colours(ledger, "references", values, labels)


def by_prefix(ledger: EngineLedger, prefixes: Sequence[tuple[str, list[int]]]) -> BlockColours:
    """Which branch of the prefix cache each is of, with all that goes on from it: `prefixes`, the largest first."""
    values = bytearray(ledger.state.total)
    for value, (_, blocks) in enumerate(prefixes, start=1):
        for block in blocks:
            values[block] = min(value, OTHER_OWNERS)
    labels = {0: "not cached", OTHER_OWNERS: f"{max(0, len(prefixes) - MAX_COLOURED_OWNERS):,} others"}
    labels |= {value: name for value, (name, _) in enumerate(prefixes[:MAX_COLOURED_OWNERS], start=1)}
    return _colours(ledger, "prefix", bytes(values), labels)


COLOURINGS: Final = {"owner": by_owner, "age": by_age, "references": by_references}
"""Colourings that need the ledger alone."""


def _colours(
    ledger: EngineLedger, by: Colouring, values: bytes, labels: dict[int, str], requests: dict[int, str] | None = None
) -> BlockColours:
    state = ledger.state
    counts = Counter(values[state.reserved :])
    keys = [
        ColourKey(
            value, label, counts[value], share_of_pool(counts[value], state.usable), (requests or {}).get(value, "")
        )
        for value, label in sorted(labels.items())
        if counts[value]
    ]
    return BlockColours(ledger.engine, timestamp(ledger.now_ns), by, state.total, values, keys)
