"""Writes the software bill of materials: every package of constraints.txt as CycloneDX 1.6 JSON, without network.

    python -m scripts.sbom

`make docs` runs it. The serial number follows from the content, and there is no time in it, so the same pins give the
same file. The property `kvscope:extra` names the extras that ask for a package directly. What the packages
need in turn is not in it: constraints.txt does not say.
"""

from __future__ import annotations

import json
import sys
import tomllib
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from cyclonedx.model import Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).parent.parent
CONSTRAINTS: Final = ROOT / "constraints.txt"
SBOM: Final = ROOT / "docs" / "sbom.cdx.json"
_NAMESPACE: Final = uuid.UUID("6ba7b811-9dad-11d1-80b4-00c04fd430c8")


def pinned_versions(constraints: Path = CONSTRAINTS) -> dict[str, str]:
    """Return the pinned version of each package, by its canonical name."""
    lines = (line.partition("#")[0].strip() for line in constraints.read_text(encoding="utf-8").splitlines())
    pins = (line.split("==", 1) for line in lines if line)
    return {canonicalize_name(name): version for name, version in pins}


def direct_requirements() -> dict[str, list[str]]:
    """Return the extras that name each package in pyproject.toml; "base" for the package's own dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups: dict[str, Iterable[str]] = {"base": project["dependencies"], **project["optional-dependencies"]}
    found: dict[str, list[str]] = {}
    for group, requirements in groups.items():
        for requirement in map(Requirement, requirements):
            found.setdefault(canonicalize_name(requirement.name), []).append(group)
    return found


def sbom() -> str:
    """Return the bill of materials as text."""
    extras = direct_requirements()
    components = [
        Component(
            name=name,
            version=version,
            type=ComponentType.LIBRARY,
            purl=PackageURL("pypi", name=name, version=version),
            bom_ref=f"pkg:pypi/{name}@{version}",
            properties=[Property(name="kvscope:extra", value=extra) for extra in extras.get(name, [])],
        )
        for name, version in sorted(pinned_versions().items())
    ]
    serial = uuid.uuid5(_NAMESPACE, " ".join(f"{each.name}=={each.version}" for each in components))
    bom = Bom(components=components, serial_number=serial)
    root = bom.metadata.component = Component(name="kvscope", type=ComponentType.APPLICATION, bom_ref="kvscope")
    bom.register_dependency(root, [each for each in components if each.name in extras])
    text = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string()
    document = json.loads(text)
    del document["metadata"]["timestamp"]
    return json.dumps(document, indent=1) + "\n"


def main() -> int:
    """Write the file."""
    SBOM.write_text(sbom(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
