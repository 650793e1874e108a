"""The engine's loop: takes requests in, lets the scheduler plan a step, runs the model, hands the tokens out.

One thread runs passes. Every other thread only submits, ends, or reads. A pass is: what came in, which grammars are
compiled, what the connector has finished, the plan, the model, what the plan's requests got of it, a slice of the
audit. All of it is logged at its place, and handed over once a pass.

With `async_scheduling` the model runs in a thread of its own, and a pass plans the next step before it waits for the
one that runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from kvscope.monitor.contract.event_log import Clock, EventLog, SilentLog
from kvscope.monitor.contract.kinds import Status
from kvscope.monitor.contract.trace_context import TraceContext
from kvscope.monitor.probes.packer import Vitals

from ..blocks.block_pool import NULL_BLOCK_COUNT, BlockPool
from ..blocks.table_audit import TableAuditor
from ..config import EngineConfig
from ..execution.memory_plan import Device, Meter, capture_graphs, device_of
from ..execution.model_runner import ModelRunner, Runner
from ..faults import PLACES, Faults
from ..models import LoadedModel
from ..requests.request import KVTransferParams, Output, Request, Sampled, SamplingParams
from ..requests.structured_output import GrammarCompiler
from ..scheduling.scheduler_state import SchedulerOutput
from .assembly import (
    EventStream,
    check_fit,
    describe_engine,
    make_connector,
    make_manager,
    make_scheduler,
    most_in_flight,
    plan_memory,
)
from .idle import IdlePolicy
from .intake import EngineDead, Intake, PromptCheck, Refused, RequestStatistics
from .watchdog import Watchdog

logger = logging.getLogger(__name__)

NO_STEP_IN_FLIGHT: Final = (-1, 0)


class LaunchedStep(NamedTuple):
    """A step that was handed to the model, and what will come of it."""

    plan: SchedulerOutput
    sampled: Future[Callable[[], list[Sampled]]]
    """Once the model has started it: what waits for its tokens."""


@dataclass
class TokenCounts:
    """Sums over the engine's life. Prompt tokens count when the prompt is computed, as vLLM counts them."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: Counter[Status] = field(default_factory=Counter)


class EngineCore:
    """An engine of `config` over the model `loaded`, publishing on `stream` (None: the stream is off).

    Either `start` a thread that runs it, or call `step` until the work is done. clock, log, runner, device: its sources
    of time, event log, model and memory to plan, if not of its own making (see SimulatedEngine). Raises ValueError if
    the settings do not fit the model, and what Publisher raises.
    """

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        stream: EventStream | None = None,
        *,
        stall_s: float = 30.0,
        clock: Clock = time,
        log: EventLog | None = None,
        runner: Runner | None = None,
        device: Device | None = None,
    ) -> None:
        check_fit(config, loaded)
        config = replace(config, dtype=loaded.dtype)
        self.config = config
        self.loaded = loaded
        self.clock = clock
        self.max_model_len = loaded.config.max_model_len
        self.log = log or (EventLog(clock) if stream else SilentLog(clock))
        self.faults = Faults.parse(config.faults)
        device = device or device_of(config)
        plan = plan_memory(config, loaded, device, self.faults)
        self.pool = BlockPool(plan.num_blocks, self.log, self.faults)
        self.manager = make_manager(config, loaded, self.pool, self.faults)
        self.runner: Runner = runner or ModelRunner(
            loaded, self.pool.total, config.block_size, config.device, config.dtype, config.seed, self.faults
        )
        self.plan = capture_graphs(config, self.runner, plan, self.faults)
        self._meter = Meter(self.plan, device, self.log, clock)
        self.counts = TokenCounts()
        self.statistics = RequestStatistics(self.max_model_len)
        self.failure = ""
        """The error that stopped the engine for good, empty while it works."""
        self.launched = NO_STEP_IN_FLIGHT
        """The step that runs and since when, in monotonic ns."""
        self._in_flight: deque[LaunchedStep] = deque()
        self._most_in_flight = most_in_flight(config)
        self._model_thread = ThreadPoolExecutor(1, "kvscope-model") if config.async_scheduling else None
        self.publisher = (
            stream.publisher(self.log, self.vitals, lambda: self._thread.ident) if stream is not None else None
        )
        self.intake = Intake(self.log, self.faults)
        self.check = PromptCheck(self.max_model_len, loaded.config.vocab_size, self.manager, self.faults)
        self.connector = make_connector(
            config, self.runner, self.pool.total, self.log, self.intake.fetch_ended, self.faults
        )
        self._grammars = GrammarCompiler(
            lambda: loaded.tokenizer.for_grammars(loaded.config.eos_token_ids), self.intake.notify
        )
        self.scheduler = make_scheduler(config, self.manager, self.max_model_len, self.connector, self.faults)
        self.auditor = TableAuditor(self.manager, self.scheduler.requests, self.scheduler.deferred)
        self._idle = IdlePolicy(self.scheduler, self.auditor, self.log)
        self.watchdog = Watchdog(self.scheduler, self.log, lambda: self.launched, stall_s, clock)
        self._closing = False
        self._worked = False
        self._deliver: Callable[[list[Output]], None] = lambda _: None
        self._thread = threading.Thread(target=self._run, name="kvscope-engine", daemon=True)
        self._emit_started()

    # ---------------------------------------------------------------- from any thread

    def submit(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        priority: int = 0,
        kv_transfer: KVTransferParams | None = None,
        trace: TraceContext | None = None,
    ) -> int:
        """Queue a request, part of its caller's `trace` if it has one. Return its number. Raises Refused as `check`
        does, and EngineDead.
        """
        self.check(prompt_token_ids, request_id)
        if kv_transfer is not None and self.config.kv_connector != "peer":
            raise Refused("kv_transfer_params need an engine with --kv-connector peer")
        if self.intake.refusing or self.failure:
            raise EngineDead(self.failure or "the engine is stopping")
        return self.intake.submit(request_id, prompt_token_ids, params, priority, kv_transfer, trace)

    def end(self, number: int, status: Status = Status.FINISHED_ABORTED) -> None:
        """End a request soon, if it has not ended: FINISHED_STOPPED when its text held a stop string."""
        self.intake.end(number, status)

    def client_gone(self, number: int) -> None:
        """Report that this request's client has gone, and end it."""
        self.log.client_gone(number)
        self.end(number)

    def refuse_all(self) -> None:
        """Take no more requests, and end those that there are."""
        self.intake.refuse_all()

    def vitals(self) -> Vitals:
        """Return the data of heartbeats."""
        scheduler = self.scheduler
        polls = self.connector.polls if self.connector is not None else 0
        return Vitals(
            *self.launched, len(scheduler.running), scheduler.num_waiting, self.in_flight, polls, scheduler.passes
        )

    @property
    def in_flight(self) -> int:
        """Requests that were submitted and whose last output has not been handed out."""
        return len(self.intake.open)

    @property
    def usage(self) -> float:
        """The share of the pool that is referenced, 0 to 1."""
        return 1 - self.pool.num_free / self.pool.usable

    def start(self, deliver: Callable[[list[Output]], None]) -> None:
        """Run in a thread. `deliver` is called in it with what each pass gave, and must not block or raise."""
        self._deliver = deliver
        self.watchdog.start()
        self._thread.start()

    def close(self) -> None:
        """Stop: requests that have not ended are aborted, and the stream reports that the engine stopped."""
        self._closing = True
        self.refuse_all()
        if self._thread.ident is not None:
            self._thread.join()
        self.watchdog.close()
        if self._model_thread is not None:
            self._model_thread.shutdown()
        if self.connector is not None:
            self.connector.close()
        if not self.failure:
            self._deliver(self._guarded(self._wind_up))
        self._grammars.close()
        self.log.tick()
        self.log.stopped()
        self._flush()
        if self.publisher is not None:
            self.publisher.close()

    # ---------------------------------------------------------------- the engine's thread

    def step(self) -> list[Output]:
        """One pass of the loop. An error in the model ends the step's requests. One in the block tables,
        or a device that is lost, ends the engine.
        """
        return self._guarded(self._pass)

    def _guarded(self, run: Callable[[], list[Output]]) -> list[Output]:
        try:
            return run()
        except Exception as error:
            self.failure = f"the engine has stopped: {type(error).__name__}: {error}"
            logger.exception("the engine cannot go on: its own books failed, or its device")
            return [
                self._last(Output(number, (), Status.FINISHED_ERROR, self.failure)) for number in list(self.intake.open)
            ]

    def _run(self) -> None:
        while not self._closing and not self.failure:
            outputs = self.step()
            if outputs:
                self._deliver(outputs)
            self._rest()

    def _rest(self) -> None:
        """Pause as long as there is nothing to do, without end if nothing can come but a request."""
        if self._worked:
            self._idle.note_work()
        else:
            self.intake.rest(self._wait, self._idle.pause(), lambda: self._closing)

    def _wait(self, pause: float | None) -> None:
        """Wait for so many seconds, or until something wakes the engine."""
        self.intake.wait(pause)

    def _pass(self) -> list[Output]:
        self.log.tick()
        outputs = self._take_in()
        held = len(self.scheduler.deferred)
        if self.intake.fetched:
            self.intake.fetched = False
            self.scheduler.take_loads()
        self.scheduler.take_completions()
        plan = self.scheduler.schedule()
        if plan.shares:
            self._launch(plan)
        self._worked = bool(self._in_flight or outputs or len(self.scheduler.deferred) != held)
        if self._in_flight and (len(self._in_flight) == self._most_in_flight or not plan.shares):
            outputs += self._complete(self._in_flight.popleft())
        self._idle.audit(self._worked)
        self._meter.tick()
        self._flush()
        return outputs

    def _take_in(self) -> list[Output]:
        """Take the requests of other threads since the last pass."""
        for request in self.intake.arrivals():
            self.scheduler.add(request)
            if request.params.structured_outputs is not None:
                self._grammars.start(request.number, request.params.structured_outputs)
        outputs = self._take_grammars()
        for number, status in self.intake.ends():
            ending = self.scheduler.requests.get(number)
            if ending is not None and not ending.is_finished:
                outputs.append(self._finish(ending, status))
        return outputs

    def _take_grammars(self) -> list[Output]:
        """Let the requests go on whose grammar is compiled, and end those whose grammar cannot be."""
        outputs = []
        for number, matcher, error in self._grammars.take():
            request = self.scheduler.requests.get(number)
            if request is None or request.is_finished or self.faults.triggers("stuck.grammar", request.id):
                continue
            if matcher is None:
                outputs.append(self._finish(request, Status.FINISHED_ERROR, error))
            else:
                request.matcher = matcher
                self.scheduler.ready(request)
        return outputs

    def _finish(self, request: Request, status: Status, grammar_error: str = "") -> Output:
        """End it, and its last output."""
        self.scheduler.finish(request, status)
        blamed = "structured_outputs" if grammar_error else ""
        return self._last(Output(request.number, (), status, grammar_error, blamed=blamed), request)

    def _launch(self, plan: SchedulerOutput) -> None:
        """Hand the step to the model: here, or to the thread that it runs in."""
        if not self._in_flight:
            self.launched = plan.step, self.clock.monotonic_ns()
        self._flush()  # what was launched is known while it runs, or hangs
        sampled: Future[Callable[[], list[Sampled]]] = Future()
        self._in_flight.append(LaunchedStep(plan, sampled))
        try:
            batch = self.runner.prepare(plan, self.manager.tables)
        except Exception as failed:  # as one in the model
            sampled.set_exception(failed)
            return
        if self._model_thread is not None:
            self._model_thread.submit(self._run_model, plan.step, batch, sampled)
        else:
            self._run_model(plan.step, batch, sampled)

    def _run_model(self, step: int, batch: Any, sampled: Future[Callable[[], list[Sampled]]]) -> None:
        try:
            while self.faults.triggers_on_request("stuck.engine-stalled", f"step {step}") and not self._closing:
                time.sleep(0.01)
            sampled.set_result(self.runner.run(batch))
        except Exception as failed:
            sampled.set_exception(failed)

    def _complete(self, launched: LaunchedStep) -> list[Output]:
        """Wait for the oldest step in flight, and hand out what came of it."""
        plan, future = launched
        scheduler = self.scheduler
        failed: Exception | None = None
        try:
            sampled = future.result()()
        except Exception as error:  # whatever a model may raise concerns this step's requests, not the engine
            failed = error
        began = self.launched[1]
        self.log.tick()
        if failed is not None:
            message = f"step {plan.step} failed: {type(failed).__name__}: {failed}"
            logger.error("%s. Its %d requests fail", message, len(plan.shares), exc_info=failed)
            # Where the device is lost, so is the engine: each later request would fail too.
            self.runner.check()
            outputs = [self._last(Output(r.number, (), r.status, message), r) for r in scheduler.fail(plan)]
        else:
            # A request that ended while the step ran has had its last output.
            news = [
                (share.request, one) for share, one in zip((s for s in plan.shares if s.samples), sampled, strict=True)
            ]
            outputs = [
                self._finish(request, Status.FINISHED_ERROR, one.error)
                for request, one in news
                if one.error and not request.is_finished
            ]
            unfinished = [(request, one) for request, one in news if not request.is_finished]
            tokens = [one.token_id for _, one in news]
            stops = [one.ends or self._is_stop(request, one.token_id) for request, one in news]
            scheduler.complete(plan, tokens, stops)
            of_prompts = sum(s.num_tokens for s in plan.shares if s.start < s.request.num_prompt_tokens)
            self.statistics.step(of_prompts + len(unfinished))
            handed_out_ns = self.clock.monotonic_ns()
            outputs += [self._news(request, one, handed_out_ns) for request, one in unfinished]
        now = self.clock.monotonic_ns()
        self.log.step_completed(plan.step, now - began, plan.limit, *self.pool.counts()[:3])
        self.launched = (self._in_flight[0].plan.step, now) if self._in_flight else NO_STEP_IN_FLIGHT
        return outputs

    def _is_stop(self, request: Request, token: int) -> bool:
        params = request.params
        is_eos = token in self.loaded.config.eos_token_ids and not params.ignore_eos
        return is_eos or token in params.stop_token_ids

    def _news(self, request: Request, sampled: Sampled, now_ns: int) -> Output:
        self.counts.generation_tokens += 1
        self.statistics.token(request, now_ns)
        prompt_logprobs = None
        if len(request.output_token_ids) == 1:
            self.counts.prompt_tokens += request.num_prompt_tokens
            prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
        news = Output(request.number, (sampled,), prompt_logprobs=prompt_logprobs)
        if request.is_finished:
            return self._last(news._replace(status=request.status, kv_offer=request.kv_offer), request)
        return news

    def _last(self, output: Output, request: Request | None = None) -> Output:
        """Every request gets exactly one output with a status, and this is it."""
        assert output.status is not None
        if request is not None and output.status != Status.FINISHED_ABORTED:
            self.statistics.finished(request, self.clock.monotonic_ns())
        self.intake.open.discard(output.number)
        self.counts.finished[output.status] += 1
        return output

    def _wind_up(self) -> list[Output]:
        """Abort what is left, and free what the connector had still to copy."""
        self.log.tick()
        outputs = self._take_in()
        while self._in_flight:
            outputs += self._complete(self._in_flight.popleft())
        if self.connector is not None:
            self.scheduler.take_loads()
        self.scheduler.take_completions()
        return outputs

    def _flush(self) -> None:
        last = self.scheduler.step - 1
        self.log.flush(last, last, self.pool.counts())

    def _emit_started(self) -> None:
        for fault in self.faults.on.values():
            logger.warning("FAULT ON: --fault %s breaks %s", fault, PLACES[fault.code])
        total = self.pool.total
        description = describe_engine(self.config, self.loaded, total, self.faults)
        self.log.started(total, NULL_BLOCK_COUNT, self.config.block_size, description.to_json())
        self._meter.tick()
        if self.plan.is_measured:
            logger.info("%s", self.plan.line(self.config.gpu_memory_utilization))
        self._flush()
        if self.publisher is not None:
            self.publisher.start()
