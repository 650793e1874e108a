"""Points as a write request of Prometheus remote write 1.0: protobuf in a snappy block.

The messages are those of prometheus/prompb/remote.proto and types.proto. protobuf, which OpenTelemetry brings, makes
them from their field numbers. pyarrow compresses: a snappy block without framing is what the protocol asks for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from kvscope.monitor.ledger.balance import Balance
from kvscope.monitor.ledger.engine_ledger import Point

HEADERS: Final = {
    "Content-Encoding": "snappy",
    "Content-Type": "application/x-protobuf",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
}
SERIES_PREFIX: Final = "kvscope_point_"
NOT_KNOWN: Final = -1
_FIELDS: Final = descriptor_pb2.FieldDescriptorProto
_POINT_COLUMNS: Final = (
    "running",
    "waiting",
    "finished_requests",
    "preemptions",
    "computed_tokens",
    "output_tokens",
    "allocation_failures",
    "steps",
    "unused_tokens",
)
SERIES_OF_POINT: Final = (*_POINT_COLUMNS, *(f"blocks_{name}" for name in Balance.__struct_fields__))
"""Columns of the table `points`. Each is a series of every engine."""


def encode_points(points: Mapping[str, Sequence[Point]]) -> bytes:
    """Return the points of engines as the body of a request. Unknown values are left out."""
    request = _WriteRequest()
    for engine, of_engine in points.items():
        for column in SERIES_OF_POINT:
            kept = [(value, point.at_ns) for point in of_engine if (value := _value(point, column)) != NOT_KNOWN]
            if not kept:
                continue
            series = request.timeseries.add()
            series.labels.add(name="__name__", value=SERIES_PREFIX + column)  # in the order of their names
            series.labels.add(name="engine", value=engine)
            for value, at_ns in kept:
                series.samples.add(value=value, timestamp=at_ns // 1_000_000)
    return bytes(pa.compress(request.SerializeToString(), codec="snappy", asbytes=True))


def _value(point: Point, column: str) -> int:
    holder = column.removeprefix("blocks_")
    value: int = getattr(point.balance, holder) if holder != column else getattr(point, column)
    return value


def _write_request() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="kvscope/remote_write.proto", package="prometheus", syntax="proto3")
    for message, fields in (
        ("Label", (("name", _FIELDS.TYPE_STRING), ("value", _FIELDS.TYPE_STRING))),
        ("Sample", (("value", _FIELDS.TYPE_DOUBLE), ("timestamp", _FIELDS.TYPE_INT64))),
        ("TimeSeries", (("labels", "Label"), ("samples", "Sample"))),
        ("WriteRequest", (("timeseries", "TimeSeries"),)),
    ):
        described = file.message_type.add(name=message)
        for number, (name, of) in enumerate(fields, 1):
            field = described.field.add(name=name, number=number, label=_FIELDS.LABEL_OPTIONAL)
            if isinstance(of, str):
                field.type, field.type_name = _FIELDS.TYPE_MESSAGE, f".prometheus.{of}"
                field.label = _FIELDS.LABEL_REPEATED
            else:
                field.type = of
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("prometheus.WriteRequest"))


_WriteRequest: Final = _write_request()
