"""Pages, terminal, metrics, answers and findings state the same: moments of a lab with shared prefixes and a leak."""

from __future__ import annotations

import io
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console

from kvscope.dashboards.web.palette import PALETTE_SHADES
from kvscope.dashboards.web.view_registry import PATHS
from kvscope.engine.bench.clock import VirtualClock
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.base.text import counted as counted_text
from kvscope.monitor.base.text import percent, timestamp
from kvscope.monitor.ledger.partial_replay import observed
from kvscope.monitor.outputs.alerting.message import AlertFigures
from kvscope.monitor.outputs.prometheus import METRIC_HOLDERS, WatchCollector
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.questions.schema import BLOCK_STATES
from kvscope.monitor.terminal import explain_text, top_text
from tests.web.parts import ENGINE, LEAK
from tests.web.test_states import at, rows, text

STEPS = 240
EVERY = 12
KINDS = ("shared and leaked", "two KV groups", "restarted", "batches lost", "dead")
STATES = dict(zip(("free", "cached_idle", *METRIC_HOLDERS[2:]), BLOCK_STATES, strict=True))


def lab_of(kind: str, clock: VirtualClock) -> Lab:
    """Every third completion of a transfer is never reported; with two KV groups there is no connector."""
    transfers: dict[str, Any] = {"connector_share": 1.0, "faults": [f"{LEAK}:every=3"]}
    groups: dict[str, Any] = {"window": 12}
    more = groups if kind == "two KV groups" else transfers
    return Lab(total=161, max_num_seqs=12, max_num_batched_tokens=64, clock=clock, **more)


def moments(kind: str) -> Iterator[Pipeline]:
    """Yield a pipeline at moments of one load, whose prompts share prefixes."""
    rng = random.Random(kind)
    clock = VirtualClock()
    lab, watch = lab_of(kind, clock), Pipeline()
    templates = [[], list(range(12)), list(range(24))]
    for step in range(STEPS):
        if kind == "restarted" and step == STEPS // 2:
            lab = lab_of(kind, clock)
        if len(lab.scheduler.requests) < 24 and rng.random() < 0.3:
            own = [rng.randrange(1000) for _ in range(rng.randint(4, 20))]
            lab.arrive([*rng.choice(templates), *own], max_tokens=rng.randint(5, 25))
        lab.step(0.3)
        if kind == "batches lost" and rng.random() < 0.05:
            lab.frames.clear()
        if step % EVERY == 0:
            lab.flush()
            watch.feed(lab.frames)
            lab.frames.clear()
            if kind == "dead" and step > STEPS // 2:
                clock.sleep(60)
                watch.feed([observed(ENGINE, lab.packer.epoch, clock.time_ns())])
            watch.settle()
            yield watch


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


def metrics(watch: Pipeline) -> dict[str, float]:
    """Blocks by holder, and usage."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(WatchCollector(watch, lambda: (), AlertFigures))
    samples = [sample for family in registry.collect() for sample in family.samples]
    blocks = {one.labels["holder"]: one.value for one in samples if one.name == "kvscope_blocks"}
    (usage,) = (one.value for one in samples if one.name == "kvscope_pool_usage_ratio")
    return blocks | {"usage": usage}


def counted_once(watch: Pipeline) -> dict[str, int]:
    """By request, the blocks that count under it."""
    return {one.id: one.counted_blocks for one in watch.requests(ENGINE) if one.counted_blocks}


def test_every_output_states_the_same_of_the_pool(kind: str) -> None:
    for watch in moments(kind):
        (engine,) = watch.engines()
        balance = engine.balance
        assert balance is not None
        assert balance.holds
        mapped = Counter(BLOCK_STATES[value] for value in watch.block_map(ENGINE).states)
        exported = metrics(watch)
        for field, state in STATES.items():
            assert mapped[state] == getattr(balance, field) == exported[field]
        usage = percent(balance.used / balance.usable)
        assert usage == percent(exported["usage"]) == percent(engine.usage or 0.0)
        assert f"{usage} in use" in str(top_text.engines([engine], ENGINE))
        assert usage in text(PATHS["engine"].make(watch, at(watch, "/engine")), "summary")
        for path, section in (("blocks", "map"), ("memory", "pool")):
            legend = text(PATHS[path].make(watch, at(watch, f"/{path}")), section)
            for shade in PALETTE_SHADES:
                blocks = getattr(balance, shade.field)
                share = "" if shade.field == "reserved" else f" {percent(blocks / balance.usable)}"
                assert f"{shade.label} {blocks:,}{share}" in legend


def test_every_output_states_the_same_of_each_request(kind: str) -> None:
    shared = 0
    for watch in moments(kind):
        requests = {one.id: one for one in watch.requests(ENGINE) if one.blocks}
        table = rows(PATHS["requests"].make(watch, at(watch, "/requests")), "requests")
        shown = {row[0]: (row[4], row[5]) for row in table}
        for name, one in requests.items():
            shared += one.shared_blocks
            assert shown[name] == (f"{one.blocks:,}", f"{one.shared_blocks:,}")
            assert len(watch.request(ENGINE, name).blocks) == one.blocks
            out = io.StringIO()
            explain_text.request(watch.request(ENGINE, name), Console(file=out, width=200))
            of_them = f", {one.shared_blocks:,} of them shared" if one.shared_blocks else ""
            assert re.search(rf"blocks +{one.blocks:,} blocks?{of_them}", out.getvalue())
        counted = counted_once(watch)
        (engine,) = watch.engines()
        assert engine.balance is not None
        nobodys = engine.balance.unaccounted if kind == "batches lost" else 0
        assert 0 <= engine.balance.used - sum(counted.values()) <= nobodys
        now_ns = watch.fleet.engines[ENGINE].now_ns
        for seconds in (600, 1):  # what is held does not depend on the window
            retained = watch.retained_blocks(ENGINE, timestamp(now_ns - seconds * 10**9) or "")
            assert {one.owner: one.blocks for one in retained.held if one.owner} == counted
        colours = watch.block_colours(ENGINE, "owner").keys
        assert {one.request: one.blocks for one in colours if one.request}.items() <= counted.items()
    assert shared


def test_a_finding_states_what_the_requests_hold(kind: str) -> None:
    leaks = 0
    for watch in moments(kind):
        (engine,) = watch.engines()
        balance, counted = engine.balance, counted_once(watch)
        assert balance is not None
        for finding in watch.findings("firing"):
            if finding.code == LEAK:
                leaks += 1
                held = sum(counted.get(name, 0) for name in finding.culprits.requests)
                assert len(finding.culprits.blocks) == held <= balance.finished
                stated = f"{counted_text(held, 'block')} ({percent(held / balance.usable)} of the pool)"
                assert stated in finding.explanation
    assert leaks > 3 or kind == "two KV groups"
