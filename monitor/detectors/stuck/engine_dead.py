"""stuck.engine-dead: the engine's process is gone while the front end answers."""

from __future__ import annotations

from collections.abc import Iterator

from ..judgement import TextJudgement
from ..written.standstill import ROOT_ERRORS, TIMEOUTS, ended_by_an_error, still_lines
from ..written.written_view import TextDetector, WrittenView, line_number, quotes


class EngineProcessDead(TextDetector):
    """A front end without an engine.

    Sees: lines by which the engine's process ended with an error.
    Likely when: the front end still answers, or the engine or more than one line reports its end.
    Cannot tell: a person reports one such line.
    Not when: the engine was asked to end, started again, never finished its start, or another error explains its end.
    """

    code = "stuck.engine-dead"
    severity = "critical"
    title = "The engine process is gone while the front end still responds"

    def read(self, view: WrittenView) -> Iterator[TextJudgement]:
        """Yield the end of the engine's process, reported by itself or noticed by the front end."""
        died = view.lines("engine_died", "worker_died")
        timed_out = view.lines(*TIMEOUTS)
        if not died or view.mentioned(*ROOT_ERRORS, "pool_audit_failed", "freed_twice", "free_list_broken"):
            return
        if (timed_out and not ended_by_an_error(view, timed_out, still_lines(view.samples))) or view.lines(
            "worker_wait"
        ):
            return
        after = line_number(died[0].position)
        answers = [line for line in view.lines("front_end_answers") if line_number(line.position) > after]
        restarted = [line for line in view.lines("start_up") if line_number(line.position) > after]
        ended = [line for line in view.lines("shut_down") if line_number(line.position) <= after]
        begins = (
            view.mentioned("start_up", "frame_of_start") and not view.samples and not view.mentioned("start_up_done")
        )
        if restarted or ended or begins:
            return  # an engine that was asked to end looks the same, and one that failed to start is another finding
        by_itself = [line for line in died if line.name == "worker_died" or line.fields.get("kind") == "fatal error"]
        sure = bool(answers or by_itself or len(died) > 1)
        if not sure and not view.is_report():
            return
        yield view.finding(
            self.code,
            died[0],
            verdict="likely" if sure else "cannot-tell",
            evidence=quotes([*died[:2], *answers[:2]]),
            explanation=(
                "The engine's process ended with an error"
                + (", but the front end still responds: its last metrics do not change." if answers else ".")
                + " Its cause is above that line in the log. Requests in flight are lost, and the engine serves no new"
                " ones until you restart it."
            ),
            case="" if answers else "If nothing answers",
            missing="" if answers else "whether the front end still responds, and the error above that line",
        )
