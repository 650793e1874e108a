"""What kvscope is made of: pins without known advisories, hashes of what images install, a bill of materials, no name
that nobody owns.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from datetime import date, timedelta
from pathlib import Path

import pytest
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts import advisories
from scripts.advisories import MAX_AGE_DAYS, SNAPSHOT, affected, age_days, read_advisories
from scripts.lock import ENGINE_LOCK, MONITOR_LOCK, engine_requirements, locked, monitor_requirements
from scripts.sbom import CHART_LIBRARY, ROOT, direct_requirements, pinned_versions, sbom

HASHED = re.compile(r"([\w.-]+)==([\w.+!-]+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n")
INSTALLS_KVSCOPE = re.compile(r"pip3? install[^\n|`:,]*?[\s'\"]kvscope(?=[\[\s'\"=<>~!`)]|$)", re.MULTILINE)
"""A command that has pip look for kvscope by its name: a path or a wheel has more around it."""


def test_no_pinned_version_has_a_known_advisory() -> None:
    assert not list(affected(pinned_versions(), read_advisories()))


def test_the_snapshot_is_about_packages_that_are_pinned() -> None:
    advisories = read_advisories()
    pins = pinned_versions()
    assert len(advisories) > 100
    assert all(each["ranges"] or each["versions"] for each in advisories)
    assert {each["package"] for each in advisories} <= set(pins)


@pytest.mark.parametrize(
    ("version", "is_covered"),
    [("9.5.0", True), ("10.2.0", True), ("10.3.0", True), ("12.1.1", True), ("12.2.0", False), ("13.0.0", False)],
)
def test_versions_that_an_advisory_covers(version: str, is_covered: bool) -> None:
    found = list(affected({"pillow": version}, read_advisories()))
    assert bool(found) is is_covered
    assert all(Version(version) < Version(each.fixed) for each in found if each.fixed)


@pytest.mark.parametrize(("version", "is_covered"), [("1.9", False), ("2.0", True), ("2.4", True), ("2.5", False)])
def test_ranges_begin_and_end(version: str, is_covered: bool) -> None:
    for end in ({"fixed": "2.5"}, {"last_affected": "2.4"}):
        advisory = {"id": "X", "package": "x", "ranges": [{"introduced": "2.0", **end}]}
        assert bool(list(affected({"x": version}, [advisory]))) is is_covered
        assert not list(affected({"y": version}, [advisory]))


def test_the_bill_of_materials_names_every_pin() -> None:
    document = json.loads(sbom())
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    components = {each["name"]: each for each in document["components"]}
    bundled = components.pop("plotly.js-basic-dist-min")
    assert bundled["hashes"][0]["content"] == hashlib.sha256(CHART_LIBRARY.read_bytes()).hexdigest()
    assert {name: each["version"] for name, each in components.items()} == pinned_versions()
    for name, each in components.items():
        assert PackageURL.from_string(each["purl"]) == PackageURL("pypi", name=name, version=each["version"])


def test_every_direct_requirement_is_pinned() -> None:
    assert set(direct_requirements()) - {"kvscope"} <= set(pinned_versions())


@pytest.mark.parametrize("lock", [MONITOR_LOCK, ENGINE_LOCK], ids=lambda lock: lock.name)
def test_a_lock_has_hashes_of_the_pinned_versions_and_names_no_index(lock: Path) -> None:
    text = lock.read_text(encoding="utf-8")
    body = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    assert HASHED.sub("", body).strip() == ""
    versions = locked(lock)
    assert len(versions) == len(HASHED.findall(body)) > 10
    pins = pinned_versions()
    assert {name: version for name, version in versions.items() if pins.get(name) != version} == {}, (
        "run `python -m scripts.lock`"
    )


def test_the_locks_have_what_is_asked_for() -> None:
    monitor, engine = locked(MONITOR_LOCK), locked(ENGINE_LOCK)
    for asked, versions in ((monitor_requirements(), monitor), (engine_requirements(), engine)):
        missing = {canonicalize_name(Requirement(each).name) for each in asked} - set(versions)
        assert not missing, "run `python -m scripts.lock`"
    assert not {"torch", "triton"} & {*monitor, *engine}


def test_images_and_units_install_what_is_locked() -> None:
    """torch alone is pinned by its version: each of its builds has other hashes."""
    places = [ROOT / "Dockerfile", *(ROOT / "deploy" / "systemd").glob("*.service")]
    installs = [
        line for path in places for line in path.read_text(encoding="utf-8").splitlines() if "pip install" in line
    ]
    assert len(installs) == 8
    for line in installs:
        assert "--require-hashes" in line or "--no-index --no-deps" in line or "^torch==" in line, line


@pytest.mark.usefixtures("real_parts")
def test_nothing_says_to_install_kvscope_by_a_name_that_nobody_owns() -> None:
    for bad in ("pip install kvscope", "pip install 'kvscope[monitor]'", "python -m pip install -U kvscope==0.1.0"):
        assert INSTALLS_KVSCOPE.search(bad)
    for good in ("pip install .", "pip install 'PATH[monitor]'", "pip install kvscope-0.1.0-py3-none-any.whl"):
        assert not INSTALLS_KVSCOPE.search(good)
    listed = subprocess.run(("git", "ls-files", "-z"), cwd=ROOT, capture_output=True, text=True, check=False)
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    if not paths:
        pytest.skip("this is no checkout of git: its files are not listed")
    told = []
    for path in paths:
        if path == Path(__file__) or not path.is_file() or path.is_relative_to(ROOT / "tests" / "data"):
            continue
        found = INSTALLS_KVSCOPE.search(path.read_bytes().decode(errors="replace"))
        told += [f"{path.relative_to(ROOT)}: {found[0]}"] if found else []
    assert told == []


def test_a_release_stops_at_a_snapshot_that_is_too_old(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["advisories"])
    of = date.fromisoformat(json.loads(SNAPSHOT.read_text(encoding="utf-8"))["date"])
    for days, code in ((0, 0), (MAX_AGE_DAYS, 0), (MAX_AGE_DAYS + 1, 3), (800, 3)):
        assert age_days(of + timedelta(days=days)) == days
        assert advisories.main(of + timedelta(days=days)) == code
        told = capsys.readouterr()
        assert f"{days} days old" in told.out
        assert ("--update CHECKOUT" in told.err) is (code == 3)
