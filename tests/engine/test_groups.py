"""Two KV groups over one pool: layers that see everything, and layers with a sliding window that gives blocks back."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install -e .[engine]")

import torch

from kvscope.engine.blocks.block_pool import NULL_BLOCK
from kvscope.engine.blocks.prefix_hashes import in_group
from kvscope.engine.config import EngineConfig
from kvscope.engine.core.assembly import describe_engine
from kvscope.engine.core.engine_core import EngineCore
from kvscope.engine.execution.model_runner import kv_bytes_per_block
from kvscope.engine.faults import Faults
from kvscope.engine.models import LoadedModel, tiny
from kvscope.engine.models.checkpoint import Checkpoint
from kvscope.engine.models.llama import Llama
from kvscope.engine.models.tokens import ByteTokenizer
from kvscope.engine.requests.request import Request, SamplingParams
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract.kinds import Kind, Release
from kvscope.monitor.ledger import event_history
from kvscope.monitor.ledger.engine_ledger import EngineLedger

WINDOW = 37
BLOCK_SIZE = 16
MISTRAL = {"architectures": ["MistralForCausalLM"], "sliding_window": WINDOW}
MIXED = {
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "max_window_layers": 1,
}


def model(settings: dict[str, Any]) -> LoadedModel:
    """The tiny model's weights with these settings."""
    weights = tiny.weights(seed=0)
    if settings["architectures"] == ["Qwen2ForCausalLM"]:
        for layer, (name, size) in itertools.product(range(4), {"q": 128, "k": 64, "v": 64}.items()):
            weights[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = torch.zeros(size)
    module = Llama(Checkpoint("tiny", tiny.CONFIG | settings, weights, torch.float32, "cpu"), None)
    return LoadedModel(module.config, module, ByteTokenizer())


def events(lab: Lab, kind: Kind) -> list[Any]:
    return [run for frame in lab.frames for run in frame.events() if run.kind == kind]


def ledger_state(lab: Lab) -> EngineLedger:
    ledger = EngineLedger(lab.packer.engine)
    for frame in lab.frames:
        ledger.apply(frame)
    assert not ledger.anomalies
    return ledger


def test_layers_that_see_the_same_are_a_group_and_a_block_has_room_for_the_largest() -> None:
    loaded = model(MIXED)
    assert loaded.config.kv_groups == [(None, (0,)), (WINDOW, (1, 2, 3))]
    one_group = model(MISTRAL).config
    assert one_group.kv_groups == [(WINDOW, (0, 1, 2, 3))]
    by_layer = kv_bytes_per_block(one_group, BLOCK_SIZE, "float32") // one_group.num_layers
    assert kv_bytes_per_block(loaded.config, BLOCK_SIZE, "float32") == 3 * by_layer
    stated = describe_engine(EngineConfig(), loaded, 10, Faults())
    assert [(group.kind, group.layers, group.window) for group in stated.groups] == [
        ("full_attention", 1, 0),
        ("sliding_window", 3, WINDOW),
    ]
    assert stated.kv_bytes_per_block == 3 * by_layer


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("settings", [MISTRAL, MIXED], ids=["window only", "two groups"])
def test_a_long_request_keeps_no_more_of_a_group_than_its_window(
    settings: dict[str, Any], async_scheduling: bool
) -> None:
    loaded = model(settings)
    config = EngineConfig(block_size=BLOCK_SIZE, max_num_batched_tokens=32, async_scheduling=async_scheduling)
    core = EngineCore(config, loaded)
    prompt, output = list(range(200)), 80
    number = core.submit("", prompt, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True))
    while core.in_flight:
        core.step()
        held = core.manager.held(number)
        request = core.scheduler.requests.get(number)
        assert core.pool.counts()[2] == sum(map(len, held)) <= core.manager.blocks_for(len(prompt) + output)
        if request is not None and request.output_token_ids:
            assert len(held[-1]) < WINDOW / BLOCK_SIZE + 2
            if len(held) == 2:
                assert len(held[0]) == -(-request.num_scheduled_tokens // BLOCK_SIZE)
    assert core.pool.num_free == core.pool.usable
    core.close()


def test_a_connector_is_refused_where_there_is_a_window() -> None:
    with pytest.raises(ValueError, match="sliding window"):
        EngineCore(EngineConfig(kv_connector="host"), model(MIXED))


def test_what_a_window_leaves_behind_is_said_of_its_group_and_stays_cached() -> None:
    lab = Lab(window=6, block_size=4)
    request = lab.arrive(20, max_tokens=8)
    lab.step()
    # The next token is at 20 and sees 15 to 20: of 5 blocks, those of 12 to 19.
    full, sliding = lab.manager.tables[request.number]
    assert NULL_BLOCK not in full
    assert [block == NULL_BLOCK for block in sliding] == [True, True, True, False, False]
    (left,) = events(lab, Kind.RELEASED)
    assert (left.group, list(left.args), len(left.ids)) == (1, [Release.OUT_OF_WINDOW], 3)
    assert lab.pool.num_cached_idle == 3
    assert Counter(run.group for run in events(lab, Kind.ALLOCATED)) == {0: 1, 1: 1}
    lab.run_until_idle()
    assert ledger_state(lab).state.totals.released.keys() == {Release.OUT_OF_WINDOW, Release.FINISHED}
    assert lab.pool.reset_prefix_cache()
    lab.flush()
    assert {run.group for run in events(lab, Kind.EVICTED)} == {0, 1}
    assert ledger_state(lab).state.cached_idle == 0


def test_a_prefix_is_found_with_what_each_group_needs_of_it() -> None:
    lab = Lab(window=6, block_size=4)
    prompt = list(range(24))
    lab.arrive(prompt, max_tokens=2)
    lab.run_until_idle()
    again = lab.arrive([*prompt, 1, 2], max_tokens=2)
    lab.step()
    assert again.num_computed_tokens == 26
    assert {run.group: len(run.ids) for run in events(lab, Kind.REUSED)} == {0: 6, 1: 2}
    asked = [(run.group, *run.args) for run in events(lab, Kind.LOOKED_UP) if run.request == again.number]
    assert asked == [(0, 26, 24), (1, 24, 24)]
    about = event_history.scan_events(lab.frames, again.number)
    reported = [line.text for line in event_history.request_history(about, again.number, {}) if line.what == "reused"]
    assert reported == [
        "took over 6 blocks from the prefix cache",
        "took over 2 blocks from the prefix cache (KV group 1)",
    ]
    assert lab.scheduler.prefix_hits == ledger_state(lab).state.totals.hit_tokens == 24


@pytest.mark.parametrize("by_fault", [False, True])
def test_what_the_window_group_misses_the_other_has_in_vain(by_fault: bool) -> None:
    faults = ["collapse.prefix-hits"] if by_fault else []
    lab = Lab(window=6, block_size=4, faults=faults)
    prompt = list(range(24))
    first = lab.arrive(prompt, max_tokens=2)
    lab.run_until_idle()
    # What the window left behind was free first, and others were given it.
    while not by_fault and lab.pool.find(in_group(first.digests[0], 1)) is not None:
        lab.arrive(4, max_tokens=1)
        lab.run_until_idle()
    shorter = lab.arrive([*prompt[:12], 1], max_tokens=1)
    lab.run_until_idle()
    asked = [(run.group, *run.args) for run in events(lab, Kind.LOOKED_UP) if run.request == shorter.number]
    assert asked == [(0, 13, 12), (1, 12, 0)]
    assert lab.scheduler.prefix_hits == ledger_state(lab).state.totals.hit_tokens == 0


def test_every_prefix_that_is_found_is_the_longest_that_every_group_has() -> None:
    """By a search over all lengths, with the pool as random requests have left it."""
    rng = random.Random(5)
    found: Counter[bool] = Counter()
    for window in (1, 3, 8, 9, 30):
        lab = Lab(window=window, block_size=4, total=60, seed=window)
        manager = lab.manager
        prompts = [[rng.randrange(9) for _ in range(50)] for _ in range(3)]
        for _ in range(60):
            lab.arrive(rng.choice(prompts)[: rng.randint(1, 50)], max_tokens=rng.randint(1, 9))
            for _ in range(3):
                lab.step()
            request = Request(0, "", rng.choice(prompts)[: rng.randint(1, 50)], SamplingParams())
            prefix = manager.find_prefix(request)
            cached = [[lab.pool.find(in_group(digest, group)) for digest in request.digests] for group in range(2)]
            first_needed = [(0, max(0, 4 * end + 1 - window) // 4) for end in range((request.num_tokens - 1) // 4 + 1)]
            longest = max(
                end
                for end, firsts in enumerate(first_needed)
                if all(None not in blocks[first:end] for blocks, first in zip(cached, firsts, strict=True))
            )
            assert prefix.num_blocks == longest
            assert prefix.blocks == [
                blocks[first:longest] for blocks, first in zip(cached, first_needed[longest], strict=True)
            ]
            found[longest > 0] += 1
    assert min(found[True], found[False]) > 10


def test_a_prompt_is_admitted_that_fits_without_what_its_window_leaves_behind() -> None:
    """Its full group needs 20 blocks; the window group no more than 3, and a chunk of 4 tokens."""
    lab = Lab(window=8, block_size=4, total=26, max_num_batched_tokens=4, prefix_caching=False)
    assert lab.manager.blocks_for(80) <= lab.pool.usable < 2 * lab.manager.blocks_for(80) - 10
    request = lab.arrive(76, max_tokens=4)
    lab.run_until_idle()
    assert len(request.output_token_ids) == 4
    assert not events(lab, Kind.ALLOCATION_FAILED)
    assert not events(lab, Kind.PREEMPTED)
    (arrived,) = events(lab, Kind.ARRIVED)
    assert list(arrived.args[-2:]) == [lab.manager.blocks_for(76), lab.manager.blocks_for(80)]
    ledger_state(lab)


def test_the_prefix_cache_is_kept_while_any_block_is_in_use() -> None:
    """As in vLLM: also where the request has no full block yet."""
    lab = Lab(block_size=16)
    lab.arrive(40, max_tokens=1)
    lab.run_until_idle()
    assert lab.pool.num_cached_idle
    lab.arrive(5, max_tokens=20)
    lab.step()
    assert not lab.pool.reset_prefix_cache()
    assert lab.pool.num_cached_idle
    lab.run_until_idle()
    assert lab.pool.reset_prefix_cache()
    assert not lab.pool.num_cached_idle
