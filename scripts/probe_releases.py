"""Writes the table of releases in docs/probe-releases.md: which hooks of the probe each release of vLLM has.

    python -m scripts.probe_releases DIRECTORY

DIRECTORY has a folder for each release, with its name, and the package `vllm` in it, of which vllm/v1/core is enough.
Releases in RUN have also passed the runs of tests/probes/test_vllm_bare.py, which compare the events with vLLM's own
tables. Its Python files, ahead on the path of an environment that has the needs of another release, are enough for
that.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from kvscope.monitor.probes.vllm.compatibility import HOOKS, Unpacked, problem
from scripts.docs import ROOT, between

RUN = (
    "0.10.2",
    "0.11.2",
    "0.12.0",
    "0.14.1",
    "0.16.0",
    "0.18.0",
    "0.20.2",
    "0.22.1",
    "0.24.0",
    "0.26.0",
    "0.28.0",
    "0.30.0",
    "0.31.0",
    "0.32.0",
    "0.33.0",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    page = ROOT / "docs" / "probe-releases.md"
    rows = "\n".join(table(parser.parse_args().directory))
    page.write_text(between(page.read_text(encoding="utf-8"), "releases", rows), encoding="utf-8")


def table(directory: Path) -> Iterator[str]:
    yield "| vLLM | checked by | works | hooks | what it has not yet | not reported |"
    yield "|---|---|---|---|---|---|"
    for release in sorted(directory.iterdir(), key=lambda path: [int(part) for part in path.name.split(".")]):
        absent = [hook for hook in HOOKS if problem(hook, Unpacked(release))]
        how = "running it" if release.name in RUN else "reading it"
        works = "no" if any(hook.needed for hook in absent) else "yes" if release.name in RUN else "should"
        later = ", ".join(f"`{hook.method}` ({hook.since})" for hook in absent if hook.since)
        lost = ", ".join(f"{hook.lost} (`{hook.method}`)" for hook in absent if not hook.since)
        hooks = f"{len(HOOKS) - len(absent)} of {len(HOOKS)}"
        yield f"| {release.name} | {how} | {works} | {hooks} | {later or '–'} | {lost or '–'} |"


if __name__ == "__main__":
    main()
