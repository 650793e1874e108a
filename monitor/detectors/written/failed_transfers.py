"""Transfers of KV between two engines that fail or never end, as connectors report them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvscope.monitor.detectors.judgement import Evidence, TextJudgement
from kvscope.monitor.detectors.written.written_view import WrittenView, number_of, quotes

_TRANSFER_LINES: Final = ("transfer_timed_out", "transfer_failed")


def transfers_fail(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield a transfer that a connector gives up, by a time-out or an error of the other side."""
    lines = view.lines(*_TRANSFER_LINES)
    late = [line for line in lines if line.name == "transfer_timed_out"]
    if not lines or view.lines("stale_read"):
        return
    seconds = max((number_of(line, "seconds") or 0 for line in late), default=0)
    first = min(lines, key=lambda line: line.at_ns or 0)
    yield TextJudgement(
        code="stuck.remote-load",
        engine=view.engine,
        verdict="likely",
        since_ns=first.at_ns or 0,
        position=first.position,
        evidence=(
            Evidence("failed_transfers", sum(map(view.reported.count, _TRANSFER_LINES)), "lines", "log"),
            *((Evidence("waited", seconds, "s", "log", late[0].position),) if seconds else ()),
            *quotes(lines),
        ),
        explanation=(
            "The connector reports KV transfers that did not complete"
            + (f", after a wait of {seconds:,.0f} s" if seconds else "")
            + ". Each such request waits until a time-out or an abort, unless this engine computes its KV. The"
            " other side may have exited, dropped the request, or have a different layout."
        ),
        do_now=(
            "Inspect the other side of the transfer for the same request id and time.",
            "Check that both sides run one release with one block size and compatible parallel sizes.",
        ),
        change=(
            "Let a failed fetch be computed here (vLLM: kv_load_failure_policy=recompute), and let the router retry on"
            " another pair.",
        ),
        wont_help=("A larger pool.", "A longer time-out, if the other side has dropped the request."),
        missing="the other side's log at that time: whether it sent, refused or had exited",
    )
