"""leak.unaccounted: references that nobody owns. With an audit since, it is confirmed."""

from __future__ import annotations

from collections.abc import Iterator

from monitor.detectors.judgement import Evidence, Judgement
from monitor.detectors.thresholds import Settings
from monitor.ledger.ledger import EngineLedger
from monitor.ledger.words import counted, listed, percent

UNACCOUNTED = "leak.unaccounted"


def judge(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    """References that neither a living request nor an announcement explains."""
    state = ledger.state
    unexplained = state.unexplained_references()
    if not unexplained:
        return
    unaccounted = set(state.unaccounted())
    culprits = [
        record
        for record in state.requests.values()
        if record.is_finished and not unexplained.keys().isdisjoint(record.blocks)
    ]
    ended = [ledger.wall(record.finished_ns) for record in culprits if record.finished_ns]
    since = min(ended, default=ledger.wall(min((state.since[b] for b in unexplained), default=0)))
    age = (ledger.now_ns - since) / 1e9
    audited = bool(state.audited_ns) and ledger.wall(state.audited_ns) >= since and not state.damaged
    shared = len(unexplained) - len(unaccounted)
    usable = state.total - state.reserved
    explanation = (
        f"{counted(sum(unexplained.values()), 'reference')} to {counted(len(unexplained), 'block')} belong to no living"
        f" request and to no announced deferral; {counted(len(unaccounted), 'block')}"
        f" ({percent(len(unaccounted) / usable)} of the pool) can never be used again"
    )
    if shared:
        explanation += f", {counted(shared, 'more is', 'more are')} still shared with living requests and will follow"
    explanation += "."
    if culprits:
        explanation += f" They were left by {listed([r.id for r in culprits])}: ended, and their free was skipped."
    yield Judgement(
        code=UNACCOUNTED,
        engine=ledger.engine,
        verdict="confirmed" if audited else "likely",
        # Until an audit has put the books right after a loss, what is missing may be missing from them alone.
        pending=state.damaged or age < settings(UNACCOUNTED, "grace_s"),
        since_ns=since,
        position=str(ledger.position()),
        requests=tuple(record.id for record in culprits),
        blocks=tuple(unexplained),
        evidence=(
            Evidence("unaccounted_blocks", len(unaccounted), "blocks"),
            Evidence("unexplained_references", sum(unexplained.values()), "references"),
            Evidence("share_of_pool", round(len(unaccounted) / usable, 4), "of the pool"),
            Evidence("requests_that_left_them", len(culprits), "requests"),
            Evidence("audits_since", int(audited), "audits", "audit"),
        ),
        explanation=explanation,
        do_now=(
            "Only a restart of this engine gives the blocks back; drain it first, before the pool is full.",
            "Keep the story of one of these blocks (monitor explain block ID): it names the path that left it.",
        ),
        change=(
            "It is a defect of the engine on the path that ended these requests: report it with that story, and"
            " upgrade to a release that has it fixed.",
        ),
        wont_help=(
            "Lowering the load or max_num_seqs: no live request holds these blocks.",
            "Resetting the prefix cache: a reference count above 0 keeps a block out of the free queue for ever.",
        ),
        missing="" if audited else "an audit of the engine's own reference counts since then (one comes by itself)",
    )  # fmt: skip
