"""The learned speculation policy: its choices, and that no output depends on it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specinfer.core.errors import ModelError
from specinfer.core.request import Request, Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import OFF, TokenTree, TreeBudget
from specinfer.drafters import MergedDrafter, SuffixDrafter, make_drafter
from specinfer.llm import LLM
from specinfer.model.runner import ModelRunner
from specinfer.policy.auto_policy import AutoPolicy
from specinfer.policy.base import SpeculationPolicy
from specinfer.policy.features import find_slots
from specinfer.policy.learned_choice import _BOUND, LearnedChoice
from specinfer.policy.network import Configuration, make_configurations
from specinfer.verify import Acceptance
from tests.policy.simulated_machines import slow_target_costs, span_of
from tests.policy.untrained_network import SLOTS, Scripted, make_network
from tiny import VOCAB, make_engine, make_request, random_prompts, run, save_model


def _drafter() -> MergedDrafter:
    return MergedDrafter([Scripted(), SuffixDrafter()])


def test_budgets_ask_the_drafters_with_the_highest_expected_yield() -> None:
    menu = make_configurations(SLOTS)
    for wanted in (0, 4, menu.index(Configuration(("model",), 7, 6, 0.02)), len(menu) - 1):
        gains = [30.0 if i == wanted else 0.01 for i in range(len(menu))]
        policy = LearnedChoice(make_network(gains=gains), slow_target_costs(), _drafter())
        (budget,) = policy.budgets([span_of(make_request("a", range(9)))])
        one = menu[wanted]
        if not one.slots:
            assert budget == OFF
            continue
        names = frozenset("scripted" if slot == "model" else slot for slot in one.slots)
        assert budget == TreeBudget(one.max_nodes, one.max_depth, min_path_prob=one.min_path_prob, drafters=names)
        assert (policy.num_decided, dict(policy.num_fallen_back)) == (1, {})


def test_a_model_that_would_have_to_read_a_long_prompt_first_is_left_out() -> None:
    gains = [6.0 if one.uses_model else 0.0 for one in make_configurations(SLOTS)]
    short = make_request("a", range(9), SamplingParams(temperature=0.0, max_tokens=2))
    for read_token, is_asked in ((0.0, True), (0.5, False)):
        policy = LearnedChoice(make_network(gains=gains), slow_target_costs(read_token), _drafter())
        (budget,) = policy.budgets([span_of(short)])
        assert bool(budget.max_nodes) is is_asked
    short.drafting.is_read = True
    (budget,) = policy.budgets([span_of(short)])
    assert budget.max_nodes, "it has read it"


def _tell(policy: LearnedChoice, request: Request, num_accepted: int) -> None:
    """A step in which so many guesses came true."""
    tree = TokenTree.chain(request.token_ids[-1], [5] * num_accepted, "scripted")
    request.token_ids += [5] * num_accepted + [6]
    logits = torch.zeros(num_accepted + 1, 10)
    policy.on_tokens(request, tree, Acceptance(tuple(range(1, num_accepted + 1)), 6), logits, num_accepted + 1)


def test_what_comes_true_corrects_what_is_expected() -> None:
    """A model that is expected to be good and is not loses to one that is what it is thought to be."""
    menu = make_configurations(SLOTS)
    good, fair = menu.index(Configuration(("model",), 7, 6, 0.02)), menu.index(Configuration(("suffix",), 7, 7, 0.02))
    gains = [{good: 4.0, fair: 3.0}.get(i, 0.0) for i in range(len(menu))]
    policy = LearnedChoice(make_network(gains=gains), slow_target_costs(), _drafter())
    request = make_request("a", range(9), SamplingParams(temperature=0.0, max_tokens=10**6))
    asked = []
    for _ in range(30):
        (budget,) = policy.budgets([span_of(request)])
        asked.append(budget.drafters)
        _tell(policy, request, 2 if budget.drafters == frozenset(["scripted"]) else 3)
    assert asked[0] == frozenset(["scripted"])
    assert asked[-1] == frozenset(["suffix"])
    (other,) = policy.budgets([span_of(make_request("b", range(9)))])
    assert other.drafters == frozenset(["suffix"]), "other requests profit from it"


def test_what_was_tried_in_vain_does_not_make_another_size_seem_better() -> None:
    """Where all sizes yield less than expected, the best one stays the best."""
    menu = make_configurations(SLOTS)
    small, large = (menu.index(Configuration(("model",), *size, 0.02)) for size in ((3, 3), (7, 6)))
    gains = [{small: 2.2, large: 3.6}.get(i, 0.0) for i in range(len(menu))]
    policy = LearnedChoice(make_network(gains=gains), slow_target_costs(), _drafter())
    request = make_request("a", range(9), SamplingParams(temperature=0.0, max_tokens=10**6))
    for _ in range(40):
        (budget,) = policy.budgets([span_of(request)])
        assert budget.max_nodes == 7
        _tell(policy, request, 2)


def test_it_falls_back_with_a_reason_when_predictions_fail() -> None:
    menu = make_configurations(SLOTS)
    policy = LearnedChoice(make_network(gains=[0.0, *[20.0] * (len(menu) - 1)]), slow_target_costs(), _drafter())
    for i in range(400):  # many requests: what is learned of one must not hide it
        request = make_request(str(i), range(9), SamplingParams(temperature=0.0, max_tokens=10**6))
        policy.budgets([span_of(request)])
        _tell(policy, request, 0)
        if policy.num_fallen_back["error"]:
            break
    assert policy.num_fallen_back["error"] == 1
    assert math.log(3) > _BOUND


def test_it_falls_back_for_what_it_does_not_know() -> None:
    fitting = make_network(gains=[0.0, *[5.0] * (len(make_configurations(SLOTS)) - 1)])
    spans = [span_of(make_request(str(i), range(9))) for i in range(3)]
    by_rank = AutoPolicy(slow_target_costs()).budgets(spans[:1])
    others = LearnedChoice(fitting, slow_target_costs(), SuffixDrafter())
    assert AutoPolicy(slow_target_costs(), network=others).budgets(spans[:1]) == by_rank
    assert dict(others.num_fallen_back) == {"drafters": 1}
    hot = fitting.names.index("request.temperature")
    cold = replace(fitting, high=np.where(np.arange(len(fitting.names)) == hot, 0.0, fitting.high))
    cold = replace(cold, low=np.where(np.arange(len(fitting.names)) == hot, 0.0, cold.low))
    warm = span_of(make_request("warm", range(9), SamplingParams(temperature=1.0)))
    predicted = span_of(make_request("predicted", range(9), prediction_ids=(1, 2)))
    choice = LearnedChoice(cold, slow_target_costs(), _drafter())
    budgets = AutoPolicy(slow_target_costs(), network=choice).budgets([spans[0], warm, predicted, spans[1]])
    assert dict(choice.num_fallen_back) == {"range": 1, "prediction": 1}
    assert choice.num_decided == 2
    assert budgets[0].drafters
    assert budgets[3].drafters
    assert budgets[1].drafters is budgets[2].drafters is None, "chosen by the acceptance of ranks"


@pytest.fixture(scope="module")
def pair(runner_of: Callable[..., ModelRunner]) -> tuple[ModelRunner, ModelRunner]:
    return runner_of("llama"), runner_of("llama", noise=0.3)


@pytest.mark.parametrize("rule", ["coupled", "target-only", "multi-step", "traversal"])
def test_no_output_depends_on_the_speculation_policy(pair: tuple[ModelRunner, ModelRunner], rule: str) -> None:
    """Several requests together: rules with random numbers keep the distribution, greedy ones the tokens too."""
    target, small = pair
    drawing = {"coupled": "shared-noise", "target-only": "top-k"}.get(rule, "without-replacement")
    drafter = make_drafter([small, "suffix"], VOCAB, draft_sampling=drawing)
    assert drafter is not None
    choice = LearnedChoice(make_network(seed=5), slow_target_costs(), drafter)
    policy = AutoPolicy(slow_target_costs(), network=choice)
    prompts = random_prompts((5, 20, 12, 33), seed=1)
    prompts[1] = prompts[1][:4] * 5
    tosses = rule in ("multi-step", "traversal")
    params = [SamplingParams(temperature=0.0 if tosses or i % 2 else 1.0, max_tokens=24, seed=i) for i in range(4)]

    def requests() -> list[Request]:
        return [make_request(str(i), prompts[i], params[i], seed=i) for i in range(4)]

    plain = run(make_engine(target), requests())
    assert run(make_engine(target, drafter, policy, verification=rule), requests()) == plain
    assert choice.num_decided > 20


class Recorded(SpeculationPolicy):
    """A policy that keeps what it was told and what it answered."""

    def __init__(self, policy: AutoPolicy) -> None:
        self.policy = policy
        self.events: list[tuple[str, Any]] = []

    def budgets(self, spans: Sequence[Span], reading: Sequence[Span] = ()) -> list[TreeBudget]:
        budgets = self.policy.budgets(spans)
        known = [(span.request, list(span.request.token_ids), span.request.drafting.is_read) for span in spans]
        self.events.append(("budgets", (known, budgets)))
        return budgets

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        self.events.append(
            ("said", (request, tree, acceptance, logits.clone(), num_generated, list(request.token_ids)))
        )
        self.policy.on_tokens(request, tree, acceptance, logits, num_generated)


def test_with_rules_that_use_random_numbers_the_choice_depends_on_earlier_steps_only(
    pair: tuple[ModelRunner, ModelRunner],
) -> None:
    """Told nothing but what earlier steps showed, with no model to guess, another policy answers the same."""
    target, small = pair
    drafter = make_drafter([small, "suffix"], VOCAB, draft_sampling="without-replacement")
    assert drafter is not None
    choice = LearnedChoice(make_network(seed=5, spread=0.4), slow_target_costs(), drafter)
    policy = Recorded(AutoPolicy(slow_target_costs(), network=choice))
    params = SamplingParams(temperature=1.0, max_tokens=30, seed=3)
    (prompt,) = random_prompts((6,))
    run(make_engine(target, drafter, policy, verification="multi-step"), [make_request("a", prompt * 3, params)])
    again = LearnedChoice(make_network(seed=5, spread=0.4), slow_target_costs(), _drafter())
    replayed = make_request("a", prompt * 3, params)
    chosen = set()
    for kind, event in policy.events:
        if kind == "budgets":
            ((_, tokens, knows),), (budget,) = event
            assert replayed.token_ids == tokens
            replayed.drafting.is_read = knows
            (answer,) = again.budgets([span_of(replayed)])
            assert answer is not None
            assert (answer.max_nodes, answer.max_depth) == (budget.max_nodes, budget.max_depth)
            chosen.add(answer)
        else:
            _, tree, acceptance, logits, num_generated, tokens = event
            replayed.token_ids = tokens
            draws = tuple(d._replace(drafter="scripted") if d.drafter == "draft" else d for d in tree.draws)
            again.on_tokens(replayed, TokenTree(tree.tokens, tree.parents, draws), acceptance, logits, num_generated)
    assert len(chosen) > 1


def test_a_library_user_names_the_file(tmp_path: Path) -> None:
    folder, small = save_model(tmp_path / "target"), save_model(tmp_path / "small", noise=0.2)
    path = tmp_path / "it.safetensors"
    make_network(seed=2).save(path)
    prompts = [{"prompt_token_ids": ids} for ids in random_prompts((6, 9))]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    with LLM(folder, drafters=[], device="cpu") as plain:
        expected = [output.outputs[0].token_ids for output in plain.generate(prompts, params)]
    drafters = [str(small), "suffix"]
    log = tmp_path / "steps.jsonl"
    with LLM(folder, drafters=drafters, speculation_policy=path, step_log=log, device="cpu") as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected
        assert find_slots(llm.drafter) if llm.drafter else None
    assert log.read_text().startswith('{"type":"step-log"')
    with pytest.raises(ModelError, match="speculation_policy: no file"):
        LLM(folder, drafters=drafters, speculation_policy=tmp_path / "none", device="cpu")
    with pytest.raises(ValueError, match=r"speculation_policy: .* not suffix"):
        LLM(folder, drafters=["suffix"], speculation_policy=path, device="cpu")
    with pytest.raises(ValueError, match=r"step_log: .* cannot be written"):
        LLM(folder, drafters=drafters, step_log=tmp_path / "no" / "log", device="cpu")


def test_another_configuration_must_promise_clearly_more_than_the_usual_one() -> None:
    policy = LearnedChoice(make_network(), slow_target_costs(), _drafter())
    policy.budgets([span_of(make_request("a", range(9), SamplingParams(temperature=0.0, max_tokens=10**6)))])
    policy._pace = np.ones(len(make_network().configurations))
    policy._pace[3] = 0.5
    for other, factor, chosen in ((5, 1.1, 3), (5, 1.2, 5), (0, 1.1, 0)):  # what plain decoding yields is known
        rates = np.full(len(policy._pace), 0.5)
        rates[3], rates[other] = 1.0, factor
        assert policy._usual_unless_clearly_better(rates) == chosen
