"""The cost of the probe for a vLLM that serves: output tokens a second with it and without it, in turns.

    python -m benchmarks.vllm_probe_served --vllm-python PYTHON [--repeats N]

Two servers of the same vLLM with the same model run on the same core. One has the probe, which publishes without a
subscriber. A signal stops the one whose turn it is not. The load is `kvscope engine bench`, on the other core. The
noise is what two neighbouring turns of the server without the probe differ by.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.machine import machine
from benchmarks.vllm import BESIDE, SERVED, SETTINGS, Contender, Run, bench, free_port, save_checkpoint, turns
from benchmarks.vllm import wait_until_healthy as wait
from kvscope.lab.vllm_python import ROOT, announce, free_ports

WITHOUT, WITH = "without", "with"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, metavar="PYTHON", help="the Python that has vLLM")
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    os.environ.update(BESIDE)
    print(machine("msgspec"))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    runs: dict[str, list[Run]] = {WITHOUT: [], WITH: []}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        save_checkpoint(Path(directory))
        ports = {name: free_port() for name in runs}
        servers = {}
        for name in runs:
            if name == WITH:
                os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{announce(Path(directory))}"
                os.environ["KVSCOPE_EVENTS"] = f"tcp://127.0.0.1:{free_ports()}"
            command = [
                arguments.vllm_python,
                "-P",
                "-m",
                "vllm.entrypoints.cli.main",
                "serve",
                directory,
                "--enforce-eager",
                "--port",
                str(ports[name]),
                "--served-model-name",
                "model",
                *flags,
            ]
            servers[name] = stack.enter_context(Contender(command, cores=1))
            with servers[name].turn():
                wait(servers[name], ports[name])
        for turn in range(-1, arguments.repeats):  # the turn before the first warms up
            for name in turns(list(servers), turn):
                with servers[name].turn():
                    began = servers[name].cpu_s()
                    report = bench(ports[name], turn + 1)
                    if turn >= 0:
                        runs[name].append(Run(report["duration_s"], servers[name].cpu_s() - began))
    show(runs)


def show(runs: dict[str, list[Run]]) -> None:
    load = " ".join(f"--{name} {value}" for name, value in SERVED.items())
    tokens = SERVED["num-prompts"] * SERVED["output-len"]
    print(f"kvscope engine bench {load}; {len(runs[WITH])} turns each")
    print(f"{'':10}tokens/s   fastest   slowest   tokens a CPU second")
    for name, made in runs.items():
        rates = [tokens / run.seconds for run in made]
        per_cpu = statistics.median(tokens / run.cpu_s for run in made)
        print(f"{name:8}{statistics.median(rates):10.0f}{max(rates):10.0f}{min(rates):10.0f}{per_cpu:22.0f}")
    pairs = list(zip(runs[WITHOUT], runs[WITH], strict=True))
    neighbours = list(zip(runs[WITHOUT], runs[WITHOUT][1:], strict=False))
    for what, cost, noise in (
        ("seconds", [b.seconds / a.seconds - 1 for a, b in pairs], [b.seconds / a.seconds - 1 for a, b in neighbours]),
        ("CPU seconds", [b.cpu_s / a.cpu_s - 1 for a, b in pairs], [b.cpu_s / a.cpu_s - 1 for a, b in neighbours]),
    ):
        print(
            f"the probe takes {statistics.median(cost):+.1%} {what}, the median over pairs; two turns without it differ"
            f" by {statistics.median(map(abs, noise)):.1%}"
        )


if __name__ == "__main__":
    main()
