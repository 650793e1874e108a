"""The tests of the judgement kill mutants of it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.accepted_mutants import ACCEPTED_MUTANTS
from tests.mutation.mutant_sites import mutants_of, mutated_tree
from tests.mutation.mutation_run import AREAS, ROOT, sample
from tests.mutation.review_mutants import REVIEW_MUTANTS

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
    assert chosen == sample(60, 1, "")
    assert len({mutant for _, mutant in chosen[: len(REVIEW_MUTANTS)]}) == len(REVIEW_MUTANTS)


def test_accepted_mutants_exist_and_have_a_reason() -> None:
    for (module, function, text), reason in ACCEPTED_MUTANTS.items():
        path = ROOT / f"{module.removeprefix('kvscope.').replace('.', '/')}.py"
        assert any((one.function, one.text) == (function, text) for one in mutants_of(path, module)), text
        assert len(reason) > 20


@pytest.mark.prove
def test_most_of_400_mutants_are_killed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutation"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    print(done.stdout)
    fates = [line.split()[0] for line in done.stdout.splitlines() if line.startswith(("killed ", "survived "))]
    assert fates.count("killed") >= 0.85 * len(fates), done.stdout
