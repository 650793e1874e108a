"""Only what somebody looks at is made, once for all who look; what is past is made once for long."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from typing import Any

import pytest

from kvscope.dashboards.web.links import PagePlace, place_of, rfc3339
from kvscope.dashboards.web.rendering import REST, TICK_S, Page, Pages
from kvscope.dashboards.web.view_registry import PATHS
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.base.text import counted
from kvscope.monitor.contract.samples import Sample
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.questions.schema import BlockMap, PointView
from tests.detectors.scenes import unaccounted
from tests.web.parts import ENGINE


class CountingWatch(Pipeline):
    """Counts what it is asked, and knows an engine that has worked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()
        lab = Lab(connector_share=0.5)
        for _ in range(20):
            lab.arrive(12)
            lab.step()
        lab.run_until_idle()
        self.feed(lab.frames)
        self.now_ns = self.fleet.engines[ENGINE].now_ns

    def points(self, *args: Any, **named: Any) -> list[PointView]:
        self.asked["points"] += 1
        return super().points(*args, **named)

    def block_map(self, engine: str, at: str = "") -> BlockMap:
        self.asked["block_map"] += 1
        return super().block_map(engine, at)


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def look(pages: Pages, place: PagePlace) -> Page:
    return asyncio.run(pages.page(place))


def test_a_finding_open_for_long_is_in_the_window_and_on_the_page_that_it_leads_to() -> None:
    scene = unaccounted()
    scene.run_until_idle(0.1)
    scene.live(45 * 60, every=1.0)
    (leak,) = [one for one in scene.watch.findings("firing") if one.code == "leak.unaccounted"]
    pages = Pages(scene.watch)
    timeline = look(pages, PagePlace("engine", ENGINE)).sections
    assert leak.title in timeline["main marks"]
    held = look(pages, PagePlace("held", ENGINE)).sections
    assert f"{counted(len(leak.culprits.blocks), 'block')} are held now" in held["main head"]
    assert leak.culprits.requests
    for request in leak.culprits.requests:
        assert f'"{request}"' in held["main held"]
    finding = look(pages, PagePlace("finding", ENGINE, id=leak.id)).sections["main finding"]
    linked = re.findall(r'"href":"(/(?:held|engine|blocks)[^"]*)"', finding)
    assert len(linked) > 2
    for address in linked:
        shown = look(pages, place_of(address)).sections
        assert "main sentence" not in shown
        assert "main marks" not in shown or leak.title in shown["main marks"]


@pytest.mark.parametrize("several", [".*", "{lab@127.0.0.1:0/0,lab@127.0.0.1:0/1}"])
def test_a_link_about_several_engines_leads_to_the_overview(several: str) -> None:
    watch = CountingWatch()
    watch.feed(Lab(engine="lab@127.0.0.1:0/1").frames)
    page = look(Pages(watch), place_of(PagePlace("engine", several, since="now-30m", id="7").but()))
    assert page.notices["title"].endswith("Overview")
    assert "No engine" not in page.sections["alarms"]
    assert "main engines" in page.notices["main"]
    assert "now-30m" in page.sections["bar"]


def test_a_link_about_all_engines_leads_to_the_only_one() -> None:
    page = look(Pages(CountingWatch()), PagePlace("requests", ".*"))
    assert "Requests" in page.notices["title"]
    assert page.notices["engine"] == ENGINE


def test_an_unknown_engine_is_named_even_in_braces_that_are_no_list() -> None:
    page = look(Pages(CountingWatch()), PagePlace("engine", "{another"))
    assert "No engine '{another' is known here" in page.sections["alarms"]


def test_only_the_view_that_is_looked_at_is_made() -> None:
    watch = CountingWatch()
    look(Pages(watch), PagePlace("requests", ENGINE))
    assert not watch.asked
    look(Pages(watch), PagePlace("blocks", ENGINE))
    assert watch.asked["block_map"] == 1


def test_a_live_view_is_made_once_a_tick_and_a_past_one_is_kept() -> None:
    watch, clock = CountingWatch(), Clock()
    pages = Pages(watch, clock)

    async def counts(place: PagePlace) -> list[int]:
        """How often it was made, as time passes, each time that three look."""
        watch.asked.clear()
        made = []
        for passes_s in (0.0, 0.0, TICK_S, TICK_S):
            clock.now += passes_s
            await asyncio.gather(*(pages.page(place) for _ in range(3)))
            made.append(watch.asked["points"])
        return made

    async def both() -> tuple[list[int], list[int]]:
        past = rfc3339(watch.now_ns - 20_000_000)
        return await counts(PagePlace("engine", ENGINE)), await counts(PagePlace("engine", ENGINE, until=past))

    assert asyncio.run(both()) == ([1, 1, 2, 3], [1, 1, 1, 1])


def test_views_that_take_long_are_made_again_one_after_another_and_say_how_often() -> None:
    """So that all of them together take no more than a tenth of the time, and each has its turn."""
    clock = Clock()
    took_s = 0.25

    class SlowWatch(CountingWatch):
        def block_map(self, engine: str, at: str = "") -> BlockMap:
            clock.now += took_s
            return super().block_map(engine, at)

    watch = SlowWatch()
    pages = Pages(watch, clock)
    places = [
        PagePlace("blocks", ENGINE, more=(("colour", colour),)) for colour in ("state", "owner", "age", "references")
    ]
    looks = 100

    async def watched() -> list[Page]:
        seen: list[Page] = []
        for _ in range(looks):
            seen = [await pages.page(place) for place in places]
            clock.now += TICK_S
        return seen

    began = clock.now
    seen = asyncio.run(watched())
    made = watch.asked["block_map"]
    assert 2 * len(places) < made
    assert (made - len(places)) * took_s <= (clock.now - began) / (1 + REST)
    every = [re.search(r"updated every (\d+) s", page.sections["bar"]) for page in seen]
    cycle_s = len(places) * (1 + REST) * took_s
    assert all(found and cycle_s <= int(found[1]) <= 1.5 * cycle_s for found in every)
    clock.now += 600  # nobody looks on; who comes back sees it as it is now
    assert "updated every" not in asyncio.run(pages.page(places[0])).sections["bar"]
    assert watch.asked["block_map"] == made + 1


@pytest.mark.parametrize("path", [path for path in PATHS if path != "finding"])
def test_every_view_can_be_made_now_and_of_a_moment(path: str) -> None:
    watch = CountingWatch()
    pages = Pages(watch)
    for at in ("", rfc3339(watch.now_ns - 20_000_000)):
        page = look(pages, PagePlace(path, ENGINE, at=at, id="r-3" if path == "request" else "3"))
        assert page.notices["main"], "it shows nothing"
        assert "main sentence" not in page.sections, page.sections
        for section in page.sections.values():
            json.loads(section)


def test_a_view_that_cannot_be_made_says_so_and_the_page_stays(caplog: pytest.LogCaptureFixture) -> None:
    class BrokenWatch(CountingWatch):
        def block_map(self, engine: str, at: str = "") -> BlockMap:
            raise ZeroDivisionError("on purpose")

    page = look(Pages(BrokenWatch()), PagePlace("blocks", ENGINE))
    assert "could not be rendered" in page.sections["main sentence"]
    assert ENGINE in page.sections["bar"]
    assert "on purpose" in caplog.text


def test_so_much_that_it_cannot_be_shown_at_once_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvscope.monitor.questions.past.MAX_WINDOW_BYTES", 0)
    page = look(Pages(CountingWatch()), PagePlace("held", ENGINE))
    assert "too many events" in page.sections["main sentence"]


@pytest.mark.parametrize("path", PATHS)
def test_of_an_engine_known_by_figures_alone_every_view_says_what_it_can(path: str) -> None:
    watch = Pipeline()
    watch.feed(
        Sample(
            "vllm", f"line {second}", 1_795_000_000_000_000_000 + second * 10**9, running=3, usage=0.4, source="metrics"
        )
        for second in range(20)
    )
    page = look(Pages(watch), PagePlace(path, "vllm", id="1"))
    assert page.notices["main"]
    assert "could not be rendered" not in str(page.sections)
    assert "seen through /metrics only" in page.sections["bar"]
    if path == "":
        assert "not exposed" in page.sections["main engines"]
    if path in ("blocks", "held", "requests", "prefixes"):
        assert f'"{PATHS[path].label}"' in page.sections["main sentence"]
        assert "event stream" in page.sections["main sentence"]


def test_who_looks_at_a_time_of_which_nothing_is_known_is_led_to_what_is() -> None:
    watch = CountingWatch()
    span = watch.history(ENGINE)
    page = look(Pages(watch), PagePlace("blocks", ENGINE, at="2020-11-20T00:00:00Z"))
    known = PagePlace("blocks", ENGINE, span.first or "", span.last or "").but()
    assert json.dumps(known)[1:-1] in page.sections["main sentence"]
    page = look(Pages(watch), place_of(known))
    assert "main sentence" not in page.sections


def test_a_bad_link_is_told_of_in_full_and_a_name_is_not_changed() -> None:
    page = look(Pages(CountingWatch()), PagePlace("engine", "nonsense", at="garbage"))
    assert "'nonsense'" in page.sections["alarms"]
    assert "'garbage'" in page.sections["alarms"]
    page = look(Pages(CountingWatch()), PagePlace("request", ENGINE, id="nobody"))
    assert f'"{ENGINE} has no request' in page.sections["main not-known"]
    assert page.sections["aside"] == '""', "it would say the same once more"
