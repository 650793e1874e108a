"""A hook chains with whatever else wraps a method, and its errors stay its own."""

from __future__ import annotations

import ast
import functools
import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvscope.lab.vllm_python import PYTHON, ROOT, environment, needs_vllm
from kvscope.monitor.probes.vllm import plugin
from kvscope.monitor.probes.vllm.compatibility import HOOKS, MANAGER, Hook, Unpacked, preempts_within_schedule, problem
from kvscope.monitor.probes.vllm.front_end_hooks import FrontEndReporter
from kvscope.monitor.probes.vllm.hooks import Hooks
from kvscope.monitor.probes.vllm.owner import Caller, caller
from kvscope.monitor.probes.vllm.vllm_description import served_model_name, without_path
from kvscope.monitor.terminal.cli import main


@pytest.fixture
def pool() -> Any:
    """What is hooked, of a class of its own; `calls` has what reached it."""

    class Pool:
        def __init__(self) -> None:
            self.calls: list[tuple[object, ...]] = []

        def free(self, blocks: Iterable[int], *, prepend: bool = False) -> int:
            self.calls.append((*blocks, prepend))
            return len(self.calls)

    return Pool()


def test_a_hook_sees_arguments_and_result_and_changes_neither(pool: Any) -> None:
    seen: list[Any] = []
    hooks = Hooks(lambda: seen.append("missed"))
    assert hooks.wrap(
        pool,
        "free",
        lambda blocks, **more: seen.append(("before", tuple(blocks), more)),
        lambda result, blocks, **more: seen.append(("after", result, tuple(blocks), more)),
    )
    assert pool.free([3, 4], prepend=True) == 1
    assert pool.calls == [(3, 4, True)]
    assert seen == [("before", (3, 4), {"prepend": True}), ("after", 1, (3, 4), {"prepend": True})]


def test_a_hook_is_handed_the_arguments_it_names_however_they_were_given() -> None:
    class Pool:
        def cache(
            self, request: str, blocks: list[int], first: int = 0, *rest: int, size: int = 16, **more: int
        ) -> int:
            return len(blocks[first:]) + sum(rest) + size + sum(more.values())

    seen: list[tuple[Any, ...]] = []

    def after(result: int, blocks: list[int], first: int) -> None:
        seen.append((result, blocks, first))

    pool, untouched = Pool(), Pool.cache
    Hooks(lambda: seen.append(("missed",))).wrap(pool, "cache", after=after)
    for args, more in (
        (("r-1", [1, 2]), {}),
        (("r-1",), {"first": 1, "blocks": [1, 2]}),
        (("r-1", [1, 2, 3], 1, 4, 5), {"size": 32, "another": 1}),
    ):
        seen.clear()
        expected = untouched(pool, *args, **more)  # type: ignore[arg-type]
        assert pool.cache(*args, **more) == expected  # type: ignore[arg-type]
        given = [*args[1:3], *([] if len(args) > 1 else [more["blocks"]])]
        first = args[2] if len(args) > 2 else more.get("first", 0)
        assert seen == [(expected, given[0], first)]


def test_a_method_that_is_no_plain_function_is_hooked_too() -> None:
    class Pool:
        @functools.cache  # noqa: B019
        def size(self) -> int:
            return 7

    seen: list[int] = []
    pool = Pool()
    assert Hooks(lambda: seen.append(0)).wrap(pool, "size", after=seen.append)
    assert (pool.size(), seen) == (7, [7])


def test_what_can_be_read_only_once_is_handed_on(pool: Any) -> None:
    seen: list[Any] = []

    def before(blocks: Iterable[int], **more: bool) -> tuple[tuple[list[int]], dict[str, bool]]:
        seen.extend(blocks)
        return (list(seen),), more

    Hooks(lambda: None).wrap(pool, "free", before)
    blocks: Iterator[int] = reversed([1, 2])
    pool.free(blocks=blocks, prepend=True)
    assert pool.calls == [(2, 1, True)]
    assert seen == [2, 1]


def test_an_error_turns_its_hook_off_and_is_counted(pool: Any, caplog: pytest.LogCaptureFixture) -> None:
    missed: list[int] = []
    calls: list[int] = []

    def broken(*_: object) -> None:
        calls.append(1)
        raise ZeroDivisionError

    hooks = Hooks(lambda: missed.append(1))
    hooks.wrap(pool, "free", after=broken)
    with caplog.at_level(logging.ERROR):
        assert [pool.free([n]) for n in range(3)] == [1, 2, 3]
    assert [n for n, _ in pool.calls] == [0, 1, 2]
    assert len(calls) == hooks.errors == len(caplog.records) == 1
    assert "Pool.free is off" in caplog.text
    assert len(missed) == 3


def test_others_wrap_the_same_method_before_and_after_us(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    kind = type(pool)

    def wrap(name: str) -> None:
        method = kind.free
        monkeypatch.setattr(kind, "free", lambda self, *a, **k: (seen.append(name), method(self, *a, **k))[1])

    wrap("earlier")
    Hooks(lambda: None).wrap(pool, "free", lambda *_: seen.append("ours"))
    wrap("later")
    assert pool.free([1]) == 1
    assert seen == ["later", "ours", "earlier"]


def test_other_objects_of_the_class_are_not_watched(pool: Any) -> None:
    seen: list[str] = []
    Hooks(lambda: None).wrap(pool, "free", lambda *_: seen.append("ours"))
    other = type(pool)()
    assert (other.free([1]), seen) == (1, [])
    assert (pool.free([1]), seen) == (1, ["ours"])


def test_an_exception_of_the_method_is_the_callers() -> None:
    class Failing:
        def free(self) -> None:
            raise KeyError("theirs")

    failing, hooks = Failing(), Hooks(lambda: None)
    hooks.wrap(failing, "free", lambda: None, lambda _: None)
    with pytest.raises(KeyError, match="theirs"):
        failing.free()
    assert hooks.errors == 0


def test_a_method_that_a_release_does_not_have_is_not_hooked(pool: Any) -> None:
    assert not Hooks(lambda: None).wrap(pool, "unpin_blocks", lambda: None)


@pytest.mark.parametrize("place", ["before", "after"])
def test_of_a_hook_on_both_sides_an_error_turns_both_off(pool: Any, place: str) -> None:
    seen: list[str] = []
    missed: list[int] = []

    def hook(name: str) -> Any:
        def seeing(*_args: object, **_kwargs: object) -> None:
            seen.append(name)
            if name == place:
                raise ZeroDivisionError

        return seeing

    hooks = Hooks(lambda: missed.append(1))
    hooks.wrap(pool, "free", hook("before"), hook("after"))
    assert [pool.free([n]) for n in range(3)] == [1, 2, 3]
    assert seen == ["before", "after"][: 1 + (place == "after")]
    assert hooks.errors == 1
    assert len(missed) == 3


def test_the_owner_is_who_called_the_pool_unless_the_scheduler_did(pool: Any) -> None:
    found: list[Caller | None] = []

    class Manager:
        kv_cache_group_id = 2

        def allocate(self, request_id: str) -> None:
            pool.free([])

    class Scheduler:
        def schedule(self) -> None:
            request_id = "a request of the loop, long done"
            pool.free([request_id])  # type: ignore[list-item]

        def run(self, request_id: str) -> None:
            Manager().allocate(request_id)

    scheduler = Scheduler()

    def before(*_: Any) -> None:
        found.append(caller(scheduler))

    Hooks(lambda: None).wrap(pool, "free", before)
    scheduler.run("r-1")
    scheduler.schedule()
    assert found == [("r-1", 2, "allocate"), None]


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://127.0.0.1:5757", 0, "tcp://127.0.0.1:5757"),
        ("tcp://127.0.0.1:5757", 3, "tcp://127.0.0.1:5763"),
        ("tcp://127.0.0.1:*", 3, "tcp://127.0.0.1:*"),
        ("ipc:///run/kvscope", 1, "ipc:///run/kvscope-1"),
    ],
)
def test_each_rank_has_ports_of_its_own(endpoint: str, rank: int, expected: str) -> None:
    assert plugin.of_rank(endpoint, rank) == expected


def test_the_plugin_brings_nothing_into_a_process_that_was_not_asked() -> None:
    code = (
        "import sys; from kvscope.monitor.probes.vllm.plugin import register; register(); print('vllm' in sys.modules)"
    )
    off = {name: value for name, value in os.environ.items() if name != "KVSCOPE_EVENTS"}
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, env=off, check=True).stdout == b"False\n"


def test_the_plugin_does_not_raise_where_there_is_no_vllm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVSCOPE_EVENTS", "tcp://127.0.0.1:*")
    monkeypatch.setitem(sys.modules, "vllm", None)
    plugin.register()
    assert "no events will be published" in caplog.text.lower()


SCHEDULE = """
    def schedule(self):
        while self.running:
            preempted = self.running.pop()
            self.kv_cache_manager.free(preempted)
            self.encoder_cache_manager.free(preempted)
            preempted.status = RequestStatus.PREEMPTED
            self.waiting.prepend_request(preempted)
"""
"""How the schedulers of vLLM up to 0.11 preempt."""


def write_vllm(root: Path, schedule: str) -> None:
    """A package with all that the probe wraps but `_preempt_request`."""
    methods: dict[str, dict[str, list[str]]] = {}
    for hook in (*HOOKS, Hook(MANAGER, "free", ("request",), "")):
        if hook.method not in ("__init__", "_preempt_request"):
            module, _, kind = hook.place.partition(":")
            text = f"    def {hook.method}(self, {', '.join(hook.arguments)}): ...\n"
            methods.setdefault(module, {}).setdefault(kind, []).append(
                schedule if hook.method == "schedule" and schedule else text
            )
    for module, kinds in methods.items():
        path = (root / module.replace(".", "/")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(f"class {kind}:\n{''.join(texts)}" for kind, texts in kinds.items()))


@pytest.mark.parametrize(("schedule", "watched"), [("", False), (SCHEDULE, True)], ids=["not traced", "traced within"])
def test_a_vllm_that_lacks_a_hook_is_left_alone_and_told_so(schedule: str, watched: bool, tmp_path: Path) -> None:
    """What could not be said would make the rest wrong; but up to 0.11 preemptions are heard without the method."""
    write_vllm(tmp_path, schedule)
    code = (
        "from kvscope.monitor.probes.vllm.plugin import register; register();"
        "from vllm.v1.core.sched.scheduler import Scheduler; print(hasattr(Scheduler.__init__, 'kvscope'))"
    )
    environment = os.environ | {"KVSCOPE_EVENTS": "tcp://127.0.0.1:*", "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, text=True, check=True)
    assert ran.stdout == f"{watched}\n"
    reported = "_preempt_request (type object 'Scheduler' has no attribute '_preempt_request')"
    assert (reported in ran.stderr) is not watched


@pytest.mark.parametrize(
    ("there", "instead"),
    [
        ("free(preempted)", "free(self.other)"),
        ("preempted.status", "self.other.status"),
        ("self.waiting.", "self.kv_cache_manager.free(self.other)\n            self.waiting."),
        ("            self.kv_cache_manager.free(preempted)", "            self.give_up(preempted)"),
        ("self.waiting.", "self.kv_cache_manager.free(preempted)\n            self.waiting."),
        ("def schedule", "def plan"),
        ("def schedule", "def other(self, r):\n        r.status = RequestStatus.PREEMPTED\n\n    def schedule"),
    ],
)
def test_a_schedule_that_preempts_in_another_way_is_not_taken_for_the_one_that_is_known(
    there: str, instead: str, tmp_path: Path
) -> None:
    write_vllm(tmp_path, SCHEDULE)
    assert preempts_within_schedule(Unpacked(tmp_path))
    other = SCHEDULE.replace(there, instead)
    assert other != SCHEDULE
    write_vllm(tmp_path, other)
    assert not preempts_within_schedule(Unpacked(tmp_path))


def test_a_vllm_that_is_not_there_preempts_in_no_known_way(tmp_path: Path) -> None:
    assert not preempts_within_schedule(Unpacked(tmp_path))


def test_a_check_without_vllm_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["probe", "check"]) == 3
    assert "there is no vLLM in" in capsys.readouterr().out
    assert main(["probe", "check", "--python", str(tmp_path / "python")]) == 2
    assert "cannot be run" in capsys.readouterr().err


def test_the_source_of_a_release_is_checked_without_running_it(tmp_path: Path) -> None:
    (tmp_path / "pool.py").write_text(
        "raise SystemExit\n"
        "class Other:\n    def later(self): ...\n"
        "class Pool:\n    def free(self, blocks, *, prepend=False): ...\n"
    )

    def wrong(place: str, method: str, *arguments: str) -> str:
        return problem(Hook(place, method, arguments, "all"), Unpacked(tmp_path))

    assert wrong("pool:Pool", "free", "blocks", "prepend") == ""
    assert wrong("pool:Pool", "free", "blocks", "request") == "it takes no request"
    assert wrong("pool:Pool", "later") == "Pool has no later"
    assert wrong("vllm.pool:Pool", "free") == "no module vllm.pool"


def write_hooked(root: Path, without: Hook) -> None:
    """A vLLM that has every method the probe wraps, but for one."""
    modules: dict[str, dict[str, list[str]]] = {}
    for hook in HOOKS:
        module, _, kind = hook.place.partition(":")
        methods = modules.setdefault(module, {}).setdefault(kind, ["    pass"])
        if hook != without:
            methods.append(f"    def {hook.method}({', '.join(('self', *hook.arguments))}): ...")
    for module, kinds in modules.items():
        path = root.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(f"class {kind}:\n" + "\n".join(methods) for kind, methods in kinds.items()) + "\n")
    (root / "vllm" / "__init__.py").write_text('__version__ = "test"\n')


@pytest.mark.parametrize("method", ["_apply_cow", "_try_schedule_encoder_inputs", "_finish_request", "free_blocks"])
def test_a_check_names_a_method_that_is_absent(method: str, tmp_path: Path) -> None:
    (hook,) = [hook for hook in HOOKS if hook.method == method]
    write_hooked(tmp_path, hook)
    command = [sys.executable, "-m", "kvscope.monitor.probes.vllm.compatibility"]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    lines = [line for line in done.stdout.splitlines() if "absent" in line or "MISSING" in line]
    named = next(line for line in lines if f".{method}:" in line)
    assert named.startswith("  MISSING" if hook.needed else "  absent")
    assert named.endswith(f"not reported: {hook.not_reported}")
    assert [line for line in lines if line != named and "the plugin" not in line] == []


def test_every_method_that_the_probe_wraps_is_checked() -> None:
    wrapped = set()
    for path in (ROOT / "monitor" / "probes" / "vllm").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("wrap", "_wrap"):
                wrapped |= {one.value for one in node.args[1:2] if isinstance(one, ast.Constant)}
    assert len(wrapped) > 20
    checked = {hook.method for hook in HOOKS}
    assert wrapped - checked == {"free"}  # only where _preempt_request is absent: preempts_within_schedule
    assert checked - wrapped == {"__init__"} - wrapped


@needs_vllm
@pytest.mark.slow
def test_a_check_finds_all_that_the_probe_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    code = main(["probe", "check", "--python", PYTHON])
    out = capsys.readouterr().out
    problems = [line for line in out.splitlines() if "MISSING" in line or "absent" in line]
    # It may be there from a checkout on the path alone, which vLLM would not find.
    assert [line for line in problems if "the plugin" not in line] == []
    assert code == bool(problems)


class Parallel:
    """What a scheduler shows of its data-parallel rank; vLLM configures each rank of a dense model by itself."""

    def __init__(self, index: int, size: int, local: int | None) -> None:
        self.data_parallel_index = self.data_parallel_rank = index
        self.data_parallel_size = size
        self.data_parallel_rank_local = local


@pytest.mark.parametrize(
    ("size", "local", "given", "expected"),
    [
        (2, 0, "", ["m@127.0.0.1:5757/0", "m@127.0.0.1:5757/1"]),
        (1, 0, "prod", ["prod/0", "prod/1"]),
        (2, None, "prod", ["prod/0", "prod/1"]),
        (1, None, "prod", ["prod"]),
        (1, None, "", ["m@127.0.0.1:5757/0"]),
    ],
)
def test_all_ranks_of_a_server_share_its_name(
    size: int, local: int | None, given: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSCOPE_EVENTS", "tcp://127.0.0.1:5757")
    monkeypatch.setenv("KVSCOPE_ENGINE_ID", given)
    model = SimpleNamespace(served_model_name="m", model="/models/m")
    names = []
    for rank in range(len(expected)):
        config = SimpleNamespace(parallel_config=Parallel(rank, size, local), model_config=model)
        names.append(plugin.engine_name(SimpleNamespace(vllm_config=config)))
    assert names == expected


@pytest.mark.parametrize(
    ("model", "named"), [("/srv/models/llama", ("llama", "")), ("meta/llama", ("meta/llama", "meta/llama"))]
)
def test_the_path_of_a_model_stays_on_its_machine(model: str, named: tuple[str, str]) -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(served_model_name=None, model=model))
    served = served_model_name(SimpleNamespace(vllm_config=config))
    assert (served, without_path(model)) == named


def test_a_front_end_in_the_engines_process_reports_to_its_own_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(parallel_config=Parallel(3, 4, 0))
    probe = SimpleNamespace(scheduler=SimpleNamespace(vllm_config=config))
    monkeypatch.setattr(plugin, "_attached", [(probe, None)])
    asked: list[int] = []
    front_end = FrontEndReporter(lambda rank: asked.append(rank) or "", plugin._own_rank)  # type: ignore[func-returns-value]
    front_end.received(SimpleNamespace(request_id="r-1", prompt_token_ids=[1]))
    assert asked == [3]
