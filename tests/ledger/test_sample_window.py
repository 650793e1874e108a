"""The selections of a window of samples are those that a search of the whole window would find."""

from __future__ import annotations

import random

import msgspec
import pytest

from kvscope.monitor.contract.samples import Sample
from kvscope.monitor.detectors.leak.usage_series import idle_usage_floors
from kvscope.monitor.ledger.engine_ledger import MAX_SAMPLES, EngineLedger
from kvscope.monitor.ledger.pool_forecast import Floor, IdleFloors
from kvscope.monitor.ledger.sample_window import MOST_BY_INDEX, SampleWindow


def drawn(rng: random.Random) -> Sample:
    """A sample of a log or a page, with figures or without them, of an engine that is idle half of the time."""
    idle = rng.random() < 0.5
    return Sample(
        "engine",
        "",
        running=rng.choice([0, 0, None] if idle else [1, 9]),
        waiting=rng.choice([0, None] if idle else [0, 4]),
        deferred=rng.choice([None, 0, 0, 0, 1]),
        usage=rng.choice([None, *(rng.random() for _ in range(4))]),
        generation_tokens_per_s=rng.choice([0.0, 0.0, 12.5]),
        generation_tokens=rng.choice([None, None, 70]),
        source=rng.choice(["log", "log", "metrics"]),
    )


@pytest.mark.parametrize("seed", range(20))
def test_selections_follow_the_window_as_it_moves_on_and_after_a_restart(seed: int) -> None:
    rng = random.Random(seed)
    window, kept = SampleWindow(40), list[Sample]()
    for _ in range(200):
        if rng.random() < 0.01:
            window.clear()
            kept.clear()
        window.append(sample := drawn(rng))
        kept = [*kept, sample][-40:]
        for same in (window, window.copy()):
            assert list(same) == kept
            with_usage = [one for one in kept if one.usage is not None and one.running is not None]
            assert list(same.with_usage) == with_usage
            assert list(same.of_log) == [one for one in kept if one.source == "log"]
            assert list(same.pages_of_log) == [one for one in same.of_log if one.generation_tokens is not None]
            assert all(with_usage[index] is one for index, one in same.around_idle())


@pytest.mark.parametrize("seed", range(20))
def test_floors_are_those_of_all_samples_of_the_window(seed: int) -> None:
    rng = random.Random(seed)
    ledger = EngineLedger("engine")
    for number in range(MAX_SAMPLES + 50):
        ledger.apply(msgspec.structs.replace(drawn(rng), restarted=rng.random() < 0.001))
        if number % 10 == 0 or number > MAX_SAMPLES:
            assert idle_usage_floors(ledger) == floors_of_all(ledger)


def floors_of_all(ledger: EngineLedger) -> list[Floor]:
    floors = IdleFloors()
    for index, one in enumerate(ledger.samples.with_usage):
        idle = not (one.running or one.waiting or one.deferred)
        floors.look(index, idle=idle, worked=bool(one.generation_tokens_per_s), in_use=one.usage or 0.0)
    return floors.rising()


def test_a_slice_of_a_window_is_that_of_a_list() -> None:
    rng = random.Random(1)
    window = SampleWindow(3 * MOST_BY_INDEX)
    for _ in range(5 * MOST_BY_INDEX):
        window.append(drawn(rng))
        kept = list(window)
        for _ in range(10):
            cut = slice(*(rng.choice([None, rng.randrange(-60, 60)]) for _ in range(2)))
            found = window[cut]
            assert len(found) == len(kept[cut])
            assert all(one is other for one, other in zip(found, kept[cut], strict=True))
        assert window[-1] is kept[-1]
