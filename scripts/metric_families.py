"""Lists the metric families that releases of engines name in their source, in tests/data/metric-families.txt.

    python -m scripts.metric_families vllm-0.33.0=FOLDER sglang-0.5.23=FOLDER

FOLDER has a release's Python files, unpacked from its wheel. Releases that are not given keep their lines.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

LIST: Final = Path(__file__).parent.parent / "tests" / "data" / "metric-families.txt"
NAME: Final = re.compile(r"(?:vllm|sglang):[a-z][a-z0-9_]+")


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
    """Return the families of each release, by `ENGINE-RELEASE`, of a text that `written` made."""
    lines = (line.split() for line in text.splitlines() if line and not line.startswith("#"))
    releases: dict[str, set[str]] = {}
    for family, *names in lines:
        for name in names:
            releases.setdefault(name, set()).add(family)
    return releases


def written(releases: dict[str, set[str]]) -> str:
    """Return the text: a family a line, with the releases that name it."""
    families = sorted(set().union(*releases.values()))
    of = {family: " ".join(name for name in sorted(releases) if family in releases[name]) for family in families}
    lines = (f"{family} {names}" for family, names in of.items())
    return "\n".join(("# By `python -m scripts.metric_families`: a family, and the releases that name it.", *lines, ""))


def main(arguments: list[str]) -> None:
    """Read the folders of the command line."""
    releases = read_releases(LIST.read_text(encoding="utf-8")) if LIST.exists() else {}
    for argument in arguments:
        release, _, folder = argument.partition("=")
        releases[release] = set(named_families(Path(folder)))
        print(f"{release}: {len(releases[release])} families")
    LIST.write_text(written(releases), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
