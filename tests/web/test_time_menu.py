"""Moving the time: what is live stays live, and nothing leads into the future."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kvscope.dashboards.web.links import PagePlace, PageWindow, ago, place_of, rfc3339, wall_ns
from kvscope.dashboards.web.time_menu import TIME_FORM, time_menu
from kvscope.dashboards.web.view import Here, engine_now_ns
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.questions.pipeline import Pipeline

MINUTE = 60 * 1_000_000_000


@pytest.fixture(scope="module")
def watch() -> Pipeline:
    lab = Lab()
    lab.arrive(12)
    lab.run_until_idle()
    watch = Pipeline()
    watch.feed(lab.frames)
    return watch


def here_at(watch: Pipeline, place: PagePlace) -> tuple[Here, int]:
    (engine,) = engines = watch.engines()
    now_ns = engine_now_ns(engine)
    return Here(place._replace(engine=engine.engine), place.window(now_ns), engine, engines), now_ns


def parts(tree: Any) -> Any:
    return json.loads(json.dumps(tree, default=lambda part: part.to_plotly_json()))


def links(tree: Any) -> dict[str, str]:
    """Where each key leads."""
    if isinstance(tree, list):
        return {name: href for one in tree for name, href in links(one).items()}
    if not isinstance(tree, dict):
        return {}
    props = tree["props"]
    own = {props["data-key"]: props["href"]} if "data-key" in props and "href" in props else {}
    return own | links(props.get("children"))


def moved(watch: Pipeline, place: PagePlace) -> dict[str, PageWindow]:
    """The windows that the buttons lead to."""
    here, now_ns = here_at(watch, place)
    found = links(parts(time_menu(here, now_ns, 0, ended=False)))
    return {name: place_of(href).window(now_ns) for name, href in found.items() if name != "l"}


@pytest.mark.parametrize("since", ["", "now-1h", "now-90s"])
def test_a_live_window_stays_live_at_any_length(watch: Pipeline, since: str) -> None:
    place = PagePlace("engine", since=since)
    here, now_ns = here_at(watch, place)
    to = moved(watch, place)
    assert to["-"].live
    assert to["+"].live
    assert to["-"].seconds == pytest.approx(2 * here.window.seconds)
    assert to["+"].seconds == pytest.approx(here.window.seconds / 2)
    assert "]" not in to
    assert not to["["].live
    assert to["["].until_ns < now_ns


def test_nothing_leads_into_the_future(watch: Pipeline) -> None:
    _, now_ns = here_at(watch, PagePlace())
    for ended_ago in (0, MINUTE, 4 * MINUTE, 60 * MINUTE):
        until = now_ns - ended_ago
        place = PagePlace("engine", since=rfc3339(until - 10 * MINUTE), until=rfc3339(until))
        to = moved(watch, place)
        assert all(window.until_ns <= now_ns for window in to.values())
        assert ("]" in to) == (ended_ago > 0), "later is offered only where there is something later"
        if ended_ago:
            assert to["]"].seconds == pytest.approx(600, abs=0.01)
            assert to["]"].until_ns > until


def test_a_window_of_an_instant_is_not_halved(watch: Pipeline) -> None:
    assert "+" not in moved(watch, PagePlace("engine", since="now-1s"))
    assert "+" in moved(watch, PagePlace("engine", since="now-2s"))


def test_windows_are_offered_as_far_as_there_is_something_to_see(watch: Pipeline) -> None:
    here, now_ns = here_at(watch, PagePlace("engine"))

    def offered(known_s: float) -> list[str]:
        text = json.dumps(parts(time_menu(here, now_ns, known_s, ended=False)))
        return [words for words in ("Last 6 hours", "Last day", "Last 7 days", "Last 30 days") if words in text]

    assert offered(0) == ["Last 6 hours"]
    assert offered(7 * 3600) == ["Last 6 hours", "Last day"]
    assert offered(40 * 86_400) == ["Last 6 hours", "Last day", "Last 7 days", "Last 30 days"]


def test_a_length_is_written_in_its_largest_unit() -> None:
    for seconds, text in ((1200, "now-20m"), (3600, "now-1h"), (90, "now-90s"), (86_400, "now-1d"), (0.4, "now-1s")):
        assert ago(seconds) == text
        assert wall_ns(ago(seconds), 0 + 10**18) == 10**18 - max(1, round(seconds)) * 10**9


def test_fields_take_what_addresses_take() -> None:
    for text in ("2026-11-21 14:02:11", "2026-11-21T14:02", "14:02:11", "now-30m", "now", "1763733600000"):
        assert re.fullmatch(TIME_FORM, text), text
        wall_ns(text, 10**18)
    for text in ("2:02 PM", "21.11.2026", "yesterday"):
        assert not re.fullmatch(TIME_FORM, text)
