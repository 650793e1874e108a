"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

Message = Mapping[str, object]
"""One message of a chat: at least `role` and `content`."""


class Tokenizer(Protocol):
    """What the front end asks of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """The prompt's token ids, with what the model wants at the beginning."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these ids, special tokens left out; bytes that are no UTF-8 (yet) become U+FFFD."""
        ...

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a chat, up to where the model's answer begins. Raises ValueError if the model cannot chat."""
        ...
