"""Pools that are too small, full or empty, blocks that are too large, and memory that is not the pool's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ...base.text import counted, percent
from ...contract.samples import ReportedEvent, Sample
from ...ledger.demand import capacity_tokens
from ..held.long_request import LongRequest
from ..judgement import Evidence, TextJudgement
from ..preemptions import FULL_AT
from .planned_settings import planned_shares
from .refusals import REFUSAL_LINES
from .written_view import WrittenView, number_of, quotes

LINES_IN_A_ROW: Final = 2
"""Not a threshold: one line shows a state, and two that it lasts."""
REPEATED_PREEMPTIONS: Final = 51
"""Not a threshold: vLLM before V1 logs the first preemption and then each fiftieth, so this is its second line."""
_MORE_MEMORY: Final = (
    "Enlarge the pool: a higher --gpu-memory-utilization, --kv-cache-dtype fp8, more devices, or a lower"
    " --max-num-batched-tokens."
)


def pool_below_one_request(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield a pool smaller than one request of the allowed length, in an engine that started all the same."""
    capacity, longest = capacity_tokens(view.facts), _longest_request(view)
    if capacity is None or longest is None or capacity >= longest or view.lines(*REFUSAL_LINES):
        return
    size = view.facts.get("kv_cache_size_tokens") or view.facts["max_concurrency"]
    yield view.finding(
        "sizing.kv-too-small",
        position=size.position,
        evidence=(
            Evidence("pool_capacity", capacity, "tokens", "log", size.position),
            Evidence("longest_request", longest, "tokens", "log"),
            Evidence("full_length_requests_that_fit", round(capacity / longest, 2), "requests", "log", size.position),
        ),
        explanation=(
            f"The pool holds {capacity:,} tokens, {percent(capacity / longest)} of one request of the {longest:,}"
            " tokens that are allowed. The engine accepts a request longer than the pool, never completes it, and the"
            " queue behind it waits."
        ),
        do_now=(f"Start it with --max-model-len {capacity}: it then rejects longer requests at once.",),
        change=(_MORE_MEMORY, "Upgrade: later releases refuse to start with such a pool."),
        wont_help=("Retrying the request.",),
        missing="one start-up with both numbers: they may be of two runs, and a hybrid model's tokens count less",
    )


def _longest_request(view: WrittenView) -> int | None:
    lengths = [number_of(line, "tokens") for line in view.lines("model_length")]
    named = [view.number("max_model_len"), view.number("max_concurrency_tokens"), *lengths]
    return next((round(length) for length in named if length), None)


def request_above_pool(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield a request that the report sizes above the pool that the engine prints."""
    capacity = capacity_tokens(view.facts)
    reported = [
        line for line in view.reported.of("request_size") if capacity and (number_of(line, "tokens") or 0) > capacity
    ]
    if (
        capacity is None
        or not reported
        or not (view.states("stuck", "waits_unserved") or _waits_unserved(view.samples))
    ):
        return
    tokens = number_of(reported[0], "tokens") or 0
    size = view.facts.get("kv_cache_size_tokens") or view.facts["max_concurrency"]
    yield view.finding(
        "stuck.never-fits",
        position=reported[0].position,
        evidence=(
            Evidence("request_size", round(tokens), "tokens", "report", reported[0].position),
            Evidence("pool_capacity", capacity, "tokens", "log", size.position),
            *quotes([*reported[:1], *view.phrases("stuck", "waits_unserved")[:1]]),
        ),
        explanation=(
            f"A request of {tokens:,.0f} tokens was sent and the pool holds {capacity:,}. It can never run, and the"
            " scheduler admits nothing behind it. Both numbers come from the text."
        ),
        do_now=("Abort the request (close its connection). The requests behind it run at once.",),
        change=(f"Set --max-model-len {capacity}, so that the engine rejects such a request at once.", _MORE_MEMORY),
        wont_help=("Restarting: the same request blocks it again.", "A higher --max-num-seqs."),
        missing="how many blocks the request needs, if the model has sliding-window layers: the event stream of a"
        " probe",
    )


def prompt_above_pool(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield prompts that an engine of before V1 refused, since the pool cannot hold them."""
    lines = view.lines("prompt_rejected")
    if not lines:
        return
    longest = max(number_of(line, "tokens") or 0 for line in lines)
    yield view.finding(
        "stuck.never-fits",
        lines[0],
        evidence=(Evidence("longest_prompt", round(longest), "tokens", "log", lines[0].position), *quotes(lines)),
        explanation=(
            f"The engine refused {counted(len(lines), 'prompt')} of up to {longest:,.0f} tokens: each needs more blocks"
            " than the pool has. The client gets an empty answer, and other requests go on."
        ),
        do_now=("Send shorter prompts, or set --max-model-len to what the pool holds, so that clients get an error.",),
        change=(_MORE_MEMORY,),
        wont_help=("Retrying the request.",),
        missing="the pool's size: the start-up log, # GPU blocks",
    )


def _waits_unserved(samples: Sequence[Sample]) -> bool:
    return bool(samples) and not samples[-1].running and bool(samples[-1].waiting)


def preempted_for_space(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield preemptions or retractions for lack of space that a person noticed."""
    lines = view.lines(
        "request_preempted",
        "requests_retracted",
        "batch_out_of_memory",
        "last_request_too_large",
        "swap_space_exhausted",
    )
    if not lines or not (view.is_report() or _ends_full(view, lines)):
        return
    waiting = max((sample.waiting or 0 for sample in view.samples), default=0)
    refused_only = all(line.name == "batch_out_of_memory" for line in lines)
    yield view.finding(
        "sizing.kv-too-small",
        lines[0],
        evidence=(
            Evidence("preemption_lines", len(lines), "lines", "log"),
            Evidence("waiting", waiting, "requests", "log"),
            *quotes(lines),
        ),
        explanation=(
            "The engine itself reports that the pool has no room for its running requests"
            + (", and its scheduler gives up: " if refused_only else " and preempts some of them: ")
            + counted(len(lines), "such line")
            + (f", with up to {waiting:,} requests waiting." if waiting else ".")
            + (
                " A request takes whole pages: room for as many tokens may be fewer pages than there are requests."
                if refused_only
                else " It recomputes their work, or swaps it to the host."
            )
        ),
        do_now=(
            "Lower --max-num-seqs (SGLang: --max-running-requests) to the number of full-length requests that the pool"
            " holds.",
        ),
        change=(_MORE_MEMORY, "With the engine of before V1, --swap-space 0 recomputes instead of swapping."),
        wont_help=("Restarting: the same load fills the same pool.",),
        missing="how often each request was preempted: vllm:num_preemptions_total twice, or the event stream of a"
        " probe",
    )


def _ends_full(view: WrittenView, lines: Sequence[ReportedEvent]) -> bool:
    """Whether the lines themselves show that it goes on, or ends: a full pool before, many preemptions, an error."""
    names = {line.name for line in lines}
    total = max((number_of(line, "total") or 0 for line in lines), default=0)
    full_at = view.settings(FULL_AT)
    full = [sample for sample in view.samples[-LINES_IN_A_ROW:] if (sample.usage or 0) >= full_at]
    retracted = "requests_retracted" in names and len(full) == LINES_IN_A_ROW and not any(s.waiting for s in full)
    return (
        retracted
        or total >= REPEATED_PREEMPTIONS
        or bool(names & {"last_request_too_large", "swap_space_exhausted", "batch_out_of_memory"})
    )


def one_request_holds_much(view: WrittenView) -> Iterator[TextJudgement]:
    """One request runs with a large share of the pool while others wait."""
    end = [
        sample
        for sample in view.samples[-LINES_IN_A_ROW:]
        if sample.running == 1 and sample.waiting and sample.generation_tokens_per_s
    ]
    if len(end) < LINES_IN_A_ROW or min(sample.usage or 0 for sample in end) < view.settings(LongRequest.min_share):
        return
    first, last = end[0], end[-1]
    yield view.finding(
        "held.long-request",
        first,
        evidence=(
            Evidence("usage", round(100 * (last.usage or 0), 1), "%", "log", last.position),
            Evidence("running", 1, "requests", "log", last.position),
            Evidence("waiting", last.waiting or 0, "requests", "log", last.position),
            Evidence("generation_rate", last.generation_tokens_per_s or 0.0, "tokens/s", "log", last.position),
        ),
        explanation=(
            f"One request runs and holds {percent(last.usage or 0)} of the pool. It generates"
            f" {last.generation_tokens_per_s or 0:g} tokens/s, so it is alive. {counted(last.waiting or 0, 'request')}"
            " wait behind it: the first needs more blocks than are left, or hits another scheduler limit."
        ),
        do_now=("Wait for it, or abort it: the engine admits the others as soon as it ends.",),
        change=("Limit the size of a request: --max-model-len, or its max_tokens.", _MORE_MEMORY),
        wont_help=("Restarting, unless you want to lose that request.",),
        missing="whether the first waiting request lacks blocks: vllm:num_requests_waiting_by_reason, or a probe",
    )


def block_above_prompts(view: WrittenView) -> Iterator[TextJudgement]:
    """Blocks of hundreds of tokens, and prompts that are never found in the cache."""
    lines = [line for line in view.lines("attention_block_size") if number_of(line, "tokens")]
    misses = view.phrases("prefix_misses", "large_block")
    if not lines or not misses:
        return
    tokens = number_of(lines[0], "tokens") or 0
    yield view.finding(
        "sizing.block-inflated",
        position=lines[0].position,
        evidence=(
            Evidence("block_size", round(tokens), "tokens", "log", lines[0].position),
            *quotes([*lines[:1], *misses[:2]]),
        ),
        explanation=(
            f"Blocks have {tokens:,.0f} tokens, so that they match the recurrent layers' state. Only whole blocks are"
            f" cached: a shared prefix of fewer than {tokens:,.0f} tokens is never found, and the last block of each"
            " request stays partly empty."
        ),
        do_now=("Compare the length of what prompts share with the block size.",),
        change=(
            "Put the shared part first and make it longer than a block, or use a release that caches partial blocks.",
        ),
        wont_help=("A larger pool.", "--enable-prefix-caching: it is on, and works on whole blocks."),
        missing="hits by prompt length: vllm:prefix_cache_hits_total before and after one repeated prompt",
    )


def prefix_never_hit(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield counters with look-ups and without a hit, for prompts that share a prefix according to the report."""
    reads = view.reported.of("metric_read")
    queries = [
        line
        for line in reads
        if "prefix_cache_queries" in str(line.fields["metric"]) and "external" not in str(line.fields["metric"])
    ]
    hits = [
        line
        for line in reads
        if "prefix_cache_hits" in str(line.fields["metric"]) and "external" not in str(line.fields["metric"])
    ]
    phrases = view.phrases("shared_prompts", "prefix_misses")
    if not queries or not hits or not phrases:
        return
    asked, found = number_of(queries[-1], "value") or 0, number_of(hits[-1], "value") or 0
    if not asked or found:
        return
    yield view.finding(
        "collapse.prefix-hits",
        position=queries[-1].position,
        evidence=(
            Evidence("looked_up_tokens", round(asked), "tokens", "metrics", queries[-1].position),
            Evidence("hit_tokens", 0, "tokens", "metrics", hits[-1].position),
            *quotes(phrases[:2]),
        ),
        explanation=(
            f"{asked:,.0f} prompt tokens were looked up in the prefix cache without a hit, although prompts share a"
            " prefix. On models with several kinds of layers, each kind must hit: one that keeps its state only at"
            " block boundaries, or only the last window, vetoes the hit."
        ),
        do_now=("Send one prompt of several blocks twice, and read vllm:prefix_cache_hits_total before and after.",),
        change=(
            "Make the shared prefix longer than one block and put the varying part last, or try a release with partial"
            " hits.",
        ),
        wont_help=("A larger pool: the blocks are cached, but lookups miss them.",),
        missing="which group of layers misses: KV events (monitor doctor tcp://HOST:5557), or a probe",
    )


def front_end_keeps_requests(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield a scheduler with nothing to do while clients wait."""
    idle = bool(view.samples) and view.samples[-1].running == 0 and view.samples[-1].waiting == 0
    phrases = view.phrases("unanswered")
    if not (idle and phrases and view.states("front_end", "answers_health")):
        return
    last = view.samples[-1]
    yield view.finding(
        "stuck.front-end",
        position=last.position,
        evidence=(
            Evidence("running", 0, "requests", last.source, last.position),
            Evidence("waiting", 0, "requests", last.source, last.position),
            *quotes([*phrases, *view.phrases("front_end")]),
        ),
        explanation=(
            "The scheduler has neither running nor waiting requests while clients wait for answers: the requests or"
            " their answers are stuck in the front end. A dead engine whose last metrics read 0 looks the same, except"
            " that it does not serve new requests either."
        ),
        do_now=("Send one new request. If it succeeds, the engine is healthy and the front end lost the others.",),
        change=("Run the front end with one worker (SGLang: --tokenizer-worker-num 1; vLLM: --api-server-count 1).",),
        wont_help=("More KV memory.",),
        missing="where a request was last seen: a log of the front end with request ids",
    )


def pool_is_the_memory(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield a question about memory use in a text that names no problem."""
    if view.samples:
        return
    pool = next(
        (
            view.facts[name]
            for name in ("available_kv_cache_gib", "kv_cache_reserved_gib", "kv_cache_size_tokens")
            if name in view.facts
        ),
        None,
    )
    allocated = view.lines("pool_allocated")
    phrases = view.phrases("memory_taken", "asks_about_pool")
    if view.is_report() or view.mentioned(*REFUSAL_LINES, "out_of_memory", "engine_died"):
        return
    if view.states("memory_left_behind"):
        return
    is_asked = view.states("question") or view.lines("start_up_done")
    if not phrases and ((pool is None and not allocated) or not is_asked):
        return
    yield view.finding(
        "held.pool-reserved",
        verdict="likely" if pool is not None or allocated else "cannot-tell",
        position=pool.position if pool is not None else (allocated or phrases)[0].position,
        evidence=(
            *(
                (
                    Evidence(
                        pool.name, pool.value, "tokens" if pool.name.endswith("tokens") else "GiB", "log", pool.position
                    ),
                )
                if pool is not None
                else ()
            ),
            *quotes([*allocated[:1], *phrases]),
        ),
        explanation=(
            "This memory is the KV pool. At startup the engine allocates everything that its share of the device leaves"
            " after weights and activations, and keeps it. The usage of the pool, not of the device, shows what"
            " requests need."
        ),
        do_now=("Nothing has to be done.", *planned_shares(view)),
        change=("To use less, set the pool's size: --kv-cache-memory-bytes, or a lower --gpu-memory-utilization.",),
        wont_help=("A shorter --max-model-len or fewer sequences: the pool takes the rest.",),
        missing=""
        if pool is not None or allocated
        else "the engine's start-up lines: its memory profile has the pool's size",
    )


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
    yield view.finding(
        "held.not-memory",
        verdict="likely" if grows else "cannot-tell",
        position=phrases[0].position,
        evidence=quotes(phrases),
        explanation=(
            "The report is about host memory. The KV pool is device memory of a fixed size, and nothing in the text"
            " offloads KV to the host, so blocks do not cause the growth. Input caches, serialized messages and host"
            " buffers may. An offload tier that the text does not mention would keep KV there."
        ),
        do_now=("Find the growing process: run ps -o pid,rss,cmd -C python twice, some minutes apart.",),
        change=(
            "Bound the input caches (vLLM: --mm-processor-cache-gb), then profile the process with memray or"
            " tracemalloc.",
        ),
        wont_help=("A smaller KV pool, or a lower --gpu-memory-utilization: neither is host memory.",),
        missing="which process grows and with what: its RSS over time beside the number of requests",
    )
