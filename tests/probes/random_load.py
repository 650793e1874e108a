"""What random runs of a bare scheduler do beside plain requests, one class a mechanism of vLLM.

Each stands in for the part of vLLM that is not there: the client of a session, the grammar compiler, the worker of a
connector that fails, a plug-in that pins blocks, the drafter. Each is drawn by the run's own random numbers.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from kvscope.lab.on_vllm.cache_groups import takes
from kvscope.lab.on_vllm.scheduler_maker import AnyGrammar


class Load:
    """Parts of a random run. `start` is called once, `before_pass` before each pass of the scheduler."""

    def start(self, bare: Any) -> None:
        self.bare = bare
        self.rng = bare.rng

    def before_pass(self) -> None:
        pass


class Aborts(Load):
    def before_pass(self) -> None:
        from vllm.v1.request import RequestStatus

        scheduler = self.bare.scheduler
        if self.rng.random() < 0.03 and scheduler.requests:
            scheduler.finish_requests(self.rng.choice(list(scheduler.requests)), RequestStatus.FINISHED_ABORTED)


class Pauses(Load):
    """An operator pauses and resumes it."""

    def before_pass(self) -> None:
        scheduler = self.bare.scheduler
        if self.rng.random() < 0.1 and hasattr(scheduler, "set_pause_state"):
            states: Any = type(scheduler._pause_state)
            scheduler.set_pause_state(self.rng.choice((*states, *[states.UNPAUSED] * 4)))


class Resets(Load):
    """Someone resets the prefix cache; by force only where vLLM itself does not fail at it."""

    def before_pass(self) -> None:
        bare = self.bare
        if self.rng.random() < bare.resets:
            reset = bare.scheduler.reset_prefix_cache
            force = self.rng.random() < 0.5 and not bare.preempts_within and self._no_others_hold()
            reset(**takes(reset, reset_running_requests=force))

    def _no_others_hold(self) -> bool:
        """A forced reset raises in vLLM if a request that does not run, or a pin, has blocks."""
        bare, scheduler = self.bare, self.bare.scheduler
        tables = [m.req_to_blocks for m in scheduler.kv_cache_manager.coordinator.single_type_managers]
        running = {request.request_id for request in scheduler.running}
        held = any(blocks and name not in running for table in tables for name, blocks in table.items())
        return not held and not bare.pinned and not bare.in_flight and not getattr(scheduler, "deferred_frees", ())


class Sessions(Load):
    """Requests whose client sends the prompt in parts, and keeps the session between them."""

    def start(self, bare: Any) -> None:
        super().start(bare)
        self.open: list[str] = []

    def before_pass(self) -> None:
        bare, rng = self.bare, self.rng
        self.open = [name for name in self.open if name in bare.scheduler.requests]
        if len(self.open) < 3 and rng.random() < 0.1:
            self.open.append(bare.arrive(f"session-{bare.arrived}", bare.tokens(rng.randrange(1, 200)), 12, part=True))
        for name in [name for name in self.open if rng.random() < 0.08]:
            last = rng.random() < 0.2
            parts = [] if last else bare.tokens(rng.randrange(1, 60))
            if not last and bare.scheduler.requests[name].num_tokens > 1200:
                continue
            bare.arrive(name, parts or [1], 12, part=not last, whole_name=True)
            if last:
                self.open.remove(name)


class Grammars(Load):
    """Requests with structured output, whose grammar takes some steps to compile."""

    def start(self, bare: Any) -> None:
        super().start(bare)
        bare.structured = True
        self.compiling: list[tuple[int, Future[AnyGrammar]]] = []
        if hasattr(bare.scheduler.structured_output_manager, "grammar_bitmask"):
            bare.scheduler.structured_output_manager.grammar_bitmask = lambda *_args, **_kwargs: None

    def before_pass(self) -> None:
        bare = self.bare
        for request in bare.scheduler.requests.values():
            wanted = request.structured_output_request
            if wanted is not None and wanted._grammar is None:
                wanted._grammar = Future()
                self.compiling.append((bare.steps + self.rng.randrange(1, 8), wanted._grammar))
        for due, grammar in self.compiling:
            if due <= bare.steps:
                grammar.set_result(AnyGrammar())
        self.compiling = [(due, grammar) for due, grammar in self.compiling if due > bare.steps]


class Pins(Load):
    """A plug-in holds cached blocks for itself, and frees or, where the release has that, unpins them."""

    def before_pass(self) -> None:
        bare, rng = self.bare, self.rng
        pool = bare.scheduler.kv_cache_manager.block_pool
        if rng.random() < 0.1 and len(bare.pinned) < 6:
            cached = [block for block in pool.blocks[1:] if block.block_hash is not None]
            chosen = rng.sample(cached, min(len(cached), 2))
            touch = pool.touch
            touch((chosen,) if "tuple" in str(touch.__annotations__) else chosen)
            bare.pinned += chosen
        if bare.pinned and rng.random() < 0.1:
            block = bare.pinned.pop()
            if hasattr(pool, "unpin_blocks") and rng.random() < 0.5:
                pool.unpin_blocks([block], lambda _block: None)
            else:
                pool.free_blocks([block])


class Evictions(Load):
    """A connector reports blocks whose contents are not to be trusted."""

    def before_pass(self) -> None:
        manager = self.bare.scheduler.kv_cache_manager
        if self.rng.random() < 0.05 and hasattr(manager, "evict_blocks"):
            blocks = range(1, manager.block_pool.num_gpu_blocks)
            manager.evict_blocks(set(self.rng.sample(blocks, 4)))


LOADS: dict[str, type[Load]] = {
    "aborts": Aborts,
    "pauses": Pauses,
    "resets": Resets,
    "sessions": Sessions,
    "grammars": Grammars,
    "pins": Pins,
    "evictions": Evictions,
}
