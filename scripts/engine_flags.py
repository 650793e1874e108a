"""Lists the command-line flags of engines' servers, in tests/data/engine-flags.txt.

    python -m scripts.engine_flags vllm-0.32.0=FOLDER sglang-0.5.23=FOLDER

FOLDER is a release's package, unpacked from its wheel. Releases that are not given keep their lines. The flags are
those that its source adds to a parser by name, or makes of the fields of its classes of arguments.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from scripts.metric_families import read_releases, reread, written

LIST: Final = Path(__file__).parent.parent / "tests" / "data" / "engine-flags.txt"
ABOUT: Final = "# By `python -m scripts.engine_flags`: a flag, and the releases whose server has it."
PARSERS: Final = {
    "vllm": ("engine/arg_utils.py", "entrypoints/**/cli_args.py", "entrypoints/cli/serve.py"),
    "sglang": ("srt/server_args.py", "srt/arg_groups/fields/*.py"),
}
"""Where a package declares the arguments of its server."""


def flags(engine: str, folder: Path) -> Iterator[str]:
    """Yield the flags of the server in a release's package."""
    for pattern in PARSERS[engine]:
        for path in folder.glob(pattern):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    yield from _added(node) if node.func.attr == "add_argument" else ()
                elif isinstance(node, ast.ClassDef):
                    is_front_end = node.name.endswith("FrontendArgs")
                    fields = (one for one in node.body if isinstance(one, ast.AnnAssign))
                    yield from (flag for one in fields for flag in _of_field(one, is_front_end))


def _added(call: ast.Call) -> Iterator[str]:
    names = [_text(argument) for argument in call.args]
    yield from (name for name in names if name.startswith("--"))
    if any(
        keyword.arg == "action" and ast.unparse(keyword.value).endswith("BooleanOptionalAction")
        for keyword in call.keywords
    ):
        yield from (f"--no-{name[2:]}" for name in names if name.startswith("--"))


def _of_field(field: ast.AnnAssign, is_front_end: bool) -> Iterator[str]:
    """Yield the flags of a field: of any of vLLM's front end, and of SGLang's `A[TYPE, HELP or Arg(…)]`."""
    own = f"--{ast.unparse(field.target).replace('_', '-')}"
    if is_front_end:
        yield own
    annotation = field.annotation
    if not (
        isinstance(annotation, ast.Subscript)
        and _name(annotation.value) == "A"
        and isinstance(annotation.slice, ast.Tuple)
    ):
        return
    meta = annotation.slice.elts[1]
    options = {one.arg: one.value for one in meta.keywords} if isinstance(meta, ast.Call) else {}
    if isinstance(meta, ast.Call) and (_name(meta.func) != "Arg" or "no_cli" in options):
        return
    yield _text(options.get("cli_name")) or own
    aliases = options.get("aliases")
    yield from (_text(one) for one in aliases.elts) if isinstance(aliases, ast.List) else ()


def _text(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def main(arguments: list[str]) -> None:
    """Read the folders of the command line."""
    known = read_releases(LIST.read_text(encoding="utf-8"))
    read = reread(arguments, known, lambda release, folder: flags(release.partition("-")[0], folder), "flags")
    LIST.write_text(written(read, ABOUT), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
