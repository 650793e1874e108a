"""The incident lab finds what it brings about, and nothing else; and its judge can say no."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest
from rich.console import Console

from kvscope.engine.config import EngineConfig
from kvscope.engine.faults import PLACES, parse_fault
from kvscope.lab import lab_report
from kvscope.lab.__main__ import main
from kvscope.lab.lab_run import LabRun, frames, live
from kvscope.lab.scenarios import HEALTHY, INCIDENTS, SCENARIOS, SHOWN_BY_HAND, Scenario
from kvscope.lab.simulated_run import among, exactly, no_requests, triggers
from kvscope.monitor.contract import journal
from kvscope.monitor.contract.description import parse_description
from kvscope.monitor.contract.wire import NO_REQUEST, Batch, decode
from kvscope.monitor.detectors.registry import CATALOGUE, THRESHOLDS
from kvscope.monitor.terminal.cli import main as monitor

SMALL_SAMPLE = (
    "leak.finished-held chat",
    "leak.unaccounted:every=3 sharing",
    "stuck.front-end:every=5 busy",
    "stuck.engine-stalled:after=200:limit=1 busy",
    "collapse.prefix-hits all",
    "corrupt.counter-drift chat",
    "sizing.kv-too-small ahead",
    "chat, one step ahead",
    "fetched from the host",
)

INCIDENTS_COMMAND = (sys.executable, "-m", "kvscope.lab")
"""In a process of its own: what watches over those that it starts lives as long as it does."""


def scenario(name: str) -> Scenario:
    return next(scenario for scenario in SCENARIOS if scenario.name == name)


@pytest.mark.parametrize("name", SMALL_SAMPLE)
def test_a_small_sample(name: str, tmp_path: Path) -> None:
    made = live(scenario(name), seed=0, keep=tmp_path)
    assert made.problems == []
    assert [fired.code for fired in made.fired] == ([made.code] if made.code else [])
    assert list(tmp_path.iterdir()) == []


def test_the_same_seed_is_the_same_run() -> None:
    one, again, other = (live(scenario("stuck.zero-token:limit=1 one"), seed) for seed in (1, 1, 2))
    one.real_s = again.real_s = 0.0
    assert one == again
    assert one.onset_s != other.onset_s


# -------------------------------------------------------------------- the judge can say no

LEAK = scenario("leak.unaccounted all")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (replace(LEAK, code=""), "false: leak.unaccounted"),
        (replace(LEAK, seconds=4.5), "missed"),
        (replace(LEAK, fault="leak.unaccounted:after=1000"), "not caused"),
        (replace(LEAK, grace=(), waits_s=-9.5), "late"),
        (replace(LEAK, onset=triggers(6)), "too early"),
        (replace(LEAK, requests=among(no_requests)), "requests named that the fault did not affect"),
        (
            replace(LEAK, blocks=exactly(lambda life: set(range(life.engine.pool.total)))),
            "affected that were not named",
        ),
    ],
)
def test_what_is_not_as_it_should_be_is_said_and_kept(
    wrong: Scenario, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = live(wrong, seed=0, keep=tmp_path)
    assert any(says in problem for problem in made.problems), made.problems
    (kept,) = tmp_path.iterdir()
    assert made.kept == str(kept)
    # What the lab hides from its monitor, the recording tells.
    monitor(["doctor", str(kept)])
    assert wrong.fault in capsys.readouterr().out


def test_a_harm_that_is_told_before_its_cause_names_those_alone_who_suffer(tmp_path: Path) -> None:
    busy = scenario("stuck.zero-token:every=4 busy")
    assert live(busy, seed=1, keep=tmp_path).problems == []
    wrong = live(replace(busy, requests=among(no_requests)), seed=1, keep=tmp_path)
    assert sum("requests named that the fault did not affect" in problem for problem in wrong.problems) == 2


def test_the_monitor_is_not_told_which_faults_are_on(tmp_path: Path) -> None:
    made = live(replace(LEAK, seconds=3.0), seed=0, keep=tmp_path)
    kept = Path(made.kept)
    stated = [frame for payload in journal.read(kept) if isinstance(frame := decode(payload), Batch)]
    received = list(frames(kept))
    assert [parse_description(batch.texts[NO_REQUEST]).faults for batch in stated if NO_REQUEST in batch.texts] == [
        [LEAK.fault]
    ]
    assert [parse_description(batch.texts[NO_REQUEST]).faults for batch in received if NO_REQUEST in batch.texts] == [
        []
    ]
    assert [batch.sequence for batch in received] == [batch.sequence for batch in stated]


# -------------------------------------------------------------------- the table


def test_every_fault_is_brought_about_in_three_ways_at_least() -> None:
    ways = {code: [each for each in INCIDENTS if each.code == code] for code in PLACES}
    assert {code for code, each in ways.items() if len(each) < 3} == set()
    assert {each.code for each in INCIDENTS if each.fault} == set(PLACES)
    names = [each.name for each in SCENARIOS]
    assert len(set(names)) == len(names)


def test_every_code_of_the_catalogue_is_brought_about_or_shown_by_hand() -> None:
    by_hand = {code for code in CATALOGUE if any(fnmatch(code, pattern) for pattern in SHOWN_BY_HAND)}
    assert CATALOGUE.keys() - {each.code for each in INCIDENTS} == by_hand


def test_enough_healthy_engines_are_looked_at() -> None:
    assert len(HEALTHY) * lab_report.SEEDS >= 60
    assert not any(each.code or each.fault or each.consequences for each in HEALTHY)


@pytest.mark.parametrize("each", SCENARIOS, ids=lambda each: each.name)
def test_the_table_is_consistent(each: Scenario) -> None:
    EngineConfig(**each.engine)
    assert not each.fault or parse_fault(each.fault).code == each.code
    assert set(each.grace) <= THRESHOLDS.keys()
    assert each.consequences <= CATALOGUE.keys()


# -------------------------------------------------------------------- the figures


def test_a_finding_that_is_missed_and_one_that_is_false_cost_recall_and_precision() -> None:
    right = live(LEAK, seed=0)
    missed = LabRun(LEAK.code, LEAK.name, 1, 2.0, onset_s=1.0, problems=["missed"])
    false = LabRun("", "chat", 2, 0.0, fired=right.fired[:1], problems=["false"])
    (figures,) = lab_report.figures([right, right, right, missed, false])
    assert (figures.recall, figures.precision, figures.right, figures.runs) == (3 / 4, 3 / 4, 3, 4)
    out = io.StringIO()
    lab_report.show([right, missed, false], Console(file=out, width=120))
    shown = out.getvalue()
    assert "2 runs not as they should be; 1 healthy ones" in shown
    assert f"{LEAK.name}, seed 1:" in shown


# -------------------------------------------------------------------- the command


def test_what_the_command_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--code", "leak.no-such"]) == 2
    assert "--code leak.no-such: no scenario causes it. There are collapse.cache-flushed" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sample_of_every_scenario(tmp_path: Path) -> None:
    assert len(lab_report.jobs([1])) == len(SCENARIOS) <= 150
    done = subprocess.run(
        [*INCIDENTS_COMMAND, "--scenarios", "--seed", "1", "--keep", tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.prove
def test_the_full_matrix(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with capfd.disabled():
        assert subprocess.run([*INCIDENTS_COMMAND, "--full", "--keep", tmp_path]).returncode == 0
