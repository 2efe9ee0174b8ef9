"""The cache's books against a plain model of them, and its tensors."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from specinfer.model.kv_cache import KVCache, OutOfSlotsError
from specinfer.model.kv_tensors import KVTensors, LayerShape, bytes_per_slot

SLOTS = 20
OWNERS = st.sampled_from("abc")


class Books(RuleBasedStateMachine):
    """Each slot is free, owned by one request at one place, or reserved by one request at one place."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(SLOTS)
        self.committed: dict[str, list[int]] = {owner: [] for owner in "abc"}
        self.reserved: dict[str, list[int]] = {owner: [] for owner in "abc"}

    def _num_taken(self) -> int:
        return sum(map(len, (*self.committed.values(), *self.reserved.values())))

    @rule(owner=OWNERS, count=st.integers(0, 8))
    def reserve(self, owner: str, count: int) -> None:
        if count > SLOTS - self._num_taken():
            with pytest.raises(OutOfSlotsError, match=f"{count} slots"):
                self.cache.reserve(owner, count)
        else:
            self.reserved[owner] += self.cache.reserve(owner, count).tolist()

    @rule(owner=OWNERS, data=st.data())
    def commit(self, owner: str, data: st.DataObject) -> None:
        reserved = self.reserved[owner]
        of = data.draw(st.none() | st.integers(0, len(reserved) + 2))
        settled, left = (reserved, []) if of is None else (reserved[:of], reserved[of:])
        kept = data.draw(st.lists(st.sampled_from(range(len(settled))), unique=True) if settled else st.just([]))
        self.cache.commit(owner, kept, of)
        self.committed[owner] += [settled[i] for i in kept]
        self.reserved[owner] = left

    @rule(owner=OWNERS, length=st.integers(0, 12))
    def truncate(self, owner: str, length: int) -> None:
        self.cache.truncate(owner, length)
        self.committed[owner] = self.committed[owner][:length]

    @rule(owner=OWNERS)
    def free(self, owner: str) -> None:
        self.cache.free(owner)
        self.committed[owner], self.reserved[owner] = [], []

    @invariant()
    def agrees(self) -> None:
        for owner in "abc":
            assert self.cache.slots(owner).tolist() == self.committed[owner]
            assert self.cache.reserved(owner).tolist() == self.reserved[owner]
        taken = [slot for part in (*self.committed.values(), *self.reserved.values()) for slot in part]
        assert len(set(taken)) == len(taken)
        assert set(taken) <= set(range(SLOTS))
        assert self.cache.num_owned == len(taken)
        assert self.cache.num_free == SLOTS - len(taken)
        assert self.cache.num_free + self.cache.num_cached + self.cache.num_owned == SLOTS
        assert self.cache.is_balanced()


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=30)


def test_the_accepted_path_is_kept_in_order_and_the_rest_is_free() -> None:
    cache = KVCache(10)
    slots = cache.reserve("a", 6).tolist()  # two known tokens, then nodes 1, 2, 3, 4
    cache.commit("a", [0, 1, 4, 2])
    assert cache.slots("a").tolist() == [slots[0], slots[1], slots[4], slots[2]]
    assert cache.num_free == 6
    again = set(cache.reserve("b", 6).tolist())
    assert {slots[3], slots[5]} <= again, "what was rejected can be used at once"
    cache.free("a")
    cache.free("b")
    assert cache.num_free == 10


def test_a_refused_reservation_takes_nothing() -> None:
    cache = KVCache(4)
    cache.reserve("a", 3)
    with pytest.raises(OutOfSlotsError):
        cache.reserve("a", 2)
    assert len(cache.reserved("a")) == 3
    assert cache.num_free == 1


def test_slots_given_out_are_not_changed_by_later_calls() -> None:
    cache = KVCache(8)
    first = cache.reserve("a", 4)
    seen = first.copy()
    cache.commit("a", [0])
    cache.reserve("b", 5)
    assert np.array_equal(first, seen)


def test_tensors_keep_what_is_written_where_it_was_written() -> None:
    shapes = [LayerShape(2, 3, 5), LayerShape(1, 4, 4)]
    store = KVTensors(shapes, 7, torch.float32, torch.device("cpu"))
    for pool in (*store.keys, *store.values):
        pool.fill_(9.0)
    key, value = torch.randn(2, 2, 3), torch.randn(2, 2, 5)
    store.store(0, torch.tensor([5, 1]), key, value)
    assert torch.equal(store.keys[0][[5, 1]], key)
    assert torch.equal(store.values[0][[5, 1]], value)
    untouched = [0, 2, 3, 4, 6]
    assert bool((store.keys[0][untouched] == 9.0).all())
    assert bool((store.keys[1] == 9.0).all())
    assert store.num_bytes() == 7 * bytes_per_slot(shapes, torch.float32) == 7 * 4 * (2 * 8 + 8)
    assert bytes_per_slot(shapes, torch.bfloat16) == 2 * (2 * 8 + 8)


def test_values_are_stored_in_the_type_of_the_cache() -> None:
    store = KVTensors([LayerShape(1, 2, 2)], 2, torch.bfloat16, torch.device("cpu"))
    store.store(0, torch.tensor([1]), torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    assert store.keys[0].dtype == torch.bfloat16
    assert float(store.values[0][1].sum()) == 2.0
