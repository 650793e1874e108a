"""The lines of a text as people paste it (quoted, fenced, coloured, or wrapped by a terminal), and their time stamps.

Line numbers are those of the file. A record that a terminal or an editor wrapped is offered twice beside its own line:
joined without a space (a terminal breaks inside words) and joined with one (an editor breaks between them). Stamps are
in the formats of vLLM and of the programs that run it:

    08-07 12:00:01                  vLLM's own: neither year nor zone
    INFO 12:00:01                   a shortened copy of it: no date, taken to be that of the log's end
    2026-08-07 12:00:01,123         Python's logging: no zone
    2026-08-07T12:00:01.123+08:00   vLLM's JSON, containers and clusters: with a zone, or Z for UTC

The year that is missing follows from when the log ended. A zone that is missing is taken to be UTC, and counted.
Fractions of a second are left out: vLLM's own stamps have none.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Final, NamedTuple

COLOURS: Final = re.compile(r"\x1b\[[0-9;?]{0,12}[A-Za-z]")
QUOTED: Final = re.compile(r"^\s{0,8}(?:(?:>|&gt;)\s?){1,6}")
FENCE: Final = re.compile(r"^\s{0,8}(?:`{3,}|~{3,})[\w .+-]{0,40}$")
RECORD_START: Final = re.compile(
    r"\s{0,12}(?:[`|*-]{1,2}\s?|\d{1,7}[\t:] ?|(?:\"[^\"]{0,80}\",){1,8}\"?)?(?:"
    r"\[?\d{4}-\d\d-\d\d[T ]|\[?\d\d[-/]\d\d \d\d:\d\d|\[?\d\d:\d\d:\d\d|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d "
    r"|(?:INFO|WARNING|WARN|ERROR|DEBUG|CRITICAL|FATAL)\b|\(\w[\w ()-]{0,60}pid=\d|\{\"|Traceback \(|File \""
    r"|[^\s()]{0,200}(?::\d{1,6}: \w{0,60})?(?:Error|Exception|Warning): |\[[\w./-]{1,80}\.\w{1,8}:\d{1,6}\]"
    r"|[\w.-]{1,60} {0,8}\| "
    r"|\$ |(?:vllm|sglang):[a-z_]{5,80}(?:\{| +-?\d)|# (?:HELP|TYPE) |\[(?:rank|TensorRT|TRT|TP|DP)\w{0,20}"
    r"|(?:Engine \d|Avg prompt)"
    r"|[EWI]\d{4} \d\d:\d\d|(?:Prefill|Decode) batch|[a-z][a-z_:]{3,80}(?:\{[^}]{0,600}\})? -?\d[\d.e+-]*\s*$)",
    re.ASCII,
)
"""How a line begins that is a record of its own, and not the rest of the one before. A list's mark, a line's number or
the columns of a CSV may stand before it.
"""
STATISTICS_HEAD: Final = re.compile(
    r"(?<=\S)(?= ?(?:\(\w{1,40} pid=\d{1,9}\) )?(?:INFO|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d )", re.ASCII
)
"""Where a record begins inside a line that has lost its line breaks."""
ACCESS: Final = re.compile(
    r"(?:\(\w{1,40} pid=\d{1,9}\) )?INFO: {1,8}[\w.:\[\]-]{1,60} - "
    r'("POST /[\w/.-]{0,80} HTTP/\d\.\d" 20\d)(?: \w{1,20})?\s*$',
    re.ASCII,
)
"""A request that the front end has answered. Nine lines of ten are such in a log of a busy engine."""
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
    answered: str = ""
    """The request, if it reports that one was answered and nothing else."""


def pasted_lines(lines: Iterable[tuple[int, str]]) -> Iterator[PastedLine]:
    """Each line that holds text, of lines with their numbers. A fence of Markdown holds none."""
    window: deque[tuple[int, str, bool]] = deque()
    for number, raw in lines:
        if (access := ACCESS.match(raw)) is not None:  # nothing is continued beyond it
            while window:
                yield from _first(window)
            yield PastedLine(number, raw, raw, raw, True, number, access[1])
            continue
        text = undecorated(raw)
        several = text.count("Avg prompt throughput: ") > 1  # records of statistics without a line break between them
        for record in STATISTICS_HEAD.split(text) if several else [text]:
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


SHORT: Final = re.compile(r"\b(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)\b", re.ASCII)
FULL: Final = re.compile(
    r"\b(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,]\d{1,9})?(?: ?(Z)\b| ?([+-])(\d\d):?(\d\d)\b)?", re.ASCII
)
TIME_ONLY: Final = re.compile(r"\b(?:INFO|WARNING|ERROR|DEBUG) (\d\d):(\d\d):(\d\d)\b", re.ASCII)
HEAD: Final = 120
"""A stamp stands at the head of a line. A similar text further on belongs to the message."""


class Stamps:
    """Reads the stamps of one log, line after line. `ended` is when the log was last written to."""

    def __init__(self, ended: datetime) -> None:
        self.without_zone = 0
        """How many had no zone."""
        self._ended = ended
        self._year = 0
        self._month = 0

    def expect_years_of(self, lines: Iterable[str]) -> None:
        """Take the year of the first stamp that has one for that of the stamps that have none."""
        for line in lines:
            if (full := FULL.search(line[:HEAD])) is not None:
                self._year = int(full[1])
                self._month = int(full[2])
                return

    def of(self, line: str, whole: bool = False) -> int | None:
        """Wall time in ns, or None if the line has no stamp. `whole`: it may stand anywhere, as in JSON."""
        head = line if whole else line[:HEAD]
        zone = None
        if (full := FULL.search(head)) is not None:
            year, month, day, hour, minute, second = map(int, full.groups()[:6])
            if full[7] or full[8]:
                zone = timedelta(hours=int(full[9] or 0), minutes=int(full[10] or 0))
                zone = -zone if full[8] == "-" else zone
        elif (short := SHORT.search(head)) is not None:
            month, day, hour, minute, second = map(int, short.groups())
            year = self._year_of(month, day)
        elif (bare := TIME_ONLY.search(head)) is not None:
            hour, minute, second = map(int, bare.groups())
            year, month, day = self._ended.year, self._ended.month, self._ended.day
        else:
            return None
        try:
            moment = datetime(year, month, day, hour, minute, second, tzinfo=timezone(zone or timedelta()))
            seconds = int(moment.timestamp())
        except (ValueError, OverflowError):
            return None
        self.without_zone += zone is None
        return seconds * 1_000_000_000

    def _year_of(self, month: int, day: int) -> int:
        """Return the year of a stamp that has none. The first one's is the latest that is not after the log's end (by
        more than a day: zones differ). A step from one of the last months to one of the first is a new year's, and the
        step back, where several processes' lines are mixed, the old one's again.
        """
        if not self._year:
            limit = self._ended.astimezone(UTC) + timedelta(days=1)
            self._year = limit.year - ((month, day) > (limit.month, limit.day))
        else:
            self._year += (self._month - month > 6) - (month - self._month > 6)
        self._month = month
        return self._year
