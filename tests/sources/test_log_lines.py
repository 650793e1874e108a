"""Each line that a supported release logs about KV memory or a failure is read, or ignored for a reason."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvscope.lab.vllm_python import PYTHON, needs_vllm
from kvscope.monitor.detectors.registry import CATALOGUE
from kvscope.monitor.sources.engine_log import Log
from kvscope.monitor.sources.log_lines import line_table
from kvscope.monitor.sources.log_patterns import PATTERNS
from scripts.log_lines import LIST, LoggedLine, logged_lines, printed, read_releases, written

TEXT = LIST.read_text(encoding="utf-8")
RELEASES = read_releases(TEXT)
ROOMS = Path(__file__).parent.parent.parent / "monitor"
FRONT = "WARNING 06-21 10:12:21 [file.py:1] "


def log_of(*texts: str) -> tuple[Log, set[str]]:
    """Return a log that has read these lines, and the names of what it read."""
    log = Log("engine.log", datetime(2026, 7, 1, tzinfo=UTC))
    names = {getattr(record, "name", "sample") for record in log.records(FRONT + text for text in texts)}
    return log, names - {"last_stamp", "request_size"}


def undecided(lines: set[LoggedLine]) -> list[LoggedLine]:
    return sorted(
        line for line in lines if not (line_table().reason(printed(line.text)) or log_of(printed(line.text))[1])
    )


@pytest.mark.parametrize("release", RELEASES)
def test_each_line_of_a_release_has_a_decision(release: str) -> None:
    assert len(RELEASES[release]) > 100
    assert not undecided(RELEASES[release]), "lines without a decision in log_lines.toml or a class in log_patterns"


@needs_vllm
@pytest.mark.usefixtures("real_parts")
def test_each_line_of_the_installed_release_has_a_decision() -> None:
    code = "import importlib.util; print(importlib.util.find_spec('vllm').origin)"
    found = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True)
    lines = set(logged_lines(Path(found.stdout.split()[-1]).parent))
    assert len(lines) > 100
    assert not undecided(lines), "run `python -m scripts.log_lines` for this release, and decide about these lines"


def test_the_table_has_no_line_that_no_release_has() -> None:
    texts = [printed(line.text) for lines in RELEASES.values() for line in lines]
    everywhere = {"Route: ", 'File "', "]  "}
    """Every release has these, and no literal of its source."""
    for group in line_table().ignored:
        for line in set(group.lines) - everywhere:
            one = type(group)(group.because, [line])
            assert any(one.expression.search(text) for text in texts), line


def test_each_class_that_is_read_names_its_codes() -> None:
    read = line_table().read
    assert read.keys() == {pattern.name for pattern in PATTERNS}
    for codes in read.values():
        assert codes
        assert set(codes) <= {*CATALOGUE, "context"}


def test_each_class_that_is_read_is_used() -> None:
    """A class that nothing asks for is ignored in silence."""
    rooms = [path for room in ("detectors", "sources", "questions") for path in (ROOMS / room).rglob("*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in rooms if path.parent.name != "log_patterns")
    assert not [name for name in line_table().read if f'"{name}"' not in text]


def test_a_log_counts_the_lines_that_no_table_has() -> None:
    log, _ = log_of(
        "Registering KV caches",
        "Turning KV blocks inside out for request cmpl-1",
        "Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 1.0 tokens/s, Running: 1 reqs,"
        " Waiting: 0 reqs, GPU KV cache usage: 1.0%, Prefix cache hit rate: 0.0%",
    )
    assert "1 line about KV memory or blocks of no known kind: 2" in log.notes


def test_the_list_is_made_of_a_releases_literals(tmp_path: Path) -> None:
    folder = tmp_path / "vllm"
    (folder / "v1" / "core").mkdir(parents=True)
    (folder / "v1" / "core" / "pool.py").write_text(
        'logger.warning("Block %d of request %s is "\n    "lost", 1, 2)\nlogger.info("The weather is %.1f", 3)\n'
        'logger.info(f"Evicted {n} blocks of the cache")\nother.warning("no logger has this line")\n'
    )
    lines = [line.text for line in logged_lines(folder)]
    assert lines == ["Block %d of request %s is lost", "Evicted %s blocks of the cache"]
    assert [printed(text) for text in lines] == ["Block 7 of request 7 is lost", "Evicted 7 blocks of the cache"]
    assert written(RELEASES) == TEXT
