"""Where the engine's thread stands while steps have stopped, as far as its stack was read."""

from __future__ import annotations

from typing import Final

from kvscope.monitor.detectors.judgement import Evidence
from kvscope.monitor.events.kinds import Layer
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.engine_state import EngineState
from kvscope.monitor.state.records import EngineStack

SHOWN_FRAMES: Final = 8
LAYER_TEXT: Final = {
    Layer.SCHEDULER: "the scheduler",
    Layer.EXECUTOR: "the executor, waiting for its workers",
    Layer.MODEL: "the model",
    Layer.CONNECTOR: "the KV connector",
    Layer.GRAMMAR: "the grammar's compiler",
    Layer.SAMPLER: "the sampler",
}


def stack_evidence(ledger: EngineLedger, since_ns: int) -> tuple[Evidence, ...]:
    """Return the layer and the innermost frames, if the stack was read since then (monotonic)."""
    stack = _stack_since(ledger.state, since_ns)
    if stack is None:
        return ()
    position = ledger.at(stack.at)
    frames = stack.frames.splitlines()
    calls = [line for line in frames if not line.startswith("process ")][:SHOWN_FRAMES]
    processes = [line for line in frames if line.startswith("process ")][:SHOWN_FRAMES]
    return (
        Evidence("stalled_layer", _layer(stack).name, "", "stream", position),
        *(Evidence("stack_frame", line, "", "stream", position) for line in calls),
        *(Evidence("worker_process_state", line, "", "stream", position) for line in processes),
    )


def stack_text(state: EngineState, since_ns: int) -> str:
    """Return a sentence with the layer and the innermost call, or an empty one if the stack was not read since then."""
    stack = _stack_since(state, since_ns)
    if stack is None or not stack.frames:
        return ""
    innermost = stack.frames.splitlines()[0]
    where = LAYER_TEXT.get(_layer(stack), "")
    return f" The engine's thread is in {where}, in {innermost}." if where else f" It is in {innermost}."


def _stack_since(state: EngineState, since_ns: int) -> EngineStack | None:
    stack = state.stack
    return stack if stack is not None and stack.at_ns >= since_ns else None


def _layer(stack: EngineStack) -> Layer:
    try:
        return Layer(stack.layer)
    except ValueError:
        return Layer.UNKNOWN
