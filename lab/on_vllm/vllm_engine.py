"""vLLM's bare scheduler under the probe in virtual time, as the lab's clients and the lab itself drive it."""

from __future__ import annotations

import inspect
import os
import random
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from kvscope.engine.bench.clock import VirtualClock
from kvscope.engine.core.intake import Refused
from kvscope.engine.requests.request import Output, Sampled, SamplingParams
from kvscope.monitor.contract.event_log import EventLog
from kvscope.monitor.contract.journal import JournalWriter
from kvscope.monitor.contract.kinds import Status
from kvscope.monitor.contract.wire import Batch, encode
from kvscope.monitor.probes.packer import Packer
from kvscope.monitor.probes.vllm.probe import Probe

from ..drain_limits import empty_pass_s
from .cache_groups import cache_config, takes
from .fault_table import FAULT_TABLE
from .scheduler_maker import configured, save_config, scheduler_of
from .vllm_draws import VllmDraw
from .vllm_operator import Operator
from .vllm_outside import CompilerStandIn, ModelStandIn, OtherEngine

LAB_SERVER_NAME: Final = "vllm@127.0.0.1:0"
BEAT_S: Final = 1.0
MOST_DOUBLINGS: Final = 8
LEAST_APART_S: Final = 1e-6
"""Between the arrivals of two requests. A float holds today's time in seconds to a quarter of that."""
CONNECTOR_SETTINGS: Final = {
    "kv_connector": "LabConnector",
    "kv_connector_module_path": "kvscope.lab.on_vllm.lab_connector",
    "kv_role": "kv_both",
}
"""As `--kv-transfer-config` has it."""
MOONCAKE_LEASE: Final = "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"
"""Where vLLM has the seconds for which Mooncake's connector keeps the blocks of a request that no consumer reads."""
FINISHED_BY_REASON: Final = {
    "stop": Status.FINISHED_STOPPED,
    "length": Status.FINISHED_LENGTH_CAPPED,
    "abort": Status.FINISHED_ABORTED,
}


class PlannedStep:
    """A step in flight: vLLM's plan, the requests whose prompt it leaves unfinished, and how long it takes."""

    def __init__(self, plan: Any, partial: set[str], seconds: float) -> None:
        self.plan, self.partial, self.seconds = plan, partial, seconds


class VllmEngine:
    """A scheduler of `draw` whose events are recorded in `directory`. Time passes while `run` is called."""

    def __init__(self, draw: VllmDraw, directory: Path, model: Path) -> None:
        self.draw = draw
        self.time = VirtualClock()
        self.vllm, self._hasher = _make_scheduler(draw, model)
        self.other = OtherEngine(draw, self.time, self._note)
        if self.vllm.connector is not None:
            self.vllm.connector.lab = self.other
            self.other.is_asleep = lambda: not self._in_flight and not self.vllm.has_requests()
        self.grammars = CompilerStandIn(self.vllm, self.time, draw.base.latencies.grammar_s)
        self._read_release()
        self.sampler = ModelStandIn(draw, self._takes_arrays)
        self.failure = ""
        """Why the scheduler can do no more: the exception that ended it."""
        self.mutation = ""
        """What a drawn change of behaviour does."""
        self.hangs = False
        self.hang_after = 0
        """The step that never returns (0: none)."""
        self.steps = 0
        self.launched_ns = 0
        self.names: dict[int, str] = {}
        """vLLM's id of each request, by number."""
        self.numbers: dict[str, int] = {}
        self.ended: set[str] = set()
        self.lost_batches = 0
        self._batches_to_lose = 0
        self.witness: Any = None
        self._in_flight: deque[PlannedStep] = deque()
        self._adapters = random.Random(f"loras {draw.base.seed}")
        self.log = EventLog(self.time)
        self.probe = Probe(self.vllm, self.log, b"lab", self.time)
        self.probe.start()
        self._packer = Packer(self.log, f"{LAB_SERVER_NAME}/{draw.base.rank}", self.probe.vitals, folds_late=True)
        keyframe = lambda: encode(self._packer.keyframe())  # noqa: E731
        self._journal: JournalWriter | None = JournalWriter(directory, self._packer.epoch, keyframe, clock=self.time)
        self._stop_repeating = (
            self.time.every(min(max(0.1, draw.base.step_time.base_s / 4), 0.5), self._drain),
            self.time.every(BEAT_S, lambda: self._keep(self._packer.heartbeat())),
        )
        self._empty_passes, self._arrived_s = 0, 0.0
        self._aborted: list[Output] = []
        self._operator = Operator(self)
        self.probe.watch_sleep(self._operator.executor)
        for at_s, count in draw.base.lost:
            self.at(at_s, lambda count=count: self.lose_batches(count))  # type: ignore[misc]

    def _read_release(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import Request

        self._takes_arrays = "ndarray" in str(ModelRunnerOutput.__annotations__["sampled_token_ids"])
        self._reports_chunks = "is_prefill_chunk" in inspect.getsource(Request)

    def _note(self, kind: str, name: str) -> None:
        if self.witness is not None:
            self.witness.note(kind, name)

    def pause_noted(self) -> None:
        """Tell the witness that the operator has paused or resumed the engine."""
        if self.witness is not None:
            self.witness.paused()

    # ---------------------------------------------------------------- what its clients see

    @property
    def now_s(self) -> float:
        """Seconds on the virtual clock."""
        return self.time.ns / 1e9

    @property
    def scheduler(self) -> VllmEngine:
        """The engine that clients query for parked requests."""
        return self

    @property
    def parked(self) -> Iterable[int]:
        """Numbers of the requests whose KV is being fetched."""
        requests = self.vllm.requests
        return [
            self.numbers[name]
            for name, done in self.other.loading.items()
            if not done and name in requests and not requests[name].is_finished()
        ]

    def at(self, seconds: float, call: Callable[[], None]) -> None:
        """Have `call` made so long after now."""
        self.time.at(self.time.ns + round(seconds * 1e9), call)

    def submit(self, name: str, prompt: list[int], params: SamplingParams, priority: int = 0) -> int:
        """Hand a request to the scheduler and return its number. Raises Refused for a prompt beyond max_model_len."""
        longest = self.draw.base.max_model_len
        if len(prompt) >= longest:
            raise Refused(f"the prompt has {len(prompt)} tokens, and max_model_len is {longest}")
        number = len(self.names)
        wanted = min(params.max_tokens, longest - len(prompt))
        request = self._request(f"{name}-{number:08x}", prompt, wanted, priority, params.structured_outputs is not None)
        self.names[number], self.numbers[request.request_id] = request.request_id, number
        self.grammars.compile(request)
        if self.witness is not None:
            self.witness.arrives(request)
        self.vllm.add_request(request)
        return number

    def client_gone(self, number: int) -> None:
        """Abort the request of that number."""
        from vllm.v1.request import RequestStatus

        name = self.names[number]
        if name in self.vllm.requests and not self.vllm.requests[name].is_finished():
            self.vllm.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.ended.add(name)

    def abort_all(self) -> None:
        """Abort all requests, as the engine core does, whose clients get that as their answer with the next pass."""
        from vllm.v1.request import RequestStatus

        for name in [name for name, request in self.vllm.requests.items() if not request.is_finished()]:
            self.vllm.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.ended.add(name)
            self._aborted.append(Output(self.numbers[name], [], Status.FINISHED_ABORTED))

    def _request(self, name: str, prompt: list[int], wanted: int, priority: int, structured: bool) -> Any:
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.v1.request import Request

        params = VllmSamplingParams(temperature=0, max_tokens=wanted, ignore_eos=True, **_structure(structured))
        params.update_from_generation_config({}, 2)
        of_releases = takes(
            Request,
            eos_token_id=2,
            multi_modal_kwargs=None,
            multi_modal_hashes=None,
            multi_modal_placeholders=None,
            mm_features=[],
        )
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            priority=priority,
            arrival_time=self._next_arrival_s(),
            block_hasher=self._hasher if self.draw.base.engine["enable_prefix_caching"] else None,
            **of_releases,
        )
        if request.status.name == "WAITING_FOR_FSM" and request.structured_output_request is None:
            from vllm.v1.structured_output.request import StructuredOutputRequest

            request.structured_output_request = StructuredOutputRequest(sampling_params=params)
        if self.draw.loras:
            adapter = self._adapters.randrange(1, 6)
            request.lora_request = LoRARequest(f"l{adapter}", adapter, "/nowhere")
        return request

    def _next_arrival_s(self) -> float:
        """Return the time, later than the last request's: vLLM 0.10 cannot order two of equal priority and time."""
        self._arrived_s = max(self.time.time_ns() / 1e9, self._arrived_s + LEAST_APART_S)
        return self._arrived_s

    # ---------------------------------------------------------------- passes

    def run(self, seconds: float, deliver: Callable[[list[Output]], None] = lambda _: None) -> None:
        """Let so much time pass. `deliver` gets the outputs of each step."""
        until = self.time.ns + round(seconds * 1e9)
        ahead = 2 if self.draw.base.engine["async_scheduling"] else 1
        while self.time.ns < until and not self.failure:
            if self.hangs:
                self.time.sleep((until - self.time.ns) / 1e9)
                return
            try:
                deliver(self._pass(ahead, until))
                while self.time.pass_to(self.time.ns):
                    pass
            except Exception as error:  # as the engine core's loop, whose process ends
                self._fails(error)

    @property
    def has_steps_in_flight(self) -> bool:
        """Whether a step was launched and is not complete."""
        return bool(self._in_flight)

    def _pass(self, ahead: int, until: int) -> list[Output]:
        if self._aborted:
            aborted, self._aborted = self._aborted, []
            return aborted
        while len(self._in_flight) < ahead and self.vllm.has_requests():
            self._schedule()
        if self._in_flight:
            return self._complete()
        self.time.pass_to(until)  # until a request comes
        return []

    def _fails(self, error: Exception) -> None:
        """End like a process that dies: no event and no heartbeat follows."""
        raised = traceback.extract_tb(error.__traceback__)[-1]
        if "/vllm/" not in raised.filename:
            raise error  # a defect of the lab's own
        self.failure = f"{type(error).__name__} in {raised.name}"
        self.stop_recording()

    def _schedule(self) -> None:
        requests = self.vllm.requests
        ends = {i: r.num_tokens + r.num_output_placeholders for i, r in requests.items() if not self._reports_chunks}
        if self.witness is not None:
            self.witness.pass_begins()
        plan = self.vllm.schedule()
        partial = {
            name
            for name in plan.num_scheduled_tokens
            if (
                requests[name].is_prefill_chunk if name not in ends else requests[name].num_computed_tokens < ends[name]
            )
        }
        seconds = self._seconds(plan)
        self._in_flight.append(PlannedStep(plan, partial, seconds))
        if self.witness is not None:
            self.witness.planned(plan)

    def _seconds(self, plan: Any) -> float:
        if not plan.total_num_scheduled_tokens:
            return self._empty_pass_s()
        self._empty_passes = 0
        requests = self.vllm.requests
        shares = [
            SimpleNamespace(num_tokens=count, start=max(requests[name].num_computed_tokens - count, 0))
            for name, count in plan.num_scheduled_tokens.items()
        ]
        planned: Any = SimpleNamespace(shares=shares, step=self.steps + len(self._in_flight))
        return self.draw.base.step_time.of(planned)

    def _empty_pass_s(self) -> float:
        """Return how long an empty pass takes. Unrecorded, each takes twice the one before, until something is due."""
        usual = empty_pass_s(self.draw.base.step_time.base_s)
        if self._journal is not None:
            return usual
        self._empty_passes += 1
        due_ns = self.time.next_due_ns
        until_due = inf if due_ns is None else max(due_ns - self.time.ns, 0) / 1e9
        return max(usual, min(until_due, usual * float(1 << min(self._empty_passes, MOST_DOUBLINGS))))

    def _complete(self) -> list[Output]:
        step = self._in_flight[0]
        if self.hang_after and self.steps >= self.hang_after and step.plan.total_num_scheduled_tokens:
            self.hangs, self.launched_ns = True, self.time.ns
            return []
        self.time.sleep(step.seconds)
        self._in_flight.popleft()
        connected = self.other.report(self.vllm) if self.vllm.connector is not None else None
        progress = min(1.0, (self.now_s - 1) / self.draw.base.seconds)
        output = self.sampler.output_of(step.plan, step.partial, progress, connected)
        if step.plan.total_num_scheduled_tokens:
            self.steps += 1
        found = self.vllm.update_from_output(step.plan, output)
        if self.draw.drafts:
            names = [name for name in step.plan.num_scheduled_tokens if name not in step.partial]
            self.sampler.draft(self.vllm, [name for name in names if name in self.vllm.requests])
        outputs = [self._output(one) for each in found.values() for one in each.outputs]
        if self.witness is not None:
            self.witness.step_ends(step, outputs)
        self._operator.check_in_flight()
        return outputs

    def _output(self, one: Any) -> Output:
        reason = None if one.finish_reason is None else str(one.finish_reason)
        if reason is not None:
            self.ended.add(one.request_id)
        sampled = [Sampled(int(token)) for token in one.new_token_ids]
        status = None if reason is None else FINISHED_BY_REASON.get(reason, Status.FINISHED_ERROR)
        return Output(self.numbers[one.request_id], sampled, status)

    # ---------------------------------------------------------------- the recording

    def lose_batches(self, count: int) -> None:
        """Leave the next `count` batches out of the recording, which then goes on with a keyframe."""
        self._batches_to_lose = count

    def stop_recording(self) -> None:
        """Close the recording with all that was logged so far. The engine can run on."""
        if self._journal is not None:
            self._drain()
            self._journal.close()
            self._journal = None
            for stop in self._stop_repeating:
                stop()

    def _drain(self) -> None:
        if self._journal is not None:
            self.probe.flush()
        for batch in self._packer.pack():
            self._keep(batch)

    def _keep(self, batch: Batch) -> None:
        if self._journal is None:
            return
        if self._batches_to_lose:
            self._batches_to_lose -= 1
            self.lost_batches += 1
            if not self._batches_to_lose:
                self._journal.append(encode(self._packer.keyframe()), batch.sequence)
            return
        self._journal.append(encode(batch), batch.sequence)


def _structure(structured: bool) -> dict[str, Any]:
    if not structured:
        return {}
    from vllm import sampling_params

    if hasattr(sampling_params, "StructuredOutputsParams"):
        return {"structured_outputs": sampling_params.StructuredOutputsParams(regex="a")}
    return {"guided_decoding": sampling_params.GuidedDecodingParams(regex="a")}


def _make_scheduler(draw: VllmDraw, model: Path) -> tuple[Any, Any]:
    engine, base = draw.base.engine, draw.base
    groups: tuple[tuple[Any, ...], ...] = (("full",), *draw.window_groups * [("sliding", base.window)])
    settings: dict[str, Any] = {
        "scheduling_policy": engine["scheduling_policy"],
        "enable_prefix_caching": engine["enable_prefix_caching"],
    }
    if draw.drafts:
        settings["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": draw.drafts,
            "prompt_lookup_max": draw.drafts,
        }
    if draw.has_connector:
        settings["kv_transfer_config"] = CONNECTOR_SETTINGS
        if draw.renews:
            lease = {"kv_lease_duration": round(draw.lease_s)}
            nixl = {"kv_connector": "NixlLabConnector", "kv_connector_extra_config": lease}
            settings["kv_transfer_config"] = CONNECTOR_SETTINGS | nixl
        elif draw.lease_s:
            os.environ[MOONCAKE_LEASE] = f"{draw.lease_s:.0f}"
            settings["kv_transfer_config"] = CONNECTOR_SETTINGS | {"kv_connector": "MooncakeLabConnector"}
    blocks, size = engine["num_gpu_blocks_override"], engine["block_size"]
    longest = max(base.max_model_len, 16)
    config = configured(
        str(save_config(model, longest)),
        size,
        engine["max_num_seqs"],
        engine["max_num_batched_tokens"],
        groups,
        draw.loras,
        longest,
        **settings,
    )
    config.cache_config.num_gpu_blocks = blocks
    config.scheduler_config.async_scheduling = engine["async_scheduling"]  # vLLM itself never has it on the CPU
    if draw.fault and not FAULT_TABLE[draw.fault].reserves:
        config.scheduler_config.scheduler_reserve_full_isl = False
    scheduler, hasher = scheduler_of(config, cache_config(groups, blocks, size, draw.drafts))
    return scheduler, hasher
