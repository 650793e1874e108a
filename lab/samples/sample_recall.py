"""Recall by code and interval where an engine's metrics or log lines are all there is.

`python -m kvscope.lab.samples.sample_recall --runs 400 --resume DIR` draws incidents as `python -m kvscope.lab` does.
It reads the metrics of each engine every second, judges them at each interval and as log lines against the engine's
final state, and prints the tables as Markdown.
"""

from __future__ import annotations

import argparse
import gzip
import logging
import math
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from kvscope.engine.serving.engine_metrics import EngineCollector
from kvscope.monitor.base.confidence_bounds import share_bounds
from kvscope.monitor.contract.samples import Record
from kvscope.monitor.detectors.registry import CATALOGUE
from kvscope.monitor.sources.engine_log import Log
from kvscope.monitor.sources.exposition import (
    CONFIGURATION,
    ExposedEngine,
    ExposedFigures,
    Sampler,
    facts_of,
    put_figure,
)

from ..accuracy import LARGE_HARM, WATCHED_AFTER_S
from ..draws import draw_run
from ..lab_watch import find_in_records
from ..own_episode import OwnEpisode
from ..paper_engine import BEGAN, Moment, log_lines
from ..trial import ClaimMade, HarmSeen, judge_claim, seen_harms
from ..truth.what_happened import Harm, decide

INTERVALS_S: Final = (1, 5, 15, 30, 60)
LOG_S: Final = 10
"""Between two of vLLM's lines, by default."""
LOG_WAYS: Final = {f"log {LOG_S} s": False, f"log {LOG_S} s, with still lines": True}
"""Whether lines go on while requests run without a token. vLLM since 0.10.2 logs one such line, and then none."""
FAULTS_IN_TURN: Final = (
    "leak.finished-held",
    "leak.rising-floor",
    "stuck.never-fits",
    "stuck.head-of-line",
    "stuck.engine-stalled",
    "thrash.preemption",
    "collapse.lockstep",
    "collapse.prefix-hits",
    "sizing.kv-too-small",
    "",
)
"""Those whose codes metrics can show, and none. imbalance.ranks and sizing.overload have no fault."""
WAYS: Final = (*(f"metrics {s} s" for s in INTERVALS_S), *LOG_WAYS)
NAMED_CAUSES: Final = {"stuck.head-of-line": ("stuck.never-fits",)}
"""Codes that name the cause of a harm: a request that never fits holds back those behind it."""
NEVER_SCRAPED_S: Final = 1e9
ENGINE: Final = ExposedEngine("lab", "127.0.0.1:0", "0")


class Reading(msgspec.Struct):
    """What came of one way to read a run."""

    harms: list[HarmSeen]
    claims: list[ClaimMade]


class PlayedRun(msgspec.Struct):
    """What a drawn run showed each second, and its truth. hours: in which a request ran or waited.

    scrapes: wall time in ns and metrics of each second. error: why it could not be run.
    """

    number: int
    faults: list[str]
    hours: float = 0.0
    began_ns: int = 0
    watched_s: float = 0.0
    configuration: dict[str, str] = {}
    scrapes: list[tuple[int, ExposedFigures]] = []
    harms: list[Harm] = []
    error: str = ""

    def as_metrics(self, interval_s: int) -> Iterator[Record]:
        """Yield the samples of a page that is scraped each `interval_s` seconds."""
        yield from facts_of(ENGINE, "scrape 1", "kvscope", self.configuration)
        sampler = Sampler(ENGINE, "metrics")
        for number, (at_ns, figures) in enumerate(self.scrapes[::interval_s], 1):
            yield sampler.sample(at_ns, f"scrape {number}", figures)

    def as_log(self, *, while_still: bool) -> Iterator[Record]:
        """Yield the samples of vLLM's lines."""
        moments = [
            Moment(
                (at_ns - self.began_ns) / 1e9,
                running=round(figures.get("running", 0.0)),
                waiting=round(figures.get("waiting", 0.0)),
                deferred=round(figures.get("deferred", 0.0)),
                usage=figures.get("usage", 0.0),
                prompt_tokens=figures.get("prompt_tokens", 0.0),
                generation_tokens=figures.get("generation_tokens", 0.0),
                steps=0,
                finished=0,
            )
            for at_ns, figures in self.scrapes[::LOG_S]
        ]
        lines = log_lines(moments, while_still=while_still)
        yield from Log("lab.log", BEGAN.replace(day=BEGAN.day + 1)).records(lines)


class SampledRun(msgspec.Struct):
    """A drawn run by each way to read it."""

    number: int
    faults: list[str]
    hours: float
    readings: dict[str, Reading]
    error: str = ""


def drawn_fault(number: int) -> str | None:
    """Return the fault of an odd run, empty for none; even runs draw it, as `python -m kvscope.lab` does."""
    return FAULTS_IN_TURN[number // 2 % len(FAULTS_IN_TURN)] if number % 2 else None


def played_run(number: int, seed: int) -> PlayedRun:
    """Run one drawn episode, read its metrics each second, and decide its truth."""
    draw = draw_run(number, seed, drawn_fault(number))
    run = PlayedRun(number, list(draw.faults))
    try:
        with tempfile.TemporaryDirectory(prefix="kvscope-recall-") as directory:
            episode = OwnEpisode(replace(draw, scrape_s=NEVER_SCRAPED_S), Path(directory))
            _scrape_each_second(episode, run)
            episode.watch()
            end = episode.drain()
        run.began_ns, run.watched_s, run.hours = episode.began_ns, end.watched_s, end.busy_s / 3600
        run.harms = decide(end)
    except Exception as error:  # a run that cannot be run is counted
        run.error = f"{type(error).__name__}: {error}"
    return run


def _scrape_each_second(episode: OwnEpisode, run: PlayedRun) -> None:
    collector = EngineCollector(episode.engine)

    def scrape() -> None:
        if episode.witness.waste.closed:
            return
        figures: ExposedFigures = {}
        for family in collector.collect():
            for sample in family.samples:
                put_figure(figures, sample.name, sample.labels, sample.value)
                if sample.name == CONFIGURATION:
                    run.configuration = sample.labels
        run.scrapes.append((episode.engine.time.time_ns(), figures))

    episode.engine.time.every(1.0, scrape)


def kept_run(number: int, seed: int, directory: Path) -> PlayedRun:
    """Return a run that `directory` keeps, which is played first if it is not there."""
    path = directory / f"played-{seed}-{number}.gz"
    if path.exists():
        return msgspec.msgpack.decode(gzip.decompress(path.read_bytes()), type=PlayedRun)
    run = played_run(number, seed)
    part = path.with_suffix(".part")
    part.write_bytes(gzip.compress(msgspec.msgpack.encode(run), 1))
    part.rename(path)
    return run


def sampled_run(number: int, seed: int, directory: Path, known: Mapping[int, SampledRun]) -> SampledRun:
    """Read one run in each way in which it is not known yet."""
    played = kept_run(number, seed, directory)
    run = SampledRun(number, played.faults, played.hours, {}, played.error)
    if played.error:
        return run
    run.readings = dict(known[number].readings) if number in known else {}
    log_began_ns = round(BEGAN.timestamp() * 1e9)
    for interval_s in INTERVALS_S:
        if (way := f"metrics {interval_s} s") not in run.readings:
            run.readings[way] = _reading(played.as_metrics(interval_s), played.began_ns, played)
    for way, while_still in LOG_WAYS.items():
        if way not in run.readings:
            run.readings[way] = _reading(played.as_log(while_still=while_still), log_began_ns, played)
    return run


def _reading(records: Iterator[Record], began_ns: int, played: PlayedRun) -> Reading:
    found = find_in_records(records, began_ns)
    claims = [judge_claim(one, played.harms) for one in found]
    return Reading(seen_harms(played.harms, found, played.watched_s), claims)


def way_interval_s(way: str) -> int:
    """Return the seconds between the samples of a way to read a run."""
    return int(way.split()[1])


def was_watched(harm: HarmSeen, _way: str) -> bool:
    """Whether the harm counts for recall: it was found, or watched for a minute."""
    return harm.found_s is not None or harm.left_s >= WATCHED_AFTER_S


def was_decidable(harm: HarmSeen, way: str) -> bool:
    """Whether a large harm was watched for as long as its rule needs at this interval."""
    need = CATALOGUE[harm.code].sample_need
    needed_s = need.decides_after_s(way_interval_s(way)) if need is not None else math.inf
    return harm.size >= LARGE_HARM and harm.left_s >= needed_s


def recall_table(runs: Sequence[SampledRun], counts: Callable[[HarmSeen, str], bool]) -> Iterator[str]:
    """Yield how many of the harms that count were found, by code that metrics can show and by way, with 95 % bounds."""
    yield f"| code | {' | '.join(WAYS)} |"
    yield "|---|" + "---|" * len(WAYS)
    codes = {harm.code for run in runs for reading in run.readings.values() for harm in reading.harms}
    for code in sorted(code for code in codes if CATALOGUE[code].sample_need is not None):
        cells = []
        for way in WAYS:
            readings = [run.readings[way] for run in runs if way in run.readings]
            seen = [(harm, one) for one in readings for harm in one.harms if harm.code == code and counts(harm, way)]
            found = sum(harm.found_s is not None for harm, _ in seen)
            other = sum(harm.found_s is None and found_otherwise(harm, one) for harm, one in seen)
            low, high = share_bounds(found, len(seen))
            bounds = f" [{100 * low:.0f}–{100 * high:.0f} %]" if seen else ""
            cells.append(f"{found}{f' (+{other})' if other else ''} of {len(seen)}{bounds}")
        yield f"| {code} | {' | '.join(cells)} |"


def found_otherwise(harm: HarmSeen, reading: Reading) -> bool:
    """Whether another code was found that the harm makes true, or that names its cause."""
    causes = NAMED_CAUSES.get(harm.code, ())
    return bool(harm.also) or any(claim.right and claim.code in causes for claim in reading.claims)


def not_in_metrics(runs: Sequence[SampledRun]) -> str:
    """Return the codes of harms that have no sample need, each with its runs and how many were found."""
    parts = []
    harms = [(run.number, harm) for run in runs for reading in run.readings.values() for harm in reading.harms]
    for code in sorted({harm.code for _, harm in harms}):
        if CATALOGUE[code].sample_need is None:
            shown = {number for number, harm in harms if harm.code == code and was_watched(harm, "")}
            found = {number for number, harm in harms if harm.code == code and (harm.found_s is not None or harm.also)}
            parts.append(f"{code} ({len(shown)}{f', {len(found)} by this or another code' if found else ''})")
    return ", ".join(parts)


def claims_table(runs: Sequence[SampledRun]) -> Iterator[str]:
    """Yield right verdicts by way and verdict, and wrong ones in healthy engines."""
    ways = list(dict.fromkeys(way for run in runs for way in run.readings))
    yield "| read as | likely, right | cannot-tell, right | wrong in healthy engines | healthy engine-hours |"
    yield "|---|---|---|---|---|"
    healthy = [run for run in runs if not run.faults]
    for way in ways:
        claims = [claim for run in runs if way in run.readings for claim in run.readings[way].claims]
        cells = []
        for verdict in ("likely", "cannot-tell"):
            of_it = [claim.right for claim in claims if claim.verdict == verdict]
            low, high = share_bounds(sum(of_it), len(of_it))
            cells.append(f"{sum(of_it)} of {len(of_it)} [{100 * low:.0f}–{100 * high:.0f} %]" if of_it else "none")
        wrong = sum(not claim.right for run in healthy if way in run.readings for claim in run.readings[way].claims)
        yield f"| {way} | {' | '.join(cells)} | {wrong} | {sum(run.hours for run in healthy):.1f} |"


def recall_section(runs: Sequence[SampledRun], command: str) -> str:
    """Return the tables as Markdown."""
    ran = [run for run in runs if not run.error]
    return "\n".join(
        (
            f"Written by `{command}`: {len(ran)} runs, of which {sum(not run.faults for run in ran)} without a fault;"
            f" {len(runs) - len(ran)} could not be run.",
            "",
            "In each cell: runs in which the code was found, with a plus those in which another code that the harm"
            " makes true, or that names its cause, was found instead, of the runs that were watched for a minute after"
            " the harm began, and the 95 % bounds of the share that was found.",
            "",
            *recall_table(ran, was_watched),
            "",
            "A harm counts above however small it is. The next table has those of at least a hundredth of the pool, the"
            " requests, the work or the time, in runs that were watched for as long as the rule needs at the interval.",
            "",
            *recall_table(ran, was_decidable),
            "",
            "Codes for which no rule states how many samples it needs, each with the runs that had it:"
            f" {not_in_metrics(ran)}.",
            "",
            *claims_table(ran),
        )
    )


def read_runs(path: Path) -> dict[int, SampledRun]:
    """Return the runs that a file of an earlier call has, by number."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return {run.number: run for run in (msgspec.json.decode(line, type=SampledRun) for line in lines)}


def is_read(run: SampledRun) -> bool:
    """Whether the run was read in every way, or could not be run."""
    return bool(run.error) or run.readings.keys() >= set(WAYS)


def main() -> None:
    """Run what is not there yet, keep it, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--resume", type=Path, required=True, help="a folder that keeps each run")
    parser.add_argument("--play-only", action="store_true", help="run what is not there yet, and read nothing")
    parser.add_argument("--reread", action="store_true", help="read all runs again, such as with changed rules")
    parsed = parser.parse_args()
    parsed.resume.mkdir(parents=True, exist_ok=True)
    played = parsed.resume / "played"
    played.mkdir(exist_ok=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(parsed.jobs, mp_context=context, initializer=logging.disable) as pool:
        if parsed.play_only:
            wait([pool.submit(kept_run, number, parsed.seed, played) for number in range(parsed.runs)])
            return
        kept = parsed.resume / f"sampled-{parsed.seed}.jsonl"
        done = {} if parsed.reread else read_runs(kept)
        left = [number for number in range(parsed.runs) if number not in done or not is_read(done[number])]
        with kept.open("wb" if parsed.reread else "ab") as file:
            for run in pool.map(partial(sampled_run, seed=parsed.seed, directory=played, known=done), left):
                done[run.number] = run
                file.write(msgspec.json.encode(run) + b"\n")
                file.flush()
    runs = [done[number] for number in range(parsed.runs)]
    print(
        recall_section(runs, f"python -m kvscope.lab.samples.sample_recall --runs {parsed.runs} --seed {parsed.seed}")
    )


if __name__ == "__main__":
    main()
