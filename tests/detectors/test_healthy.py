"""A healthy engine, whatever its traffic and whatever is lost of it, gives no alarm at any moment."""

from __future__ import annotations

import random

import pytest

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.detectors.findings import severity_at_least
from tests.detectors.scenes import ENGINE, Observer, Watched
from tests.drawn_seeds import drawn_seeds


@pytest.mark.parametrize("seed", drawn_seeds(4, 12))
def test_random_traffic(seed: int) -> None:
    """Pools of all sizes, priorities, preemptions, aborts, shared prefixes, transfers, pauses; each request fits."""
    rng = random.Random(seed)
    block_size = rng.choice((2, 4, 16))
    total = rng.choice((20, 65, 200))
    fits = (total - 1) * block_size
    scene = Watched(
        total=total,
        block_size=block_size,
        max_num_seqs=rng.choice((3, 8, 32)),
        max_num_batched_tokens=rng.choice((16, 64, 512)),
        policy=rng.choice(("fcfs", "priority")),
        prefix_caching=rng.random() < 0.7,
        connector_share=rng.choice((0.0, 0.5, 1.0)),
        load_share=rng.choice((0.0, 0.3)),
        lease_s=rng.choice((0.0, 30.0)),
        async_scheduling=rng.random() < 0.5,
        seed=seed,
    )
    prefixes = [[rng.randrange(9) for _ in range(fits // 4)] for _ in range(3)]
    requests = []
    for _ in range(700):
        if rng.random() < 0.3:
            prompt = rng.choice(prefixes)[: rng.randint(0, fits // 4)]
            prompt = prompt + [rng.randrange(1000) for _ in range(rng.randint(1, fits // 4))]
            requests.append(scene.lab.arrive(prompt, max_tokens=rng.randint(1, fits // 2), priority=rng.randint(0, 2)))
        if requests and rng.random() < 0.1:
            scene.lab.abort(requests.pop(rng.randrange(len(requests))))
        if rng.random() < 0.02 and not scene.lab.scheduler.running:
            scene.live(rng.randint(1, 4))
        scene.steps(1, rng.choice((0.005, 0.02, 0.1, 0.5)))
        found = scene.watch.findings() + scene.watch.findings("pending")
        # Of a request that waits half a minute behind more urgent ones, kvscope says that the policy is why.
        found = [f for f in found if "the policy starves it" not in f.explanation]
        worst = [f.explanation for f in found if severity_at_least(f.severity, "warning")]
        assert worst == []
    assert scene.ledger.state.totals.finished


def test_the_same_lab_ill_is_noticed() -> None:
    """The counterpart: what finds nothing above does find something."""
    scene = Watched(faults=["leak.unaccounted"])
    for _ in range(5):
        scene.lab.arrive(20, max_tokens=30)
        scene.steps(4)
        scene.lab.abort(scene.lab.scheduler.running[0])
    scene.live(5)
    assert set(scene.alarms()) == {"leak.unaccounted"}


@pytest.mark.parametrize("seed", drawn_seeds(4, 10))
def test_random_traffic_of_which_batches_are_lost(seed: int) -> None:
    """One batch in a hundred is lost for good, again and again: that is said, and nothing is made of it."""
    rng = random.Random(seed)
    total = rng.choice((65, 200, 2000))
    lab = Lab(
        engine=ENGINE,
        total=total,
        seed=seed,
        connector_share=rng.choice((0.0, 0.5)),
        max_num_batched_tokens=64,
        load_share=rng.choice((0.0, 0.3)),
        async_scheduling=rng.random() < 0.5,
    )
    observer = Observer()
    observer.watch.feed(lab.frames)
    requests = []
    for _ in range(500):
        if rng.random() < 0.3:
            requests.append(lab.arrive(rng.randint(1, 60), max_tokens=rng.randint(1, 60)))
        if requests and rng.random() < 0.1:
            lab.abort(requests.pop(rng.randrange(len(requests))))
        seen = len(lab.frames)
        lab.step(rng.choice((0.01, 0.05, 0.3)))
        observer.watch.feed(frame for frame in lab.frames[seen:] if rng.random() > 0.01)
        assert [f.explanation for f in observer.firing() if severity_at_least(f.severity, "warning")] == []
    assert observer.ledger.losses
    assert observer.firing("blind.stream-gap")


def test_a_leak_is_found_though_batches_are_lost() -> None:
    """The idle engine's own counter shows it, as likely; the audit that puts the ledger right confirms it."""
    scene = Watched(faults=["leak.unaccounted"])
    request = scene.lab.arrive(20, max_tokens=100)
    scene.steps(10)
    scene.lab.step()
    scene.skip()
    scene.lab.abort(request)
    scene.steps(1)
    assert scene.ledger.uncertain_since_ns > 0
    scene.beat(4)
    found = scene.only("leak.unaccounted")
    assert found.verdict == "likely"
    assert scene.ledger.uncertain_since_ns > 0
    scene.live(4, every=0.1)
    assert scene.ledger.uncertain_since_ns == 0
    finding = scene.only("leak.unaccounted")
    assert finding.verdict == "confirmed"
    assert finding.id == found.id
