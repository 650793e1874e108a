"""The soak of `monitor serve`: `make prove` runs it for a quarter of an hour, MONITOR_SOAK_SECONDS=N for N seconds."""

from __future__ import annotations

import os

import pytest

from kvscope.lab.chaos.fleet_process import PublishedTotals
from kvscope.lab.chaos.service_process import ProcessCost
from kvscope.lab.chaos.soak import TWO_HOURS_S, SoakSample, problems_of, rate, running_soak, soak, table_of

SOAK_SECONDS = float(os.environ.get("MONITOR_SOAK_SECONDS", "900"))


def sample(at_s: float, pss: int, lost: int = 0, events: int = 0, failed: int = 0) -> SoakSample:
    published = PublishedTotals(events=events, at_s=1 + at_s)
    return SoakSample(at_s, ProcessCost(pss, pss, pss, 100, 50, at_s / 2), published, lost, 0.1, failed)


def test_growth_losses_and_failed_questions_are_problems() -> None:
    assert problems_of([sample(at, 1000) for at in range(8)]) == []
    assert problems_of([sample(at, 1000 + (at >= 4) * 20) for at in range(8)]) == []  # 2 %
    grown = problems_of([sample(at, 1000 + (at >= 4) * 30) for at in range(8)])
    assert grown == ["PSS grew by 3.0% from one half to the next", "RSS grew by 3.0% from one half to the next"]
    assert problems_of([sample(at, 1000, lost=at) for at in range(8)]) == ["7 batches or events were lost"]
    assert problems_of([sample(at, 1000, failed=at) for at in range(8)]) == ["7 questions failed"]


def test_the_rate_is_what_was_published_by_the_fleets_own_clock() -> None:
    assert rate([sample(0, 1), sample(10, 1, events=500)], "events") == 50


@pytest.mark.prove
def test_the_monitor_of_25_engines_stays_within_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    budget_bytes = 768 << 20
    with running_soak(25, 5.0, "768M") as (fleet, service):
        samples = soak(SOAK_SECONDS, fleet, service, 25)
    with capsys.disabled():
        print(f"\n{table_of(samples, 25)}")
    assert max(each.cost.rss for each in samples) <= budget_bytes
    assert not samples[-1].batches_lost
    if SOAK_SECONDS >= TWO_HOURS_S:
        assert not problems_of(samples)
