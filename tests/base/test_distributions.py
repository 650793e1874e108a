"""A separate distribution adds a detector; one that is broken in every way disturbs nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.base.installing import TESTS, install, on_path

pytestmark = pytest.mark.usefixtures("real_parts")

LOG = TESTS / "data" / "never-freed.log.gz"
FAILED = "blind.plugin-failed"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install("plugin_example", tmp_path_factory.mktemp("example"))


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install("plugin_broken", tmp_path_factory.mktemp("broken"))


def monitor(*arguments: str, plugins: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"PYTHONPATH": on_path(plugins)} if plugins else {})}
    command = [sys.executable, "-m", "kvscope.monitor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def findings(*arguments: str, plugins: Path | None = None) -> list[dict[str, Any]]:
    answer = monitor("doctor", str(LOG), "--format", "json", *arguments, plugins=plugins)
    assert answer.returncode == 1, answer.stderr
    found: list[dict[str, Any]] = json.loads(answer.stdout)["findings"]
    return found


def test_its_finding_is_in_doctor_beside_ours(example: Path) -> None:
    ours = findings()
    both = findings("--set", "acme.long-queue.max_waiting=5", plugins=example)
    (theirs,) = [finding for finding in both if finding["code"] == "acme.long-queue"]
    assert theirs["title"] == "More requests wait than the service level allows"
    assert theirs["severity"] == "warning"
    assert theirs["runbook"] == "docs/runbooks/acme.long-queue.md"
    assert [item["value"] for item in theirs["evidence"]] == [8]
    assert [finding for finding in both if finding is not theirs] == ours


def test_by_its_own_threshold_there_is_nothing_to_find(example: Path) -> None:
    assert findings(plugins=example) == findings()


def test_its_threshold_can_be_set_only_while_it_is_installed(example: Path) -> None:
    answer = monitor("doctor", str(LOG), "--set", "acme.long-queue.max_waiting=5")
    assert answer.returncode == 2
    assert "there is no threshold 'acme.long-queue.max_waiting'" in answer.stderr
    answer = monitor("doctor", str(LOG), "--set", "acme.long-queue.max_wating=5", plugins=example)
    assert "near it are acme.long-queue.max_waiting" in answer.stderr


def test_its_runbook_is_printed(example: Path) -> None:
    answer = monitor("runbook", "acme.long-queue", plugins=example)
    assert answer.stdout.startswith("# acme.long-queue: more requests wait")
    listed = monitor("runbook", plugins=example).stdout
    assert "acme.long-queue" in listed
    assert "leak.finished-held" in listed


def test_a_broken_one_is_named_and_nothing_else_notices(broken: Path) -> None:
    found = findings(plugins=broken)
    assert [finding for finding in found if finding["code"] != FAILED] == findings()
    errors = {
        finding["evidence"][0]["value"]: next(i["value"] for i in finding["evidence"] if i["name"] == "plugin_error")
        for finding in found
        if finding["code"] == FAILED
    }
    assert errors["does-not-import"] == "RuntimeError: this module cannot be imported"
    assert "leak.* is kvscope's own" in errors["has-our-prefix"]
    assert "has no runbook" in errors["has-no-runbook"]
    assert "is not a subclass of kvscope.Detector" in errors["is-no-detector"]
    assert errors["raises"] == "ZeroDivisionError: this detector divides by zero"
    assert errors["hangs"] == "PluginTimeout: did not return within 2 s"
    assert "yielded leak.finished-held" in errors["lies"]
    assert {finding["severity"] for finding in found if finding["code"] == FAILED} == {"info"}
