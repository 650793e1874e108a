"""Structured output through the engine: it fits whatever the schedule was, and waiting for a grammar is a state."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from typing import Any

import jsonschema
import pytest

pytest.importorskip("torch", reason="needs torch: pip install -e .[engine]")

from llguidance import LLTokenizer, TokenizerWrapper

from kvscope.engine.config import EngineConfig
from kvscope.engine.core.assembly import EventStream
from kvscope.engine.core.engine_core import EngineCore
from kvscope.engine.models import LoadedModel, load_model
from kvscope.engine.models.tokens import ByteTokenizer
from kvscope.engine.requests.request import Output, SamplingParams
from kvscope.engine.requests.structured_output import StructuredOutputs
from kvscope.engine.serving.llm import LLM
from kvscope.monitor.contract.kinds import Cause, Status
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.sources.live_stream import LiveStream
from tests.engine.process import follow, wait_for
from tests.engine.test_grammar import NOTHING, REGEX, SCHEMA

ANYWHERE = "tcp://127.0.0.1:*"
JSON, MATCH = StructuredOutputs(json=SCHEMA), StructuredOutputs(regex=REGEX)


def texts(temperature: float, **settings: Any) -> tuple[list[tuple[str, str]], int]:
    """Texts with their reasons, of JSON, a match and anything in turn; and how often one was preempted."""
    each = [
        SamplingParams(temperature=temperature, max_tokens=200 if kind else 30, seed=n, structured_outputs=kind)
        for n in range(3)
        for kind in (JSON, MATCH, None)
    ]
    with LLM(block_size=4, **settings) as llm:
        made = llm.generate([f"number {n}" for n in range(len(each))], each)
        preemptions = llm.core.scheduler.num_preemptions
    return [(one.outputs[0].text, one.outputs[0].finish_reason) for one in made], preemptions


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_outputs_fit_whatever_the_schedule_was(temperature: float, async_scheduling: bool) -> None:
    """And with room for few, so that many are preempted, they are what they are with room for all."""
    tight, preemptions = texts(temperature, num_gpu_blocks_override=26, async_scheduling=async_scheduling)
    assert preemptions > 0
    for text, reason in tight[0::3]:
        jsonschema.validate(json.loads(text), SCHEMA)
        assert reason == "stop"
    for text, reason in tight[1::3]:
        assert re.fullmatch(REGEX, text)
        assert reason == "stop"
    assert len(set(tight)) > 3
    roomy, preemptions = texts(temperature, num_gpu_blocks_override=600)
    assert preemptions == 0
    assert roomy == tight


def test_an_output_that_runs_out_of_tokens_is_a_beginning() -> None:
    with LLM(num_gpu_blocks_override=40) as llm:
        params = SamplingParams(max_tokens=5, structured_outputs=StructuredOutputs(regex="[0-9]{9}"))
        (made,) = llm.generate("a", params)
    assert re.fullmatch("[0-9]{5}", made.outputs[0].text)
    assert made.outputs[0].finish_reason == "length"


def test_a_grammar_s_end_is_an_end_also_if_the_models_is_ignored() -> None:
    with LLM(num_gpu_blocks_override=40) as llm:
        for regex in ("a{3}", "a*"):
            wanted = StructuredOutputs(regex=regex)
            (made,) = llm.generate("a", SamplingParams(max_tokens=500, ignore_eos=True, structured_outputs=wanted))
            assert re.fullmatch(regex, made.outputs[0].text)
            assert made.outputs[0].finish_reason == "stop"


class Running:
    """A core in its own thread, and what it put out."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.outputs: list[Output] = []
        core.start(self.outputs.extend)

    def ask(self, name: str, regex: str | None = None) -> int:
        wanted = StructuredOutputs(regex=regex) if regex is not None else None
        return self.core.submit(name, [1, 2, 3], SamplingParams(max_tokens=6, structured_outputs=wanted))

    def last(self, number: int) -> Output:
        """Its last output, waited for."""

        def ends() -> list[Output]:
            return [output for output in list(self.outputs) if output.number == number and output.status is not None]

        wait_for(lambda: bool(ends()))
        return ends()[0]


@contextmanager
def running(core: EngineCore) -> Iterator[Running]:
    try:
        yield Running(core)
    finally:
        core.close()


@contextmanager
def nothing_compiled(core: EngineCore) -> Iterator[None]:
    """As long as a grammar before it takes."""
    go = threading.Event()
    core._grammars._thread.submit(go.wait)
    try:
        yield
    finally:
        go.set()


def tiny(stream: EventStream | None = None, loaded: LoadedModel | None = None, **settings: Any) -> EngineCore:
    config = EngineConfig(num_gpu_blocks_override=40, **settings)
    return EngineCore(config, loaded or load_model(config), stream)


def test_a_request_waits_for_its_grammar_and_nobody_behind_it_does() -> None:
    core = tiny(EventStream("tiny@test/0", ANYWHERE, ANYWHERE), max_num_seqs=1)
    assert core.publisher is not None
    ledger = EngineLedger("tiny@test/0")
    live = LiveStream(core.publisher.events_endpoint, core.publisher.replay_endpoint)
    with closing(live), running(core) as engine:
        with nothing_compiled(core):
            first, gone = engine.ask("first", "a+b"), engine.ask("gone", "a+b")
            behind = engine.ask("behind")
            assert engine.last(behind).status in (Status.FINISHED_STOPPED, Status.FINISHED_LENGTH_CAPPED)
            core.client_gone(gone)
            assert engine.last(gone).status == Status.FINISHED_ABORTED

            def says_so() -> bool:
                record = ledger.request("first")
                return record is not None and record.status == Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR

            follow(live, [ledger], says_so)
            record = ledger.request("first")
            assert record is not None
            assert record.cause == Cause.GRAMMAR
            assert core.scheduler.num_waiting == 1
        engine.last(first)
        follow(live, [ledger], lambda: ledger.state.totals.finished.keys() >= {int(engine.last(first).status or 0)})
        assert list(ledger.anomalies) == []
        assert core.pool.counts()[2] == 0


def test_closing_ends_those_who_wait_for_a_grammar() -> None:
    core = tiny()
    with running(core) as engine, nothing_compiled(core):
        number = engine.ask("waits", "a")
        core.refuse_all()
        assert engine.last(number).status == Status.FINISHED_ABORTED


def test_a_grammar_that_cannot_be_compiled_ends_its_request_and_no_other() -> None:
    with running(tiny()) as engine:
        nothing, something = engine.ask("nothing", NOTHING), engine.ask("something", "a")
        assert engine.last(nothing).status == Status.FINISHED_ERROR
        assert engine.last(nothing).blamed == "structured_outputs"
        assert "regex cannot be used: no token" in engine.last(nothing).error
        assert engine.last(something).status == Status.FINISHED_STOPPED


class WithoutZ(ByteTokenizer):
    """Tokens for all bytes but one."""

    def for_grammars(self, eos_token_ids: Collection[int]) -> LLTokenizer:
        (eos,) = eos_token_ids

        class Bytes:
            eos_token_id, bos_token_id, special_token_ids = eos, None, (eos,)
            tokens = tuple(b"" if n in (*b"z", eos) else bytes([min(n, 255)]) for n in range(self.VOCAB_SIZE))

            def __call__(self, text: bytes) -> list[int]:
                return [byte for byte in text if byte not in b"z"]

        return LLTokenizer(TokenizerWrapper(Bytes()), eos_token=eos)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_output_that_cannot_go_on_ends_with_an_error_and_no_other_does(async_scheduling: bool) -> None:
    loaded = dataclasses.replace(load_model(EngineConfig()), tokenizer=WithoutZ())
    with running(tiny(loaded=loaded, async_scheduling=async_scheduling)) as engine:
        stuck, other = engine.ask("stuck", "abz"), engine.ask("other", "abc")
        assert engine.last(stuck).status == Status.FINISHED_ERROR
        assert "no token leads to an output" in engine.last(stuck).error
        assert engine.last(other).status == Status.FINISHED_STOPPED
        wait_for(lambda: engine.core.pool.counts()[2] == 0)  # behind a step that was planned meanwhile
        assert engine.core.in_flight == 0
