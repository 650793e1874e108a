"""Sends what a scene does, and reads what a receiver got of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import msgspec
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from kvscope.monitor.contract.kinds import Kind, Status
from kvscope.monitor.contract.samples import Record
from kvscope.monitor.contract.trace_context import parse_traceparent
from kvscope.monitor.contract.wire import Batch, Run, batch_of
from kvscope.monitor.outputs.otel.export_queue import Pace
from kvscope.monitor.outputs.otel.otel_exporter import OtelConfig, OtelOutlet
from kvscope.monitor.outputs.prometheus import WatchCollector
from tests.detectors.scenes import Observer, Watched
from tests.outputs.otel.receiver import Receiver, attributes

QUICK = Pace(retry_s=0.02, most_retry_s=0.05, give_up_s=60)
PATIENCE_S = 30
TRACE = parse_traceparent("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")


@contextmanager
def sending(url: str, scene: Observer, sample: float = 1.0, pace: Pace = QUICK) -> Iterator[OtelOutlet]:
    """An outlet that follows what is fed to the scene from now on; at its end all has been sent."""
    outlet = OtelOutlet(OtelConfig(url, sample, 3600, pace), scene.watch, WatchCollector(scene.watch).collect)
    feed = scene.watch.feed

    def followed(records: Iterable[Record]) -> None:
        reported = list(records)
        outlet.follow(reported)
        feed(reported)

    scene.watch.feed = followed  # type: ignore[method-assign]
    try:
        yield outlet
    finally:
        scene.watch.feed = feed  # type: ignore[method-assign]
        outlet.close()


def busy(scene: Watched) -> Watched:
    """Requests that end by length, one that is aborted, preemptions, prefix hits, prefill in chunks."""
    for n in range(6):
        scene.lab.arrive([*range(60), 100 + n], max_tokens=30)
    scene.steps(3)
    scene.lab.abort(scene.lab.scheduler.running[1])
    scene.run_until_idle()
    return scene


def roots(receiver: Receiver) -> dict[str, Span]:
    found = {str(attributes(span.attributes).get("gen_ai.response.id")): span for span in receiver.spans}
    found.pop("None", None)
    return found


def under(receiver: Receiver, parent: Span) -> list[Span]:
    found = [s for s in receiver.spans if s.parent_span_id == parent.span_id and s.trace_id == parent.trace_id]
    return sorted(found, key=lambda span: span.start_time_unix_nano)


def times(span: Span) -> tuple[int, int]:
    return span.start_time_unix_nano, span.end_time_unix_nano


def long_prefill(number: int, steps: int = 100) -> Batch:
    done = [
        event
        for step in range(steps)
        for event in (
            Run(Kind.CLOCK, 0, -1, [2 * step + 2], []),
            Run(Kind.PROGRESSED, 0, -1, [16 * step + 16, step == steps - 1], [number]),
        )
    ]
    begun = [
        Run(Kind.ARRIVED, 0, number, [1, 16 * steps, 1, 0, steps, steps + 1], []),
        Run(Kind.ADMITTED, 0, number, [0], []),
    ]
    ended = Run(Kind.FINISHED, 0, number, [Status.FINISHED_STOPPED], [])
    batch = batch_of("gone@127.0.0.1:0/0", 1, [*begun, *done, ended])
    return msgspec.structs.replace(batch, sequence=number)
