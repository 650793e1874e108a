"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer as FastTokenizer

from .checkpoint import read_json

TemplateMessage = Mapping[str, object]
"""One message of a chat: at least `role` and `content`."""
NO_EOS: Final = "<|no end|>"
"""Ends no output: for models that have nothing which does."""


class Tokenizer(Protocol):
    """The interface of a tokenizer to the front end."""

    max_chars_per_token: int
    """The most characters of a text that one token stands for."""

    def encode(self, text: str) -> list[int]:
        """Return the prompt's token ids, with the model's beginning tokens."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of these ids, without special tokens. Bytes that are no UTF-8 (yet) become U+FFFD."""
        ...

    def encode_chat(self, messages: Sequence[TemplateMessage]) -> list[int]:
        """Return the ids of a chat, up to where the model's answer begins. Raises ValueError if the model cannot
        chat.
        """
        ...

    def for_grammars(self, eos_token_ids: Collection[int]) -> LLTokenizer:
        """Return the tokens for grammars: their bytes, and which of them end an output.

        Takes long for a large vocabulary. Raises ValueError if the bytes of a token are unknown.
        """
        ...


class ByteTokenizer:
    """A token a byte, and after those: the prompt's beginning, the output's end, a message's beginning."""

    BEGIN, END, MESSAGE = 256, 257, 258
    VOCAB_SIZE = 259
    max_chars_per_token = 1

    def encode(self, text: str) -> list[int]:
        """Never empty: the prompt's beginning has a token of its own."""
        return [self.BEGIN, *text.encode()]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the bytes among these ids as text."""
        return bytes(token for token in token_ids if token < self.BEGIN).decode(errors="replace")

    def encode_chat(self, messages: Sequence[TemplateMessage]) -> list[int]:
        """`role: content` for each message, and the assistant's turn."""
        ids = [self.BEGIN]
        for message in messages:
            ids += [self.MESSAGE, *f"{message.get('role')}: {message.get('content')}".encode()]
        return [*ids, self.MESSAGE, *b"assistant: "]

    def for_grammars(self, eos_token_ids: Collection[int]) -> LLTokenizer:
        """Bytes are their own tokens."""
        return LLTokenizer(TokenizerWrapper(_Bytes()), eos_token=sorted(eos_token_ids))


class _Bytes:
    """The byte tokenizer as llguidance asks for it."""

    eos_token_id, bos_token_id = ByteTokenizer.END, ByteTokenizer.BEGIN
    special_token_ids = (ByteTokenizer.BEGIN, ByteTokenizer.END, ByteTokenizer.MESSAGE)
    tokens = (*(bytes([byte]) for byte in range(ByteTokenizer.BEGIN)), b"<begin>", b"<end>", b"<message>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


class DirectoryTokenizer:
    """The tokenizer of a Hugging Face directory: tokenizer.json, and the chat template if it has one.

    Raises ValueError if a file is missing or cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{directory} has no tokenizer.json: save the model's fast tokenizer beside its weights")
        try:
            self._tokenizer = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path} is not a tokenizer: {error}") from error
        self.max_chars_per_token = max(map(len, self._tokenizer.get_vocab()), default=1)
        config = directory / "tokenizer_config.json"
        self._config: dict[str, Any] = read_json(config) if config.is_file() else {}
        self._template = _chat_template(directory, self._config)
        self._name = directory.name

    def encode(self, text: str) -> list[int]:
        """As the tokenizer's own post-processing has it."""
        # The batch's method lets other threads run meanwhile; `encode` keeps the interpreter to itself.
        ids: list[int] = self._tokenizer.encode_batch([text])[0].ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def encode_chat(self, messages: Sequence[TemplateMessage]) -> list[int]:
        """By the model's chat template, which writes the special tokens itself."""
        if self._template is None:
            raise ValueError(f"the model {self._name} has no chat template: send a prompt to /v1/completions")
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        special = {name: _token_text(self._config.get(name)) for name in names}
        try:
            text = self._template.render(messages=list(messages), add_generation_prompt=True, **special)
        except TemplateError as error:
            raise ValueError(f"the chat template of {self._name} refuses these messages: {error}") from error
        ids: list[int] = self._tokenizer.encode_batch([text], add_special_tokens=False)[0].ids
        return ids

    def for_grammars(self, eos_token_ids: Collection[int]) -> LLTokenizer:
        """As llguidance reads its file."""
        copy = FastTokenizer.from_str(self._tokenizer.to_str())
        if not eos_token_ids:  # one beyond the model's own: else the first token would be taken for it
            copy.add_special_tokens([NO_EOS])
            eos_token_ids = [copy.get_vocab_size() - 1]
        try:
            return LLTokenizer(copy.to_str(), eos_token=sorted(eos_token_ids))
        except ValueError as error:
            raise ValueError(
                f"the tokenizer of {self._name} does not expose the bytes of its tokens: {error}"
            ) from error


def _chat_template(directory: Path, config: Mapping[str, Any]) -> Template | None:
    """chat_template.jinja, else the one of tokenizer_config.json: a text, or a list of which `default` counts."""
    path = directory / "chat_template.jinja"
    source = path.read_text() if path.is_file() else config.get("chat_template")
    if isinstance(source, list):
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    if source is None:
        return None
    # Templates come with the weights, from an unknown author: sandboxed. They are written for these settings.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ValueError(f"the chat template of {directory} is no Jinja template: {error}") from error


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _token_text(token: object) -> object:
    """Return a special token, which is written as its text, or as a map that has it."""
    return token.get("content", "") if isinstance(token, dict) else token or ""
