"""The page of all finding codes, docs/codes.md: meaning, severity, runbook, and the best verdict from each source.

The registry has codes, titles and severities. This module adds what it does not declare: how sure a verdict can be
from each source. tests/test_codes_page.py compares that with the verdicts of recorded incidents and public reports.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from kvscope.monitor.detectors.detector import Detector, Signal
from kvscope.monitor.detectors.judgement import Verdict
from kvscope.monitor.detectors.registry import CATALOGUE, sources_of
from kvscope.monitor.detectors.written.hypotheses import HYPOTHESES

ROOT: Final = Path(__file__).parent.parent
FAMILIES: Final = {
    "leak": ("Leaks", "Blocks stay in use after the request that needed them has ended."),
    "stuck": ("Stuck requests and engines", "Work waits for something that does not come."),
    "thrash": ("Thrashing", "The engine computes the same tokens more than once."),
    "collapse": ("Collapses", "Usage or the hit rate of the prefix cache drops suddenly."),
    "imbalance": ("Imbalance", "Data-parallel ranks of one server have unequal load."),
    "corrupt": ("Corruption", "The engine's accounts contradict each other."),
    "sizing": ("Sizing", "The pool does not fit the device or the load."),
    "held": ("No leak", "Memory is in use for a sound reason. These codes are information."),
    "blind": ("Observation", "kvscope misses part of the picture. These codes are information."),
}

HEAD: Final = """\
# Finding codes

A finding has a code, `family.name`. Each code links to its runbook: symptoms, causes, how to confirm it, what to do
now, what to change and what will not help. `monitor runbook CODE` prints the same page.

The columns of sources show the highest verdict that each can support. The evidence decides each time, and a verdict can
be lower: [how verdicts are reached](concepts/verdicts.md). An empty cell means that the source cannot show the code.
Prometheus shows what metrics show. *cannot-tell* in the column of bug reports is a hypothesis. It names the signal that
you should collect.

**lab only** marks codes that kvscope's own engine has shown, and no vLLM so far
([recall by code](results.md#recall-by-code)).
"""
HEADINGS: Final[dict[Signal, str]] = {
    "stream": "event stream",
    "metrics": "metrics",
    "log": "log",
    "report": "bug report",
    "kv-events": "KV events",
}
LAB_ONLY: Final = frozenset(
    (
        "collapse.preempt-all",
        "sizing.bad-suggestion",
        "sizing.elsewhere",
        "sizing.kv-too-large",
        "sizing.overreserved",
        "stuck.lost-wakeup",
        "thrash.after-retract",
    )
)
"""Codes that neither a test on vLLM nor a drawn run on its scheduler has found: only kvscope's own engine has."""
CERTAIN_FROM_ANY_SOURCE: Final = frozenset(
    (
        "held.pool-reserved",
        "sizing.overreserved",
        "blind.not-exposed",
        "blind.counter-lag",
        "blind.log-silence",
        "blind.plugin-failed",
        "blind.reader-failed",
    )
)
"""Codes that follow from what the source itself states, or from the monitor's own state."""
BEST: Final[Mapping[str, Mapping[Signal, Verdict]]] = {
    "leak.encoder-cache": {"stream": "likely"},
    "stuck.encoder-budget": {"stream": "likely"},
    "stuck.front-end": {"stream": "likely"},
    "stuck.grammar": {"stream": "likely"},
    "thrash.after-retract": {"stream": "likely"},
    "stuck.never-fits": {"metrics": "cannot-tell"},
    "collapse.prefix-hits": {"metrics": "cannot-tell"},
    "collapse.lockstep": {"report": "cannot-tell"},
    "sizing.bad-suggestion": {"stream": "likely", "log": "confirmed"},
    "sizing.refused-start": {"log": "confirmed", "report": "confirmed"},
}
"""Where the best verdict of a source is not the usual one: *confirmed* from the event stream, else *likely*."""
WRITTEN: Final = ROOT / "monitor" / "detectors" / "written"
NO_RULES: Final = ("__init__", "hypotheses")


def codes_of_lines() -> frozenset[str]:
    """Return the codes that single lines of a log or a report can show: those that the modules of rules name."""
    sources = (path.read_text(encoding="utf-8") for path in WRITTEN.glob("*.py") if path.stem not in NO_RULES)
    return (
        frozenset(code for source in sources for code in re.findall(r'"([a-z]+\.[a-z-]+)"', source)) & CATALOGUE.keys()
    )


def best_verdicts(detector: type[Detector[Any]], lines: Collection[str]) -> dict[Signal, Verdict]:
    """Return the highest verdict from each source that can show this code, without other sources.

    lines: the codes that single lines of a log or a report show.
    """
    code = detector.code
    best: dict[Signal, Verdict] = dict.fromkeys(sources_of(code), "likely")
    if "stream" in best:
        best["stream"] = "confirmed"
    if code in lines:
        best |= {"log": "likely", "report": "likely"}
    if any(row.code == code for row in HYPOTHESES):
        best.setdefault("report", "cannot-tell")
    if code in CERTAIN_FROM_ANY_SOURCE:
        best = dict.fromkeys(best, "confirmed")
    return best | dict(BEST.get(code, {}))


def codes_page() -> str:
    """Return docs/codes.md."""
    lines = HEAD.splitlines()
    families = list(dict.fromkeys(code.partition(".")[0] for code in CATALOGUE))
    for family in families:
        heading, text = FAMILIES[family]
        lines += ["", f"## {heading}", "", text, "", *_family_table(family)]
    return "\n".join(lines) + "\n"


def _family_table(family: str) -> Iterator[str]:
    yield "| code | meaning | severity | " + " | ".join(HEADINGS.values()) + " |"
    yield "|---|---|---" + "|---" * len(HEADINGS) + "|"
    lines = codes_of_lines()
    for code, detector in CATALOGUE.items():
        if code.partition(".")[0] == family:
            best = best_verdicts(detector, lines)
            verdicts = (best.get(signal, "") for signal in HEADINGS)
            name = f"[{code}](runbooks/{code}.md)" + (" **lab only**" if code in LAB_ONLY else "")
            yield f"| {name} | {detector.title} | {detector.severity} | " + " | ".join(verdicts) + " |"
