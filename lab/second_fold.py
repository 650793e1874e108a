"""A second fold of an engine's events, written from the contract's page and not from the ledger's code.

It keeps what single events report: references and hashes of blocks, block tables, deferrals, statuses and progress of
requests, and sums. After a loss it believes the engine's audits. Once a cycle is complete it compares again, without
the sums, of which a part is lost.
"""

from __future__ import annotations

from collections import Counter

from kvscope.monitor.contract.kinds import FIRST_FINISHED, Holder, Kind, Release, Status
from kvscope.monitor.contract.wire import PINS, Batch, Run
from kvscope.monitor.ledger.engine_ledger import EngineLedger


class Audit:
    """A cycle in which the engine reads out its tables: requests that were known at its beginning and not seen yet."""

    def __init__(self, unseen: set[int]) -> None:
        self.unseen = unseen
        self.seen = 0
        self.others: dict[int, list[int]] = {}


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
        self.detached: dict[int, list[int]] = {}
        """By block: those it was detached from, and PINS for each pin."""
        self.deferred: dict[int, set[int]] = {}
        self.keepers: dict[int, int] = {}
        """By request, the holder that the last deferral named."""
        self.fetching: set[int] = set()
        self.audit: Audit | None = None
        self.audits = self.audit_differences = 0
        self.damaged = self.lossy = False
        self._sequence = -1

    def add(self, batch: Batch) -> None:
        """Fold a batch in."""
        if batch.sequence >= 0:
            self.lose(bool(batch.sequence > self._sequence + 1 > 0))
            self._sequence = batch.sequence
        for event in batch.events():
            self.lose(event.kind == Kind.LOST and batch.sequence < 0)  # which the source added
            self._add_block_event(event)
            self._add_deferral(event)
            self._add_audit_event(event)
            self._add_request_event(event)
            self._add_step_event(event)
        over = [number for number, status in self.statuses.items() if status >= FIRST_FINISHED]
        for number in over:
            if not self.tables.get(number):
                del self.statuses[number]

    def lose(self, is_loss: bool) -> None:
        """Take in that batches are missing here, if they are."""
        if is_loss:
            self.damaged = self.lossy = True
            self.audit = None

    def _add_deferral(self, event: Run) -> None:
        number = event.request
        if event.kind == Kind.FREE_DEFERRED and event.ids:
            self.deferred.setdefault(number, set()).update(event.ids)
            self.keepers[number] = event.args[0]
        elif event.kind == Kind.RELEASED:
            self._undefer(number, event.ids)
            if event.args[0] in (Release.TRANSFER_DONE, Release.LEASE_EXPIRED):
                self._connector_ends(number)
        elif event.kind == Kind.COMPLETION_DELIVERED and self.statuses.get(number, 0) >= FIRST_FINISHED:
            if number not in self.fetching:
                self._connector_ends(number)
        elif event.kind == Kind.WAITING_ON and event.args[0] == Status.WAITING_FOR_REMOTE_KVS:
            self.fetching.add(number)
        elif event.kind in (Kind.READY, Kind.REMOTE_LOAD):
            self.fetching.discard(number)
        for block in event.ids if event.kind in (Kind.DETACHED, Kind.PINNED, Kind.RECLAIMED, Kind.UNPINNED) else ():
            holders = self.detached.setdefault(block, [])
            if event.kind == Kind.DETACHED:
                holders.append(number)
            elif event.kind == Kind.PINNED:
                holders.append(PINS)
                self.deferred.setdefault(PINS, set()).add(block)
            elif event.kind == Kind.UNPINNED and PINS in holders:
                holders.remove(PINS)
                if PINS not in holders:
                    self._undefer(PINS, [block])
            elif event.kind == Kind.RECLAIMED and any(holder != PINS for holder in holders):
                former = next(holder for holder in holders if holder != PINS)
                holders.remove(former)
                self._undefer(former, [block])

    def _connector_ends(self, number: int) -> None:
        if self.keepers.get(number) == Holder.CONNECTOR:
            self.deferred.pop(number, None)

    def _undefer(self, number: int, blocks: list[int]) -> None:
        left = self.deferred.get(number, set()).difference(blocks)
        if left:
            self.deferred[number] = left
        else:
            self.deferred.pop(number, None)

    def _add_audit_event(self, event: Run) -> None:
        if event.kind == Kind.AUDIT_BEGIN:
            self.audit = Audit({n for n, status in self.statuses.items() if status != Status.RECEIVED})
        elif self.audit is None:
            return
        elif event.kind == Kind.AUDIT_BLOCKS:
            for block, value in enumerate(event.ids, event.args[0]):
                self._audit_block(block, value >> 2, bool(value & 2), bool(value & 1))
        elif event.kind == Kind.AUDIT_REQUEST and not event.args[6]:
            self._audit_request(self.audit, event)
        elif event.kind == Kind.AUDIT_REQUEST and self.damaged:
            self._adopt_deferral(event, event.ids)
            for block in event.ids:
                if event.request not in self.detached.setdefault(block, []):
                    self.detached[block].append(event.request)
        elif event.kind == Kind.AUDIT_END:
            self._end_audit(self.audit, event.args[4])

    def _audit_block(self, block: int, references: int, is_queued: bool, is_hashed: bool) -> None:
        differs = references != self.references[block] or is_hashed != bool(self.hashes.get(block, 0))
        self.audit_differences += (differs and not self.damaged) or is_queued != (references == 0)
        if differs and self.damaged:
            self.references[block] = references
            self.hashes[block] = (self.hashes.get(block, 0) or 1) if is_hashed else 0

    def _audit_request(self, audit: Audit, event: Run) -> None:
        """Compare a request, or adopt it after a loss. Its first KV group comes last."""
        number, args = event.request, event.args
        if event.group:
            audit.others.setdefault(number, []).extend(event.ids)
            return
        blocks = event.ids + audit.others.pop(number, [])
        audit.seen += 1
        audit.unseen.discard(number)
        if self.damaged:
            self.statuses[number], self.progress[number] = args[0], (args[1], args[2])
            self.tables[number] = blocks
            self._adopt_deferral(event, blocks)
        elif number not in self.statuses or sorted(self.tables.get(number, ())) != sorted(blocks):
            self.audit_differences += 1

    def _adopt_deferral(self, event: Run, blocks: list[int]) -> None:
        if event.args[3]:
            self.deferred.setdefault(event.request, set()).update(blocks)
            self.keepers[event.request] = event.args[3]

    def _end_audit(self, audit: Audit, requests: int) -> None:
        self.audit = None
        self.audits += 1
        if self.damaged:
            for number in audit.unseen:
                self.statuses.pop(number, None)
                self.tables.pop(number, None)
            self.damaged = False
            self._keep_known_holders()
            return
        alive = [n for n in audit.unseen if self.statuses.get(n, FIRST_FINISHED) < FIRST_FINISHED]
        self.audit_differences += len(alive) + (audit.seen != requests)

    def _keep_known_holders(self) -> None:
        """Forget holders and deferrals that the tables and references leave no room for."""
        owned = Counter(block for number in self.statuses for block in self.tables.get(number, ()))
        self.detached = {b: holders for b, holders in self.detached.items() if self.references[b] > owned[b]}
        for number, blocks in list(self.deferred.items()):
            is_over = self.statuses.get(number, 0) >= FIRST_FINISHED
            held = {*(self.tables.get(number, ()) if is_over else ())}
            held |= {block for block in blocks if number in self.detached.get(block, ())}
            self._undefer(number, list(blocks - held))

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
        """Name what the ledger has otherwise. After a loss not the sums, and of hashes only whether there is one."""
        if self.damaged:
            return [] if ledger.state.damaged else ["damage: the ledger has none"]
        state, blocks = ledger.state, range(self.total)
        used = sum(self.references[block] > 0 for block in blocks)
        idle = sum(self.references[block] <= 0 and self.hashes.get(block, 0) != 0 for block in blocks)
        requests = state.requests.values()
        queues = Counter(record.status for record in requests)
        totals = {name: getattr(state.totals, name) for name in self.sums}
        compared: dict[str, tuple[object, object]] = {
            "pool": ((state.total, state.reserved), (self.total, self.reserved)),
            "references": (state.refs, [self.references[block] for block in blocks]),
            "hashes": (
                [value and (value, 1)[self.lossy] for value in state.hashes],
                [(value := self.hashes.get(block, 0)) and (value, 1)[self.lossy] for block in blocks],
            ),
            "deferrals": (
                {number: sorted(deferral.blocks) for number, deferral in state.deferrals.items()},
                {number: sorted(held) for number, held in self.deferred.items()},
            ),
            "audits": (state.audit_cycles, self.audits),
            "differences of audits": (
                any("audit:" in each.anomaly.kind.value for each in ledger.anomalies),
                self.audit_differences > 0,
            ),
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
        }
        counted: dict[str, tuple[object, object]] = {
            "sums": (totals, dict(self.sums)),
            "released": (+Counter(state.totals.released), +self.released),
            "preemptions": (Counter(state.totals.preemptions), self.preempted),
            "finished": (Counter(state.totals.finished), self.finished),
            "bounds of steps": (Counter(state.totals.limits), self.bounds),
        }
        if not self.lossy:
            compared |= counted
        return [f"{name}: {theirs} and {ours}" for name, (theirs, ours) in compared.items() if theirs != ours]
