"""The sizes that the plan computes, against vLLM's own code for them, in three releases."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest

from kvscope.lab.vllm_python import PYTHON, RELEASES, ROOT, UNPACKED, environment, needs_vllm
from kvscope.monitor.planning.kv_pool import EngineSettings, pool_of
from kvscope.monitor.planning.model_shape import CacheKind, shape_of
from tests.planning.drawn_models import FAMILIES, drawn

pytestmark = needs_vllm
SINCE = "0.18"
SEED = 20
PROVED_SEEDS = range(100, 110)
NOT_COMPUTED = {
    ("0.18.0", "lfm2"): "vLLM 0.18 reads this family's configuration with an older transformers only",
    ("0.18.0", "deepseek_v2"): "vLLM 0.18 has no latent attention on the CPU",
}


def drawn_with(seeds: Iterable[int]) -> list[dict[str, Any]]:
    return [case for seed in seeds for case in drawn(seed)]


@cache
def answers(release: str, *seeds: int) -> list[dict[str, Any]]:
    path = [str(UNPACKED / release), str(UNPACKED / "deps")] if release else []
    done = subprocess.run(
        [PYTHON, "-m", "tests.planning.vllm_sizes"],
        input=json.dumps(drawn_with(seeds)),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(PYTHONPATH=":".join([str(ROOT), *path])),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("release", [one for one in RELEASES if not one or one >= SINCE])
def test_layers_blocks_and_concurrency_are_those_of_vllm(release: str, family: str) -> None:
    place = list(FAMILIES).index(family)
    case, answer = drawn(SEED)[place], answers(release, SEED)[place]
    if (release, family) in NOT_COMPUTED:
        pytest.skip(NOT_COMPUTED[release, family])
    assert "error" not in answer, answer
    compare(case, answer)


@pytest.mark.prove
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("release", [one for one in RELEASES if not one or one >= SINCE])
def test_ten_draws_of_each_family_are_those_of_vllm(release: str, family: str) -> None:
    if (release, family) in NOT_COMPUTED:
        pytest.skip(NOT_COMPUTED[release, family])
    place = list(FAMILIES).index(family)
    both = list(zip(drawn_with(PROVED_SEEDS), answers(release, *PROVED_SEEDS), strict=True))
    for case, answer in both[place :: len(FAMILIES)]:
        assert "error" not in answer, answer
        compare(case, answer)


def compare(case: dict[str, Any], answer: dict[str, Any]) -> None:
    arguments = case["arguments"]
    major, minor = answer["release"].split(".")[:2]
    settings = EngineSettings(
        release=(int(major), int(minor)),
        block_size=arguments["block_size"],
        max_num_batched_tokens=arguments["max_num_batched_tokens"],
        prefix_caching=arguments["enable_prefix_caching"],
        steps_in_flight=answer["steps_in_flight"],
    )
    shape = shape_of(case["config"])
    pool = pool_of(shape, settings)
    ours = [layer.state_bytes if layer.kind == CacheKind.STATE else layer.bytes_per_token for layer in shape.layers]
    assert sorted(ours) == sorted(answer["per_layer"])
    assert len(pool.groups) == len(answer["groups"])
    assert case["available_bytes"] // pool.bytes_per_block == answer["blocks"]
    concurrency = answer["blocks"] / pool.blocks_of(answer["max_model_len"])
    assert concurrency == pytest.approx(answer["concurrency"], rel=1e-12)
