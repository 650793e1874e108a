"""A read-only view of one engine's ledger: what a detector of another distribution reads.

The ledger's own columns may change with any release. These names change only as docs/python-api.md promises. Everything
returned is a copy or immutable, so that a detector cannot change what others judge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from kvscope.monitor.events.kinds import Cause, Status, name_of
from kvscope.monitor.events.samples import Fact, Sample
from kvscope.monitor.ledger.balance import Balance
from kvscope.monitor.ledger.engine_ledger import EngineLedger, Point
from kvscope.monitor.state.records import RequestState


class RequestSnapshot(msgspec.Struct, frozen=True):
    """One request. `state` and `waits_for` are the contract's names (Status and Cause). `for_s`: in this state so far.

    Times are wall ns, 0 where they are not known or have not come.
    """

    id: str
    number: int
    state: str
    waits_for: str
    for_s: float
    arrived_ns: int
    finished_ns: int
    blocks: tuple[int, ...]
    blocks_needed: int
    prompt_tokens: int
    max_tokens: int
    computed_tokens: int
    output_tokens: int
    preemptions: int


class EngineSnapshot:
    """One engine as its ledger has it now. Times are wall ns. Values that the engine does not report are None or
    empty.
    """

    def __init__(self, ledger: EngineLedger) -> None:
        self._ledger = ledger

    @property
    def engine(self) -> str:
        """The engine's name."""
        return self._ledger.engine

    @property
    def has_stream(self) -> bool:
        """Whether it has an event stream. Without one, only `samples` and `facts` have anything."""
        return self._ledger.has_stream

    @property
    def now_ns(self) -> int:
        """The latest time that the engine's records have shown."""
        return self._ledger.now_ns

    @property
    def epoch(self) -> int:
        """The epoch of the stream: it changes with each restart of the engine."""
        return self._ledger.epoch

    @property
    def position(self) -> str:
        """The position in the stream (epoch/sequence/event), for a judgement or its evidence."""
        return str(self._ledger.position())

    @property
    def step(self) -> int | None:
        """The last step of the scheduler."""
        return self._ledger.state.last_step

    @property
    def is_uncertain(self) -> bool:
        """Whether events were lost and no audit has confirmed the state since."""
        return bool(self._ledger.uncertain_since_ns)

    @property
    def balance(self) -> Balance:
        """The pool, in blocks: free, cached, held by running, waiting and finished requests, reserved, UNACCOUNTED."""
        return self._ledger.balance()

    @property
    def configuration(self) -> Mapping[str, object]:
        """The engine's report about itself at its start: model, block_size, max_num_seqs and more."""
        return MappingProxyType(msgspec.to_builtins(self._ledger.description))

    @property
    def requests(self) -> Sequence[RequestSnapshot]:
        """The requests that are active or hold blocks, in order of arrival."""
        return tuple(self._request(record) for record in self._ledger.state.requests.values())

    @property
    def waiting_by_cause(self) -> Mapping[str, int]:
        """How many requests wait, by the contract's name of what they wait for."""
        counts = self._ledger.waiting_by_cause()
        return MappingProxyType({name_of(Cause, cause): count for cause, count in counts.items()})

    @property
    def points(self) -> Sequence[Point]:
        """The pool and the queues over the last minutes, oldest first."""
        return tuple(self._ledger.points)

    @property
    def samples(self) -> Sequence[Sample]:
        """Metrics over time, of an engine that is known from its metrics page or its log, oldest first."""
        return tuple(self._ledger.samples)

    @property
    def facts(self) -> Mapping[str, Fact]:
        """Facts that the engine reported once, in its log or on its metrics page, by name."""
        return MappingProxyType(dict(self._ledger.facts))

    def request(self, id: str) -> RequestSnapshot | None:
        """Return one request by its id or `#number`, or None if there is none."""
        record = self._ledger.request(id)
        return self._request(record) if record is not None else None

    def references(self, block: int) -> int:
        """Return how many references a block has. Raises IndexError for a block that the pool does not have."""
        references = self._ledger.state.refs
        if not 0 <= block < len(references):
            raise IndexError(f"there is no block {block}: the pool has {len(references)}")
        return references[block]

    def _request(self, record: RequestState) -> RequestSnapshot:
        ledger = self._ledger
        cause = ledger.cause_of_wait(record)
        return RequestSnapshot(
            id=record.id,
            number=record.number,
            state=name_of(Status, record.status),
            waits_for="" if cause == Cause.NONE else cause.name,
            for_s=ledger.age_s(record.since_ns),
            arrived_ns=ledger.wall(record.arrived_ns),
            finished_ns=ledger.wall(record.finished_ns),
            blocks=tuple(record.blocks),
            blocks_needed=record.blocks_needed,
            prompt_tokens=record.prompt_tokens,
            max_tokens=record.max_tokens,
            computed_tokens=record.computed_tokens,
            output_tokens=record.output_tokens,
            preemptions=record.preemptions,
        )
