"""Why a block is held: the chain from it to a live reason, one for each reference.

block 812 ← request r-91, FINISHED_ABORTED 14:02:11 ← free deferred by the KV connector ← waits for a completion, 312 s
"""

from __future__ import annotations

from kvscope.monitor.events.kinds import Holder, Status, name_of
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import Deferral
from kvscope.monitor.text import clock_time, counted, duration

WAITS_FOR: dict[int, tuple[str, str]] = {
    Holder.CONNECTOR: ("the KV connector", "waits for a completion"),
    Holder.FENCE: ("a step that may still write it", "waits for the step"),
    Holder.SESSION: ("an open session", "waits for the session's next input"),
}


def because(ledger: EngineLedger, block: int) -> list[list[str]]:
    """Return the chains that hold `block`, each from the block to its reason. If nothing holds it, one chain states
    that.

    Raises ValueError if the pool has no such block.
    """
    state = ledger.state
    if not 0 <= block < state.total:
        raise ValueError(f"there is no block {block}: the pool of {ledger.engine} has blocks 0 to {state.total - 1}")
    here = f"block {block}"
    since = duration(ledger.age_s(state.since[block]))
    if block < state.reserved:
        return [[here, "reserved: the null block, never handed out"]]
    if state.refs[block] <= 0:
        if state.hashes[block]:
            return [[here, f"cached-idle for {since}: the prefix cache keeps it until the space is needed"]]
        return [[here, f"free for {since}"]]
    chains = [[here, *_owner(ledger, number, block)] for number in state.owners(block)]
    for number in state.detached.get(block, ()):
        link = f"once in the table of request {_owner_name(ledger, number)}, detached"
        chains.append([here, link, *_after_the_end(ledger, number, block)])
    surplus = state.refs[block] - len(chains)
    if surplus > 0:
        chains.append([here, f"UNACCOUNTED: {counted(surplus, 'reference')} that no request acquired in any event"])
    return chains


def _owner(ledger: EngineLedger, number: int, block: int) -> list[str]:
    record = ledger.state.requests.get(number)
    if record is None:
        return [f"request #{number}, of which nothing is known"]
    status = name_of(Status, record.status)
    if record.is_finished:
        ended = f"request {record.id}, {status} {clock_time(ledger.wall(record.finished_ns))}"
        return [ended, *_after_the_end(ledger, number, block)]
    for_long = duration(ledger.age_s(record.since_ns))
    if record.is_running:
        progress = f"{record.computed_tokens:,} tokens computed, {record.output_tokens:,} generated"
        quiet = ledger.age_s(record.progressed_ns)
        last = f", last progress {duration(quiet)} ago" if quiet > 1 else ""
        return [f"request {record.id}, {status} for {for_long}", progress + last]
    cause = ledger.cause_of_wait(record).name
    return [f"request {record.id}, {status} for {for_long}", f"waits: {cause}"]


def _after_the_end(ledger: EngineLedger, number: int, block: int) -> list[str]:
    state = ledger.state
    if not state.is_deferred(number, block):
        return ["UNACCOUNTED: neither released nor deferred"]
    deferral = state.deferrals[number]
    by, waits = WAITS_FOR.get(deferral.holder, ("somebody", "waits"))
    return [f"free deferred by {by}", f"{waits}, {duration(ledger.age_s(deferral.since_ns))}{_lease(ledger, deferral)}"]


def _lease(ledger: EngineLedger, deferral: Deferral) -> str:
    if deferral.lease_deadline_ns <= 0:
        return " (under an unknown lease)" if deferral.lease_deadline_ns else ""
    left = (ledger.wall(deferral.lease_deadline_ns) - ledger.now_ns) / 1e9
    return f" (lease ends in {duration(left)})" if left > 0 else f" (lease ended {duration(abs(left))} ago)"


def _owner_name(ledger: EngineLedger, number: int) -> str:
    record = ledger.state.requests.get(number)
    if record is not None:
        return record.id
    deferral = ledger.state.deferrals.get(number)
    return deferral.id if deferral else f"#{number}"
