"""Explain the KV-cache memory of paged-attention LLM engines.

It shows the holder of every block, the reason, the age, and the remedy.

    with kvscope.open("recording/") as session:
        for finding in session.findings():
            print(finding.code, finding.explanation)

docs/python-api.md is the guide. Only the names in `__all__` are public.
"""

from __future__ import annotations

import importlib
from pathlib import Path as _Path
from typing import TYPE_CHECKING, Any

# A wheel has engine/, kernels/, monitor/ and dashboards/ in this folder. A checkout has them, and lab/, beside it.
if not _Path(__file__).with_name("monitor").is_dir():
    __path__.append(str(_Path(__file__).parents[1]))

if TYPE_CHECKING:
    from kvscope.monitor.base.errors import (
        BadQuestion,
        BadTarget,
        BadTime,
        CannotTell,
        ContractError,
        KvscopeError,
        NotKnown,
        Unreachable,
    )
    from kvscope.monitor.detectors.detector import Detector, Settings, Threshold
    from kvscope.monitor.detectors.findings import FindingReport as Finding
    from kvscope.monitor.detectors.judgement import Evidence, Judgement
    from kvscope.monitor.ledger.engine_ledger import EngineLedger
    from kvscope.monitor.questions.session import Session
    from kvscope.monitor.questions.session import open_target as open
    from kvscope.monitor.sources.source import Source, SourceOptions, SourceStatus

__all__ = [
    "BadQuestion",
    "BadTarget",
    "BadTime",
    "CannotTell",
    "ContractError",
    "Detector",
    "EngineLedger",
    "Evidence",
    "Finding",
    "Judgement",
    "KvscopeError",
    "NotKnown",
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
    "Settings": "kvscope.monitor.detectors.detector",
    "Threshold": "kvscope.monitor.detectors.detector",
    "Finding": "kvscope.monitor.detectors.findings:FindingReport",
    "EngineLedger": "kvscope.monitor.ledger.engine_ledger",
    "Source": "kvscope.monitor.sources.source",
    "SourceOptions": "kvscope.monitor.sources.source",
    "SourceStatus": "kvscope.monitor.sources.source",
    "Session": "kvscope.monitor.questions.session",
    "open": "kvscope.monitor.questions.session:open_target",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kvscope' has no attribute {name!r}")
    module, _, attribute = _HOMES.get(name, "kvscope.monitor.base.errors").partition(":")
    return getattr(importlib.import_module(module), attribute or name)


def __dir__() -> list[str]:
    return __all__
