"""Blocks freed twice and free lists that contradict themselves, as assertions of the engine show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvscope.monitor.detectors.judgement import TextJudgement
from kvscope.monitor.detectors.written.written_view import WrittenView, quotes

_AFTER_CORRUPTION: Final = (
    "Restart the engine, and treat earlier answers as suspect: two requests may have shared a block.",
)
_NO_REMEDY: Final = ("More memory, or a larger pool.", "Removing the check: it reports the bug and does not cause it.")
_WHICH_REQUEST: Final = "which request freed the block, and when: the event stream of a probe"


def block_freed_twice(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield a refusal of the block manager to free a block that no request holds."""
    lines = view.lines("freed_twice")
    if not lines:
        return
    yield TextJudgement(
        code="corrupt.double-free",
        engine=view.engine,
        verdict="likely",
        since_ns=lines[0].at_ns or 0,
        position=lines[0].position,
        evidence=quotes(lines),
        explanation=(
            "The block manager was to free a block whose reference count is 0 already. Two sequences shared it and one"
            " of them freed it once too often, or an aborted request was freed again. A count that was lost before"
            " looks the same."
        ),
        do_now=_AFTER_CORRUPTION,
        change=(
            "Disable features that share blocks within a request (beam search, n > 1, a sliding window, offloading)"
            " until you have a release with the fix.",
        ),
        wont_help=_NO_REMEDY,
        missing=_WHICH_REQUEST,
    )


def free_list_contradicts(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield a failed assertion of the block pool: its list of free blocks and its counts disagree."""
    lines = view.lines("free_list_broken")
    if not lines:
        return
    condition = next((str(line.fields["condition"]) for line in lines if "condition" in line.fields), "")
    yield TextJudgement(
        code="corrupt.counter-drift",
        engine=view.engine,
        verdict="likely",
        since_ns=lines[0].at_ns or 0,
        position=lines[0].position,
        evidence=quotes(lines),
        explanation=(
            "A check of the block pool fails"
            + (f" ({condition})" if condition else "")
            + ": its list of free blocks, its counter and the blocks' references do not agree. A block that was freed"
            " twice (corrupt.double-free), or freed while another part of the engine still used it, leaves such a list."
        ),
        do_now=_AFTER_CORRUPTION,
        change=("Report it with the lines above it. Until it is fixed, run without block reuse or the connector.",),
        wont_help=_NO_REMEDY,
        missing=_WHICH_REQUEST,
    )
