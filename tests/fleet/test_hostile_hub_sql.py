"""Hostile SQL through a hub: nothing is written at the agent, and neither it nor the hub outgrows its bounds."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from subprocess import Popen

import httpx2
import psutil
import pytest

from tests.fleet.nats_servers import bus_config_of, one_server, set_up
from tests.history.hostile_asking import ANSWER_BYTES
from tests.history.hostile_sql import COPIES, ENDLESS, HOSTILE, LARGE, aimed, fingerprint
from tests.history.test_hostile_sql import GROWTH_BYTES
from tests.history.test_hostile_sql import data as data
from tests.test_service import process
from tests.test_source_set import leaking
from tests.waiting import until

HUB_WAITS_S = 20.0
THROUGH_A_HUB = (*COPIES[:10], *LARGE[:8], ENDLESS[0])
ENVELOPE_BYTES = 1_000


def serving(run: Popen[str]) -> str:
    assert run.stderr is not None
    line = run.stderr.readline()
    found = re.search(r"serves (http://\S+),", line)
    assert found is not None, line
    return found[1]


def peak_bytes(process: psutil.Process) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


@pytest.mark.parametrize(
    "statements",
    [pytest.param(THROUGH_A_HUB, marks=pytest.mark.slow), pytest.param(HOSTILE, marks=pytest.mark.prove)],
    ids=["some", "all"],
)
def test_no_statement_does_harm_through_a_hub(data: Path, tmp_path: Path, statements: tuple[str, ...]) -> None:
    kept = tmp_path / "kept"
    (kept / "history").mkdir(parents=True)
    for engine in (data / "history").iterdir():
        if engine.is_dir():
            shutil.copytree(engine, kept / "history" / "of.another.run")
    with one_server(tmp_path / "nats") as server, leaking(tmp_path) as engine:
        set_up(bus_config_of([server]))
        nats = ("--nats", server.url, "--port", "0")
        arguments = ("--events", engine.target, "--nats-agent", "edge", "--data", str(kept), "--keep-days", "36500")
        with (
            process("kvscope.monitor", "agent", *arguments, *nats) as agent,
            process("kvscope.monitor", "hub", *nats) as hub,
            httpx2.Client(base_url=serving(hub), trust_env=False, timeout=60) as client,
        ):
            until(lambda: client.get("/api/engines").json(), "an engine at the hub")
            name = client.get("/api/engines").json()[0]["engine"]

            def ask(statement: str) -> httpx2.Response:
                return client.post("/api/sql", json={"engine": name, "query": statement})

            until(lambda: ask("SELECT 1 AS one FROM events LIMIT 1").status_code == 200, "an answer")
            time.sleep(2)
            before = fingerprint(kept / "history" / "of.another.run")
            processes = [psutil.Process(run.pid) for run in (agent, hub)]
            grown = [0, 0]
            for statement in statements:
                resident = [each.memory_info().rss for each in processes]
                for each in processes:
                    Path(f"/proc/{each.pid}/clear_refs").write_text("5")
                began_s = time.monotonic()
                answer = ask(aimed(statement, kept, "of.another.run"))
                assert time.monotonic() - began_s < HUB_WAITS_S + 1, statement[:100]
                assert len(answer.content) <= ANSWER_BYTES + ENVELOPE_BYTES, statement[:100]
                del answer
                peaks = [peak_bytes(each) - was for each, was in zip(processes, resident, strict=True)]
                grown = list(map(max, grown, peaks))
                assert fingerprint(kept / "history" / "of.another.run") == before, statement[:100]
                assert not [path for path in kept.rglob("*") if path.name in ("x", "x.csv", "new.csv", "by")]
            print(f"{len(statements)} statements; peak growth of the agent and the hub in bytes: {grown}")
            assert max(grown) < GROWTH_BYTES
