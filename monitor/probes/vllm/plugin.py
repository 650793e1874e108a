"""The entry point that vLLM calls in each of its processes: the probe waits there for a Scheduler, which only one of
them makes.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time
from typing import Any, Final

import zmq

from ...contract.event_log import EventLog
from ..publisher import Publisher, replay_endpoint_for
from ..stall_capture import StallCapture, stacks_enabled
from .compatibility import HOOKS, problem
from .front_end_hooks import FrontEndReporter, watch_front_end
from .front_end_inbox import front_end_endpoint
from .probe import Probe
from .vllm_description import breakdown, calling_executor, rank_of, served_model_name

logger = logging.getLogger("vllm.kvscope")
"""Under vLLM's own, so that its format and its level are ours."""

PORTS_A_RANK: Final = 2
_attached: list[tuple[Probe, Publisher]] = []
"""The probes of this process, which live as long as their schedulers."""


def register() -> None:
    """Register as the entry point in `vllm.general_plugins`. Does nothing unless KVSCOPE_EVENTS is set. Never raises.

    It also leaves alone a vLLM that lacks a hook without which the events would be wrong.
    """
    if not os.environ.get("KVSCOPE_EVENTS"):
        return
    try:
        from vllm.v1.core.sched.scheduler import Scheduler

        if gaps := [f"{hook.method} ({wrong})" for hook in HOOKS if hook.needed and (wrong := problem(hook))]:
            logger.error("kvscope: no events will be published: this vLLM has not what they need: %s", ", ".join(gaps))
            return
        _watch(Scheduler)
        watch_front_end(FrontEndReporter(_front_end_of_rank, _own_rank))
    except Exception:
        logger.exception("kvscope: vLLM's scheduler could not be hooked. No events will be published")


def _watch(kind: Any) -> None:
    """Attach a probe to each Scheduler that is made from now on."""
    made = kind.__init__
    if hasattr(made, "kvscope"):
        return  # vLLM may call a plugin more than once

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        try:
            attach(self)
        except Exception as error:
            logger.exception("kvscope: no events will be published: %s", error)

    init.kvscope = True  # type: ignore[attr-defined]
    kind.__init__ = init


def attach(scheduler: Any) -> tuple[Probe, Publisher]:
    """Watch this scheduler, and publish its events at KVSCOPE_EVENTS.

    Each data-parallel rank is on ports of its own. Raises NotPrivate and zmq.ZMQError for an address that cannot be.
    """
    rank, _ = rank_of(scheduler)
    events = of_rank(os.environ["KVSCOPE_EVENTS"], rank)
    replay = os.environ.get("KVSCOPE_REPLAY", "")
    thread = threading.get_ident()  # the maker of the scheduler runs it
    log = EventLog(time)
    probe = Probe(scheduler, log, os.environ.get("KVSCOPE_HASH_KEY", "").encode())
    publisher = Publisher(
        log,
        engine_name(scheduler),
        probe.vitals,
        events=events,
        replay=of_rank(replay, rank) if replay else replay_endpoint_for(events),
        stacks=StallCapture(log, lambda: thread, connector_paths(scheduler)) if stacks_enabled() else None,
        before_drain=probe.check_front_end,
    )
    _join_front_end(probe, events)

    def stop(*_args: Any, **_kwargs: Any) -> None:
        probe.stop()
        publisher.close()
        probe.close()

    probe.start()
    _report_memory(probe)
    probe.hooks.wrap(scheduler, "shutdown", stop)
    if (executor := calling_executor()) is not None:
        probe.watch_sleep(executor)
    publisher.start()
    _attached.append((probe, publisher))
    logger.info("kvscope: events on %s, replay on %s", publisher.events_endpoint, publisher.replay_endpoint)
    return probe, publisher


def _join_front_end(probe: Probe, events: str) -> None:
    endpoint = front_end_endpoint(events)
    if not endpoint:
        return
    try:
        probe.join_front_end(endpoint)
    except zmq.ZMQError as error:
        logger.warning("kvscope: what the API server reports is not received at %s: %s", endpoint, error)


def _front_end_of_rank(rank: int) -> str:
    return front_end_endpoint(of_rank(os.environ["KVSCOPE_EVENTS"], rank))


def _own_rank() -> int | None:
    """Return the rank of the engine in this process, if there is one."""
    return rank_of(_attached[0][0].scheduler)[0] if _attached else None


def engine_name(scheduler: Any) -> str:
    """`SERVER/RANK`. All ranks of a server name it by the address of rank 0, or by KVSCOPE_ENGINE_ID.

    A single engine has its KVSCOPE_ENGINE_ID unchanged.
    """
    rank, is_one_of_many = rank_of(scheduler)
    if given := os.environ.get("KVSCOPE_ENGINE_ID"):
        return f"{given}/{rank}" if is_one_of_many else given
    address = os.environ["KVSCOPE_EVENTS"].partition("://")[2]
    return f"{served_model_name(scheduler)}@{address}/{rank}"


def connector_paths(scheduler: Any) -> set[str]:
    """Return the files of the KV connector's classes."""
    kinds = type(getattr(scheduler, "connector", None)).__mro__
    files = {getattr(sys.modules.get(kind.__module__), "__file__", None) for kind in kinds}
    return {file for file in files if file}


def _report_memory(probe: Probe) -> None:
    try:
        figures = breakdown(probe.scheduler)
    except Exception as error:
        logger.warning("kvscope: what vLLM measured of its device's memory is not reported: %r", error)
        return
    if figures:
        probe.log.memory(figures)
        probe.flush()


def of_rank(endpoint: str, rank: int) -> str:
    """Where that data-parallel rank publishes: two ports higher for each rank before it."""
    head, _, port = endpoint.rpartition(":")
    if rank == 0 or port == "*":
        return endpoint
    return f"{head}:{int(port) + PORTS_A_RANK * rank}" if port.isdecimal() else f"{endpoint}-{rank}"
