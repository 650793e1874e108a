"""What changes from one look at the findings to the next, and is worth a word: `monitor doctor --watch`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from kvscope.monitor.findings import FindingReport

GROWS_BY: Final = 2
"""It is said anew when it is about so many times as many requests or blocks as when it was said last: a leak grows by
a little with each look.
"""


class Change(msgspec.Struct, frozen=True):
    """One finding began to fire, is surer or about more than it was, or is over. `at` is RFC 3339."""

    at: str | None
    what: Literal["fires", "grows", "resolved"]
    finding: FindingReport


class Changes:
    """Remembers what was told."""

    def __init__(self) -> None:
        self._told: dict[str, FindingReport] = {}

    def since(self, findings: Iterable[FindingReport], at: str | None) -> list[Change]:
        """What has changed by this look, at that time. `findings`: those that fire and those that are resolved."""
        changes = []
        now = {finding.id: finding for finding in findings}
        for id_, finding in now.items():
            if finding.state != "firing":
                continue
            told = self._told.get(id_)
            if told is None:
                changes.append(Change(at, "fires", finding))
            elif finding.verdict != told.verdict or _finding_size(finding) >= GROWS_BY * max(_finding_size(told), 1):
                changes.append(Change(at, "grows", finding))
            else:
                continue
            self._told[id_] = finding
        for id_, told in list(self._told.items()):
            over = now.get(id_, told)
            if id_ not in now or over.state != "firing":
                del self._told[id_]
                changes.append(Change(at, "resolved", over))
        return changes

    @property
    def firing(self) -> list[FindingReport]:
        """What was told and is not over, as it was told last."""
        return list(self._told.values())


def _finding_size(finding: FindingReport) -> int:
    return max(len(finding.culprits.requests), len(finding.culprits.blocks))
