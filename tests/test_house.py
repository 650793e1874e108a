"""Architecture rules: the order of the rooms, the size of files and functions, and names that a search can find."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# From the ground up. A module belongs to the longest name that it begins with.
ROOMS = (
    "kvscope.version",
    "kvscope.kernels",
    "kvscope.monitor.errors",
    "kvscope.monitor.plugins",
    "kvscope.monitor.events",
    "kvscope.monitor.bounded_server",
    "kvscope.monitor.state",
    "kvscope.monitor.publishing",
    "kvscope.monitor.probes",
    "kvscope.monitor.text",
    "kvscope.monitor.reason_words",
    "kvscope.monitor.confidence_bounds",
    "kvscope.monitor.bounded_http",
    "kvscope.monitor.supervision",
    "kvscope.monitor.rare_collections",
    "kvscope.monitor.kept_database",
    "kvscope.monitor.runbook_files",
    "kvscope.monitor.planning",
    "kvscope.engine",
    "kvscope.engine.faults",
    "kvscope.engine.requests",
    "kvscope.engine.config",
    "kvscope.engine.blocks",
    "kvscope.engine.connectors",
    "kvscope.engine.scheduling",
    "kvscope.engine.models",
    "kvscope.engine.execution",
    "kvscope.engine.core",
    "kvscope.engine.serving",
    "kvscope.engine.lab",
    "kvscope.engine.command_line",
    "kvscope.engine.__main__",
    "kvscope.monitor.sources",
    "kvscope.monitor.discovery",
    "kvscope.monitor.ledger",
    "kvscope.monitor.analysis",
    "kvscope.monitor.detectors",
    "kvscope.monitor.findings",
    "kvscope.monitor.fleet_schema",
    "kvscope.monitor.history",
    "kvscope.monitor.schema",
    "kvscope.monitor.alert_state",
    "kvscope.monitor.json_names",
    "kvscope.monitor.arrow_tables",
    "kvscope.monitor.query",
    "kvscope.monitor.client",
    "kvscope.monitor.queries",
    "kvscope.monitor.pipeline",
    "kvscope.monitor.incidents.truth",
    "kvscope.monitor.incidents",
    "kvscope.monitor.bus_figures",
    "kvscope.monitor.alerting",
    "kvscope.monitor.exporters",
    "kvscope.monitor.doctor",
    "kvscope.monitor.session",
    "kvscope.monitor.bus",
    "kvscope.monitor.service",
    "kvscope.monitor.hub",
    "kvscope.monitor.configuration",
    "kvscope.monitor.commands",
    "kvscope.monitor.cli",
    "kvscope.monitor.__main__",
    "kvscope.dashboards.objectives",
    "kvscope.dashboards",
    "kvscope.dashboards.prometheus",
    "kvscope.command",
    "kvscope.__main__",
)
# What each of these may import of ours, and nothing else.
ONLY = {
    "kvscope.kernels": {"kvscope.kernels"},
    "kvscope.monitor.events": {"kvscope.monitor.events", "kvscope.monitor.errors"},
    "kvscope.engine": {
        "kvscope.version",
        "kvscope.engine",
        "kvscope.kernels",
        "kvscope.monitor.events",
        "kvscope.monitor.bounded_server",
        "kvscope.monitor.state",
        "kvscope.monitor.publishing",
    },
    # Decides what happened without anything that a detector rests on.
    "kvscope.monitor.incidents.truth": {"kvscope.monitor.incidents.truth"},
    "kvscope.dashboards": {
        "kvscope.dashboards",
        "kvscope.dashboards.objectives",
        "kvscope.monitor.errors",
        "kvscope.monitor.text",
        "kvscope.monitor.reason_words",
        "kvscope.monitor.query",
        "kvscope.monitor.schema",
        "kvscope.monitor.alert_state",
        "kvscope.monitor.findings",
        "kvscope.monitor.fleet_schema",
    },
    "kvscope.dashboards.prometheus": {
        "kvscope.dashboards.prometheus",
        "kvscope.dashboards.objectives",
        "kvscope.monitor.detectors",
        "kvscope.monitor.findings",
    },
}
# The engine is an extra of the wheel: of the monitor, only the incident lab runs it, and says so when it is missing.
RUN_THE_ENGINE = {"kvscope.engine", "kvscope.monitor.incidents", "kvscope.command"}
# `monitor serve` and `monitor hub` import the web app when they run.
EXCEPTIONS = {(f"kvscope.monitor.commands.{command}", "kvscope.dashboards.web.app") for command in ("serve", "hub")}


MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
# A name or file that repeats by agreement, and the package in which it does ("kvscope": anywhere).
REPEATED_BY_PROTOCOL = {
    "logger": "kvscope",  # logging.getLogger(__name__)
    "main": "kvscope",  # the entry point of a command
    "__all__": "kvscope",
    "__init__.py": "kvscope",
    "__main__.py": "kvscope",  # python -m
    "view": "kvscope.dashboards.web.views",  # each page of the web app
    "add": "kvscope.monitor.commands",  # each command defines itself on the command line
    "_run": "kvscope.monitor.commands",  # and runs
}
# The exceptions to a limit, each with its reason. At most five of each.
LONG_FILES = {"tests/engine/test_fault_symptoms.py"}  # one test for each fault, over one set of helpers
LONG_FUNCTIONS = {  # Triton compiles a kernel from one function
    "kvscope.kernels.paged_decode.paged_decode_kernel",
    "kvscope.kernels.paged_prefill.paged_prefill_kernel",
}


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
            not_for_it = other == "kvscope.engine" and room not in RUN_THE_ENGINE
            if ROOMS.index(other) > ROOMS.index(room) or (allowed is not None and other not in allowed) or not_for_it:
                wrong.append(f"{name} imports {imported}")
    assert not wrong


def test_tests_mirror_the_rooms() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    of_the_house = {room.rpartition(".")[2] for room in ROOMS} | {"web", "dashboards", "deploy", "mutation", "chaos"}
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


def imported_at_load(nodes: Iterable[ast.AST]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that run with the module: neither inside a function nor for type checking only."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from imported_at_load(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imported_at_load(ast.iter_child_nodes(node))


def dependencies(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """The modules among `sources` (name → code) that each of them imports when it is loaded."""
    found: dict[str, set[str]] = {name: set() for name in sources}
    for name, code in sources.items():
        for node in imported_at_load([ast.parse(code)]):
            parent = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                target = f"{parent}{alias.name}"
                if target not in sources:
                    target = target.rpartition(".")[0]
                if target in sources and target != name:
                    found[name].add(target)
    return found


def circular(graph: Mapping[str, Set[str]]) -> set[str]:
    """The nodes of `graph` on a circle, or between two circles."""
    left = {node: set(others) for node, others in graph.items()}
    while True:
        reached = set().union(*left.values())
        ends = {node for node, others in left.items() if not others or node not in reached}
        if not ends:
            return set(left)
        left = {node: others - ends for node, others in left.items() if node not in ends}


def test_no_circle_of_imports() -> None:
    assert circular(dependencies({name: path.read_text() for name, path in modules()})) == set()


def test_a_circle_is_found_and_a_typing_import_makes_none() -> None:
    sources = {"a": "import b", "b": "from c import x", "c": "import a", "d": "import a"}
    assert circular(dependencies(sources)) == {"a", "b", "c"}
    sources["c"] = "if TYPE_CHECKING:\n    import a\nelse:\n    import os\ndef f():\n    import a"
    assert circular(dependencies(sources)) == set()


def sources_with_limits() -> Iterator[Path]:
    for top in ("kvscope", "kernels", "engine", "monitor", "dashboards", "tests", "benchmarks", "scripts"):
        for suffix in ("py", "js", "css"):
            yield from sorted((ROOT / top).rglob(f"*.{suffix}"))


def test_files_stay_short() -> None:
    lengths = {path.relative_to(ROOT).as_posix(): path.read_bytes().count(b"\n") for path in sources_with_limits()}
    long = {path for path, lines in lengths.items() if lines > MAX_FILE_LINES}
    assert long - LONG_FILES == set()


def test_functions_stay_short() -> None:
    long = set()
    for name, path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES:
                    long.add(f"{name}.{node.name}")
    assert long - LONG_FUNCTIONS == set()


def defined_in(path: Path) -> Iterator[str]:
    """The names of functions, classes and constants at the top level of a module."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                        yield part.id


def repeated(places: Mapping[str, Set[str]]) -> dict[str, list[str]]:
    """What occurs in two modules or more, and not by protocol only."""
    found = {}
    for name, homes in places.items():
        package = REPEATED_BY_PROTOCOL.get(name)
        outside = {home for home in homes if package is None or not f"{home}.".startswith(f"{package}.")}
        if len(outside) > 1 or (outside and outside != homes):
            found[name] = sorted(homes)
    return found


def test_a_name_is_defined_once() -> None:
    places = defaultdict(set)
    for module, path in modules():
        for name in defined_in(path):
            places[name].add(module)
    found = repeated(places)
    assert found == {}


def test_a_file_name_occurs_once() -> None:
    places = defaultdict(set)
    for module, path in modules():
        places[path.name].add(module)
    assert repeated(places) == {}


def test_a_repetition_is_found_unless_a_protocol_declares_it() -> None:
    commands = "kvscope.monitor.commands"
    assert repeated({"add": {f"{commands}.top", f"{commands}.sql"}, "judge": {"kvscope.engine.core"}}) == {}
    twice = {"add": {f"{commands}.top", "kvscope.engine.core"}, "judge": {"kvscope.a", "kvscope.b"}}
    assert set(repeated(twice)) == {"add", "judge"}
