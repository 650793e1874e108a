"""Classes of log lines that bear on KV memory, beside the statistics and the memory profile.

pattern.py               a class: its name, engine, releases, sample and regular expression
refusal_patterns.py      engines that do not start, and devices that run out of memory
health_patterns.py       engines, workers and front ends that stand still, die or restart
pressure_patterns.py     preemptions, retractions, pools and blocks
connector_patterns.py    KV connectors, leases, outer tiers
audit_patterns.py        SGLang's audits of its own pools
corruption_patterns.py   blocks freed twice, free lists that contradict their counters
setting_patterns.py      models and shares of the device that a command or code names
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from .audit_patterns import AUDIT_PATTERNS
from .connector_patterns import CONNECTOR_PATTERNS
from .corruption_patterns import CORRUPTION_PATTERNS
from .health_patterns import HEALTH_PATTERNS
from .pattern import LogPattern, MatchedLine, Prefilter
from .pressure_patterns import PRESSURE_PATTERNS
from .refusal_patterns import REFUSAL_PATTERNS
from .setting_patterns import SETTING_PATTERNS

PATTERNS: Final[tuple[LogPattern, ...]] = (
    *REFUSAL_PATTERNS,
    *HEALTH_PATTERNS,
    *PRESSURE_PATTERNS,
    *CONNECTOR_PATTERNS,
    *AUDIT_PATTERNS,
    *CORRUPTION_PATTERNS,
    *SETTING_PATTERNS,
)
_PREFILTER: Final = Prefilter(PATTERNS)


def matched_lines(text: str, joined: str = "", spaced: str = "") -> Iterator[MatchedLine]:
    """Yield the classes of a line, with their fields. `joined` and `spaced` are the line with those that continue
    it.
    """
    yield from _PREFILTER.matches(text, joined or text, spaced or text)
