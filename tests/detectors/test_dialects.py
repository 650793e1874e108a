"""Advice names the flags and metrics of the engine that it is given to."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from kvscope.monitor import detectors
from kvscope.monitor.detectors.advice import MORE_ROOM, WHOLE_PROMPTS
from kvscope.monitor.detectors.dialects import IN_SGLANG, in_sglang, sglang_text
from kvscope.monitor.detectors.judgement import Judgement
from kvscope.monitor.detectors.runbook_files import ADVICE, runbook_codes, runbook_text
from kvscope.monitor.sources.log_patterns import PATTERNS
from kvscope.monitor.terminal.cli import main
from scripts.engine_flags import LIST as ENGINE_FLAGS
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
        "--kv-cache-memory",
        "--watch",
        "--weights",
        "--query-compute-apps",
    ]
)
"""Flags of `monitor`, nvidia-smi and the like."""
FLAGS = read_releases(ENGINE_FLAGS.read_text(encoding="utf-8"))
SGLANG, VLLM = FLAGS["sglang-0.5.23"], FLAGS["vllm-0.32.0"]
OTHERS = frozenset(
    [
        *("--nats-share", "--archive", "--alert-engines-only"),  # monitor serve
        *("--kv-connector", "--kv-lease-seconds"),  # kvscope's own engine
        *("--max-concurrency", "--num-prompts", "--input-len", "--output-len"),  # vllm bench serve
        "--swap-space",  # vLLM before V1
    ]
)
"""Flags of programs and releases that are in neither list, and that no user of SGLang is told."""
STREAM = re.compile(r"event streams?\b|tcp://HOST:5757|\bmonitor record\b|[Aa]ttach the probe|\b(?:a|its) probe\b")
"""kvscope has no probe for SGLang."""
DETECTORS = Path(detectors.__file__).parent
START = (
    "[2026-05-24 03:50:10 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 24512, K size: 1.50 GB, V size:"
    " 1.50 GB\n"
)


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))


def foreign(text: str) -> list[str]:
    """The flags, metrics, names and sources in a text that SGLang's users do not have."""
    names = {*re.findall(r"\bvLLM\b|\bVLLM_\w+|\bvllm:\w+", text), *STREAM.findall(text)}
    return sorted((flags_in(text) - SGLANG - OURS) | names)


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


def told_texts() -> list[str]:
    """The texts in the detectors' code that name a flag or a source, without docstrings and the table of names."""
    found = []
    for path in sorted(DETECTORS.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        bodies = [node.body for node in ast.walk(tree) if isinstance(node, documented)]
        documents = {id(line.value) for body in bodies for line in body if isinstance(line, ast.Expr)}
        texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
        if path.name != "dialects.py":
            found += [str(node.value) for node in texts if id(node) not in documents]
    return [text for text in found if flags_in(text) or STREAM.search(text)]


def is_of_vllm(flag: str) -> bool:
    """Each of its switches has a negative."""
    return flag in VLLM or flag.replace("--no-", "--", 1) in VLLM


def test_each_flag_of_a_text_is_one_of_an_engine() -> None:
    texts = {code: runbook_text(code) or "" for code in runbook_codes()} | {text: text for text in told_texts()}
    named = {name: flags_in(text) - SGLANG - OURS - OTHERS for name, text in texts.items()}
    assert len([flag for flags in named.values() for flag in flags]) > 20
    unknown = {name: {flag for flag in flags if not is_of_vllm(flag)} for name, flags in named.items()}
    assert {name: flags for name, flags in unknown.items() if flags} == {}


def test_no_text_names_in_sglang_what_sglang_lacks() -> None:
    texts = told_texts()
    assert len(texts) > 50
    told = {}
    for text in texts:
        said = in_sglang(Judgement("harm.no-progress", "engine", "likely", "", do_now=(text,), missing=text))
        if named := foreign(" ".join([*said.do_now, said.missing])):
            told[text] = named
    assert told == {}


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
