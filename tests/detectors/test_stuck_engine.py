"""What is stuck outside the scheduler: a minute of a whole engine in virtual time, judged from its journal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from kvscope.engine.bench.simulated_engine import SimulatedEngine
from kvscope.engine.config import EngineConfig
from kvscope.engine.models import load_model
from kvscope.engine.requests.request import SamplingParams
from kvscope.engine.requests.structured_output import StructuredOutputs
from kvscope.monitor.contract import journal
from kvscope.monitor.contract.wire import decode
from kvscope.monitor.detectors.findings import FindingReport, severity_at_least
from kvscope.monitor.questions.pipeline import Pipeline

PROMPT = list(range(1, 101))


def ask(engine: SimulatedEngine, name: str, *, max_tokens: int = 4, regex: str | None = None) -> None:
    grammar = StructuredOutputs(regex=regex) if regex else None
    engine.submit(name, PROMPT, SamplingParams(max_tokens=max_tokens, ignore_eos=True, structured_outputs=grammar))


def in_a_grammar(engine: SimulatedEngine) -> None:
    ask(engine, "stuck", regex="[ab]{4}")
    ask(engine, "other", regex="[ab]{4}")
    engine.run(60)


def at_the_front_end(engine: SimulatedEngine) -> None:
    ask(engine, "stuck")
    ask(engine, "other")
    engine.run(60)


def in_a_fetch(engine: SimulatedEngine) -> None:
    """The same prompt again, gone from the pool and kept by the connector; nothing else is asked for."""
    ask(engine, "first")
    engine.run(5)
    assert engine.pool.reset_prefix_cache()
    ask(engine, "stuck")
    engine.run(60)


def in_a_fetch_among_others(engine: SimulatedEngine) -> None:
    in_a_fetch(engine)
    engine.submit("other", PROMPT[::-1], SamplingParams(max_tokens=2_000, ignore_eos=True))
    engine.run(10)


@pytest.mark.parametrize("fault", [True, False])
@pytest.mark.parametrize(
    ("code", "stuck"),
    [
        ("stuck.grammar", in_a_grammar),
        ("stuck.front-end", at_the_front_end),
        ("stuck.lost-wakeup", in_a_fetch),
        ("stuck.remote-load", in_a_fetch),
        ("stuck.remote-load", in_a_fetch_among_others),
        ("stuck.promotion-starved", in_a_fetch),
    ],
)
def test_a_fault_of_the_whole_engine(
    code: str, stuck: Callable[[SimulatedEngine], None], fault: bool, tmp_path: Path
) -> None:
    config = EngineConfig(
        num_gpu_blocks_override=200,
        kv_connector="host",
        hash_key=b"always the same",
        faults=(f"{code}:limit=1",) if fault else (),
    )
    with closing(SimulatedEngine(config, load_model(config), journal=tmp_path)) as engine:
        stuck(engine)
        found = judged(tmp_path)
    assert [finding.code for finding in found] == ([code] if fault else [])
    # A grammar or a front end that is only slow looks the same; that a fetch has ended, this engine reports.
    verdict = "likely" if code in ("stuck.grammar", "stuck.front-end") else "confirmed"
    assert all((finding.culprits.requests, finding.verdict) == (["stuck"], verdict) for finding in found)


def judged(kept: Path) -> list[FindingReport]:
    """What fires of warning or above at the end of a journal."""
    watch = Pipeline()
    frames = [decode(payload) for payload in journal.read(kept)]
    watch.feed(frame for frame in frames if frame is not None)
    watch.settle()
    return [finding for finding in watch.findings("firing") if severity_at_least(finding.severity, "warning")]
