"""No detector knows which faults are on: told or not told, it judges the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest

from kvscope.monitor import detectors
from kvscope.monitor.contract.description import parse_description
from kvscope.monitor.contract.wire import NO_REQUEST, Batch, Keyframe
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.detectors.registry import CATALOGUE
from kvscope.monitor.questions.pipeline import Pipeline
from tests.detectors.scenes import ENGINE, Watched, finished_held, unaccounted


def judged(frames: Iterable[Batch | Keyframe]) -> tuple[list[str], list[FindingReport]]:
    watch = Pipeline()
    watch.feed(frames)
    watch.settle()
    return watch.fleet.engines[ENGINE].description.faults, watch.findings()


def with_faults(frames: Iterable[Batch | Keyframe], faults: list[str]) -> list[Batch | Keyframe]:
    """The same frames, the engine's description naming those faults."""
    out: list[Batch | Keyframe] = []
    for frame in frames:
        if isinstance(frame, Batch) and NO_REQUEST in frame.texts:
            described = parse_description(frame.texts[NO_REQUEST])
            text = msgspec.structs.replace(described, faults=faults).to_json()
            frame = msgspec.structs.replace(frame, texts={**frame.texts, NO_REQUEST: text})
        out.append(frame)
    return out


@pytest.mark.parametrize("scene", [finished_held, unaccounted])
def test_a_fault_that_is_not_told_is_found_all_the_same(scene: Callable[[], Watched]) -> None:
    watched = scene()
    watched.live(120)
    reported, findings = judged(watched.lab.frames)
    assert len(reported) == 1
    assert [f.code for f in findings if f.severity == "error"] == reported
    assert judged(with_faults(watched.lab.frames, [])) == ([], findings)


def test_a_fault_that_is_told_but_never_strikes_is_not_found() -> None:
    healthy = finished_held(fault="")
    healthy.live(120)
    _, findings = judged(healthy.lab.frames)
    every = ["leak.finished-held", "leak.unaccounted"]
    assert judged(with_faults(healthy.lab.frames, every)) == (every, findings)
    assert not healthy.alarms()


def test_no_detector_asks_for_them() -> None:
    sources = list(Path(inspect.getfile(detectors)).parent.rglob("*.py"))
    assert len(sources) > len(CATALOGUE)
    for source in sources:
        assert ".faults" not in source.read_text()
