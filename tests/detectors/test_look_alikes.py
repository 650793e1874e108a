"""Troubles that look alike, and what only looks like trouble: each is told from the other, and in one engine both are.

Of every pair there is the one, the other, and where an engine can have them together, both: then each is blamed for its
own. All of it is lived through by a whole engine in virtual time, and judged from the bytes it has sent.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from kvscope.engine.bench.simulated_engine import SimulatedEngine, StepTime
from kvscope.engine.config import EngineConfig
from kvscope.engine.models import LoadedModel, load_model
from kvscope.engine.requests.request import Output
from kvscope.lab.client_load import Clients, Crowd
from kvscope.lab.lab_run import Seen, look
from kvscope.lab.scenarios.collapse_scenarios import WAVES
from kvscope.lab.scenarios.scenario import ClientLoad
from kvscope.lab.scenarios.shapes import (
    CHAT,
    FETCHED,
    FETCHED_POOL,
    GROWING,
    HOST,
    LEAVING,
    MEDIUM,
    NO_PREFIXES,
    SMALL,
    TIGHT,
)
from kvscope.lab.scenarios.stuck_scenarios import DEMANDING, HOG, ON_AND_ON, STEADY
from kvscope.lab.scenarios.thrash_scenarios import LONG_PROMPTS
from kvscope.lab.simulated_run import SimulatedRun, affected, affected_blocks, alive, long_ones, ownerless_blocks
from kvscope.monitor.detectors.registry import THRESHOLDS

SLOW: Final = StepTime(0.02)
MINUTES: Final = StepTime(0.15)
"""So that a request that runs goes on for minutes."""
BY_TOKENS: Final = StepTime(0.02, per_token_s=0.005)
"""A prompt of thousands of tokens takes a step of many seconds."""

WARM: Final = Clients("w", rate=2, until_s=15, prefixes=2, prefix=640, prompt=(5, 30), output=(5, 15))
LONG: Final = Clients("long", times=(2.0,), prompt=(700, 700), output=(3000, 3000))
LARGER: Final = Clients("larger", times=(5.0,), prompt=(3900, 3900), output=(5, 5))
SHORT: Final = Clients(rate=0.2, since_s=6, until_s=60)
WAVING: Final = {**SMALL, **NO_PREFIXES, "num_gpu_blocks_override": 481, "max_num_batched_tokens": 128}
PREFILLING: Final = {**MEDIUM, "max_num_batched_tokens": 4096}
OUTGROWING: Final = Clients("grows", at_once=8, prompt=(860, 900), output=(150, 200), since_s=32, until_s=50)
RUNS: Final = Clients("runs", times=(0.5,), prompt=(1500, 1500), output=(1090, 1090))
ROOMY: Final = {**TIGHT, "num_gpu_blocks_override": 52}
ONE_LONG_PREFILL: Final = (STEADY, Clients("prefill", times=(10.0,), prompt=(4000, 4000), output=(5, 5)))


class Case(NamedTuple):
    """A life, and all that may be said of it: codes of warning or above, each with whom it names, and what is held.

    faults: as `--fault` takes them, the first one that of `named`. named: by code, requests or blocks, by the engine.
    """

    pair: str
    what: str
    engine: dict[str, Any]
    load: ClientLoad
    faults: tuple[str, ...] = ()
    alarms: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    named: tuple[tuple[str, Callable[[SimulatedRun], set[Any]]], ...] = ()
    seconds: float = 40.0
    step_time: StepTime = SLOW


def case(pair: str, what: str, engine: dict[str, Any], load: ClientLoad, *faults: str, **asked: Any) -> Case:
    """The alarms are those of the faults, if nothing else is asked."""
    alarms = frozenset(asked.pop("alarms", (fault.partition(":")[0] for fault in faults)))
    return Case(pair, what, engine, load, faults, alarms, frozenset(asked.pop("held", ())), **asked)


LEAK_CACHE = "a leak, a warm prefix cache"
LEAK_LONG = "a leak, one long request"
WAVE_PREEMPT = "requests in step, all preempted at once"
FITS_LINE = "one that never fits, a head of the line"
STALL_REST = "a stalled engine, an idle one, one long prefill step"
READY_FETCH = "who is ready and not looked at, who is still fetched for"
THRASH_GROWTH = "thrash, preemption as requests grow"
FREE_DRIFT = "a double free, a counter that drifts"

CASES: Final = (
    case(LEAK_CACHE, "one", {**MEDIUM, **NO_PREFIXES}, (LEAVING,), "leak.unaccounted:every=2"),
    case(LEAK_CACHE, "other", MEDIUM, (WARM,), held=["held.prefix-cache"]),
    case(
        LEAK_CACHE,
        "both",
        MEDIUM,
        (LEAVING, WARM),
        "leak.unaccounted:every=2",
        held=["held.prefix-cache"],
        named=(("leak.unaccounted", ownerless_blocks),),
    ),
    case(LEAK_LONG, "one", {**MEDIUM, **HOST}, (CHAT,), "leak.finished-held", seconds=100),
    case(LEAK_LONG, "other", {**SMALL, "num_gpu_blocks_override": 301}, (LONG,), held=["held.long-request"]),
    case(
        LEAK_LONG,
        "both",
        {**MEDIUM, **HOST},
        (CHAT, LONG),
        "leak.finished-held",
        seconds=100,
        held=["held.long-request"],
        named=(
            ("leak.finished-held", affected),
            ("leak.finished-held", affected_blocks),
            ("held.long-request", long_ones),
        ),
    ),
    case(WAVE_PREEMPT, "one", WAVING, WAVES, "collapse.lockstep"),
    case(WAVE_PREEMPT, "other", WAVING, (OUTGROWING,), "collapse.preempt-all"),
    case(
        WAVE_PREEMPT,
        "both",
        WAVING,
        (*WAVES, OUTGROWING),
        "collapse.preempt-all",
        "collapse.lockstep",
        seconds=60,
    ),
    case(
        FITS_LINE,
        "one",
        {**MEDIUM, "num_gpu_blocks_override": 241},
        (RUNS, LARGER, SHORT),
        "stuck.never-fits",
        held=["held.long-request"],
        step_time=MINUTES,
        seconds=150,
    ),
    case(
        FITS_LINE,
        "other",
        MEDIUM,
        (HOG, DEMANDING, SHORT),
        "stuck.head-of-line",
        held=["held.long-request"],
        step_time=MINUTES,
        seconds=150,
    ),
    case(STALL_REST, "one", PREFILLING, (STEADY,), "stuck.engine-stalled:after=100:limit=1"),
    case(STALL_REST, "other", PREFILLING, (Clients(times=(1.0, 2.0)),), seconds=60),
    case(
        STALL_REST,
        "the third",
        PREFILLING,
        ONE_LONG_PREFILL,
        held=["held.long-request"],
        seconds=60,
        step_time=BY_TOKENS,
    ),
    case(
        STALL_REST,
        "both",
        PREFILLING,
        ONE_LONG_PREFILL,
        "stuck.engine-stalled:after=150:limit=1",
        seconds=60,
        step_time=BY_TOKENS,
        held=["held.long-request"],
        named=(("stuck.engine-stalled", alive),),
    ),
    case(READY_FETCH, "one", FETCHED_POOL, (FETCHED, ON_AND_ON), "stuck.promotion-starved:limit=2", seconds=60),
    case(READY_FETCH, "other", FETCHED_POOL, (FETCHED, ON_AND_ON), "stuck.remote-load:limit=2", seconds=60),
    case(
        READY_FETCH,
        "both",
        FETCHED_POOL,
        (FETCHED, ON_AND_ON),
        "stuck.promotion-starved:limit=1",
        "stuck.remote-load:after=2:limit=1",
        seconds=60,
        named=(("stuck.promotion-starved", affected),),
    ),
    case(THRASH_GROWTH, "one", {**TIGHT, **NO_PREFIXES}, LONG_PROMPTS, "thrash.preemption"),
    case(THRASH_GROWTH, "other", {**ROOMY, **NO_PREFIXES}, GROWING),
    case(THRASH_GROWTH, "both", {**ROOMY, **NO_PREFIXES}, (*GROWING, *LONG_PROMPTS), "thrash.preemption"),
    case(FREE_DRIFT, "one", {**SMALL, **NO_PREFIXES}, (CHAT,), "corrupt.double-free:limit=1"),
    case(FREE_DRIFT, "other", SMALL, (CHAT,), "corrupt.counter-drift:limit=1"),
    case(
        FREE_DRIFT,
        "both",
        SMALL,
        (CHAT,),
        "corrupt.double-free:after=4:limit=1",
        "corrupt.counter-drift:limit=1",
    ),
)


@cache
def model(max_model_len: int | None) -> LoadedModel:
    return load_model(EngineConfig(max_model_len=max_model_len))


def lived(it: Case, folder: Path) -> tuple[Seen, SimulatedRun, list[tuple[str, set[Any]]]]:
    """What was seen of it, the engine at its end, and whom each code should have named."""
    config = EngineConfig(**{"hash_key": b"alike", **it.engine}, faults=it.faults)
    engine = SimulatedEngine(config, model(config.max_model_len), step_time=it.step_time, journal=folder)
    with closing(engine):
        crowd = Crowd(engine, it.load, seed=0)
        fault = engine.faults.on[it.faults[0].partition(":")[0]] if it.faults else None
        life = SimulatedRun(engine, fault, crowd.names, crowd.numbers)

        def receive(outputs: list[Output]) -> None:
            crowd.receive(outputs)
            life.note()

        engine.run(it.seconds, receive)
        return look(folder), life, [(code, them(life)) for code, them in it.named]


@pytest.mark.parametrize("it", CASES, ids=lambda it: f"{it.pair}: {it.what}")
def test_each_is_told_from_the_other(it: Case, tmp_path: Path) -> None:
    seen, life, truth = lived(it, tmp_path)
    assert {fired.code for fired in seen.fired} == it.alarms, [fired.explanation for fired in seen.fired]
    of_the_pair = {code for other in CASES if other.pair == it.pair for code in other.held}
    assert seen.requests.keys() & of_the_pair == it.held
    for code, struck_by_it in truth:
        assert struck_by_it
        assert struck_by_it in (seen.requests[code], seen.blocks[code])
    if it.pair == THRASH_GROWTH:
        assert life.preempted  # in the case where nothing is found, too


def test_the_long_prefill_is_longer_than_a_stall_has_to_be() -> None:
    (tokens,) = {tokens for clients in ONE_LONG_PREFILL if clients.name == "prefill" for tokens in clients.prompt}
    assert tokens <= PREFILLING["max_num_batched_tokens"]
    assert BY_TOKENS.seconds(tokens, tokens) > THRESHOLDS["stuck.engine-stalled.grace_s"].value
