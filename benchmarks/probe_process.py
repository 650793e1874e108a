"""The cost of the probe for vLLM's scheduler: run by a Python that has vLLM, for `benchmarks.vllm_probe`.

    PYTHONPATH=. PYTHON -m benchmarks.probe_process MODEL_DIRECTORY ROUNDS RUNNING…

For each RUNNING, two of vLLM's schedulers, one with the probe on it and a drain thread that publishes, decode as many
requests, in turns of TURN steps: on a machine shared with others, what is measured far apart differs by more than the
probe costs. Prints, for each round of STEPS steps of both, the microseconds of CPU time a step took in the engine's
thread and in the whole process, without and with the probe: {RUNNING: [[[thread, process], [thread, process]], …]}.
"""

from __future__ import annotations

import gc
import json
import sys
import time

from kvscope.monitor.contract.event_log import EventLog
from kvscope.monitor.probes.publisher import Publisher
from kvscope.monitor.probes.vllm.probe import Probe
from tests.probes.bare_scheduler import Bare
from tests.probes.run_record import ENGINE

STEPS = 100
TURN = 20


def main() -> None:
    model, rounds, *running = sys.argv[1:]
    print(json.dumps({count: measure(model, int(rounds), int(count)) for count in running}))


def measure(model: str, rounds: int, running: int) -> list[list[list[float]]]:
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
    for _ in range(rounds):
        pair = [[0.0, 0.0], [0.0, 0.0]]
        for turn in range(STEPS // TURN):
            for which in (0, 1) if turn % 2 else (1, 0):
                thread, process = run(engines[which], TURN)
                pair[which][0] += thread / STEPS
                pair[which][1] += process / STEPS
        took.append(pair)
    assert len(engines[1].scheduler.running) == running
    assert probe.hooks.errors == log.dropped_batches == 0
    publisher.close()
    return took


def run(engine: Bare, steps: int) -> tuple[float, float]:
    """Run that many steps. Return the microseconds of CPU time in this thread and in the process."""
    thread, process = time.thread_time_ns(), time.process_time_ns()
    for _ in range(steps):
        engine.schedule()
        engine.update()
    return (time.thread_time_ns() - thread) / 1000, (time.process_time_ns() - process) / 1000


if __name__ == "__main__":
    main()
