"""Requests and responses, in OpenAI's words: https://platform.openai.com/docs/api-reference.

Unknown fields are ignored and logged once each, as vLLM does: clients send `metadata`, `store` and the like. A field
that is known, not served, and would change the answer is refused unless it has the value that asks for nothing. Fields
that constrain the output (`structured_outputs`, `response_format`) accept no unknown fields: the engine could not
honour them.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request

from ..models.tokens import Tokenizer
from ..requests.request import KVTransferParams, Logprob, PromptLogprobs, Sampled, SamplingParams
from ..requests.structured_output import StructuredOutputs
from .text_stream import UNFINISHED_CHARACTER

logger = logging.getLogger(__name__)

MAX_TEXTS: Final = 2_048
"""Prompts times n of one request."""
MAX_STOPS: Final = 16
MAX_NUMBER: Final = (1 << 53) - 1
"""The largest number that JSON's readers agree on, well within an event's range."""
MAX_BIAS: Final = 100.0
"""OpenAI's limit of a logit_bias, either way."""
LEAST_LOGPROB: Final = -9_999.0
IGNORED_NAMES: Final = 256
"""Unknown fields that are remembered as logged."""
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "suffix": (None, ""),
    "prompt_embeds": (None,),
    "use_beam_search": (None, False),
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "functions": (None, []),
}
"""Fields that are known and not served, with the values that ask for nothing."""


class BadRequest(ValueError):
    """The request cannot be served in this form. `param` is the field to blame, if one is."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code


class StreamOptions(msgspec.Struct):
    """include_usage: one more chunk at the end, with the token counts. continuous_usage_stats: in every chunk too."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class StructuredOutputsParams(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's field of the same meaning: a JSON schema, or its text, a regular expression, or one of some texts."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None

    def wanted(self) -> StructuredOutputs | None:
        """As the engine takes it. Raises ValueError."""
        return StructuredOutputs(self.json, self.regex, None if self.choice is None else tuple(self.choice))


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


class GenerationRequest(msgspec.Struct, kw_only=True):
    """The shared fields of both kinds of requests. null is a field left out."""

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
    include_stop_str_in_output: bool = False
    min_tokens: int | None = None
    logit_bias: dict[int, float] | None = None
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsParams | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = 0
    kv_transfer_params: KVTransferParams | None = None
    prompt_logprobs: int | None = None
    prompt_embeds: Any = None
    use_beam_search: bool | None = None

    def check(self, served_model_name: str) -> None:
        """Raise BadRequest for a valid request that cannot be served."""
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
            if self.prompt_logprobs is not None:
                raise BadRequest("prompt_logprobs need all of the prompt computed here", "prompt_logprobs")
        if self.prompt_logprobs and self.stream:
            raise BadRequest("prompt_logprobs are not available when stream is true", "prompt_logprobs")
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options needs stream to be true", "stream_options")
        for name in ("priority", "seed", "max_tokens"):
            if not -MAX_NUMBER <= (getattr(self, name) or 0) <= MAX_NUMBER:
                raise BadRequest(f"{name} is {getattr(self, name)} and may be {MAX_NUMBER} at most", name)
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOPS:
            raise BadRequest(f"stop has {len(self.stop)} strings and may have {MAX_STOPS}", "stop")
        for bias in (self.logit_bias or {}).values():
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise BadRequest(f"logit_bias holds {bias}, and may hold -{MAX_BIAS:g} to {MAX_BIAS:g}", "logit_bias")

    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report at each place, as SamplingParams has it."""
        raise NotImplementedError

    def num_prompt_logprobs(self) -> int | None:
        """Return the same for the prompt's tokens."""
        return self.prompt_logprobs

    def num_tokens(self, default: int) -> int:
        """How many tokens to generate at most."""
        return default if self.max_tokens is None else self.max_tokens

    def sent_field(self, name: str) -> str:
        """Return the field of the request that a field of SamplingParams is from."""
        return "response_format" if name == "structured_outputs" and self.response_format is not None else name

    def structure(self) -> StructuredOutputs | None:
        """Return the structure of the output, by whichever field gives it. Raises BadRequest."""
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
            "top_k": 0 if self.top_k == -1 else self.top_k,  # vLLM's value for all
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "n": self.n,
            "logprobs": self.num_logprobs(),
            "seed": self.seed,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "min_tokens": self.min_tokens,
            "logit_bias": self.logit_bias,
            "prompt_logprobs": self.num_prompt_logprobs(),
            "max_tokens": self.num_tokens(default_max_tokens),
            "structured_outputs": self.structure(),
        }
        try:
            return SamplingParams(
                ignore_eos=self.ignore_eos,
                include_stop_str_in_output=self.include_stop_str_in_output,
                **{name: value for name, value in given.items() if value is not None},
            )
        except ValueError as error:
            field = str(error).split(" ", 1)[0]
            raise BadRequest(str(error), field if field in given else None) from error


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions. `prompt`: a text, texts, token ids, or lists of token ids. `echo`: the answer begins with
    it, and with max_tokens 0 has nothing else.
    """

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None

    def num_logprobs(self) -> int | None:
        """As given."""
        return self.logprobs

    def num_prompt_logprobs(self) -> int | None:
        """Return it as given, or with `echo` as many as for the output, since the prompt is part of it."""
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def echoes_only(self) -> bool:
        """Whether the prompt is all that is asked for."""
        return bool(self.echo) and self.max_tokens == 0

    def num_tokens(self, default: int) -> int:
        """At least one, which is left out of the answer if only the prompt is asked for."""
        return 1 if self.echoes_only else super().num_tokens(default)

    def prompt_texts(self, prompts: list[list[int]], decode: Callable[[list[int]], str]) -> list[str]:
        """Return the texts of the prompts, those that were given as token ids by `decode`."""
        given = (
            [self.prompt] if isinstance(self.prompt, str) else [item for item in self.prompt if isinstance(item, str)]
        )
        return given or [decode(prompt) for prompt in prompts]

    def prompts(self, encode: Callable[[str], list[int]]) -> list[list[int]]:
        """Return the token ids of each prompt, texts by `encode`. Raises BadRequest if they are mixed or there is
        none.
        """
        given = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if given and all(isinstance(item, int) for item in given):
            return [[item for item in given if isinstance(item, int)]]
        texts = [encode(item) for item in given if isinstance(item, str)]
        ids = [item for item in given if isinstance(item, list)]
        if not given or len(given) not in (len(texts), len(ids)):
            raise BadRequest("prompt must be a text, a list of texts, token ids, or a list of lists of them", "prompt")
        return texts or ids


class TextPart(msgspec.Struct):
    """A part of a message. Only text is understood."""

    text: str
    type: Literal["text"] = "text"


class ChatMessage(msgspec.Struct):
    """One message of a chat. Tool calls of past turns are for the chat template."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The content, parts joined."""
        content = self.content
        return "".join(part.text for part in content) if isinstance(content, list) else content or ""

    def as_dict(self) -> dict[str, object]:
        """As chat templates take it."""
        more = {"name": self.name, "tool_calls": self.tool_calls, "tool_call_id": self.tool_call_id}
        return {"role": self.role, "content": self.text} | {name: value for name, value in more.items() if value}


class ChatRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions. max_completion_tokens is the newer name of max_tokens."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None

    def num_logprobs(self) -> int | None:
        """top_logprobs, which count only if logprobs are asked for. Raises BadRequest if they are not."""
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompt(self, encode: Callable[[list[ChatMessage]], list[int]]) -> list[int]:
        """Return the token ids up to where the answer begins, by `encode`. Raises BadRequest."""
        if not self.messages:
            raise BadRequest("messages is empty: send at least one", "messages")
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        try:
            return encode(self.messages)
        except BadRequest:
            raise
        except ValueError as error:
            raise BadRequest(str(error), "messages") from error


class TokenizeRequest(msgspec.Struct):
    """POST /tokenize, as in vLLM: of a prompt, or of a chat up to where the answer begins."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    return_token_strs: bool = False

    def token_ids(
        self, encode: Callable[[str], list[int]], encode_chat: Callable[[list[ChatMessage]], list[int]]
    ) -> list[int]:
        """Return the ids. Raises BadRequest."""
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("exactly one of prompt and messages must be given", "prompt")
        if self.prompt is not None:
            return encode(self.prompt)
        try:
            return encode_chat(self.messages or [])
        except BadRequest:
            raise
        except ValueError as error:
            raise BadRequest(str(error), "messages") from error


class DetokenizeRequest(msgspec.Struct):
    """POST /detokenize, as in vLLM."""

    tokens: list[int]
    model: str | None = None


def completion_logprobs(tokenizer: Tokenizer, sampled: Sequence[Sampled], offset: int) -> dict[str, Any]:
    """Return the four lists of /v1/completions, a place each. `offset`: where, in the texts of all tokens, the first
    begins.

    The likeliest are named by their texts. Of tokens with one text, only the likeliest is there. A prompt's first token
    has no logprob.
    """
    texts = [tokenizer.decode([one.token_id]) for one in sampled]
    entries = [
        {tokenizer.decode([each.token_id]): json_logprob(each) for each in reversed(one.logprobs)} or None
        for one in sampled
    ]
    return {
        "tokens": texts,
        "token_logprobs": [json_logprob(one.logprobs[0]) if one.logprobs else None for one in sampled],
        "top_logprobs": entries,
        "text_offset": [offset + before for before in accumulate(map(len, texts[:-1]), initial=0)],
    }


def json_logprob(logprob: Logprob) -> float:
    """Return the logprob as vLLM sends it: JSON has no infinity."""
    return max(logprob.logprob, LEAST_LOGPROB)


def prompt_logprobs_body(tokenizer: Tokenizer, entries: PromptLogprobs) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: by token id, a prompt token's own and the likeliest, or null for the first
    token.
    """
    return [
        {
            str(each.token_id): {
                "logprob": json_logprob(each),
                "rank": each.rank,
                "decoded_token": tokenizer.decode([each.token_id]),
            }
            for each in logprobs
        }
        or None
        for logprobs in entries
    ]


def chat_logprobs(tokenizer: Tokenizer, sampled: Sequence[Sampled]) -> dict[str, Any]:
    """Return the content's tokens of /v1/chat/completions, each with the likeliest at its place."""

    def entry(logprob: Logprob) -> dict[str, Any]:
        text = tokenizer.decode([logprob.token_id])
        # A part of a character has bytes, but no tokenizer exposes them.
        in_bytes = None if UNFINISHED_CHARACTER in text else list(text.encode())
        return {"token": text, "logprob": logprob.logprob, "bytes": in_bytes}

    return {
        "content": [entry(one.logprobs[0]) | {"top_logprobs": [entry(e) for e in one.logprobs[1:]]} for one in sampled]
    }


RequestT = TypeVar("RequestT", CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)

_REQUEST_DECODERS: Final = {
    kind: msgspec.json.Decoder(kind) for kind in (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
}
_NAMES_DECODER: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ignored: set[str] = set()
_LISTS: Final = re.compile(rb"\[\s*\[")
_PATH: Final = re.compile(r" - at `\$\.?(.*)`$")
_FIELD: Final = re.compile(r"field `(.+?)`")


def parse_request(kind: type[RequestT], body: bytes) -> RequestT:
    """Return the request in `body`. Raises BadRequest, naming the field."""
    try:
        fields = _NAMES_DECODER.decode(body)
        _require_few_lists(bytes(fields.get("prompt", b"")))
        request = _REQUEST_DECODERS[kind].decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        path, field = _PATH.search(text), _FIELD.search(text)
        name = ".".join(part for part in (path[1] if path else "", field[1] if field else "") if part)
        message = text[: path.start()] if path else text
        raise BadRequest(f"{name}: {message}" if name else message, name or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    assert isinstance(request, kind)
    _log_ignored(kind, fields)
    return request


def _require_few_lists(prompt: bytes) -> None:
    """Refuse more lists of token ids than one request may have before they are made: millions of them stop every thread
    for seconds.
    """
    lists = prompt.count(b"[") - 1
    if lists > MAX_TEXTS and _LISTS.match(prompt):
        raise BadRequest(f"{lists:,} prompts are more than the {MAX_TEXTS:,} texts of one request", "prompt")


def _log_ignored(kind: type[RequestT], fields: Iterable[str]) -> None:
    """Log each field that `kind` does not have, once in the life of the process."""
    known = kind.__struct_fields__
    for name in fields:
        if name not in known and name not in _ignored and len(_ignored) < IGNORED_NAMES:
            _ignored.add(name)
            logger.warning("requests have the field %.64r, which is not known here and is ignored", name)


def error_body(message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return the token counts of a request, or of all of its prompts."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


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
    """Encodes prompts for a model of `max_model_len` tokens. Raises BadRequest for those that are too long.

    A prompt that cannot fit the model whatever it holds is refused by its length before it is encoded, as in vLLM
    (`vllm/renderers/params.py`): a megabyte of text takes a tokenizer seconds.
    """

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
    """Reads bodies, which threads parse and tokenize, so that no long prompt delays other requests."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(READER_THREADS, "kvscope-request")

    async def read(self, request: Request, parse: Callable[[bytes], ReadT]) -> ReadT:
        """Return what `parse`, called in a thread, makes of the body."""
        body = await request.body()
        return await asyncio.get_running_loop().run_in_executor(self._threads, parse, body)
