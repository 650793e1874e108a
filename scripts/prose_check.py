"""Holds how the project's text reads: no group of texts may read worse than it did. `make lint` runs it.

    python -m scripts.prose_check [--write | --table]

The measures are those of scripts/prose_counts.py. scripts/prose_ceilings.toml has the bounds of each group: openings,
passives and semicolons per 100 sentences, odd words per 1,000 words, and `you` per 1,000 words as a floor. `--write`
makes the bounds stricter where the text has become better, down to the targets. It never relaxes one: edit the file for
that, and give the reason in the commit. `--table` prints the rates of all groups.
"""

from __future__ import annotations

import math
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from scripts.prose_counts import ROOT, counts_of, sentences_below, sentences_of
from scripts.user_texts import (
    PACKAGES,
    comment_texts,
    finding_texts,
    help_texts,
    json_keys,
    label_texts,
    metric_texts,
    other_messages,
)

CEILINGS: Final = ROOT / "scripts" / "prose_ceilings.toml"
GUIDES: Final = (
    *("attach", "probe", "read-a-log", "plan", "memory", "terminal", "alerts", "dashboards", "history", "scale-out"),
    *("deploy", "opentelemetry", "export", "python-api"),
)
DEVELOP: Final = ("write-a-detector", "write-a-source", "engine", "incidents")
USER_TEXTS: Final[dict[str, Callable[[], Iterator[str]]]] = {
    "findings": finding_texts,
    "help": help_texts,
    "messages": other_messages,
    "comments": comment_texts,
}
"""Kinds of texts in the program, in sentences."""
LABELS: Final[dict[str, Callable[[], Iterator[str]]]] = {
    "metrics": metric_texts,
    "labels": label_texts,
    "json keys": json_keys,
}
"""Names and labels. Each counts, however short it is, and no odd word may be among them."""
SHOWN: Final = 3
"""How many sentences are printed of a group that reads worse."""


class Measured(NamedTuple):
    """The rates of a group. `you` is the only one of which more is better."""

    openings: float
    passives: float
    semicolons: float
    odd_words: float
    you: float


TARGETS: Final = Measured(openings=2, passives=25, semicolons=3, odd_words=1, you=8)
"""The aims for a text. A bound is never stricter than this, but for LABELS."""


def main(arguments: Sequence[str]) -> int:
    """Print every group that reads worse than its ceilings. Return 1 if one does."""
    groups = dict(text_groups())
    if "--write" in arguments:
        CEILINGS.write_text(written({name: measured(found) for name, found in groups.items()}, ceilings()))
        return 0
    if "--table" in arguments:
        print("\n".join(table_of({name: measured(found) for name, found in groups.items()})))
        return 0
    worse = [line for name, found in groups.items() for line in worse_than(name, found, ceilings().get(name, {}))]
    print("\n".join(worse) if worse else f"prose: {len(groups)} groups within their ceilings")
    return 1 if worse else 0


def text_groups() -> Iterator[tuple[str, list[str]]]:
    """Yield each group of texts with its sentences."""
    docs = ROOT / "docs"
    of_groups = {
        "get started": [docs / "index.md", *sorted((docs / "start").glob("*.md"))],
        "guides": [docs / f"{name}.md" for name in GUIDES],
        "investigations": sorted((docs / "investigations").glob("*.md")),
        "concepts": sorted((docs / "concepts").glob("*.md")),
        "develop": [*sorted((docs / "develop").glob("*.md")), *(docs / f"{name}.md" for name in DEVELOP)],
        "runbooks": sorted((docs / "runbooks").glob("*.md")),
        "root": [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")],
        "changelog": [ROOT / "CHANGELOG.md"],
    }
    listed = {path for paths in of_groups.values() for path in paths}
    of_groups["reference"] = [path for path in sorted(docs.glob("*.md")) if path not in listed]
    for name, paths in of_groups.items():
        yield name, [sentence for path in paths for sentence in sentences_below(path)]
    yield "docstrings", [sentence for package in PACKAGES for sentence in sentences_below(ROOT / package)]
    for name, texts in USER_TEXTS.items():
        yield name, [sentence for text in texts() for sentence in sentences_of(text)]
    for name, texts in LABELS.items():
        yield name, list(texts())


def measured(sentences: list[str]) -> Measured:
    """Return the rates of a group."""
    counts = counts_of(sentences)
    hundred, thousand = 100 / max(1, counts.sentences), 1000 / max(1, counts.words)
    return Measured(
        counts.openings * hundred,
        counts.passives * hundred,
        counts.semicolons * hundred,
        counts.odd_words * thousand,
        counts.you * thousand,
    )


def table_of(rates: Mapping[str, Measured]) -> Iterator[str]:
    """Yield a line for each group, with openings, passives and semicolons per 100 sentences, and words per 1,000."""
    yield f"{'group':<16}" + "".join(f"{measure:>12}" for measure in Measured._fields)
    for name, each in rates.items():
        yield f"{name:<16}" + "".join(f"{value:>12.1f}" for value in each)


def ceilings() -> dict[str, dict[str, float]]:
    """Return the ceilings of every group. Raises FileNotFoundError and tomllib.TOMLDecodeError."""
    return tomllib.loads(CEILINGS.read_text(encoding="utf-8"))


def worse_than(name: str, sentences: list[str], bounds: Mapping[str, float]) -> Iterator[str]:
    """Yield a line for each measure that is beyond its bound, with sentences to rewrite."""
    if not bounds:
        yield f"prose: {name}: no ceilings in {CEILINGS.name}; add the group"
        return
    for measure, value in measured(sentences)._asdict().items():
        bound = bounds[measure]
        if value < bound if measure == "you" else value > bound:
            relation = "below its floor" if measure == "you" else "above its ceiling"
            yield f"prose: {name}: {measure} at {value:.2f}, {relation} of {bound:.2f}"
            shown = [each for each in sentences if measure != "you" and getattr(counts_of([each]), measure)]
            yield from (f"    {each}" for each in shown[-SHOWN:])


def written(found: Mapping[str, Measured], before: Mapping[str, Mapping[str, float]]) -> str:
    """Return the file of ceilings: what the groups have reached, and never more lenient than before."""
    lines = ["# How each group of texts reads at worst: see scripts/prose_check.py. `--write` only makes it stricter."]
    for name, rates in found.items():
        lines += ["", f'["{name}"]']
        for measure, value in rates._asdict().items():
            target = 0 if measure == "odd_words" and name in LABELS else getattr(TARGETS, measure)
            if measure == "you":
                bound = max(min(math.floor(value), target), before.get(name, {}).get(measure, 0))
            else:
                bound = min(max(math.ceil(value), target), before.get(name, {}).get(measure, math.inf))
            lines.append(f"{measure} = {bound:g}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
