"""Requests, or the whole engine, that do not move."""

from __future__ import annotations

from typing import Final

from ..client_load import Clients
from ..simulated_run import (
    affected_blocks,
    alive,
    blocks_of,
    exactly,
    holding_in_queue,
    long_ones,
    no_requests,
    parked,
    preemptions,
    requests_short_of_blocks,
)
from .scenario import ClientLoad, Way, incident
from .shapes import (
    AHEAD,
    BUSY,
    CHAT,
    FETCHED,
    FETCHED_FINE,
    FETCHED_POOL,
    FETCHED_URGENT,
    FINE,
    HOST,
    MEDIUM,
    NO_PREFIXES,
    PRIORITY,
    SMALL,
    STRUCTURED,
    TIGHT_FINE,
    URGENT,
)

LARGE: Final = Clients("large", times=(5.0, 9.0), prompt=(2450, 2900), output=(5, 5))
ENDLESS: Final = Clients("long", times=(6.0,), output=(1500, 2000))
BRIEFLY: Final = Clients("b", rate=1, until_s=5)
HOG: Final = Clients("hog", times=(0.5,), prompt=(3000, 3000), output=(1090, 1090))
DEMANDING: Final = Clients("long", times=(3.0,), prompt=(60, 90), output=(3600, 3900))
STEADY: Final = Clients("s", rate=1, until_s=30)
ON_AND_ON: Final = Clients("on", at_once=1, until_s=58)


def _together(*prefixes: str, tokens: int, own: int = 16) -> ClientLoad:
    """Store prompts in the host, let the pool forget them, and then fetch all at the same time.

    Each begins with `tokens` tokens and goes on with at most `own`. The prompts that make the pool forget have twice as
    many.
    """
    once = (
        Clients(
            name, times=(1.0 + 2 * n, 8.0), prompt=(1, own), output=(30, 40), prefixes=1, prefix=tokens, family=name
        )
        for n, name in enumerate(prefixes)
    )
    return *once, Clients("flush", times=(5.0,), prompt=(2 * tokens - 20, 2 * tokens - 20), output=(2, 2))


STUCK: Final = (
    *incident(
        "stuck.never-fits",
        Way("chat", SMALL, (LARGE, CHAT)),
        Way("busy", {**MEDIUM, "num_gpu_blocks_override": 151}, (LARGE, BUSY), ":every=2"),
        Way("urgent", FINE, (LARGE, URGENT), ":limit=1"),
        grace=("stuck.never-fits.grace_s",),
        blocks=exactly(no_requests),
    ),
    *incident(
        "stuck.self-preempt",
        Way("after others", {**SMALL, "num_gpu_blocks_override": 41}, (ENDLESS, BRIEFLY)),
        Way("alone", {**SMALL, **NO_PREFIXES, "num_gpu_blocks_override": 31}, (ENDLESS,)),
        Way("urgent", {**TIGHT_FINE, "max_num_batched_tokens": 128}, (ENDLESS, BRIEFLY)),
        onset=preemptions(3),
    ),
    *incident(
        "stuck.remote-load",
        Way("two", FETCHED_POOL, (FETCHED, ON_AND_ON), ":limit=2"),
        Way("and then nothing", FETCHED_POOL, (FETCHED,), ":limit=2"),
        Way("urgent", FETCHED_URGENT, (FETCHED, ON_AND_ON), ":every=5:limit=3"),
        Way("fine", FETCHED_FINE, (FETCHED, ON_AND_ON), ":after=4:limit=2"),
        seconds=100,
        waits_s=60,  # no transfer has shown the pace
        blocks=exactly(affected_blocks),
    ),
    *incident(
        "stuck.grammar",
        Way("chat", SMALL, (CHAT, STRUCTURED)),
        Way("busy", MEDIUM, (BUSY, STRUCTURED), ":every=2"),
        Way("urgent", FINE, (URGENT, Clients("g", rate=1, until_s=15, regex="(yes|no) [0-9]+")), ":after=1:limit=2"),
        seconds=60,
        grace=("stuck.grammar.grace_s",),
        blocks=exactly(no_requests),
    ),
    *incident(
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
    *incident(
        "stuck.promotion-starved",
        Way("two", FETCHED_POOL, (FETCHED,), ":limit=2"),
        Way("urgent", FETCHED_URGENT, (FETCHED,), ":every=6:limit=3"),
        Way("after a grammar", MEDIUM, (CHAT, STRUCTURED), ":every=2"),
        grace=("stuck.promotion-starved.grace_s",),
        blocks=exactly(affected_blocks),
    ),
    *incident(
        "stuck.zero-token",
        Way("one", SMALL, (CHAT,), ":limit=1"),
        Way("busy", MEDIUM, (BUSY,), ":every=4"),
        Way("urgent", {**FINE, **AHEAD}, (URGENT, CHAT), ":after=2:limit=2"),
        grace=("stuck.zero-token.grace_s",),
        blocks=exactly(affected_blocks),
    ),
    *incident(
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
        onset=requests_short_of_blocks,
        requests=exactly(long_ones),
        blocks=exactly(no_requests),
    ),
    *incident(
        "stuck.engine-stalled",
        Way("chat", SMALL, (STEADY,), ":after=100:limit=1"),
        Way("busy", {**MEDIUM, **AHEAD}, (STEADY, BUSY), ":after=200:limit=1"),
        Way("urgent", FINE, (STEADY, URGENT), ":after=150:limit=1"),
        grace=("stuck.engine-stalled.grace_s",),
        requests=exactly(alive),
    ),
    *incident(
        "stuck.lost-wakeup",
        Way("one", {**HOST, "num_gpu_blocks_override": 40}, _together("a", tokens=304)),
        Way("urgent", {**HOST, **PRIORITY, "num_gpu_blocks_override": 26}, _together("a", tokens=192), ":limit=1"),
        Way("ahead", {**HOST, **AHEAD, "num_gpu_blocks_override": 64, "block_size": 8}, _together("a", tokens=248)),
        grace=("stuck.lost-wakeup.grace_s",),
        requests=exactly(parked),
        blocks=exactly(blocks_of(parked)),
    ),
    *incident(
        "stuck.front-end",
        Way("one", SMALL, (CHAT,), ":limit=1"),
        Way("busy", MEDIUM, (BUSY,), ":every=5"),
        Way("urgent", {**FINE, **AHEAD}, (URGENT, CHAT), ":after=3:limit=2"),
        grace=("stuck.front-end.grace_s",),
        blocks=exactly(no_requests),
    ),
)
