"""The scheduler alone: budgets of tokens and slots, order, preemption; no model."""

from hypothesis import given
from hypothesis import strategies as st

from specinfer.core.request import Request, Span
from specinfer.core.sampling import SamplingParams
from specinfer.engine.scheduler import Scheduler
from specinfer.model.kv_cache import KVCache
from tiny import make_request

PARAMS = SamplingParams(max_tokens=None)


def _request(name: str, length: int) -> Request:
    return make_request(name, range(length), PARAMS)


def _ranges(spans: list[Span]) -> dict[str, tuple[int, int]]:
    return {span.request.request_id: (span.start, span.end) for span in spans}


def _compute(cache: KVCache, spans: list[Span]) -> None:
    """What the engine does after a pass without guesses."""
    for span in spans:
        request, count = span.request, span.end - span.start
        says = span.produces_token
        cache.reserve(request.request_id, count)
        cache.commit(request.request_id, range(count))
        request.num_computed += count
        if says:
            request.append(1, None)


def test_a_long_prompt_is_read_in_chunks_together_with_others() -> None:
    cache = KVCache(100)
    scheduler = Scheduler(cache, 8, 10)
    for name, length in (("a", 4), ("b", 23), ("c", 3)):
        scheduler.add(_request(name, length))
    seen = []
    for _ in range(4):
        schedule = scheduler.schedule()
        assert not schedule.preempted
        seen.append(_ranges(schedule.spans))
        _compute(cache, schedule.spans)
    assert seen == [
        {"a": (0, 4), "b": (0, 3), "c": (0, 3)},
        {"a": (4, 5), "b": (3, 11), "c": (3, 4)},
        {"a": (5, 6), "b": (11, 19), "c": (4, 5)},
        {"a": (6, 7), "b": (19, 23), "c": (5, 6)},
    ]


def test_no_more_than_max_num_seqs_run() -> None:
    cache = KVCache(100)
    scheduler = Scheduler(cache, 2, 50)
    requests = [_request(name, 2) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    assert set(_ranges(scheduler.schedule().spans)) == {"a", "b"}
    assert [r.request_id for r in scheduler.requests()] == ["a", "b", "c"]
    scheduler.remove(requests[0])
    assert "c" in _ranges(scheduler.schedule().spans)


def test_a_budget_below_the_number_of_requests_starves_nobody() -> None:
    cache = KVCache(100)
    scheduler = Scheduler(cache, max_num_seqs=3, max_num_batched_tokens=3)
    for name in "abc":
        scheduler.add(_request(name, 1))
    scheduler.schedule()
    scheduler._max_num_batched_tokens = 1
    assert {span.request.request_id for span in scheduler.schedule().spans} == {"a", "b", "c"}


def test_a_large_step_reads_few_tokens_whose_log_probabilities_are_returned() -> None:
    """Each needs a row of logits, and memory is reserved for few of them."""
    scheduler = Scheduler(KVCache(5000), 8, 2048)
    scheduler.add(make_request("a", range(1000), SamplingParams(prompt_logprobs=0)))
    scheduler.add(_request("b", 1000))
    assert _ranges(scheduler.schedule().spans) == {"a": (0, 513), "b": (0, 1000)}


def test_the_newest_is_put_back_and_comes_first_in_the_queue() -> None:
    cache = KVCache(9)
    scheduler = Scheduler(cache, 8, 50)
    a, b, c = (_request(name, length) for name, length in (("a", 4), ("b", 4), ("c", 1)))
    for request in (a, b, c):
        scheduler.add(request)
    _compute(cache, scheduler.schedule().spans)
    assert cache.num_free == 0
    schedule = scheduler.schedule()
    assert schedule.preempted == [c, b], "one slot of c's for a; b needs one too and none is left but its own"
    assert _ranges(schedule.spans) == {"a": (4, 5)}
    assert list(scheduler.waiting) == [b, c]
    assert (b.num_computed, len(cache.slots("b"))) == (0, 0)
    assert cache.num_free == 5
    _compute(cache, schedule.spans)
    assert _ranges(scheduler.schedule().spans) == {"a": (5, 6)}, "b's five tokens need more than is free"


def test_a_request_waits_until_its_whole_prompt_fits() -> None:
    cache = KVCache(10)
    scheduler = Scheduler(cache, 8, 4)
    scheduler.add(_request("a", 6))
    scheduler.add(_request("b", 5))
    for _ in range(2):
        spans = scheduler.schedule().spans
        assert set(_ranges(spans)) == {"a"}
        _compute(cache, spans)


def test_a_request_waits_for_a_shared_beginning_only_under_its_own_salt() -> None:
    for salt, running in (("mine", {"a"}), ("yours", {"a", "b"}), (None, {"a", "b"})):
        scheduler = Scheduler(KVCache(400, keeps_prefixes=True), 8, 400)
        scheduler.add(make_request("a", range(100), PARAMS, cache_salt="mine"))
        scheduler.add(make_request("b", range(100), PARAMS, cache_salt=salt))
        assert set(_ranges(scheduler.schedule().spans)) == running


def test_cached_slots_that_a_request_would_share_are_not_counted_as_free_for_it() -> None:
    cache = KVCache(20, keeps_prefixes=True)
    cache.reserve("old", 10)
    cache.commit("old", range(10))
    cache.release("old", "", range(10))
    scheduler = Scheduler(cache, 8, 50)
    running = make_request("running", [20] * 6, PARAMS, cache_salt="")
    waiting = make_request("waiting", range(18), PARAMS, cache_salt="")
    scheduler.add(running)
    _compute(cache, scheduler.schedule().spans)
    scheduler.add(waiting)  # eight tokens beside the ten that are cached, and four slots are free
    for _ in range(3):
        schedule = scheduler.schedule()
        assert not schedule.preempted
        assert set(_ranges(schedule.spans)) == {"running"}
        _compute(cache, schedule.spans)
    assert list(scheduler.waiting) == [waiting]
    scheduler.remove(running)
    assert _ranges(scheduler.schedule().spans) == {"waiting": (10, 18)}


def test_removing_from_anywhere_gives_slots_back() -> None:
    cache = KVCache(20)
    scheduler = Scheduler(cache, 1, 50)
    running, waiting, unknown = _request("a", 3), _request("b", 3), _request("c", 3)
    scheduler.add(running)
    scheduler.add(waiting)
    _compute(cache, scheduler.schedule().spans)
    for request in (waiting, unknown, running, running):
        scheduler.remove(request)
    assert not list(scheduler.requests())
    assert cache.num_free == 20


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    outputs=st.lists(st.integers(1, 12), min_size=8, max_size=8),
    num_slots=st.integers(42, 90),
    max_num_seqs=st.integers(1, 8),
    max_tokens=st.integers(1, 40),
    num_tenants=st.integers(1, 4),
)
def test_everybody_is_served_within_the_limits(
    lengths: list[int], outputs: list[int], num_slots: int, max_num_seqs: int, max_tokens: int, num_tenants: int
) -> None:
    cache = KVCache(num_slots)
    scheduler = Scheduler(cache, max_num_seqs, max_tokens)
    scheduler.waiting.max_running = {"1": 2}
    requests = [
        make_request(str(i), range(length), SamplingParams(max_tokens=outputs[i]), tenant=str(i % num_tenants))
        for i, length in enumerate(lengths)
    ]
    for request in requests:
        scheduler.add(request)
    steps = 0
    while list(scheduler.requests()):
        steps += 1
        assert steps < 3000, "no progress"
        schedule = scheduler.schedule()
        assert 0 < len(schedule.spans) <= max_num_seqs
        assert len(scheduler.running) <= max_num_seqs
        assert sum(request.tenant == "1" for request in scheduler.running) <= 2
        num_tokens = sum(span.end - span.start for span in schedule.spans)
        assert num_tokens <= max(max_tokens, len(scheduler.running))
        assert len({span.request.request_id for span in schedule.spans}) == len(schedule.spans)
        for span in schedule.spans:
            assert span.request not in schedule.preempted
            assert span.start == span.request.num_computed == len(cache.slots(span.request.request_id))
        _compute(cache, schedule.spans)
        for request in [r for r in requests if r.is_finished]:
            scheduler.remove(request)
    assert all(request.num_output == outputs[i] for i, request in enumerate(requests))
    assert cache.num_free == num_slots
