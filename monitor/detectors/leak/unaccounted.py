"""leak.unaccounted: blocks in use that no living request and no announced deferral owns."""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.detector import Causes, Detector
from kvscope.monitor.detectors.judgement import Evidence, HoldsBlocks
from kvscope.monitor.detectors.leak.block_effects import ROOM_IS_GONE_FOR_GOOD
from kvscope.monitor.detectors.leak.lost_references import (
    KEEP_HISTORY,
    LOST_RESTART,
    LOST_WONT_HELP,
    NO_AUDIT_SINCE,
    UNACCOUNTED_GRACE_S,
    LostReferences,
    audited_since,
    lost_references,
)
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.idle_holds import used_while_idle
from kvscope.monitor.text import counted, listed, percent


class Unaccounted(Detector[HoldsBlocks]):
    """References left by a free that was skipped."""

    code = "leak.unaccounted"
    severity = "error"
    title = "Blocks in use without an owner"
    requires = ("stream",)
    position = 195

    grace_s = UNACCOUNTED_GRACE_S

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[HoldsBlocks]:
        """Yield the references that no owner explains."""
        if not ledger.has_stream:
            return
        lost = lost_references(ledger, settings).unaccounted
        if ledger.state.damaged and (used := used_while_idle(ledger)):
            yield self._judge_idle_use(ledger, lost, used)
        elif lost is not None:
            yield self._judge_lost(ledger, settings, lost)

    def causes(self) -> Causes[HoldsBlocks]:
        """Return what it may cause."""
        return ROOM_IS_GONE_FOR_GOOD

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
            f" request and to no announced deferral. {counted(len(unaccounted), 'block')}"
            f" ({percent(share)} of the pool) can never be used again"
        )
        if shared:
            explanation += (
                f", {counted(shared, 'more is', 'more are')} still shared with living requests and will follow"
            )
        explanation += "."
        if lost.culprits:
            names = listed([record.id for record in lost.culprits])
            explanation += f" Their free was skipped when these requests ended: {names}."
        return HoldsBlocks(
            code=self.code,
            engine=ledger.engine,
            verdict="confirmed" if audited else "likely",
            # Blocks from before a loss may have been freed in it: an audit shows that, or an idle engine's counter.
            pending=not certain.references or age < settings(self.grace_s),
            since_ns=since,
            position=lost.first_at(ledger),
            requests=tuple(record.id for record in lost.culprits),
            blocks=tuple(lost.references),
            share_of_pool=round(share, 4),
            evidence=(
                Evidence("unaccounted_blocks", len(unaccounted), "blocks", position=left_at),
                Evidence("unexplained_references", references, "references", position=left_at),
                Evidence("share_of_pool", round(share, 4), "of the pool", position=left_at),
                Evidence("requests_leaking", len(lost.culprits), "requests", position=left_at),
                Evidence("audits_since", int(audited), "audits", "audit", position=ledger.at(state.places.audited)),
            ),
            explanation=explanation,
            do_now=(LOST_RESTART, KEEP_HISTORY),
            change=(
                "The bug is in the engine's code path that ended these requests: report it with that history, and"
                " upgrade to a release with the fix.",
            ),
            wont_help=LOST_WONT_HELP,
            missing="" if audited else NO_AUDIT_SINCE,
        )

    def _judge_idle_use(self, ledger: EngineLedger, lost: LostReferences | None, used: int) -> HoldsBlocks:
        """Judge an idle engine by its own counter, which holds even after lost events."""
        state, at = ledger.state, ledger.at
        usable = state.total - state.reserved
        known = lost if lost is not None and len(lost.references) == used else None
        share = round(used / usable, 4)
        return HoldsBlocks(
            code=self.code,
            engine=ledger.engine,
            verdict="likely",
            since_ns=known.since_ns(ledger) if known is not None else ledger.uncertain_since_ns,
            position=at(state.places.heartbeat),
            requests=tuple(record.id for record in known.culprits) if known is not None else (),
            blocks=tuple(known.references) if known is not None else (),
            share_of_pool=share,
            evidence=(
                Evidence("unaccounted_blocks", used, "blocks", position=at(state.places.heartbeat)),
                Evidence("share_of_pool", share, "of the pool", position=at(state.places.heartbeat)),
                Evidence("running", 0, "requests", position=at(state.places.heartbeat)),
                Evidence("waiting", 0, "requests", position=at(state.places.heartbeat)),
                Evidence("lost_batches", sum(ledger.lost_batches.values()), "batches", position=at(state.lost_at)),
            ),
            explanation=(
                f"The idle engine counts {counted(used, 'block')} ({percent(share)} of the pool) as used beyond all"
                " announced deferrals, with no request running or waiting. Events were lost before that, so the"
                " ledger cannot prove each block, but no live request can hold them."
            ),
            do_now=(LOST_RESTART, KEEP_HISTORY),
            change=(
                "The bug is in the engine's code path that ended these requests: report it with that history, and"
                " upgrade to a release with the fix.",
            ),
            wont_help=LOST_WONT_HELP,
            missing="an audit since the loss: a deferral that keeps the blocks may be among the lost events",
        )
