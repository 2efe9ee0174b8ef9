"""The suffix drafter against a slow twin, and what it remembers: limits, salts, threads, requests put back."""

import random
import threading
import time
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafting import draft_within
from specinfer.core.lookups import drafter_of, is_model
from specinfer.core.request import FinishReason, Request, Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import OFF, TokenTree, TreeBudget
from specinfer.drafters.lookup.suffix import (
    EARLIER,
    GENERATION_TOKENS,
    MAX_MATCH,
    PROMPT,
    REPEATED,
    SALT_CHARACTERS,
    SALT_TOKENS,
    STEP_TOKENS,
    SuffixDrafter,
    SuffixStore,
)
from specinfer.drafters.lookup.suffix_growth import MIN_PATH_PROB
from specinfer.drafters.merge.budget_split import BudgetSplit
from specinfer.verify import Acceptance
from tiny import make_request

TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=12)
SAID = st.lists(st.integers(0, 2), min_size=1, max_size=REPEATED - 2)  # too short to repeat a passage of a prompt


def _request(request_id: str, prompt: Sequence[int], said: Sequence[int] = (), salt: str = "") -> Request:
    request = Request(request_id, list(prompt), SamplingParams(temperature=0.0, max_tokens=10**6), 0, cache_salt=salt)
    request.token_ids += said
    return request


def _draft(drafter: SuffixDrafter, request: Request, max_nodes: int = 8, max_depth: int = 4) -> TokenTree:
    tree = draft_within(drafter, request, TreeBudget(max_nodes, max_depth))
    assert [draw.node for draw in tree.draws] == list(range(1, len(tree)))
    assert all(drafter_of(draw.drafter) == "suffix" and 0 < draw.confidence <= 1 for draw in tree.draws)
    return tree


def _finish(drafter: SuffixDrafter, request: Request, reason: FinishReason = FinishReason.STOP) -> None:
    _draft(drafter, request)
    request.finish(reason)
    drafter.forget(request.request_id)


# ------------------------------------------------------------------------------------------ slow twin


def _ends(texts: list[list[int]], stretch: tuple[int, ...]) -> int:
    """At how many places of the texts the stretch ends."""
    n = len(stretch)
    return sum(tuple(text[i : i + n]) == stretch for text in texts for i in range(len(text) - n + 1))


def _shorter(texts: list[list[int]], stretch: tuple[int, ...]) -> tuple[int, ...]:
    """The longest suffix that ends at more places."""
    times = _ends(texts, stretch)
    while stretch and _ends(texts, stretch) == times:
        stretch = stretch[1:]
    return stretch


def _followers(
    texts: list[list[int]], stretch: tuple[int, ...], said: frozenset[int]
) -> tuple[tuple[int, ...], dict[int, float], float, frozenset[int]]:
    """The stretch or the first shorter one that something new followed, shares, doubt, and all that followed it."""
    while stretch:
        seen = {token: times for token in range(5) if (times := _ends(texts, (*stretch, token)))}
        new = {token: times for token, times in seen.items() if token not in said}
        if new:
            doubt = len(new) * (2.0 / len(stretch) ** 0.8)
            total = doubt + sum(new.values())
            return stretch, {t: times / total for t, times in new.items()}, doubt / total, frozenset(seen)
        stretch, said = _shorter(texts, stretch), said | frozenset(seen)
    return (), {}, 1.0, said


def _paths(
    texts: list[list[int]], stretch: tuple[int, ...], chance: float, depth: int, path: tuple[int, ...], out: dict
) -> None:
    """The chance of each path that follows the stretch in these texts, down to the least chance."""
    said: frozenset[int] = frozenset()
    while stretch and depth:
        stretch, shares, doubt, said = _followers(texts, stretch, said)
        for token, share in shares.items():
            if chance * share >= MIN_PATH_PROB:
                longer = (*path, token)
                out[longer] = max(out.get(longer, 0.0), chance * share)
                _paths(texts, (*stretch, token), chance * share, depth - 1, longer, out)
        chance *= doubt
        if chance < MIN_PATH_PROB or len(stretch) == 1:
            return
        stretch = _shorter(texts, stretch)


def _twin(text: list[int], stored: list[list[int]], max_depth: int) -> dict[tuple[int, ...], float]:
    """The chance of each path that may be guessed."""
    lengths = [n for n in range(len(text)) if _ends([text], tuple(text[len(text) - n :])) > 1]
    own = tuple(text[len(text) - max(lengths, default=0) :]) if max(lengths, default=0) else ()
    tail = tuple(text[-MAX_MATCH:])
    while tail and not _ends(stored, tail):
        tail = tail[1:]
    chance, out = 1.0, dict[tuple[int, ...], float]()
    matches = [([text], own), (stored, tail)] if stored else [([text], own)]
    doubts = [round(_followers(texts, stretch, frozenset())[2], 9) for texts, stretch in matches]
    for i in sorted(range(len(matches)), key=lambda i: doubts[i]):
        _paths(*matches[i], chance, max_depth, (), out)
        chance *= doubts[i]
    return out


@settings(deadline=None)
@given(TEXT, SAID, st.lists(TEXT, max_size=2), st.integers(1, 12), st.integers(1, 4))
def test_the_likeliest_paths_of_the_slow_twin(
    prompt: list[int], said: list[int], stored: list[list[int]], max_nodes: int, max_depth: int
) -> None:
    drafter = SuffixDrafter()
    for answer in stored:
        _finish(drafter, _request("earlier", [4], answer))
    request = _request("0", prompt)
    for token in [*said, 0]:
        drafter._readings.clear()  # nothing is known of how often it was right
        tree = _draft(drafter, request, max_nodes, max_depth)
        twin = _twin(request.token_ids, stored, max_depth)
        chances = [1.0]
        for draw in tree.draws:
            chances.append(chances[tree.parents[draw.node]] * draw.confidence)
            assert chances[-1] == pytest.approx(twin[tree.path_tokens(draw.node)])
        assert sorted(chances[1:], reverse=True) == pytest.approx(sorted(twin.values(), reverse=True)[:max_nodes])
        request.token_ids.append(token)


# -------------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    ("tokens", "guesses"),
    [
        ([1, 2, 3, 1, 2], [3, 1, 2, 3]),  # past the end the repetition goes on
        ([5, 5, 5], [5, 5, 5, 5]),
        ([9, 1, 2, 3, 8, 9, 1, 2], [3, 8, 9, 1]),
        ([1, 2, 3, 4], []),
        ([1], []),
    ],
)
def test_a_repetition_by_hand(tokens: list[int], guesses: list[int]) -> None:
    tree = _draft(SuffixDrafter(), _request("0", tokens), 4)
    assert list(tree.tokens[1:]) == guesses
    assert list(tree.parents[1:]) == list(range(len(guesses)))


def test_branches_in_the_order_of_their_counts() -> None:
    tree = _draft(SuffixDrafter(), _request("0", [7, 1, 8, 7, 1, 9, 7, 1, 10, 7, 2, 11, 7, 3, 12, 7, 3, 13, 7]), 3, 1)
    assert tree.tokens == (7, 1, 3, 2)
    assert tree.parents == (-1, 0, 0, 0)
    first, second, third = (draw.confidence for draw in tree.draws)
    assert first > second > third


def test_a_long_match_gives_one_long_chain() -> None:
    source = random.Random(1)
    text = [source.randrange(50) for _ in range(400)]
    tree = _draft(SuffixDrafter(), _request("0", text + text[:200]), 64, 64)
    assert max(tree.depths) >= 60
    assert list(tree.path_tokens(tree.depths.index(60))) == text[200:260]
    assert SuffixDrafter().draft([], []) == []


def test_five_tokens_a_pass_on_a_file_that_is_edited_twice() -> None:
    source = random.Random(2)
    first = [source.randrange(200) for _ in range(600)]
    second = [token if source.random() > 0.02 else 999 for token in first]
    third = [token if source.random() > 0.02 else 998 for token in second]
    for budget in (8, 16):
        drafter, request, passes = SuffixDrafter(), _request("0", first + second), 0
        while request.num_output < len(third):
            tree, node, passes = _draft(drafter, request, budget, budget), 0, passes + 1
            while request.num_output < len(third):
                token = third[request.num_output]
                request.token_ids.append(token)
                if token not in tree.children[node]:
                    break
                node = tree.children[node][token]
        assert len(third) / passes >= 5


def test_an_edited_file_is_found_in_the_prompt_and_followed() -> None:
    source = random.Random(3)
    prompt = [source.randrange(200) for _ in range(600)]
    answer = [900, *(token if i % 60 else 901 for i, token in enumerate(prompt))]
    drafter, request, passes = SuffixDrafter(), _request("0", prompt), 0
    while request.num_output < len(answer):
        tree, node, passes = _draft(drafter, request, 16, 16), 0, passes + 1
        origins = tree.drafters()
        while request.num_output < len(answer):
            token = answer[request.num_output]
            node = tree.children[node].get(token, -1)
            request.append(token, origins[node] if node >= 0 else None)
            if node < 0:
                break
    assert request.origins.count(PROMPT) > 500
    assert passes < len(answer) / 10


def test_nothing_is_guessed_or_kept_without_a_budget() -> None:
    drafter, request = SuffixDrafter(), _request("0", [1, 1, 1])
    assert drafter.draft([Span(request, 2, 3)], [OFF]) == [TokenTree.root(1)]
    assert not drafter._readings


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        SuffixDrafter(max_tokens=-1)
    with pytest.raises(ValueError, match="min_match"):
        SuffixDrafter(min_match=0)


# ------------------------------------------------------------------------------------- what it remembers


def test_answers_are_shared_with_the_same_salt_only() -> None:
    drafter, answer = SuffixDrafter(), list(range(10, 40))
    _finish(drafter, _request("a", [1], answer, salt="red"))
    _finish(drafter, _request("b", [1], answer[::-1], salt="blue"), FinishReason.LENGTH)
    assert list(_draft(drafter, _request("c", [1, 20, 21], salt="red"), 4).tokens) == [21, 22, 23, 24, 25]
    assert list(_draft(drafter, _request("d", [1, 20, 21], salt="blue"), 4).tokens) == [21, 20, 19, 18, 17]
    assert _draft(drafter, _request("e", [1, 20, 21])) == TokenTree.root(21)


@given(st.lists(st.tuples(st.sampled_from("abc"), TEXT), max_size=6))
def test_no_guess_crosses_salts(answers: list[tuple[str, list[int]]]) -> None:
    """Guesses with other salts' answers in the store are those without them."""
    mixed, alone = SuffixDrafter(), SuffixDrafter()
    for salt, answer in answers:
        _finish(mixed, _request("x", [4], answer, salt))
        if salt == "a":
            _finish(alone, _request("x", [4], answer, salt))
    request = _request("0", [0, 1, 2, 0, 1], salt="a")
    assert _draft(mixed, request) == _draft(alone, request)


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_only_whole_answers_are_kept(reason: FinishReason) -> None:
    drafter = SuffixDrafter()
    _finish(drafter, _request("a", [1], range(10, 40)), reason)
    _draft(drafter, _request("b", [2]))
    assert drafter.store.num_tokens == 0


@pytest.mark.parametrize(
    ("keeps_seeded", "params", "is_kept"),
    [
        (True, SamplingParams(seed=1), True),
        (False, SamplingParams(seed=1), False),
        (False, SamplingParams(), True),
        (False, SamplingParams(temperature=0.0, seed=1), True),
    ],
)
def test_rules_that_draw_see_no_answer_of_their_own_random_numbers(
    keeps_seeded: bool, params: SamplingParams, is_kept: bool
) -> None:
    drafter = SuffixDrafter(keeps_seeded=keeps_seeded)
    request = _request("a", [1], [2, 3, 4])
    request.params = params
    _finish(drafter, request)
    assert (len(_draft(drafter, _request("b", [2]))) > 1) == is_kept


def test_tokens_of_earlier_answers_are_named_so_and_are_those_of_the_drafter() -> None:
    drafter = SuffixDrafter()
    _finish(drafter, _request("a", [1], range(10, 40)))
    tree = _draft(drafter, _request("b", [7, 8, 7, 20, 8, 7], [20, 21]), 6, 6)
    names = dict(zip(tree.tokens, tree.drafters(), strict=True))
    assert names[22] == EARLIER
    tree = _draft(drafter, _request("c", [20, 50, 51, 20]), 8, 4)
    names = dict(zip(tree.tokens, tree.drafters(), strict=True))
    assert (names[50], names[21]) == ("suffix", EARLIER)
    assert {drafter_of(draw.drafter) for draw in tree.draws} == {"suffix"}
    assert not any(is_model(draw.drafter) for draw in tree.draws)
    split = BudgetSplit(["suffix", "model"])
    split.observe(tree, Acceptance((tree.children[0][21],), 22))
    assert split.share(10, [0, 1]) > 5


def test_prompts_are_not_shared() -> None:
    drafter = SuffixDrafter()
    _finish(drafter, _request("a", range(10, 40), [50]))
    assert _draft(drafter, _request("b", [12, 13])) == TokenTree.root(13)


def test_a_request_that_was_put_back_guesses_as_before_and_leaves_nothing() -> None:
    drafter, request = SuffixDrafter(), _request("a", [1, 2, 3, 4], [1, 2, 3])
    tree = _draft(drafter, request)
    drafter.observe(request, tree, Acceptance((), 0))
    drafter.forget("a")
    assert not drafter._readings
    assert not drafter._unread
    assert _draft(drafter, request) == tree
    request.finish(FinishReason.STOP)
    drafter.forget("a")
    drafter.forget("a")
    assert not drafter._readings
    _draft(drafter, _request("b", [9]))
    assert drafter.store.num_tokens == 3


def test_another_request_of_the_same_name_starts_anew() -> None:
    drafter = SuffixDrafter()
    _draft(drafter, _request("a", [1, 2, 3, 1, 2]))
    assert _draft(drafter, _request("a", [1, 5, 6, 7, 8, 9])) == TokenTree.root(9)


@settings(deadline=None)
@given(st.integers(0, 200), st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 80)), max_size=20))
def test_the_store_never_exceeds_its_limit(max_tokens: int, added: list[tuple[str, int]]) -> None:
    store = SuffixStore(max_tokens)
    for salt, length in added:
        store.add(salt, list(range(length)))
        texts = [text for texts in store._salts.values() for text in texts]
        assert store.num_tokens == sum(text.num_tokens for text in texts)
        charged = store.num_tokens + SALT_TOKENS * len(store.salts) + GENERATION_TOKENS * len(texts)
        assert store._charged == charged <= max_tokens
        if max_tokens >= SALT_TOKENS + 2 * (GENERATION_TOKENS + 1):
            assert store.salts[-1] == salt
            match = store.match(salt, [length - 1])  # the newest text's end is always there
            assert match is not None
            assert match[2] == 1


def test_the_older_half_and_the_least_used_salt_go_first() -> None:
    store = SuffixStore(SALT_TOKENS + 2 * (GENERATION_TOKENS + 10))
    for start in (0, 10, 20):
        store.add("a", range(start, start + 10))
    assert [store.match("a", [token])[2] for token in (5, 15, 25)] == [0, 1, 1]  # type: ignore[index]
    store = SuffixStore(3 * (SALT_TOKENS + GENERATION_TOKENS + 10))
    for salt in "abc":
        store.add(salt, range(10))
    store.match("a", [1])
    store.add("d", range(10))
    assert store.salts == ("c", "a", "d")
    assert store.match("b", [1]) is None


@pytest.mark.parametrize("name", ["{}", "{}" + "x" * 1000], ids=["short", "long"])
def test_many_salts_with_little_text_stay_within_the_same_memory(name: str) -> None:
    tracemalloc.start()
    try:
        store = SuffixStore(20_000)
        for number in range(5000):
            store.add(name.format(number), [number, number + 1])
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 20_000 * 125
    assert 0 < len(store.salts) < 20_000 / (SALT_TOKENS + GENERATION_TOKENS)
    assert store.salts[-1] == name.format(4999)


def test_a_salt_that_is_longer_than_the_store_is_not_kept() -> None:
    store = SuffixStore(1000)
    store.add("a", [1, 2])
    store.add("b" * 1000 * SALT_CHARACTERS, [1, 2])
    assert store.salts == ("a",)


def test_long_answers_are_found_across_their_pieces() -> None:
    drafter, answer = SuffixDrafter(), list(range(3000))
    _finish(drafter, _request("a", [5000], answer))
    request = _request("b", [5000, 0])
    for _ in range(5):
        _draft(drafter, request)
    assert not drafter._unread
    assert 3000 <= drafter.store.num_tokens <= 3000 * 1.1
    for at in range(40, 2900, 37):
        request = _request(str(at), [5000], answer[:at])
        tree = _draft(drafter, request, 40, 40)
        assert list(tree.path_tokens(tree.depths.index(32))) == answer[at : at + 32]


def test_a_long_prompt_is_read_over_several_steps() -> None:
    source = random.Random(3)
    prompt = [source.randrange(1000) for _ in range(5 * STEP_TOKENS)]
    drafter, request = SuffixDrafter(), _request("0", prompt + prompt[:50])
    for step in range(1, 6):
        tree = _draft(drafter, request, 16, 16)
        assert drafter._readings["0"].text.num_tokens <= step * STEP_TOKENS
        assert list(tree.path_tokens(tree.depths.index(10))) == prompt[50:60]  # found from the first step on
    requests = [_request(str(i), prompt) for i in range(10)]
    spans = [Span(request, len(prompt) - 1, len(prompt)) for request in requests]
    drafter.draft(spans, [TreeBudget(4, 4)] * 10)
    read = sum(drafter._readings[request.request_id].text.num_tokens for request in requests[1:])
    assert read <= STEP_TOKENS + 10 * MAX_MATCH


def test_one_token_over_and_over() -> None:
    drafter, request = SuffixDrafter(), _request("0", [7] * 40_000)
    begin = time.perf_counter()
    for _ in range(40_000 // STEP_TOKENS + 1):
        assert _draft(drafter, request, 16, 16).tokens == (7,) * 17
    assert time.perf_counter() - begin < 30  # about half a second


def test_engines_in_several_threads_share_a_store() -> None:
    store, failures = SuffixStore(3000), list[BaseException]()

    def serve(number: int) -> None:
        source = random.Random(number)
        drafter = SuffixDrafter(store=store)
        try:
            for i in range(60):
                request = _request(str(i), [1, 2], salt=str(i % 3))
                for _ in range(8):
                    tree = _draft(drafter, request, 16, 8)
                    request.token_ids += [*tree.tokens[1:4], source.randrange(4)]
                request.finish(FinishReason.STOP)
                drafter.forget(request.request_id)
        except BaseException as error:  # a thread's failure must fail the test
            failures.append(error)

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert 0 < store.num_tokens <= 3000
    assert store.num_tokens == sum(text.num_tokens for texts in store._salts.values() for text in texts)
    assert set() < set(store.salts) <= {"0", "1", "2"}, "how many fit depends on who comes last"


def test_what_one_engine_heard_another_guesses() -> None:
    store = SuffixStore(1000)
    one, other = SuffixDrafter(store=store), SuffixDrafter(store=store)
    _finish(one, _request("a", [1], range(10, 30)))
    _draft(one, _request("b", [1]))
    assert list(_draft(other, _request("c", [12, 13]), 2).tokens) == [13, 14, 15]


def test_a_prospect_is_the_longest_match_and_what_followed_it() -> None:
    drafter, request = SuffixDrafter(), make_request("0", [1, 2, 3, 4, 9, 1, 2, 3])
    (prospect,) = drafter.prospects([Span(request, 0, len(request.token_ids))])
    assert prospect.match == 3
    assert prospect.tokens[:2] == (4, 9)
    assert list(prospect.path_probs) == sorted(prospect.path_probs, reverse=True)
    assert 0 < prospect.path_probs[0] < 1
