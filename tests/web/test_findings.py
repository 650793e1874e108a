"""Findings that come and go, narrowed; one of them told to somebody, and silenced from its page."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.receiving import Server
from tests.web.incidents import TOKEN
from tests.web.parts import ENGINE, LEAK, Account, Engine, address, service

PUBLIC = "https://ops.example"
TOO_BIG = "stuck.never-fits"


def test_from_a_finding_to_its_silence(page: Page, tmp_path: Path) -> None:
    with ExitStack() as stack:
        receiver = Server()
        stack.callback(receiver.stop)
        engine = stack.enter_context(Engine(tmp_path, total=400, connector_share=1.0, faults=[f"{LEAK}:every=3"]))
        engine.lab.faults.on[LEAK].limit = 3
        arguments = ("--alert", receiver.url, "--alert-private", "--data", str(tmp_path), "--token", TOKEN)
        arguments += ("--public-url", PUBLIC)
        with service("--events", engine.events, "--set", f"{LEAK}.grace_s=1", *arguments) as url:
            account = Account(page)
            page.goto(f"{url}{address('findings')}&token={TOKEN}")
            page.locator(".finding-timeline").get_by_role("link", name="Finished requests keep their blocks").click()
            reported = page.locator("#notifications")
            expect(reported.locator("tr").first).to_contain_text("delivered")
            reported.get_by_text("Acknowledge, or silence it").click()
            reported.get_by_label("For").select_option("a day")
            reported.get_by_label("Comment").fill("anna looks at it")
            here = page.url
            reported.get_by_role("button").click()
            expect(reported.locator(".silenced")).to_contain_text("anna looks at it")
            expect(reported.get_by_role("status")).to_contain_text("Silence 1 is set until")
            assert page.url == f"{here}&silenced=1"
            page.get_by_role("navigation", name="Views").get_by_role("link", name="Alerts").click()
            silences = page.locator("#silences")
            expect(silences).to_contain_text(f"code={LEAK} engine={ENGINE}")
            silences.get_by_role("button", name="End").click()
            expect(silences).to_contain_text("No silence is set")
            silences.get_by_text("Create a silence").click()
            silences.get_by_label("Code").select_option(LEAK)
            silences.get_by_label("For").select_option("an hour")
            silences.get_by_label("Reason").fill("a drill")
            silences.get_by_role("button", name="Silence", exact=True).click()
            expect(silences.get_by_role("status")).to_contain_text("Silence 2 is set until")
            expect(silences.locator("tbody tr")).to_contain_text(["a drill"])
            page.locator("#open-alerts").get_by_label("Code").select_option(LEAK)
            page.locator("#open-alerts").get_by_role("button", name="Show").click()
            expect(page).to_have_url(re.compile(f"code={LEAK}"))
            opened = page.locator("#open-alerts tbody tr")
            expect(opened).to_have_count(1)
            opened.get_by_role("link", name=LEAK).click()
            expect(page.locator("#finding .marks code")).to_have_text(LEAK)
            links = json.loads(receiver.got[0].body)["data"]["links"]
            page.goto(links["finding"].replace(PUBLIC, url))
            expect(page.locator("#finding .marks code")).to_have_text(LEAK)
            page.goto(links["engine"].replace(PUBLIC, url))
            expect(page.get_by_role("link", name="Finished requests keep their blocks").first).to_be_visible()
            assert page.request.get(links["runbook"].replace(PUBLIC, url)).text().startswith(f"# {LEAK}")
            page.goto(f"{url}/alerts")
            expect(page.locator("#thresholds")).to_contain_text(f"{LEAK}.grace_s")
            assert account.elsewhere(url) == []


@pytest.mark.slow
def test_open_ones_and_those_that_are_over(page: Page, tmp_path: Path) -> None:
    with Engine(tmp_path, total=100) as engine, service("--events", engine.events) as url:
        too_big = engine.lab.pool.total * engine.lab.manager.block_size + 1
        arrived = []
        page.goto(url + address("findings"))
        expect(page.locator("#view h1")).to_have_text(re.compile("^No finding"))
        engine.soon(lambda: arrived.append(engine.lab.arrive(too_big, name="too-big")))
        life = page.locator(".finding-timeline tbody tr").filter(has_text="more blocks")
        expect(life.locator(".life.open")).to_be_visible()
        expect(page.locator("#view h1")).to_have_text(re.compile("^1 finding open"))
        engine.soon(lambda: engine.lab.abort(arrived[0]))
        expect(life.locator(".life.over")).to_be_visible()
        page.get_by_label("State").select_option("open")
        page.get_by_role("button", name="Show").click()
        expect(page).to_have_url(re.compile("state=open"))
        expect(life).to_have_count(0)
        page.get_by_role("link", name="Show all").click()
        life.get_by_role("link").first.click()
        found = page.locator("#finding")
        expect(found.locator(".marks code")).to_have_text(TOO_BIG)
        found.locator(".culprits a.id").first.click()
        expect(page.locator("#time .past")).to_be_visible()
        expect(page.get_by_role("complementary", name="Event history")).to_contain_text("arrived at the scheduler")
