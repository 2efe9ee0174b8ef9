"""The cases of a quick run have all values, or pairs of values, that all cases have."""

from itertools import combinations, product

import pytest

from covering import Case, covering

CASES: list[Case] = [case for case in product("abcdefgh", range(5), (True, False)) if case != ("a", 0, True)]


@pytest.mark.parametrize(("strength", "most"), [(1, 8), (2, 48)])
def test_few_cases_have_every_combination(strength: int, most: int) -> None:
    def of(cases: list[Case]) -> set[object]:
        return {values for case in cases for values in combinations(enumerate(case), strength)}

    chosen = [CASES[place] for place in covering(CASES, strength)]
    assert of(chosen) == of(CASES)
    assert len(set(chosen)) == len(chosen) <= most


def test_a_case_without_others_is_kept() -> None:
    assert covering([("a",)], 2) == covering([()], 2) == [0]


@pytest.mark.covering(1)
@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("left", range(4))
def test_others_are_slow(left: int, right: bool, request: pytest.FixtureRequest) -> None:
    cases = [item for item in request.session.items if item.nodeid.startswith(request.node.nodeid.partition("[")[0])]
    quick = [item for item in cases if item.get_closest_marker("slow") is None]
    assert len(quick) == 4
