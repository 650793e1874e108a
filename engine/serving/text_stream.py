"""Assemble the text of a request from its tokens as they are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvscope.engine.models.tokens import Tokenizer
from kvscope.monitor.events.kinds import Status

OPENAI_FINISH_REASONS: Final = {
    Status.FINISHED_STOPPED: "stop",
    Status.FINISHED_LENGTH_CAPPED: "length",
    Status.FINISHED_ABORTED: "abort",
    Status.FINISHED_ERROR: "error",
}
"""Why a request ended, as clients know it."""
UNFINISHED_CHARACTER: Final = "\ufffd"


class TextStream:
    """The text of one request's tokens as they come, up to the first stop string, which is not part of it.

    What could still change is kept back: bytes that are not yet a character, and what may be a stop string's beginning.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = stop
        self._keep_back = max((len(string) - 1 for string in stop), default=0)
        # Text is known up to token `_read`; decoding begins at `_start` before it, since the text of a token may depend
        # on the one before.
        self._start = 0
        self._read = 0
        self._sent = 0

    def add(self, token_ids: Sequence[int], *, last: bool = False) -> str:
        """Take more tokens in; the text that is now certain. `last`: no more will come. Sets `stopped`."""
        self.token_ids += token_ids
        known = len(self.text)
        before = self._tokenizer.decode(self.token_ids[self._start : self._read])
        after = self._tokenizer.decode(self.token_ids[self._start :])
        if last or (len(after) > len(before) and not after.endswith(UNFINISHED_CHARACTER)):
            self.text += after[len(before) :]
            self._start, self._read = self._read, len(self.token_ids)
        found = [self.text.find(string, max(0, known - self._keep_back)) for string in self._stop]
        cut = min((place for place in found if place >= 0), default=-1)
        if cut >= 0:
            self.text, self.stopped = self.text[:cut], True
        end = len(self.text) if last or self.stopped else max(self._sent, len(self.text) - self._keep_back)
        new, self._sent = self.text[self._sent : end], end
        return new
