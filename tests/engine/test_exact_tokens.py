"""Greedy in fp32 the engine says what transformers' `generate` says, token for token, however its steps are cut.

A block read too early, a position off by one or a page of another request would change a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

pytest.importorskip("torch", reason="needs torch: pip install -e .[engine]")

from kvscope.engine.config import EngineConfig
from kvscope.engine.core.engine_core import EngineCore
from kvscope.engine.models import LoadedModel, load_model
from kvscope.engine.requests.request import SamplingParams
from kvscope.monitor.contract.kinds import Status
from tests.engine import checkpoints

COUNT = 64
LONGEST = 300
MAX_TOKENS = 20
BLOCK_SIZE = 16
SHARED = 100
"""Tokens that every other prompt of that length begins with."""
OVERLAPPED: list[dict[str, object]] = [
    {"enable_prefix_caching": False},
    {"max_num_batched_tokens": 256, "kv_connector": "host"},
    {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 64},
]


class Oracle(NamedTuple):
    directory: str
    loaded: LoadedModel
    prompts: list[list[int]]
    expected: list[list[int]]


# Positions that are learned, and those that are turned with two KV groups.
QUICK = ["gpt2", "qwen3-window"]
VARIANTS = [pytest.param(name, marks=pytest.mark.slow) for name in checkpoints.CONFIGS if name not in QUICK]


@pytest.fixture(scope="module", params=[*QUICK, *VARIANTS])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    directory = tmp_path_factory.mktemp(request.param)
    model = checkpoints.save(request.param, directory)
    prompts = checkpoints.prompts(COUNT, LONGEST, seed=7, shared=SHARED)
    expected = [checkpoints.generate(model, prompt, MAX_TOKENS) for prompt in prompts]
    # An oracle that said nothing, or always the same, would prove nothing.
    assert all(len(tokens) == MAX_TOKENS for tokens in expected)
    assert len({tuple(tokens) for tokens in expected}) > COUNT / 2
    return Oracle(str(directory), load_model(EngineConfig(model=str(directory))), prompts, expected)


@contextmanager
def engine(oracle: Oracle, **settings: object) -> Iterator[EngineCore]:
    core = EngineCore(EngineConfig(model=oracle.directory, block_size=BLOCK_SIZE, **settings), oracle.loaded)
    yield core
    core.close()
    assert core.pool.num_free == core.pool.usable


def submit(core: EngineCore, prompt: list[int], max_tokens: int = MAX_TOKENS, priority: int = 0) -> int:
    return core.submit("", prompt, SamplingParams(temperature=0, max_tokens=max_tokens), priority)


def take_step(core: EngineCore, tokens: dict[int, list[int]]) -> None:
    for output in core.step():
        assert not output.error
        tokens.setdefault(output.number, []).extend(output.token_ids)


def run(core: EngineCore, oracle: Oracle) -> list[list[int]]:
    """Everything submitted at once; the output tokens by prompt."""
    numbers = [submit(core, prompt) for prompt in oracle.prompts]
    tokens: dict[int, list[int]] = {}
    while core.in_flight:
        take_step(core, tokens)
    return [tokens[number] for number in numbers]


def settle(core: EngineCore) -> None:
    """Until neither the connector nor a step needs anything of the pool any more."""
    while core.scheduler.deferred or core.scheduler.in_flight:
        take_step(core, {})


@pytest.mark.slow
def test_everything_at_once(oracle: Oracle) -> None:
    everything = sum(map(len, oracle.prompts))
    with engine(oracle, max_num_batched_tokens=everything, enable_prefix_caching=False) as core:
        assert run(core, oracle) == oracle.expected
        assert core.scheduler.step == MAX_TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("settings", OVERLAPPED, ids=lambda settings: next(iter(settings)))
def test_with_each_step_planned_while_another_runs(oracle: Oracle, settings: dict[str, object]) -> None:
    if oracle.loaded.config.sliding_layers:
        settings = {name: value for name, value in settings.items() if name != "kv_connector"}  # it is refused
        if "num_gpu_blocks_override" in settings and len(oracle.loaded.config.kv_groups) == 1:
            settings["num_gpu_blocks_override"] = 14  # all that a window needs, and not much more
    with engine(oracle, async_scheduling=True, **settings) as core:
        assert run(core, oracle) == oracle.expected
        settle(core)
        if "num_gpu_blocks_override" in settings:
            assert core.scheduler.num_preemptions > 0


def test_in_chunks_of_16_tokens(oracle: Oracle) -> None:
    with engine(oracle, max_num_batched_tokens=16, enable_prefix_caching=False) as core:
        assert run(core, oracle) == oracle.expected
        computed = sum(len(p) + len(e) - 1 for p, e in zip(oracle.prompts, oracle.expected, strict=True))
        assert core.scheduler.step >= math.ceil(computed / 16)


def test_prefix_caching_with_shared_prefixes(oracle: Oracle) -> None:
    sharing = [prompt for prompt in oracle.prompts[1::2] if len(prompt) > SHARED]
    with engine(oracle, max_num_batched_tokens=256) as core:
        assert run(core, oracle) == oracle.expected
        # Whoever comes after the first of them finds all full blocks of what they share.
        assert core.scheduler.prefix_hits >= (len(sharing) - 2) * (SHARED // BLOCK_SIZE) * BLOCK_SIZE > 0
        before = core.scheduler.prefix_hits
        assert run(core, oracle) == oracle.expected
        assert core.scheduler.prefix_hits > before


def test_kv_that_went_to_the_host_and_came_back(oracle: Oracle) -> None:
    if oracle.loaded.config.sliding_layers:
        with pytest.raises(ValueError, match="sliding window"), engine(oracle, kv_connector="host"):
            pass
        return
    with engine(oracle, max_num_batched_tokens=256, kv_connector="host") as core:
        assert run(core, oracle) == oracle.expected
        settle(core)
        steps, hits = core.scheduler.step, core.scheduler.prefix_hits
        assert core.pool.reset_prefix_cache()
        assert run(core, oracle) == oracle.expected
        settle(core)
        # No more was found in the pool than before, but most prompts had not to be computed again.
        assert core.scheduler.prefix_hits - hits <= hits
        assert core.scheduler.step - steps < steps


def test_every_request_preempted_at_least_once(oracle: Oracle) -> None:
    """Urgent requests take all free blocks as soon as a prompt has begun to answer, and then each needs one more."""
    groups = len(oracle.loaded.config.kv_groups)
    pool = 2 + groups * math.ceil((LONGEST + MAX_TOKENS) / BLOCK_SIZE)
    settings = {"num_gpu_blocks_override": pool, "scheduling_policy": "priority", "enable_prefix_caching": False}
    tokens: dict[int, list[int]] = {}
    numbers: list[int] = []
    with engine(oracle, **settings) as core:
        for priority, prompt in enumerate(oracle.prompts, start=1):
            number = submit(core, prompt, priority=priority)
            numbers.append(number)
            take_step(core, tokens)
            request = core.scheduler.requests[number]
            urgent: set[int] = set()
            while request.status != Status.PREEMPTED:
                assert not request.is_finished
                # What is free after those that run have grown.
                growing = sum(r.num_computed_tokens % BLOCK_SIZE == 0 for r in core.scheduler.running)
                free = core.pool.num_free // groups - growing
                if request.output_token_ids and urgent.isdisjoint(core.scheduler.requests):
                    urgent = {submit(core, [1] * BLOCK_SIZE, max_tokens=2, priority=0) for _ in range(free)}
                take_step(core, tokens)
        while core.in_flight:
            take_step(core, tokens)
        assert [tokens[number] for number in numbers] == oracle.expected
