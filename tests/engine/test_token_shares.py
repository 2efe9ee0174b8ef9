"""Shares of a step's budget: who computes how many known tokens."""

from specinfer import SamplingParams
from specinfer.core.request import Request
from specinfer.engine.token_shares import token_shares
from tiny import make_request


def _reader(num_unread: int, params: SamplingParams | None = None) -> Request:
    return make_request("a", [1] * num_unread, params)


def _shares(*group: Request, budget: int = 16, logprobs: int = 16) -> list[int]:
    return token_shares(group, budget, logprobs, None)


def test_half_of_the_budget_is_for_the_oldest_and_the_rest_for_the_shortest() -> None:
    assert _shares(_reader(100), _reader(50), _reader(5), budget=23) == [11, 7, 5]


def test_what_others_leave_goes_to_the_oldest() -> None:
    assert _shares(_reader(100), _reader(3)) == [13, 3]
    assert _shares(_reader(100)) == [16]


def test_each_request_has_a_token_whatever_the_budget() -> None:
    assert _shares(*(_reader(9) for _ in range(4)), budget=2) == [1, 1, 1, 1]


def test_decoding_requests_compute_one_token() -> None:
    assert _shares(_reader(1), _reader(30), _reader(1)) == [1, 14, 1]


def test_tokens_with_log_probabilities_have_a_limit_of_their_own() -> None:
    asks = SamplingParams(prompt_logprobs=0)
    assert _shares(_reader(30, params=asks), logprobs=4) == [5]
    assert _shares(_reader(30, params=asks), _reader(20), logprobs=4) == [5, 11]
