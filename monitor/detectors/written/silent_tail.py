"""A log that goes on after its last line of statistics, by stamps and by the probes that the front end answers.

vLLM since 0.10.2 logs one line of statistics without a token, and then none until a token is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from kvscope.monitor.detectors.judgement import Evidence
from kvscope.monitor.detectors.sample_math import apart_s
from kvscope.monitor.detectors.written.written_view import WrittenView, line_number
from kvscope.monitor.events.samples import Sample
from kvscope.monitor.sources.front_end_lines import RUN_ENDS
from kvscope.monitor.text import counted, duration


class SilentTail(NamedTuple):
    """The time after the last statistics: its length, and the part after the first request that came since."""

    seconds: float
    requests: int = 0
    after_request_s: float = 0.0
    request_at: str = ""
    until: str = ""

    def evidence(self) -> tuple[Evidence, ...]:
        """Return the figures, with the lines that they end and begin at."""
        return (
            Evidence("log_goes_on_for", round(self.seconds, 1), "s", "log", self.until),
            Evidence("requests_received_since", self.requests, "requests", "log", self.request_at),
        )

    def text(self) -> str:
        """Describe it, and what it leaves open."""
        goes_on = (
            f"The log goes on for {duration(self.seconds)} without another line of statistics, which vLLM prints as"
            " soon as it computes a token"
        )
        if not self.requests:
            return (
                f"{goes_on}. It shows no request that came since: had all clients given up during one long step, an"
                " idle engine would be as silent."
            )
        return f"{goes_on}, though {counted(self.requests, 'request')} came since."


NO_TAIL: Final = SilentTail(0.0)


def silent_tail(view: WrittenView) -> SilentTail:
    """Return what follows the engine's last statistics in its run, or NO_TAIL if nothing shows time."""
    last = view.samples[-1]
    end = _run_end_ns(view, line_number(last.position))
    goes_on, requests = view.facts.get("last_stamp"), view.facts.get("requests_since_statistics")
    until_ns = end if end is not None else goes_on.at_ns if goes_on is not None else None
    stamped_s = max(0.0, (until_ns - last.at_ns) / 1e9) if until_ns and last.at_ns else 0.0
    probed_s, probed_since_s = view.number("probed_for_s") or 0.0, view.number("probed_since_request_s") or 0.0
    seconds = max(stamped_s, probed_s)
    if not seconds:
        return NO_TAIL
    probed = view.facts.get("probed_for_s")
    until = probed.position if probed is not None and probed_s > stamped_s else goes_on.position if goes_on else ""
    count = int(view.number("requests_since_statistics") or 0)
    if requests is None or not count:
        return SilentTail(seconds, until=until)
    came_ns = requests.at_ns
    since_s = max(0.0, (until_ns - came_ns) / 1e9) if until_ns and came_ns else 0.0
    return SilentTail(seconds, count, max(since_s, probed_since_s), requests.position, until)


def _run_end_ns(view: WrittenView, last_line: int) -> int | None:
    """Return when the engine ended or restarted after its last statistics, 0 if that line has no time, or None if it
    did neither.
    """
    ended = [line for line in view.lines(*RUN_ENDS) if line_number(line.position) > last_line]
    return min(ended, key=lambda line: line_number(line.position)).at_ns or 0 if ended else None


def longest_silence_s(samples: Sequence[Sample]) -> float:
    """Return the longest time that passed without statistics after a line without a token, and then ended."""
    gaps = (
        apart_s(one, two)
        for one, two in pairwise(samples)
        if one.running and not (one.generation_tokens_per_s or one.prompt_tokens_per_s) and not two.restarted
    )
    return max((gap for gap in gaps if gap is not None), default=0.0)
