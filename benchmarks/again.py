"""Repeats an engine's events: an hour's worth of them in the time that it takes to copy them.

Real scheduling costs far more than its events. A stretch of an engine's life that begins and ends with an empty pool
can follow itself: the same events at later times, in later steps and batches, about requests of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvscope.monitor.contract.kinds import SCHEMA, Kind
from kvscope.monitor.contract.wire import Batch, fives

Array = NDArray[np.int64]

TIMES: Final = ("at_ns", "in_flight_since_ns", "lease_deadline_ns")
"""0: there is none."""
STEPS: Final = ("step", "last_step", "step_in_flight")
SEQUENCES: Final = ("last_sequence",)
REQUESTS: Final = ("for_request",)


class _Sheet(NamedTuple):
    """A batch, and which of its numbers move with time, step, sequence and request."""

    batch: Batch
    runs: NDArray[np.int32]
    args: Array
    ids: NDArray[np.int32]
    times: Array
    steps: Array
    sequences: Array
    named: Array
    of_runs: Array
    of_ids: Array


class Episode:
    """Batches of one engine, in order, without its start. Request numbers in them are from 1 on.

    Each repetition takes as long as the first one did, with `pause_ns` before it.
    """

    def __init__(self, batches: Sequence[Batch], pause_ns: int) -> None:
        self._sheets = [_sheet(batch) for batch in batches]
        first, last = batches[0], batches[-1]
        self._lasts_ns = last.mono_ns - first.mono_ns + pause_ns
        self._batches = last.sequence - first.sequence + 1
        self._steps = max(batch.last_step for batch in batches) - first.last_step
        self._requests = max(number for batch in batches for number in batch.texts)

    def again(self, times: int) -> Iterator[Batch]:
        """Yield it for the `times`-th time after the first."""
        shift_ns, step = times * self._lasts_ns, times * self._steps
        sequence, request = times * self._batches, times * self._requests
        for sheet in self._sheets:
            runs, args, ids = sheet.runs.copy(), sheet.args.copy(), sheet.ids.copy()
            args[sheet.times] += shift_ns
            args[sheet.steps] += step
            args[sheet.sequences] += sequence
            args[sheet.named] += request
            runs[sheet.of_runs] += request
            ids[sheet.of_ids] += request
            batch = sheet.batch
            yield msgspec.structs.replace(
                batch,
                sequence=batch.sequence + sequence,
                first_step=batch.first_step + step,
                last_step=batch.last_step + step,
                wall_ns=batch.wall_ns + shift_ns,
                mono_ns=batch.mono_ns + shift_ns,
                texts={number + request: f"{name}-{times}" for number, name in batch.texts.items()},
                runs=runs.data.cast("B"),
                args=args.data.cast("B"),
                ids=ids.data.cast("B"),
            )


def _sheet(batch: Batch) -> _Sheet:
    moving: dict[tuple[str, ...], list[int]] = {TIMES: [], STEPS: [], SEQUENCES: [], REQUESTS: []}
    of_runs: list[int] = []
    of_ids: list[int] = []
    runs, args = batch.runs.cast("i").tolist(), batch.args.cast("q").tolist()
    a = i = 0
    for index, (kind, _, request, n_args, n_ids) in enumerate(fives(runs)):
        fields = SCHEMA[Kind(kind)]
        for place, name in enumerate(fields.args[:n_args], a):
            for names, places in moving.items():
                if name in names and args[place] > (0 if names is TIMES else -1):
                    places.append(place)
        if request >= 0:
            of_runs.append(index * 5 + 2)
        if fields.ids == "requests":
            of_ids += range(i, i + n_ids)
        a += n_args
        i += n_ids
    moved = [np.array(each, dtype=np.int64) for each in (*moving.values(), of_runs, of_ids)]
    return _Sheet(
        batch,
        np.array(runs, dtype=np.int32),
        np.array(args, dtype=np.int64),
        np.frombuffer(batch.ids, dtype=np.int32),
        *moved,
    )
