"""A code takes one module, one runbook and one scenario: the diff of docs/write-a-detector.md, applied to a copy."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvscope.lab.__main__ import main
from kvscope.lab.new_code import HEADINGS, missing_parts, new_code_files
from kvscope.monitor.detectors.registry import CATALOGUE

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "write-a-detector.md").read_text()
CODE = "stuck.long-queue"
COPIED = (
    "deploy",
    "kvscope",
    "engine",
    "kernels",
    "monitor",
    "dashboards",
    "lab",
    "docs",
    "scripts",
    "tests",
    "pyproject.toml",
    "README.md",
)


def copied(folder: Path) -> Callable[..., str]:
    """Copy the repository there, and return what runs Python in it."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, folder / name)

    def run(*arguments: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        answer = subprocess.run(
            [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr
        return answer.stdout

    return run


def test_the_example_of_the_page_is_the_plugins_module() -> None:
    for path, code in re.findall(r"<!-- example: (\S+) -->\n```python\n(.*?)```\n", PAGE, re.DOTALL):
        assert (ROOT / path).read_text() == code


def test_no_code_lacks_a_part() -> None:
    assert [part for code in CATALOGUE for part in missing_parts(code)] == []


@pytest.mark.parametrize("code", ["stuck.Long", "odd.long-queue", "stuck.", "stuck.never-fits"])
def test_a_new_code_has_a_known_family_and_a_name_that_is_free(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-code", code]) == 2
    assert code in capsys.readouterr().err


@pytest.mark.slow
def test_a_skeleton_names_what_it_lacks(tmp_path: Path) -> None:
    run = copied(tmp_path)
    written = run("-m", "kvscope.lab", "new-code", CODE).splitlines()[:-1]
    assert written == list(new_code_files(CODE))
    assert all((tmp_path / path).is_file() for path in written)
    lacks = run("-c", f"from kvscope.lab.new_code import missing_parts; print(*missing_parts({CODE!r}), sep='\\n')")
    assert lacks.splitlines() == [
        "monitor/detectors/stuck/long_queue.py: a title",
        *(f"docs/runbooks/{CODE}.md: {heading}" for heading in HEADINGS),
        f"lab/scenarios: a Scenario or a ShownByHand of {CODE}",
    ]


@pytest.mark.slow
def test_the_diff_of_the_page_is_all_that_a_code_takes(tmp_path: Path) -> None:
    run = copied(tmp_path)
    (diff,) = re.findall(r"<!-- diff -->\n```diff\n(.*?)```\n", PAGE, re.DOTALL)
    assert len(re.findall(r"^diff --git", diff, re.MULTILINE)) == 3
    subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=tmp_path, check=True)
    run("-m", "scripts.docs")
    run("-m", "kvscope.dashboards.prometheus")
    thresholds = (tmp_path / "docs" / "reference" / "thresholds.md").read_text()
    assert f"[{CODE}](runbooks/{CODE}.md)" in (tmp_path / "docs" / "codes.md").read_text()
    assert f"`{CODE}.max_waiting`" in thresholds
    assert f'code="{CODE}"' in (tmp_path / "dashboards" / "prometheus" / "rules" / "kvscope.yml").read_text()
    assert run("-m", "kvscope.monitor", "runbook", CODE).startswith(f"# {CODE}")
    lab = run("-m", "kvscope.lab", "--code", CODE, "--jobs", "1")
    assert CODE in lab
    assert "0 runs not as they should be" in lab
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_docs.py", "-k", "every_code_has_a_runbook")
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/lab/test_lab.py", "-k", "of_the_catalogue or ways")
