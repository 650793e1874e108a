"""sizing.elsewhere: much device memory is in use that the memory breakdown does not name. From the event only."""

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
    title = "Much device memory is in use outside the memory breakdown"
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
                f"{size_text(unknown)} of the device's {size_text(total)} ({percent(unknown / total)}) are in use,"
                " but not as KV or any other part of the engine's memory breakdown: "
                + (
                    f"other processes hold {size_text(others or 0)}."
                    if theirs
                    else "another process holds them."
                    if others is None
                    else "the engine itself holds them, and did not when it measured its memory at startup."
                )
            ),
            do_now=(
                ("List the processes on the device (nvidia-smi), and end those that do not belong there.",)
                if theirs or others is None
                else ("If it grows, drain and restart the engine before the device is full.",)
            ),
            change=(
                "Leave room for other processes on the device: lower --gpu-memory-utilization, or use a device for"
                " each.",
                "If the engine itself grows, look for tensors kept between steps (logits, prompt_logprobs, hooks,"
                " adapters), and for allocator fragmentation (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True).",
            ),
            wont_help=("Watching KV cache usage, or resetting the prefix cache: the pool's size never changes.",),
            missing="which process holds it: the driver does not distinguish processes here" if others is None else "",
        )
