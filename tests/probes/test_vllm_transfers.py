"""KV that real engines send each other or keep in an outer tier, and what the monitor says: by their event streams,
metrics pages and logs, all of the same run.
"""

from __future__ import annotations

import signal
from ctypes.util import find_library
from pathlib import Path

import httpx2
import pytest

from kvscope.lab.vllm_python import free_ports, needs_pairs
from kvscope.monitor.contract.samples import Sample
from kvscope.monitor.terminal.report import examine
from tests.probes.vllm_transfers import (
    WAYS,
    Engine,
    Route,
    Watched,
    lmcache,
    mooncake,
    mooncake_route,
    nixl,
    nixl_route,
    offloading,
    prompt_of,
    tier_server,
    watched,
)

pytestmark = needs_pairs
needs_verbs = pytest.mark.skipif(
    not find_library("ibverbs"),
    reason="Mooncake, and LMCache beside it, lack it: apt-get install libibverbs1 librdmacm1",
)

BURST, STALE, REMOTE, TIER = "leak.lease-burst", "corrupt.stale-remote-read", "stuck.remote-load", "stuck.outer-tier"
STALLED = "stuck.engine-stalled"
MODERATE = 6
"""Clients at once."""


def serve(seen: Watched, route: Route, tag: str, count: int, tokens: int = 300) -> list[str]:
    """Have so many clients answered, a few at once, and return their requests as the engine names them."""
    for number in range(count):
        seen.until(lambda: seen.unanswered() < MODERATE)
        seen.come(route, f"{tag}-{number}", prompt_of(f"{tag}-{number}", tokens + number), 8)
    seen.until(lambda: not seen.unanswered())
    return [f"cmpl-{tag}-{number}-0" for number in range(count)]


def last_page(seen: Watched, engine: Engine) -> Sample:
    return seen.by_page.fleet.engines[engine.page_engine].samples[-1]


def assert_healthy(seen: Watched) -> None:
    """No client has an error, and no way tells more than information."""
    for client in seen.clients:
        client.result()
    for engine in seen.engines:
        for way in WAYS:
            assert seen.findings(way, engine) == {}, (engine.log.parent.name, way)


def names(seen: Watched, engine: Engine, code: str, requests: list[str]) -> bool:
    """Whether the stream's finding has exactly these: what fails one by one is named one by one."""
    finding = seen.findings("stream", engine).get(code)
    return finding is not None and sorted(finding.culprits.requests) == sorted(requests)


def found_by(seen: Watched, engine: Engine, code: str) -> list[str]:
    return [way for way in WAYS if code in seen.findings(way, engine)]


def is_killed(seen: Watched, route: Route, ways: list[str]) -> None:
    """The pair is healthy until its decode is killed. By these ways the prefill has then what nobody reads."""
    prefill, decode = seen.engines
    serve(seen, route, "served", 12)
    seen.until(lambda: last_page(seen, decode).external_hits)
    assert_healthy(seen)
    seen.clients.clear()
    decode.kill()
    lost = serve(seen, route, "lost", 5)  # each is computed by the prefill, and its client gets no further
    assert all(isinstance(client.exception(), httpx2.ConnectError) for client in seen.clients)
    seen.until(lambda: found_by(seen, prefill, BURST) == ways and names(seen, prefill, BURST, lost))
    assert seen.findings("stream", prefill)[BURST].verdict == "confirmed"
    for way in ways:
        assert seen.findings(way, prefill).keys() == {BURST}


# ---------------------------------------------------------------- NIXL


@pytest.mark.slow
def test_nixl_pair_is_healthy_until_its_decode_is_killed(tmp_path: Path) -> None:
    prefill, decode = nixl(tmp_path, "kv_producer"), nixl(tmp_path, "kv_consumer")
    with watched(prefill, decode) as seen:
        is_killed(seen, nixl_route(prefill, decode), list(WAYS))


@pytest.mark.prove
def test_leases_that_expire_before_the_decode_reads(tmp_path: Path) -> None:
    extra = {"kv_lease_duration": 6}
    prefill, decode = nixl(tmp_path, "kv_producer", **extra), nixl(tmp_path, "kv_consumer", **extra)
    with watched(prefill, decode) as seen:
        serve(seen, nixl_route(prefill, decode), "served", 4)
        assert_healthy(seen)
        late = serve(seen, nixl_route(prefill, decode, between_s=10.0), "late", 8)
        seen.until(lambda: last_page(seen, prefill).late_reads)
        for client in seen.clients:
            client.result()  # nobody is told
        seen.until(lambda: names(seen, prefill, BURST, late))
        assert found_by(seen, prefill, BURST) == list(WAYS)
        assert found_by(seen, prefill, STALE) == ["page", "log"]


@pytest.mark.prove
def test_a_decode_of_another_model_gets_nothing(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    prefill, decode = nixl(tmp_path, "kv_producer"), nixl(tmp_path / "other", "kv_consumer")
    with watched(prefill, decode) as seen:
        failed = serve(seen, nixl_route(prefill, decode), "refused", 6)
        assert all(client.exception() for client in seen.clients)
        seen.until(lambda: found_by(seen, decode, REMOTE) == list(WAYS) and names(seen, decode, REMOTE, failed))


# ---------------------------------------------------------------- host tier


def directly(engine: Engine) -> Route:
    """Its prompt follows from the number of the client."""

    def direct(name: str, _prompt: object, max_tokens: int) -> dict[str, object]:
        return engine.ask(name, prompt_of(name.partition("-")[2], 500), max_tokens)

    return direct


def asked_again(seen: Watched, engine: Engine, rounds: int = 2, prompts: int = 16) -> None:
    """Ask for the same prompts again and again: more than the pool holds, so that an outer tier is looked into."""
    for turn in range(rounds):
        serve(seen, directly(engine), f"{turn}", prompts)


@pytest.mark.prove
def test_a_host_tier_with_room(tmp_path: Path) -> None:
    engine = offloading(tmp_path, chunks=600)
    with watched(engine) as seen:
        asked_again(seen, engine)
        seen.until(lambda: last_page(seen, engine).tier_loaded_bytes)
        assert_healthy(seen)


@pytest.mark.slow
def test_a_host_tier_that_is_smaller_than_a_prompt(tmp_path: Path) -> None:
    engine = offloading(tmp_path, chunks=12)
    with watched(engine) as seen:
        asked_again(seen, engine)
        seen.until(lambda: found_by(seen, engine, TIER) == ["page", "log"])
        for way in WAYS:
            assert seen.findings(way, engine).keys() <= {TIER}


@pytest.mark.prove
def test_a_host_tier_that_is_slower_than_the_engine(tmp_path: Path) -> None:
    engine = offloading(tmp_path, chunks=600, seconds_a_block=0.1)
    with watched(engine) as seen:
        asked_again(seen, engine, rounds=5)
        assert found_by(seen, engine, TIER) == ["page"]
        assert "waited for KV from the outer tier" in seen.findings("page", engine)[TIER].explanation


# ---------------------------------------------------------------- LMCache's server


@pytest.mark.prove
@needs_verbs
@pytest.mark.parametrize("lost", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_no_way_is_silent_about_clients_that_a_lost_lmcache_server_keeps(tmp_path: Path, lost: signal.Signals) -> None:
    """LMCache 0.5.6 goes on without its server, or its worker waits for it for ever: that is a matter of the moment."""
    with tier_server(tmp_path) as server:
        engine = lmcache(tmp_path, server)
        with watched(engine) as seen:
            asked_again(seen, engine)
            seen.until(lambda: last_page(seen, engine).external_hits)
            assert_healthy(seen)
            seen.clients.clear()
            server.signal(lost)
            for number in (*range(8), *range(100, 104)):  # known ones, and some that are to be stored
                seen.come(directly(engine), f"lost-{number}", prompt_of(f"{number}", 500), 8)
            seen.until(lambda: not seen.unanswered() or all(seen.findings(way, engine) for way in WAYS))
            if not seen.unanswered():
                assert_healthy(seen)
                return
            assert found_by(seen, engine, STALLED) == ["stream", "log"]
            assert found_by(seen, engine, REMOTE) == ["page"]


@pytest.mark.prove
@needs_verbs
def test_an_lmcache_server_that_is_full_says_so_in_its_own_log(tmp_path: Path) -> None:
    with tier_server(tmp_path, gigabytes=0.002) as server:
        engine = lmcache(tmp_path, server)
        with watched(engine) as seen:
            asked_again(seen, engine)
            assert_healthy(seen)
            assert TIER in {finding.code for finding in examine([str(server.log)], seen.settings).findings}


# ---------------------------------------------------------------- Mooncake, which has no metrics in 0.32


@pytest.mark.prove
@needs_verbs
def test_mooncake_pair_is_healthy_until_its_decode_is_killed(tmp_path: Path) -> None:
    bootstrap = free_ports()
    prefill, decode = mooncake(tmp_path, "kv_producer", bootstrap), mooncake(tmp_path, "kv_consumer", bootstrap)
    with watched(prefill, decode) as seen:
        is_killed(seen, mooncake_route(prefill, decode, bootstrap), ["stream", "log"])
