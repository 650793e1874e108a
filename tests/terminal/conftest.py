"""A Prometheus server with a past, for all tests of the doctor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvscope.lab.recorded_pages import rows
from tests.dashboards.programs import program
from tests.terminal.by_source import INCIDENTS, remembered


@pytest.fixture(scope="session")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """It has scraped an engine of each incident each second, until a minute ago, and one engine's two lives."""
    server, tool = program("prometheus", "prometheus"), program("promtool", "prometheus")
    series = {f"{name}:8000": rows(name) for name in INCIDENTS}
    leak, healthy = rows("never-freed"), rows("healthy-shared-prefix")
    series["restarted:8000"] = leak + [{**row, "t": row["t"] + leak[-1]["t"] + 20} for row in healthy]
    with remembered(series, server, tool, tmp_path_factory.mktemp("history")) as url:
        yield url
