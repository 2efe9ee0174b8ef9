"""The prediction drafter: where it goes on after the output and the prediction parted."""

import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafting import draft_within
from specinfer.core.request import Request, Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import OFF, TokenTree, TreeBudget
from specinfer.drafters.lookup.prediction import MAX_MATCH, TRUSTED, PredictionDrafter
from specinfer.verify import Acceptance


def _request(prediction: Sequence[int], said: Sequence[int] = (), prompt: Sequence[int] = (0,)) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=10**6)
    request = Request("0", list(prompt), params, 0, prediction_ids=tuple(prediction))
    request.token_ids += said
    return request


def _guesses(drafter: PredictionDrafter, request: Request, max_nodes: int = 4, max_depth: int = 4) -> list[int]:
    tree = draft_within(drafter, request, TreeBudget(max_nodes, max_depth))
    assert tree.num_guessed <= min(max_nodes, max_depth)
    assert tree.parents == tuple(range(-1, tree.num_guessed))
    confidences = [draw.confidence for draw in tree.draws]
    assert confidences == sorted(confidences)
    assert all(0 < confidence < 1 for confidence in confidences)
    return list(tree.tokens[1:])


@pytest.mark.parametrize(
    ("said", "guesses"),
    [
        ([], [1, 2, 3, 4]),
        ([1, 2], [3, 4, 5, 6]),
        ([1, 2, 3, 4, 5, 6, 7], [8]),
        ([1, 2, 3, 4, 5, 6, 7, 8], []),  # the prediction's end
        ([1, 9], []),  # said nowhere in the prediction
        ([1, 9, 3], [4, 5, 6, 7]),  # one token replaced
        ([1, 9, 9, 2, 3], [4, 5, 6, 7]),  # two put in
        ([1, 5], [6, 7, 8]),  # three left out
        ([5, 6, 2], [3, 4, 5, 6]),  # a piece moved
        ([1, 2, 9, 10, 11], []),
    ],
)
def test_by_hand(said: list[int], guesses: list[int]) -> None:
    request = _request(range(1, 9))
    drafter = PredictionDrafter()
    for token in said:
        _guesses(drafter, request)
        request.token_ids.append(token)
    assert _guesses(drafter, request) == guesses
    assert _guesses(PredictionDrafter(), request) == guesses  # the same after having been put back


def test_the_place_nearest_after_the_last_one_is_taken() -> None:
    prediction = [1, 2, 7, 11, 3, 4, 7, 12, 5, 6, 7, 13]
    drafter, request = PredictionDrafter(), _request(prediction, [1, 2])
    assert _guesses(drafter, request, 1) == [7]
    request.token_ids += [9, 7]
    assert _guesses(drafter, request, 1) == [11]
    drafter, request = PredictionDrafter(), _request(prediction, [3, 4])
    assert _guesses(drafter, request, 1) == [7]
    request.token_ids += [9, 7]
    assert _guesses(drafter, request, 1) == [12]
    request.token_ids += [9, 4, 7]  # a longer match is taken wherever it is
    assert _guesses(drafter, request, 1) == [12]
    request.token_ids += [9, 2]  # nothing after it: what stands before
    assert _guesses(drafter, request, 1) == [7]


def test_more_agreement_is_more_confidence() -> None:
    request = _request(range(100), [9, 50])
    drafter, spans = PredictionDrafter(), [Span(request, 2, 3)]
    (short,) = drafter.draft(spans, [TreeBudget(2, 2)])
    request.token_ids += [51, 52, 53]
    (long,) = drafter.draft(spans, [TreeBudget(2, 2)])
    assert long.draws[0].confidence > short.draws[1].confidence > short.draws[0].confidence


def test_without_a_prediction_nothing_is_drafted_or_kept() -> None:
    drafter = PredictionDrafter()
    assert _guesses(drafter, _request([])) == []
    request = _request([1, 2])
    assert drafter.draft([Span(request, 0, 1)], [OFF]) == [TokenTree.root(0)]
    assert not drafter._alignments
    assert _guesses(drafter, request, 9, 1) == [1]
    assert _guesses(drafter, request, 1, 9) == [1]
    drafter.observe(request, TokenTree.root(0), Acceptance((), 0))
    drafter.forget("0")
    drafter.forget("0")
    assert not drafter._alignments


def test_another_request_of_the_same_name_starts_anew() -> None:
    drafter = PredictionDrafter()
    assert _guesses(drafter, _request([1, 2], [1])) == [2]
    assert _guesses(drafter, _request([3, 4])) == [3, 4]


class _Twin:
    """The same by trying every length and every place."""

    def __init__(self, prediction: Sequence[int]) -> None:
        self.prediction = list(prediction)
        self.place: int | None = 0
        self.agreed, self.trusted = TRUSTED, 0

    def hear(self, output: Sequence[int], num_new: int) -> None:
        parted = False
        for token in output[len(output) - num_new :]:
            if self.place is not None and self.prediction[self.place : self.place + 1] == [token]:
                self.place, self.agreed = self.place + 1, self.agreed + 1
            else:
                self.place, self.agreed, parted = None, 0, True
            if self.place is not None and self.agreed >= TRUSTED:
                self.trusted = self.place
        if not parted:
            return
        for length in range(min(len(output), MAX_MATCH), 0, -1):
            end = list(output[-length:])
            ends = [i for i in range(length, len(self.prediction) + 1) if self.prediction[i - length : i] == end]
            if ends:
                after = [i for i in ends if i >= self.trusted]
                self.place, self.agreed = min(after) if after else max(ends), length
                if length >= TRUSTED:
                    self.trusted = self.place
                return


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=20),
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), max_size=8),
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
)
def test_the_slow_twin_goes_on_at_the_same_place(
    prediction: list[int], steps: list[list[int]], prompt: list[int]
) -> None:
    drafter, request, twin = PredictionDrafter(), _request(prediction, (), prompt), _Twin(prediction)
    for said in [[], *steps]:
        request.token_ids += said
        twin.hear(request.output_ids, len(said))
        expected = prediction[twin.place : twin.place + 4] if twin.place is not None else []
        assert _guesses(drafter, request) == expected


def test_an_edited_file_takes_few_passes() -> None:
    source = random.Random(4)
    before = [source.randrange(300) for _ in range(2000)]
    after = [token if source.random() > 0.01 else 999 for token in before if source.random() > 0.01]
    drafter, request, passes = PredictionDrafter(), _request(before), 0
    while request.num_output < len(after):
        passes += 1
        rest = after[request.num_output :]
        agreed = 0
        for guess, token in zip(_guesses(drafter, request, 16, 16), rest, strict=False):
            if guess != token:
                break
            agreed += 1
        request.token_ids += rest[: agreed + 1]
    assert len(after) / passes > 10


@pytest.mark.parametrize("period", [[7], [7] * 31 + [9]], ids=["same", "nearly the same"])
def test_long_predictions_of_one_token(period: list[int]) -> None:
    drafter, request = PredictionDrafter(), _request((period * 100_000)[:100_000])
    begin = time.perf_counter()
    for _ in range(100):
        request.token_ids += [8, *[7] * 40]
        assert _guesses(drafter, request)
    assert time.perf_counter() - begin < 60  # about a quarter of a second


def test_tokens_beyond_all_characters_are_guessed_too() -> None:
    big = 0x110000
    assert _guesses(PredictionDrafter(), _request([5, big + 1, 6, 0xD800], [9, big + 1])) == [6, 0xD800]
