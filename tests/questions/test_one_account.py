"""Pages, terminal, metrics, answers and findings state the same: moments of a lab with shared prefixes and a leak."""

from __future__ import annotations

import io
import random
import re
from collections import Counter

import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console

from kvscope.dashboards.web.palette import PALETTE_SHADES
from kvscope.dashboards.web.view_registry import PATHS
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.base.text import counted as counted_text
from kvscope.monitor.base.text import percent, timestamp
from kvscope.monitor.outputs.alerting.message import AlertFigures
from kvscope.monitor.outputs.prometheus import METRIC_HOLDERS, WatchCollector
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.questions.schema import BLOCK_STATES
from kvscope.monitor.terminal import explain_text, top_text
from tests.web.parts import ENGINE, LEAK
from tests.web.test_states import at, rows, text

STEPS = 240
EVERY = 12
STATES = dict(zip(("free", "cached_idle", *METRIC_HOLDERS[2:]), BLOCK_STATES, strict=True))


def moments(seed: int) -> list[Pipeline]:
    """A pipeline at moments of one load: prompts share prefixes, and every third completion is never reported."""
    rng = random.Random(seed)
    lab = Lab(total=161, max_num_seqs=12, max_num_batched_tokens=64, connector_share=1.0, faults=[f"{LEAK}:every=3"])
    templates = [[], list(range(12)), list(range(24))]
    watches = []
    for step in range(STEPS):
        if len(lab.scheduler.requests) < 24 and rng.random() < 0.3:
            own = [rng.randrange(1000) for _ in range(rng.randint(4, 20))]
            lab.arrive([*rng.choice(templates), *own], max_tokens=rng.randint(5, 25))
        lab.step(0.3)
        if step % EVERY == 0:
            lab.flush()
            watch = Pipeline()
            watch.feed(lab.frames)
            watch.settle()
            watches.append(watch)
    return watches


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


@pytest.fixture(scope="module", params=range(2))
def watches(request: pytest.FixtureRequest) -> list[Pipeline]:
    return moments(request.param)


def test_every_output_states_the_same_of_the_pool(watches: list[Pipeline]) -> None:
    for watch in watches:
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


def test_every_output_states_the_same_of_each_request(watches: list[Pipeline]) -> None:
    shared = 0
    for watch in watches:
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
        assert sum(counted.values()) == engine.balance.used
        now_ns = watch.fleet.engines[ENGINE].now_ns
        for seconds in (600, 1):  # what is held does not depend on the window
            retained = watch.retained_blocks(ENGINE, timestamp(now_ns - seconds * 10**9) or "")
            assert {one.owner: one.blocks for one in retained.held} == counted
        colours = watch.block_colours(ENGINE, "owner").keys
        assert {one.request: one.blocks for one in colours if one.request}.items() <= counted.items()
    assert shared


def test_a_finding_states_what_the_requests_hold(watches: list[Pipeline]) -> None:
    leaks = 0
    for watch in watches:
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
    assert leaks > 3
