"""Count how a text reads: openings, passives, semicolons, "you" and odd words.

    python -m scripts.prose_counts [PATH …]

Prints one line for each PATH, a folder or a file of Markdown, reStructuredText or Python (without any: docs, README.md,
docstrings and commit subjects of this checkout), and the longest offenders with --show MEASURE. Code, tables, headings,
links' addresses and directives are left out first. The patterns were chosen before any text here was changed to suit
them, and tried on other projects' docs. At commit 481df7ff datasette's (without the changelog) have 0.3 % openings, 27
passives and 16 "you". At 025edaf structlog's have 1.1 %, 21 and 37.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
OPENINGS: Final = re.compile(r"(?:What|Who|Whoever|Whatever|Of|Those|That which|There(?: is| are| was| were|'s))\b")
"""Free relative clauses, partitives and dummy subjects at the beginning of a sentence."""
IRREGULAR: Final = (
    "been|begun|bound|broken|brought|built|bought|caught|chosen|come|cut|dealt|done|drawn|driven|eaten|fallen|fed|felt"
    "|found|forgotten|frozen|given|gone|grown|heard|held|hidden|hit|hung|kept|known|laid|led|left|lent|let|lost|made"
    "|meant|met|overridden|overwritten|paid|put|read|rewritten|run|said|seen|sent|set|shaken|shown|shut|sold|spent|split"
    "|spread|stolen|struck|sunk|swept|taken|taught|thought|thrown|told|torn|understood|won|worn|written"
)
PASSIVE: Final = re.compile(
    r"\b(?:is|are|was|were|be|been|being|'s|isn't|aren't|wasn't|weren't)\s+"
    r"(?:not\s+|also\s+|then\s+|now\s+|never\s+|always\s+|only\s+|still\s+|\w+ly\s+)?"
    rf"(?:(?!\b(?:need|indeed|speed|feed|seed|red|bed|based)\b)\w{{2,}}ed|{IRREGULAR})\b",
    re.IGNORECASE,
)
ODD_WORDS: Final = re.compile(
    r"\b(?:told|(?<!cannot-)tells?|telling|(?<! of )(?<! that )said|says?|heard|hears?|unheard|nobody|somebody"
    r"|whoever|in vain|of late|in any case"
    r"|given back|came back|gives back|let in|held against|brought about|brings about|looks? on|looked at|looks at"
    r"|keeps? books|the books|a life|its life|lives|strikes|struck|trouble|hush|anew|mended|as it is|by figures"
    r"|happenings|whom)\b",
    re.IGNORECASE,
)
"""`cannot-tell` is the name of a verdict, and "of said type hints" has an adjective."""
YOU: Final = re.compile(r"\byou(?:r|rs|rself|'re|'ll|'ve|'d)?\b", re.IGNORECASE)
WORD: Final = re.compile(r"[A-Za-z][A-Za-z'’-]*")
MIN_WORDS: Final = 3
"""Length of a sentence: labels and list items of one or two words are none."""


class ProseCounts(NamedTuple):
    """The counts of a corpus. `openings` and `semicolons` count sentences, the other measures count occurrences."""

    sentences: int
    words: int
    openings: int
    passives: int
    odd_words: int
    you: int
    semicolons: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH")
    parser.add_argument("--show", choices=("openings", "passives", "odd_words", "semicolons"), default="")
    parsed = parser.parse_args()
    corpora = {str(path): sentences_below(path) for path in parsed.paths} or own_corpora()
    if parsed.show:
        for sentence in (each for found in corpora.values() for each in found):
            if getattr(counts_of([sentence]), parsed.show):
                print(sentence)
        return
    print(f"{'corpus':<34}{'sentences':>10}{'openings':>10}{'passive':>9}{'odd':>7}{'you':>7}{'; ':>7}")
    print(f"{'':<34}{'':>10}{'%':>10}{'per 100':>9}{'per 1k words':>14}{'per 100':>7}")
    for name, found in corpora.items():
        print(line_of(name, counts_of(found)))


def own_corpora() -> dict[str, list[str]]:
    """Return the sentences of this checkout by kind of text."""
    log = subprocess.run(["git", "-C", str(ROOT), "log", "--format=%s"], capture_output=True, text=True, check=True)
    docs = [
        path for path in sorted((ROOT / "docs").rglob("*.md")) if not path.is_relative_to(ROOT / "docs" / "accuracy")
    ]
    pages = [path for path in docs if path.parent.name != "runbooks"]
    runbooks = [path for path in docs if path.parent.name == "runbooks"]
    return {
        "README.md": sentences_below(ROOT / "README.md"),
        "docs": [sentence for path in pages for sentence in sentences_below(path)],
        "docs/runbooks": [sentence for path in runbooks for sentence in sentences_below(path)],
        "CHANGELOG.md": sentences_below(ROOT / "CHANGELOG.md"),
        "docstrings": [
            sentence
            for room in ("monitor", "engine", "kernels", "dashboards")
            for sentence in sentences_below(ROOT / room)
        ],
        "commit subjects": [line.partition(": ")[2] or line for line in log.stdout.splitlines()],
    }


def sentences_below(path: Path) -> list[str]:
    """Return the sentences of a file, or of all files below a folder. Raises OSError if it cannot be read."""
    suffixes = (".md", ".rst", ".py")
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.suffix in suffixes)
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file or folder")
    if any(each.suffix != ".py" for each in files):
        files = [each for each in files if each.suffix != ".py"]
    return [sentence for each in files for block in blocks_of(each) for sentence in sentences_of(block)]


def blocks_of(path: Path) -> Iterator[str]:
    """Yield the paragraphs and list items of a file, without markup."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from (block for docstring in docstrings_of(text) for block in prose_blocks(docstring))
    else:
        yield from prose_blocks(markdown_prose(text) if path.suffix == ".md" else rst_prose(text))


def docstrings_of(source: str) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and functions, and those below assignments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def markdown_prose(text: str) -> str:
    """Return Markdown without code, tables, headings, comments and directives."""
    text = re.sub(r"^(```|~~~).*?^\1", "\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", " ", text, flags=re.DOTALL)
    text = re.sub(r"^(?: {4}|\t)(?![-*\d]).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\s*(?:\||#|:::|\(\w+\)=|\[[^\]]+\]:).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", text)
    text = re.sub(r"\{[\w:.-]+\}`[^`]*`|`+[^`]*`+", "code", text)
    return re.sub(r"<[^>]+>|[*_]{1,3}(?=\S)|(?<=\S)[*_]{1,3}", "", text)


def rst_prose(text: str) -> str:
    """Return reStructuredText without code, tables, headings and directives."""
    kept: list[str] = []
    lines = text.splitlines()
    skipped_indent = -1
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if skipped_indent >= 0 and (not line.strip() or indent > skipped_indent):
            continue
        skipped_indent = -1
        following = lines[number + 1] if number + 1 < len(lines) else ""
        is_heading = bool(re.fullmatch(r"([=\-~^\"'+#*.])\1{2,}\s*", following)) and bool(line.strip())
        if re.match(r"\s*\.\. ", line) or line.rstrip().endswith("::"):
            skipped_indent = indent
            line = "" if re.match(r"\s*\.\. ", line) else line.rstrip()[:-1]
        if is_heading or re.fullmatch(r"\s*([=\-~^\"'+#*.])\1{2,}[=\s+-]*", line) or re.match(r"\s*[|+:]", line):
            line = ""
        kept.append(line)
    prose = "\n".join(kept)
    prose = re.sub(r":[\w:+.-]+:`(?:[^`<]*)(?:<[^>]*>)?`", "code", prose)
    prose = re.sub(r"``[^`]*``", "code", prose)
    prose = re.sub(r"`([^`<]*)\s*(?:<[^>]*>)?`__?", r"\1", prose)
    return re.sub(r"\*{1,2}(?=\S)|(?<=\S)\*{1,2}|`", "", prose)


def prose_blocks(text: str) -> Iterator[str]:
    """Yield paragraphs and list items, each on one line."""
    items = re.sub(r"^\s*(?:[-*+]|\d+[.)])\s+", "\n\n", text, flags=re.MULTILINE)
    for block in re.split(r"\n\s*\n", items):
        yield " ".join(block.split())


def sentences_of(block: str) -> Iterator[str]:
    """Yield the sentences of a paragraph that have at least MIN_WORDS words."""
    for sentence in re.split(r"(?<=[.!?])[\"')]*\s+(?=[\"'(]?[A-Z`])|(?<=:)\s+(?=[A-Z])", block):
        if len(WORD.findall(sentence)) >= MIN_WORDS:
            yield sentence


def counts_of(sentences: list[str]) -> ProseCounts:
    """Count all measures."""
    text = "\n".join(sentences)
    return ProseCounts(
        sentences=len(sentences),
        words=len(WORD.findall(text)),
        openings=sum(bool(OPENINGS.match(each.lstrip("\"'(“"))) for each in sentences),
        passives=len(PASSIVE.findall(text)),
        odd_words=len(ODD_WORDS.findall(text)),
        you=len(YOU.findall(text)),
        semicolons=sum(";" in each for each in sentences),
    )


def line_of(name: str, counts: ProseCounts) -> str:
    """Return the rates of a corpus."""
    hundred, thousand = 100 / max(1, counts.sentences), 1000 / max(1, counts.words)
    return (
        f"{name:<34}{counts.sentences:>10,}{counts.openings * hundred:>10.1f}{counts.passives * hundred:>9.0f}"
        f"{counts.odd_words * thousand:>7.1f}{counts.you * thousand:>7.1f}{counts.semicolons * hundred:>7.1f}"
    )


if __name__ == "__main__":
    main()
