"""Prompts of a step: room for them, and shares of the budget."""

from collections.abc import Sequence

import pytest

from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.engine.prompts import token_shares
from specinfer.engine.scheduler import Schedule, Scheduler
from specinfer.model.kv_cache import KVCache
from tiny import make_request

BUDGET = 64


def _request(name: str, length: int, *, priority: int = 0, first: int = 0) -> Request:
    request: Request = make_request(
        name, range(first, first + length), SamplingParams(max_tokens=None), cache_salt="", priority=priority
    )
    return request


def _running(scheduler: Scheduler) -> list[str]:
    return [request.request_id for request in scheduler.running]


def _scheduler(*requests: Request, num_slots: int = 10_000) -> tuple[Scheduler, KVCache]:
    """Return a scheduler that has begun with these requests, as far as there was room."""
    cache = KVCache(num_slots, keeps_prefixes=True)
    scheduler = Scheduler(cache, 32, BUDGET)
    for request in requests:
        scheduler.add(request)
    _step(scheduler, cache)
    return scheduler, cache


def _step(scheduler: Scheduler, cache: KVCache) -> Schedule:
    schedule = scheduler.schedule()
    for span in schedule.spans:
        is_last = span.produces_token
        cache.reserve(span.request.request_id, span.end - span.start)
        scheduler.keep(span.request, range(span.end - span.start))
        if is_last:
            span.request.append(1, None)
    return schedule


def _steps_to_first_token(scheduler: Scheduler, cache: KVCache, request: Request) -> int:
    for number in range(1, 1000):
        _step(scheduler, cache)
        if request.num_output:
            return number
    raise AssertionError("no first token")


def _long(names: Sequence[str]) -> list[Request]:
    return [_request(name, 1000, first=1000 * (i + 1)) for i, name in enumerate(names)]


@pytest.mark.parametrize("num_long", [1, 2, 3, 8])
def test_a_short_prompt_joins_the_next_step_whatever_is_read(num_long: int) -> None:
    scheduler, cache = _scheduler(*_long("abcdefgh"[:num_long]))
    short = _request("short", BUDGET // 2 - 2)
    scheduler.add(short)
    assert _steps_to_first_token(scheduler, cache, short) == 1


def test_two_long_prompts_are_read_at_a_time_and_the_third_follows() -> None:
    long = _long("abc")
    scheduler, cache = _scheduler(*long)
    assert _running(scheduler) == ["a", "b"]
    _steps_to_first_token(scheduler, cache, long[0])
    _step(scheduler, cache)
    assert _running(scheduler) == ["a", "b", "c"]


def test_a_prompt_that_is_mostly_cached_is_short() -> None:
    scheduler, cache = _scheduler(turn := _request("turn", 500))
    _steps_to_first_token(scheduler, cache, turn)
    scheduler.remove(turn)
    for request in _long("abc"):
        scheduler.add(request)
    _step(scheduler, cache)
    following = _request("following", 520)
    scheduler.add(following)
    assert _steps_to_first_token(scheduler, cache, following) == 1
    assert following.num_cached == 500
    assert next(iter(scheduler.waiting)).num_computed == 0, "that without room holds nothing"


def test_no_prompt_goes_past_one_of_its_tenant_with_a_better_priority() -> None:
    scheduler, cache = _scheduler(*_long("ab"), _request("urgent", 1000, priority=-1, first=5000))
    assert _running(scheduler) == ["urgent", "a"]
    scheduler.add(_request("better", 1000, priority=-1, first=7000))
    for name, priority in (("worse", 0), ("same", -1)):
        scheduler.add(_request(name, 10, priority=priority, first=8000))
    other = _request("other", 10, first=9000)
    other.tenant = "b"
    scheduler.add(other)
    _step(scheduler, cache)
    assert _running(scheduler) == ["urgent", "a", "other", "same"]


def test_short_prompts_fill_a_step_and_no_more() -> None:
    scheduler, cache = _scheduler(*_long("a"))
    for number in range(20):
        scheduler.add(_request(str(number), 10, first=10 * number))
    _step(scheduler, cache)
    assert _running(scheduler) == ["a", "0", "1", "2", "3", "4", "5", "6"], "the seventh takes the last of 64 tokens"


def test_slots_for_the_rest_of_the_running_prompts_are_kept_for_them() -> None:
    """Else one of two prompts would be preempted halfway, and read again."""
    scheduler, cache = _scheduler(*_long("ab"), num_slots=1600)
    for _ in range(10):
        assert not _step(scheduler, cache).preempted
        assert _running(scheduler) == ["a"]


def test_a_waiting_long_prompt_is_served_amid_a_stream_of_short_ones() -> None:
    scheduler, cache = _scheduler(*_long("ab"))
    third = _long("cde")[2]
    scheduler.add(third)
    short = list[Request]()
    for step in range(400):
        short.append(_request(f"short {step}", 30, first=20_000 + 30 * step))
        scheduler.add(short[-1])
        _step(scheduler, cache)
        for request in [one for one in short if one.num_output]:
            scheduler.remove(request)
            short.remove(request)
        if third.num_output:
            return
    raise AssertionError("short prompts keep the long one waiting")


# ------------------------------------------------------------------------------------------- shares


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
