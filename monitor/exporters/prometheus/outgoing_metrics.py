"""How far the archive of the history and remote write are."""

from __future__ import annotations

from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvscope.monitor.exporters.remote_write.remote_writer import RemoteWriteFigures
from kvscope.monitor.history.archiver import ArchiveFigures


class OutgoingFigures(NamedTuple):
    """Copies to other systems, None for those that are not configured."""

    archive: ArchiveFigures | None = None
    remote_write: RemoteWriteFigures | None = None


class OutgoingFamilies:
    """Copies to other systems, being filled, without series for those that are not configured. These belong to no
    engine.
    """

    def __init__(self) -> None:
        self.archived = CounterMetricFamily(
            "kvscope_archive_segments", "History segments that reached the archive since the service started."
        )
        self.archived_bytes = CounterMetricFamily("kvscope_archive_bytes", "Bytes of those segments.")
        self.archive_failures = CounterMetricFamily(
            "kvscope_archive_failures", "Failed uploads to the archive, which are repeated."
        )
        self.archive_deleted = CounterMetricFamily(
            "kvscope_archive_segments_lost",
            "Segments that --keep-bytes deleted from the local disk before the archive had them.",
        )
        self.archive_waiting = GaugeMetricFamily(
            "kvscope_archive_waiting_segments", "Closed segments that the archive does not have yet."
        )
        self.archive_lag = GaugeMetricFamily(
            "kvscope_archive_lag_seconds", "How long the oldest of them has been closed. 0 without any."
        )
        self.points = CounterMetricFamily(
            "kvscope_remote_write_points",
            "Points of engines by outcome: sent, rejected (the store refused their content) or dropped (the spool was"
            " full).",
            labels=("outcome",),
        )
        self.write_failures = CounterMetricFamily(
            "kvscope_remote_write_failures", "Failed remote write requests, which are repeated."
        )
        self.spool = GaugeMetricFamily("kvscope_remote_write_spool_bytes", "Bytes of requests waiting on disk.")
        self.write_lag = GaugeMetricFamily(
            "kvscope_remote_write_lag_seconds", "How long the oldest request has waited. 0 without any."
        )

    def add(self, figures: OutgoingFigures) -> None:
        """All of it."""
        if figures.archive is not None:
            self.archived.add_metric((), figures.archive.segments)
            self.archived_bytes.add_metric((), figures.archive.bytes)
            self.archive_failures.add_metric((), figures.archive.failures)
            self.archive_deleted.add_metric((), figures.archive.deleted)
            self.archive_waiting.add_metric((), figures.archive.waiting)
            self.archive_lag.add_metric((), figures.archive.waiting_s)
        if figures.remote_write is not None:
            for outcome in ("sent", "rejected", "dropped"):
                self.points.add_metric((outcome,), getattr(figures.remote_write, outcome))
            self.write_failures.add_metric((), figures.remote_write.failures)
            self.spool.add_metric((), figures.remote_write.waiting_bytes)
            self.write_lag.add_metric((), figures.remote_write.waiting_s)
