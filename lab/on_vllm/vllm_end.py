"""Runs an episode of vLLM's scheduler and returns its final state, from vLLM's own tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvscope.engine.requests.request import Output

from ..client_load import Crowd
from ..drain_limits import DRAIN_SLICE_S, ENOUGH_STEPS, MOST_DRAIN_STEPS, PATIENT_STEPS, SLICES, STILL_S, DrainCut
from ..truth.episode_end import EpisodeEnd, KeptBlocks, UnfinishedRequest, WaitPlace
from .vllm_draws import VllmDraw
from .vllm_engine import VllmEngine
from .vllm_faults import Breaker
from .vllm_witness import QUEUES, VllmWitness, client_name


class VllmRun:
    """An episode of `draw`: `watch` it, then `drain` it. The recording is in `directory`.

    keep_recording: the drain is recorded too.
    """

    def __init__(self, draw: VllmDraw, directory: Path, model: Path, keep_recording: bool = False) -> None:
        self.engine = VllmEngine(draw, directory, model)
        self.vllm = self.engine.vllm
        self.witness = self.engine.witness = VllmWitness(self.engine)
        self.draw = draw
        self._keep_recording = keep_recording
        self._crowd = Crowd(self.engine, draw.base.load, draw.base.seed)
        self._watched_s = 0.0
        self._failed_s: float | None = None
        self._patient_until = 0
        """The step of the drain after which outputs are cut short."""
        self._preemptions: dict[str, int] = {}
        self._polls = 0
        Breaker(self.engine).install()

    def watch(self) -> None:
        """Run the watched part: no more than the drawn seconds and steps."""
        base, witness = self.draw.base, self.witness
        while witness.now_s < base.seconds - 1e-6 and witness.steps < base.steps and not self.engine.failure:
            self.engine.run(base.seconds / SLICES, self._deliver)
        self._watched_s = witness.now_s
        if self.engine.failure:
            self._failed_s = self._watched_s
        witness.watch_ends()
        if not self._keep_recording:
            self.engine.stop_recording()

    def _deliver(self, outputs: list[Output]) -> None:
        self._crowd.receive(outputs)

    def drain(self) -> EpisodeEnd:
        """Run on without new requests until nothing moves, and return the final state."""
        engine, witness = self.engine, self.witness
        self._crowd.close()
        living = self._living()
        self._preemptions = dict(witness.preemptions)
        self._polls = engine.other.polls
        enough = ENOUGH_STEPS * sum(map(self._steps_alone, living)) + 1_000
        most = engine.steps + min(enough, MOST_DRAIN_STEPS)
        self._patient_until = engine.steps + PATIENT_STEPS
        moved_s, before = witness.now_s, self._mark()
        while engine.steps < most and not engine.failure and not self._is_over():
            engine.run(DRAIN_SLICE_S, self._drained)
            if not self._keep_recording:
                engine.log.flushed.clear()
            now = self._mark()
            if now != before or (not engine.hangs and (engine.other.pending or engine.grammars.pending)):
                moved_s, before = witness.now_s, now
            if witness.now_s - moved_s > STILL_S:
                break
        engine.stop_recording()
        if engine.steps >= most and enough > MOST_DRAIN_STEPS:
            raise DrainCut(f"the drain was not over after {MOST_DRAIN_STEPS:,} steps")
        return self._end()

    def _drained(self, outputs: list[Output]) -> None:
        """Take the outputs of a pass of the drain. Once it takes long, let each request end with its next token."""
        self._deliver(outputs)
        if self.engine.steps < self._patient_until:
            return
        room = (len(self.witness.pool.blocks) - 1) * self.witness.block_size // len(self.witness.tables())
        for output in outputs:
            request = self.vllm.requests.get(self.engine.names.get(output.number, ""))
            if request is None or not output.sampled or request.is_finished():
                continue
            if min(request.num_prompt_tokens + request.max_tokens, self.vllm.max_model_len) <= room:
                in_flight = getattr(request, "num_output_placeholders", 0)
                request.max_tokens = min(request.max_tokens, request.num_output_tokens + in_flight + 1)

    def _living(self) -> list[Any]:
        return [request for request in self.vllm.requests.values() if not request.is_finished()]

    def _steps_alone(self, request: Any) -> int:
        left = request.max_tokens - len(request.output_token_ids)
        return int(left - (-request.num_tokens // self.vllm.max_num_scheduled_tokens))

    def _mark(self) -> tuple[int, int, int]:
        return self.engine.steps, len(self.vllm.requests), self.witness.pool.get_num_free_blocks()

    def _is_over(self) -> bool:
        pool = self.witness.pool
        return not self.vllm.requests and pool.get_num_free_blocks() == len(pool.blocks) - 1

    def _end(self) -> EpisodeEnd:
        engine, witness = self.engine, self.witness
        return EpisodeEnd(
            watched_s=self._watched_s,
            drained_s=witness.now_s - self._watched_s,
            busy_s=witness.busy_s,
            steps=witness.steps,
            short_steps=witness.short_steps,
            usable_blocks=len(witness.pool.blocks) - 1,
            asked=self._crowd.asked - self._crowd.refused,
            tokens_computed=witness.tokens_computed,
            request_s=witness.request_s,
            polled=engine.other.polls > self._polls,
            hangs_since_s=engine.launched_ns / 1e9 - witness.began_s if engine.hangs else None,
            failed_s=self._failed_s,
            failure=engine.failure,
            mutation=engine.mutation,
            lost_batches=engine.lost_batches,
            unfinished=[*self._unfinished()],
            kept=[*self._kept()],
            observed=witness.waste.all(),
        )

    def _unfinished(self) -> Iterator[UnfinishedRequest]:
        engine, witness, living = self.engine, self.witness, self._living()
        places = {request.request_id: self._place(request) for request in living}
        for name in self._not_reached(places):
            places[name] = "waiting"
        for request in living:
            name = request.request_id
            preempted = 0 if engine.hangs else witness.preemptions[name] - self._preemptions.get(name, 0)
            since_s = witness.furthest[name][1] if preempted and name in witness.furthest else witness.moved_s[name]
            if places[name] == "remote":
                since_s = max(since_s, engine.other.fetching_s.get(name, 0.0) - witness.began_s)
            if places[name] == "lost":  # a step that was in flight may have moved it since
                since_s = witness.lost_s.get(name, since_s)
            yield UnfinishedRequest(
                client_name(name),
                places[name],
                since_s,
                witness.blocks_of(name),
                witness.blocks_needed(request),
                engine.other.loading.get(name, False),
                preempted,
                witness.arrived[name],
                witness.least_blocks(request.num_prompt_tokens),
            )

    def _not_reached(self, places: Mapping[str, WaitPlace]) -> list[str]:
        """Return the requests that are ready and stand behind one that has no room."""
        queued = [one.request_id for queue in QUEUES for one in getattr(self.vllm, queue, ())]
        plain = [index for index, name in enumerate(queued) if places.get(name) == "waiting"]
        return [name for name in queued[min(plain) :] if places.get(name) == "ready"] if plain else []

    def _place(self, request: Any) -> WaitPlace:
        scheduler, name = self.vllm, request.request_id
        if any(request is one for one in scheduler.running):
            return "running"
        if not any(request is one for queue in QUEUES for one in getattr(scheduler, queue, ())):
            return "lost"
        if request.status.name == "WAITING_FOR_REMOTE_KVS":
            return "ready" if name in scheduler.finished_recving_kv_req_ids else "remote"
        if request.status.name in ("WAITING_FOR_FSM", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"):
            grammar = request.structured_output_request._grammar
            return "grammar" if hasattr(grammar, "done") and not grammar.done() else "ready"
        return "waiting"

    def _kept(self) -> Iterator[KeptBlocks]:
        witness, requests = self.witness, self.vllm.requests
        owed = {block.block_id: block.ref_cnt for block in witness.pool.blocks if not block.is_null}
        for name, request in requests.items():
            blocks = witness.blocks_of(name)
            for block in filter(owed.__contains__, blocks):  # a broken table names what the pool does not have
                owed[block] -= 1
            if request.is_finished() and blocks:
                loading = self.engine.other.loading.get(name) is False
                yield KeptBlocks("fetch" if loading else "connector", blocks, witness.moved_s[name], client_name(name))
        fences = {block.block_id: fence for fence, all in getattr(self.vllm, "deferred_frees", ()) for block in all}
        completed = getattr(self.vllm, "processed_step_seq", 0)
        lost = defaultdict(list)
        pinned = [block for block, refs in owed.items() if refs > 0 and block in witness.pinned_s]
        if pinned:
            yield KeptBlocks("pin", pinned, min(witness.pinned_s[block] for block in pinned))
        for block, refs in owed.items():
            if refs > 0 and block not in witness.pinned_s:
                owed_free = witness.owed_free_of(block, block in fences)
                lost[owed_free, fences.get(block, completed) > completed].append(block)
        for (owed_free, in_flight), blocks in lost.items():
            yield KeptBlocks("nothing", blocks, owed_free.at_s, owed_free.owner, owed_free.by, in_flight)
