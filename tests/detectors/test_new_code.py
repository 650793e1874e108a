"""A code takes one module, one runbook and one scenario: the diff of docs/write-a-detector.md, applied to a copy."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "write-a-detector.md").read_text()
CODE = "stuck.long-queue"
COPIED = (
    "kvscope",
    "engine",
    "kernels",
    "monitor",
    "dashboards",
    "docs",
    "scripts",
    "tests",
    "pyproject.toml",
    "README.md",
)


def test_the_example_of_the_page_is_the_plugins_module() -> None:
    for path, code in re.findall(r"<!-- example: (\S+) -->\n```python\n(.*?)```\n", PAGE, re.DOTALL):
        assert (ROOT / path).read_text() == code


@pytest.mark.slow
def test_the_diff_of_the_page_is_all_that_a_code_takes(tmp_path: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "screens")
            shutil.copytree(source, tmp_path / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, tmp_path / name)
    (diff,) = re.findall(r"<!-- diff -->\n```diff\n(.*?)```\n", PAGE, re.DOTALL)
    assert len(re.findall(r"^diff --git", diff, re.MULTILINE)) == 3
    subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=tmp_path, check=True)

    def run(*arguments: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        answer = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr
        return answer.stdout

    run("-m", "scripts.docs")
    run("-m", "kvscope.dashboards.prometheus")
    reference = (tmp_path / "docs" / "reference.md").read_text()
    assert f"[{CODE}](runbooks/{CODE}.md)" in (tmp_path / "docs" / "codes.md").read_text()
    assert f"`{CODE}.max_waiting`" in reference
    assert f'code="{CODE}"' in (tmp_path / "dashboards" / "prometheus" / "rules" / "kvscope.yml").read_text()
    assert run("-m", "kvscope.monitor", "runbook", CODE).startswith(f"# {CODE}")
    lab = run("-m", "kvscope.monitor", "incidents", "--code", CODE, "--jobs", "1")
    assert CODE in lab
    assert "0 runs not as they should be" in lab
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_docs.py", "-k", "every_code_has_a_runbook")
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/incidents/test_lab.py", "-k", "of_the_catalogue or ways")
