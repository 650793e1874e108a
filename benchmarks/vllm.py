"""The engine beside vLLM on the same CPU, in one run: the same checkpoint, cores, settings, prompts, and tokens.

    python -m benchmarks.vllm --vllm-python PYTHON [--repeats N] [--cores N]

PYTHON is that of an environment with vLLM for the CPU in it (docs/benchmarks.md is about 0.32.0). Nothing of ours needs
to be installed there. The model is a random Qwen3 of 4 million parameters. All compute greedily in fp32 with
OMP_NUM_THREADS=1, in blocks of 32 tokens, on the same --cores.

Offline is one call of generate with all prompts, transformers' generate_batch beside it. Served is `kvscope engine
bench` against both servers. Contenders take turns, with new prompts in each, so that no prefix cache helps. A signal
stops the others. CPU seconds are those of all processes of a contender, and mean more than tokens a second on a machine
that has other work. Where tokens differ there is no result: the run ends and reports where.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import psutil

from benchmarks.machine import machine

BESIDE = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""The environment of all contenders. vLLM would otherwise choose threads and cores itself."""
REQUESTS = 32
PROMPT_LENS = (16, 96)
OUTPUT_TOKENS = 96
VOCAB_SIZE = 320
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 32,
    "num_gpu_blocks_override": 512,
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 512,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
}
SERVED = {"num-prompts": 64, "max-concurrency": 16, "input-len": 64, "output-len": 64}
PATIENCE_S = 300
OURS, VLLM, TRANSFORMERS = "kvscope", "vllm", "transformers"
FILE = Path(__file__).with_name("generate_process.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, metavar="PYTHON", help="the Python that has vLLM")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cores", type=int, default=1, help="cores that each contender may use (1)")
    arguments = parser.parse_args()
    os.environ.update(BESIDE)
    found = subprocess.run(
        [arguments.vllm_python, "-P", "-c", "from importlib.metadata import version; print(version('vllm'))"],
        capture_output=True,
        text=True,
    )
    if found.returncode:
        parser.error(f"--vllm-python {arguments.vllm_python} has no vLLM: {found.stderr.strip().splitlines()[-1]}")
    if not 1 <= arguments.cores <= len(os.sched_getaffinity(0)):
        parser.error(f"--cores is {arguments.cores} and must be 1 to {len(os.sched_getaffinity(0))}")
    with tempfile.TemporaryDirectory() as directory:
        parameters = save_checkpoint(Path(directory))
        print(f"{machine('torch', 'transformers')}, vLLM {found.stdout.strip()}")
        print(
            f"Qwen3 of {parameters / 1e6:.1f} M parameters, fp32, greedy, blocks of {SETTINGS['block_size']} tokens;"
            f" each contender on {arguments.cores} core{'s' * (arguments.cores > 1)}, OMP_NUM_THREADS=1"
        )
        pythons = {OURS: sys.executable, VLLM: arguments.vllm_python, TRANSFORMERS: sys.executable}
        offline(pythons, directory, arguments)
        served(pythons, directory, arguments)


def save_checkpoint(directory: Path) -> int:
    """Write a random Qwen3, of heads of 64, and a tokenizer of one token a word. Return the number of its
    parameters.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=512,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():  # as they are initialised, logits are almost flat
            weight.add_(torch.randn_like(weight) * 0.05)
    model.save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB_SIZE)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(directory)
    return int(model.num_parameters())


# -------------------------------------------------------------------- offline


def offline(pythons: dict[str, str], checkpoint: str, arguments: argparse.Namespace) -> None:
    runs: dict[str, list[Run]] = {name: [] for name in pythons}
    with ExitStack() as stack:
        contenders = {
            name: stack.enter_context(
                Contender(
                    [python, "-P", str(FILE), name, checkpoint, json.dumps(SETTINGS)], arguments.cores, talks=True
                )
            )
            for name, python in pythons.items()
        }
        for turn in range(-1, arguments.repeats):  # the turn before the first allocates and compiles
            prompts = draw_prompts(turn)
            tokens = {}
            for name in turns(list(contenders), turn):
                contender = contenders[name]
                with contender.turn():
                    began = contender.cpu_s() if turn >= 0 else 0.0
                    answer = contender.ask({"prompts": prompts, "max_tokens": OUTPUT_TOKENS})
                    if turn >= 0:
                        runs[name].append(Run(answer["seconds"], contender.cpu_s() - began))
                tokens[name] = answer["tokens"]
            require_same(tokens)
    shortest, longest = PROMPT_LENS
    same = arguments.repeats * REQUESTS
    print(
        f"\noffline: {REQUESTS} prompts of {shortest} to {longest} tokens, {OUTPUT_TOKENS} new each;"
        f" {same} of {same} outputs are the same in all"
    )
    show(runs, REQUESTS * OUTPUT_TOKENS)


LABELS = {OURS: "kvscope", VLLM: "vLLM", TRANSFORMERS: "transformers generate_batch"}


def draw_prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    lengths = [rng.randint(*PROMPT_LENS) for _ in range(REQUESTS)]
    return [[rng.randrange(1, VOCAB_SIZE) for _ in range(length)] for length in lengths]


# -------------------------------------------------------------------- served


def served(pythons: dict[str, str], checkpoint: str, arguments: argparse.Namespace) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    commands = {
        OURS: [pythons[OURS], "-m", "kvscope.engine", "serve", checkpoint, "--events", "tcp://127.0.0.1:*"],
        VLLM: [pythons[VLLM], "-P", "-m", "vllm.entrypoints.cli.main", "serve", checkpoint, "--enforce-eager"],
    }
    ports = {name: free_port() for name in commands}
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    with ExitStack() as stack:
        contenders, texts = {}, {}
        for name, command in commands.items():
            where = ["--port", str(ports[name]), "--served-model-name", "model"]
            contender = stack.enter_context(Contender([*command, *where, *flags], arguments.cores))
            with contender.turn():
                wait_until_healthy(contender, ports[name])
                texts[name] = texts_of(ports[name])
            contenders[name] = contender
        require_same(texts)
        for turn in range(-1, arguments.repeats):
            for name in turns(list(contenders), turn):
                with contenders[name].turn():
                    began = contenders[name].cpu_s()
                    report = bench(ports[name], turn + 1)
                    if turn >= 0:
                        runs[name].append(Run(report["duration_s"], contenders[name].cpu_s() - began))
                        reports[name].append(report)
    load = " ".join(f"--{name} {value}" for name, value in SERVED.items())
    same = len(texts[OURS])
    print(f"\nserved: kvscope engine bench {load};\n{same} of {same} answers to others are the same in both")
    show(runs, SERVED["num-prompts"] * SERVED["output-len"])
    for name, made in reports.items():
        first, between = (statistics.median(r[field]["p50"] for r in made) for field in ("ttft_ms", "inter_token_ms"))
        print(f"{LABELS[name]}: time to first token {first:.0f} ms, between tokens {between:.2f} ms (medians)")


def bench(port: int, seed: int) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "kvscope.engine",
        "bench",
        "--base-url",
        f"http://127.0.0.1:{port}",
        "--format",
        "json",
    ]
    load = [f"--{name}={value}" for name, value in SERVED.items()]
    done = subprocess.run([*command, *load, "--seed", str(seed)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the load on port {port} failed: {done.stdout}{done.stderr}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def texts_of(port: int) -> list[str]:
    """Return its answers to some prompts. Words are tokens, so equal texts are equal tokens."""
    body = {"model": "model", "prompt": draw_prompts(-1)[:8], "max_tokens": OUTPUT_TOKENS, "temperature": 0.0}
    answer = httpx2.post(
        f"http://127.0.0.1:{port}/v1/completions", json=body | {"ignore_eos": True}, timeout=PATIENCE_S
    )
    return [choice["text"].strip() for choice in answer.raise_for_status().json()["choices"]]


def wait_until_healthy(contender: Contender, port: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until and contender.process.poll() is None:
        with contextlib.suppress(httpx2.HTTPError):
            if httpx2.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == httpx2.codes.OK:
                return
        time.sleep(0.2)
    raise contender.failed()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port


# -------------------------------------------------------------------- both


class Contender:
    """A process, and what it starts, on the first `cores` of the cores that we may use. It runs inside `turn` only."""

    def __init__(self, command: list[str], cores: int, *, talks: bool = False) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        ours = os.sched_getaffinity(0)
        os.sched_setaffinity(0, sorted(ours)[:cores])  # inherited
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if talks else self._log,
                stderr=self._log,
                text=True,
                cwd=FILE.parent.parent,
                start_new_session=True,
            )
        finally:
            os.sched_setaffinity(0, ours)

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self._log.close()

    @contextmanager
    def turn(self) -> Iterator[None]:
        os.killpg(self.process.pid, signal.SIGCONT)
        yield
        os.killpg(self.process.pid, signal.SIGSTOP)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """One line of JSON to its standard input for one from its standard output."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise self.failed()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def cpu_s(self) -> float:
        """Seconds of CPU that its processes, all of which live, have taken until now."""
        first = psutil.Process(self.process.pid)
        return sum(sum(one.cpu_times()[:2]) for one in [first, *first.children(recursive=True)])

    def failed(self) -> SystemExit:
        self._log.seek(0)
        return SystemExit(f"{self.process.args!r} ended, or does not answer:\n{self._log.read()}")


class Run(NamedTuple):
    """One turn of a contender."""

    seconds: float
    cpu_s: float


def show(runs: dict[str, list[Run]], tokens: int) -> None:
    """Output tokens a second of each, and how many times those of the others ours are: the median over turns."""
    print(f"{'':32}tokens/s   fastest   slowest   tokens a CPU second")
    for name, made in runs.items():
        rates = [tokens / run.seconds for run in made]
        per_cpu = statistics.median(tokens / run.cpu_s for run in made)
        print(f"{LABELS[name]:30}{statistics.median(rates):10.0f}{max(rates):10.0f}{min(rates):10.0f}{per_cpu:22.0f}")
    for name in list(runs)[1:]:
        pairs = list(zip(runs[name], runs[OURS], strict=True))
        by_time = statistics.median(theirs.seconds / ours.seconds for theirs, ours in pairs)
        by_cpu = statistics.median(theirs.cpu_s / ours.cpu_s for theirs, ours in pairs)
        print(f"kvscope beside {LABELS[name]}: {by_time:.2f} times; by the CPU seconds {by_cpu:.2f} times")


def require_same(answers: Mapping[str, Sequence[Any]]) -> None:
    """End the run where one contender's answers are not another's."""
    for name, given in answers.items():
        for index, (one, other) in enumerate(zip(answers[OURS], given, strict=True)):
            if one != other:
                raise SystemExit(
                    f"no figures: prompt {index} gives {one} in {LABELS[OURS]} and {other} in {LABELS[name]}"
                )


def turns(names: list[str], turn: int) -> list[str]:
    """Return the names with another one first each time."""
    place = turn % len(names)
    return names[place:] + names[:place]


if __name__ == "__main__":
    main()
