"""The texts that users read in the program itself: findings, help, metrics, JSON keys, labels and messages.

scripts/prose_check.py counts them like the docs. JSON keys and help come from the schemas and parsers that users get.
The others are the strings of the modules that write them.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import kvscope.engine.command_line
from kvscope.monitor import cli
from kvscope.monitor.doctor.memory_report import MemoryReport
from kvscope.monitor.json_names import schema_with_old_names
from kvscope.monitor.query import QUESTIONS
from scripts.prose_counts import ROOT, prose_blocks

PACKAGES: Final = ("monitor", "engine", "kernels", "dashboards")
METRIC_MODULES: Final = (
    "monitor/exporters/prometheus",
    "monitor/hub/hub_metrics.py",
    "engine/serving/engine_metrics.py",
)
SCHEMAS: Final = ("docs/bus.schema.json", "monitor/doctor/report.schema.json", "monitor/planning/plan.schema.json")
METRIC_NAME: Final = re.compile(r"[a-z0-9]+(?:_[a-z0-9]+){2,}")
MIN_MESSAGE_WORDS: Final = 6
"""Length of a string that counts as a message to people: shorter ones are labels, names and formats."""


def finding_texts() -> Iterator[str]:
    """Yield the texts of findings: explanations, alternatives, steps, and the reasons of thresholds."""
    for path in _modules("monitor/detectors"):
        yield from messages_of(path.read_text(encoding="utf-8"))


def help_texts() -> Iterator[str]:
    """Yield the help of every command and flag, of `monitor` and of `kvscope engine`."""
    for parser in (cli.parser(), kvscope.engine.command_line.engine_parser()):
        yield from _help_below(parser)


def metric_texts() -> Iterator[str]:
    """Yield the help and labels of all metrics."""
    for module in METRIC_MODULES:
        for path in _modules(module):
            strings = strings_of(path.read_text(encoding="utf-8"))
            yield from (words_of(each) for each in strings if not METRIC_NAME.fullmatch(each))


def label_texts() -> Iterator[str]:
    """Yield every string of the web app, the Grafana dashboards and the rules: titles, labels, notes and ids."""
    for path in _modules("dashboards"):
        yield from (words_of(each) for each in strings_of(path.read_text(encoding="utf-8")))


def json_keys() -> Iterator[str]:
    """Yield each key that JSON has and each name of evidence, with spaces for underscores. Deprecated ones are not."""
    _, components = schema_with_old_names([*(question.answer for question in QUESTIONS.values()), MemoryReport])
    schemas = [json.loads((ROOT / path).read_text(encoding="utf-8")) for path in SCHEMAS]
    names = {name for schema in (components, *schemas) for name in _properties(schema)}
    for path in _modules("monitor/detectors"):
        names.update(_evidence_names(ast.parse(path.read_text(encoding="utf-8"))))
    yield from (words_of(name) for name in sorted(names))


def other_messages() -> Iterator[str]:
    """Yield what the log, errors, reports and comments in schemas say: messages outside of the kinds above."""
    counted = [path for place in ("monitor/detectors", "dashboards", *METRIC_MODULES) for path in _modules(place)]
    for package in PACKAGES:
        for path in _modules(package):
            if path not in counted:
                yield from messages_of(path.read_text(encoding="utf-8"))


def comment_texts() -> Iterator[str]:
    """Yield the comments of the packages. Lines that follow each other are one."""
    for package in PACKAGES:
        for path in _modules(package):
            yield from comments_of(path.read_text(encoding="utf-8"))


def comments_of(source: str) -> Iterator[str]:
    """Yield the comments of one module, without the marks of tools (`noqa`, `type: ignore`)."""
    block: list[str] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if block and token.start[0] != last + 1:
            yield " ".join(block)
            block = []
        last = token.start[0]
        block.append(
            re.sub(r"^#[:!]?\s*|-{3,}\s*|(?:noqa|type: ignore|fmt: \w+|pragma)\S*(?: [A-Z]+\d+)*", "", token.string)
        )
    if block:
        yield " ".join(block)


def messages_of(source: str) -> Iterator[str]:
    """Yield the messages of one module, with `code` for what is filled in."""
    for text in strings_of(source):
        if len(re.findall(r"(?<![\w.])[a-z]+(?![\w.])", text)) >= MIN_MESSAGE_WORDS:
            yield from prose_blocks(text)


def strings_of(source: str) -> Iterator[str]:
    """Yield the strings of one module, with `code` for what is filled in. Docstrings, SQL and patterns are not."""
    tree = ast.parse(source)
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    documented = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "code" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside | documented:
            text = node.value
        else:
            continue
        if not re.search(r"\b(?:SELECT|UPDATE|CREATE TABLE|INSERT OR)\b|\(\?:|\\b|\\d", text):
            yield text


def words_of(name: str) -> str:
    """Return a name as words: underscores and dashes are spaces. Names of metrics are final, and are `code`."""
    return re.sub(r"[_-]+", " ", re.sub(r"\b(?:kvscope|vllm)[_:]\w+", "code", name))


def _modules(place: str) -> Sequence[Path]:
    path = ROOT / place
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def _help_below(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield from (each for each in (parser.description, parser.epilog) if each)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from (each.help for each in action._choices_actions if each.help)
            for child in action.choices.values():
                yield from _help_below(child)
        elif action.help and action.help != argparse.SUPPRESS:
            yield action.help.replace("%%", "%")


def _properties(schema: Any) -> Iterator[str]:
    """Yield the names of the properties in a JSON schema, without deprecated ones."""
    if isinstance(schema, list):
        yield from (name for each in schema for name in _properties(each))
    if isinstance(schema, dict):
        properties = schema.get("properties")
        for name, each in properties.items() if isinstance(properties, dict) else ():
            if not (isinstance(each, dict) and each.get("deprecated")):
                yield name
        yield from (name for each in schema.values() for name in _properties(each))


def _evidence_names(tree: ast.AST) -> Iterator[str]:
    """Yield the first argument of each `Evidence(…)` that is a plain string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Evidence" and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value
