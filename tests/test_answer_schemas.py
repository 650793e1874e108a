"""Real answers match the JSON schemas of all questions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import jsonschema
import pytest

from kvscope.monitor.contract.kinds import SCHEMA, Kind
from kvscope.monitor.questions.client import ServiceClient
from kvscope.monitor.questions.query import QUESTIONS, Question
from kvscope.monitor.questions.schema import SCHEMA_VERSION
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
def service(scene: Watched) -> Iterator[httpx2.Client]:
    with served(scene.watch) as url, httpx2.Client(base_url=url, trust_env=False) as client:
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
def test_a_real_answer_is_as_its_schema_says(scene: Watched, service: httpx2.Client, question: Question) -> None:
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


def test_a_client_reads_the_same_answer_over_http(scene: Watched) -> None:
    with served(scene.watch) as url:
        client = ServiceClient(url)
        try:
            detail = client.request(ENGINE, arguments(scene, "request")["id"])
            assert detail == scene.watch.request(ENGINE, detail.request.id)
        finally:
            client.close()
