"""sizing.elsewhere: much device memory is in use that the memory breakdown does not name; from the event only."""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.analysis.memory_breakdown import measured, unnamed
from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.sizing.memory_figures import size_text
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.text import percent


class MemoryElsewhere(Detector[Judgement]):
    """Device memory that is neither KV nor named by the engine."""

    code = "sizing.elsewhere"
    severity = "warning"
    title = "Much device memory is in use that the bill does not name"
    requires = ("stream",)
    position = 620

    min_share = Threshold(0.05, "of the device", "a driver, a display or a second small process is less")

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the memory that the breakdown does not name."""
        if ledger.has_stream:
            yield from self._from_stream(ledger, settings, measured(ledger.state.memory))

    def _from_stream(self, ledger: EngineLedger, settings: Settings, known: dict[str, int]) -> Iterator[Judgement]:
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
        yield Judgement(
            code=self.code,
            engine=ledger.engine,
            verdict="likely" if others is None else "confirmed",
            position=position,
            evidence=(
                Evidence("unattributed_memory", unknown, "bytes", position=position),
                Evidence("unattributed_share", round(unknown / total, 4), "of the device", position=position),
                Evidence("device_total", total, "bytes", position=position),
                Evidence("device_free", known["device_free"], "bytes", position=position),
                Evidence(
                    "used_by_other_processes", "not known" if others is None else others, "bytes", position=position
                ),
                *(Evidence(name, known[name], "bytes", position=position) for name in named if name in known),
            ),
            explanation=(
                f"{size_text(unknown)} of the device's {size_text(total)} ({percent(unknown / total)}) are in use and"
                " are neither KV nor anything else on the engine's bill: "
                + (
                    f"other processes have {size_text(others or 0)}."
                    if theirs
                    else "another process has them."
                    if others is None
                    else "the engine itself has them, and did not have them when it was measured at its start."
                )
            ),
            do_now=(
                ("Look at who is on the device (nvidia-smi), and end what does not belong there.",)
                if theirs or others is None
                else ("If it grows, restart the engine before the device is full; drain it first.",)
            ),
            change=(
                "Leave room for what shares the device: a lower --gpu-memory-utilization, or an own device for each.",
                "If the engine itself grows: look for what keeps tensors from step to step (logits, prompt_logprobs,"
                " hooks, adapters), and for slack of the allocator"
                " (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True).",
            ),
            wont_help=("Looking at KV cache usage, or resetting the prefix cache: the pool's size never changes.",),
            missing="whose it is: the driver does not tell processes apart here" if others is None else "",
        )
