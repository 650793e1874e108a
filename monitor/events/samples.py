"""The data of an engine that does not speak the contract: metrics at one time, and facts.

A source makes them of a line of a log or of a metrics page. Missing values are None, never 0. KV events are what an
engine publishes of its prefix cache: which contents it keeps, and nothing of who uses them.
"""

from __future__ import annotations

import msgspec

from kvscope.monitor.events.wire import Frame

DurationCount = tuple[float, float, int]
"""So many requests took longer than the first number of seconds, and at most the second."""


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """An engine's figures at one moment. `at_ns` is wall time, None if the line had no stamp.

    `usage` is the share of the pool that is referenced, 0 to 1. Throughputs are tokens per second since the sample
    before. `source` is where it was read: log, metrics (a page) or prometheus (a server's history).
    """

    engine: str
    position: str
    at_ns: int | None = None
    running: int | None = None
    waiting: int | None = None
    usage: float | None = None
    prompt_tokens_per_s: float | None = None
    generation_tokens_per_s: float | None = None
    prefix_hit_rate: float | None = None
    preemptions: int | None = None
    deferred: int | None = None
    """Requests among `waiting` that wait for something other than room: a grammar, or KV from elsewhere."""
    awake: bool | None = None
    """False while the engine sleeps on request: nothing runs then, by intention."""
    steps: int | None = None
    """Completed since the engine started. The same holds for requests answered to their end, requests that were aborted
    or failed, and tokens generated.
    """
    finished: int | None = None
    generation_tokens: int | None = None
    restarted: bool = False
    """A counter went back since the sample before: the engine restarted, and its past is over."""
    source: str = "log"
    aborted: int | None = None
    measured_requests: int | None = None
    """Requests whose lengths an engine has summed up: tokens of their prompts, tokens generated for them."""
    request_prompt_tokens: int | None = None
    request_output_tokens: int | None = None
    prefix_queries: int | None = None
    """Tokens looked up in the prefix cache, and those of them that it had, since the engine started."""
    prefix_hits: int | None = None
    first_token_s: tuple[DurationCount, ...] | None = None
    """Requests since the sample before, by the time from their arrival to their first token, and by their time in the
    queue.
    """
    queue_s: tuple[DurationCount, ...] | None = None


class Fact(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something an engine reported once: its version, its pool, a warning (kvscope.monitor.sources.engine_log has the
    names).
    """

    engine: str
    position: str
    name: str
    value: int | float | str
    at_ns: int | None = None


class ReportedEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of a log, or a phrase of a report, that bears on KV memory.

    `name` is its class (kvscope.monitor.sources.log_patterns and kvscope.monitor.sources.report_phrases have them),
    `fields` are the numbers in it, and `quote` is the part of the text that matched. `at_ns` is wall time, None if the
    line has no stamp.
    """

    engine: str
    position: str
    name: str
    fields: dict[str, int | float | str] = {}
    quote: str = ""
    at_ns: int | None = None
    is_stated: bool = msgspec.field(default=False, name="told")
    """A sentence mentions it, and the engine's own line is not in the text."""


class KvEvent(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Blocks that an engine began or ceased to keep for their prefix: `what` is stored, removed or cleared (all).

    `hashes` name the blocks' contents, `parent` the content before the first of them (None: it begins a prompt), and
    `group` is the KV group. The tokens themselves are not kept.
    """

    what: str
    hashes: list[int | bytes] = []
    parent: int | bytes | None = None
    group: int = 0


class KvEvents(msgspec.Struct, frozen=True, omit_defaults=True):
    """KV events of one step, in their order.

    `lost`: so many batches before this one never came. `restarted`: the engine's count began again at 0.
    """

    engine: str
    position: str
    at_ns: int
    events: list[KvEvent]
    lost: int = 0
    restarted: bool = False


Record = Frame | Sample | Fact | ReportedEvent | KvEvents
"""Everything that a source can bring."""
