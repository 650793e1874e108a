"""What may be mutated in a module: conditions, boundaries, clauses of boolean expressions, constants, thresholds."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

SWAPS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
TEXT_CALLS: Final = frozenset(("round", "Evidence", "counted", "percent", "duration", "listed", "Threshold", "HarmBar"))
"""Calls whose constants are digits and names that are shown, and no decision."""


class Mutant(NamedTuple):
    """One change of one node. `function`: the qualified name of the outermost function, or of a threshold. source: the
    line that it begins in. nth: which of the changes of its module. value: of a threshold.
    """

    module: str
    function: str
    kind: str
    line: int
    text: str
    source: str = ""
    nth: int = -1
    value: float | None = None


class _Site(NamedTuple):
    """A node of a function and what may stand in its place."""

    function: str
    kind: str
    node: ast.expr
    new: ast.expr


def mutants_of(path: Path, module: str) -> Iterator[Mutant]:
    """Yield the mutants of a module."""
    text = path.read_text()
    tree, lines = ast.parse(text), text.splitlines()
    for nth, site in enumerate(_sites(tree.body, "")):
        change = f"{ast.unparse(site.node)} -> {ast.unparse(site.new)}"
        source = lines[site.node.lineno - 1].strip()
        yield Mutant(module, site.function, site.kind, site.node.lineno, change, source, nth)
    for threshold in _thresholds(tree.body, "", module):
        yield threshold._replace(source=lines[threshold.line - 1].strip())


def mutated_tree(path: Path, nth: int) -> ast.Module:
    """Return the module's tree with the nth of its changes made."""
    tree = ast.parse(path.read_text())
    site = next(site for index, site in enumerate(_sites(tree.body, "")) if index == nth)
    _Replace(site.node, site.new).visit(tree)
    return ast.fix_missing_locations(tree)


def _sites(body: list[ast.stmt], prefix: str) -> Iterator[_Site]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _sites(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            for decision in _decisions(node):
                for kind, new in _changes(decision):
                    yield _Site(prefix + node.name, kind, decision, new)


def _thresholds(body: list[ast.stmt], prefix: str, module: str) -> Iterator[Mutant]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _thresholds(node.body, f"{prefix}{node.name}.", module)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            yield from _of_threshold(node, prefix, module)


def _of_threshold(node: ast.Assign | ast.AnnAssign, prefix: str, module: str) -> Iterator[Mutant]:
    """Double and halve what is `NAME = Threshold(number, …)`."""
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    call = node.value
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Threshold"):
        return
    if isinstance(target, ast.Name) and isinstance(call.args[0], ast.Constant):
        number = float(str(call.args[0].value))
        for value in (2 * number, number / 2):
            text = f"{target.id}: {number:g} -> {value:g}"
            yield Mutant(module, prefix + target.id, "threshold", node.lineno, text, value=value)


def _decisions(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the nodes of a function that decide something, without annotations, texts and docstrings."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "defaults", "kw_defaults"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id in TEXT_CALLS:
                continue
            if isinstance(child, ast.expr):
                yield child
            yield from _decisions(child)


def _changes(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        new = copy.deepcopy(node)
        new.ops = [SWAPS[type(node.ops[0])]()]
        yield "boundary" if isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE) else "condition", new
    elif isinstance(node, ast.BoolOp):
        for index in range(len(node.values)):
            rest = [value for at, value in enumerate(node.values) if at != index]
            yield "clause", rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "condition", node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "condition", ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield "constant", ast.Constant(node.value + 1 if abs(node.value) <= 1 else 2 * node.value)


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        """Return the new node in the old one's place."""
        if node is self.old:
            return ast.copy_location(self.new, node)
        return self.generic_visit(node)
