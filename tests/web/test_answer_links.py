"""Each view links to what it shows as JSON and CSV, and a request is found from the bar, whatever engine had it."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from kvscope.dashboards.web.header import header_bar
from kvscope.dashboards.web.links import place_of, wall_ns
from kvscope.dashboards.web.view import Here
from kvscope.dashboards.web.view_registry import ANSWERS_OF, PATHS, answer_links
from kvscope.dashboards.web.views import search_view
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.service.query_routes import csv_of, serve_questions
from tests.web.parts import ENGINE
from tests.web.test_states import looked_at, rows


def worked() -> tuple[Pipeline, TestClient]:
    from fastapi import FastAPI

    lab = Lab(connector_share=0.5)
    for number in range(12):
        lab.arrive(12, name=f"chat-{number}")
        lab.step()
    lab.arrive(12, name="=cmd()")
    lab.step()
    watch = looked_at(lab)
    app = FastAPI()
    serve_questions(app, watch)
    return watch, TestClient(app)


def at(watch: Pipeline, address: str) -> Here:
    (engine,) = watch.engines()
    place = place_of(address)._replace(engine=engine.engine)
    return Here(place, place.window(wall_ns(engine.at or "", 0)), engine, [engine])


def links(tree: Any) -> list[str]:
    found: list[str] = []
    for one in tree if isinstance(tree, (list, tuple)) else [tree]:
        found += [one.href] if type(one).__name__ == "A" else []
        found += links(one.children) if hasattr(one, "children") else []
    return found


ADDRESSES = {
    "block": "/block?id=3",
    "request": "/request?id=chat-3",
    "search": "/search?q=chat",
    "finding": "",
    "compare": "",
}


def test_every_view_has_them() -> None:
    assert set(ANSWERS_OF) == set(PATHS)


@pytest.mark.parametrize("path", [path for path in PATHS if ADDRESSES.get(path, path or "/")])
@pytest.mark.parametrize("times", ["", "at"])
def test_the_links_of_a_view_are_answered(path: str, times: str) -> None:
    watch, client = worked()
    address = ADDRESSES.get(path, f"/{path}")
    if times:
        now = watch.engines()[0].at or ""
        address += ("&" if "?" in address else "?") + f"at={now}"
    found = links(answer_links(at(watch, address)))
    assert found
    for link in found:
        response = client.get(link)
        if path == "memory":  # this engine never reported it, as the view says
            assert response.headers["x-kvscope"] == "not-known"
            continue
        assert response.status_code == 200, (link, response.text)
        if "format=csv" in link:
            assert response.headers["content-type"].startswith("text/csv")
            assert "attachment" in response.headers["content-disposition"]
        else:
            json.loads(response.text)


def test_a_csv_has_the_rows_of_the_answer_and_no_formula() -> None:
    watch, client = worked()
    response = client.get("/api/requests", params={"engine": ENGINE, "format": "csv"})
    reported = list(csv.DictReader(io.StringIO(response.text)))
    asked = watch.requests(ENGINE)
    assert [row["number"] for row in reported] == [str(one.number) for one in asked]
    assert {row["id"] for row in reported} == {one.id for one in asked} - {"=cmd()"} | {"'=cmd()"}
    assert [row["for_s"] for row in reported] == [str(one.for_s) for one in asked]
    assert client.get("/api/requests", params={"engine": ENGINE, "format": "xml"}).status_code == 400
    assert csv_of([]) == "\r\n"


def test_a_request_is_found_from_the_bar() -> None:
    watch, _ = worked()
    bar = header_bar(at(watch, "/engine"))
    assert "/search" in json.dumps(bar, default=lambda part: part.to_plotly_json())
    here = at(watch, "/search?q=CHAT-7&from=now-5m")
    view = search_view.view(watch, here)
    ((name, engine, seen, _state),) = rows(view, "found")[1:]
    assert (name, engine) == ("chat-7", ENGINE)
    assert seen
    assert any(link.startswith("/request?") for link in links(view.sections["found"]))
    none = search_view.view(watch, at(watch, "/search?q=chat-7&of=another"))
    assert rows(none, "found") == []
    assert "found" not in search_view.view(watch, at(watch, "/search")).sections
