"""What kvscope is made of: the pins carry no known advisory, and the bill of materials names every pin."""

from __future__ import annotations

import hashlib
import json

import pytest
from packageurl import PackageURL
from packaging.version import Version

from scripts.advisories import affected, read_advisories
from scripts.sbom import CHART_LIBRARY, SBOM, direct_requirements, pinned_versions, sbom


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
    document = json.loads(SBOM.read_text(encoding="utf-8"))
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    components = {each["name"]: each for each in document["components"]}
    bundled = components.pop("plotly.js-basic-dist-min")
    assert bundled["hashes"][0]["content"] == hashlib.sha256(CHART_LIBRARY.read_bytes()).hexdigest()
    assert {name: each["version"] for name, each in components.items()} == pinned_versions()
    for name, each in components.items():
        assert PackageURL.from_string(each["purl"]) == PackageURL("pypi", name=name, version=each["version"])
    assert SBOM.read_text(encoding="utf-8") == sbom(), "run `make docs`"


def test_every_direct_requirement_is_pinned() -> None:
    assert set(direct_requirements()) - {"kvscope"} <= set(pinned_versions())
