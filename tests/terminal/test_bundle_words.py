"""A bundle holds no word of an engine's description that its owner may have chosen, and those that anybody has."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import msgspec
import pytest

from kvscope.lab.stepped_engine import Lab
from kvscope.lab.stepped_recordings import recording_of
from kvscope.monitor.contract.description import EngineDescription, KVGroup, parse_description
from kvscope.monitor.contract.wire import NO_REQUEST, Batch
from kvscope.monitor.sources.recording import Recording
from kvscope.monitor.terminal.cli import main

OWN_WORDS = {
    "kv_connector": "ZanzibarConnector",
    "scheduling_policy": "zanzibar-first",
    "device": "cuda of Zanzibar",
    "version": "0.32.0+zanzibar7",
    "engine": "zanzibar-vllm",
    "groups": [KVGroup(kind="ZanzibarSpec", layers=4)],
    "faults": ["leak.finished-held:path=/srv/zanzibar"],
    "other": {"zanzibar_slots": 12, "quantization": "zanzibar"},
}
PUBLIC_WORDS = {
    "kv_connector": "NixlConnector",
    "scheduling_policy": "priority",
    "device": "cuda",
    "version": "0.32.0",
    "engine": "vllm",
    "groups": [KVGroup(kind="FullAttentionSpec", layers=4)],
    "faults": ["leak.finished-held:after=3"],
}


def bundle_of(words: dict[str, object], folder: Path) -> Path:
    lab = Lab(total=60)
    for _ in range(8):
        lab.arrive(12, max_tokens=4)
        lab.step(seconds=0.3)
    lab.frames = [described(frame, words) for frame in lab.frames if isinstance(frame, Batch)]
    bundle = folder / "bundle.zip"
    assert main(["bundle", str(recording_of(lab, folder / "recording")), str(bundle)]) == 0
    return bundle


def described(batch: Batch, words: dict[str, object]) -> Batch:
    if NO_REQUEST not in batch.texts:
        return batch
    stated = msgspec.structs.replace(parse_description(batch.texts[NO_REQUEST]), **words)
    return msgspec.structs.replace(batch, texts={**batch.texts, NO_REQUEST: stated.to_json()})


def description_in(bundle: Path, folder: Path) -> EngineDescription:
    with zipfile.ZipFile(bundle) as opened:
        opened.extractall(folder / "opened")
    (segment,) = (folder / "opened").rglob("*.kvj")
    for frame in Recording(segment.parent).poll():
        if isinstance(frame, Batch) and NO_REQUEST in frame.texts:
            return parse_description(frame.texts[NO_REQUEST])
    raise AssertionError("the bundle has no description")


@pytest.mark.parametrize("field", OWN_WORDS)
def test_a_word_of_the_owner_is_not_in_it(field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = bundle_of({field: OWN_WORDS[field]}, tmp_path)
    assert "anzibar" not in capsys.readouterr().out
    with zipfile.ZipFile(bundle) as opened:
        assert [name for name in opened.namelist() if re.search(b"zanzibar", opened.read(name), re.IGNORECASE)] == []


def test_words_that_engines_define_are_kept(tmp_path: Path) -> None:
    reported = description_in(bundle_of(PUBLIC_WORDS, tmp_path), tmp_path)
    assert {name: getattr(reported, name) for name in PUBLIC_WORDS} == PUBLIC_WORDS
