"""Comments and docstrings name only files, modules, functions and attributes that exist, and the docs only files and
modules.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parent.parent
FOLDERS: Final = ("benchmarks", "dashboards", "engine", "kernels", "kvscope", "lab", "monitor", "scripts", "tests")
PLAIN: Final = (".md", ".service", ".sh", ".toml", ".txt", ".yaml", ".yml")
"""Kinds of files that comments may name beside Python's."""
METRICS: Final = ("docs/reference/metrics.md", "dashboards/prometheus/rules/kvscope.yml")
"""Files that have names of metrics in full, which the code composes."""
FOREIGN_PATHS: Final = ("nixl/", "vllm/", "out/")
FOREIGN_NAMES: Final = frozenset(
    (
        "FlashAttention",
        "MkDocs",
        "OpenMetrics",
        "PowerShell",
        "ValueErrors",
        "_lease_extension",
        "aborted_retracted_reqs",
        "action_prohibited",
        "get_kv_cache_capacity",
        "invalid_payload",
        "new_token_ratio",
        "new_tokens_gained",
        "wait_for_function",
    )
)
"""Names of other programs, of fields in their messages, and plurals."""

COMMENT: Final = re.compile(r"(?:^|(?<=\s))#(?!:? ?(?:noqa|type:|pragma)) ?(.*)$")
FILE: Final = re.compile(r"(?<![\w/.{*-])((?:[\w.-]+/)*[\w-]+\.(?:py|sh|toml|md))\b(?![/(])")
PATH: Final = re.compile(
    r"(?<![\w/.:@$}-])((?:benchmarks|dashboards|deploy|docs|engine|kernels|kvscope|lab|monitor|scripts|tests)"
    r"/[\w./-]*\w)(?![\w…*{])"
)
RUN: Final = re.compile(r"-m ((?:benchmarks|scripts|tests|kvscope)(?:\.\w+)+)")
NOT_HERE: Final = re.compile(r"^```(?:diff|text)\n.*?^```|\]\([^)]*\)", re.MULTILINE | re.DOTALL)
"""What a page of the docs adds, prints or links to: tests/test_docs.py follows its links."""
MODULE: Final = re.compile(r"\bkvscope((?:\.[a-zA-Z_]\w*)+)")
MEMBER: Final = re.compile(r"\b([A-Z]\w*[a-z]\w*)\.([a-z_]\w+)\b")
SNAKE: Final = re.compile(r"(?<![\w.:/\"'%$-])_?[a-z][a-z0-9]*(?:_[a-z0-9]+)+\b(?![\w/*-]|\.\w)")
CAMEL: Final = re.compile(r"(?<![\w.:/-])[A-Z][a-z]+(?:[A-Z][a-z]+)+\b(?![/-]|\.\w)")


class Text(NamedTuple):
    """A comment or a docstring, and its line."""

    line: int
    text: str


class Source(NamedTuple):
    """A Python file: its comments and docstrings, and its code without them."""

    texts: tuple[Text, ...]
    code: str


class Names(NamedTuple):
    """What there is: paths of files, words of the code, and for each class the words of the files that define it."""

    paths: frozenset[str]
    words: frozenset[str]
    members: dict[str, set[str]]


def parsed(text: str) -> Source:
    """Separate the comments and docstrings of a file from its code."""
    texts, code = [], text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts.append(Text(node.lineno, node.value.value))
            last = node.end_lineno or node.lineno
            code[node.lineno - 1 : last] = [""] * (last - node.lineno + 1)
    for number, line in enumerate(code):
        if comment := COMMENT.search(line) if "#" in line else None:
            texts.append(Text(number + 1, comment[1]))
            code[number] = line[: comment.start()]
    return Source(tuple(texts), "\n".join(code))


def names_of(files: dict[str, Source], others: Iterable[str] = (), more: str = "") -> Names:
    """Return what these files define. others: paths of further files. more: text whose words count, too."""
    words = set(re.findall(r"[^\W\d]\w*", more))
    members: dict[str, set[str]] = {}
    for source in files.values():
        found = set(re.findall(r"[^\W\d]\w*", source.code))
        words |= found
        for name in re.findall(r"^ *class (\w+)", source.code, re.MULTILINE):
            members.setdefault(name, set()).update(found)
    return Names(frozenset((*files, *others)), frozenset(words), members)


def stale(path: str, texts: Iterable[Text], names: Names) -> Iterator[str]:
    """Yield what the comments and docstrings of a file name and nothing defines."""
    for line, text in texts:
        for file in FILE.findall(text):
            exists = any(f"/{known}".endswith(f"/{file}") for known in names.paths)
            if not exists and not file.startswith(FOREIGN_PATHS):
                yield f"{path}:{line}: no file {file}"
        for shown in stale_places(text):
            yield f"{path}:{line}: {shown}"
        for module in MODULE.findall(text):
            if not is_module(module.strip(".").split("."), names):
                yield f"{path}:{line}: no module kvscope{module}"
        for word in (*SNAKE.findall(text), *CAMEL.findall(text)):
            if word not in names.words and word not in FOREIGN_NAMES:
                yield f"{path}:{line}: nothing is named {word}"
        for owner, member in MEMBER.findall(text) if "vllm" not in path else ():
            if member not in names.members.get(owner, (member,)):
                yield f"{path}:{line}: {owner} has no {member}"


def stale_places(text: str) -> Iterator[str]:
    """Yield the paths from the root, and the modules that `python -m` runs, which a text names and nobody finds."""
    for place in PATH.findall(text):
        found = any((ROOT / path).exists() for path in (place, place.removeprefix("kvscope/")))
        if not found and place == place.lower():
            yield f"no file {place}"
    for module in RUN.findall(text):
        path = ROOT / module.removeprefix("kvscope.").replace(".", "/")
        if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
            yield f"no module {module}"


def is_module(parts: list[str], names: Names) -> bool:
    """Whether these lead to a folder or a file, and to a name that the code has. A subject of the bus has capitals."""
    if any(part.isupper() for part in parts):
        return True
    for count in range(len(parts), 0, -1):
        path = "/".join(parts[:count])
        if names.paths & {f"{path}.py", f"{path}/__init__.py", f"kvscope/{path}.py"}:
            return count == len(parts) or parts[count] in names.words
    return parts[0] in names.words


def test_comments_and_docstrings_name_what_exists() -> None:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    files = {path.relative_to(ROOT).as_posix(): parsed(path.read_text(encoding="utf-8")) for path in paths}
    plain = (path for folder in (*FOLDERS, "deploy", "docs") for path in (ROOT / folder).rglob("*"))
    others = [path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.*"), *plain) if path.suffix in PLAIN]
    names = names_of(files, others, "".join((ROOT / name).read_text(encoding="utf-8") for name in METRICS))
    assert len(names.members) > 1000
    assert [one for path, source in files.items() for one in stale(path, source.texts, names)] == []


def test_the_docs_name_what_exists() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert [f"{page.name}: {one}" for page in pages for one in stale_places(NOT_HERE.sub("", page.read_text()))] == []


def test_a_stale_name_is_noticed() -> None:
    text = '''"""Reads what kept.py and gone.py have. See kvscope.room.kept.Kept and kvscope.room.lost."""

class Kept:
    """Kept.load_all() is here, Kept.save_all() is not; `other_name` is gone, and so is LostClass."""

    def load_all(self) -> None:  # calls _gone_helper
        """Load them."""
'''
    files = {"room/kept.py": parsed(text)}
    assert [*stale("room/kept.py", files["room/kept.py"].texts, names_of(files))] == [
        "room/kept.py:1: no file gone.py",
        "room/kept.py:1: no module kvscope.room.lost",
        "room/kept.py:4: nothing is named other_name",
        "room/kept.py:4: nothing is named LostClass",
        "room/kept.py:4: Kept has no save_all",
        "room/kept.py:6: nothing is named _gone_helper",
    ]
    assert [
        *stale_places("Run `python -m tests.gone`, not `-m scripts.docs`: see tests/gone/kept.md and docs/index.md")
    ] == [
        "no file tests/gone/kept.md",
        "no module tests.gone",
    ]
