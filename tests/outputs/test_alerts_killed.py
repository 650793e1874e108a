"""The service is killed at random moments, its receiver fails half of the time, and every transition is told.

Each engine is in trouble until the receiver has heard of it, then well until it has heard of that, and so on: a
transition that was lost would be waited for in vain. Half of the kills come at random moments, half just as something
is sent.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.outputs.alerting.outbox import FIRES
from kvscope.monitor.probes.publisher import Publisher
from tests.receiving import Got, Server
from tests.waiting import until

LOOK_AGAIN_S = 8.0
"""Long enough for a service to start and to hear an engine on a busy machine."""
NEVER = 1 << 60


class Engine(threading.Thread):
    """A real pool and scheduler that publish, idle but for a request now and then, whose KV somebody else should take:
    while `deaf`, nobody says that they have.
    """

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__()
        self.name = f"lab-{number}@127.0.0.1:0/0"
        self.events = f"ipc://{folder}/events-{number}"
        self.deaf = False
        self.stopping = False
        self.lab = Lab(connector_share=1.0, clock=time, pack=False, engine=self.name)
        self.publisher = Publisher(
            self.lab.log,
            self.name,
            self.lab.vitals,
            events=self.events,
            replay=f"{self.events}-replay",
            heartbeat_s=0.2,
        )

    def run(self) -> None:
        self.publisher.start()
        connector = self.lab.connector
        assert connector is not None
        try:
            while not self.stopping:
                if self.deaf and not self.lab.scheduler.requests and not connector._pending:
                    self.lab.arrive(20, max_tokens=2)
                for number in connector._pending:
                    connector._pending[number] = NEVER if self.deaf else 0
                self.lab.step()
                time.sleep(0.02)
        finally:
            self.publisher.close()


class Receiver(Server):
    """Answers half of all requests with an error, after a moment; `begun` counts those that have come."""

    def __init__(self, seed: int) -> None:
        self.begun = 0
        self._rng = random.Random(seed)
        super().__init__(check=self._answer)

    def _answer(self, got: Got) -> int:
        self.begun += 1
        time.sleep(self._rng.uniform(0, 0.05))
        return 204 if self._rng.random() < 0.5 else 500

    def handle_error(self, request: object, client_address: object) -> None:
        """Who asked was killed."""

    def reported(self, engine: str) -> list[tuple[str, str]]:
        """What it was told of an engine and took: (alert, kind), each once, in the order in which it first came."""
        received = [_data(got) for got in self.taken]
        return list(dict.fromkeys((data["id"], data["state"]) for data in received if data["engine"] == engine))


def _data(got: Got) -> dict[str, str]:
    data: dict[str, str] = json.loads(got.body)["data"]
    return data


@contextmanager
def running(engine: Engine) -> Iterator[Engine]:
    engine.start()
    try:
        yield engine
    finally:
        engine.stopping = True
        engine.join()


def live(engine: Engine, receiver: Receiver, episodes: int, seed: int) -> None:
    """Trouble, heard of; its end, heard of; and again."""
    rng = random.Random(seed)
    for episode in range(episodes):
        for deaf in (True, False):
            time.sleep(rng.uniform(0, LOOK_AGAIN_S))
            engine.deaf = deaf
            wanted = 2 * episode + (1 if deaf else 2)
            until(lambda wanted=wanted: len(receiver.reported(engine.name)) >= wanted)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kills", "engines", "episodes"),
    [pytest.param(3, 1, 1, marks=pytest.mark.slow), pytest.param(20, 8, FIRES, marks=pytest.mark.prove)],
)
def test_each_transition_is_told_whenever_the_service_is_killed(
    tmp_path: Path, kills: int, engines: int, episodes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(kills)
    receiver = Receiver(kills)
    command = [
        sys.executable,
        "-m",
        "tests.outputs.alerts_service",
        str(tmp_path / "alerts.sqlite"),
        receiver.url,
        str(LOOK_AGAIN_S),
    ]
    with ExitStack() as stack:
        stack.callback(receiver.stop)
        labs = [stack.enter_context(running(Engine(tmp_path, number))) for number in range(engines)]
        command += [lab.events for lab in labs]

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(command, stderr=subprocess.DEVNULL)

        threads = [
            threading.Thread(target=live, args=(lab, receiver, episodes, number)) for number, lab in enumerate(labs)
        ]
        for one in threads:
            one.start()
        killed_sending = 0
        service = start()
        try:
            for kill in range(kills):
                begun = receiver.begun
                deadline = time.monotonic() + rng.uniform(LOOK_AGAIN_S / 4, 2 * LOOK_AGAIN_S)
                while time.monotonic() < deadline and not (kill % 2 and receiver.begun > begun):
                    time.sleep(0.001)
                killed_sending += kill % 2 and receiver.begun > begun
                assert service.poll() is None
                service.kill()
                service.wait()
                service = start()
            for one in threads:
                one.join()
        finally:
            service.kill()
            service.wait()
            for one in threads:
                one.join()

    with capsys.disabled():
        print(f"\n{kills} kills, {killed_sending} of them as something was sent; the receiver refused half\n")
        print(f"{'engine':24}{'told':>6}{'lost':>6}{'tries':>7}{'refused':>9}{'taken twice':>13}{'out of order':>14}")
    identities: Counter[tuple[str, str]] = Counter()
    for lab in labs:
        tries = [got for got in receiver.got if _data(got)["engine"] == lab.name]
        taken = [got for got in tries if got.status == 204]
        reported = receiver.reported(lab.name)
        alerts = list(dict.fromkeys(alert for alert, _ in reported))
        wanted = [(alert, kind) for alert in alerts for kind in ("firing", "resolved")]
        disorder = 0
        for alert in alerts:
            kinds = [_data(got)["state"] for got in tries if _data(got)["id"] == alert]
            disorder += kinds != sorted(kinds)  # firing, however often, then resolved
        for transition in reported:
            ids = {got.headers["webhook-id"] for got in tries if (_data(got)["id"], _data(got)["state"]) == transition}
            identities[transition] = len(ids)
        lost = 2 * episodes - len(reported)
        with capsys.disabled():
            print(
                f"{lab.name:24}{len(reported):>6}{lost:>6}{len(tries):>7}{len(tries) - len(taken):>9}"
                f"{len(taken) - len(reported):>13}{disorder:>14}"
            )
        assert reported == wanted
        assert (lost, disorder, len(alerts)) == (0, 0, episodes)
    assert set(identities.values()) == {1}
    every = {got.headers["webhook-id"] for got in receiver.got}
    assert len(every) == len(identities)
