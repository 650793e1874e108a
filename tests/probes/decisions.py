"""Why vLLM's scheduler left each waiting request where it is, read from the lines of its own code that ran.

`schedule` gives no reasons. It leaves its loop over the waiting requests by a `break`, and goes on to the next by
skipping one: the conditions around the statements that ran are the reasons. Only for tests: tracing is slow.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from types import FrameType
from typing import Any

CAUSES = (
    # A part of the condition in some release, and the cause as the contract has it.
    ("new_blocks is None", "KV_BLOCKS"),
    ("max_loras", "LORA"),
    ("ext_tokens is None", "CONNECTOR"),
    ("num_external_computed_tokens is None", "CONNECTOR"),
    ("num_stale_output_tokens", "STEP_IN_FLIGHT"),
    ("max_num_active_reqs", "MAX_NUM_SEQS"),
    ("max_num_running_reqs", "MAX_NUM_SEQS"),
    ("draft_slots", "QUEUE_OR_BUDGET"),
)


class Decisions:
    """Of `scheduler`: `last` has the cause by request id, of those that the last pass considered."""

    def __init__(self, scheduler: Any) -> None:
        self.last: dict[str, str] = {}
        self._scheduler = scheduler
        self._schedule = inspect.unwrap(type(scheduler).schedule)
        self._code = self._schedule.__code__
        self._exits = dict(self._find())

    def _find(self) -> Iterator[tuple[int, str]]:
        """Lines of the loop over waiting requests that leave it or skip a request, with the condition."""
        source, first = inspect.getsourcelines(self._code)
        tree = ast.parse(textwrap.dedent("".join(source)))
        loops = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.While) and "waiting" in ast.unparse(node) and "peek_request" in ast.unparse(node)
        ]
        outer = loops[0]
        for node in ast.walk(outer):
            if isinstance(node, ast.If):
                for statement in node.body:
                    text = ast.unparse(statement)
                    if isinstance(statement, ast.Break) or text.startswith(
                        ("skip_request(", "skipped_waiting_requests.prepend_request(", "step_skipped_waiting.prepend")
                    ):
                        yield statement.lineno + first - 1, ast.unparse(node.test)

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """Note the decisions of the call of `schedule` within."""
        self.last = {}
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _arg: object) -> Any:
        return self._line if frame.f_code is self._code else None

    def _line(self, frame: FrameType, event: str, _arg: object) -> Any:
        if event == "line" and (condition := self._exits.get(frame.f_lineno)) is not None:
            found = next((cause for part, cause in CAUSES if part in condition), "")
            if found == "MAX_NUM_SEQS":
                queue = frame.f_locals.get("request_queue") or self._scheduler.waiting
                self.last[queue.peek_request().request_id] = found
            elif found and found != "QUEUE_OR_BUDGET" and "request" in frame.f_locals:
                self.last[frame.f_locals["request"].request_id] = found
        return self._line
