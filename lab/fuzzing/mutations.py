"""Damage to real input: to its bytes, and, where a checksum or a packer would hide that, to what is inside."""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from kvscope.monitor.contract.journal import HEADER, RECORD
from kvscope.monitor.contract.wire import PREFIX

INPUT_BYTES: Final = 256 << 10
LARGE_BYTES: Final = 2 << 20
TOKENS: Final = (
    b"Avg prompt throughput: ",
    b" tokens/s",
    b"Running: ",
    b" reqs, Waiting: ",
    b"KV cache usage: ",
    b"Engine 000: ",
    b" Engines Aggregated: ",
    b"non-default args: {'",
    b"': '",
    b"GiB",
    b"0 GiB",
    b"Maximum concurrency for ",
    b'{"message": "',
    b'{"log": ',
    b"12-31 23:59:59 ",
    b"0000-00-00T99:99:99+99:99 ",
    b"vllm serve ",
    b"vllm bench serve ",
    b" cache ",
    b"--max-concurrency ",
    b"--input-len ",
    b"--output-len ",
    b"100%",
    b"9" * 5000,
    b"1e999",
    b"1e308",
    b"1e-300",
    b"-1",
    b"0",
    b"1.2.3",
    b"nan",
    b"\n",
    b"\r",
    b"\\\n",
    b"\x00",
    b"\x00" * 4096,
    b"\xff\xfe",
    b"{" * 5000,
    b"[" * 5000,
    b"\xe2\x96\x88" * 5000,
    b"\x1b[2J\x9b",
    b"\x93\x92\xcf",
    b"\xdf\xff\xff\xff\xff",
    b"\x91" * 2000,
    b"vllm:",
    b'{engine="',
    b"} ",
)
NUMBERS: Final = (0, 1, -1, 7, 1 << 31, -(1 << 31), (1 << 31) - 1, 1 << 53, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1)
VALUES: Final[tuple[Any, ...]] = (
    *NUMBERS,
    float("nan"),
    float("inf"),
    1e300,
    "",
    "x",
    b"",
    None,
    [],
    {},
    True,
    [[[[[[[[]]]]]]]],
    {1: "x" * 5_000, -1: "{" * 5_000},
)
Mutation = Callable[[random.Random], bytes]


def damaged_bytes(inputs: Sequence[bytes], rng: random.Random, limit: int = INPUT_BYTES) -> bytes:
    """Take one of the inputs; change bytes, cut a part out, double it, take it from another, insert a token."""
    data = bytearray(rng.choice(inputs))
    for _ in range(rng.choice((0, 1, 1, 2, 4, 16))):
        start, length = rng.randrange(len(data) + 1), round(rng.paretovariate(0.7))
        match rng.randrange(7):
            case 0:
                for _ in range(min(length, 50)):
                    if data:
                        data[rng.randrange(len(data))] = rng.randrange(256)
            case 1:
                del data[start : start + length]
            case 2:
                data[start:start] = data[start : start + min(length, limit)]
            case 3:
                other = rng.choice(inputs)
                at = rng.randrange(len(other) + 1)
                data[start : start + length] = other[at : at + length]
            case 4:
                data[start:start] = rng.choice(TOKENS)
            case 5:
                if data:
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case _:
                del data[start:]
        del data[limit:]
    return bytes(data)


def damaged_frame(frames: Sequence[bytes], rng: random.Random) -> bytes:
    """Damage the bytes of a frame, or change fields of it and pack it again."""
    if rng.random() < 0.3:
        return damaged_bytes(frames, rng)
    frame = rng.choice(frames)
    try:
        body = msgspec.msgpack.decode(frame[PREFIX:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return damaged_bytes([frame], rng)
    for _ in range(rng.choice((1, 1, 2, 3))):
        body = _with_a_change(body, rng)
    return frame[:PREFIX] + msgspec.msgpack.encode(body)


def _with_a_change(value: Any, rng: random.Random) -> Any:
    """Change the value, or one within it."""
    match value:
        case list() if value and rng.random() < 0.95:
            at = rng.randrange(len(value))
            match rng.randrange(12):
                case 0:
                    return value[:at] + value[at + 1 :]
                case 1:
                    return [*value[:at], value[at], *value[at:]]
                case _:
                    return [*value[:at], _with_a_change(value[at], rng), *value[at + 1 :]]
        case dict() if value and rng.random() < 0.95:
            key = rng.choice(list(value))
            return {**value, key: _with_a_change(value[key], rng)}
        case bytes() if value and rng.random() < 0.9:
            return _with_a_changed_number(value, rng)
        case int() if rng.random() < 0.5 and not isinstance(value, bool):
            near = value + rng.choice((-1, 1, 2, -100, 1000, 1 << 20))
            return near if -(1 << 63) <= near < 1 << 64 else 0
        case str() if rng.random() < 0.5:
            return damaged_bytes([value.encode()], rng, 1 << 16).decode(errors="replace")
        case _:
            return rng.choice(VALUES)


def _with_a_changed_number(column: bytes, rng: random.Random) -> bytes:
    """Change a number in a column of 4 or 8 bytes each, or its length."""
    form = rng.choice(("<i", "<q"))
    size = struct.calcsize(form)
    if len(column) < size or rng.random() < 0.1:
        return damaged_bytes([column], rng)
    at = rng.randrange(len(column) // size) * size
    low, high = -(1 << (8 * size - 1)), (1 << (8 * size - 1)) - 1
    old = struct.unpack_from(form, column, at)[0]
    new = rng.choice((*NUMBERS, old + 1, old - 1, rng.randrange(64), rng.randrange(1 << 20)))
    return column[:at] + struct.pack(form, min(max(new, low), high)) + column[at + size :]


def records_in(segment: bytes) -> list[bytes]:
    """Return the payloads of a journal's segment."""
    payloads = []
    at = len(HEADER)
    while at + RECORD.size <= len(segment):
        length, _ = RECORD.unpack_from(segment, at)
        payloads.append(segment[at + RECORD.size : at + RECORD.size + length])
        at += RECORD.size + length
    return payloads


def segment_of(payloads: Sequence[bytes]) -> bytes:
    """Return payloads as a journal's segment, with checksums that fit."""
    records = (RECORD.pack(len(payload), zlib.crc32(payload)) + payload for payload in payloads)
    return HEADER + b"".join(records)


def damaged_segment(segments: Sequence[bytes], rng: random.Random, limit: int = INPUT_BYTES) -> bytes:
    """Damage the bytes of a segment, or swap, double, drop and change records of it, with checksums that fit."""
    if rng.random() < 0.3:
        return damaged_bytes(segments, rng, limit)
    payloads = records_in(rng.choice(segments))
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(payloads)) if payloads else 0
        match rng.randrange(6) if payloads else 0:
            case 0:
                payloads.insert(at, rng.choice((b"", b"\x00" * 64, rng.randbytes(40))))
            case 1:
                other = rng.randrange(len(payloads))
                payloads[at], payloads[other] = payloads[other], payloads[at]
            case 2:
                payloads.insert(at, payloads[at])
            case 3:
                del payloads[at]
            case _:
                payloads[at] = damaged_frame([payloads[at]], rng)
    segment = segment_of(payloads)[:limit]
    return segment + rng.choice((b"", b"", b"\x00" * 4096, rng.randbytes(100)))


def damaged_archive(archives: Sequence[bytes], rng: random.Random, limit: int = INPUT_BYTES) -> bytes:
    """Damage the bytes of a zip, or its members' contents, names and packing, with checksums that fit."""
    if rng.random() < 0.5:
        return damaged_bytes(archives, rng, limit)
    out = io.BytesIO()
    method = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA))
    with zipfile.ZipFile(io.BytesIO(rng.choice(archives))) as source, zipfile.ZipFile(out, "w", method) as made:
        for member in source.infolist():
            name, content = member.filename, source.read(member)
            if rng.random() < 0.1:
                name = damaged_bytes([name.encode()], rng, 200).decode(errors="replace").replace("\x00", "") or "x"
            if content.startswith(HEADER) and rng.random() < 0.8:
                content = damaged_segment([content], rng, 4 * limit)
            elif rng.random() < 0.2:
                content = damaged_bytes([content], rng, limit)
            if name not in made.namelist():
                made.writestr(name, content)
    return damaged_bytes([out.getvalue()], rng, limit) if rng.random() < 0.2 else out.getvalue()
