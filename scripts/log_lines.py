"""Lists what releases of engines log about KV memory and failures, in tests/data/log-lines.txt.

    python -m scripts.log_lines vllm-0.33.0=FOLDER sglang-0.5.23=FOLDER

FOLDER is a release's package, unpacked from its wheel. Releases that are not given keep their lines. Listed are the
literal warnings and errors of the parts in ROOMS, and their other lines that speak of KV memory.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kvscope.monitor.sources.text_events import ABOUT_MEMORY
from scripts.metric_families import reread

LIST: Final = Path(__file__).parent.parent / "tests" / "data" / "log-lines.txt"
ROOMS: Final = {
    "vllm": (
        "v1/core",
        "v1/engine",
        "v1/executor",
        "v1/kv_offload",
        "v1/simple_kv_offload",
        "v1/worker/cpu_worker.py",
        "v1/worker/gpu_worker.py",
        "v1/worker/gpu_model_runner.py",
        "v1/worker/startup_plan.py",
        "distributed/kv_transfer",
        "distributed/kv_events.py",
        "config/cache.py",
        "config/vllm.py",
        "entrypoints",
        "platforms",
    ),
    "sglang": (
        "srt/disaggregation/common/conn.py",
        "srt/disaggregation/common/staging_handler.py",
        "srt/disaggregation/decode.py",
        "srt/disaggregation/decode_hicache_mixin.py",
        "srt/disaggregation/decode_kvcache_offload_manager.py",
        "srt/disaggregation/kv_events.py",
        "srt/disaggregation/mooncake/conn.py",
        "srt/disaggregation/nixl/conn.py",
        "srt/disaggregation/prefill.py",
        "srt/mem_cache/buffer_mode",
        "srt/mem_cache/hybrid_cache",
        "srt/mem_cache/kv_cache_configurator.py",
        "srt/mem_cache/pool_host/base.py",
        "srt/mem_cache/unified_cache",
        "srt/mem_cache/unified_radix_cache.py",
        "srt/managers/cache_controller.py",
        "srt/managers/data_parallel_controller.py",
        "srt/managers/schedule_batch.py",
        "srt/managers/scheduler.py",
        "srt/managers/tp_worker.py",
        "srt/managers/utils.py",
    ),
    "vllm_ascend": ("core", "distributed/kv_transfer"),
    "lmcache": (
        "integration/vllm/lmcache_mp_connector.py",
        "integration/vllm/vllm_multi_process_adapter.py",
        "integration/vllm/vllm_v1_adapter.py",
        "v1/cache_engine.py",
        "v1/distributed/l1_manager.py",
        "v1/memory_allocators",
        "v1/memory_management.py",
        "v1/multiprocess/transfer_context/worker_transfer.py",
        "v1/pin_monitor.py",
        "v1/storage_backend/local_cpu_backend.py",
        "v1/storage_backend/pd_backend.py",
    ),
}
"""The parts of a package that hold or move KV, or end when the engine does: of SGLang without what stores HiCache, of
LMCache without its remote stores and its own server's protocol.
"""
_NOT_OURS: Final = re.compile(r"/(?:decode_bench|example_\w+|encoder|fake|\w*mock\w*|embedding_\w+)(?:/|\.py|_)")
"""Benchmarks, examples, stand-ins and the embeddings of images."""
_SPEAKS_OF_ALL: Final = ("config/", "entrypoints/", "platforms/")
"""Parts whose warnings are about anything: those that speak of KV memory are listed."""
_LEVELS: Final = {
    **dict.fromkeys(("warning", "warning_once", "error", "error_once", "exception", "critical"), "warning"),
    **dict.fromkeys(("info", "info_once"), "info"),
}
_INTEGER: Final = re.compile(r"%[-+#0 ]*\d*(?:[dxi]|\.0f)")
_FRACTION: Final = re.compile(r"%[-+#0 ]*\d*(?:\.\d+)?[feg]")
_TEXT: Final = re.compile(r"%[-+#0 ]*\d*[srb]")


SHORTEST: Final = 14
"""Characters: a line with fewer of its own, as "%s: %s", is another text's."""


class LoggedLine(NamedTuple):
    """A literal of a logger's call, with its placeholders, and the file that has it."""

    file: str
    text: str


def logged_lines(folder: Path) -> Iterator[LoggedLine]:
    """Yield the lines of the package's rooms, each once in a file."""
    for room in ROOMS[folder.name]:
        for file in sorted([*folder.glob(room), *folder.glob(f"{room}/**/*.py")]):
            name = file.relative_to(folder).as_posix()
            if file.suffix == ".py" and _NOT_OURS.search(name) is None:
                tree = ast.parse(file.read_text(encoding="utf-8"))
                lines = dict.fromkeys(LoggedLine(name, text) for text in _literals(tree))
                everything = not name.startswith(_SPEAKS_OF_ALL)
                yield from (line for line in lines if everything or ABOUT_MEMORY.search(line.text))


def _literals(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        level = _LEVELS.get(node.func.attr) if "logg" in ast.unparse(node.func.value) else None
        text = " ".join(_literal(node.args[0]).split())
        if len(_TEXT.sub("", text)) > SHORTEST and (level == "warning" or (level and ABOUT_MEMORY.search(text))):
            yield text


def _literal(node: ast.expr) -> str:
    """Return a string as a format, with %s for the values of an f-string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_literal(part) if isinstance(part, ast.Constant) else "%s" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _literal(node.left) + _literal(node.right)
    return ""


def printed(text: str) -> str:
    """Return the line as an engine prints it, with 7 for each value."""
    return _TEXT.sub("7", _FRACTION.sub("7.0", _INTEGER.sub("7", text))).replace("%%", "%")


def read_releases(text: str) -> dict[str, set[LoggedLine]]:
    """Return the lines of each release, by `ENGINE-RELEASE`, of a text that `written` made."""
    releases: dict[str, set[LoggedLine]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            release, file, logged = line.split(" ", 2)
            releases.setdefault(release, set()).add(LoggedLine(file, logged))
    return releases


def written(releases: dict[str, set[LoggedLine]]) -> str:
    """Return the text: a release, a file and what it logs, a line each."""
    lines = (f"{release} {one.file} {one.text}" for release in sorted(releases) for one in sorted(releases[release]))
    return "\n".join(("# By `python -m scripts.log_lines`: a release, a file, and what it logs.", *lines, ""))


def main(arguments: list[str]) -> None:
    """Read the folders of the command line."""
    known = read_releases(LIST.read_text(encoding="utf-8"))
    read = reread(arguments, known, lambda _, folder: logged_lines(folder), "lines")
    LIST.write_text(written(read), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
