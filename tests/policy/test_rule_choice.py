"""The choice of a rule for each request under verification "auto"."""

import pytest
import torch

from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import TokenTree
from specinfer.policy.rule_choice import RuleChoice
from specinfer.verify import Acceptance
from tiny import make_request

TREE = TokenTree.chain(0, [1, 2])


def _started(rules: RuleChoice, params: SamplingParams | None = None) -> Request:
    request = make_request("a", [0], params or SamplingParams(), seed=5)
    rules.start(request)
    return request


def _step(
    rules: RuleChoice, tokens: dict[str, int], seconds: float = 1.0, tree: TokenTree = TREE, verified: float = 0.0
) -> None:
    """Report a step with one request for each rule, which emitted so many tokens; traversal alone took `verified`."""
    for rule, count in tokens.items():
        request = make_request("a", [0], SamplingParams())
        request.verification = rule
        alone = verified if rule == "traversal" else 0.0
        rules.on_tokens(request, tree, Acceptance((), 3, alone), torch.zeros(0), count)
    num_guessed = tree.num_guessed * len(tokens)
    rules.on_step(
        StepRecord(len(tokens), len(tokens) + num_guessed, num_guessed, 2, sum(tokens.values()), 0, 0.0, seconds, 0.0)
    )


def _learned(coupled: int, traversal: int, seconds: tuple[float, float] = (1.0, 1.0)) -> RuleChoice:
    rules = RuleChoice()
    for _ in range(int(rules.TRIAL) * 2):
        _step(rules, {"coupled": coupled}, seconds[0])
        _step(rules, {"traversal": traversal}, seconds[1])
    return rules


def test_requests_take_both_rules_in_turn_until_both_are_known() -> None:
    rules = RuleChoice()
    assert [_started(rules).verification for _ in range(4)] == ["coupled", "traversal"] * 2
    _step(rules, {"coupled": 3, "traversal": 2})
    assert rules.best is None


@pytest.mark.parametrize(
    ("tokens", "seconds", "best"),
    [
        ((3, 4), (1.0, 1.0), "traversal"),
        ((4, 3), (1.0, 1.0), "coupled"),
        ((3, 4), (1.0, 2.0), "coupled"),  # more tokens a pass, but fewer in the same time
    ],
)
def test_the_faster_rule_is_taken_but_for_rare_probes(
    tokens: tuple[int, int], seconds: tuple[float, float], best: str
) -> None:
    rules = _learned(*tokens, seconds)
    assert rules.best == best
    taken = [_started(rules).verification for _ in range(64)]
    assert taken.count(best) == 64 - 64 // rules.PROBE
    assert f"auto: {best}; coupled" in rules.summary()


@pytest.mark.parametrize(("verified", "best"), [(0.05, "traversal"), (0.4, "coupled")])
def test_slow_verification_counts_for_its_own_rule_although_passes_are_shared(verified: float, best: str) -> None:
    rules = RuleChoice()
    for _ in range(int(rules.TRIAL) * 2):
        _step(rules, {"coupled": 10, "traversal": 12}, 1.0, verified=verified)
    assert rules.best == best


def test_a_rule_that_is_hardly_faster_does_not_replace_the_other() -> None:
    rules = _learned(100, 99)
    for _ in range(8000):
        _step(rules, {"traversal": 101})
    assert rules.best == "coupled"
    for _ in range(8000):
        _step(rules, {"traversal": 103})
    assert rules.best == "traversal"


def test_steps_without_draft_tokens_or_with_prompts_teach_nothing() -> None:
    rules = RuleChoice()
    _step(rules, {"coupled": 1}, tree=TokenTree.root(0))
    rules.on_tokens(_started(rules), TREE, Acceptance((), 3), torch.zeros(0), 3)
    rules.on_step(StepRecord(2, 40, 2, 2, 3, 0, 0.0, 1.0, 0.0))
    assert rules.summary() == "verification auto: both rules in turn"


def test_sampled_requests_keep_their_rule_and_have_noise_of_their_own() -> None:
    rules = RuleChoice()
    first, second = _started(rules), _started(rules)
    assert len({first.seed, second.seed, 5}) == len({first.uniforms.state, second.uniforms.state}) + 1 == 3
    before = first.verification, first.seed
    rules.start(first)
    assert (first.verification, first.seed) == before


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(tree="off")], ids=["greedy", "off"])
def test_requests_that_verify_alike_under_every_rule_are_left_alone(params: SamplingParams) -> None:
    request = _started(RuleChoice(), params)
    assert (request.verification, request.seed) == (None, 5)
