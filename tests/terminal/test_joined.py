"""Several targets about one engine: one judgement, the surest, that has all the evidence."""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import pytest

from kvscope.lab.recorded_pages import page, rows, served
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.detectors.judgement import Evidence
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.terminal.report import joined, same_engine
from tests.detectors.test_logs import log
from tests.terminal.test_doctor import doctor_json

DATA = Path(__file__).parent.parent / "data"


def finding(**changed: object) -> FindingReport:
    """A real one, of a log, with what a test makes of it."""
    watch = Pipeline()
    watch.feed(log("never-freed.log.gz"))
    watch.settle()
    (found,) = (f for f in watch.findings() if f.code == "leak.finished-held")
    return msgspec.structs.replace(found, **changed)


def test_the_surest_judgement_has_the_evidence_of_all() -> None:
    page = finding(
        evidence=[Evidence("usage", 1.0, "%", "metrics")], since="2026-11-20T00:00:00Z", explanation="A page."
    )
    stream = finding(verdict="confirmed", evidence=[Evidence("blocks_held", 7)], explanation="A stream.", id="s")
    guess = finding(verdict="cannot-tell", evidence=[Evidence("told", 1)], explanation="A guess.")
    (one,) = joined([("a.log", [guess]), ("http://x", [page]), ("tcp://x", [stream])])
    assert (one.verdict, one.id) == ("confirmed", "s")
    assert [item.name for item in one.evidence] == ["blocks_held", "usage", "told"]
    assert one.explanation == "A stream. Also seen in http://x (likely) and a.log (cannot-tell)."
    assert one.since == min(stream.since or "", "2026-11-20T00:00:00Z")


def test_what_is_not_the_same_trouble_stays_apart() -> None:
    a, b = finding(), finding(code="collapse.lockstep")
    elsewhere = finding(engine="tiny@127.0.0.1:9000/0")
    assert joined([("a", [a, b]), ("b", [elsewhere])]) == [a, b, elsewhere]


def test_what_one_target_says_twice_is_two() -> None:
    """One finding for each request: what another target says goes to the first."""
    one, two = finding(id="1"), finding(id="2")
    guess = finding(verdict="cannot-tell", evidence=[Evidence("told", 1)])
    assert joined([("a", [one, two])]) == [one, two]
    for order in ([("a", [one, two]), ("b", [guess])], [("b", [guess]), ("a", [one, two])]):
        first, second = joined(order)
        assert [first.id, second.id] == ["1", "2"]
        assert first.evidence[-1].name == "told"
        assert second == two


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("tiny@127.0.0.1:8000/0", "tiny@localhost:8000/0", True),
        ("tiny@0.0.0.0:8000/0", "vllm@[::1]:8000/0", True),
        ("engine@127.0.0.1:8000/0", "tiny@127.0.0.1:8000/0", True),
        ("tiny@127.0.0.1:8000/0", "huge@127.0.0.1:8000/0", False),
        ("tiny@127.0.0.1:8000/0", "tiny@127.0.0.1:8000/1", False),
        ("tiny@10.0.0.1:8000/0", "tiny@127.0.0.1:8000/0", False),
        ("engine@a.log/0", "engine@b.log/0", False),
        ("org/tiny@[::]:8000/0", "org/tiny@127.0.0.1:8000/0", True),
    ],
)
def test_whether_two_names_are_of_one_engine(one: str, other: str, same: bool) -> None:
    assert same_engine(one, other) is same
    assert same_engine(other, one) is same


def test_a_log_and_a_page_of_one_engine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    its_log = tmp_path / "its.log"
    with served(page(rows("never-freed")[-1])) as server:
        text = gzip.decompress((DATA / "never-freed.log.gz").read_bytes()).decode()
        its_log.write_text(text.replace("'port': 8100", f"'port': {server.url.rpartition(':')[2].partition('/')[0]}"))
        quick = ("--for", "0.1", "--timeout", "2", "--set", "leak.finished-held.grace_s=0.5")
        quick += ("--set", "leak.finished-held.starved_s=0.5", "--set", "leak.finished-held.lease_s=0.5")
        code, printed = doctor_json(capsys, server.url, its_log, *quick)
    assert code == 1
    (one,) = [f for f in printed["findings"] if f["code"] == "leak.finished-held"]
    assert {item["source"] for item in one["evidence"]} == {"metrics", "log"}
    assert one["explanation"].endswith(f"Also seen in {its_log} (likely).")
    assert [balance["engine"] for balance in printed["balances"]] == [one["engine"]] * 2


def test_two_logs_of_one_engine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its own, and that of the machine, cut off before the end: one finding, of both."""
    lines = gzip.decompress((DATA / "never-freed.log.gz").read_bytes()).decode().splitlines(keepends=True)
    part = tmp_path / "part.log"
    part.write_text("".join(lines[:-5]))
    code, printed = doctor_json(capsys, DATA / "never-freed.log.gz", part)
    assert code == 1
    assert [target["engines"] for target in printed["targets"]] == [["tiny@127.0.0.1:8100/0"]] * 2
    (one,) = [f for f in printed["findings"] if f["code"] == "leak.finished-held"]
    assert {item["position"].partition(":")[0] for item in one["evidence"]} == {"never-freed.log.gz", "part.log"}
    assert "part.log (likely)." in one["explanation"]
