"""What a process may use: the sources and clients that its file descriptors allow, and when garbage is collected."""

from __future__ import annotations

import gc
import resource
from typing import Final

from . import limits


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one: a shell's 1,024 protects programs that call select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def allowed_files() -> int:
    """Return how many files the process may have open now."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 30


def sources_that_fit() -> int:
    """Return how many sources the service may read."""
    beside = limits.SERVICE_FILES + limits.CONNECTIONS_LEFT
    return max(0, min(limits.SOURCES, (allowed_files() - beside) // limits.SOURCE_FILES))


def files_of_service() -> int:
    """Return the descriptors that are kept for the service and its sources. Its clients have the rest."""
    return limits.SERVICE_FILES + limits.SOURCE_FILES * sources_that_fit()


def files_of_full_service() -> int:
    """Return the descriptors of a service with as many sources and clients as it takes."""
    return limits.SERVICE_FILES + limits.SOURCE_FILES * limits.SOURCES + limits.SERVICE_CONNECTIONS


def threads_of_full_service() -> int:
    """Return the threads of a service with as many sources as it takes."""
    return limits.SERVICE_THREADS + limits.SOURCE_THREADS * limits.SOURCES


def why_no_more_sources() -> str:
    """Explain the limit of sources, and what to do."""
    remedy = "give the rest to another `monitor serve` or `monitor agent`"
    fit = sources_that_fit()
    if fit == limits.SOURCES:
        return f"the service reads {fit} sources, and no more than that: {remedy}"
    needed = files_of_full_service()
    return (
        f"the service reads {fit} sources, as its limit of {allowed_files()} open files allows no more: raise that to"
        f" {needed} (`ulimit -n {needed}`, or LimitNOFILE={needed} in its systemd unit), or {remedy}"
    )


SERVICE_THRESHOLDS: Final = 50_000, 20, 10
"""When the garbage collector of a service examines young, older, and old objects. With its own thresholds it walks the
columns of all blocks of every state in memory (a third of a second for a million) at each second query for a past
time. Hardly anything there is in a cycle.
"""


def collect_rarely(thresholds: tuple[int, int, int] = SERVICE_THRESHOLDS) -> None:
    """Let the garbage collector of this process ignore the objects of now, and examine the rest rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds)
