"""Run `monitor doctor` of an earlier commit and of this checkout on the same incidents, and show both side by side.

    python -m scripts.doctor_before_after [--before COMMIT] [--write]

`--write` writes docs/develop/doctor-before-after.md. The earlier commit is checked out into a temporary folder, which
needs a clone with its history.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "develop" / "doctor-before-after.md"
BEFORE: Final = "5181483"
"""The last commit before the texts were rewritten."""
ROWS: Final = {
    "Finding": "explanation",
    "Do now": "do_now",
    "Change": "change",
    "Won't help": "wont_help",
    "To be sure": "missing",
}
"""The part of a finding in each row of the table, by its key in JSON."""
HEAD: Final = """\
# The doctor before and after

`python -m scripts.doctor_before_after --write` made this page. The left side is `monitor doctor` at commit {before},
the last one before its texts were rewritten. The right side is this release. Both read the same input. The tables
leave out findings of severity *info*, evidence and excluded alternatives.
[The investigations](../investigations/index.md) explain the incidents.
"""


class Incident(NamedTuple):
    """What a reader looks for, and the input."""

    title: str
    path: str


INCIDENTS: Final = (
    Incident("Usage never falls", "tests/data/seed-000.log"),
    Incident("Usage drops from 100 % to 0 %", "tests/data/seed-001.txt"),
    Incident("A request larger than the pool", "docs/investigations/larger-than-the-pool.zip"),
    Incident("A fetch that never ends", "docs/investigations/fetch-never-ends.zip"),
    Incident("Ready requests are not admitted", "docs/investigations/deferred-fill-the-slots.zip"),
    Incident("A step that never returns", "docs/investigations/step-never-returns.zip"),
)


def main() -> None:
    """Print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default=BEFORE, metavar="COMMIT")
    parser.add_argument("--write", action="store_true")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvscope-before-") as folder:
        earlier = Path(folder, "checkout")
        archive = subprocess.run(["git", "-C", str(ROOT), "archive", parsed.before], capture_output=True, check=True)
        earlier.mkdir()
        subprocess.run(["tar", "-x", "-C", str(earlier)], input=archive.stdout, check=True)
        parts = [HEAD.format(before=parsed.before)]
        for title, path in INCIDENTS:
            before, after = findings_of(earlier, path), findings_of(ROOT, path)
            parts.append(f"## {title}\n\n`monitor doctor {path}`\n\n{table_of(before, after)}")
    page = "\n".join(parts)
    if parsed.write:
        PAGE.write_text(page, encoding="utf-8")
    else:
        print(page, end="")


def findings_of(checkout: Path, path: str) -> list[dict[str, Any]]:
    """Return the findings of warning and above that the doctor of `checkout` reports for `path`."""
    command = [sys.executable, "-P", "-m", "kvscope.monitor", "doctor", path, "--format", "json"]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1, 3):
        sys.exit(f"{checkout}: {done.stderr}")
    return [found for found in json.loads(done.stdout)["findings"] if found["severity"] != "info"]


def table_of(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str:
    """Return a table for each finding, with one side empty for a finding that only the other commit has."""
    tables = []
    for code in dict.fromkeys(found["code"] for found in [*after, *before]):
        sides = [next((found for found in found_by if found["code"] == code), {}) for found_by in (before, after)]
        heads = [f"{each['code']}, {each['verdict']}" if each else "no such finding" for each in sides]
        rows = [f"| | before: {heads[0]} | after: {heads[1]} |", "|---|---|---|"]
        for label, key in ROWS.items():
            texts = [cell_of(each.get(key, "")) for each in sides]
            if any(texts):
                rows.append(f"| {label} | {texts[0]} | {texts[1]} |")
        tables.append("\n".join(rows) + "\n")
    return "\n".join(tables) or "Neither has a finding of warning or above.\n"


def cell_of(value: str | list[str]) -> str:
    """Return a text, or a list of steps, as the cell of a table."""
    steps = [value] if isinstance(value, str) else value
    return "<br>".join(step.replace("|", "\\|").replace("<", "&lt;") for step in steps)


if __name__ == "__main__":
    main()
