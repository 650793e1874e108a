"""Every grace and threshold that a detector uses, with its reason; `--set CODE.NAME=VALUE` changes one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Final, NamedTuple


class Threshold(NamedTuple):
    """A number that a detector compares with."""

    value: float
    unit: str
    reason: str


THRESHOLDS: Final[dict[str, Threshold]] = {
    "leak.finished-held.grace_s": Threshold(
        10,
        "s",
        "a transfer of one request's KV takes milliseconds to seconds; a lease, if there is one, counts instead",
    ),
    "leak.finished-held.lease_slack_s": Threshold(
        5, "s", "an engine looks at expired leases between steps, and one step can take seconds"
    ),
    "leak.finished-held.min_samples": Threshold(
        6, "lines", "a line through fewer points fits by chance: two large prompts after a quiet spell are enough"
    ),
    "leak.finished-held.min_fit": Threshold(
        0.95, "R²", "usage that follows the running sum of prompt tokens this closely is not made by live requests"
    ),
    "leak.finished-held.max_correlation": Threshold(0.5, "r", "usage made by live requests moves with their number"),
    "leak.finished-held.min_rise": Threshold(0.2, "of the pool", "a smaller rise is within one request's size"),
    "leak.finished-held.max_fall": Threshold(
        0.1, "of the pool", "where blocks do come back, usage falls by a request's worth now and then"
    ),
    "leak.finished-held.steady_samples": Threshold(
        30, "lines", "under a load that does not go away, usage must have climbed for this long"
    ),
    "leak.finished-held.idle_floor": Threshold(
        0.02, "of the pool", "with nothing running, usage above this is not rounding"
    ),
    "leak.remote-load-lost.grace_s": Threshold(
        10, "s", "the fetch of one request's KV takes milliseconds to seconds, and nobody waits for this one any more"
    ),
    "leak.idle-not-polled.grace_s": Threshold(
        10, "s", "an idle engine asks its connector many times a second, and heartbeats tell once a second"
    ),
    "leak.lease-burst.min_requests": Threshold(
        3, "requests", "one or two are clients that went away between the two engines"
    ),
    "leak.lease-burst.burst_s": Threshold(1, "s", "what comes back within a second is missed by no queue for longer"),
    "leak.lease-burst.remember_s": Threshold(
        600, "s", "leases last up to minutes; between two that run out it is the same trouble"
    ),
    "leak.deferred-free-stalled.grace_s": Threshold(
        2, "s", "what a step was waited for comes back in the pass in which it is over, or the next"
    ),
    "leak.session-pinned.idle_s": Threshold(300, "s", "people stop to think or to read, for minutes"),
    "leak.session-pinned.min_share": Threshold(0.05, "of the pool", "less is not what others wait for"),
    "leak.external-pins.oldest_s": Threshold(
        10, "s", "a pin lasts as long as a fetch, milliseconds to seconds; for one that still goes on it may be older"
    ),
    "leak.external-pins.min_share": Threshold(
        0.1, "of the tier", "a tier that lacks less than this serves nearly as well as a whole one"
    ),
    "leak.encoder-cache.grace_s": Threshold(
        30, "s", "the encoder's work on a long video takes seconds, in which nobody else may advance"
    ),
    "leak.rising-floor.min_rises": Threshold(
        3, "drains", "a floor that is higher than the last three times over, and never lower, is not left by chance"
    ),
    "leak.unaccounted.grace_s": Threshold(
        2, "s", "a free may be said in the batch after the one that ended its request"
    ),
    "stuck.never-fits.grace_s": Threshold(
        1, "s", "the arithmetic is certain; this only lets a client that gives up at once pass"
    ),
    "stuck.never-fits.figures_grace_s": Threshold(
        10, "s", "gauges are those of the last step, and in one long step the queue may look like this"
    ),
    "stuck.self-preempt.min_times": Threshold(
        3, "times", "with nobody else in the pool nothing changes from one time to the next; the third is no accident"
    ),
    "stuck.parked-loads.grace_s": Threshold(
        5, "s", "nothing runs and nothing is fetched, so nothing can change; this lets a client that gives up pass"
    ),
    "stuck.head-of-line.grace_s": Threshold(
        120, "s", "first come first served is the rule, and who needs much may wait for others to end; not for minutes"
    ),
    "stuck.head-of-line.min_free": Threshold(0.1, "of the pool", "less room is no loss to those that wait"),
    "stuck.remote-load.grace_s": Threshold(
        30, "s", "the fetch of one request's KV takes milliseconds to seconds, behind others some more"
    ),
    "stuck.lost-wakeup.grace_s": Threshold(5, "s", "an engine that is woken makes a pass within milliseconds"),
    "stuck.promotion-starved.grace_s": Threshold(
        10, "s", "who is ready is looked at in the next pass, or the one after a full step; not seconds later"
    ),
    "stuck.grammar.grace_s": Threshold(30, "s", "a grammar compiles in milliseconds, a very large one in seconds"),
    "stuck.zero-token.grace_s": Threshold(
        10, "s", "a request that runs may go without tokens in a full step, not in all of them"
    ),
    "stuck.encoder-budget.grace_s": Threshold(
        30, "s", "items of others leave the encoder's cache as soon as their prompts are computed"
    ),
    "stuck.front-end.grace_s": Threshold(
        5, "s", "from the front end to the scheduler a request takes a pass, with a prompt of many tokens some more"
    ),
    "stuck.engine-stalled.grace_s": Threshold(
        5, "s", "no pause between steps, a garbage collection or a swapped page, is this long"
    ),
    "stuck.engine-stalled.first_step_s": Threshold(60, "s", "the first step of a size may compile kernels"),
    "stuck.engine-stalled.slower_than_expected": Threshold(
        5, "times", "a step this much slower than its tokens have cost so far is not just a long prefill"
    ),
    "stuck.engine-stalled.unseen_step_s": Threshold(
        10, "s", "where only figures are known and none of the steps was seen to end, one may be a long prefill"
    ),
    "stuck.engine-stalled.longest_times": Threshold(
        3, "times", "where only figures are known, a step may take as much longer than the longest seen"
    ),
    "stuck.rank-diverged.after_s": Threshold(
        2, "s", "ranks that wait for one another stop within a step of each other; one that goes on for longer does not"
    ),
    "thrash.preemption.window_s": Threshold(60, "s", "what was thrown away before is past"),
    "thrash.preemption.min_requests": Threshold(
        4, "requests", "a few lose their blocks so early when decodes grow while their prompts are computed"
    ),
    "thrash.preemption.min_share": Threshold(
        0.1, "of the computed", "where a pool is merely full, a twentieth of the work or less is thrown away so early"
    ),
    "thrash.cascade.min_requests": Threshold(
        3, "requests", "of two, only the first can be seen to have given nothing back, which may be a chance"
    ),
    "thrash.cascade.remember_s": Threshold(120, "s", "a pool that is full is so again and again: the same trouble"),
    "thrash.after-retract.quiet_s": Threshold(
        30, "s", "a sound engine lets one more run with each step, and is back at hundreds in as many steps"
    ),
    "thrash.after-retract.over_s": Threshold(10, "s", "steps before and now are compared over so long"),
    "thrash.after-retract.slower": Threshold(2, "times", "steps differ by less as prompts come and go"),
    "collapse.lockstep.within_s": Threshold(
        1, "s", "requests that end by chance do not end within one second of each other"
    ),
    "collapse.lockstep.max_spread": Threshold(
        0.1, "of their lives", "requests that live for a second end within one by chance; those in step end closer"
    ),
    "collapse.lockstep.min_requests": Threshold(4, "requests", "fewer end together by chance"),
    "collapse.lockstep.min_share": Threshold(0.5, "of the pool", "a smaller fall is ordinary traffic"),
    "collapse.lockstep.next_wave_s": Threshold(
        30, "s", "what makes it an incident is the wave that queues next; if none comes, the load has ended"
    ),
    "collapse.lockstep.remember_s": Threshold(
        120, "s", "waves come minutes apart; between them it is the same trouble"
    ),
    "collapse.preempt-all.min_requests": Threshold(
        4, "requests", "of two or three, a prompt that needs many blocks may well preempt all"
    ),
    "collapse.preempt-all.min_share": Threshold(
        0.9, "of the running", "who lacks a block need preempt one request, or as many as have the blocks it lacks"
    ),
    "collapse.preempt-all.remember_s": Threshold(120, "s", "waves come minutes apart; it is the same trouble"),
    "collapse.prefix-hits.window_s": Threshold(60, "s", "what was computed again before is past"),
    "collapse.prefix-hits.min_blocks": Threshold(
        64, "blocks", "fewer are a prompt or two that were not looked up, for a request of its own wish"
    ),
    "collapse.prefix-hits.min_share": Threshold(
        0.5, "of the stored", "where prefixes are hit, next to nothing that is kept is stored again"
    ),
    "collapse.cache-flushed.min_share": Threshold(
        0.5, "of the kept", "a prompt that evicts less leaves most prefixes in place"
    ),
    "collapse.cache-flushed.min_missed": Threshold(
        0.1, "of the evicted", "prefixes that nobody asks for again are no loss: this is what an LRU is for"
    ),
    "collapse.cache-flushed.min_blocks": Threshold(64, "blocks", "less to compute again costs nobody much"),
    "collapse.cache-flushed.min_cache": Threshold(
        0.5, "of the pool", "where less was cached and idle, live requests need the pool, and prefixes give way"
    ),
    "collapse.cache-flushed.min_unused": Threshold(
        0.1, "of the pool", "a few blocks without content lie somewhere in every free queue"
    ),
    "collapse.cache-flushed.remember_s": Threshold(
        600, "s", "large prompts come minutes apart; it is the same trouble"
    ),
    "sizing.kv-too-small.window_s": Threshold(60, "s", "what it costs now counts"),
    "sizing.kv-too-small.min_preemptions": Threshold(3, "preemptions", "one or two are long requests met by chance"),
    "sizing.kv-too-small.min_share": Threshold(
        0.1, "of the computed", "the tax of 10 to 23 % that is reported of full pools begins here"
    ),
    "sizing.kv-too-small.over_s": Threshold(
        10, "s", "nothing is lost by telling of a size later; what else preempts them is known by then"
    ),
    "sizing.kv-too-large.min_free_mib": Threshold(
        150, "MiB", "engines keep so much free in what they advise, for what grows with requests"
    ),
    "sizing.overreserved.min_times": Threshold(2, "times", "an estimate is an estimate"),
    "sizing.overreserved.min_share": Threshold(0.01, "of the device", "less is hardly a block for each request"),
    "sizing.block-inflated.min_block": Threshold(
        256, "tokens", "blocks that are chosen, not made to fit other layers, are smaller"
    ),
    "sizing.block-inflated.min_requests": Threshold(4, "requests", "fewer say nothing of the load"),
    "sizing.block-inflated.min_usage": Threshold(0.5, "of the pool", "below this, room is not what anybody lacks"),
    "sizing.block-inflated.max_filled": Threshold(
        0.5, "of the reserved", "the last block of each request is half empty on average, the others are full"
    ),
    "sizing.elsewhere.min_share": Threshold(
        0.05, "of the device", "a driver, a display or a second small process is less"
    ),
    "held.prefix-cache.min_share": Threshold(0.1, "of the pool", "less is not worth a line"),
    "held.pool-reserved.min_share": Threshold(
        0.25, "of the device", "who wonders where the memory went does not mean less"
    ),
    "held.long-request.min_share": Threshold(0.25, "of the pool", "less does not crowd others out"),
    "held.long-request.min_age_s": Threshold(5, "s", "shorter requests are gone before they are read about"),
    "blind.log-silence.silent_s": Threshold(
        30, "s", "vLLM writes a line every ten seconds while it works; three that are missing are no delay"
    ),
    "blind.stream-gap.remember_s": Threshold(600, "s", "figures of the last minutes may rest on what was lost"),
}


class Settings:
    """The thresholds in force: the table's, and what was set instead."""

    def __init__(self, changed: Mapping[str, float] | None = None) -> None:
        self._values = {name: threshold.value for name, threshold in THRESHOLDS.items()} | dict(changed or {})

    def __call__(self, code: str, name: str) -> float:
        """The value of `name` for the code."""
        return self._values[f"{code}.{name}"]

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Settings:
        """From `CODE.NAME=VALUE`, as `--set` takes it. Raises ValueError, naming what is wrong and what there is."""
        changed: dict[str, float] = {}
        for text in texts:
            name, _, value = text.partition("=")
            if name not in THRESHOLDS:
                near = [known for known in THRESHOLDS if known.split(".")[:2] == name.split(".")[:2]]
                near = near or get_close_matches(name, THRESHOLDS, cutoff=0)
                raise ValueError(
                    f"--set {text}: there is no threshold {name!r}; near it are {', '.join(near)}, and"
                    " docs/reference.md has all of them"
                )
            try:
                changed[name] = float(value)
            except ValueError:
                changed[name] = math.nan
            if math.isnan(changed[name]):
                raise ValueError(f"--set {text}: {value!r} is not a number")
        return cls(changed)
