"""sizing.other-process: another process holds device memory that the engine counts on."""

from __future__ import annotations

from collections.abc import Iterator

from ..judgement import TextJudgement
from ..shared_thresholds import MOST_ELSEWHERE
from ..written.refusals import held_by_others, printed_numbers
from ..written.written_view import TextDetector, WrittenView, quotes


class OtherProcess(TextDetector):
    """A device that others fill.

    Sees: an error by which less of the device was free than the engine's share, or an out-of-memory error that counts
    others.
    Likely when: always, since an engine that did not exit looks the same.
    """

    code = "sizing.other-process"
    severity = "warning"
    title = "Another process holds device memory that the engine needs"

    max_elsewhere = MOST_ELSEWHERE

    def read(self, view: WrittenView) -> Iterator[TextJudgement]:
        """Less of the device was free than the engine's share, or an out-of-memory error counts others."""
        refused = view.lines("refused_for_other_processes", "profile_disturbed")
        crowded = [line for line in view.lines("out_of_memory") if held_by_others(line) > view.settings(MOST_ELSEWHERE)]
        lines = refused or crowded
        if not lines:
            return
        line = lines[0]
        held = held_by_others(line)
        yield view.finding(
            self.code,
            line,
            evidence=(*printed_numbers(line), *quotes(lines)),
            explanation=(
                f"Other processes hold {100 * held:.0f} % of the device, by the sums of the error."
                if crowded and not refused
                else "Another process holds device memory that the engine needs: less was free than its share, or free"
                " memory changed while the engine measured."
            ),
            missing="which process holds it: nvidia-smi at that time. An engine that did not exit looks the same",
        )
