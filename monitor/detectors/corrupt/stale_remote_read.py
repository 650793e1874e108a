"""corrupt.stale-remote-read: blocks were read from another engine after their lease had ended."""

from __future__ import annotations

from collections.abc import Iterator

from ..judgement import Evidence, TextJudgement
from ..written.written_view import TextDetector, WrittenView, quotes


class StaleRemoteRead(TextDetector):
    """A read of blocks that may be another request's by then.

    Sees: a line by which a decode worker read blocks that this engine had released, since their lease had ended.
    Likely when: always, since nothing shows whether the blocks were in use again by then.
    """

    code = "corrupt.stale-remote-read"
    severity = "critical"
    title = "Another engine read blocks after their lease had ended"

    def read(self, view: WrittenView) -> Iterator[TextJudgement]:
        """Yield fetches by a decode worker of blocks that the prefill side had released."""
        lines = view.lines("stale_read")
        if not lines:
            return
        yield view.finding(
            self.code,
            lines[0],
            evidence=(Evidence("reads", view.reported.count("stale_read"), "lines", "log"), *quotes(lines)),
            explanation=(
                "A decode worker read blocks of a request that this engine had released: their lease had ended, and by"
                " then they may hold another request's KV. The client gets status 200 and an answer that may be wrong."
            ),
            missing="whether the blocks had been reused by then: the event stream of a probe on the prefill side",
        )
