"""stuck.self-preempt: a request fills the pool, preempts itself for one block more, and is admitted again."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import clock_time, counted, percent
from ...ledger.engine_ledger import EngineLedger
from ...ledger.records import RequestState
from ..detector import Causes, Settings, StreamDetector, Threshold
from ..judgement import Alternative, Judgement, hits_its_requests, seen
from ..sizing.kv_too_small import KvTooSmall
from ..thrash.preemption_thrash import PreemptionThrash
from .waiting_requests import missing_after_loss


class SelfPreempt(StreamDetector[Judgement]):
    """Requests that preempt themselves over and over.

    Sees: a request that fills the pool, preempts itself with no other left to preempt, and is admitted again.
    Confirmed when: several times in a row, without a token of output in between.
    Likely when: events were lost.
    Not when: it progresses in between; others take its blocks (thrash.preemption).
    """

    code = "stuck.self-preempt"
    severity = "error"
    title = "A request fills the pool, preempts itself and restarts"

    min_times = Threshold(
        3, "times", "alone in the pool, nothing changes from one preemption to the next, so the third is no accident"
    )
    alternatives = (
        Alternative("others take its blocks", "it was alone in the pool at each preemption"),
        Alternative("progress between the preemptions", "no output token in between"),
    )
    causes = Causes[Judgement]().of(PreemptionThrash, hits_its_requests).of(KvTooSmall, hits_its_requests)

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the requests that preempted themselves since their last output."""
        living = ledger.living()
        for records in (living.running, living.waiting):
            for record in records:
                if record.self_preemptions > 1 and record.output_tokens == record.self_preempted_outputs:
                    yield self._judge_request(ledger, settings, record)

    def _judge_request(self, ledger: EngineLedger, settings: Settings, record: RequestState) -> Judgement:
        state, at = ledger.state, ledger.at
        preempted_at = at(record.preempted_at)
        times = record.self_preemptions
        holds = state.usable * state.block_size
        return self.finding(
            ledger,
            key=record.id,
            pending=times < settings(self.min_times),
            since_ns=ledger.wall(record.self_preempted_ns),
            position=preempted_at,
            requests=(record.id,),
            blocks=tuple(sorted(record.blocks)),
            evidence=(
                seen("self_preemptions", times, "times in a row", preempted_at),
                seen("output_tokens", record.output_tokens, "tokens", preempted_at),
                seen("peak_blocks", record.peak_blocks, "blocks", preempted_at),
                seen("blocks_usable", state.usable, "blocks", at(state.places.started)),
                seen("share_of_pool", round(record.peak_blocks / state.usable, 4), "of the pool", preempted_at),
                seen("tokens_lost", record.tokens_lost, "tokens", preempted_at),
            ),
            explanation=(
                f"Request {record.id} has filled the pool ({record.peak_blocks:,} of {state.usable:,} blocks,"
                f" {percent(record.peak_blocks / state.usable)}), needed one more with no other request to preempt,"
                f" preempted itself and was admitted again: {counted(times, 'time')} in a row since"
                f" {clock_time(ledger.wall(record.self_preempted_ns))}, without an output token in between."
                f" {counted(record.tokens_lost, 'token')} of computation were wasted, and the cycle continues."
            ),
            numbers={
                "Abort it": f"Abort {record.id}",
                "to the capacity": f"{holds}, the capacity",
                "what it needs": f"{state.usable + state.reserved} blocks",
            },
            missing=missing_after_loss(ledger),
        )
