"""Structured output: what a text must look like, and which tokens may come next so that it becomes that.

llguidance compiles the grammar, in a thread beside the engine's: a large schema takes as long as many steps, and the
first one of an engine as long as it takes to make the tokenizer known. Imports no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, lru_cache
from json import dumps, loads
from typing import Any, Final, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_CHARACTERS: Final = 1 << 16
"""Bound of a schema, or of all choices: its client, and others, wait for the check."""
MAX_REGEX_CHARACTERS: Final = 1 << 12
"""Bound of a regular expression, and of all of a schema together. The time for one may grow with its square: 0.6 s for
2,000 times `.*`, and more than 100 s for 32,000."""
COMPILED_GRAMMARS_KEPT: Final = 32
"""So many compiled grammars are kept for requests that want the same."""
MULTIPLES_TOGETHER: Final = 100_000
"""Bound of the sum of a schema's multipleOf, each without its point and the zeros at its end. The grammar has a state
for each remainder: 0.2 s and 25 MB at the bound, 160 s and 5.5 GB for {"multipleOf": 9999991}, which nothing stops."""
LARGEST_NUMBER: Final = 1 << 53
"""Bound of the numbers in a schema, and the largest that JSON's readers agree on. llguidance ends the process with
SIGSEGV at {"const": -9223372036854775807}.
"""
WHITE_SPACE: Final[dict[str, Any]] = {"whitespace_pattern": " "}
"""In JSON, one space where any white space may stand: no model can go on with spaces for ever."""
_LIMITS: Final = LLParserLimits(verbose_errors=False)  # or its errors reveal the output


@dataclass(frozen=True)
class StructuredOutputs:
    """The form of an output, in vLLM's words: JSON that fits a schema, or what a regular expression matches whole.

    json: the schema, or its text, whose properties come in its order. regex: in the syntax of Rust's regex crate, which
    has neither look-around nor references back. choice: the output is one of these texts. Exactly one of them is given.
    Raises ValueError, saying what is wrong.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if [self.json, self.regex, self.choice].count(None) != 2:
            raise ValueError("exactly one of json, which is a schema, regex and choice must be given")
        if self.choice is not None and not (self.choice and all(self.choice)):
            raise ValueError("choice must hold at least one text, and no empty one")
        try:
            if isinstance(self.json, dict):
                object.__setattr__(self, "json", dumps(self.json))  # so that equal ones are found again
            self._check()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust, too: whatever it is, this input caused it
            raise ValueError(f"{self.kind} cannot be used: {error}") from error

    def _check(self) -> None:
        """Raise what is wrong with the one that is given."""
        if len(self.json or self.regex or "".join(self.choice or ())) > MAX_CHARACTERS:
            raise ValueError(f"it is longer than the {MAX_CHARACTERS} characters that it may have")
        _check_costs(loads(self.json) if isinstance(self.json, str) else {"pattern": self.regex})
        failed, why = LLMatcher.validate_grammar_with_warnings(self.grammar(), limits=_LIMITS)
        if failed:
            raise ValueError(why[0].strip())

    @property
    def kind(self) -> str:
        """Which of them is given."""
        if self.choice is not None:
            return "choice"
        return "regex" if self.json is None else "json"

    def grammar(self) -> str:
        """As llguidance has it."""
        if self.json is not None:
            return LLMatcher.grammar_from_json_schema(self.json, overrides=WHITE_SPACE)  # type: ignore[arg-type]
        if self.choice is not None:
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(dumps, self.choice)))
        return LLMatcher.grammar_from_regex(self.regex or "")


def _check_costs(schema: object) -> None:
    """Raise ValueError for a schema for which the compiler takes too long, or with which it ends the process."""
    together, characters, waiting = 0, 0, [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += one.values()
            if type(multiple := one.get("multipleOf")) in (int, float):
                together += int("".join(map(str, Decimal(str(multiple)).normalize().as_tuple().digits)) or 0)
            of_names = one.get("patternProperties")
            patterns = [one.get("pattern"), *(of_names if isinstance(of_names, dict) else ())]
            characters += sum(len(pattern) for pattern in patterns if isinstance(pattern, str))
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, int | float) and not abs(one) <= LARGEST_NUMBER:
            raise ValueError(f"it has the number {one:.6g}, and may have {LARGEST_NUMBER} at most, or its negative")
    if characters > MAX_REGEX_CHARACTERS:
        raise ValueError(
            f"it has {characters:,} characters of regular expressions, and may have {MAX_REGEX_CHARACTERS:,}"
        )
    if together > MULTIPLES_TOGETHER:
        raise ValueError(
            f"its multipleOf are {together:,} together, without their points and the zeros at their ends, and may be"
            f" {MULTIPLES_TOGETHER:,}: each remainder is a state of the grammar"
        )


class Matcher:
    """How far an output has come in its grammar. Only the model's thread may use it.

    `mask`: a bit for each token, the lowest of each byte first, that is set if the token may be next. Raises ValueError
    if no output at all would do.
    """

    def __init__(self, compiled: LLMatcher) -> None:
        self._matcher = compiled
        self._look()
        if self.error:
            raise ValueError(self.error)

    def copy(self) -> Matcher:
        """One that goes on alone from here."""
        made = copy(self)
        made._matcher = self._matcher.deep_copy()
        return made

    def advance(self, token_id: int) -> None:
        """Advance the output by this token. Sets `ended` if nothing may follow, and `error` if nothing can."""
        self._matcher.consume_token(token_id)
        self._look()

    def _look(self) -> None:
        self.mask = self._matcher.compute_bitmask()
        self.ended = self._matcher.is_stopped()
        self.error = ""
        if self._matcher.is_error():
            why = self._matcher.get_error().partition("\n")[0]
            self.error = f"no token leads to an output that the grammar allows ({why})"


class Compiled(NamedTuple):
    """The result for a request's grammar: its matcher, or why there is none."""

    number: int
    matcher: Matcher | None
    error: str = ""


class GrammarCompiler:
    """Compiles in a thread of its own, one after the other, and equal grammars once.

    `tokenizer` makes what llguidance knows the tokens by, and is called there. `wake` is called there too, when there
    is something to take.
    """

    def __init__(self, tokenizer: Callable[[], LLTokenizer], wake: Callable[[], None]) -> None:
        self._tokenizer = cache(tokenizer)
        self._compiled = lru_cache(COMPILED_GRAMMARS_KEPT)(self._compile)
        self._wake = wake
        self._done: deque[Compiled] = deque()
        self._thread = ThreadPoolExecutor(1, "kvscope-grammar")

    def start(self, number: int, wanted: StructuredOutputs) -> None:
        """Compile it for the request `number`."""
        self._thread.submit(self._run, number, wanted)

    def take(self) -> list[Compiled]:
        """Return the grammars compiled since the last time."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def settle(self) -> None:
        """Wait until all that was asked for is compiled."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Stop, with what is being compiled still done."""
        self._thread.shutdown(cancel_futures=True)

    def _run(self, number: int, wanted: StructuredOutputs) -> None:
        try:
            self._done.append(Compiled(number, self._compiled(wanted).copy()))
        except BaseException as error:  # a panic in Rust, too: it concerns this request, which waits for an answer
            self._done.append(Compiled(number, None, f"{wanted.kind} cannot be used: {error}"))
        self._wake()

    def _compile(self, wanted: StructuredOutputs) -> Matcher:
        made = LLMatcher(self._tokenizer(), wanted.grammar(), log_level=0, limits=_LIMITS)
        if made.is_error():
            raise ValueError(made.get_error().strip())
        return Matcher(made)
