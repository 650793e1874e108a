"""A long prompt delays nobody: it is tokenized beside the event loop, which goes on answering."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.engine import checkpoints
from tests.engine.process import PATIENCE_S, EngineProcess

MAX_MODEL_LEN = 4_000_000


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    directory = tmp_path_factory.mktemp("long")
    checkpoints.save("llama", directory)
    checkpoints.edit(directory, max_position_embeddings=MAX_MODEL_LEN)
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel()
    words.train_from_iterator(["a few words"], trainers.BpeTrainer(vocab_size=64))
    words.save(str(directory / "tokenizer.json"))
    with EngineProcess("--model", str(directory), "--num-gpu-blocks-override", "65") as engine:
        yield engine


@pytest.mark.slow
@pytest.mark.parametrize("path", ["v1/completions", "v1/chat/completions", "tokenize"])
def test_health_is_answered_while_a_long_prompt_is_tokenized(engine: EngineProcess, path: str) -> None:
    text = "few words " * 60_000
    body: dict[str, Any] = {"prompt": text}
    if "chat" in path:
        body = {"messages": [{"role": "user", "content": text}]}
    answers: list[httpx2.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(httpx2.post(f"{engine.url}/{path}", json=body, timeout=PATIENCE_S))
    )
    with httpx2.Client(timeout=PATIENCE_S) as other:
        other.get(f"{engine.url}/health")
        asking.start()
        healthy = 0
        while not answers:
            healthy += other.get(f"{engine.url}/health").status_code == 200
        asking.join()
    assert healthy > 2  # one at the beginning and one at the end are answered by an event loop that is busy between
    assert answers[0].status_code == (200 if path == "tokenize" else 400)
