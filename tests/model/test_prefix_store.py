"""Blocks of prefixes that outlast the process: what they hold, to whom they are given, and in how many steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from block_store import FakeStore
from specinfer.engine.scheduler import RESTORED_AT_ONCE, Scheduler
from specinfer.model.kv_cache import KVCache, Slots
from specinfer.model.kv_tensors import KVTensors, LayerShape, TapShape
from specinfer.model.prefix_folder import PrefixFolder
from specinfer.model.prefix_store import PrefixStore
from specinfer.model.recurrent.states import RecurrentStates
from specinfer.ops.kv_types import KV_TYPES
from tiny import make_request

CPU = torch.device("cpu")


def _cache(num_slots: int = 40) -> tuple[KVCache, FakeStore]:
    cache, store = KVCache(num_slots, keeps_prefixes=True), FakeStore()
    store.content = {slot: slot for slot in range(num_slots)}
    cache.store = store
    return cache, store


def _compute(cache: KVCache, name: str, tokens: Sequence[int], salt: str | None = "") -> None:
    cache.reserve(name, len(tokens))
    cache.commit(name, range(len(tokens)))
    cache.release(name, salt, tokens)


def test_a_block_that_could_not_be_written_is_offered_again() -> None:
    cache, store = _cache()
    store.is_busy = True
    cache.reserve("a", 5)
    cache.commit("a", range(5))
    cache.save("a", "", range(5))
    assert not store.blocks
    store.is_busy = False
    cache.save("a", "", range(5))
    assert len(store.blocks) == 2


def test_requests_without_a_salt_leave_nothing() -> None:
    cache, store = _cache()
    _compute(cache, "a", range(6), salt=None)
    assert not store.blocks
    assert cache.restore(None, range(6)) == (0, True)


def test_a_prefix_that_ends_within_a_block_gets_the_rest_of_it() -> None:
    cache, store = _cache()
    _compute(cache, "a", range(6))
    again, store.content = KVCache(40, keeps_prefixes=True), {}
    again.store = store
    store.is_busy = True
    _compute(again, "b", range(3))  # the cache has three tokens, the store six
    again.restore("", range(7))
    assert again.attach("c", "", range(7)) == 6
    assert sorted(store.content.values()) == [3, 4, 5]
    again.free("c")
    assert again.is_balanced()


def test_blocks_that_find_no_slots_are_not_read() -> None:
    cache, store = _cache()
    _compute(cache, "a", range(6))
    again = KVCache(7, keeps_prefixes=True)
    again.store = store
    again.reserve("other", 3)
    again.restore("", range(6))
    assert again.attach("b", "", range(6)) == 4
    assert again.num_available == 0


def test_each_block_of_a_request_is_hashed_once() -> None:
    """Not the whole prefix with each block that a long answer completes, nor twice when it begins."""
    cache, store = _cache(200)
    hashed, keys = [], store.keys

    def counted(salt: str, tokens: Sequence[int] | Slots, known: Sequence[bytes] = ()) -> list[bytes]:
        hashed.append(len(tokens) // store.block_size - len(known))
        return keys(salt, tokens, known)

    store.keys = counted  # type: ignore[method-assign]
    scheduler, request = Scheduler(cache, 4, 50), make_request("a", range(21))
    scheduler.add(request)
    for _ in range(20):
        for span in scheduler.schedule().spans:
            cache.reserve("a", span.end - span.start)
            scheduler.keep(span.request, range(span.end - span.start))
        request.token_ids.append(1)
    num_blocks = len(cache.slots("a")) // store.block_size
    assert sum(hashed) == 20 // store.block_size + num_blocks, "once to look for them, and once to keep them"
    scheduler.remove(request)
    assert sum(hashed) == 20 // store.block_size + num_blocks


def test_a_request_waits_for_its_blocks_while_others_run_and_gets_them_at_once_when_alone() -> None:
    cache, store = _cache(200)
    length = 2 * (2 * RESTORED_AT_ONCE + 3)
    _compute(cache, "first", range(length))
    reads = []
    store.read = lambda key, slots: reads.append(len(slots)) or True  # type: ignore[assignment, func-returns-value]
    for others, wanted in ((1, [4, 4, 3]), (0, [11])):
        reads.clear()
        again = KVCache(200, keeps_prefixes=True)
        again.store = store
        scheduler = Scheduler(again, 4, 50)
        for number in range(others):
            scheduler.add(make_request(f"other{number}", range(90, 95)))
            scheduler.schedule()
        scheduler.add(request := make_request("again", range(length + 1)))
        seen = []
        while request not in scheduler.running:
            before = len(reads)
            (_, *spans) = [None, *scheduler.schedule().spans]
            seen.append(len(reads) - before)
            assert len(spans) == others + (request in scheduler.running)  # others never wait
        assert seen == wanted
        assert request.num_cached == length


def test_requests_share_what_is_read_in_a_step_while_others_run() -> None:
    cache, store = _cache(200)
    texts = [[start, *range(1, 12)] for start in (100, 200, 300)]
    for number, text in enumerate(texts):
        _compute(cache, str(number), text)
    reads = []
    store.read = lambda key, slots: reads.append(len(slots)) or True  # type: ignore[assignment, func-returns-value]
    again = KVCache(200, keeps_prefixes=True)
    again.store = store
    scheduler = Scheduler(again, 8, 50)
    scheduler.add(make_request("other", range(90, 95)))
    scheduler.schedule()
    requests = [make_request(f"again{number}", [*text, 7]) for number, text in enumerate(texts)]
    for request in requests:
        scheduler.add(request)
    seen = []
    while len(scheduler.running) < 4:
        before = len(reads)
        scheduler.schedule()
        seen.append((len(reads) - before, len(scheduler.running)))
    assert sum(count for count, _ in seen) == len(reads) == 18
    assert max(count for count, _ in seen) == RESTORED_AT_ONCE
    assert [request.num_cached for request in requests] == [12] * 3


# ---------------------------------------------------------------------------------------- tensors

NUM_SLOTS, BLOCK = 300, 128


def _tensors(kv_dtype: torch.dtype | None = None, *, is_empty: bool = False) -> KVTensors:
    """Tensors of an attention layer, a recurrent one, and one that reads the first one's, with hidden states."""
    shapes = [LayerShape(2, 4, 4), LayerShape(1, 8, 0, attends=False), LayerShape(2, 4, 4, shares=0)]
    states = RecurrentStates({1: (3, 5)}, 4, NUM_SLOTS, CPU)
    tensors = KVTensors(shapes, NUM_SLOTS, torch.float32, CPU, TapShape((1, 3), 6), states, kv_dtype)
    for number, pool in enumerate(_pools(tensors)):
        numbers = torch.arange(pool.numel()).reshape(pool.shape) * 7 % 50 + number
        pool.copy_((numbers * (not is_empty)).to(pool.dtype))
    return tensors


def _pools(tensors: KVTensors) -> list[torch.Tensor]:
    return [*tensors.keys, *tensors.values, *tensors.taps.values(), *tensors.states.pools.values()]


def _rows(tensors: KVTensors, slots: Slots) -> list[list[Any]]:
    index = torch.from_numpy(slots)
    return [pool.float()[index].tolist() for pool in _pools(tensors)[: -len(tensors.states.pools)]]


def test_a_step_begins_to_read_few_blocks_of_a_long_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = PrefixFolder(tmp_path, 1 << 30)
    store = PrefixStore(folder, {"model": "a"}, _tensors(None))
    chain = [bytes([number]) * 32 for number in range(9)]
    begun: list[int] = []
    monkeypatch.setattr(folder, "has", lambda key: key != chain[-1])
    monkeypatch.setattr(folder, "will_read", lambda keys: begun.append(len(keys)))
    assert [store.will_read(chain, most) for most in (None, 3, 0)] == [8, 8, 8]
    assert begun == [8, 6, 0]


@pytest.mark.parametrize("kv_dtype", [None, *KV_TYPES])
def test_all_that_is_stored_of_a_token_comes_back(kv_dtype: torch.dtype | None, tmp_path: Path) -> None:
    tensors, folder = _tensors(kv_dtype), PrefixFolder(tmp_path, 1 << 30)
    store = PrefixStore(folder, {"model": "a"}, tensors)
    assert store.block_size == BLOCK
    slots, others = (np.random.default_rng(seed).permutation(NUM_SLOTS)[:BLOCK] for seed in (0, 1))
    tensors.states.note(2, int(slots[99]))
    chain = store.keys("", range(BLOCK))
    assert store.write(chain, slots)
    folder.close()
    empty = _tensors(kv_dtype, is_empty=True)
    again = PrefixStore(PrefixFolder(tmp_path, 1 << 30), {"model": "a"}, empty)
    assert again.will_read(chain) == 1
    assert again.read(chain[0], others[40:])  # the first 40 tokens are cached
    assert _rows(empty, others[40:]) == _rows(tensors, slots[40:])
    assert not any(np.any(rows) for rows in _rows(empty, others[:40]))
    count, row = empty.states.latest(others)
    assert count == 100
    assert torch.equal(empty.states.pools[1][row], tensors.states.pools[1][2])
    assert again.read(chain[0], others[110:])  # the state is that of a token before these
    assert again.folder.num_read_tokens == 88 + 18


def test_a_block_without_a_state_has_none_when_it_comes_back(tmp_path: Path) -> None:
    folder, tensors = PrefixFolder(tmp_path, 1 << 30), _tensors()
    store, slots = PrefixStore(folder, {}, tensors), np.arange(BLOCK)
    chain = store.keys("", range(BLOCK))
    assert store.write(chain, slots)
    folder.close()
    tensors.states.note(0, 200)  # of the token that was in this slot before
    assert store.read(chain[0], slots + 100)
    assert tensors.states.latest(slots + 100) == (0, -1)


@pytest.mark.parametrize("kv_dtype", [None, *KV_TYPES])
@pytest.mark.parametrize("place", ["keys", "values", "taps", "states"])
def test_a_prompt_with_numbers_that_are_not_finite_is_not_kept(
    place: str, kv_dtype: torch.dtype | None, tmp_path: Path
) -> None:
    folder, tensors = PrefixFolder(tmp_path, 1 << 30), _tensors(kv_dtype)
    store, slots = PrefixStore(folder, {}, tensors), np.arange(BLOCK)
    tensors.states.note(0, 7)
    pool = {"keys": tensors.keys[0], "values": tensors.values[0], "taps": tensors.taps[3], "states": None}[place]
    (tensors.states.pools[1] if pool is None else pool)[0].fill_(float("nan"))
    assert store.write(store.keys("", range(BLOCK)), slots)
    folder.close()
    assert not list(folder.path.iterdir())


def test_prefixes_of_other_models_salts_and_tokens_have_other_keys(tmp_path: Path) -> None:
    folder, tensors, text = PrefixFolder(tmp_path, 1 << 30), _tensors(), list(range(400))
    stores = [
        PrefixStore(folder, {"model": "a"}, tensors),
        PrefixStore(folder, {"model": "b"}, tensors),
        PrefixStore(folder, {"model": "a"}, _tensors(torch.float16)),
    ]
    keys = [key for store in stores for salt in ("", "x") for key in store.keys(salt, text)]
    assert len(keys) == len(set(keys)) == 3 * 2 * 3
    assert stores[0].keys("", [*text[:300], 7, *text[301:]])[:2] == keys[:2]
    assert not {*stores[0].keys("", [9, *text[1:]])} & {*keys}
    assert not {*stores[0].keys("", text[BLOCK:])} & {*keys}


def test_large_models_have_short_blocks(tmp_path: Path) -> None:
    tensors = KVTensors([LayerShape(8, 128, 128)] * 80, 1, torch.bfloat16, CPU)
    assert PrefixStore(PrefixFolder(tmp_path, 1), {}, tensors).block_size == 16
