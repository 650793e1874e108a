"""Compare recall with that of an earlier commit's detectors, on the same recordings and by the same truth.

    git worktree add ../earlier fd2fe77
    python -m tests.incidents.recall_beside --checkout ../earlier --seed 20261216 --per-fault 25 \\
        --fault leak.lease-burst --fault leak.rising-floor --resume out/beside

`--resume` names a directory whose runs are not made again. The tables are those of
docs/accuracy/recall-beside-baseline.md.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from kvscope.monitor.incidents.drain_limits import NotFinished
from kvscope.monitor.incidents.episode import faults_in_turn, make_ranks
from kvscope.monitor.incidents.lab_watch import FoundCode, find_in_recordings
from kvscope.monitor.incidents.trial import Trial, limited_to, note_outcome
from kvscope.monitor.incidents.trial_batch import TRIALS_FILE, read_trials

READER: Final = Path(__file__).with_name("earlier_detectors.py")
SURE: Final = ("likely", "confirmed")
LIMIT_S: Final = 300.0
"""A run that takes longer is left out, as one that fails is."""


class Pair(NamedTuple):
    """One run as both detectors see it."""

    now: Trial
    earlier: Trial


def compare_run(number: int, seed: int, engine: str, checkout: Path) -> Pair:
    """Run one trial and have both detectors read its recording."""
    pair = Pair(*(Trial(number, seed, engine=engine, by_fault=True) for _ in Pair._fields))
    with tempfile.TemporaryDirectory(prefix="kvscope-beside-") as directory:
        try:
            with limited_to(LIMIT_S):
                ranks = make_ranks(engine, number, seed, Path(directory), "faults")
                for rank in ranks.values():
                    rank.watch()
                found = find_in_recordings(ranks)
                ends = [rank.drain() for rank in ranks.values()]
                earlier = found_by(checkout, ranks)
        except (NotFinished, Exception) as error:  # a run that cannot be run is counted, and the others go on
            for trial in pair:
                trial.error = f"{type(error).__name__}: {error}"
            return pair
    for trial, codes in zip(pair, (found, earlier), strict=True):
        trial.faults = [fault for rank in ranks.values() for fault in rank.faults]
        note_outcome(trial, ends, {"stream": codes})
    return pair


def found_by(checkout: Path, recordings: Iterable[Path]) -> list[FoundCode]:
    """Return what the detectors of another checkout find. Raises RuntimeError with why they cannot."""
    command = [sys.executable, str(READER), *map(str, recordings)]
    read = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(checkout)}, capture_output=True)
    if read.returncode:
        raise RuntimeError(read.stderr.decode().strip().rpartition("\n")[2])
    return msgspec.json.decode(read.stdout, type=list[FoundCode])


def codes_of(trial: Trial) -> dict[str, bool]:
    """Return the codes that happened, each with whether a right finding named it at least as likely."""
    result = trial.results["stream"]
    sure = {claim.code for claim in result.claims if claim.verdict in SURE}
    return {harm.code: harm.found_s is not None and harm.code in sure for harm in result.harms}


def tables(pairs: Sequence[Pair]) -> Iterator[str]:
    """Yield the lines of the two tables."""
    runs: Counter[str] = Counter()
    counts: Counter[tuple[str, bool, bool]] = Counter()
    for pair in pairs:
        now, earlier = map(codes_of, pair)
        runs.update(now.keys())
        counts.update((code, now[code], earlier[code]) for code in now)
    yield "| code | runs with it | found now | found earlier | only now | only earlier |"
    yield "|---" * 6 + "|"
    for code in sorted(runs):
        both, gained, lost = (counts[code, *which] for which in ((True, True), (True, False), (False, True)))
        yield f"| {code} | {runs[code]} | {both + gained} | {both + lost} | {gained} | {lost} |"
    yield ""
    yield "| *confirmed* and *likely* findings | right | wrong |"
    yield "|---" * 3 + "|"
    for name, trials in (("earlier", [pair.earlier for pair in pairs]), ("now", [pair.now for pair in pairs])):
        claims = [claim for trial in trials for claim in trial.results["stream"].claims if claim.verdict in SURE]
        right = sum(claim.right for claim in claims)
        yield f"| {name} | {right} | {len(claims) - right} |"


def main() -> None:
    """Make the runs and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help="a checkout of the earlier commit")
    parser.add_argument("--engine", default="own", help="as `monitor incidents` has it; vLLM with its release")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--per-fault", type=int, default=25)
    parser.add_argument("--fault", action="append", required=True)
    parser.add_argument("--resume", type=Path, required=True)
    parsed = parser.parse_args()
    if not (parsed.checkout / "kvscope").is_dir():  # the installed detectors would be taken instead
        parser.error(f"--checkout {parsed.checkout} is no checkout of kvscope")
    logging.disable()
    in_turn = faults_in_turn(parsed.engine)
    numbers = [turn * len(in_turn) + in_turn.index(fault) for turn in range(parsed.per_fault) for fault in parsed.fault]
    folders = [parsed.resume / name for name in Pair._fields]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    done = [read_trials(folder, parsed.seed, parsed.engine, "faults") for folder in folders]
    for number in numbers:
        if all(number in trials for trials in done):
            continue
        pair = compare_run(number, parsed.seed, parsed.engine, parsed.checkout.resolve())
        for trial, trials, folder in zip(pair, done, folders, strict=True):
            trials[number] = trial
            with (folder / TRIALS_FILE).open("ab") as file:
                file.write(msgspec.json.encode(trial) + b"\n")
        print(number, *pair.now.faults, pair.now.error, flush=True, file=sys.stderr)
    pairs = [Pair(*(trials[number] for trials in done)) for number in numbers]
    print(*tables([pair for pair in pairs if not pair.now.error]), sep="\n")
    print(f"\n{len(pairs)} runs, {sum(bool(pair.now.error) for pair in pairs)} left out", file=sys.stderr)


if __name__ == "__main__":
    main()
