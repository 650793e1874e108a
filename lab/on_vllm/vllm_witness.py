"""A witness of vLLM's scheduler: reads its objects at each pass, and none of the probe's events.

It wraps methods of the scheduler's own objects, inside of which the probe's hooks run unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile
from typing import Any, Final, NamedTuple

from kvscope.engine.requests.request import Output
from kvscope.monitor.contract.kinds import Status

from ..truth.episode_end import FreedBy
from ..waste_log import EvictionCauses, WasteLog, held_back
from .vllm_engine import PlannedStep, VllmEngine

LOOKED_BEHIND: Final = 256
"""Requests behind a refused head that are asked whether they would fit."""
SHORT_STEP_S: Final = 0.05
NATURAL_VLLM_ENDS: Final = (Status.FINISHED_STOPPED, Status.FINISHED_LENGTH_CAPPED)
PLAIN_WAITS: Final = ("WAITING", "PREEMPTED")
LOOKED_EVERY_S: Final = 1.0
QUEUES: Final = ("kv_holding_waiting", "skipped_waiting", "waiting")
"""Queues of requests that wait, in one release or another, in the order in which the scheduler tries them."""
GROUP_BYTES: Final = 4
"""A block's hash ends with its KV cache group, of four bytes."""


class OwedFree(NamedTuple):
    """When and why a block's last owner should have freed it."""

    at_s: float
    by: FreedBy
    owner: str


class RanBefore(NamedTuple):
    """A running request as a pass found it."""

    computed: int
    outputs: int


class VllmWitness:
    """Watches `engine` from its first pass on."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.vllm = engine.vllm
        self.manager = self.vllm.kv_cache_manager
        self.pool = self.manager.block_pool
        self.block_size = engine.draw.base.engine["block_size"]
        self.began_s = engine.now_s
        self.waste = WasteLog()
        self.moved_s: dict[str, float] = {}
        self.furthest: dict[str, tuple[int, float]] = {}
        """By request: the most tokens that it ever had computed, and since when. Work done again adds none."""
        self.arrived: dict[str, float] = {}
        self.owed_frees: dict[int, OwedFree] = {}
        self.preemptions: Counter[str] = Counter()
        self.tokens_computed = self.steps = self.short_steps = 0
        self.busy_s = self.request_s = 0.0
        self._planned_s = self._passed_s = 0.0
        self._before: dict[str, RanBefore] = {}
        self._lost: dict[str, tuple[int, float]] = {}
        self._outputs_before: dict[str, int] = {}
        self._blocked: tuple[str, int, int] | None = None
        self._fits_unfilled = False  # whether the free blocks and the unfilled part of those in use would hold it
        self._ended, self._ended_s = 0, 0.0
        """Requests that ended in one step, if they were most of those that ran, and when.

        They are forgotten once a request had to wait, or as many run again.
        """
        self._held = 0
        self._released_s: dict[int, float] = {}
        """By block, the last time that a reference to it was dropped."""
        self.pinned_s: dict[int, float] = {}
        """By block, when something other than a request first took a reference."""
        self._serving = False
        """Whether the scheduler allocates, or drops what a window has left: then tables change with references."""
        self._freed_twice = False
        self._freed_s: dict[int, float] = {}
        """By block, the last time that it was freed. For two frees, the first may be the one too many."""
        self._evictions = EvictionCauses()
        self._allocating, self._refused = "", ""
        """The request that is being allocated blocks, and the one that got none in this pass."""
        self._refused_of: dict[str, int] = {}
        """By request, the most blocks that were free when it got none, since it last got some."""
        self._lookups: dict[str, tuple[int, list[bytes]]] = {}
        """By request, the tokens that its last lookup missed though they were cached, and the contents evicted."""
        self._one_group = len(self.tables()) == 1
        self.lost_s: dict[str, float] = {}
        """By request, since when it is in none of the scheduler's queues. A step in flight may still compute it."""
        self._stop_looking = engine.time.every(LOOKED_EVERY_S, self._look)
        self._wrap()
        self._wrap_manager()

    @property
    def now_s(self) -> float:
        """Seconds of the episode."""
        return self.engine.now_s - self.began_s

    def tables(self) -> list[dict[str, list[Any]]]:
        """Return the block tables by request, of each KV cache group."""
        return [one.req_to_blocks for one in self.manager.coordinator.single_type_managers]

    def blocks_of(self, name: str) -> list[int]:
        """Return the blocks of a request."""
        return [block.block_id for table in self.tables() for block in table.get(name, ()) if not block.is_null]

    def owed_free_of(self, block: int, fenced: bool) -> OwedFree:
        """Return what should have freed a block that is still referenced. A pin outlives the free of its owner."""
        owed = self.owed_frees.get(block, OwedFree(0.0, "", ""))
        if fenced:
            return owed._replace(by="fence")
        return owed if self._released_s.get(block, -1.0) < owed.at_s else owed._replace(by="")

    def arrives(self, request: Any) -> None:
        """Note a request that is about to be added."""
        self.arrived[request.request_id] = self.moved_s[request.request_id] = self.now_s

    def note(self, kind: str, name: str) -> None:
        """Note what the connector's worker did for a request."""
        if kind == "freed-by-lease":
            blocks = self.blocks_of(name)
            self.waste.add("freed-by-lease", self.now_s, len(blocks), (client_name(name),), blocks)
            since_s = self.moved_s.get(name, self.now_s)
            self.waste.add_even_late("kept-until-lease", since_s, len(blocks), (client_name(name),), blocks)
        if kind == "sent-while-asleep":  # from when it fell asleep: it cannot learn of the end of this transfer
            blocks = self.blocks_of(name)
            since_s = max(self.moved_s.get(name, 0.0), self.engine.other.polled_s - self.began_s)
            self.waste.add("sent-while-asleep", since_s, len(blocks), (client_name(name),), blocks)
        else:
            self.moved_s[name] = self.now_s

    # ---------------------------------------------------------------- passes and steps

    def pass_begins(self) -> None:
        """Note the time since the last pass, and who runs."""
        scheduler, now_s = self.vllm, self.now_s
        present = sum(not request.is_finished() for request in scheduler.requests.values())
        self._passed_s = max(0.0, now_s - self._planned_s)
        if present and not self.waste.closed:
            self.busy_s += self._passed_s
            self.request_s += self._passed_s * present
            if self._blocked is not None and self._passed_s:
                head, waiting, fitting = self._blocked
                self.waste.add("queued-for-blocks", self._planned_s, waiting * self._passed_s, (head,))
                if self._fits_unfilled:
                    self.waste.add("queued-for-unfilled-blocks", self._planned_s, waiting * self._passed_s)
                if fitting:
                    self.waste.add("head-of-line", self._planned_s, fitting * self._passed_s, (head,))
        self._planned_s, self._refused = now_s, ""
        self._before = {
            request.request_id: RanBefore(request.num_computed_tokens, len(request.output_token_ids))
            for request in scheduler.running
        }

    def watch_ends(self) -> None:
        """Note the head that the last pass left without room, and nothing after it."""
        if self._blocked is not None:
            self.waste.add("queued-for-blocks", self._planned_s, 0.0, self._blocked[:1])
        self.waste.closed = True
        self._stop_looking()

    def paused(self) -> None:
        """Forget the head that the last pass left without room: until the next one it waits for the operator."""
        self._blocked = None

    def _look(self) -> None:
        """Look at what may break at any time. The next pass may be minutes away, if a step takes as long."""
        self._counters(self.now_s)
        vllm = self.vllm
        queued = {id(request) for request in vllm.running}
        queued.update(id(request) for queue in QUEUES for request in getattr(vllm, queue, ()))
        lost = [n for n, request in vllm.requests.items() if id(request) not in queued and not request.is_finished()]
        self.lost_s = {name: self.lost_s.get(name, self.now_s) for name in lost}

    def planned(self, plan: Any) -> None:
        """Note what a pass decided."""
        now_s, requests = self.now_s, self.vllm.requests
        preempted = [name for name in self._before if name in requests and requests[name].status.name == "PREEMPTED"]
        for name in preempted:
            self._preempts(name, now_s)
        if len(preempted) >= len(self._before) >= 2:
            self.waste.add("preempted-all", now_s, len(preempted))
        self._counters(now_s)
        self._blocked = None if preempted else self._blocked_head()
        if not plan.total_num_scheduled_tokens:
            return
        self.tokens_computed += plan.total_num_scheduled_tokens
        waits = bool(self._plain_waiting(1))
        if self._ended and waits:
            self.waste.add("ended-together", self._ended_s, self._ended)
        if waits or len(self.vllm.running) >= self._ended:
            self._ended = 0
        for name, count in plan.num_scheduled_tokens.items():
            self._admitted(name, requests[name].num_computed_tokens - count)
        self._starved(plan, now_s)

    def _preempts(self, name: str, now_s: float) -> None:
        before = self._before[name]
        self.preemptions[name] += 1
        client = (client_name(name),)
        lost, lost_s = self._lost.get(name, (0, now_s))
        self._lost[name] = max(lost, before.computed), lost_s
        for_itself = name == self._refused  # it got no blocks, and is the least urgent
        if for_itself and not hasattr(self.vllm, "_preempt_request"):  # a release that preempts within its pass
            self.waste.add("preempted-for-itself", now_s, before.computed, client)
        if before.outputs == self._outputs_before.get(name, 0) and before.computed and not for_itself:
            self.waste.add("preempted-in-vain", now_s, before.computed, client)
        self._outputs_before[name] = before.outputs
        completed = getattr(self.vllm, "processed_step_seq", 0)
        fenced = any(fence > completed for fence, _ in getattr(self.vllm, "deferred_frees", ()))
        if fenced and not for_itself:
            self.waste.add("preempted-behind-fence", now_s, before.computed, client)

    def _admitted(self, name: str, start: int) -> None:
        lost, lost_s = self._lost.pop(name, (0, 0.0))
        if lost > start:
            self.waste.add("recomputed-after-preemption", lost_s, lost - start, (client_name(name),))
        missed, gone = self._lookups.pop(name, (0, []))
        if missed:
            self.waste.add("prefix-missed", self.now_s, missed, (client_name(name),))
        if gone and not self.preemptions[name]:
            most = self._blocks_to_admit(self.vllm.requests[name])
            flushed = self._evictions.blocks_flushed(([content] for content in gone), name, most)
            self.waste.add_lost_prefix(self.now_s, flushed * self.block_size, (len(gone) - flushed) * self.block_size)

    def _starved(self, plan: Any, now_s: float) -> None:
        """Note requests that got no next token in a step that computed prompts."""
        scheduled = plan.num_scheduled_tokens
        if plan.total_num_scheduled_tokens < self.vllm.max_num_scheduled_tokens or len(scheduled) >= len(self._before):
            return
        requests = self.vllm.requests
        starved = [
            client_name(request.request_id)
            for request in self.vllm.running
            if request.request_id not in scheduled and request.output_token_ids and self._lacks_a_token(request)
        ]
        if starved and any(not requests[name].output_token_ids for name in scheduled):
            self.waste.add("decode-starved", now_s, len(starved) * self._passed_s, starved)

    def _lacks_a_token(self, request: Any) -> bool:
        """Whether a step could give it a token: not if the step in flight samples its last one, or nothing is left."""
        in_flight = getattr(request, "num_output_placeholders", 0)
        ends = request.num_output_tokens + in_flight >= request.max_tokens
        at_length = request.num_tokens + in_flight >= self.vllm.max_model_len
        left = request.num_tokens_with_spec + in_flight - request.num_computed_tokens
        return left > 0 and not (in_flight and (ends or at_length))

    def _plain_waiting(self, most: int) -> list[Any]:
        waiting = (request for request in self.vllm.waiting if request.status.name in PLAIN_WAITS)
        return list(islice(waiting, most))

    def _blocked_head(self) -> tuple[str, int, int] | None:
        """Return the head that vLLM gave no blocks in this pass, how many wait and how many it holds back.

        None count behind one that no free pool could hold: it does not wait for others to end. Nor does one whose LoRA
        adapter has no slot.
        """
        requests, name = self.vllm.requests, self._refused
        if name not in requests or requests[name].status.name not in PLAIN_WAITS:
            return None
        free, needed = self.pool.get_num_free_blocks(), self.blocks_needed(requests[name])
        self._fits_unfilled = needed <= free + self._unfilled_tokens() // self.block_size
        behind = self._plain_waiting(1 + LOOKED_BEHIND) if needed < len(self.pool.blocks) else ()
        needs = [
            self._blocks_to_admit(each) - len(self.blocks_of(each.request_id))
            for each in behind
            if each.request_id != name and self._has_slot(each)
        ]
        running = len(self.vllm.running)
        fitting = held_back(needs, free, self.vllm.max_num_running_reqs - running, others_run=running > 0)
        return client_name(name), sum(each.status.name in PLAIN_WAITS for each in self.vllm.waiting), fitting

    def _has_slot(self, request: Any) -> bool:
        """Whether its adapter is loaded for one that runs, or could be loaded beside theirs."""
        if request.lora_request is None:
            return True
        loaded = {each.lora_request.lora_int_id for each in self.vllm.running if each.lora_request is not None}
        return request.lora_request.lora_int_id in loaded or len(loaded) < self.engine.draw.loras

    def _unfilled_tokens(self) -> int:
        """Return how many more tokens fit in the blocks of the requests that run."""
        return sum(
            max(0, len(table.get(request.request_id, ())) * self.block_size - request.num_computed_tokens)
            for request in self.vllm.running
            for table in self.tables()
        )

    def blocks_needed(self, request: Any) -> int:
        """Return the blocks that all of its tokens take at least: more than were free when it was given none."""
        return max(self.least_blocks(request.num_tokens), self._refused_of.get(request.request_id, -1) + 1)

    def least_blocks(self, tokens: int) -> int:
        """Return the blocks without which the last of so many tokens cannot be computed.

        That token reads all of them in a group that sees everything, and as many as the window in each that has one.
        """
        draw = self.engine.draw
        seen = [tokens, *draw.window_groups * [min(tokens, draw.base.window)]]
        return sum(-(-count // self.block_size) for count in seen)

    def _blocks_to_admit(self, request: Any) -> int:
        """Return the blocks that it takes at most. A group with a window may take fewer."""
        tokens = request.num_tokens
        if not getattr(self.vllm, "scheduler_reserve_full_isl", True) or self.engine.draw.release < (0, 19):
            tokens = min(tokens, self.vllm.max_num_scheduled_tokens)
        return int(-(-tokens // self.block_size)) * len(self.tables())

    def step_ends(self, step: PlannedStep, outputs: Sequence[Output]) -> None:
        """Note what a step computed."""
        now_s = self.now_s
        if not self.waste.closed and step.plan.total_num_scheduled_tokens:
            self.steps += 1
            self.short_steps += step.seconds < SHORT_STEP_S
        self.moved_s.update(dict.fromkeys(step.plan.num_scheduled_tokens, now_s))
        for name in step.plan.num_scheduled_tokens:
            request = self.vllm.requests.get(name)
            if request is not None and request.num_computed_tokens > self.furthest.get(name, (0, 0.0))[0]:
                self.furthest[name] = request.num_computed_tokens, now_s
        count = sum(output.status in NATURAL_VLLM_ENDS for output in outputs)
        if count >= 2 and 2 * count > len(self._before):
            self._ended, self._ended_s = count, now_s

    # ---------------------------------------------------------------- blocks

    def _wrap(self) -> None:
        pool, scheduler = self.pool, self.vllm
        free, get_new, touch = pool.free_blocks, pool.get_new_blocks, pool.touch
        free_request, evict = scheduler._free_request, pool._maybe_evict_cached_block
        preempt: Any = getattr(scheduler, "_preempt_request", None)

        def freed(ordered: Iterable[Any], *args: Any, **named: Any) -> Any:
            blocks = list(ordered)
            self._frees(blocks)
            return free(blocks, *args, **named)

        def taken(count: int, *args: Any, **named: Any) -> Any:
            blocks = get_new(count, *args, **named)
            self._held += len(blocks)
            if self._freed_twice:
                self._handed_out_twice([block.block_id for block in blocks])
            return blocks

        def touched(blocks: Any, *args: Any, **named: Any) -> Any:
            flat = [one for each in blocks for one in (each if isinstance(each, list | tuple) else (each,))]
            self._held += sum(block.ref_cnt == 0 and not block.is_null for block in flat)
            if not self._serving:
                self.pinned_s = {block.block_id: self.now_s for block in flat} | self.pinned_s
            return touch(blocks, *args, **named)

        def request_freed(request: Any, *args: Any, **named: Any) -> Any:
            by: FreedBy = "aborted" if request.status.name == "FINISHED_ABORTED" else "completed"
            owed = OwedFree(self.now_s, by, client_name(request.request_id))
            self.owed_frees.update(dict.fromkeys(self.blocks_of(request.request_id), owed))
            self.moved_s[request.request_id] = self.now_s
            return free_request(request, *args, **named)

        def evicted(block: Any, *args: Any, **named: Any) -> Any:
            if block.block_hash is not None:
                self._evictions.evicted(bytes(block.block_hash)[:-GROUP_BYTES], self._allocating)
            return evict(block, *args, **named)

        def preempted(request: Any, *args: Any, **named: Any) -> Any:
            name = request.request_id
            if name == self._refused:
                self.waste.add("preempted-for-itself", self.now_s, request.num_computed_tokens, (client_name(name),))
            return preempt(request, *args, **named)

        if preempt is not None:
            scheduler._preempt_request = preempted
        pool.free_blocks, pool.get_new_blocks, pool.touch = freed, taken, touched
        pool._maybe_evict_cached_block, scheduler._free_request = evicted, request_freed

    def _wrap_manager(self) -> None:
        manager = self.manager
        look_up, allocate = manager.get_computed_blocks, manager.allocate_slots
        leave: Any = getattr(manager, "remove_skipped_blocks", None)

        def looked_up(request: Any, *args: Any, **named: Any) -> Any:
            found = look_up(request, *args, **named)
            self._looked_up(request, int(found[1]))
            return found

        def allocated(request: Any, *args: Any, **named: Any) -> Any:
            self._allocating, self._serving = request.request_id, True
            given = allocate(request, *args, **named)
            self._serving = False
            name, free = request.request_id, self.pool.get_num_free_blocks()
            if given is None:
                self._refused, self._refused_of[name] = name, max(self._refused_of.get(name, 0), free)
            else:
                self._refused = "" if self._refused == name else self._refused
                self._refused_of.pop(name, None)
            return given

        def left_behind(*args: Any, **named: Any) -> Any:
            self._serving = True
            dropped = leave(*args, **named)
            self._serving = False
            return dropped

        manager.get_computed_blocks, manager.allocate_slots = looked_up, allocated
        if leave is not None:
            manager.remove_skipped_blocks = left_behind

    def _frees(self, blocks: Sequence[Any]) -> None:
        twice = [block.block_id for block in blocks if block.ref_cnt <= 0 and not block.is_null]
        if twice:
            self._freed_twice = True
            first_s = min(self._freed_s.get(block, self.now_s) for block in twice)
            self.waste.add("freed-twice", first_s, len(twice), blocks=twice)
        if not self._serving and (early := self._still_in_tables(blocks)):
            self._freed_twice = True
            self.waste.add("freed-twice", self.now_s, len(early), blocks=early)
        last = [block.block_id for block in blocks if block.ref_cnt == 1 and not block.is_null]
        self._held -= len(last)
        self._freed_s.update(dict.fromkeys(last, self.now_s))
        self._released_s.update((block.block_id, self.now_s) for block in blocks)

    def _still_in_tables(self, blocks: Sequence[Any]) -> list[int]:
        """Return the blocks that will have fewer references than tables that name them: who frees them is no owner."""
        left = {block.block_id: block.ref_cnt - 1 for block in blocks if not block.is_null}
        named = Counter(
            block.block_id
            for table in self.tables()
            for owned in table.values()
            for block in owned
            if block.block_id in left
        )
        return [block for block, count in named.items() if left[block] < count]

    def _handed_out_twice(self, blocks: Sequence[int]) -> None:
        new = set(blocks)
        if len(new) < len(blocks):  # the free queue had one of them twice
            self.waste.add("handed-out-in-use", self.now_s, len(blocks) - len(new))
        for name in self.vllm.requests:
            used = [block for block in self.blocks_of(name) if block in new]
            if used:  # it concerns both: each writes to what the other reads
                names = client_name(name), client_name(self._allocating)
                self.waste.add("handed-out-in-use", self.now_s, len(used), names, used)

    def _counters(self, now_s: float) -> None:
        """Compare the pool's counter of free blocks with a count of our own."""
        free = self.engine.draw.base.engine["num_gpu_blocks_override"] - 1 - self._held
        if self.pool.get_num_free_blocks() != free and not self._freed_twice:
            self.waste.add("counters-differ", now_s, 1)

    def _looked_up(self, request: Any, tokens: int) -> None:
        """Compare what a lookup found with what the pool has and had. A miss is seen only where one group sees
        everything: elsewhere a window that another group has left behind looks the same.
        """
        most, first = (request.num_tokens - 1) // self.block_size, tokens // self.block_size
        digests = getattr(request, "block_hashes", ())[first:most]
        there = 0
        if self._one_group:
            kept = (n for n, each in enumerate(digests) if not self.pool.get_cached_block(each, [0]))
            there = next(kept, len(digests))
        latest = self._evictions.latest
        gone = list(takewhile(latest.__contains__, map(bytes, digests[there:])))
        self._lookups[request.request_id] = there * self.block_size, gone


def client_name(name: str) -> str:
    """Return the id that the client gave, as the probe reports it."""
    return name.rpartition("-")[0]
