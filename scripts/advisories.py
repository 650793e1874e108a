"""Compares constraints.txt with a committed snapshot of security advisories, without network.

    python -m scripts.advisories                     name each pinned version that an advisory covers (exit 1), and fail
                                                     (exit 3) if the snapshot is older than MAX_AGE_DAYS
    python -m scripts.advisories --update CHECKOUT   write the snapshot again from a checkout of pypa/advisory-database

The snapshot has the advisories about the pinned packages alone. Entries under `added` come from elsewhere, by hand,
and stay through an update. The tests compare the pins with the snapshot and do not look at its age: they run without
network, where nobody could renew it. A release is made where there is network, and stops at a snapshot that is too old.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml
from packaging.version import Version

from scripts.sbom import pinned_versions

SNAPSHOT: Final = Path(__file__).parent / "data" / "advisories.json"
SOURCE: Final = "https://github.com/pypa/advisory-database"
MAX_AGE_DAYS: Final = 90
TOO_OLD: Final = 3


class Affected(NamedTuple):
    """A pinned version that an advisory covers."""

    package: str
    version: str
    advisory: str
    fixed: str


def main(today: date | None = None) -> int:
    """Check the pins, or update the snapshot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--update", type=Path, metavar="CHECKOUT")
    given = parser.parse_args()
    if given.update is not None:
        SNAPSHOT.write_text(json.dumps(updated(given.update), indent=1) + "\n", encoding="utf-8")
    found = list(affected(pinned_versions(), read_advisories()))
    for each in found:
        print(f"{each.package} {each.version}: {each.advisory}, fixed in {each.fixed or 'no release'}")
    days = age_days(today or datetime.now(UTC).date())
    print(f"the snapshot is {days} days old, and may be {MAX_AGE_DAYS}")
    if days > MAX_AGE_DAYS:
        print(f"Advisories since then are missing: clone {SOURCE} and run this with --update CHECKOUT", file=sys.stderr)
    return 1 if found else TOO_OLD if days > MAX_AGE_DAYS else 0


def age_days(today: date, snapshot: Path = SNAPSHOT) -> int:
    """Return how old the snapshot is: the age of the last commit of its source that it has."""
    return (today - date.fromisoformat(json.loads(snapshot.read_text(encoding="utf-8"))["date"])).days


def read_advisories() -> list[dict[str, Any]]:
    """Return all advisories of the snapshot."""
    snapshot = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    return [*snapshot["advisories"], *snapshot["added"]]


def affected(pins: Mapping[str, str], advisories: Iterable[Mapping[str, Any]]) -> Iterator[Affected]:
    """Yield the pinned versions that an advisory covers."""
    for advisory in advisories:
        version = pins.get(advisory["package"])
        if version is None:
            continue
        covering = [each for each in advisory["ranges"] if _covers(each, version)]
        if covering or version in advisory.get("versions", ()):
            fixed = covering[0].get("fixed", "") if covering else ""
            yield Affected(advisory["package"], version, advisory["id"], fixed)


def _covers(span: Mapping[str, str], version: str) -> bool:
    """Whether a version lies in a range: from `introduced` to before `fixed`, or to `last_affected`."""
    at = Version(version)
    if span["introduced"] != "0" and at < Version(span["introduced"]):
        return False
    if "fixed" in span:
        return at < Version(span["fixed"])
    return "last_affected" not in span or at <= Version(span["last_affected"])


def updated(checkout: Path) -> dict[str, Any]:
    """Return the snapshot with the advisories of a checkout. Entries added by hand stay."""
    before = json.loads(SNAPSHOT.read_text(encoding="utf-8")) if SNAPSHOT.exists() else {"added": []}
    advisories = [
        advisory
        for package in pinned_versions()
        for path in sorted((checkout / "vulns" / package).glob("*.yaml"))
        if (advisory := _advisory_in(path, package)) is not None
    ]
    last = ("git", "-C", str(checkout), "log", "-1", "--format=%H %cs")
    commit, date = subprocess.run(last, check=True, capture_output=True, text=True).stdout.split()
    return {
        "source": SOURCE,
        "license": "CC-BY-4.0",
        "commit": commit,
        "date": date,
        "advisories": advisories,
        "added": before["added"],
    }


def _advisory_in(path: Path, package: str) -> dict[str, Any] | None:
    """Return an advisory as the snapshot has it, None if it was withdrawn."""
    read = yaml.safe_load(path.read_text(encoding="utf-8"))
    if "withdrawn" in read:
        return None
    ranges, versions = [], []
    for entry in read["affected"]:
        for each in entry.get("ranges", ()):
            ranges += list(_spans(each["events"])) if each["type"] == "ECOSYSTEM" else []
        versions += [] if entry.get("ranges") else [str(version) for version in entry.get("versions", ())]
    return {
        "id": read["id"],
        "aliases": read.get("aliases", []),
        "package": package,
        "ranges": ranges,
        **({"versions": versions} if versions else {}),
    }


def _spans(events: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    """Yield each range that a list of events opens and closes."""
    span: dict[str, str] | None = None
    for event in events:
        ((name, version),) = event.items()
        if name == "introduced":
            if span is not None:
                yield span
            span = {"introduced": str(version)}
        elif span is not None and name in ("fixed", "last_affected"):
            yield {**span, name: str(version)}
            span = None
    if span is not None:
        yield span


if __name__ == "__main__":
    sys.exit(main())
