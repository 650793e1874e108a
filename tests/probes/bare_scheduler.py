"""vLLM's own Scheduler with the probe on it, without a server and without a model: run by a Python that has vLLM.

    PYTHONPATH=. PYTHON -m tests.probes.bare_scheduler MODEL_DIRECTORY OUT '{"LIFE": {"steps": 2000, …}, …}'

It leads random lives: shared prefixes, a pool too small for all, aborts, resets; with a connector also fetches and
blocks that outlive their request. After each call of schedule or update_from_output, or after each `every` of them, it
writes to OUT/LIFE what the probe said and what vLLM's tables hold, each as a msgpack map after its length, of four
bytes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from kvscope.monitor.events.event_log import EventLog
from kvscope.monitor.events.wire import encode
from kvscope.monitor.probes.vllm.probe import Probe
from kvscope.monitor.publishing.packer import Packer
from tests.probes.decisions import Decisions

ENGINE = "vllm@127.0.0.1:0/0"


def traceparent(number: int) -> str:
    """The header that the `number`-th request comes with, if it comes with one."""
    return f"00-{number:032x}-{number:016x}-01"


def takes(called: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Those of `arguments` that it takes in this release of vLLM."""
    return {name: value for name, value in arguments.items() if name in _parameters(called)}


@functools.cache
def _parameters(called: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(called).parameters)


class Bare:
    """A scheduler over `blocks` blocks, and what stands in for the model and for the connector's worker."""

    def __init__(
        self,
        model: str,
        *,
        seed: int = 0,
        blocks: int = 120,
        max_num_seqs: int = 16,
        a_step_ahead: bool = False,
        preempts_within: bool = False,
        windows: tuple[int, ...] = (),
        loras: int = 0,
        pauses: bool = False,
        **settings: Any,
    ) -> None:
        import torch
        from vllm.config import LoRAConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import Request
        from vllm.v1.structured_output import StructuredOutputManager

        try:
            from vllm.utils.hashing import get_hash_fn_by_name
        except ImportError:  # up to 0.10
            from vllm.utils import get_hash_fn_by_name

        self.rng = random.Random(seed)
        self.block_size = 32
        config = EngineArgs(
            model=model,
            skip_tokenizer_init=True,
            dtype="float32",
            block_size=self.block_size,
            enforce_eager=True,
            max_num_seqs=max_num_seqs,
            max_model_len=4096,
            max_num_batched_tokens=512,
            **settings,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        config.scheduler_config.async_scheduling = a_step_ahead  # vLLM itself never has it on the CPU
        shape = {"block_size": self.block_size, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
        specs: list[Any] = [FullAttentionSpec(**shape, **takes(FullAttentionSpec, use_mla=False))]
        for window in windows:
            more = takes(SlidingWindowSpec, use_mla=False)
            specs.append(SlidingWindowSpec(**shape, sliding_window=window, **more))
        groups = [KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(specs)]
        if loras:
            config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=loras)
        self.scheduler = (AsyncScheduler if a_step_ahead else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(blocks, [], groups),
            structured_output_manager=StructuredOutputManager(config),
            log_stats=True,
            **takes(Scheduler, block_size=self.block_size),
        )
        hash_of = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_of)
        self.hasher = get_request_block_hasher(self.block_size, hash_of)
        self.ahead = 2 if a_step_ahead else 1
        self.preempts_within = preempts_within
        self.loras = loras
        self.pauses = pauses
        self.takes_arrays = "ndarray" in str(ModelRunnerOutput.__annotations__["sampled_token_ids"])  # 0.11.1 to 0.12
        self.tells_chunks = "is_prefill_chunk" in inspect.getsource(Request)
        self.in_flight: deque[Any] = deque()
        self.sending: list[tuple[int, str]] = []
        self.receiving: dict[str, int] = {}
        self.steps = 0
        self.arrived = 0
        self.prefixes = [self.tokens(200) for _ in range(4)]

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(1, 300) for _ in range(count)]

    def arrive(self, name: str, prompt: list[int], max_tokens: int, priority: int = 0) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.v1.request import Request

        self.arrived += 1
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        params.update_from_generation_config({}, 2)
        of_early_releases = takes(
            Request, eos_token_id=2, multi_modal_kwargs=None, multi_modal_hashes=None, multi_modal_placeholders=None
        )
        request = Request(
            request_id=f"{name}-{self.rng.randrange(1 << 32):08x}",
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            priority=priority,
            block_hasher=self.hasher,
            **of_early_releases,
        )
        if self.loras and self.arrived % 2:
            request.lora_request = LoRARequest(f"l{self.arrived % 5}", 1 + self.arrived % 5, "/nowhere")
        if self.arrived % 3 == 0:
            request.trace_headers = {"traceparent": traceparent(self.arrived)}
        self.scheduler.add_request(request)

    def someone(self) -> None:
        """A request as the load has them."""
        rng = self.rng
        prompt = rng.choice(self.prefixes)[: rng.randrange(1, 201)] + self.tokens(rng.randrange(1, 250))
        what = rng.choice(("keep", "load", "r", "r")) if self.arrived % 8 == 0 else rng.choice(("load", "r", "r"))
        if self.arrived % 7 == 0 and self.scheduler.connector is not None:
            what = "slow"
        self.arrive(f"{what}-{self.arrived}", prompt, rng.randrange(1, 120), rng.randrange(3))

    def schedule(self) -> Any:
        requests = self.scheduler.requests
        ends = {i: r.num_tokens + r.num_output_placeholders for i, r in requests.items() if not self.tells_chunks}
        output = self.scheduler.schedule()
        # A token comes of a step that brings a request to its end.
        partial = {
            i
            for i in output.num_scheduled_tokens
            if (requests[i].is_prefill_chunk if self.tells_chunks else requests[i].num_computed_tokens < ends[i])
        }
        self.in_flight.append((output, partial))
        for request_id in output.finished_req_ids:
            if "keep" not in request_id:
                self.sending.append((self.steps + self.rng.randrange(1, 4), request_id))
        return output

    def update(self) -> None:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        self.steps += 1
        output, partial = self.in_flight.popleft()
        request_ids = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        sampled: list[Any] = [[] if i in partial else [self.rng.randrange(1, 300)] for i in request_ids]
        if self.takes_arrays:
            sampled = [np.array(tokens, dtype=int) for tokens in sampled]
        transfers = None
        if self.scheduler.connector is not None:
            sent = {i for due, i in self.sending if due <= self.steps}
            self.sending = [(due, i) for due, i in self.sending if i not in sent]
            for request in requests.values():
                fetched = request.request_id in self.scheduler.finished_recving_kv_req_ids
                if request.status.name == "WAITING_FOR_REMOTE_KVS" and not fetched:
                    self.receiving.setdefault(request.request_id, self.steps + self.rng.randrange(1, 6))
            received = {i for i, due in self.receiving.items() if due <= self.steps}
            for request_id in received:
                del self.receiving[request_id]
            # One that was aborted while it was fetched is told of once, by its fetch.
            sent -= received | self.receiving.keys()
            transfers = KVConnectorOutput(
                finished_sending={i for i in sent if i in requests} or None, finished_recving=received or None
            )
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=request_ids,
                req_id_to_index={r: i for i, r in enumerate(request_ids)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
                kv_connector_output=transfers,
                **takes(ModelRunnerOutput, spec_token_ids=None),
            ),
        )

    def live(self) -> None:
        """One step of a random life."""
        from vllm.v1.request import RequestStatus

        rng = self.rng
        if len(self.scheduler.requests) < 60 and rng.random() < 0.4:
            self.someone()
        if rng.random() < 0.03 and self.scheduler.requests:
            self.scheduler.finish_requests(rng.choice(list(self.scheduler.requests)), RequestStatus.FINISHED_ABORTED)
        if self.pauses and rng.random() < 0.1 and hasattr(self.scheduler, "set_pause_state"):
            states = type(self.scheduler._pause_state)
            self.scheduler.set_pause_state(rng.choice((*states, states.UNPAUSED, states.UNPAUSED)))
        if rng.random() < 0.003 and self.scheduler.connector is None:
            reset = self.scheduler.reset_prefix_cache
            reset(**takes(reset, reset_running_requests=rng.random() < 0.5 and not self.preempts_within))


def main() -> None:
    model, out, lives = sys.argv[1:]
    for life, settings in json.loads(lives).items():
        steps, every = settings.pop("steps"), settings.pop("every", 1)
        bare = Bare(model, **settings)
        within = preempting_within(bare.scheduler) if bare.preempts_within else contextlib.nullcontext()
        with (Path(out) / life).open("wb") as file, within:
            record(bare, steps, every, file)


@contextlib.contextmanager
def preempting_within(scheduler: Any) -> Iterator[None]:
    """As in releases up to 0.11, whose schedulers have no method to preempt, and so none that can be wrapped."""
    method = getattr(type(scheduler), "_preempt_request", None)
    if method is None:
        yield
        return
    scheduler._preempt_request = functools.partial(method, scheduler)
    del type(scheduler)._preempt_request
    yield
    type(scheduler)._preempt_request = method


def record(bare: Bare, steps: int, every: int, file: BinaryIO) -> None:
    log = EventLog(time)
    probe = Probe(bare.scheduler, log, b"test")
    probe.start()
    packer = Packer(log, ENGINE, probe.vitals)
    scheduler = bare.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    decisions = Decisions(scheduler)

    calls = 0

    def write(calls_schedule: bool = False) -> None:
        nonlocal calls
        calls += 1
        if calls % every:
            return
        probe.flush()
        now = {
            "frames": [encode(batch) for batch in packer.pack()],
            "refs": [block.ref_cnt for block in pool.blocks],
            "hashed": [block.block_hash is not None for block in pool.blocks],
            "tables": {
                i: [b.block_id for manager in managers for b in manager.req_to_blocks.get(i, ()) if not b.is_null]
                for i in scheduler.requests
            },
            "decisions": {i: cause for i, cause in decisions.last.items() if i in scheduler.requests},
            "scheduled": calls_schedule,
            "statuses": {i: request.status.name for i, request in scheduler.requests.items()},
            "free": pool.get_num_free_blocks(),
            "errors": probe.hooks.errors,
            "fences": hasattr(scheduler.kv_cache_manager, "pop_blocks_for_free"),
        }
        encoded = msgspec.msgpack.encode(now)
        file.write(len(encoded).to_bytes(4, "little") + encoded)

    # An audit's slices are so long apart, however quick steps are; without its hook there would be none.
    while bare.steps < steps or not (packer.shadow.audit_cycles or probe.hooks.errors):
        bare.live()
        while len(bare.in_flight) < bare.ahead:
            with decisions.traced():
                bare.schedule()
            write(True)
        bare.update()
        write()


if __name__ == "__main__":
    main()
