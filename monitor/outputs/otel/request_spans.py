"""A request that ended, as a tree of spans: its phases, and the events in each.

    chat tiny                               the request, under the caller's span
    ├ front end                             until the scheduler had it
    ├ wait KV_BLOCKS                        a wait, by its reason
    ├ remote load                           KV that is fetched
    ├ prefill
    │ ├ chunk                               a step of it, if there were several
    │ └ chunk
    ├ decode
    ├ preempted                             until it is admitted again
    │ └ wait KV_BLOCKS
    ├ prefill                               its lost tokens are recomputed
    └ decode

gen_ai.* attributes are those of the GenAI conventions (https://github.com/open-telemetry/semantic-conventions-genai),
gen_ai.latency.* vLLM's. kvscope.* are ours.

Ids are derived from the request, and not drawn. So a finding and an exemplar can name the trace of a request that has
not ended yet, and a trace that is sent twice is the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, Final, NamedTuple

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from ...contract.kinds import FIRST_FINISHED, Cause, Kind, Load, Preempt, name_of
from ...contract.kinds import Status as RequestStatus
from ...ledger.event_history import HistoryLine, Phase, phases, request_history
from ...ledger.records import RequestState
from ...ledger.tally import SERVED
from ...questions.pipeline import EndedRequest
from .request_recorder import About, RecordedRequest

SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)


def root_of(engine: str, record: RequestState) -> SpanContext:
    """Return the root span of a request, in its caller's trace if it has come with one."""
    made = _digest(f"{engine}\n{record.id}\n{record.number}\n{record.arrived_ns or record.received_ns}")
    trace_id = record.trace.trace_id if record.trace is not None else int.from_bytes(made[:16])
    return SpanContext(trace_id, int.from_bytes(made[16:]), is_remote=False, trace_flags=SAMPLED)


def parent_of(record: RequestState) -> SpanContext | None:
    """Return the caller's span, or None without one."""
    if record.trace is None:
        return None
    return SpanContext(
        record.trace.trace_id, record.trace.span_id, is_remote=True, trace_flags=TraceFlags(record.trace.flags)
    )


def callers_of(ended: Iterable[EndedRequest]) -> list[tuple[EndedRequest, SpanContext]]:
    """Return the requests whose callers record their traces, and the callers' spans."""
    parents = ((one, parent_of(one.request)) for one in ended)
    return [(one, parent) for one, parent in parents if parent is not None and parent.trace_flags.sampled]


def child_of(parent: SpanContext, index: int) -> SpanContext:
    """Return the `index`-th span under a root."""
    made = _digest(f"{parent.trace_id:x}\n{parent.span_id:x}\n{index}")
    return SpanContext(parent.trace_id, int.from_bytes(made[16:]), is_remote=False, trace_flags=SAMPLED)


def _digest(text: str) -> bytes:
    """24 bytes: of a trace's id, and of a span's."""
    return hashlib.blake2b(text.encode(), digest_size=24).digest()


SCOPE: Final = InstrumentationScope("kvscope")
FINISH_REASONS: Final[Mapping[int, str]] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_IGNORED: "length",
    RequestStatus.FINISHED_ERROR: "error",
    RequestStatus.FINISHED_REPETITION: "repetition",
}
"""The reasons that vLLM reports to its clients."""

Attributes = dict[str, Any]


def spans_of(
    engine: str,
    provider: str,
    record: RequestState,
    wall_minus_mono_ns: int,
    recorded: RecordedRequest,
    why: str,
    resource: Resource,
) -> list[ReadableSpan]:
    """Return the trace of `record`, the root first. `provider`: the kind of engine. `why`: the reason to keep its
    trace.

    The list is empty if its beginning is unknown: a span with an invented start would be wrong.
    """
    began, ended = record.received_ns or record.arrived_ns, record.finished_ns
    if not began or not ended:
        return []
    began_ns, ended_ns = began + wall_minus_mono_ns, ended + wall_minus_mono_ns
    if recorded.about:  # by the clock that its phases have
        ended_ns = recorded.about[-1][1]
        began_ns = recorded.about[0][1] if recorded.is_whole else min(began_ns, recorded.about[0][1])
    phases_before_end = [
        phase for phase in phases(recorded.about, record.number, ended_ns) if phase.status < FIRST_FINISHED
    ]
    lines = [
        line for line in request_history(recorded.about, record.number, recorded.names) if line.what != "progressed"
    ]
    tree = _Tree(root_of(engine, record), resource)
    outside = [line for line in lines if not phases_before_end or line.at_ns >= phases_before_end[-1].until_ns]
    tree.add(
        f"{operation_of(record)} {engine.partition('@')[0]}",
        None,
        began_ns,
        ended_ns,
        outside,
        _root_attributes(engine, provider, record, recorded, why),
        parent_of(record),
        _span_status(record),
    )
    for status, group in groupby(phases_before_end, lambda phase: phase.status):
        _add_phases(tree, status, list(group), recorded.about, lines)
    return tree.spans


class _Tree:
    """Spans under one root, which is the first."""

    def __init__(self, root: SpanContext, resource: Resource) -> None:
        self.spans: list[ReadableSpan] = []
        self.root = root
        self._resource = resource

    def add(
        self,
        name: str,
        under: SpanContext | None,
        since_ns: int,
        until_ns: int,
        lines: Iterable[HistoryLine],
        attributes: Attributes,
        parent: SpanContext | None = None,
        status: Status | None = None,
    ) -> SpanContext:
        """Add a span under the span `under` of the tree. With None it adds the root, whose parent is elsewhere."""
        context = self.root if under is None else child_of(self.root, len(self.spans))
        self.spans.append(
            ReadableSpan(
                name,
                context,
                parent if under is None else under,
                self._resource,
                attributes,
                [Event(line.what, {"kvscope.text": line.text}, timestamp=line.at_ns) for line in lines],
                kind=SpanKind.SERVER if under is None else SpanKind.INTERNAL,
                status=status or Status(StatusCode.UNSET),
                start_time=since_ns,
                end_time=max(since_ns, until_ns),
                instrumentation_scope=SCOPE,
            )
        )
        return context


def _add_phases(
    tree: _Tree, status: int, group: Sequence[Phase], about: Sequence[About], lines: Sequence[HistoryLine]
) -> None:
    """Phases of one state in a row, each for another reason."""
    lasting = [phase for phase in group if phase.until_ns > phase.since_ns]
    if status == RequestStatus.PREEMPTED:
        first, last = group[0], group[-1]
        attributes = _preemption(about, first.since_ns)
        inside = tree.add("preempted", tree.root, first.since_ns, last.until_ns, (), attributes)
        for phase in lasting:
            _add_wait(tree, inside, phase, lines)
        return
    for phase in lasting:
        if status == RequestStatus.RUNNING and phase.cause == Cause.NONE:
            _add_running(tree, phase, about, lines)
        elif status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            attributes = _load_event(about, phase)
            tree.add("remote load", tree.root, phase.since_ns, phase.until_ns, _clamped(lines, phase), attributes)
        else:
            _add_wait(tree, tree.root, phase, lines)


def _add_wait(tree: _Tree, under: SpanContext, phase: Phase, lines: Sequence[HistoryLine]) -> None:
    status = name_of(RequestStatus, phase.status)
    reason = name_of(Cause, phase.cause) if phase.cause else status.removeprefix("WAITING_FOR_")
    name = "front end" if phase.status == RequestStatus.RECEIVED else f"wait {reason}"
    attributes = {"kvscope.status": status, "kvscope.reason": reason}
    tree.add(name, under, phase.since_ns, phase.until_ns, _clamped(lines, phase), attributes)


class _Step(NamedTuple):
    """Where a request was after a step."""

    at_ns: int
    computed: int
    outputs: int


def _add_running(tree: _Tree, phase: Phase, about: Sequence[About], lines: Sequence[HistoryLine]) -> None:
    """Prefill until a step of it brings a token of output, and decode from there on."""
    prefills, steps = _step_attributes(about, phase)
    recorded = _clamped(lines, phase)
    first = steps[0]
    turn = next((n for n, step in enumerate(steps) if step.outputs > first.outputs), 0) if prefills else 0
    turned_ns = phase.since_ns
    if prefills:
        chunks = steps[: turn + 1] if turn else steps
        turned_ns = chunks[-1].at_ns if turn else phase.until_ns
        attributes = {
            "kvscope.chunks": len(chunks) - 1,
            "kvscope.tokens": chunks[-1].computed - first.computed,
            "kvscope.recomputed_tokens": phase.recomputed,
        }
        then = [line for line in recorded if line.at_ns < turned_ns]
        inside = tree.add("prefill", tree.root, phase.since_ns, turned_ns, then, attributes)
        for before, after in pairwise(chunks) if len(chunks) > 2 else ():
            size = {"kvscope.tokens": after.computed - before.computed}
            tree.add("chunk", inside, before.at_ns, after.at_ns, (), size)
    if turned_ns < phase.until_ns or not prefills:
        then = [line for line in recorded if line.at_ns >= turned_ns]
        made = {"kvscope.tokens": steps[-1].outputs - steps[turn].outputs}
        tree.add("decode", tree.root, turned_ns, phase.until_ns, then, made)


def _step_attributes(about: Iterable[About], phase: Phase) -> tuple[bool, list[_Step]]:
    """Return for a running phase whether it begins in prefill, and the request's progress at its beginning and after
    each known step.
    """
    prefills, outputs_before = False, 0
    last = _Step(phase.since_ns, 0, 0)
    steps: list[_Step] = []
    for _, at_ns, event in about:
        if at_ns > phase.until_ns:
            break
        if event.kind == Kind.ADMITTED and at_ns <= phase.since_ns:
            prefills, outputs_before = True, last.outputs
            last = _Step(at_ns, event.args[0], last.outputs)
        elif event.kind == Kind.PROGRESSED and at_ns <= phase.since_ns:
            last = _Step(at_ns, *event.args)
            prefills = prefills and last.outputs <= outputs_before
        elif event.kind == Kind.PROGRESSED:
            steps.append(_Step(at_ns, *event.args))
    return prefills, [last._replace(at_ns=phase.since_ns), *steps]


def _clamped(lines: Iterable[HistoryLine], phase: Phase) -> list[HistoryLine]:
    return [line for line in lines if phase.since_ns <= line.at_ns < phase.until_ns]


def _preemption(about: Iterable[About], at_ns: int) -> Attributes:
    for _, when_ns, event in about:
        if event.kind == Kind.PREEMPTED and when_ns == at_ns:
            reason, _, blocks, tokens = event.args[:4]
            return {
                "kvscope.reason": name_of(Preempt, reason),
                "kvscope.blocks": blocks,
                "kvscope.tokens_lost": tokens,
            }
    return {}


def _load_event(about: Iterable[About], phase: Phase) -> Attributes:
    for _, at_ns, event in about:
        if event.kind == Kind.REMOTE_LOAD and phase.since_ns <= at_ns <= phase.until_ns:
            return {"kvscope.outcome": name_of(Load, event.args[0]).lower(), "kvscope.tokens": event.args[1]}
    return {}


# -------------------------------------------------------------------- the root


def operation_of(record: RequestState) -> str:
    """Return the convention's name for the operation, by the id that OpenAI's servers give."""
    return "chat" if record.id.startswith("chatcmpl-") else "text_completion"


def _span_status(record: RequestState) -> Status:
    if record.status in SERVED:
        return Status(StatusCode.UNSET)
    return Status(StatusCode.ERROR, name_of(RequestStatus, record.status))


def _root_attributes(
    engine: str, provider: str, record: RequestState, recorded: RecordedRequest, why: str
) -> Attributes:
    status = name_of(RequestStatus, record.status)
    attributes: Attributes = {
        "gen_ai.operation.name": operation_of(record),
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": engine.partition("@")[0],
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.response.id": record.id,
        "gen_ai.response.finish_reasons": [FINISH_REASONS.get(record.status, status.lower())],
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": min(record.hit_tokens, record.prompt_tokens),
        **_server(engine),
        **_latencies(record),
        "kvscope.engine": engine,
        "kvscope.status": status,
        "kvscope.kv.peak_blocks": record.peak_blocks,
        "kvscope.preemptions": record.preemptions,
        "kvscope.preempted_tokens": record.tokens_lost,
        "kvscope.client_gone": bool(record.client_gone_ns),
        "kvscope.story_is_whole": recorded.is_whole,
        "kvscope.sampled_because": why,
    }
    for cause, ns in record.waited_ns.items():
        attributes[f"kvscope.waited.{name_of(Cause, cause).lower()}_s"] = round(ns / 1e9, 6)
    if record.status not in SERVED:
        attributes["error.type"] = status
    return attributes


def _server(engine: str) -> Mapping[str, Any]:
    """NAME@HOST:PORT/RANK."""
    host, _, port = engine.rpartition("@")[2].partition("/")[0].rpartition(":")
    return {"server.address": host, "server.port": int(port)} if host and port.isdigit() else {}


def _latencies(record: RequestState) -> Mapping[str, float]:
    began = record.received_ns or record.arrived_ns
    latencies = {"gen_ai.latency.e2e": record.finished_ns - began}
    if record.admitted_ns:
        latencies["gen_ai.latency.time_in_queue"] = record.admitted_ns - record.arrived_ns
    if record.first_token_ns:
        latencies["gen_ai.latency.time_to_first_token"] = record.first_token_ns - began
    return {name: round(ns / 1e9, 6) for name, ns in latencies.items()}
