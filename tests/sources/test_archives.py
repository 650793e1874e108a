"""Bombs, damage and foreign methods in bundles, zips and gzips end at a bound, in a sentence, and never in exit 1."""

from __future__ import annotations

import gzip
import io
import random
import resource
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvscope.lab.stepped_recordings import healthy_lab, recording_of
from kvscope.monitor.base import limits
from kvscope.monitor.contract.journal import RECORD
from kvscope.monitor.sources.log_file import lines_of, read_log
from kvscope.monitor.sources.targets import file_input, zip_inputs
from kvscope.monitor.terminal.cli import main
from kvscope.monitor.terminal.report import CANNOT_TELL, USAGE

MIB = 1 << 20
SEGMENT = "events/00000000000000000001-000000000000000.kvj"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("bundle")
    assert main(["bundle", str(recording_of(healthy_lab(), folder / "run")), str(folder / "it.zip")]) == 0
    return (folder / "it.zip").read_bytes()


def exit_code(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    code = main(["doctor", str(path), "--format", "short"])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out + err


def test_a_damaged_bundle_is_never_findings(bundle: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1 means findings to CI. A healthy engine has none."""
    rng = random.Random(1)
    path = tmp_path / "damaged.zip"
    refused = 0
    for _ in range(60):
        data = bytearray(bundle)
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        code, stated = exit_code(path, capsys)
        assert code in (0, USAGE, CANNOT_TELL), stated
        refused += code == USAGE
    assert refused > 10


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
@pytest.mark.parametrize("damaged", [False, True])
def test_only_stored_and_deflated_members_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: int, damaged: bool
) -> None:
    path = tmp_path / "it.zip"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr(SEGMENT, b"KVSCOPE\x01" + b"x" * 5000)
    data = bytearray(path.read_bytes())
    if damaged:
        data[90:100] = b"\xff" * 10
    path.write_bytes(data)
    code, stated = exit_code(path, capsys)
    assert code == USAGE
    assert "neither stored nor deflated" in stated or damaged


def test_a_zip_bomb_ends_at_a_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open(SEGMENT, "w") as member:
        for _ in range(500):
            member.write(bytes(MIB))
    assert path.stat().st_size < 3 * MIB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code, stated = exit_code(path, capsys)
    assert code == USAGE
    assert "100 times" in stated
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


@pytest.mark.parametrize("folder", ["events/", "logs/"])
def test_a_zip_of_many_members_is_opened_a_few_times(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To open one is to read all its names: once for each member, the time grows with the square of their number."""
    opened = []

    class Counted(zipfile.ZipFile):
        def __init__(self, *given: Any, **named: Any) -> None:
            opened.append(given)
            super().__init__(*given, **named)

    path = tmp_path / "many.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(150):
            name = f"{number:020d}-{0:015d}.kvj" if folder == "events/" else f"{number}.log"
            archive.writestr(folder + name, b"" if folder == "events/" else b"INFO a line\n")
    monkeypatch.setattr(zipfile, "ZipFile", Counted)
    assert exit_code(path, capsys)[0] == 3
    assert len(opened) < 10


def test_a_bundle_of_too_many_segments_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "many.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(limits.BUNDLE_SEGMENTS + 1):
            archive.writestr(f"events/{number:020d}-{0:015d}.kvj", b"")
    code, told = exit_code(path, capsys)
    assert (code, "1,001 segments" in told, "1,000 at most" in told) == (2, True, True)


def lines(count: int) -> Iterator[bytes]:
    rng = random.Random(2)
    for n in range(count):
        yield f"INFO 11-20 12:{n // 60 % 60:02}:{n % 60:02} [x.py:{rng.randrange(999)}] req {rng.random()}\n".encode()


@pytest.mark.parametrize("form", ["gzip", "zip"])
def test_a_packed_log_is_read_up_to_its_bound_and_says_so(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"bomb.{form}"
    content = (b"\n" + b"x" * (MIB - 1)) * 60
    if form == "gzip":
        path.write_bytes(gzip.compress(content))
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("vllm.log", content)
    (text,) = [file_input(path)] if form == "gzip" else zip_inputs(path)
    notes: list[str] = []
    read = sum(map(len, lines_of(text, notes)))
    assert 30 * MIB < read < 40 * MIB
    assert "30 times its packed size" in notes[0]


def test_what_packs_well_and_is_no_bomb_is_read_whole(tmp_path: Path) -> None:
    text = b"".join(lines(20_000))
    path = tmp_path / "vllm.log.gz"
    path.write_bytes(gzip.compress(text, 9))
    log, _ = read_log(path)
    assert not any("packed" in note for note in log.notes)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("a.log", text)
    (tmp_path / "a.zip").write_bytes(archive.getvalue())
    assert main(["doctor", str(tmp_path / "a.zip"), "--format", "short"]) in (0, CANNOT_TELL)


@pytest.mark.parametrize("content", [b"no journal at all", b"PK"])
def test_a_bundle_that_holds_no_journal_is_named_by_its_own_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    for member in (SEGMENT, "events/renamed.kvj"):
        path = tmp_path / "it.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(member, content)
        code, stated = exit_code(path, capsys)
        assert code == USAGE
        assert str(path) in stated
        assert "/tmp/kvscope-bundle" not in stated


def test_a_damaged_member_is_noted_and_the_others_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "logs.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("bad.log", b"x" * 4000)
        archive.writestr("good.log", b"".join(lines(50)))
    data = bytearray(path.read_bytes())
    data[40:60] = b"\xff" * 20  # the checksum of bad.log fits no longer
    path.write_bytes(data)
    from kvscope.monitor.sources.source import SourceOptions
    from kvscope.monitor.sources.source_registry import open_source

    with closing(open_source(str(path), SourceOptions())) as source:
        source.poll()
        notes = " ".join(source.status().notes)
    assert "bad.log: cannot be read" in notes
    assert "good.log" in notes
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("bad.log", b"x" * 4000)
    data = bytearray(path.read_bytes())
    data[40:60] = b"\xff" * 20
    path.write_bytes(data)
    code, stated = exit_code(path, capsys)
    assert code == USAGE
    assert f"{path}: bad.log: cannot be read" in " ".join(stated.split())


@pytest.mark.parametrize("packed", [False, True])
def test_a_record_of_a_newer_version_is_named_by_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], packed: bool
) -> None:
    (segment,) = recording_of(healthy_lab(), tmp_path / "run").iterdir()
    payload = b"KV\x09\x00B\x90"
    with segment.open("ab") as file:
        file.write(RECORD.pack(len(payload), zlib.crc32(payload)) + payload)
    path = segment.parent
    if packed:
        path = tmp_path / "it.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.write(segment, f"events/{segment.name}")
    code, stated = exit_code(path, capsys)
    assert code == CANNOT_TELL
    assert str(path if packed else segment) in stated.replace("\n", "")
    assert "version 9.0" in stated


def test_reports_of_a_bundle_without_its_events_are_no_log_and_logs_of_such_names_are(
    bundle: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "renamed.zip"
    path.write_bytes(bundle.replace(b"events/", b"evemts/"))
    code, stated = exit_code(path, capsys)
    assert (code, "without events" in stated) == (USAGE, True)
    logs = tmp_path / "logs.zip"
    with zipfile.ZipFile(logs, "w") as archive:
        archive.writestr("report.txt", "INFO Running: 0 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.0%\n")
        archive.writestr("README.txt", "logs of Tuesday\n")
    code, stated = exit_code(logs, capsys)
    assert "without events" not in stated
