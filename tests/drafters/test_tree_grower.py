"""A draft in one native call: its trees are those that small models grow step by step."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from drafting import span_of
from heads import drafter_of, ids_of, llm_of, save_eagle3
from pair_heads import save_eagle, save_mtp
from specinfer.core.draws import Draws
from specinfer.core.request import Request, Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters import SmallModelDrafter
from specinfer.drafters.growth.calibration import Calibration
from specinfer.drafters.tree_grower import NativeGrower, Wanted
from specinfer.drafters.vocabulary.token_map import ReducedVocabulary, SharedVocabulary
from specinfer.model.kv_cache import OutOfSlotsError
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.load import load_model
from specinfer.model.runner import ModelRunner
from specinfer.verify import Acceptance, verify
from tiny import VOCAB, make_request, random_prompts, resized, save_model

LAYERS = 8  # of the target
GREEDY, SAMPLED = SamplingParams(temperature=0.0, max_tokens=99), SamplingParams(temperature=0.8, max_tokens=99)
BUDGETS = {
    "best first": [TreeBudget(12, 4), TreeBudget(3, 5), TreeBudget(30, 3, min_path_prob=0.05)],
    "stopped": [TreeBudget(16, 6, min_gain=0.4), TreeBudget(9, 8, min_gain=0.9), TreeBudget(1, 1)],
    "fixed": [TreeBudget.expansion((3, 1, 2)), TreeBudget.expansion((1,)), TreeBudget.expansion((1, 1, 1, 1, 1))],
    "mixed": [TreeBudget.expansion((2, 2)), TreeBudget(64, 6), TreeBudget.expansion((9, 1))],
}
PARAMS = {
    "greedy": [GREEDY] * 3,
    "sampled": [SAMPLED] * 3,
    "both": [GREEDY, SamplingParams(max_tokens=99), SAMPLED],
    "truncated": [replace(SAMPLED, top_p=0.7), replace(SAMPLED, top_k=3), replace(SAMPLED, min_p=0.2)],
}


class _Twins:
    """A drafter that drafts in one call, and one that drafts step by step."""

    def __init__(self, runner: ModelRunner, **kwargs: Any) -> None:
        assert isinstance(runner.loaded.model, FusedDecoder), "the model is computed natively"
        self.drafters = [
            SmallModelDrafter(resized(runner, 400), VOCAB, calibration=Calibration(), **kwargs) for _ in range(2)
        ]
        self.drafters[1]._loop = None

    def draft(self, requests: Sequence[Request], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        spans = [span_of(request) for request in requests]
        counts = [dict(request.drafting.num_draws) for request in requests]
        one = self.drafters[0].draft(spans, budgets)
        used = [request.drafting.num_draws for request in requests]
        for request, before in zip(requests, counts, strict=True):
            request.drafting.num_draws = before
        other = self.drafters[1].draft(spans, budgets)
        for request, tree, numbers in zip(requests, one, used, strict=True):
            assert numbers == request.drafting.num_draws or not any(draw.distribution for draw in tree.draws)
        for mine, expected in zip(one, other, strict=True):
            _check_alike(mine, expected)
        return one

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        """Go on with the accepted tokens; what both then have in their caches is equal."""
        for node in acceptance.path:
            request.append(tree.tokens[node], None)
        request.append(acceptance.next_token, None)
        cached = []
        for drafter in self.drafters:
            drafter.observe(request, tree, acceptance)
            drafter._calibration.observe(request, tree, acceptance)
            cache = drafter.runner.cache
            assert cache.is_balanced()
            cached.append((cache.num_owned, len(cache.slots(request.request_id))))
        assert cached[0] == cached[1]


def _check_alike(mine: TokenTree, expected: TokenTree) -> None:
    assert (mine.tokens, mine.parents) == (expected.tokens, expected.parents)
    assert [draw[:2] for draw in mine.draws] == [draw[:2] for draw in expected.draws]
    sure = [[draw.confidence for draw in tree.draws] for tree in (mine, expected)]
    assert sure[0] == pytest.approx(sure[1], rel=1e-5)
    for one, other in zip(*([draw.distribution for draw in tree.draws] for tree in (mine, expected)), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert one.removed == other.removed
            assert one.probs == pytest.approx(other.probs, rel=1e-5, abs=1e-12)


def _deepest(tree: TokenTree) -> Acceptance:
    """Accept the deepest path, and an arbitrary token after it."""
    path = tree.path(tree.depths.index(tree.max_depth))
    return Acceptance(path, (7 * len(tree) + 3) % VOCAB)


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", BUDGETS)
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("sampling", ["shared-noise", "without-replacement"])
def test_trees_are_those_that_grow_step_by_step(
    shape: str, params: str, sampling: str, runner_of: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = _count_calls(monkeypatch)
    twins = _Twins(runner_of("llama"), draft_sampling=sampling)
    requests = [
        make_request(str(i), prompt, one, seed=i)
        for i, (prompt, one) in enumerate(zip(random_prompts([9, 1, 90]), PARAMS[params], strict=True))
    ]
    for number in range(4):
        trees = twins.draft(requests, BUDGETS[shape])
        assert any(tree.num_guessed for tree in trees)
        for i, (request, tree) in enumerate(zip(requests, trees, strict=True)):
            twins.observe(request, tree, _deepest(tree) if (i + number) % 3 else Acceptance((), 5))
    assert used == [True] * 4


@pytest.mark.parametrize("rule", ["multi-step", "traversal"])
def test_walks_of_trees_that_were_drawn_in_one_call(rule: str, runner_of: Callable[..., ModelRunner]) -> None:
    """What their tokens were drawn from is read where the call has written it."""
    twins = _Twins(runner_of("llama"), draft_sampling="without-replacement")
    requests = [make_request(str(i), [5, 6, i], SAMPLED, seed=i) for i in range(3)]
    trees = twins.draft(requests, BUDGETS["best first"])
    again = [TokenTree.from_arrays(tree.arrays._replace(draws=Draws.from_draws(tree.draws))) for tree in trees]
    logits = [torch.randn(len(tree), VOCAB, generator=torch.Generator().manual_seed(4)) for tree in trees]
    kept = [verify(rule, logits, copy.deepcopy(requests), several) for several in (trees, again)]
    assert kept[0] == kept[1]
    assert any(acceptance.path for acceptance in kept[0])


def test_trees_of_different_rules_grow_together(
    runner_of: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = _count_calls(monkeypatch)
    twins = _Twins(runner_of("llama"), draft_sampling="auto")
    requests = [make_request(str(i), [7, 8, i], SAMPLED, seed=i) for i in range(3)]
    requests[0].verification, requests[1].verification = "traversal", "multi-step"
    for _ in range(3):
        trees = twins.draft(requests, BUDGETS["mixed"])
        for request, tree in zip(requests, trees, strict=True):
            twins.observe(request, tree, _deepest(tree))
    assert used == [True] * 3


REDUCED = ReducedVocabulary((range(32), range(64, VOCAB)))


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("sampling", ["shared-noise", "without-replacement"])
@pytest.mark.parametrize("has_other_text", [False, True])
def test_a_reduced_vocabulary_drafts_as_a_model_that_has_no_other_tokens(
    params: str, sampling: str, has_other_text: bool, runner_of: Callable[..., ModelRunner]
) -> None:
    runner = runner_of("llama")
    cut = load_model(runner.loaded.folder, "auto", runner.loaded.device, token_map=REDUCED.ids)
    whole = SharedVocabulary(VOCAB, VOCAB)
    made = {
        "reduced": (runner.loaded, SharedVocabulary(VOCAB, VOCAB, None, REDUCED)),
        "expected": (runner.loaded, whole) if has_other_text else (cut, SharedVocabulary(VOCAB, VOCAB, REDUCED.ids)),
    }
    drafters = [
        SmallModelDrafter(
            ModelRunner(loaded, 400), VOCAB, draft_sampling=sampling, calibration=Calibration(), vocabulary=vocabulary
        )
        for loaded, vocabulary in made.values()
    ]
    prompts = [[3, 40, 70, 41, 5, 42], [9], [65, 43] * 2]  # 3, 0 and 2 tokens that are outside
    if has_other_text:
        prompts[1] = [40, 44, 9, 50, 51, 52]
    trees = []
    for drafter in drafters:
        requests = [
            make_request(str(i), prompt, one, seed=i)
            for i, (prompt, one) in enumerate(zip(prompts, PARAMS[params], strict=True))
        ]
        trees.append(drafter.draft([span_of(request) for request in requests], BUDGETS["mixed"]))
    for mine, expected in zip(*trees, strict=True):
        _check_alike(mine, expected)
        drafted = set(mine.tokens[1:])
        assert drafted
        assert has_other_text or drafted <= {*REDUCED.ids.tolist()}


def _count_calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each draft whether it was made in one call."""
    used: list[bool] = []
    plain = NativeGrower.draft

    def counted(self: NativeGrower, *args: Any) -> Any:
        result = plain(self, *args)
        used.append(result is not None)
        return result

    monkeypatch.setattr(NativeGrower, "draft", counted)
    return used


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gemma4_text-shared", "gemma4_text-moe"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_trees_of_other_models_and_weights(
    family: str, quantization: str | None, runner_of: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tied and scaled embeddings, windows, norms of queries, inputs of layers, capped logits; weights in codes."""
    used = _count_calls(monkeypatch)
    twins = _Twins(runner_of(family, quantization=quantization))
    request = make_request("0", random_prompts([20])[0], SAMPLED)
    for _ in range(2):
        (tree,) = twins.draft([request], [TreeBudget(20, 5)])
        twins.observe(request, tree, _deepest(tree))
    assert used == [True] * 2


def test_trees_of_few_tokens(runner_of: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary that is padded and one of which only some tokens are drafted."""
    used = _count_calls(monkeypatch)
    for vocab, token_ids in ((VOCAB - 10, None), (VOCAB + 10, None)):
        twins = _Twins(runner_of("llama", vocab_size=vocab), vocabulary=SharedVocabulary(VOCAB, vocab, token_ids))
        (tree,) = twins.draft([make_request("0", random_prompts([6], vocab=80)[0], SAMPLED)], [TreeBudget(40, 3)])
        assert max(tree.tokens) < min(vocab, VOCAB)
    assert used == [True] * 2


def test_requests_whose_logits_are_adjusted_are_drafted_for_step_by_step(
    runner_of: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = _count_calls(monkeypatch)
    twins = _Twins(runner_of("llama"))
    for params in (SamplingParams(repetition_penalty=1.3), SamplingParams(allowed_token_ids=(3, 4, 5))):
        twins.draft([make_request("0", random_prompts([6])[0], params)], [TreeBudget(8, 3)])
    assert not used


def test_other_requests_are_drafted_for_in_one_call(
    runner_of: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = _count_calls(monkeypatch)
    twins = _Twins(runner_of("llama"))
    all_params = (SAMPLED, replace(SAMPLED, repetition_penalty=1.3), GREEDY)
    requests = [
        make_request(str(i), prompt, params, seed=i)
        for i, (prompt, params) in enumerate(zip(random_prompts([6, 9, 3]), all_params, strict=True))
    ]
    for _ in range(3):
        trees = twins.draft(requests, [TreeBudget(8, 3)] * 3)
        assert all(tree.num_guessed for tree in trees)
        for request, tree in zip(requests, trees, strict=True):
            twins.observe(request, tree, _deepest(tree))
    assert used == [True] * 3


def test_wide_trees_next_to_drawn_ones_are_not_in_their_call(
    runner_of: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call's trees share the number of candidates of a node, and the distribution of a draw has 128 tokens."""
    used = _count_calls(monkeypatch)
    vocabulary = SharedVocabulary(300, 300, None)
    twins = _Twins(runner_of("llama", vocab_size=300), vocabulary=vocabulary, draft_sampling="without-replacement")
    requests = [make_request(str(i), [7, 8, i], params, seed=i) for i, params in enumerate((GREEDY, SAMPLED))]
    budgets = [TreeBudget.expansion((200,)), TreeBudget.expansion((2, 1))]
    spans = [span_of(request) for request in requests]
    trees = twins.drafters[0].draft(spans, budgets)
    assert [tree.num_guessed for tree in trees] == [200, 4]
    assert used == [True]
    for request, span, budget, tree in zip(requests, spans, budgets, trees, strict=True):
        request.drafting.num_draws.clear()
        (alone,) = twins.drafters[1].draft([span], [budget])
        _check_alike(tree, alone)
    drafter, wide = twins.drafters[0], TreeBudget.expansion((200,))
    assert drafter._loop is not None
    fitting = drafter._loop.fitting([Wanted(request, wide) for request in requests])
    assert fitting == [Wanted(requests[0], wide)], "where none is drawn, wide trees are"


def test_trees_of_one_call_are_kept_if_others_run_out_of_slots(
    runner_of: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = SmallModelDrafter(resized(runner_of("llama"), 400), VOCAB, calibration=Calibration())
    requests = [
        make_request("0", [3, 4, 5], GREEDY),
        make_request("1", [5, 6], replace(GREEDY, repetition_penalty=1.3)),
    ]
    spans = [span_of(request) for request in requests]
    monkeypatch.setattr(drafter.runner, "forward", Mock(side_effect=OutOfSlotsError))
    trees = drafter.draft(spans, [TreeBudget(8, 3)] * 2)
    assert [tree.num_guessed > 0 for tree in trees] == [True, False]
    for request, tree in zip(requests, trees, strict=True):
        request.append(7, None)
        drafter.observe(request, tree, Acceptance((), 7))
        drafter.forget(request.request_id)
    cache = drafter.runner.cache
    assert cache.is_balanced()
    assert cache.num_owned == 0


def test_logits_that_are_no_numbers_draft_nothing(runner_of: Callable[..., ModelRunner]) -> None:
    twins = _Twins(runner_of("llama"))
    model = twins.drafters[0].runner.loaded.model
    assert isinstance(model, FusedDecoder)
    assert model.head is not None
    kept = model.head.norm.clone()
    try:
        model.head.norm.fill_(torch.nan)
        (tree,) = twins.draft([make_request("0", [1, 2, 3], SAMPLED)], [TreeBudget(8, 3)])
    finally:
        model.head.norm.copy_(kept)
    assert tree.num_guessed == 0


def test_a_draft_continues_with_other_weights(runner_of: Callable[..., ModelRunner]) -> None:
    twins = _Twins(runner_of("llama"))
    request = make_request("0", random_prompts([12])[0])
    (before,) = twins.draft([request], [TreeBudget(12, 4)])
    for drafter in twins.drafters:
        drafter.replace(runner_of("llama", seed=5).loaded)
    (after,) = twins.draft([request], [TreeBudget(12, 4)])
    assert before.tokens != after.tokens


HEADS: dict[str, dict[str, Any]] = {
    "EAGLE-3": {},
    "EAGLE-3, normed": {"layout": "speculators", "norm_output": True, "norm_before_residual": True},
    "EAGLE-3, own tokens": {"draft_ids": range(2, 90), "own_embedding": True},
    "EAGLE-3, two layers": {"num_layers": 2, "family": "qwen3"},
    "EAGLE": {"bias": True},
    "EAGLE, with its target's ends": {"own_embedding": False},
}
TARGETS = {"EAGLE, with its target's ends": "gemma2"}  # not fused here, and its logits are capped
MTP = ["mimo", "glm4_moe", "qwen3_next"]  # with the feature first; with experts; with norms around 1
CASES = [
    *((head, dtype) for head in HEADS for dtype in ("float32", "bfloat16") if "EAGLE-3" in head or dtype == "float32"),
    *((family, "float32") for family in MTP),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("head", "dtype"), CASES)
@pytest.mark.parametrize("verification", ["coupled", "traversal"])
@pytest.mark.parametrize("tree", ["best-first:12", "2,2,1"])
def test_trees_of_heads_are_those_that_grow_step_by_step(
    head: str, dtype: str, verification: str, tree: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32; those of EAGLE-1 and MTP layers are rounded at other places in half precision."""
    used, params = _count_calls(monkeypatch), [replace(one, max_tokens=16, ignore_eos=True) for one in PARAMS["both"]]
    options = {"dtype": dtype, "tree": tree, "verification": verification, "max_num_batched_tokens": 64}
    if head in MTP:
        save_mtp(tmp_path, head)
        target, drafter_name = tmp_path, "mtp"
    else:
        if head in TARGETS:
            target = save_model(tmp_path / "target", TARGETS[head], num_hidden_layers=8)
        save = save_eagle3 if "EAGLE-3" in head else save_eagle
        drafter_name = str(save(tmp_path, **HEADS[head]))
    with llm_of(target, drafter_name, **options) as llm:
        drafter, num_trees = drafter_of(llm), 0
        draft, loop = drafter.draft, drafter._loop
        assert isinstance(loop, NativeGrower)

        def both(spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
            nonlocal num_trees
            counts, drafted = [dict(span.request.drafting.num_draws) for span in spans], []
            for drafter._loop in (None, loop):
                for span, before in zip(spans, counts, strict=True):
                    span.request.drafting.num_draws = dict(before)
                drafted.append(draft(spans, budgets))
            for expected, mine in zip(*drafted, strict=True):
                _check_alike(mine, expected)
                num_trees += mine.num_guessed > 0
            return drafted[1]

        monkeypatch.setattr(drafter, "draft", both)
        outputs = llm.generate(ids_of(random_prompts([9, 2, 90])), params, use_tqdm=False)
        assert not any(output.error for output in outputs)
    assert num_trees > 20
    assert set(used) == {True}
