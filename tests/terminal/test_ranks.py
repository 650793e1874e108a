"""Event streams of one server's ranks, looked at together: each knows the others."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.terminal.test_doctor import doctor_json
from tests.waiting import PATIENCE_S
from tests.web.parts import Engine

AT_ONCE = ("--set", "stuck.engine-stalled.grace_s=1", "--set", "stuck.rank-diverged.after_s=0.5")


def test_a_rank_that_stands_still_beside_one_that_goes_on(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    goes_on, stands_still = "m@h:1/0", "m@h:1/1"
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    with Engine(tmp_path / "0", goes_on) as one, Engine(tmp_path / "1", stands_still) as other:
        go_on = threading.Event()
        other.soon(lambda: (other.lab.arrive(40, max_tokens=400), go_on.wait()))
        try:
            deadline = time.monotonic() + PATIENCE_S
            while other.lab.vitals().running + other.lab.vitals().waiting == 0:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            code, alone = doctor_json(capsys, other.events, *AT_ONCE)
            assert code == 1
            assert [f["code"] for f in alone["findings"] if f["severity"] != "info"] == ["stuck.engine-stalled"]
            code, both = doctor_json(capsys, one.events, other.events, *AT_ONCE)
            assert code == 1
            (finding,) = [f for f in both["findings"] if f["severity"] != "info"]
            assert (finding["code"], finding["engine"]) == ("stuck.rank-diverged", stands_still)
            assert [target["engines"] for target in both["targets"]] == [[goes_on], [stands_still]]
            assert [balance["engine"] for balance in both["balances"]] == [goes_on, stands_still]
        finally:
            go_on.set()
