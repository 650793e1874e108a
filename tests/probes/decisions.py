"""Why vLLM's scheduler left each waiting request where it is, read from the lines of its own code that ran.

`schedule` gives no reasons. It leaves its loop over the waiting requests by a `break`, by the loop's own condition, or
never enters it, and goes on to the next request by skipping one: the conditions around the statements that ran are the
reasons. Only for tests: tracing is slow.
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

SKIPS = ("skip_request(", "skipped_waiting_requests.prepend_request(", "step_skipped_waiting.prepend")
OF_REQUEST = (
    # A part of the innermost condition, in some release, around what skips a request or ends the loop at it.
    ("new_blocks is None", "KV_BLOCKS"),
    ("max_loras", "LORA"),
    ("ext_tokens is None", "CONNECTOR"),
    ("num_external_computed_tokens is None", "CONNECTOR"),
    ("num_stale_output_tokens", "STEP_IN_FLIGHT"),
    ("padded_num_tokens > request_token_budget", "TOKEN_BUDGET"),
)
OF_LOOP = (("max_num_active_reqs", "MAX_NUM_SEQS"), ("max_num_running_reqs", "MAX_NUM_SEQS"))
NOT_DECIDED = ("load_kv_async", "not ready_to_schedule", "_is_blocked_waiting_status", "structured_output_req")
"""Requests that are admitted to load, or wait for something outside the scheduler."""
BLOCKED = ("WAITING_FOR_REMOTE_KVS", "WAITING_FOR_FSM")


class Decisions:
    """Of `scheduler`: `last` has the cause by request id, of those that the last pass considered.

    A cause is a name of the contract's, or the condition itself if it is not known here.
    """

    def __init__(self, scheduler: Any) -> None:
        self.last: dict[str, str] = {}
        self._scheduler = scheduler
        self._code = inspect.unwrap(type(scheduler).schedule).__code__
        source, first = inspect.getsourcelines(self._code)
        tree = ast.parse(textwrap.dedent("".join(source)))
        ast.increment_lineno(tree, first - 1)
        self._loop = next(
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.While) and "waiting" in ast.unparse(node) and "peek_request" in ast.unparse(node)
        )
        self._around = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and self._loop in ast.walk(node) and "preempted_reqs" in ast.unparse(node.test)
        ]
        self._exits = dict(self._find(self._loop.body, []))
        self._entered = self._ended = False

    def _find(self, body: list[ast.stmt], conditions: list[str]) -> Iterator[tuple[int, tuple[bool, list[str]]]]:
        """Lines that leave the loop or skip a request: whether the loop ends there, and the conditions, inner last."""
        for statement in body:
            text = ast.unparse(statement)
            if isinstance(statement, ast.Break) or text.startswith(SKIPS):
                yield statement.lineno, (isinstance(statement, ast.Break), conditions)
            if isinstance(statement, ast.If):
                yield from self._find(statement.body, [*conditions, ast.unparse(statement.test)])
                yield from self._find(statement.orelse, conditions)

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """Note the decisions of the call of `schedule` within."""
        self.last = {}
        self._entered = self._ended = False
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _arg: object) -> Any:
        return self._line if frame.f_code is self._code else None

    def _line(self, frame: FrameType, event: str, _arg: object) -> Any:
        line, loop = frame.f_lineno, self._loop
        if event != "line" or self._ended:
            return self._line
        if found := self._exits.get(line):
            ends, conditions = found
            self._decide(frame, conditions)
            self._ended = ends
        elif loop.lineno <= line <= (loop.end_lineno or 0):
            self._entered = True
        elif line > (loop.end_lineno or 0):
            self._ended = True
            self._close(frame, "TOKEN_BUDGET" if self._entered else self._barred(frame))
        return self._line

    def _decide(self, frame: FrameType, conditions: list[str]) -> None:
        inner = conditions[-1]
        if any(part in inner for part in NOT_DECIDED) or any(part in one for one in conditions for part in BLOCKED):
            return
        request: Any = frame.f_locals.get("request")
        if cause := next((cause for part, cause in OF_LOOP if part in inner), ""):
            self._close(frame, cause)
        elif "not request_queue" in inner:
            self._close(frame, "TOKEN_BUDGET" if frame.f_locals["request_queue"] else "PAUSED")
        elif inner == "num_new_tokens == 0":
            aligned = any("need_mamba" in condition for condition in conditions)
            self.last[request.request_id] = "ZERO_TOKENS" if aligned else "ENCODER"
        else:
            self.last[request.request_id] = next((cause for part, cause in OF_REQUEST if part in inner), inner)

    def _barred(self, frame: FrameType) -> str:
        """Why the loop was not entered: the first condition around it that does not hold."""
        for node in self._around:
            parts = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
            for part in parts:
                code = compile(ast.Expression(part), "condition", "eval")
                if not eval(code, frame.f_globals, frame.f_locals):
                    return "PREEMPTION_IN_STEP" if "preempted" in ast.unparse(part) else "PAUSED"
        return "TOKEN_BUDGET"

    def _close(self, frame: FrameType, cause: str) -> None:
        """It holds for the request that would have been next, of those that wait for nothing else."""
        scheduler = self._scheduler
        holding = [*getattr(scheduler, "kv_holding_waiting", ())]
        others = [*getattr(scheduler, "skipped_waiting", ()), *scheduler.waiting]
        if scheduler.policy.name == "PRIORITY" and hasattr(scheduler, "skipped_waiting"):
            others.sort()
        paused = getattr(getattr(scheduler, "_pause_state", None), "name", "UNPAUSED") != "UNPAUSED"
        for request in (*holding, *others):
            if not request.status.name.startswith("WAITING_FOR"):
                bars = paused and request not in holding and cause != "PREEMPTION_IN_STEP"
                self.last[request.request_id] = "PAUSED" if bars else cause
                return
