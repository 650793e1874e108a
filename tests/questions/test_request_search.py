"""A request is found by a part of its id: in the ledgers, in the history, in engines that are gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.base.errors import BadQuestion
from kvscope.monitor.contract.wire import encode
from kvscope.monitor.history.history import History
from kvscope.monitor.history.retention import Keep, Keeper
from kvscope.monitor.history.sealed_segment import close
from kvscope.monitor.history.segment_files import directory_of, history_segments
from kvscope.monitor.questions import request_details
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.live_stream import Received

NAMES = ("first-lab@127.0.0.1:0/0", "second-lab@127.0.0.1:0/0")


def worked(engine: str, names: list[str]) -> Lab:
    lab = Lab(engine=engine)
    for name in names:
        lab.arrive(8, name=name)
        lab.step(0.5)
        lab.flush()
    lab.run_until_idle()
    lab.flush()
    return lab


def kept(path: Path, lab: Lab) -> None:
    keeper = Keeper(path, Keep())
    keeper.keep([Received(frame, encode(frame)) for frame in lab.frames], None)
    keeper.stop([])


def test_requests_of_all_engines_live_and_gone(tmp_path: Path) -> None:
    gone, live = worked(NAMES[0], ["abc-1", "abc-2"]), worked(NAMES[1], ["ABC-3", "other"])
    kept(tmp_path, gone)
    for segment in history_segments(directory_of(tmp_path, NAMES[0])):
        close(segment.path, segment.path.parent)
    kept(tmp_path, live)
    watch = Pipeline(history=History(tmp_path))
    watch.feed(live.frames)
    found = watch.find_request("abc")
    assert {(one.engine, one.id) for one in found.requests} == {
        (NAMES[0], "abc-1"),
        (NAMES[0], "abc-2"),
        (NAMES[1], "ABC-3"),
    }
    assert found.is_complete
    by_id = {one.id: one for one in found.requests}
    assert (by_id["ABC-3"].at, by_id["ABC-3"].ended) == ("", True)
    for one in found.requests:
        assert watch.request(one.engine, one.id, one.at).request.id == one.id
    assert [one.id for one in watch.find_request("abc", engine=NAMES[1]).requests] == ["ABC-3"]
    assert watch.find_request("nobody").requests == []


def test_a_window_and_a_limit_narrow_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = worked(NAMES[0], [f"abc-{number}" for number in range(5)])
    kept(tmp_path, lab)
    watch = Pipeline(history=History(tmp_path))
    first, *_, last = sorted(watch.find_request("abc").requests, key=lambda one: one.first_seen or "")
    assert (first.id, last.id) == ("abc-0", "abc-4")
    early = watch.find_request("abc", until=first.at)
    assert [one.id for one in early.requests] == ["abc-0"]
    assert watch.find_request("abc", until=first.at, since=first.at).requests == []
    limited = watch.find_request("abc", limit=2)
    assert ([one.id for one in limited.requests], limited.is_complete) == (["abc-4", "abc-3"], False)
    monkeypatch.setattr(request_details, "MAX_SEARCH_S", -1.0)
    hurried = watch.find_request("abc")
    assert (hurried.requests, hurried.is_complete) == ([], False)


def test_a_search_for_nothing_is_refused() -> None:
    with pytest.raises(BadQuestion):
        Pipeline().find_request("  ")
