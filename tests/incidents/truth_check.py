"""Compare the truth of drawn runs with two other methods: a replay of the raw events, and the run without its faults.

`python -m tests.incidents.truth_check --runs 50 --write docs/accuracy/truth-check-table.md` writes the list. What
is known to be wrong or blind is written by hand, in truth-check.md beside it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from kvscope.monitor.incidents.draws import Draw, draw_run
from kvscope.monitor.incidents.own_episode import OwnEpisode
from kvscope.monitor.incidents.truth.episode_end import EpisodeEnd
from kvscope.monitor.incidents.truth.what_happened import Harm, decide
from tests.incidents.event_replay import Replayed, replay_events

REFERENCES_ARE_WRONG = frozenset(("freed-twice", "handed-out-in-use"))
"""Harms after which the events' own references are not those of a sound pool."""
FINAL = frozenset(
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
"""Harms that only a fault of kvscope's own engine can cause: without it, nothing of the kind may be left."""


MOST_STEPS_CHECKED = 1_000
MOST_S_CHECKED = 300.0


class Checked(NamedTuple):
    """One run: the truth's final state, the replay's, and what is left of it without the faults."""

    draw: Draw
    end: EpisodeEnd
    harms: list[Harm]
    replayed: Replayed
    left_undone: set[str]

    @property
    def agrees(self) -> bool:
        """Whether all methods agree."""
        return not [*disagreements(self)]


def run_to_end(draw: Draw) -> tuple[EpisodeEnd, Replayed]:
    """Run an episode, recorded to the end of its drain."""
    with tempfile.TemporaryDirectory() as directory:
        episode = OwnEpisode(draw, Path(directory), keep_recording=True)
        episode.watch()
        end = episode.drain()
        return end, replay_events(Path(directory))


def check_run(number: int, seed: int) -> Checked:
    """Compare the methods on one drawn run, of which the beginning is watched."""
    draw = draw_run(number, seed)
    draw = replace(draw, steps=min(draw.steps, MOST_STEPS_CHECKED), seconds=min(draw.seconds, MOST_S_CHECKED))
    end, replayed = run_to_end(draw)
    undone = decide(run_to_end(draw.undone())[0]) if draw.faults else []
    return Checked(draw, end, decide(end), replayed, {harm.kind for harm in undone} & FINAL)


def disagreements(checked: Checked) -> Iterator[str]:
    """Yield where the truth and another method differ."""
    end, replayed = checked.end, checked.replayed
    if end.lost_batches or end.failed_s is not None:
        return  # the recording has not all events
    unfinished = {request.id for request in end.unfinished}
    if unfinished != replayed.unfinished:
        yield f"unfinished: truth {len(unfinished)}, replay {len(replayed.unfinished)}"
    kept = {block for each in end.kept for block in each.blocks}
    if kept != replayed.kept and not REFERENCES_ARE_WRONG & {seen.kind for seen in end.observed}:
        yield f"kept blocks: truth {len(kept)}, replay {len(replayed.kept)}"
    if checked.left_undone:
        yield f"without the faults: {', '.join(sorted(checked.left_undone))}"


def truth_page(runs: Sequence[Checked], command: str) -> str:
    """Return the list as Markdown."""
    agree = sum(each.agrees for each in runs)
    lines = [
        "# The truth, checked by other methods",
        "",
        f"`{command}` runs each drawn episode twice, with its faults and without them, and compares the truth with a",
        "replay of the raw events (references and ends only) and with what is left when the faults are undone.",
        f"All methods agree in {agree} of {len(runs)} runs.",
        "",
        "| run | faults | harms by the truth | unfinished: truth / replay | kept blocks: truth / replay | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for each in runs:
        kept = {block for one in each.end.kept for block in one.blocks}
        cells = (
            str(each.draw.number),
            ", ".join(each.draw.codes) or "none",
            ", ".join(harm.kind for harm in each.harms) or "none",
            f"{len(each.end.unfinished)} / {len(each.replayed.unfinished)}",
            f"{len(kept)} / {len(each.replayed.kept)}",
            "; ".join(disagreements(each)) or ("agrees" if not each.end.lost_batches else "a batch was lost"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Check runs and write the list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", type=Path)
    parsed = parser.parse_args()
    logging.disable()
    runs = []
    for number in range(parsed.first, parsed.first + parsed.runs):
        runs.append(check_run(number, parsed.seed))
        print(number, runs[-1].draw.faults, *disagreements(runs[-1]), flush=True, file=sys.stderr)
        if parsed.write is not None:  # after each, since all take an hour
            span = f"--first {parsed.first} --runs {parsed.runs}"
            command = f"python -m tests.incidents.truth_check {span} --seed {parsed.seed}"
            parsed.write.write_text(truth_page(runs, command))
    sys.exit(not all(each.agrees for each in runs))


if __name__ == "__main__":
    main()
