"""Every grace and threshold is in one table, can be set, is used, and is honoured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from kvscope.lab.paper_engine import as_log, as_metrics, every
from kvscope.monitor.base import plugins
from kvscope.monitor.base.errors import CannotTell
from kvscope.monitor.base.plugins import Plugin, PluginFailure
from kvscope.monitor.contract.kinds import Holder, Status, Tier, TierOp
from kvscope.monitor.contract.samples import Fact, Sample
from kvscope.monitor.detectors.detector import Settings, Threshold
from kvscope.monitor.detectors.leak.unaccounted import Unaccounted
from kvscope.monitor.detectors.registry import CATALOGUE, THRESHOLDS, parse_settings
from kvscope.monitor.questions.observe import observe
from kvscope.monitor.sources.engine_log import Log
from tests.detectors import leaks, scenes, stuck, waste
from tests.detectors.scenes import Observer, Watched
from tests.detectors.test_figures import figures, spoken
from tests.detectors.test_logs import line, log
from tests.detectors.test_prefixes import computed_again, flush
from tests.detectors.test_queue_metrics import held_back, hits, served
from tests.detectors.test_relative import flushed_by_one_prompt
from tests.detectors.test_unclaimed_harm import passed_by
from tests.detectors.test_without_a_stream import idle_with, preempting, trends

DATA = Path(__file__).parent.parent / "data"
S = 1_000_000_000


class Asked(Settings):
    """Settings that remember what they were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __call__(self, threshold: Threshold) -> float:
        self.names.add(threshold.name)
        return super().__call__(threshold)


def test_every_threshold_has_a_code_and_a_reason() -> None:
    for name, threshold in THRESHOLDS.items():
        assert name.rpartition(".")[0] in CATALOGUE
        assert len(threshold.reason) > 10
        assert threshold.unit


def test_every_threshold_is_used_by_some_detector(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()
    once = PluginFailure(Plugin("kvscope.detectors", "slow", "acme", "1"), "OSError", 1, 1, 1, disabled=False)
    monkeypatch.setattr(plugins, "failures", lambda: [once])
    for scene in (
        scenes.finished_held(settings=asked),
        scenes.unaccounted(settings=asked),
        leaks.remote_load_lost(asked),
        leaks.idle_not_polled(asked),
        leaks.lease_burst(asked),
        leaks.deferred_free_stalled(asked),
        leaks.rising_floor(asked),
        leaks.encoder_cache(asked),
        stuck.remote_load(asked),
        stuck.promotion_starved(asked),
        stuck.parked_loads(asked),
        stuck.front_end(asked),
        stuck.grammar(asked)[0],
        stuck.self_preempt(asked)[0],
        scenes.never_fits(settings=asked)[0],
        scenes.lockstep(settings=asked),
        waste.preemption(asked),
        waste.prefix_hits(asked),
        waste.flushed_by_one(asked),
        waste.flushed_needlessly(asked),
    ):
        scene.live(12)
    flushed_by_one_prompt(needed=625, settings=asked)
    waste.wrong_sizes(asked)
    waste.after_retract(asked).live(40)
    stuck.head_of_line(asked)[0].live(70, every=2)
    stalled = scenes.stalled(settings=asked)
    stalled.beat(10)
    larger = Watched(asked)
    larger.lab.arrive(8, max_tokens=100)
    larger.live(2)
    larger.lab.arrive(200)
    larger.launch()
    larger.beat(3)
    first = Watched(asked)
    first.lab.arrive(8)
    first.launch()
    first.beat(3)
    leased = scenes.Spoken()
    leased.watch.settings = asked
    for number, block in ((7, 3), (8, 4)):
        leased.arrive(number, [block])
        leased.log.finished(number, Status.FINISHED_STOPPED)
    leased.log.free_deferred(7, [3], Holder.CONNECTOR, lease_deadline_ns=1)
    leased.log.free_deferred(8, [4], Holder.SESSION)
    leased.log.tier(TierOp.PINNED, Tier.HOST, 1, 1, [5])
    leased.log.pinned([6])
    leased.say()
    leased.wait(301)
    long = Watched(asked, prefix_caching=False)
    long.lab.arrive(100, max_tokens=100)
    long.live(2, every=0.5)
    logs = [log("seed-000.log"), log("never-freed.log.gz"), log("lockstep-collapse.log.gz")]
    logs.append([line(8 - n % 2, 0.02 * n) for n in range(40)])
    pages = [figures("lockstep-collapse", 1.0), as_metrics(idle_with(0.5, 20)), as_log(trends(1, 8, 0)), *drained()]
    pages += [
        as_metrics(every(preempting(60, 20), 15)),
        as_metrics(every(served(1, 2.6, 600), 15)),
        as_metrics(every(held_back(), 15)),
        as_metrics(every(hits(lambda t: 0.7 if t < 1500 else 0.05), 30)),
        figures("frozen-engine", 1.0),
        spoken({"running": 1}, again=3),
        spoken({"waiting": 1}, again=3),
    ]
    for records in (*logs, *pages, flush(needed_again=4), computed_again()):
        observer = Observer(asked)
        observer.watch.feed(records)
        observer.watch.settle()
    for report in (DATA / "reports").glob("*/report.txt"):
        with contextlib.suppress(CannotTell):
            observe(str(report), asked)
    workers = Observer(asked)
    sized = "INFO 04-14 22:03:3{0} [gpu_worker.py:227] Available KV cache memory: {0}0.00 GiB"
    workers.watch.feed(Log("a.log", datetime(2026, 4, 15, tzinfo=UTC)).records(map(sized.format, (1, 4))))
    workers.watch.settle()
    ranks = Observer(asked)
    for n in range(4):
        for rank, waiting, usage in ((0, 9, 1.0), (1, 0, 0.1)):
            ranks.watch.feed([Sample(f"m@h:1/{rank}", "x", n * S + 1, running=4, waiting=waiting, usage=usage)])
    ranks.watch.settle()
    counting = Observer(asked)
    for n in range(8):
        figures_now = Sample("m@h:1/0", "x", 15 * n * S + 1, 1, 1, 0.99, kv_pool_usage=0.1, state_pool_usage=0.99)
        counting.watch.feed([msgspec.structs.replace(figures_now, expired_leases=5 * n, finished=5 * n)])
    counting.watch.settle()
    passed_by(3, asked)
    assert asked.names == set(THRESHOLDS)


def drained() -> list[list[Sample | Fact]]:
    """Usage that follows prompts and does not fall in a drain; and more in use than live requests can hold."""
    usage, samples = 0.1, []
    for n in range(12):
        prompt = 100.0 + 150 * (n * 7 % 5)
        usage += prompt / 6_000
        samples.append(line(1 if n == 11 else 8, usage, prompt=prompt))
    fits = Fact(samples[0].engine, "x:0", "max_concurrency", 40.0)
    return [[*samples], [fits, *[line(1, 0.9)] * 10]]


def head_at_any_pace(settings: list[str]) -> Watched:
    return stuck.head_of_line([*settings, "stuck.head-of-line.min_steps=1"])[0]


GRACES: dict[str, tuple[Callable[[list[str]], Watched], Callable[[Watched, float], None]]] = {
    "leak.finished-held": (lambda s: scenes.finished_held(settings=s), lambda w, t: w.live(t, every=0.25)),
    "leak.remote-load-lost": (leaks.remote_load_lost, lambda w, t: w.live(t, every=0.25)),
    "leak.idle-not-polled": (leaks.idle_not_polled, lambda w, t: w.live(t, every=0.25)),
    "leak.deferred-free-stalled": (leaks.deferred_free_stalled, lambda w, t: w.live(t, every=0.25)),
    "leak.encoder-cache": (leaks.encoder_cache, lambda w, t: w.live(t, every=0.25)),
    "leak.unaccounted": (lambda s: scenes.unaccounted(settings=s), lambda w, t: w.live(t, every=0.25)),
    "stuck.never-fits": (lambda s: scenes.never_fits(settings=s)[0], lambda w, t: w.live(t, every=0.25)),
    "stuck.parked-loads": (stuck.parked_loads, lambda w, t: w.live(t, every=0.25)),
    "stuck.head-of-line": (
        head_at_any_pace,
        lambda w, t: w.live(t, every=0.25),
    ),
    "stuck.remote-load": (stuck.remote_load, lambda w, t: w.live(t, every=0.25)),
    "stuck.lost-wakeup": (lambda s: stuck.lost_wakeup(s)[0], lambda w, t: w.beat(t, every=0.25)),
    "stuck.promotion-starved": (stuck.promotion_starved, lambda w, t: w.live(t, every=0.25)),
    "stuck.grammar": (lambda s: stuck.grammar(s)[0], lambda w, t: w.live(t, every=0.25)),
    "stuck.zero-token": (stuck.zero_token, lambda w, t: w.live(t, every=0.25)),
    "stuck.encoder-budget": (lambda s: stuck.encoder_budget(s)[0], lambda w, t: w.live(t, every=0.25)),
    "stuck.front-end": (stuck.front_end, lambda w, t: w.live(t, every=0.25)),
    "stuck.engine-stalled": (lambda s: scenes.stalled(settings=s), lambda w, t: w.beat(t, every=0.25)),
}


def test_every_grace_is_tried_below() -> None:
    graces = {name.removesuffix(".grace_s") for name in THRESHOLDS if name.endswith(".grace_s")}
    assert {code for code in graces if not code.startswith("harm.")} == set(GRACES)  # those in test_unclaimed_harm


@pytest.mark.parametrize("grace_s", [None, 3.0, 30.0])
@pytest.mark.parametrize("code", GRACES)
def test_below_its_grace_it_is_pending_and_above_it_fires(code: str, grace_s: float | None) -> None:
    begin, later = GRACES[code]
    scene = begin([] if grace_s is None else [f"{code}.grace_s={grace_s}"])
    grace = THRESHOLDS[f"{code}.grace_s"].value if grace_s is None else grace_s
    later(scene, grace - 0.5)
    assert not scene.firing(code)
    (pending,) = [f for f in scene.watch.findings("pending") if f.code == code]
    assert pending.culprits.requests
    later(scene, 1.0)
    (firing,) = scene.firing(code)
    assert firing.id == pending.id
    assert not [f for f in scene.watch.findings("pending") if f.code == code]


def test_what_cannot_be_set_is_named() -> None:
    with pytest.raises(ValueError, match=r"no threshold 'leak\.finished-held\.grase_s'.*leak\.finished-held\.grace_s"):
        parse_settings(["leak.finished-held.grase_s=1"])
    with pytest.raises(ValueError, match=r"no threshold 'leak\.finishd-held\.grace_s'.* leak\.finished-held\.grace_s,"):
        parse_settings(["leak.finishd-held.grace_s=1"])
    with pytest.raises(ValueError, match=r"'soon' is not a number"):
        parse_settings(["leak.finished-held.grace_s=soon"])
    with pytest.raises(ValueError, match=r"'' is not a number"):
        parse_settings(["leak.finished-held.grace_s"])
    with pytest.raises(ValueError, match=r"'nan' is not a number"):
        parse_settings(["leak.finished-held.grace_s=nan"])
    assert parse_settings(["leak.unaccounted.grace_s=0.5"])(Unaccounted.grace_s) == 0.5
