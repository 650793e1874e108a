"""The runbooks: one Markdown page for each finding code, carried by the wheel and found in a checkout.

`monitor runbook CODE` prints them, the service serves them under /docs/runbooks/.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_PACKAGE: Final = Path(__file__).resolve().parent
_IN_WHEEL: Final = _PACKAGE / "runbooks"
RUNBOOKS: Final = _IN_WHEEL if _IN_WHEEL.is_dir() else _PACKAGE.parent / "docs" / "runbooks"


def runbook_codes() -> list[str]:
    """Return the codes that have a runbook, in alphabetical order."""
    return sorted(path.stem for path in RUNBOOKS.glob("*.md"))


def runbook_text(code: str) -> str | None:
    """Return the runbook of `code` as Markdown, or None if there is none."""
    # Only a name from the folder is opened, so that no code can lead out of it.
    return (RUNBOOKS / f"{code}.md").read_text(encoding="utf-8") if code in runbook_codes() else None
