"""A source and a receiver of another distribution, in doctor and on a service; broken ones beside them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import httpx2
import pytest

from tests.base.installing import install, on_path
from tests.test_service import receiver
from tests.waiting import until


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process in which both distributions are installed."""
    example = install("plugin_example", tmp_path_factory.mktemp("example"))
    broken = install("plugin_broken", tmp_path_factory.mktemp("broken"))
    return {**os.environ, "PYTHONPATH": f"{on_path(example)}{os.pathsep}{broken}"}


QUICK = [part for name in ("grace_s", "starved_s", "lease_s") for part in ("--set", f"leak.finished-held.{name}=0.5")]


def monitor(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvscope.monitor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.slow
def test_its_engine_is_in_doctor_beside_sources_that_fail(both: dict[str, str]) -> None:
    targets = ("acme://there:8000", "broken-raises://x", "broken-hangs://x")
    answer = monitor(both, "doctor", *targets, "--for", "1", "--timeout", "3", *QUICK, "--format", "json")
    report = json.loads(answer.stdout)
    theirs, raises, hangs = report["targets"]
    assert (theirs["kind"], theirs["status"], theirs["engines"]) == ("acme", "ok", ["acme@there:8000/0"])
    assert raises["status"] == hangs["status"] == "cannot-tell"
    assert "ZeroDivisionError: this source divides by zero" in raises["error"]


def test_what_is_loaded_is_listed(both: dict[str, str]) -> None:
    answer = monitor(both, "plugins", "--format", "json")
    found = {(one["group"], one["name"]): one for one in json.loads(answer.stdout)}
    assert found["kvscope.sources", "acme"]["distribution"] == "acme-kvscope"
    assert found["kvscope.receivers", "acme"]["status"] == "loaded"
    assert found["kvscope.detectors", "does-not-import"]["status"] == "failed"
    assert answer.returncode == 1
    assert "acme://" in monitor(both, "doctor", "--help").stdout
    assert "no source reads this scheme" in monitor(dict(os.environ), "doctor", "acme://there:8000").stdout


@pytest.mark.slow
def test_on_a_service_its_receiver_gets_the_alert_and_broken_ones_disturb_nothing(both: dict[str, str]) -> None:
    with receiver() as (url, received):
        command = [sys.executable, "-m", "kvscope.monitor", "serve", "--port", "0", "--alert-private"]
        command += ["acme://there:8000", "broken-raises://x", "broken-hangs://x"]
        command += ["--alert", f"acme+{url}/pager", "--alert", f"broken+{url}/broken"]
        command += QUICK
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=both) as service:
            try:
                assert service.stderr is not None
                address = re.search(r"http://127\.0\.0\.1:\d+", service.stderr.readline())
                assert address is not None
                with httpx2.Client(base_url=address[0], trust_env=False) as client:
                    until(lambda: any(b"leak.finished-held" in body for _, _, body in received), "an alert")
                    sources = {one["target"]: one for one in client.get("/api/sources").json()}
                    failed = client.get("/api/findings").json()
                service.send_signal(signal.SIGTERM)
                service.communicate(timeout=60)
            finally:
                service.kill()
    assert {path for path, _, _ in received} == {"/pager"}
    assert (sources["acme://there:8000"]["engine"], sources["acme://there:8000"]["error"]) == ("acme@there:8000/0", "")
    assert "this source divides by zero" in sources["broken-raises://x"]["error"]
    names = {item["value"] for one in failed if one["code"] == "blind.plugin-failed" for item in one["evidence"]}
    assert "broken-raises" in names
