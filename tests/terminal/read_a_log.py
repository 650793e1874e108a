"""The outputs in docs/read-a-log.md: `python -m tests.terminal.read_a_log` writes them, and a test compares them."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from kvscope.monitor.terminal.cli import main

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "read-a-log.md"
SHOWN = re.compile(r"(```console\n\$ monitor doctor (tests/data/\S+)\n).*?(```\n)", re.DOTALL)


@contextmanager
def at_80_columns() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR")}
    os.environ.update(COLUMNS="80", NO_COLOR="1")
    os.chdir(ROOT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def printed(target: str) -> str:
    """What doctor prints of a target, and its exit code as the last line."""
    out = io.StringIO()
    with at_80_columns(), redirect_stdout(out), redirect_stderr(out):
        code = main(["doctor", target])
    text = "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())
    return f"{text}\n$ echo $?\n{code}\n"


def written(page: str) -> str:
    """The page with what doctor prints now."""
    return SHOWN.sub(lambda match: f"{match[1]}{printed(match[2])}{match[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
