"""Incidents of the queue on vLLM's bare Scheduler: what requests wait for, other than blocks (bare_incidents.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Final

from tests.probes.connector_settings import CONNECTOR
from tests.probes.incident_scene import Open


def with_grammar(grammar: object) -> Callable[[Any], None]:
    """Give a request structured output, with a grammar that is compiled or is compiled for ever."""

    def prepare(request: Any) -> None:
        from vllm.sampling_params import StructuredOutputsParams
        from vllm.v1.request import RequestStatus
        from vllm.v1.structured_output.request import StructuredOutputRequest

        names = RequestStatus.__members__
        request.structured_output_request = StructuredOutputRequest(StructuredOutputsParams(regex="a"))
        request.structured_output_request._grammar = grammar
        request.status = names.get("WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR") or names["WAITING_FOR_FSM"]

    return prepare


def grammar_in_the_queue(begin: Open) -> None:
    """Two of two run; a request whose grammar is compiled stands behind them for 50 s."""
    scene = begin(blocks=200, max_num_seqs=2)
    for number in range(2):
        scene.ask(f"runs-{number}", 100, 2600)
    scene.run(1)
    scene.ask_prepared(with_grammar(object()), "json", 40, 4)
    scene.run(50)


def grammar_never_compiled(begin: Open) -> None:
    """The same queue, and the compiler hangs on the grammar."""
    scene = begin(blocks=200, max_num_seqs=2)
    for number in range(2):
        scene.ask(f"runs-{number}", 100, 2600)
    scene.run(1)
    scene.ask_prepared(with_grammar(Future()), "json", 40, 4)
    scene.run(50)


def full_decode_instance(begin: Open) -> None:
    """Two of two run; KV that was fetched for a third is there, and it waits for its turn for 45 s."""
    scene = begin(kv_transfer_config=CONNECTOR, blocks=240, max_num_seqs=2)
    scene.ask("load-0", 200, 4)
    scene.turn()
    for number in range(2):
        scene.ask(f"runs-{number}", 100, 2400)
    scene.run(46)


def promotion_never_comes(begin: Open) -> None:
    """KV has come for a request, others that came later run, and a defect keeps it from being promoted."""
    scene = begin(kv_transfer_config=CONNECTOR, blocks=240, max_num_seqs=8)
    promote = "_handle_blocked_waiting_request"
    kind = type(scene.scheduler)
    method = getattr(kind, promote)

    def refuse(scheduler: Any, request: Any) -> bool:
        return request.status.name != "WAITING_FOR_REMOTE_KVS" and method(scheduler, request)

    setattr(kind, promote, refuse)
    try:
        scene.ask("load-0", 200, 4)
        scene.run(40, scene.chat)
    finally:
        setattr(kind, promote, method)


def adapter(number: int) -> Callable[[Any], None]:
    """Give a request that LoRA adapter."""

    def prepare(request: Any) -> None:
        from vllm.lora.request import LoRARequest

        request.lora_request = LoRARequest(f"adapter-{number}", number, "/nowhere")

    return prepare


def adapters_in_use(begin: Open) -> None:
    """Two adapters of two are in use for 50 s, with most of the pool free; a request with a third one waits."""
    scene = begin(blocks=400, loras=2)
    for number in (1, 2):
        scene.ask_prepared(adapter(number), f"runs-{number}", 100, 2700)
    scene.run(1)
    scene.ask_prepared(adapter(3), "third", 100, 4)
    scene.run(50)


@contextlib.contextmanager
def rounding_down() -> Iterator[None]:
    """Chunks of prompts are rounded down to whole aligned blocks, as vLLM up to 0.24 does, even if to nothing."""
    from vllm.v1.core.sched.scheduler import Scheduler

    def rounded(scheduler: Any, request: Any, tokens: int, local: int = 0, external: int = 0) -> int:
        size: int = scheduler.cache_config.block_size
        ends = request.num_computed_tokens + local + external + tokens >= request.num_tokens
        return tokens if ends else tokens // size * size

    name = "_mamba_block_aligned_split"
    method = getattr(Scheduler, name)
    setattr(Scheduler, name, rounded)
    try:
        yield
    finally:
        setattr(Scheduler, name, method)


def aligned_block_too_large(begin: Open) -> None:
    """A step has fewer tokens than the aligned block of a Mamba layer: a prompt's share of each is 0, for ever."""
    with rounding_down():
        scene = begin(blocks=140, block_size=128, groups=(("full",), ("mamba", "align", 128)), max_tokens=64)
        scene.ask("aligned", 600, 4)
        scene.ask("behind", 40, 4)
        scene.run(40)


def aligned_block_beside_others(begin: Open) -> None:
    """A block fits in a step, but not beside the requests that decode: the prompt waits until some have ended."""
    with rounding_down():
        scene = begin(blocks=140, block_size=128, groups=(("full",), ("mamba", "align", 128)), max_tokens=130)
        for number in range(8):
            scene.ask(f"runs-{number}", 40, 900)
        scene.run(2)
        scene.ask("aligned", 600, 4)
        scene.run(40)


QUEUE_INCIDENTS: Final = (
    grammar_in_the_queue,
    grammar_never_compiled,
    full_decode_instance,
    promotion_never_comes,
    adapters_in_use,
    aligned_block_too_large,
    aligned_block_beside_others,
)
