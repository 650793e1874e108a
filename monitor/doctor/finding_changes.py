"""Changes of the findings from one check to the next that are worth a line: `monitor doctor --watch`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from kvscope.monitor.findings import FindingReport

GROWS_BY: Final = 2
"""A finding is reported again when its requests or blocks have grown by this factor since its last report: a leak grows
by a little with each check.
"""


class Change(msgspec.Struct, frozen=True):
    """One finding began to fire, is surer or about more than it was, or is over. `at` is RFC 3339."""

    at: str | None
    what: Literal["fires", "grows", "resolved"]
    finding: FindingReport


class Changes:
    """Remembers what was reported."""

    def __init__(self) -> None:
        self._reported: dict[str, FindingReport] = {}

    def since(self, findings: Iterable[FindingReport], at: str | None) -> list[Change]:
        """Return the changes by this check, at that time. `findings`: those that fire and those that are resolved."""
        changes = []
        now = {finding.id: finding for finding in findings}
        for id_, finding in now.items():
            if finding.state != "firing":
                continue
            reported = self._reported.get(id_)
            if reported is None:
                changes.append(Change(at, "fires", finding))
            elif finding.verdict != reported.verdict or _finding_size(finding) >= GROWS_BY * max(
                _finding_size(reported), 1
            ):
                changes.append(Change(at, "grows", finding))
            else:
                continue
            self._reported[id_] = finding
        for id_, reported in list(self._reported.items()):
            over = now.get(id_, reported)
            if id_ not in now or over.state != "firing":
                del self._reported[id_]
                changes.append(Change(at, "resolved", over))
        return changes

    @property
    def firing(self) -> list[FindingReport]:
        """The findings that were reported and are not over, as of their last report."""
        return list(self._reported.values())


def _finding_size(finding: FindingReport) -> int:
    return max(len(finding.culprits.requests), len(finding.culprits.blocks))
