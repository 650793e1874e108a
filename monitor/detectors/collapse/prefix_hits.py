"""collapse.prefix-hits: prompts are computed again though their prefixes are in the cache."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, pairwise, takewhile
from typing import Final, NamedTuple

from ...base.text import clock_time, counted, duration, percent
from ...contract.samples import Sample
from ...ledger.engine_ledger import EngineLedger
from ...ledger.engine_state import EVENT_BITS
from ...ledger.records import ComputedPrompt
from ..detector import Causes, FromKvEvents, FromMetrics, Known, SampleNeed, Settings, StreamDetector, Threshold
from ..judgement import Alternative, Evidence, Judgement, began_later, seen
from ..preemptions import point_at
from ..sample_math import apart_s, moved, scrape_interval_s
from ..sizing.kv_too_small import KvTooSmall

CELL_S: Final = 60.0
"""Hit rates are compared minute by minute: the longest usual scrape interval."""
CELLS_COMPARED: Final = 120
SPACING: Final = 0.9
"""Scrapes a little closer together than a cell still bound one."""
HIT_RATE_SPAN_S = Threshold(
    900, "s", "where only metrics are known: ten minutes of the level before, and five, a third of it, of the new one"
)
PREFIX_HITS_NEED = SampleNeed(16, HIT_RATE_SPAN_S, "ten minutes at one hit rate, then five at a quarter of it or less")


class HitCell(NamedTuple):
    """About a minute of look-ups. looked_up: tokens. requests: that ended, -1 where not exposed."""

    first: Sample
    last: Sample
    looked_up: int
    rate: float
    requests: int

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return apart_s(self.first, self.last) or 0.0


def hit_cells(samples: Sequence[Sample]) -> list[HitCell]:
    """Return the samples as cells of a minute or a scrape interval, those without look-ups left out."""
    marks: list[Sample] = []
    for sample in reversed(samples):
        if marks and not _is_apart(sample, marks[-1]):
            continue
        if sample.at_ns is None or (sample.prefix_queries is None and sample.prefix_hit_rate is None):
            break
        marks.append(sample)
        if len(marks) > CELLS_COMPARED:
            break
    marks.reverse()
    cells = (_hit_cell(one, two) for one, two in pairwise(marks))
    return [cell for cell in cells if cell is not None]


def _is_apart(sample: Sample, later: Sample) -> bool:
    return sample.at_ns is None or later.at_ns is None or later.at_ns - sample.at_ns >= SPACING * CELL_S * 1e9


def _hit_cell(first: Sample, last: Sample) -> HitCell | None:
    requests = moved(first.finished, last.finished) if last.finished is not None else -1
    if first.prefix_queries is not None and last.prefix_queries is not None:
        looked_up = moved(first.prefix_queries, last.prefix_queries)
        rate = moved(first.prefix_hits, last.prefix_hits) / looked_up if looked_up > 0 else 0.0
    else:  # SGLang exposes the rate of its last batch, and tokens of prompts
        looked_up = round((last.prompt_tokens_per_s or 0.0) * (apart_s(first, last) or 0.0))
        rate = last.prefix_hit_rate or 0.0
    return HitCell(first, last, looked_up, rate, requests) if looked_up > 0 else None


class HitRateDrop(NamedTuple):
    """Cells before the hit rate fell, and since."""

    before: list[HitCell]
    since: list[HitCell]

    @property
    def level(self) -> float:
        """The hit rate before."""
        return statistics.median(cell.rate for cell in self.before)


def hit_rate_drop(samples: Sequence[Sample], settings: Settings) -> HitRateDrop | None:
    """Return the fall, if there is one and the load is the same as before."""
    if not samples or samples[-1].source == "log":
        return None  # vLLM's line has the mean of the last thousand requests
    cells = [
        cell
        for cell in hit_cells(samples)
        if cell.looked_up >= settings(PrefixHits.min_looked_up) * cell.seconds / CELL_S
    ]
    needed_since = round(settings(HIT_RATE_SPAN_S) / CELL_S / 3)
    if len(cells) < 3 * needed_since:
        return None
    high = sorted(cell.rate for cell in cells)[3 * len(cells) // 4]
    most = settings(PrefixHits.max_hit_share_left) * high
    start = len(cells)
    while start > 0 and cells[start - 1].rate <= most:
        start -= 1
    drop = HitRateDrop(cells[:start], cells[start:])
    if len(drop.since) < needed_since or len(drop.before) < 2 * needed_since:
        return None
    lowest_before = sorted(cell.rate for cell in drop.before)[len(drop.before) // 10]
    steady = lowest_before >= drop.level / 2 and drop.level >= settings(PrefixHits.min_hit_level)
    return drop if steady and _is_same_load(drop, settings(PrefixHits.same_load)) else None


def _is_same_load(drop: HitRateDrop, factor: float) -> bool:
    """Whether requests are as long and as many as before, as far as their number is exposed."""
    if any(cell.requests < 0 for cell in (*drop.before, *drop.since)):
        return True
    ratios = []
    for measure in (_tokens_each, _requests_a_second):
        before, since = measure(drop.before), measure(drop.since)
        ratios.append(max(before, since) / max(min(before, since), 1e-9))
    return all(ratio <= factor for ratio in ratios)


def _tokens_each(cells: Sequence[HitCell]) -> float:
    return sum(cell.looked_up for cell in cells) / max(sum(cell.requests for cell in cells), 1)


def _requests_a_second(cells: Sequence[HitCell]) -> float:
    return sum(cell.requests for cell in cells) / max(sum(cell.seconds for cell in cells), 1.0)


KV_EVENTS: Final = "kv-events"
NOT_LOOKED_UP: Final = (
    "whether the clients of these prompts asked not to be looked up, as for prompt_logprobs: a part of the prompts"
    " missed what was cached"
)
NOT_IN_ALL_GROUPS: Final = "whether each KV group held the blocks: of these prompts, some group lacked a part"


def _none_hit(prompts: Sequence[ComputedPrompt]) -> bool:
    return not any(prompt.hit for prompt in prompts)


class PrefixHits(StreamDetector[Judgement]):
    """Prefixes that the cache holds and does not give.

    Sees: prompts that were looked up and computed, of which too few blocks entered the cache: the others were there.
    Confirmed when: these are half of what prompts computed.
    Likely when: they are less and no prompt hit, a KV group lacked a part, the engine stores one content several times,
    or events were lost.
    Not when: they share no prefix; prompts hit again, or it is a hundredth of the work. Below a tenth it is info.
    """

    code = "collapse.prefix-hits"
    severity = "warning"
    title = "Prompts are recomputed although their prefixes are cached"
    recurs = True
    sample_need = PREFIX_HITS_NEED

    window_s = Threshold(60, "s", "what was computed again before is past, once a prompt hits")
    lasts_s = Threshold(600, "s", "while no prompt hits: a quiet load, or a full pool, shows neither a hit nor a miss")
    min_prompts = Threshold(3, "prompts", "one or two may have asked not to be looked up, as for prompt_logprobs")
    min_recomputed = Threshold(
        0.01, "of the computed", "of less work that is done again, a client notices nothing in its latency"
    )
    harmful_share = Threshold(0.1, "of the computed", "of less that is done again, latency varies more by itself")
    min_share = Threshold(0.5, "of the stored", "where prefixes are hit, next to nothing that is kept is stored again")
    hit_rate_span_s = HIT_RATE_SPAN_S
    min_hit_level = Threshold(0.2, "of the tokens", "a lower level of hits comes and goes with single prompts")
    max_hit_share_left = Threshold(0.25, "of the level", "where only metrics are known: a mix of loads shifts by less")
    min_looked_up = Threshold(1000, "tokens", "looked up in a minute: fewer are one prompt")
    same_load = Threshold(
        1.5, "times", "tokens looked up for each request, and requests a minute, of one load vary by less"
    )
    alternatives = (Alternative("prompts without a common prefix", "the same content was stored again while cached"),)
    # Preempted requests find nothing of theirs in the cache, and are computed again.
    causes = Causes[Judgement]().of(KvTooSmall, began_later)

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield what is cached and computed again."""
        windows = self._missed_windows(ledger, settings)
        shares = ((window, self._share_of_work(ledger, window, settings)) for window in windows)
        recent, of_work = next((one for one in shares if one[1] >= settings(self.min_recomputed)), (None, 0.0))
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
        yield self.finding(
            ledger,
            severity=None if of_work >= settings(self.harmful_share) else "info",
            since_ns=began,
            position=ledger.at(missed[0].at),
            requests=tuple(dict.fromkeys(prompt.id for prompt in missed)),
            evidence=(
                seen("prompts_computed", len(recent), "prompts", last_at),
                seen("prompt_blocks_looked_up", asked, "blocks", last_at),
                seen("blocks_hit", hit, "blocks", last_at),
                seen("blocks_computed", computed, "blocks", last_at),
                seen("cached_blocks_recomputed", again, "blocks", ledger.at(missed[-1].at)),
                seen("cached_share_recomputed", round(100 * again / computed, 1), "%", last_at),
                seen("blocks_cached_idle", ledger.state.cached_idle, "blocks", ledger.at(ledger.state.places.pool)),
            ),
            explanation=(
                f"Since {clock_time(began)} {counted(len(missed), 'prompt')} missed the prefix cache and were computed"
                f" or fetched although it held their blocks: at least {counted(again, 'block')},"
                f" {percent(again / computed)} of all that prompts did not hit. The hit rate was"
                f" {percent(hit / max(asked, 1))}."
            ),
            missing=missing,
        )

    def _enough(self, prompts: int, again: int, of: int, settings: Settings) -> bool:
        return prompts >= settings(self.min_prompts) and again >= settings(self.min_share) * of

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

    def _share_of_work(self, ledger: EngineLedger, prompts: Sequence[ComputedPrompt], settings: Settings) -> float:
        """Return the part of all computed tokens that was computed though it was cached."""
        again = sum(prompt.missed for prompt in prompts)
        until_ns = ledger.wall(prompts[-1].at_ns)
        since_ns = min(until_ns, ledger.wall(prompts[0].at_ns) + 1) - settings(self.window_s) * 1e9
        newest = prompts[-1] is ledger.prompts[-1]
        in_all = ledger.state.totals.computed_tokens if newest else point_at(ledger, until_ns).computed_tokens
        in_all -= point_at(ledger, since_ns).computed_tokens
        return again * ledger.state.block_size / max(in_all, 1)


class PrefixHitsFromKvEvents(FromKvEvents, PrefixHits):
    """Prefixes that are stored again while the cache holds them.

    Sees: half of the blocks stored in a minute repeat a content that the cache had, which vLLM's event stream hides.
    Likely when: always, since KV events name no hits.
    Not when: only the last block of each prompt is stored again.
    """

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield what was stored again, unless the event stream shows as much."""
        if ledger.has_stream and any(PrefixHits().detect(ledger, settings)):
            return
        since_ns = ledger.now_ns - settings(self.window_s) * 1e9
        recent = list(takewhile(lambda step: step.at_ns >= since_ns, reversed(ledger.prefixes.steps)))
        stored, again = sum(step.stored for step in recent), sum(step.again for step in recent)
        if not self._enough(sum(step.again > 0 for step in recent), again, stored, settings):
            return
        first = next(step for step in reversed(recent) if step.again)
        yield self.finding(
            ledger,
            since_ns=first.at_ns,
            position=first.position,
            evidence=(
                Evidence("blocks_stored", stored, "blocks", KV_EVENTS),
                Evidence("cached_blocks_stored_again", again, "blocks", KV_EVENTS, first.position),
                Evidence("cached_share_stored_again", round(100 * again / stored, 1), "%", KV_EVENTS),
                Evidence("cached_blocks", ledger.prefixes.kept_blocks, "blocks", KV_EVENTS),
            ),
            explanation=(
                f"Since {clock_time(first.at_ns)} {counted(again, 'block')} were computed and stored although the cache"
                f" held the same content, {percent(again / stored)} of all stored blocks. A prefix that hits is not"
                " stored again, except for the last block of a prompt."
            ),
            case="From KV events",
            missing=(
                "tokens looked up and hit, by group: the event stream has them; vllm:prefix_cache_queries_total and"
                " _hits_total on /metrics have the sum"
            ),
        )


class PrefixHitsFromMetrics(FromMetrics, PrefixHits):
    """A hit rate that fell against the engine's own level.

    Sees: the hit rate fell to a quarter of its level and stays there.
    Cannot tell: prompts without a common prefix, evictions and failed look-ups look the same.
    Not when: requests became longer, shorter or fewer: the load changed.
    """

    def applies(self, known: Known) -> bool:
        """Whether metrics are all there is: KV events show more."""
        return super().applies(known) and not known.kv_events

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the fall of the hit rate."""
        drop = hit_rate_drop(ledger.samples, settings)
        if drop is None:
            return
        began, last = drop.since[0].first, drop.since[-1].last
        looked_up = sum(cell.looked_up for cell in drop.since)
        now = sum(cell.rate * cell.looked_up for cell in drop.since) / looked_up
        requests = sum(cell.requests for cell in drop.since) if drop.since[0].requests >= 0 else None
        as_before = (
            "How many requests that were is not exposed. "
            if requests is None
            else f"{counted(requests, 'request')} ended meanwhile, about as many a minute and as long as before. "
        )
        source, span = last.source, f"{began.position} to {last.position}"
        yield self.finding(
            ledger,
            verdict="cannot-tell",
            since_ns=began.at_ns or 0,
            position=began.position,
            evidence=(
                Evidence("hit_rate_before", round(100 * drop.level, 1), "%", source, f"until {began.position}"),
                Evidence("hit_rate", round(100 * now, 1), "%", source, span),
                Evidence("tokens_looked_up", looked_up, "tokens", source, span),
                Evidence(
                    "requests_finished", "not exposed" if requests is None else requests, "requests", source, span
                ),
                Evidence("usage", round(100 * (last.usage or 0.0), 1), "%", source, last.position),
            ),
            explanation=(
                f"Since {clock_time(began.at_ns or 0)} the prefix cache hits {percent(now)} of the tokens that are"
                f" looked up, after {percent(drop.level)} in the {duration(sum(cell.seconds for cell in drop.before))}"
                f" before. {as_before}Possible causes: prompts of the same length that share no prefix (another tenant,"
                " a router that no longer sends similar prompts here), prefixes evicted before their next use, or"
                " lookups that miss what the cache has."
            ),
            missing="what the cache holds and what is looked up: KV events (monitor doctor"
            " http://HOST:8000/kv_event_sources) or the event stream."
            f" {self.sample_need.text(settings, scrape_interval_s(ledger.samples))}",
        )
