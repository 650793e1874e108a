"""Random loads through vLLM's scheduler and kvscope's, step by step: run by a Python that has vLLM.

    PYTHONPATH=. PYTHON -m tests.probes.differential MODEL_DIRECTORY FIRST COUNT [own]

kvscope's scheduler follows VLLM_RULES or, with `own`, its own rules, which differ.
Prints a line of JSON for each load: its settings, the steps that were compared, and the first difference, if any. After
each step these are compared: the tokens scheduled of each request, in order, the queues of running and waiting
requests, the blocks of each request, free blocks, and preemptions.
"""

from __future__ import annotations

import json
import random
import sys
import zlib
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from kvscope.engine.bench.clock import VirtualClock
from kvscope.engine.blocks.block_pool import BlockPool
from kvscope.engine.blocks.kv_cache_manager import KVCacheManager
from kvscope.engine.blocks.prefix_hashes import PrefixHasher
from kvscope.engine.faults import Faults
from kvscope.engine.requests.request import Request, SamplingParams
from kvscope.engine.scheduling.scheduler import Scheduler
from kvscope.engine.scheduling.scheduler_state import OWN_RULES, VLLM_RULES, SchedulingRules
from kvscope.lab.on_vllm.cache_groups import cache_config, takes
from kvscope.lab.on_vllm.scheduler_maker import configured, save_config, scheduler_of
from kvscope.monitor.contract.event_log import SilentLog

STEPS: Final = 300
MOST_REQUESTS: Final = 60
"""In both schedulers at once: a longer queue takes time to compare and shows nothing new."""
SAMPLED: Final = (3, 300)
STOP_TOKEN: Final = 2


@dataclass(frozen=True)
class RandomLoad:
    """Settings of both schedulers, and the load. rate: arrivals in a step, on average."""

    seed: int
    blocks: int
    block_size: int
    max_num_seqs: int
    max_tokens: int
    asynchronous: bool
    by_priority: bool
    caching: bool
    window: int
    prompt: int
    output: int
    rate: float
    leave: float
    prefixes: int

    @property
    def max_model_len(self) -> int:
        """At most what the pool takes of one request."""
        return min(4096, (self.blocks - 1) // (2 if self.window else 1) * self.block_size)


def draw_random_load(seed: int) -> RandomLoad:
    """Draw load number `seed`: half of them asynchronous, a third by priority, most short of blocks at times."""
    rng = random.Random(f"differential {seed}")
    block_size = rng.choice((1, 4, 16, 16, 32, 128))
    blocks = rng.choice((24, 40, 80, 150, 400))
    pool = (blocks - 1) * block_size
    seqs = rng.choice((1, 4, 16, 16, 64))
    prompt = max(2, int(pool * rng.choice((0.02, 0.1, 0.3))))
    return RandomLoad(
        seed=seed,
        blocks=blocks,
        block_size=block_size,
        max_num_seqs=seqs,
        max_tokens=max(seqs, rng.choice((16, 64, 256, 2048))),
        asynchronous=seed % 2 == 1,
        by_priority=rng.random() < 1 / 3,
        caching=rng.random() < 0.75,
        window=rng.choice((0, 0, 0, 2 * block_size, 5 * block_size + 3)),
        prompt=prompt,
        output=max(2, int(pool * rng.choice((0.05, 0.2, 0.5)))),
        rate=rng.choice((0.05, 0.3, 1.0)),
        leave=rng.choice((0.0, 0.002, 0.02)),
        prefixes=rng.choice((0, 2, 5)),
    )


def sampled_token(name: str, place: int) -> int:
    """Return the token of a request at a place of its output, for both schedulers."""
    return SAMPLED[0] + zlib.crc32(f"{name} {place}".encode()) % (SAMPLED[1] - SAMPLED[0])


class OwnSide:
    """kvscope's scheduler under some rules."""

    def __init__(self, load: RandomLoad, rules: SchedulingRules) -> None:
        self.clock = VirtualClock()
        log = SilentLog(self.clock)
        self.pool = BlockPool(load.blocks, log, keeps_duplicates=rules.settles_when_planned)
        windows = (None, load.window) if load.window else (None,)
        ahead = 2 if load.asynchronous else 1
        self.manager = KVCacheManager(
            self.pool,
            load.block_size,
            PrefixHasher(load.block_size, b"differential") if load.caching else None,
            Faults(),
            windows,
            ahead * load.max_tokens,
            settles_when_planned=rules.settles_when_planned,
        )
        self.scheduler = Scheduler(
            self.manager,
            log,
            max_num_seqs=load.max_num_seqs,
            max_num_batched_tokens=load.max_tokens,
            max_model_len=load.max_model_len,
            policy="priority" if load.by_priority else "fcfs",
            rules=rules,
        )
        self.numbers: dict[str, int] = {}
        self.in_flight: deque[Any] = deque()

    def add(self, name: str, prompt: list[int], wanted: int, priority: int) -> None:
        """Take a request in."""
        number = self.numbers[name] = len(self.numbers)
        params = SamplingParams(max_tokens=wanted, ignore_eos=True)
        self.scheduler.add(Request(number, name, prompt, params, priority, number))

    def abort(self, name: str) -> None:
        """End a request."""
        self.scheduler.abort(self.numbers[name])

    def plan(self) -> list[tuple[str, int]]:
        """Plan a step: request and tokens, in order."""
        plan = self.scheduler.schedule()
        self.in_flight.append(plan)
        return [(share.request.id, share.num_tokens) for share in plan.shares]

    def complete(self) -> None:
        """Complete the oldest step in flight."""
        plan = self.in_flight.popleft()
        if not plan.shares:
            return
        samples = [share.request for share in plan.shares if share.samples]
        tokens = [sampled_token(request.id, len(request.output_token_ids)) for request in samples]
        self.scheduler.complete(plan, tokens, [token == STOP_TOKEN for token in tokens])

    def state(self) -> dict[str, Any]:
        """Return what is compared."""
        scheduler = self.scheduler
        return {
            "running": [request.id for request in scheduler.running],
            "waiting": [request.id for request in scheduler.waiting],
            "free": self.pool.num_free,
            "blocks": {
                request.id: [len(held) for held in self.manager.held(request.number)]
                for request in scheduler.requests.values()
                if request.number in self.manager.tables
            },
            "preemptions": {r.id: r.num_preemptions for r in scheduler.requests.values()},
        }


class VllmSide:
    """vLLM's scheduler."""

    def __init__(self, load: RandomLoad, directory: Path) -> None:
        groups: tuple[tuple[Any, ...], ...] = (("full",), ("sliding", load.window)) if load.window else (("full",),)
        longest = load.max_model_len
        config = configured(
            str(save_config(directory, max(longest, 16))),
            load.block_size,
            load.max_num_seqs,
            load.max_tokens,
            groups,
            0,
            max(longest, 16),
            scheduling_policy="priority" if load.by_priority else "fcfs",
            enable_prefix_caching=load.caching,
        )
        config.cache_config.num_gpu_blocks = load.blocks
        config.scheduler_config.async_scheduling = load.asynchronous
        made = scheduler_of(config, cache_config(groups, load.blocks, load.block_size, 0))
        self.scheduler, self.hasher = made
        self.load = load
        self.in_flight: deque[Any] = deque()
        self.arrived = 0

    def add(self, name: str, prompt: list[int], wanted: int, priority: int) -> None:
        """Take a request in."""
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.v1.request import Request as VllmRequest

        params = VllmSamplingParams(temperature=0, max_tokens=wanted, ignore_eos=True)
        params.update_from_generation_config({}, STOP_TOKEN)
        self.arrived += 1
        request = VllmRequest(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            priority=priority,
            arrival_time=float(self.arrived),
            block_hasher=self.hasher if self.load.caching else None,
            **takes(VllmRequest, eos_token_id=STOP_TOKEN, mm_features=[]),
        )
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        """End a request."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def plan(self) -> list[tuple[str, int]]:
        """Plan a step: request and tokens, in order."""
        plan = self.scheduler.schedule()
        requests = self.scheduler.requests
        partial = {name for name in plan.num_scheduled_tokens if requests[name].is_prefill_chunk}
        self.in_flight.append((plan, partial))
        return list(plan.num_scheduled_tokens.items())

    def complete(self) -> None:
        """Complete the oldest step in flight."""
        from vllm.v1.outputs import ModelRunnerOutput

        plan, partial = self.in_flight.popleft()
        names = list(plan.num_scheduled_tokens)
        sampled = [
            []
            if name in partial
            else [sampled_token(name, self.scheduler.requests[name].num_output_tokens)]
            if name in self.scheduler.requests
            else [SAMPLED[0]]
            for name in names
        ]
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        self.scheduler.update_from_output(plan, output)

    def state(self) -> dict[str, Any]:
        """Return what is compared."""
        scheduler = self.scheduler
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        tables = [manager.req_to_blocks for manager in managers]
        held = {
            name: [sum(not block.is_null for block in table.get(name, ())) for table in tables]
            for name in scheduler.requests
        }
        return {
            "running": [request.request_id for request in scheduler.running],
            "waiting": [request.request_id for request in scheduler.waiting],
            "free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "blocks": {name: blocks for name, blocks in held.items() if any(blocks)},
            "preemptions": {name: request.num_preemptions for name, request in scheduler.requests.items()},
        }


def compare_load(load: RandomLoad, directory: Path, rules: SchedulingRules) -> dict[str, Any]:
    """Run a load through both, and return the steps compared and the first difference."""
    own, vllm = OwnSide(load, rules), VllmSide(load, directory)
    rng = random.Random(f"load {load.seed}")
    beginnings = [[rng.randrange(*SAMPLED) for _ in range(load.prompt // 2)] for _ in range(load.prefixes)]
    ahead = 2 if load.asynchronous else 1
    arrived, step, difference = 0, 0, ""
    for step in range(STEPS):
        while rng.random() < load.rate and len(vllm.scheduler.requests) < MOST_REQUESTS:
            own_part = [rng.randrange(*SAMPLED) for _ in range(rng.randint(1, load.prompt))]
            prompt = [*(rng.choice(beginnings) if beginnings else ()), *own_part][: load.max_model_len - 1]
            wanted = min(rng.randint(1, load.output), load.max_model_len - len(prompt))
            request = (f"r{arrived}", prompt, wanted, rng.randrange(3) if load.by_priority else 0)
            own.add(*request)
            vllm.add(*request)
            arrived += 1
        for name in list(vllm.scheduler.requests):
            if rng.random() < load.leave:
                own.abort(name)
                vllm.abort(name)
        while len(vllm.in_flight) < ahead:
            planned = vllm.plan(), own.plan()
            if planned[0] != planned[1] or vllm.state() != own.state():
                difference = _first_difference(step, planned, vllm.state(), own.state())
                break
        if difference:
            break
        vllm.complete()
        own.complete()
        if vllm.state() != own.state():
            difference = "after completion, " + _first_difference(step, ([], []), vllm.state(), own.state())
            break
    counts = {"steps": step + 1, "arrived": arrived, "preempted": own.scheduler.num_preemptions}
    return {**asdict(load), **counts, "difference": difference}


def _first_difference(step: int, planned: tuple[Any, Any], vllm: dict[str, Any], own: dict[str, Any]) -> str:
    if planned[0] != planned[1]:
        return f"step {step}: vLLM plans {planned[0]}, kvscope {planned[1]}"
    key = next(key for key in vllm if vllm[key] != own[key])
    return f"step {step}: {key} is {vllm[key]} in vLLM, {own[key]} in kvscope"


def main() -> None:
    """Run the loads that the command line names."""
    directory, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rules = OWN_RULES if "own" in sys.argv[4:] else VLLM_RULES
    for seed in range(first, first + count):
        print(json.dumps(compare_load(draw_random_load(seed), directory / "model", rules)), flush=True)


if __name__ == "__main__":
    main()
