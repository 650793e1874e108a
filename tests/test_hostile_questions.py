"""Numbers in a question to the service that no engine has: refused with a reason, never an error of the service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from kvscope.lab.fuzzing.served_targets import QuestionTarget
from kvscope.lab.stepped_recordings import healthy_lab
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.service.http_api import create_app

HUGE = "9" * 400


@pytest.fixture
def client() -> Iterator[tuple[TestClient, str]]:
    pipeline = Pipeline()
    lab = healthy_lab()
    pipeline.feed(lab.frames)
    with TestClient(create_app(pipeline, list), base_url="http://127.0.0.1") as client:  # which raises what escapes
        yield client, lab.frames[0].engine


@pytest.mark.parametrize(
    ("question", "status"),
    [
        ("points?seconds=nan", 400),
        ("points?seconds=1e308", 400),
        ("points?seconds=-1e308", 400),
        ("points?seconds=600", 200),
        (f"calculator?prompt_tokens={HUGE}&max_tokens=1", 400),
        (f"calculator?prompt_tokens=1&max_tokens=1&concurrency={HUGE}", 400),
        ("calculator?prompt_tokens=1000000&max_tokens=1000000&concurrency=1000000", 200),
    ],
)
def test_numbers_that_no_engine_has(client: tuple[TestClient, str], question: str, status: int) -> None:
    http, engine = client
    answer = http.get(f"/api/{question}&engine={engine}")
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize("path", ["/api/points", "/api/points/", "/metrics", "/nothing/"])
def test_a_query_string_that_is_no_text(tmp_path: Path, path: str) -> None:
    target = QuestionTarget(tmp_path)
    try:
        assert target.read(path.encode() + b"?engine=\x83") == "400"
        assert target.read(path.encode() + "?engine=ü".encode()) in ("200", "307", "404", "422")
    finally:
        target.close()
