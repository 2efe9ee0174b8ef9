"""A quick run of tests with many cases: so few of them that each value of a parameter, or each pair of values, occurs.

    @pytest.mark.covering(2)

takes a covering array of strength 2 of a test's cases; the others are marked slow.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

Case = tuple[object, ...]


def covering(cases: Sequence[Case], strength: int) -> list[int]:
    """Places of some cases in which every combination of `strength` values that all of them have occurs.

    A case is taken if it has the most combinations that none before it has, so that few are.
    """
    open_ = [_combinations(case, strength) for case in cases]
    left, taken = set().union(*open_), []
    while left:
        best = max(range(len(cases)), key=lambda place: len(open_[place] & left))
        left -= open_[best]
        taken.append(best)
    return sorted(taken)


def _combinations(case: Case, strength: int) -> set[Any]:
    return set(combinations(enumerate(case), min(strength, len(case))))


@pytest.hookimpl(tryfirst=True)  # before slow tests are left out
def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        is_covering = item.get_closest_marker("covering") and not item.get_closest_marker("slow")
        if is_covering and isinstance(item, pytest.Function):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        marker = cases[0].get_closest_marker("covering")
        assert marker is not None
        kept = covering([tuple(map(repr, case.callspec.params.values())) for case in cases], *marker.args)
        for place in set(range(len(cases))).difference(kept):
            cases[place].add_marker(pytest.mark.slow)
