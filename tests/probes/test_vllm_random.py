"""Random runs of vLLM's own scheduler under the probe: ledger, tables and causes are compared after every call."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from kvscope.lab.vllm_python import RELEASES, needs_vllm, run, save_model
from kvscope.monitor.contract.kinds import Release
from tests.probes.random_runs import draw_runs
from tests.probes.run_check import check_run

RUNS = 40
SAMPLE = 6
IN_ALL = {"KV_BLOCKS", "MAX_NUM_SEQS", "TOKEN_BUDGET", "PREEMPTION_IN_STEP", "LORA", "CONNECTOR"}
IN_RECENT = IN_ALL | {"PAUSED", "ZERO_TOKENS", "ENCODER"}
STATUSES = {"RUNNING", "WAITING", "PREEMPTED", "WAITING_FOR_REMOTE_KVS", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"}
WITHOUT_SESSIONS = "0.10"


def random_runs(directory: Path, release: str, count: int) -> tuple[Counter[str], Counter[str]]:
    """Lead them, in one process, and compare; how often each status and mechanism was met, and each cause."""
    runs = draw_runs(count, release)
    directory.mkdir(exist_ok=True)
    model = save_model(directory / "model")
    run("tests.probes.bare_scheduler", str(model), str(directory), json.dumps(runs), release=release)
    seen: Counter[str] = Counter()
    causes: Counter[str] = Counter()
    for name in runs:
        checked = check_run(directory / name)
        state = checked.ledger.state
        assert state.audit_cycles > 0, name
        seen += checked.seen
        seen["calls"] += checked.calls
        seen["pinned"] += checked.pinned
        seen["out of window"] += state.totals.released.get(Release.OUT_OF_WINDOW, 0)
        causes += checked.causes
    assert "UNKNOWN" not in causes
    return seen, causes


@needs_vllm
@pytest.mark.slow
def test_a_sample_of_random_runs_adds_up_after_every_call(tmp_path: Path) -> None:
    seen, causes = random_runs(tmp_path, "", SAMPLE)
    assert seen["calls"] > 150 * SAMPLE
    assert causes["KV_BLOCKS"]
    assert causes["MAX_NUM_SEQS"]


@needs_vllm
@pytest.mark.prove
@pytest.mark.parametrize("release", RELEASES, ids=[release or "installed" for release in RELEASES])
def test_random_runs_add_up_after_every_call_on_each_release(
    release: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, causes = random_runs(tmp_path, release, RUNS)
    early = release.startswith(WITHOUT_SESSIONS)
    with capsys.disabled():
        print(
            f"\nvLLM {release or 'installed'}: {RUNS} random runs, {seen['calls']:,} calls compared, 0 differences;",
            end="",
        )
        print(f" {causes.total():,} causes compared, 0 differences: {dict(causes.most_common())}")
    assert causes.keys() >= (IN_ALL if early else IN_RECENT)
    assert seen.keys() >= (STATUSES if early else STATUSES | {"WAITING_FOR_STREAMING_REQ"})
    assert seen["pinned"]
    assert seen["out of window"]
