"""A witness of kvscope's own engine: reads the engine's objects at each pass, and none of its events.

It wraps methods of the engine's parts to see what goes in and out of them. It changes nothing and decides nothing. Its
observations go into an EpisodeEnd.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, takewhile
from typing import Any, Final

from kvscope.engine.bench.simulated_engine import SimulatedEngine
from kvscope.engine.blocks.kv_cache_manager import Prefix
from kvscope.engine.blocks.prefix_hashes import in_group
from kvscope.engine.connectors.base import KVLoad
from kvscope.engine.connectors.host import HostConnector
from kvscope.engine.requests.request import Request
from kvscope.engine.scheduling.scheduler_state import SchedulerOutput
from kvscope.monitor.contract.kinds import Cause, Release, Status

from .truth.episode_end import FreedBy
from .waste_log import EvictionCauses, WasteLog, held_back

INSPECTED_BEHIND: Final = 256
"""Requests behind a refused head that are asked whether they would fit."""
ASKED_EVERY_S: Final = 1.0
"""An idle engine polls its connector several times in that. One that polls only at its next request does not."""
SHORT_S: Final = 0.05
"""A step shorter than this counts as a short one."""
NATURAL_STATUSES: Final = (Status.FINISHED_STOPPED, Status.FINISHED_LENGTH_CAPPED)
FREED_BY: Final[dict[Release, FreedBy]] = {
    Release.FINISHED: "completed",
    Release.ABORTED: "aborted",
    Release.ERROR: "aborted",
    Release.PREEMPTED: "preempted",
}


class LastFree:
    """When and why a block's last owner should have freed it. One object for all blocks of a free."""

    __slots__ = ("at_s", "by", "owner")

    def __init__(self, at_s: float, by: FreedBy, owner: str) -> None:
        self.at_s, self.by, self.owner = at_s, by, owner


class EngineWitness:
    """Watches `engine` from its first pass on."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine
        self.began_s = engine.now_s
        self.waste = WasteLog()
        self.names: dict[int, str] = {}
        """Ids of all requests that the scheduler ever had, by number."""
        self.moved_s: dict[int, float] = {}
        """By request: when it last got a token, or what it waits for was there."""
        self.furthest: dict[int, tuple[int, float]] = {}
        """By request: the most tokens that it ever had computed, and since when. Work done again adds none."""
        self.last_free: dict[int, LastFree] = {}
        self.tokens_computed = 0
        self.leaked_s = 0.0
        """When memory of the device was first taken that no part of the plan names."""
        self.steps = self.short_steps = 0
        self._launched_s = 0.0
        self.busy_s = self.request_s = 0.0
        self._fetched_keys: dict[int, Counter[bytes]] = {}
        """By request, what the outer tier pins for a fetch whose end the connector has not handed over."""
        self._lost: dict[int, tuple[int, float]] = {}
        """Computed tokens that a preempted request had and when it lost them, until it is admitted again."""
        self._freed_twice = False
        self._outputs_before: dict[int, int] = {}
        self._evictions = EvictionCauses()
        self._allocating, self._unused = -1, 0
        """The request that is being allocated blocks, and how many more blocks without content are free than it takes.
        """
        self._not_counted = 0
        """Cached blocks that became idle and that the pool's own counter of them left out."""
        self._preempted_in_pass = 0
        self._ran_before = 0
        self._planned_s = self._passed_s = 0.0
        self._blocked: tuple[str, int, int] | None = None
        """The head that the last pass left without room, how many waited then, and how many it held back."""
        self._fits_unfilled = False  # whether the free blocks and the unfilled part of those in use would hold it
        self._ended_s_of: dict[int, float] = {}
        """By request: when it ended."""
        self._ended, self._ended_s = 0, 0.0
        """Requests that ended in one pass, most of those that ran, until one waits or as many run again, and when."""
        self._cap = engine.config.max_num_seqs
        self._being_written: dict[int, dict[int, int]] = {}
        """By step in flight: the blocks that it writes, with the request."""
        self._fenced: dict[int, tuple[int, str]] = {}
        """By block: the step in flight that its free is fenced behind, and whose it was."""
        self._unasked: tuple[int, set[int]] = 0, set()
        """How often the connector had been asked at the last look, and for which requests a copy was there for it."""
        self._waiting_fetches: tuple[int, set[int]] = 0, set()
        """How often the connector had been asked at the last look, and whose fetches had ended then and were not taken.
        """
        self._brought: dict[int, float] = {}
        """By request whose fetch has ended, when, until the engine takes it in."""
        self._steps_open = 0
        """Steps that were planned and have not ended."""
        self._copied: set[int] = set()
        self._slept_through: set[int] = set()
        self._wrap_scheduler()
        self._wrap_blocks()
        if engine.connector is not None:
            self._wrap_connector(engine.connector)

    @property
    def now_s(self) -> float:
        """Seconds of the episode."""
        return self.engine.now_s - self.began_s

    # ---------------------------------------------------------------- requests and steps

    def _wrap_scheduler(self) -> None:
        scheduler = self.engine.scheduler
        _tap_before(scheduler, "add", self._arrives)
        _tap_before(scheduler, "schedule", self._pass_begins)
        _tap_after(scheduler, "schedule", self._planned)
        _tap_before(scheduler, "complete", self._step_ends)
        _tap_before(scheduler.state, "park", self._moves)
        _tap_before(scheduler.state, "unpark", self._moves)
        _tap_before(scheduler.transfers, "defers", self._ends)
        _tap_before(scheduler._preemption, "preempt", self._preempts)
        _tap_before(scheduler._admission, "_report_lookup", self._looked_up)

    def _arrives(self, request: Request) -> None:
        self.names[request.number] = request.id
        self.moved_s[request.number] = self.now_s

    def _ends(self, request: Request, _completed_normally: bool) -> None:
        self._ended_s_of[request.number] = self.now_s

    def _moves(self, request: Request, *_status: Any) -> None:
        self.moved_s[request.number] = self.now_s

    def _pass_begins(self) -> None:
        scheduler = self.engine.scheduler
        now_s = self.now_s
        present = len(scheduler.running) + scheduler.num_waiting
        passed_s = max(0.0, now_s - self._planned_s)
        if not self.waste.closed and present:
            self.busy_s += passed_s
            self.request_s += passed_s * present
            self._lost_in_queue(passed_s)
            self._passes_over_fetches(passed_s)
        self._planned_s, self._passed_s = now_s, passed_s
        self._preempted_in_pass, self._ran_before = 0, len(scheduler.running)

    def watch_ends(self) -> None:
        """Note the head that the last pass left without room, and nothing after it but what is added late."""
        if self._blocked is not None:
            self.waste.add("queued-for-blocks", self._planned_s, 0.0, self._blocked[:1])
        self.waste.closed = True

    def _lost_in_queue(self, passed_s: float) -> None:
        """Add up the time that requests lost since the last pass, which left a head without room, from then on."""
        if self._blocked is None or not passed_s:
            return
        head, waiting, fitting = self._blocked
        self.waste.add("queued-for-blocks", self._planned_s, waiting * passed_s, (head,))
        if self._fits_unfilled:
            self.waste.add("queued-for-unfilled-blocks", self._planned_s, waiting * passed_s)
        if fitting:
            self.waste.add("head-of-line", self._planned_s, fitting * passed_s, (head,))

    def _blocked_head(self) -> tuple[str, int, int] | None:
        """Return the head that has no room after this pass, how many wait and how many it holds back.

        None count behind one that no free pool could hold: it does not wait for others to end.
        """
        scheduler, manager = self.engine.scheduler, self.engine.manager
        waiting, running = scheduler.waiting, len(scheduler.running)
        if not len(waiting) or waiting.head().cause != Cause.KV_BLOCKS:
            return None
        needed = manager.blocks_for(waiting.head().num_tokens)
        self._fits_unfilled = needed <= manager.pool.num_free + self._unfilled_tokens() // manager.block_size
        fits_alone = needed <= manager.pool.usable
        behind = islice(waiting, 1, 1 + INSPECTED_BEHIND) if fits_alone else ()
        needs = [manager.blocks_for(each.num_tokens) - sum(map(len, manager.held(each.number))) for each in behind]
        places = scheduler.state.seqs_allowed - running
        return waiting.head().id, len(waiting), held_back(needs, manager.pool.num_free, places, others_run=running > 0)

    def _unfilled_tokens(self) -> int:
        """Return how many more tokens fit in the blocks of the requests that run."""
        manager = self.engine.manager
        return sum(
            max(0, len(table) * manager.block_size - request.num_scheduled_tokens)
            for request in self.engine.scheduler.running
            for table in manager.tables[request.number]
        )

    def _planned(self, plan: SchedulerOutput) -> None:
        scheduler, now_s = self.engine.scheduler, self.now_s
        if self._preempted_in_pass >= self._ran_before >= 2:
            self.waste.add("preempted-all", now_s, self._preempted_in_pass)
        self._blocked = self._blocked_head()
        if not plan.shares:
            return
        if self._ended and len(scheduler.waiting):
            self.waste.add("ended-together", self._ended_s, self._ended)
        if len(scheduler.waiting) or len(scheduler.running) >= self._ended:
            self._ended = 0
        self._steps_open += 1
        for share in plan.shares:
            self.tokens_computed += share.num_tokens
            self._readmitted(share.request, share.start)
        self._capped(now_s)
        if len(plan.shares) < len(scheduler.running):
            self._starved(plan, now_s)
        self._launched_s = now_s
        if self.engine.config.async_scheduling:
            self._being_written[plan.step] = dict(self._writes(plan))

    def _capped(self, now_s: float) -> None:
        """Note requests that wait for a cap below max_num_seqs which this step should have raised and did not."""
        scheduler, before = self.engine.scheduler, self._cap
        self._cap = scheduler.state.seqs_allowed
        if self._preempted_in_pass or self._cap != before or self._cap >= scheduler.state.max_num_seqs:
            return
        if len(scheduler.waiting):
            head = scheduler.waiting.head()
            fits = self.engine.manager.blocks_for(head.num_tokens) <= self.engine.pool.num_free
            if head.cause == Cause.MAX_NUM_SEQS and fits:
                self.waste.add("capped-after-preemption", now_s, len(scheduler.waiting) * self._passed_s)

    def _starved(self, plan: SchedulerOutput, now_s: float) -> None:
        """Note requests that got no next token in a step that computed prompts."""
        starved = [
            request.id
            for request in self.engine.scheduler.running
            if request.cause == Cause.TOKEN_BUDGET and request.output_token_ids and request.last_step < plan.step
        ]
        if starved and any(not share.request.output_token_ids for share in plan.shares):
            self.waste.add("decode-starved", now_s, len(starved) * self._passed_s, starved)

    def _readmitted(self, request: Request, start: int) -> None:
        lost, at_s = self._lost.pop(request.number, (0, 0.0))
        if lost > start:
            self.waste.add("recomputed-after-preemption", at_s, lost - start, (request.id,))

    def _writes(self, plan: SchedulerOutput) -> list[tuple[int, int]]:
        size, tables = self.engine.manager.block_size, self.engine.manager.tables
        return [
            (block, share.request.number)
            for share in plan.shares
            for table in tables[share.request.number]
            for block in table[share.start // size : -(-(share.start + share.num_tokens) // size)]
        ]

    def _step_ends(self, plan: SchedulerOutput, *_sampled: Any) -> None:
        now_s = self.now_s
        self._steps_open -= 1
        if not self.waste.closed:
            self.steps += 1
            self.short_steps += now_s - self._launched_s < SHORT_S
        if self.engine.leaked > 0 and not self.leaked_s:
            self.leaked_s = now_s
        self._being_written.pop(plan.step, None)
        if self._fenced:
            self._fenced = {block: fenced for block, fenced in self._fenced.items() if fenced[0] > plan.step}
        for share in plan.shares:
            number, computed = share.request.number, share.start + share.num_tokens
            self.moved_s[number] = now_s
            if number not in self.furthest or computed > self.furthest[number][0]:
                self.furthest[number] = computed, now_s

    def ended(self, count: int) -> None:
        """Note that so many requests came to their natural end in this pass."""
        if count >= 2 and 2 * count > self._ran_before:
            self._ended, self._ended_s = count, self.now_s

    def _preempts(self, _plan: SchedulerOutput, victim: Request, beneficiary: Request) -> None:
        now_s, number = self.now_s, victim.number
        self._preempted_in_pass += 1
        before, before_s = self._lost.get(number, (0, now_s))
        self._lost[number] = max(before, victim.num_computed_tokens), before_s
        outputs = len(victim.output_token_ids)
        if victim is beneficiary:
            self.waste.add("preempted-for-itself", now_s, victim.num_computed_tokens, (victim.id,))
        elif outputs == self._outputs_before.get(number, 0) and victim.num_computed_tokens:
            self.waste.add("preempted-in-vain", now_s, victim.num_computed_tokens, (victim.id,))
        self._outputs_before[number] = outputs
        if victim is not beneficiary and self._fenced:
            self.waste.add("preempted-behind-fence", now_s, victim.num_computed_tokens, (victim.id,))

    # ---------------------------------------------------------------- blocks and the prefix cache

    def _wrap_blocks(self) -> None:
        pool, manager = self.engine.pool, self.engine.manager
        _tap_before(pool, "allocate", self._allocates)
        _tap_before(pool, "_forget", self._forgets)
        _tap_after(pool, "allocate", self._allocated)
        original = pool._unreference

        def unreference(request: int, blocks: Sequence[int]) -> None:
            twice = [block for block in blocks if pool.refs[block] <= 0]
            if twice:
                self._freed_twice = True
                self.waste.add("freed-twice", self.now_s, len(twice), blocks=twice)
            idle = pool.num_cached_idle
            become_idle = sum(pool.refs[block] == 1 and pool.digests[block] is not None for block in blocks)
            original(request, blocks)
            if pool.num_cached_idle - idle != become_idle and not twice:
                self._not_counted += become_idle - (pool.num_cached_idle - idle)
                self.waste.add("counters-differ", self.now_s, become_idle)

        pool._unreference = unreference  # type: ignore[method-assign]
        manager.free = partial(self._frees, manager.free)  # type: ignore[method-assign]

    def _frees(
        self, original: Callable[..., None], request: Request, reason: Release, fence: int | None = None
    ) -> None:
        manager = self.engine.manager
        held, fenced = manager.held(request.number), len(manager.fenced)
        original(request, reason, fence)
        # Blocks whose free was skipped altogether wait behind no step.
        by: FreedBy = "fence" if len(manager.fenced) > fenced else FREED_BY.get(reason, "")
        last = LastFree(self.now_s, by, request.id)
        for blocks in held:
            self.last_free.update(dict.fromkeys(blocks, last))
            if fence is not None:
                self._fenced.update(dict.fromkeys(blocks, (fence, request.id)))

    def _allocates(self, request: int, count: int, _group: int = 0) -> None:
        pool = self.engine.pool
        cached_idle = pool.num_cached_idle + self._not_counted
        self._allocating, self._unused = request, pool.num_free - cached_idle - count

    def _forgets(self, _block: int, digest: bytes) -> None:
        self._evictions.evicted(digest, self._allocating, needless=self._unused >= 0)

    def _allocated(self, blocks: list[int]) -> None:
        for written in self._being_written.values():
            used = [block for block in blocks if block in written]
            if used:
                names = {self.names[number] for number in (self._allocating, *(written[block] for block in used))}
                self.waste.add("handed-out-in-use", self.now_s, len(used), names, used)
        fenced = [block for block in blocks if block in self._fenced]
        if fenced:
            self.waste.add(
                "fence-broken", self.now_s, len(fenced), {self._fenced[block][1] for block in fenced}, fenced
            )
        if self._freed_twice:
            self._handed_out_twice(blocks)

    def _handed_out_twice(self, blocks: list[int]) -> None:
        """Note blocks that are handed out while they are in a request's table, as a free too many lets them be.

        It concerns both: the one that gets a block writes over what the other reads, and the other writes to it.
        """
        manager, taken = self.engine.manager, set(blocks)
        if len(taken) < len(blocks):  # the free queue had one of them twice
            self.waste.add("handed-out-in-use", self.now_s, len(blocks) - len(taken))
        for number in manager.tables:
            used = [block for held in manager.held(number) for block in held if block in taken]
            if used:
                names = self.names[number], self.names[self._allocating]
                self.waste.add("handed-out-in-use", self.now_s, len(used), names, used)

    def _looked_up(self, request: Request, prefix: Prefix, *_hits: int) -> None:
        """Compare what the lookup found with what the pool has and had. Of several groups all must have a prefix from
        its beginning on: a window that has left a part of it behind is no miss.

        An evicted block that is fetched from outside counts too: it is brought a second time.
        """
        manager, size = self.engine.manager, self.engine.manager.block_size
        groups = range(len(manager.windows))
        prompt = request.digests[: (request.num_tokens - 1) // size]
        lacks = (any(manager.pool.find(in_group(digest, group)) is None for group in groups) for digest in prompt)
        there = next((place for place, lacking in enumerate(lacks) if lacking), len(prompt)) - prefix.num_blocks
        wanted = prompt[prefix.num_blocks :]
        if there > 0:
            self.waste.add("prefix-missed", self.now_s, there * size, (request.id,))
            wanted = wanted[there:]  # the cache also lost what came behind it
        if not request.num_preemptions:
            latest = self._evictions.latest
            keys = ([in_group(digest, group) for group in groups] for digest in wanted)
            gone = list(takewhile(bool, ([key for key in each if key in latest] for each in keys)))
            if gone:
                # The request that pushed it out and the one that needed it differ: it concerns the cache as a whole.
                most = manager.blocks_for(request.num_tokens)
                flushed = self._evictions.blocks_flushed(gone, request.number, most)
                self.waste.add_lost_prefix(self.now_s, flushed * size, (len(gone) - flushed) * size)

    # ---------------------------------------------------------------- the connector

    def _wrap_connector(self, connector: Any) -> None:
        _tap_before(connector, "start_load", self._fetch_begins)
        _tap_after(connector, "loaded", self._fetches_ended)
        _tap_after(connector, "completed", lambda numbers: self.moved_s.update(dict.fromkeys(numbers, self.now_s)))
        _tap_before(connector, "lease_ended", self._lease_ends)
        if isinstance(connector, HostConnector):
            _tap_before(connector, "_copy_out", lambda copy: self._copied.add(copy.request))
            _tap_after(connector, "completed", self._copied.difference_update)
            _tap_before(connector, "_copy_in", self._fetch_ends)
            self.engine.time.every(ASKED_EVERY_S, lambda: self._asks(connector))
            self.engine.time.every(ASKED_EVERY_S, lambda: self._takes_fetches(connector))
            _tap_after(connector, "loaded", lambda ended: self._pins_remain(connector) if ended else None)

    def _asks(self, connector: HostConnector) -> None:
        """Note copies that an engine with nothing to run has not asked for since the last look. A sound one asks
        several times meanwhile.
        """
        polls, ready = self._unasked
        living = any(not request.is_finished for request in self.engine.scheduler.requests.values())
        copied = set() if living or not connector.num_copied else set(self._copied)
        kept = self.engine.scheduler.deferred.keys()
        for number in ready & copied & kept - self._slept_through if polls == connector.polls else ():
            self._slept_through.add(number)
            blocks = [block for held in self.engine.manager.held(number) for block in held]
            since_s = self.now_s - ASKED_EVERY_S
            self.waste.add("sent-while-asleep", since_s, len(blocks), (self.names[number],), blocks)
        self._unasked = connector.polls, copied

    def _takes_fetches(self, connector: HostConnector) -> None:
        """Note fetches that had ended at the last look, and that an engine with no step to wait for has not taken in.

        A sound one is woken by their end, and takes them in with its next pass.
        """
        polls, ended = self._waiting_fetches
        still = set(self._brought) if connector.num_fetched and not self._steps_open else set()
        if polls == connector.polls and (late := sorted(ended & still)):
            since_s = self.now_s - ASKED_EVERY_S
            names = [self.names[number] for number in late]
            self.waste.add("fetched-while-asleep", since_s, len(late) * ASKED_EVERY_S, names)
        self._waiting_fetches = connector.polls, still

    def _passes_over_fetches(self, passed_s: float) -> None:
        """Note fetches that had ended before the last pass, which did not take them in."""
        connector = self.engine.connector
        if not (self._brought and isinstance(connector, HostConnector) and connector.num_fetched):
            return
        late = sorted(number for number, ended_s in self._brought.items() if ended_s < self._planned_s)
        if late:
            names = [self.names[number] for number in late]
            self.waste.add("fetched-and-passed-over", self._planned_s, len(late) * passed_s, names)

    def _fetch_ends(self, fetch: Any) -> None:
        self._brought[fetch.request] = self.now_s

    def _fetch_begins(self, load: KVLoad) -> None:
        digests = load.request.digests[load.first : load.first + len(load.blocks)]
        self._fetched_keys[load.request.number] = Counter(digests)
        self._brought.pop(load.request.number, None)

    def _fetches_ended(self, ended: list[tuple[int, bool]]) -> None:
        for number, _ in ended:
            self.moved_s[number] = self.now_s
            self._fetched_keys.pop(number, None)
            self._brought.pop(number, None)

    def _pins_remain(self, connector: HostConnector) -> None:
        """Note pins beyond those of fetches that go on: their own fetch has ended, however many others have not."""
        left = connector._pins - sum(self._fetched_keys.values(), Counter())
        if left:
            self.waste.add("outer-pin", self.now_s, len(left))

    def _lease_ends(self, number: int) -> None:
        blocks, names = [block for held in self.engine.manager.held(number) for block in held], (self.names[number],)
        self.waste.add("freed-by-lease", self.now_s, len(blocks), names, blocks)
        self.waste.add_even_late("kept-until-lease", self._ended_s_of[number], len(blocks), names, blocks)


def _tap_before(part: Any, method: str, see: Callable[..., Any]) -> None:
    original = getattr(part, method)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        see(*arguments, **named)
        return original(*arguments, **named)

    setattr(part, method, wrapped)


def _tap_after(part: Any, method: str, see: Callable[[Any], Any]) -> None:
    setattr(part, method, partial(_call_and_see, getattr(part, method), see))


def _call_and_see(original: Callable[..., Any], see: Callable[[Any], Any], *arguments: Any, **named: Any) -> Any:
    result = original(*arguments, **named)
    see(result)
    return result
