"""The pages of docs/reference, which `make docs` writes: commands, settings, thresholds, the API, metrics, sources.

Flags that at least three commands have are printed once. A command whose flags are mostly another's names that one.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from fastapi.routing import APIRoute

import kvscope.engine.command_line
from kvscope.monitor.detectors.measured_harm import HARM_BARS, HELD_BARS, HELD_S, HarmBar
from kvscope.monitor.detectors.registry import THRESHOLDS
from kvscope.monitor.ledger.harms import CLIENT_HARMS
from kvscope.monitor.outputs.prometheus import WatchCollector
from kvscope.monitor.questions.availability import (
    FAMILIES_NEED,
    FAMILIES_WITHOUT_STREAM,
    KINDS_OF_SOURCE,
    OUTPUTS,
    reason,
)
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.questions.query import QUESTIONS
from kvscope.monitor.questions.schema import SCHEMA_VERSION
from kvscope.monitor.service.http_api import create_app
from kvscope.monitor.service.query_routes import SCHEMA_HEADER
from kvscope.monitor.service.settings_table import HUB_KEYS, SETTINGS, THRESHOLDS_KEY
from kvscope.monitor.sources.log_lines import line_table
from kvscope.monitor.sources.log_patterns import PATTERNS
from kvscope.monitor.sources.metric_families import FIELD_OF_FAMILY, family_table
from kvscope.monitor.terminal import cli
from kvscope.monitor.terminal.commands.shared_flags import target_help

ENVIRONMENT: Final = {
    "KVSCOPE_EVENTS": "where the engine binds its event stream, and which streams the monitor reads (comma-separated)",
    "KVSCOPE_REPLAY": "where the engine binds its replay socket (default: beside the stream)",
    "KVSCOPE_ENGINE_ID": "the engine's id in the stream (default: NAME@HOST:PORT/0)",
    "KVSCOPE_HASH_KEY": "key of the prefix hashes in the stream (default: random for each epoch of an engine)",
    "KVSCOPE_STACKS": "0: do not read the stack of the engine's thread when a step is late (default: read it)",
    "KVSCOPE_VALIDATE": "1: check every invariant of the ledger after every batch, and raise; for tests (default: off)",
    "KVSCOPE_URL": "the service that `monitor doctor` and `monitor explain` ask when no target is given",
    "KVSCOPE_TOKEN": "the service's token: `monitor serve` requires it, and the other commands send it",
    "KVSCOPE_DATA": "the directory with the history and the alerts of `monitor serve`, which `monitor sql` reads",
    "KVSCOPE_NODE": "an agent's node: Kubernetes discovery with `own_node` reads its pods, and the fleet view shows it",
    "KVSCOPE_ALERTS": "receivers of alerts, as --alert takes them, separated by spaces",
    "KVSCOPE_ZONE": "zone of an agent's engines, for the fleet view",
    "KVSCOPE_SERVICE": "service of an agent's engines: a hub shows its prefill engines beside its decode engines",
    "KVSCOPE_KV_ROLE": "role of an agent's engines in their service, producer or consumer, where it is kv_both",
    "KVSCOPE_WEBHOOK_SECRET": "the secret that signs alerts to webhooks (whsec_…)",
}
"""Each environment variable and what it sets."""
LIKE: Final = {
    "monitor agent": "monitor serve",
    "monitor hub": "monitor serve",
    "kvscope engine bench": "kvscope engine serve",
}
"""Commands that take most of the flags of another one."""
SHARED_BY: Final = 3
"""How many commands have a flag that is printed once for all of them."""
SUFFIX: Final = {"counter": "_total"}

ABOUT_METRICS: Final = """\
Requests and blocks are never labels. On a machine with a GPU, the service exports three gauges of the driver,
by gpu and uuid: `kvscope_gpu_memory_bytes` by state (used, free), `kvscope_gpu_utilization_ratio` by part
(kernels, memory), and `kvscope_gpu_process_memory_bytes` by owner. The owner is a monitored engine with its
workers, or others. In a container all processes are *others*.

A gaugehistogram shows the current ages. Its buckets can fall, so use neither `rate` nor `increase` on it. The
text format has it as a histogram with `_gcount` and `_gsum`. Counters begin at 0 with each epoch of an engine."""


class Flag(NamedTuple):
    """A flag or an argument of a command, as its help shows it."""

    form: str
    text: str


class Command(NamedTuple):
    """A command at an end of the tree, and the line that its parent has for it."""

    parser: argparse.ArgumentParser
    line: str

    def groups(self) -> dict[str, list[Flag]]:
        """Return arguments and flags by the title of their group, without --help. Those of the main group have none."""
        found: dict[str, list[Flag]] = {}
        formatter = self.parser._get_formatter()
        for group in self.parser._action_groups:
            title = "" if group.title in ("positional arguments", "options") else group.title or ""
            for action in (one for one in group._group_actions if not isinstance(one, argparse._HelpAction)):
                text = formatter._expand_help(action) if action.help else ""
                form = formatter._format_action_invocation(action)
                found.setdefault(title, []).append(Flag(form, _one_line(text)))
        return found

    def flags(self) -> list[Flag]:
        """Return all arguments and flags."""
        return [flag for flags in self.groups().values() for flag in flags]

    def usage(self) -> str:
        """Return the command with its positional arguments."""
        formatter = self.parser._get_formatter()
        positional = [action for action in self.parser._actions if not action.option_strings]
        formatter.add_usage(None, positional, [], prefix="")
        name, arguments = self.parser.prog, formatter.format_help().split()
        has_flags = any(flag.form.startswith("-") for flag in self.flags())
        return " ".join((name, *(["[FLAGS]"] if has_flags else []), *arguments[len(name.split()) :]))


def table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |"


def reference_pages() -> dict[str, str]:
    """Return each page by its name in docs/reference."""
    pages = {
        "commands": _commands_page(),
        "settings": _settings_page(),
        "thresholds": _thresholds_page(),
        "api": _api_page(),
        "metrics": _metrics_page(),
        "families": _families_page(),
        "log-lines": _log_lines_page(),
        "sources": _sources_page(),
    }
    return {f"{name}.md": "\n".join(lines) + "\n" for name, lines in pages.items()}


# ---------------------------------------------------------------- sources and outputs


def _sources_page() -> Iterator[str]:
    """Yield the table of sources and outputs, each reason once, by its number."""
    yield from (
        "# Sources and outputs",
        "",
        "Generated from the code by `make docs`. Which source has data for which answer, and where the answer is shown."
        " A number stands for the reason that you read there. A probe needs no reader: one that attaches later gets the"
        " whole state, and all events from then on. A hub answers as the agent does that reads the engine.",
        "",
    )
    reasons: dict[str, int] = {}
    rows = []
    for name, output in OUTPUTS.items():
        cells = [reason(name, seen) for seen in KINDS_OF_SOURCE.values()]
        numbers = [f"[{reasons.setdefault(cell, len(reasons) + 1)}](#reasons)" if cell else "data" for cell in cells]
        rows.append((f"`{name}`", output.shown_in, *numbers))
    yield from table(("answer", "shown in", *KINDS_OF_SOURCE), rows)
    yield from ("", "## Reasons", "", *(f"{number}. {text}" for text, number in reasons.items()), "")
    yield from ("## Panels of Grafana", "", "A panel without data says what its families need.", "")
    needs = [(f"`{prefix}…`", need) for prefix, need in FAMILIES_NEED if need]
    yield from table(("family", "says"), needs)
    families = ", ".join(f"`{name}`" for name in sorted(FAMILIES_WITHOUT_STREAM))
    yield from ("", f"Those of an engine that a metrics page has, too: {families}.")


# ---------------------------------------------------------------- commands


def _commands_page() -> Iterator[str]:
    os.environ["COLUMNS"] = "100"
    for name in ENVIRONMENT:
        os.environ.pop(name, None)
    commands = [*_commands(cli.parser()), *_commands(kvscope.engine.command_line.engine_parser())]
    by_name = {command.parser.prog: command for command in commands}
    shared = _shared(command for command in commands if command.parser.prog not in LIKE)
    yield from ("# Commands", "", "Generated from the code by `make docs`. `COMMAND --help` prints the same text.", "")
    yield from ("## Targets", "", "A TARGET of `monitor doctor`, `explain` and other commands is one of", "")
    yield from ("```text", *(line.strip("\n") for line in target_help().splitlines()[1:]), "```", "")
    yield from ("## Shared flags", "", "Each command that takes one of these names it.", "")
    yield from _flag_table(sorted(shared, key=lambda flag: flag.form.lstrip("-")))
    for command in commands:
        yield from ("", *_command(command, by_name, shared))


def _shared(commands: Iterable[Command]) -> set[Flag]:
    """Return the flags that several commands have with the same meaning, of each form the most common one."""
    counts = Counter(flag for command in commands for flag in command.flags() if flag.form.startswith("-"))
    most_common = {flag.form: flag for flag, _ in reversed(counts.most_common())}
    return {flag for flag in most_common.values() if counts[flag] >= SHARED_BY}


def _command(command: Command, by_name: Mapping[str, Command], shared: set[Flag]) -> Iterator[str]:
    name, flags = command.parser.prog, command.flags()
    yield from (f"## `{name}`", "", "```text", command.usage(), "```", "")
    text = _one_line(command.parser.description or command.line)
    yield f"{text[0].upper()}{text[1:]}" + ("" if text.endswith(".") else ".")
    likes: list[Flag] = []
    if other := by_name.get(LIKE.get(name, "")):
        likes = [flag for flag in other.flags() if flag in flags and flag not in shared]
        missing = [flag for flag in other.flags() if flag not in flags]
        link = f"[`{other.parser.prog}`](#{other.parser.prog.replace(' ', '-')})"
        few = len(missing) < len(likes)
        which = f"the flags of {link}, except {_named(missing)}" if few else f"these flags of {link}: {_named(likes)}"
        yield from ("", f"It takes {which}.")
    for title, group in command.groups().items():
        if own := [flag for flag in group if flag not in shared and flag not in likes]:
            yield from ("", f"{title[0].upper()}{title[1:]}:") if title else ()
            yield from ("", *_flag_table(own))
    if used := [flag for flag in flags if flag in shared]:
        yield from ("", f"[Shared flags](#shared-flags): {_named(used)}.")
    if rest := (command.parser.epilog or "").replace(target_help(), "").strip("\n"):
        yield from ("", "```text", rest % {"prog": name}, "```")


def _named(flags: Iterable[Flag]) -> str:
    return ", ".join(f"`{flag.form.split(',')[0].split()[0]}`" for flag in flags)


def _commands(parser: argparse.ArgumentParser, line: str = "") -> Iterator[Command]:
    """Yield the commands at the ends of the tree."""
    branches = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not branches:
        yield Command(parser, line)
    for branch in branches:
        lines = {choice.dest: choice.help or "" for choice in branch._choices_actions}
        for name, child in branch.choices.items():
            yield from _commands(child, lines.get(name, ""))


def _flag_table(flags: Iterable[Flag]) -> Iterator[str]:
    yield from table(("flag", "meaning"), ((f"`{flag.form}`", _escaped(flag.text)) for flag in flags))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*")


# ---------------------------------------------------------------- settings


def _settings_page() -> Iterator[str]:
    yield "# Settings"
    yield ""
    yield "Generated from the code by `make docs`."
    yield ""
    yield "## Environment"
    yield ""
    yield "Each is also a flag, and the flag takes precedence."
    yield ""
    yield from table(("variable", "what it sets"), ((f"`{name}`", shown) for name, shown in ENVIRONMENT.items()))
    yield ""
    yield "## Configuration file"
    yield ""
    yield "Keys of the TOML file that `--config` names ([scale out](../scale-out.md#configuration-file)). A flag takes"
    yield "precedence over a variable, and a variable over the file. A reload (SIGHUP) changes the keys marked *yes*."
    yield ""
    rows = (
        (
            f"`{key}`",
            {"list": "list", "switch": "true or false", "one": "text or number"}[setting.shape]
            if key != THRESHOLDS_KEY
            else "table of `CODE.NAME = NUMBER`",
            f"`{setting.option}`" if setting.option.startswith("-") else "TARGET",
            f"`{setting.variable}`" if setting.variable else "",
            "yes" if setting.is_live else "",
            "" if setting.of_agent else "no",
            "yes" if key in HUB_KEYS else "",
        )
        for key, setting in SETTINGS.items()
    )
    yield from table(("key", "value", "flag", "variable", "reload", "`monitor agent`", "`monitor hub`"), rows)


# ---------------------------------------------------------------- severities and thresholds


def _thresholds_page() -> Iterator[str]:
    yield "# Severities and thresholds"
    yield ""
    yield "Generated from the code by `make docs`. [Finding codes](../codes.md) has the codes themselves."
    yield ""
    yield "## Severity"
    yield ""
    yield "A finding has the severity of [its code](../codes.md) at its full harm. `harm` in its JSON has what was"
    yield "measured. The severity rises with it and never falls while the finding is open:"
    yield ""
    yield "- An *error* that reaches none of these is a *warning*: " + _bars(HARM_BARS)
    yield f"- Blocks that have not returned for {HELD_S:g} s are at least this, and an *error* if a request waits for"
    yield (
        "  them: "
        + "; ".join(f"*{one.severity}* from {one.least:g} {one.unit} ({one.reason})" for one in HELD_BARS)
        + "."
    )
    yield "- Corruption, a stopped engine, and findings from metrics, a log or a report keep the code's severity, but"
    yield "  what cannot tell is no *error* while no request waits."
    yield ""
    yield "`alternatives` lists the other explanations, each with what excludes it. *confirmed* has none that remains."
    yield ""
    yield "## Harm"
    yield ""
    yield "What kvscope counts as harm, whatever the cause. Harm that no finding explains is a finding `harm.*`."
    yield ""
    yield from table(("harm", "a request or blocks", "measured in", "reason"), CLIENT_HARMS)
    yield ""
    yield "## Pending periods and thresholds"
    yield ""
    yield "`--set CODE.NAME=VALUE` changes one, wherever a detector runs: `monitor doctor`, `explain` and `serve`."
    yield ""
    yield from table(
        ("name", "default", "unit", "reason"),
        ((f"`{name}`", f"{t.value:g}", t.unit, t.reason) for name, t in THRESHOLDS.items()),
    )


def _bars(bars: Sequence[HarmBar]) -> str:
    return "; ".join(f"`{one.measure}` {one.least:g} {one.unit} ({one.reason})" for one in bars) + "."


# ---------------------------------------------------------------- the API


def _api_page() -> Iterator[str]:
    yield "# API of `monitor serve`"
    yield ""
    yield "Generated from the code by `make docs`."
    yield ""
    yield "Answers are JSON. If your service has a token, send it as a bearer. `/api/openapi.json` describes the"
    yield f"routes and the schemas of all answers. The header `{SCHEMA_HEADER}` carries the version of the schema, now"
    yield f"{SCHEMA_VERSION}."
    yield ""
    yield "`at`, `since`, `until` and `around` take a time (RFC 3339, or the last such time of day in UTC: `14:02:11`)"
    yield "or a position (`epoch/sequence/event`: just after that event). An empty `at` or `until` means now. An empty"
    yield "`since` means ten minutes before `until`. Status 404: not known, or not kept. Status 400: the question makes"
    yield "no sense. Status 422: a parameter is missing or of another type."
    yield ""
    yield from table(("route", "parameters", "answer"), _questions())
    yield ""
    yield "Other routes of the service:"
    yield ""
    asked = {question.route for question in QUESTIONS.values()}
    yield from table(
        ("route", "parameters", "answer"),
        (
            (
                f"`{method} {route.path}`",
                ", ".join(f"`{each.name}`" for each in route.dependant.query_params),
                " ".join(route.description.split()),
            )
            for route in create_app(Pipeline(), list).routes
            if isinstance(route, APIRoute) and route.path.startswith("/api/") and route.path not in asked
            if "{path" not in route.path
            for method in sorted(route.methods or ())
        ),
    )


def _questions() -> Iterator[tuple[str, ...]]:
    for question in QUESTIONS.values():
        names = ", ".join(f"`{name}`" for name in question.parameters.__struct_fields__)
        answer = " ".join(question.text.split())
        yield f"`GET {question.route}`", names, answer


# ---------------------------------------------------------------- metrics


def _metrics_page() -> Iterator[str]:
    yield "# Metrics of `monitor serve`"
    yield ""
    yield "Generated from the code by `make docs`."
    yield ""
    yield from ABOUT_METRICS.splitlines()
    yield ""
    yield from table(
        ("metric", "type", "labels", "what it is"),
        sorted(
            (f"`{m.name}{SUFFIX.get(m.type, '')}`", m.type, ", ".join(cast(Any, m)._labelnames), m.documentation)
            for m in WatchCollector(Pipeline()).collect()
            if not m.name.startswith("kvscope_gpu_")
        ),
    )


# ---------------------------------------------------------------- metric families of engines

USES: Final = {
    "every": "every judgement from metrics",
    "shown": "shown as a latency",
    "context": "no code by itself: it dates, names or weighs what others show",
}


def _families_page() -> Iterator[str]:
    decided = family_table()
    yield from ("# Metric families of engines", "", "Generated from the code by `make docs`.", "")
    yield "What kvscope does with each metric family of vLLM 0.10.2 to 0.33.0 and SGLang 0.5.23. `monitor doctor`"
    yield "counts the families of a page that were not used, and names those that are not in this list. Names are"
    yield "without `_total`."
    yield from ("", "## Read", "")
    uses = _evidence(decided.read)
    rows = ((f"`{family}`", uses[field]) for family, field in sorted(FIELD_OF_FAMILY.items()))
    yield from table(("family", "evidence for"), rows)
    yield from ("", "## Ignored", "", "A `*` stands for any ending.", "")
    groups = ((one.because, ", ".join(f"`{family}`" for family in sorted(one.families))) for one in decided.ignored)
    yield from table(("because", "families"), groups)


def _evidence(read: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return what each field or class is evidence for, as a cell."""
    return {
        name: ", ".join(USES.get(code) or f"[{code}](../runbooks/{code}.md)" for code in codes)
        for name, codes in read.items()
    }


def _log_lines_page() -> Iterator[str]:
    decided = line_table()
    yield from ("# Log lines of engines", "", "Generated from the code by `make docs`.", "")
    yield "What kvscope does with each line that vLLM 0.32, SGLang 0.5.23, vllm-ascend of August 2026 and, in vLLM's"
    yield "processes, LMCache 0.5.6 log about KV memory, transfers and failures. Lines of other releases are read too."
    yield "Statistics and the memory profile are read apart ([Read a log](../read-a-log.md)). `monitor doctor` counts"
    yield "the lines about KV memory that are not in this list."
    yield from ("", "## Read", "")
    uses = _evidence(decided.read)
    rows = ((f"`{one.sample}`", f"{one.engine}, {one.releases}", uses[one.name]) for one in PATTERNS)
    yield from table(("example", "seen in", "evidence for"), rows)
    yield from ("", "## Ignored", "", "A `*` stands for any text within a line.", "")
    groups = ((one.because, ", ".join(f"`{line.strip()}`" for line in sorted(one.lines))) for one in decided.ignored)
    yield from table(("because", "lines"), groups)
