"""The base class of harm.* codes: a client suffers, and no finding of another code names a cause.

They are judged last, with all that the other detectors found. A finding claims the requests that it names, those that
wait for the blocks that it names, and these blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ...ledger.engine_ledger import EngineLedger
from ..detector import JudgementT, Settings, StreamDetector
from ..judgement import Judgement
from ..measured_harm import waiting_for_blocks


class HarmDetector(StreamDetector[JudgementT]):
    """Finds what is harmed and which of it no cause claims."""

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[JudgementT]:
        """Yield the harm as if nothing else had been found."""
        yield from self.detect_unclaimed(ledger, settings, ())

    def detect_unclaimed(
        self, ledger: EngineLedger, settings: Settings, causes: Sequence[Judgement]
    ) -> Iterator[JudgementT]:
        """Yield the harm that none of `causes`, of warning or above, claims."""
        raise NotImplementedError


def claimed_requests(ledger: EngineLedger, causes: Sequence[Judgement]) -> set[str]:
    """Return the ids of the requests whose harm these explain: those that they name, those behind a head of the queue
    that they name, and those that wait for blocks if the blocks that they name would do.
    """
    found = {name for cause in causes for name in cause.requests}
    head = ledger.head()
    if head is not None and head.id in found:
        found.update(record.id for record in ledger.living().waiting)
    elif head is not None and head.blocks_needed - head.blocks_free_then <= len(claimed_blocks(causes)):
        found.update(record.id for record in waiting_for_blocks(ledger))
    return found


def claimed_blocks(causes: Iterable[Judgement]) -> set[int]:
    """Return the blocks whose hold these explain, at once: leaks are told before a minute is over."""
    return {block for cause in causes for block in cause.blocks}
