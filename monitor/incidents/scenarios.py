"""What is brought about: the table of incidents, and that of healthy engines.

An incident is a fault on an engine under a load for so many virtual seconds. Each code has three ways or more, which
differ in how often the fault strikes, in the engine's shape and in what its clients do. Beside them stands what the
judge asks of the monitor: from when on it is there (`onset`), how long the class itself waits (`grace`), whom it
strikes, and what else it rightly causes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from monitor.detectors.thresholds import Settings
from monitor.incidents.life import (
    Life,
    Named,
    alive,
    among,
    anybody,
    at_once,
    blocks_of,
    blocks_struck,
    deferred,
    exactly,
    finished,
    heirs,
    holding_in_queue,
    idle_with_deferrals,
    in_vain,
    inherited,
    leaked,
    long_ones,
    missed_again,
    nobody,
    overdrawn,
    ownerless_blocks,
    parked,
    preempted,
    preemptions,
    somebody_lacks_blocks,
    strikes,
    struck,
)
from monitor.incidents.load import Clients

SHOWN_BY_HAND: Final = (
    "leak.session-pinned", "leak.encoder-cache", "stuck.encoder-budget", "stuck.rank-diverged",
    "sizing.block-inflated", "blind.*", "held.*",
)  # fmt: skip
"""kvscope's engine has no such part: tests/detectors has streams written by hand for these."""

AT_FIRST: Final = strikes(1)
THE_STRUCK: Final = exactly(struck)
Load = tuple[Clients, ...]
Engine = Mapping[str, Any]


@dataclass(frozen=True)
class Scenario:
    """One way to bring an incident about; a healthy engine if `code` is empty.

    fault: as `--fault` takes it. engine: EngineConfig's fields. step_s: the least that a step takes. grace: thresholds,
    in seconds, that the class waits for; waits_s: what it waits for besides. requests, blocks: whom a finding must name
    (None: it is not asked). consequences: other codes that may rightly be found.
    """

    name: str
    code: str = ""
    fault: str = ""
    engine: Engine = field(default_factory=dict)
    load: Load = ()
    seconds: float = 40.0
    step_s: float = 0.02
    grace: tuple[str, ...] = ()
    waits_s: float = 0.0
    onset: Callable[[Life], bool] = AT_FIRST
    requests: Callable[[Life], Named] | None = THE_STRUCK
    blocks: Callable[[Life], Named] | None = None
    consequences: frozenset[str] = frozenset()

    def grace_s(self, settings: Settings) -> float:
        """What the class itself waits before it is found."""
        return self.waits_s + sum(settings(*name.rsplit(".", 1)) for name in self.grace)


class Way(NamedTuple):
    """One of the ways to bring an incident about. keys: how often the fault strikes, as `--fault` takes it."""

    name: str
    engine: Engine
    load: Load
    keys: str = ""


def _incident(code: str, *ways: Way, **asked: Any) -> list[Scenario]:
    """A scenario for each way; `asked` is what all of them have in common."""
    return [
        Scenario(f"{code}{way.keys} {way.name}", code, f"{code}{way.keys}", way.engine, way.load, **asked)
        for way in ways
    ]


# -------------------------------------------------------------------- engines

SMALL: Final = {"num_gpu_blocks_override": 101, "max_num_seqs": 8, "max_num_batched_tokens": 256}
MEDIUM: Final = {"num_gpu_blocks_override": 401, "max_num_seqs": 32, "max_num_batched_tokens": 1024}
FINE: Final = {
    "num_gpu_blocks_override": 601, "block_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 512,
    "scheduling_policy": "priority",
}  # fmt: skip
TIGHT: Final = {"num_gpu_blocks_override": 41, "max_num_seqs": 16, "max_num_batched_tokens": 128}
TIGHT_FINE: Final = {**FINE, "num_gpu_blocks_override": 161}
HOST: Final = {"kv_connector": "host"}
AHEAD: Final = {"async_scheduling": True}
NO_PREFIXES: Final = {"enable_prefix_caching": False}
PRIORITY: Final = {"scheduling_policy": "priority"}

# -------------------------------------------------------------------- clients

CHAT: Final = Clients(rate=0.6, until_s=15)
BUSY: Final = Clients("b", rate=2, until_s=15)
URGENT: Final = Clients("u", rate=0.6, until_s=15, priority=(0, 3))
LEAVING: Final = Clients("l", rate=1, until_s=15, leave=0.6)
SHARING: Final = Clients("s", rate=1, until_s=15, leave=0.6, prefixes=2, prefix=160)
STRUCTURED: Final = Clients("g", rate=0.4, until_s=15, regex="[ab]{9}")
# More beginnings than the pool keeps: again and again one is fetched from the host.
FETCHED: Final = Clients("f", rate=3, until_s=15, prompt=(10, 30), output=(5, 15), prefixes=12, prefix=320)
FETCHED_POOL: Final = {**HOST, "num_gpu_blocks_override": 161, "max_num_seqs": 8, "max_num_batched_tokens": 512}
FETCHED_FINE: Final = {**FETCHED_POOL, "block_size": 8, "num_gpu_blocks_override": 221, "max_num_seqs": 4}
FETCHED_URGENT: Final = {**FETCHED_POOL, **PRIORITY}
GONE: Final = Clients(
    "gone", rate=2, since_s=6, until_s=16, prompt=(10, 30), prefixes=12, prefix=320, leave_fetching=True
)
GROWING: Final = (Clients(at_once=10, prompt=(15, 30), output=(60, 90), until_s=20),)


def _together(*prefixes: str, tokens: int, own: int = 16) -> Load:
    """Prompts are stored in the host, the pool forgets them, and then all are fetched at the same time.

    Each begins with `tokens` tokens and goes on with at most `own`; what makes the pool forget has twice as many.
    """
    once = (
        Clients(
            name, times=(1.0 + 2 * n, 8.0), prompt=(1, own), output=(30, 40), prefixes=1, prefix=tokens, family=name
        )
        for n, name in enumerate(prefixes)
    )
    return *once, Clients("flush", times=(5.0,), prompt=(2 * tokens - 20, 2 * tokens - 20), output=(2, 2))


# -------------------------------------------------------------------- leaks

LEAKS: Final = (
    *_incident(
        "leak.finished-held",
        Way("chat", {**SMALL, **HOST}, (CHAT,)),
        Way("busy", {**MEDIUM, **HOST}, (BUSY,), ":every=3"),
        Way("urgent", {**FINE, **HOST}, (URGENT, LEAVING), ":after=5:limit=4"),
        grace=("leak.finished-held.grace_s",),
        blocks=exactly(blocks_struck),
    ),
    *_incident(
        "leak.remote-load-lost",
        Way("all", FETCHED_POOL, (FETCHED, GONE)),
        Way("urgent", FETCHED_URGENT, (FETCHED, GONE), ":every=2"),
        Way("fine", FETCHED_FINE, (FETCHED, GONE), ":limit=2"),
        grace=("leak.remote-load-lost.grace_s",),
        blocks=exactly(blocks_struck),
    ),
    *_incident(
        "leak.lease-burst",
        Way("chat", {**MEDIUM, **HOST, "kv_lease_seconds": 10}, (CHAT,)),
        Way("busy", {**MEDIUM, **HOST, "kv_lease_seconds": 10}, (BUSY,), ":every=2"),
        Way("urgent", {**FINE, **HOST, "kv_lease_seconds": 10}, (URGENT, LEAVING), ":after=3:limit=5"),
        waits_s=10,  # the lease
        onset=strikes(3),
        blocks=exactly(blocks_struck),
    ),
    *_incident(
        "leak.idle-not-polled",
        Way("chat", {**SMALL, **HOST}, (CHAT,)),
        Way("busy", {**MEDIUM, **HOST}, (BUSY,), ":after=2"),
        Way("four at once", {**FINE, **HOST}, (Clients(times=(3.0,) * 4, prompt=(60, 60), output=(20, 20)),)),
        grace=("leak.idle-not-polled.grace_s",),
        onset=idle_with_deferrals,
        requests=exactly(deferred),
        blocks=exactly(blocks_of(deferred)),
    ),
    *_incident(
        "leak.unaccounted",
        Way("all", MEDIUM, (LEAVING,)),
        Way("sharing", MEDIUM, (SHARING, CHAT), ":every=3"),
        Way("urgent", FINE, (LEAVING, URGENT), ":after=2:limit=3"),
        grace=("leak.unaccounted.grace_s",),
        blocks=exactly(ownerless_blocks),
    ),
    *_incident(
        "leak.rising-floor",
        Way("all", SMALL, (Clients(times=tuple(range(1, 22, 3)), output=(10, 30)),)),
        Way("slower", MEDIUM, (Clients(times=tuple(range(1, 40, 3)), output=(10, 30)),), ":every=2"),
        Way(
            "in pairs", {**FINE, **NO_PREFIXES}, (Clients(times=(*range(1, 22, 3),) * 2, output=(10, 30)),), ":every=2"
        ),
        seconds=60,
        onset=strikes(3),
        # Until it has risen often enough, what is left lies unaccounted.
        consequences=frozenset({"leak.unaccounted"}),
        blocks=exactly(ownerless_blocks),
    ),
    *_incident(
        "leak.deferred-free-stalled",
        Way("all", {**MEDIUM, **AHEAD}, (LEAVING,)),
        Way("bare", {**MEDIUM, **AHEAD, **NO_PREFIXES}, (LEAVING, CHAT), ":every=3"),
        Way("urgent", {**FINE, **AHEAD}, (LEAVING, URGENT), ":limit=3"),
        grace=("leak.deferred-free-stalled.grace_s",),
        blocks=exactly(ownerless_blocks),
    ),
    *_incident(
        "leak.external-pins",
        Way("all", FETCHED_POOL, (FETCHED,)),
        Way("urgent", FETCHED_URGENT, (FETCHED,), ":every=2"),
        Way("fine", FETCHED_FINE, (FETCHED,), ":after=3"),
        grace=("leak.external-pins.oldest_s",),
        requests=exactly(nobody),
        blocks=exactly(nobody),
    ),
)

# -------------------------------------------------------------------- stuck

LARGE: Final = Clients("large", times=(5.0, 9.0), prompt=(2450, 2900), output=(5, 5))
ENDLESS: Final = Clients("long", times=(6.0,), output=(1500, 2000))
BRIEFLY: Final = Clients("b", rate=1, until_s=5)
HOG: Final = Clients("hog", times=(0.5,), prompt=(3000, 3000), output=(1090, 1090))
DEMANDING: Final = Clients("long", times=(3.0,), prompt=(60, 90), output=(3600, 3900))
STEADY: Final = Clients("s", rate=1, until_s=30)
ON_AND_ON: Final = Clients("on", at_once=1, until_s=58)

STUCK: Final = (
    *_incident(
        "stuck.never-fits",
        Way("chat", SMALL, (LARGE, CHAT)),
        Way("busy", {**MEDIUM, "num_gpu_blocks_override": 151}, (LARGE, BUSY), ":every=2"),
        Way("urgent", FINE, (LARGE, URGENT), ":limit=1"),
        grace=("stuck.never-fits.grace_s",),
        blocks=exactly(nobody),
    ),
    *_incident(
        "stuck.self-preempt",
        Way("after others", {**SMALL, "num_gpu_blocks_override": 41}, (ENDLESS, BRIEFLY)),
        Way("alone", {**SMALL, **NO_PREFIXES, "num_gpu_blocks_override": 31}, (ENDLESS,)),
        Way("urgent", {**TIGHT_FINE, "max_num_batched_tokens": 128}, (ENDLESS, BRIEFLY)),
        onset=preemptions(3),
    ),
    *_incident(
        "stuck.remote-load",
        # Others go on: where nobody does, an engine that sleeps cannot be told from one that was not woken.
        Way("two", FETCHED_POOL, (FETCHED, ON_AND_ON), ":limit=2"),
        Way("urgent", FETCHED_URGENT, (FETCHED, ON_AND_ON), ":every=5:limit=3"),
        Way("fine", FETCHED_FINE, (FETCHED, ON_AND_ON), ":after=4:limit=2"),
        seconds=60,
        grace=("stuck.remote-load.grace_s",),
        blocks=exactly(blocks_struck),
    ),
    *_incident(
        "stuck.grammar",
        Way("chat", SMALL, (CHAT, STRUCTURED)),
        Way("busy", MEDIUM, (BUSY, STRUCTURED), ":every=2"),
        Way("urgent", FINE, (URGENT, Clients("g", rate=1, until_s=15, regex="(yes|no) [0-9]+")), ":after=1:limit=2"),
        seconds=60,
        grace=("stuck.grammar.grace_s",),
        blocks=exactly(nobody),
    ),
    *_incident(
        "stuck.parked-loads",
        # Two of them and one block more: each has what was fetched, and neither gets what it needs besides.
        Way("two", {**SMALL, **HOST, "num_gpu_blocks_override": 40}, _together("a", "b", tokens=304)),
        Way("urgent", {**SMALL, **HOST, **PRIORITY, "num_gpu_blocks_override": 26}, _together("a", "b", tokens=192)),
        Way(
            "fine",
            {**SMALL, **HOST, "num_gpu_blocks_override": 64, "block_size": 8},
            _together("a", "b", tokens=248, own=8),
        ),
        grace=("stuck.parked-loads.grace_s",),
        requests=exactly(holding_in_queue),
        blocks=exactly(blocks_of(holding_in_queue)),
    ),
    *_incident(
        "stuck.promotion-starved",
        Way("two", FETCHED_POOL, (FETCHED,), ":limit=2"),
        Way("urgent", FETCHED_URGENT, (FETCHED,), ":every=6:limit=3"),
        Way("after a grammar", MEDIUM, (CHAT, STRUCTURED), ":every=2"),
        grace=("stuck.promotion-starved.grace_s",),
        blocks=exactly(blocks_struck),
    ),
    *_incident(
        "stuck.zero-token",
        Way("one", SMALL, (CHAT,), ":limit=1"),
        Way("busy", MEDIUM, (BUSY,), ":every=4"),
        Way("urgent", {**FINE, **AHEAD}, (URGENT, CHAT), ":after=2:limit=2"),
        grace=("stuck.zero-token.grace_s",),
        blocks=exactly(blocks_struck),
    ),
    *_incident(
        "stuck.head-of-line",
        Way("a trickle", MEDIUM, (HOG, DEMANDING, Clients(rate=0.2, since_s=4, until_s=60))),
        Way("three", {**MEDIUM, **AHEAD}, (HOG, DEMANDING, Clients(times=(5.0, 5.0, 6.0)))),
        Way(
            "fine",
            {**MEDIUM, "block_size": 8, "num_gpu_blocks_override": 801},
            (HOG, DEMANDING, Clients(rate=0.5, since_s=4, until_s=20)),
        ),
        seconds=150,
        step_s=0.15,  # as long as that, the one that runs goes on for minutes
        grace=("stuck.head-of-line.grace_s",),
        onset=somebody_lacks_blocks,
        requests=exactly(long_ones),
        blocks=exactly(nobody),
    ),
    *_incident(
        "stuck.engine-stalled",
        Way("chat", SMALL, (STEADY,), ":after=100:limit=1"),
        Way("busy", {**MEDIUM, **AHEAD}, (STEADY, BUSY), ":after=200:limit=1"),
        Way("urgent", FINE, (STEADY, URGENT), ":after=150:limit=1"),
        grace=("stuck.engine-stalled.grace_s",),
        requests=exactly(alive),
    ),
    *_incident(
        "stuck.lost-wakeup",
        Way("one", {**HOST, "num_gpu_blocks_override": 40}, _together("a", tokens=304)),
        Way("urgent", {**HOST, **PRIORITY, "num_gpu_blocks_override": 26}, _together("a", tokens=192), ":limit=1"),
        Way("ahead", {**HOST, **AHEAD, "num_gpu_blocks_override": 64, "block_size": 8}, _together("a", tokens=248)),
        grace=("stuck.lost-wakeup.grace_s",),
        requests=exactly(parked),
        blocks=exactly(blocks_of(parked)),
    ),
    *_incident(
        "stuck.front-end",
        Way("one", SMALL, (CHAT,), ":limit=1"),
        Way("busy", MEDIUM, (BUSY,), ":every=5"),
        Way("urgent", {**FINE, **AHEAD}, (URGENT, CHAT), ":after=3:limit=2"),
        grace=("stuck.front-end.grace_s",),
        blocks=exactly(nobody),
    ),
)

# -------------------------------------------------------------------- thrash, collapse

LONG_PROMPTS: Final = (Clients(at_once=8, prompt=(300, 500), output=(4, 10)),)
THEN_MANY: Final = (
    Clients("first", at_once=16, prompt=(10, 20), output=(10, 20), until_s=10),
    Clients("long", times=(10.0,) * 10, prompt=(20, 30), output=(60, 90)),
    Clients("many", at_once=24, prompt=(10, 20), output=(10, 20), since_s=16, until_s=55),
)
WAVES: Final = (Clients(at_once=8, prompt=(800, 800), output=(60, 60), until_s=30),)
BEGINNING: Final = Clients("s", rate=3, until_s=20, prompt=(5, 15), output=(5, 15), prefixes=2, prefix=320)
OTHERS: Final = Clients("o", rate=1, until_s=30, prompt=(300, 400), output=(5, 10))

THRASH: Final = (
    *_incident(
        "thrash.preemption",
        Way("bare", {**TIGHT, **NO_PREFIXES}, LONG_PROMPTS),
        Way("half", TIGHT, LONG_PROMPTS, ":every=2"),
        Way("fine", {**TIGHT_FINE, **NO_PREFIXES, "max_num_batched_tokens": 64}, LONG_PROMPTS),
        onset=lambda life: len(life.in_vain) >= 4,
        requests=exactly(in_vain),
    ),
    *_incident(
        "thrash.cascade",
        Way("bare", {**TIGHT, **AHEAD, **NO_PREFIXES}, GROWING),
        Way("hits", {**TIGHT, **AHEAD}, GROWING, ":after=1"),
        Way("fine", {**TIGHT_FINE, **AHEAD}, GROWING),
        onset=at_once("preempted", 3),
        requests=exactly(preempted(3)),
    ),
    *_incident(
        "thrash.after-retract",
        Way("hits", TIGHT, THEN_MANY),
        Way("bare", {**TIGHT, **NO_PREFIXES}, THEN_MANY),
        Way("fine", TIGHT_FINE, THEN_MANY),
        seconds=60,
        grace=("thrash.after-retract.quiet_s",),
        requests=among(anybody),
    ),
)

COLLAPSE: Final = (
    *_incident(
        "collapse.lockstep",
        Way("bare", {**SMALL, **NO_PREFIXES, "num_gpu_blocks_override": 481, "max_num_batched_tokens": 128}, WAVES),
        Way("hits", {**SMALL, "num_gpu_blocks_override": 501}, WAVES),
        Way(
            "fine",
            {**FINE, "num_gpu_blocks_override": 1401, "max_num_batched_tokens": 64},
            (Clients(at_once=10, prompt=(480, 480), output=(50, 50), until_s=30),),
        ),
        onset=at_once("finished", 4),
        requests=among(finished(4)),
    ),
    *_incident(
        "collapse.preempt-all",
        Way("bare", {**TIGHT, **NO_PREFIXES}, GROWING),
        Way("hits", TIGHT, GROWING, ":every=2"),
        Way("fine", TIGHT_FINE, GROWING),
        onset=at_once("preempted", 4),
        requests=exactly(preempted(4)),
    ),
    *_incident(
        "collapse.prefix-hits",
        Way("all", MEDIUM, (BEGINNING,)),
        Way("half, ahead", {**MEDIUM, **AHEAD}, (BEGINNING,), ":every=2"),
        Way("later, beside others", {**MEDIUM, **PRIORITY}, (BEGINNING, CHAT), ":after=10"),
        onset=strikes(3),
        requests=among(struck),
    ),
    *_incident(
        "collapse.cache-flushed",
        Way("all", MEDIUM, (BEGINNING, OTHERS)),
        Way(
            "half", MEDIUM, (BEGINNING, Clients("o", rate=2, until_s=30, prompt=(200, 300), output=(5, 10))), ":every=2"
        ),
        Way(
            "ahead", {**MEDIUM, **AHEAD}, (BEGINNING, Clients("o", rate=3, until_s=30, prompt=(60, 90), output=(5, 10)))
        ),
        onset=missed_again(prefix=320, beginnings=2, times=2),
        requests=among(anybody),
    ),
)

# -------------------------------------------------------------------- corrupt

GOING: Final = (Clients(at_once=8, prompt=(20, 60), output=(30, 80), leave=0.9, until_s=10),)

CORRUPT: Final = (
    *_incident(
        "corrupt.double-free",
        Way("once", {**SMALL, **NO_PREFIXES}, (CHAT,), ":limit=1"),
        Way("twice", MEDIUM, (BUSY,), ":every=4:limit=2"),
        Way("urgent", FINE, (URGENT, CHAT), ":after=3:limit=1"),
        blocks=exactly(overdrawn),
    ),
    *_incident(
        "corrupt.use-after-free",
        Way(
            "bare",
            {**SMALL, **AHEAD, **NO_PREFIXES, "block_size": 4, "num_gpu_blocks_override": 251},
            GOING,
            ":limit=30",
        ),
        Way("hits", {**SMALL, **AHEAD}, GOING, ":every=3"),
        Way("urgent", {**FINE, **AHEAD, **NO_PREFIXES, "num_gpu_blocks_override": 251}, GOING, ":after=3:limit=30"),
        seconds=20,
        onset=lambda life: bool(life.heirs),
        requests=exactly(heirs),
        blocks=exactly(inherited),
    ),
    *_incident(
        "corrupt.counter-drift",
        Way("chat", SMALL, (CHAT,)),
        Way("busy", MEDIUM, (BUSY,), ":every=3"),
        Way("once", FINE, (URGENT, CHAT), ":limit=1"),
        requests=exactly(nobody),
    ),
)

# -------------------------------------------------------------------- sizing

MIB: Final = 1 << 20
CAPTURING: Final = {
    "memory_budget": 420 * MIB, "enforce_eager": False, "max_model_len": 512, "max_num_seqs": 256, "block_size": 4,
}  # fmt: skip
"""A device so small that the inputs of its graphs, a fraction of a MiB, count."""
CAPTURING_FEWER: Final = {**CAPTURING, "max_num_seqs": 128, "max_num_batched_tokens": 512}
CAPTURING_AHEAD: Final = {**CAPTURING, **AHEAD, "memory_budget": 450 * MIB}
MUCH_MEMORY: Final = {"memory_budget": 1024 * MIB, "max_model_len": 512}
BY_BYTES: Final = {"kv_cache_memory_bytes": 13 * MIB, "max_num_batched_tokens": 512}
CROWD: Final = (Clients(at_once=12, prompt=(60, 120), output=(40, 80)),)

SIZING: Final = (
    *_incident(
        "sizing.kv-too-small",
        Way("hits", {**BY_BYTES, "max_num_seqs": 16}, CROWD),
        Way("bare", {**BY_BYTES, **NO_PREFIXES, "max_num_seqs": 12}, CROWD),
        Way("ahead", {**BY_BYTES, **AHEAD, "block_size": 8, "max_num_seqs": 16}, CROWD),
        grace=("sizing.kv-too-small.over_s",),
        onset=preemptions(3),
        requests=exactly(preempted(1)),
    ),
    *_incident(
        "sizing.kv-too-large",
        Way("all", {**CAPTURING, "gpu_memory_utilization": 1.0}, (CHAT,)),
        Way("fewer", {**CAPTURING_FEWER, "gpu_memory_utilization": 1.0}, (CHAT,)),
        Way("ahead", {**CAPTURING_AHEAD, "gpu_memory_utilization": 1.0}, (BUSY,)),
        requests=exactly(nobody),
    ),
    *_incident(
        "sizing.overreserved",
        Way("all", CAPTURING, (CHAT,)),
        Way("more", {**CAPTURING, "max_num_seqs": 384, "memory_budget": 600 * MIB}, (CHAT,)),
        Way("ahead", CAPTURING_AHEAD, (BUSY,)),
        requests=exactly(nobody),
    ),
    *_incident(
        "sizing.bad-suggestion",
        Way("all", CAPTURING, (CHAT,)),
        Way("fewer", CAPTURING_FEWER, (CHAT,)),
        Way("ahead", CAPTURING_AHEAD, (BUSY,)),
        requests=exactly(nobody),
    ),
    *_incident(
        "sizing.elsewhere",
        Way("small", {**SMALL, **MUCH_MEMORY}, (BUSY,)),
        Way("medium", {**MEDIUM, **MUCH_MEMORY}, (BUSY,), ":after=50"),
        Way("fine", {**FINE, **MUCH_MEMORY}, (BUSY, CHAT), ":every=2"),
        waits_s=5,  # the engine measures so often
        onset=leaked(1024 * MIB // 20),
        requests=exactly(nobody),
    ),
)

# -------------------------------------------------------------------- healthy engines

HEALTHY: Final = tuple(
    Scenario(name, engine=engine, load=load, seconds=seconds)
    for name, engine, load, seconds in (
        ("chat", MEDIUM, (BUSY,), 40),
        ("chat, one step ahead", {**MEDIUM, **AHEAD}, (BUSY, LEAVING), 40),
        ("long context", MEDIUM, (CHAT, Clients("c", rate=0.2, until_s=20, prompt=(2000, 3000), output=(50, 300))), 60),
        ("bursts", MEDIUM, tuple(Clients(f"b{n}", times=(3.0 + 10 * n,) * 30) for n in range(3)), 45),
        ("prefixes shared by all", MEDIUM, (Clients(rate=4, prefixes=1, prefix=640, prompt=(5, 60)),), 40),
        ("more prefixes than fit", SMALL, (Clients(rate=3, prefixes=20, prefix=320, prompt=(5, 60)),), 40),
        ("priorities", {**SMALL, **PRIORITY}, (Clients(rate=3, priority=(0, 5)),), 60),
        (
            "pool nearly full",
            {**TIGHT, "max_num_seqs": 4},
            (Clients(at_once=6, prompt=(60, 140), output=(10, 30)),),
            40,
        ),
        ("in step, not collapsing", MEDIUM, (Clients(at_once=8, prompt=(60, 60), output=(60, 60), until_s=30),), 40),
        ("storm of aborts", {**MEDIUM, **AHEAD}, (Clients(rate=8, until_s=15, leave=0.9), BUSY), 40),
        ("impatient clients", SMALL, (Clients(rate=3, patience_s=3.0, output=(20, 200)),), 40),
        ("long idle", SMALL, (Clients(times=(1.0, 2.0, 120.0, 121.0, 240.0)),), 250),
        ("slow clients", MEDIUM, (Clients(rate=2, lingers_s=15.0), Clients("p", at_once=3, pause_s=4.0)), 50),
        ("fetched from the host", FETCHED_POOL, (FETCHED, LEAVING), 40),
        ("fetched, and left", {**FETCHED_FINE, **AHEAD}, (FETCHED, GONE), 40),
        ("kept to be sent, with a lease", {**MEDIUM, **HOST, "kv_lease_seconds": 5}, (BUSY, LEAVING), 40),
        ("structured output", MEDIUM, (CHAT, STRUCTURED), 40),
        ("one large prompt after the other", SMALL, (Clients(at_once=2, prompt=(1200, 1500), output=(5, 20)),), 40),
        ("graphs, and a budget", CAPTURING, (BUSY,), 40),
    )
)

INCIDENTS: Final = (*LEAKS, *STUCK, *THRASH, *COLLAPSE, *CORRUPT, *SIZING)
SCENARIOS: Final = (*INCIDENTS, *HEALTHY)
