"""Read requests' bodies: parsed and tokenized in threads, so that no long prompt delays others.

A prompt that cannot fit the model whatever it holds is refused by its length before it is encoded, as in vLLM
(`renderers/params.py`): a megabyte of text takes a tokenizer seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple, TypeVar

from starlette.requests import Request

from kvscope.engine.models.tokens import Tokenizer
from kvscope.engine.requests.sampling_params import SamplingParams
from kvscope.engine.serving.openai_protocol import BadRequest, ChatMessage, GenerationRequest

READER_THREADS: Final = 2
"""Bodies that are parsed and tokenized at once, while the others wait."""
ReadT = TypeVar("ReadT")


class ReadRequest(NamedTuple):
    """A request, the token ids of its prompts, and how to sample."""

    asked: GenerationRequest
    prompts: list[list[int]]
    params: SamplingParams
    echoed: Sequence[str] = ()
    """The text of each prompt, if it is to be part of the answer."""


class PromptEncoder:
    """Encodes prompts for a model of `max_model_len` tokens. Raises BadRequest for those that are too long."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._max_characters = max_model_len * tokenizer.max_chars_per_token

    def text(self, text: str) -> list[int]:
        """Return the token ids of a prompt."""
        self._require_fits(len(text), "prompt")
        return self._tokenizer.encode(text)

    def chat(self, messages: list[ChatMessage]) -> list[int]:
        """Return the token ids of a chat up to where the answer begins. Raises ValueError if the model cannot chat."""
        self._require_fits(sum(len(message.text) for message in messages), "messages")
        return self._tokenizer.encode_chat([message.as_dict() for message in messages])

    def _require_fits(self, characters: int, param: str) -> None:
        if characters > self._max_characters:
            raise BadRequest(
                f"the prompt has {characters:,} characters, which are more than max_model_len tokens:"
                f" max_model_len is {self._max_model_len:,}, and a token has"
                f" {self._tokenizer.max_chars_per_token} characters at most",
                param,
            )


class RequestReader:
    """Reads bodies, and has them turned into requests in threads."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(READER_THREADS, "kvscope-request")

    async def read(self, request: Request, parse: Callable[[bytes], ReadT]) -> ReadT:
        """Return what `parse`, called in a thread, makes of the body."""
        body = await request.body()
        return await asyncio.get_running_loop().run_in_executor(self._threads, parse, body)
