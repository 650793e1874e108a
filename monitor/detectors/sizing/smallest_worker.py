"""sizing.smallest-worker: every worker has the pool of the smallest one."""

from __future__ import annotations

from collections.abc import Iterator

from ..detector import Threshold
from ..judgement import Evidence, TextJudgement
from ..written.written_view import TextDetector, WrittenView, number_of, quotes


class SmallestWorker(TextDetector):
    """Workers of which one has far less room than the others.

    Sees: pools of very different sizes that workers print.
    Likely when: always, since lines of two starts in one text look the same.
    Not when: the text has several starts.
    """

    code = "sizing.smallest-worker"
    severity = "warning"
    title = "Every worker gets the pool size of the smallest one"

    min_ratio = Threshold(
        1.5, "times", "pipeline stages differ by a layer or an embedding, devices of another size by more"
    )

    def read(self, view: WrittenView) -> Iterator[TextJudgement]:
        """Workers that print pools of very different sizes: the smallest is everyone's."""
        lines = [line for line in view.lines("worker_pool") if (number_of(line, "pool_gib") or 0) > 0]
        sizes = [number_of(line, "pool_gib") or 0.0 for line in lines]
        if (
            len(sizes) < 2  # a single worker has no other to differ from
            or max(sizes) < view.settings(self.min_ratio) * min(sizes)
            or view.lines("start_up")[2:]
        ):
            return
        yield view.finding(
            self.code,
            position=lines[sizes.index(min(sizes))].position,
            evidence=(
                Evidence("smallest_pool", min(sizes), "GiB", "log", lines[sizes.index(min(sizes))].position),
                Evidence("largest_pool", max(sizes), "GiB", "log", lines[sizes.index(max(sizes))].position),
                *quotes(lines),
            ),
            explanation=(
                f"Workers have room for pools from {min(sizes):g} to {max(sizes):g} GiB, and all get the smallest: each"
                f" keeps the same number of blocks. {max(sizes) - min(sizes):.2f} GiB of the roomiest device stay"
                " unused. Lines of two starts in one text look the same."
            ),
            missing="the worker of each line, if the text does not show it",
        )
