"""The base class of detectors: one class for each finding code.

A detector is a class in a module of a family's folder. The registry finds it there and derives the catalogue, the
thresholds, cause and effect, the reference page and the Prometheus rules from its attributes. docs/write-a-detector.md
shows one, and how another distribution brings its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources.abc import Traversable
from typing import Any, ClassVar, Final, Generic, Literal, NamedTuple, TypeVar, get_args

from kvscope.monitor.detectors.judgement import Judgement, Severity
from kvscope.monitor.detectors.sample_needs import SampleNeed
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.engine_snapshot import EngineSnapshot

Signal = Literal["stream", "metrics", "log", "kv-events", "report"]
"""A kind of evidence: the event stream, a metrics page or Prometheus, the engine's log, KV events, a bug report."""
SIGNALS: Final[tuple[Signal, ...]] = get_args(Signal)

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
    """One finding code: what it is called, what it needs, what it compares with, and how it is found.

    code: `family.name`, or `vendor.name` of a plug-in. requires: any one of these signals is enough. position: the
    place in the catalogue and in the order of detection. runbook: Markdown, or the resource that has it. kvscope's own
    codes have theirs in docs/runbooks.
    sample_need: the least samples to decide from metrics alone, if it can. Thresholds are attributes of type Threshold.

    A detector has no state: `detect` reads the ledger, which it must not change, and yields what is wrong now. Pending
    periods over time, resolving and merging belong to kvscope.monitor.findings.
    """

    code: ClassVar[str] = ""
    severity: ClassVar[Severity]
    title: ClassVar[str]
    requires: ClassVar[tuple[Signal, ...]]
    position: ClassVar[int] = 10_000
    runbook: ClassVar[str | Traversable] = ""
    sample_need: ClassVar[SampleNeed | None] = None
    thresholds: ClassVar[Mapping[str, Threshold]] = {}
    """By attribute name, derived from the attributes."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Collect the thresholds."""
        super().__init_subclass__(**kwargs)
        own = {name: value for name, value in vars(cls).items() if isinstance(value, Threshold)}
        cls.thresholds = {**cls.thresholds, **own}

    def causes(self) -> Causes[JudgementT]:
        """Return the effects that a finding of this code may have in the same engine."""
        return Causes()

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[JudgementT]:
        """Yield a judgement for each problem of this code in the engine now.

        A detector of another distribution overrides `inspect` instead: the ledger's columns may change with a release.
        """
        return self.inspect(EngineSnapshot(ledger), settings)

    def inspect(self, engine: EngineSnapshot, settings: Settings) -> Iterator[JudgementT]:
        """Yield the same from a read-only view of the engine, whose names are public."""
        raise NotImplementedError

    def detect_rank(
        self, ledger: EngineLedger, siblings: Sequence[EngineLedger], settings: Settings
    ) -> Iterator[JudgementT]:
        """Yield the same for an engine beside the other data-parallel ranks of its server. Override it to compare."""
        return self.detect(ledger, settings)


def signals_of(ledger: EngineLedger) -> frozenset[Signal]:
    """Return the kinds of evidence that the ledger has."""
    found: set[Signal] = set()
    if ledger.has_stream or ledger.losses:
        found.add("stream")
    if ledger.samples:
        found.add("log" if ledger.samples[-1].source == "log" else "metrics")
    if ledger.prefixes.stored:
        found.add("kv-events")
    if ledger.facts or ledger.reported:
        found.update(("log", "report"))
    return frozenset(found)
