"""A monitor that is paused itself raises no alarm about engines that went on."""

from __future__ import annotations

import signal
import time

import pytest

from kvscope.lab.chaos.soak import running_soak

PAUSE_S = 15.0


@pytest.mark.slow
def test_a_paused_monitor_calls_no_engine_stalled() -> None:
    with running_soak(1, 5.0, "") as (_, service):
        time.sleep(12)  # the model of step times has what it needs
        service.process.send_signal(signal.SIGSTOP)
        time.sleep(PAUSE_S)
        service.process.send_signal(signal.SIGCONT)
        codes: set[str] = set()
        resumed_s = time.monotonic()
        while time.monotonic() - resumed_s < 10:
            codes |= {finding["code"] for finding in service.client.get("/api/findings").json()}
            time.sleep(0.2)
    assert not {code for code in codes if code.startswith("stuck.")}
