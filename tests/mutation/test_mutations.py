"""Small faults in the source of the core, of which tests must notice nearly all.

A survivor that changes what a user sees calls for a test. One that changes only a limit of work may stay.
"""

import ast

import pytest

from mutations import EQUIVALENT, ROOT, TESTS, mutants_of, mutants_of_exactness, sample, survivors

SOURCE = '''"""A docstring with 1 number."""
import logging

LIMIT: int = 3


def kept(sizes, least=1):
    """Return sizes, at least 1."""
    assert len(sizes) < 9
    logger.info("%d sizes", 3 + 4)
    if not sizes or least == 2:
        raise ValueError("none of 3")
    return max(sizes) - pow(least, 2), f"{least + 1}"
'''


def test_faults_are_made_of_comparisons_numbers_operators_and_arguments() -> None:
    made = {(mutant.old, mutant.new) for mutant in mutants_of("a.py", SOURCE)}
    assert made == {
        ("1", "2"),
        ("2", "3"),
        ("not sizes or least == 2", "not sizes and least == 2"),
        ("not sizes", "sizes"),
        ("least == 2", "least != 2"),
        ("max(sizes)", "min(sizes)"),
        ("max(sizes) - pow(least, 2)", "max(sizes) + pow(least, 2)"),
        ("pow(least, 2)", "pow(2, least)"),
    }


def test_every_fault_changes_its_module_and_leaves_it_readable() -> None:
    for mutant in mutants_of("a.py", SOURCE):
        changed = mutant.applied_to(SOURCE.encode())
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE))


def test_modules_and_their_tests_exist() -> None:
    for module, tests in TESTS.items():
        assert (ROOT / "src/specinfer" / module).is_file(), module
        assert all((ROOT / "tests" / test).is_file() for test in tests), module


def test_lines_whose_faults_change_nothing_are_in_the_source() -> None:
    lines = {
        line.strip()
        for module in TESTS
        for line in (ROOT / "src/specinfer" / module).read_text(encoding="utf-8").splitlines()
    }
    assert {line for line, _ in EQUIVALENT} <= lines


@pytest.mark.timeout(600)
def test_faults_of_exactness_are_caught() -> None:
    mutants = mutants_of_exactness()
    assert mutants
    assert not survivors(mutants)


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
def test_nearly_all_faults_of_a_sample_are_caught() -> None:
    mutants = sample(60, seed=0)
    left = survivors(mutants)
    assert len(left) <= 0.15 * len(mutants), "\n".join(map(str, left))
