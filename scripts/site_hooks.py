"""Hooks of MkDocs beside docs/: pages of the repository's root, and the list of runbooks.

Pages link to files of the repository that are not on the site, such as a schema. A reader of the repository follows
these links. The site has no address for them, so they become the path in code.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from scripts.code_catalogue import FAMILIES

ROOT: Final = Path(__file__).resolve().parents[1]
ROOT_PAGES: Final = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
"""Pages of the root that the site has, too, under the same names in small letters."""
SEARCH_BOOSTS: Final = {
    "concepts/": 1.5,
    "start/": 1.5,
    "write-a-": 4.0,
    "runbooks/": 0.5,
    "changelog": 0.1,
    "benchmarks": 0.3,
    "reference": 0.5,
}
"""How much a match counts in the search, by the beginning of a page's path: explanations before lists."""
LINK: Final = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
FENCED: Final = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the parts of the navigation that have a page for each code."""
    docs = Path(config.docs_dir)
    config.nav = _filled(config.nav, {"Runbooks": _runbooks(docs)})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root."""
    for name in ROOT_PAGES:
        files.append(File.generated(config, name.lower(), abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the site's pages, and name files that the site does not have."""
    boost = next((boost for start, boost in SEARCH_BOOSTS.items() if page.file.src_uri.startswith(start)), 1.0)
    page.meta.setdefault("search", {"boost": boost})
    is_of_root = page.file.src_uri in {name.lower() for name in ROOT_PAGES}
    folder = "" if is_of_root else posixpath.join("docs", posixpath.dirname(page.file.src_uri))
    parts = FENCED.split(markdown)
    here = posixpath.dirname(page.file.src_uri)
    return "".join(part if part.startswith("```") else LINK.sub(_relinked(folder, here), part) for part in parts)


def _relinked(folder: str, here: str) -> Any:
    """Return what replaces a link on a page of `folder`, whose place on the site is `here`."""

    def replaced(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if path in ROOT_PAGES:
            on_site = path.lower()
        elif path.startswith("docs/"):
            on_site = path.removeprefix("docs/")
        else:
            assert (ROOT / path).exists(), f"{link[0]} leads nowhere"
            return f"{text} (`{path}`)"
        return f"[{text}]({posixpath.relpath(on_site, here or '.')}{anchor})"

    return replaced


def _filled(nav: Any, filled: dict[str, list[Any]]) -> Any:
    """Return the navigation with `name: FILLED` replaced by its pages, after those that it lists itself."""
    if isinstance(nav, list):
        return [_filled(each, filled) for each in nav]
    if isinstance(nav, dict):
        return {
            name: [*(_filled(each, filled) for each in value), *filled[name]]
            if name in filled
            else _filled(value, filled)
            for name, value in nav.items()
        }
    return nav


def _runbooks(docs: Path) -> list[Any]:
    """Return the runbooks by family, in the order of docs/codes.md."""
    pages = sorted(path.stem for path in (docs / "runbooks").glob("*.md"))
    return [
        {heading: [{code: f"runbooks/{code}.md"} for code in pages if code.startswith(f"{family}.")]}
        for family, (heading, _) in FAMILIES.items()
    ]
