"""What the probe costs vLLM: CPU time a step of its scheduler, with the probe and without it, in turns.

    python -m benchmarks.vllm_probe --vllm-python PYTHON [--rounds N]

PYTHON is that of an environment with vLLM in it. There is no model behind the scheduler, so a step is schedule and
update_from_output alone, and every request decodes. The engine's own thread is what a step waits for; the drain thread
packs and sends beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

from benchmarks.machine import machine

RUNNING = (16, 64, 128)
AIM_US = 10
ROOT = Path(__file__).parent.parent
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
}
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, metavar="PYTHON", help="the Python that has vLLM")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    print(machine("msgspec"))
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(CONFIG))
        command = [arguments.vllm_python, "-m", "benchmarks.probe_process", directory, str(arguments.rounds)]
        done = subprocess.run(
            [*command, *map(str, RUNNING)], capture_output=True, text=True, cwd=ROOT, env=os.environ | ENVIRONMENT
        )
    if done.returncode:
        raise SystemExit(done.stderr)
    print("\nµs of CPU time a step, medians of", arguments.rounds)
    print(f"{'running':>8}{'without':>10}{'with':>8}{'probe':>8}{'share':>8}{'beside it, in the drain thread':>33}")
    for running, rounds in json.loads(done.stdout.splitlines()[-1]).items():
        off = statistics.median(without[0] for without, _ in rounds)
        on = statistics.median(probed[0] for _, probed in rounds)
        thread = statistics.median(probed[0] - without[0] for without, probed in rounds)
        drain = statistics.median(probed[1] - probed[0] for _, probed in rounds)
        aim = f" (aim: under {AIM_US} in the engine's thread)" if int(running) == RUNNING[0] else ""
        print(f"{running:>8}{off:10.0f}{on:8.0f}{thread:+8.1f}{thread / off:8.1%}{drain:+33.1f}{aim}")


if __name__ == "__main__":
    main()
