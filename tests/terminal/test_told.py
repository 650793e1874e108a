"""`monitor doctor` on what people write: a report without a log in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvscope.monitor.terminal.cli import main
from tests.terminal.test_doctor import doctor_json

DATA = Path(__file__).parent.parent / "data"
SEED = DATA / "seed-001.txt"
CAPACITY = round(5.70 * 262_144)
EACH = 80_000 + 800


def values(finding: dict[str, Any]) -> dict[str, Any]:
    return {item["name"]: item["value"] for item in finding["evidence"]}


def test_the_report_of_a_collapse_gives_a_hypothesis(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = doctor_json(capsys, SEED)
    assert code == 1
    (finding,) = printed["findings"]
    assert (finding["code"], finding["verdict"]) == ("collapse.lockstep", "cannot-tell")
    found = values(finding)
    assert found["pool_capacity"] == CAPACITY
    for clients in (18, 15):
        assert found[f"demand_of_{clients}"] == clients * EACH
        assert found[f"demand_of_{clients}_share"] == round(100 * clients * EACH / CAPACITY, 1)
    assert found["usage_peak_reported"] == pytest.approx(found["demand_of_15_share"], abs=1.1)
    assert {item["source"] for item in finding["evidence"]} == {"report"}
    assert f"at least {-(-18 * 80_000 // 65_536)} steps" in finding["explanation"]
    assert "num_preemptions" in finding["missing"]
    assert "event stream" in finding["missing"]
    (target,) = printed["targets"]
    assert target["kind"] == "prose"
    assert target["engines"] == ["default_model@[::]:8000/0"]
    assert any(f"{18 * EACH:,}" in note and f"{15 * EACH:,}" in note for note in target["notes"])


def test_more_than_the_pool_holds_leaves_preemption_open(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = tmp_path / "report.txt"
    report.write_text(SEED.read_text().replace("18", "36").replace("15", "30"))
    _, printed = doctor_json(capsys, report)
    (finding,) = printed["findings"]
    assert values(finding)["demand_of_36"] == 36 * EACH
    assert "preemption explains the fall as well" in finding["explanation"]


@pytest.mark.parametrize("left_out", ["Maximum concurrency", "vllm bench serve"], ids=["pool", "load"])
def test_without_one_of_its_parts_the_words_alone_give_hypotheses(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, left_out: str
) -> None:
    report = tmp_path / "report.txt"
    report.write_text("\n".join(line for line in SEED.read_text().splitlines() if left_out not in line))
    _, printed = doctor_json(capsys, report)
    assert 1 <= len(printed["findings"]) <= 3
    assert {finding["verdict"] for finding in printed["findings"]} == {"cannot-tell"}
    assert "collapse.lockstep" in [finding["code"] for finding in printed["findings"]]


def test_a_report_without_the_fall_has_no_hypothesis_of_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = tmp_path / "report.txt"
    report.write_text("\n".join(line for line in SEED.read_text().splitlines() if "%" not in line))
    _, printed = doctor_json(capsys, report)
    assert "collapse.lockstep" not in [finding["code"] for finding in printed["findings"]]


@pytest.mark.parametrize(("least", "collapses"), [(0.5, True), (0.51, False)])
def test_a_fall_of_less_than_the_limit_is_no_collapse(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, least: float, collapses: bool
) -> None:
    report = tmp_path / "report.txt"
    report.write_text(SEED.read_text().replace("从100%掉到0%", "从75%掉到25%"))
    _, printed = doctor_json(capsys, report, "--set", f"collapse.lockstep.min_share={least}")
    codes = [each["code"] for each in printed["findings"] if "usage_reported_before" in values(each)]
    assert codes == ["collapse.lockstep"] * collapses


def test_what_the_tables_show_of_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    for style in ("table", "markdown"):
        assert main(["doctor", str(SEED), "--format", style]) == 1
        shown = " ".join(capsys.readouterr().out.split())
        assert "a report and not a log" in shown
        assert f"{CAPACITY:,}" in shown


def test_a_bill_is_told_though_nothing_can_be_judged(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = doctor_json(capsys, DATA / "seed-002.log")
    assert code == 3
    (note,) = printed["targets"][0]["notes"]
    main(["explain", "memory", "--log", str(DATA / "seed-002.log"), "--format", "json"])
    breakdown = json.loads(capsys.readouterr().out)
    for name, size in breakdown["parts"].items():
        assert f"{size / 2**30:.2f} {name}" in note
    assert f"--kv-cache-memory={breakdown['suggestions']['fit_requested_bytes']}" in note


OMITTED = """The KV cache is sized by a memory profile, which ends before CUDA graphs are captured and leaves them out.
On another model with gpu-memory-utilization=0.99 the capture then ends in OOM.
"""


def test_a_report_on_graphs_beside_a_profile_that_left_them_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    breakdown = (DATA / "seed-002.log").read_text()
    report = tmp_path / "report.txt"
    report.write_text(OMITTED + breakdown)
    code, printed = doctor_json(capsys, report)
    assert code == 1
    (finding,) = [each for each in printed["findings"] if each["severity"] == "warning"]
    assert (finding["code"], finding["verdict"]) == ("sizing.kv-too-large", "likely")
    evidence = {each["name"]: each["value"] for each in finding["evidence"]}
    assert 0.6 < evidence["graphs_actual"] / 2**30 < 0.7
    assert 0.6 < evidence["above_the_share"] / 2**30 < 0.7
    for which in ("fit_requested", "use_all"):
        assert abs(evidence[f"suggested_{which}"] - evidence[f"computed_{which}"]) < 30 << 20
    assert "to use all of the device takes 16.98 GiB more than the share" in finding["explanation"]
    assert "to fit into the requested share adds up" in finding["explanation"]

    # Another suggestion that the device cannot hold; a pool within the share; a question without a complaint.
    report.write_text(OMITTED + breakdown.replace("169914314752", "179914314752"))
    finding = next(each for each in doctor_json(capsys, report)[1]["findings"] if each["severity"] == "warning")
    assert "to use all of the device overcommits the device by 9.1" in finding["explanation"]
    for text in (OMITTED + breakdown.replace("152379699200", "151379699200"), "Why?\n" + breakdown):
        report.write_text(text)
        assert not [each for each in doctor_json(capsys, report)[1]["findings"] if each["severity"] != "info"]


def test_an_explanation_of_what_may_happen_is_no_complaint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = tmp_path / "report.txt"
    report.write_text(
        "How much of the device is the cache? When it starts, vLLM reserves most of the GPU memory for it.\n"
        "If you find that it is OOMing, lower the share. A larger one might end in an out-of-memory error.\n"
    )
    code, printed = doctor_json(capsys, report)
    assert code == 0
    assert [(each["code"], each["verdict"]) for each in printed["findings"]] == [("held.pool-reserved", "cannot-tell")]
    report.write_text(report.read_text() + "It ended with an out-of-memory error.\n")
    codes = {each["code"] for each in doctor_json(capsys, report)[1]["findings"]}
    assert "held.pool-reserved" not in codes
