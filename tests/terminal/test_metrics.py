"""`monitor doctor` of an engine without a probe: its metrics page, and what a Prometheus server kept of it."""

from __future__ import annotations

import socket
import time
from datetime import datetime

import pytest

from kvscope.lab.recorded_pages import page, rows, served
from kvscope.monitor.terminal.cli import main
from tests.terminal.by_source import INCIDENTS
from tests.terminal.test_doctor import doctor_json

# -------------------------------------------------------------------- a page


def test_a_page_is_watched_until_it_is_clear(capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks in use with nothing running may be a request's end, or a connector's: that is not called healthy."""
    with served(page(rows("never-freed")[-1])) as server:
        grace = "leak.finished-held.starved_s"
        code, printed = doctor_json(capsys, server.url, "--for", "0.1", "--set", f"{grace}=0.5")
        assert code == 1
        assert [f["code"] for f in printed["findings"]] == ["leak.finished-held", "blind.counter-lag"]
        assert printed["targets"][0]["kind"] == "metrics"
        (balance,) = printed["balances"]
        assert (balance["signal"], balance["total"], balance["status"]) == ("metrics", None, "idle")
        assert balance["usage"] == pytest.approx(rows("never-freed")[-1]["kv_usage"], abs=1e-4)
        code, printed = doctor_json(capsys, server.url, "--for", "0.1", "--set", f"{grace}=60", "--timeout", "1")
        assert code == 3
        assert "leak.finished-held" in printed["targets"][0]["error"]
        assert "--timeout" in printed["targets"][0]["error"]


@pytest.mark.parametrize("deferred", [0, 3, 110])
def test_a_page_of_a_full_pool_that_serves_nothing_is_not_healthy(
    capsys: pytest.CaptureFixture[str], deferred: int
) -> None:
    waits = {"waiting": 110.0, "wait_capacity": 110.0 - deferred, "wait_deferred": float(deferred)}
    with served(page({**rows("never-freed")[-1], **waits, "running": 0.0, "kv_usage": 0.99})) as server:
        code, printed = doctor_json(capsys, server.url, "--for", "0.1", "--timeout", "1")
    assert code == 3
    assert "leak.finished-held" in printed["targets"][0]["error"]


def test_a_healthy_page(capsys: pytest.CaptureFixture[str]) -> None:
    with served(page(rows("never-freed")[0])) as server:
        code, printed = doctor_json(capsys, server.url, "--for", "0.1")
    assert code == 0
    assert [f["code"] for f in printed["findings"]] == ["blind.counter-lag"]


@pytest.mark.parametrize("answer", ["<html>Not found</html>", "", 404])
def test_no_page(capsys: pytest.CaptureFixture[str], answer: str | int) -> None:
    with served(answer) as server:
        code, printed = doctor_json(capsys, server.url)
    assert code == 3
    assert server.url in printed["targets"][0]["error"]


def test_a_page_that_hangs(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        code, printed = doctor_json(capsys, f"{url}/metrics", "--timeout", "0.2")
        assert code == 3
        assert "did not answer within 0.2 s" in printed["targets"][0]["error"]
        code, printed = doctor_json(capsys, "--prometheus", url, "--timeout", "0.2")
        assert code == 3
        assert "--since" in printed["targets"][0]["error"]


@pytest.mark.parametrize("url", ["http://[::1/metrics", "http:///metrics", "http://a:b/metrics"])
def test_what_is_no_address(capsys: pytest.CaptureFixture[str], url: str) -> None:
    for arguments in ((url,), ("--prometheus", url)):
        code, printed = doctor_json(capsys, *arguments)
        assert code == 2
        assert "is not an address" in printed["targets"][0]["error"]


def test_requests_and_blocks_are_not_on_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    with served(page(rows("never-freed")[0])) as server:
        for thing, name in (("request", "r-1"), ("block", "1")):
            assert main(["explain", thing, name, server.url, "--for", "0.1"]) == 3
            assert "needs the event stream: its metrics page has totals only" in capsys.readouterr().err


def test_a_password_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with served(page(rows("never-freed")[0])) as server:
        for answer in (page(rows("never-freed")[0]), 404):
            server.answer = answer
            url = server.url.replace("//", "//someone:s3cret@")
            for arguments in ((url,), ("--prometheus", url)):
                _, printed = doctor_json(capsys, *arguments, "--for", "0.1")
                assert "s3cret" not in str(printed)


# -------------------------------------------------------------------- a Prometheus server's history


def test_the_past_of_engines_that_nobody_watched(prometheus: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = doctor_json(capsys, "--prometheus", prometheus, "--since", "1h")
    assert code == 1
    names = (*INCIDENTS, "restarted")
    assert {balance["engine"] for balance in printed["balances"]} == {f"tiny@{name}:8000/0" for name in names}
    for name in names:
        found = [f for f in printed["findings"] if f["engine"] == f"tiny@{name}:8000/0"]
        grave = [f for f in found if f["severity"] != "info"]
        short = "stuck.engine-stalled"  # it lasted 7 s, which a pause may
        assert all(f["verdict"] == ("cannot-tell" if f["code"] == short else "likely") for f in grave)
        assert all(f["missing"] for f in grave)
        assert [f["code"] for f in found if f["severity"] == "info"] == ["blind.counter-lag"]
    leaks = [f["engine"] for f in printed["findings"] if f["code"] == "leak.finished-held"]
    assert sorted(leaks) == ["tiny@never-freed:8000/0", "tiny@restarted:8000/0"]
    states = {f["engine"]: f["state"] for f in printed["findings"] if f["severity"] != "info"}
    assert states["tiny@restarted:8000/0"] == "resolved"  # by the restart
    assert states["tiny@never-freed:8000/0"] == "firing"
    (target,) = printed["targets"]
    assert target["kind"] == "prometheus"
    assert f"of {len(names)} engines" in target["notes"][0]


def test_a_past_that_has_nothing(prometheus: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = doctor_json(capsys, "--prometheus", prometheus, "--since", "1s")
    assert code == 3
    assert "scrape targets" in printed["targets"][0]["error"]
    assert doctor_json(capsys, "--prometheus", prometheus, "--since", "3h", "--until", "2h")[0] == 3
    _, whole = doctor_json(capsys, "--prometheus", prometheus, "--since", "3h")
    last = {balance["engine"]: balance["at"] for balance in whole["balances"]}
    ended_s_ago = time.time() - min(map(datetime.fromisoformat, last.values())).timestamp()
    before = f"{round(ended_s_ago) + 30}s"
    _, until = doctor_json(capsys, "--prometheus", prometheus, "--since", "3h", "--until", before)
    assert all(balance["at"] < last[balance["engine"]] for balance in until["balances"])


def test_what_is_no_prometheus_server(capsys: pytest.CaptureFixture[str]) -> None:
    with served(page(rows("never-freed")[0])) as server:
        code, printed = doctor_json(capsys, "--prometheus", server.url)
        assert code == 3
        assert "does not answer as a Prometheus server does" in printed["targets"][0]["error"]
        server.answer = '{"status": "error", "errorType": "bad_data", "error": "too many samples"}'
        code, printed = doctor_json(capsys, "--prometheus", server.url)
        assert code == 3
        error = printed["targets"][0]["error"]
        assert "refuses the query (bad_data): see its log for the reason" in error
        assert "too many samples" not in error
        series = '{"metric": {"__name__": "vllm:num_requests_running"}, "values": [[%s, "%s"]]}'
        for at, value in (("1.5", "many"), ("-1", "0"), ("1e300", "0"), ("1.5", "NaN")):
            server.answer = '{"status": "success", "data": {"result": [' + series % (at, value) + "]}}"
            code, printed = doctor_json(capsys, "--prometheus", server.url)
            assert code == 3


@pytest.mark.parametrize("since", ["", "2", "h", "2h3", "-1h", "two hours"])
def test_how_far_back(capsys: pytest.CaptureFixture[str], since: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--prometheus", "http://127.0.0.1:9", f"--since={since}"])
    assert "1d12h" in capsys.readouterr().err
