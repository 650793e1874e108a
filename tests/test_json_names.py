"""The schemas of all answers hold real answers, and renamed routes, parameters and keys answer under both names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest

from kvscope.monitor.client import ServiceClient
from kvscope.monitor.doctor.memory_report import MemoryReport
from kvscope.monitor.doctor.report import BalanceReport
from kvscope.monitor.events.kinds import SCHEMA, Kind
from kvscope.monitor.json_names import (
    OLD_VALUES,
    RENAMED_KEYS,
    encode_answer,
    has_old_names,
    schema_with_old_names,
    structs_in,
    with_old_names,
)
from kvscope.monitor.query import QUESTIONS, Question
from kvscope.monitor.schema import SCHEMA_VERSION, FindingRow
from tests.detectors.scenes import ENGINE, Watched, finished_held
from tests.test_api import served


@pytest.fixture(scope="module")
def scene() -> Watched:
    """An engine with a leak, requests of every kind, and a memory breakdown."""
    scene = finished_held("leak.finished-held:every=2")
    sizes = {"device_total": 80, "device_free": 8, "weights": 20, "kv_pool": 40}
    scene.lab.log.memory([sizes[name] << 30 if name in sizes else -1 for name in SCHEMA[Kind.MEMORY].args])
    scene.live(15)
    scene.lab.arrive(200, max_tokens=4)
    scene.lab.arrive(30, max_tokens=60)
    scene.steps(5)
    return scene


@pytest.fixture
def service(scene: Watched) -> Iterator[httpx.Client]:
    with served(scene.watch) as url, httpx.Client(base_url=url, trust_env=False) as client:
        yield client


def arguments(scene: Watched, name: str) -> dict[str, Any]:
    """Arguments of each question that have an answer."""
    (leak,) = (f for f in scene.watch.findings() if f.code == "leak.finished-held")
    given: dict[str, dict[str, Any]] = {
        "finding": {"id": leak.id},
        "notifications": {"finding": leak.id},
        "request": {"engine": ENGINE, "id": scene.watch.requests(ENGINE)[0].id},
        "find_request": {"id": scene.watch.requests(ENGINE)[0].id},
        "block": {"engine": ENGINE, "id": leak.culprits.blocks[0]},
        "block_colours": {"engine": ENGINE, "by": "owner"},
        "calculator": {"engine": ENGINE, "prompt_tokens": 30, "max_tokens": 20},
        "events": {"engine": ENGINE, "kinds": "allocated,released", "limit": 20},
        "points": {"engine": ENGINE, "limit": 20},
    }
    return given.get(name, {} if name in ("engines", "past_engines", "findings") else {"engine": ENGINE})


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=lambda question: question.name)
def test_a_real_answer_is_as_its_schema_says(scene: Watched, service: httpx.Client, question: Question) -> None:
    document = service.get("/api/openapi.json").json()
    operation = document["paths"][question.route]["get"]
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    response = service.get(question.route, params=arguments(scene, question.name))
    assert (response.status_code, response.headers["x-kvscope-schema"]) == (200, SCHEMA_VERSION)
    answer = response.json()
    whole = {**schema, "components": document["components"]}
    jsonschema.validate(answer, whole)
    assert answer or question.name == "past_engines"
    with pytest.raises(jsonschema.ValidationError):  # the schema says something
        jsonschema.validate(["text"] if isinstance(answer, list) else "text", whole)


@pytest.mark.parametrize("question", [q for q in QUESTIONS.values() if q.old_name], ids=lambda question: question.name)
def test_an_old_route_answers_like_the_new_one(scene: Watched, service: httpx.Client, question: Question) -> None:
    given = arguments(scene, question.name)
    assert service.get(question.old_route, params=given).json() == service.get(question.route, params=given).json()


def test_an_old_parameter_counts(service: httpx.Client) -> None:
    for path in ("/api/points", "/api/events"):
        assert len(service.get(path, params={"engine": ENGINE, "most": 3}).json()) == 3
        assert len(service.get(path, params={"engine": ENGINE, "most": 3, "limit": 2}).json()) == 2
    old = service.get("/api/drop", params={"engine": ENGINE, "window": 3.0}).json()
    assert old == service.get("/api/usage_drop", params={"engine": ENGINE, "window_s": 3.0}).json()
    assert service.get("/api/drop", params={"engine": ENGINE, "window": 0}).status_code == 400


def test_an_answer_has_each_renamed_key_under_both_names(scene: Watched, service: httpx.Client) -> None:
    request = service.get("/api/request", params=arguments(scene, "request")).json()
    for new, old in RENAMED_KEYS["RequestDetail"].items():
        assert request[new] == request[old]
    for entry in request["event_history"]:
        assert entry["kind"] == entry["what"]
    (engine,) = service.get("/api/engines").json()
    assert (engine["signal"], engine["attached"]) == ("stream", "stream")
    row = FindingRow("leak.unaccounted", "", "error", "added", 0, 1, "likely", [])
    assert json.loads(encode_answer([{"rows": [row]}]))[0]["rows"][0]["change"] == "came"


def test_a_client_reads_what_both_names_carry(scene: Watched) -> None:
    with served(scene.watch) as url:
        client = ServiceClient(url)
        try:
            detail = client.request(ENGINE, arguments(scene, "request")["id"])
            assert detail == scene.watch.request(ENGINE, detail.request.id)
        finally:
            client.close()


def test_the_table_of_renamed_keys_is_about_structs_that_there_are() -> None:
    answers = [question.answer for question in QUESTIONS.values()]
    structs = {each.__name__: each for kind in (*answers, BalanceReport, MemoryReport) for each in structs_in(kind)}
    for name, renamed in RENAMED_KEYS.items():
        fields = structs[name].__struct_fields__
        assert set(renamed) <= set(fields), name
        assert not set(renamed.values()) & set(fields), name
        assert has_old_names(structs[name])
    assert set(OLD_VALUES) <= {old for renamed in RENAMED_KEYS.values() for old in renamed.values()}
    _, components = schema_with_old_names(answers)
    marked = {
        name: {key for key, each in component.get("properties", {}).items() if each.get("deprecated")}
        for name, component in components.items()
    }
    expected = {name: set(RENAMED_KEYS.get(name, {}).values()) for name in components}
    assert marked == expected


def test_what_has_no_renamed_key_is_encoded_as_it_is(scene: Watched) -> None:
    points = scene.watch.points(ENGINE)
    assert points
    assert with_old_names(points) == points
    assert encode_answer(points) == msgspec.json.encode(points)
