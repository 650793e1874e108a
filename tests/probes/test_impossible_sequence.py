"""A batch whose number its engine never gave: it is refused as damage, and what follows it is received."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract.wire import Batch, encode
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.records import AnomalyKind
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.service.source_reader import SourceReader
from kvscope.monitor.sources.live_stream import LiveStream
from tests.probes.published import ENGINE, published, run
from tests.waiting import until

AHEAD = (1 << 61, 10_000)


@pytest.mark.parametrize("ahead", AHEAD)
def test_a_stream_is_in_step_again_after_a_batch_that_its_engine_never_made(tmp_path: Path, ahead: int) -> None:
    lab = Lab(total=200, clock=time, pack=False)
    with published(lab, tmp_path) as publisher:
        pipeline = Pipeline()
        source = LiveStream(publisher.events_endpoint, publisher.replay_endpoint)
        reader = SourceReader(source, pipeline)
        reader.start()
        try:
            until(lambda: pipeline.fleet.engines.get(ENGINE) and reader.view().in_step)
            run(lab, 20)
            last = pipeline.fleet.engines[ENGINE].recent[-1]
            assert isinstance(last, Batch)
            forged = msgspec.structs.replace(last, sequence=last.sequence + ahead)
            publisher._pub.send_multipart([ENGINE.encode(), encode(forged)])
            until(lambda: reader.view().bad_frames == 1)
            until(lambda: reader.view().in_step)
            reached = pipeline.fleet.engines[ENGINE].sequence
            run(lab, 20)
            until(lambda: pipeline.fleet.engines[ENGINE].sequence > reached)
            assert pipeline.fleet.engines[ENGINE].sequence < forged.sequence
            assert not pipeline.fleet.engines[ENGINE].losses
        finally:
            reader.stop()


def test_a_recording_goes_on_behind_a_batch_whose_number_its_time_excludes() -> None:
    """An engine packs no batch in less than a microsecond: so many cannot be missing between two."""
    lab = Lab(total=64)
    run(lab, 60)
    batches = [frame for frame in lab.frames if isinstance(frame, Batch)]
    half = len(batches) // 2
    forged = msgspec.structs.replace(batches[half], sequence=1 << 62)
    ledger = EngineLedger(ENGINE)
    for batch in (*batches[:half], forged, *batches[half:]):
        ledger.apply(batch)
    assert ledger.sequence == batches[-1].sequence
    assert [loss.batches for loss in ledger.losses] == [1]
    assert ledger.anomalies[0].anomaly.kind is AnomalyKind.UNREADABLE
