"""The prediction drafter: where it goes on after the output and the prediction parted."""

import random
import time
from collections.abc import Sequence

import pytest

from drafting import draft_within
from specinfer.core.request import Request, Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import OFF, TokenTree, TreeBudget
from specinfer.drafters.lookup.prediction import PredictionDrafter
from specinfer.verify import Acceptance


def _request(prediction: Sequence[int], said: Sequence[int] = (), prompt: Sequence[int] = (0,)) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=10**6)
    request = Request("0", list(prompt), params, 0, prediction_ids=tuple(prediction))
    request.token_ids += said
    return request


def _guesses(drafter: PredictionDrafter, request: Request, max_nodes: int = 4, max_depth: int = 4) -> list[int]:
    tree = draft_within(drafter, request, TreeBudget(max_nodes, max_depth))
    assert tree.num_guessed <= max_nodes
    assert tree.max_depth <= max_depth
    assert all(0 < draw.confidence < 1 and draw.drafter == "prediction" for draw in tree.draws)
    first, node = list[int](), 0
    while tree.children[node]:
        token, node = next(iter(tree.children[node].items()))
        first.append(token)
    return first


@pytest.mark.parametrize(
    ("said", "guesses"),
    [
        ([], [1, 2, 3, 4]),
        ([1, 2], [3, 4, 5, 6]),
        ([1, 2, 3, 4, 5, 6, 7], [8]),
        ([1, 2, 3, 4, 5, 6, 7, 8], []),  # the prediction's end
        ([1, 9], [3, 4]),  # replaced, or put in, which takes the other half of the nodes
        ([1, 9, 3], [4, 5, 6, 7]),  # one token replaced
        ([1, 9, 9, 2, 3], [4, 5, 6, 7]),  # two put in
        ([1, 5], [6, 7, 8]),  # three left out
        ([5, 6, 2], [3, 4, 5, 6]),  # a piece moved
        ([1, 2, 9, 10, 11], [6, 7]),
        ([1, 2, 9, 10, 11, 12, 13], [3, 4, 5, 6]),  # too long for a replacement
        ([9, 10, 11, 12, 13], [1, 2, 3, 4]),
        ([1, 2, *range(100, 170)], []),
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
