"""Heads among the drafters that are chosen: scores are those of their drafts, missed text is read, outputs stay."""

from pathlib import Path
from typing import Any

from heads import drafter_of, ids_of, llm_of, save_cycle, save_eagle3
from reference.heads import SlowEagle3, slow_tree
from reference.texts import hidden_states
from specinfer import SamplingParams
from specinfer.core.request import Request, Span
from specinfer.core.tree import TreeBudget
from specinfer.drafters import SmallModelDrafter
from specinfer.drafters.merge.scoring import Scoring
from tiny import paths_of, random_prompts, save_model

LAYERS = 8  # of the target
CYCLE = [63, 62, 57, 32, 35, 50, 61, 52]  # text of the target that is a cycle
GREEDY = SamplingParams(temperature=0.0, max_tokens=90)


def _losses(slow: SlowEagle3, model: Any, tokens: list[int], start: int, end: int, step: int) -> list[float]:
    """The losses of chains of four that begin at these places, as far as the text goes with them."""
    losses = []
    for place in range(start, end, step):
        features = slow.project(hidden_states(model, tokens[: place - 1], (2, 4, 5)))
        chain = max(paths_of(slow_tree(slow, features, tokens[:place], (1, 1, 1, 1))), key=len)
        for drafted, token in zip(chain, tokens[place : min(place + 4, end)], strict=False):
            losses.append(float(drafted != token))
            if drafted != token:
                break
    return losses


def test_a_head_is_scored_on_drafts_of_text_that_it_missed(target: Path, model: Any, tmp_path: Path) -> None:
    """The slow twin computes every draft anew, without a cache; prompt and output are scored apart, each once."""
    slow = SlowEagle3(save_eagle3(tmp_path / "head"), model.model.embed_tokens.weight.detach())
    with llm_of(target, tmp_path / "head", tree="1") as llm:
        drafter = drafter_of(llm)
        drafter._scoring, drafter._loop = Scoring("shared-noise", drafter.vocabulary), None  # scored drafts go in steps
        request = Request("one", random_prompts([21])[0], GREEDY, seed=0)
        llm.engine.add(request)
        drafter.replay([request])
        assert drafter.take_losses("one") == ([], []), "the target has not read the prompt"
        while request.num_output < 9:
            llm.engine.step()
        drafter.forget("one")
        count = len(request.token_ids)
        drafter.replay([request])
        losses, tokens = drafter.take_losses("one"), request.token_ids
        wanted = [_losses(slow, model, tokens, start, end, 4) for start, end in ((2, 21), (22, count))]
        assert [losses.prompt, losses.output] == wanted
        drafter.replay([request])
        assert drafter.take_losses("one") == ([], []), "each token is scored once"
        span = Span(request, count - 1, count)
        (tree,) = drafter.draft([span], [TreeBudget.expansion((2, 2))])
        features = slow.project(hidden_states(model, tokens[:-1], (2, 4, 5)))
        assert sorted(paths_of(tree)) == sorted(paths_of(slow_tree(slow, features, tokens, (2, 2))))


def test_a_perfect_head_is_chosen_and_catches_up_with_what_it_missed(tmp_path: Path) -> None:
    """The first drafter named is asked until the other has been scored, after the first pass, on the prompt."""
    target, head = save_cycle(tmp_path)
    small = save_model(tmp_path / "small", vocab_size=64)
    with llm_of(target, small, head, tree="1,1,1,1", select="hedge:1") as llm:
        assert llm.drafter is not None
        assert llm.drafter.selection is not None
        names = [one.name for one in llm.drafter.drafters if isinstance(one, SmallModelDrafter)]
        (output,) = llm.generate(ids_of([CYCLE]), GREEDY, use_tqdm=False)
        weights = llm.drafter.selection.weights
        assert weights[names[1]] > weights[names[0]]
        steps = dict(output.metrics.speculative_decoding)
        assert int(steps["num_accepted_draft_tokens"]) / int(steps["num_spec_steps"]) > 3.5  # type: ignore[call-overload]
