"""The lines of a text as people paste it: quoted, fenced, coloured, or wrapped by a terminal.

Line numbers are those of the file. A record that a terminal or an editor wrapped is offered twice beside its own line:
joined without a space (a terminal breaks inside words) and joined with one (an editor breaks between them).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

COLOURS: Final = re.compile(r"\x1b\[[0-9;?]{0,12}[A-Za-z]")
QUOTED: Final = re.compile(r"^\s{0,8}(?:(?:>|&gt;)\s?){1,6}")
FENCE: Final = re.compile(r"^\s{0,8}(?:`{3,}|~{3,})[\w .+-]{0,40}$")
RECORD_START: Final = re.compile(
    r"\s{0,12}(?:[`|*-]{1,2}\s?)?(?:"
    r"\[?\d{4}-\d\d-\d\d[T ]|\[?\d\d[-/]\d\d \d\d:\d\d|\[?\d\d:\d\d:\d\d|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d "
    r"|(?:INFO|WARNING|WARN|ERROR|DEBUG|CRITICAL|FATAL)\b|\(\w[\w ()-]{0,60}pid=\d|\{\"|Traceback \(|File \""
    r"|[^\s()]{0,200}(?::\d{1,6}: \w{0,60})?(?:Error|Exception|Warning): |\[[\w./-]{1,80}\.\w{1,8}:\d{1,6}\]"
    r"|[\w.-]{1,60} {0,8}\| "
    r"|\$ |(?:vllm|sglang):[a-z_]{5,80}(?:\{| +-?\d)|# (?:HELP|TYPE) |\[(?:rank|TensorRT|TRT|TP|DP)\w{0,20}"
    r"|(?:Engine \d|Avg prompt)"
    r"|[EWI]\d{4} \d\d:\d\d|(?:Prefill|Decode) batch|[a-z][a-z_:]{3,80}(?:\{[^}]{0,600}\})? -?\d[\d.e+-]*\s*$)",
    re.ASCII,
)
"""How a line begins that is a record of its own, and not the rest of the one before."""
STATISTICS_HEAD: Final = re.compile(
    r"(?<=\S)(?= ?(?:\(\w{1,40} pid=\d{1,9}\) )?(?:INFO|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d )", re.ASCII
)
"""Where a record begins inside a line that has lost its line breaks."""
WRAPS_FROM: Final = 60
"""Characters: no terminal or editor wraps shorter lines."""
MOST_PARTS: Final = 6
_SPACES: Final = re.compile(r"(?<=\S) {2,}(?=\S)")
MOST_CHARACTERS: Final = 4_000


class PastedLine(NamedTuple):
    """One line without its decoration, from 1 on. `joined` and `spaced` hold the lines that continue it too."""

    number: int
    text: str
    joined: str
    spaced: str
    is_record: bool
    last: int
    """The number of the last line that continues it."""


def pasted_lines(lines: Iterable[str], first: int = 1) -> Iterator[PastedLine]:
    """Each line that holds text, numbered from `first` on. A fence of Markdown holds none."""
    window: deque[tuple[int, str, bool]] = deque()
    for number, raw in enumerate(lines, first):
        text = undecorated(raw)
        for record in _records(text):
            window.append((number, record, RECORD_START.match(record) is not None))
            if len(window) > MOST_PARTS:
                yield from _first(window)
    while window:
        yield from _first(window)


def undecorated(raw: str) -> str:
    """Return the line without colours, marks of quotation, fences and its end."""
    text = raw.rstrip("\r\n").replace("\u00a0", " ")
    if "  " in text and "throughput: " in text:
        text = _SPACES.sub(" ", text)  # a web page's table pads the words of a line
    if "\x1b" in text:
        text = COLOURS.sub("", text)
    if text.lstrip().startswith((">", "&gt;")):
        text = QUOTED.sub("", text, count=1)
    return "" if text.lstrip().startswith(("```", "~~~")) and FENCE.match(text) else text


def _records(text: str) -> list[str]:
    """Return the line, or the records of statistics that stand in it without a line break between them."""
    return STATISTICS_HEAD.split(text) if text.count("Avg prompt throughput: ") > 1 else [text]


def _first(window: deque[tuple[int, str, bool]]) -> Iterator[PastedLine]:
    number, text, is_record = window.popleft()
    if not text.strip():
        return
    joined = spaced = text
    last = number
    if is_record and (len(text) >= WRAPS_FROM or _is_unfinished(text)):
        for at, more, starts in window:
            if starts or not more.strip() or len(joined) + len(more) > MOST_CHARACTERS:
                break
            last = at
            joined += more
            spaced = f"{spaced.rstrip()} {more.strip()}"
    yield PastedLine(number, text, joined, spaced, is_record, last)


def _is_unfinished(text: str) -> bool:
    return text.rstrip().endswith((",", "(", "=", "tokens/s")) or "Error: " in text
