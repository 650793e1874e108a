"""Compare the counts of scripts/prose_counts.py with earlier counts of two projects' docs, at the same commits.

    git clone https://github.com/simonw/datasette
    git clone https://github.com/hynek/structlog
    python -m scripts.prose_calibration datasette structlog

The earlier counts, made with other patterns, set the aims for kvscope's texts. Each measure must agree within a fifth,
but for UNREPRODUCED. Prints each measure, and exits with 1 if another one does not agree. docs/prose.txt has the last
output.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from scripts.prose_check import Measured, measured
from scripts.prose_counts import sentences_below

TOLERATED_SHARE: Final = 0.2


class Anchor(NamedTuple):
    """A project with good docs: the commit and folder that were counted, and its earlier counts."""

    name: str
    commit: str
    left_out: tuple[str, ...]
    earlier: Measured


ANCHORS: Final = (
    Anchor(
        "datasette",
        "481df7ff6d78a8ccf919984d27f27201b081bd53",
        ("changelog.rst",),
        Measured(openings=0.8, passives=25, semicolons=0.7, odd_words=0.3, you=19.7),
    ),
    Anchor(
        "structlog",
        "025edaf799c6d6d511ab672d14c2ba8e885c4c36",
        (),
        Measured(openings=1.2, passives=19, semicolons=0.7, odd_words=0.8, you=33.9),
    ),
)


UNREPRODUCED: Final = {("datasette", "openings")}
"""An earlier count of about 24 sentences of 2,979. Only 12 lines of the sources, without the changelog, open one so:
`grep -hE "(^|[.!?] )(What|Who|Of|Those|There (is|are|was|were))\\b" docs/*.rst`."""


class Comparison(NamedTuple):
    """One measure of one project: the earlier count and the one of this script."""

    anchor: str
    measure: str
    earlier: float
    now: float

    @property
    def agrees(self) -> bool:
        """Whether they differ by a fifth at most."""
        return abs(self.now - self.earlier) <= self.earlier * TOLERATED_SHARE

    @property
    def verdict(self) -> str:
        """Note on a measure that does not agree."""
        if self.agrees:
            return ""
        return "  not reproduced" if (self.anchor, self.measure) in UNREPRODUCED else "  does not agree"


def main(folders: Sequence[str]) -> int:
    """Print the comparison of each anchor with the clone of the same place in `folders`. Return 1 if one disagrees."""
    rows = [
        row
        for anchor, folder in zip(ANCHORS, folders, strict=True)
        for row in compared(anchor, counted(anchor, folder))
    ]
    print(f"{'docs of':<12}{'measure':<12}{'earlier':>8}{'now':>8}{'difference':>12}")
    for row in rows:
        share = (row.now - row.earlier) / row.earlier
        print(f"{row.anchor:<12}{row.measure:<12}{row.earlier:>8.1f}{row.now:>8.1f}{share:>12.0%}{row.verdict}")
    return 0 if all(row.agrees or (row.anchor, row.measure) in UNREPRODUCED for row in rows) else 1


def compared(anchor: Anchor, now: Measured) -> Iterator[Comparison]:
    """Yield each measure beside its earlier count."""
    for measure, value in now._asdict().items():
        yield Comparison(anchor.name, measure, getattr(anchor.earlier, measure), value)


def counted(anchor: Anchor, clone: str | Path) -> Measured:
    """Count the docs of an anchor at its commit. Raises CalledProcessError if the clone does not have it."""
    archive = subprocess.run(
        ["git", "-C", str(clone), "archive", anchor.commit, "docs"], capture_output=True, check=True
    )
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(folder, filter="data")
        for name in anchor.left_out:
            (Path(folder) / "docs" / name).unlink()
        return measured(sentences_below(Path(folder)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
