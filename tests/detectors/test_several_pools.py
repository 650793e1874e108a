"""SGLang's pools: KV, sliding windows and Mamba states. The fullest limits, and only a full KV pool is too small."""

from __future__ import annotations

import gzip
import re

import pytest

from kvscope.lab.recorded_pages import BEGAN_S, DATA, At, served
from kvscope.monitor.contract.samples import Sample
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.metrics_page import MetricsPage

SLOTS, TOO_SMALL, OVERLOAD = "stuck.slots-exhausted", "sizing.kv-too-small", "sizing.overload"
REAL_PAGE = gzip.decompress((DATA / "sglang-page.prom.gz").read_bytes()).decode()
Pools = dict[str, float]
HYBRID: Pools = {"full": 0.11, "mamba": 0.99}


def page(seconds: float, pools: Pools, *, waiting: int = 20, retracted_per_s: float = 2.0) -> str:
    """SGLang's page with these pools, three requests a second that end, and a queue."""
    names = {"full": "full_token_usage", "swa": "swa_token_usage", "mamba": "mamba_usage"}
    figures = {names[pool]: usage for pool, usage in pools.items()} | {
        "token_usage": max(pools.values()),
        "num_running_reqs": 48,
        "num_queue_reqs": waiting,
        "num_requests_total": round(3 * seconds),
    }
    text = REAL_PAGE
    for name, value in figures.items():
        text, count = re.subn(rf"^(sglang:{name}(?:{{.*}})?) \S+$", rf"\g<1> {value}", text, flags=re.M)
        assert count == 1, name
    labels = 'tp_rank="0",model_name="models/llama"'
    return f"{text}sglang:num_retracted_requests_total{{{labels}}} {round(seconds * retracted_per_s)}\n"


def samples_of(*pages: str, every_s: float = 15.0) -> tuple[list[Sample], list[FindingReport]]:
    """The samples of these pages, and all that fires in the end."""
    watch, clock, samples = Pipeline(), At(BEGAN_S), []
    with served() as server:
        reader = MetricsPage(server.url, clock=clock)
        for text in pages:
            server.answer = text
            records = reader.scrape()
            samples += [record for record in records if isinstance(record, Sample)]
            watch.feed(records)
            clock.seconds += every_s
        reader.close()
    watch.settle()
    return samples, watch.findings("firing")


def test_a_real_page_has_its_pools() -> None:
    ((sample,), _) = samples_of(REAL_PAGE)
    assert sample.usage == 0.52
    assert (sample.kv_pool_usage, sample.window_pool_usage, sample.state_pool_usage) == (0.521, 0.0, 0.0)
    assert sample.shown_usage == 0.521


@pytest.mark.parametrize("full", ["mamba", "swa"])
def test_a_full_pool_beside_the_kv_pool_is_named_and_the_kv_pool_is_not_too_small(full: str) -> None:
    pools = {"full": 0.11, full: 0.99}
    samples, findings = samples_of(*(page(15.0 * n, pools, waiting=20 + 30 * n) for n in range(20)))
    assert (samples[-1].usage, samples[-1].shown_usage) == (0.99, 0.11)
    codes = {each.code: each for each in findings}
    assert TOO_SMALL not in codes
    assert (codes[SLOTS].severity, codes[SLOTS].verdict) == ("warning", "likely")
    assert {"mamba": "Mamba", "swa": "sliding-window"}[full] in codes[SLOTS].explanation
    assert "89.0 % is free" in codes[SLOTS].explanation
    assert not any("gpu-memory-utilization" in text for each in findings for text in each.change)


def test_a_full_kv_pool_is_too_small_in_the_words_of_sglang() -> None:
    _, findings = samples_of(*(page(15.0 * n, {"full": 0.99, "mamba": 0.1}) for n in range(20)))
    codes = {each.code: each for each in findings}
    assert SLOTS not in codes
    assert any("--mem-fraction-static" in text for text in codes[TOO_SMALL].change)
    assert "tcp://" not in codes[TOO_SMALL].missing


def test_a_full_pool_that_nobody_waits_for_is_nothing() -> None:
    _, findings = samples_of(*(page(15.0 * n, HYBRID, waiting=0) for n in range(20)))
    assert not {SLOTS, OVERLOAD} & {each.code for each in findings}
    _, findings = samples_of(*(page(15.0 * n, HYBRID) for n in range(4)))
    assert SLOTS not in {each.code for each in findings}  # not for a minute yet
    _, findings = samples_of(*(page(15.0 * n, {"full": 0.7, "mamba": 0.99}, retracted_per_s=0.0) for n in range(20)))
    assert [each.severity for each in findings if each.code == SLOTS] == ["info"]
