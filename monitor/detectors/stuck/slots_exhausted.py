"""stuck.slots-exhausted: request or adapter slots ran out, not memory."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import counted
from ..judgement import Evidence, TextJudgement
from ..written.written_view import TextDetector, WrittenView, number_of, quotes


class SlotsExhausted(TextDetector):
    """A count of requests that is used up.

    Sees: SGLang's own audit of request slots, which counts slots that belong to no request.
    Likely when: that line is there.
    Not when: its audit of the pool misses blocks as well (leak.unaccounted).
    """

    code = "stuck.slots-exhausted"
    severity = "error"
    title = "Request or adapter slots ran out, not KV memory"

    def read(self, view: WrittenView) -> Iterator[TextJudgement]:
        """SGLang's audit of request slots."""
        lines = view.lines("slot_audit_failed")
        if not lines or any((number_of(line, "unowned") or 0) > 0 for line in view.lines("pool_audit_failed")):
            return
        line = lines[0]
        missing = (number_of(line, "total") or 0) - (number_of(line, "available") or 0)
        yield view.finding(
            self.code,
            line,
            evidence=(Evidence("missing_slots", round(missing), "slots", "log", line.position), *quotes(lines)),
            explanation=(
                f"{counted(round(missing), 'request slot')} of {number_of(line, 'total') or 0:,.0f} belong to no"
                " request while nothing is running. Once all are gone, the engine admits no request, however much"
                " memory is free."
            ),
            missing="which request kept its slot",
        )
