"""Whether a release of vLLM counts CUDA graphs when it sizes the pool, and how often its suggestions subtract them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from kvscope.monitor.events.samples import Fact

OPTIONAL_SINCE: Final = (0, 18, 0)
"""With VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1."""
COUNTED_SINCE: Final = (0, 20, 2)
TWICE_SINCE: Final = (0, 27, 0)
"""Its suggestions subtract graphs a second time (https://github.com/vllm-project/vllm/issues/57936)."""
NEWEST_SEEN: Final = (0, 33)
_RELEASE: Final = re.compile(r"v?(\d{1,3})\.(\d{1,3})(?:\.(\d{1,3}))?")


class GraphAccounting(NamedTuple):
    """`in_pool`: the pool leaves room for graphs, or None where the text does not show it. `sentence` is the same for a
    reader.
    """

    in_pool: bool | None
    sentence: str


def graph_accounting(facts: Mapping[str, Fact]) -> GraphAccounting:
    """Return how the release that the text names counts graphs, or what the wording shows without a release."""
    if "enforce_eager" in facts and str(facts["enforce_eager"].value) == "True":
        return GraphAccounting(False, "no graphs are captured: the engine runs with --enforce-eager")
    is_reserved = "memory_graphs_are_reserved" in facts
    release = release_in(facts)
    if release is None:
        return _by_wording(facts, is_reserved)
    name = "vLLM " + ".".join(map(str, release))
    if release < OPTIONAL_SINCE or (release < COUNTED_SINCE and not is_reserved):
        unless = "" if release < OPTIONAL_SINCE else ", unless VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1"
        return GraphAccounting(
            False, f"{name} does not count graphs: it captures them after sizing the pool, on top of the share{unless}"
        )
    if release < COUNTED_SINCE or release >= TWICE_SINCE:
        newest = f" (seen up to {'.'.join(map(str, NEWEST_SEEN))})" if release >= TWICE_SINCE else ""
        return GraphAccounting(
            True,
            f"{name} counts graphs once in the pool, and twice in the --kv-cache-memory that it suggests{newest}",
        )
    return GraphAccounting(
        True, f"{name} counts graphs once, in the pool and in the --kv-cache-memory that it suggests"
    )


def release_in(facts: Mapping[str, Fact]) -> tuple[int, int, int] | None:
    """Return the release that the text states, None if it states none."""
    found = _RELEASE.match(str(facts["version"].value)) if "version" in facts else None
    if found is None:
        return None
    major, minor, patch = (int(part or 0) for part in found.groups())
    return major, minor, patch


def _by_wording(facts: Mapping[str, Fact], is_reserved: bool) -> GraphAccounting:
    if "memory_consumed_gib" in facts:
        return GraphAccounting(
            True,
            "the text has the wording of vLLM 0.27 and later, which counts graphs once in the pool, and twice in the"
            " --kv-cache-memory that it suggests",
        )
    if is_reserved:
        return GraphAccounting(
            True, "graphs are counted in the pool, because the log reports that their profiling is enabled"
        )
    if "memory_weights_gib" in facts and "kv_cache_reserved_gib" in facts:
        return GraphAccounting(
            False,
            "the text has the wording of vLLM before 0.9, which does not count graphs: they come on top of the share",
        )
    return GraphAccounting(
        None,
        "the text does not name the release: vLLM before 0.20.2 leaves graphs out of the pool, later ones count them",
    )
