"""Architecture rules: the order of the rooms, the size of files and functions, and names that a search can find."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from kvscope.monitor.detectors.detector import Threshold

ROOT = Path(__file__).parent.parent

FOLDERS = ("kernels", "engine", "monitor", "dashboards", "lab")
# From the ground up. A module belongs to the longest name that it begins with.
ROOMS = (
    "kvscope.version",
    "kvscope.kernels",
    "kvscope.monitor.base",
    "kvscope.monitor.contract",
    "kvscope.monitor.ledger",
    "kvscope.monitor.probes",
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
    "kvscope.engine.bench",
    "kvscope.engine.command_line",
    "kvscope.engine.__main__",
    "kvscope.monitor.planning",
    "kvscope.monitor.sources",
    "kvscope.monitor.detectors",
    "kvscope.monitor.detectors.findings",
    "kvscope.monitor.history",
    "kvscope.monitor.questions",
    "kvscope.monitor.outputs",
    "kvscope.monitor.fleet",
    "kvscope.monitor.service",
    "kvscope.monitor.terminal",
    "kvscope.monitor.__main__",
    "kvscope.dashboards.objectives",
    "kvscope.dashboards",
    "kvscope.dashboards.prometheus",
    "kvscope.command",
    "kvscope.__main__",
    "kvscope.lab.truth",
    "kvscope.lab",
)
# What each of these may import of ours, and nothing else.
ONLY = {
    "kvscope.kernels": {"kvscope.kernels"},
    "kvscope.monitor.contract": {"kvscope.monitor.contract", "kvscope.monitor.base"},
    "kvscope.engine": {
        "kvscope.version",
        "kvscope.engine",
        "kvscope.kernels",
        "kvscope.monitor.base",
        "kvscope.monitor.contract",
        "kvscope.monitor.ledger",
        "kvscope.monitor.probes",
    },
    # Decides what happened without anything that a detector rests on.
    "kvscope.lab.truth": {"kvscope.lab.truth"},
    "kvscope.dashboards": {
        "kvscope.dashboards",
        "kvscope.dashboards.objectives",
        "kvscope.monitor.base",
        "kvscope.monitor.detectors.findings",
        "kvscope.monitor.questions",
    },
    "kvscope.dashboards.prometheus": {
        "kvscope.dashboards.prometheus",
        "kvscope.dashboards.objectives",
        "kvscope.monitor.detectors",
        "kvscope.monitor.detectors.findings",
    },
}
# The engine is an extra of the wheel, which the monitor does without.
RUN_THE_ENGINE = {"kvscope.engine", "kvscope.command", "kvscope.lab"}
# `monitor serve` and `monitor hub` import the web app when they run.
EXCEPTIONS = {
    (f"kvscope.monitor.terminal.commands.{command}", "kvscope.dashboards.web.app") for command in ("serve", "hub")
}


POOL_SIZES = {"usable", "usable_blocks", "num_gpu_blocks"}
# Where shares of a pool are looked for, and whether they are printed there. Detectors compare them with thresholds too.
SHARES_IN = {
    "monitor/planning": True,
    "monitor/detectors": False,
    "monitor/questions": True,
    "monitor/outputs": True,
    "monitor/fleet": True,
    "monitor/service": True,
    "monitor/terminal": True,
    "dashboards/web": True,
}

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
# A name or file that repeats by agreement, and the package in which it does ("kvscope": anywhere).
REPEATED_BY_PROTOCOL = {
    "logger": "kvscope",  # logging.getLogger(__name__)
    "main": "kvscope",  # the entry point of a command
    "__all__": "kvscope",
    "__init__.py": "kvscope",
    "__main__.py": "kvscope",  # python -m
    "view": "kvscope.dashboards.web.views",  # each page of the web app
    "define": "kvscope.monitor.terminal.commands",  # each command defines its arguments
}
# The exceptions to a limit, each with its reason. At most five of each.
LONG_FILES = {"tests/engine/test_fault_symptoms.py"}  # one test for each fault, over one set of helpers
LONG_FUNCTIONS = {  # Triton compiles a kernel from one function
    "kvscope.kernels.paged_decode.paged_decode_kernel",
    "kvscope.kernels.paged_prefill.paged_prefill_kernel",
}


# Threads that need no supervision, each with its reason.
OTHER_THREADS = {
    "kvscope.monitor.base.plugins",  # one call of a plug-in: its caller waits for it, and takes what it raises
    "kvscope.monitor.history.sql_process",  # in the process of one query, which it ends
    "kvscope.monitor.probes.publisher",  # in the engine's process, which has no service to report to
}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / "kvscope").glob("*.py")):
        yield f"kvscope.{path.stem}".removesuffix(".__init__"), path
    for top in ("kernels", "engine", "monitor", "dashboards", "lab"):
        for path in sorted((ROOT / top).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield f"kvscope.{name}".removesuffix(".__init__"), path


def imports(name: str, path: Path) -> Iterator[str]:
    """What a module imports, by absolute names."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def room_of(module: str) -> str | None:
    found = [room for room in ROOMS if module == room or module.startswith(f"{room}.")]
    return max(found, key=len, default=None)


def test_every_thread_of_the_monitor_is_supervised() -> None:
    """A thread outside of supervision.py may end unnoticed, and what it does ends with it."""
    made = {
        module
        for module, path in modules()
        if module.startswith("kvscope.monitor") and module != "kvscope.monitor.base.supervision"
        for node in ast.walk(parsed(path))
        if (isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("Thread", "Timer"))
        or (isinstance(node, ast.ClassDef) and {"Thread", "threading.Thread"} & set(map(ast.unparse, node.bases)))
    }
    assert made == OTHER_THREADS


def test_every_module_has_a_room() -> None:
    homeless = [name for name, _ in modules() if room_of(name) is None and name not in ("kvscope", "kvscope.monitor")]
    assert not homeless


def test_imports_within_a_folder_are_relative_and_those_across_are_absolute() -> None:
    """So that tools which know git's paths alone see the rooms: in a checkout, monitor/ is not below kvscope/."""
    wrong = []
    for name, path in modules():
        folder = ".".join(name.split(".")[:2])
        is_ours = folder.removeprefix("kvscope.") in FOLDERS
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and node.level:
                package = name if path.name == "__init__.py" else name.rpartition(".")[0]
                if len(package.split(".")) - node.level < 1:
                    wrong.append(f"{name}:{node.lineno} leaves {folder}")
            elif isinstance(node, ast.ImportFrom) and is_ours and f"{node.module}.".startswith(f"{folder}."):
                wrong.append(f"{name}:{node.lineno} imports {node.module} by its absolute name")
            elif isinstance(node, ast.Import | ast.ImportFrom):
                origins = [node] if isinstance(node, ast.ImportFrom) else node.names
                names = [each.module if isinstance(each, ast.ImportFrom) else each.name for each in origins]
                wrong += [f"{name}:{node.lineno} imports {top}" for top in names if top.split(".")[0] in FOLDERS]
    assert not wrong


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
    of_the_house = {room.rpartition(".")[2] for room in ROOMS} | {"web", "dashboards", "deploy"}
    assert folders <= of_the_house


def test_no_test_changes_a_threshold() -> None:
    """A test that needs another value passes it as a user would: by `--set`, or by Settings."""
    changes = re.compile(r"\.value\s*[-+*/]?=(?!=)|setattr\([^)]*[\"']value[\"']")
    tests = (ROOT / "tests").rglob("*.py")
    assert not [str(path.relative_to(ROOT)) for path in tests if changes.search(path.read_text())]


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        # Beside any vLLM: the standard library, msgspec and pyzmq.
        (
            "kvscope.monitor.probes.publisher",
            {"httpcore2", "rich", "numpy", "torch", "fastapi", "starlette", "prometheus_client"},
        ),
        # `monitor doctor` with the base install.
        (
            "kvscope.monitor.terminal.cli",
            {"torch", "numpy", "fastapi", "starlette", "uvicorn", "dash", "plotly", "prometheus_client"},
        ),
        # A lab runs these in virtual time, without a model.
        ("kvscope.engine.scheduling.scheduler", {"torch", "triton", "numpy"}),
        ("kvscope.engine.blocks.table_audit", {"torch", "triton", "numpy"}),
    ],
)
@pytest.mark.usefixtures("real_parts")
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


def dependencies(sources: Mapping[str, str], packages: Set[str] = frozenset()) -> dict[str, set[str]]:
    """The modules among `sources` (name → code), some of them packages, that each of them imports when it is loaded."""
    found: dict[str, set[str]] = {name: set() for name in sources}
    for name, code in sources.items():
        package = name if name in packages else name.rpartition(".")[0]
        for node in imported_at_load([ast.parse(code)]):
            parent = ""
            if isinstance(node, ast.ImportFrom):
                parent = importlib.util.resolve_name("." * node.level + (node.module or ""), package) + "."
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


def _other_percentages(path: Path, printed: bool) -> Iterator[int]:
    """Yield the lines that compute a share of a pool themselves, or round one themselves."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            divisor = {
                one.attr if isinstance(one, ast.Attribute) else one.id
                for one in ast.walk(node.right)
                if isinstance(one, ast.Attribute | ast.Name)
            }
            is_total = isinstance(node.right, ast.Attribute) and node.right.attr == "total"
            if is_total or (printed and divisor & POOL_SIZES):
                yield node.lineno
        elif isinstance(node, ast.JoinedStr) and printed:
            for part, after in pairwise([*node.values, ast.Constant("")]):
                spec = (
                    ast.unparse(part.format_spec) if isinstance(part, ast.FormattedValue) and part.format_spec else ""
                )
                ends = str(after.value) if isinstance(after, ast.Constant) else ""
                if spec and "+" not in spec and (ends.startswith(" %") or spec.rstrip("'").endswith("%")):
                    yield part.lineno


def test_shares_of_a_pool_come_from_its_account() -> None:
    """Of usable blocks, by `share_of_pool` or `Balance.share`, and rounded by `percent`."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder, printed in SHARES_IN.items()
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in _other_percentages(path, printed)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("held / balance.total", True),
        ("held / max(state.usable, 1)", True),
        ("size / total", False),
        ("f'{held:.1f} %'", True),
        ("f'{share:.0%}'", True),
        ("f'{change:+.0%}'", False),
        ("f'{percent(balance.share(held))} of the pool'", False),
    ],
)
def test_another_percentage_of_blocks_is_found(line: str, is_found: bool, tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(line)
    assert bool(list(_other_percentages(tmp_path / "one.py", printed=True))) == is_found


def test_no_circle_of_imports() -> None:
    packages = {name for name, path in modules() if path.name == "__init__.py"}
    assert circular(dependencies({name: path.read_text() for name, path in modules()}, packages)) == set()


def test_a_circle_is_found_and_a_typing_import_makes_none() -> None:
    sources = {"a": "import b", "b": "from c import x", "c": "import a", "d": "import a"}
    assert circular(dependencies(sources)) == {"a", "b", "c"}
    sources["c"] = "if TYPE_CHECKING:\n    import a\nelse:\n    import os\ndef f():\n    import a"
    assert circular(dependencies(sources)) == set()


def test_families_of_detectors_share_thresholds_only_from_a_home_of_their_own() -> None:
    detectors = ROOT / "monitor" / "detectors"
    families = {path.parent.name for path in detectors.glob("*/__init__.py")}
    crossing = []
    for path in sorted(detectors.glob("*/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 2 and node.module:
                family = node.module.partition(".")[0]
                if family in families:
                    module = importlib.import_module(f"kvscope.monitor.detectors.{node.module}")
                    names = [each.name for each in node.names if isinstance(getattr(module, each.name), Threshold)]
                    crossing += [f"{path.parent.name}/{path.name}: {node.module}.{name}" for name in names]
    assert crossing == []


def sources_with_limits() -> Iterator[Path]:
    for top in ("kvscope", "kernels", "engine", "monitor", "dashboards", "lab", "tests", "benchmarks", "scripts"):
        for suffix in ("py", "js", "css"):
            yield from sorted((ROOT / top).rglob(f"*.{suffix}"))


def test_files_stay_short() -> None:
    lengths = {path.relative_to(ROOT).as_posix(): path.read_bytes().count(b"\n") for path in sources_with_limits()}
    long = {path for path, lines in lengths.items() if lines > MAX_FILE_LINES}
    assert long - LONG_FILES == set()


def test_functions_stay_short() -> None:
    long = set()
    for name, path in modules():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES:
                    long.add(f"{name}.{node.name}")
    assert long - LONG_FUNCTIONS == set()


def defined_in(path: Path) -> Iterator[str]:
    """The names of functions, classes and constants at the top level of a module."""
    for node in parsed(path).body:
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


def test_a_public_name_is_defined_once() -> None:
    """A search of the product for it finds one thing. A private name belongs to its module."""
    places = defaultdict(set)
    for module, path in modules():
        if module.startswith("kvscope.lab"):
            continue
        for name in defined_in(path):
            if not name.startswith("_"):
                places[name].add(module)
    found = repeated(places)
    assert found == {}


def test_a_file_name_occurs_once() -> None:
    places = defaultdict(set)
    for module, path in modules():
        places[path.name].add(module)
    assert repeated(places) == {}


def test_a_repetition_is_found_unless_a_protocol_declares_it() -> None:
    commands = "kvscope.monitor.terminal.commands"
    assert repeated({"define": {f"{commands}.top", f"{commands}.sql"}, "judge": {"kvscope.engine.core"}}) == {}
    twice = {"define": {f"{commands}.top", "kvscope.engine.core"}, "judge": {"kvscope.a", "kvscope.b"}}
    assert set(repeated(twice)) == {"define", "judge"}
