"""stuck.self-preempt: a request fills the pool, preempts itself for one block more, and is admitted again."""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.detector import Causes, Detector
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.sizing.kv_too_small import KvTooSmall
from kvscope.monitor.detectors.stuck.waiting_requests import missing_after_loss, stream_verdict
from kvscope.monitor.detectors.thrash.preemption_thrash import PreemptionThrash
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.detectors.ties import hits_its_requests
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import RequestState
from kvscope.monitor.text import clock_time, counted, percent


class SelfPreempt(Detector[Judgement]):
    """Requests that preempt themselves over and over."""

    code = "stuck.self-preempt"
    severity = "error"
    title = "A request fills the pool, preempts itself and restarts"
    requires = ("stream",)
    position = 290

    min_times = Threshold(
        3, "times", "alone in the pool, nothing changes from one preemption to the next, so the third is no accident"
    )

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the requests that preempted themselves since their last output."""
        if not ledger.has_stream:
            return
        living = ledger.living()
        for records in (living.running, living.waiting):
            for record in records:
                if record.self_preemptions > 1 and record.output_tokens == record.self_preempted_outputs:
                    yield self._judge_request(ledger, settings, record)

    def causes(self) -> Causes[Judgement]:
        """Return what it may cause."""
        return Causes[Judgement]().of(PreemptionThrash, hits_its_requests).of(KvTooSmall, hits_its_requests)

    def _judge_request(self, ledger: EngineLedger, settings: Settings, record: RequestState) -> Judgement:
        state, at = ledger.state, ledger.at
        usable = state.total - state.reserved
        preempted_at = at(record.preempted_at)
        times = record.self_preemptions
        holds = usable * state.block_size
        return Judgement(
            code=self.code,
            engine=ledger.engine,
            key=record.id,
            verdict=stream_verdict(ledger),
            pending=times < settings(self.min_times),
            since_ns=ledger.wall(record.self_preempted_ns),
            position=preempted_at,
            requests=(record.id,),
            blocks=tuple(sorted(record.blocks)),
            evidence=(
                Evidence("self_preemptions", times, "times in a row", position=preempted_at),
                Evidence("output_tokens", record.output_tokens, "tokens", position=preempted_at),
                Evidence("peak_blocks", record.peak_blocks, "blocks", position=preempted_at),
                Evidence("blocks_usable", usable, "blocks", position=at(state.places.started)),
                Evidence("share_of_pool", round(record.peak_blocks / usable, 4), "of the pool", position=preempted_at),
                Evidence("tokens_lost", record.tokens_lost, "tokens", position=preempted_at),
            ),
            explanation=(
                f"Request {record.id} has filled the pool ({record.peak_blocks:,} of {usable:,} blocks,"
                f" {percent(record.peak_blocks / usable)}), needed one more with no other request to preempt,"
                f" preempted itself and was admitted again: {counted(times, 'time')} in a row since"
                f" {clock_time(ledger.wall(record.self_preempted_ns))}, without an output token in between."
                f" {counted(record.tokens_lost, 'token')} of computation were wasted, and the cycle continues."
            ),
            do_now=(
                f"Abort {record.id} (close its connection): nothing else ends the cycle, and other requests wait for"
                " its blocks.",
            ),
            change=(
                f"Set --max-model-len {holds}, the capacity of the pool: such a request then ends normally at that"
                " length.",
                f"Or enlarge the pool to more than {usable + state.reserved} blocks (--kv-cache-memory-bytes, a"
                " higher --gpu-memory-utilization, no --num-gpu-blocks-override).",
            ),
            wont_help=(
                "Lowering the load, or max_num_seqs: the request is alone in the pool.",
                "Watching the preemption counter: vLLM's counts a preemption only with the request's next output"
                " token, which never comes.",
            ),
            missing=missing_after_loss(ledger),
        )
