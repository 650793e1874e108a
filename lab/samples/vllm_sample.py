"""A sample of episodes on vLLM's scheduler, each fault in the smallest engines of a few draws.

`KVSCOPE_LAB_VLLM=PYTHON python -m kvscope.lab.samples.vllm_sample --each 1 --seed 2026 --write DIR` writes
its tables there as Markdown and JSON, named by the release. KVSCOPE_LAB_VLLM_RELEASE names a folder with another
release.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..accuracy import accuracy_of, accuracy_page
from ..lab_watch import find_in_recordings
from ..on_vllm.fault_table import RANDOM_MUTATION, release_tuple
from ..on_vllm.vllm_draws import draw_vllm_run, faults_of
from ..on_vllm.vllm_episode import VllmEpisode
from ..on_vllm.vllm_worker import shared_worker
from ..trial import Trial, note_outcome

DRAWN_FOR_EACH = 12
"""Draws among which the smallest engine and load is taken."""
HEALTHY_FOR_EACH = 3


def quick_numbers(fault: str, count: int, seed: int, release: str) -> list[int]:
    """Return the runs with the smallest engines and loads, of so many draws for each."""

    def size(number: int) -> float:
        base = draw_vllm_run(number, seed, release, fault).base
        pool = base.engine["num_gpu_blocks_override"] * base.engine["block_size"]
        return float(max(pool, 20 * base.steps))

    return sorted(range(DRAWN_FOR_EACH * count), key=size)[:count]


def sample_trials(count: int, seed: int) -> Iterator[Trial]:
    """Run `count` episodes of each fault of the release, and some healthy ones."""
    release = shared_worker().release
    listed = [fault.name for fault in faults_of(release_tuple(release)) if fault.name != RANDOM_MUTATION]
    for name in ("", *listed):
        for number in quick_numbers(name, count if name else HEALTHY_FOR_EACH * count, seed, release):
            yield sample_trial(number, seed, name, release)


def sample_trial(number: int, seed: int, fault: str, release: str) -> Trial:
    """Run one episode and compare what was found with the truth."""
    began = time.perf_counter()
    trial = Trial(number, seed, [fault] if fault else [], engine=f"vllm {release}")
    directory = Path(tempfile.mkdtemp(prefix="kvscope-sample-"))
    try:
        episode = VllmEpisode(number, seed, directory, fault)
        episode.watch()
        note_outcome(trial, [episode.drain()], {"stream": find_in_recordings([directory])})
    except RuntimeError as error:  # a drawn run that cannot be run is shown, and the others go on
        trial.error = str(error)
    finally:
        shutil.rmtree(directory)
    trial.real_s = time.perf_counter() - began
    return trial


def main() -> None:
    """Run the sample and write its page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=1)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--write", type=Path)
    parsed = parser.parse_args()
    trials: list[Trial] = []
    for trial in sample_trials(parsed.each, parsed.seed):
        trials.append(trial)
        claims = [(c.code, c.verdict, c.wrong_because or "right") for r in trial.results.values() for c in r.claims]
        print(trial.number, trial.faults, trial.kinds, trial.error, claims, f"{trial.real_s:.0f} s", flush=True)
    if parsed.write is not None:
        release = shared_worker().release
        command = f"python -m kvscope.lab.samples.vllm_sample --each {parsed.each} --seed {parsed.seed}"
        accuracy = accuracy_of(trials)
        page = accuracy_page(accuracy, f"`{command}`, on the scheduler of vLLM {release} with the probe")
        (parsed.write / f"vllm-{release}.md").write_text(page)
        data = msgspec.json.format(msgspec.json.encode(accuracy), indent=1)
        (parsed.write / f"vllm-{release}.json").write_bytes(data + b"\n")
    shared_worker().close()
    sys.exit(any(trial.error for trial in trials))


if __name__ == "__main__":
    main()
