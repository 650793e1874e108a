"""What the events add up to: the fold of everything that an engine says into its books.

The engine's drain thread keeps one State as the shadow that keyframes are cut from; a reader keeps another as its
books. Both are the same fold of the same events, so a keyframe loaded is the state the events would have given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvscope.monitor.events.kinds import CAUSE_OF, FIRST_FINISHED, Cause, Holder, Kind, Status, TierOp
from kvscope.monitor.events.trace_context import TraceContext
from kvscope.monitor.events.wire import PINS, STACK_TEXT, fives
from kvscope.monitor.state.audit_comparison import AuditFold
from kvscope.monitor.state.records import (
    EngineStack,
    Heartbeat,
    Preemption,
    Prompt,
    RequestState,
    StepInFlight,
    TierState,
)
from kvscope.monitor.state.residency_samples import Stays
from kvscope.monitor.state.tables import EVENT_BITS, Books

MAX_BLOCKS: Final = 1 << 28
FETCH_SLACK_NS: Final = 2_000_000_000
"""What another thread says of a fetch may stand before what the engine's own said earlier, by an interval or two."""


class State(Books):
    """The books, and the fold into them: `apply`."""

    def __init__(self) -> None:
        super().__init__()
        self._audits = AuditFold()
        self._last_preemption: Preemption | None = None
        self._lost_tokens: dict[int, int] = {}
        """By request, the computed tokens that a preemption took; until it runs again."""

    # ---------------------------------------------------------------- the fold

    def apply(
        self, runs: list[int], args: list[int], ids: list[int], texts: Mapping[int, str], sequence: int = -1
    ) -> None:
        """Fold events in, in order. The lists are a batch's columns, or a log's lists before they are packed;
        `sequence` is the batch's number.

        Events laid out as SCHEMA says never make it raise; others may (IndexError, ValueError, OverflowError).
        """
        refs, owner, hashes, since, born = self.refs, self.owner, self.hashes, self.since, self.born
        requests, totals, evictions = self.requests, self.totals, self.evictions
        gone = evictions.gone.keys() if evictions else ()
        stays = self.stays or Stays()
        self._sequence = sequence
        pool = self.used, self.cached_idle
        allocated = cached = a = i = 0
        index = -1
        for kind, group, number, n_args, n_ids in fives(runs):
            index += 1
            a_end, i_end = a + n_args, i + n_ids
            if kind in _BLOCK_KINDS:
                now = self.now_ns
                self._index = index
                if n_ids == 1:  # the usual decode case, worth a shorter way
                    blocks = [ids[i]]
                    known = self.reserved <= ids[i] < self.total
                else:
                    blocks = ids[i:i_end]
                    ordered = sorted(blocks)  # which takes less than to look for the least and the greatest
                    known = not blocks or self.reserved <= ordered[0] <= ordered[-1] < self.total
                if not known:
                    self.anomaly("block out of range", max(blocks), number, f"the pool has {self.total}")
                elif kind == _ALLOCATED:
                    taken, evicted = n_ids, 0
                    for block in blocks:
                        if refs[block]:
                            taken -= 1
                            self._allocated_held(block, number)
                            continue
                        if hashes[block]:
                            hashes[block] = 0
                            evicted += 1
                            stays.evicted_since.append(since[block])
                            stays.evicted_ns.append(now)
                            stays.born.append(born[block])
                            stays.died_ns.append(now)
                        refs[block] = 1
                        owner[block] = number
                        since[block] = born[block] = now
                    stays.taken.append(taken)
                    stays.taken_ns.append(now)
                    if evicted:
                        self.cached_idle -= evicted
                        totals.evicted += evicted
                    if self.early:
                        self._check_early(blocks, number)
                    self.used += taken
                    allocated += n_ids
                    record = requests.get(number) or self._request(number)
                    record.blocks += blocks
                    if evictions and n_args and not record.first_token_ns:
                        unused = self.free - self.cached_idle  # of a prompt, counted already
                        evictions.evict(record, now, args[a:a_end], self.cached_idle + n_args, unused, self.here)
                elif kind == _CACHED:
                    if n_args != n_ids:
                        raise ValueError(f"{n_ids} blocks cached under {n_args} hashes")
                    for at, block in enumerate(blocks, a):
                        if not refs[block] and not hashes[block]:
                            self._cached_unused(block, stays)
                        hashes[block] = args[at]
                    cached += n_ids
                    if evictions and gone and not gone.isdisjoint(args[a:a_end]):
                        evictions.store(args[a:a_end], self.here)
                    cacher = requests.get(number)
                    if cacher is not None and not cacher.first_token_ns and not group:  # of each token once
                        cacher.cached_blocks += n_ids
                        self.prompt_blocks_cached += n_ids
                elif kind == _RELEASED:
                    freed = kept = 0
                    for block in blocks:
                        if refs[block] != 1 or owner[block] != number:
                            self._release_shared(block, number)
                            continue
                        refs[block] = 0
                        owner[block] = -1
                        freed += 1
                        stays.used_since.append(since[block])
                        since[block] = now
                        if hashes[block]:
                            kept += 1
                        else:
                            stays.born.append(born[block])
                            stays.died_ns.append(now)
                    stays.kept.append(kept)
                    stays.kept_ns.append(now)
                    self.used -= freed
                    self.cached_idle += kept
                    reason, released = args[a], totals.released
                    released[reason] = released.get(reason, 0) + n_ids
                    self._drop_blocks(number, blocks)
                elif kind == _REUSED:
                    self._reused(blocks, number, stays)
                    totals.reused += n_ids
                    (requests.get(number) or self._request(number)).blocks += blocks
                else:
                    self._rare_block_event(kind, number, args[a:a_end], blocks)
            elif kind == _CLOCK:
                self.now_ns = args[a]
            elif kind == _PROGRESSED:
                self._index = index
                self._progressed(ids[i:i_end], args[a:a_end])
            elif kind == _STEP_LAUNCHED:
                self._index = index
                self.now_ns = self.launched_ns = args[a]
                step, at = args[a + 1], self.here
                self.places.launched = at
                self.in_flight[step] = StepInFlight(step, args[a], n_ids, sum(args[a + 2 : a_end]), at)
            elif kind == _STEP_COMPLETED:
                self._index = index
                self._step_completed(*args[a:a_end][:7])
            else:
                self._index = index
                self._other(kind, group, number, args[a:a_end], ids[i:i_end], texts)
            a, i = a_end, i_end
        totals.allocated += allocated
        totals.cached += cached
        self._index = max(index, 0)  # what is found of all of them together is found there
        if pool != (self.used, self.cached_idle):
            self.places.pool = max(self.places.pool, sequence << EVENT_BITS | _last_of(_BLOCK_KINDS, runs))

    def mark_damaged(self) -> None:
        """Events were lost for good: take the engine's audits for truth until one is complete."""
        self.damaged = True
        self.stays = None
        self._lost_tokens.clear()  # who was let in again meanwhile is not known
        self._audits.forget()
        self.prompt_blocks_cached += MAX_BLOCKS  # so many may have been, unheard: see _prompt_computed
        for record in self.requests.values():
            record.ready_ns = record.fetch_ended_ns = 0  # what followed may be among what was lost
        for tier in self.tiers.values():
            tier.pins.clear()  # no audit tells of them, and their unpinning may be among what was lost

    # ---------------------------------------------------------------- blocks

    def _reused(self, blocks: list[int], number: int, stays: Stays) -> None:
        refs, owner, hashes, since, more = self.refs, self.owner, self.hashes, self.since, self.more
        now = self.now_ns
        used = hit = 0
        for block in blocks:
            if refs[block]:
                if owner[block] < 0:
                    owner[block] = number
                else:
                    more.setdefault(block, []).append(number)
                refs[block] += 1
                continue
            if hashes[block]:
                hit += 1
                stays.hit_since.append(since[block])
                stays.hit_ns.append(now)
            else:
                self.anomaly("prefix hit on a block with no hash", block, number, "")
            refs[block] = 1
            owner[block] = number
            since[block] = now
            used += 1
        stays.taken.append(used)
        stays.taken_ns.append(now)
        self.used += used
        self.cached_idle -= hit

    def _cached_unused(self, block: int, stays: Stays) -> None:
        """A block that nobody uses got contents."""
        self.cached_idle += 1
        stays.kept.append(1)
        stays.kept_ns.append(self.since[block])

    def _unused(self, block: int) -> None:
        """The last reference to it has just gone."""
        self.used -= 1
        stays = self.stays or Stays()
        stays.used_since.append(self.since[block])
        self.since[block] = self.now_ns
        if self.hashes[block]:
            self.cached_idle += 1
            stays.kept.append(1)
            stays.kept_ns.append(self.now_ns)
        else:
            stays.born.append(self.born[block])
            stays.died_ns.append(self.now_ns)

    def _evicted(self, block: int) -> None:
        """It has lost its contents, and is handed to nobody."""
        self.hashes[block] = 0
        self.totals.evicted += 1
        if not self.refs[block]:
            self.cached_idle -= 1
            stays = self.stays or Stays()
            stays.evicted_since.append(self.since[block])
            stays.evicted_ns.append(self.now_ns)
            stays.born.append(self.born[block])
            stays.died_ns.append(self.now_ns)

    # ---------------------------------------------------------------- blocks, the rarer cases

    def _allocated_held(self, block: int, number: int) -> None:
        """A held block was handed out: it gains an owner."""
        self.anomaly("allocated while held", block, number, f"held by {self.names(self.owners(block))}")
        self.refs[block] += 1
        if self.owner[block] < 0:
            self.owner[block] = number
        else:
            self.more.setdefault(block, []).append(number)

    def _release_shared(self, block: int, number: int) -> None:
        """One of several references goes, or one that the books do not know."""
        if self.refs[block] > 1 and block in self.more and self._remove_owner(block, number):
            self.refs[block] -= 1
            return
        if self.refs[block] <= 0:
            self.anomaly("released while free", block, number, f"reference count {self.refs[block]}")
            return
        if not self._remove_owner(block, number):
            owners = self.names(self.owners(block))
            self.anomaly("released by another than its owner", block, number, f"owned by {owners or 'nobody'}")
        self._drop_reference(block)

    def _remove_owner(self, block: int, number: int) -> bool:
        others = self.more.get(block)
        if self.owner[block] == number:
            self.owner[block] = others.pop(0) if others else -1
        else:
            try:
                (others or []).remove(number)
            except ValueError:
                return False
        if others is not None and not others:
            del self.more[block]
        return True

    def _drop_reference(self, block: int) -> None:
        self.refs[block] -= 1
        if not self.refs[block]:
            self._unused(block)

    def _rare_block_event(self, kind: int, number: int, args: list[int], blocks: list[int]) -> None:
        if kind == Kind.EVICTED:
            for block in blocks:
                if self.hashes[block]:
                    self._evicted(block)
        elif kind == Kind.DETACHED:
            for block in blocks:
                if not self._remove_owner(block, number):
                    self.anomaly("detached from another than its owner", block, number, "")
                self.detached.setdefault(block, []).append(number)
            self._drop_blocks(number, blocks, still_held=True)
        elif kind == Kind.FREE_DEFERRED:
            # One that ended, and all of whose blocks were detached just now, is among the ended.
            known = (self.requests.get(number), *reversed(self._ended))
            name = next((record.id for record in known if record is not None and record.number == number), f"#{number}")
            self.defer(number, name, args[0], args[1], args[2], blocks)
        elif kind == Kind.RECLAIMED:
            for block in blocks:
                former = self.detached.get(block)
                if not former:
                    self.anomaly("reclaimed though never detached", block, number, "")
                    continue
                self._reclaimed(former.pop(0), block)
                if not former:
                    del self.detached[block]
                self._drop_reference(block)
            self.totals.released[args[0]] = self.totals.released.get(args[0], 0) + len(blocks)
        elif kind == Kind.PINNED:
            self._pinned(blocks)
        elif kind == Kind.UNPINNED:
            self._unpinned(blocks)

    def _pinned(self, blocks: list[int]) -> None:
        """Something other than a request holds these: an owner outside all tables, announced by the event itself."""
        for block in blocks:
            self.refs[block] += 1
            if self.refs[block] == 1:
                self.used += 1
                self.cached_idle -= self.hashes[block] != 0
                self.since[block] = self.now_ns
            self.detached.setdefault(block, []).append(PINS)
        self.defer(PINS, "pinned", Holder.PIN, 0, -1, blocks)

    def _unpinned(self, blocks: list[int]) -> None:
        for block in blocks:
            holders = self.detached.get(block, [])
            if PINS not in holders:
                self.anomaly("unpinned though never pinned", block, -1, "")
                continue
            holders.remove(PINS)
            if PINS not in holders:
                self.undefer(PINS, [block])
            if not holders:
                del self.detached[block]
            self._drop_reference(block)

    def _reclaimed(self, former: int, block: int) -> None:
        deferral = self.deferrals.get(former)
        if deferral is not None and deferral.holder == Holder.FENCE and deferral.fence in self.in_flight:
            self.early[block] = deferral.fence
        self.undefer(former, [block])

    def _check_early(self, blocks: list[int], number: int) -> None:
        for block in blocks:
            fence = self.early.pop(block, -1)
            if fence in self.in_flight:
                detail = f"step {fence}, which may still write to it, is not complete"
                self.anomaly("handed out before its fence", block, number, detail)

    def _drop_blocks(self, number: int, blocks: list[int], still_held: bool = False) -> None:
        record = self.requests.get(number)
        if record is None:
            # Known to be over, or never heard of: who gives blocks back is not alive for that. Where nothing was lost,
            # it has been said of each block that this was not its owner.
            self.undefer(number, blocks)
            return
        record.peak_blocks = max(record.peak_blocks, len(record.blocks))
        if len(blocks) == len(record.blocks):
            record.blocks = []
        else:
            gone = set(blocks)
            record.blocks = [block for block in record.blocks if block not in gone]
        if self.deferrals and not still_held:
            self.undefer(number, blocks)
        self._end_if_over(record)

    # ---------------------------------------------------------------- steps and requests

    def _progressed(self, numbers: list[int], column: list[int]) -> None:
        now, half, requests = self.now_ns, len(numbers), self.requests
        self.places.progressed = self.here
        more_computed = more_outputs = 0
        for number, computed, outputs in zip(numbers, column[:half], column[half:], strict=True):
            record = requests.get(number)
            if record is None:
                continue  # aborted while its step ran
            if computed > record.computed_tokens:
                more_computed += computed - record.computed_tokens
            if outputs != record.output_tokens:
                if outputs > record.output_tokens:
                    more_outputs += outputs - record.output_tokens
                record.output_tokens = outputs
                record.not_queued_ns = 0
            record.computed_tokens = computed
            record.progressed_ns = now
            if record.stalled_ns:
                record.stalled_ns = 0
            if record.cause and record.is_running:  # was passed over for a while, and is no more
                self._move(record, record.status, Cause.NONE)
        self.totals.computed_tokens += more_computed
        self.totals.output_tokens += more_outputs

    def _step_completed(
        self,
        at_ns: int,
        step: int,
        duration_ns: int,
        limit: int,
        free: int = -1,
        cached: int = -1,
        used: int = -1,
    ) -> None:
        self.now_ns = at_ns
        self.last_step = step
        self.places.completed = self.here
        self.in_flight.pop(step, None)
        if self.in_flight:  # steps end in order: the end of an earlier one is among what was lost
            self.in_flight = {later: launched for later, launched in self.in_flight.items() if later > step}
        if self.early:
            self.early = {block: fence for block, fence in self.early.items() if fence != step}
        if self.fences:
            self._fence_passed(step)
        self.totals.steps += 1
        self.totals.step_ns += duration_ns
        self.totals.limits[limit] = self.totals.limits.get(limit, 0) + 1
        if not self.counts_match(free, cached, used):
            self.check(free, cached, used)

    def _fence_passed(self, step: int) -> None:
        for number in self.fences.pop(step, ()):
            deferral = self.deferrals.get(number)
            if deferral is not None and deferral.fence == step:
                deferral.fence_passed_ns, deferral.fence_passed_at = self.now_ns, self.here

    def _request(self, number: int) -> RequestState:
        """The request's record; one that was never announced gets a name made of its number, and is an anomaly."""
        record = self.requests.get(number)
        if record is None:
            record = self.requests[number] = RequestState(number, f"#{number}", since_ns=self.now_ns)
            record.blocks, record.waited_ns = [], {}
            self.anomaly("a request that never arrived", -1, number, "")
        return record

    def _move(self, record: RequestState, status: int, cause: int) -> None:
        """Put a request in a state for a reason, from now."""
        if record.status == status and record.cause == cause:
            return
        if record.is_waiting:
            waited = record.waited_ns
            waited[record.cause] = waited.get(record.cause, 0) + self.now_ns - record.since_ns
        if record.status != status:
            record.stalled_ns = 0
        record.not_queued_ns = 0
        record.status, record.cause, record.since_ns = status, cause, self.now_ns
        record.since_at = self.places.moved = self.here

    def _stalled(self, record: RequestState, at_ns: int, status: int, since_step: int, cause: int) -> None:
        """The watchdog's word, taken if the books agree: it looks from another thread, and may be late."""
        if record.status == status and not record.is_finished:
            record.stalled_ns, record.stalled_since_step, record.stalled_cause = at_ns, since_step, cause
            record.stalled_at = self.here

    def _self_preempted(self, record: RequestState) -> None:
        if record.output_tokens != record.self_preempted_outputs:
            record.self_preemptions, record.self_preempted_ns = 0, self.now_ns
            record.self_preempted_outputs = record.output_tokens
        record.self_preemptions += 1

    def _end_if_over(self, record: RequestState) -> None:
        if record.status >= FIRST_FINISHED and not record.blocks and self.requests.pop(record.number, None) is not None:
            self._ended.append(record)

    def _other(
        self, kind: int, group: int, number: int, args: list[int], ids: list[int], texts: Mapping[int, str]
    ) -> None:
        """Everything that is not about blocks and not once a step."""
        match kind:
            case Kind.HEARTBEAT:
                self.heartbeat, self.places.heartbeat = Heartbeat(*args[:10]), self.here
            case Kind.STARTED:
                self._started(*args[:4], description=texts.get(-1, ""))
            case Kind.STOPPED:
                self.now_ns = self.stopped_ns = args[0]
            case Kind.ENGINE_MODE:
                self.now_ns = self.mode_since_ns = args[0]
                self.mode, self.places.mode = args[1], self.here
            case Kind.STACK:
                self.stack = EngineStack(args[0], args[1], args[2], args[3], texts.get(STACK_TEXT, ""), self.here)
            case Kind.NOT_QUEUED:
                record = self.requests.get(number)
                if record is not None and not record.is_finished:
                    record.not_queued_ns, record.not_queued_at = args[0], self.here
            case Kind.MEMORY:
                self.memory, self.places.memory = args, self.here
            case Kind.TIER:
                tier = self.tiers.setdefault(args[1], TierState(operations={}))
                tier.used, tier.capacity, tier.at = args[2], args[3], self.here
                tier.operations[args[0]] = tier.operations.get(args[0], 0) + len(args) - 4
                self._pins(tier.pins, args[0], args[4:])
                if args[0] == TierOp.UNPINNED:
                    tier.unpinned_ns = self.now_ns
            case Kind.RECEIVED | Kind.ARRIVED:
                self._arrived(kind, number, args, texts)
            case Kind.CLIENT_GONE:
                self.totals.client_gone += 1
                if (record := self.requests.get(number)) is not None:
                    record.client_gone_ns = args[0]
            case Kind.TRACED:
                if (record := self.requests.get(number)) is not None:
                    record.trace = TraceContext(*args[:4])
            case Kind.COMPLETION_DELIVERED:
                record = self.requests.get(number)
                if record is not None and not record.is_finished:
                    record.fetch_ended_ns = args[0] if args else self.now_ns  # older engines tell no time
                    record.fetch_ended_at = self.here
            case Kind.STALLED:
                if (record := self.requests.get(number)) is not None:
                    self._stalled(record, *args[:4])
            case Kind.AUDIT_BEGIN | Kind.AUDIT_BLOCKS | Kind.AUDIT_REQUEST | Kind.AUDIT_END:
                self._audits.apply(self, kind, group, number, args, ids, texts)
            case Kind.LOOKED_UP if number >= 0:
                self._looked_up(group, self._request(number), *args[:2])
            case _ if number >= 0 and kind in _REQUEST_KINDS:
                self._request_event(kind, self._request(number), args)

    def _pins(self, pins: dict[int, tuple[int, ...]], op: int, keys: list[int]) -> None:
        if op == TierOp.PINNED:
            for key in keys:
                count, *since = pins.get(key, (0, self.now_ns, self.here))
                pins[key] = count + 1, *since
        elif op == TierOp.UNPINNED:
            for key in keys:
                count, *since = pins.pop(key, (0,))
                if count > 1:
                    pins[key] = count - 1, *since

    def _started(self, at_ns: int, total: int, reserved: int, block_size: int, *, description: str) -> None:
        if self.total:
            raise ValueError("an engine's life begins once an epoch")
        if not 0 <= reserved <= total <= MAX_BLOCKS:
            raise ValueError(f"a pool of {total} blocks, {reserved} of them reserved")
        self.description = description
        self.now_ns = self.started_ns = at_ns
        self.places.started = self.places.pool = self.here
        self.total, self.reserved, self.block_size = total, reserved, block_size
        # In place: `apply` holds these very lists.
        self.refs[:] = [0] * total
        self.owner[:] = [-1] * total
        self.hashes[:] = [0] * total
        self.since[:] = [at_ns] * total
        self.born[:] = [0] * total

    def _arrived(self, kind: int, number: int, args: list[int], texts: Mapping[int, str]) -> None:
        record = self.requests.get(number)
        if record is None:
            record = RequestState(number, texts.get(number, f"#{number}"), blocks=[], waited_ns={})
            self.requests[number] = record
        record.arrived_at = record.since_at = self.here
        if kind == Kind.RECEIVED:
            record.status, record.cause, record.since_ns = Status.RECEIVED, Cause.NONE, args[0]
            record.received_ns, record.prompt_tokens = args[:2]
            return
        self.now_ns = args[0]
        self.totals.arrived += 1
        self.places.moved = self.here
        record.arrived_ns, record.prompt_tokens, record.max_tokens, record.priority = args[:4]
        record.blocks_to_admit, record.blocks_to_finish = args[4:6]
        record.status, record.cause, record.since_ns = Status.WAITING, Cause.NEW, args[0]

    def _prompt_computed(self, record: RequestState) -> None:
        """What did not enter the cache was there, but for what alike prompts put there while this one was computed."""
        full, hit = record.prompt_tokens // self.block_size, record.hit_tokens // self.block_size
        others = self.prompt_blocks_cached - record.cached_until_then - record.cached_blocks
        again = max(full - hit - record.cached_blocks - others, 0)
        self._prompts.append(Prompt(record.id, self.now_ns, full, hit, again, self.here))

    def _note_preemption(self, record: RequestState, args: list[int]) -> None:
        last = self._last_preemption
        if last is not None and last.at_ns == self.now_ns:
            running = last.running
        else:
            running = sum(other.is_running for other in self.requests.values())
        outputs = record.output_tokens - record.admitted_outputs
        released = sum(self.totals.released.values())
        last = Preemption(
            record.id, self.now_ns, args[0], args[2], args[3], outputs, running, self.free, released, self.here
        )
        self._last_preemption = last
        self._preempted.append(last)

    def _looked_up(self, group: int, record: RequestState, tokens: int, hit_tokens: int) -> None:
        """Each group after the first is asked for what those before it had: the last one's hit is the request's."""
        self.places.looked_up = self.here
        if group == 0:
            self.totals.looked_up_tokens += tokens
            record.looked_up_tokens, record.hit_tokens = tokens, 0
        self.totals.hit_tokens += hit_tokens - record.hit_tokens
        record.hit_tokens = hit_tokens

    def _request_event(self, kind: int, record: RequestState, args: list[int]) -> None:
        totals = self.totals
        if record.ready_ns and kind not in (Kind.READY, Kind.REMOTE_LOAD):
            record.ready_ns = 0
        match kind:
            case Kind.QUEUED:
                status = Status.PREEMPTED if record.status == Status.PREEMPTED else Status.WAITING
                self._move(record, status, args[0])
            case Kind.ALLOCATION_FAILED:
                totals.allocation_failures += 1
                record.blocks_needed, record.blocks_free_then = args[:2]
                record.refused_at = self.here
            case Kind.NOT_SCHEDULED:
                self._move(record, record.status, args[0])
                record.times_passed_over, record.passed_over_at = args[1], self.here
            case Kind.ADMITTED:
                self._move(record, Status.RUNNING, Cause.NONE)
                if self._lost_tokens:
                    self._recomputed += max(self._lost_tokens.pop(record.number, 0) - args[0], 0)
                record.admitted_ns = record.admitted_ns or self.now_ns
                record.fetch_ended_ns = 0
                record.progressed_ns = self.now_ns
                record.computed_tokens = args[0]
                record.admitted_outputs = record.output_tokens
                # Some engines cache the first chunk's blocks, and say so, before they say whom they let in.
                record.cached_until_then = self.prompt_blocks_cached - record.cached_blocks
                record.times_passed_over = record.blocks_needed = record.blocks_free_then = 0
            case Kind.FIRST_TOKEN:
                record.first_token_ns = self.now_ns
                if record.looked_up_tokens:
                    self._prompt_computed(record)
            case Kind.PREEMPTED:
                self._note_preemption(record, args)
                self._move(record, Status.PREEMPTED, Cause.PREEMPTED)
                record.preemptions += 1
                record.preempted_at = self.here
                if args[1] == record.number and self.used <= len(record.blocks):
                    self._self_preempted(record)
                record.tokens_lost += args[3]
                if not self.damaged:
                    self._lost_tokens[record.number] = args[3]
                record.computed_tokens = record.cached_blocks = 0
                totals.preemptions[args[0]] = totals.preemptions.get(args[0], 0) + 1
                totals.tokens_lost += args[3]
            case Kind.WAITING_ON:
                self._move(record, args[0], CAUSE_OF.get(args[0], Cause.NONE))
                if args[0] == Status.WAITING_FOR_REMOTE_KVS:
                    record.fetching_ns, record.fetching_at = self.now_ns, self.here
                    if record.fetch_ended_ns < self.now_ns - FETCH_SLACK_NS:
                        record.fetch_ended_ns = 0  # of a fetch before this one
            case Kind.READY:
                self._move(record, Status.WAITING, Cause.NEW)
                record.fetching_ns = record.fetch_ended_ns = 0
                if not record.ready_ns:
                    record.ready_ns, record.ready_at = self.now_ns, self.here
            case Kind.REMOTE_LOAD:
                record.fetching_ns = record.fetch_ended_ns = 0
                if not record.is_finished:
                    record.ready_ns, record.ready_at = self.now_ns, self.here
            case Kind.FINISHED:
                self._move(record, args[0], Cause.NONE)
                self._lost_tokens.pop(record.number, None)
                record.finished_ns = self.now_ns
                record.ended_blocks = len(record.blocks)
                record.peak_blocks = max(record.peak_blocks, record.ended_blocks)
                self._finished.append(record)
                totals.finished[args[0]] = totals.finished.get(args[0], 0) + 1
                self._end_if_over(record)


# As plain numbers: comparing with an IntEnum's member costs several times as much, and this runs for every event.
_CLOCK = int(Kind.CLOCK)
_PROGRESSED = int(Kind.PROGRESSED)
_STEP_LAUNCHED = int(Kind.STEP_LAUNCHED)
_STEP_COMPLETED = int(Kind.STEP_COMPLETED)
_ALLOCATED = int(Kind.ALLOCATED)
_RELEASED = int(Kind.RELEASED)
_CACHED = int(Kind.CACHED)
_REUSED = int(Kind.REUSED)
_BLOCK_KINDS = frozenset(
    int(k)
    for k in (
        Kind.ALLOCATED,
        Kind.REUSED,
        Kind.CACHED,
        Kind.EVICTED,
        Kind.DETACHED,
        Kind.RELEASED,
        Kind.FREE_DEFERRED,
        Kind.RECLAIMED,
        Kind.PINNED,
        Kind.UNPINNED,
    )
)
_REQUEST_KINDS = frozenset(
    int(k)
    for k in (
        Kind.QUEUED,
        Kind.ALLOCATION_FAILED,
        Kind.NOT_SCHEDULED,
        Kind.ADMITTED,
        Kind.FIRST_TOKEN,
        Kind.PREEMPTED,
        Kind.WAITING_ON,
        Kind.READY,
        Kind.FINISHED,
        Kind.REMOTE_LOAD,
    )
)


def _last_of(kinds: frozenset[int], runs: list[int]) -> int:
    """Which event of a batch is the last of these kinds."""
    index = len(runs) // 5 - 1
    while index > 0 and runs[5 * index] not in kinds:
        index -= 1
    return index
