"""Scores of sources on the text of one request: one that is never right is soon not believed, and then again."""

from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.drafters.lookup.passage import Passage
from specinfer.drafters.lookup.source_scores import SourceScores
from specinfer.drafters.lookup.suffix_growth import Match, first_tokens

TEXT = Passage([7, 8])


def _request() -> Request:
    return Request("0", [1, 2], SamplingParams(temperature=0.0, max_tokens=10**6), 0)


def _run(scores: SourceScores, request: Request, token: int, times: int) -> list[Match]:
    for _ in range(times):
        matches = scores.trusted(request, [Match(TEXT, 0, 8, "a"), Match(TEXT, 1, 8, "b")], 1)
        request.token_ids.append(token)
    return matches


def test_a_source_that_is_never_right_is_soon_not_believed_and_comes_back() -> None:
    scores, request = SourceScores(), _request()
    assert [match.trust for match in _run(scores, request, 7, 1)] == [1.0, 1.0]
    wrong = _run(scores, request, 7, 30)
    assert [match.name for match in wrong] == ["a", "b"]
    assert wrong[0].trust == 1.0
    assert wrong[1].trust < 0.2
    right = _run(scores, request, 8, 10)
    assert right[0].trust < 0.7 < right[1].trust


def test_sources_are_scored_once_for_each_token() -> None:
    scores, request, matches = SourceScores(), _request(), [Match(TEXT, 0, 8, "a")]
    scores.trusted(request, matches, 1)
    request.token_ids.append(9)
    first = scores.trusted(request, matches, 1)
    assert first[0].trust < 1
    assert [scores.trusted(request, matches, 1) for _ in range(3)] == [first] * 3


def test_a_source_that_proposes_nothing_is_not_scored() -> None:
    scores, request = SourceScores(), _request()
    nothing = Match(TEXT, 2, 8, "a")
    assert first_tokens(nothing) == {}
    for _ in range(5):
        assert scores.trusted(request, [nothing], 1) == [nothing]
        request.token_ids.append(9)
