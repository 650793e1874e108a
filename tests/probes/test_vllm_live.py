"""The probe in a vLLM that serves, found by vLLM itself as a plugin."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from kvscope.lab.vllm_python import PYTHON, ROOT, announce, environment, free_ports, needs_vllm, save_model
from kvscope.monitor.ledger.balance import balance_of
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.sources.live_stream import LiveStream
from kvscope.monitor.terminal.cli import main
from scripts.tiny_model import save_tokenizer
from tests.engine.process import follow
from tests.probes.connector_settings import CONNECTOR

PATIENCE_S = 240
CLIENTS = 16


class Server:
    """`vllm serve` with the probe on, or without it. `log` is where it writes. engine_id: as KVSCOPE_ENGINE_ID.
    The model is made, in `directory` if none is named. `more` is its environment's.
    """

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        engine_id: str = "",
        probe: bool = True,
        python: str = PYTHON,
        model: Path | None = None,
        **more: str,
    ) -> None:
        model = save_model(model or directory / "model")
        save_tokenizer(model)
        events, port = free_ports(), free_ports()
        self.url, self.events = f"http://127.0.0.1:{port}", f"tcp://127.0.0.1:{events}"
        self.engine = f"{engine_id or f'tiny@127.0.0.1:{events}'}/0"
        self.log = directory / "server.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    python,
                    "-m",
                    "vllm.entrypoints.cli.main",
                    "serve",
                    str(model),
                    "--load-format",
                    "dummy",
                    "--served-model-name",
                    "tiny",
                    "--port",
                    str(port),
                    "--enforce-eager",
                    "--dtype",
                    "float32",
                    "--block-size",
                    "32",
                    "--num-gpu-blocks-override",
                    "200",
                    "--kv-cache-memory-bytes",
                    "64M",
                    "--max-model-len",
                    "1024",
                    "--max-num-seqs",
                    "8",
                    *arguments,
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=directory,
                start_new_session=True,
                env=environment(
                    PYTHONPATH=f"{ROOT}{os.pathsep}{announce(directory)}" if probe else "",
                    KVSCOPE_EVENTS=self.events if probe else "",
                    KVSCOPE_ENGINE_ID=engine_id,
                    **more,
                ),
            )

    def wait(self, patience_s: float = PATIENCE_S) -> None:
        until = time.monotonic() + patience_s
        while time.monotonic() < until and self.process.poll() is None:
            try:
                if httpx2.get(f"{self.url}/health", timeout=5).status_code == httpx2.codes.OK:
                    return
            except httpx2.HTTPError:
                time.sleep(0.2)
        raise AssertionError(self.log.read_text())

    def complete(self, name: str, prompt: list[int], max_tokens: int) -> None:
        answer = httpx2.post(
            f"{self.url}/v1/completions",
            headers={"X-Request-Id": name},
            timeout=PATIENCE_S,
            json={"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True},
        )
        assert answer.status_code == httpx2.codes.OK, answer.text
        assert answer.json()["usage"]["completion_tokens"] == max_tokens

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path, "--kv-transfer-config", json.dumps(CONNECTOR))
    try:
        server.wait()
        yield server
    finally:
        server.stop()


@needs_vllm
@pytest.mark.slow
def test_doctor_names_the_requests_whose_blocks_a_connector_never_gave_back(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = EngineLedger(server.engine)
    with contextlib.closing(LiveStream(server.events)) as stream:
        follow(stream, [ledger], lambda: ledger.ready)
        assert ledger.description.engine == "vllm"
        assert ledger.description.served_model_name == "tiny"
        assert ledger.description.model == ""  # it is a directory of this machine
        assert str(server.log.parent) not in ledger.description.to_json()
        assert ledger.description.kv_connector == CONNECTOR["kv_connector"]
        assert ledger.description.num_gpu_blocks == 200
        names = [f"{'keep' if index % 4 == 0 else 'give'}-{index}" for index in range(CLIENTS)]
        for index, name in enumerate(names):
            server.complete(name, [1 + (index * token) % 300 for token in range(40 + 10 * index)], 4 + index)
        kept = {f"cmpl-{name}-0" for name in names if "keep" in name}
        follow(stream, [ledger], lambda: {d.id for d in ledger.state.deferrals.values()} == kept)
        audited = ledger.state.audit_cycles
        follow(stream, [ledger], lambda: ledger.state.audit_cycles > audited + 1)
    state = ledger.state
    assert not ledger.anomalies
    assert balance_of(state).holds
    assert balance_of(state).finished == state.used == sum(len(d.blocks) for d in state.deferrals.values())
    assert state.totals.finished
    assert state.totals.output_tokens == sum(4 + index for index in range(CLIENTS))
    target = [
        server.events,
        "--format",
        "json",
        "--set",
        "leak.finished-held.grace_s=0.1",
        "--set",
        "leak.finished-held.unseen_times=0",
        "--for",
        "5",
    ]
    assert main(["doctor", *target]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    (finding,) = [one for one in findings if one["severity"] != "info"]
    assert (finding["code"], finding["verdict"]) == ("leak.finished-held", "likely")
    assert set(finding["culprits"]["requests"]) == kept
    logged = server.log.read_text()
    assert f"kvscope: events on {server.events}" in logged
    assert "Traceback" not in logged
