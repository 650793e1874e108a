"""What the probe reads of a vLLM before it watches it: whether the hooks are there, and the settings in force."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvscope.lab.vllm_python import announce
from kvscope.monitor.probes.vllm import compatibility, plugin
from kvscope.monitor.probes.vllm.compatibility import HOOKS, MISSING, OK, SCHEDULER, Hook, Unpacked, sleeps_in_base
from kvscope.monitor.probes.vllm.vllm_description import NO_LEASE, UNKNOWN_LEASE, describe, lease_ns
from tests.probes.stand_in import scheduler, with_vllm
from tests.probes.test_hooks import write_hooked


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder in which a test writes the vLLM that this process imports, beside an installed plugin."""
    names = [name for name in sys.modules if name.partition(".")[0] == "vllm"]
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.syspath_prepend(str(announce(tmp_path)))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def hook_on(method: str) -> Hook:
    return next(hook for hook in HOOKS if hook.method == method)


@pytest.mark.parametrize(("method", "code"), [("_apply_cow", OK), ("free_blocks", MISSING)])
def test_a_check_fails_only_for_what_is_needed(method: str, code: int, in_this_process: Path) -> None:
    write_hooked(in_this_process, hook_on(method))
    assert compatibility.main() == code


@pytest.mark.parametrize(("allowed", "code"), [("kvscope,lora", OK), ("lora", MISSING), ("", MISSING)])
def test_a_check_fails_where_vllm_is_told_to_leave_the_plugin_out(
    allowed: str, code: int, in_this_process: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_hooked(in_this_process, hook_on("_apply_cow"))
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert compatibility.main() == code
    assert ("leaves kvscope out" in capsys.readouterr().out) == (code == MISSING)


def test_a_check_fails_where_the_plugin_is_not_installed(
    in_this_process: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_hooked(in_this_process, hook_on("_apply_cow"))
    monkeypatch.setattr(compatibility, "GROUP", "another group")
    assert compatibility.main() == MISSING
    assert "kvscope is not installed there" in capsys.readouterr().out


@pytest.mark.parametrize(("method", "watched"), [("_apply_cow", True), ("free_blocks", False)])
def test_the_plugin_watches_a_vllm_that_lacks_only_what_is_not_needed(
    method: str, watched: bool, in_this_process: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hooked(in_this_process, hook_on(method))
    monkeypatch.setenv("KVSCOPE_EVENTS", "tcp://127.0.0.1:*")
    plugin.register()
    module, _, name = SCHEDULER.partition(":")
    assert hasattr(getattr(sys.modules[module], name).__init__, "kvscope") is watched


@pytest.mark.parametrize("sleeps", [True, False])
def test_an_executor_sleeps_in_its_base_if_that_has_both_methods(sleeps: bool, tmp_path: Path) -> None:
    """As up to vLLM 0.10."""
    path = tmp_path / "vllm" / "executor" / "executor_base.py"
    path.parent.mkdir(parents=True)
    methods = ["sleep", "wake_up"] if sleeps else ["sleep"]
    path.write_text("class ExecutorBase:\n" + "".join(f"    def {name}(self): ...\n" for name in methods))
    assert sleeps_in_base(Unpacked(tmp_path)) is sleeps


@pytest.mark.parametrize(
    ("connector", "envs", "lease"),
    [
        ("", {}, NO_LEASE),
        ("NixlConnector", {"VLLM_NIXL_ABORT_REQUEST_TIMEOUT": "480"}, 480 * 10**9),
        ("NixlConnector", {}, UNKNOWN_LEASE),
        ("LMCacheConnectorV1", {"VLLM_NIXL_ABORT_REQUEST_TIMEOUT": "480"}, UNKNOWN_LEASE),
    ],
)
def test_a_lease_is_known_where_the_settings_show_it(
    connector: str, envs: dict[str, str], lease: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_vllm(monkeypatch, **envs)
    transfer = SimpleNamespace(kv_connector=connector) if connector else None
    assert lease_ns(SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=transfer))) == lease


def test_a_description_has_0_for_what_a_group_or_a_model_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    with_vllm(monkeypatch)
    sliding = SimpleNamespace(sliding_window=64, page_size_bytes=10)
    whole = SimpleNamespace(sliding_window=None, page_size_bytes=20)
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"]) for spec in (sliding, whole)]
    found = describe(scheduler(blocks=100, kv_groups=groups))
    assert ([group.window for group in found.groups], found.kv_bytes_per_block) == ([64, 0], 40)
    assert describe(scheduler()).kv_bytes_per_block == 0
