"""The tests of the judgement kill mutants of it."""

from __future__ import annotations

import ast
import faulthandler
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvscope.lab.mutation import mutant_fork
from kvscope.lab.mutation.accepted_mutants import ACCEPTED_MUTANTS
from kvscope.lab.mutation.mutant_fork import MutantFork, next_ended
from kvscope.lab.mutation.mutant_results import MutantResult, digest, read_results, share_killed
from kvscope.lab.mutation.mutant_sample import AREAS, KEPT_DRAW, ROOT, path_of, sample
from kvscope.lab.mutation.mutant_sites import mutants_of, mutated_tree
from kvscope.lab.mutation.mutation_run import FOLDERS, in_a_fork
from kvscope.lab.mutation.reaching_tests import ReachedFunctions, record_reach
from kvscope.lab.mutation.review_mutants import REVIEW_MUTANTS
from kvscope.lab.vllm_python import needs_vllm

SOURCE = '''
class Rule:
    least = Threshold(3, "blocks", "a reason")

    def fires(self, count: int, free: int) -> bool:
        """Return whether 5 is enough."""
        return count >= 4 and not free, round(count, 2)
'''


@pytest.fixture
def rule(tmp_path: Path) -> Path:
    path = tmp_path / "rule.py"
    path.write_text(SOURCE)
    return path


def test_conditions_boundaries_clauses_constants_and_thresholds_are_mutated_and_texts_are_not(rule: Path) -> None:
    found = {(mutant.function, mutant.kind, mutant.text) for mutant in mutants_of(rule, "rule")}
    assert found == {
        ("Rule.fires", "clause", "count >= 4 and (not free) -> not free"),
        ("Rule.fires", "clause", "count >= 4 and (not free) -> count >= 4"),
        ("Rule.fires", "boundary", "count >= 4 -> count > 4"),
        ("Rule.fires", "constant", "4 -> 8"),
        ("Rule.fires", "condition", "not free -> free"),
        ("Rule.least", "threshold", "least: 3 -> 6"),
        ("Rule.least", "threshold", "least: 3 -> 1.5"),
    }


def test_a_mutant_is_the_one_change_that_its_text_states(rule: Path) -> None:
    boundary = next(mutant for mutant in mutants_of(rule, "rule") if mutant.kind == "boundary")
    mutated = ast.unparse(mutated_tree(rule, boundary.nth))
    assert mutated == ast.unparse(ast.parse(SOURCE)).replace("count >= 4", "count > 4")


def test_a_sample_is_a_third_of_each_area_and_has_those_of_the_review() -> None:
    chosen = sample(60, 1, "")
    assert [sum(area == each for each, _ in chosen) for area in AREAS] == [20, 20, 20]
    assert len({mutant for _, mutant in chosen[: len(REVIEW_MUTANTS)]}) == len(REVIEW_MUTANTS)


def test_the_tests_that_reach_each_mutant_of_the_sample_are_noted() -> None:
    """Those of the review are in other rooms, too."""
    paths = {str(path_of(mutant.module)) for _, mutant in sample(400, 1, "")}
    assert [path for path in paths if not any(folder in path for folder in FOLDERS)] == []


def test_the_kept_draw_stays_where_the_code_does() -> None:
    """A mutant of code that is gone is drawn anew: few are, or the draw would have to be kept anew."""
    lines = [json.loads(line) for line in KEPT_DRAW.read_text().splitlines()]
    kept = {tuple(line[1:5]) for line in lines}
    chosen = [(mutant.module, mutant.function, mutant.source, mutant.text) for _, mutant in sample(400, 1, "")]
    assert 0.9 < len([one for one in chosen if one in kept]) / len(chosen) <= 1
    other = [(mutant.module, mutant.function, mutant.source, mutant.text) for _, mutant in sample(400, 2, "")]
    assert len([one for one in other if one in kept]) / len(other) < 0.5


@pytest.mark.slow
def test_a_smaller_sample_is_part_of_a_larger() -> None:
    assert set(sample(60, 1, "")) < set(sample(90, 1, ""))
    assert set(sample(60, 1, "")) != set(sample(60, 2, ""))


PLANTED = """
def fires(count, free):
    return count >= 4 and not free

def drain(left):
    while left:
        left -= 1
    return left
"""
PLANTED_TESTS = """
from threading import Thread

from planted_rule import drain, fires

def test_weak():
    assert fires(9, False)
    assert not fires(1, False)

def test_strong():
    assert fires(4, False)

def test_drained():
    assert drain(3) == 0

def test_in_a_thread():
    thread = Thread(target=drain, args=(3,))
    thread.start()
    thread.join()

def test_that_fails_without_a_mutant():
    assert fires(4, True)
"""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A rule that has a weak test and a strong one."""
    faulthandler.cancel_dump_traceback_later()  # a fork that records would wait for pytest's thread
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "planted_rule.py").write_text(PLANTED)
    (tmp_path / "test_planted_rule.py").write_text(PLANTED_TESTS)
    yield tmp_path
    sys.modules.pop("planted_rule", None)


def fate(planted: Path, change: str, test: str) -> tuple[str, str]:
    mutant = next(one for one in mutants_of(planted / "planted_rule.py", "planted_rule") if one.text == change)
    fork = MutantFork(mutant, [f"{planted / 'test_planted_rule.py'}::{test}"], 0.0)
    return fork.fate(next_ended([fork.process])[1])


def test_a_strong_test_kills_what_a_weak_one_lets_live(planted: Path) -> None:
    assert fate(planted, "count >= 4 -> count > 4", "test_weak") == ("survived", "")
    killed, killer = fate(planted, "count >= 4 -> count > 4", "test_strong")
    assert (killed, killer.rpartition("::")[2]) == ("killed", "test_strong")


def test_a_mutant_that_never_ends_is_killed(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutant_fork, "LEAST_CPU_S", 2.0)
    assert fate(planted, "1 -> 2", "test_drained") == ("killed", "")


def test_tests_that_cannot_be_found_kill_no_mutant(planted: Path) -> None:
    assert fate(planted, "count >= 4 -> count > 4", "test_of_no_name")[0] == "error"


def test_a_test_that_fails_without_a_mutant_is_not_among_those_that_reach_a_function(planted: Path) -> None:
    tests = str(planted / "test_planted_rule.py")
    reached = in_a_fork(lambda: record_reach([tests, "-p", "no:dash"], ("planted_rule",)))
    reaching = {
        place.rpartition("/")[2]: {test.rpartition("::")[2] for test in names} for place, names in reached.tests.items()
    }
    assert reaching["planted_rule.py:2"] == {"test_weak", "test_strong"}
    assert reaching["planted_rule.py:5"] == {"test_drained", "test_in_a_thread"}


def test_a_newer_record_of_a_file_replaces_the_older() -> None:
    older = ReachedFunctions({"a:1": ["t.py::old", "u.py::kept"]}, {"t.py::old": 1.0, "u.py::kept": 2.0})
    newer = ReachedFunctions({"a:1": ["t.py::new"], "b:2": ["t.py::new"]}, {"t.py::new": 3.0})
    found = older.renewed(["t.py"], newer)
    assert found.tests == {"a:1": ["t.py::new", "u.py::kept"], "b:2": ["t.py::new"]}
    assert found.seconds["u.py::kept"] == 2.0


def test_a_result_holds_while_its_module_is_the_same() -> None:
    area, mutant = sample(3, 1, "")[0]
    result = MutantResult(area, mutant, digest(mutant.module), "killed")
    assert result.still_holds()
    assert not msgspec.structs.replace(result, module_digest="other").still_holds()
    assert not msgspec.structs.replace(result, fate="survived").still_holds()
    assert msgspec.structs.replace(result, fate="accepted").still_holds()


def test_mutants_that_no_test_reaches_count_as_alive_and_equivalent_ones_not_at_all() -> None:
    area, mutant = sample(3, 1, "")[0]
    fates = ["killed"] * 3 + ["survived", "unreached", "error", "accepted"]
    assert share_killed(MutantResult(area, mutant, "", fate) for fate in fates) == 0.5


def test_results_are_read_back_the_last_of_each_mutant(tmp_path: Path) -> None:
    area, mutant = sample(3, 1, "")[0]
    lines = [msgspec.json.encode(MutantResult(area, mutant, "", fate)) for fate in ("survived", "killed")]
    (tmp_path / "results").write_bytes(b"\n".join(lines))
    assert read_results(tmp_path / "results")[mutant].fate == "killed"
    assert read_results(tmp_path / "none") == {}


def test_accepted_mutants_exist_and_have_a_reason() -> None:
    for (module, function, source, text), reason in ACCEPTED_MUTANTS.items():
        found = [(one.function, one.source, one.text) for one in mutants_of(path_of(module), module)]
        assert (function, source, text) in found
        assert len(reason) > 20


@needs_vllm
@pytest.mark.prove
def test_most_of_400_mutants_are_killed(capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "kvscope.lab.mutation"], cwd=ROOT, capture_output=True, text=True)
    with capsys.disabled():
        print(f"\n{done.stdout}")
    assert done.returncode == 0, done.stderr[-2000:]
