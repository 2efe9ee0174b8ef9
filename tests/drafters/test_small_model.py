"""Small models: trees by their logits and the shared noise, and a cache that follows any output."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import reference
from drafting import draft_expansion, span_of
from specinfer.core.noise import gumbel
from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TreeBudget
from specinfer.drafters import (
    SmallModelDrafter,
)
from specinfer.drafters.drafter_cache import DrafterCache
from specinfer.drafters.sparse_context import places_to_read
from specinfer.model.runner import ModelRunner
from specinfer.verify import Acceptance
from tiny import VOCAB, make_engine, make_model, make_request, paths_of, random_prompts, requests_of, resized, run

PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.9),
    "penalised": SamplingParams(temperature=0.7, frequency_penalty=1.0, repetition_penalty=1.3),
    "limited": SamplingParams(temperature=1.0, top_k=2),
}


def _expected(model: Any, request: Request, widths: Sequence[int]) -> set[tuple[int, ...]]:
    """Paths of the expansion: at each node the best children by the drafter's logits plus the shared noise."""
    level: list[tuple[int, ...]] = [()]
    paths = set(level)
    for width in widths:
        grown = []
        for path in level:
            output = [*request.output_ids, *path]
            logits = reference.last_logits(model, [*request.prompt_ids, *output]).tolist()
            row = reference.scores(logits, request.params, request.prompt_ids, output, request.seed)
            best = sorted(range(len(row)), key=lambda token: -row[token])[:width]
            grown += [(*path, token) for token in best if row[token] > -torch.inf]
        level = grown
        paths |= set(level)
    return paths


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("widths", [(1,), (1, 1, 1), (3, 2), (1, 1, 3, 1), (4,), (2, 2, 2)])
def test_small_model_grows_the_expansion(
    name: str, widths: tuple[int, ...], runner_of: Callable[..., ModelRunner]
) -> None:
    drafter, model = SmallModelDrafter(runner_of("llama"), VOCAB, "small"), make_model("llama")
    request = make_request("0", random_prompts([9])[0], PARAMS[name], seed=4)
    tree = draft_expansion(drafter, request, *widths)
    assert set(paths_of(tree)) == _expected(model, request, widths)
    assert set(tree.drafters()[1:]) == {"small"}
    drafter.forget("0")


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["llama", "mistral", "mpt", "gpt2"])
@pytest.mark.parametrize("widths", [(2, 1, 1), (1, 1), (2, 2)])
def test_small_model_keeps_up_with_any_output(
    family: str, widths: tuple[int, ...], runner_of: Callable[..., ModelRunner]
) -> None:
    """Its cache follows accepted paths, rejected ones, steps it slept through and steps without a budget."""
    drafter, model = SmallModelDrafter(runner_of(family), VOCAB), make_model(family)
    params = SamplingParams(temperature=0.0, max_tokens=99)
    requests = [make_request(str(i), prompt, params) for i, prompt in enumerate(random_prompts([5, 12]))]
    generator = torch.Generator().manual_seed(1)
    for step in range(8):
        trees = drafter.draft([span_of(r) for r in requests], [TreeBudget.expansion(widths)] * 2)
        for request, tree in zip(requests, trees, strict=True):
            assert set(paths_of(tree)) == _expected(model, request, widths), step
            leaf = int(torch.randint(len(tree), (), generator=generator))
            for token in (*tree.path_tokens(leaf), 5 + step):
                request.append(token, None)
            if step % 3 != 1:  # as when its tree was discarded
                drafter.observe(request, tree, Acceptance(tree.path(leaf), 5 + step))
        if step == 4:
            requests[0].append(7, None)
    for request in requests:
        drafter.forget(request.request_id)


def test_small_model_reads_long_prompts_in_chunks(
    runner_of: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specinfer.drafters.drafter_cache.MAX_CHUNK", 7)
    drafter = SmallModelDrafter(runner_of("mistral"), VOCAB)
    request = make_request("0", random_prompts([30])[0])
    assert set(paths_of(draft_expansion(drafter, request, 2, 2))) == _expected(make_model("mistral"), request, (2, 2))
    drafter.forget("0")


def test_small_model_computes_only_the_last_token_of_a_cached_prompt(
    runner_of: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = resized(runner_of("llama"), 200, keeps_prefixes=True)
    drafter, sizes, note_read = SmallModelDrafter(runner, VOCAB), list[int](), DrafterCache.note_read

    def counted(self: DrafterCache, request: Request, count: int) -> None:
        sizes.append(count)
        note_read(self, request, count)

    monkeypatch.setattr(DrafterCache, "note_read", counted)
    for name in ("first", "second"):
        draft_expansion(drafter, make_request(name, range(1, 21)), 1)
        drafter.forget(name)
    assert sizes == [20, 1]


def _places(num_known: int, window: int) -> list[int]:
    places = places_to_read(num_known, window)
    return [*range(num_known)] if places is None else places.tolist()


def _as_read(request: Request, places: Sequence[int]) -> Request:
    """Return a request whose text is what a drafter with a window reads, which began with these places."""
    kept = [*(request.token_ids[place] for place in places), *request.token_ids[places[-1] + 1 :]]
    return make_request(request.request_id, kept, request.params, request.seed)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("chunk", [7, 512])
def test_small_model_with_a_window_reads_the_ends_of_a_long_prompt(
    family: str, chunk: int, runner_of: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drafts as for the shorter text, also after any output, and short prompts are read whole."""
    monkeypatch.setattr("specinfer.drafters.drafter_cache.MAX_CHUNK", chunk)
    drafter, model = SmallModelDrafter(runner_of(family), VOCAB, window=16), make_model(family)
    params, widths = SamplingParams(temperature=0.0, max_tokens=99), (2, 1)
    prompts = random_prompts([70, 20, 41])
    requests = [make_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    places = [_places(len(prompt), 16) for prompt in prompts]
    assert list(map(len, places)) == [22, 20, 17]
    for step in range(6):
        trees = drafter.draft([span_of(r) for r in requests], [TreeBudget.expansion(widths)] * 3)
        for request, tree, read in zip(requests, trees, places, strict=True):
            assert set(paths_of(tree)) == _expected(model, _as_read(request, read), widths), step
            leaf = step % len(tree)
            for token in (*tree.path_tokens(leaf), 5 + step):
                request.append(token, None)
            if step != 3:  # as when its tree was discarded
                drafter.observe(request, tree, Acceptance(tree.path(leaf), 5 + step))
    for request in requests:
        drafter.forget(request.request_id)
    assert drafter.runner.cache.is_balanced()


def test_the_next_turn_computes_only_what_the_window_has_not_seen(runner_of: Callable[..., ModelRunner]) -> None:
    runner = resized(runner_of("llama"), 300, keeps_prefixes=True)
    drafter, model = SmallModelDrafter(runner, VOCAB, window=32), make_model("llama")
    text, slots = random_prompts([140])[0], dict[int, int]()
    for length in (100, 111, 120, 140):  # places are those for 96, 96, 112 and 128 tokens
        request = make_request(str(length), text[:length])
        cached = runner.cache.num_cached
        tree = draft_expansion(drafter, request, 2)
        assert set(paths_of(tree)) == _expected(model, _as_read(request, _places(length, 32)), (2,))
        drafter.forget(str(length))
        slots[length] = runner.cache.num_cached - cached
    assert slots == {100: 32 + 4, 111: 11, 120: 24 + 8, 140: 24 + 12}, "the first 8 tokens are always cached"


def test_sampled_requests_share_the_noise_of_places_in_the_whole_text(runner_of: Callable[..., ModelRunner]) -> None:
    """A copy that reads all of what the target's text depends on guesses right, though it has skipped tokens."""
    request = make_request("0", random_prompts([70])[0], PARAMS["sampled"], seed=4)
    trees = []
    for grows_at_once in (True, False):
        drafter = SmallModelDrafter(runner_of("llama"), VOCAB, window=16)
        if not grows_at_once:
            drafter._loop = None
        trees.append(set(paths_of(draft_expansion(drafter, request, 3, 2))))
        drafter.forget("0")
    logits = reference.last_logits(make_model("llama"), _as_read(request, _places(70, 16)).token_ids)
    row = logits / request.params.temperature + gumbel(torch.tensor([4]), torch.tensor([70]), torch.arange(VOCAB))[0]
    assert {path for path in trees[0] if len(path) == 1} == {(token,) for token in row.topk(3).indices.tolist()}
    assert trees[0] == trees[1]


@pytest.mark.parametrize("params", [PARAMS["greedy"], PARAMS["sampled"]], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_slots", [400, 60])
def test_a_window_changes_no_text(num_slots: int, params: Any, runner_of: Callable[..., ModelRunner]) -> None:
    """In a batch whose prompts are read in chunks, and where the drafter lacks slots for all requests."""
    fields = {name: getattr(params, name) for name in params.__slots__} | {"max_tokens": 20}
    requests = requests_of(random_prompts([70, 20, 90]), [SamplingParams(**fields)] * 3)
    texts = []
    for is_drafting in (False, True):
        target = resized(runner_of("llama"), 400)
        drafter = SmallModelDrafter(resized(runner_of("mistral"), num_slots), VOCAB, window=16) if is_drafting else None
        made = requests()
        texts.append(run(make_engine(target, drafter, (2, 1) if drafter else (), max_num_batched_tokens=32), made))
    assert texts[0] == texts[1]
    assert sum(request.speculation.num_draft_tokens for request in made) > 0


def test_small_model_without_free_slots_drafts_less(runner_of: Callable[..., ModelRunner]) -> None:
    runner = resized(runner_of("llama"), 11)  # one too few for the prompt and a level to go on from
    drafter = SmallModelDrafter(runner, VOCAB)
    request = make_request("0", random_prompts([10])[0])
    assert draft_expansion(drafter, request, 2, 2).num_guessed == 2, "the level there was room for"
    assert runner.cache.num_free == 11
    assert draft_expansion(drafter, request, 2).num_guessed == 2, "there is room for this one"
    drafter.forget("0")
    long = make_request("1", random_prompts([13])[0])
    assert draft_expansion(drafter, long, 1).num_guessed == 0


def test_free_slots_do_not_choose_among_draws(runner_of: Callable[..., ModelRunner]) -> None:
    """Two equal draws take one slot and two different ones two: what was drawn is kept either way."""
    runner = resized(runner_of("llama"), 3)  # two for the prompt, one for the tree
    drafter = SmallModelDrafter(runner, VOCAB, draft_sampling="iid")
    differ = 0
    for seed in range(60):
        request = make_request(str(seed), [3, 1], SamplingParams(top_k=2), seed)
        tree = draft_expansion(drafter, request, 2, 1)
        first = [tree.tokens[draw.node] for draw in tree.candidates[0]]
        assert len(first) == 2, "a drawn guess was dropped"
        differ += first[0] != first[1]
        drafter.forget(str(seed))
    assert 10 < differ < 50


def test_small_model_stops_at_its_own_length(model_folder: Any, runner_of: Callable[..., ModelRunner]) -> None:
    runner = runner_of("gpt2", n_positions=16)
    drafter = SmallModelDrafter(runner, VOCAB)
    for length, depth in ((13, 3), (15, 1), (16, 0), (20, 0)):
        request = make_request(str(length), random_prompts([length])[0])
        assert draft_expansion(drafter, request, 1, 1, 1).max_depth == depth
        drafter.forget(str(length))


@pytest.mark.parametrize("vocab", [VOCAB - 10, VOCAB + 10])
def test_small_model_of_another_padded_vocabulary(vocab: int, runner_of: Callable[..., ModelRunner]) -> None:
    drafter = SmallModelDrafter(runner_of("llama", vocab_size=vocab), VOCAB)
    request = make_request("0", random_prompts([6], vocab=80)[0], PARAMS["sampled"])
    tree = draft_expansion(drafter, request, 8, 3)
    assert tree.num_guessed == 8 + 24
    assert max(tree.tokens) < min(vocab, VOCAB)
    drafter.forget("0")


def test_a_token_the_drafter_lacks_costs_that_request_its_guesses_only(runner_of: Callable[..., ModelRunner]) -> None:
    drafter = SmallModelDrafter(runner_of("llama", vocab_size=VOCAB - 8), VOCAB)
    ordinary, foreign = make_request("a", [1, 2, 3]), make_request("b", [1, VOCAB - 1, 3])
    trees = drafter.draft([span_of(ordinary), span_of(foreign)], [TreeBudget.expansion((2, 1))] * 2)
    assert [tree.num_guessed for tree in trees] == [4, 0]
    drafter.forget("a")
    drafter.forget("b")


def test_small_model_never_drafts_tokens_that_cannot_be_emitted(runner_of: Callable[..., ModelRunner]) -> None:
    drafter = SmallModelDrafter(runner_of("llama"), VOCAB)
    params = SamplingParams(temperature=1.0, allowed_token_ids=[3, 60])
    tree = draft_expansion(drafter, make_request("0", [1, 2], params), 4, 3)
    assert set(paths_of(tree)[1:]) == {(3,), (60,), (3, 3), (3, 60), (60, 3), (60, 60)}
    assert tree.num_guessed == 6
    drafter.forget("0")


def test_a_perfect_copy_is_always_right(runner_of: Callable[..., ModelRunner]) -> None:
    """Greedy and sampled: target and drafter share the noise, so a copy of the target guesses every token."""
    runner = runner_of("llama")
    for params in PARAMS.values():
        fields = {name: getattr(params, name) for name in params.__slots__} | {"max_tokens": 20}
        drafter = SmallModelDrafter(resized(runner, 500), VOCAB)
        request = make_request("0", [1, 2, 3], SamplingParams(**fields), seed=11)
        run(make_engine(runner, drafter, (1, 1, 1)), [request])
        assert request.speculation.num_target_passes == 5
        assert request.speculation.num_accepted_draft_tokens == 15
