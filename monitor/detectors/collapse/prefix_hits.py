"""collapse.prefix-hits: prompts are computed again though their prefixes are in the cache.

Confirmed by the event stream, where prompts were looked up and too few of their blocks entered the cache: the others
were there. Likely where these are less than half of what was computed, or where the engine stores a content again while
other blocks hold it. Likely by KV events, since these name no hits. From metrics the hit rate fell against the engine's
own level, which does not show why.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, pairwise, takewhile
from typing import Final

from kvscope.monitor.detectors.collapse.hit_rate_drop import (
    HIT_RATE_SPAN_S,
    MAX_HIT_SHARE_LEFT,
    MIN_HIT_LEVEL,
    MIN_LOOKED_UP,
    PREFIX_HITS_NEED,
    SAME_LOAD,
    prefix_hits_by_samples,
)
from kvscope.monitor.detectors.detector import Causes, Detector
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.preemptions import point_at
from kvscope.monitor.detectors.sizing.kv_too_small import KvTooSmall
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.detectors.ties import began_later
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.engine_state import EVENT_BITS
from kvscope.monitor.state.records import ComputedPrompt
from kvscope.monitor.text import clock_time, counted, percent

PREFIX_HITS_CHANGE = (
    "On a model with several KV groups (sliding window, Mamba) every group must hit, and one that always misses"
    " vetoes all of them. Check whether a newer vLLM fixes it, or try --disable-hybrid-kv-cache-manager.",
    "Check that clients send neither their own cache_salt nor prompt_logprobs: such requests do not hit.",
)


PREFIX_HITS_WONT_HELP = ("More KV memory: the cache already holds what is looked up.",)


KV_EVENTS: Final = "kv-events"
NOT_LOOKED_UP: Final = (
    "whether the clients of these prompts asked not to be looked up, as for prompt_logprobs: a part of the prompts"
    " missed what was cached"
)
NOT_IN_ALL_GROUPS: Final = "whether each KV group held the blocks: of these prompts, some group lacked a part"


def _none_hit(prompts: Sequence[ComputedPrompt]) -> bool:
    return not any(prompt.hit for prompt in prompts)


class PrefixHits(Detector[Judgement]):
    """Prefixes that the cache holds and does not give."""

    code = "collapse.prefix-hits"
    severity = "warning"
    title = "Prompts are recomputed although their prefixes are cached"
    requires = ("stream", "kv-events", "metrics")
    position = 420
    sample_need = PREFIX_HITS_NEED

    window_s = Threshold(60, "s", "what was computed again before is past, once a prompt hits")
    lasts_s = Threshold(600, "s", "while no prompt hits: a quiet load, or a full pool, shows neither a hit nor a miss")
    min_prompts = Threshold(3, "prompts", "one or two may have asked not to be looked up, as for prompt_logprobs")
    min_recomputed = Threshold(
        0.01, "of the computed", "of less work that is done again, a client notices nothing in its latency"
    )
    min_share = Threshold(0.5, "of the stored", "where prefixes are hit, next to nothing that is kept is stored again")
    hit_rate_span_s = HIT_RATE_SPAN_S
    min_hit_level = MIN_HIT_LEVEL
    max_hit_share_left = MAX_HIT_SHARE_LEFT
    min_looked_up = MIN_LOOKED_UP
    same_load = SAME_LOAD

    def causes(self) -> Causes[Judgement]:
        """Return what it may cause: preempted requests find nothing of theirs in the cache, and are computed again."""
        return Causes[Judgement]().of(KvTooSmall, began_later)

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield what is cached and computed again."""
        found = list(self._from_stream(ledger, settings)) if ledger.has_stream else []
        # vLLM stores again what is there already, which its KV events report and the stream does not.
        found = found or list(self._from_kv_events(ledger, settings) if ledger.prefixes.stored else ())
        yield from found
        if not (found or ledger.has_stream or ledger.prefixes.stored):
            fallen = prefix_hits_by_samples(ledger, self.code, settings, PREFIX_HITS_CHANGE, PREFIX_HITS_WONT_HELP)
            yield from () if fallen is None else (fallen,)

    def _enough(self, prompts: int, again: int, of: int, settings: Settings) -> bool:
        return prompts >= settings(self.min_prompts) and again >= settings(self.min_share) * of

    def _from_stream(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        windows = self._missed_windows(ledger, settings)
        recent = next((window for window in windows if self._is_much(ledger, window, settings)), None)
        if recent is None:
            return
        missed = [prompt for prompt in recent if prompt.missed]
        again = sum(prompt.missed for prompt in missed)
        computed = sum(prompt.blocks - prompt.hit for prompt in recent)
        began, last_at = ledger.wall(missed[0].at_ns), ledger.at(recent[-1].at)
        hit, asked = sum(prompt.hit for prompt in recent), sum(prompt.blocks for prompt in recent)
        missing = "the lost events" if ledger.state.damaged else ""
        # Earlier probes for vLLM, which keeps several blocks of one content, report a lookup of all prompts.
        # Where another KV group lacked a part, how much of the rest it lacked is unknown.
        sure = [prompt.missed for prompt in missed if not (prompt.kept or prompt.lacked)]
        if not missing and not self._enough(len(sure), sum(sure), computed, settings):
            missing = NOT_IN_ALL_GROUPS if any(prompt.lacked for prompt in missed) else NOT_LOOKED_UP
        yield Judgement(
            code=self.code,
            engine=ledger.engine,
            verdict="likely" if missing else "confirmed",
            since_ns=began,
            position=ledger.at(missed[0].at),
            requests=tuple(dict.fromkeys(prompt.id for prompt in missed)),
            evidence=(
                Evidence("prompts_computed", len(recent), "prompts", position=last_at),
                Evidence("prompt_blocks_looked_up", asked, "blocks", position=last_at),
                Evidence("blocks_hit", hit, "blocks", position=last_at),
                Evidence("blocks_computed", computed, "blocks", position=last_at),
                Evidence("cached_blocks_recomputed", again, "blocks", position=ledger.at(missed[-1].at)),
                Evidence("cached_share_recomputed", round(100 * again / computed, 1), "%", position=last_at),
                Evidence(
                    "blocks_cached_idle",
                    ledger.state.cached_idle,
                    "blocks",
                    position=ledger.at(ledger.state.places.pool),
                ),
            ),
            explanation=(
                f"Since {clock_time(began)} {counted(len(missed), 'prompt')} missed the prefix cache and were"
                f" computed or fetched although it held their blocks: at least {counted(again, 'block')},"
                f" {percent(again / computed)} of all that prompts did not hit. The hit rate was"
                f" {percent(hit / max(asked, 1))}."
            ),
            do_now=(
                "Send one prompt twice with nothing else running. If the second is no faster, the cache never hits.",
            ),
            change=PREFIX_HITS_CHANGE,
            wont_help=PREFIX_HITS_WONT_HELP,
            missing=missing,
        )

    def _missed_windows(self, ledger: EngineLedger, settings: Settings) -> Iterator[Sequence[ComputedPrompt]]:
        """Yield the prompts of the last `window_s` if enough of what they computed was in the cache, or if some of it
        was and no prompt hit anything, nor did a loss of events hide one. Only a hit shows that misses are over: as
        long as none came, also those of windows that ended with a miss in the last `lasts_s`.
        """
        window_ns = settings(self.window_s) * 1e9
        now_ns = ledger.now_ns - (ledger.wall(1) - 1)  # on the engine's clock
        oldest_ns = now_ns - settings(self.lasts_s) * 1e9
        of_late = takewhile(lambda one: one.at_ns >= oldest_ns - window_ns, reversed(ledger.prompts))
        if not any(one.missed for one in of_late):
            return  # which is the rule: each judgement would go through thousands of prompts several times
        since_hit = takewhile(lambda one: one.hit <= one.missed and one.at_ns >= oldest_ns, reversed(ledger.prompts))
        unrefuted_ns = min((one.at_ns for one in since_hit), default=now_ns)
        begin = bisect_left(ledger.prompts, unrefuted_ns - window_ns, key=lambda one: one.at_ns)
        prompts = list(islice(ledger.prompts, begin, None))
        missed = [prompt.missed for prompt in prompts]
        sums = [(0, 0, 0)]
        for prompt, again in zip(prompts, missed, strict=True):
            count, in_cache, computed = sums[-1]
            sums.append((count + (again > 0), in_cache + again, computed + prompt.blocks - prompt.hit))
        times = [prompt.at_ns for prompt in prompts]

        one_group = len(ledger.description.groups) <= 1
        lost = [loss.after for loss in ledger.losses]

        def enough(first: int, end: int) -> bool:
            count, in_cache, computed = (last - before for last, before in zip(sums[end], sums[first], strict=True))
            if self._enough(count, in_cache, computed, settings):
                return True
            if not one_group or count < settings(self.min_prompts):
                return False
            received = [prompt.at >> EVENT_BITS for prompt in (prompts[first], prompts[end - 1])]
            unbroken = bisect_left(lost, received[0]) == bisect_left(lost, received[1])
            return unbroken and _none_hit(prompts[first:end])

        recent = bisect_left(times, now_ns - window_ns)
        if enough(recent, len(prompts)):
            yield prompts[recent:]
        for last in reversed(range(bisect_left(times, unrefuted_ns), len(prompts))):
            if missed[last]:
                first = bisect_left(times, times[last] - window_ns)
                if enough(first, last + 1):
                    yield prompts[first : last + 1]
        if one_group:
            yield from self._missed_beside_hits(ledger, now_ns, settings)

    def _missed_beside_hits(
        self, ledger: EngineLedger, now_ns: int, settings: Settings
    ) -> Iterator[Sequence[ComputedPrompt]]:
        """Yield the prompts of the last `lasts_s` if enough missed, unless misses are over: none came for `window_s`,
        and more prompts hit since the last one than ever between two.
        """
        begin = bisect_left(ledger.prompts, now_ns - settings(self.lasts_s) * 1e9, key=lambda one: one.at_ns)
        prompts = list(islice(ledger.prompts, begin, None))
        places = [place for place, prompt in enumerate(prompts) if prompt.missed]
        if len(places) < settings(self.min_prompts):
            return
        hits = [0, *accumulate(prompt.hit > 0 for prompt in prompts)]
        most_between = max(hits[later] - hits[place] for place, later in pairwise(places))
        is_recent = now_ns - prompts[places[-1]].at_ns <= settings(self.window_s) * 1e9
        if is_recent or hits[-1] - hits[places[-1]] <= most_between:
            yield prompts

    def _is_much(self, ledger: EngineLedger, prompts: Sequence[ComputedPrompt], settings: Settings) -> bool:
        """Whether what was computed though it was cached is a part of all work that clients notice."""
        again = sum(prompt.missed for prompt in prompts)
        until_ns = ledger.wall(prompts[-1].at_ns)
        since_ns = min(until_ns, ledger.wall(prompts[0].at_ns) + 1) - settings(self.window_s) * 1e9
        newest = prompts[-1] is ledger.prompts[-1]
        in_all = ledger.state.totals.computed_tokens if newest else point_at(ledger, until_ns).computed_tokens
        in_all -= point_at(ledger, since_ns).computed_tokens
        return again * ledger.state.block_size >= settings(self.min_recomputed) * in_all

    def _from_kv_events(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        since_ns = ledger.now_ns - settings(self.window_s) * 1e9
        recent = list(takewhile(lambda step: step.at_ns >= since_ns, reversed(ledger.prefixes.steps)))
        stored, again = sum(step.stored for step in recent), sum(step.again for step in recent)
        if not self._enough(sum(step.again > 0 for step in recent), again, stored, settings):
            return
        first = next(step for step in reversed(recent) if step.again)
        yield Judgement(
            code=self.code,
            engine=ledger.engine,
            verdict="likely",
            since_ns=first.at_ns,
            position=first.position,
            evidence=(
                Evidence("blocks_stored", stored, "blocks", KV_EVENTS),
                Evidence("cached_blocks_stored_again", again, "blocks", KV_EVENTS, first.position),
                Evidence("cached_share_stored_again", round(100 * again / stored, 1), "%", KV_EVENTS),
                Evidence("cached_blocks", ledger.prefixes.kept_blocks, "blocks", KV_EVENTS),
            ),
            explanation=(
                f"Since {clock_time(first.at_ns)} {counted(again, 'block')} were computed and stored although the"
                f" cache held the same content, {percent(again / stored)} of all stored blocks. A prefix that hits"
                " is not stored again, except for the last block of a prompt."
            ),
            do_now=(
                "Compare vllm:prefix_cache_hits_total with vllm:prefix_cache_queries_total: the first does not move.",
            ),
            change=PREFIX_HITS_CHANGE,
            wont_help=PREFIX_HITS_WONT_HELP,
            missing=(
                "tokens looked up and hit, by group: the event stream has them; vllm:prefix_cache_queries_total and"
                " _hits_total on /metrics have the sum"
            ),
        )
