"""The form in which a log is exported changes no verdict: its order, labels before its lines, other pods' lines."""

from __future__ import annotations

import gzip
import html
import json
import re
from collections.abc import Callable
from itertools import chain, zip_longest
from pathlib import Path

import pytest

from kvscope.monitor.contract.samples import Sample
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.log_file import read_log

DATA = Path(__file__).parent.parent / "data"
LOGS = sorted([*DATA.glob("*.log.gz"), *DATA.glob("seed-*.log")])
Verdicts = set[tuple[str, str, str]]
POD = "[pod/vllm-6f5-{}/vllm] "
LABELS = {
    "kubectl": POD.format("aaaaa"),
    "compose": "vllm-1  | ",
    "stern": "vllm-6f5-aaaaa vllm ",
    "loki": '{app="vllm", pod="vllm-6f5-aaaaa", stream="stderr"} ',
    "journalctl": "Nov 02 10:00:00 gpu-1 vllm[77]: ",
}


def lines_of_log(path: Path) -> list[str]:
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    return [line for line in text.splitlines() if line.strip()]


def verdicts(path: Path, lines: list[str]) -> Verdicts:
    """What is found, by the engine's model, in a file of these lines."""
    path.write_text("\n".join(lines) + "\n")
    return verdicts_of(path)


def verdicts_of(path: Path) -> Verdicts:
    watch = Pipeline()
    watch.feed(read_log(path)[1])
    watch.settle()
    return {(finding.engine.partition("@")[0], finding.code, finding.verdict) for finding in watch.findings()}


def per_line(form: Callable[[int, str], str]) -> Callable[[list[str]], bytes]:
    return lambda lines: "".join(form(number, line) for number, line in enumerate(lines, 1)).encode()


def stamped(lines: list[str]) -> bytes:
    """As containerd writes them: with the time before each line, of which those without one have that of the last."""
    at, out = "01-01T00:00:00", []
    for line in lines:
        own = re.search(r"\b(\d\d-\d\d) (\d\d:\d\d:\d\d)\b", line)
        at = f"{own[1]}T{own[2]}" if own is not None else at
        out.append(f"2026-{at}.123456789Z stderr F {line}\n")
    return "".join(out).encode()


FORMS: dict[str, Callable[[list[str]], bytes]] = {
    "Windows' line ends": per_line(lambda _, line: f"{line}\r\n"),
    "a byte order mark": lambda lines: ("\ufeff" + "\n".join(lines)).encode(),
    "PowerShell's redirection": lambda lines: ("\ufeff" + "\r\n".join(lines)).encode("utf-16-le"),
    "gzip": lambda lines: gzip.compress("\n".join(lines).encode()),
    "colours": per_line(lambda _, line: f"\x1b[0;36m{line}\x1b[0m\n"),
    "a quotation": per_line(lambda _, line: f"> {line}\n"),
    "a fence": lambda lines: "\n".join(["Here is the log:", "```", *lines, "```", ""]).encode(),
    "empty lines": per_line(lambda _, line: f"{line}\n\n"),
    "an indent": per_line(lambda _, line: f"\t{line}\n"),
    "cat -n": per_line(lambda number, line: f"{number:6}\t{line}\n"),
    "grep -n": per_line(lambda number, line: f"{number}:{line}\n"),
    "Docker's JSON": per_line(lambda _, line: json.dumps({"log": f"{line}\n", "stream": "stderr"}) + "\n"),
    "the journal's JSON": per_line(lambda _, line: json.dumps({"MESSAGE": line, "_PID": "77"}) + "\n"),
    "Cloud Logging's JSON": per_line(lambda _, line: json.dumps({"textPayload": line, "severity": "INFO"}) + "\n"),
    "Loki's JSON": per_line(lambda _, line: json.dumps({"labels": {"pod": "vllm-0"}, "line": line}) + "\n"),
    "Ray": per_line(lambda _, line: f"\x1b[36m(RayWorkerWrapper pid=77, ip=10.0.0.1)\x1b[0m {line}\n"),
    "CSV": per_line(lambda _, line: '"gpu-1","vllm","{}"\n'.format(line.replace('"', '""'))),
    "HTML": per_line(lambda _, line: f"{html.escape(line, quote=False)}<br>\n"),
    "containerd": stamped,
}


@pytest.mark.parametrize("name", ["frozen-engine", "healthy-shared-prefix", "lockstep-collapse", "never-freed"])
@pytest.mark.parametrize("form", FORMS)
def test_a_form_of_export_changes_no_verdict(tmp_path: Path, name: str, form: str) -> None:
    lines = lines_of_log(DATA / f"{name}.log.gz")
    log = tmp_path / "a.log"
    log.write_bytes(FORMS[form](lines))
    assert verdicts_of(log) == verdicts(tmp_path / "a.log", lines)


WITHOUT_TIMES = "seed-000.log"
"""Nothing in it shows which of its lines is the newest, or that two are of one moment."""


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
@pytest.mark.parametrize("label", [pytest.param(label, id=name) for name, label in LABELS.items()])
def test_a_label_before_each_line_changes_no_verdict(tmp_path: Path, path: Path, label: str) -> None:
    lines = lines_of_log(path)
    assert verdicts(tmp_path / "a.log", [label + line for line in lines]) == verdicts(tmp_path / "a.log", lines)


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
def test_a_log_that_begins_with_its_newest_line_has_the_verdict_of_one_that_ends_with_it(
    tmp_path: Path, path: Path
) -> None:
    if path.name == WITHOUT_TIMES:
        return
    lines = lines_of_log(path)
    assert verdicts(tmp_path / "a.log", lines[::-1]) == verdicts(tmp_path / "a.log", lines)


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
def test_each_pod_of_one_text_has_the_verdict_of_its_own_log(tmp_path: Path, path: Path) -> None:
    one, other = lines_of_log(path), lines_of_log(DATA / "healthy-shared-prefix.log.gz")
    mixed = [
        POD.format(pod) + line for pair in zip_longest(one, other) for pod, line in zip("ab", pair, strict=True) if line
    ]
    alone = verdicts(tmp_path / "a.log", one) | verdicts(tmp_path / "a.log", other)
    assert verdicts(tmp_path / "a.log", mixed) == alone


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
def test_lines_that_come_twice_change_no_verdict(tmp_path: Path, path: Path) -> None:
    if path.name == WITHOUT_TIMES:
        return
    lines = lines_of_log(path)
    twice = list(chain.from_iterable((line, line) for line in lines))
    assert verdicts(tmp_path / "a.log", twice) == verdicts(tmp_path / "a.log", lines)


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
def test_a_log_that_is_cut_within_its_last_line_loses_no_verdict_but_of_that_line(tmp_path: Path, path: Path) -> None:
    lines = lines_of_log(path)
    cut = [*lines[:-1], lines[-1][:20]]
    assert verdicts(tmp_path / "a.log", cut) == verdicts(tmp_path / "a.log", lines[:-1])


def test_a_line_of_statistics_that_is_cut_gives_no_figure_but_whole_ones(tmp_path: Path) -> None:
    """Cut at each character, as `head -c` does it."""
    lines = lines_of_log(DATA / "never-freed.log.gz")
    last = max(number for number, line in enumerate(lines) if "Avg prompt" in line)
    lines = lines[last - 40 : last + 1]
    whole = figures(tmp_path / "a.log", "\n".join(lines))
    before, line = "\n".join(lines[:-1]) + "\n", lines[-1]
    for end in range(len(line)):
        cut = figures(tmp_path / "a.log", before + line[:end])
        assert cut[: len(whole) - 1] == whole[:-1]
        for sample in cut[len(whole) - 1 :]:
            assert (sample.running, sample.waiting) == (whole[-1].running, whole[-1].waiting), line[:end]
            assert sample.usage in (whole[-1].usage, None), line[:end]


def figures(path: Path, text: str) -> list[Sample]:
    path.write_text(text)
    return [record for record in read_log(path)[1] if isinstance(record, Sample)]


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
def test_answered_requests_that_are_passed_by_change_no_record(tmp_path: Path, path: Path) -> None:
    """Plain access lines are passed by; coloured ones are searched as any line. Both give the same records."""
    paths = ("/v1/chat/completions", "/pause", "/resume", "/v1/completions", "/generate", "/health")
    lines = lines_of_log(path)
    written = []
    for colour in ("", "\x1b[0m"):
        log = tmp_path / "a.log"
        with log.open("w") as file:
            for number, line in enumerate(lines):
                answered = f'"POST {paths[number % 6]} HTTP/1.1" 200 OK'
                access = f"(APIServer pid=1) INFO:     127.0.0.1:{number + 1} - {answered}"
                file.write(f"{line}\n{access}{colour}\n{access}{colour}\n")
        written.append(read_log(log)[1])
    assert written[0] == written[1]
