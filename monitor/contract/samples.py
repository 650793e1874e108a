"""The data of an engine that does not speak the contract: metrics at one time, facts, reported events and KV events.

A source makes them of a line of a log or of a metrics page. Missing values are None, never 0. KV events are what an
engine publishes of its prefix cache: which contents it keeps, and nothing of who uses them.

In a journal each is a payload beside the frames of an event stream: `K V major minor letter` and msgpack, as a frame
is, so that a reader of frames skips it as a frame type that is newer than the reader.
"""

from __future__ import annotations

from typing import Final

import msgspec

from .wire import MAGIC, MAJOR, MINOR, PREFIX, Frame

DurationCount = tuple[float, float, int]
"""So many requests took longer than the first number of seconds, and at most the second."""


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """An engine's figures at one moment. `at_ns` is wall time, None if the line had no stamp.

    `usage` is the share of the pool that is referenced, 0 to 1: of the fullest, if there are several. Throughputs are
    tokens per second since the sample before. `source` is where it was read: log, metrics (a page) or prometheus (a
    server's history).
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
    prompt_tokens: int | None = None
    """Since the engine started, counted when a prompt's first token is out."""
    process_cpu_s: float | None = None
    """CPU time of the process that serves the page: of the front end, and of the engine where it is the same process.
    An answer costs some, so that a page which repeats it is a copy.
    """
    external_queries: int | None = None
    """Tokens looked up in caches outside the pool (another engine, an outer tier), which the pool's own cache lacked,
    and those of them that were there, since the engine started.
    """
    external_hits: int | None = None
    fetching: int | None = None
    """Requests whose KV is being fetched from elsewhere."""
    failed_transfers: int | None = None
    """Transfers of KV that failed, leases on the blocks of finished requests that expired before a consumer had read
    them, and reads whose notification came after such an end, since the engine started.
    """
    expired_leases: int | None = None
    late_reads: int | None = None
    tier_refusals: int | None = None
    """Allocations in an outer tier that failed, and bytes stored there and loaded, since the engine started."""
    tier_stored_bytes: int | None = None
    tier_loaded_bytes: int | None = None
    kv_pool_usage: float | None = None
    """Where an engine has several pools (SGLang), the share in use of each: of the KV of full attention, of sliding
    windows, and of Mamba states. `usage` is that of the fullest.
    """
    window_pool_usage: float | None = None
    state_pool_usage: float | None = None

    @property
    def shown_usage(self) -> float | None:
        """The usage of the KV pool itself, whatever other pools there are."""
        return self.usage if self.kv_pool_usage is None else self.kv_pool_usage


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


Observed = Sample | Fact | KvEvents | ReportedEvent
"""The records of a source without an event stream."""
OBSERVED_LETTERS: Final[dict[type[Observed], str]] = {Sample: "S", Fact: "F", KvEvents: "E", ReportedEvent: "R"}
OBSERVED_DECODERS: Final[dict[str, msgspec.msgpack.Decoder[Observed]]] = {
    letter: msgspec.msgpack.Decoder(cls) for cls, letter in OBSERVED_LETTERS.items()
}


def journal_payload(letter: str, body: bytes) -> bytes:
    """Return the payload of a journal record that is not a frame."""
    return MAGIC + bytes((MAJOR, MINOR)) + letter.encode() + body


def encode_observed(record: Observed) -> bytes:
    """Return a record as the payload of a journal."""
    return journal_payload(OBSERVED_LETTERS[type(record)], msgspec.msgpack.encode(record))


def decode_observed(payload: bytes) -> Observed | None:
    """Return the record in a journal's payload, or None for a frame and for anything that is damaged."""
    if len(payload) < PREFIX or payload[:2] != MAGIC or payload[2] > MAJOR:
        return None
    decoder = OBSERVED_DECODERS.get(chr(payload[PREFIX - 1]))
    try:
        return decoder.decode(payload[PREFIX:]) if decoder is not None else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
