"""A second fold of an engine's events, written from the contract's page and not from the ledger's code.

It keeps no more than what single events report: references and hashes of blocks, block tables, statuses and progress of
requests, and sums. It knows no audits, no deferrals and no losses.
"""

from __future__ import annotations

from collections import Counter

from kvscope.monitor.events.kinds import FIRST_FINISHED, Kind, Status
from kvscope.monitor.events.wire import Batch, Run
from kvscope.monitor.ledger.engine_ledger import EngineLedger


class SecondFold:
    """The state of an engine whose events never contradict each other."""

    def __init__(self) -> None:
        self.total = self.reserved = 0
        self.references: Counter[int] = Counter()
        self.hashes: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}
        self.statuses: dict[int, int] = {}
        self.progress: dict[int, tuple[int, int]] = {}
        self.hits: Counter[int] = Counter()
        self.sums: Counter[str] = Counter()
        self.released: Counter[int] = Counter()
        self.preempted: Counter[int] = Counter()
        self.finished: Counter[int] = Counter()
        self.bounds: Counter[int] = Counter()

    def add(self, batch: Batch) -> None:
        """Fold a batch in."""
        for event in batch.events():
            self._add_block_event(event)
            self._add_request_event(event)
            self._add_step_event(event)
        over = [number for number, status in self.statuses.items() if status >= FIRST_FINISHED]
        for number in over:
            if not self.tables.get(number):
                del self.statuses[number]

    def _add_block_event(self, event: Run) -> None:
        ids, table = event.ids, self.tables.setdefault(event.request, [])
        if event.kind == Kind.ALLOCATED:
            for block in ids:
                self.sums["evicted"] += not self.references[block] and bool(self.hashes.pop(block, 0))
            self.references.update(ids)
            table += ids
            self.sums["allocated"] += len(ids)
        elif event.kind == Kind.REUSED:
            self.references.update(ids)
            table += ids
            self.sums["reused"] += len(ids)
        elif event.kind == Kind.PINNED:
            self.references.update(ids)
        elif event.kind in (Kind.RELEASED, Kind.RECLAIMED, Kind.UNPINNED):
            self.references.subtract(ids)
            if event.kind != Kind.UNPINNED:
                self.released[event.args[0]] += len(ids)
        elif event.kind == Kind.CACHED:
            self.hashes.update(zip(ids, event.args, strict=True))
            self.sums["cached"] += len(ids)
        elif event.kind == Kind.EVICTED:
            self.sums["evicted"] += sum(bool(self.hashes.pop(block, 0)) for block in ids)
        if event.kind in (Kind.RELEASED, Kind.DETACHED):
            self.tables[event.request] = [block for block in table if block not in ids]

    def _add_request_event(self, event: Run) -> None:
        number, args = event.request, event.args
        moved = {
            Kind.RECEIVED: Status.RECEIVED,
            Kind.ARRIVED: Status.WAITING,
            Kind.ADMITTED: Status.RUNNING,
            Kind.PREEMPTED: Status.PREEMPTED,
            Kind.READY: Status.WAITING,
        }
        if event.kind in moved:
            self.statuses[number] = moved[Kind(event.kind)]
        elif event.kind in (Kind.WAITING_ON, Kind.FINISHED):
            self.statuses[number] = args[0]
        elif event.kind == Kind.QUEUED and self.statuses.get(number) != Status.PREEMPTED:
            self.statuses[number] = Status.WAITING
        if event.kind == Kind.ADMITTED:
            self.progress[number] = (args[0], self.progress.get(number, (0, 0))[1])
        elif event.kind == Kind.PREEMPTED:
            self.progress[number] = (0, self.progress.get(number, (0, 0))[1])
            self.preempted[args[0]] += 1
            self.sums["tokens_lost"] += args[3]
        elif event.kind == Kind.FINISHED:
            self.finished[args[0]] += 1
        elif event.kind == Kind.LOOKED_UP:
            if event.group == 0:
                self.sums["looked_up_tokens"] += args[0]
                self.hits[number] = 0
            self.sums["hit_tokens"] += args[1] - self.hits[number]
            self.hits[number] = args[1]
        counted = {
            Kind.ARRIVED: "arrived",
            Kind.ALLOCATION_FAILED: "allocation_failures",
            Kind.CLIENT_GONE: "client_gone",
        }
        if event.kind in counted:
            self.sums[counted[Kind(event.kind)]] += 1

    def _add_step_event(self, event: Run) -> None:
        args = event.args
        if event.kind == Kind.STARTED:
            self.total, self.reserved = args[1:3]
        elif event.kind == Kind.STEP_COMPLETED:
            self.sums["steps"] += 1
            self.sums["step_ns"] += args[2]
            self.bounds[args[3]] += 1
        elif event.kind == Kind.PROGRESSED:
            half = len(event.ids)
            for number, computed, outputs in zip(event.ids, args[:half], args[half:], strict=True):
                if number in self.statuses:
                    before = self.progress.get(number, (0, 0))
                    self.sums["computed_tokens"] += max(computed - before[0], 0)
                    self.sums["output_tokens"] += max(outputs - before[1], 0)
                    self.progress[number] = (computed, outputs)

    def differences(self, ledger: EngineLedger) -> list[str]:
        """Name what the ledger has otherwise."""
        state, blocks = ledger.state, range(self.total)
        used = sum(self.references[block] > 0 for block in blocks)
        idle = sum(self.references[block] <= 0 and self.hashes.get(block, 0) != 0 for block in blocks)
        requests = state.requests.values()
        queues = Counter(record.status for record in requests)
        totals = {name: getattr(state.totals, name) for name in self.sums}
        compared: dict[str, tuple[object, object]] = {
            "pool": ((state.total, state.reserved), (self.total, self.reserved)),
            "references": (state.refs, [self.references[block] for block in blocks]),
            "hashes": (state.hashes, [self.hashes.get(block, 0) for block in blocks]),
            "used": (state.used, used),
            "cached idle": (state.cached_idle, idle),
            "free": (state.free, self.total - self.reserved - used),
            "statuses": ({record.number: record.status for record in requests}, self.statuses),
            "queues": (queues, Counter(self.statuses.values())),
            "tables": (
                {record.number: sorted(record.blocks) for record in requests},
                {number: sorted(self.tables.get(number, ())) for number in self.statuses},
            ),
            "progress": (
                {record.number: (record.computed_tokens, record.output_tokens) for record in requests},
                {number: self.progress.get(number, (0, 0)) for number in self.statuses},
            ),
            "sums": (totals, dict(self.sums)),
            "released": (+Counter(state.totals.released), +self.released),
            "preemptions": (Counter(state.totals.preemptions), self.preempted),
            "finished": (Counter(state.totals.finished), self.finished),
            "bounds of steps": (Counter(state.totals.limits), self.bounds),
        }
        return [f"{name}: {theirs} and {ours}" for name, (theirs, ours) in compared.items() if theirs != ours]
