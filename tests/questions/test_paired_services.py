"""Prefill beside decode engines: statements of a pair rest on findings of real pools, and a healthy pair has none."""

from __future__ import annotations

import msgspec
import pytest

from kvscope.monitor.questions.fleet_overview import paired_services
from kvscope.monitor.questions.fleet_schema import FleetEngineView, FleetService
from tests.detectors.leaks import fetching
from tests.detectors.scenes import Watched, finished_held
from tests.detectors.stuck import remote_load

FIRES_S = 120.0


def producer(*, leaks: bool) -> Watched:
    scene = finished_held("leak.finished-held" if leaks else "")
    scene.live(FIRES_S)
    return scene


def consumer(*, hangs: bool) -> Watched:
    scene = remote_load(fault=hangs)
    scene.live(FIRES_S, every=0.25)
    return scene


def line_of(scene: Watched, name: str, role: str, **fields: str) -> FleetEngineView:
    """An engine as the fleet view has it, by another name."""
    (line,) = scene.watch.fleet_overview().engines
    return msgspec.structs.replace(line, engine=name, kv_role=role, service="chat", **fields)


def pair(prefill: Watched, decode: Watched) -> FleetService:
    (service,) = paired_services([line_of(prefill, "prefill", "producer"), line_of(decode, "decode", "consumer")])
    assert (service.name, service.producers, service.consumers) == ("chat", ["prefill"], ["decode"])
    return service


def test_a_healthy_pair_states_nothing_while_blocks_are_held_and_fetched() -> None:
    prefill, decode = Watched(connector_share=1.0), fetching()
    for scene in (prefill, decode):
        for tokens in range(20, 40):
            scene.lab.arrive(tokens, max_tokens=2)
    assert prefill.lab.connector is not None
    assert decode.lab.connector is not None
    prefill.lab.connector.polls_needed = decode.lab.connector.polls_needed = 5
    seen = set()
    for _ in range(200):
        prefill.steps(1, 0.1)
        decode.steps(1, 0.1)
        service = pair(prefill, decode)
        assert (service.statement, service.held_up_by, service.verdict) == ("", "none", "")
        assert service.held_blocks is not None
        assert service.fetching is not None
        seen |= {("held", service.held_blocks > 0), ("fetching", service.fetching > 0)}
    assert {("held", True), ("fetching", True)} <= seen


def test_a_leaking_producer_beside_a_healthy_consumer_holds_nobody_up() -> None:
    prefill = producer(leaks=True)
    service = pair(prefill, consumer(hangs=False))
    assert (service.held_up_by, service.verdict) == ("none", "cannot-tell")
    assert service.held_blocks == len(prefill.lab.scheduler.deferred_blocks()) if False else service.held_blocks
    assert f"prefill holds {service.held_blocks} blocks of finished requests" in service.statement
    assert "No consumer is stuck, silent or stopped, or has a finding about its fetches" in service.statement


def test_a_consumer_that_stopped_holds_a_leaking_producer_up() -> None:
    decode = consumer(hangs=False)
    decode.silence(60)
    service = pair(producer(leaks=True), decode)
    assert (service.held_up_by, service.verdict) == ("consumers", "likely")
    assert "decode is silent" in service.statement
    assert "The producer's own connector may have failed, too" in service.statement


def test_a_consumer_that_stopped_is_not_blamed_without_held_blocks() -> None:
    decode = consumer(hangs=False)
    decode.silence(60)
    assert pair(producer(leaks=False), decode).statement == ""


def test_a_producer_that_stopped_holds_a_waiting_consumer_up() -> None:
    prefill = producer(leaks=False)
    prefill.silence(60)
    service = pair(prefill, consumer(hangs=True))
    assert (service.held_up_by, service.verdict) == ("producers", "likely")
    assert "1 request of decode waits for KV whose fetch does not complete, and prefill is silent" in service.statement


def test_a_producer_that_stopped_is_not_blamed_while_fetches_complete() -> None:
    prefill = producer(leaks=False)
    prefill.silence(60)
    assert pair(prefill, consumer(hangs=False)).statement == ""


@pytest.mark.parametrize("leaks", [False, True])
def test_no_side_is_named_where_both_are_there(leaks: bool) -> None:
    service = pair(producer(leaks=leaks), consumer(hangs=True))
    assert (service.held_up_by, service.verdict) == ("transfer", "cannot-tell")
    assert ("prefill holds" in service.statement) == leaks


def test_a_consumer_without_a_stream_does_not_show_whether_it_waits() -> None:
    prefill = line_of(producer(leaks=True), "prefill", "producer")
    decode = msgspec.structs.replace(line_of(consumer(hangs=False), "decode", "consumer"), fetching=None)
    (service,) = paired_services([prefill, decode])
    assert service.verdict == "cannot-tell"
    assert "Whether consumers wait for them is not exposed by decode" in service.statement


def plain(name: str, role: str, **fields: str) -> FleetEngineView:
    return FleetEngineView(name, "none", "serving", kv_role=role, **fields)  # type: ignore[arg-type]


def test_engines_belong_together_by_service_or_else_by_model_and_zone() -> None:
    engines = [
        plain("a", "producer", service="chat", model="qwen"),
        plain("b", "consumer", service="chat", model="qwen", zone="z2"),
        plain("c", "producer", model="qwen", zone="z1"),
        plain("d", "consumer", model="qwen", zone="z1"),
        plain("e", "consumer", model="qwen", zone="z2"),
        plain("f", "both", service="chat"),
        plain("g", "", service="chat"),
        plain("h", "producer", service="alone"),
    ]
    named, by_model = paired_services(engines)
    assert (named.name, named.grouped_by, named.producers, named.consumers) == ("chat", "service", ["a"], ["b"])
    assert (by_model.name, by_model.grouped_by) == ("qwen · z1", "model")
    assert (by_model.producers, by_model.consumers) == (["c"], ["d"])
