"""vLLM's LLMEngine with engine core, scheduler, executor and model in one process, as on one GPU, and what befalls it.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 KVSCOPE_EVENTS=ADDRESS PYTHON -m tests.probes.one_process_engine MODEL EVENT

Runs until it is killed. A KV connector keeps the blocks of requests with `keep` in their id (keeping_connector.py).
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.probes.connector_settings import CONNECTOR

METRICS_PORT = "KVSCOPE_TEST_METRICS_PORT"
GO_ON = "go-on"
"""The file, beside the model's folder, by which a test lets the incident go on."""


QUICK_STEPS = 150
"""Steps after which a step's time is known, and one that hangs is not among the first."""


class Engine:
    """The engine and its requests; `turn` is what a server's loop does. settings: of vLLM, beside those that follow."""

    def __init__(self, model: str, **settings: Any) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from kvscope.monitor.probes.vllm.plugin import register

        register()
        usual: dict[str, Any] = {
            "load_format": "dummy",
            "served_model_name": ["tiny"],
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "float32",
            "block_size": 32,
            "num_gpu_blocks_override": 100,
            "kv_cache_memory_bytes": 64 << 20,
            "max_model_len": 2048,
            "max_num_seqs": 4,
            "kv_transfer_config": CONNECTOR,
        }
        self.engine = LLMEngine.from_engine_args(EngineArgs(model=model, **usual | settings))
        self.go_on_at = Path(model).parent / GO_ON
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.came = 0
        self.steps = 0

    def ask(
        self, name: str, prompt_tokens: int, max_tokens: int, *, priority: int = 0, lora: object | None = None
    ) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        prompt = {"prompt_token_ids": [1 + (self.came + n) % 300 for n in range(prompt_tokens)]}
        self.engine.add_request(name, prompt, params, priority=priority, lora_request=lora)
        self.came += 1

    def ask_prepared(self, prepare: Callable[[Any], None], name: str, prompt_tokens: int, max_tokens: int) -> None:
        """The same, of a request that is changed before the scheduler gets it."""
        add = self.scheduler.add_request

        def prepared(request: Any) -> None:
            prepare(request)
            add(request)

        self.scheduler.add_request = prepared
        try:
            self.ask(name, prompt_tokens, max_tokens)
        finally:
            del self.scheduler.add_request

    def answered(self, name: str) -> int:
        """How many tokens the requests have whose name begins so, the one with the fewest; 0 if there is none."""
        found = [r.num_output_tokens for i, r in self.scheduler.requests.items() if i.startswith(name)]
        return min(found, default=0)

    def turn(self) -> None:
        if self.scheduler.has_requests():
            self.engine.step()
            self.steps += 1
        else:
            time.sleep(0.001)

    def until(self, done: Callable[[], object], load: Callable[[], None] = lambda: None) -> None:
        while not done():
            load()
            self.turn()

    def until_let_go_on(self, load: Callable[[], None] = lambda: None) -> None:
        """Until the test has seen what it waits for (OneProcess.let_go_on)."""
        self.until(self.go_on_at.exists, load)
        self.go_on_at.unlink()

    def run(self, seconds: float, load: Callable[[], None] = lambda: None) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            load()
            self.turn()

    def chat(self) -> None:
        """Short requests, two at a time."""
        if self.engine.get_num_unfinished_requests() < 2:
            self.ask(f"chat-{self.came}", 40, 30)


def healthy(engine: Engine) -> None:
    engine.run(3600, engine.chat)


def leak(engine: Engine) -> None:
    """A connector never gives the blocks of six requests back; then one waits that needs more than is left."""
    for number in range(6):
        engine.ask(f"keep-{number}", 400, 2)
    engine.until(lambda: not engine.engine.has_unfinished_requests())
    engine.ask("big", 1200, 4)
    engine.run(3600)


def leak_then_idle(engine: Engine) -> None:
    for number in range(6):
        engine.ask(f"keep-{number}", 400, 2)
    engine.run(3600)


def pause(engine: Engine) -> None:
    for number in range(3):
        engine.ask(f"kept-{number}", 40, 1500)
    engine.until(lambda: engine.answered("kept") > 3)
    engine.core.pause_scheduler(mode="keep")
    engine.run(3600)


def lose(engine: Engine) -> None:
    """Under load a plug-in removes requests from the queue of those that run."""
    engine.ask("lost", 100, 1500)
    engine.until(lambda: engine.answered("lost") > 3, engine.chat)
    lost = [request for request in engine.scheduler.running if request.request_id.startswith("lost")]
    engine.scheduler.running = [request for request in engine.scheduler.running if request not in lost]
    engine.run(3600, engine.chat)


def free_twice(engine: Engine) -> None:
    """Code of the scheduler frees blocks that a running request still has."""
    engine.ask("victim", 200, 1500)
    engine.until(lambda: engine.answered("victim") > 3)
    manager = engine.scheduler.kv_cache_manager
    (blocks,) = [table for table in manager.coordinator.single_type_managers[0].req_to_blocks.values() if table]
    manager.block_pool.free_blocks(blocks[:2])
    engine.run(3600)


def stall(engine: Engine, where: Any, method: str, sleep: Callable[[float], object]) -> None:
    """A call that never returns, in a method that every step makes."""
    engine.ask("stands-still", 100, 1500)
    engine.until(lambda: engine.steps > QUICK_STEPS)
    setattr(where, method, lambda *_args, **_kwargs: sleep(3600))
    engine.run(3600)


def stall_in_model(engine: Engine) -> None:
    stall(engine, engine.core.model_executor.driver_worker.worker.model_runner, "execute_model", time.sleep)


def stall_in_connector(engine: Engine) -> None:
    from tests.probes import keeping_connector

    engine.until(lambda: engine.steps > QUICK_STEPS, engine.chat)
    keeping_connector.STUCK = True
    engine.ask("stands-still", 100, 1500)
    engine.run(3600)


def stall_in_scheduler(engine: Engine) -> None:
    stall(engine, engine.scheduler.kv_cache_manager, "new_step_starts", time.sleep)


def stall_with_the_gil(engine: Engine) -> None:
    stall(engine, engine.scheduler.kv_cache_manager, "new_step_starts", lambda s: ctypes.PyDLL(None).sleep(int(s)))


EVENTS = (
    healthy,
    leak,
    leak_then_idle,
    pause,
    lose,
    free_twice,
    stall_in_model,
    stall_in_connector,
    stall_in_scheduler,
    stall_with_the_gil,
)


def main() -> None:
    model, event = sys.argv[1:]
    {each.__name__: each for each in EVENTS}[event](Engine(model))


if __name__ == "__main__":
    main()
