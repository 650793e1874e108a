"""Which codes were shown on which engine: `python -m tests.incidents.reach` writes docs/accuracy/reach.md."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from kvscope.monitor.detectors.registry import CATALOGUE
from kvscope.monitor.findings import severity_at_least
from kvscope.monitor.incidents.on_vllm.fault_table import release_tuple
from kvscope.monitor.incidents.scenarios import INCIDENTS

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "accuracy" / "reach.md"
HEAD = """\
# Reach: which codes were shown on which engine

`python -m tests.incidents.reach` writes this page. *Drawn runs* are those of [the baseline](baseline.md), from the
event stream and from the metrics page alone. *Scenario* is the fixed table of faults. *vLLM, drawn* lists the
releases on whose scheduler a drawn run rightly found the code. *vLLM, tests* lists the test modules that name the
code and run vLLM with the probe: its bare scheduler, one process or the server.

A code that only kvscope's own engine has shown is marked **lab only**: neither a test nor a drawn run has found it
on an engine in use so far. A code without any mark was shown by streams, logs or pages written by hand.

| code | drawn, stream | drawn, metrics | scenario | vLLM, drawn | vLLM, tests | |
|---|---|---|---|---|---|---|
"""
RUNS_HEAD = """
## Drawn runs in which it happened

By the truth, over all seeds on the pages of the [lab](../incidents.md#results), which say in how many of them the code
was found. A bare scheduler has no front end, no memory plan and no host tier, and what it lacks cannot happen there.
For collapse.lockstep, pages of seeds before 20261213 count steps in which prompts took the whole budget, and later ones
the waves that end together.

| code | kvscope | {releases} | vLLM, all |
|---|---|{lines}---|
"""
BASELINE_RELEASE = "0.32.0"
"""The release of the pages of vLLM that do not name one."""


def tests_on_vllm(code: str) -> list[str]:
    """Return the test modules that run vLLM and name the code."""
    paths = sorted((ROOT / "tests" / "probes").glob("test_vllm*.py"))
    return [path.stem for path in paths if f'"{code}"' in path.read_text()]


def pages_by_engine() -> dict[str, list[Any]]:
    """Return the pages of drawn runs, by `own` and vLLM's release, in order."""
    found: dict[str, list[Any]] = {}
    for path in sorted((ROOT / "docs" / "accuracy").glob("*.json")):
        engine, _, name = path.stem.partition("-")
        first = name.partition("-")[0]
        if engine == "vllm":
            engine = first if first[0].isdecimal() else BASELINE_RELEASE
        found.setdefault("own" if path.stem == "baseline" else engine, []).append(json.loads(path.read_bytes()))
    return found


def runs_table(pages: dict[str, list[Any]]) -> str:
    """Return the table of runs in which each code happened, by engine."""
    releases = sorted((one for one in pages if one != "own"), key=release_tuple)
    runs: Counter[tuple[str, str]] = Counter()
    for engine, of_engine in pages.items():
        for recall in (recall for page in of_engine for recall in page["recalls"] if recall["source"] == "stream"):
            runs[recall["code"], engine] += recall["trials"]
    lines = []
    for code in (code for code in CATALOGUE if any(runs[code, engine] for engine in pages)):
        counts = [runs[code, engine] for engine in ("own", *releases)]
        cells = [code, *(str(count or "–") for count in (*counts, sum(counts[1:])))]
        lines.append(f"| {' | '.join(cells)} |\n")
    head = RUNS_HEAD.format(releases=" | ".join(f"vLLM {one}" for one in releases), lines="---|" * len(releases))
    return head + "".join(lines)


def reach_page() -> str:
    """Return the page."""
    pages = pages_by_engine()
    drawn = json.loads((ROOT / "docs" / "accuracy" / "baseline.json").read_bytes())["reach"]
    scenarios = {scenario.code for scenario in INCIDENTS}
    lines = []
    for code, detector in CATALOGUE.items():
        if not severity_at_least(detector.severity, "warning"):
            continue
        on_vllm = tests_on_vllm(code)
        on_own = [source in drawn.get(code, []) for source in ("stream", "metrics")]
        on_own.append(code in scenarios)
        on_scheduler = [one for one in pages if one != "own" and any(code in page["reach"] for page in pages[one])]
        releases = sorted(on_scheduler, key=release_tuple)
        mark = "**lab only**" if any(on_own) and not on_vllm and not releases else ""
        shown = [", ".join(names) or "–" for names in (releases, on_vllm)]
        cells = [code, *("yes" if one else "–" for one in on_own), *shown, mark]
        lines.append(f"| {' | '.join(cells)} |\n")
    return HEAD + "".join(lines) + runs_table(pages)


def main() -> None:
    """Write the page."""
    PAGE.write_text(reach_page())


if __name__ == "__main__":
    main()
