"""Advice names the flags and metrics of the engine that it is given to."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvscope.monitor.detectors.advice import MORE_ROOM, WHOLE_PROMPTS
from kvscope.monitor.detectors.dialects import IN_SGLANG, sglang_text
from kvscope.monitor.detectors.runbook_files import ADVICE, runbook_codes, runbook_text
from kvscope.monitor.sources.log_patterns import PATTERNS
from kvscope.monitor.terminal.cli import main
from scripts.metric_families import LIST, read_releases

OURS = frozenset(
    [
        "--pid",
        "--log",
        "--memory-budget",
        "--simulate",
        "--timeout",
        "--format",
        "--set",
        "--journal",
        "--fault",
        "--events",
        "--device-memory",
        "--weights",
        "--query-compute-apps",
    ]
)
"""Flags of `monitor`, nvidia-smi and the like."""
SGLANG = frozenset(
    [
        "--mem-fraction-static",
        "--max-running-requests",
        "--context-length",
        "--chunked-prefill-size",
        "--max-total-tokens",
        "--disable-cuda-graph",
        "--page-size",
        "--schedule-policy",
        "--schedule-conservativeness",
        "--disable-radix-cache",
        "--tokenizer-worker-num",
        "--kv-cache-dtype",
        "--swa-full-tokens-ratio",
        "--mamba-full-memory-ratio",
        "--enable-metrics",
        "--max-mamba-cache-size",
        "--enable-streaming-session",
        "--enable-session-radix-cache",
        "--log-requests",
    ]
)
"""Arguments that advice names, each of them in the package of SGLang 0.5.23, --disable-cuda-graph as deprecated."""
START = (
    "[2026-05-24 03:50:10 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 24512, K size: 1.50 GB, V size:"
    " 1.50 GB\n"
)


def foreign(text: str) -> list[str]:
    """The flags, metrics and names in a text that SGLang's users do not have."""
    flags = {flag for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text) if flag not in SGLANG | OURS}
    return sorted(flags | set(re.findall(r"\bvLLM\b|\bVLLM_\w+|\bvllm:\w+", text)))


def bullets(code: str) -> list[str]:
    sections = re.split(r"^## ", runbook_text(code) or "", flags=re.MULTILINE)[1:]
    advice = [section for section in sections if section.partition("\n")[0] in ADVICE]
    found = [bullet for section in advice for bullet in re.findall(r"^- (.+(?:\n  .+)*)", section, re.MULTILINE)]
    return [" ".join(bullet.replace("`", "").split()) for bullet in found]


def test_each_metric_is_one_of_its_engine() -> None:
    families = read_releases(LIST.read_text(encoding="utf-8"))
    named = {
        name: set().union(*(families[of] for of in families if of.startswith(name))) for name in ("vllm", "sglang")
    }
    pairs = [pair for pair in IN_SGLANG.items() if ":" in pair[0]]
    assert len(pairs) > 5
    for ours, theirs in pairs:
        assert ours.removesuffix("_total") in named["vllm"], ours  # Prometheus adds it to a counter of vLLM
        assert theirs in named["sglang"], theirs
        assert ours.endswith("_total") == theirs.endswith("_total"), "a counter is another counter"


def test_no_advice_of_a_runbook_names_in_sglang_what_sglang_lacks() -> None:
    texts = [bullet for code in runbook_codes() for bullet in bullets(code)] + [MORE_ROOM, WHOLE_PROMPTS]
    assert any(map(foreign, texts))
    assert {text: foreign(sglang_text(text)) for text in texts if foreign(sglang_text(text))} == {}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Lower --max-num-seqs (SGLang: --max-running-requests) to 12.", "Lower --max-running-requests to 12."),
        ("Use one worker (SGLang: --tokenizer-worker-num 1; vLLM: --api-server-count 1).", "Use one worker (--tok"),
        ("Close sessions (vLLM: end the input, or abort; SGLang: POST /close_session).", "Close sessions (POST /"),
        ("In the server if it has one (SGLang: timeout in /open_session).", "In the server if it has one (timeout in"),
        ("Enlarge the pool (--kv-cache-memory-bytes, a higher --gpu-memory-utilization).", "Enlarge the pool (--max-t"),
        ("Start it with --kv-cache-memory-bytes 123. Or restart.", "Or restart."),
        ("vLLM: upgrade to a release that promotes ready requests (#53130).", ""),
    ],
)
def test_a_text_has_one_engines_names(text: str, told: str) -> None:
    assert sglang_text(text).startswith(told)
    assert bool(sglang_text(text)) == bool(told)


def test_no_line_of_sglang_is_answered_with_flags_of_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "engine.log"
    told = {}
    patterns = [pattern for pattern in PATTERNS if pattern.engine == "sglang"]
    assert len(patterns) > 20
    for pattern in patterns:
        log.write_text(f"{START}{pattern.sample}\n{pattern.sample}\n")
        main(["doctor", str(log), "--format", "json"])
        for found in json.loads(capsys.readouterr().out)["findings"]:
            texts = [*found["do_now"], *found["change"], *found["wont_help"], found["missing"]]
            if named := foreign(" ".join(texts)):
                told[pattern.sample, found["code"]] = named
            assert found["do_now"] or found["change"] or found["verdict"] == "cannot-tell", found
    assert told == {}
