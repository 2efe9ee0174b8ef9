"""Places for outputs: how many a tenant may have, and which are kept for others."""

from types import SimpleNamespace
from typing import Any

import pytest

from specinfer.admission import Admission
from specinfer.core.errors import QueueFullError, QuotaError
from specinfer.core.limits import QueueLimits, TenantLimits
from specinfer.quotas import Quotas


def _generation(*ids: str, tenant: str = "", num_tokens: int = 4) -> Any:
    requests = [
        SimpleNamespace(request_id=i, tenant=tenant, prompt_ids=[0] * num_tokens, num_computed=0, is_finished=False)
        for i in ids
    ]

    class Generation:
        def __init__(self) -> None:
            self.requests = requests

    return Generation()


def test_outputs_are_live_from_the_reading_of_their_prompt_to_their_end() -> None:
    admission = Admission(2, QueueLimits())
    assert admission.idle.is_set()
    with admission.reading(2, "a"):
        assert (admission.num_live, admission.num_live_by_tenant()) == (2, {"a": 2})
        assert not admission.idle.is_set()
    assert admission.idle.is_set()
    generation = _generation("0", "1", tenant="b")
    admission.add(generation)
    assert admission.num_live_by_tenant() == {"a": 0, "b": 2}
    assert admission.generations == {generation}
    first, last = generation.requests
    admission.remove([first])
    assert (admission.generation_of(first), admission.generation_of(last)) == (None, generation)
    admission.remove([first, last])
    assert admission.idle.is_set()


def test_the_queue_takes_as_many_outputs_as_may_run_and_wait() -> None:
    admission = Admission(2, QueueLimits(max_num_queued_reqs=3))
    with admission.reading(4, ""):
        admission.check(1, "", 2)
        with pytest.raises(QueueFullError, match=r"2 requests"):
            admission.check(2, "", 2)


def test_places_are_kept_for_other_tenants_and_each_has_one() -> None:
    admission = Admission(4, QueueLimits(max_num_queued_reqs=12))
    admission.quotas = Quotas(dict.fromkeys(("a", "b"), TenantLimits()))
    with admission.reading(14, "a"):  # an eighth of 16 places is kept for each of two
        with pytest.raises(QueueFullError):
            admission.check(1, "a", 10)
        admission.check(2, "b", 10)
    with admission.reading(20, "a"):
        admission.check(1, "b", 16)
        with pytest.raises(QueueFullError):
            admission.check(2, "b", 16)


def test_a_tenant_has_the_places_of_its_own_limits() -> None:
    admission = Admission(4, QueueLimits(max_num_queued_reqs=12))
    admission.quotas = Quotas({"a": TenantLimits(max_num_seqs=1, max_num_queued_reqs=2), "b": TenantLimits()})
    assert [admission.capacity_of(tenant) for tenant in ("a", "b", "unknown")] == [3, 16, 16]
    with admission.reading(3, "a"), pytest.raises(QuotaError):
        admission.check(1, "a", 0)


def test_a_prompt_waits_with_others_only_within_the_limit_on_tokens() -> None:
    admission = Admission(4, QueueLimits(max_num_queued_tokens=10))
    job: Any = _generation("new", num_tokens=11)
    admission.check_tokens(job)
    running, waiting = _generation("0", num_tokens=100), _generation("1", num_tokens=1)
    running.requests[0].num_computed = 1
    admission.add(running)
    admission.check_tokens(job)
    admission.add(waiting)
    with pytest.raises(QueueFullError, match=r"1 token\)"):
        admission.check_tokens(job)
