"""The rooms and their order: a room imports only rooms above it, and what installs beside an engine stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# From the ground up. A module belongs to the longest name that it begins with.
ROOMS = (
    "kvscope.kernels",
    "kvscope.monitor.plugins",
    "kvscope.monitor.events",
    "kvscope.monitor.state",
    "kvscope.monitor.publishing",
    "kvscope.monitor.probes",
    "kvscope.monitor.text",
    "kvscope.engine",
    "kvscope.monitor.sources",
    "kvscope.monitor.ledger",
    "kvscope.monitor.analysis",
    "kvscope.monitor.detectors",
    "kvscope.monitor.findings",
    "kvscope.monitor.history",
    "kvscope.monitor.schema",
    "kvscope.monitor.queries",
    "kvscope.monitor.pipeline",
    "kvscope.monitor.incidents",
    "kvscope.monitor.query",
    "kvscope.monitor.alerting",
    "kvscope.monitor.exporters",
    "kvscope.monitor.doctor",
    "kvscope.monitor.service",
    "kvscope.monitor.commands",
    "kvscope.monitor.cli",
    "kvscope.monitor.__main__",
    "kvscope.dashboards",
    "kvscope.dashboards.prometheus",
    "kvscope.command",
    "kvscope.__main__",
)
# What each of these may import of ours, and nothing else.
ONLY = {
    "kvscope.kernels": {"kvscope.kernels"},
    "kvscope.monitor.events": {"kvscope.monitor.events"},
    "kvscope.engine": {
        "kvscope.engine",
        "kvscope.kernels",
        "kvscope.monitor.events",
        "kvscope.monitor.state",
        "kvscope.monitor.publishing",
    },
    "kvscope.dashboards": {
        "kvscope.dashboards",
        "kvscope.monitor.query",
        "kvscope.monitor.schema",
        "kvscope.monitor.findings",
    },
    "kvscope.dashboards.prometheus": {
        "kvscope.dashboards.prometheus",
        "kvscope.monitor.detectors",
        "kvscope.monitor.findings",
    },
}
# The wheel has no engine: of the monitor only the lab of incidents, which says so, runs it.
RUN_THE_ENGINE = {"kvscope.engine", "kvscope.monitor.incidents"}
# `monitor serve` has the page; it imports it when it runs.
EXCEPTIONS = {("kvscope.monitor.commands.serve", "kvscope.dashboards.web.app")}


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / "kvscope").glob("*.py")):
        yield f"kvscope.{path.stem}".removesuffix(".__init__"), path
    for top in ("kernels", "engine", "monitor", "dashboards"):
        for path in sorted((ROOT / top).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield f"kvscope.{name}".removesuffix(".__init__"), path


def imports(name: str, path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def room_of(module: str) -> str | None:
    found = [room for room in ROOMS if module == room or module.startswith(f"{room}.")]
    return max(found, key=len, default=None)


def test_every_module_has_a_room() -> None:
    homeless = [name for name, _ in modules() if room_of(name) is None and name not in ("kvscope", "kvscope.monitor")]
    assert not homeless


def test_a_room_imports_only_rooms_above_it() -> None:
    wrong = []
    for name, path in modules():
        room = room_of(name)
        for imported in imports(name, path):
            other = room_of(imported)
            if room is None or other is None or (name, imported.rpartition(".")[0]) in EXCEPTIONS:
                continue
            allowed = ONLY.get(room)
            not_for_it = other == "engine" and room not in RUN_THE_ENGINE
            if ROOMS.index(other) > ROOMS.index(room) or (allowed is not None and other not in allowed) or not_for_it:
                wrong.append(f"{name} imports {imported}")
    assert not wrong


def test_tests_mirror_the_rooms() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    of_the_house = {room.rpartition(".")[2] for room in ROOMS} | {"web", "dashboards"}
    assert folders <= of_the_house


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        # Beside any vLLM: the standard library, msgspec and pyzmq.
        (
            "kvscope.monitor.publishing.publisher",
            {"httpx", "rich", "numpy", "torch", "fastapi", "starlette", "prometheus_client"},
        ),
        # `monitor doctor` with the base install.
        (
            "kvscope.monitor.cli",
            {"torch", "numpy", "fastapi", "starlette", "uvicorn", "dash", "plotly", "prometheus_client"},
        ),
        # A lab runs these in virtual time, without a model.
        ("kvscope.engine.scheduling.scheduler", {"torch", "triton", "numpy"}),
        ("kvscope.engine.blocks.table_audit", {"torch", "triton", "numpy"}),
    ],
)
def test_what_a_module_brings_with_it(module: str, heavy: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not heavy & set(loaded.stdout.split())
