"""stuck.zero-token: a request is given no token at any step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...base.text import counted, duration
from ...contract.kinds import Cause
from ...ledger.engine_ledger import EngineLedger
from ...ledger.records import RequestState
from ..advice import them
from ..detector import Causes, Settings, StreamDetector, Threshold
from ..engine_pace import MIN_STEPS, at_pace_s
from ..judgement import ENGINE_PAUSED, NO_ROOM, NO_WORK, Judgement, holds_what_it_needs, seen
from .head_of_line import HeadOfLine
from .waiting_requests import Overdue, overdue_judgement, overdue_requests, requests_text, since_text

FREES_BLOCKS = "its blocks become free for others"


class ZeroToken(StreamDetector[Judgement]):
    """Requests that get no token at any step.

    Sees: a running request that each step leaves out, or one that each pass leaves out while no other runs.
    Confirmed when: for the pending period and several steps, with room for its next token.
    Likely when: events were lost.
    Not when: the step was full; no block was free for its next token.
    """

    code = "stuck.zero-token"
    severity = "error"
    title = "A running request receives no tokens"

    grace_s = Threshold(10, "s", "a request that runs may go without tokens in a full step, not in all of them")
    min_steps = MIN_STEPS
    alternatives = (NO_WORK, NO_ROOM, ENGINE_PAUSED)
    causes = Causes[Judgement]().of(HeadOfLine, holds_what_it_needs)

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the requests that are passed over with zero tokens."""
        living = ledger.living()
        grace_s = at_pace_s(ledger, settings, self.grace_s)
        running = [r for r in living.running if r.cause == Cause.ZERO_TOKENS]
        full_ns = _full_until_ns(ledger, running)
        late = overdue_requests(ledger, running, lambda r: max(r.since_ns, full_ns), ledger.looked_ns, grace_s)
        yield from self._judge(ledger, late)
        if not living.running:
            waiting = [r for r in living.waiting if r.cause == Cause.ZERO_TOKENS]
            launched_ns = ledger.state.launched_ns  # until then others had their share of the steps
            late = overdue_requests(ledger, waiting, lambda r: max(r.since_ns, launched_ns), ledger.looked_ns, grace_s)
            yield from self._judge(ledger, late)

    def _judge(self, ledger: EngineLedger, late: Overdue | None) -> Iterator[Judgement]:
        if late is None:
            return
        state, at = ledger.state, ledger.at
        count = len(late.records)
        blocks = sorted({block for record in late.records for block in record.blocks})
        first = late.records[0]
        runs = first.is_running
        yield overdue_judgement(
            self,
            ledger,
            late,
            began_at=first.since_at,
            blocks=tuple(blocks),
            evidence=(
                seen("requests_with_zero_tokens", count, "requests", at(*(record.since_at for record in late.records))),
                seen("longest_wait_s", round(late.age_s, 1), "s", at(first.since_at)),
                seen("times_passed_over", first.times_passed_over, "times, at the least", at(first.passed_over_at)),
                seen("computed_tokens", first.computed_tokens, "tokens", at(first.since_at)),
                seen("blocks_free", state.free, "blocks", at(state.places.pool)),
                seen("blocks_held", len(blocks), "blocks", at(state.places.pool)),
                seen("last_step", state.last_step, "step", at(state.places.completed)),
            ),
            explanation=(
                f"{requests_text(late)} {_zero_token_verb(runs, count)} given 0 tokens at every"
                f" {'step' if runs else 'pass'}, {since_text(ledger, late)} ({duration(late.age_s)}; passed over"
                f" {first.times_passed_over:,} times at the least). {_room_text(state.free)} "
                + (
                    f"{counted(len(blocks), 'block')} {'is' if len(blocks) == 1 else 'are'} held for it."
                    if runs
                    else "no other request runs, so each step's budget is whole."
                )
            ),
            numbers={
                "Abort it": f"Abort {them(count)}",
                FREES_BLOCKS: FREES_BLOCKS if runs else "the requests behind it run at once",
            },
        )


def _full_until_ns(ledger: EngineLedger, running: Sequence[RequestState]) -> int:
    """Return until when no block was free for a request whose next token begins one, on the engine's clock.

    0 if there is none. vLLM gives those after it nothing either, while it cannot preempt who runs.
    """
    state, groups = ledger.state, max(1, len(ledger.description.groups))
    if not any(each.computed_tokens % state.block_size == 0 for each in running):
        return 0
    if state.free < groups:
        return ledger.looked_ns
    full = (one for one in reversed(ledger.points) if one.balance.free + one.balance.cached_idle < groups)
    return next((one.at_ns - (ledger.wall(1) - 1) for one in full), 0)


def _room_text(free: int) -> str:
    if not free:
        return "No block is free, but the next token of each fits into its own, so blocks are not the limit."
    return f"{counted(free, 'block')} {'is' if free == 1 else 'are'} free, so blocks are not the limit."


def _zero_token_verb(runs: bool, count: int) -> str:
    if runs:
        return "runs and is" if count == 1 else "run and are"
    return "waits and is" if count == 1 else "wait and are"
