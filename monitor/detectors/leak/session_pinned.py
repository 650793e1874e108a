"""leak.session-pinned: idle sessions keep their KV."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...base.text import counted, duration, percent
from ...contract.kinds import EngineMode, Holder, Status
from ...ledger.engine_ledger import EngineLedger
from ...ledger.pool_account import share_of_pool
from ..detector import Settings, StreamDetector, Threshold
from ..judgement import ENGINE_PAUSED, Alternative, HoldsBlocks, seen
from .block_effects import ROOM_IS_GONE


class IdleSession(NamedTuple):
    """A session that waits for its next input: its request, since when, its blocks, and the position of the report."""

    id: str
    since_ns: int
    blocks: set[int]
    since_at: int
    blocks_at: int


def _sessions_of(ledger: EngineLedger) -> Iterator[IdleSession]:
    """Yield the sessions that ended a turn and stay, and those that live and wait for more of their input."""
    state = ledger.state
    for deferral in state.deferrals.values():
        if deferral.holder == Holder.SESSION:
            yield IdleSession(deferral.id, deferral.since_ns, deferral.blocks, deferral.since_at, deferral.changed_at)
    for record in state.requests.values():
        if record.status == _STREAMING and record.blocks:
            yield IdleSession(record.id, record.since_ns, set(record.blocks), record.since_at, record.since_at)


_STREAMING = int(Status.WAITING_FOR_STREAMING_REQ)  # as a plain number: this is compared with every request's


class SessionPinned(StreamDetector[HoldsBlocks]):
    """Blocks of sessions that wait for their next input for too long.

    Sees: sessions without input for minutes that together hold a twentieth of the pool.
    Confirmed when: no event is missing.
    Likely when: events were lost: an input may be among them.
    Not when: the sessions are in use; they hold little.
    """

    code = "leak.session-pinned"
    severity = "warning"
    title = "Idle sessions keep their blocks"

    idle_s = Threshold(300, "s", "people stop to think or to read, for minutes")
    min_share = Threshold(0.05, "of the pool", "less is not what others wait for")
    alternatives = (ENGINE_PAUSED, Alternative("a session in use", "no input for longer than the allowed idle time"))
    causes = ROOM_IS_GONE

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[HoldsBlocks]:
        """Yield the sessions that have been idle for too long."""
        state, at = ledger.state, ledger.at
        idle_s = settings(self.idle_s)
        if state.mode != EngineMode.UNPAUSED or ledger.age_s(state.mode_since_ns) <= idle_s:
            return  # its inputs may wait for the operator to resume it
        idle = sorted(
            (session for session in _sessions_of(ledger) if ledger.age_s(session.since_ns) > idle_s),
            key=lambda session: session.since_ns,
        )
        certain = [session for session in idle if not state.damaged or session.since_at > state.lost_at]
        idle = certain or idle
        blocks = sorted(set().union(*(session.blocks for session in idle)))
        if not blocks:
            return
        share = share_of_pool(len(blocks), state.usable) or 0.0
        oldest = ledger.age_s(idle[0].since_ns)
        many = len(idle) != 1
        yield self.holding(
            ledger,
            # Few blocks in a session are what sessions are for, and after a loss an earlier one may have gone on.
            pending=not certain or share < settings(self.min_share),
            since_ns=ledger.wall(idle[0].since_ns),
            position=at(idle[0].since_at),
            requests=tuple(session.id for session in idle),
            blocks=tuple(blocks),
            share_of_pool=round(share, 4),
            evidence=(
                seen("idle_sessions", len(idle), "sessions", at(*(session.since_at for session in idle))),
                seen("blocks_held", len(blocks), "blocks", at(*(session.blocks_at for session in idle))),
                seen("share_of_pool", round(share, 4), "of the pool", at(*(session.blocks_at for session in idle))),
                seen("longest_idle_s", round(oldest, 1), "s", at(idle[0].since_at)),
            ),
            explanation=(
                f"{counted(len(idle), 'session')} {'wait' if many else 'waits'} for {'their' if many else 'its'} next"
                f" input and {'keep' if many else 'keeps'} {counted(len(blocks), 'block')} ({percent(share)} of the"
                f" pool) meanwhile. {'The quietest' if many else 'It'} ({idle[0].id}) has had no input for"
                f" {duration(oldest)}. The engine cannot evict a session's blocks."
            ),
            missing="the lost events" if state.damaged else "",
        )
