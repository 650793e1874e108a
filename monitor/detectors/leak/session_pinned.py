"""leak.session-pinned: idle sessions keep their KV."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvscope.monitor.detectors.detector import Causes, Detector
from kvscope.monitor.detectors.judgement import Evidence, HoldsBlocks
from kvscope.monitor.detectors.leak.block_effects import ROOM_IS_GONE
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.events.kinds import Holder, Status
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.text import counted, duration, percent


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


class SessionPinned(Detector[HoldsBlocks]):
    """Blocks of sessions that wait for their next input for too long."""

    code = "leak.session-pinned"
    severity = "warning"
    title = "Idle sessions keep their blocks"
    requires = ("stream",)
    position = 150

    idle_s = Threshold(300, "s", "people stop to think or to read, for minutes")
    min_share = Threshold(0.05, "of the pool", "less is not what others wait for")

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[HoldsBlocks]:
        """Yield the sessions that have been idle for too long."""
        if ledger.has_stream:
            yield from self._from_stream(ledger, settings)

    def causes(self) -> Causes[HoldsBlocks]:
        """Return what it may cause."""
        return ROOM_IS_GONE

    def _from_stream(self, ledger: EngineLedger, settings: Settings) -> Iterator[HoldsBlocks]:
        """Sessions that have been idle for too long."""
        state, at = ledger.state, ledger.at
        idle_s = settings(self.idle_s)
        idle = sorted(
            (session for session in _sessions_of(ledger) if ledger.age_s(session.since_ns) > idle_s),
            key=lambda session: session.since_ns,
        )
        certain = [session for session in idle if not state.damaged or session.since_at > state.lost_at]
        idle = certain or idle
        blocks = sorted(set().union(*(session.blocks for session in idle)))
        if not blocks:
            return
        share = len(blocks) / (state.total - state.reserved)
        oldest = ledger.age_s(idle[0].since_ns)
        many = len(idle) != 1
        yield HoldsBlocks(
            code=self.code,
            engine=ledger.engine,
            verdict="likely" if state.damaged else "confirmed",
            # Few blocks in a session are what sessions are for, and after a loss an earlier one may have gone on.
            pending=not certain or share < settings(self.min_share),
            since_ns=ledger.wall(idle[0].since_ns),
            position=at(idle[0].since_at),
            requests=tuple(session.id for session in idle),
            blocks=tuple(blocks),
            share_of_pool=round(share, 4),
            evidence=(
                Evidence("idle_sessions", len(idle), "sessions", position=at(*(session.since_at for session in idle))),
                Evidence("blocks_held", len(blocks), "blocks", position=at(*(session.blocks_at for session in idle))),
                Evidence(
                    "share_of_pool",
                    round(share, 4),
                    "of the pool",
                    position=at(*(session.blocks_at for session in idle)),
                ),
                Evidence("longest_idle_s", round(oldest, 1), "s", position=at(idle[0].since_at)),
            ),
            explanation=(
                f"{counted(len(idle), 'session')} {'wait' if many else 'waits'} for {'their' if many else 'its'}"
                f" next input and {'keep' if many else 'keeps'} {counted(len(blocks), 'block')} ({percent(share)} of"
                f" the pool) meanwhile. {'The quietest' if many else 'It'} ({idle[0].id}) has had no input for"
                f" {duration(oldest)}. The engine cannot evict a session's blocks."
            ),
            do_now=(
                "Close finished sessions (vLLM: end the streaming input, or abort its request; SGLang: POST"
                " /close_session).",
            ),
            change=(
                "Give sessions a time-out: in the client, or in the server if it has one (SGLang: timeout in"
                " /open_session).",
                "Or keep sessions in the prefix cache, where the engine can evict them (SGLang:"
                " --enable-session-radix-cache in place of --enable-streaming-session).",
            ),
            wont_help=(
                "Lowering max_num_seqs: waiting sessions are not running.",
                "Resetting the prefix cache: the session still references its blocks.",
            ),
            missing="the lost events" if state.damaged else "",
        )
