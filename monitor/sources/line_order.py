"""Puts the lines of a text in order and apart, by the process that wrote them, before any of them is judged.

A tool that collects logs puts a label before each line. It names the pod, the container or the host, and so the engine:

    kubectl logs --prefix    "[pod/vllm-6f5-abcde/vllm] INFO …"
    docker compose logs      "vllm-1  | INFO …"
    stern                    "vllm-6f5-abcde vllm INFO …"
    logcli (Loki)            "2026-11-02T10:00:00Z {pod="vllm-6f5-abcde", stream="stderr"} INFO …"
    journalctl, syslog       "Nov 02 10:00:00 gpu-1 vllm[77]: INFO …"

Exports of Loki, Cloud Logging and Datadog begin with the newest line. Such a text is read from its end.
"""

from __future__ import annotations

import os
import re
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from datetime import datetime
from heapq import merge
from itertools import chain, islice, pairwise
from typing import IO, Final, NamedTuple

from .pasted_lines import Stamps, undecorated

NumberedText = tuple[int, str]
FROM_ITS_END: Final = " (from its end)"
"""Behind the name of a text in positions: its lines are counted from there."""
HEAD_LINES: Final = 2_000
"""The form of a text's labels, and whether its times fall, follow from so many lines."""
LEAST_LABELS: Final = 2
"""Lines: one alone may be a sentence that happens to begin so."""
LEAST_FALLS: Final = 2
"""From one time to the next: a report may quote two excerpts, the later one first, which is one fall."""
RISES_PER_FALL: Final = 0.1
"""Lines of several processes come some seconds late, in either order of the text."""
_HEAD: Final = re.compile(
    r"(?:\d{4}-\d\d-\d\dT\S{8,32} )?(?:\(\w[^()]{0,60}pid=\d{1,9}\) )?"
    r"(?:(?:INFO|WARNING|ERROR|DEBUG)\b|\[?\d{4}-\d\d-\d\d[ T]\d\d:|Avg prompt|\[\d\d:\d\d:\d\d|\{\")"
)
"""How an engine's record begins, behind a label."""
_ENGINES_OWN: Final = re.compile(r"Avg prompt|batch, #|KV cache|[vV]LLM|sglang|\.py:\d|\d GiB")
_LABELS: Final = tuple(
    re.compile(form, re.ASCII)
    for form in (
        r"(?P<cut>\[(?P<label>[A-Za-z0-9][\w./:-]{2,200})\] )",
        r"(?P<cut>(?P<label>[A-Za-z0-9][\w.-]{0,60}) {0,24}\| )",
        r"(?P<cut>(?P<label>[a-z0-9][a-z0-9.-]{2,80} [a-z0-9][a-z0-9-]{1,60}) )",
        r"(?:\d{4}-\d\d-\d\dT\S{8,32} )?(?P<cut>\{(?P<label>\w{1,60}=\"[^\"]{0,200}\"[^{}]{0,2000})\} )",
        r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d (?P<cut>(?P<label>[\w.-]{1,80}) [\w./-]{1,60}(?:\[\d{1,9}\])?: )",
    )
)
_PAIR: Final = re.compile(r"(\w{1,60})=\"([^\"]{0,200})\"")
_NAMES_AN_ENGINE: Final = ("pod", "pod_name", "instance", "host", "hostname", "container", "container_name")
"""Loki's labels by which processes differ, in order. Others, such as `stream` and `level`, differ within one."""


class EngineLines(NamedTuple):
    """The lines of one process. `label` is empty where the text has no more than one."""

    label: str
    lines: Iterable[NumberedText]
    from_its_end: bool


class StoredLines(ExitStack):
    """Lines in a temporary file, so that a text of any size can be parted or read from its end. They are numbered from
    1, as they are added. The file is there once it is needed, and until the block of its `with` ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self._file: IO[bytes] | None = None
        self._starts = array("q", [0])

    def add(self, line: str) -> int:
        """Store a line. Return its number. Raises OSError."""
        if self._file is None:
            self._file = self.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 – closed with this
        self._starts.append(self._starts[-1] + self._file.write(line.encode("utf-8", "surrogatepass")))
        return len(self._starts) - 1

    def lines(self, numbers: Iterable[int]) -> Iterator[NumberedText]:
        """Yield those lines. Raises OSError."""
        assert self._file is not None
        self._file.flush()
        handle, starts = self._file.fileno(), self._starts
        for number in numbers:
            data = os.pread(handle, starts[number] - starts[number - 1], starts[number - 1])
            yield number, data.decode("utf-8", "surrogatepass")


def text_streams(lines: Iterable[str], ended: datetime, stored: StoredLines) -> list[EngineLines]:
    """Return the lines by process, oldest first. `ended` is when the text was last written to. `stored` keeps those
    that cannot be read as they come.

    Lines are numbered from 1. Those of a text that is read from its end are numbered from there. Raises OSError.
    """
    source = iter(lines)
    head = list(islice(source, HEAD_LINES))
    form = _form_of(head)
    whole = chain(head, source)
    if form is None and not _falls(head, ended):
        return [EngineLines("", enumerate(whole, 1), from_its_end=False)]
    apart = {"": array("q", map(stored.add, whole))} if form is None else _apart(form, whole, stored)
    return [_in_order(label if len(apart) > 1 else "", stored, part, ended) for label, part in apart.items()]


def _form_of(head: Iterable[str]) -> re.Pattern[str] | None:
    """Return the form of the labels that most lines have, or None."""
    counts = dict.fromkeys(_LABELS, 0)
    for line in map(undecorated, head):
        for form in _LABELS:
            counts[form] += (found := form.match(line)) is not None and _HEAD.match(line, found.end()) is not None
    form = max(_LABELS, key=lambda one: counts[one])
    return form if counts[form] >= LEAST_LABELS else None


def _apart(form: re.Pattern[str], lines: Iterable[str], stored: StoredLines) -> dict[str, array[int]]:
    """Store the lines without their labels, and return their numbers by label. Those without one, or of no engine, are
    with the first engine's.
    """
    found: dict[str, array[int]] = {}
    engines: dict[str, array[int]] = {}
    others = array("q")
    for raw in lines:
        line = undecorated(raw)
        match = form.match(line)
        if match is None:
            others.append(stored.add(raw))
            continue
        text, label = line[: match.start("cut")] + line[match.end("cut") :], _identity(match["label"])
        found.setdefault(label, array("q")).append(stored.add(text))
        if label not in engines and _ENGINES_OWN.search(text):
            engines[label] = found[label]
    engines = {label: part for label, part in found.items() if label in engines}
    first = next(iter(engines or found))
    rest = (part for label, part in found.items() if label not in engines)
    of_first = merge(engines.get(first, ()), others, *rest)
    return (engines or {first: others}) | {first: array("q", of_first)}


def _identity(label: str) -> str:
    labels = dict(_PAIR.findall(label)) if '="' in label else {}
    return next((labels[name] for name in _NAMES_AN_ENGINE if name in labels), "" if labels else label)


def _in_order(label: str, stored: StoredLines, part: array[int], ended: datetime) -> EngineLines:
    if not _falls((text for _, text in stored.lines(part)), ended):
        return EngineLines(label, stored.lines(part), from_its_end=False)
    backwards = (text for _, text in stored.lines(reversed(part)))
    return EngineLines(label, enumerate(backwards, 1), from_its_end=True)


def _falls(lines: Iterable[str], ended: datetime) -> bool:
    """Whether the times of the first lines fall throughout."""
    stamps = Stamps(ended)
    times: Iterator[int] = (at for line in islice(lines, HEAD_LINES) if (at := stamps.of(line)) is not None)
    steps = [later - earlier for earlier, later in pairwise(times) if later != earlier]
    falls = sum(step < 0 for step in steps)
    return falls >= LEAST_FALLS and len(steps) - falls <= RISES_PER_FALL * falls
