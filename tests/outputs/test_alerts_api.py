"""What can be asked and done about alerts over HTTP, from the command line, and with the page's buttons."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest

from kvscope.monitor.outputs.alerting.alerting import Alerts, AlertsConfig
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.terminal.cli import main
from kvscope.monitor.terminal.commands.alerts import AlertsClient
from kvscope.monitor.terminal.report import CANNOT_TELL, FINDINGS, NOTHING, USAGE
from tests.finding_transitions import AlertMessages
from tests.receiving import PATH, Server
from tests.test_api import served
from tests.waiting import until

TOKEN = "a-token"


@pytest.fixture
def receiver() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def alerts(receiver: Server) -> Iterator[Alerts]:
    alerts = Alerts(AlertsConfig((receiver.url,), allow_private=True, schedule=(0.0,)))
    alerts.start()
    yield alerts
    alerts.close()


@pytest.fixture
def url(alerts: Alerts) -> Iterator[str]:
    with served(Pipeline(), TOKEN, alerts=alerts) as address:
        yield address


def test_from_the_command_line(
    url: str, alerts: Alerts, receiver: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")

    def stated(*arguments: str, code: int = NOTHING) -> str:
        assert main(["alerts", *arguments, "--url", url, "--token", TOKEN]) == code
        out, error = capsys.readouterr()
        return out + error

    name = alerts.receivers[0].name
    assert stated("test") == f"delivered  {name}  answered 204\n"
    receiver.answers = [(503, {})]
    assert stated("test", name, code=FINDINGS) == f"NOT delivered  {name}  answered 503\n"
    assert "there is no receiver pager here; there are: " + name in stated("test", "pager", code=USAGE)
    assert stated("silence", "code=stuck.*", "--for", "2h", "--comment", "[we] know") == "silence 1\n"
    assert "NAME=PATTERN" in stated("silence", "stuck.*", "--for", "2h", code=USAGE)
    receiver.answers = [(500, {})]
    received_alerts = AlertMessages()
    alerts.put(received_alerts.fire(1) + received_alerts.fire(1, "stuck.engine-stalled"))
    until(lambda: alerts.outbox.pending() == 0)
    shown = stated("list")
    for part in (name, "127.0.0.1", "leak.finished-held", "given-up", "silenced", "code=stuck.*", "[we] know"):
        assert part in shown
    assert PATH not in shown
    number = next(one.number for one in alerts.view().deliveries if one.state == "given-up")
    assert stated("replay", str(number)) == ""
    until(lambda: {one.state for one in alerts.view().deliveries if one.kind != "test"} == {"delivered", "silenced"})
    assert "no delivery 99" in stated("replay", "99", code=USAGE)
    assert stated("unsilence", "1") == ""
    assert "no silence 1" in stated("unsilence", "1", code=USAGE)
    until(lambda: {one.state for one in alerts.view().deliveries if one.kind != "test"} == {"delivered"})


def test_who_may_not_is_told_so(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alerts", "test", "--url", url, "--token", "another"]) == CANNOT_TELL
    assert "wants a token" in capsys.readouterr().err
    assert main(["alerts", "test", "--url", "http://127.0.0.1:1", "--token", TOKEN]) == CANNOT_TELL
    assert "is `monitor serve` running there?" in capsys.readouterr().err


def test_a_silence_that_is_none_is_refused(url: str) -> None:
    with httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False) as client:
        for body in ("", "{}", '{"matchers": ["code=*"], "seconds": "soon"}', '{"matchers": [], "seconds": 5}'):
            refused = client.post("/api/alerts/silences", content=body)
            assert refused.status_code == 400
            assert "silence" in refused.json()["detail"]


def test_the_pages_buttons(url: str, alerts: Alerts, receiver: Server) -> None:
    """Each goes where its form says, as a browser would send it, and leads back to the page."""
    alerts.put(AlertMessages().fire(1, explanation="<script>alert(1)</script>"))
    until(lambda: alerts.outbox.pending() == 0)
    with httpx2.Client(base_url=url, headers={"Accept": "text/html"}, trust_env=False) as client:
        client.get(f"/metrics?token={TOKEN}")
        state = alerts.view()
        (receiver_view,), (delivery,) = state.receivers, state.deliveries
        page = {"Referer": f"{url}/alerts?code=leak.*"}
        for button in (f"test?receiver={receiver_view.name}", f"deliveries/{delivery.number}/replay"):
            answer = client.post(f"/api/alerts/{button}", headers=page)
            assert (answer.status_code, answer.headers["location"]) == (303, "/alerts?code=leak.%2A")
        form = {"matchers": ["code=stuck.*", ""], "seconds": "60", "comment": "bo knows"}
        set_now = client.post("/api/alerts/silences", data=form, headers=page)
        (silence,) = alerts.view().silences
        assert set_now.headers["location"] == f"/alerts?code=leak.%2A&silenced={silence.number}"
        ended = client.post(
            f"/api/alerts/silences/{silence.number}/end", headers={"Referer": url + set_now.headers["location"]}
        )
        assert ended.headers["location"] == "/alerts?code=leak.%2A"
        assert alerts.view().silences == []
    until(lambda: len(receiver.got) == 3)


def test_a_service_that_sends_none_says_so() -> None:
    with served(Pipeline()) as address, pytest.raises(ValueError, match="sends no alerts"):
        AlertsClient(address).view()
