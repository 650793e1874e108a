"""Tokens a second, side by side in one run: what the event stream costs the engine, and the engine beside transformers.

    python -m benchmarks.throughput [--repeats N]

Everybody computes on one thread, the same weights (the tiny model's, saved as a checkpoint for transformers) and the
same prompts, greedily. Contenders take turns, so that a busy moment of the machine meets all of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

# Before torch is imported, which reads it then.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

REQUESTS = 32
PROMPT_LENS = (16, 96)
OUTPUT_TOKENS = 96
ENGINE_TURNS = 5
"""The engine's contenders differ by little: so many turns each for one of transformers'."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--reader", nargs=2, metavar=("EVENTS", "REPLAY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.reader:
        read(*arguments.reader)
    else:
        compare(arguments.repeats)


def compare(repeats: int) -> None:
    import torch

    from benchmarks.machine import machine

    torch.set_num_threads(1)
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(*PROMPT_LENS))] for _ in range(REQUESTS)]
    engines = engine_contenders(prompts)
    print(machine("torch", "transformers"))
    shortest, longest = PROMPT_LENS
    print(f"tiny model, {REQUESTS} requests of {shortest} to {longest} tokens, {OUTPUT_TOKENS} new each, one thread")
    with tempfile.TemporaryDirectory() as directory:
        others = transformers_contenders(prompts, Path(directory))
        for run in [*engines.values(), *others.values()]:
            run()  # first runs allocate and compile
        seconds: dict[str, list[float]] = {name: [] for name in [*engines, *others]}
        for _ in range(repeats):
            for turn in range(ENGINE_TURNS):
                # Whoever goes first is another one each time.
                names = list(engines)
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    seconds[name].append(engines[name]())
            for name, run in others.items():
                seconds[name].append(run())
    report(seconds)


def report(seconds: dict[str, list[float]]) -> None:
    rate = {name: REQUESTS * OUTPUT_TOKENS / statistics.median(times) for name, times in seconds.items()}
    print(f"\n{'':44}tokens/s   fastest   slowest   runs")
    for name, times in seconds.items():
        best, worst = (REQUESTS * OUTPUT_TOKENS / pick(times) for pick in (min, max))
        print(f"{name:42}{rate[name]:10.0f}{best:10.0f}{worst:10.0f}{len(times):7}")
    print()
    off = seconds["engine, stream off"]
    for name in ("engine, stream on", "engine, stream on, a reader attached"):
        cost = statistics.median(on / without - 1 for on, without in zip(seconds[name], off, strict=True))
        print(f"{name}: {cost:+.1%} of the time with the stream off (aim: within 2 %)")
    for name in ("transformers generate, static batch", "transformers generate_batch"):
        aim = " (aim: ahead)" if name.endswith("generate_batch") else ""
        print(f"engine, stream on, beside {name}: {rate['engine, stream on'] / rate[name]:.2f} times{aim}")


def engine_contenders(prompts: list[list[int]]) -> dict[str, Callable[[], float]]:
    """Return runs of the engine's own loop, in seconds, without the time to start and stop."""
    from kvscope.engine.config import EngineConfig
    from kvscope.engine.core.assembly import EventStream
    from kvscope.engine.core.engine_core import EngineCore
    from kvscope.engine.models import load_model
    from kvscope.engine.requests.request import SamplingParams

    config = EngineConfig()
    loaded = load_model(config)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    anywhere = EventStream("bench@127.0.0.1:0/0", "tcp://127.0.0.1:*", "tcp://127.0.0.1:*")

    def run(stream: EventStream | None, reader: bool = False) -> float:
        core = EngineCore(config, loaded, stream)
        process = None
        if reader:
            assert core.publisher is not None
            process = start_reader(core.publisher.events_endpoint, core.publisher.replay_endpoint)
        began = time.perf_counter()
        for index, prompt in enumerate(prompts):
            core.submit(f"r-{index}", prompt, params)
        tokens = 0
        while core.in_flight:
            tokens += sum(len(output.token_ids) for output in core.step())
        took = time.perf_counter() - began
        core.close()
        if process is not None:
            stop_reader(process)
        assert tokens == REQUESTS * OUTPUT_TOKENS
        return took

    return {
        "engine, stream off": lambda: run(None),
        "engine, stream on": lambda: run(anywhere),
        "engine, stream on, a reader attached": lambda: run(anywhere, reader=True),
    }


def start_reader(events: str, replay: str) -> subprocess.Popen[str]:
    """Start a process that folds the engine's events. Return when it has the state."""
    command = [sys.executable, "-m", "benchmarks.throughput", "--reader", events, replay]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def stop_reader(process: subprocess.Popen[str]) -> None:
    out, _ = process.communicate("\n")
    report = json.loads(out)
    assert report["steps"] >= OUTPUT_TOKENS, report
    assert report["lost"] == 0, report


def read(events: str, replay: str) -> None:
    """Apply the stream to a ledger until a line comes in, and print the counts."""
    import select

    from kvscope.monitor.ledger.engine_ledger import EngineLedger
    from kvscope.monitor.sources.live_stream import LiveStream

    stream = LiveStream(events, replay)
    ledger: EngineLedger | None = None
    stopped = False
    while not stopped:
        stopped = bool(select.select([sys.stdin], [], [], 0)[0])
        for frame, _ in stream.receive(0.1):
            if ledger is None:
                ledger = EngineLedger(frame.engine)
                print("in step", flush=True)
            ledger.apply(frame)
    stream.close()
    assert ledger is not None
    print(json.dumps({"steps": ledger.state.last_step + 1, "lost": sum(loss.batches for loss in ledger.losses)}))


def transformers_contenders(prompts: list[list[int]], directory: Path) -> dict[str, Callable[[], float]]:
    """Return runs of transformers with the tiny model's weights, in seconds. generate_batch keeps its manager between
    runs.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, LlamaConfig
    from transformers.utils import logging as transformers_logging

    from kvscope.engine.models import tiny

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    LlamaConfig(**{**tiny.CONFIG, "eos_token_id": None, "bos_token_id": None}).save_pretrained(directory)
    save_file(tiny.weights(seed=0), directory / "model.safetensors", metadata={"format": "pt"})
    static = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    continuous = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    greedy = {"max_new_tokens": OUTPUT_TOKENS, "do_sample": False, "pad_token_id": 0}

    # 32,768 tokens, as in the engine. It takes 90 % of the machine's memory otherwise.
    as_much = ContinuousBatchingConfig(num_blocks=128, page_size=256)

    def generate() -> float:
        began = time.perf_counter()
        out = static.generate(ids, attention_mask=mask, generation_config=GenerationConfig(**greedy))
        took = time.perf_counter() - began
        assert out.shape == (REQUESTS, width + OUTPUT_TOKENS)
        return took

    def generate_batch() -> float:
        # No token is -1, so nothing ends early.
        config = GenerationConfig(**greedy, eos_token_id=-1)
        began = time.perf_counter()
        out = continuous.generate_batch(
            prompts, generation_config=config, continuous_batching_config=as_much, persistent_manager=True
        )
        took = time.perf_counter() - began
        assert sum(len(result.generated_tokens) for result in out.values()) == REQUESTS * OUTPUT_TOKENS
        return took

    return {"transformers generate, static batch": generate, "transformers generate_batch": generate_batch}


if __name__ == "__main__":
    main()
