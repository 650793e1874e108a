"""Explain the KV-cache memory of paged-attention LLM engines.

It shows the holder of every block, the reason, the age, and the remedy.

    with kvscope.open("recording/") as session:
        for finding in session.findings():
            print(finding.code, finding.explanation)

docs/python-api.md is the guide. Only the names in `__all__` are public.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvscope.monitor.detectors.detector import Detector
    from kvscope.monitor.detectors.judgement import Evidence, Judgement
    from kvscope.monitor.detectors.thresholds import Settings, Threshold
    from kvscope.monitor.errors import (
        BadQuestion,
        BadTarget,
        BadTime,
        CannotTell,
        ContractError,
        KvscopeError,
        NotKnown,
        Unreachable,
    )
    from kvscope.monitor.findings import FindingReport as Finding
    from kvscope.monitor.ledger.engine_snapshot import EngineSnapshot, RequestSnapshot
    from kvscope.monitor.session import Session
    from kvscope.monitor.session import open_target as open
    from kvscope.monitor.sources.source import Source, SourceOptions, SourceStatus

__all__ = [
    "BadQuestion",
    "BadTarget",
    "BadTime",
    "CannotTell",
    "ContractError",
    "Detector",
    "EngineSnapshot",
    "Evidence",
    "Finding",
    "Judgement",
    "KvscopeError",
    "NotKnown",
    "RequestSnapshot",
    "Session",
    "Settings",
    "Source",
    "SourceOptions",
    "SourceStatus",
    "Threshold",
    "Unreachable",
    "open",
]

# Imported when first used: the probe imports this package inside the engine's process.
_HOMES = {
    "Detector": "kvscope.monitor.detectors.detector",
    "Evidence": "kvscope.monitor.detectors.judgement",
    "Judgement": "kvscope.monitor.detectors.judgement",
    "Settings": "kvscope.monitor.detectors.thresholds",
    "Threshold": "kvscope.monitor.detectors.thresholds",
    "Finding": "kvscope.monitor.findings:FindingReport",
    "EngineSnapshot": "kvscope.monitor.ledger.engine_snapshot",
    "RequestSnapshot": "kvscope.monitor.ledger.engine_snapshot",
    "Source": "kvscope.monitor.sources.source",
    "SourceOptions": "kvscope.monitor.sources.source",
    "SourceStatus": "kvscope.monitor.sources.source",
    "Session": "kvscope.monitor.session",
    "open": "kvscope.monitor.session:open_target",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kvscope' has no attribute {name!r}")
    module, _, attribute = _HOMES.get(name, "kvscope.monitor.errors").partition(":")
    return getattr(importlib.import_module(module), attribute or name)


def __dir__() -> list[str]:
    return __all__
