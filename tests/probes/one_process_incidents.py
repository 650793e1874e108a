"""Incidents on vLLM's LLMEngine in one process, beside those of tests.probes.one_process_engine.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 KVSCOPE_EVENTS=ADDRESS PYTHON -m tests.probes.one_process_incidents MODEL EVENT

Runs until it is killed.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import Future
from typing import Any

from tests.probes.one_process_engine import Engine


def lost_blocks(engine: Engine) -> None:
    """A defect skips the free of two requests; `big` then needs more than is left, and `small` stands behind it."""
    for number in range(2):
        engine.ask(f"forgotten-{number}", 700, 1000)
    engine.run(2)
    tables = engine.scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
    forgotten = [name for name in tables if name.startswith("forgotten")]
    for name in forgotten:
        tables.pop(name)
    engine.engine.abort_request([f"forgotten-{number}" for number in range(2)])
    engine.run(2, engine.chat)
    engine.ask("big", 1900, 4)
    engine.ask("small", 40, 4)
    engine.run(3600)


def pause_new(engine: Engine) -> None:
    """The operator holds new requests back while none runs."""
    engine.run(2, engine.chat)
    engine.run(2)
    states = type(engine.scheduler._pause_state)
    engine.scheduler.set_pause_state(states.PAUSED_NEW)
    for number in range(2):
        engine.ask(f"new-{number}", 30, 4)
    engine.run(3600)


def slow_early_step(engine: Engine) -> None:
    """A step among the first ten takes 14 s, and all others are quick."""
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    execute, calls = runner.execute_model, 0

    def slow(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 8:
            time.sleep(14)
        return execute(*args, **kwargs)

    runner.execute_model = slow
    engine.ask("first", 60, 1500)
    engine.run(3600)


def full_instance(engine: Engine) -> None:
    """Four of four run; a grammar that is compiled and a fetch that has ended wait for their turn."""
    from vllm.v1.outputs import KVConnectorOutput

    for number in range(4):
        engine.ask(f"runs-{number}", 40, 1900)
    engine.run(1)
    _ask_with_grammar(engine, "json")
    engine.ask("load-0", 200, 4)
    until = time.monotonic() + 3600
    while time.monotonic() < until:
        engine.turn()
        time.sleep(0.1)  # so that none of the four ends meanwhile
        fetched = engine.scheduler.finished_recving_kv_req_ids
        for request in engine.scheduler.requests.values():
            if request.status.name == "WAITING_FOR_REMOTE_KVS" and request.request_id not in fetched:
                done = KVConnectorOutput(finished_recving={request.request_id})
                engine.scheduler._update_from_kv_xfer_finished(done)


def grammar_hangs(engine: Engine) -> None:
    """The compiler never returns a grammar, and others are served."""
    _ask_with_grammar(engine, "json", Future())
    engine.run(3600, engine.chat)


def pins(engine: Engine) -> None:
    """A connector pins blocks and unpins them every second, under load; the free of a request was skipped."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    tables = engine.scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
    engine.ask("forgotten", 400, 1000)
    engine.run(2)
    (name,) = [name for name in tables if name.startswith("forgotten")]
    tables.pop(name)
    engine.engine.abort_request(["forgotten"])
    engine.ask("stays", 100, 1900)
    engine.run(1)
    while True:
        pinned = [block for table in tables.values() for block in table if not block.is_null][:2]
        pool.touch(pinned)
        engine.run(0.5)
        pool.unpin_blocks(pinned, lambda _block: None)
        engine.run(0.5)


def late_heartbeats(engine: Engine) -> None:
    """`big` waits for blocks that a leak has; now and then the engine's thread makes no pass for 1.3 s."""
    for number in range(6):
        engine.ask(f"keep-{number}", 400, 2)
    engine.run(3)
    engine.ask("big", 1200, 4)
    while True:
        engine.run(4)
        time.sleep(1.3)


def _ask_with_grammar(engine: Engine, name: str, grammar: object = None) -> None:
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.request import RequestStatus
    from vllm.v1.structured_output.request import StructuredOutputRequest

    add = engine.scheduler.add_request

    def prepared(request: Any) -> None:
        request.structured_output_request = StructuredOutputRequest(StructuredOutputsParams(regex="a"))
        request.structured_output_request._grammar = grammar or object()
        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        add(request)

    engine.scheduler.add_request = prepared
    try:
        engine.ask(name, 40, 4)
    finally:
        del engine.scheduler.add_request


INCIDENTS_IN_ONE_PROCESS = (
    lost_blocks,
    pause_new,
    slow_early_step,
    full_instance,
    grammar_hangs,
    pins,
    late_heartbeats,
)


def main() -> None:
    model, event = sys.argv[1:]
    {each.__name__: each for each in INCIDENTS_IN_ONE_PROCESS}[event](Engine(model))


if __name__ == "__main__":
    main()
