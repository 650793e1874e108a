"""A Prometheus server's past beyond what `monitor serve` reads at its start: any window of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from kvscope.lab.recorded_pages import COLUMNS
from kvscope.monitor.base.errors import NotKnown
from kvscope.monitor.base.text import timestamp
from kvscope.monitor.contract.samples import Sample
from kvscope.monitor.questions.past import KEPT_WINDOWS, MOST_BACK_NS, StoredPast
from kvscope.monitor.sources.prometheus_history import MOST_STORED
from tests.dashboards.programs import program
from tests.terminal.by_source import remembered
from tests.web.parts import service

HOUR_NS = 3_600 * 10**9
DAY_S = 86_400
EVERY_S = 60
TOKENS_EACH = 100
ROWS = [
    dict.fromkeys(COLUMNS, 0.0)
    | {"t": at, "running": 1.0, "kv_usage": at / DAY_S, "gen_tokens": TOKENS_EACH * at / EVERY_S}
    for at in range(0, DAY_S, EVERY_S)
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A day of an engine, scraped each minute, whose usage rises from 0 to 100 %."""
    prometheus, promtool = program("prometheus", "prometheus"), program("promtool", "prometheus")
    with remembered({"day:8000": ROWS}, prometheus, promtool, tmp_path_factory.mktemp("day")) as url:
        yield url


@pytest.mark.slow
def test_any_window_of_the_servers_past_is_shown(server: str, tmp_path: Path) -> None:
    with (
        service(f"prometheus+{server}", "--look-back", "30m") as url,
        httpx2.Client(trust_env=False, timeout=60) as ask,
    ):

        def get(path: str, **params: str) -> object:
            answer = ask.get(f"{url}/api/{path}", params=params)
            assert answer.status_code == httpx2.codes.OK, answer.text
            return answer.json()

        while not (engines := get("engines")):
            time.sleep(0.1)
        assert isinstance(engines, list)
        name, last_ns = engines[0]["engine"], int(time.time()) * 10**9
        for hours, most in ((12, MOST_STORED), (1, 61)):
            window = {"since": _at(last_ns - (hours + 6) * HOUR_NS), "until": _at(last_ns - 6 * HOUR_NS)}
            points = get("points", engine=name, **window)
            assert isinstance(points, list)
            assert 55 * hours / 12 < len(points) <= most + 1
            for point in points:
                began_ns = last_ns - DAY_S * 10**9
                assert point["usage"] == pytest.approx((point["at_ns"] - began_ns) / (DAY_S * 1e9), abs=0.01)
        span = get("history", engine=name)
        assert isinstance(span, dict)
        assert span["first"] < _at(last_ns - 23 * HOUR_NS)


def _at(ns: int) -> str:
    return timestamp(ns) or ""


def sample(at_ns: int) -> Sample:
    return Sample("engine", "", at_ns, usage=0.5)


def test_a_window_that_moves_on_is_asked_for_rarely_and_few_are_kept() -> None:
    asked: list[tuple[int, int]] = []

    def read(_engine: str, since_ns: int, until_ns: int) -> list[Sample]:
        asked.append((since_ns, until_ns))
        return [sample(at_ns) for at_ns in range(since_ns, until_ns, 60 * 10**9)]

    past = StoredPast(read)
    for second in range(600):
        since_ns = (100_000 + second) * 10**9
        found = past.samples("engine", since_ns, since_ns + 10 * HOUR_NS)
        assert all(since_ns <= (one.at_ns or 0) < since_ns + 10 * HOUR_NS for one in found)
        assert len(found) == 600
    assert len(asked) <= 21
    assert len(past._kept) <= KEPT_WINDOWS
    past.samples("engine", 0, 10 * MOST_BACK_NS)
    assert asked[-1][1] - asked[-1][0] < 1.01 * MOST_BACK_NS


def test_a_server_that_does_not_answer_is_an_error_and_hides_no_other_history() -> None:
    def read(_engine: str, _since_ns: int, _until_ns: int) -> list[Sample]:
        raise NotKnown("the server does not answer")

    past = StoredPast(read)
    with pytest.raises(NotKnown, match="does not answer"):
        past.samples("engine", 0, HOUR_NS)
    assert past.first_ns("engine", HOUR_NS) == HOUR_NS
    assert StoredPast().samples("engine", 0, HOUR_NS) == []
