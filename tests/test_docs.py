"""The docs say all of it, and nothing else: every setting, metric, code and command; every link leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from starlette.routing import Route

from kvscope.lab.stepped_recordings import leaking_lab, recording_of
from kvscope.monitor.detectors.registry import CATALOGUE
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.service.http_api import create_app
from kvscope.monitor.service.settings_table import SETTINGS
from kvscope.monitor.terminal.cli import main
from scripts.reference_pages import ENVIRONMENT

ROOT = Path(__file__).parent.parent
RUNBOOK_PARTS = {
    "info": ["What it looks like"],
    "else": ["What it looks like", "Why it happens", "How to confirm", "Do now", "Change", "What will not help"],
}


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_what_is_generated_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make docs` writes these; in a process of its own, since the reference must not depend on this one's settings."""
    code = "from scripts import docs; print(*[p for p, text in docs.generated().items() if p.read_text() != text])"
    stale = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "KVSCOPE_URL": "http://elsewhere:1", "COLUMNS": "40"},
    )
    assert stale.stdout.split() == [], "run `make docs`"


def test_every_variable_of_the_environment_is_named() -> None:
    used = set()
    for folder in ("monitor", "engine", "dashboards", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            used |= set(re.findall(r"\bKVSCOPE_[A-Z_]+\b", path.read_text()))
    assert used - set(ENVIRONMENT) == set()
    assert set(ENVIRONMENT) <= used


def test_every_setting_of_the_configuration_file_is_in_the_reference() -> None:
    reference = (ROOT / "docs" / "reference" / "settings.md").read_text()
    assert [key for key in SETTINGS if f"`{key}`" not in reference] == []


def test_every_route_of_the_service_and_of_the_engine_is_documented() -> None:
    text = "".join(page.read_text() for page in pages())
    of_service = {route.path for route in create_app(Pipeline(), list).routes if isinstance(route, Route)}
    of_engine = set(re.findall(r'Route\("([^"]+)"', (ROOT / "engine" / "serving" / "server.py").read_text()))
    catch_all = {"/api/{path:path}"}  # what names an unknown route
    assert len(of_service) > 20
    assert len(of_engine) > 5
    assert [path for path in sorted(of_service | of_engine) if path not in text and path not in catch_all] == []


def test_every_code_has_a_runbook_and_every_runbook_a_code() -> None:
    runbooks = {path.stem: path.read_text() for path in (ROOT / "docs" / "runbooks").glob("*.md")}
    assert set(runbooks) == set(CATALOGUE)
    for code, text in runbooks.items():
        severity, title = CATALOGUE[code].severity, CATALOGUE[code].title
        assert text.partition("\n")[0].lower() == f"# {code}: {title}".lower()
        says = "Information" if severity == "info" else f"Severity: {severity}."
        assert says in text
        for part in RUNBOOK_PARTS["info" if severity == "info" else "else"]:
            assert f"\n## {part}\n" in text, f"{code}: {part}"


def test_every_link_leads_somewhere() -> None:
    assert [f"{page.relative_to(ROOT)}: {target}" for page in pages() for target in broken_links(page)] == []


def broken_links(page: Path) -> Iterator[str]:
    """The targets of a page's links that do not exist, with their anchor where only that is missing."""
    for path, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        target = page.parent / path if path else page
        if path.startswith(("http://", "https://")):
            continue
        if not target.exists():
            yield path
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{path}#{anchor}"


@cache
def anchors(page: Path) -> frozenset[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads)


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A head\n[here](#a-head) [gone](#a-foot) [page](page.md#a-head) [none](other.md) [no](page.md#x)\n"
    )
    assert [*broken_links(page)] == ["#a-foot", "other.md", "page.md#x"]


def test_every_page_of_the_docs_is_in_the_navigation_of_the_site() -> None:
    """Runbooks are added by scripts/site_hooks.py; the build of the site refuses other pages."""
    named = set(re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    found = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    left_out = {page for page in found - named if not page.startswith("runbooks/")}
    assert left_out == set(), "name them in mkdocs.yml"


def test_the_python_in_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recording_of(leaking_lab(), tmp_path / "run2")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(code, {})
    assert "leak.finished-held" in capsys.readouterr().out


def test_the_diagnosis_in_the_readme_is_what_doctor_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each part of it, between the lines that stand for what is left out, is a part of the output at 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(ROOT)
    shown = re.search(r"\$ \.venv/bin/monitor (doctor \S+)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    main(shown[1].split())
    printed = capsys.readouterr().out
    parts = [part.strip("\n") for part in shown[2].split("…\n") if part.strip()]
    assert len(parts) == 3
    for part in parts:
        assert part in printed


def test_the_commands_in_the_readme_are_there() -> None:
    """Each `make` target and each flag that the README shows exists."""
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`?make ([a-z]+)`?", readme)) - {"nothing"} <= targets
    reference = (ROOT / "docs" / "reference" / "commands.md").read_text()
    for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", readme):
        assert flag in reference, flag
