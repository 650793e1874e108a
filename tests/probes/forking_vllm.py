"""Forks processes that have imported vLLM, which takes 15 s of CPU time (tests.probes.forked_vllm has the orders)."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from typing import Any


def become(order: dict[str, Any]) -> None:
    """Run a module's main in this fork."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream, target in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(target, stream)
    os.environ.update(order["environment"])
    sys.argv = [order["module"], *order["arguments"]]
    importlib.import_module(order["module"]).main()


def main() -> None:
    """Fork a process for each line of standard input, and answer its number."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what vLLM prints is no answer
    for module in ("engine.llm_engine", "worker.cpu_worker", "worker.cpu_model_runner"):
        importlib.import_module(f"vllm.v1.{module}")
    importlib.import_module("vllm.model_executor.models.llama")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a fork that ends is gone at once
    for line in sys.stdin:
        fork = os.fork()
        if not fork:
            os.close(answers)
            become(json.loads(line))
            return
        os.write(answers, f"{fork}\n".encode())


if __name__ == "__main__":
    main()
