"""The cost of history: to take events in, on disk, and to query the past.

    python -m benchmarks.history [--events N] [--blocks N] [--into DIR]

An engine's real scheduler and pool, in virtual time, under a load of chats over shared system prompts that fills the
pool, some 5,000 events a second: ten minutes of it, at the end of which the pool is emptied, and those ten minutes
again and again until there are enough events (432,000,000 are 24 hours). Every event goes through the writer, and each
segment that ends is closed. An event is one block of a run of blocks, one request of a step, one event of any other
kind. Taking in is the processor time of the writer and the closing. Folding, which the service does anyway, is
separate. Asking is measured on what is then on disk, by a reader that knows nothing yet, and by one that was asked
before. Times are of a processor, since what else the machine does is not history's.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

from benchmarks.again import Episode
from benchmarks.machine import machine
from kvscope.engine.bench.clock import VirtualClock
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract.event_log import count_events
from kvscope.monitor.contract.wire import Batch, encode
from kvscope.monitor.history.history import History
from kvscope.monitor.history.sealed_segment import close
from kvscope.monitor.history.segment_files import closed_segments, directory_of
from kvscope.monitor.history.segment_writer import Writer
from kvscope.monitor.history.sql_query import SqlSource
from kvscope.monitor.history.sql_tables import with_answer
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.holders import owner_names
from kvscope.monitor.sources.live_stream import Received

EVENTS_A_SECOND = 1_000_000
BYTES_AN_EVENT = 8
STATE_MS = 100
OLDER_MS = 1_000
STEP_S = 0.05
RATE = 5_700
"""About so many events a second come of that."""
EPISODE_S = 600
MOMENTS = 20
OLDER_THAN_S = 20
HOUR_NS = 3_600_000_000_000
HELD = """
WITH happened AS (
    SELECT unnest(ids) AS block, request, kind, at_ns, sequence, event FROM events
    WHERE at_ns <= {at_ns} AND kind IN ('ALLOCATED', 'REUSED', 'RELEASED')
)
SELECT block, arg_max(request, (sequence, event)) AS owner, max(at_ns) AS since FROM happened
GROUP BY block
HAVING arg_max(kind, (sequence, event)) <> 'RELEASED' AND since <= {at_ns} - {age_ns}
"""
"""Blocks that a request got that long ago, and that were never freed. For shared ones, the last request that took
it.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=5_000_000, metavar="N", help="(5,000,000)")
    parser.add_argument("--blocks", type=int, default=20_000, metavar="N", help="of the pool (20,000)")
    parser.add_argument("--into", type=Path, metavar="DIR", help="keep the history there: `monitor serve --data DIR`")
    parsed = parser.parse_args()
    if parsed.into is not None and parsed.into.exists():
        parser.error(f"{parsed.into} exists: give a directory that does not")
    print(machine("pyarrow", "duckdb"))
    with contextlib.ExitStack() as stack:
        folder = parsed.into or stack.enter_context(tempfile.TemporaryDirectory(prefix="kvscope-history-"))
        measure(Path(folder), parsed.events, parsed.blocks)


class EndsNow(VirtualClock):
    """A virtual clock that began so long ago: what is kept of it is not too old to be kept."""

    def __init__(self, lasts_ns: int) -> None:
        super().__init__()
        self._began_ns = time.time_ns() - lasts_ns

    def time_ns(self) -> int:
        """Now, as a date."""
        return self._began_ns + self.ns


def measure(folder: Path, events: int, blocks: int) -> None:
    """Take that many events in, and ask. Print what each takes."""
    spent: Counter[str] = Counter()
    kept = take_in(folder, events, blocks, spent)
    directory = directory_of(folder, kept.engine)
    sizes: Counter[str] = Counter()
    for segment in closed_segments(directory):
        for path in segment.path.iterdir():
            sizes[path.stem] += path.stat().st_size
    print(
        f"\n{kept.events:,} events of an engine of {blocks:,} blocks, {kept.raw / kept.events:.1f} bytes each as sent;",
        end=" ",
    )
    print(f"{len(list(closed_segments(directory)))} segments;", end=" ")
    lasted_ns = kept.to_ns - kept.from_ns
    print(f"{lasted_ns / 3.6e12:.1f} hours at {kept.events / lasted_ns * 1e9:,.0f} events a second")
    row("events a second taken in", kept.events / (spent["writing"] + spent["closing"]) * 1e9, EVENTS_A_SECOND)
    for part in ("writing", "closing"):
        row(f"  of which {part}, ns an event", spent[part] / kept.events)
    row("folding into the ledger besides, ns an event", spent["folding"] / kept.events)
    row("bytes an event", sizes.total() / kept.events, BYTES_AN_EVENT)
    for part, size in sizes.most_common(3):
        row(f"  of which {part}", size / kept.events)
    ask(folder, kept.engine)


class TakenIn(NamedTuple):
    """A history that was made: of which engine, how much and when (wall ns). `raw` is in bytes, as sent."""

    engine: str
    events: int
    raw: int
    from_ns: int
    to_ns: int


def take_in(folder: Path, events: int, blocks: int, spent: Counter[str]) -> TakenIn:
    """Keep so many events of an engine under `folder`, all segments closed. `spent` counts ns of CPU by part."""
    clock = EndsNow(round(events / RATE * 1e9))
    lab = Lab(total=blocks, block_size=16, max_num_seqs=64, max_num_batched_tokens=2048, seed=3, clock=clock)
    directory = directory_of(folder, lab.packer.engine)
    ended: list[Path] = []
    ledger = EngineLedger(lab.packer.engine)
    writer = Writer(directory, ended.append, lab.clock)
    taken = raw = 0
    began_ns = lab.clock.time_ns()
    for number, batch in enumerate(stated(lab)):
        if number % 2000 == 0:
            print(f"\r{taken / events:4.0%} taken in", end="", file=sys.stderr, flush=True)
        payload = encode(batch)
        spent["writing"] += cpu_ns(writer.keep, [Received(batch, payload)], ledger)
        spent["folding"] += cpu_ns(ledger.apply, batch)
        taken += count_events(batch.runs.cast("i").tolist())
        raw += len(payload)
        while ended:
            spent["closing"] += cpu_ns(close, ended.pop(), directory)
        if taken >= events:
            break
    writer.stop(ledger)
    spent["closing"] += sum(cpu_ns(close, path, directory) for path in directory.glob("*.kvj"))
    assert not ledger.anomalies, ledger.anomalies[0]
    print(file=sys.stderr)
    return TakenIn(lab.packer.engine, taken, raw, began_ns, batch.wall_ns)


def ask(folder: Path, engine: str) -> None:
    """Query past times, by readers that know nothing and by one that knows the segments."""
    history = History(folder)
    span = history.span(engine)
    assert span is not None
    rng = random.Random(5)
    moments = [rng.randint(span.from_ns, span.to_ns) for _ in range(MOMENTS)]
    cold = [cpu_ms(History(folder).ledger_at, engine, at_ns) for at_ns in moments]
    for at_ns in moments:
        history.ledger_at(engine, at_ns)
    moments = [rng.randint(span.from_ns, span.to_ns) for _ in range(MOMENTS)]
    warm = [cpu_ms(history.ledger_at, engine, at_ns) for at_ns in moments]
    row("ms for the state at a moment, median", statistics.median(warm), STATE_MS)
    row("  the slowest", max(warm))
    row("  of a reader that knows nothing yet, median", statistics.median(cold))
    whole = [cpu_ms(History(folder).points, engine, span.from_ns, span.to_ns) for _ in range(3)]
    row("ms for 600 points of all of it, a new reader, median", statistics.median(whole))
    hours = [(at_ns, at_ns + HOUR_NS) for at_ns in moments]
    row("  of an hour of it", statistics.median(cpu_ms(history.points, engine, *hour) for hour in hours))
    moments = [rng.randint(span.from_ns, span.to_ns) for _ in range(5)]
    older = [cpu_ms(older_than, history, engine, at_ns) for at_ns in moments]
    row(f"ms for what was held for {OLDER_THAN_S} s, and by whom", statistics.median(older), OLDER_MS)
    by_sql = [cpu_ms(held_by_sql, folder, at_ns) for at_ns in moments[:3]]
    row("  by a query over all events until then", statistics.median(by_sql))


def older_than(history: History, engine: str, at_ns: int) -> list[tuple[int, str]]:
    """Blocks that were held for so long at a moment, with their owner."""
    ledger = history.ledger_at(engine, at_ns)
    state = ledger.state
    oldest = at_ns - OLDER_THAN_S * 1_000_000_000 - (ledger.wall(1) - 1)
    held = [block for block, refs in enumerate(state.refs) if refs and state.since[block] <= oldest]
    return [(block, owner_names(state, block)) for block in held]


def held_by_sql(folder: Path, at_ns: int) -> int:
    """How many of them a query finds."""
    query = HELD.format(at_ns=at_ns, age_ns=OLDER_THAN_S * 1_000_000_000)
    return with_answer(query, SqlSource(folder), lambda found: sum(1 for _ in found.rows))


def stated(lab: Lab) -> Iterator[Batch]:
    """Yield the engine's events, a batch a step, for ever: one episode, and that again."""
    start = [frame for frame in lab.frames if isinstance(frame, Batch)]
    yield from start
    lab.frames.clear()
    once = list(episode(lab))
    yield from once
    whole = Episode(once, round(STEP_S * 1e9))
    for times in count(1):
        yield from whole.again(times)


def episode(lab: Lab) -> Iterator[Batch]:
    """Yield a window of the engine from an empty pool to an empty pool. It is kept full in it by who waits."""
    rng = random.Random(3)
    systems = [[rng.randrange(1000) for _ in range(rng.randint(200, 1500))] for _ in range(8)]
    steps = round(EPISODE_S / STEP_S)
    for step in count():
        while step < steps and len(lab.scheduler.waiting) < 2:
            question = [rng.randrange(1000) for _ in range(rng.randint(50, 2000))]
            lab.arrive(rng.choice(systems) + question, max_tokens=rng.randint(50, 600))
        lab.step(STEP_S)
        if step % round(1 / STEP_S) == 0:
            lab.heartbeat()
        if not lab.scheduler.has_work:
            break
        yield from taken(lab)
    lab.pool.reset_prefix_cache()
    lab.step(STEP_S)
    yield from taken(lab)


def taken(lab: Lab) -> list[Batch]:
    """Return its events since the last call."""
    frames = [frame for frame in lab.frames if isinstance(frame, Batch)]
    lab.frames.clear()
    return frames


def row(what: str, figure: float, aim: float | None = None) -> None:
    print(f"{what:56}{figure:14,.1f}" + (f"   (aim {aim:,})" if aim is not None else ""))


def cpu_ns(do: Callable[..., object], *arguments: object) -> int:
    began = time.process_time_ns()
    do(*arguments)
    return time.process_time_ns() - began


def cpu_ms(do: Callable[..., object], *arguments: object) -> float:
    return cpu_ns(do, *arguments) / 1e6


if __name__ == "__main__":
    main()
