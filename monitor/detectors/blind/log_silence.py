"""blind.log-silence: the log has fallen silent about an engine that had work."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from ...base.text import counted, duration
from ...contract.samples import Sample
from ...ledger.demand import number_fact
from ...ledger.engine_ledger import EngineLedger
from ..detector import Detector, FromSamples, Settings, Threshold
from ..judgement import Evidence, Judgement
from ..sample_math import DEFAULT_INTERVAL_S, apart_s

LINES_MISSING: Final = 3
"""In a row: where lines are further apart than vLLM's ten seconds, so many of them are waited for."""


def _line_interval_s(samples: Sequence[Sample]) -> float:
    """Between two of the log's lines, as it was until the last."""
    apart = [s for earlier, later in pairwise(samples) if (s := apart_s(earlier, later))]
    return statistics.median(apart) if apart else DEFAULT_INTERVAL_S


class LogSilence(FromSamples, Detector[Judgement]):
    """A log that no longer has lines about an engine that had work.

    Sees: a last line of statistics with requests, and no other since.
    Confirmed when: the log goes on for as long as several such lines take.
    Cannot tell: it is the last of the log, and says that no token was computed.
    Not when: that line has no request. vLLM omits its lines as soon as no token is computed, idle or hung.
    """

    code = "blind.log-silence"
    severity = "info"
    title = "The log went silent about an engine that had work"
    outlasts_epoch = True
    requires = ("log",)

    silent_s = Threshold(
        30, "s", "vLLM writes a line every ten seconds while it works, and three missing ones are no delay"
    )

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the silence, if the engine had work."""
        last = ledger.samples[-1]
        if last.source != "log" or not (last.running or last.waiting):
            return
        goes_on = ledger.facts.get("last_stamp")
        stamped_s = (goes_on.at_ns - last.at_ns) / 1e9 if goes_on and goes_on.at_ns and last.at_ns else 0.0
        silent_s = max(stamped_s, number_fact(ledger.facts, "probed_for_s") or 0.0)
        known = silent_s >= settings(self.silent_s) and silent_s >= LINES_MISSING * _line_interval_s(ledger.samples)
        stood_still = last.prompt_tokens_per_s == 0 and last.generation_tokens_per_s == 0
        if not (known or stood_still):
            return
        running, waiting = last.running or 0, last.waiting or 0
        yield self.finding(
            ledger,
            verdict="confirmed" if known else "cannot-tell",
            since_ns=last.at_ns or 0,
            position=last.position,
            evidence=(
                Evidence("running", running, "requests", "log", last.position),
                Evidence("waiting", waiting, "requests", "log", last.position),
                Evidence("silent_s", round(silent_s, 1), "s", "log", goes_on.position if goes_on else ""),
            ),
            explanation=(
                f"The last line with figures has {counted(running, 'request')} running and {waiting:,} waiting; "
                + (f"the log goes on for {duration(silent_s)} without another. " if known else "it is the log's last. ")
                + "vLLM leaves these lines out while no token is computed, so their absence does not show that the"
                " engine had no requests: a hung engine is as silent as an idle one."
            ),
            missing="" if known else "a longer log, or the metrics page",
        )
