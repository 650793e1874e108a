"""leak.unaccounted: blocks in use that no living request and no announced deferral owns."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import counted, listed, percent
from ...ledger.engine_ledger import EngineLedger
from ...ledger.pool_imbalance import used_while_idle
from ..detector import Settings, StreamDetector
from ..judgement import LIVE_REQUEST, Alternative, Evidence, HoldsBlocks, Unless, seen
from .block_effects import ROOM_IS_GONE_FOR_GOOD
from .lost_references import NO_AUDIT_SINCE, UNACCOUNTED_GRACE_S, LostReferences, audited_since, lost_references


class Unaccounted(StreamDetector[HoldsBlocks]):
    """References left by a free that was skipped.

    Sees: blocks with more references than living requests and announced deferrals explain.
    Confirmed when: an audit of the engine's own reference counts agrees, or an idle engine counts the blocks as used.
    Likely when: no audit has come since.
    Not when: a connector or a step announced that it keeps them (leak.finished-held, leak.deferred-free-stalled); the
    floor rises by a block or two at each drain (leak.rising-floor).
    """

    code = "leak.unaccounted"
    severity = "error"
    title = "Blocks in use without an owner"

    grace_s = UNACCOUNTED_GRACE_S
    alternatives = (
        LIVE_REQUEST,
        Alternative("a connector or a step keeps the blocks", "no deferral was announced for them"),
        Unless("an unreported free", "an audit of the engine's own reference counts since then"),
    )
    causes = ROOM_IS_GONE_FOR_GOOD

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[HoldsBlocks]:
        """Yield the references that no owner explains."""
        lost = lost_references(ledger, settings).unaccounted
        if ledger.state.damaged and (used := used_while_idle(ledger)):
            yield self._judge_idle_use(ledger, lost, used)
        elif lost is not None:
            yield self._judge_lost(ledger, settings, lost)

    def _judge_lost(self, ledger: EngineLedger, settings: Settings, lost: LostReferences) -> HoldsBlocks:
        state = ledger.state
        certain = lost.certain(ledger)
        lost = certain if certain.references else lost
        unexplained = ledger.unexplained_references()
        unaccounted = {block for block in lost.references if unexplained.get(block) == state.refs[block]}
        references = sum(lost.references.values())
        since = lost.since_ns(ledger)
        age = (ledger.now_ns - since) / 1e9
        audited = audited_since(ledger, since)
        left_at = lost.last_at(ledger)
        shared = len(lost.references) - len(unaccounted)
        share = len(unaccounted) / (state.total - state.reserved)
        explanation = (
            f"{counted(references, 'reference')} to {counted(len(lost.references), 'block')} belong to no living"
            f" request and to no announced deferral. {counted(len(unaccounted), 'block')} ({percent(share)} of the"
            " pool) can never be used again"
        )
        if shared:
            explanation += (
                f", {counted(shared, 'more is', 'more are')} still shared with living requests and will follow"
            )
        explanation += "."
        if lost.culprits:
            names = listed([record.id for record in lost.culprits])
            explanation += f" No free of them was reported when these requests ended: {names}."
        if lost.dropped:
            names = listed([dropped.id for dropped in lost.dropped])
            explanation += f" Without a free, the engine's block table of {names} lost them."
        return self.holding(
            ledger,
            # Blocks from before a loss may have been freed in it: an audit shows that, or an idle engine's counter.
            pending=not certain.references or age < settings(self.grace_s),
            since_ns=since,
            position=lost.first_at(ledger),
            requests=lost.names,
            blocks=tuple(lost.references),
            share_of_pool=round(share, 4),
            evidence=(
                seen("unaccounted_blocks", len(unaccounted), "blocks", left_at),
                seen("unexplained_references", references, "references", left_at),
                seen("share_of_pool", round(share, 4), "of the pool", left_at),
                seen("requests_leaking", len(lost.names), "requests", left_at),
                Evidence("audits_since", int(audited), "audits", "audit", position=ledger.at(state.places.audited)),
            ),
            explanation=explanation,
            missing="" if audited else NO_AUDIT_SINCE,
        )

    def _judge_idle_use(self, ledger: EngineLedger, lost: LostReferences | None, used: int) -> HoldsBlocks:
        """Judge an idle engine by its own counter, which holds even after lost events."""
        state, at = ledger.state, ledger.at
        known = lost if lost is not None and len(lost.references) == used else None
        share = round(used / state.usable, 4)
        return self.holding(
            ledger,
            since_ns=known.since_ns(ledger) if known is not None else ledger.uncertain_since_ns,
            position=at(state.places.heartbeat),
            requests=known.names if known is not None else (),
            blocks=tuple(known.references) if known is not None else (),
            share_of_pool=share,
            evidence=(
                seen("unaccounted_blocks", used, "blocks", at(state.places.heartbeat)),
                seen("share_of_pool", share, "of the pool", at(state.places.heartbeat)),
                seen("running", 0, "requests", at(state.places.heartbeat)),
                seen("waiting", 0, "requests", at(state.places.heartbeat)),
                seen("lost_batches", sum(ledger.lost_batches.values()), "batches", at(state.lost_at)),
            ),
            explanation=(
                f"The idle engine counts {counted(used, 'block')} ({percent(share)} of the pool) as used beyond all"
                " announced deferrals, with no request running or waiting. Events were lost before that, so the ledger"
                " cannot prove each block, but no live request can hold them."
            ),
            missing="an audit since the loss: a deferral that keeps the blocks may be among the lost events",
        )
