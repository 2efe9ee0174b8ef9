"""Prefixes kept for reuse: what a request finds in its slots, what is given up, and that no token changes by it."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from block_store import FakeStore
from specinfer.core.request import Request, Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TreeBudget
from specinfer.drafters import MergedDrafter, NGramDrafter, SmallModelDrafter
from specinfer.engine.engine import Engine
from specinfer.model.kv_cache import KVCache, OutOfSlotsError
from specinfer.model.runner import ModelRunner
from tiny import VOCAB, make_engine, make_request, quick, random_prompts, resized, run

Runners = Callable[..., ModelRunner]
SLOTS = 24
OWNERS = ("a", "b", "c", "d")
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)  # two kinds of tokens: prefixes meet and part all the time


class Contents(RuleBasedStateMachine):
    """Each slot has what was last computed for it: a salt and the tokens up to its own.

    Whatever is shared, kept and given up, a request's slots must hold its own beginning, and nobody else may write
    to them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(SLOTS, keeps_prefixes=True)
        self.content: dict[int, tuple[str | None, tuple[int, ...]]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.salts: dict[str, str | None] = {}

    @rule(owner=st.sampled_from(OWNERS), salt=st.sampled_from(["", "x", None]), tokens=TOKENS)
    def begin(self, owner: str, salt: str | None, tokens: list[int]) -> None:
        if owner in self.tokens:
            return
        known = self.cache.attach(owner, salt, tokens[:-1])
        assert known < len(tokens)
        assert not (salt is None and known)
        self.tokens[owner], self.salts[owner] = tokens[:known], salt

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), generated=st.lists(st.integers(0, 1), min_size=1, max_size=5), num_guessed=st.integers(0, 3))
    def compute(self, data: st.DataObject, generated: list[int], num_guessed: int) -> None:
        owner = data.draw(st.sampled_from(sorted(self.tokens)))
        try:
            slots = self.cache.reserve(owner, len(generated) + num_guessed).tolist()
        except OutOfSlotsError:
            assert self.cache.num_available < len(generated) + num_guessed
            return
        for i, slot in enumerate(slots):
            path = (*self.tokens[owner], *generated[: i + 1]) if i < len(generated) else (-1,)
            self.content[slot] = (self.salts[owner], path)
        self.cache.commit(owner, range(len(generated)))
        self.tokens[owner] = [*self.tokens[owner], *generated]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), length=st.integers(0, 12))
    def truncate(self, data: st.DataObject, length: int) -> None:
        owner = data.draw(st.sampled_from(sorted(self.tokens)))
        self.cache.truncate(owner, length)
        self.tokens[owner] = self.tokens[owner][:length]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=3))
    def share(self, data: st.DataObject, more: list[int]) -> None:
        owner = data.draw(st.sampled_from(sorted(self.tokens)))
        self.cache.share(owner, self.salts[owner], [*self.tokens[owner], *more])  # the newest are not computed yet

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), kept=st.booleans())
    def end(self, data: st.DataObject, kept: bool) -> None:
        owner = data.draw(st.sampled_from(sorted(self.tokens)))
        tokens, salt = self.tokens.pop(owner), self.salts.pop(owner)
        if kept:
            self.cache.release(owner, salt, tokens)
            if salt is not None:
                found = self.cache.attach("probe", salt, tokens)
                assert found == len(tokens), "what was just kept is found whole"
                self.cache.free("probe")
        else:
            self.cache.free(owner)

    @invariant()
    def everyone_finds_their_own(self) -> None:
        own: list[int] = []
        for owner, tokens in self.tokens.items():
            slots = self.cache.slots(owner).tolist()
            found = [self.content[slot] for slot in slots]
            assert found == [(self.salts[owner], tuple(tokens[: i + 1])) for i in range(len(tokens))]
            own += slots[self.cache.num_shared(owner) :]
        assert len(set(own)) == len(own) == self.cache.num_owned
        assert self.cache.is_balanced()
        assert self.cache.num_free <= self.cache.num_available <= SLOTS - len(own)

    def teardown(self) -> None:
        for owner in list(self.tokens):
            self.cache.free(owner)
        assert self.cache.num_owned == 0
        assert self.cache.num_available == SLOTS, "nothing stays locked"
        assert sorted(self.cache.reserve("all", SLOTS).tolist()) == list(range(SLOTS))


TestContents = Contents.TestCase
TestContents.settings = settings(max_examples=60, stateful_step_count=40, suppress_health_check=list(HealthCheck))


class LastingContents(Contents):
    """The same with a store, through which contents come back after restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.store = FakeStore()

    @rule()
    def restart(self) -> None:
        self.cache = KVCache(SLOTS, keeps_prefixes=True)
        self.cache.store, self.store.content = self.store, self.content
        self.content.clear()
        self.tokens, self.salts = {}, {}

    @rule(is_busy=st.booleans())
    def change_pace(self, is_busy: bool) -> None:
        self.store.is_busy = is_busy

    @rule(data=st.data(), damage=st.booleans())
    def lose(self, data: st.DataObject, damage: bool) -> None:
        if self.store.blocks:
            key = data.draw(st.sampled_from(sorted(self.store.blocks)))
            self.store.is_busy = True  # chains have gaps from now on
            if damage:
                self.store.blocks[key][0] = None
            else:
                del self.store.blocks[key]


TestLastingContents = LastingContents.TestCase
TestLastingContents.settings = settings(
    max_examples=60, stateful_step_count=40, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
def test_contents_stay_right_in_longer_histories() -> None:
    run_state_machine_as_test(
        Contents, settings=settings(max_examples=300, stateful_step_count=60, suppress_health_check=list(HealthCheck))
    )


def _kept(cache: KVCache, name: str, tokens: Sequence[int], salt: str = "") -> None:
    cache.reserve(name, len(tokens))
    cache.commit(name, range(len(tokens)))
    cache.release(name, salt, tokens)


def test_what_was_used_last_goes_last() -> None:
    cache = KVCache(12, keeps_prefixes=True)
    _kept(cache, "a", [1, 2, 3, 4])
    _kept(cache, "b", [5, 6, 7, 8])
    assert cache.attach("c", "", [1, 2, 3, 4]) == 4
    cache.free("c")
    cache.reserve("d", 5)  # four are free
    assert cache.attach("e", "", [5, 6, 7, 8]) == 0
    assert cache.attach("f", "", [1, 2, 3, 4]) == 4


def test_a_prefix_counts_as_used_until_its_last_user_ends() -> None:
    cache = KVCache(12, keeps_prefixes=True)
    _kept(cache, "a", [1, 2, 3, 4])
    _kept(cache, "b", [5, 6, 7, 8])
    for user, tokens in (("c", [1, 2, 3, 4]), ("d", [5, 6, 7, 8])):
        assert cache.attach(user, "", tokens) == 4
    cache.free("d")
    cache.free("c")  # attached first, in use last
    cache.reserve("e", 5)  # four are free
    assert cache.attach("f", "", [5, 6, 7, 8]) == 0
    assert cache.attach("g", "", [1, 2, 3, 4]) == 4


def test_a_beginning_outlives_the_ends_that_hang_on_it() -> None:
    cache = KVCache(10, keeps_prefixes=True)
    _kept(cache, "a", [1, 2, 3, 4])
    _kept(cache, "b", [1, 2, 5, 6])
    assert cache.num_cached == 6
    cache.reserve("c", 6)
    assert cache.attach("d", "", [1, 2, 9]) == 2


def test_salts_do_not_meet() -> None:
    cache = KVCache(10, keeps_prefixes=True)
    _kept(cache, "a", [1, 2, 3], salt="mine")
    assert cache.attach("b", "yours", [1, 2, 3]) == 0
    assert cache.attach("c", "", [1, 2, 3]) == 0
    assert cache.attach("d", "mine", [1, 2, 3]) == 3


def test_asking_under_many_salts_leaves_nothing_behind() -> None:
    cache = KVCache(10, keeps_prefixes=True)
    for i in range(100):
        cache.attach(f"r{i}", f"salt {i}", [1, 2])
    assert not cache._prefixes._roots


# --------------------------------------------------------------------------------- in the engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SAMPLED = SamplingParams(max_tokens=12)
COMMON = random_prompts([45], seed=9)[0]
PROMPTS = [[*COMMON, *rest] for rest in random_prompts([3, 3, 20, 1, 9], seed=4)] + [COMMON]


def _requests(names: str = "", **fields: Any) -> list[Request]:
    return [
        make_request(f"{names}{i}", prompt, GREEDY if i % 2 else SAMPLED, seed=i, **fields)
        for i, prompt in enumerate(PROMPTS)
    ]


def _engine(
    runners: Runners, family: str = "llama", *, num_slots: int = 900, speculates: bool = True, **limits: int
) -> Engine:
    target = resized(runners(family), num_slots, keeps_prefixes=True)
    if not speculates:
        return make_engine(target, **limits)
    small = SmallModelDrafter(resized(runners(family, 0, 0.15), 900, keeps_prefixes=True), VOCAB, "small")
    return make_engine(target, MergedDrafter([small, NGramDrafter()]), (2, 1, 1), **limits)


@pytest.mark.parametrize("family", quick(["llama", "gemma2", "mpt", "gpt2", "qwen3"], "llama", "gemma2", "mpt"))
def test_no_token_changes(runner_of: Runners, family: str) -> None:
    """Alone, together, after others, in chunks, with and without speculation: plain decoding without a cache."""
    wanted = [run(make_engine(resized(runner_of(family), 600)), [request])[0] for request in _requests()]
    for speculates, max_tokens in ((False, 512), (True, 512), (True, 13)):
        engine = _engine(runner_of, family, speculates=speculates, max_num_batched_tokens=max_tokens)
        assert run(engine, _requests("a")) == wanted
        again = _requests("b")
        assert run(engine, again) == wanted
        assert [request.num_cached for request in again] == [len(p) - 1 for p in PROMPTS], "all but the last token"
        for request, tokens in zip(_requests("c"), wanted, strict=True):
            assert run(engine, [request]) == [tokens]


def test_a_common_beginning_is_computed_once(runner_of: Runners) -> None:
    engine = _engine(runner_of)
    sizes = []
    forward = engine.target.forward

    def counted(pieces: Any) -> Any:
        sizes.append(sum(len(piece.tokens) - piece.num_logits for piece in pieces))
        return forward(pieces)

    engine.target.forward = counted  # type: ignore[method-assign]
    requests = _requests()
    run(engine, requests)
    assert sum(sizes) < 2 * len(COMMON), "six prompts of 45 common tokens"
    assert requests[0].num_cached == 0
    assert all(request.num_cached >= len(COMMON) - 1 for request in requests[1:])


def test_several_outputs_read_their_prompt_once(runner_of: Runners) -> None:
    engine = _engine(runner_of, speculates=False)
    requests = [make_request(f"r{i}", COMMON, SAMPLED, seed=i) for i in range(8)]
    wanted = [
        run(make_engine(resized(runner_of("llama"), 600)), [make_request("w", COMMON, SAMPLED, seed=i)])[0]
        for i in range(8)
    ]
    assert run(engine, requests) == wanted
    assert [request.num_cached for request in requests] == [0] + [len(COMMON) - 1] * 7


def test_prompt_logprobs_are_of_every_token(runner_of: Runners) -> None:
    engine = _engine(runner_of)
    run(engine, _requests("a"))
    asked = make_request("p", COMMON, SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=1))
    run(engine, [asked])
    assert asked.num_cached == 0
    assert len(asked.prompt_logprobs) == len(COMMON)


@pytest.mark.parametrize("keeps_prefixes", [True, False])
@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 16}, {"num_slots": 150}], ids=str)
def test_several_outputs_compute_the_logprobs_of_their_prompt_once(
    runner_of: Runners, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], keeps_prefixes: bool
) -> None:
    num_rows, num_slots = [], limits.get("num_slots", 600)
    limits = {name: value for name, value in limits.items() if name != "num_slots"}
    target = resized(runner_of("llama"), num_slots, keeps_prefixes=keeps_prefixes)
    begin = target.begin
    monkeypatch.setattr(
        target, "begin", lambda pieces: num_rows.append(sum(one.num_logits for one in pieces)) or begin(pieces)
    )
    params = SamplingParams(max_tokens=6, prompt_logprobs=2)
    alone = [make_request(f"a{i}", COMMON, params, seed=i) for i in range(8)]
    wanted = [run(make_engine(resized(runner_of("llama"), 600)), [request])[0] for request in alone]
    shared: list[Any] = []
    requests = [make_request(f"r{i}", COMMON, params, seed=i, prompt_logprobs=shared) for i in range(8)]
    assert run(make_engine(target, **limits), requests) == wanted
    assert len(shared) == len(COMMON)
    for known, exact in zip(shared[1:], alone[0].prompt_logprobs[1:], strict=True):
        assert {kind: one.logprob for kind, one in known.items()} == pytest.approx(
            {kind: one.logprob for kind, one in exact.items()}, abs=2e-4
        )
    # A prompt's last tokens may be computed by all, as they are for other requests.
    assert sum(num_rows) < len(COMMON) + 8 * (32 + 2 * params.max_tokens)


def test_a_request_that_was_put_back_goes_on_from_what_it_computed(runner_of: Runners) -> None:
    wanted = [run(make_engine(resized(runner_of("llama"), 600)), [request])[0] for request in _requests()]
    for num_slots in (85, 100, 140):
        engine = _engine(runner_of, num_slots=num_slots)
        assert run(engine, _requests("a")) == wanted
        assert run(engine, _requests("b")) == wanted


def test_what_a_request_computed_itself_does_not_count_as_cached(runner_of: Runners) -> None:
    engine = _engine(runner_of, max_num_batched_tokens=8)
    request = make_request("a", COMMON, GREEDY)
    engine.add(request)
    engine.step()
    assert 0 < request.num_computed < len(COMMON)
    engine.scheduler._put_back(request)
    while not request.is_finished:
        engine.step()
    assert request.num_cached == 0


def test_what_a_failed_request_computed_is_not_kept(runner_of: Runners) -> None:
    engine = _engine(runner_of)
    request = make_request("a", COMMON, SamplingParams(temperature=0.0, max_tokens=100))
    engine.add(request)
    engine.step()
    engine.abort(request, "broken")
    after = make_request("b", [*COMMON, 1, 2], GREEDY)
    run(engine, [after])
    assert after.num_cached in (0, len(COMMON)), "the prompt it shared while it was sound, at most"


def test_a_drafter_short_of_slots_takes_up_what_it_read(runner_of: Runners) -> None:
    """Its trees find no room; in the next step it goes on from the prompt it has read already."""
    runner = resized(runner_of("llama", 0, 0.15), len(COMMON) + 6, keeps_prefixes=True)
    small = SmallModelDrafter(runner, VOCAB, "small")
    request = make_request("a", COMMON, GREEDY)
    span = Span(request, len(COMMON) - 1, len(COMMON))
    small.draft([span], [TreeBudget.expansion((4, 4, 1))])  # the first level fits, the second does not
    assert runner.cache.num_owned == 0
    with patch.object(small._cache, "note_read", wraps=small._cache.note_read) as read:
        (tree,) = small.draft([span], [TreeBudget.expansion((1,))])
    assert tree.num_guessed == 1
    read.assert_called_once_with(request, 1)  # the root alone
    small.forget("a")


def test_requests_that_share_nothing_leave_nothing(runner_of: Runners) -> None:
    engine = _engine(runner_of)
    run(engine, _requests("a", cache_salt=None))
    assert engine.target.cache.num_cached == 0
    assert engine.target.cache.num_free == engine.target.cache.num_slots
