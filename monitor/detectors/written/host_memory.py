"""Reports of host memory that grows: the KV pool is device memory of a fixed size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvscope.monitor.detectors.judgement import TextJudgement
from kvscope.monitor.detectors.written.written_view import WrittenView, quotes

_ON_THE_HOST: Final = ("offload", "connector", "pinned", "remote_load")
"""Concepts of tiers that keep KV in host memory."""


def host_memory_grows(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield the case of a person who names host memory in a text without any KV there."""
    grows = view.phrases("host_memory_grows")
    phrases = [*grows, *view.phrases("host_process_killed")]
    if not phrases or view.states(*_ON_THE_HOST, "stuck", "waits_unserved", "start_fails"):
        return
    if view.mentioned("connector_named", "out_of_memory", "swap_space_exhausted", "tier_allocation_failed"):
        return
    yield TextJudgement(
        code="held.not-memory",
        engine=view.engine,
        verdict="likely" if grows else "cannot-tell",
        position=phrases[0].position,
        evidence=quotes(phrases),
        explanation=(
            "The report is about host memory. The KV pool is device memory of a fixed size, and nothing in the text"
            " offloads KV to the host, so blocks do not cause the growth. Input caches, serialized messages and"
            " host buffers may. An offload tier that the text does not mention would keep KV there."
        ),
        do_now=("Find the growing process: run ps -o pid,rss,cmd -C python twice, some minutes apart.",),
        change=(
            "Bound the input caches (vLLM: --mm-processor-cache-gb), then profile the process with memray or"
            " tracemalloc.",
        ),
        wont_help=("A smaller KV pool, or a lower --gpu-memory-utilization: neither is host memory.",),
        missing="which process grows and with what: its RSS over time beside the number of requests",
    )
