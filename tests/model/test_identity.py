"""Coupled and greedy output is that of plain decoding, token for token: random engines, batches and parameters.

Engines draw and shape their trees in every way there is, also for single requests; the plain engine has no drafter.
The plain engine itself is compared with a slow twin in verify/test_lossless.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer.core.lookups import LOOKUPS
from specinfer.core.request import Request
from specinfer.core.rules import DRAFT_SAMPLINGS, RULES
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree_shape import parse_tree
from specinfer.drafters import make_drafter
from specinfer.engine.engine import Engine
from specinfer.model.runner import ModelRunner
from specinfer.policy.cost_model import CostModel
from specinfer.policy.request_policy import RequestPolicy, make_policy
from tiny import VOCAB, make_engine, make_request, random_prompts, resized, run

Runners = Callable[..., ModelRunner]
EOS = (1,)
PROMPTS = [*random_prompts([1, 7, 19, 30], seed=11), [5, 6, 7, 8] * 5, [9, 4] * 8]
NOISES = (0.0, 0.15, 0.6, 3.0)
DRAFTERS = (*NOISES, *LOOKUPS)


def _no_costs() -> CostModel:
    raise AssertionError("nothing here asks for measured costs")


fixed_trees = st.lists(st.integers(1, 3), min_size=1, max_size=4).filter(lambda w: len(w) * max(w) < 9)
tree_options = st.one_of(
    fixed_trees.map(lambda widths: ",".join(map(str, widths))),
    st.tuples(st.integers(1, 20), st.integers(1, 6)).map(lambda sizes: "best-first:{}:{}".format(*sizes)),
)


@st.composite
def parameters(draw: st.DrawFn, *, greedy: bool = False) -> SamplingParams:
    """A few things asked for at once, penalties that see the tree's own paths among them."""
    asked: dict[str, Any] = {"temperature": 0.0 if greedy else draw(st.sampled_from([0.0, 0.5, 1.0, 1.4]))}
    choices: dict[str, st.SearchStrategy[Any]] = {
        "top_p": st.sampled_from([0.5, 0.9]),
        "top_k": st.integers(1, 20),
        "min_p": st.sampled_from([0.02, 0.3]),
        "presence_penalty": st.sampled_from([-1.0, 0.7, 2.0]),
        "frequency_penalty": st.sampled_from([-0.5, 0.4, 2.0]),
        "repetition_penalty": st.sampled_from([0.7, 1.5]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 2.0, 5.0]), max_size=3),
        "allowed_token_ids": st.sets(st.integers(0, VOCAB - 1), min_size=2, max_size=12).map(sorted),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=20),
        "tree": st.one_of(st.just("off"), tree_options),
        "prediction": st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    }
    for name in draw(st.lists(st.sampled_from(sorted(choices)), max_size=4, unique=True)):
        asked[name] = draw(choices[name])
    asked["max_tokens"] = draw(st.integers(1, 14))
    if "allowed_token_ids" not in asked and draw(st.booleans()):  # among a few tokens all might be held back
        asked["min_tokens"] = draw(st.integers(0, asked["max_tokens"]))
    return SamplingParams(**asked)


def jobs(params: st.SearchStrategy[SamplingParams]) -> st.SearchStrategy[list[tuple[int, int, SamplingParams]]]:
    """Prompt, seed and parameters of each request in a batch."""
    return st.lists(
        st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(0, 2**63 - 1), params), min_size=1, max_size=5
    )


drafter_lists = st.lists(st.sampled_from(DRAFTERS), min_size=1, max_size=3, unique=True)


def _requests(batch: Sequence[tuple[int, int, SamplingParams]]) -> list[Request]:
    return [
        make_request(
            str(i), PROMPTS[prompt], params, seed, eos_token_ids=EOS, prediction_ids=tuple(params.prediction or ())
        )
        for i, (prompt, seed, params) in enumerate(batch)
    ]  # fmt: skip


def _engine(
    runners: Runners, kinds: Sequence[float | str], tree: str, rule: str, drawing: str, max_num_seqs: int
) -> Engine:
    runnable = [resized(runners("llama", 0, kind), 1024) if isinstance(kind, float) else kind for kind in kinds]
    drafter = make_drafter(runnable, VOCAB, [str(kind) for kind in kinds], drawing)
    assert drafter is not None
    policy = make_policy(parse_tree(tree), _no_costs, drafter.num_drafters)
    assert isinstance(policy, RequestPolicy)
    target = resized(runners("llama"), 1024)
    return make_engine(target, drafter, policy, max_num_seqs=max_num_seqs, verification=rule)


def _compare(engine: Engine, runners: Runners, batch: Sequence[tuple[int, int, SamplingParams]]) -> None:
    guessed, plain = _requests(batch), _requests(batch)
    generated = run(engine, guessed)
    assert generated == run(make_engine(resized(runners("llama"), 1024)), plain)
    assert [(r.finish_reason, r.stop_reason) for r in guessed] == [(r.finish_reason, r.stop_reason) for r in plain]
    assert engine.metrics.num_draft_failures == 0
    assert engine.drafter is not None
    assert not engine.drafter.num_failures, "a drafter failed"  # type: ignore[attr-defined]


@settings(max_examples=50)
@given(
    batch=jobs(parameters()),
    kinds=drafter_lists,
    tree=tree_options,
    drawing=st.sampled_from(DRAFT_SAMPLINGS),
    max_num_seqs=st.integers(1, 5),
)
def test_coupled(
    runner_of: Runners,
    batch: list[tuple[int, int, SamplingParams]],
    kinds: list[float | str],
    tree: str,
    drawing: str,
    max_num_seqs: int,
) -> None:
    _compare(_engine(runner_of, kinds, tree, "coupled", drawing, max_num_seqs), runner_of, batch)


@settings(max_examples=60)
@given(
    batch=jobs(parameters(greedy=True)),
    kinds=drafter_lists,
    tree=tree_options,
    pair=st.sampled_from([(name, drawing) for name, rule in RULES.items() for drawing in rule.draft_samplings]),
)
def test_greedy_under_every_rule(
    runner_of: Runners,
    batch: list[tuple[int, int, SamplingParams]],
    kinds: list[float | str],
    tree: str,
    pair: tuple[str, str],
) -> None:
    _compare(_engine(runner_of, kinds, tree, *pair, 4), runner_of, batch)


@pytest.mark.parametrize("rule", ["multi-step", "traversal"])
def test_other_rules_generate_other_tokens(rule: str, runner_of: Runners) -> None:
    """Guards the tests above: the comparison sees rules that keep only the distribution."""
    batch = [(i, 5, SamplingParams(max_tokens=14)) for i in range(4)]
    engine = _engine(runner_of, [0.15], "2,2", rule, "without-replacement", 4)
    with pytest.raises(AssertionError):
        _compare(engine, runner_of, batch)
    assert engine.metrics.num_draft_failures == 0
