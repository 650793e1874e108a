"""The table of questions. `Query` defines each question once: name, parameters, types, docstring, time-out.

The decorator `question` turns a signature into a `Question` in QUESTIONS, and the method into a call of `Query.answer`.
Everything else is derived from the table:

QueryHandlers   answers from ledgers (kvscope.monitor.questions.handlers); it overrides each method, and mypy holds its
                signatures to these
ServiceClient   asks a service over HTTP (kvscope.monitor.questions.client); it implements `answer` and nothing else
HTTP routes     /api/NAME with the same parameters (kvscope.monitor.service.query_routes), their OpenAPI schemas, and
                docs/reference/api.md
"""
# The bodies are empty on purpose: `question` replaces them.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast, get_type_hints

import msgspec

from ..detectors.findings import FindingReport
from ..ledger.usage_drop import UsageDrop
from ..planning.plan_types import CapacityPlan
from . import schema
from .fleet_schema import FleetView

AskFunction = TypeVar("AskFunction", bound=Callable[..., Any])


class Question(msgspec.Struct, frozen=True):
    """One question: what is derived from its signature in `Query`.

    parameters   a struct with a field for each parameter, defaults included
    answer       the type of the answer
    timeout_s    how long a client waits; 0: as long as for any other
    """

    name: str
    parameters: type[msgspec.Struct]
    answer: Any
    text: str
    timeout_s: float = 0.0

    @property
    def route(self) -> str:
        """The path of its HTTP route."""
        return f"/api/{self.name}"


QUESTIONS: Final[dict[str, Question]] = {}
"""Every question by name, in the order of `Query`."""


def question(*, timeout_s: float = 0.0) -> Callable[[AskFunction], AskFunction]:
    """Enter the decorated signature in QUESTIONS and pass its calls to `Query.answer`."""

    def define(function: AskFunction) -> AskFunction:
        signature = inspect.signature(function)
        types = get_type_hints(function)
        parameters = [
            (name, types[name]) if each.default is each.empty else (name, types[name], each.default)
            for name, each in signature.parameters.items()
            if name != "self"
        ]
        entry = QUESTIONS[function.__name__] = Question(
            name=function.__name__,
            parameters=msgspec.defstruct(f"{function.__name__}_parameters", parameters, frozen=True),
            answer=types["return"],
            text=inspect.getdoc(function) or "",
            timeout_s=timeout_s,
        )

        @functools.wraps(function)
        def ask(self: Query, *args: Any, **named: Any) -> Any:
            arguments = signature.bind(self, *args, **named).arguments
            del arguments["self"]
            return self.answer(entry, arguments)

        return cast(AskFunction, ask)

    return define


class Query:
    """The questions about engines, and their answers as plain structures.

    `at`, `since` and `until` are a time (RFC 3339, or the last 14:02:11 or 14:02:11.5 in UTC) or a position in an
    engine's stream (epoch/sequence/event: just after that event). An empty `at` or `until` means now. An empty `since`
    means ten minutes before `until`. A time covers all events sent until then. A position covers each event up to it.

    Raises NotKnown for what is not there or not kept, BadQuestion for what makes no sense, and BadTime for a text that
    names no time.
    """

    def answer(self, question: Question, arguments: Mapping[str, Any]) -> Any:
        """Answer a question of the table. Arguments that are not given have their defaults."""
        raise NotImplementedError

    def snapshot(self, engine: str) -> Query:
        """Return a query object about an engine in its current state, at one position of its stream, for all later
        queries.

        HTTP has no snapshots: each of its answers has a time of its own.
        """
        return self

    @question()
    def engines(self, at: str = "", engine: str = "") -> list[schema.EngineView]:
        """Every engine at a glance, by name, or only `engine`."""

    @question()
    def fleet_overview(self) -> FleetView:
        """Every engine in a line, the worst first, with findings of several engines grouped by what these share."""

    @question()
    def past_engines(self) -> list[schema.EngineView]:
        """Engines that only the history knows, each as it was last: removed, or silent since the service began."""

    @question()
    def findings(
        self, state: schema.FindingState | None = None, engine: str = "", since: str = "", until: str = ""
    ) -> list[FindingReport]:
        """Return findings, the most severe first: those in `state`, or firing and resolved ones.

        `engine` keeps only those about one engine. With a time, only findings that were active in the window are
        listed, and an empty `since` is then any time.
        """

    @question()
    def finding(self, id: str) -> schema.FindingDetail:
        """One finding, with the pool and the queues from before it began until it ended."""

    @question()
    def notifications(self, finding: str) -> schema.NotificationsView:
        """Notifications about one finding, by its id: receivers, deliveries and silences."""

    @question()
    def alert_state(self) -> schema.AlertStateView:
        """Receivers, open alerts, silences, the latest deliveries, and the thresholds in force."""

    @question()
    def points(
        self, engine: str, seconds: float = 600.0, limit: int = 600, since: str = "", until: str = ""
    ) -> list[schema.PointView]:
        """Return the pool and the queues over time, at most `limit` points: from `since`, or for `seconds`, to
        `until`.
        """

    @question()
    def requests(self, engine: str, at: str = "") -> list[schema.RequestView]:
        """Return requests that are active or hold blocks, the longest in their state first, then those that ended
        recently.
        """

    @question()
    def request(self, engine: str, id: str, at: str = "") -> schema.RequestDetail:
        """One request by its id or `#number`, with its phases and event history."""

    @question(timeout_s=20.0)  # reads the names of every request of the window
    def find_request(
        self, id: str, engine: str = "", since: str = "", until: str = "", limit: int = 50
    ) -> schema.RequestSearch:
        """Return requests whose id contains `id`, in upper or lower case, over all engines or in `engine`, the latest
        first.

        An empty `since` reaches back to the beginning of the history.
        """

    @question()
    def block(self, engine: str, id: int, at: str = "") -> schema.BlockDetail:
        """One block, its ownership chains and its event history."""

    @question()
    def block_map(self, engine: str, at: str = "") -> schema.BlockMap:
        """Return the state of every block. `states` is base64 in JSON."""

    @question()
    def block_colours(self, engine: str, by: schema.Colouring, at: str = "") -> schema.BlockColours:
        """Every block by its owner, its age, its references or its prefix. `values` is base64 in JSON."""

    @question()
    def events(
        self,
        engine: str,
        since: str = "",
        until: str = "",
        around: str = "",
        limit: int = 200,
        kinds: Sequence[str] = (),
        request: str = "",
        block: int | None = None,
    ) -> list[schema.EventView]:
        """Events in order: the last `limit` of a window, or `limit` of them around a position.

        `kinds` is a list such as allocated,preempted. Without it, all kinds are listed except clock readings, audits,
        heartbeats and progress. `request` (id or `#number`) and `block` keep only the events about them. `until` itself
        is left out, so that the position of the first event of one answer is the `until` of the page before.
        """

    @question()
    def retained_blocks(self, engine: str, since: str = "", until: str = "") -> schema.RetainedBlocksView:
        """Return every block that is held at the end of a window, by owner and reason, and the fate of those that were
        allocated in it.
        """

    @question()
    def prefix_cache(self, engine: str, at: str = "") -> schema.PrefixCacheView:
        """Return the prefix cache as a forest, and its recent evictions."""

    @question()
    def usage_drop(self, engine: str, at: str = "", window_s: float = 10.0) -> UsageDrop:
        """Why usage fell, or throughput stopped, in the `window_s` seconds around `at`.

        Without `at`, the window is the one in which usage fell furthest.
        """

    @question()
    def explain(self, engine: str, since: str = "", until: str = "") -> schema.ExplanationView:
        """Return a summary of a window in two or three sentences."""

    @question(timeout_s=60.0)  # every event of two windows is replayed
    def compare(
        self,
        engine: str,
        since: str = "",
        until: str = "",
        other: str = "",
        other_since: str = "",
        other_until: str = "",
    ) -> schema.Diff:
        """Return the improvements and regressions in a window, compared with another window of this engine or of
        `other`.

        A window is an hour at most. Without a second window, the first is compared with as long a time just before it,
        or with the same time of `other` (its last such time, if it was not there then). An empty `since` leaves time to
        compare with: it is no earlier than half of what is known.
        """

    @question()
    def memory(self, engine: str) -> schema.MemoryView:
        """Return the breakdown of the device's memory, as the engine measured it."""

    @question()
    def calculator(
        self, engine: str, prompt_tokens: int, max_tokens: int, concurrency: int = 1
    ) -> schema.CalculatorView:
        """How many blocks a number of requests of one length need, and how many of them fit."""

    @question()
    def plan(
        self,
        engine: str,
        model: str = "",
        layers: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        device_memory: int | None = None,
        gpu_memory_utilization: float | None = None,
        weights: int | None = None,
        other: int | None = None,
        kv_cache_memory: int | None = None,
        tensor_parallel_size: int = 1,
        block_size: int | None = None,
        kv_cache_dtype: str = "auto",
        max_num_batched_tokens: int | None = None,
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
        prompt_len: int | None = None,
        output_len: int | None = None,
        shared_prefix: int | None = None,
    ) -> CapacityPlan:
        """Return the capacity plan: requests at once by length, and the settings that follow. Sizes are in bytes.

        Without a model, the plan is of the engine's own pool. Lengths that are not given are those of its requests.
        """

    @question()
    def history(self, engine: str) -> schema.HistoryView:
        """Which past of an engine can be queried: its epochs and the gaps."""
