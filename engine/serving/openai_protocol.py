"""What clients send and get, in OpenAI's words: https://platform.openai.com/docs/api-reference.

Fields that we do not know are refused, not passed over: whoever sends one expects something of it. Fields of the API
that we know and do not serve are taken with the value that asks for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec

from kvscope.engine.models.tokens import Tokenizer
from kvscope.engine.requests.kv_transfer import KVTransferParams
from kvscope.engine.requests.request_output import Logprob, Sampled
from kvscope.engine.requests.sampling_params import SamplingParams
from kvscope.engine.requests.structured_output import StructuredOutputs
from kvscope.engine.serving.text_stream import UNFINISHED_CHARACTER

MAX_STOPS: Final = 16
MAX_NUMBER: Final = (1 << 53) - 1
"""What JSON's readers agree on, and well within what an event carries."""
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
}
"""Fields that are known and not served, with the values that ask for nothing."""


class BadRequest(ValueError):
    """The request cannot be served as it is; `param` is the field to blame, if one is."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """include_usage: one more chunk at the end, with the token counts."""

    include_usage: bool = False


class StructuredOutputsParams(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's field of the same meaning: a JSON schema, or its text, or a regular expression."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None

    def wanted(self) -> StructuredOutputs | None:
        """As the engine takes it. Raises ValueError."""
        return StructuredOutputs(self.json, self.regex)


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A schema by name. It is kept to whether `strict` is set or not."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's field: any text, any JSON object, or JSON that fits a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def wanted(self) -> StructuredOutputs | None:
        """As the engine takes it. Raises ValueError."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema")
        if self.json_schema is not None:
            return StructuredOutputs(json=self.json_schema.schema)
        return StructuredOutputs(json={"type": "object"}) if self.type == "json_object" else None


class GenerationRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both ways to ask have in common. null is a field left out."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsParams | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = 0
    kv_transfer_params: KVTransferParams | None = None
    user: str | None = None

    def check(self, served_model_name: str) -> None:
        """Raises BadRequest for what is understood and cannot be served."""
        if self.model and self.model != served_model_name:
            raise BadRequest(
                f"the model {self.model!r} is not served here; {served_model_name!r} is",
                "model",
                status=404,
                code="model_not_found",
            )
        for name, neutral in NEUTRAL.items():
            if getattr(self, name, None) not in neutral:
                raise BadRequest(f"{name} is {getattr(self, name)!r}, which is not supported: leave it out", name)
        if self.kv_transfer_params is not None:
            if (self.n or 1) > 1:
                raise BadRequest(f"n is {self.n}, and KV is transferred for one output at a time", "n")
            try:
                self.kv_transfer_params.check()
            except ValueError as error:
                raise BadRequest(str(error), "kv_transfer_params") from error
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options needs stream to be true", "stream_options")
        for name in ("priority", "seed", "max_tokens"):
            if not -MAX_NUMBER <= (getattr(self, name) or 0) <= MAX_NUMBER:
                raise BadRequest(f"{name} is {getattr(self, name)} and may be {MAX_NUMBER} at most", name)
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOPS:
            raise BadRequest(f"stop has {len(self.stop)} strings and may have {MAX_STOPS}", "stop")

    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are to be told at each place, as SamplingParams has it."""
        raise NotImplementedError

    def structure(self) -> StructuredOutputs | None:
        """What the output is to be, by whichever field asks for it. Raises BadRequest."""
        if self.response_format is not None and self.structured_outputs is not None:
            raise BadRequest("response_format and structured_outputs are two ways to ask: leave one out")
        for name in ("response_format", "structured_outputs"):
            asked: ResponseFormat | StructuredOutputsParams | None = getattr(self, name)
            if asked is not None:
                try:
                    return asked.wanted()
                except ValueError as error:
                    raise BadRequest(f"{name}: {error}", name) from error
        return None

    def sampling(self, default_max_tokens: int) -> SamplingParams:
        """As the engine takes it. Raises BadRequest, naming the field."""
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,  # vLLM's way to say all
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "n": self.n,
            "logprobs": self.num_logprobs(),
            "seed": self.seed,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "max_tokens": self.max_tokens if self.max_tokens is not None else default_max_tokens,
            "structured_outputs": self.structure(),
        }
        try:
            return SamplingParams(
                ignore_eos=self.ignore_eos, **{name: value for name, value in given.items() if value is not None}
            )
        except ValueError as error:
            field = str(error).split(" ", 1)[0]
            raise BadRequest(str(error), field if field in given else None) from error


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. `prompt`: a text, texts, token ids, or lists of token ids."""

    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None

    def num_logprobs(self) -> int | None:
        """As given."""
        return self.logprobs

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        """The token ids of each prompt. Raises BadRequest if they are mixed or there is none."""
        given = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if given and all(isinstance(item, int) for item in given):
            return [[item for item in given if isinstance(item, int)]]
        texts = [tokenizer.encode(item) for item in given if isinstance(item, str)]
        ids = [item for item in given if isinstance(item, list)]
        if not given or len(given) not in (len(texts), len(ids)):
            raise BadRequest("prompt must be a text, a list of texts, token ids, or a list of lists of them", "prompt")
        return texts or ids


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message. Only text is understood."""

    text: str
    type: Literal["text"] = "text"


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a chat."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None

    def as_dict(self) -> dict[str, object]:
        """As chat templates take it: parts joined."""
        content = self.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
        message: dict[str, object] = {"role": self.role, "content": text}
        return message | ({"name": self.name} if self.name else {})


class ChatRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions. max_completion_tokens is the newer name of max_tokens."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def num_logprobs(self) -> int | None:
        """top_logprobs, which count only if logprobs are asked for. Raises BadRequest if they are not."""
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompt(self, tokenizer: Tokenizer) -> list[int]:
        """The token ids up to where the answer begins. Raises BadRequest."""
        if not self.messages:
            raise BadRequest("messages is empty: send at least one", "messages")
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        try:
            return tokenizer.encode_chat([message.as_dict() for message in self.messages])
        except ValueError as error:
            raise BadRequest(str(error), "messages") from error


def completion_logprobs(tokenizer: Tokenizer, sampled: Sequence[Sampled], offset: int) -> dict[str, Any]:
    """The four lists of /v1/completions, a place each. `offset`: where, in the texts of all tokens, the first begins.

    The likeliest are named by their texts; of tokens with one text, only the likeliest is there.
    """
    texts = [tokenizer.decode([one.token_id]) for one in sampled]
    told = [{tokenizer.decode([each.token_id]): each.logprob for each in reversed(one.logprobs)} for one in sampled]
    return {
        "tokens": texts,
        "token_logprobs": [one.logprobs[0].logprob for one in sampled],
        "top_logprobs": told,
        "text_offset": [offset + sum(map(len, texts[:place])) for place in range(len(texts))],
    }


def chat_logprobs(tokenizer: Tokenizer, sampled: Sequence[Sampled]) -> dict[str, Any]:
    """The content's tokens of /v1/chat/completions, each with the likeliest at its place."""

    def entry(logprob: Logprob) -> dict[str, Any]:
        text = tokenizer.decode([logprob.token_id])
        # A part of a character has bytes, but no tokenizer says which.
        in_bytes = None if UNFINISHED_CHARACTER in text else list(text.encode())
        return {"token": text, "logprob": logprob.logprob, "bytes": in_bytes}

    return {
        "content": [entry(one.logprobs[0]) | {"top_logprobs": [entry(e) for e in one.logprobs[1:]]} for one in sampled]
    }


RequestT = TypeVar("RequestT", CompletionRequest, ChatRequest)

_REQUEST_DECODERS: Final = {kind: msgspec.json.Decoder(kind) for kind in (CompletionRequest, ChatRequest)}
_PATH: Final = re.compile(r" - at `\$\.?(.*)`$")
_FIELD: Final = re.compile(r"field `(.+?)`")


def parse_request(kind: type[RequestT], body: bytes) -> RequestT:
    """The request in `body`. Raises BadRequest, naming the field."""
    try:
        request = _REQUEST_DECODERS[kind].decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        path, field = _PATH.search(text), _FIELD.search(text)
        name = ".".join(part for part in (path[1] if path else "", field[1] if field else "") if part)
        message = text[: path.start()] if path else text
        raise BadRequest(f"{name}: {message}" if name else message, name or None) from error
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    assert isinstance(request, kind)
    return request


def error_body(message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """The token counts of a request, or of all of its prompts."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
