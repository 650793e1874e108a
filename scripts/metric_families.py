"""Lists the metric families that releases of engines name in their source, in tests/data/metric-families.txt.

    python -m scripts.metric_families vllm-0.33.0=FOLDER sglang-0.5.23=FOLDER

FOLDER has a release's Python files, unpacked from its wheel. Releases that are not given keep their lines.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, TypeVar

LIST: Final = Path(__file__).parent.parent / "tests" / "data" / "metric-families.txt"
ABOUT: Final = "# By `python -m scripts.metric_families`: a family, and the releases that name it."
NAME: Final = re.compile(r"(?:vllm|sglang):[a-z][a-z0-9_]+")

Entry = TypeVar("Entry")


def named_families(folder: Path) -> Iterator[str]:
    """Yield the names that the strings of a release's Python files consist of."""
    for path in folder.rglob("*.py"):
        text = path.read_text(encoding="utf-8", errors="replace")
        if "vllm:" not in text and "sglang:" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value):
                yield node.value


def read_releases(text: str) -> dict[str, set[str]]:
    """Return the names of each release, by `ENGINE-RELEASE`, of a text that `written` made."""
    lines = (line.split() for line in text.splitlines() if line and not line.startswith("#"))
    releases: dict[str, set[str]] = {}
    for entry, *names in lines:
        for name in names:
            releases.setdefault(name, set()).add(entry)
    return releases


def written(releases: dict[str, set[str]], about: str = ABOUT) -> str:
    """Return the text: a name a line, with the releases that have it, under a line about them."""
    names = sorted(set().union(*releases.values()))
    lines = (
        " ".join([name, *(release for release in sorted(releases) if name in releases[release])]) for name in names
    )
    return "\n".join((about, *lines, ""))


def reread(
    arguments: list[str], releases: dict[str, set[Entry]], found: Callable[[str, Path], Iterable[Entry]], what: str
) -> dict[str, set[Entry]]:
    """Return the releases with what is found in the folders of the command line in place of what they had."""
    for argument in arguments:
        release, _, folder = argument.partition("=")
        releases[release] = set(found(release, Path(folder)))
        print(f"{release}: {len(releases[release])} {what}")
    return releases


def main(arguments: list[str]) -> None:
    """Read the folders of the command line."""
    known = read_releases(LIST.read_text(encoding="utf-8"))
    LIST.write_text(written(reread(arguments, known, lambda _, folder: named_families(folder), "families")), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
