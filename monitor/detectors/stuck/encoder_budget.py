"""stuck.encoder-budget: a request is passed over for room in the encoder's cache, at every step."""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.engine_pace import at_pace_s
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.leak.encoder_holders import hold_one_another
from kvscope.monitor.detectors.stuck.waiting_requests import (
    overdue_requests,
    requests_text,
    since_text,
)
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.events.kinds import Cause
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import RequestState
from kvscope.monitor.text import counted, duration


class EncoderBudget(Detector[Judgement]):
    """Requests that are passed over for the encoder."""

    code = "stuck.encoder-budget"
    severity = "error"
    title = "A request waits for room in the encoder cache"
    requires = ("stream",)
    position = 280

    grace_s = Threshold(30, "s", "items of others leave the encoder's cache as soon as their prompts are computed")

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the requests passed over for the encoder, unless they are leak.encoder-cache."""
        if not ledger.has_stream or hold_one_another(ledger):
            return
        living = ledger.living()
        encoder = [r for records in (living.running, living.waiting) for r in records if r.cause == Cause.ENCODER]
        yield from self._from_stream(ledger, settings, encoder)

    def _from_stream(
        self, ledger: EngineLedger, settings: Settings, passed_over: list[RequestState]
    ) -> Iterator[Judgement]:
        grace_s = at_pace_s(ledger, settings, self.grace_s)
        late = overdue_requests(ledger, passed_over, lambda r: r.since_ns, ledger.looked_ns, grace_s)
        if late is None:
            return
        state, at, count = ledger.state, ledger.at, len(late.records)
        yield Judgement(
            code=self.code,
            engine=ledger.engine,
            verdict="likely",
            pending=late.pending,
            since_ns=ledger.wall(late.since_ns),
            position=at(late.records[0].since_at),
            requests=late.ids,
            evidence=(
                Evidence(
                    "requests_waiting", count, "requests", position=at(*(record.since_at for record in late.records))
                ),
                Evidence("longest_wait_s", round(late.age_s, 1), "s", position=at(late.records[0].since_at)),
                Evidence(
                    "times_passed_over",
                    late.records[0].times_passed_over,
                    "times, at the least",
                    position=at(late.records[0].passed_over_at),
                ),
                Evidence("blocks_free", state.free, "blocks", position=at(state.places.pool)),
                Evidence("last_step", state.last_step, "step", position=at(state.places.completed)),
            ),
            explanation=(
                f"{requests_text(late)} {'is' if count == 1 else 'are'} skipped for lack of encoder room at every"
                f" step, {since_text(ledger, late)} ({duration(late.age_s)}), with {counted(state.free, 'block')}"
                " free: an image, video or sound in it is larger than the encoder cache, or other requests keep"
                " that cache full."
            ),
            do_now=(
                f"Abort {'it' if count == 1 else 'them'} (close the connection). Send a smaller item, or one with"
                " fewer frames.",
            ),
            change=(
                "Limit the size of items (vLLM: --mm-processor-kwargs, --limit-mm-per-prompt).",
                "Enlarge the encoder budget: in vLLM, its budget and its cache follow --max-num-batched-tokens.",
                "Upgrade: newer vLLM rejects an item that its encoder cache cannot hold (PR #33110, #41969).",
            ),
            wont_help=(
                "A larger KV pool: KV blocks are free. The encoder cache is separate memory.",
                "Waiting, if the item alone is too large.",
            ),
            missing=(
                "the sizes of the item and of the encoder cache: the event stream has neither, the engine's log may"
            ),
        )
