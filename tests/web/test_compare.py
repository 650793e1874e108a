"""The view that compares: its figures are those of `monitor diff`; its form, links and keys lead to other windows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx2
import pytest
from playwright.sync_api import Locator, Page, expect

from kvscope.dashboards.web.links import PagePlace, place_of, rfc3339, wall_ns
from kvscope.dashboards.web.views.compare_view import STATUS_SIGNS, _value, metric_in_words
from kvscope.lab.stepped_recordings import healthy_lab, leaking_lab, recording_of
from kvscope.monitor.terminal.cli import main
from tests.terminal.golden import TOLD
from tests.web.incidents import TOKEN, Incident, served
from tests.web.parts import ENGINE, Account, service

LEAK = "leak.finished-held"
SECOND = 1_000_000_000
AXES = """chart => [
  chart.layout.yaxis.range,
  chart.layout.yaxis2.range,
  chart.layout.xaxis.range.map((at) => +new Date(at)).reduce((first, last) => last - first),
]"""
"""Where the axes of a chart end, and how long a time it shows."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("incident")


@pytest.fixture(scope="module")
def incident(kept: Path) -> Iterator[Incident]:
    with served(TOLD[LEAK].scenario, kept) as incident:
        yield incident


def diff(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """What the command prints."""
    main(["diff", "--format", "json", *map(str, arguments)])
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def rows(table: Locator) -> list[list[str]]:
    cells = table.locator("tbody tr").evaluate_all(
        "rows => rows.map((row) => [...row.cells].map((cell) => cell.innerText.trim().replace(/\\s+/g, ' ')))"
    )
    return [[str(cell) for cell in row] for row in cells]


def assert_says(page: Page, expected: dict[str, Any]) -> None:
    """The page says what the command says."""
    expect(page.locator("#figures tbody tr").first).to_be_visible()
    assert [row[:3] for row in rows(page.locator("#figures"))] == [
        [metric_in_words(row["name"]), *(_value(row[side], row["unit"]) for side in ("before", "after"))]
        for row in expected["metrics"]
        if row["before"] is not None or row["after"] is not None
    ]
    changes = [row[3].split()[-1] if row[3] else "" for row in rows(page.locator("#figures"))]
    assert changes == [
        row["change"] for row in expected["metrics"] if row["before"] is not None or row["after"] is not None
    ]
    found = {(row[3], row[0].split()[-1]) for row in rows(page.locator("#compared-findings"))}
    assert found == {(row["code"], STATUS_SIGNS[row["status"]].split()[-1]) for row in expected["findings"]}


def where(page: Page) -> PagePlace:
    return place_of(page.url)


def test_it_shows_what_the_command_prints(
    page: Page, incident: Incident, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over two windows: one before the leak and one in it, taken from the finding itself."""
    account = Account(page)
    (leak,) = (one for one in incident.ask("findings", engine=ENGINE) if one["code"] == LEAK)
    began_ns, first = wall_ns(leak["since"], 0), incident.ask("history", engine=ENGINE)["first"]
    since, until = rfc3339(began_ns + 70 * SECOND), rfc3339(began_ns + 80 * SECOND)
    before = {"with_from": first, "with_to": leak["since"]}
    page.goto(incident.url + PagePlace("compare", ENGINE, since, until, more=tuple(before.items())).but())
    windows = ("--window", f"{first}..{leak['since']}", "--window", f"{since}..{until}")
    assert_says(page, diff(capsys, kept / "recording", *windows))
    expect(page.locator("#view h1")).to_have_text(re.compile("^1 new finding; "))
    expect(page.locator("#compared-findings tr").filter(has_text=LEAK).locator("td").first).to_have_text(
        re.compile("new")
    )
    # Both pools, to one scale.
    ends = []
    for name in ("before", "after"):
        chart = page.locator(f"#{name}-pool")
        expect(chart.locator(".scatterlayer .trace").first).to_be_attached()
        ends.append(chart.evaluate(AXES))
    assert ends[0] == ends[1]
    # What it is about leads to itself.
    page.locator("#compared-findings").get_by_role("link", name=re.compile("^since")).first.click()
    expect(page.locator("#finding .marks code")).to_have_text(LEAK)
    assert account.wrong == []
    assert account.elsewhere(incident.url) == []


def test_the_form_leads_to_other_windows_and_back(page: Page, incident: Incident) -> None:
    page.goto(incident.url + PagePlace("compare", ENGINE).but())
    form = page.locator("form.to-compare")
    expect(page.locator("#figures tbody tr").first).to_be_visible()
    last_ns = wall_ns(incident.ask("history", engine=ENGINE)["last"], 0)
    chosen = {
        name: rfc3339((last_ns - ago_s * SECOND) // SECOND * SECOND).removesuffix("Z")
        for name, ago_s in {"from": 6, "to": 2, "with_from": 14, "with_to": 8}.items()
    }
    for name, value in chosen.items():
        form.locator(f"[name='{name}']").fill(value)
    form.get_by_role("button", name="Compare").press("Enter")
    expect(page).to_have_url(re.compile("with_to="))
    asked = where(page)
    assert (asked.since, asked.until, dict(asked.more)) == (
        chosen["from"],
        chosen["to"],
        {name: chosen[name] for name in ("with_from", "with_to")},
    )
    sides = page.locator(".sides")
    expect(sides).to_contain_text(f"{chosen['with_from'][11:19]} – ")
    for name, value in chosen.items():
        expect(form.locator(f"[name='{name}']")).to_have_value(value.replace("T", " "))
    # Swapped, what was compared with the other is what is looked at.
    figures = rows(page.locator("#figures"))
    form.get_by_role("link", name="Swap").click()
    expect(page.locator("#figures tbody tr td").first).to_have_text(figures[0][2])
    swapped = {row[0]: (row[2], row[1]) for row in rows(page.locator("#figures"))}
    assert swapped == {row[0]: (row[1], row[2]) for row in figures}
    form.get_by_role("link", name="With the time before it").click()
    expect(page).not_to_have_url(re.compile("with_"))
    page.go_back()
    page.go_back()
    expect(page).to_have_url(incident.url + asked.but())


@pytest.mark.slow
def test_each_window_is_chosen_on_its_own_pool(page: Page, incident: Incident) -> None:
    page.goto(incident.url + PagePlace("compare", ENGINE).but())
    for name, window in (("after", ("from", "to")), ("before", ("with_from", "with_to"))):
        earlier = dict(parse_qsl(urlsplit(page.url).query))
        chart = page.locator(f"#{name}-pool")
        expect(chart.locator(".scatterlayer .trace").first).to_be_attached()
        chart.scroll_into_view_if_needed()
        box = chart.locator(".nsewdrag").first.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + box["height"] / 2)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + box["height"] / 2, steps=5)
        page.mouse.up()
        expect(page).to_have_url(re.compile(f"[?&]{window[1]}="))
        asked = dict(parse_qsl(urlsplit(page.url).query))
        assert {key: value for key, value in asked.items() if key not in window} == earlier
        side = page.locator(".sides dd").nth(["before", "after"].index(name))
        expect(side).to_contain_text(f"{asked[window[0]][11:19]} – {asked[window[1]][11:19]} UTC")


def test_a_window_and_a_finding_lead_here(page: Page, incident: Incident) -> None:
    (leak,) = (one for one in incident.ask("findings", engine=ENGINE) if one["code"] == LEAK)
    began_ns = wall_ns(leak["since"], 0)
    window = {"since": rfc3339(began_ns), "until": rfc3339(began_ns + 8 * SECOND)}
    page.goto(incident.url + PagePlace("engine", ENGINE, **window).but())
    expect(page.locator("#history .scatterlayer .trace").first).to_be_attached()
    page.keyboard.press("c")
    expect(page).to_have_url(re.compile("/compare[?]"))
    reported = incident.ask("compare", engine=ENGINE, **window)
    expect(page.locator(".sides")).to_contain_text(
        f"{reported['after']['since'][11:19]} – {reported['after']['until'][11:19]} UTC"
    )
    assert wall_ns(reported["before"]["until"], 0) <= began_ns
    page.goto(incident.url + PagePlace("finding", ENGINE, id=leak["id"]).but())
    page.get_by_role("link", name="Compare with before it began").click()
    expect(page.locator("#compared-findings")).to_contain_text(LEAK)
    assert (where(page).since, where(page).view) == (leak["since"], "compare")


def test_what_cannot_be_compared_is_said_beside_the_form(page: Page, incident: Incident) -> None:
    for times in ({"since": "2001-02-03T04:05:06Z"}, {"since": "now-10s", "more": (("with_from", "teatime"),)}):
        page.goto(incident.url + PagePlace("compare", ENGINE, **times).but())  # type: ignore[arg-type]
        expect(page.get_by_role("heading", name="Nothing to compare")).to_be_visible()
        expect(page.locator("#view").get_by_role("alert")).to_have_text(re.compile("too long|is not a time"))
        expect(page.get_by_role("button", name="Compare")).to_be_visible()


def test_two_recordings_of_one_engine(page: Page, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [recording_of(lab, tmp_path / name) for name, lab in (("monday", healthy_lab()), ("friday", leaking_lab()))]
    with service(*(word for run in runs for word in ("--recording", str(run)))) as url:
        page.goto(f"{url}/compare")
        form = page.locator("form.to-compare")
        expect(form).to_be_visible()
        engines = form.locator("select[name='engine'] option").all_inner_texts()
        assert engines == sorted(f"{run.name}: {ENGINE}" for run in runs)
        friday, monday = engines
        form.locator("select[name='engine']").select_option(friday)
        form.locator("select[name='with']").select_option(monday)
        for name in ("from", "to"):
            form.locator(f"[name='{name}']").fill("")
        form.get_by_role("button", name="Compare").click()
        expect(page.locator(".sides dd").first).to_contain_text(monday)
        assert (where(page).engine, where(page).get("with")) == (friday, monday)
        answer = httpx2.get(f"{url}/api/compare", params={"engine": friday, "other": monday}, trust_env=False).json()
        windows = [
            word
            for side in ("before", "after")
            for word in ("--window", f"{answer[side]['since']}..{answer[side]['until']}")
        ]
        assert_says(page, diff(capsys, *runs, *windows))
        expect(page.locator("#compared-findings").get_by_role("link", name=re.compile("^after, since"))).to_have_count(
            1
        )


@pytest.mark.slow
def test_who_has_no_token_compares_nothing(kept: Path, incident: Incident) -> None:
    assert incident.ask("compare", engine=ENGINE)["after"]["engine"] == ENGINE
    with service("--recording", str(kept / "recording"), "--token", TOKEN) as url:
        for path in ("api/compare", "compare"):
            for given in ("", "not-this"):
                answer = httpx2.get(f"{url}/{path}", params={"engine": ENGINE, "token": given}, trust_env=False)
                assert (answer.status_code, ENGINE in answer.text) == (401, False)
        allowed = {"Authorization": f"Bearer {TOKEN}"}
        asked = httpx2.get(f"{url}/api/compare", params={"engine": "nobody"}, headers=allowed, trust_env=False)
        assert (asked.status_code, urlsplit(str(asked.url)).path) == (404, "/api/compare")
