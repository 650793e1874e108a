"""Which source has data for which output: one table, and one sentence for each cell without data.

An output is a question of query.py, which the web app, the API and the commands ask, or a file that is made of every
event, or a metric family. It shows the sentence of its cell (`reason`), so that a user reads the same everywhere.
`make docs` writes docs/reference/sources.md from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple

from ..base.errors import NotKnown
from ..ledger.engine_ledger import EngineLedger

KnownBy = Literal["stream", "metrics", "prometheus", "log", "kv-events"]
"""By what an engine is known."""

KINDS_OF_SOURCE: Final[dict[str, KnownBy]] = {
    "event stream": "stream",
    "probe, read late": "stream",
    "recording": "stream",
    "metrics page": "metrics",
    "Prometheus": "prometheus",
    "log": "log",
    "KV events": "kv-events",
}

_NAMES_NO_OWNER: Final[dict[KnownBy, str]] = {
    "metrics": "its metrics page has totals only",
    "prometheus": "Prometheus has totals only",
    "log": "its log has totals only",
    "kv-events": "its KV events name the contents of cached blocks, but not who holds them",
}
_HAS_NO_FIGURES: Final[dict[KnownBy, str]] = {"kv-events": "its KV events have no figures"}


class OutputNeed(NamedTuple):
    """Where an answer is shown, what it is of, what it needs, and why each source without data has none."""

    shown_in: str
    what: str = ""
    needs: str = ""
    lacking: Mapping[KnownBy, str] = {}


def _by_stream(shown_in: str, what: str) -> OutputNeed:
    return OutputNeed(shown_in, what, "the event stream", _NAMES_NO_OWNER)


def _by_figures(shown_in: str, what: str) -> OutputNeed:
    return OutputNeed(shown_in, what, "the metrics page, the log or the event stream", _HAS_NO_FIGURES)


OUTPUTS: Final[dict[str, OutputNeed]] = {
    "engines": OutputNeed("Overview, Configuration, `monitor top`, `kvscope_engine_…`"),
    "findings": OutputNeed("Findings, `monitor doctor`, alerts, `kvscope_findings`"),
    "history": OutputNeed("Configuration"),
    "points": _by_figures("Timeline, CSV", "a timeline"),
    "explain": _by_figures("Timeline", "a summary"),
    "compare": _by_figures("Compare, `monitor diff`", "a comparison"),
    "plan": OutputNeed(
        "Planner, `monitor plan`",
        "a plan",
        "the number of blocks and their size, which a metrics page has in vllm:cache_config_info",
        {"kv-events": ""},
    ),
    "memory": OutputNeed(
        "Memory, `monitor explain memory`",
        "the memory of the device",
        "a MEMORY event of the probe, or the lines in the engine's log",
        {"metrics": "", "prometheus": "", "kv-events": ""},
    ),
    "requests": _by_stream("Requests", "a list of requests"),
    "request": _by_stream("Request, `monitor explain request`", "a list of requests"),
    "find_request": _by_stream("Search", "a list of requests"),
    "block_map": _by_stream("Blocks", "a map of the blocks"),
    "block_colours": _by_stream("Blocks", "a map of the blocks"),
    "block": _by_stream("Block, `monitor explain block`", "a map of the blocks"),
    "events": _by_stream("Blocks, `monitor explain event`", "a list of events"),
    "retained_blocks": _by_stream("Retained blocks", "who holds blocks"),
    "prefix_cache": _by_stream("Prefix cache", "the tree of prefixes"),
    "usage_drop": _by_stream("`monitor explain drop`", "why usage fell"),
    "trace": _by_stream("`monitor export`, `monitor replay`", "a file of every event"),
}

FAMILIES_WITHOUT_STREAM: Final = frozenset(
    f"kvscope_{name}"
    for name in (
        "engine_info",
        "engine_last_heard_timestamp_seconds",
        "engine_restarts_total",
        "engine_status",
        "findings",
        "output_tokens_total",
        "pool_full_seconds",
        "pool_usage_ratio",
        "preemptions_total",
        "prefix_cache_hit_tokens_total",
        "prefix_cache_queried_tokens_total",
        "requests",
        "steps_total",
    )
)
"""The families of an engine that is known by a metrics page."""
FAMILIES_NEED: Final = (
    ("kvscope_alerts_", "needs a receiver of alerts"),
    ("kvscope_otlp_", "needs an OpenTelemetry collector"),
    ("kvscope_gpu_", "needs a GPU"),
    ("kvscope_source_lag_", "needs an event stream"),
    ("kvscope_source_batches_", "needs an event stream"),
    ("kvscope_source_", ""),
    ("kvscope_", "needs an event stream"),
)
"""What other families need, by how they begin. A panel says it: it is of many engines, so it names no source."""


def families_need(families: Iterable[str]) -> str:
    """Return what these families need that a service has not always, or an empty string."""
    for name in families:
        need = next((need for prefix, need in FAMILIES_NEED if name.startswith(prefix)), "")
        if need and name not in FAMILIES_WITHOUT_STREAM:
            return need
    return ""


def need_of(output: str) -> str:
    """Return what an output needs, in words."""
    return f"{OUTPUTS[output].what} needs {OUTPUTS[output].needs}"


def reason(output: str, seen: KnownBy) -> str:
    """Return why an output has no data of an engine that is known so, or an empty string where it has."""
    lacking = OUTPUTS[output].lacking
    return ": ".join(filter(None, (need_of(output), lacking[seen]))) if seen in lacking else ""


def known_by(ledger: EngineLedger) -> KnownBy | None:
    """Return by what an engine is known: the surest, or None as long as nothing was received."""
    if ledger.has_stream:
        return "stream"
    if ledger.samples:
        sources: dict[str, KnownBy] = {"log": "log", "prometheus": "prometheus"}
        return sources.get(ledger.samples[-1].source, "metrics")
    return "kv-events" if ledger.prefixes.stored or ledger.prefixes.removed else None


def require(ledger: EngineLedger, output: str) -> None:
    """Raise NotKnown, with the reason, if the output has no data of this engine."""
    seen = known_by(ledger)
    if seen is not None and (why := reason(output, seen)):
        raise NotKnown(f"{ledger.engine}: {why}")
