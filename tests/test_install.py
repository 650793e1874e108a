"""What is installed: the wheel carries what it should and nothing else; every version is pinned."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from importlib.metadata import distributions, requires
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_wheel_installs_kvscope_and_nothing_else(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvscope"}
    for needed in (
        "kvscope/monitor/doctor/report.schema.json",
        "kvscope/monitor/runbooks/leak.finished-held.md",
        "kvscope/dashboards/grafana/generated/fleet.json",
        "kvscope/dashboards/web/app.py",
    ):
        assert needed in names


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
