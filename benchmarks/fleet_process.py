"""Agents of a fleet, as `benchmarks.hub` starts them in processes of their own, until stdin is closed.

    python -m benchmarks.fleet_process replay NATS_URL ENGINES
    python -m benchmarks.fleet_process answer NATS_URL AGENT ENGINES BLOCKS REQUESTS

replay: points of so many engines, each every POINT_EVERY_S as agents send them, and findings on every twentieth.
answer: a real agent of a few engines with full pools, which answers questions.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
from nats.js import JetStreamContext

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.fleet.bus_config import BusConfig
from kvscope.monitor.fleet.bus_connection import connect_bus, publish_once
from kvscope.monitor.fleet.bus_link import POINT_EVERY_S, BusLink
from kvscope.monitor.fleet.bus_messages import PointMessage, encode_message, finding_message
from kvscope.monitor.fleet.bus_subjects import subject_of
from kvscope.monitor.questions.fleet_schema import STRIP_BUCKETS
from kvscope.monitor.questions.pipeline import Pipeline
from tests.finding_transitions import AlertMessages

TENANT = "default"
FOUND_EVERY = 20
STEP_S = 0.5


def watched(names: list[str], blocks: int, requests: int) -> Pipeline:
    """Engines with full pools, as an agent has them."""
    watch = Pipeline()
    for number, name in enumerate(names):
        lab = Lab(
            total=blocks, block_size=16, max_num_seqs=requests, max_num_batched_tokens=65_536, seed=number, engine=name
        )
        for request in range(requests):
            lab.arrive([request] * min(560, 8 * blocks // requests), max_tokens=1000)
        for _ in range(40):
            lab.step(STEP_S)
        watch.feed(lab.frames)
    return watch


def answer(url: str, agent: str, engines: int, blocks: int, requests: int) -> None:
    watch = watched([f"{agent}-{number}@10.0.0.1:8000/0" for number in range(engines)], blocks, requests)
    link = BusLink(BusConfig((url,), tenant=TENANT, agent=agent), watch)
    link.start()
    print("ready", flush=True)
    sys.stdin.read()
    link.stop()


def replay(url: str, engines: int) -> None:
    (view,) = watched(["engine"], 2_000, 40).engines()
    drawn = random.Random(1)
    points = [
        PointMessage(
            id="",
            agent=f"agent-{number // 8}",
            at_ns=0,
            engine=msgspec.structs.replace(
                view,
                engine=f"engine-{number}@10.1.{number // 250}.{number % 250}:8000/0",
                model=drawn.choice(("llama-70b", "qwen-32b", "mixtral")),
                version=drawn.choice(("vLLM 0.11.0", "vLLM 0.12.0")),
            ),
            open=[],
            zone=f"zone-{number % 3}",
            node=f"node-{number // 8}",
            usage=[drawn.randrange(30, 100) for _ in range(STRIP_BUCKETS)],
        )
        for number in range(engines)
    ]
    asyncio.run(_replay(url, points, drawn))


async def _replay(url: str, points: list[PointMessage], drawn: random.Random) -> None:
    client = await connect_bus(BusConfig((url,), tenant=TENANT, agent="replay"))
    streams = client.jetstream()
    for number in range(0, len(points), FOUND_EVERY):
        found = await _publish_finding(streams, points[number])
        points[number] = msgspec.structs.replace(points[number], open=[found])
    closed = ThreadPoolExecutor(1).submit(sys.stdin.read)
    for turn in itertools.count():
        began = time.monotonic()
        for number, point in enumerate(points):
            await _publish_point(streams, point, drawn)
            late_s = began + number * POINT_EVERY_S / len(points) - time.monotonic()
            if turn and late_s > 0:
                await asyncio.sleep(late_s)
        if not turn:
            print("ready", flush=True)
        if closed.done():
            break
    await client.close()


async def _publish_finding(streams: JetStreamContext, point: PointMessage) -> str:
    """Publish a finding of the point's engine, and return its id."""
    engine = point.engine.engine
    (transition,) = AlertMessages().fire(time.time(), engine=engine)
    message = finding_message(transition, point.agent)
    subject = subject_of(TENANT, "finding", point.agent, engine, message.id)
    await publish_once(streams, subject, encode_message(message), message.id, alone=True)
    return transition.finding.id


async def _publish_point(streams: JetStreamContext, point: PointMessage, drawn: random.Random) -> None:
    now_ns = time.time_ns()
    usage = drawn.uniform(0.3, 1.0)
    sent = msgspec.structs.replace(
        point,
        id=f"{point.engine.engine}/{now_ns}",
        at_ns=now_ns,
        engine=msgspec.structs.replace(point.engine, usage=usage, waiting=drawn.randrange(20)),
        usage=[*point.usage[1:], round(100 * usage)],
    )
    subject = subject_of(TENANT, "point", point.agent, point.engine.engine)
    await publish_once(streams, subject, encode_message(sent), sent.id, alone=False)


if __name__ == "__main__":
    kind, url, *rest = sys.argv[1:]
    if kind == "replay":
        replay(url, int(rest[0]))
    else:
        answer(url, rest[0], *map(int, rest[1:]))
