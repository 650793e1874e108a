"""References that nobody owns. With an audit since, it is confirmed. Each block is in one of the two:

leak.unaccounted    a free was skipped: a request has ended, and what it had is still there
leak.rising-floor   a free forgets something: requests end well but for a block or two, and each drain to idle leaves
                    more of these in use than the one before

A block or two do no harm; that it goes on does. So until the floor has risen some times they are leak.unaccounted too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import RequestState
from kvscope.monitor.text import clock_time, counted, listed, percent

UNACCOUNTED = "leak.unaccounted"
RISING_FLOOR = "leak.rising-floor"


class _Lost(NamedTuple):
    """Some of the references that nobody owns, by block, and the requests that left them."""

    references: Mapping[int, int]
    culprits: list[RequestState]

    def since_ns(self, ledger: EngineLedger) -> int:
        """When the first of them was left, wall time."""
        ended = [ledger.wall(record.finished_ns) for record in self.culprits if record.finished_ns]
        since = ledger.state.since
        return min(ended, default=ledger.wall(min((since[block] for block in self.references), default=0)))

    def first_at(self, ledger: EngineLedger) -> str:
        """The position of that: of the end of the request that left it, or of the audit that showed it."""
        first = min(self.culprits, key=lambda record: record.finished_ns, default=None)
        return ledger.at(first.since_at if first is not None else ledger.state.places.audited)

    def last_at(self, ledger: EngineLedger) -> str:
        """The position of the end of the last request that left some."""
        return ledger.at(*(record.since_at for record in self.culprits)) or self.first_at(ledger)


def judge(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    """References that neither a living request nor an announcement explains."""
    unexplained = ledger.state.unexplained_references()
    if not unexplained:
        return
    culprits = [
        record
        for record in ledger.state.requests.values()
        if record.is_finished and not unexplained.keys().isdisjoint(record.blocks)
    ]
    if len(ledger.floors.rising()) > settings(RISING_FLOOR, "min_rises"):
        forgotten = [record for record in culprits if len(record.blocks) < record.ended_blocks]
        skipped = [record for record in culprits if len(record.blocks) >= record.ended_blocks]
        some = _blocks(forgotten) - _blocks(skipped)
        rising = {block: count for block, count in unexplained.items() if block in some}
        if rising:
            yield _rising_floor(ledger, settings, _Lost(rising, forgotten))
        unexplained = {block: count for block, count in unexplained.items() if block not in some}
        culprits = skipped
    if unexplained:
        yield _unaccounted(ledger, settings, _Lost(unexplained, culprits))


def _blocks(records: Iterable[RequestState]) -> set[int]:
    return {block for record in records for block in record.blocks}


def _is_audited(ledger: EngineLedger, since_ns: int) -> bool:
    state = ledger.state
    return bool(state.audited_ns) and ledger.wall(state.audited_ns) >= since_ns and not state.damaged


_RESTART = "Only a restart of this engine gives the blocks back; drain it first, before the pool is full."
_STORY = "Keep the story of one of these blocks (monitor explain block ID): it names the path that left it."
_WONT_HELP = (
    "Lowering the load or max_num_seqs: no live request holds these blocks.",
    "Resetting the prefix cache: a reference count above 0 keeps a block out of the free queue for ever.",
)
_NO_AUDIT = "an audit of the engine's own reference counts since then (one comes by itself)"


def _unaccounted(ledger: EngineLedger, settings: Settings, lost: _Lost) -> Judgement:
    state = ledger.state
    unaccounted = set(state.unaccounted()).intersection(lost.references)
    references = sum(lost.references.values())
    since = lost.since_ns(ledger)
    age = (ledger.now_ns - since) / 1e9
    audited = _is_audited(ledger, since)
    left_at = lost.last_at(ledger)
    shared = len(lost.references) - len(unaccounted)
    share = len(unaccounted) / (state.total - state.reserved)
    explanation = (
        f"{counted(references, 'reference')} to {counted(len(lost.references), 'block')} belong to no living"
        f" request and to no announced deferral; {counted(len(unaccounted), 'block')}"
        f" ({percent(share)} of the pool) can never be used again"
    )
    if shared:
        explanation += f", {counted(shared, 'more is', 'more are')} still shared with living requests and will follow"
    explanation += "."
    if lost.culprits:
        names = listed([record.id for record in lost.culprits])
        explanation += f" They were left by {names}: ended, and their free was skipped."
    return Judgement(
        code=UNACCOUNTED,
        engine=ledger.engine,
        verdict="confirmed" if audited else "likely",
        # Until an audit has put the books right after a loss, what is missing may be missing from them alone.
        pending=state.damaged or age < settings(UNACCOUNTED, "grace_s"),
        since_ns=since,
        position=lost.first_at(ledger),
        requests=tuple(record.id for record in lost.culprits),
        blocks=tuple(lost.references),
        evidence=(
            Evidence("unaccounted_blocks", len(unaccounted), "blocks", position=left_at),
            Evidence("unexplained_references", references, "references", position=left_at),
            Evidence("share_of_pool", round(share, 4), "of the pool", position=left_at),
            Evidence("requests_that_left_them", len(lost.culprits), "requests", position=left_at),
            Evidence("audits_since", int(audited), "audits", "audit", position=ledger.at(state.places.audited)),
        ),
        explanation=explanation,
        do_now=(_RESTART, _STORY),
        change=(
            "It is a defect of the engine on the path that ended these requests: report it with that story, and"
            " upgrade to a release that has it fixed.",
        ),
        wont_help=_WONT_HELP,
        missing="" if audited else _NO_AUDIT,
    )


def _rising_floor(ledger: EngineLedger, settings: Settings, lost: _Lost) -> Judgement:
    state = ledger.state
    floors = ledger.floors.rising()
    first, last = floors[0], floors[-1]
    usable = state.total - state.reserved
    since = lost.since_ns(ledger)
    audited = _is_audited(ledger, since)
    left_at = lost.last_at(ledger)
    rises = len(floors) - 1
    each = (last.in_use - first.in_use) / rises
    left = (usable - last.in_use) / each
    return Judgement(
        code=RISING_FLOOR,
        engine=ledger.engine,
        verdict="confirmed" if audited else "likely",
        pending=state.damaged or (ledger.now_ns - since) / 1e9 < settings(UNACCOUNTED, "grace_s"),
        since_ns=since,
        position=lost.first_at(ledger),
        requests=tuple(record.id for record in lost.culprits),
        blocks=tuple(lost.references),
        evidence=(
            Evidence("times_the_floor_rose", rises, "drains to idle", position=last.where),
            Evidence("first_floor", int(first.in_use), "blocks", position=first.where),
            Evidence("last_floor", int(last.in_use), "blocks", position=last.where),
            Evidence("each_time", round(each, 2), "blocks", position=last.where),
            Evidence("share_of_pool", round(len(lost.references) / usable, 4), "of the pool", position=left_at),
            Evidence("requests_that_left_them", len(lost.culprits), "requests", position=left_at),
            Evidence("audits_since", int(audited), "audits", "audit", position=ledger.at(state.places.audited)),
        ),
        explanation=(
            f"Each time the engine drains to idle, more blocks stay in use than the time before:"
            f" {counted(int(first.in_use), 'block')} at {clock_time(first.at)},"
            f" {counted(int(last.in_use), 'block')} after {rises} more such {'drain' if rises == 1 else 'drains'}."
            f" {counted(len(lost.culprits), 'request')} ended, gave back what they had, and left"
            f" {counted(len(lost.references), 'block')} ({percent(len(lost.references) / usable)} of the pool) of it."
            f" At this rate the pool is full after {left:,.0f} drains more."
        ),
        do_now=(
            "There is time: plan a restart of this engine for a quiet hour. Only that gives the blocks back.",
            _STORY,
        ),
        change=(
            "It is a defect of the engine, which forgets part of what a request had at its end: report it with that"
            " story, and upgrade to a release that has it fixed.",
        ),
        wont_help=_WONT_HELP,
        missing="" if audited else _NO_AUDIT,
    )
