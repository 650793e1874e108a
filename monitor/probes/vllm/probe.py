"""The probe: hooks into one vLLM scheduler, its cache manager and its block pool, and reports what they do.

Everything runs in the engine's own thread, where vLLM does what is reported, so events are in the order of what
happened. Work at every step is kept short. All else hangs on calls that vLLM makes for few requests a step. A slice of
the audit is read at a pass in ten milliseconds. An idle engine is audited from the drain thread.

    hook                              events
    ------------------------------    -------------------------------------------------------------------------------
    Scheduler.add_request             arrived, queued, waiting on a grammar; a streaming session goes on
    Scheduler.schedule                step launched, looked up, admitted, waiting on remote KV, ready; passed over
    Scheduler.update_from_output      first token, progressed, step completed
    Scheduler._preempt_request        allocation failed, preempted, queued
    KVCacheManager.free               the same, in releases up to 0.11, which preempt within `schedule`
    Scheduler._free_request           finished; free deferred, if the blocks are still there afterwards
    Scheduler._free_blocks            completion delivered, for those
    Scheduler._handle_stopped_request   a streaming session waits
    Scheduler._update_from_kv_xfer_finished   remote load
    KVCacheManager.pop_blocks_for_free   detached, behind the step in flight
    BlockPool.get_new_blocks, touch, free_blocks   allocated, reused, released, reclaimed
    BlockPool.cache_full_blocks, …    cached, evicted
"""

from __future__ import annotations

import time
from typing import Any, Final

from ...contract.event_log import Clock, EventLog
from ..packer import Vitals
from .block_hooks import BlockHooks
from .emitter import Emitter
from .front_end_inbox import FrontEndInbox
from .hooks import Hooks
from .probe_state import RESERVED_BLOCKS, ProbeState
from .request_hooks import RequestHooks
from .scheduler_hooks import SchedulerHooks
from .table_reader import IdleAudit, QueueCheck
from .vllm_description import describe

NO_STEP: Final = (-1, 0)


class Probe:
    """Watches `scheduler`, which has just been made, and from `start` on reports what it does to `log`.

    hash_key: of the prefix hashes, random if empty. Raises AttributeError or KeyError, and has hooked nothing, if the
    scheduler is not of a shape that it knows.
    """

    def __init__(self, scheduler: Any, log: EventLog, hash_key: bytes = b"", clock: Clock = time) -> None:
        self.scheduler = scheduler
        self.log = log
        self.state = ProbeState(scheduler)
        self._emitter = Emitter(self.state, log, hash_key)
        self.hooks = Hooks(self._emitter.drop_notes)
        requests = RequestHooks(self.state, self._emitter, clock)
        self._passes = SchedulerHooks(self.state, self._emitter, requests, clock)
        self._queue_check = QueueCheck(self.state, log)
        self._idle_audit = IdleAudit(self.state, self._emitter, lambda: self._passes.passes)
        self.inbox: FrontEndInbox | None = None
        self._hook_groups = (requests, self._passes, BlockHooks(self.state, self._emitter))

    def vitals(self) -> Vitals:
        """Return the state for heartbeats, read from the drain thread."""
        launched = next(iter(tuple(self.state.launched)), None)
        running, waiting = len(self.scheduler.running), sum(len(queue) for queue in self.state.queues())
        self._queue_check.check(running + waiting)
        self._idle_audit.check(idle=launched is None and not running + waiting)
        step, since_ns = NO_STEP if launched is None else launched[1:3]
        in_front_end = running + waiting + (self.inbox.pending if self.inbox is not None else 0)
        return Vitals(step, since_ns, running, waiting, in_front_end, self._passes.polls, self._passes.passes)

    def join_front_end(self, endpoint: str) -> None:
        """Take the front end's reports there. Before `start`. Raises zmq.ZMQError if it cannot bind."""
        self.inbox = FrontEndInbox(self.state, self.log, endpoint)
        self.state.next_number = self.inbox.number_of

    def check_front_end(self) -> None:
        """Report what the front end did. From the drain thread."""
        if self.inbox is not None:
            self.inbox.check()

    def close(self) -> None:
        """Release its sockets, after the drain thread has ended."""
        if self.inbox is not None:
            self.inbox.close()

    def start(self) -> None:
        """Report that the engine starts, and hook in."""
        description = describe(self.scheduler)
        self.log.started(self.state.total, RESERVED_BLOCKS, self.scheduler.block_size, description.to_json())
        self.flush()
        for group in self._hook_groups:
            group.wrap(self.hooks)

    def watch_sleep(self, executor: Any) -> None:
        """Report when the engine's executor is put to sleep and woken."""
        self.hooks.wrap(executor, "sleep", after=self._passes.slept)
        self.hooks.wrap(executor, "wake_up", after=self._passes.woken)

    def stop(self) -> None:
        """Report that it ends in good order."""
        self._emitter.expire_time()
        self._emitter.stamped.stopped()
        self.flush()

    def flush(self) -> None:
        """Hand over what happened until now, for the drain thread to send."""
        self._emitter.flush()
