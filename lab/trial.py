"""One trial: a drawn episode, what a monitor finds in it by stream and by metrics, and both compared with the truth."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final, Literal

import msgspec

from .drain_limits import NotFinished
from .episode import DrawnFrom, make_ranks
from .lab_watch import FoundCode, find_in_recordings, find_in_records
from .simulated_metrics import pages_as_records
from .suffering import Suffering, suffering_of
from .truth.claims import codes_named, harms_behind
from .truth.episode_end import EpisodeEnd
from .truth.what_happened import Harm, decide_of_ranks

TrialSource = Literal["stream", "metrics"]
TRIAL_SOURCES: Final[tuple[TrialSource, ...]] = ("stream", "metrics")
ROUNDING_S: Final = 1.0
RETRY_LIMIT_S: Final = 0.01
"""The delay after which the limit of real time is raised again if it was raised where Python drops exceptions."""
"""The time by which a finding may seem too early: the recording is flushed, and the witness samples, at intervals."""


class HarmSeen(msgspec.Struct):
    """A harm of the trial by the code that names it: its size, and whether and when that code was found.

    also: other codes that it makes true and that were found. left_s: how long the engine was watched after it began.
    """

    code: str
    kind: str
    since_s: float
    size: float
    left_s: float = 0.0
    found_s: float | None = None
    also: list[str] = []


class ClaimMade(msgspec.Struct):
    """A finding of the trial: its code, verdict and time, and whether the truth confirms it, or why not."""

    code: str
    verdict: str
    at_s: float
    right: bool
    wrong_because: str = ""
    explanation: str = ""


class SourceResult(msgspec.Struct):
    """The result of one source of evidence."""

    harms: list[HarmSeen] = []
    claims: list[ClaimMade] = []


class Trial(msgspec.Struct):
    """The result of one drawn run. kinds: of all harms. error: why it has none. finished: false if it ran too long.
    suffering: of an engine whose behaviour was changed at random.

    only_healthy: it was drawn from engines without a fault, which are watched for longer. by_fault: it was drawn from
    engines with one fault, where each fault has its turn.
    """

    number: int
    seed: int
    faults: list[str] = []
    engine: str = "own"
    watched_s: float = 0.0
    busy_s: float = 0.0
    steps: int = 0
    short_steps: int = 0
    asked: int = 0
    kinds: list[str] = []
    results: dict[str, SourceResult] = {}
    lost_batches: int = 0
    real_s: float = 0.0
    error: str = ""
    finished: bool = True
    suffering: Suffering | None = None
    only_healthy: bool = False
    by_fault: bool = False

    @property
    def drawn_from(self) -> DrawnFrom:
        """The engines that it was drawn from."""
        return "healthy" if self.only_healthy else "faults" if self.by_fault else "all"

    @property
    def healthy(self) -> bool:
        """Whether it had no fault."""
        return not self.faults


@contextmanager
def limited_to(seconds: float) -> Iterator[None]:
    """Raise NotFinished in the block after so many seconds of real time. It works in a main thread only. 0 means no
    limit.
    """

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise NotFinished(f"not finished within {seconds:g} s")

    def dropped(unraisable: sys.UnraisableHookArgs) -> None:
        """Raise it again: a finalizer, such as Popen.__del__, or a callback of the garbage collector was running."""
        if isinstance(unraisable.exc_value, NotFinished):
            signal.setitimer(signal.ITIMER_REAL, RETRY_LIMIT_S)
        else:
            hook_before(unraisable)

    if not seconds:
        yield
        return
    hook_before, sys.unraisablehook = sys.unraisablehook, dropped
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook_before


def run_trial(
    number: int,
    seed: int,
    engine: str = "own",
    keep: Path | None = None,
    limit_s: float = 0.0,
    drawn_from: DrawnFrom = "all",
) -> Trial:
    """Run one trial on the engine under test of that name.

    keep: a directory for its recording. limit_s:
    real seconds after which it is reported as not finished (0: none).
    """
    began = time.perf_counter()
    trial = Trial(number, seed, engine=engine)
    trial.only_healthy, trial.by_fault = drawn_from == "healthy", drawn_from == "faults"
    directory = Path(tempfile.mkdtemp(prefix="kvscope-trial-"))
    try:
        with limited_to(limit_s):
            _run_episode(trial, directory)
    except NotFinished as error:
        trial.error, trial.finished = str(error), False
    except Exception as error:  # a drawn run that cannot be run is shown, and the others go on
        trial.error = f"{type(error).__name__}: {error}"
    finally:
        if keep is not None:
            shutil.rmtree(keep, ignore_errors=True)
            shutil.copytree(directory, keep)
        shutil.rmtree(directory)
    trial.real_s = time.perf_counter() - began
    return trial


def _run_episode(trial: Trial, directory: Path) -> None:
    ranks = make_ranks(trial.engine, trial.number, trial.seed, directory, trial.drawn_from)
    first, *others = ranks.values()
    trial.faults = list(first.faults)
    for rank in ranks.values():
        rank.watch()
    found = {"stream": find_in_recordings(ranks)}
    if not others:
        found["metrics"] = find_in_records(pages_as_records(first.pages), first.began_ns)
    note_outcome(trial, [rank.drain() for rank in ranks.values()], found)


def note_outcome(trial: Trial, ends: Sequence[EpisodeEnd], found: dict[str, list[FoundCode]]) -> None:
    """Compare what was found, by source, with the truth of all ranks."""
    harms = decide_of_ranks(ends)
    trial.watched_s = max(end.watched_s for end in ends)
    trial.busy_s, trial.asked = sum(end.busy_s for end in ends), sum(end.asked for end in ends)
    trial.steps, trial.short_steps = sum(end.steps for end in ends), sum(end.short_steps for end in ends)
    trial.lost_batches = sum(end.lost_batches for end in ends)
    trial.kinds = list(dict.fromkeys(harm.kind for harm in harms))
    if ends[0].mutation:
        trial.suffering = suffering_of(ends[0], found["stream"])
    for source, codes in found.items():
        trial.results[source] = SourceResult(
            seen_harms(harms, codes, trial.watched_s, source), [judge_claim(one, harms, source) for one in codes]
        )


def seen_harms(
    harms: Sequence[Harm], found: Sequence[FoundCode], watched_s: float, source: str = "stream"
) -> list[HarmSeen]:
    """Return each harm that a code names, with whether that code was found."""
    by_code = {one.code: one for one in found}
    seen = []
    for code, harm in codes_named(harms).items():
        own = by_code.get(code)
        others = [one.code for one in found if one.code != code and harm in harms_behind(one.code, harms, source)]
        right = own is not None and judge_claim(own, harms, source).right
        found_s = own.at_s if own is not None and right else None
        left_s = watched_s - harm.since_s
        seen.append(HarmSeen(code, harm.kind, harm.since_s, harm.size, left_s, found_s, others))
    return seen


def judge_claim(found: FoundCode, harms: Sequence[Harm], source: str = "stream") -> ClaimMade:
    """Decide whether a finding is right: a harm makes its code true, had begun, and concerns the requests or blocks
    that the finding names.
    """
    claim = ClaimMade(found.code, found.verdict, found.at_s, right=False, explanation=found.explanation)
    behind = harms_behind(found.code, harms, source)
    if not behind:
        claim.wrong_because = "nothing of the kind happened"
    elif found.at_s < min(harm.since_s for harm in behind) - ROUNDING_S:
        claim.wrong_because = "it fired before anything of the kind began"
        if found.surest_s >= min(harm.since_s for harm in behind) - ROUNDING_S:
            claim.verdict = found.first_verdict or found.verdict  # it became surer once it was right
    elif not any(_concerns(found, harm) for harm in behind):
        claim.wrong_because = "it names only requests or blocks that are not concerned"
    else:
        claim.right = True
    return claim


def _concerns(found: FoundCode, harm: Harm) -> bool:
    if harm.requests and found.requests and harm.requests.isdisjoint(found.requests):
        return bool(harm.blocks and found.blocks) and not harm.blocks.isdisjoint(found.blocks)
    return True
