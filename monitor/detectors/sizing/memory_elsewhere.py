"""sizing.elsewhere: much device memory is in use that the memory breakdown does not name. From the event only."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import percent
from ...ledger.engine_ledger import EngineLedger
from ...ledger.memory_breakdown import measured, unnamed
from ..detector import Settings, StreamDetector, Threshold
from ..judgement import Judgement, seen
from .memory_figures import size_text


class MemoryElsewhere(StreamDetector[Judgement]):
    """Device memory that is neither KV nor named by the engine.

    Sees: a twentieth of the device in use that no part of the engine's memory breakdown explains.
    Confirmed when: the driver tells the engine's memory from that of other processes.
    Likely when: it does not.
    Not when: the parts explain it.
    """

    code = "sizing.elsewhere"
    severity = "warning"
    title = "Much device memory is in use outside the memory breakdown"
    lab_only = True

    min_share = Threshold(0.05, "of the device", "a driver, a display or a second small process is less")

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the memory that the breakdown does not name."""
        known = measured(ledger.state.memory)
        unknown = unnamed(known)
        if not unknown or unknown < settings(self.min_share) * known["device_total"]:
            return
        others = known.get("used_by_others")
        total = known["device_total"]
        theirs = others is not None and others >= unknown / 2
        position = ledger.at(ledger.state.places.memory)
        named = (
            "weights",
            "activations_peak",
            "graphs_actual",
            "non_torch",
            "kv_pool",
            "allocator_reserved",
            "allocator_allocated",
        )
        yield self.finding(
            ledger,
            position=position,
            evidence=(
                seen("unattributed_memory", unknown, "bytes", position),
                seen("unattributed_share", round(unknown / total, 4), "of the device", position),
                seen("device_total", total, "bytes", position),
                seen("device_free", known["device_free"], "bytes", position),
                seen("used_by_other_processes", "not known" if others is None else others, "bytes", position),
                *(seen(name, known[name], "bytes", position) for name in named if name in known),
            ),
            explanation=(
                f"{size_text(unknown)} of the device's {size_text(total)} ({percent(unknown / total)}) are in use, but"
                " not as KV or any other part of the engine's memory breakdown: "
                + (
                    f"other processes hold {size_text(others or 0)}."
                    if theirs
                    else "another process holds them."
                    if others is None
                    else "the engine itself holds them, and did not when it measured its memory at startup."
                )
            ),
            case="" if theirs or others is None else "If nothing else uses the device",
            missing="which process holds it: the driver does not distinguish processes here" if others is None else "",
        )
