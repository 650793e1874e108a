"""`python -m kvscope.lab new-code CODE`: write the three files of a new finding code, and name what they still lack.

A code takes a class in its family's folder, a runbook and a scenario. docs/write-a-detector.md says what belongs in
each.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from kvscope.monitor.detectors.detector import rule_of
from kvscope.monitor.detectors.registry import CATALOGUE, DETECTORS, FAMILIES
from kvscope.monitor.detectors.runbook_files import runbook_text
from kvscope.monitor.terminal.report import NOTHING

from .scenarios import INCIDENTS, SHOWN_BY_HAND

ROOT: Final = Path(__file__).resolve().parents[1]
CODE: Final = re.compile(rf"({'|'.join(FAMILIES)})\.[a-z0-9]+(-[a-z0-9]+)*")
HEADINGS: Final = ("What it looks like", "Why it happens", "How to confirm", "Do now", "Change", "What will not help")
CLASS: Final = '''\
"""{code}."""

from __future__ import annotations

from collections.abc import Iterator

from ...ledger.engine_ledger import EngineLedger
from ..detector import Settings, StreamDetector
from ..judgement import Judgement


class {name}(StreamDetector[Judgement]):
    """One sentence: what is wrong.

    Sees: what the engine does while it is so.
    Confirmed when: what excludes each alternative.
    Likely when: what remains possible, and which signal would exclude it.
    Not when: what looks the same, each with its own code.
    """

    code = "{code}"
    severity = "warning"
    title = ""

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield each problem."""
        yield from ()
'''
SCENARIO: Final = '''\
"""Scenarios of {code}."""

from __future__ import annotations

from typing import Final

from .scenario import Scenario

{constant}: Final[tuple[Scenario, ...]] = ()
'''


def new_code_files(code: str) -> dict[str, str]:
    """Return the text of each file of a new code, by its path in the repository."""
    family, _, own = code.partition(".")
    module, name = own.replace("-", "_"), own.title().replace("-", "")
    runbook = "".join(f"\n## {heading}\n" for heading in HEADINGS)
    return {
        f"monitor/detectors/{family}/{module}.py": CLASS.format(code=code, name=name),
        f"docs/runbooks/{code}.md": f"# {code}:\n\nSeverity: warning.\n{runbook}",
        f"lab/scenarios/{family}_{module}.py": SCENARIO.format(code=code, constant=module.upper()),
    }


def missing_parts(code: str) -> Iterator[str]:
    """Yield what a code of the catalogue lacks, by file."""
    module = CATALOGUE[code].__module__.removeprefix("kvscope.").replace(".", "/")
    if not CATALOGUE[code].title:
        yield f"{module}.py: a title"
    for detector in DETECTORS:
        if detector.code == code:
            each = type(detector)
            source = f"{each.__module__.removeprefix('kvscope.').replace('.', '/')}.py: {each.__name__}"
            rule = rule_of(each)
            yield from (f"{source}: {part}" for part in ("Sees",) if part not in rule)
            if rule.keys() <= {"Sees", "Not when"}:
                yield f"{source}: Confirmed when, Likely when or Cannot tell"
    runbook = runbook_text(code)
    if runbook is None:
        yield f"docs/runbooks/{code}.md"
    elif CATALOGUE[code].severity != "info":
        written = dict(re.findall(r"^## (.+)\n\n*((?:(?!## ).*\n?)*)", runbook, re.MULTILINE))
        yield from (
            f"docs/runbooks/{code}.md: {heading}" for heading in HEADINGS if not written.get(heading, "").strip()
        )
    if all(code != each.code for each in INCIDENTS) and not any(fnmatch(code, each) for each in SHOWN_BY_HAND):
        yield f"lab/scenarios: a Scenario or a ShownByHand of {code}"


def new_code(arguments: Sequence[str]) -> int:
    """Write the files of the code that the arguments name, in this checkout, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m kvscope.lab new-code", description="Writes the class, the runbook and the scenarios of a code."
    )
    parser.add_argument("code", help=f"FAMILY.NAME, such as stuck.long-queue. Families: {', '.join(FAMILIES)}")
    code: str = parser.parse_args(arguments).code
    if not CODE.fullmatch(code):
        raise ValueError(f"{code}: a code has the form FAMILY.NAME, of a-z, 0-9 and -, and one of the known families")
    files = new_code_files(code)
    taken = [path for path in files if (ROOT / path).exists()]
    if taken:
        raise ValueError(f"{code}: {', '.join(taken)} is there already")
    for path, text in files.items():
        (ROOT / path).write_text(text)
        print(path)
    print("Fill them in. tests/detectors/test_new_code.py names what is missing.")
    return NOTHING
