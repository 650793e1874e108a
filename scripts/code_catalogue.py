"""The page of all finding codes, docs/codes.md: meaning, severity, runbook, and the best verdict from each source.

All of it comes from the detectors: codes, titles, severities, and the rules in their docstrings.
tests/test_codes_page.py compares the verdicts of recorded incidents and public reports with these.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final

from kvscope.monitor.detectors.detector import Detector, Signal, rule_of, surest_verdict
from kvscope.monitor.detectors.judgement import VERDICTS, Verdict
from kvscope.monitor.detectors.registry import CATALOGUE, DETECTORS
from kvscope.monitor.detectors.written.hypotheses import HYPOTHESES

ROOT: Final = Path(__file__).parent.parent
FAMILIES: Final = {
    "leak": ("Leaks", "Blocks stay in use after the request that needed them has ended."),
    "stuck": ("Stuck requests and engines", "Work waits for something that does not come."),
    "thrash": ("Thrashing", "The engine computes the same tokens more than once."),
    "collapse": ("Collapses", "Usage or the hit rate of the prefix cache drops suddenly."),
    "harm": (
        "Harm without a known cause",
        "A client suffers, and no finding of another family names a cause. Judged last, with what the others claim.",
    ),
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

Below each table are the rules: what a code sees from each source, when it is confirmed or likely, and what looks the
same and is another code. `--set` changes the amounts ([thresholds](reference/thresholds.md)).

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
WRITTEN: Final = ROOT / "monitor" / "detectors" / "written"
NO_RULES: Final = ("__init__", "hypotheses")


def codes_of_lines() -> frozenset[str]:
    """Return the codes that single lines of a log or a report can show: those that the modules of rules name."""
    sources = (path.read_text(encoding="utf-8") for path in WRITTEN.glob("*.py") if path.stem not in NO_RULES)
    return (
        frozenset(code for source in sources for code in re.findall(r'"([a-z]+\.[a-z-]+)"', source)) & CATALOGUE.keys()
    )


def best_verdicts(code: str, lines: Collection[str]) -> dict[Signal, Verdict]:
    """Return the highest verdict from each source that can show this code, without other sources.

    lines: the codes that single lines of a log or a report show.
    """
    shown: list[tuple[Signal, Verdict]] = [
        (signal, surest_verdict(type(each))) for each in DETECTORS if each.code == code for signal in each.requires
    ]
    if code in lines:
        shown += [("log", "likely"), ("report", "likely")]
    if any(row.code == code for row in HYPOTHESES):
        shown.append(("report", "cannot-tell"))
    return dict(sorted(shown, key=lambda each: VERDICTS.index(each[1])))


def codes_page() -> str:
    """Return docs/codes.md."""
    lines = HEAD.splitlines()
    families = list(dict.fromkeys(code.partition(".")[0] for code in CATALOGUE))
    for family in families:
        heading, text = FAMILIES[family]
        lines += ["", f"## {heading}", "", text, "", *_family_table(family)]
        for detector in DETECTORS:
            if detector.code.partition(".")[0] == family:
                lines += _rule_lines(detector)
    return "\n".join(lines) + "\n"


def _family_table(family: str) -> Iterator[str]:
    yield "| code | meaning | severity | " + " | ".join(HEADINGS.values()) + " |"
    yield "|---|---|---" + "|---" * len(HEADINGS) + "|"
    lines = codes_of_lines()
    for code, detector in CATALOGUE.items():
        if code.partition(".")[0] == family:
            best = best_verdicts(code, lines)
            verdicts = (best.get(signal, "") for signal in HEADINGS)
            name = f"[{code}](runbooks/{code}.md)" + (" **lab only**" if detector.lab_only else "")
            yield f"| {name} | {detector.title} | {detector.severity} | " + " | ".join(verdicts) + " |"


def _rule_lines(detector: Detector[Any]) -> Iterator[str]:
    """Yield the rule of one source, below a heading for the first of its code."""
    if "code" in vars(type(detector)):
        yield from ("", f"### {detector.code}")
    sources = ", ".join(HEADINGS[signal] for signal in detector.requires)
    rule = " ".join(f"**{name}** {text}" for name, text in rule_of(type(detector)).items())
    yield from ("", *textwrap.wrap(f"From {sources}. {rule}", 120, break_long_words=False, break_on_hyphens=False))
