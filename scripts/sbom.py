"""Writes the software bill of materials as CycloneDX 1.6 JSON, without network: every package of constraints.txt, and
the chart library that the web app brings.

    python -m scripts.sbom

It writes build/sbom.cdx.json, which a release brings. The serial number follows from the content, and there is no time
in it, so the same pins give the same file. The property `kvscope:extra` names the extras that ask for a package
directly. The packages' own requirements are not in it: constraints.txt does not have them.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tomllib
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from cyclonedx.contrib.hash.factories import HashTypeFactory
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
SBOM: Final = ROOT / "build" / "sbom.cdx.json"
CHART_LIBRARY: Final = ROOT / "dashboards" / "web" / "assets" / "plotly-basic.min.js"
_CHART_PACKAGE: Final = "plotly.js-basic-dist-min"
_NAMESPACE: Final = uuid.UUID("6ba7b811-9dad-11d1-80b4-00c04fd430c8")


def pinned_versions(constraints: Path = CONSTRAINTS) -> dict[str, str]:
    """Return the pinned version of each package, by its canonical name."""
    lines = (line.partition("#")[0].strip() for line in constraints.read_text(encoding="utf-8").splitlines())
    pins = (line.split("==", 1) for line in lines if line)
    return {canonicalize_name(name): version for name, version in pins}


def direct_requirements() -> dict[str, list[str]]:
    """Return the extras that name each package in pyproject.toml, with "base" for the package's own dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups: dict[str, Iterable[str]] = {"base": project["dependencies"], **project["optional-dependencies"]}
    found: dict[str, list[str]] = {}
    for group, requirements in groups.items():
        for requirement in map(Requirement, requirements):
            found.setdefault(canonicalize_name(requirement.name), []).append(group)
    return found


def bundled_library() -> Component:
    """Return the chart library, in the version that its header names. Raises ValueError if it names none."""
    header = CHART_LIBRARY.read_text(encoding="utf-8")[:200]
    found = re.search(r"plotly\.js \(basic - minified\) v(\d+\.\d+\.\d+)", header)
    if found is None:
        raise ValueError(f"{CHART_LIBRARY} is not npm's {_CHART_PACKAGE}: its header names no version")
    url = PackageURL("npm", name=_CHART_PACKAGE, version=found[1])
    return Component(
        name=_CHART_PACKAGE,
        version=found[1],
        type=ComponentType.LIBRARY,
        purl=url,
        bom_ref=url.to_string(),
        hashes=[HashTypeFactory().from_hashlib_alg("sha256", hashlib.sha256(CHART_LIBRARY.read_bytes()).hexdigest())],
    )


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
    components.append(bundled_library())
    serial = uuid.uuid5(_NAMESPACE, " ".join(f"{each.name}=={each.version}" for each in components))
    bom = Bom(components=components, serial_number=serial)
    root = bom.metadata.component = Component(name="kvscope", type=ComponentType.APPLICATION, bom_ref="kvscope")
    bom.register_dependency(root, [each for each in components if each.name in (*extras, _CHART_PACKAGE)])
    text = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string()
    document = json.loads(text)
    del document["metadata"]["timestamp"]
    return json.dumps(document, indent=1) + "\n"


def main() -> int:
    """Write the file."""
    SBOM.parent.mkdir(exist_ok=True)
    SBOM.write_text(sbom(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
