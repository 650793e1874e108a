"""Which traces are kept, and why: all that users may want to inspect, and a share of the rest.

The decision comes when a request ends, with all data. The trace's id decides the share, as in OpenTelemetry's
TraceIdRatioBased, so that services with the same share keep the same traces.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvscope.monitor.events.kinds import Kind
from kvscope.monitor.exporters.otel.request_recorder import RecordedRequest
from kvscope.monitor.findings import Finding, severity_at_least
from kvscope.monitor.ledger.latency import SERVED
from kvscope.monitor.state.records import RequestState

SLOW_FIRST_TOKEN_S: Final = 5.0
"""From arrival to the first token, or to the end without one. Chat users wait a second or two. Even a prompt that fills
a whole context window takes less on the hardware that serves it. A longer time means that it stood still somewhere.
"""
PER_TOKEN_S: Final = 0.2
"""Between two tokens, on average over the request. People read about five words a second: from here on the text comes
slower than it is read."""
WAITED_S: Final = 5.0
"""In all, while the scheduler had it and did not run it: as long as is too long for a first token."""
MAX_CULPRITS: Final = 10_000
_RATIO_BITS: Final = (1 << 64) - 1


class Sampling:
    """Keeps `share` (0 to 1) of the unremarkable requests."""

    def __init__(self, share: float = 1.0) -> None:
        self._bound = round(share * (_RATIO_BITS + 1))
        self._culprits: dict[tuple[str, str], str] = {}
        """Requests that a finding named, by engine and request id, with its code, until they end."""

    def note(self, findings: Iterable[Finding]) -> None:
        """Note the requests that current findings name, to keep their traces when they end."""
        for finding in findings:
            judged = finding.judgement
            if severity_at_least(finding.severity, "warning"):
                self._culprits.update({(judged.engine, name): judged.code for name in judged.requests})
        while len(self._culprits) > MAX_CULPRITS:
            del self._culprits[next(iter(self._culprits))]

    def why(self, engine: str, record: RequestState, recorded: RecordedRequest, trace_id: int) -> str:
        """Why the trace of a request that ended is kept: failed, finding CODE, stuck, preempted, slow, or share of the
        rest, or an empty string if it is not.
        """
        code = self._culprits.pop((engine, record.id), "")
        if record.status not in SERVED:
            return "failed"
        if code:
            return f"finding {code}"
        if record.stalled_ns or any(event.kind == Kind.STALLED for _, _, event in recorded.about):
            return "stuck"
        if record.preemptions:
            return "preempted"
        if _is_slow(record):
            return "slow"
        return "share" if trace_id & _RATIO_BITS < self._bound else ""


def _is_slow(record: RequestState) -> bool:
    first_ns = record.first_token_ns or record.finished_ns
    if (first_ns - (record.received_ns or record.arrived_ns)) / 1e9 > SLOW_FIRST_TOKEN_S:
        return True
    if sum(record.waited_ns.values()) / 1e9 > WAITED_S:
        return True
    between = record.output_tokens - 1
    return between > 0 and (record.finished_ns - first_ns) / 1e9 / between > PER_TOKEN_S
