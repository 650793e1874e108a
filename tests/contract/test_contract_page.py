"""docs/contract.md is true: its example is decoded, by kvscope and by the code on the page."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from kvscope.monitor.contract.kinds import Kind, Release
from kvscope.monitor.contract.wire import Batch, Keyframe, Run, decode, encode

PAGE = (Path(__file__).parent.parent.parent / "docs" / "contract.md").read_text()


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def example() -> bytes:
    (dump,) = code_blocks("hexdump")
    return bytes.fromhex("".join(re.split(r"\s{2,}", line)[0] for line in dump.splitlines()))


def test_the_example_is_a_frame() -> None:
    frame = decode(example())
    assert isinstance(frame, Batch)
    assert encode(frame) == example()
    assert f"A batch of {len(example())} bytes" in PAGE
    assert list(frame.events()) == [
        Run(Kind.CLOCK, 0, -1, [90_000_000_000], []),
        Run(Kind.ALLOCATED, 0, 7, [], [3, 4]),
        Run(Kind.RELEASED, 0, 5, [Release.FINISHED], [9]),
    ]


def test_each_line_of_the_dump_says_what_it_is() -> None:
    frame = decode(example())
    assert isinstance(frame, Batch)
    for field in ("epoch", "sequence", "wall_ns", "mono_ns", "free", "cached_idle", "used", "total"):
        assert f" {field} {getattr(frame, field)}\n" in PAGE


def test_the_code_on_the_page_reads_it() -> None:
    reader, result = code_blocks("python")
    scope: dict[str, object] = {"frame": example()}
    exec(reader, scope)
    assert scope["events"] == ast.literal_eval(result)


def test_the_tables_have_every_field_in_order() -> None:
    (batch_table,) = re.findall(r"array of 17:\n\n(.*?)\n\n", PAGE, re.DOTALL)
    rows = [line.split("|")[2].strip().split(", ") for line in batch_table.splitlines()[2:]]
    assert [name for row in rows for name in row] == list(Batch.__struct_fields__)
    (keyframe_says,) = re.findall(r"A \*\*keyframe\*\* is an array of (\d+): (.*?)\(binary", PAGE, re.DOTALL)
    assert int(keyframe_says[0]) == len(Keyframe.__struct_fields__)
    places = [keyframe_says[1].index(name) for name in Keyframe.__struct_fields__]
    assert places == sorted(places)
