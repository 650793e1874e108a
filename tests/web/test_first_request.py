"""A service that has just started may be asked for any view first: an alert's link leads straight to one."""

from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient

from kvscope.dashboards.web.app import mount
from kvscope.dashboards.web.view_registry import PATHS
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.service.http_api import create_app


@pytest.mark.parametrize("path", PATHS)
def test_the_first_page_that_is_asked_for_is_whole(path: str) -> None:
    watch = Pipeline()
    app = create_app(watch, list)
    mount(app, watch)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        first = client.get(f"/{path}").text
    served = [link.rpartition("/")[2].partition("?")[0] for link in re.findall(r'"(/assets/[^"]+)"', first)]
    assert {"kvscope.js", "kvscope.css", "charts.js"} <= set(served)
