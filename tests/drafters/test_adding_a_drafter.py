"""A drafter and a verification rule are added as CONTRIBUTING.md says, and then work by their names everywhere."""

import sys
from collections.abc import Sequence
from types import ModuleType

import pytest

from on_device import add_rejecting_rule
from specinfer import LLM, SamplingParams
from specinfer.cli.values import parse_speculative_config
from specinfer.core.config import SpeculativeConfig
from specinfer.core.lookups import LOOKUPS, LookupKind
from specinfer.core.options import settings_of
from specinfer.core.request import Request, Span
from specinfer.core.rules import RULES
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.engine_args import EngineArgs
from specinfer.verify import Acceptance
from tiny import offered

pytestmark = pytest.mark.usefixtures("small_demo")
PROMPT = "values = ["
# Only one token can be emitted, so that a drafter of repetitions is right.
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, allowed_token_ids=[7])


class RepeatDrafter:
    """A drafter that proposes the last token over and over."""

    name = "repeat"

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        trees = []
        for span, budget in zip(spans, budgets, strict=True):
            last = span.request.token_ids[-1]
            trees.append(TokenTree.chain(last, [last] * min(budget.max_nodes, budget.max_depth), self.name))
        return trees

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass


@pytest.fixture
def _repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("specinfer_repeat")
    module.RepeatDrafter = RepeatDrafter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(LOOKUPS, "repeat", LookupKind("specinfer_repeat:RepeatDrafter", "the last token again"))


@pytest.mark.usefixtures("_repeat")
def test_an_added_drafter_drafts_by_its_name_and_changes_no_token() -> None:
    with LLM("demo", drafters=["repeat"], tree="1,1") as llm:
        drafted = llm.generate([PROMPT], GREEDY)[0].outputs[0]
    with LLM("demo", drafters=[]) as llm:
        plain = llm.generate([PROMPT], GREEDY)[0].outputs[0]
    assert drafted.token_ids == plain.token_ids
    assert "repeat" in drafted.token_origins


@pytest.mark.usefixtures("_repeat")
def test_an_added_drafter_is_a_speculative_method() -> None:
    assert parse_speculative_config('{"method": "repeat"}')["drafters"] == ["repeat"]


def test_an_added_rule_verifies_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule accepts nothing, and samples each token after the root."""
    calls = add_rejecting_rule(monkeypatch)
    with offered("verification", "reject-all"), LLM("demo") as llm:
        llm.speculate(SpeculativeConfig(tree="2,1", verification="reject-all"))
        output = llm.generate([PROMPT], SamplingParams(max_tokens=4, seed=1, ignore_eos=True))[0].outputs[0]
    assert len(output.token_ids) == len(calls) == 4
    assert calls[0] == 4


def test_the_option_offers_every_rule_of_the_table() -> None:
    (choices,) = (about.choices for field, about in settings_of(EngineArgs) if field.name == "verification")
    assert choices == (*RULES, "auto")
