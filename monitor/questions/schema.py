"""Answers about engines, as plain structures: the results of kvscope.monitor.questions.query, and the API's JSON.

Times are RFC 3339 (None: not known), ages in seconds. Values that a source does not expose are None, never 0.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from ..detectors.findings import FindingReport, severity_at_least
from ..detectors.findings import FindingState as FindingState
from ..detectors.judgement import Severity, Verdict
from ..ledger.balance import Balance
from ..ledger.prefix_tree import EvictionView as EvictionView
from ..ledger.prefix_tree import PrefixCacheView as PrefixCacheView
from ..ledger.prefix_tree import PrefixNode as PrefixNode
from ..ledger.request_latency import LatencyView as LatencyView
from ..ledger.request_latency import PointView as PointView
from ..ledger.request_latency import SlowView as SlowView
from ..ledger.retained_blocks import IdleFloorView as IdleFloorView
from ..ledger.retained_blocks import LifetimeBucket as LifetimeBucket
from ..ledger.retained_blocks import RetainedBlocksView as RetainedBlocksView
from ..ledger.retained_blocks import RetainedGroup as RetainedGroup
from ..ledger.wait_graph import Wait as Wait
from ..planning.plan_types import CapacityPlan as CapacityPlan
from ..planning.plan_types import PlanInput as PlanInput

SCHEMA_VERSION: Final = "2"
"""The version of all JSON: the reports of doctor, diff and memory, and the answers of the API."""

BLOCK_STATES = ("free", "cached-idle", "running", "waiting", "finished", "reserved", "UNACCOUNTED")
"""The states of a block, in the order of the numbers that a block map uses."""
PART_LABELS = {"cached_idle": "cached-idle", "finished": "finished, held", "unaccounted": "UNACCOUNTED"}
"""What every output calls the parts of a Balance whose name is no word."""


class EngineView(msgspec.Struct, frozen=True):
    """One engine at a glance."""

    engine: str
    model: str
    version: str
    signal: Literal["stream", "metrics"]
    status: Literal["serving", "degraded", "slow", "idle", "paused", "stuck", "silent", "stopped", "gone", "unknown"]
    """degraded: it serves, with an open finding of *warning* or above, so that somebody suffers. slow: for five
    minutes, half of the requests have waited far longer for their first token than they used to. stuck: requests run
    or wait, and no token is computed. unknown: its reader is down, or nothing is exposed.
    """
    at: str | None
    last_seen_s_ago: float
    epoch: int
    restarts: int
    step: int | None
    running: int | None
    waiting: int | None
    waiting_by_reason: dict[str, int]
    usage: float | None
    balance: Balance | None
    output_tokens_per_s: float | None
    computed_tokens_per_s: float | None
    preemptions: int | None
    prefix_hit_rate: float | None
    batches_lost: int
    events_dropped: int
    uncertain_since: str | None
    faults: list[str]
    configuration: dict[str, Any]
    findings: dict[str, int]
    memory: dict[str, int] = {}
    """Bytes, by the names of the MEMORY event, and `elsewhere`, without unknown values."""
    status_since: str | None = None
    status_findings: list[str] = []
    """Codes of the open findings that say why it is degraded, slow or stuck. Without one it is said to be serving."""
    position: str | None = None
    """Epoch and sequence of the last batch that counts here: `at` takes it."""
    first_token: LatencyView | None = None
    """Requests of the last five minutes: from arrival to the first token."""
    queue_time: LatencyView | None = None
    """The same from arrival to the first admission."""
    slow: SlowView | None = None
    """While it is slow: what clients wait, and what is usual of this engine."""
    known_by: Literal["stream", "metrics", "prometheus", "log", "kv-events"] = "stream"
    """The surest of its sources."""


class RequestView(msgspec.Struct, frozen=True):
    """One request. `blocks`: all that it holds."""

    id: str
    number: int
    state: str
    reason: str
    since: str | None
    for_s: float
    arrived: str | None
    blocks: int
    prompt_tokens: int
    max_tokens: int
    computed_tokens: int
    output_tokens: int
    hit_tokens: int
    preemptions: int
    tokens_lost: int
    blocks_needed: int
    deferred: bool
    client_gone: bool
    stalled: bool
    ended: bool
    waited_s: dict[str, float] = {}
    """Until now, by reason."""
    shared_blocks: int = 0
    """Of its blocks, those that other requests hold too."""
    counted_blocks: int = 0
    """Of its blocks, those that count under it where each block of the pool counts once."""


class FoundRequest(msgspec.Struct, frozen=True):
    """A request whose id matches. `state` is empty where only the history has it. `request` shows it `at` (or now)."""

    engine: str
    id: str
    number: int
    epoch: int
    state: str
    ended: bool
    first_seen: str | None
    at: str = ""


class RequestSearch(msgspec.Struct, frozen=True):
    """The latest first. Not complete: more than the limit, or out of time once it had `searched_since` then."""

    requests: list[FoundRequest]
    searched_since: str | None
    is_complete: bool


class EventHistoryEntry(msgspec.Struct, frozen=True):
    """One line of a story."""

    at: str | None
    kind: str
    text: str
    position: str


class PhaseView(msgspec.Struct, frozen=True):
    """One state of a request for one reason: how long, blocks and tokens at its end, and what it cost. `recomputed` of
    the tokens computed in it had been computed before.
    """

    state: str
    reason: str
    since: str | None
    for_s: float
    blocks: int
    computed_tokens: int
    output_tokens: int
    phase_tokens: int
    recomputed_tokens: int


class ConditionView(msgspec.Struct, frozen=True):
    """Whether something is so of a request, since when, and why."""

    name: str
    holds: bool
    since: str | None
    reason: str


class RequestDetail(msgspec.Struct, frozen=True):
    """One request and its phases. `waits`: its waits now, down to the roots (None if it does not wait).
    `unused_tokens`: how many more its blocks have room for (None where KV groups differ in what they keep).
    """

    engine: str
    request: RequestView
    blocks: list[int]
    waited_s: dict[str, float]
    event_history: list[EventHistoryEntry]
    event_history_complete: bool
    phases: list[PhaseView] = []
    conditions: list[ConditionView] = []
    waits: Wait | None = None
    unused_tokens: int | None = None


class BlockDetail(msgspec.Struct, frozen=True):
    """One block: its state, its owners (a chain for each reference, from the block to its reason), and its event
    history. `tokens`: how many of the computed ones it holds (None where KV groups differ in what they keep).
    """

    engine: str
    block: int
    state: str
    references: int
    owners: list[str]
    hashed: bool
    ownership_chains: list[list[str]]
    event_history: list[EventHistoryEntry]
    tokens: int | None = None


class BlockMap(msgspec.Struct, frozen=True):
    """Every block of a pool: `states` has a byte for each, an index into BLOCK_STATES."""

    engine: str
    at: str | None
    total: int
    states: bytes


Colouring = Literal["owner", "age", "references", "prefix"]
"""Properties that colour blocks, besides their state."""


class ColourKey(msgspec.Struct, frozen=True):
    """The meaning of a value of a colouring, how many usable blocks have it, and the share of the pool that these are.
    `request`: the owner, if it is one.
    """

    value: int
    label: str
    blocks: int
    share: float | None
    request: str = ""


class BlockColours(msgspec.Struct, frozen=True):
    """Every block of a pool by one of its properties: `values` has a byte for each, which `keys` explain. 0 is for
    blocks without it. The values of ages and references rise with them, and others stand for a few of many.
    """

    engine: str
    at: str | None
    by: Colouring
    total: int
    values: bytes
    keys: list[ColourKey]


class EventView(msgspec.Struct, frozen=True):
    """One event. `blocks` has the first of its `block_count` ids. `request` is empty where it is about none."""

    position: str
    at: str | None
    kind: str
    text: str
    request: str
    blocks: list[int]
    block_count: int


class ExplanationView(msgspec.Struct, frozen=True):
    """The events of a window, in sentences, and the findings that touch it."""

    engine: str
    since: str | None
    until: str | None
    sentences: list[str]
    findings: list[FindingReport]


class MemoryView(msgspec.Struct, frozen=True):
    """A device's memory in bytes. `known`: the engine's measurements, by name. `parts`: the device's memory by use,
    which add up to its total, empty where too little is known. `unnamed`: in use and on no line of the breakdown.
    """

    engine: str
    at: str | None
    measured: dict[str, int]
    parts: dict[str, int]
    unattributed: int | None
    kv_bytes_per_block: int
    block_size: int
    usable_blocks: int


class CalculatorView(msgspec.Struct, frozen=True):
    """The demand of that many requests of that length on the pool, each at its end.

    blocks_per_request   of all KV groups, 0 where the engine has not reported its block size
    bytes_per_request    None where the engine has not reported the size of a block
    max_concurrency      how many such requests fit at once, where `limited_by` names a lower bound than the pool
    notes                limits of the sum, and other obstacles, in sentences
    """

    engine: str
    prompt_tokens: int
    max_tokens: int
    concurrency: int
    block_size: int
    usable_blocks: int
    blocks_per_request: int
    bytes_per_request: int | None
    blocks_needed: int
    share: float | None
    fits: bool
    max_concurrency: int
    notes: list[str]


class EpochView(msgspec.Struct, frozen=True):
    """One epoch of an engine, as far as it is kept."""

    epoch: int
    since: str | None
    until: str | None


class GapView(msgspec.Struct, frozen=True):
    """A time without history: nothing of it was kept."""

    since: str | None
    until: str | None


class HistoryView(msgspec.Struct, frozen=True):
    """The history of an engine: its epochs and gaps, in memory after `in_memory_since`."""

    engine: str
    first: str | None
    last: str | None
    in_memory_since: str | None
    epochs: list[EpochView]
    gaps: list[GapView]


class FindingDetail(msgspec.Struct, frozen=True):
    """A finding, and what the pool and the queues were from before it began until it ended, or now."""

    finding: FindingReport
    points: list[PointView]


class SourceView(msgspec.Struct, frozen=True):
    """One source that the service reads."""

    target: str
    engine: str
    in_step: bool
    bad_frames: int
    filled_from: dict[str, int]
    error: str
    ended: bool = False
    """Whether that error ended the reading."""
    lag_s: float | None = None
    """The time from packing the last batch, by the engine's clock, until its arrival (None for a page)."""
    cpu_s: float = 0.0
    """Processor time that its reader took, bookkeeping and judging included."""
    kind: str = ""
    """The kind of source: stream, kv-events, metrics, prometheus, log, recording, or a plug-in's scheme."""
    engines: list[str] = []
    """Every engine that it brought. `engine` is the first."""
    failures: int = 0
    """Attempts to read that raised, and were repeated."""
    notes: list[str] = []


class SourceChange(msgspec.Struct, frozen=True):
    """A source that was added or removed while the service ran."""

    at: str
    change: str
    """added or removed."""
    target: str
    origin: str
    """By what: the configuration, a discovery, or a name that the caller gave."""
    engines: list[str]
    """Engines that left the ledgers with it. Their history stays."""


class DiscoveryView(msgspec.Struct, frozen=True, kw_only=True):
    """How a discovery is. A blind one keeps the last list that it had.

    targets: of the last list. leaving: targets that the list has no more, and that are still read for a while.
    listed_at: when the last list came, null before the first. error: why it is blind, or what it leaves out.
    """

    name: str
    targets: int = 0
    leaving: int = 0
    listed_at: str | None = None
    is_blind: bool = False
    error: str = ""


class WindowStats(msgspec.Struct, kw_only=True):
    """Statistics of one engine over a window of time. Times are RFC 3339, durations in seconds.

    source: the recording it is of, or empty where a service has answered. findings: those active in it. waits: by
    cause, how long each request waited that ended in the stretch or was there at its end. first_tokens: from arrival to
    the first token, of those whose first token was in it. counts: of its events. peak: the pool when most of it was in
    use (None if not known). peak_usage: the share in use then, from metrics. first_token, queue_time: percentiles, from
    metrics.
    """

    source: str
    since: str | None
    until: str | None
    seconds: float
    engine: str
    findings: list[FindingReport] = []
    waited_s: dict[str, list[float]] = {}
    time_to_first_token_s: list[float] = []
    counts: dict[str, int] = {}
    peak: Balance | None = None
    peak_at: str | None = None
    peak_usage: float | None = None
    first_token: LatencyView | None = None
    queue_time: LatencyView | None = None

    @property
    def computed_nothing(self) -> bool:
        """Whether no token was computed in it, as far as is known."""
        counts = [self.counts[name] for name in ("output_tokens", "computed_tokens") if name in self.counts]
        return bool(counts) and not any(counts)


MetricChange = Literal["better", "worse", "same", "differs", ""]


class MetricRow(msgspec.Struct, frozen=True):
    """One metric on both sides (None: not measurable). `change` is empty where one side is not known, and `differs`
    where neither direction is better. unit: s, /s, /min, or a share of 1.
    """

    name: str
    unit: str
    before: float | None
    after: float | None
    change: MetricChange


class FindingRow(msgspec.Struct, frozen=True):
    """A code that was found on either side, how often, and the requests that it named."""

    code: str
    title: str
    severity: Severity
    status: Literal["added", "removed", "unchanged"]
    before: int
    after: int
    verdict: Verdict
    requests: list[str]


class Diff(msgspec.Struct, frozen=True):
    """Two stretches compared. The second is compared with the first."""

    schema_version: str
    before: WindowStats
    after: WindowStats
    findings: list[FindingRow]
    metrics: list[MetricRow]

    @property
    def is_worse(self) -> bool:
        """Whether a finding of warning or above came."""
        return any(row.status == "added" and severity_at_least(row.severity, "warning") for row in self.findings)


DeliveryState = Literal["pending", "delivered", "given-up", "silenced", "damped", "disabled"]
"""pending: retried until delivery. given-up: refused for good, or at the last try. silenced: sent when the silence
ends, if it still fires then. damped: not sent, since it flaps. disabled: the receiver had answered that it is gone.
"""


class DeliveryView(msgspec.Struct, frozen=True):
    """One message to one receiver."""

    number: int
    id: str
    receiver: str
    kind: str
    alert: str
    engine: str
    code: str
    state: DeliveryState
    tries: int
    created_at: str
    due_at: str | None
    ended_at: str | None
    answer: str


class SilenceView(msgspec.Struct, frozen=True):
    """One silence."""

    number: int
    matchers: list[str]
    until: str
    comment: str


class NotificationsView(msgspec.Struct, frozen=True):
    """The notifications of one finding: messages to `receivers`, the latest first, and the silences that cover it.
    Without receivers, this service sends no notifications.
    """

    receivers: list[str] = []
    deliveries: list[DeliveryView] = []
    silences: list[SilenceView] = []


class ReceiverView(msgspec.Struct, frozen=True):
    """One receiver. `name` is made of its kind and a hash of its URL, which may be a secret."""

    name: str
    host: str
    pending: int
    paused_until: str | None
    disabled_at: str | None


class AlertView(msgspec.Struct, frozen=True):
    """An open alert: reported as firing, and not yet as resolved."""

    id: str
    engine: str
    code: str
    severity: str
    since: str | None
    flapping: bool
    explanation: str
    finding: str = ""
    """The id of the finding that fires."""


class ThresholdView(msgspec.Struct, frozen=True):
    """A threshold of the detectors: the value in force, and the default."""

    name: str
    value: float
    default: float
    unit: str
    reason: str


class AlertStateView(msgspec.Struct, frozen=True):
    """Alerts as a whole: receivers, open alerts, silences, the latest deliveries, and the thresholds in force. No
    receivers: this service sends no alerts.
    """

    receivers: list[ReceiverView] = []
    open: list[AlertView] = []
    silences: list[SilenceView] = []
    deliveries: list[DeliveryView] = []
    thresholds: list[ThresholdView] = []
