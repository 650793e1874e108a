"""Random runs of vLLM's LLMEngine with engine core, scheduler, executor and model in one process, under the probe.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 PYTHON -m tests.probes.one_process_runs MODEL OUT '{"seed": 1, "steps": 200, …}'

After each step it writes to OUT what the probe reported and what vLLM's tables hold (run_record.py).
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from tests.probes.run_record import RunRecord

PAUSED_STEPS = 4


class EngineRun:
    """One engine and the random requests that it gets."""

    def __init__(self, model: str, out: Path, settings: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.rng = random.Random(settings.pop("seed"))
        self.steps: int = settings.pop("steps")
        self.acts: list[str] = settings.pop("acts")
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=model,
                load_format="dummy",
                skip_tokenizer_init=True,
                enforce_eager=True,
                dtype="float32",
                kv_cache_memory_bytes=64 << 20,
                max_model_len=1024,
                max_num_batched_tokens=256,
                **settings,
            )
        )
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.prefixes = [self.tokens(150) for _ in range(3)]
        self.came = 0
        self.resume_in = 0
        self.sessions: list[str] = []
        self.record = RunRecord(self.scheduler, out.open("wb"))

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(1, 300) for _ in range(count)]

    def lead(self) -> None:
        """Steps until there were enough and an audit has ended."""
        method = self.scheduler.schedule

        def traced(*args: Any, **kwargs: Any) -> Any:
            with self.record.decisions.traced():
                return method(*args, **kwargs)

        self.scheduler.schedule = traced
        if "sessions" in self.acts:
            self.open_session()
        done = 0
        while done < self.steps or not self.record.is_audited():
            self.act()
            if self.scheduler.has_requests():
                self.engine.step()
            self.record.write(after_schedule=True)
            done += 1

    def act(self) -> None:
        rng = self.rng
        if len(self.scheduler.requests) < 12 and rng.random() < 0.3:
            name = rng.choice(("keep", "load", "slow", "r", "r")) if self.scheduler.connector is not None else "r"
            self.ask(f"{name}-{self.came}", rng.choice(self.prefixes)[: rng.randrange(1, 151)])
        if rng.random() < 0.02 and self.scheduler.requests:
            self.core.abort_requests([rng.choice(list(self.scheduler.requests))])
        if self.resume_in:
            self.resume_in -= 1
            if not self.resume_in:
                self.core.resume_scheduler()
        elif "pauses" in self.acts and rng.random() < 0.03:
            self.core.pause_scheduler(mode="keep", clear_cache=False)
            self.resume_in = PAUSED_STEPS
        if "resets" in self.acts and rng.random() < 0.02:
            self.engine.reset_prefix_cache()
        if "sessions" in self.acts:
            self.talk()

    def ask(self, name: str, prefix: list[int]) -> None:
        from vllm import SamplingParams

        rng = self.rng
        params = SamplingParams(temperature=0, max_tokens=rng.randrange(1, 60), ignore_eos=True, detokenize=False)
        prompt = {"prompt_token_ids": prefix + self.tokens(rng.randrange(1, 200))}
        self.engine.add_request(name, prompt, params, priority=rng.randrange(3) if self.is_by_priority() else 0)
        self.came += 1

    def is_by_priority(self) -> bool:
        return bool(self.scheduler.policy.name == "PRIORITY")

    def talk(self) -> None:
        """Sessions whose clients send their prompt in parts."""
        rng = self.rng
        self.sessions = [name for name in self.sessions if name in self.scheduler.requests]
        if len(self.sessions) < 2 and rng.random() < 0.1:
            self.open_session()
        for name in [name for name in self.sessions if rng.random() < 0.05]:
            last = rng.random() < 0.3 or self.scheduler.requests[name].num_tokens > 600
            self.part(name, not last)
            if last:
                self.sessions.remove(name)

    def open_session(self) -> None:
        self.sessions.append(f"session-{self.came}-{self.rng.randrange(1 << 32):08x}")
        self.part(self.sessions[-1], True)

    def part(self, name: str, resumable: bool) -> None:
        """As a client of the front end's streaming interface sends it."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self.came += 1
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        params.update_from_generation_config({}, 0)
        request = Request(
            request_id=name,
            prompt_token_ids=self.tokens(self.rng.randrange(1, 80)),
            sampling_params=params,
            pooling_params=None,
            block_hasher=self.core.request_block_hasher,
            resumable=resumable,
        )
        self.core.add_request(request)


def main() -> None:
    model, out, settings = sys.argv[1:]
    EngineRun(model, Path(out), json.loads(settings)).lead()


if __name__ == "__main__":
    main()
