"""Who is next: the tenant that runs least, then the one served least, of its requests by priority, then the first."""

from specinfer.core.limits import SLO
from specinfer.core.request import Request, Span
from specinfer.core.sampling import SamplingParams
from specinfer.engine.scheduler import Scheduler
from specinfer.engine.waiting import WaitingQueue
from specinfer.model.kv_cache import KVCache
from tiny import make_request


def _request(name: str, tenant: str = "", priority: int = 0, length: int = 4) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=None)
    request = make_request(name, range(length), params, tenant=tenant, priority=priority, cache_salt=None)
    request.times.arrival = float(len(_MADE))
    _MADE.append(name)
    return request


_MADE: list[str] = []


def _names(queue: WaitingQueue) -> list[str]:
    return [request.request_id for request in queue]


def test_one_tenant_is_served_in_order() -> None:
    queue = WaitingQueue()
    for name in "abc":
        queue.add(_request(name))
    assert _names(queue) == ["a", "b", "c"]
    assert len(queue) == 3


def _due(name: str, ttft: float) -> Request:
    """Return a request whose first token is due so many seconds after its arrival."""
    request = _request(name)
    request.params = SamplingParams(slo=SLO(ttft=1000 * ttft))
    return request


def test_the_earliest_deadline_that_can_be_kept_goes_first() -> None:
    queue = WaitingQueue()
    first = len(_MADE)  # the time of the next arrival
    queue.clock = lambda: first + 4.0
    for request in (_request("a"), _due("b", 100.0), _due("c", 50.0), _due("d", 0.5)):  # the last is late
        queue.add(request)
    assert _names(queue) == ["c", "b", "a", "d"]


def test_every_fourth_place_is_that_of_the_oldest_whatever_deadlines_others_have() -> None:
    queue = WaitingQueue()
    queue.clock = lambda: 0.0
    for request in (_request("old"), _request("next"), *(_due(f"d{i}", 1e6) for i in range(9))):
        queue.add(request)
    names = _names(queue)
    assert names == ["d0", "d1", "d2", "old", "d3", "d4", "d5", "next", "d6", "d7", "d8"]
    served = []
    for _ in range(8):  # one at a time, as in steps with room for one request
        served.append(next(iter(queue)))
        assert queue.take(served[-1])
    assert [request.request_id for request in served] == names[:8]


def test_lower_priorities_go_first() -> None:
    queue = WaitingQueue()
    for name, priority in (("a", 1), ("b", 0), ("c", -1), ("d", 0)):
        queue.add(_request(name, priority=priority))
    assert _names(queue) == ["c", "b", "d", "a"]


def test_priorities_push_no_other_tenant_out() -> None:
    queue = WaitingQueue()
    running, pushing, quiet = _request("a0", "a"), _request("a1", "a", priority=-100), _request("b0", "b")
    for request in (running, pushing, quiet):
        queue.add(request)
    assert queue.take(running)
    queue.charge(running.tenant, 5.0)
    assert _names(queue) == ["b0", "a1"]


def test_the_tenant_served_least_is_next() -> None:
    queue = WaitingQueue()
    many = [_request(f"a{i}", "a") for i in range(3)]
    for request in (*many, _request("b0", "b")):
        queue.add(request)
    assert queue.take(many[0])
    queue.charge(many[0].tenant, 10.0)
    assert _names(queue) == ["b0", "a1", "a2"]


def test_a_pause_earns_no_credit() -> None:
    queue = WaitingQueue()
    first = _request("a0", "a")
    queue.add(first)
    queue.charge(first.tenant, 1000.0)
    late = _request("b0", "b")
    queue.add(late)
    queue.charge(late.tenant, 1.0)
    assert queue.take(late)
    assert _names(queue) == ["a0"], "level with a from the start, but one token more"
    queue.leave(late)
    assert "b" not in queue._served, "nothing is kept of tenants that are gone"


def test_one_that_was_put_back_is_next() -> None:
    queue = WaitingQueue()
    a, b = _request("a"), _request("b", priority=-5)
    queue.add(a)
    assert queue.take(a)
    queue.add(b)
    queue.put_back(a)
    assert _names(queue) == ["a", "b"]
    assert queue.take(a)
    assert not queue.take(a)


def _serve(requests: list[Request], num_steps: int, num_tokens: int = 8) -> dict[str, int]:
    """Tokens computed for each tenant; outputs never end."""
    cache = KVCache(10_000)
    scheduler = Scheduler(cache, 2, num_tokens)
    for request in requests:
        scheduler.add(request)
    served: dict[str, int] = {}
    for _ in range(num_steps):
        for span in scheduler.schedule().spans:
            request, count = span.request, span.end - span.start
            served[request.tenant] = served.get(request.tenant, 0) + count
            says = span.produces_token
            cache.reserve(request.request_id, count)
            cache.commit(request.request_id, range(count))
            request.num_computed += count
            if says:
                request.append(1, None)
            if request.num_output == 4:
                scheduler.remove(request)
    return served


def _scheduler(max_num_seqs: int, *requests: Request, num_slots: int = 1000) -> tuple[Scheduler, KVCache]:
    cache = KVCache(num_slots)
    scheduler = Scheduler(cache, max_num_seqs, 100)
    for request in requests:
        scheduler.add(request)
    _step(scheduler, cache)
    return scheduler, cache


def _tenants(scheduler: Scheduler) -> str:
    return "".join(sorted(request.tenant for request in scheduler.running))


def test_free_slots_go_in_turns_to_the_tenant_that_runs_least() -> None:
    scheduler, _ = _scheduler(6, *(_request(f"{i}", tenant) for i, tenant in enumerate("aaaaaabbbbc")))
    assert _tenants(scheduler) == "aaabbc"
    scheduler, cache = _scheduler(4, *(_request(f"{i}", "a") for i in range(8)))
    scheduler.add(_request("b0", "b"))
    scheduler.add(_request("b1", "b"))
    scheduler.remove(scheduler.running[0])
    _step(scheduler, cache)
    assert _tenants(scheduler) == "aaab"
    scheduler.remove(scheduler.running[0])
    _step(scheduler, cache)
    assert _tenants(scheduler) == "aabb"


def test_a_tenant_runs_no_more_than_it_may() -> None:
    scheduler, cache = _scheduler(8)
    scheduler.waiting.max_running = {"a": 2}
    for i in range(5):
        scheduler.add(_request(f"a{i}", "a"))
    _step(scheduler, cache)
    assert _tenants(scheduler) == "aa"
    scheduler.add(_request("b0", "b"))
    _step(scheduler, cache)
    assert _tenants(scheduler) == "aab", "what waits for its own tenant keeps nobody else"
    scheduler.remove(scheduler.running[0])
    _step(scheduler, cache)
    assert _tenants(scheduler) == "aab"
    assert scheduler.num_draft_slots([]) > 900, "no slots are kept for a request that may not run"


def test_a_tenant_with_nothing_running_gets_a_slot_at_once() -> None:
    scheduler, cache = _scheduler(4, *(_request(f"a{i}", "a") for i in range(6)))
    newest = scheduler.running[-1]
    for tenant in "bc":
        scheduler.add(_request(tenant, tenant))
    schedule = scheduler.schedule()
    assert schedule.preempted == [newest]
    assert _tenants(scheduler) == "aaab"
    _finish(schedule.spans, cache)
    _step(scheduler, cache)
    assert _tenants(scheduler) == "aabc"
    assert next(iter(scheduler.waiting)).num_output, "what was preempted comes before others of its tenant"
    scheduler.add(_request("d", "d"))
    _step(scheduler, cache)
    assert _tenants(scheduler) == "abcd"
    scheduler.add(_request("e", "e"))
    assert not scheduler.schedule().preempted, "nobody gives the only one away"


def test_a_tenant_with_nothing_running_gets_memory_from_the_one_that_runs_most() -> None:
    scheduler, cache = _scheduler(8, *(_request(f"a{i}", "a", length=10) for i in range(3)), num_slots=40)
    late = _request("b", "b", length=15)
    scheduler.add(late)
    for _ in range(3):
        _step(scheduler, cache)
    assert late in scheduler.running
    assert late.num_output > 0
    while len(scheduler.running) == 3:  # slots run out
        _step(scheduler, cache)
    assert _tenants(scheduler) == "ab"


def test_requests_in_a_pass_are_not_preempted_but_begin_no_other_while_somebody_waits() -> None:
    scheduler, cache = _scheduler(2, _request("a0", "a"), _request("a1", "a"))
    spans = scheduler.schedule().spans
    scheduler.mark_in_flight(spans)
    scheduler.add(_request("b", "b"))
    schedule = scheduler.schedule()
    assert (schedule.spans, schedule.preempted) == ([], [])
    assert scheduler.is_starved
    _finish(spans, cache)
    scheduler.release(spans)
    assert len(scheduler.schedule().preempted) == 1
    assert _tenants(scheduler) == "ab"


def test_a_flood_does_not_push_others_out() -> None:
    flood = [_request(f"f{i}", "flood", length=20) for i in range(200)]
    quiet = [_request(f"q{i}", "quiet", length=20) for i in range(20)]
    served = _serve([*flood, *quiet], 100)
    assert served["quiet"] > 0.8 * served["flood"] or served["quiet"] == 20 * 23


def test_short_prompts_do_not_wait_for_a_long_one_to_be_read() -> None:
    cache = KVCache(10_000)
    scheduler = Scheduler(cache, 8, 64)
    long, short = _request("long", length=2000), _request("short", length=20)
    scheduler.add(long)
    _step(scheduler, cache)
    scheduler.add(short)
    for _ in range(3):
        _step(scheduler, cache)
    assert short.num_output > 0
    assert long.num_computed >= 4 * 32, "half of each step at least is the long one's"


def test_a_long_prompt_progresses_next_to_endless_short_ones() -> None:
    cache = KVCache(100_000)
    scheduler = Scheduler(cache, 8, 64)
    long = _request("long", length=1000)
    scheduler.add(long)
    for i in range(60):
        short = _request(f"short {i}", length=60)
        scheduler.add(short)
        _step(scheduler, cache)
        for request in list(scheduler.running):
            if request is not long and request.num_output:
                scheduler.remove(request)
    assert long.num_output > 0


def _step(scheduler: Scheduler, cache: KVCache) -> None:
    _finish(scheduler.schedule().spans, cache)


def _finish(spans: list[Span], cache: KVCache) -> None:
    for span in spans:
        request, count = span.request, span.end - span.start
        says = span.produces_token
        cache.reserve(request.request_id, count)
        cache.commit(request.request_id, range(count))
        request.num_computed += count
        if says:
            request.append(1, None)
