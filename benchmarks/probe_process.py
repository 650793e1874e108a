"""What the probe costs vLLM's scheduler: run by a Python that has vLLM, for `benchmarks.vllm_probe`.

    PYTHONPATH=. PYTHON -m benchmarks.probe_process MODEL_DIRECTORY ROUNDS RUNNING…

For each RUNNING, two of vLLM's schedulers, one with the probe on it and a drain thread that publishes, decode as many
requests in turns of STEPS steps. Prints, for each round, the microseconds of CPU time a step took in the engine's
thread and in the whole process, without and with the probe: {RUNNING: [[[thread, process], [thread, process]], …]}.
"""

from __future__ import annotations

import gc
import json
import sys
import time

from kvscope.monitor.events.event_log import EventLog
from kvscope.monitor.probes.vllm.probe import Probe
from kvscope.monitor.publishing.publisher import Publisher
from tests.probes.bare_scheduler import Bare
from tests.probes.run_record import ENGINE

STEPS = 100


def main() -> None:
    model, rounds, *running = sys.argv[1:]
    print(json.dumps({count: measure(model, int(rounds), int(count)) for count in running}))


def measure(model: str, rounds: int, running: int) -> list[list[tuple[float, float]]]:
    tokens = STEPS * (rounds + 1)
    engines = [Bare(model, blocks=2 + running * (8 + tokens // 32), max_num_seqs=running) for _ in range(2)]
    log = EventLog(time)
    probe = Probe(engines[1].scheduler, log)
    publisher = Publisher(log, ENGINE, probe.vitals, events="tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*")
    probe.start()
    publisher.start()
    for engine in engines:
        for index in range(running):
            engine.arrive(f"r-{index}", engine.tokens(100), tokens)
        while any(request.num_output_tokens == 0 for request in engine.scheduler.requests.values()):
            run(engine, 1)
    gc.collect()
    gc.freeze()  # as vLLM does once it has started
    took = []
    for turn in range(rounds):
        pair = [(0.0, 0.0), (0.0, 0.0)]
        for which in (0, 1) if turn % 2 else (1, 0):
            pair[which] = run(engines[which], STEPS)
        took.append(pair)
    assert len(engines[1].scheduler.running) == running
    assert probe.hooks.errors == log.dropped_batches == 0
    publisher.close()
    return took


def run(engine: Bare, steps: int) -> tuple[float, float]:
    thread, process = time.thread_time_ns(), time.process_time_ns()
    for _ in range(steps):
        engine.schedule()
        engine.update()
    return (time.thread_time_ns() - thread) / steps / 1000, (time.process_time_ns() - process) / steps / 1000


if __name__ == "__main__":
    main()
