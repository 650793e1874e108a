"""A receiver that is not there: nothing is lost, or it is counted; what is wrong is refused in words."""

from __future__ import annotations

import logging.config
import time
from collections.abc import Iterator

import psutil
import pytest

from kvscope.monitor.base.supervision import Supervisor
from kvscope.monitor.contract.kinds import Load
from kvscope.monitor.contract.kinds import Status as RequestStatus
from kvscope.monitor.ledger.records import RequestState
from kvscope.monitor.outputs.otel.export_queue import BadEndpoint, ExportSender, Pace, Reasons, Sending
from kvscope.monitor.outputs.otel.otel_exporter import OtelConfig, OtelOutlet
from kvscope.monitor.outputs.prometheus import WatchCollector
from kvscope.monitor.questions.pipeline import EndedRequest
from tests.detectors.scenes import Watched
from tests.outputs.otel.receiver import GrpcReceiver, Receiver, receiving
from tests.outputs.otel.sent import busy, long_prefill, roots, sending
from tests.waiting import until


def test_what_a_receiver_misses_while_it_is_down_arrives_when_it_is_back(
    receiver: Receiver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")  # of one try
    scene = Watched(total=33)
    with sending(receiver.url, scene) as outlet:
        receiver.down()
        busy(scene)
        ended = scene.watch.take_ended()
        outlet.send(ended)
        assert not scene.alarms()
        until(lambda: outlet.figures()[0].waiting)
        assert [figures.sent for figures in outlet.figures()] == [0, 0, 0]
        until(lambda: not_arriving(caplog))
        receiver.up()
        until(lambda: outlet.figures()[0].sent == len(ended))
        assert {figures.dropped for figures in outlet.figures()} == {0}
        assert outlet.figures()[0].waiting == 0
    assert set(roots(receiver)) == {one.request.id for one in ended}
    (stated,) = not_arriving(caplog)
    assert "Failed to export" in stated  # why, as the exporter says it


def not_arriving(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if message.startswith("OpenTelemetry traces do not arrive")]


@pytest.fixture
def reasons() -> Iterator[Reasons]:
    made = Reasons()
    yield made
    made.stop()


def test_why_is_heard_after_logging_is_configured_anew(reasons: Reasons) -> None:
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})  # which closes every handler
    exporter = logging.getLogger("opentelemetry.exporter.otlp")
    exporter.warning("connection %s", "refused")
    exporter.error("given up")
    assert reasons.here() == "connection refused given up"


class Deaf:
    """An exporter whose receiver never answers."""

    def __init__(self) -> None:
        self.tries = 0

    def export(self, batch: list[int], /) -> Load:
        self.tries += 1
        return Load.FAILED

    def shutdown(self) -> None:
        pass


def test_too_much_is_dropped_from_its_old_end_and_counted(reasons: Reasons) -> None:
    deaf = Deaf()
    sending = Sending(Pace(60, 60, 60), reasons, Supervisor())
    sender = ExportSender[int]("traces", deaf, list, sending, capacity=100, batch=10)
    try:
        sender.put(0, 10)
        until(lambda: deaf.tries)  # the first is in hand
        for n in range(1, 50):
            sender.put(n, 10)
        assert sender.waiting == sender.capacity
        assert sender.dropped == 50 - 100 // 10
    finally:
        sender.begin_to_close()
        sender.close(time.monotonic() + 10)
    assert sender.dropped == 50
    assert (sender.sent, sender.waiting) == (0, 0)


def test_what_is_refused_for_too_long_makes_room_for_what_follows(reasons: Reasons) -> None:
    deaf = Deaf()
    sending = Sending(Pace(0.01, 0.01, 1.0), reasons, Supervisor())
    sender = ExportSender[int]("traces", deaf, list, sending, capacity=100, batch=1)
    try:
        sender.put(1)
        sender.put(2)
        until(lambda: sender.dropped == 2)
        assert deaf.tries >= 2 * 2
        assert sender.waiting == 0
    finally:
        sender.begin_to_close()
        sender.close(time.monotonic() + 10)


@pytest.mark.parametrize(
    "url", ["", "localhost:4317", "ftp://localhost", "grpc://", "grpc://localhost:none", "http://:4318"]
)
def test_an_address_that_is_none_is_refused_in_words(url: str) -> None:
    scene = Watched()
    with pytest.raises(BadEndpoint, match="grpc://HOST:4317"):
        OtelOutlet(OtelConfig(url), scene.watch, WatchCollector(scene.watch).collect)


@pytest.mark.parametrize(
    ("sample", "variable", "says"),
    [
        (1.5, "", "from 0 to 1"),
        (1.0, "OTEL_METRIC_EXPORT_INTERVAL", "milliseconds"),
        (1.0, "OTEL_EXPORTER_OTLP_TIMEOUT", "seconds"),
    ],
)
def test_a_setting_that_is_none_is_refused_in_words(
    sample: float, variable: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv(variable, "soon")
    scene = Watched()
    with pytest.raises(BadEndpoint, match=says):
        OtelOutlet(OtelConfig("grpc://localhost", sample), scene.watch, WatchCollector(scene.watch).collect)


def test_the_whole_path_may_be_given(over_http: Receiver) -> None:
    scene = busy(Watched(total=33))
    with sending(f"{over_http.url}/v1/traces/", scene) as outlet:
        outlet.send(scene.watch.take_ended())
    assert len(roots(over_http)) == 6
    assert len(over_http.snapshots) == 1


@pytest.mark.slow
def test_nothing_is_lost_while_a_receiver_is_down_for_half_a_minute(receiver: Receiver) -> None:
    scene = Watched(total=33)
    sent = 0
    with sending(receiver.url, scene, pace=Pace()) as outlet:
        receiver.down()
        back = time.monotonic() + 30
        while time.monotonic() < back:
            busy(scene)
            ended = scene.watch.take_ended()
            outlet.send(ended)
            sent += len(ended)
            time.sleep(1)
        receiver.up()
        until(lambda: outlet.figures()[0].sent == sent)
        assert {figures.dropped for figures in outlet.figures()} == {0}
    assert len({span.span_id for span in roots(receiver).values()}) == sent > 100


@pytest.mark.prove
def test_memory_is_flat_while_a_receiver_is_down_for_ten_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    """50 requests a second, each with a prefill of 100 steps, to an address that nobody listens at."""
    with receiving(GrpcReceiver) as gone:
        url = gone.url
    scene = Watched()
    resident = []
    with sending(url, scene, pace=Pace()) as outlet:
        began = time.monotonic()
        for number in range(50 * 600):
            outlet.follow([long_prefill(number)])
            record = RequestState(number, f"r-{number}", RequestStatus.FINISHED_STOPPED, arrived_ns=1, finished_ns=202)
            outlet.send([EndedRequest("gone@127.0.0.1:0/0", record, 0)])
            if number % 3000 == 2999:
                resident.append(psutil.Process().memory_info().rss / 1e6)
            time.sleep(max(0.0, began + number / 50 - time.monotonic()))
        traces = outlet.figures()[0]
    with capsys.disabled():
        print(f"\nMB resident, by the minute, with no receiver: {[round(mb) for mb in resident]}; {traces}")
    assert traces.dropped > 0
    assert traces.sent == 0
    # The queue is full after a minute and a half, and what the allocator makes of that is done in the fifth.
    assert max(resident[5:]) < 1.02 * resident[4]
