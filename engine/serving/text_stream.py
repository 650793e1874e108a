"""Assemble the text of a request from its tokens as they are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvscope.monitor.contract.kinds import Status

from ..models.tokens import Tokenizer
from ..requests.request import SamplingParams

OPENAI_FINISH_REASONS: Final = {
    Status.FINISHED_STOPPED: "stop",
    Status.FINISHED_LENGTH_CAPPED: "length",
    Status.FINISHED_ABORTED: "abort",
    Status.FINISHED_ERROR: "error",
}
"""Why a request ended, as clients know it."""
UNFINISHED_CHARACTER: Final = "\ufffd"
DEFAULT_PARAMS: Final = SamplingParams()


class TextStream:
    """The text of one request's tokens as they come, up to what ends it by `params`.

    A stop string is not part of it unless include_stop_str_in_output, and counts only beyond min_tokens. Among several,
    the one that is complete first ends the text, as in vLLM. Text that could still change is kept back: bytes that are
    not yet a character, and a possible beginning of a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams = DEFAULT_PARAMS) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.stopped = False
        self.stop_reason: str | int | None = None
        """The stop string or the stop token that ended it."""
        self._tokenizer = tokenizer
        self._params = params
        self._keep_back = max((len(string) - 1 for string in params.stop), default=0)
        # Text is known up to token `_read`; decoding begins at `_start` before it, since the text of a token may depend
        # on the one before.
        self._start = 0
        self._read = 0
        self._sent = 0

    def add(self, token_ids: Sequence[int], status: Status | None = None) -> str:
        """Take more tokens in. Return the text that is now certain. `status`: how the engine ended it. Sets
        `stopped`.
        """
        last, params = status is not None, self._params
        known, counted = len(self.text), len(self.token_ids)
        self.token_ids += token_ids
        tokens = self.token_ids
        if status == Status.FINISHED_STOPPED and token_ids and token_ids[-1] in params.stop_token_ids:
            self.stop_reason = token_ids[-1]
            tokens = tokens if params.include_stop_str_in_output else tokens[:-1]
        before = self._tokenizer.decode(tokens[self._start : self._read])
        after = self._tokenizer.decode(tokens[self._start :])
        if last or (len(after) > len(before) and not after.endswith(UNFINISHED_CHARACTER)):
            self.text += after[len(before) :]
            self._start, self._read = self._read, len(tokens)
        if len(self.token_ids) > params.min_tokens:
            self._look_for_stop(known if counted < params.min_tokens else max(0, known - self._keep_back))
        end = len(self.text) if last or self.stopped else max(self._sent, len(self.text) - self._keep_back)
        new, self._sent = self.text[self._sent : end], end
        return new

    def _look_for_stop(self, begin: int) -> None:
        """End the text at the stop string that is complete first, if there is one from `begin` on."""
        found = [(self.text.find(string, begin), string) for string in self._params.stop]
        ends = [(place + len(string), place, string) for place, string in found if place >= 0]
        if ends:
            end, place, string = min(ends)
            self.text = self.text[: end if self._params.include_stop_str_in_output else place]
            self.stopped, self.stop_reason = True, string
