"""sizing.refused-start: the engine does not start, because the pool holds less than one request."""

from __future__ import annotations

from collections.abc import Iterator

from ...contract.samples import ReportedEvent
from ..judgement import TextJudgement
from ..written.planned_settings import remedies_of
from ..written.refusals import REFUSAL_LINES, printed_numbers
from ..written.written_view import TextDetector, WrittenView, number_of, quotes


class RefusedStart(TextDetector):
    """An engine that ended at its start for want of KV memory.

    Sees: the error by which an engine refuses to start.
    Confirmed when: the two numbers of that error show the shortage.
    Likely when: it has no such numbers.
    Not when: the engine served requests.
    """

    code = "sizing.refused-start"
    severity = "error"
    title = "The engine refuses to start: the pool holds less than one request"

    def read(self, view: WrittenView) -> Iterator[TextJudgement]:
        """Yield a start that the engine refused, naming the shortage of one request or of the pool."""
        lines = view.lines(*REFUSAL_LINES)
        if not lines or view.samples:
            return
        exact = next((line for line in lines if _lacks(line)), None)
        line = exact or lines[0]
        yield view.finding(
            self.code,
            line,
            verdict="confirmed" if exact is not None else "likely",
            evidence=(*printed_numbers(line), *quotes(lines)),
            explanation=_why_refused(line),
            do_now=remedies_of(view, line),
            missing=""
            if exact is not None
            else "the memory profile above the error: what weights and activations took",
        )


def _lacks(line: ReportedEvent) -> bool:
    """Whether its own two numbers show that it cannot start."""
    needed, available = number_of(line, "needed_gib"), number_of(line, "available_gib")
    length, pool = number_of(line, "max_len"), number_of(line, "pool_tokens")
    free, desired = number_of(line, "free_gib"), number_of(line, "desired_gib")
    below_zero = (number_of(line, "pool_gib") or 0) < 0 or (
        "pool_blocks" in line.fields and (number_of(line, "pool_blocks") or 0) <= 0
    )
    return (
        below_zero
        or (needed is not None and available is not None and needed > available)
        or (length is not None and pool is not None and length > pool)
        or (free is not None and desired is not None and free < desired)
    )


def _why_refused(line: ReportedEvent) -> str:
    needed, available = number_of(line, "needed_gib"), number_of(line, "available_gib")
    length, pool = number_of(line, "max_len"), number_of(line, "pool_tokens")
    if needed is not None and available is not None:
        return (
            f"The engine refused to start: one request of {length or 0:,.0f} tokens needs {needed:g} GiB of KV cache"
            f" and the pool has {available:g} GiB, {needed - available:.2f} GiB too little. The numbers are the"
            " engine's own."
        )
    if pool is not None and length is not None:
        return (
            f"The engine refused to start: a request may have {length:,.0f} tokens and the pool holds {pool:,.0f}. The"
            " numbers are the engine's own."
        )
    if (desired := number_of(line, "desired_gib")) is not None:
        return (
            f"The engine refused to start: it needed {desired:g} GiB of the device and {number_of(line, 'free_gib'):g}"
            " GiB were free. Another process holds the rest."
        )
    return (
        "The engine refused to start: weights, activations and other device memory leave nothing for the KV pool within"
        " its share."
    )
