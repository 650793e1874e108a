"""leak.session-pinned: sessions that nobody talks in keep their KV."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.events.kinds import Holder, Status
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.text import counted, duration, percent

SESSION_PINNED = "leak.session-pinned"


class _Session(NamedTuple):
    """One that waits for its next input: of which request, since when, with which blocks, and where that was said."""

    id: str
    since_ns: int
    blocks: set[int]
    since_at: int
    blocks_at: int


def judge(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    """Sessions that have been idle for too long."""
    state, at = ledger.state, ledger.at
    idle_s = settings(SESSION_PINNED, "idle_s")
    idle = sorted(
        (session for session in _sessions(ledger) if ledger.age_s(session.since_ns) > idle_s),
        key=lambda session: session.since_ns,
    )
    blocks = sorted(set().union(*(session.blocks for session in idle)))
    if not blocks:
        return
    share = len(blocks) / (state.total - state.reserved)
    oldest = ledger.age_s(idle[0].since_ns)
    many = len(idle) != 1
    yield Judgement(
        code=SESSION_PINNED,
        engine=ledger.engine,
        verdict="likely" if state.damaged else "confirmed",
        # Few blocks in a session are what sessions are for; and after a loss the session may have gone on.
        pending=state.damaged or share < settings(SESSION_PINNED, "min_share"),
        since_ns=ledger.wall(idle[0].since_ns),
        position=at(idle[0].since_at),
        requests=tuple(session.id for session in idle),
        blocks=tuple(blocks),
        evidence=(
            Evidence("idle_sessions", len(idle), "sessions", position=at(*(session.since_at for session in idle))),
            Evidence("blocks_held", len(blocks), "blocks", position=at(*(session.blocks_at for session in idle))),
            Evidence(
                "share_of_pool", round(share, 4), "of the pool", position=at(*(session.blocks_at for session in idle))
            ),
            Evidence("longest_idle_s", round(oldest, 1), "s", position=at(idle[0].since_at)),
        ),
        explanation=(
            f"{counted(len(idle), 'session')} {'wait' if many else 'waits'} for {'their' if many else 'its'} next input"
            f" and {'keep' if many else 'keeps'} {counted(len(blocks), 'block')} ({percent(share)} of the pool)"
            f" meanwhile. Nobody has spoken in {'the quietest' if many else 'it'} ({idle[0].id}) for"
            f" {duration(oldest)}. Blocks of a session cannot be evicted: new requests wait for room beside them."
        ),
        do_now=(
            "Close the sessions that are done (vLLM: end the streaming input, or abort its request; SGLang: POST"
            " /close_session).",
        ),
        change=(
            "Give sessions a time-out: in the client, or where the server has one (SGLang: timeout in /open_session).",
            "Or let the prefix cache keep what a session has said, where it can be evicted (SGLang:"
            " --enable-session-radix-cache in place of --enable-streaming-session).",
        ),
        wont_help=(
            "Lowering max_num_seqs: sessions that wait are not running.",
            "Resetting the prefix cache: blocks of a session are referenced.",
        ),
        missing="the events that were lost" if state.damaged else "",
    )


def _sessions(ledger: EngineLedger) -> Iterator[_Session]:
    """Those that have ended a turn and stay, and those that live and wait for more of their input."""
    state = ledger.state
    for deferral in state.deferrals.values():
        if deferral.holder == Holder.SESSION:
            yield _Session(deferral.id, deferral.since_ns, deferral.blocks, deferral.since_at, deferral.changed_at)
    for record in state.requests.values():
        if record.status == _STREAMING and record.blocks:
            yield _Session(record.id, record.since_ns, set(record.blocks), record.since_at, record.since_at)


_STREAMING = int(Status.WAITING_FOR_STREAMING_REQ)  # as a plain number: this is compared with every request's
