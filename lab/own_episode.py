"""An episode on kvscope's own engine in virtual time: watched while clients come and go, then drained."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from kvscope.engine.bench.simulated_engine import DRAIN_S, SimulatedEngine
from kvscope.engine.blocks.block_pool import NULL_BLOCK_COUNT
from kvscope.engine.config import EngineConfig
from kvscope.engine.connectors.host import HostConnector
from kvscope.engine.execution.memory_plan import DEVICE_HEADROOM
from kvscope.engine.models import LoadedModel, load_model
from kvscope.engine.requests.request import Output, Request
from kvscope.engine.serving.engine_metrics import EngineCollector

from .client_load import Crowd
from .drain_limits import (
    DRAIN_SLICE_S,
    ENOUGH_STEPS,
    MOST_DRAIN_STEPS,
    PATIENT_STEPS,
    SLICES,
    STILL_S,
    DrainCut,
    empty_pass_s,
)
from .draws import Draw
from .engine_witness import NATURAL_STATUSES, EngineWitness
from .simulated_metrics import page_of
from .truth.episode_end import EpisodeEnd, KeptBlocks, ObservedWaste, UnfinishedRequest, WaitPlace
from .waste_log import WasteLog


@cache
def _tiny_model(max_model_len: int | None) -> LoadedModel:
    return load_model(EngineConfig(max_model_len=max_model_len))


def model_of(draw: Draw) -> LoadedModel:
    """Return the model that the drawn engine pretends to run. Only its settings count."""
    loaded = _tiny_model(draw.max_model_len if draw.plans_memory else None)
    shape = replace(loaded.config, max_model_len=draw.max_model_len)
    if draw.window:
        layers = frozenset(range(1, loaded.config.num_layers))
        shape = replace(shape, sliding_window=draw.window, sliding_layers=layers)
    return replace(loaded, config=shape)


class OwnEpisode:
    """An episode of `draw` whose events are recorded in `directory`. `watch` it, read the recording, then `drain` it.

    pages: the metrics page as text, with the wall time in ns of each scrape.
    """

    def __init__(self, draw: Draw, directory: Path, keep_recording: bool = False) -> None:
        loaded = model_of(draw)
        config = EngineConfig(**draw.engine, faults=draw.faults, hash_key=b"lab", max_model_len=draw.max_model_len)
        self.engine = SimulatedEngine(
            config,
            loaded,
            step_time=draw.step_time,
            latencies=draw.latencies,
            journal=directory,
            name=f"lab@127.0.0.1:0/{draw.rank}",
            drain_s=min(max(DRAIN_S, draw.step_time.base_s / 4), 0.5),
            blocked_s=empty_pass_s(draw.step_time.base_s),
        )
        self.draw = draw
        self.faults = draw.faults
        self.began_ns = self.engine.time.time_ns()
        self.pages: list[tuple[int, str]] = []
        self.witness = EngineWitness(self.engine)
        self._keep_recording = keep_recording
        self._crowd = Crowd(self.engine, draw.load, draw.seed)
        self._watched_s = self._failed_s = 0.0
        self._patient_until = 0
        """The step of the drain after which outputs are cut short."""
        self._preemptions: dict[int, int] = {}
        self._polls = 0
        for at_s, count in draw.lost:
            self.engine.at(at_s, lambda count=count: self.engine.lose_batches(count))  # type: ignore[misc]
        self._collector = EngineCollector(self.engine)
        self._stop_scraping = self.engine.time.every(draw.scrape_s, self._scrape)

    def _scrape(self) -> None:
        self.pages.append((self.engine.time.time_ns(), page_of(self._collector.collect())))

    def watch(self) -> None:
        """Run the watched part: no more than the drawn seconds and steps. The recording ends with it."""
        engine, draw = self.engine, self.draw
        slice_s = draw.seconds / SLICES
        while self.witness.now_s < draw.seconds - 1e-6 and self.witness.steps < draw.steps and not engine.failure:
            engine.run(slice_s, self._deliver)
        self._watched_s = self.witness.now_s
        if engine.failure:
            self._failed_s = self._watched_s
        self.witness.watch_ends()
        self._stop_scraping()
        if self._keep_recording:
            return
        engine.stop_recording()

    def _deliver(self, outputs: list[Output]) -> None:
        self.witness.ended(sum(output.status in NATURAL_STATUSES for output in outputs))
        self._crowd.receive(outputs)

    def drain(self) -> EpisodeEnd:
        """Run on without new requests until nothing moves, close the engine and return its final state."""
        engine, witness = self.engine, self.witness
        self._crowd.close()
        scheduler = engine.scheduler
        living = [request for request in scheduler.requests.values() if not request.is_finished]
        self._preemptions = {request.number: request.num_preemptions for request in living}
        self._polls = engine.connector.polls if engine.connector is not None else 0
        left = sum(map(self._steps_alone, living))
        enough = ENOUGH_STEPS * left + 1_000
        most = scheduler.step + min(enough, MOST_DRAIN_STEPS)
        self._patient_until = scheduler.step + PATIENT_STEPS
        moved_s, before = witness.now_s, self._mark()
        while not engine.failure and scheduler.step < most and not self._is_over():
            engine.run(DRAIN_SLICE_S, self._drained)
            now = self._mark()
            if now != before or self._on_its_way():
                moved_s, before = witness.now_s, now
            if witness.now_s - moved_s > STILL_S:
                break
        cut = scheduler.step >= most and enough > MOST_DRAIN_STEPS
        end = self._end()
        engine.stop_recording()  # the end that closing gives to requests is no part of the episode
        engine.close()
        if cut:
            raise DrainCut(f"the drain was not over after {MOST_DRAIN_STEPS:,} steps")
        return end

    def _drained(self, outputs: list[Output]) -> None:
        """Take the outputs of a pass of the drain. Once it takes long, let each request end with its next token."""
        self._crowd.receive(outputs)
        scheduler, manager = self.engine.scheduler, self.engine.manager
        if scheduler.step < self._patient_until:
            return
        for output in outputs:
            request = scheduler.requests.get(output.number)
            if request is None or not output.sampled or request.is_finished:
                continue
            if manager.fits(min(request.num_prompt_tokens + request.params.max_tokens, scheduler.max_model_len)):
                next_token = len(request.output_token_ids) + request.num_output_placeholders + 1
                request.params = replace(request.params, max_tokens=min(request.params.max_tokens, next_token))

    def _steps_alone(self, request: Request) -> int:
        chunk = self.engine.scheduler.max_num_batched_tokens
        return request.params.max_tokens - len(request.output_token_ids) + -(-request.num_tokens // chunk)

    def _mark(self) -> tuple[int, int, int]:
        """Return counters that change when anything moves."""
        scheduler = self.engine.scheduler
        return scheduler.step, len(scheduler.requests), self.engine.pool.num_free

    def _is_over(self) -> bool:
        scheduler, engine = self.engine.scheduler, self.engine
        return not scheduler.requests and not engine.intake.open and engine.pool.num_free == engine.pool.usable

    def _on_its_way(self) -> bool:
        """Whether a copy, a grammar or a lease will end by itself, and the engine can take it."""
        engine = self.engine
        if engine.hangs:
            return False
        now_ns = engine.time.ns
        leases = any(deadline > now_ns for deadline in engine.scheduler.deferred.values())
        return leases or engine.virtual_jobs > 0

    # ---------------------------------------------------------------- the final state

    def _end(self) -> EpisodeEnd:
        engine, witness = self.engine, self.witness
        hangs = engine.launched[1] / 1e9 - witness.began_s if engine.hangs else None
        polls = engine.connector.polls if engine.connector is not None else 0
        plan = engine.plan
        observed = witness.waste.all()
        pinned = isinstance(engine.connector, HostConnector) and engine.connector.num_pinned
        if not pinned:
            observed = [seen for seen in observed if seen.kind != "outer-pin"]
        return EpisodeEnd(
            watched_s=self._watched_s,
            drained_s=witness.now_s - self._watched_s,
            busy_s=witness.busy_s,
            steps=witness.steps,
            short_steps=witness.short_steps,
            usable_blocks=engine.pool.usable,
            asked=self._crowd.asked - self._crowd.refused,
            tokens_computed=witness.tokens_computed,
            request_s=witness.request_s,
            device_bytes=plan.total if plan.is_measured else 0,
            polled=polls > self._polls,
            hangs_since_s=hangs,
            failed_s=self._failed_s if engine.failure and self._failed_s else None,
            failure=engine.failure,
            lost_batches=engine.lost_batches,
            unfinished=[*self._unfinished()],
            kept=[*self._kept()],
            observed=[*observed, *self._memory()],
        )

    def _unfinished(self) -> Iterator[UnfinishedRequest]:
        engine, witness = self.engine, self.witness
        scheduler, manager = engine.scheduler, engine.manager
        for request in scheduler.requests.values():
            if request.is_finished:
                continue
            number = request.number
            place = self._place(request)
            fetched = isinstance(engine.connector, HostConnector) and engine.connector.num_fetched > 0
            preempted = 0 if engine.hangs else request.num_preemptions - self._preemptions.get(number, 0)
            since_s = witness.moved_s[number]
            if place == "waiting" and number in manager.tables:  # it waits for the head, and the head for its blocks
                since_s = max(since_s, witness.moved_s[scheduler.waiting.head().number])
            yield UnfinishedRequest(
                request.id,
                place,
                witness.furthest[number][1] if preempted and number in witness.furthest else since_s,
                [block for held in manager.held(number) for block in held],
                manager.blocks_for(request.num_tokens),
                fetched and number in scheduler.transfers.loading,
                preempted,
            )
        for number in sorted(engine.intake.open - scheduler.requests.keys()):
            yield UnfinishedRequest(self._crowd.names[number], "front-end", self._crowd.asked_s[number])

    def _place(self, request: Request) -> WaitPlace:
        scheduler = self.engine.scheduler
        if request in scheduler.running:
            return "running"
        if request in scheduler.state.unparked:
            return "ready"
        if request.number not in scheduler.parked:
            return "waiting"
        return "remote" if request.number in scheduler.transfers.loading else "grammar"

    def _kept(self) -> Iterator[KeptBlocks]:
        engine, witness = self.engine, self.witness
        scheduler, manager = engine.scheduler, engine.manager
        owed = [*engine.pool.refs]
        for number in manager.tables:
            for held in manager.held(number):
                for block in held:
                    owed[block] -= 1
        for fenced in manager.fenced:
            for blocks in fenced.blocks:
                for block in blocks:
                    owed[block] -= 1
        for number in scheduler.deferred:
            blocks = [block for held in manager.held(number) for block in held]
            by_fetch = number in scheduler.transfers.loading
            kept = KeptBlocks("fetch" if by_fetch else "connector", blocks, witness.moved_s[number])
            yield KeptBlocks(kept.by, kept.blocks, kept.since_s, witness.names[number])
        yield from self._ownerless(block for block, refs in enumerate(owed) if refs > 0 and block >= NULL_BLOCK_COUNT)

    def _ownerless(self, blocks: Iterable[int]) -> Iterator[KeptBlocks]:
        by_free = defaultdict(list)
        for block in blocks:
            last = self.witness.last_free.get(block)
            by_free[(last.at_s, last.by, last.owner) if last is not None else (0.0, "", "")].append(block)
        for (at_s, by, owner), lost in by_free.items():
            yield KeptBlocks("nothing", lost, at_s, owner, by)

    def _memory(self) -> Iterator[ObservedWaste]:
        """Yield the difference between the plan for the device and its real use."""
        plan, log = self.engine.plan, WasteLog()
        if plan.is_measured and self.draw.plans_memory:
            outgrew = plan.graphs - max(plan.graphs_estimated, 0)
            room = plan.free_at_start - plan.weights - plan.activations - plan.non_torch - plan.kv_pool - plan.graphs
            if outgrew > 0 and room < DEVICE_HEADROOM:
                log.add("graphs-outgrew", 0.0, outgrew)
            elif outgrew < 0:
                log.add("graphs-overreserved", 0.0, -outgrew)
            if plan.counted_twice:
                log.add("advice-wrong", 0.0, plan.counted_twice)
            if self.engine.leaked > 0:
                log.add("memory-unnamed", self.witness.leaked_s, self.engine.leaked)
        yield from log.all()
