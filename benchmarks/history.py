"""What keeping history costs: to take events in, on disk, and to ask what was.

    python -m benchmarks.history [--events N] [--blocks N]

An engine's real scheduler and pool, in virtual time, under a load of chats over shared system prompts that fills the
pool; everything that it says goes through the writer, and each segment that ends is closed. An event is one block of a
run of blocks, one request of a step, one event of any other kind. Taking in is what the writer and the closing take of
a processor; folding, which the service does anyway, is not in it. Asking is measured on what is then on disk, by a
reader that knows nothing yet, and by one that was asked before. Times are of a processor, since what else the machine
does is not history's.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.machine import machine
from engine.clock import VirtualClock
from monitor.events.log import count_events
from monitor.events.wire import Batch, encode
from monitor.history.closed import close
from monitor.history.history import History
from monitor.history.segments import closed_segments, directory_of
from monitor.history.sql import answer
from monitor.history.writer import Writer
from monitor.ledger.ledger import EngineLedger
from monitor.sources.live import Received
from tests.lab import Lab

EVENTS_A_SECOND = 1_000_000
BYTES_AN_EVENT = 8
STATE_MS = 100
OLDER_MS = 1_000
STEP_S = 0.02
MOMENTS = 20
OLDER_THAN_S = 20
HELD = """
WITH happened AS (
    SELECT unnest(ids) AS block, request, kind, at_ns, sequence, event FROM events
    WHERE at_ns <= {at_ns} AND kind IN ('ALLOCATED', 'REUSED', 'RELEASED')
)
SELECT block, arg_max(request, (sequence, event)) AS owner, max(at_ns) AS since FROM happened
GROUP BY block
HAVING arg_max(kind, (sequence, event)) <> 'RELEASED' AND since <= {at_ns} - {age_ns}
"""
"""Blocks that a request was given so long ago, and nobody gave back. Of shared ones, the last who took it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=5_000_000, metavar="N", help="(5,000,000)")
    parser.add_argument("--blocks", type=int, default=20_000, metavar="N", help="of the pool (20,000)")
    parsed = parser.parse_args()
    print(machine("pyarrow", "duckdb"))
    with tempfile.TemporaryDirectory(prefix="kvscope-history-") as folder:
        measure(Path(folder), parsed.events, parsed.blocks)


def measure(folder: Path, events: int, blocks: int) -> None:
    """Take so many events in, and ask; print what each takes."""
    lab = Lab(total=blocks, block_size=16, max_num_seqs=256, max_num_batched_tokens=8192, seed=3)
    directory = directory_of(folder, lab.packer.engine)
    ended: list[Path] = []
    spent: Counter[str] = Counter()
    ledger = EngineLedger(lab.packer.engine)
    writer = Writer(directory, ended.append, lab.clock)
    taken = raw = 0
    for batch in said(lab):
        payload = encode(batch)
        spent["writing"] += cpu_ns(writer.keep, [Received(batch, payload)], ledger)
        ledger.apply(batch)
        taken += count_events(batch.runs.cast("i").tolist())
        raw += len(payload)
        while ended:
            spent["closing"] += cpu_ns(close, ended.pop(), directory)
        if taken >= events:
            break
    writer.stop(ledger)
    spent["closing"] += sum(cpu_ns(close, path, directory) for path in directory.glob("*.kvj"))
    assert not ledger.anomalies, ledger.anomalies[0]
    sizes: Counter[str] = Counter()
    for segment in closed_segments(directory):
        for path in segment.path.iterdir():
            sizes[path.stem] += path.stat().st_size
    print(f"\n{taken:,} events of an engine of {blocks:,} blocks, {raw / taken:.1f} bytes each as sent;", end=" ")
    print(f"{len(list(closed_segments(directory)))} segments")
    row("events a second taken in", taken / sum(spent.values()) * 1e9, EVENTS_A_SECOND)
    for part in ("writing", "closing"):
        row(f"  of which {part}, ns an event", spent[part] / taken)
    row("bytes an event", sizes.total() / taken, BYTES_AN_EVENT)
    for part, size in sizes.most_common(3):
        row(f"  of which {part}", size / taken)
    ask(folder, lab.packer.engine)


def ask(folder: Path, engine: str) -> None:
    """What was at moments, by readers that know nothing and by one that knows the segments."""
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
    return [(block, state.names(state.owners(block))) for block in held]


def held_by_sql(folder: Path, at_ns: int) -> int:
    """How many of them a query finds."""
    with answer(HELD.format(at_ns=at_ns, age_ns=OLDER_THAN_S * 1_000_000_000), folder) as found:
        return sum(1 for _ in found.rows)


def said(lab: Lab) -> Iterator[Batch]:
    """What the engine says, a batch a step, for ever. The pool is kept full by who waits."""
    rng = random.Random(3)
    systems = [[rng.randrange(1000) for _ in range(rng.randint(200, 1500))] for _ in range(8)]
    yield from (frame for frame in lab.frames if isinstance(frame, Batch))
    assert isinstance(lab.clock, VirtualClock)
    beat_s = 0.0
    while True:
        while len(lab.scheduler.waiting) < 2:
            question = [rng.randrange(1000) for _ in range(rng.randint(50, 2000))]
            lab.arrive(rng.choice(systems) + question, max_tokens=rng.randint(50, 600))
        lab.frames.clear()
        lab.step(STEP_S)
        beat_s += STEP_S
        if beat_s >= 1:
            beat_s = 0.0
            lab.heartbeat()
        yield from (frame for frame in lab.frames if isinstance(frame, Batch))


def row(what: str, figure: float, aim: float | None = None) -> None:
    print(f"{what:52}{figure:14,.1f}" + (f"   (aim {aim:,})" if aim is not None else ""))


def cpu_ns(do: Callable[..., object], *arguments: object) -> int:
    began = time.process_time_ns()
    do(*arguments)
    return time.process_time_ns() - began


def cpu_ms(do: Callable[..., object], *arguments: object) -> float:
    return cpu_ns(do, *arguments) / 1e6


if __name__ == "__main__":
    main()
