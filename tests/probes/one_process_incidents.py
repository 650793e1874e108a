"""Incidents on vLLM's LLMEngine in one process, beside those of tests.probes.one_process_engine.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 KVSCOPE_EVENTS=ADDRESS PYTHON -m tests.probes.one_process_incidents MODEL EVENT

Runs until it is killed.
"""

from __future__ import annotations

import sys

from tests.probes.one_process_engine import Engine


def pause_new(engine: Engine) -> None:
    """The operator holds new requests back while none runs."""
    engine.run(2, engine.chat)
    engine.run(2)
    states = type(engine.scheduler._pause_state)
    engine.scheduler.set_pause_state(states.PAUSED_NEW)
    for number in range(2):
        engine.ask(f"new-{number}", 30, 4)
    engine.run(3600)


INCIDENTS_IN_ONE_PROCESS = (pause_new,)


def main() -> None:
    model, event = sys.argv[1:]
    {each.__name__: each for each in INCIDENTS_IN_ONE_PROCESS}[event](Engine(model))


if __name__ == "__main__":
    main()
