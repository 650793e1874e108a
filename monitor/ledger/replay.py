"""Parts of a replay: the first events of a batch, and the passing of time when nothing is heard."""

from __future__ import annotations

from monitor.events.kinds import Kind
from monitor.events.wire import NO_REQUEST, Batch, Run, batch_of, column, fives
from monitor.ledger.story import CARRIES_TIME


def first_events(batch: Batch, count: int) -> Batch:
    """The batch as if it had ended after its first `count` events: without the counts of its end, and with the time
    that the last of these events was said at.
    """
    runs, args, ids = batch.runs.cast("i").tolist(), batch.args.cast("q").tolist(), batch.ids.cast("i").tolist()
    if count >= len(runs) // 5:
        return batch
    runs = runs[: 5 * count]
    mono_ns = a = 0
    for kind, _, _, n_args, _ in fives(runs):
        if kind in CARRIES_TIME and n_args:
            mono_ns = args[a]
        a += n_args
    wall_ns = batch.wall_ns - batch.mono_ns + mono_ns if mono_ns else batch.wall_ns
    return Batch(
        batch.engine, batch.epoch, batch.sequence, batch.first_step, batch.last_step, wall_ns,
        mono_ns or batch.mono_ns, -1, -1, -1, -1, batch.dropped_batches, batch.dropped_events, batch.texts,
        column("i", runs), column("q", args[:a]), column("i", ids[: sum(runs[4::5])]),
    )  # fmt: skip


def observed(engine: str, epoch: int, wall_ns: int) -> Batch:
    """It was this late, and nothing else was heard: as a source says it."""
    return batch_of(engine, epoch, [Run(Kind.OBSERVED, 0, NO_REQUEST, [wall_ns], [])])
