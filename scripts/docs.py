"""Writes the generated parts of the docs: `make docs`. A test holds the files to it.

docs/contract.md                     the tables of kinds and names, between its markers
docs/attach.md                       when a rule decides from metrics, between its markers
docs/limits.md                       the tables of limits, between its markers
docs/codes.md                        the catalogue of finding codes
docs/renames.md                      renamed routes, parameters and JSON keys, between its markers
docs/reference.md                    commands, environment, metrics, findings, thresholds
monitor/doctor/report.schema.json    the schema of doctor's JSON
monitor/planning/plan.schema.json    the schema of the plan's JSON
docs/bus.schema.json                 the schema of the messages in NATS
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from fastapi.routing import APIRoute

import kvscope.engine.command_line
import kvscope.engine.faults
from kvscope.monitor import cli
from kvscope.monitor.bus.bus_messages import bus_schema
from kvscope.monitor.configuration.settings_table import HUB_KEYS, SETTINGS, THRESHOLDS_KEY
from kvscope.monitor.detectors.harm import HARM_BARS, HELD_BAR, HarmBar
from kvscope.monitor.detectors.registry import CATALOGUE, THRESHOLDS
from kvscope.monitor.doctor import report
from kvscope.monitor.events import kinds, limits
from kvscope.monitor.exporters.prometheus import WatchCollector
from kvscope.monitor.json_names import OLD_VALUES, RENAMED_KEYS
from kvscope.monitor.pipeline import Pipeline
from kvscope.monitor.planning.plan_types import plan_schema
from kvscope.monitor.query import QUESTIONS
from kvscope.monitor.schema import SCHEMA_VERSION
from kvscope.monitor.service.http_api import create_app
from kvscope.monitor.service.query_routes import SCHEMA_HEADER
from kvscope.monitor.text import duration
from scripts.code_catalogue import codes_page

ROOT = Path(__file__).parent.parent
DECISION_INTERVALS_S = (1, 5, 15, 30, 60)

ENVIRONMENT = {
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
    "KVSCOPE_LAB_VLLM": "the Python that has vLLM, for `monitor incidents --engine vllm`",
    "KVSCOPE_LAB_VLLM_RELEASE": "a folder with another release of vLLM, put ahead of that Python's own",
    "KVSCOPE_REMOTE_WRITE_TOKEN": "the bearer token that `monitor serve --remote-write` sends",
    "KVSCOPE_ZONE": "zone of an agent's engines, for the fleet view",
    "KVSCOPE_SERVICE": "service of an agent's engines: a hub shows its prefill engines beside its decode engines",
    "KVSCOPE_KV_ROLE": "role of an agent's engines in their service, producer or consumer, where it is kv_both",
    "KVSCOPE_WEBHOOK_SECRET": "the secret that signs alerts to webhooks (whsec_…)",
}

ABOUT_METRICS = """\
Requests and blocks are never labels. On a machine with a GPU, the service exports three gauges of the driver,
by gpu and uuid: `kvscope_gpu_memory_bytes` by state (used, free), `kvscope_gpu_utilization_ratio` by part
(kernels, memory), and `kvscope_gpu_process_memory_bytes` by owner. The owner is a monitored engine with its
workers, or others. In a container all processes are *others*.

A gaugehistogram shows the current ages. Its buckets can fall, so use neither `rate` nor `increase` on it. The
text format has it as a histogram with `_gcount` and `_gsum`. Counters begin at 0 with each epoch of an engine."""


def main() -> None:
    """Write them."""
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")


def generated() -> dict[Path, str]:
    """Each file that is generated in whole or in part, and what it should hold."""
    contract = ROOT / "docs" / "contract.md"
    text = contract.read_text(encoding="utf-8")
    text = between(text, "kinds", "\n".join(_kinds()))
    text = between(text, "enums", "\n".join(_enums()))
    limits_page = ROOT / "docs" / "limits.md"
    attach = ROOT / "docs" / "attach.md"
    renames = ROOT / "docs" / "renames.md"
    renamed = between(renames.read_text(encoding="utf-8"), "renamed routes", "\n".join(_renamed_routes()))
    renamed = between(renamed, "renamed keys", "\n".join(_renamed_keys()))
    schema = msgspec.json.format(msgspec.json.encode(report.schema()), indent=2).decode() + "\n"
    planned = msgspec.json.format(msgspec.json.encode(plan_schema()), indent=2).decode() + "\n"
    on_bus = msgspec.json.format(msgspec.json.encode(bus_schema()), indent=2).decode() + "\n"
    return {
        contract: text,
        attach: between(attach.read_text(encoding="utf-8"), "sample needs", "\n".join(_sample_needs())),
        ROOT / "docs" / "codes.md": codes_page(_lab_only()),
        limits_page: between(limits_page.read_text(encoding="utf-8"), "limits", "\n".join(_limits())),
        renames: renamed,
        ROOT / "docs" / "reference.md": "\n".join(_reference()) + "\n",
        ROOT / "monitor" / "doctor" / "report.schema.json": schema,
        ROOT / "monitor" / "planning" / "plan.schema.json": planned,
        ROOT / "docs" / "bus.schema.json": on_bus,
    }


def between(text: str, name: str, new: str) -> str:
    """Return the page with `new` between the markers of that name."""
    marked = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- /generated -->)", re.DOTALL)
    return marked.sub(lambda found: f"{found[1]}{new}\n{found[2]}", text)


def _table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |"


def _lab_only() -> frozenset[str]:
    """Return the codes that the page of reach marks as shown on kvscope's own engine alone."""
    page = (ROOT / "docs" / "accuracy" / "reach.md").read_text(encoding="utf-8")
    return frozenset(line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if line.endswith("only** |"))


def _sample_needs() -> Iterator[str]:
    """When each rule decides from metrics alone, by the interval of the samples."""
    needs = [(code, each.sample_need) for code, each in CATALOGUE.items() if each.sample_need is not None]
    yield from _table(
        ("finding", "state of the engine", "samples", *(f"at {interval} s" for interval in DECISION_INTERVALS_S)),
        (
            (
                f"[{code}](runbooks/{code}.md)",
                need.what,
                need.samples,
                *(
                    duration(after_s) if (after_s := need.decides_after_s(interval)) < math.inf else "never"
                    for interval in DECISION_INTERVALS_S
                ),
            )
            for code, need in needs
        ),
    )


def _kinds() -> Iterator[str]:
    yield from _table(
        ("kind", "name", "request", "args", "ids", "meaning"),
        (
            (int(kind), kind.name, "yes" if f.request_event_text else "", ", ".join(f.args), f.ids, f.meaning)
            for kind, f in kinds.SCHEMA.items()
        ),
    )


def _enums() -> Iterator[str]:
    named = (
        kinds.Status,
        kinds.Cause,
        kinds.Release,
        kinds.Evict,
        kinds.Preempt,
        kinds.Holder,
        kinds.Limit,
        kinds.EngineMode,
        kinds.Layer,
        kinds.Load,
        kinds.TierOp,
        kinds.Tier,
        kinds.Stage,
    )
    for enum in named:
        shown = (enum.__doc__ or "").splitlines()[0]
        yield f"- **{enum.__name__}** ({shown}): " + ", ".join(f"{int(m)} {m.name}" for m in enum) + "."


def _limits() -> Iterator[str]:
    """Yield a table for each part of the module of limits, with the docstring of each constant."""
    source = (ROOT / "monitor" / "events" / "limits.py").read_text(encoding="utf-8")
    for part in source.split("# ------")[1:]:
        title = part.partition("\n")[0].strip("- ")
        found = re.findall(r'^([A-Z_]+): Final = .*\n"""([^"]+)"""$', part, re.MULTILINE)
        rows = ((f"`{name}`", f"{getattr(limits, name):,}", " ".join(shown.split())) for name, shown in found)
        yield from ("", f"## {title[0].upper()}{title[1:]}", "", *_table(("limit", "value", "what it bounds"), rows))


def _bars(bars: Sequence[HarmBar]) -> str:
    return "; ".join(f"`{one.measure}` {one.least:g} {one.unit} ({one.reason})" for one in bars) + "."


def _settings() -> Iterator[str]:
    """Yield the keys of a configuration file."""
    yield "## Configuration file"
    yield ""
    yield "Keys of the TOML file that `--config` names ([scale out](scale-out.md#configuration-file)). A flag takes"
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
    yield from _table(("key", "value", "flag", "variable", "reload", "`monitor agent`", "`monitor hub`"), rows)
    yield ""


def _reference() -> Iterator[str]:
    yield "# Reference"
    yield ""
    yield "Generated from the code by `make docs`. [The event contract](contract.md) has a page of its own."
    yield ""
    yield "## Commands"
    os.environ["COLUMNS"] = "100"
    for name in ENVIRONMENT:
        os.environ.pop(name, None)
    for parser in (*_commands(cli.parser()), *_commands(kvscope.engine.command_line.engine_parser())):
        yield from ("", f"### `{parser.prog}`", "", "```text", parser.format_help().strip(), "```")
    yield ""
    yield "## Environment"
    yield ""
    yield "Each is also a flag, and the flag takes precedence."
    yield ""
    yield from _table(("variable", "what it sets"), ((f"`{name}`", shown) for name, shown in ENVIRONMENT.items()))
    yield ""
    yield from _settings()
    yield "## Findings"
    yield ""
    yield "[All codes](codes.md), with the best verdict from each source."
    yield ""
    yield "A finding has the severity of that page at its full harm. `harm` in its JSON has what was measured, and the"
    yield "severity rises with it and never falls while the finding is open:"
    yield ""
    yield "- An *error* that reaches none of these is a *warning*: " + _bars(HARM_BARS)
    yield "- A *warning* about blocks that do not return is an *error* from here on: " + _bars((HELD_BAR,))
    yield "- Corruption, a stopped engine, and findings from metrics, a log or a report keep the severity of that page."
    yield ""
    yield "`alternatives` lists the other explanations, each with what excludes it. *confirmed* has none that remains."
    yield ""
    yield "## Pending periods and thresholds"
    yield ""
    yield "`--set CODE.NAME=VALUE` changes one, wherever a detector runs: `monitor doctor`, `explain` and `serve`."
    yield ""
    yield from _table(
        ("name", "default", "unit", "reason"),
        ((f"`{name}`", f"{t.value:g}", t.unit, t.reason) for name, t in THRESHOLDS.items()),
    )
    yield ""
    yield "## Faults of kvscope's own engine"
    yield ""
    yield "`kvscope engine serve --fault CODE[:every=N][:after=N][:limit=N]` breaks one mechanism on purpose."
    yield ""
    yield from _table(
        ("code", "what is broken"), ((f"`{c}`", place) for c, place in kvscope.engine.faults.PLACES.items())
    )
    yield ""
    yield "## API of `monitor serve`"
    yield ""
    yield "Answers are JSON. If your service has a token, send it as a bearer. `/api/openapi.json` describes the"
    yield f"routes and the schemas of all answers. The header `{SCHEMA_HEADER}` carries the version of the schema, now"
    yield f"{SCHEMA_VERSION}. Renamed routes, parameters and keys keep their old names for one release"
    yield "([list](renames.md))."
    yield ""
    yield "`at`, `since`, `until` and `around` take a time (RFC 3339, or the last such time of day in UTC: `14:02:11`)"
    yield "or a position (`epoch/sequence/event`: just after that event). An empty `at` or `until` means now. An empty"
    yield "`since` means ten minutes before `until`. Status 404: not known, or not kept. Status 400: the question makes"
    yield "no sense. Status 422: a parameter is missing or of another type."
    yield ""
    yield from _table(("route", "parameters", "answer"), _questions())
    yield ""
    yield "Other routes of the service:"
    yield ""
    asked = {route for question in QUESTIONS.values() for route in (question.route, question.old_route)}
    yield from _table(
        ("route", "parameters", "answer"),
        (
            (
                f"`{method} {route.path}`",
                ", ".join(f"`{each.name}`" for each in route.dependant.query_params),
                " ".join((route.endpoint.__doc__ or "").split()),
            )
            for route in create_app(Pipeline(), list).routes
            if isinstance(route, APIRoute) and route.path.startswith("/api/") and route.path not in asked
            if "{path" not in route.path
            for method in sorted(route.methods)
        ),
    )
    yield ""
    yield "## Metrics of `monitor serve`"
    yield ""
    yield from ABOUT_METRICS.splitlines()
    yield ""
    yield from _table(
        ("metric", "type", "labels", "what it is"),
        sorted(
            (f"`{m.name}{_SUFFIX.get(m.type, '')}`", m.type, ", ".join(m._labelnames), m.documentation)
            for m in WatchCollector(Pipeline()).collect()
            if not m.name.startswith("kvscope_gpu_")
        ),
    )


def _renamed_routes() -> Iterator[str]:
    rows = [(f"`{q.old_route}`", f"`{q.route}`") for q in QUESTIONS.values() if q.old_name]
    rows += [
        (f"`{old}` of `{question.route}`", f"`{new}`")
        for question in QUESTIONS.values()
        for new, old in question.old_parameters.items()
    ]
    yield from _table(("old", "new"), rows)


def _renamed_keys() -> Iterator[str]:
    def values(old: str) -> str:
        pairs = OLD_VALUES.get(old, {}).items()
        return ", ".join(f"`{before}` is now `{now}`" for now, before in pairs)

    rows = [
        (f"`{struct}`", f"`{old}`", f"`{new}`", values(old))
        for struct, renamed in RENAMED_KEYS.items()
        for new, old in renamed.items()
    ]
    yield from _table(("struct", "old", "new", "values"), rows)


def _questions() -> Iterator[tuple[str, ...]]:
    for question in QUESTIONS.values():
        names = ", ".join(f"`{name}`" for name in question.parameters.__struct_fields__)
        answer = " ".join(question.text.split())
        if question.old_name:
            answer += f" (Until this release: `{question.old_route}`.)"
        yield f"`GET {question.route}`", names, answer


_SUFFIX = {"counter": "_total"}


def _commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the commands at the ends of the tree."""
    branches = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not branches:
        yield parser
    for branch in branches:
        for child in branch.choices.values():
            yield from _commands(child)


if __name__ == "__main__":
    main()
