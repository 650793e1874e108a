"""Writes the generated parts of the docs: `make docs`. A test holds the files to it.

docs/contract.md                     the tables of kinds and names, between its markers
docs/attach.md                       when a rule decides from metrics, between its markers
docs/limits.md                       the tables of limits, between its markers
docs/codes.md                        the catalogue of finding codes
docs/engine.md                       the table of faults, between its markers
docs/reference/                      commands, settings, thresholds, the API, metrics
monitor/terminal/report.schema.json    the schema of doctor's JSON
monitor/planning/plan.schema.json    the schema of the plan's JSON
docs/bus.schema.json                 the schema of the messages in NATS
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvscope.engine.faults import PLACES
from kvscope.monitor.base import limits
from kvscope.monitor.base.text import duration
from kvscope.monitor.contract import kinds
from kvscope.monitor.detectors.registry import CATALOGUE
from kvscope.monitor.fleet.bus_messages import bus_schema
from kvscope.monitor.planning.plan_types import plan_schema
from kvscope.monitor.terminal import report
from scripts.code_catalogue import codes_page
from scripts.reference_pages import reference_pages, table

ROOT = Path(__file__).parent.parent
DECISION_INTERVALS_S = (1, 5, 15, 30, 60)


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
    engine = ROOT / "docs" / "engine.md"
    schema = msgspec.json.format(msgspec.json.encode(report.schema()), indent=2).decode() + "\n"
    planned = msgspec.json.format(msgspec.json.encode(plan_schema()), indent=2).decode() + "\n"
    on_bus = msgspec.json.format(msgspec.json.encode(bus_schema()), indent=2).decode() + "\n"
    return {
        contract: text,
        attach: between(attach.read_text(encoding="utf-8"), "sample needs", "\n".join(_sample_needs())),
        ROOT / "docs" / "codes.md": codes_page(),
        limits_page: between(limits_page.read_text(encoding="utf-8"), "limits", "\n".join(_limits())),
        engine: between(engine.read_text(encoding="utf-8"), "faults", "\n".join(_faults())),
        **{ROOT / "docs" / "reference" / name: page for name, page in reference_pages().items()},
        ROOT / "monitor" / "terminal" / "report.schema.json": schema,
        ROOT / "monitor" / "planning" / "plan.schema.json": planned,
        ROOT / "docs" / "bus.schema.json": on_bus,
    }


def between(text: str, name: str, new: str) -> str:
    """Return the page with `new` between the markers of that name."""
    marked = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- /generated -->)", re.DOTALL)
    return marked.sub(lambda found: f"{found[1]}{new}\n{found[2]}", text)


def _sample_needs() -> Iterator[str]:
    """When each rule decides from metrics alone, by the interval of the samples."""
    needs = [(code, each.sample_need) for code, each in CATALOGUE.items() if each.sample_need is not None]
    yield from table(
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
    yield from table(
        ("kind", "name", "request", "args", "ids", "meaning"),
        (
            (int(kind), kind.name, "yes" if f.of_request else "", ", ".join(f.args), f.ids, f.meaning)
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


def _faults() -> Iterator[str]:
    yield from table(("code", "what is broken"), ((f"`{code}`", place) for code, place in PLACES.items()))


def _limits() -> Iterator[str]:
    """Yield a table for each part of the module of limits, with the docstring of each constant."""
    source = (ROOT / "monitor" / "base" / "limits.py").read_text(encoding="utf-8")
    for part in source.split("# ------")[1:]:
        title = part.partition("\n")[0].strip("- ")
        found = re.findall(r'^([A-Z_]+): Final = .*\n"""([^"]+)"""$', part, re.MULTILINE)
        rows = ((f"`{name}`", f"{getattr(limits, name):,}", " ".join(shown.split())) for name, shown in found)
        yield from ("", f"## {title[0].upper()}{title[1:]}", "", *table(("limit", "value", "what it bounds"), rows))


if __name__ == "__main__":
    main()
