"""corrupt.conservation: the blocks under all holders do not add up to the pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvscope.monitor.analysis.pool_imbalance import Imbalance, find_imbalance
from kvscope.monitor.detectors.advice import named
from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.text import clock_time, counted

MAX_IMBALANCE_EVENTS: Final = 6


class Conservation(Detector[Judgement]):
    """Total is not free + cached-idle + running + waiting + finished + reserved + UNACCOUNTED."""

    code = "corrupt.conservation"
    severity = "critical"
    title = "The blocks of the pool do not add up"
    requires = ("stream",)
    position = 530

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield a judgement if the parts of the pool differ from its total and no lost event explains that."""
        imbalance = find_imbalance(ledger)
        if imbalance is not None:
            yield _judge_imbalance(ledger, imbalance)


def _judge_imbalance(ledger: EngineLedger, imbalance: Imbalance) -> Judgement:
    parts, blocks = imbalance.balance, imbalance.blocks
    total, counted_blocks, at = parts.total, parts.total + parts.difference, str(ledger.last_received_at)
    disputed = counted(len(blocks), "block")
    first = f" Block {blocks[0]} is the first of {disputed} whose references differ." if blocks else ""
    engine = f" ({named(ledger)})" if named(ledger) else ""
    lossy = bool(ledger.losses)
    return Judgement(
        code=Conservation.code,
        engine=ledger.engine,
        verdict="likely" if lossy else "confirmed",
        since_ns=imbalance.since_ns,
        position=imbalance.position,
        blocks=tuple(blocks),
        evidence=(
            Evidence("difference", parts.difference, "blocks", position=at),
            Evidence("pool_blocks", total, "blocks", position=ledger.at(ledger.state.places.started)),
            Evidence("counted_blocks", counted_blocks, "blocks", position=at),
            *(
                Evidence("block_history", f"{clock_time(line.at_ns)} {line.text}", "", "stream", str(line.position))
                for line in imbalance.history[-MAX_IMBALANCE_EVENTS:]
            ),
        ),
        explanation=(
            f"The pool has {counted(total, 'block')}, but {counted_blocks:,} are counted under all holders"
            f" ({parts.difference:+,}) since {clock_time(imbalance.since_ns)}.{first} Some block counts twice or not"
            " at all, so two requests may use it, or the pool may have lost it. "
            + (
                "Events were lost, but an audit has repaired the ledger since."
                if lossy
                else "No event was lost, so no gap explains the difference."
            )
        ),
        do_now=(
            "Restart the engine if corrupt.double-free or corrupt.use-after-free fires too: outputs may mix requests.",
            "Keep a recording (monitor record) or the journal: it holds the events that contradict each other.",
        ),
        change=(
            f"This is a bug of the engine{engine}, of its probe, or of kvscope: report it with a bundle (monitor"
            " bundle TARGET FILE).",
        ),
        wont_help=("Lowering the load, or enlarging the pool.",),
        missing="the lost events before the last audit" if lossy else "",
    )
