"""Incidents on vLLM's LLMEngine in one process, beside those of tests.probes.one_process_engine.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 KVSCOPE_EVENTS=ADDRESS PYTHON -m tests.probes.one_process_incidents MODEL EVENT

Each runs until it is killed. They wait for states of the engine, or for the test, and never for a time to pass: how far
an engine gets in a second depends on the machine.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from kvscope.lab.on_vllm.scheduler_maker import TINY_LLAMA
from tests.probes.connector_settings import CONNECTOR
from tests.probes.model_shapes import SLOWER, TWO_WINDOWS, save_shape
from tests.probes.one_process_engine import METRICS_PORT, QUICK_STEPS, Engine

FOR_GOOD: Final = 3600
SLOW_STEP: Final = 8
SLOW_STEP_S: Final = 14
NIXL: Final = {**CONNECTOR, "kv_connector": "NixlKeepingConnector"}

Begin = Callable[..., Engine]
"""Make the engine, with these settings of vLLM."""


def tables(engine: Engine) -> dict[str, list[Any]]:
    """vLLM's block tables, by its request ids."""
    found: dict[str, list[Any]] = engine.scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
    return found


def skip_free(engine: Engine, *names: str, prompt_tokens: int = 700) -> None:
    """A defect skips the free of these requests, which their clients abort."""
    for name in names:
        engine.ask(name, prompt_tokens, 1000)
    engine.until(lambda: all(engine.answered(name) for name in names))
    for request_id in [one for one in tables(engine) if one.startswith(names)]:
        tables(engine).pop(request_id)
    engine.engine.abort_request(list(names))


def keep(engine: Engine, requests: int = 6) -> None:
    """A connector keeps the blocks of these, 13 of each."""
    for number in range(requests):
        engine.ask(f"keep-{number}", 400, 2)
    engine.until(lambda: not engine.engine.has_unfinished_requests())


def lost_blocks(begin: Begin) -> None:
    """The frees of two requests are skipped; `big` then needs more than is left, and `small` stands behind it."""
    engine = begin()
    skip_free(engine, "forgotten-0", "forgotten-1")
    engine.until(lambda: engine.steps > QUICK_STEPS, engine.chat)
    engine.ask("big", 1900, 4)
    engine.ask("small", 40, 4)
    engine.run(FOR_GOOD)


def lost_blocks_and_room(begin: Begin) -> None:
    """The free of one request is skipped; what comes fits beside it and waits for its turn."""
    engine = begin(max_num_seqs=2)
    skip_free(engine, "forgotten")

    def load() -> None:
        if engine.engine.get_num_unfinished_requests() < 4:
            engine.ask(f"fits-{engine.came}", 600, 200)

    engine.run(FOR_GOOD, load)


def dropped_table(begin: Begin) -> None:
    """A preemption drops the block table of its request without a free. It gets others, runs on and ends.

    Prints the request and the blocks that its table had.
    """
    engine = begin(kv_transfer_config=None, num_gpu_blocks_override=70)
    preempt, dropped = engine.scheduler._preempt_request, 0

    def preempt_badly(request: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal dropped
        if not dropped:
            blocks = [block.block_id for block in tables(engine).pop(request.request_id)]
            dropped = len(blocks)
            print("dropped", request.request_id, *blocks, flush=True)
        return preempt(request, *args, **kwargs)

    engine.scheduler._preempt_request = preempt_badly
    engine.until(lambda: dropped, lambda: crowd(engine))
    engine.until(lambda: not engine.engine.has_unfinished_requests())
    engine.run(FOR_GOOD, engine.chat)


def pause_new(begin: Begin) -> None:
    """The operator holds new requests back while none runs."""
    engine = begin()
    engine.until(lambda: engine.steps > QUICK_STEPS, engine.chat)
    engine.until(lambda: not engine.engine.has_unfinished_requests())
    states = type(engine.scheduler._pause_state)
    engine.scheduler.set_pause_state(states.PAUSED_NEW)
    for number in range(2):
        engine.ask(f"new-{number}", 30, 4)
    engine.run(FOR_GOOD)


def late_heartbeats(begin: Begin) -> None:
    """`big` waits for blocks that a leak has; now and then the engine's thread makes no pass for 1.3 s."""
    engine = begin()
    keep(engine)
    engine.ask("big", 1200, 4)
    while True:
        engine.run(4)
        time.sleep(1.3)


def slow_early_step(begin: Begin) -> None:
    """A step among the first ten takes 14 s, and all others are quick."""
    engine = begin()
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    execute, calls = runner.execute_model, 0

    def slow(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == SLOW_STEP:
            time.sleep(SLOW_STEP_S)
        return execute(*args, **kwargs)

    runner.execute_model = slow
    engine.run(FOR_GOOD, engine.chat)


def crowd(engine: Engine) -> None:
    """Four requests at any time that need 25 blocks each in the end, 99 of them."""
    while engine.engine.get_num_unfinished_requests() < 4:
        engine.ask(f"crowd-{engine.came}", 100, 660 + engine.came % 40)


def crowd_beside_leak(begin: Begin) -> None:
    """Four requests have room in the pool, and preempt one another where a connector keeps half of it."""
    engine = begin()
    keep(engine, 4)
    engine.until_let_go_on(engine.chat)
    engine.run(FOR_GOOD, lambda: crowd(engine))


def crowd_alone(begin: Begin) -> None:
    """The same requests, twice as long, with nothing kept."""
    engine = begin()

    def load() -> None:
        while engine.engine.get_num_unfinished_requests() < 4:
            engine.ask(f"crowd-{engine.came}", 100, 1400)

    engine.run(FOR_GOOD, load)


def few_at_a_time(begin: Begin) -> None:
    """An engine with a light load."""
    engine = begin()
    engine.run(FOR_GOOD, engine.chat)


def lease_shown_nowhere(begin: Begin) -> None:
    """A consumer takes the kept blocks when the test has seen that they are kept."""
    _released_in_the_end(begin(), 6)


def nixl_lease_kept(begin: Begin) -> None:
    """The same of a NIXL consumer, whose lease the configuration shows."""
    _released_in_the_end(begin(kv_transfer_config=NIXL), 6)


def _released_in_the_end(engine: Engine, requests: int) -> None:
    keep(engine, requests)
    engine.until_let_go_on(engine.chat)
    keeping_connector_of(engine).RELEASES = True
    engine.run(FOR_GOOD, engine.chat)


def keeping_connector_of(engine: Engine) -> Any:
    """The module of its connector."""
    return sys.modules[type(engine.scheduler.connector).__module__]


def windows_fit(begin: Begin) -> None:
    """A prompt that fits only because windows recycle blocks waits behind two of two that run."""
    engine = begin(
        model=TWO_WINDOWS,
        kv_transfer_config=None,
        num_gpu_blocks_override=120,
        max_num_seqs=2,
        max_num_batched_tokens=256,
    )
    for number in range(2):
        engine.ask(f"runs-{number}", 60, 1900)
    engine.until(lambda: engine.answered("runs"))
    engine.ask("long-doc", 1900, 4)
    engine.run(FOR_GOOD, engine.chat)


def with_grammar(grammar: object) -> Callable[[Any], None]:
    """Give a request structured output, with a grammar that is compiled or is compiled for ever."""

    def prepare(request: Any) -> None:
        from vllm.sampling_params import StructuredOutputsParams
        from vllm.v1.request import RequestStatus
        from vllm.v1.structured_output.request import StructuredOutputRequest

        request.structured_output_request = StructuredOutputRequest(StructuredOutputsParams(regex="a"))
        request.structured_output_request._grammar = grammar
        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR

    return prepare


def full_instance(begin: Begin) -> None:
    """Four of four run; a grammar that is compiled and KV that was fetched wait for their turn."""
    engine = begin(num_gpu_blocks_override=300)
    engine.ask("load-0", 200, 4)
    engine.turn()
    for number in range(4):
        engine.ask(f"runs-{number}", 40, 1900)
    engine.ask_prepared(with_grammar(object()), "json", 40, 4)
    while True:
        engine.turn()
        time.sleep(0.3)  # so that none of the four ends meanwhile, on a busy machine either


def grammar_hangs(begin: Begin) -> None:
    """The compiler never returns a grammar, and others are served."""
    engine = begin()
    engine.ask_prepared(with_grammar(Future()), "json", 40, 4)
    engine.run(FOR_GOOD, engine.chat)


def promotion_never_comes(begin: Begin) -> None:
    """KV has come for a request, others that came later run, and a defect keeps it from being promoted."""
    engine = begin()
    kind = type(engine.scheduler)
    method = kind._handle_blocked_waiting_request

    def refuse(scheduler: Any, request: Any) -> bool:
        return request.status.name != "WAITING_FOR_REMOTE_KVS" and bool(method(scheduler, request))

    kind._handle_blocked_waiting_request = refuse
    engine.ask("load-0", 200, 4)
    engine.run(FOR_GOOD, engine.chat)


def pins(begin: Begin) -> None:
    """A connector pins blocks and unpins them all the time, under load; the free of a request was skipped."""
    engine = begin()
    pool = engine.scheduler.kv_cache_manager.block_pool
    skip_free(engine, "forgotten", prompt_tokens=400)
    while True:
        engine.until(lambda: engine.answered("chat") > 3, engine.chat)
        pinned = [block for table in tables(engine).values() for block in table if not block.is_null][:2]
        pool.touch(pinned)
        until = engine.steps + 20
        engine.until(lambda until=until: engine.steps > until, engine.chat)
        pool.unpin_blocks(pinned, lambda _block: None)


def adapters_in_use(begin: Begin) -> None:
    """Two adapters of two are in use, with most of the pool free; a request with a third one waits."""
    engine = begin(num_gpu_blocks_override=300, kv_transfer_config=None, enable_lora=True, max_loras=2, max_lora_rank=8)
    loras = [save_adapter(engine.go_on_at.parent, number) for number in (1, 2, 3)]

    def load() -> None:
        for number in (0, 1):
            if not engine.answered(f"runs-{number}"):
                engine.ask(f"runs-{number}-{engine.came}", 100, 1900, lora=loras[number])
                engine.until(lambda number=number: engine.answered(f"runs-{number}"))

    load()
    engine.ask("third", 100, 4, lora=loras[2])
    while True:
        engine.turn()
        time.sleep(0.1)  # so that neither of the two ends meanwhile


def save_adapter(directory: Path, number: int) -> Any:
    """A LoRA adapter that changes nothing, and vLLM's name for it."""
    import torch
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    folder = directory / f"adapter-{number}"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["o_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    width = TINY_LLAMA["num_attention_heads"] * TINY_LLAMA["head_dim"]
    layer = "base_model.model.model.layers.0.self_attn.o_proj"
    weights = {f"{layer}.lora_A.weight": torch.zeros(8, width)}
    weights[f"{layer}.lora_B.weight"] = torch.zeros(TINY_LLAMA["hidden_size"], 8)
    save_file(weights, folder / "adapter_model.safetensors")
    return LoRARequest(f"adapter-{number}", number, str(folder))


def waves(begin: Begin) -> None:
    """Eight alike requests at a time take nine tenths of the pool; the next eight come when all have ended.

    They run for several scrapes of the metrics page, on a fast machine too: shorter ones end together by chance.
    """
    engine = begin(
        hf_overrides=SLOWER,
        kv_transfer_config=None,
        num_gpu_blocks_override=262,
        max_num_seqs=8,
        max_num_batched_tokens=512,
    )

    def load() -> None:
        if not engine.engine.has_unfinished_requests():
            for _ in range(8):
                engine.ask(f"alike-{engine.came}", 600, 360)

    serve_metrics()
    engine.run(FOR_GOOD, load)


def by_priority(begin: Begin) -> None:
    """A healthy load by priority, in small steps: short unlike requests come and end all the time."""
    engine = begin(kv_transfer_config=None, max_num_seqs=7, max_num_batched_tokens=96, scheduling_policy="priority")
    rng = random.Random(5)

    def load() -> None:
        while engine.engine.get_num_unfinished_requests() < 14:
            engine.ask(f"r-{engine.came}", rng.randrange(100, 700), rng.randrange(2, 30), priority=rng.randrange(3))

    serve_metrics()
    engine.run(FOR_GOOD, load)


def serve_metrics() -> None:
    """What vLLM's own server has at /metrics."""
    from prometheus_client import start_http_server

    start_http_server(int(os.environ[METRICS_PORT]), "127.0.0.1")


INCIDENTS_IN_ONE_PROCESS: Final = {
    each.__name__: each
    for each in (
        lost_blocks,
        lost_blocks_and_room,
        dropped_table,
        pause_new,
        late_heartbeats,
        slow_early_step,
        crowd_beside_leak,
        crowd_alone,
        few_at_a_time,
        lease_shown_nowhere,
        nixl_lease_kept,
        windows_fit,
        full_instance,
        grammar_hangs,
        promotion_never_comes,
        pins,
        adapters_in_use,
        waves,
        by_priority,
    )
}


def begin_engine(directory: str, *, model: dict[str, Any] | None = None, **settings: Any) -> Engine:
    """The engine of an incident. model: its shape, if it is not MODEL."""
    if model is not None:
        save_shape(Path(directory), model)
    return Engine(directory, **settings)


def main() -> None:
    model, event = sys.argv[1:]
    INCIDENTS_IN_ONE_PROCESS[event](functools.partial(begin_engine, model))


if __name__ == "__main__":
    main()
