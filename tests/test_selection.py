"""Choosing drafters: scores are those of plain passes, shifts are followed, failures are harmless, outputs stay."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import reference
from specinfer.drafters import SmallModelDrafter
from specinfer.drafters.scoring import MAX_SCORED, lookup_losses
from specinfer.model.runner import ModelRunner
from specinfer.request import Request, Span
from specinfer.sampling import SamplingParams
from specinfer.tree import TokenTree, TreeBudget
from specinfer.verify import Acceptance
from tiny import VOCAB, make_model, make_request, random_prompts, resized

PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=200),
    "sampled": SamplingParams(temperature=0.9, max_tokens=200),
    "processed": SamplingParams(
        temperature=0.7, top_p=0.9, frequency_penalty=1.0, repetition_penalty=1.3, max_tokens=200
    ),
}
DRAWINGS = ("shared-noise", "top-k", "without-replacement", "iid", "hybrid")


def _span(request: Request) -> Span:
    return Span(request, len(request.token_ids) - 1, len(request.token_ids))


def _expected(request: Request, drawing: str, start: int, model: Any = None) -> list[float]:
    return reference.guess_losses(
        model or make_model("llama"), request.token_ids, len(request.prompt_ids), start, request.params, request.seed,
        chosen=drawing in ("shared-noise", "top-k") or request.params.is_greedy, noisy=drawing == "shared-noise",
    )  # fmt: skip


def _plain(request: Request, count: int) -> list[int]:
    """The next tokens of plain decoding, if the drafter's model were the target."""
    said: list[int] = []
    for _ in range(count):
        logits = reference.last_logits(make_model("llama"), [*request.token_ids, *said]).tolist()
        row = reference.scores(logits, request.params, request.prompt_ids, said, request.seed)
        said.append(max(range(len(row)), key=row.__getitem__))
    return said


def _scored(runner: ModelRunner, drawing: str = "shared-noise") -> SmallModelDrafter:
    return SmallModelDrafter(runner, VOCAB, "small", drawing, is_scored=True)


def _say(request: Request, tokens: Sequence[int]) -> None:
    for token in tokens:
        request.append(token, None)


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("drawing", DRAWINGS)
def test_replayed_tokens_score_as_in_plain_passes(
    name: str, drawing: str, runner_of: Callable[..., ModelRunner]
) -> None:
    drafter = _scored(runner_of("llama"), drawing)
    request = make_request("0", random_prompts([9])[0], PARAMS[name], seed=4)
    drafter.replay([request])
    losses = drafter.take_losses("0")
    assert losses.output == []
    assert losses.prompt == pytest.approx(_expected(request, drawing, 1), abs=1e-5)
    assert drafter.take_losses("0") == ([], []), "each is told once"
    # Some tokens as the drafter itself would have it, some at random.
    said = [*_plain(request, 4), *random_prompts([5], seed=3)[0]]
    _say(request, said)
    drafter.replay([request])
    losses = drafter.take_losses("0")
    assert losses.prompt == []
    assert losses.output == pytest.approx(_expected(request, drawing, 9), abs=1e-5)
    if drawing == "shared-noise":
        assert losses.output[:4] == [0.0] * 4
    assert 0 < sum(losses.output) < len(said) or drawing == "top-k"
    drafter.forget("0")


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("drawing", DRAWINGS)
@pytest.mark.parametrize("budget", [TreeBudget.expansion((2, 2, 1)), TreeBudget(7, 4)], ids=["fixed", "best first"])
def test_whoever_is_asked_is_scored_once_on_every_token(
    name: str, drawing: str, budget: TreeBudget, runner_of: Callable[..., ModelRunner]
) -> None:
    """On its own accepted nodes, on what it had not guessed, on steps it slept through, on discarded trees."""
    drafter, model = _scored(runner_of("llama"), drawing), make_model("llama")
    requests = [make_request(str(i), prompt, PARAMS[name], seed=i) for i, prompt in enumerate(random_prompts([5, 12]))]
    found: list[list[float]] = [[], []]
    generator = torch.Generator().manual_seed(1)
    for step in range(7):
        trees = drafter.draft([_span(r) for r in requests], [budget] * 2)
        for request, tree, known in zip(requests, trees, found, strict=True):
            leaf = int(torch.randint(len(tree), (), generator=generator))
            _say(request, (*tree.path_tokens(leaf), 5 + step))
            if step != 3:
                drafter.observe(request, tree, Acceptance(tree.path(leaf), 5 + step))
            losses = drafter.take_losses(request.request_id)
            known += [*losses.prompt, *losses.output]
        if step == 4:
            _say(requests[0], [7, 8])
    for request, known in zip(requests, found, strict=True):
        drafter.replay([request])
        known += drafter.take_losses(request.request_id).output
        assert known == pytest.approx(_expected(request, drawing, 1, model), abs=1e-5)
        drafter.forget(request.request_id)


def test_only_the_end_of_a_long_text_is_scored(
    runner_of: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is read in chunks, or found in the prefix cache."""
    runner = resized(runner_of("llama"), 1024, keeps_prefixes=True)
    prompt = random_prompts([100])[0]
    for chunk in (512, 80):
        monkeypatch.setattr("specinfer.drafters.small_model.MAX_CHUNK", chunk)
        drafter = _scored(runner)
        request = make_request("0", prompt, PARAMS["greedy"])
        drafter.replay([request])
        losses = drafter.take_losses("0").prompt
        assert len(losses) == MAX_SCORED
        assert losses == _expected(request, "shared-noise", 100 - MAX_SCORED)
        drafter.forget("0")


def test_many_requests_share_what_logits_may_take(runner_of: Callable[..., ModelRunner]) -> None:
    drafter = _scored(runner_of("llama"))
    requests = [make_request(str(i), prompt, PARAMS["greedy"]) for i, prompt in enumerate(random_prompts([40] * 16))]
    drafter.draft([_span(request) for request in requests], [TreeBudget.expansion((1,))] * 16)
    for request in requests:
        assert drafter.take_losses(request.request_id).prompt == _expected(request, "shared-noise", 40 - 256 // 16)
        drafter.forget(request.request_id)


def test_without_room_nothing_is_scored_and_nothing_is_kept(runner_of: Callable[..., ModelRunner]) -> None:
    runner = resized(runner_of("llama"), 8)
    drafter = _scored(runner)
    request = make_request("0", random_prompts([10])[0], PARAMS["greedy"])
    drafter.replay([request])
    assert drafter.take_losses("0") == ([], [])
    assert runner.cache.num_free == 8
    drafter.forget("0")


def test_a_text_longer_than_the_drafters_context_is_not_read(runner_of: Callable[..., ModelRunner]) -> None:
    drafter = _scored(runner_of("gpt2", n_positions=16))
    for length, num_scored in ((15, 14), (16, 0), (20, 0)):
        drafter.replay([make_request(str(length), random_prompts([length])[0])])
        assert len(drafter.take_losses(str(length)).prompt) == num_scored
        drafter.forget(str(length))


def test_who_is_not_scored_asks_for_no_logits_beside(runner_of: Callable[..., ModelRunner]) -> None:
    """The choice is off: one row a request, as ever."""
    runner, rows = runner_of("llama"), []
    drafter = SmallModelDrafter(runner, VOCAB)
    request = make_request("0", random_prompts([9])[0])
    forward = runner.forward
    runner.forward = lambda pieces: (rows.append([piece.num_logits for piece in pieces]), forward(pieces))[1]  # type: ignore[method-assign]
    try:
        drafter.draft([_span(request)], [TreeBudget.expansion((1,))])
    finally:
        del runner.forward
    assert rows == [[1]]
    assert drafter.take_losses("0") == ([], [])
    drafter.forget("0")


def test_lookups_are_scored_as_far_as_the_text_stays_in_their_tree() -> None:
    tree = replace(TokenTree.chain(0, [5, 6, 7]))
    assert lookup_losses(tree, [5, 6, 7, 8]) == [0, 0, 0]
    assert lookup_losses(tree, [5, 9, 7]) == [0, 1]
    assert lookup_losses(tree, [9]) == [1]
    assert lookup_losses(TokenTree.root(0), [9, 9]) == [1], "to say nothing is to be wrong"
    branching = TokenTree((0, 5, 6, 1), (-1, 0, 0, 2))
    assert lookup_losses(branching, [6, 1, 4]) == [1, 0], "its second guess is not its best"
