"""The cost of the probe for vLLM: CPU time a step of its scheduler, with the probe and without it, in turns.

    python -m benchmarks.vllm_probe --vllm-python PYTHON [--rounds N]

PYTHON is that of an environment with vLLM in it. No model is behind the scheduler, so a step is schedule and
update_from_output alone, and every request decodes. A step waits for the engine's own thread alone. The drain thread
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
AIM_US, AIM_SHARE = 8, 0.025
MAX_ROUNDS = 38
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
    parser.add_argument("--rounds", type=int, default=30, help=f"of 100 steps each, at most {MAX_ROUNDS}")
    arguments = parser.parse_args()
    if not 1 <= arguments.rounds <= MAX_ROUNDS:
        parser.error(f"--rounds is 1 to {MAX_ROUNDS}: the model's context ends there")
    print(machine("msgspec"))
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(CONFIG))
        command = [arguments.vllm_python, "-m", "benchmarks.probe_process", directory, str(arguments.rounds)]
        done = subprocess.run(
            [*command, *map(str, RUNNING)], capture_output=True, text=True, cwd=ROOT, env=os.environ | ENVIRONMENT
        )
    if done.returncode:
        raise SystemExit(done.stderr)
    print(f"\nµs of CPU time a step, medians of {arguments.rounds} rounds; in brackets the 95 % interval of the median")
    print(f"{'running':>8}{'without':>9}{'probe':>8}{'share':>9}{'beside it, in the drain thread':>47}")
    for running, rounds in json.loads(done.stdout.splitlines()[-1]).items():
        off = statistics.median(without[0] for without, _ in rounds)
        extra = sorted(probed[0] - without[0] for without, probed in rounds)
        low, high = interval_of_median(extra)
        probe, drain = statistics.median(extra), statistics.median(probed[1] - probed[0] for _, probed in rounds)
        aim = f"  aim: {AIM_US} µs, {AIM_SHARE:.1%}" if int(running) == RUNNING[0] else ""
        print(f"{running:>8}{off:9.0f}{probe:+8.1f} [{low:+.1f}, {high:+.1f}]{probe / off:8.1%}{drain:+16.1f}{aim}")


def interval_of_median(ordered: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median of that sorted sample, by the sign test's order statistics."""
    reach = round(0.98 * len(ordered) ** 0.5)
    middle = len(ordered) // 2
    return ordered[max(middle - reach, 0)], ordered[min(middle + reach, len(ordered) - 1)]


if __name__ == "__main__":
    main()
