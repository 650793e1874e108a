"""The text of an engine's log, vLLM's from 0.8 to 0.33 and kvscope's own, to samples and facts.

Lines are searched, not matched from their start, so that prefixes of process managers, a report's prose around them and
several processes' lines mixed do no harm. A line may be JSON: vLLM's own, a container's, or one inside the other. Lines
of a process of one data-parallel rank apply to that rank, and lines of the front end to every rank.

    fact                       from
    -------------------------  ------------------------------------------------------------------------------
    version                    "█  version 0.32.0", "vLLM API server version 0.10.2", "LLM engine (v0.32.0)"
    model, host, port, …       "non-default args: {…}": each argument under its own name
    kv_cache_size_tokens       "GPU KV cache size: 16,416 tokens"
    max_concurrency, _tokens   "Maximum concurrency for 4,096 tokens per request: 4.01x": 4.01 and 4096
    num_gpu_blocks             "# cuda blocks: 27443, # CPU blocks: 2048": the engine of before V1
    num_gpu_blocks_override    "Overriding num_gpu_blocks=8192 with num_gpu_blocks_override=513"
    available_kv_cache_gib     "Available KV cache memory: 45.94 GiB"
    blocks_not_freed           "Failed to reset prefix cache because some blocks (12) are not freed yet"
    kv_connector               "Creating v1 connector with name: NixlConnector", or the arguments
    kv_role                    "kv_role='kv_producer'", "disaggregation_mode='prefill'"
    non_default_args           how many arguments that line has: what is not among them is the default
    memory_…                   the memory bill: monitor/sources/memory_log.py

Preemptions are logged by the engine of before V1 alone, the first and every fiftieth. Samples after such a line have
them. Later versions cannot print theirs: they reset the counter before reading it.

A front end's lines stand beside statistics: probes that it answers, and requests that it receives. vLLM since 0.10.2
logs no statistics while no token is computed, so these lines are what goes on when an engine stands still. Access lines
have no time of their own. Probes come at a steady pace, which the statistics before show.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import lru_cache
from itertools import chain, islice
from typing import Any, Final, NamedTuple

from ..base.text import counted, number_in
from ..contract.samples import Fact, ReportedEvent, Sample
from .line_order import FROM_ITS_END
from .memory_log import MEMORY_FACTS, memory_facts
from .pasted_lines import PastedLine, Stamps, pasted_lines
from .text_events import DescribedState, TextEvent, TextEvents

PROBED: Final = re.compile(r'"GET /(?:health|metrics|ping)[^"\s]{0,40} HTTP/\d\.\d" 200', re.ASCII)
RECEIVED: Final = re.compile(
    r'"POST /(?:v1/(?:chat/completions|completions|responses|messages)|generate)[^"\s]{0,40} HTTP/\d\.\d" 200'
    r"|\bReceived request [\w-]{1,120}: ",
    re.ASCII,
)
"""A response that is streamed is logged when it begins, before its first token."""
HALTED: Final = re.compile(
    r'"POST /(?:(?P<halt>pause|sleep|pause_generation|release_memory_occupation)'
    r"|resume|wake_up|continue_generation|resume_memory_occupation)[^\"\s]{0,80} HTTP/\d\.\d\" 200",
    re.ASCII,
)
"""vLLM's and SGLang's calls by which an operator halts an engine, and lets it go on."""
RUN_ENDS: Final = ("start_up", "shut_down", "engine_died", "worker_died")
"""Classes of lines after which an engine's last statistics are those of an earlier run."""
GAPS_KEPT: Final = 32
"""Between lines of statistics, by which the pace of the probes is known."""


class FrontEndFact(NamedTuple):
    """A fact of the lines after the last statistics."""

    name: str
    value: int | float
    position: str
    at_ns: int | None


class _FrontEndLine(NamedTuple):
    """What a line of the front end reports. `halts`: an operator halts the engine, or lets it go on."""

    halts: bool | None
    is_probe: bool
    is_request: bool


def _of_front_end(text: str) -> _FrontEndLine:
    halted = HALTED.search(text)
    return _FrontEndLine(
        None if halted is None else halted["halt"] is not None,
        PROBED.search(text) is not None,
        RECEIVED.search(text) is not None,
    )


_answered: Final = lru_cache(maxsize=256)(_of_front_end)
"""The same for an answered request: nine lines of ten name one of a few paths."""


class FrontEndLines:
    """Feed it a log's lines in their order."""

    def __init__(self) -> None:
        self._gaps: deque[tuple[float, int]] = deque(maxlen=GAPS_KEPT)
        self._statistics_ns: int | None = None
        self._run_is_over = False
        self._probes = self._probes_since_request = self._requests = 0
        self._last_probe = ""
        self._first_request: tuple[str, int | None] = ("", None)
        self._halted_at = ""
        self._reported: dict[str, FrontEndFact] = {}

    def statistics(self, at_ns: int | None) -> None:
        """Take a line of statistics."""
        if at_ns is not None and self._statistics_ns is not None:
            if at_ns == self._statistics_ns and not self._run_is_over:
                return  # another rank's
            if at_ns > self._statistics_ns and not self._run_is_over:
                self._gaps.append(((at_ns - self._statistics_ns) / 1e9, self._probes))
        self._statistics_ns = at_ns
        self._run_is_over = False
        self._probes = self._probes_since_request = self._requests = 0

    def line(self, text: str, position: str, at_ns: int | None) -> None:
        """Take another line."""
        if "HTTP/" in text or "Received request" in text:
            self._take(_of_front_end(text), position, at_ns)

    def answered(self, request: str, position: str) -> None:
        """Take the line of an answered request, which has no time."""
        self._take(_answered(request), position, None)

    def _take(self, told: _FrontEndLine, position: str, at_ns: int | None) -> None:
        if told.halts is not None:
            self._halted_at = position if told.halts else ""
        if self._run_is_over:
            return
        if told.is_probe:
            self._probes += 1
            self._probes_since_request += bool(self._requests)
            self._last_probe = position
        elif told.is_request:
            self._first_request = self._first_request if self._requests else (position, at_ns)
            self._requests += 1

    def end_run(self) -> None:
        """Count nothing until the next statistics: the engine ended, or restarted."""
        self._run_is_over = True
        self._halted_at = ""

    def facts(self) -> Iterator[FrontEndFact]:
        """Yield what has changed of what came after the last statistics."""
        for fact in self._facts_now():
            if self._reported.get(fact.name) != fact:
                self._reported[fact.name] = fact
                yield fact

    def _facts_now(self) -> Iterator[FrontEndFact]:
        """Yield the lines after the last statistics, and their times only where probes show a pace."""
        seconds, probes = sum(gap for gap, _ in self._gaps), sum(count for _, count in self._gaps)
        if probes:
            pace_s = seconds / probes
            yield FrontEndFact("probed_for_s", round(pace_s * self._probes, 1), self._last_probe, None)
            yield FrontEndFact(
                "probed_since_request_s", round(pace_s * self._probes_since_request, 1), self._last_probe, None
            )
        yield FrontEndFact("requests_since_statistics", self._requests, *self._first_request)
        yield FrontEndFact("halted", int(bool(self._halted_at)), self._halted_at, None)


NUM: Final = r"-?\d{1,15}(?:\.\d{1,15})?"
COUNT: Final = r"\d{1,15}"

STATS: Final = re.compile(
    r"(?:Engine (?P<rank>\d{1,4}): |(?P<several>\d{1,4}) Engines Aggregated: )?"
    rf"Avg prompt throughput: (?P<prompt>{NUM}) tokens/s, Avg generation throughput: (?P<generation>{NUM})"
    rf" tokens/s, Running: (?P<running>{COUNT}) reqs,"
    rf" (?:Waiting: (?P<waiting>{COUNT}) reqs|Swapped: (?P<swapped>{COUNT}) reqs, Pending: (?P<pending>{COUNT}) reqs)"
    r"(?P<rest>[^\dEA\n]*+(?:(?!Engine \d|\d Engines|Avg prompt).[^\dEA\n]*+)*+)",
    re.ASCII,
)
MOST_BEFORE_STATS: Final = len("9999 Engines Aggregated: ")
"""Characters of a match before the figures."""
USAGE_PERCENT: Final = re.compile(rf"KV cache usage: ({NUM})%", re.ASCII)
DEFERRED: Final = re.compile(rf", Deferred: ({COUNT}) reqs", re.ASCII)
HIT_RATE: Final = re.compile(rf", Prefix cache hit rate: ({NUM})%", re.ASCII)
PREEMPTION_LINE: Final = re.compile(rf"total_num_cumulative_preemption=({COUNT})\b", re.ASCII)
ARGS: Final = re.compile(r"non-default args: \{(.*)")
ARG: Final = re.compile(r"'(\w{1,80})': (?:\[?'([^']*)'\]?|(-?[\d.]+|True|False))(?=[,}])")
PROCESS: Final = re.compile(r"\(\w{1,40}?_DP(\d{1,4})(?:_\w{1,40})? pid=", re.ASCII)
"""vLLM's prefix of a process that is of one data-parallel rank: (EngineCore_DP1 pid=77), (Worker_DP1_TP0 pid=78)."""
PROCESS_ID: Final = re.compile(r"\((\w{1,40}) pid=(\d{1,9})\)", re.ASCII)
SGLANG_RANK: Final = re.compile(r"^\[[\d :-]{10,24} DP(\d{1,4}) ", re.ASCII)
CONNECTOR_ARGUMENT: Final = re.compile(r"\bkv_connector[\\\"']{0,3}\s?[:=]\s?[\\\"']{1,3}(\w{1,80})", re.ASCII)
ROLE_ARGUMENT: Final = re.compile(
    r"\b(?:kv_role|disaggregation[_-]mode)[\\\"']{0,3}\s?[:= ]\s?[\\\"']{0,3}(kv_\w{1,20}|prefill|decode)\b", re.ASCII
)
"""vLLM: kv_producer, kv_consumer or kv_both. SGLang: prefill or decode."""
LINES_OF_HEAD: Final = 2_000
"""Stamps without a year have that of a stamp with one among so many lines."""
MESSAGE_KEYS: Final = ("message", "msg", "body", "event", "log")
"""Where JSON has the text: usual loggers, vLLM's and OpenTelemetry's, structlog, Docker."""

LOG_FACTS: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    ("version", re.compile(r"(?:LLM engine \(v|vLLM API server version |█ {1,9}version )(\d+\.\d+\.\d+[\w.+]*)")),
    ("kv_cache_size_tokens", re.compile(r"KV (?:cache size:|pool holds) ([\d,]{1,20}) tokens")),
    ("max_model_len", re.compile(rf"fewer than --context-length ({COUNT})\b")),
    ("max_concurrency_tokens", re.compile(r"Maximum concurrency for ([\d,]{1,20}) tokens per request: [\d.]+x")),
    ("max_concurrency", re.compile(rf"Maximum concurrency for [\d,]{{1,20}} tokens per request: ({NUM})x")),
    ("num_gpu_blocks", re.compile(rf"# (?:GPU|cuda|CUDA) blocks: ({COUNT}), # CPU blocks: \d")),
    ("num_gpu_blocks_override", re.compile(rf"Overriding num_gpu_blocks=\d+ with num_gpu_blocks_override=({COUNT})")),
    ("available_kv_cache_gib", re.compile(rf"Available KV cache memory: ({NUM}) GiB")),
    (
        "blocks_not_freed",
        re.compile(rf"Failed to reset prefix cache because some blocks \(({COUNT})\) are not freed yet"),
    ),
    ("kv_connector", re.compile(r"Creating v1 connector with name: (\w{1,80})")),
)
OURS: Final = {name for name, _ in LOG_FACTS + MEMORY_FACTS}
"""An argument that happens to have one of these names is no figure of ours unless it is one."""
FACT_SIGNS: Final = ("version", "engine (v", "tokens", "blocks", "Available KV", "prefix cache", "connector")
"""Few lines of a log have any of these, and every fact above has one."""


class _LogFact(NamedTuple):
    """A fact, before it is known what the engine is called. `rank` is None where it is every rank's."""

    position: str
    rank: int | None
    name: str
    value: int | float | str
    at_ns: int | None


class Log:
    """Reads the lines of one log. `name` stands for its file in positions. `ended` is when it was last written to.

    `label` is what the lines of this engine begin with, where the file has those of several.
    """

    def __init__(self, name: str, ended: datetime, label: str = "") -> None:
        self.name = name
        self._label = label
        self.stats_lines = 0
        self.notes: list[str] = []
        self._lines = 0
        self._args: dict[str, int | float | str] = {}
        self._stamps = Stamps(ended)
        self._last_stamp: int | None = None
        self._preemptions: int | None = None
        self._engines: dict[str, int] = {}
        self.text_events = TextEvents()
        self.described_states = 0
        self._restarted = False
        self._processes: dict[str, str] = {}
        self._front_end = FrontEndLines()
        self._has_tail = False

    def records(self, lines: Iterable[str], *, grows: bool = False) -> Iterator[Sample | Fact | ReportedEvent]:
        """Yield samples in the order of the lines, then facts and events, and skip other lines. For a log that grows,
        call it again with the lines that follow: it searches them for no report in prose.
        """
        return self.records_of(self._counted(lines), grows=grows)

    def records_of(
        self, lines: Iterable[tuple[int, str]], *, grows: bool = False
    ) -> Iterator[Sample | Fact | ReportedEvent]:
        """Yield the records of lines that have their numbers."""
        read: list[_LogFact] = []
        events: list[tuple[TextEvent, int | None, int | None]] = []
        last_position, read_until = "", 0
        source = iter(lines)
        head = list(islice(source, LINES_OF_HEAD))
        if not grows:
            self._stamps.expect_years_of(text for _, text in head)
        for line in pasted_lines(chain(head, source)):
            position = f"{self.name}:{line.number}"
            if line.answered:
                self._front_end.answered(line.answered, position)
                self.text_events.passes(line.number)
                continue
            text, is_json = _message(line.text)
            at_ns = self._stamps.of(line.text, whole=is_json)
            if at_ns is not None:
                last_position, self._last_stamp = position, at_ns
            found = _statistics(line, text)
            read_until = line.last if found else read_until
            for match in found:
                self.stats_lines += 1
                self._notice_run(line.text)
                self._front_end.statistics(at_ns)
                yield self._sample(match, position, at_ns)
            if not found:
                self._front_end.line(text, position, at_ns)
                rank = int(process[1]) if (process := PROCESS.search(line.text)) is not None else None
                facts = list(self._facts(text))
                read += [_LogFact(position, rank, name, value, at_ns) for name, value in facts]
                joined, spaced = (text, text) if is_json else (line.joined, line.spaced)
                for event in self.text_events.events(line, text, joined, spaced, bool(facts)):
                    self._restarted = self._restarted or event.name == "start_up"
                    if event.name in RUN_ENDS and not event.is_stated:
                        self._front_end.end_run()
                    events.append((event, rank, at_ns))
                is_cut = self.stats_lines and "Avg prompt" in text
                is_state = line.number > read_until and not is_cut
                for state in self.text_events.states(line, text, joined, at_ns) if is_state else ():
                    yield from self._described(state, line.text)
        for state in self.text_events.stated_states() if not (self.stats_lines or grows) else ():
            yield from self._described(state, "")
        if len(self.text_events.pages) and not (self.stats_lines or grows):
            yield from self._of_pages()
        if last_position and self._last_stamp is not None:
            read.append(_LogFact(last_position, None, "last_stamp", "", self._last_stamp))
        read += [_LogFact(fact.position, None, *fact[:2], fact.at_ns) for fact in self._tail_facts()]
        kinds = self.text_events.engine_kinds
        if "sglang" in kinds and "vllm" not in kinds and not self.stats_lines:
            read.append(_LogFact(f"{self.name}:{kinds['sglang']}", None, "exposition", "sglang", None))
        self._take_notes()
        if not grows:
            events += [(phrase, None, None) for phrase in self.text_events.phrases()]
        yield from self._named(read)
        yield from self._named_events(events)

    def engine(self, rank: str | int = 0) -> str:
        """Return the engine's id, NAME@HOST:PORT/RANK as far as the log has it."""
        model = str(self._args.get("served_model_name") or self._args.get("model") or "engine")
        port = self._args.get("port")
        host = str(self._args.get("host", "127.0.0.1"))
        address = f"{f'[{host}]' if ':' in host else host}:{port}" if isinstance(port, int) else ""
        where = self._label or address or self.name.removesuffix(FROM_ITS_END)
        return f"{model}@{where}/{int(rank)}"

    def name_by(self, arguments: dict[str, int | float | str]) -> None:
        """Take these for the engine's arguments, where no line has them."""
        self._args = arguments | self._args

    def _facts(self, text: str) -> Iterator[tuple[str, int | float | str]]:
        if (found := ARGS.search(text)) is not None:
            arguments = {name: quoted or number_in(plain) for name, quoted, plain in ARG.findall(found[1])}
            self._args.update(arguments)
            for name, value in arguments.items():
                if name not in OURS or not isinstance(value, str):
                    yield name, value
            yield "non_default_args", len(arguments)
            yield from _connector_facts(found[1])
            return
        yield from _connector_facts(text)
        if (found := PREEMPTION_LINE.search(text)) is not None:
            self._preemptions = int(found[1])
        if any(sign in text for sign in FACT_SIGNS):
            for name, pattern in LOG_FACTS:
                if (found := pattern.search(text)) is not None:
                    yield name, number_in(found[1])
        yield from memory_facts(text)

    def _sample(self, match: re.Match[str], position: str, at_ns: int | None) -> Sample:
        usage, hit_rate, deferred = (p.search(match["rest"]) for p in (USAGE_PERCENT, HIT_RATE, DEFERRED))
        if match["several"]:
            engine = f"{self.engine().rpartition('/')[0]}/all {match['several']}"
        else:
            engine = self.engine(match["rank"] or 0)
        restarted = self._was_restarted()
        self._engines[engine] = int(match["rank"] or 0)
        return Sample(
            engine=engine,
            position=position,
            at_ns=at_ns,
            running=int(match["running"]),
            waiting=int(match["waiting"] or int(match["swapped"] or 0) + int(match["pending"] or 0)),
            usage=float(usage[1]) / 100 if usage else None,
            prompt_tokens_per_s=float(match["prompt"]),
            generation_tokens_per_s=float(match["generation"]),
            prefix_hit_rate=float(hit_rate[1]) / 100 if hit_rate else None,
            preemptions=self._preemptions,
            deferred=int(deferred[1]) if deferred else None,
            restarted=restarted,
        )

    def _counted(self, lines: Iterable[str]) -> Iterator[tuple[int, str]]:
        for line in lines:
            self._lines += 1
            yield self._lines, line

    def _notice_run(self, line: str) -> None:
        """Take another process id of the same process for another run."""
        if (process := PROCESS_ID.search(line)) is not None:
            before = self._processes.get(process[1])
            self._restarted = self._restarted or (before is not None and before != process[2])
            self._processes[process[1]] = process[2]

    def _described(self, state: DescribedState, line: str) -> Iterator[Sample | Fact]:
        """Yield a sample of a state that is in no line of vLLM's statistics."""
        rank = SGLANG_RANK.search(line)
        engine = self.engine(int(rank[1]) if rank is not None else 0)
        position = f"{self.name}:{state.line}"
        if state.dialect and engine not in self._engines:
            yield Fact(engine, position, "exposition", state.dialect)
        self._engines[engine] = int(rank[1]) if rank is not None else 0
        self.described_states += 1
        figures = state.figures
        yield Sample(
            engine=engine,
            position=position,
            at_ns=state.at_ns,
            running=int(figures["running"]),
            waiting=int(figures["waiting"]) if "waiting" in figures else None,
            usage=figures.get("usage"),
            generation_tokens_per_s=figures.get("generation_tokens_per_s"),
            restarted=self._was_restarted(),
        )

    def _of_pages(self) -> Iterator[Sample]:
        pages = self.text_events.pages
        if pages.begun > len(pages):
            self.notes.append(f"it has {pages.begun:,} metrics pages, of which the last {len(pages):,} are read")
        for sample in pages.samples(self.name, self.engine):
            self._engines[sample.engine] = int(sample.engine.rpartition("/")[2])
            self.described_states += 1
            yield sample

    def _was_restarted(self) -> bool:
        restarted, self._restarted = self._restarted and bool(self._engines), False
        return restarted

    def _tail_facts(self) -> list[FrontEndFact]:
        """Return the front end's lines after the last statistics, if any."""
        facts = list(self._front_end.facts()) if self.stats_lines else []
        self._has_tail = self._has_tail or any(fact.value for fact in facts)
        return facts if self._has_tail else []

    def _take_notes(self) -> None:
        note = ""
        if self._stamps.without_zone:
            note = "its times have no zone and are taken to be UTC"
        elif self.stats_lines and self._last_stamp is None:
            note = "its lines have no times. They are assumed to be 10 s apart, as vLLM logs by default"
        unknown = self.text_events.unknown_count
        if unknown:
            shown = ", ".join(map(str, self.text_events.unknown_lines))
            self.notes.append(f"{counted(unknown, 'line')} about KV memory or blocks of no known kind: {shown}")
        if note and note not in self.notes:
            self.notes.append(note)

    def _named(self, read: Iterable[_LogFact]) -> Iterator[Fact]:
        """Only at the end is it known what the engines are called, and which there are."""
        engines = self._engines or {self.engine(): 0}
        for position, rank, name, value, at_ns in read:
            theirs = [engine for engine, of in engines.items() if rank in (None, of)]
            for engine in theirs or [self.engine(rank or 0)]:
                yield Fact(engine, position, name, value, at_ns)

    def _named_events(self, events: Iterable[tuple[TextEvent, int | None, int | None]]) -> Iterator[ReportedEvent]:
        """Yield the events. Those without a rank belong to the first engine: one line does not apply to each rank."""
        engines = self._engines or {self.engine(): 0}
        for event, rank, at_ns in events:
            theirs = next((engine for engine, of in engines.items() if of == rank), next(iter(engines)))
            position = f"{self.name}:{event.line}"
            yield ReportedEvent(theirs, position, event.name, event.fields, event.quote, at_ns, event.is_stated)


def _statistics(line: PastedLine, text: str) -> list[re.Match[str]]:
    """Return the lines of statistics in it. A wrapped one comes with its continuation."""
    for variant in (line.spaced, line.joined) if line.joined != line.text else (text,):
        if (at := variant.find("Avg prompt")) >= 0:
            from_rank = max(0, at - MOST_BEFORE_STATS)
            found = [match for match in STATS.finditer(variant, from_rank) if match.start() < len(line.text)]
            if found:
                return found
    return []


def _message(line: str) -> tuple[str, bool]:
    """Return the text of a line, and whether it was JSON, behind a process's prefix or not."""
    start = line.find('{"', 0, 80)
    if start < 0:
        return line, False
    try:
        fields: Any = json.loads(line[start:])
    except (ValueError, RecursionError):
        return line, line.startswith("{")
    if isinstance(fields, dict):
        for key in MESSAGE_KEYS:
            if isinstance(fields.get(key), str):
                return _message(fields[key])[0], True
    return line, False


def _connector_facts(text: str) -> Iterator[tuple[str, str]]:
    """Yield the KV connector's name and the side of a disaggregated pair, from a command line or printed arguments."""
    if "kv_" in text and (found := CONNECTOR_ARGUMENT.search(text)) is not None:
        yield "kv_connector", found[1]
    if ("kv_role" in text or "disagg" in text) and (found := ROLE_ARGUMENT.search(text)) is not None:
        yield "kv_role", found[1]
