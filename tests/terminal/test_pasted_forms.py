"""The forms in which people paste a log: each gives the finding that the plain file gives, by the right line."""

from __future__ import annotations

import gzip
import io
import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvscope.monitor.terminal.cli import main
from tests.terminal.test_doctor import DATA

LINES = (DATA / "seed-000.log").read_text().splitlines()
FINISHED_HELD = "leak.finished-held"


def finding_of(capsys: pytest.CaptureFixture[str], target: str) -> dict[str, Any]:
    assert main(["doctor", target, "--format", "json"]) == 1
    (finding,) = [f for f in json.loads(capsys.readouterr().out)["findings"] if f["severity"] != "info"]
    return dict(finding)


def wrapped(lines: list[str]) -> list[str]:
    """As a terminal of 80 columns shows them."""
    return [line[at : at + 80] for line in lines for at in range(0, len(line), 80)]


FORMS: dict[str, tuple[Callable[[list[str]], list[str]], int]] = {
    "plain": (lambda lines: lines, 1),
    "fenced": (lambda lines: ["It fills up:", "```text", *lines, "```"], 3),
    "quoted": (lambda lines: ["On Monday you wrote:", *[f"> {line}" for line in lines]], 2),
    "wrapped": (wrapped, 1),
    "compose": (lambda lines: [f"vllm-1  | {line}" for line in lines], 1),
    "kubernetes": (
        lambda lines: [
            f"2026-08-07T12:{n // 6:02}:{10 * (n % 6):02}.123456789Z stdout F {line}" for n, line in enumerate(lines)
        ],
        1,
    ),
    "journald": (lambda lines: [f"Aug 07 12:00:00 node vllm[77]: {line}" for line in lines], 1),
    "json": (lambda lines: [json.dumps({"log": f"{line}\n", "stream": "stdout"}) for line in lines], 1),
    "coloured": (lambda lines: [f"\x1b[32mINFO\x1b[0m {line}" for line in lines], 1),
    "without line breaks": (lambda lines: [" ".join(lines)], 1),
    "hard spaces": (lambda lines: [line.replace(" ", "\u00a0") for line in lines], 1),
    "list": (lambda lines: [f"- {line}" for line in lines], 1),
    "in Chinese": (lambda lines: ["服务跑了一段时间之后，显存一直不释放：", "", *lines, "", "请问是什么原因？"], 3),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_form(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, first = FORMS[form]
    (tmp_path / "pasted.txt").write_text("\n".join(change(LINES)) + "\n")
    finding = finding_of(capsys, str(tmp_path / "pasted.txt"))
    assert (finding["code"], finding["verdict"]) == (FINISHED_HELD, "likely")
    assert finding["position"] == f"pasted.txt:{first}"


def test_records_without_a_line_break_keep_their_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stamped = [f"(APIServer pid=1) INFO 08-07 12:{n // 6:02}:{10 * (n % 6):02} {line}" for n, line in enumerate(LINES)]
    since = []
    for name, text in (("lines.txt", "\n".join(stamped)), ("joined.txt", " ".join(stamped))):
        (tmp_path / name).write_text(text + "\n")
        finding = finding_of(capsys, str(tmp_path / name))
        since.append((finding["since"], [item["value"] for item in finding["evidence"]]))
    assert since[0] == since[1]
    assert since[0][0] is not None


def test_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(LINES).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    finding = finding_of(capsys, "-")
    assert (finding["code"], finding["position"]) == (FINISHED_HELD, "stdin:1")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(text))))
    assert finding_of(capsys, "-")["code"] == FINISHED_HELD
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b" \n")))
    assert main(["doctor", "-"]) == 2
    assert "standard input is empty" in "".join(capsys.readouterr())


def test_a_directory_and_a_zip_of_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "collected"
    (folder / "pod-1").mkdir(parents=True)
    (folder / "pod-1" / "engine.log.gz").write_bytes(gzip.compress("\n".join(LINES).encode()))
    (folder / "healthy.log").write_text("\n".join(LINES[:2]))
    (folder / "core.bin").write_bytes(b"\x7fELF\0\0\0")
    with zipfile.ZipFile(tmp_path / "collected.zip", "w") as archive:
        for path in sorted(folder.rglob("*")):
            archive.write(path, path.relative_to(folder))
    for target in (folder, tmp_path / "collected.zip"):
        finding = finding_of(capsys, str(target))
        assert (finding["code"], finding["position"]) == (FINISHED_HELD, "pod-1/engine.log.gz:1")


def test_a_zip_without_a_text_and_a_damaged_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("image.png", b"\x89PNG\0")
    assert main(["doctor", str(tmp_path / "a.zip")]) == 2
    whole = (tmp_path / "a.zip").read_bytes()
    (tmp_path / "b.zip").write_bytes(whole[: len(whole) // 2])
    assert main(["doctor", str(tmp_path / "b.zip")]) in (2, 3)
    assert "Traceback" not in "".join(capsys.readouterr())


def run(lines: list[str], pid: int) -> list[str]:
    return [f"(APIServer pid={pid}) INFO {line}" for line in lines]


def test_another_run_in_the_same_file_begins_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first run leaks and ends; what follows has another process id, and is healthy."""
    start = "(APIServer pid=9) INFO 08-07 13:00:00 [api_server.py:1] vLLM API server version 0.18.0"
    healthy = [LINES[0], *[LINES[0].replace("600.0", f"{600 + n}.0") for n in range(4)]]
    (tmp_path / "two.log").write_text("\n".join([*run(LINES[:4], 8), start, *run(healthy, 9)]))
    assert main(["doctor", str(tmp_path / "two.log"), "--format", "json"]) == 0
    (tmp_path / "one.log").write_text("\n".join([*run(LINES[:3], 8), *run(LINES[3:], 8)]))
    capsys.readouterr()
    assert finding_of(capsys, str(tmp_path / "one.log"))["code"] == FINISHED_HELD


def test_a_fragment_of_a_metrics_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = 'vllm:num_requests_running{engine="0",model_name="m"} 0.0\nvllm:num_requests_waiting{engine="0"} 6.0\n'
    (tmp_path / "page.txt").write_text(f"$ curl -s localhost:8000/metrics | grep requests\n{page}")
    code = main(["doctor", str(tmp_path / "page.txt"), "--format", "json"])
    assert code in (1, 3)  # never that nothing is wrong
