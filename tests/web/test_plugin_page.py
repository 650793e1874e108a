"""The finding of another distribution's detector goes wherever ours go: page, /metrics, API, runbook and alert."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx2
import pytest
from playwright.sync_api import Page, expect

from kvscope.lab.recorded_pages import page as metrics_page
from kvscope.lab.recorded_pages import rows, served
from tests.base.installing import install, on_path
from tests.receiving import Server
from tests.waiting import PATIENCE_S
from tests.web.parts import service

CODE = "acme.long-queue"


def test_from_a_plugins_finding_to_an_alert(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", on_path(install("plugin_example", tmp_path / "plugins")))
    receiver = Server()
    row = next(row for row in reversed(rows("never-freed")) if int(row["waiting"]) > 5)
    arguments = ("--alert", receiver.url, "--alert-private", "--data", str(tmp_path / "data"))
    try:
        with (
            served(metrics_page(row)) as engine,
            service("--metrics", engine.url, "--set", f"{CODE}.max_waiting=5", *arguments) as url,
        ):
            page.goto(f"{url}/findings")
            expect(page.locator("#view")).to_contain_text("More requests wait than the service level allows")
            with httpx2.Client(base_url=url, trust_env=False) as client:
                (finding,) = [one for one in client.get("/api/findings").json() if one["code"] == CODE]
                assert f'code="{CODE}"' in client.get("/metrics").text
                assert client.get("/" + finding["runbook"]).text.startswith(f"# {CODE}")
            deadline = time.monotonic() + PATIENCE_S
            while not any(CODE in got.body for got in receiver.taken):
                assert time.monotonic() < deadline, "no alert"
                time.sleep(0.05)
            (alert,) = [json.loads(got.body) for got in receiver.taken if CODE in got.body]
            assert alert["data"]["id"] == finding["id"]
            assert alert["data"]["severity"] == "warning"
    finally:
        receiver.stop()
