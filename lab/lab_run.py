"""One run: an engine in virtual time, its events as bytes, the monitor's findings, and the verdict.

Nothing but the events goes from the engine to the monitor, and of these the faults that are on are taken out. Only the
judge reads the engine's own objects.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from kvscope.engine.bench.simulated_engine import SimulatedEngine, StepTime
from kvscope.engine.config import EngineConfig
from kvscope.engine.models import LoadedModel, load_model
from kvscope.engine.requests.request import Output
from kvscope.monitor.contract import journal
from kvscope.monitor.contract.description import parse_description
from kvscope.monitor.contract.kinds import Status
from kvscope.monitor.contract.wire import NO_REQUEST, Batch, Keyframe, decode
from kvscope.monitor.detectors.detector import Settings
from kvscope.monitor.detectors.findings import severity_at_least
from kvscope.monitor.questions.pipeline import Pipeline

from .client_load import Crowd
from .opposite_advice import opposite_advice
from .scenarios import Scenario
from .simulated_run import Named, SimulatedRun
from .truth.claims import harms_told_first

SLACK_S: Final = 10.0
"""The time that a finding may take beyond the class's own pending period."""
ENDED_WELL: Final = (Status.FINISHED_STOPPED, Status.FINISHED_LENGTH_CAPPED)
EARLY_S: Final = 0.2
"""The time by which it may seem too early: the engine's state is noted after a pass, and ten times a second."""
LOOK_EVERY_NS: Final = 1_000_000_000


class Fired(msgspec.Struct):
    """A finding of warning or above that began to fire: when, in virtual seconds and steps of the engine's life."""

    code: str
    at_s: float
    step: int
    explanation: str


class LabRun(msgspec.Struct):
    """The result of a scenario under one seed. `problems` is empty if all is as it should be."""

    code: str
    scenario: str
    seed: int
    grace_s: float
    onset_s: float | None = None
    onset_step: int = -1
    fired: list[Fired] = []
    problems: list[str] = []
    virtual_s: float = 0.0
    real_s: float = 0.0
    kept: str = ""
    """Where its recording is, if it was kept."""

    @property
    def found(self) -> Fired | None:
        """The first finding of the injected code."""
        return next((fired for fired in self.fired if fired.code == self.code), None)

    @property
    def took_s(self) -> float | None:
        """From onset to finding."""
        return None if self.found is None or self.onset_s is None else self.found.at_s - self.onset_s

    @property
    def took_steps(self) -> int:
        """The same in the engine's steps, 0 if it was not found."""
        return self.found.step - self.onset_step if self.found is not None else 0


def live(scenario: Scenario, seed: int, keep: Path | None = None) -> LabRun:
    """Live it, look at it, judge it. keep: a directory for the recording of a run that was not right."""
    began = time.perf_counter()
    directory = Path(tempfile.mkdtemp(prefix="kvscope-incident-"))
    try:
        made, simulated = inject_fault(scenario, seed, directory)
        with closing(simulated.engine):  # it runs until it has been judged: its end is no part of the incident
            seen = look(directory)
            made.fired, made.problems = seen.fired, list(_problems(made, scenario, simulated, seen))
        made.real_s = time.perf_counter() - began
        if made.problems and keep is not None:
            made.kept = str(keep / re.sub(r"[^a-z0-9.=-]+", "-", f"{scenario.name} seed {seed}"))
            shutil.rmtree(made.kept, ignore_errors=True)
            shutil.copytree(directory, made.kept)
        return made
    finally:
        shutil.rmtree(directory)


# -------------------------------------------------------------------- the engine's side


@cache
def _model(max_model_len: int | None) -> LoadedModel:
    """Return the model that the engine pretends to run. Only its settings count."""
    return load_model(EngineConfig(max_model_len=max_model_len))


def inject_fault(scenario: Scenario, seed: int, directory: Path) -> tuple[LabRun, SimulatedRun]:
    """Run it on an engine in virtual time, which keeps its events in `directory`, and close that engine."""
    config = EngineConfig(
        **{"hash_key": b"lab", "seed": seed, **scenario.engine},
        faults=(scenario.fault,) if scenario.fault else (),
    )
    step_time = StepTime(base_s=scenario.step_s)  # few steps a second are soon lived through
    engine = SimulatedEngine(
        config, _model(config.max_model_len), step_time=step_time, journal=directory, name="lab@127.0.0.1:0/0"
    )
    crowd = Crowd(engine, scenario.load, seed)
    fault = engine.faults.on.get(scenario.code)
    simulated = SimulatedRun(engine, fault, crowd.names, crowd.numbers)
    made = LabRun(scenario.code, scenario.name, seed, scenario.grace_s(Settings()))
    began_s = engine.now_s

    def note() -> None:
        simulated.note()
        if not scenario.code or (scenario.fault and fault is None) or not scenario.onset(simulated):
            made.onset_s = None
        elif made.onset_s is None:
            made.onset_s = engine.now_s - began_s
            made.onset_step = engine.scheduler.step - 1

    def receive(outputs: list[Output]) -> None:
        simulated.finished_now({output.number for output in outputs if output.status in ENDED_WELL})
        crowd.receive(outputs)
        note()

    engine.time.every(0.1, note)  # an engine that sleeps makes no passes
    engine.run(scenario.seconds, receive)
    made.virtual_s = engine.now_s - began_s
    return made, simulated


# -------------------------------------------------------------------- the monitor's side


class Seen(msgspec.Struct):
    """The monitor's report on a recording: the codes that fired, and all requests and blocks ever named, by code."""

    fired: list[Fired] = []
    requests: dict[str, set[str]] = {}
    blocks: dict[str, set[int]] = {}
    opposites: dict[str, None] = {}
    """Contradictions between the advice of findings that fire at once."""


def frames(directory: Path) -> Iterator[Batch]:
    """Yield a recording's batches, from its bytes, without the faults that the engine's description lists."""
    for payload in journal.read(directory):
        frame = decode(payload)
        if frame is None or isinstance(frame, Keyframe):
            continue  # a keyframe adds nothing for a reader of all batches
        described = frame.texts.get(NO_REQUEST)
        if described:
            innocent = msgspec.structs.replace(parse_description(described), faults=[]).to_json()
            frame = msgspec.structs.replace(frame, texts={**frame.texts, NO_REQUEST: innocent})
        yield frame


def look(directory: Path) -> Seen:
    """Let a monitor watch the recording, and ask it every second what it has found."""
    watch = Pipeline()
    seen = Seen([], {}, {})
    began = due = step = 0
    for frame in frames(directory):
        watch.feed([frame])
        began, step = began or frame.wall_ns, frame.last_step
        _note_fired(watch, seen, began, step)
        if frame.wall_ns >= due:
            due = frame.wall_ns + LOOK_EVERY_NS
            _note_firing(watch, seen, (frame.wall_ns - began) / 1e9, step)
    watch.settle()  # an engine whose ledger has failed sends no more events
    _note_fired(watch, seen, began, step)
    _note_firing(watch, seen, (due - LOOK_EVERY_NS - began) / 1e9, step)
    return seen


def _note_fired(watch: Pipeline, seen: Seen, began_ns: int, step: int) -> None:
    for finding, to, at_ns in watch.take_transitions():
        judged = finding.judgement
        if to == "firing" and severity_at_least(finding.severity, "warning"):
            seen.fired.append(Fired(judged.code, (at_ns - began_ns) / 1e9, step, judged.explanation))


def _note_firing(watch: Pipeline, seen: Seen, at_s: float, step: int) -> None:
    """Add the requests and blocks that firing findings name now, including findings that were information at first and
    no longer are.
    """
    noted = {fired.code for fired in seen.fired}
    for report in watch.findings("firing"):
        if report.code not in noted and severity_at_least(report.severity, "warning"):
            seen.fired.append(Fired(report.code, at_s, step, report.explanation))
        seen.requests.setdefault(report.code, set()).update(report.culprits.requests)
        seen.blocks.setdefault(report.code, set()).update(report.culprits.blocks)
    seen.opposites.update(dict.fromkeys(opposite_advice(watch.findings("firing"))))


# -------------------------------------------------------------------- the verdict


def _problems(made: LabRun, scenario: Scenario, simulated: SimulatedRun, seen: Seen) -> Iterator[str]:
    code = scenario.code
    yield from seen.opposites
    told_first = harms_told_first(code)
    for fired in seen.fired:
        if fired.code in told_first and scenario.requests is not None:
            asked = scenario.requests(simulated)
            yield from _compare("requests", seen.requests.get(fired.code, set()), Named(frozenset(), asked.most))
        elif fired.code != code and fired.code not in scenario.consequences:
            yield f"false: {fired.code} at {fired.at_s:.1f} s: {fired.explanation}"
    if not code:
        return
    if made.onset_s is None:
        yield "not caused: the fault triggered on nothing, or too rarely"
        return
    found = next((fired for fired in seen.fired if fired.code == code), None)
    if found is None:
        yield "missed"
        return
    took_s = found.at_s - made.onset_s
    if took_s > made.grace_s + SLACK_S:
        yield f"late: {took_s:.1f} s after its onset, of which {made.grace_s:g} s are its grace"
    if took_s < -EARLY_S:
        yield f"too early: {-took_s:.1f} s before its onset"
    if scenario.requests is not None:
        yield from _compare("requests", seen.requests.get(code, set()), scenario.requests(simulated))
    if scenario.blocks is not None:
        yield from _compare("blocks", seen.blocks.get(code, set()), scenario.blocks(simulated))


def _compare(what: str, named: set[Any], asked: Named) -> Iterator[str]:
    wrong, left_out = sorted(named - asked.most), sorted(asked.least - named)
    if wrong:
        yield f"culprits: {what} named that the fault did not affect: {wrong[:10]}"
    if left_out:
        yield f"culprits: {what} affected that were not named: {left_out[:10]}"
