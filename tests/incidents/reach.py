"""Which codes were shown on which engine: `python -m tests.incidents.reach` writes docs/accuracy/reach.md."""

from __future__ import annotations

import json
from pathlib import Path

from kvscope.monitor.detectors.registry import CATALOGUE
from kvscope.monitor.findings import severity_at_least
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


def tests_on_vllm(code: str) -> list[str]:
    """Return the test modules that run vLLM and name the code."""
    paths = sorted((ROOT / "tests" / "probes").glob("test_vllm*.py"))
    return [path.stem for path in paths if f'"{code}"' in path.read_text()]


def drawn_on_vllm() -> dict[str, list[str]]:
    """Return, by code, the releases on whose scheduler a drawn run rightly found it."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "docs" / "accuracy").glob("vllm-*.json")):
        for code in json.loads(path.read_bytes())["reach"]:
            found.setdefault(code, []).append(path.stem.removeprefix("vllm-"))
    return found


def reach_page() -> str:
    """Return the page."""
    on_scheduler = drawn_on_vllm()
    drawn = json.loads((ROOT / "docs" / "accuracy" / "baseline.json").read_bytes())["reach"]
    scenarios = {scenario.code for scenario in INCIDENTS}
    lines = []
    for code, detector in CATALOGUE.items():
        if not severity_at_least(detector.severity, "warning"):
            continue
        on_vllm = tests_on_vllm(code)
        on_own = [source in drawn.get(code, []) for source in ("stream", "metrics")]
        on_own.append(code in scenarios)
        releases = on_scheduler.get(code, [])
        mark = "**lab only**" if any(on_own) and not on_vllm and not releases else ""
        shown = [", ".join(names) or "–" for names in (releases, on_vllm)]
        cells = [code, *("yes" if one else "–" for one in on_own), *shown, mark]
        lines.append(f"| {' | '.join(cells)} |\n")
    return HEAD + "".join(lines)


def main() -> None:
    """Write the page."""
    PAGE.write_text(reach_page())


if __name__ == "__main__":
    main()
