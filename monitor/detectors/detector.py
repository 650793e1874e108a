"""The base class of detectors, one class for each finding code, and what a detector declares and returns.

A detector is a class in a module of a family's folder. The registry finds it there and derives the catalogue, the
thresholds, cause and effect, the reference page and the Prometheus rules from its attributes. docs/write-a-detector.md
shows one, and how another distribution brings its own.

Threshold     a number that a detector compares with; Settings are the values in force
SampleNeed    from how many samples, and over how long, it can decide where metrics are all there is
Causes        the effects that its findings may have, each with a tie: what must hold for one finding to be the effect
              of another in the same engine
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources.abc import Traversable
from typing import Any, ClassVar, Final, Generic, Literal, NamedTuple, TypeVar, Unpack, get_args

from ..base.text import counted, duration
from ..ledger.engine_ledger import EngineLedger
from .judgement import Alternative, HoldsBlocks, Judgement, Severity, ShortOfBlocks, Unless, Verdict
from .measured_harm import GradedT, verdict_of
from .runbook_files import FindingFields, with_advice


class Threshold:
    """A number that a detector compares with: its default, its unit, and the reason for the default.

    An attribute of the detector that it belongs to, which gives it its name: `leak.finished-held.grace_s`, as `--set
    CODE.NAME=VALUE` takes it. Several detectors' shared code may hold the object. One class owns it.
    """

    def __init__(self, value: float, unit: str, reason: str) -> None:
        self.value = value
        self.unit = unit
        self.reason = reason
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        """Take the name from the class and the attribute."""
        self.name = f"{getattr(owner, 'code', '')}.{name}"

    def __repr__(self) -> str:
        return f"{self.name}={self.value:g} {self.unit}"


class Settings:
    """The thresholds in force: every threshold's default, and the values that were set instead, by full name."""

    def __init__(self, changed: Mapping[str, float] | None = None) -> None:
        self._changed = dict(changed or {})

    def __call__(self, threshold: Threshold) -> float:
        """Return the value in force."""
        return self._changed.get(threshold.name, threshold.value)


class SampleNeed(NamedTuple):
    """The least that a rule decides from.

    samples: the fewest. seconds: the time that they must span (None: any). what: the state of the engine that has to
    show in all of them. longest_interval_s: samples further apart than this decide nothing (None: any distance).
    """

    samples: int
    seconds: Threshold | None
    what: str
    longest_interval_s: Threshold | None = None

    def decides_after_s(self, interval_s: float, settings: Settings | None = None) -> float:
        """Return how long the state must last at one sample each `interval_s` seconds, or infinity if it never
        decides.
        """
        values = settings or Settings()
        if self.longest_interval_s is not None and interval_s > values(self.longest_interval_s):
            return math.inf
        spanned = values(self.seconds) if self.seconds is not None else 0.0
        return max(self.samples - 1, math.ceil(spanned / interval_s)) * interval_s

    def text(self, settings: Settings, interval_s: float) -> str:
        """Return the need as a sentence for a finding that is not decided."""
        span = f" over {duration(settings(self.seconds))} or more" if self.seconds is not None else ""
        least = f"This rule decides from {counted(self.samples, 'sample')}{span}"
        after_s = self.decides_after_s(interval_s, settings) if interval_s > 0 else math.inf
        return (
            least
            if after_s == math.inf
            else f"{least}, so after {duration(after_s)} at one sample each {duration(interval_s)}"
        )


Signal = Literal["stream", "metrics", "log", "kv-events", "report"]
"""A kind of evidence: the event stream, a metrics page or Prometheus, the engine's log, KV events, a bug report."""
SIGNALS: Final[tuple[Signal, ...]] = get_args(Signal)


class Known(NamedTuple):
    """What is known of an engine, by which it is decided which detectors have something to read.

    stream: its state, from its event stream. lost: batches of that were lost. samples: the signal that brought the last
    one, empty if there is none. kv_events: some were stored. lines: facts and events from a text.
    """

    stream: bool
    lost: bool
    samples: Literal["", "metrics", "log"]
    kv_events: bool
    lines: bool

    @property
    def signals(self) -> frozenset[Signal]:
        """Return the kinds of evidence."""
        found: set[Signal] = set()
        if self.stream or self.lost:
            found.add("stream")
        if self.samples:
            found.add(self.samples)
        if self.kv_events:
            found.add("kv-events")
        if self.lines:
            found.update(("log", "report"))
        return frozenset(found)


def known_of(ledger: EngineLedger) -> Known:
    """Return what the ledger has."""
    samples = ledger.samples
    return Known(
        stream=ledger.has_stream,
        lost=bool(ledger.losses),
        samples=("log" if samples[-1].source == "log" else "metrics") if samples else "",
        kv_events=bool(ledger.prefixes.stored),
        lines=bool(ledger.facts or ledger.reported),
    )


CauseT = TypeVar("CauseT", bound=Judgement)
EffectT = TypeVar("EffectT", bound=Judgement)
JudgementT = TypeVar("JudgementT", bound=Judgement)


class CanCause(NamedTuple):
    """An effect that a finding may have, and the tie: whether one judgement is the effect of the other."""

    effect: type[Detector[Any]]
    tie: Callable[[Any, Any], bool]


class Causes(Generic[CauseT]):
    """The effects that findings of one code may have, each with what ties them. Typed: a tie reads attributes of the
    judgements that both detectors declare to return, so that renaming one is a type error.
    """

    def __init__(self, effects: Sequence[CanCause] = ()) -> None:
        self.effects = tuple(effects)

    def of(self, effect: type[Detector[EffectT]], tie: Callable[[CauseT, EffectT], bool]) -> Causes[CauseT]:
        """Return these and one more."""
        return Causes((*self.effects, CanCause(effect, tie)))


class Detector(Generic[JudgementT]):
    """One finding code from one source of evidence: what it is called, what it needs, and how it is found.

    The docstring of a detector is its page: what it *Sees*, when it is *Confirmed* or *Likely*, and *Not when*: what
    looks the same, each with its own code.

    code: `family.name`, or `vendor.name` of a plug-in. requires: any one of these signals is enough. runbook: Markdown,
    or the resource that has it. kvscope's own codes have theirs in docs/runbooks. Its bullets under *Do now*, *Change*
    and *What will not help* are the advice of a finding. sample_need: the least samples to decide from metrics alone,
    if it can. Thresholds are attributes of type Threshold.

    A detector has no state: `detect` reads the ledger, which it must not change, and yields what is wrong now, each
    made by `finding`, `holding` or `short_of_blocks`. Pending periods over time, resolving and merging belong to
    kvscope.monitor.detectors.findings.
    """

    code: ClassVar[str] = ""
    severity: ClassVar[Severity]
    title: ClassVar[str]
    requires: ClassVar[tuple[Signal, ...]]
    runbook: ClassVar[str | Traversable] = ""
    alternatives: ClassVar[tuple[Alternative | Unless, ...]] = ()
    settles_s: ClassVar[float] = 0.0
    """How long a finding lasts without a judgement, where what is measured hovers about a threshold."""
    recurs: ClassVar[bool] = False
    """Whether it is about events that recur: evidence and requests are those of the last one."""
    counts_events: ClassVar[bool] = False
    """Whether it counts the events of a window: those before its cause ended are the cause's effects for good."""
    moves_kv: ClassVar[Literal["", "send", "fetch"]] = ""
    """Whether it is about KV that waits to be sent to another engine, or fetched from one."""
    lab_only: ClassVar[bool] = False
    """Whether kvscope's own engine has shown it, and no vLLM so far."""
    outlasts_epoch: ClassVar[bool] = False
    """Whether it is about the observer, so that a restart or the silence of the engine changes nothing for it."""
    sample_need: ClassVar[SampleNeed | None] = None
    thresholds: ClassVar[Mapping[str, Threshold]] = {}
    """By attribute name, derived from the attributes."""
    causes: Causes[JudgementT] = Causes()
    """The effects that a finding of this code may have in the same engine."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Collect the thresholds."""
        super().__init_subclass__(**kwargs)
        own = {name: value for name, value in vars(cls).items() if isinstance(value, Threshold)}
        cls.thresholds = {**cls.thresholds, **own}

    def applies(self, known: Known) -> bool:
        """Whether a ledger that has this has what `detect` reads."""
        return not known.signals.isdisjoint(self.requires)

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[JudgementT]:
        """Yield a judgement for each problem of this code in the engine now. `ledger.siblings` are the other
        data-parallel ranks of its server.
        """
        raise NotImplementedError

    def finding(self, ledger: EngineLedger, **fields: Unpack[FindingFields]) -> Judgement:
        """Return a judgement of this code about the engine. Unless `fields` have a verdict, it is confirmed, or likely
        if a signal is `missing`. Its advice is that of the runbook, under the heading `case` if there is one, with
        `numbers` in place of the phrases that they name.
        """
        return self._made(Judgement, ledger, fields)

    def holding(
        self, ledger: EngineLedger, share_of_pool: float | None, **fields: Unpack[FindingFields]
    ) -> HoldsBlocks:
        """Return the same about blocks that are held and do not return."""
        return self._made(HoldsBlocks, ledger, fields, share_of_pool=share_of_pool)

    def short_of_blocks(
        self, ledger: EngineLedger, blocks_needed: int, blocks_free_for_it: int, **fields: Unpack[FindingFields]
    ) -> ShortOfBlocks:
        """Return the same about a request that needs more blocks than are free for it."""
        needs = {"blocks_needed": blocks_needed, "blocks_free_for_it": blocks_free_for_it}
        return self._made(ShortOfBlocks, ledger, fields, **needs)

    def _made(self, kind: type[GradedT], ledger: EngineLedger, fields: FindingFields, **typed: float | None) -> GradedT:
        verdict = "likely" if fields.get("missing") else "confirmed"
        own: dict[str, Any] = {"verdict": verdict, **with_advice(self.runbook or self.code, fields), **typed}
        return verdict_of(ledger, kind(self.code, ledger.engine, **own), self.severity, self.alternatives)


class StreamDetector(Detector[JudgementT]):
    """A code, or a part of one, that the event stream shows."""

    requires: ClassVar[tuple[Signal, ...]] = ("stream",)

    def applies(self, known: Known) -> bool:
        """Whether the engine's state is known from its event stream."""
        return known.stream


class FromSamples:
    """Mixed into the detector of a code: finds it from metrics or a log, for an engine without an event stream."""

    requires: ClassVar[tuple[Signal, ...]] = ("metrics", "log")

    def applies(self, known: Known) -> bool:
        """Whether there are samples, and no event stream."""
        return not known.stream and bool(known.samples) and not known.signals.isdisjoint(self.requires)


class FromMetrics(FromSamples):
    """The same without the statistics in a log."""

    requires: ClassVar[tuple[Signal, ...]] = ("metrics",)


class FromLog:
    """Mixed into the detector of a code: finds it from the facts of a log or a report, without an event stream."""

    requires: ClassVar[tuple[Signal, ...]] = ("log", "report")

    def applies(self, known: Known) -> bool:
        """Whether there are lines, and no event stream."""
        return known.lines and not known.stream


class FromKvEvents:
    """Mixed into the detector of a code: finds it from KV events."""

    requires: ClassVar[tuple[Signal, ...]] = ("kv-events",)

    def applies(self, known: Known) -> bool:
        """Whether there are KV events."""
        return known.kv_events


RULE: Final = ("Sees", "Confirmed when", "Likely when", "Cannot tell", "Not when")
"""The sections of a detector's docstring, in this order. docs/codes.md is made from them."""


def rule_of(detector: type[Detector[Any]]) -> dict[str, str]:
    """Return the sections of its own docstring, one line each."""
    parts = re.split(rf"^({'|'.join(RULE)}): ", inspect.cleandoc(detector.__doc__ or ""), flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in zip(parts[::2], parts[1::2], strict=True)}


def surest_verdict(detector: type[Detector[Any]]) -> Verdict:
    """Return the surest verdict that its docstring has a section for."""
    rule = rule_of(detector)
    return "confirmed" if "Confirmed when" in rule else "likely" if "Likely when" in rule else "cannot-tell"
