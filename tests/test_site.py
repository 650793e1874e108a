"""The documentation site: it builds without a warning, makes no external request, and its search finds answers."""

from __future__ import annotations

import functools
import html
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from playwright.sync_api import Browser, Page, expect

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)[^>]*\ssrc=["']?([^"'\s>]+)"""
    r"""|<link[^>]*rel=["']?(?:stylesheet|preload|preconnect|dns-prefetch|icon|modulepreload)["']?[^>]*href=["']?([^"'\s>]+)"""
    r"""|<link[^>]*href=["']?([^"'\s>]+)["']?[^>]*rel=["']?(?:stylesheet|preload|preconnect|dns-prefetch|icon)"""
    r"""|url\(["']?([^"')]+)["']?\)|@import\s+["']([^"']+)["']"""
)


class Question(NamedTuple):
    """What a newcomer types, and the page and words that answer it."""

    typed: str
    page: str
    answer: str


QUESTIONS = (
    Question(
        "what does UNACCOUNTED mean", "concepts/conservation.html", "UNACCOUNTED blocks are in use without an owner"
    ),
    Question("pool is full and nothing runs", "concepts/paged-memory.html", "A full pool without a running request"),
    Question("what does the probe cost", "concepts/overhead.html", "within the noise of the machine"),
    Question("how do I add a detector", "write-a-detector.html", "Write a detector"),
    Question("what does likely promise", "concepts/verdicts.html", "This is the best explanation of what you see"),
)


def built(folder: Path, *arguments: str, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--config-file",
            config,
            "--site-dir",
            folder,
            *arguments,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = built(folder)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def url(site: Path) -> Iterator[str]:
    handler = functools.partial(QuietHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    """A page that fails the test if it asks for anything elsewhere."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    elsewhere: list[str] = []
    page.on(
        "request", lambda asked: None if asked.url.startswith((url, "data:", "blob:")) else elsewhere.append(asked.url)
    )
    yield page
    page.close()
    assert elsewhere == []


def fetched_elsewhere(text: str) -> list[str]:
    """Return the addresses on other hosts that a browser would fetch for this HTML or CSS."""
    found = (next(filter(None, each), "") for each in FETCHED.findall(text))
    return [html.unescape(each) for each in found if each.startswith(("http://", "https://", "//"))]


def test_no_page_fetches_anything_from_another_host(site: Path) -> None:
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    assert len([path for path in files if path.suffix == ".html"]) > 100
    assert {path.name: found for path in files if (found := fetched_elsewhere(path.read_text()))} == {}


def test_a_fetch_from_another_host_is_noticed() -> None:
    assert fetched_elsewhere('<link rel="stylesheet" href="https://fonts.googleapis.com/css?family=Roboto">')
    assert fetched_elsewhere("<script async src=//cdn.example/x.js></script>")
    assert fetched_elsewhere("a { background: url(https://example.org/x.png) }")
    assert fetched_elsewhere('<a href="https://example.org">elsewhere</a> <img src="page.png">') == []


def test_every_page_of_the_docs_is_on_the_site(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert {str(path) for path in pages if not (site / path).exists()} == set()


@pytest.mark.parametrize("broken", ["[x](nowhere.md)", "[x](codes.md#no-such-heading)"])
def test_a_broken_link_or_anchor_fails_the_build(broken: str, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text(f"# Start\n\n{broken}\n")
    (docs / "codes.md").write_text("# Codes\n")
    whole = (ROOT / "mkdocs.yml").read_text()
    head = whole[: whole.index("\nnav:") + 1].replace("hooks:\n  - scripts/site_hooks.py\n", "")
    (tmp_path / "mkdocs.yml").write_text(head.replace("docs_dir: docs", f"docs_dir: {docs}"))
    done = built(tmp_path / "site", config=tmp_path / "mkdocs.yml")
    assert done.returncode != 0
    assert "contains a link" in done.stderr


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.typed)
def test_a_newcomer_finds_the_answer_by_search_in_two_clicks(question: Question, page: Page, url: str) -> None:
    """One click opens the search, another a result; the answer is on that page."""
    page.goto(f"{url}/index.html")
    box, results = page.locator("input.md-search__input"), page.locator("a.md-search-result__link")
    box.click()
    # What is typed before the page has its index is lost now and then.
    expect(page.locator(".md-search-result__meta")).to_have_text("Type to start searching", timeout=60_000)
    box.press_sequentially(question.typed)
    wanted = page.locator(f'a.md-search-result__link[href*="{question.page}"]').first
    expect(wanted).to_be_visible(timeout=60_000)
    page.wait_for_timeout(500)  # until the list is whole
    links = [link.get_attribute("href") or "" for link in results.all()[:10]]
    assert any(question.page in link for link in links), links
    wanted.click()
    page.wait_for_url(f"**/{question.page}**")
    expect(page.get_by_text(question.answer).first).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_first_page_has_a_readable_theme_of_each_kind(scheme: str, browser: Browser, url: str) -> None:
    page = browser.new_page(
        color_scheme="dark" if scheme == "dark" else "light", viewport={"width": 1280, "height": 800}
    )
    page.goto(f"{url}/index.html")
    expect(page.locator("h1")).to_have_text(re.compile("kvscope"))
    shown = page.evaluate("document.body.getAttribute('data-md-color-scheme')")
    assert shown == ("slate" if scheme == "dark" else "default")
    assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    if folder := os.environ.get("KVSCOPE_SITE_SCREENS"):
        Path(folder, f"site-{scheme}.png").write_bytes(page.screenshot())
    page.close()
