"""What a guess is worth: counts by rank and confidence, what is learned from a walk, and what is forgotten."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import Draw, TokenTree
from specinfer.drafters.growth.calibration import (
    _EDGES,
    _MEMORY,
    _PRIOR_WEIGHT,
    MIDDLE,
    RANKS,
    Calibration,
    source,
)
from specinfer.verify import Acceptance
from tiny import make_request

GREEDY, SAMPLED = make_request("g", [1]), make_request("s", [1], SamplingParams(temperature=1.0))


def _chance(calibration: Calibration, source: str, rank: int, confidence: float) -> float:
    return float(calibration.acceptance_prob(source, [rank], [confidence])[0])


def test_before_anything_was_seen_a_confidence_is_taken_at_its_word() -> None:
    calibration = Calibration()
    for confidence in (0.02, 0.2, 0.5, 0.75, 0.93, 0.999):
        assert _chance(calibration, "x", 0, confidence) == pytest.approx(confidence, abs=0.1)
    falling = calibration.acceptance_prob("x", range(RANKS), [0.5] * RANKS)
    assert (np.diff(falling) < 0).all(), "a later guess is worth less"
    assert (np.diff(calibration.by_rank("x")) < 0).all()
    rising = calibration.acceptance_prob("x", [0] * 99, np.linspace(0.0, 1.0, 99))
    assert (np.diff(rising) >= 0).all()


@given(st.lists(st.tuples(st.integers(0, 12), st.floats(0, 1), st.booleans()), max_size=60))
def test_chances_are_the_share_of_what_was_kept(tries: list[tuple[int, float, bool]]) -> None:
    """By plain counting, each cell from its own beginning; between the middles of buckets lines are straight."""
    calibration, fresh = Calibration(), Calibration()
    for rank, confidence, kept in tries:
        calibration.count("x", rank, confidence, kept=kept)

    def share(rank: int, bucket: int) -> float:
        low, high = ([0.0, *_EDGES, 1.0][bucket + i] for i in (0, 1))
        mine = [kept for r, c, kept in tries if min(r, RANKS - 1) == rank and sum(c > e for e in _EDGES) == bucket]
        prior = _PRIOR_WEIGHT * _chance(fresh, "x", rank, (low + high) / 2)
        return (prior + sum(mine)) / (_PRIOR_WEIGHT + len(mine))

    for rank, confidence, _ in tries:
        rank = min(rank, RANKS - 1)
        shares = [0.0, *(share(rank, bucket) for bucket in range(len(MIDDLE)))]
        wanted = np.interp(confidence, [0.0, *MIDDLE], shares)
        assert _chance(calibration, "x", rank, confidence) == pytest.approx(wanted, abs=1e-9)
    for rank in range(RANKS):
        mine = [kept for r, _, kept in tries if min(r, RANKS - 1) == rank]
        prior = _PRIOR_WEIGHT * fresh.by_rank("x")[rank]
        assert calibration.by_rank("x")[rank] == pytest.approx((prior + sum(mine)) / (_PRIOR_WEIGHT + len(mine)))


SURE = float(MIDDLE[6])  # 0.475: the middle of a bucket


@pytest.mark.parametrize("truth", [0.1, 0.5, 0.9])
def test_the_accepted_share_is_learned_whatever_the_confidence_is(truth: float) -> None:
    calibration, generator = Calibration(), np.random.default_rng(0)
    for kept in generator.random(2000) < truth:
        calibration.count("x", 0, SURE, kept=bool(kept))
    assert _chance(calibration, "x", 0, SURE) == pytest.approx(truth, abs=0.05)
    assert calibration.by_rank("x")[0] == pytest.approx(truth, abs=0.05)
    assert _chance(calibration, "x", 0, 0.05) == _chance(Calibration(), "x", 0, 0.05), "other cells are as before"
    assert _chance(calibration, "y", 0, SURE) == _chance(Calibration(), "y", 0, SURE), "and other drafters"


def test_a_change_of_text_is_followed() -> None:
    """However much was seen before: a cell remembers so many tries."""
    calibration = Calibration()
    for _ in range(100_000):
        calibration.count("x", 0, SURE, kept=True)
    assert _chance(calibration, "x", 0, SURE) > 0.99
    for _ in range(3 * int(_MEMORY)):
        calibration.count("x", 0, SURE, kept=False)
    assert _chance(calibration, "x", 0, SURE) < 0.2
    assert calibration.by_rank("x")[0] < 0.2


# Root with draws of two drafters, b's first on the node that a guessed first; below node 2 only a guessed.
TREE = TokenTree(
    (9, 1, 2, 3, 4),
    (-1, 0, 0, 0, 2),
    (
        Draw(1, "a", None, 0.5),
        Draw(2, "a", None, 0.3),
        Draw(4, "a", None, 0.8),
        Draw(2, "b", None, 0.6),
        Draw(3, "b", None, 0.2),
        Draw(2, "b", None, 0.6),
    ),
)


Counted = Sequence[tuple[str, int, float, bool]]


def _states(calibration: Calibration, request: Request) -> np.ndarray:
    return np.concatenate([calibration.state(source(name, request)) for name in "ab"])


def _one_by_one(request: Request, counted: Counted) -> np.ndarray:
    calibration = Calibration()
    for name, rank, confidence, kept in counted:
        calibration.count(source(name, request), rank, confidence, kept=kept)
    return _states(calibration, request)


@pytest.mark.parametrize("request_", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_draws_where_the_target_came_are_counted(request_: Request) -> None:
    """Node 4 was tried and not kept; without a path, the root alone was reached."""
    at_root = [("a", 0, 0.5), ("a", 1, 0.3), ("b", 0, 0.6), ("b", 1, 0.2), ("b", 2, 0.6)]
    on_path = (False, True, True, False, True)
    walked = [(*one, kept) for one, kept in zip(at_root, on_path, strict=True)]
    cases = {(2,): [*walked, ("a", 0, 0.8, False)], (): [(*one, False) for one in at_root]}
    together = Calibration()
    for path, counted in cases.items():
        calibration = Calibration()
        for one in (calibration, together):
            one.observe(request_, TREE, Acceptance(path, 7))
            one.observe(request_, TokenTree.root(9), Acceptance((), 7))
        assert _states(calibration, request_) == pytest.approx(_one_by_one(request_, counted))
    everything = [one for counted in cases.values() for one in counted]
    assert _states(together, request_) == pytest.approx(_one_by_one(request_, everything))


def test_a_restored_table_forgets_what_was_counted_before() -> None:
    source, calibration = Calibration(), Calibration()
    for _ in range(30):
        source.count("x", 0, SURE, kept=True)
    for _ in range(5):  # too few to be added up yet
        calibration.observe(GREEDY, TokenTree.chain(9, [1], "x", SURE), Acceptance((), 7))
    calibration.restore("x", source.state("x"))
    assert np.array_equal(calibration.state("x"), source.state("x"))
    assert np.array_equal(calibration.lines("x"), source.lines("x"))


def test_greedy_and_sampled_guesses_have_tables_of_their_own() -> None:
    calibration = Calibration()
    for _ in range(50):
        calibration.observe(SAMPLED, TREE, Acceptance((1,), 7))
    assert _chance(calibration, source("a", SAMPLED), 0, SURE) > 0.9
    assert _chance(calibration, source("a", GREEDY), 0, SURE) == _chance(Calibration(), "z", 0, SURE)


def test_how_much_a_confidence_is_trusted_further_down() -> None:
    for trust in (1.0, 0.5):
        chances = Calibration(trust).acceptance_prob("x", range(RANKS), [SURE] * RANKS)
        assert chances == pytest.approx([SURE * trust**rank for rank in range(RANKS)])
    assert _chance(Calibration(), "x", 0, 0.0) == 0.0, "without confidence no chance"
    assert _chance(Calibration(), "x", 0, 1.0) == pytest.approx(MIDDLE[-1])


def test_the_target_itself_is_expected_to_be_right_more_often_than_it_is_sure() -> None:
    calibration = Calibration()
    for confidence, share in ((0.2, 0.43), (0.5, 0.82), (0.85, 0.99)):
        assert _chance(calibration, "self:int4 sampled", 0, confidence) == pytest.approx(share, abs=0.03)
    assert _chance(calibration, "self:int4", 1, 0.2) == _chance(calibration, "x", 1, 0.2), "but no later guess"


@pytest.mark.parametrize(("truth", "expected"), [(1.0, 0.7), (0.2, 0.2)])
def test_results_of_the_target_itself_at_one_confidence_change_what_is_expected_at_others(
    truth: float, expected: float
) -> None:
    """A streamed target makes few passes, and trees are to be deep from the second one on."""
    calibration, fresh = Calibration(), Calibration()
    for i in range(20):
        calibration.count("self:int4", 0, 0.8, kept=i < 20 * truth)
    chance, before = _chance(calibration, "self:int4", 0, 0.3), _chance(fresh, "self:int4", 0, 0.3)
    assert (chance > expected > before) if truth == 1.0 else (chance < expected < before)
    restored = Calibration()
    restored.restore("self:int4", calibration.state("self:int4"))
    for each in (calibration, restored):
        for _ in range(20):
            each.count("self:int4", 0, 0.8, kept=True)
    assert (restored.state("self:int4") == calibration.state("self:int4")).all()
