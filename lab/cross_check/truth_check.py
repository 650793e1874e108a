"""Compare the truth of drawn runs with two other methods: harms by the raw events, and the run without its faults.

`python -m kvscope.lab.cross_check.truth_check --keep out/truth --write out/truth.md` checks fifty runs and writes
their list. It needs vLLM: KVSCOPE_LAB_VLLM names its Python.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ..truth.what_happened import Harm, decide
from .checked_runs import KeptRun, RunToCheck, drawn_at_random, kept_run
from .second_truth import BY_HAND, SecondHarm, SecondTruth

FIRST_SEED: Final = 1
FIRST_RUNS: Final = range(6, 23)
RANDOM_SEED: Final = 20261123
RANDOM_RUNS: Final = 33
NEAR_S: Final = 1.0
"""What two beginnings of one harm may differ by, as a trial allows it for a finding."""
FINAL: Final = frozenset(
    (
        "kept-by-connector",
        "kept-unpolled",
        "kept-by-fetch",
        "lost-behind-fence",
        "lost-at-end",
        "lost-at-abort",
        "never-reaches-the-scheduler",
        "ready-and-not-queued",
        "grammar-not-taken",
        "runs-without-tokens",
        "fetched-and-not-taken",
        "fetch-never-ends",
        "needs-more-than-the-pool",
        "engine-hangs",
        "preempts-itself",
        "waits-with-blocks",
    )
)
"""Harms that only a fault can cause: without it, nothing of the kind may be left."""


class Checked(NamedTuple):
    """One run: the truth's harms, those by the events, and what is left of FINAL ones without the faults."""

    kept: KeptRun
    harms: dict[str, Harm]
    second: dict[str, SecondHarm]
    left_undone: set[str]

    @property
    def agrees(self) -> bool:
        """Whether all methods agree."""
        return not [*disagreements(self)]


def check_run(run: RunToCheck, directory: Path) -> Checked:
    """Compare the methods on one drawn run, which is kept in `directory`."""
    kept = kept_run(run, directory)
    second = SecondTruth(kept.recording, kept.end.watched_s, kept.lease_s).harms
    undone = decide(kept.undone) if kept.undone is not None and not kept.by_load else []
    harms = {harm.kind: harm for harm in decide(kept.end)}
    return Checked(kept, harms, second, {harm.kind for harm in undone} & FINAL)


def disagreements(checked: Checked) -> Iterator[str]:
    """Yield where the truth and another method differ."""
    if checked.kept.end.failed_s is not None:
        return  # a process that dies sends nothing of it
    for kind in sorted((checked.harms.keys() | checked.second.keys()) - BY_HAND):
        harm, second = checked.harms.get(kind), checked.second.get(kind)
        if harm is None or second is None:
            yield f"{kind}: {'not in the truth' if harm is None else 'not by the events'}"
            continue
        if abs(harm.since_s - second.first_s) > NEAR_S:
            yield f"{kind}: from {harm.since_s:.1f} s on, by the events from {second.first_s:.1f} s on"
        if harm.requests and second.requests and harm.requests != second.requests:
            yield f"{kind}: {len(harm.requests)} requests, by the events {len(second.requests)}"
        if harm.blocks and second.blocks and harm.blocks != second.blocks:
            yield f"{kind}: {len(harm.blocks)} blocks, by the events {len(second.blocks)}"
    if checked.left_undone:
        yield f"without the faults: {', '.join(sorted(checked.left_undone))}"


def fifty_runs() -> list[RunToCheck]:
    """Return the runs of the list: seventeen in a row on kvscope's own engine, and those drawn at random."""
    in_a_row = [RunToCheck("own", number, FIRST_SEED) for number in FIRST_RUNS]
    return in_a_row + drawn_at_random(RANDOM_RUNS, RANDOM_SEED)


def truth_rows(runs: Sequence[Checked]) -> list[str]:
    """Return the list as a Markdown table."""
    lines = ["| run | seed | faults | by the truth | by the events | without the faults | verdict |", "|---" * 7 + "|"]
    for each in runs:
        kept, by_hand = each.kept, sorted(each.harms.keys() & BY_HAND)
        undone = "" if kept.undone is None else ", ".join(harm.kind for harm in decide(kept.undone)) or "none"
        cells = (
            kept.run.name.replace("-", " "),
            str(kept.run.seed),
            ", ".join(kept.faults) or "none",
            _listed(each.harms),
            _listed(each.second),
            undone,
            "; ".join(disagreements(each)) or ("agrees; by hand: " + ", ".join(by_hand) if by_hand else "agrees"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _listed(harms: Mapping[str, Harm | SecondHarm]) -> str:
    return ", ".join(f"{kind} from {_began(harms[kind]):.1f} s" for kind in sorted(harms)) or "none"


def _began(harm: Harm | SecondHarm) -> float:
    return harm.since_s if isinstance(harm, Harm) else harm.first_s


def main() -> None:
    """Check runs and write the list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, required=True, help="runs that it has are not run again")
    parser.add_argument("--write", type=Path)
    parsed = parser.parse_args()
    logging.disable()
    checked = []
    for run in fifty_runs():
        checked.append(check_run(run, parsed.keep / f"seed-{run.seed}"))
        print(run.name, checked[-1].kept.faults, *disagreements(checked[-1]), flush=True, file=sys.stderr)
        if parsed.write is not None:
            parsed.write.write_text("\n".join(truth_rows(checked)) + "\n")
    sys.exit(not all(each.agrees for each in checked))


if __name__ == "__main__":
    main()
