"""How long the engine's `/health` takes while long prompts arrive: none, and 1, 4 and 40 MB, one after another.

    python -m benchmarks.long_prompts [--seconds N]

The model's length is 4 million tokens, so that 1 and 4 MB are tokenized in full. 40 MB are beyond the server's limit of
a body. The prompts' client is a process of its own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx2
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from benchmarks.machine import machine
from tests.engine import checkpoints
from tests.engine.process import EngineProcess

MEGABYTES = (0, 1, 4, 40)
AIM_MS = 100.0
EVERY_S = 0.01
CLIENT = """
import sys, httpx2
url, size = sys.argv[1], int(sys.argv[2])
body = {"prompt": ("few words " * (size // 10 + 1))[:size], "max_tokens": 1}
with httpx2.Client(timeout=120) as client:
    while True:
        try:
            print(client.post(url, json=body).status_code, flush=True)
        except httpx2.HTTPError as error:
            print(type(error).__name__, flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    seconds = parser.parse_args().seconds
    print(machine("starlette", "uvicorn", "tokenizers"))
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        with EngineProcess("--model", folder, "--num-gpu-blocks-override", "65") as engine:
            print(
                f"\n{'prompts':>10}{'asked':>8}{'p50, ms':>10}{'p99, ms':>10}{'worst, ms':>11}   answers to the prompts"
            )
            for megabytes in MEGABYTES:
                measure(engine.url, megabytes, seconds)
    print(f"\naim: p99 within {AIM_MS:.0f} ms")


def save_model(directory: Path) -> None:
    """Save a tiny model of 4 million tokens, with a tokenizer that splits words into letters."""
    checkpoints.save("llama", directory)
    checkpoints.edit(directory, max_position_embeddings=4_000_000)
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel()
    words.train_from_iterator(["a few words"], trainers.BpeTrainer(vocab_size=64))
    words.save(str(directory / "tokenizer.json"))


def measure(url: str, megabytes: int, seconds: float) -> None:
    """Print a line: the times of `/health` while prompts of that size arrive."""
    command = [sys.executable, "-c", CLIENT, f"{url}/v1/completions", str(megabytes * 1_000_000)]
    prompts = subprocess.Popen(command, stdout=subprocess.PIPE, text=True) if megabytes else None
    took_ms: list[float] = []
    try:
        with httpx2.Client(timeout=120) as client:
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s:
                began_s = time.perf_counter()
                client.get(f"{url}/health").raise_for_status()
                took_ms.append((time.perf_counter() - began_s) * 1e3)
                time.sleep(EVERY_S)
    finally:
        answers = ""
        if prompts is not None:
            prompts.kill()
            lines = prompts.communicate()[0].split()
            answers = ", ".join(f"{lines.count(each)} x {each}" for each in sorted(set(lines)))
    p50, p99 = statistics.median(took_ms), statistics.quantiles(took_ms, n=100)[98]
    name = f"{megabytes} MB" if megabytes else "none"
    print(f"{name:>10}{len(took_ms):>8}{p50:>10.1f}{p99:>10.1f}{max(took_ms):>11.1f}   {answers}", flush=True)


if __name__ == "__main__":
    main()
