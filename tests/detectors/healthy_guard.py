"""How often healthy engines raise a finding by their metrics and log lines alone.

`python -m tests.detectors.healthy_guard --seeds 50 --resume DIR` reads every healthy shape, of paper and of the lab, at
each interval and in each form, and prints a table of what was found. test_healthy_metrics.py beside it asserts the
same of a sample.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from kvscope.lab.paper_engine import HEALTHY_ON_PAPER
from kvscope.lab.scenarios.healthy_engines import HEALTHY
from kvscope.monitor.base.confidence_bounds import rate_bounds
from tests.detectors.test_healthy_metrics import INTERVALS_S, Shape, lab_moments, readings

SHAPES: Final[Mapping[str, Shape]] = {
    **{shape.__name__: shape for shape in HEALTHY_ON_PAPER},
    **{f"lab: {scenario.name}": partial(lab_moments, scenario) for scenario in HEALTHY},
}


def guarded_run(name: str, seed: int, intervals: Sequence[int]) -> dict[str, object]:
    """Read one run of a shape in every way: hours of the engine, and what was found by each way."""
    moments = SHAPES[name](seed)
    found = dict(readings(moments, seed, intervals))
    return {"shape": name, "seed": seed, "hours": moments[-1].t / 3600, "found": found}


def guard_table(runs: Sequence[dict[str, object]]) -> Iterator[str]:
    """Yield findings of warning or above by way, and the rate that so many hours allow."""
    yield "| read as | runs | engine-hours | findings of *warning* or above | an hour, 95 % bounds |"
    yield "|---|---|---|---|---|"
    ways: dict[str, list[tuple[float, int]]] = {}
    for run in runs:
        found = run["found"]
        assert isinstance(found, dict)
        for way, findings in found.items():
            ways.setdefault(way, []).append((float(str(run["hours"])), len(findings)))
    for way in sorted(ways, key=_interval_of_way):
        hours, count = sum(each[0] for each in ways[way]), sum(each[1] for each in ways[way])
        low, high = rate_bounds(count, hours)
        yield f"| {way} | {len(ways[way]):,} | {hours:.1f} | {count} | {low:.2f} to {high:.2f} |"


def _interval_of_way(way: str) -> int:
    return int(way.split()[-2])


def read_guarded(kept: Path) -> dict[tuple[str, int], dict[str, object]]:
    """Return the runs of earlier calls by shape and seed, with what was found in all ways that were read."""
    done: dict[tuple[str, int], dict[str, object]] = {}
    for run in map(json.loads, kept.read_text(encoding="utf-8").splitlines() if kept.exists() else ()):
        merge_guarded(done, run)
    return done


def merge_guarded(done: dict[tuple[str, int], dict[str, object]], run: dict[str, object]) -> None:
    """Add a run, or ways to read one that is there."""
    key = (str(run["shape"]), int(str(run["seed"])))
    known, found = done.setdefault(key, run)["found"], run["found"]
    assert isinstance(known, dict)
    assert isinstance(found, dict)
    known.update(found)


def main() -> None:
    """Run what is not there yet, and print the table of all that is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--intervals", type=int, nargs="+", default=INTERVALS_S, metavar="S", help="seconds")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--resume", type=Path, required=True, help="a folder that keeps each run")
    parsed = parser.parse_args()
    parsed.resume.mkdir(parents=True, exist_ok=True)
    intervals = tuple(parsed.intervals)
    kept = parsed.resume / "healthy.jsonl"
    done = read_guarded(kept)
    ways = {f"log each {seconds} s" for seconds in intervals}
    wanted = [(name, seed) for seed in range(parsed.seeds) for name in SHAPES]
    left = [each for each in wanted if each not in done or not ways <= dict(done[each]["found"]).keys()]
    with ProcessPoolExecutor(parsed.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for run in pool.map(partial(guarded_run, intervals=intervals), *zip(*left, strict=True)) if left else ():
            merge_guarded(done, run)
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(run) + "\n")
    print(*guard_table([*done.values()]), sep="\n")


if __name__ == "__main__":
    main()
