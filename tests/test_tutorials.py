"""The tutorials of docs/start, followed word for word; KVSCOPE_WRITE_SCREENS=1 takes their pictures anew."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from kvscope.lab.vllm_python import PYTHON, environment, free_ports, needs_vllm
from tests.tutorials import ROOT, Follower, missing_lines, steps_of

START = ROOT / "docs" / "start"
SCREEN = {"width": 1280, "height": 800}
BIN = Path(sys.executable).parent


def test_a_line_that_was_not_printed_is_noticed() -> None:
    printed = "FINDINGS  2 error\n× error  leak.finished-held\n  likely\n  total   ██   161"
    assert missing_lines("FINDINGS  7 error\nleak.finished-held likely\ntotal 161", printed) == []
    assert missing_lines("× error  leak.finished-held  confirmed", printed) == [
        "× error  leak.finished-held  confirmed"
    ]


def test_every_command_and_picture_of_the_tutorials_is_a_step() -> None:
    for name in ("demo.md", "vllm.md"):
        text = (START / name).read_text()
        steps = steps_of(text)
        assert sum(step.kind == "console" for step in steps) == text.count("```console")
        assert sum(bool(step.picture) for step in steps) == text.count("![")
        assert all((START / step.picture).exists() for step in steps)


def test_make_demo_is_what_the_tutorial_runs() -> None:
    printed = subprocess.run(
        ["make", "--no-print-directory", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert printed.splitlines()[-1] == ".venv/bin/python -m scripts.demo"


@pytest.mark.slow
def test_the_demo_tutorial_word_for_word(tmp_path: Path, browser: Browser) -> None:
    replace = {"make demo": f"{sys.executable} -m scripts.demo", ".venv/bin/": f"{BIN}/"}
    follower = Follower(tmp_path, replace, {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"})
    page = browser.new_page(viewport=SCREEN, color_scheme="light")
    expect.set_options(timeout=90_000)
    try:
        for step in steps_of((START / "demo.md").read_text()):
            if step.kind == "console":
                (command,) = (line.removeprefix("$ ") for line in step.text.splitlines())
                follower.run(command)
                if command == "make demo":
                    follower.until(lambda log: log.count("FOUND") == 2)
                    adopt_ports(follower)
            elif step.kind == "text":
                follower.check(step.text)
            else:
                follower.look(page, step)
                if os.environ.get("KVSCOPE_WRITE_SCREENS"):
                    (START / step.picture).write_bytes(page.screenshot())
    finally:
        page.close()
        follower.stop()


def test_the_readme_installs_before_it_uses() -> None:
    """What its first three blocks run is make, or a program that `make demo` has made."""
    blocks = [step.text for step in steps_of((ROOT / "README.md").read_text()) if step.kind == "console"][:3]
    programs = [
        line.removeprefix("$ ").split()[0] for block in blocks for line in block.splitlines() if line[:2] == "$ "
    ]
    assert programs == ["make", "make", *[".venv/bin/monitor"] * 4]


@pytest.mark.slow
def test_the_first_blocks_of_the_readme_in_order(tmp_path: Path) -> None:
    """The demo's own engine stands for the vLLM of the third block, and its service keeps its port."""
    replace = {
        "make demo": f"{sys.executable} -m scripts.demo",
        "make test": "true",
        "server.log": "tests/data/seed-000.log",
        "monitor serve": f"monitor serve --port {free_ports()}",
        ".venv/bin/": f"{BIN}/",
    }
    follower = Follower(tmp_path, replace, {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"})
    blocks = [step.text for step in steps_of((ROOT / "README.md").read_text()) if step.kind == "console"][:3]
    try:
        for block in blocks:
            command, _, printed = block.partition("\n…")
            for line in command.splitlines():
                follower.run(line.removeprefix("$ ").partition("  #")[0].strip())
                if line.endswith("make demo") or "make demo  " in line:
                    follower.until(lambda log: log.count("FOUND") == 2)
                    adopt_ports(follower)
                if " serve " in line:
                    follower.until(lambda log: "http://127.0.0.1" in log)
            if printed:
                follower.check(printed.strip())
    finally:
        follower.stop()


def adopt_ports(follower: Follower) -> None:
    """Where the usual ports are taken, the demo has others and prints them."""
    url = follower.log().partition("Open ")[2].split()[0]
    engine = follower.log().partition("The engine answers at ")[2].split()[0]
    follower.replace |= {"http://127.0.0.1:8765": url, "http://127.0.0.1:8000": engine}
    follower.environment["KVSCOPE_URL"] = url


@pytest.mark.slow
@needs_vllm
def test_the_vllm_tutorial_word_for_word(tmp_path: Path) -> None:
    http, events = free_ports(), free_ports()
    beside = tmp_path / "beside-vllm"
    replace = {
        "sh scripts/vllm.sh": "true",
        "tiny-model": str(tmp_path / "tiny-model"),
        "./tiny-model": str(tmp_path / "tiny-model"),
        ".venv-vllm/bin/vllm serve": f"{PYTHON} -m vllm.entrypoints.cli.main serve",
        ".venv-vllm/bin/python -m pip install .": f"{sys.executable} -m pip install --quiet --no-deps"
        f" --no-build-isolation --target {beside} .",
        ".venv-vllm/bin/monitor": f"{PYTHON} -m kvscope.monitor",
        ".venv/bin/": f"{BIN}/",
        "--max-model-len 1024": f"--max-model-len 1024 --port {http}",
        "127.0.0.1:8000": f"127.0.0.1:{http}",
        "127.0.0.1:5757": f"127.0.0.1:{events}",
        "monitor serve": f"monitor serve --port {free_ports()}",
    }
    follower = Follower(tmp_path, replace, environment(PYTHONPATH=str(ROOT)))
    try:
        for step in steps_of((START / "vllm.md").read_text()):
            if step.kind == "text":
                follower.check(step.text)
                continue
            for line in step.text.splitlines():
                command = line.removeprefix("$ ")
                if "vllm serve" in command and "KVSCOPE_EVENTS" in command:
                    follower.stop_last()
                follower.run(command)
                if "pip install" in command:
                    follower.environment["PYTHONPATH"] = str(beside)
                if "vllm serve" in command:
                    follower.until(lambda log: "Application startup complete." in log)
                if "scripts.tiny_model" in command:
                    assert (tmp_path / "tiny-model" / "tokenizer.json").exists()
        follower.until(lambda log: "kvscope" in log or "8765" in log or "http" in log)
    finally:
        follower.stop()
        shutil.rmtree(beside, ignore_errors=True)
