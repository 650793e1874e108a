"""An address says where one is, and every way of writing a time leads to the same moment."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvscope.dashboards.web.links import PagePlace, place_of, rfc3339, wall_ns
from kvscope.monitor.base.errors import BadTime

NOW_NS = 1_795_000_000_123_000_000
SECOND = 1_000_000_000

words = st.text(max_size=12)
filters = st.dictionaries(st.sampled_from(["sort", "state", "q"]), words.filter(bool))
more = filters.map(lambda found: tuple(sorted(found.items())))
views = st.sampled_from(["", "engine", "blocks", "request"])
places = st.builds(PagePlace, views, words, words, words, words, words, more)


@settings(deadline=None)
@given(places)
def test_an_address_leads_back_to_its_place(place: PagePlace) -> None:
    assert place_of("http://127.0.0.1:8765" + place.but()) == place


def test_another_view_keeps_the_engine_and_the_time_and_nothing_else() -> None:
    place = PagePlace("requests", "m@h:1/0", "now-1h", "", "", "r-1", (("sort", "age"),))
    assert place_of(place.to("blocks", id="7")) == PagePlace("blocks", "m@h:1/0", "now-1h", "", "", "7")


def test_a_token_is_not_handed_on() -> None:
    assert "secret" not in place_of("/engine?token=secret&engine=a").but()


@settings(deadline=None)
@given(st.integers(min_value=0, max_value=4_000_000_000_000))
def test_rfc_3339_and_milliseconds_are_the_same_time(ms: int) -> None:
    assert wall_ns(rfc3339(ms * 1_000_000), NOW_NS) == wall_ns(str(ms), NOW_NS) == ms * 1_000_000


def test_other_ways_to_write_a_time() -> None:
    at = wall_ns("2026-11-21T14:02:11Z", NOW_NS)
    assert wall_ns("2026-11-21T15:02:11+01:00", NOW_NS) == wall_ns("2026-11-21T14:02:11", NOW_NS) == at
    assert wall_ns("14:02:11", at + 60 * SECOND) == at
    assert wall_ns("now", NOW_NS) == NOW_NS
    assert wall_ns("now-30m", NOW_NS) == NOW_NS - 1800 * SECOND


@pytest.mark.parametrize("text", ["teatime", "", "now-", "99999999999999999999", "25:00:00", "3/17/2", "now-999999d"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(BadTime):
        wall_ns(text, NOW_NS)


def test_windows() -> None:
    minute = 60 * SECOND
    assert PagePlace().window(NOW_NS) == (NOW_NS - 10 * minute, NOW_NS, True)
    assert PagePlace(since="now-1h", until="now").window(NOW_NS) == (NOW_NS - 60 * minute, NOW_NS, True)
    until = rfc3339(NOW_NS - 30 * minute)
    assert PagePlace(until=until).window(NOW_NS) == (NOW_NS - 40 * minute, NOW_NS - 30 * minute, False)
    assert PagePlace(at=until).window(NOW_NS) == (NOW_NS - 35 * minute, NOW_NS - 25 * minute, False)
    old, new = NOW_NS - 45 * minute, NOW_NS - 2 * minute  # an open finding
    assert PagePlace().window(NOW_NS, old) == (NOW_NS - 46 * minute, NOW_NS, True)
    assert PagePlace().window(NOW_NS, new) == (NOW_NS - 10 * minute, NOW_NS, True)
    assert PagePlace(since="now-1m").window(NOW_NS, old) == (NOW_NS - minute, NOW_NS, True)
    assert PagePlace(until=until).window(NOW_NS, old) == (NOW_NS - 40 * minute, NOW_NS - 30 * minute, False)
    assert not PagePlace(at="3/17/2").window(NOW_NS).live
    with pytest.raises(BadTime):
        PagePlace(since=until, until="now-1h").window(NOW_NS)
