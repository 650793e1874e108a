"""collapse.outer-hits: an outer tier stores KV and never hits."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import counted
from ..judgement import Evidence, TextJudgement
from ..written.lost_blocks import HELD_LINES
from ..written.written_view import TextDetector, WrittenView, number_of, quotes


class OuterHits(TextDetector):
    """A tier that only stores.

    Sees: look-ups in an outer tier that stores KV, and no hit.
    Likely when: a person reports prompts that share a prefix, or misses.
    Not when: nothing shows that prompts share anything: those miss too.
    """

    code = "collapse.outer-hits"
    severity = "warning"
    title = "An outer tier stores KV and never hits"
    recurs = True

    def read(self, view: WrittenView) -> Iterator[TextJudgement]:
        """Look-ups in an outer tier that stored before, none with a hit."""
        lookups, stored = view.lines("tier_lookup"), view.lines("tier_stored")
        hits = sum(number_of(line, "hits") or 0 for line in lookups)
        if len(lookups) < HELD_LINES or not stored or hits:
            return
        if not view.states("shared_prompts", "tier_misses", "prefix_misses"):
            return  # prompts that share nothing miss too
        yield view.finding(
            self.code,
            lookups[0],
            evidence=(
                Evidence("lookups", view.reported.count("tier_lookup"), "lines", "log"),
                Evidence("hit_tokens", 0, "tokens", "log"),
                *quotes([*lookups[:2], *stored[:2]]),
            ),
            explanation=(
                f"{counted(len(lookups), 'look-up')} in the outer tier missed although it stores KV, and the report"
                " says that prompts share a prefix: keys do not match, or chunks are larger than the shared prefix."
            ),
            missing="the keys of what is stored and looked up: the tier's debug log",
        )
