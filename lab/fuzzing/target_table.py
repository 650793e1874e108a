"""Every reader that is fed damaged input, by the name that the campaign takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from .fuzz_targets import (
    BundleTarget,
    FrameTarget,
    FuzzTarget,
    HistoryTarget,
    JournalTarget,
    KvEventsTarget,
    LogTarget,
    ReportTarget,
)
from .served_targets import PageTarget, PrometheusTarget, QuestionTarget

TARGETS: Final[dict[str, Callable[[Path, Sequence[bytes]], FuzzTarget]]] = {
    "frame": FrameTarget,
    "journal": JournalTarget,
    "parquet-and-index": HistoryTarget,
    "bundle": BundleTarget,
    "metrics-page": PageTarget,
    "prometheus-answer": PrometheusTarget,
    "kv-events": KvEventsTarget,
    "log": LogTarget,
    "prose": ReportTarget,
    "api-question": QuestionTarget,
}
