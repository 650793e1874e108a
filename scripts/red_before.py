"""Show that tests fail on an earlier commit and pass here: their problem was there, and is solved.

    python -m scripts.red_before BASE TOPIC [-k EXPRESSION]

BASE is a commit. TOPIC is a section of tests/red_before/tests.toml, where a test may take its `limit_s`, or 30 s. The
commit is checked out in a temporary worktree, into which the topic's files are copied. The checkout itself stays
unchanged. Names that the earlier commit did not have yet come from tests/red_before/names: they are appended to its
modules, or become new ones, and change no behaviour.

Exit code: 0 if every test is red there and green here, but for those that `green_before` names, or else 1. A test that
could not be run there, because a name is missing, is marked `error` and counts as red. So does one that hangs there.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parent.parent
TOPICS: Final = ROOT / "tests" / "red_before" / "tests.toml"
PLUGINS: Final = ROOT / "tests" / "red_before"
LIMIT_S: Final = 30
NAMES: Final = ROOT / "tests" / "red_before" / "names"


class Outcome(NamedTuple):
    """The outcome of one test: passed, failed, error or skipped, and why, in a line."""

    result: str
    reason: str


def main() -> int:
    """Run the topic's tests on both commits, and print a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("base")
    parser.add_argument("topic")
    parser.add_argument("-k", dest="expression", default="", help="as pytest takes it")
    given = parser.parse_args()
    topic = tomllib.loads(TOPICS.read_text(encoding="utf-8"))[given.topic]
    arguments = [*topic["tests"], *(["-k", given.expression] if given.expression else [])]
    limit_s = topic.get("limit_s", LIMIT_S)
    with checkout_of(given.base, topic["files"]) as directory:
        before = outcomes(directory, arguments, limit_s)
    here = outcomes(ROOT, arguments)
    return report(before, here, frozenset(topic.get("green_before", ())))


def report(before: Mapping[str, Outcome], here: Mapping[str, Outcome], green_before: frozenset[str]) -> int:
    """Print both outcomes of each test. Return the exit code."""
    wrong = 0
    for name, now in sorted(here.items()):
        then = before.get(name, Outcome("error", "not collected"))
        test = name.rpartition("::")[2]
        was_green = not green_before.isdisjoint((test, test.partition("[")[0]))
        expected = {"passed"} if was_green else {"failed", "error"}
        fine = now.result == "passed" and then.result in expected
        wrong += not fine
        print(f"{'  ' if fine else '! '}{then.result:8} -> {now.result:8} {name}  {then.reason[:100]}")
    print(f"{len(here) - wrong} of {len(here)} as they should be")
    return 1 if wrong or not here else 0


@contextmanager
def checkout_of(commit: str, files: Sequence[str]) -> Iterator[Path]:
    """Check the commit out in a temporary worktree, with these files of ours."""
    parent = Path(tempfile.mkdtemp(prefix="red-before-"))
    directory = parent / "checkout"
    git = ("git", "-C", str(ROOT), "worktree")
    subprocess.run([*git, "add", "--quiet", "--detach", str(directory), commit], check=True)
    try:
        for file in files:
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, directory / file)
        _add_names(directory)
        yield directory
    finally:
        subprocess.run([*git, "remove", "--force", str(directory)], check=True)
        shutil.rmtree(parent)


def _add_names(directory: Path) -> None:
    """Add the names that are missing: a file of which the module has a name already is of an even earlier time."""
    for source in sorted(NAMES.rglob("*.txt")):
        target = directory / source.relative_to(NAMES).with_suffix(".py")
        if target.exists() and (_names_in(source) | _imported_in(source)) & _names_in(target):
            continue
        with target.open("a", encoding="utf-8") as file:
            file.write("\n" + source.read_text(encoding="utf-8"))


def _names_in(path: Path) -> set[str]:
    """Return the names that a module defines at its top."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def _imported_in(path: Path) -> set[str]:
    """Return the names that a module imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }


def outcomes(directory: Path, arguments: Sequence[str], limit_s: int = LIMIT_S) -> dict[str, Outcome]:
    """Run pytest in that checkout. Return the outcome of each test by its name. limit_s: of a test on the earlier
    commit.
    """
    with tempfile.TemporaryDirectory() as kept:
        results = Path(kept) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        if directory != ROOT:
            command += ["-p", "time_limit"]
        command += ["--continue-on-collection-errors", f"--junit-xml={results}", *arguments]
        paths = f"{directory}{os.pathsep}{PLUGINS}"
        environment = {**os.environ, "PYTHONPATH": paths, "RED_BEFORE_LIMIT_S": str(limit_s)}
        subprocess.run(command, cwd=directory, env=environment, capture_output=True)
        return dict(_cases(results)) if results.exists() else {}


def _cases(results: Path) -> Iterator[tuple[str, Outcome]]:
    for case in ElementTree.parse(results).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if bad is None:
            yield name, Outcome("passed", "")
        else:
            result = {"failure": "failed", "error": "error", "skipped": "skipped"}[bad.tag]
            yield name, Outcome(result, " ".join((bad.get("message") or "").split()))


if __name__ == "__main__":
    sys.exit(main())
