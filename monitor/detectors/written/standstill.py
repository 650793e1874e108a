"""Engines that stand still or died, as statistics and other processes' lines show.

vLLM since 0.10.2 logs one line of statistics without a token, and then none until a token is computed again. The log
goes on nevertheless, with stamps and with the probes that the front end answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from ...base.text import clock_time, counted, duration, percent
from ...contract.samples import ReportedEvent, Sample
from ...sources.engine_log import RUN_ENDS
from ..judgement import Evidence, TextJudgement
from ..sample_math import apart_s
from ..stuck.engine_stalled import EngineStalled
from .written_view import WrittenView, interval_of, line_number, quotes, seconds_between


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


LINES_OF_PROGRESS: Final = 3
"""Each with tokens, just before: steps are shorter than the interval. Not a threshold: text_unknown_s applies where
fewer lines show it.
"""
VLLM_INTERVAL_S: Final = 9.5
"""Ten seconds, as stamps without fractions show them. Not a threshold: a fact of vLLM's logger."""
TIMEOUTS: Final = ("call_timed_out", "input_dumped", "watchdog_expired")
"""Lines by which an engine gives a step up."""
REPORTED_HANGS: Final = ("stuck", "waits_unserved", "unanswered", "process_gone")
"""Concepts by which a person reports that nothing moves, in contrast to a slow engine."""
ROOT_ERRORS: Final = ("out_of_memory", "refused_for_length", "refused_without_pool", "refused_for_other_processes")
_DO_NOW: Final = (
    "Take the stacks while it hangs: py-spy dump --pid PID of the engine's process and of each worker.",
    "Check whether its processes exist, and their state: ps -o pid,stat,etime,cmd -C python.",
    "Then restart it: requests in flight are lost either way.",
)
WOULD_END: Final = " A kernel that compiles on first use, or a prefill of minutes, would end by itself."
LONG_PROMPT: Final = (
    " A long prompt looks the same: it produces no token before its last chunk, and earlier lines do not show whether"
    " usage would move meanwhile."
)
_CHANGE: Final = (
    "Use a one-token request as liveness probe instead of /health, which the front end answers by itself.",
)
_WONT_HELP: Final = ("More KV memory, or fewer requests: the step hangs with any pool.", "Waiting for /health to fail.")


def engine_stalled(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield steps that stopped with requests running: two lines of no token, or one that others' lines confirm or
    follow.
    """
    if view.mentioned("start_up") and not view.samples and not view.mentioned("start_up_done", *TIMEOUTS):
        return
    if view.number("halted"):
        return  # its operator has paused it, or put it to sleep
    still = still_lines(view.samples)
    waits, given_up = view.lines("worker_wait"), view.lines(*TIMEOUTS)
    still = still or waiting_line(view.samples, waits)
    if not (still or waits or given_up):
        return
    if ended_by_an_error(view, given_up, still) and not waits:
        return
    others = [
        line for line in (*waits, *given_up) if not still or line_number(line.position) > line_number(still[0].position)
    ]
    tail = silent_tail(view) if still else NO_TAIL
    lasted = _stood_s(view.samples, still, view.settings(EngineStalled.text_times_longest), tail.seconds)
    before = view.samples[: len(view.samples) - len(still)]
    is_short = view.is_report() or (bool(still) and _steps_were_short(before) and _none_admitted(before, still))
    least = view.settings(EngineStalled.text_least_s if is_short else EngineStalled.text_unknown_s)
    by_others = bool((still and others) or len(others) > 1 or given_up)
    unknown_s = view.settings(EngineStalled.text_unknown_s)
    is_silent = tail.seconds >= unknown_s
    shown = (lasted >= least and (len(still) > 1 or is_silent)) or by_others
    if not shown or _moves_on(view.samples, others, still):
        return
    starved = is_silent and tail.after_request_s >= unknown_s and _is_no_prefill(before, still, tail)
    long_prompt = len(still) == 1 or not _usage_moves_with_tokens(before)
    sure = by_others or view.states(*REPORTED_HANGS) or starved or not long_prompt
    yield _stalled(view, still, others, lasted, tail if is_silent else NO_TAIL, sure=sure)


def ended_by_an_error(view: WrittenView, given_up: Sequence[ReportedEvent], still: Sequence[Sample] = ()) -> bool:
    """Whether the input was dumped without a time-out: any exception of a step does that.

    A step that stood still before, or a person who reports a hang, makes a time-out of it, unless a worker died.
    """
    if not given_up or any(line.name != "input_dumped" for line in given_up):
        return False
    return bool(view.lines("worker_died")) or not (still or view.states("stuck", "waits_unserved", "unanswered"))


def _steps_were_short(before: Sequence[Sample]) -> bool:
    """Whether each line before the pause, at vLLM's interval at least, counted tokens."""
    return _counted_tokens(before[-LINES_OF_PROGRESS:]) and interval_of(before) >= VLLM_INTERVAL_S


def _counted_tokens(lines: Sequence[Sample]) -> bool:
    return len(lines) == LINES_OF_PROGRESS and all(
        sample.generation_tokens_per_s or sample.prompt_tokens_per_s for sample in lines
    )


def _none_admitted(before: Sequence[Sample], still: Sequence[Sample]) -> bool:
    """Whether the requests of the pause are those that had tokens before it: no more run, and none was freed.

    A prompt that was admitted since is computed in steps that may be longer than those seen.
    """
    last, first = before[-1], still[0]
    return (first.running or 0) <= (last.running or 0) and (first.usage or 0.0) >= (last.usage or 0.0)


def _is_no_prefill(before: Sequence[Sample], still: Sequence[Sample], tail: SilentTail) -> bool:
    """Whether a prefill in chunks explains neither the running requests nor those that came since.

    It may take all of each step's tokens, so that a request that comes waits, and leaves those that decode theirs. So
    two or more that had tokens and have none are no prefill.
    """
    is_batch = bool(still) and (still[0].running or 0) > 1
    return is_batch and tail.requests > 1 and _steps_were_short(before) and _none_admitted(before, still)


def _usage_moves_with_tokens(before: Sequence[Sample]) -> bool:
    """Whether usage changed from line to line as tokens were computed, so that a prefill in chunks would show in it.

    Lines give usage with one decimal. In a large pool, or on a slow host, a long prefill changes none for minutes.
    """
    last = before[-LINES_OF_PROGRESS:]
    return _counted_tokens(last) and all(one.usage != two.usage for one, two in pairwise(last))


def still_lines(samples: Sequence[Sample]) -> list[Sample]:
    """Return the last lines, as far as they show running requests and no computed token."""
    still: list[Sample] = []
    for sample in reversed(samples):
        no_token = sample.generation_tokens_per_s == 0 and not sample.prompt_tokens_per_s
        if not (sample.running and no_token) or (still and sample.usage != still[-1].usage):
            break
        still.append(sample)
    return still[::-1]


def waiting_line(samples: Sequence[Sample], waits: Sequence[ReportedEvent]) -> list[Sample]:
    """Return the last line if it shows requests that wait, none that runs and no token, and the engine's process waits
    for its workers since: the step that took these requests in has not come back.
    """
    if not (samples and waits) or line_number(waits[-1].position) <= line_number(samples[-1].position):
        return []
    last = samples[-1]
    is_still = not last.running and last.generation_tokens_per_s == 0 and not last.prompt_tokens_per_s
    return [last] if is_still and last.waiting else []


def _stood_s(samples: Sequence[Sample], still: Sequence[Sample], times_longest: float, silent_s: float = 0.0) -> float:
    """Return how long, the interval before the first line and the silence after the last included, or 0 if this engine
    has paused as long before.
    """
    if not still:
        return 0.0
    lasted = seconds_between(still[0], still[-1], len(still)) + interval_of(samples) + silent_s
    longest = current = 0
    for sample in samples[: len(samples) - len(still)]:
        current = (
            current + 1
            if sample.generation_tokens_per_s == 0 and not sample.prompt_tokens_per_s and sample.running
            else 0
        )
        longest = max(longest, current)
    paused = (longest + 1) * interval_of(samples) if longest else 0.0
    paused = max(paused, longest_silence_s(samples[: len(samples) - len(still)]))
    return lasted if lasted > times_longest * paused else 0.0


def _moves_on(samples: Sequence[Sample], others: Sequence[ReportedEvent], still: Sequence[Sample]) -> bool:
    """Return whether tokens are computed according to the other lines."""
    if still or not others or not samples:
        return False
    last = samples[-1]
    return line_number(last.position) > max(line_number(line.position) for line in others) and bool(
        last.generation_tokens_per_s
    )


def _stalled(
    view: WrittenView,
    still: Sequence[Sample],
    others: Sequence[ReportedEvent],
    lasted: float,
    tail: SilentTail,
    *,
    sure: bool,
) -> TextJudgement:
    """sure: what a prefill in chunks would look like is excluded."""
    first = still[0] if still else None
    at_ns = (first.at_ns if first is not None else others[0].at_ns) or 0
    last_ns = max((line.at_ns or 0 for line in others), default=0)
    lasted = max(lasted, (last_ns - at_ns) / 1e9 if at_ns and last_ns else 0.0)
    evidence = [Evidence("no_token_for", round(lasted, 1), "s", "log")]
    state = ""
    if first is not None:
        evidence += [
            Evidence("running", first.running or 0, "requests", "log", first.position),
            *(() if first.running else (Evidence("waiting", first.waiting or 0, "requests", "log", first.position),)),
            Evidence("usage", round(100 * (first.usage or 0), 1), "%", "log", first.position),
            Evidence(
                "lines_without_a_token", len(still), "lines", "log", f"{still[0].position} to {still[-1].position}"
            ),
        ]
        since = f" since {clock_time(at_ns)}" if at_ns else ""
        state = f"No token was computed{since} with {counted(first.running or 0, 'request')} running"
        state += "." if first.running else f" and {first.waiting or 0:,} waiting."
        if tail.seconds:
            evidence += tail.evidence()
            state += f" {tail.text()}"
        if first.usage is not None and first.usage < 0.5:
            state += f" {percent(first.usage)} of the pool is in use, so memory is not the limit."
    confirmed_by = f" {_reporters(others)}" if others else ""
    return view.finding(
        "stuck.engine-stalled",
        verdict="likely" if sure else "cannot-tell",
        since_ns=at_ns,
        position=first.position if first is not None else others[0].position,
        evidence=(*evidence, *quotes(list(others))),
        explanation=(
            (state or "A step of the engine hangs.")
            + confirmed_by
            + f" It has lasted at least {duration(lasted)}."
            + (WOULD_END if sure else "" if tail.seconds and not tail.requests else LONG_PROMPT)
        ),
        do_now=_DO_NOW if sure else _DO_NOW[:2],
        change=_CHANGE,
        wont_help=_WONT_HELP if sure else _WONT_HELP[1:],
        missing="whether a step is in flight, and the workers' stacks: py-spy dump, or the event stream of a probe",
    )


def _reporters(others: Sequence[ReportedEvent]) -> str:
    parts = []
    waits = [line for line in others if line.name == "worker_wait"]
    if waits:
        parts.append(f"the engine's process waits for its workers ({counted(len(waits), 'line')})")
    if any(line.name == "call_timed_out" for line in others):
        parts.append("a call to the workers timed out")
    if any(line.name == "input_dumped" for line in others):
        parts.append("the engine gave up on the step and dumped its input")
    if any(line.name == "watchdog_expired" for line in others):
        parts.append("a watchdog expired")
    text = " and ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def socket_thread_died(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield the end of the thread by which vLLM's engine process receives requests or sends answers."""
    died = view.lines("socket_thread_died")
    if not died:
        return
    after = line_number(died[-1].position)
    if any(line_number(line.position) > after for line in view.lines("start_up")):
        return
    receives = died[-1].fields["side"] == "input"
    yield view.finding(
        "stuck.front-end",
        died[0],
        evidence=quotes(died),
        explanation=(
            f"The engine's thread that {'receives requests' if receives else 'sends answers'} ended with an exception,"
            " and nothing restarts it. "
            + (
                "Requests that came since reach the front end but not the scheduler."
                if receives
                else "The scheduler computes answers that no client receives."
            )
            + " The traceback below that line has the cause."
        ),
        do_now=("Restart the engine: requests in flight are lost either way.",),
        change=("Use a one-token request as liveness probe instead of /health.", "Reject the input that caused it."),
        wont_help=("More KV memory.",),
        missing="the exception itself, and the request that came right before",
    )
