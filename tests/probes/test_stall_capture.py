"""The engine's thread is read when it stops, however it stops, and not before."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvscope.monitor.contract.kinds import Layer
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.probes.stall_capture import StackFrame, layer_of, read_dump, stack_file
from kvscope.monitor.sources.live_stream import LiveStream

ENGINE = textwrap.dedent(
    """
    import ctypes, sys, threading, time
    from kvscope.monitor.contract.event_log import EventLog
    from kvscope.monitor.probes.packer import Vitals
    from kvscope.monitor.probes.publisher import Publisher
    from kvscope.monitor.probes.stall_capture import StallCapture

    log, passes, how, events = EventLog(), 0, sys.argv[1], sys.argv[2]
    log.started(10, 1, 16, "")
    log.arrived(1, "r-1", 16, 16, 0, 1, 2)
    log.flush(0, 0, (9, 0, 0, 10))
    ident = threading.get_ident()
    publisher = Publisher(
        log, "e@h:1/0", lambda: Vitals(-1, 0, 1, 0, 1, 0, passes), events=events, replay=events + "-replay",
        stacks=StallCapture(log, lambda: ident, [__file__] if how == "connector" else []),
    )
    publisher.start()

    def wait_for_the_worker():
        time.sleep(60)

    def match_a_pattern():
        ctypes.PyDLL(None).sleep(60)  # a C call that keeps the GIL

    def go_on(times=100):
        global passes
        for _ in range(times):
            passes += 1
            time.sleep(0.1)

    go_on(20)
    {"healthy": go_on, "gil": match_a_pattern}.get(how, wait_for_the_worker)()
    """
)


@pytest.fixture
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[LiveStream, EngineLedger, str]]:
    events = f"ipc://{tmp_path}/events"
    script = tmp_path / "connector_of_mine.py"
    script.write_text(ENGINE)
    process = subprocess.Popen([sys.executable, str(script), request.param, events])
    try:
        with closing(LiveStream(events, f"{events}-replay")) as stream:
            yield stream, EngineLedger("e@h:1/0"), events
    finally:
        process.kill()
        process.wait()
        stack_file(events).unlink(missing_ok=True)


def follow(stream: LiveStream, ledger: EngineLedger, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and ledger.state.stack is None:
        for record in stream.poll(0.1):
            ledger.apply(record)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "function", "layer"),
    [
        ("sleep", "wait_for_the_worker", Layer.UNKNOWN),
        ("connector", "wait_for_the_worker", Layer.CONNECTOR),
        ("gil", "match_a_pattern", Layer.UNKNOWN),
    ],
    indirect=["engine"],
)
@pytest.mark.usefixtures("real_parts")
def test_a_thread_that_stands_still_is_read(
    engine: tuple[LiveStream, EngineLedger, str], function: str, layer: Layer
) -> None:
    stream, ledger, _ = engine
    follow(stream, ledger, 30)
    stack = ledger.state.stack
    assert stack is not None
    assert stack.layer == layer
    assert stack.frames.splitlines()[0].startswith(f"{function} (connector_of_mine.py:")
    assert str(Path(__file__).parent) not in stack.frames


@pytest.mark.slow
@pytest.mark.usefixtures("real_parts")
@pytest.mark.parametrize("engine", ["healthy"], indirect=True)
def test_a_thread_that_goes_on_is_not(engine: tuple[LiveStream, EngineLedger, str]) -> None:
    stream, ledger, events = engine
    follow(stream, ledger, 8)
    assert ledger.ready
    assert ledger.state.stack is None
    assert read_dump(stack_file(events)) is None


@pytest.mark.parametrize(
    ("paths", "layer"),
    [
        (["x/site-packages/zmq/sugar/socket.py", "x/site-packages/vllm/v1/executor/multiproc_executor.py"], "EXECUTOR"),
        (["x/lib/python3.11/threading.py", "x/site-packages/vllm/v1/core/sched/scheduler.py"], "SCHEDULER"),
        (["x/site-packages/torch/nn/linear.py", "x/site-packages/vllm/model_executor/models/llama.py"], "MODEL"),
        (["x/site-packages/vllm/distributed/kv_transfer/kv_connector/v1/nixl/connector.py"], "CONNECTOR"),
        (["x/site-packages/xgrammar/compiler.py", "x/site-packages/vllm/v1/core/sched/scheduler.py"], "GRAMMAR"),
        (
            ["x/site-packages/vllm/v1/sample/sampler.py", "x/site-packages/vllm/v1/worker/gpu_model_runner.py"],
            "SAMPLER",
        ),
        (["x/lib/python3.11/threading.py"], "UNKNOWN"),
    ],
)
def test_the_innermost_call_that_belongs_to_a_layer_names_it(paths: list[str], layer: str) -> None:
    assert layer_of([StackFrame("f", path, 1) for path in paths]) == Layer[layer]


def test_a_file_that_is_no_dump_has_no_stack(tmp_path: Path) -> None:
    assert read_dump(tmp_path / "none") is None
    (tmp_path / "empty").write_text("")
    assert read_dump(tmp_path / "empty") is None
    (tmp_path / "words").write_text("zz\n\nThread 0xzz\n  File")
    assert read_dump(tmp_path / "words") is None
