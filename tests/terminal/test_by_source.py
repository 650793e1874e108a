"""The table of what each source tells of the same incidents is what each source tells of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from operator import itemgetter

import pytest

from kvscope.lab.recorded_pages import Row, Served, page, rows, served
from kvscope.monitor.detectors.detector import Settings
from kvscope.monitor.terminal.report import examine
from tests.terminal import by_source
from tests.terminal.by_source import INCIDENTS, SOURCES, grave, in_the_docs

STREAM, PAGE, PROMETHEUS, LOG = SOURCES
ANEW = "python -m tests.terminal.by_source"


def test_the_stream() -> None:
    found = by_source.from_the_stream()
    assert found == in_the_docs(STREAM), ANEW
    verdicts = {code: verdict for seen in found.values() for code, verdict in seen.items()}
    assert verdicts.pop("leak.finished-held") == "likely"  # its connector states no lease
    assert set(verdicts.values()) == {"confirmed"}


def test_the_page() -> None:
    assert by_source.from_the_page() == in_the_docs(PAGE), ANEW


def test_prometheus(prometheus: str) -> None:
    assert by_source.from_prometheus(prometheus) == in_the_docs(PROMETHEUS), ANEW


def test_the_log() -> None:
    assert by_source.from_the_log() == in_the_docs(LOG), ANEW


def test_figures_see_nothing_that_the_stream_does_not_and_are_never_sure() -> None:
    confirmed = in_the_docs(STREAM)
    for source in (PAGE, PROMETHEUS, LOG):
        for incident, seen in in_the_docs(source).items():
            assert seen.keys() <= confirmed[incident].keys()
            assert "confirmed" not in seen.values()


@contextmanager
def going_on(name: str) -> Iterator[Served]:
    """A page that is at each moment as it was then, however busy the machine is."""
    moments = rows(name, every_s=0.2)
    began = time.monotonic()

    def at(now: float) -> Row:
        return max((row for row in moments if row["t"] <= now - began), key=itemgetter("t"), default=moments[0])

    with served(lambda: page(at(time.monotonic()))) as server:
        yield server


@pytest.mark.slow
def test_pages_watched_in_real_time() -> None:
    """What the doctor itself says when it watches each of them, all at once, for as long as the longest goes on."""
    seconds = max(rows(name)[-1]["t"] for name in INCIDENTS)
    with ExitStack() as opened:
        urls = {name: opened.enter_context(going_on(name)).url for name in INCIDENTS}
        report = examine(list(urls.values()), Settings(), watch_s=seconds + 1, timeout_s=seconds + 1)
    found = {}
    for name, url in urls.items():
        (target,) = [target for target in report.targets if target.target == url]
        (engine,) = target.engines
        found[name] = grave([finding for finding in report.findings if finding.engine == engine])
    assert found == in_the_docs(PAGE)
