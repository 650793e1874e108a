"""`monitor bundle`: it tells what went wrong, and not whose it was."""

from __future__ import annotations

import json
import re
import socket
import time
import zipfile
from pathlib import Path

import msgspec
import pytest

from kvscope.lab.stepped_engine import Lab
from kvscope.lab.stepped_recordings import recording_of
from kvscope.monitor.contract.description import parse_description
from kvscope.monitor.contract.kinds import Kind
from kvscope.monitor.contract.trace_context import TraceContext
from kvscope.monitor.contract.wire import NO_REQUEST, Batch
from kvscope.monitor.probes.publisher import Publisher
from kvscope.monitor.sources.recording import Recording
from kvscope.monitor.terminal.cli import main
from tests.terminal.test_doctor import doctor_json

HOST, MODEL = "gpu-box-17.example.internal", "/srv/models/secret-finetune"
ENGINE = f"{MODEL}@{HOST}:8000/0"
TRACE = TraceContext(0x1122334455667788, 0x1234567812345678, 0x0FEDCBA987654321, 1)
SECRETS = (HOST, MODEL, "secret-finetune", "customer-", "s3cret-path", str(TRACE[0]), f"{TRACE[0]:x}")


def leaking_lab(**lab: object) -> Lab:
    """A connector keeps what finished requests had; one that runs on was preempted nowhere and is traced."""
    made = Lab(total=101, block_size=16, connector_share=1.0, seed=1, engine=ENGINE, **lab)  # type: ignore[arg-type]
    assert made.connector is not None
    made.connector.polls_needed = 1_000_000_000
    for n in range(4):
        request = made.arrive(60, max_tokens=4, name=f"customer-{n}")
        made.log.traced(request.number, TRACE)
    made.arrive(30, max_tokens=10_000, name="customer-alive")
    return made


def private(batch: Batch) -> Batch:
    """As of an engine that says more of itself than a lab."""
    if NO_REQUEST not in batch.texts:
        return batch
    stated = msgspec.structs.replace(
        parse_description(batch.texts[NO_REQUEST]),
        model=MODEL,
        served_model_name=MODEL,
        pid=4711,
        max_num_seqs=8,
        device=f"cuda on {socket.gethostname()} of {HOST}",
        other={"cache_dir": "/home/s3cret-path", "layers": 12},
    )
    return msgspec.structs.replace(batch, texts={**batch.texts, NO_REQUEST: stated.to_json()})


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lab = leaking_lab()
    for _ in range(170):
        lab.step(seconds=1.0)
        lab.heartbeat()
    lab.frames = [private(frame) for frame in lab.frames if isinstance(frame, Batch)]
    return recording_of(lab, tmp_path_factory.mktemp("recording"))


def contents(bundle: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(bundle) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def secrets_in(bundle: Path) -> list[tuple[str, str]]:
    return [
        (name, secret)
        for name, content in contents(bundle).items()
        for secret in secrets_of(name.encode() + b"\n" + content)
    ]


def secrets_of(content: bytes) -> list[str]:
    """What no file may name. A host's name may have two letters, which numbers hold by chance: it counts as a word of a
    text.
    """
    host = re.compile(rb"(?<!\w)" + re.escape(socket.gethostname().encode()) + rb"(?!\w)")
    found = [secret for secret in SECRETS if secret.encode() in content]
    return found + [socket.gethostname()] * any(map(host.search, re.findall(rb"[ -~]{6,}", content)))


@pytest.mark.parametrize("since", [(), ("--since", "12s")])
def test_nobody_is_named_and_the_same_is_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, recording: Path, since: tuple[str, ...]
) -> None:
    """With a window it begins with a keyframe, in which requests have their names too."""
    bundle = tmp_path / "bundle.zip"
    assert main(["bundle", str(recording), str(bundle), *since]) == 0
    assert "leak.finished-held" in capsys.readouterr().out
    assert set(secrets_of(b"".join(each.read_bytes() for each in recording.iterdir()))) >= {HOST, socket.gethostname()}
    assert secrets_in(bundle) == []
    assert {"README.txt", "report.txt", "report.json", "configuration.json", "versions.json"} < contents(bundle).keys()

    code, printed = doctor_json(capsys, recording)
    again_code, again = doctor_json(capsys, bundle)
    assert again_code == code == 1
    assert again["targets"][0]["kind"] == "bundle"
    assert len(again["findings"]) == len(printed["findings"]) > 0
    for was, now in zip(printed["findings"], again["findings"], strict=True):
        for field in ("code", "verdict", "severity", "since", "do_now", "change"):
            assert now[field] == was[field]
        assert now["culprits"]["blocks"] == was["culprits"]["blocks"]
        assert len(now["culprits"]["requests"]) == len(was["culprits"]["requests"])
        assert [item["value"] for item in now["evidence"]] == [item["value"] for item in was["evidence"]]
    pool = ("total", "free", "cached_idle", "running", "waiting", "finished", "unaccounted")
    assert [again["balances"][0][part] for part in pool] == [printed["balances"][0][part] for part in pool]
    assert again["balances"][0]["configuration"]["max_num_seqs"] == 8
    assert again["balances"][0]["configuration"].get("pid") is None

    # One name is one word wherever it stands.
    reported = json.loads(contents(bundle)["report.json"])
    culprits = next(f for f in reported["findings"] if f["code"] == "leak.finished-held")["culprits"]["requests"]
    assert culprits == next(f for f in again["findings"] if f["code"] == "leak.finished-held")["culprits"]["requests"]
    main(["explain", "request", culprits[0], str(bundle)])
    assert culprits[0] in capsys.readouterr().out


def test_another_bundle_has_other_words_and_ids_can_be_kept(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, recording: Path
) -> None:
    names = []
    for number, flags in enumerate(([], [], ["--keep-ids"])):
        bundle = tmp_path / f"{number}.zip"
        assert main(["bundle", str(recording), str(bundle), *flags]) == 0
        capsys.readouterr()
        _, printed = doctor_json(capsys, bundle)
        names.append((printed["balances"][0]["engine"], printed["findings"][0]["culprits"]["requests"][0]))
    capsys.readouterr()
    assert len({engine for engine, _ in names}) == len({request for _, request in names}) == 3
    assert names[2][1] == "customer-0"
    assert {secret for _, secret in secrets_in(tmp_path / "2.zip")} == {"customer-"}
    assert main(["bundle", str(recording), str(bundle)]) == 2
    assert "new file" in capsys.readouterr().err
    assert main(["bundle", str(recording), str(tmp_path / "nowhere" / "bundle.zip")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_of_a_stream(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lab = leaking_lab(clock=time, pack=False)
    publisher = Publisher(
        lab.log,
        ENGINE,
        lab.vitals,
        events=f"ipc://{tmp_path}/e",
        replay=f"ipc://{tmp_path}/e-replay",
        heartbeat_s=0.1,
    )
    publisher.start()
    try:
        for _ in range(20):
            lab.step()
        bundle = tmp_path / "bundle.zip"
        grace = ("--set", "leak.finished-held.grace_s=0.1")
        assert main(["bundle", publisher.events_endpoint, str(bundle), "--for", "0.8", *grace]) == 0
        assert main(["bundle", publisher.events_endpoint, str(tmp_path / "other"), "--since", "1m"]) == 2
    finally:
        publisher.close()
    capsys.readouterr()
    assert secrets_in(bundle) == []
    _, printed = doctor_json(capsys, bundle, *grace)
    assert "leak.finished-held" in [finding["code"] for finding in printed["findings"]]


def test_every_event_stays_in_its_place(tmp_path: Path, recording: Path) -> None:
    bundle = tmp_path / "bundle.zip"
    main(["bundle", str(recording), str(bundle)])
    with zipfile.ZipFile(bundle) as opened:
        opened.extractall(tmp_path)
    was, now = (list(Recording(path)) for path in (recording, tmp_path / "events"))
    assert len(was) == len(now)
    for before, after in zip(was, now, strict=True):
        assert isinstance(before, Batch)
        assert isinstance(after, Batch)
        assert (before.sequence, before.wall_ns, bytes(before.runs)) == (
            after.sequence,
            after.wall_ns,
            bytes(after.runs),
        )
        for one, other in zip(before.events(), after.events(), strict=True):
            assert one == other or (one.kind == other.kind == Kind.TRACED and not any(other.args))


@pytest.mark.parametrize("content", [b"PK\x03\x04 cut short", None])
def test_a_zip_that_is_no_bundle(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "other.zip"
    if content is None:
        with zipfile.ZipFile(path, "w") as made:
            made.writestr("events.txt", "none")
    else:
        path.write_bytes(content)
    code, printed = doctor_json(capsys, path)
    assert code == (2 if content else 3)  # any other zip is read as collected logs
    assert ("zip" if content else "no line has") in printed["targets"][0]["error"]
    assert main(["bundle", "tests/data/seed-000.log", str(tmp_path / "b.zip")]) == 2
    assert "a file of every event needs the event stream" in capsys.readouterr().err
