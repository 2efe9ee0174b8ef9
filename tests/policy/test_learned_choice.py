"""The learned speculation policy: its features, its network, its choices, and that no output depends on it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specinfer.core.errors import ModelError
from specinfer.core.request import FinishReason, Request, Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import OFF, Draw, TokenTree, TreeBudget
from specinfer.drafters import MergedDrafter, NGramDrafter, SuffixDrafter, make_drafter
from specinfer.drafters.base import MAX_PROSPECT, Lookup
from specinfer.llm import LLM
from specinfer.model.runner import ModelRunner
from specinfer.policy.auto_policy import AutoPolicy
from specinfer.policy.base import SpeculationPolicy
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from specinfer.policy.features import FeatureTracker, feature_names, find_slots
from specinfer.policy.learned_choice import _BOUND, LearnedChoice, load_policy_network
from specinfer.policy.network import Configuration, PolicyNetwork, make_configurations
from specinfer.verify import Acceptance
from tiny import VOCAB, make_engine, make_request, random_prompts, run, save_model

GROWING = Curve((1, 8, 16, 32, 64), (1.0, 1.07, 1.42, 1.93, 3.5))
SLOTS = ("model", "suffix")


def costs(read_token: float = 0.0) -> CostModel:
    """Those of a target a hundred times as slow as its drafter."""
    return CostModel(Curve(GROWING.sizes.tolist(), GROWING.seconds.tolist()), Curve([1], [0.02]), read_token)


def predictor(
    slots: Sequence[str] = SLOTS, seed: int = 0, gains: Sequence[float] | None = None, spread: float = 0.1
) -> PolicyNetwork:
    """One that knows nothing: random, or the same expected guesses for every request."""
    names, menu = feature_names(slots), make_configurations(slots)
    source = np.random.default_rng(seed)
    size = 3 * len(menu)
    weight = source.normal(size=(len(names), size)) * (0.0 if gains else spread)
    bias = source.normal(size=size) - 1.0
    if gains:
        nodes = [max(one.max_nodes, 1e-3) for one in menu]
        levels = [one.max_depth if one.uses_model else 1e-3 for one in menu]
        bias = np.log([*np.maximum(gains, 1e-6), *nodes, *levels])
    shape = len(names)
    return PolicyNetwork(
        tuple(slots), names, menu, np.full(shape, -100.0), np.full(shape, 100.0), np.zeros(shape), np.ones(shape),
        ((weight, np.asarray(bias)),), {"seed": seed},
    )  # fmt: skip


def span_of(request: Request) -> Span:
    return Span(request, len(request.token_ids) - 1, len(request.token_ids))


# ------------------------------------------------------------------------------ what lookups would say


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.sampled_from([SuffixDrafter, NGramDrafter]))
def test_a_prospect_is_the_first_path_that_the_lookup_guesses(tokens: list[int], kind: Callable[[], Any]) -> None:
    lookup = kind()
    assert isinstance(lookup, Lookup)
    spans = [span_of(make_request("a", tokens))]
    (prospect,) = lookup.prospects(spans)
    (tree,) = lookup.draft(spans, [TreeBudget(200, MAX_PROSPECT)])
    assert bool(prospect.tokens) == bool(tree.num_guessed)
    assert len(prospect.path_probs) == len(prospect.tokens) <= MAX_PROSPECT
    assert list(prospect.path_probs) == sorted(prospect.path_probs, reverse=True)
    assert all(0 < chance <= 1 for chance in prospect.path_probs)
    if prospect.tokens:
        assert prospect.match >= 1
        assert tree.tokens[1] == prospect.tokens[0]
        assert prospect.path_probs[0] == pytest.approx(tree.draws[0].confidence)
    lookup.forget("a")


def test_a_text_that_repeats_itself_has_a_long_prospect() -> None:
    for lookup in (SuffixDrafter(), NGramDrafter()):
        (prospect,) = lookup.prospects([span_of(make_request("a", [1, 2, 3, 4, 5, 6, 7, 8] * 6))])
        assert prospect.tokens[:10] == (1, 2, 3, 4, 5, 6, 7, 8, 1, 2)
        assert prospect.reach > 8
        (none,) = lookup.prospects([span_of(make_request("b", range(20)))])
        assert (none.match, none.tokens, none.reach) == (0, (), 0)


# ------------------------------------------------------------------------------------------- features


class Scripted:
    """A drafter that is no lookup; its trees are the test's own."""

    name = "scripted"

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        raise AssertionError

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None: ...

    def forget(self, request_id: str) -> None: ...


def test_features_follow_the_output_of_the_target() -> None:
    tracker = FeatureTracker(MergedDrafter([Scripted(), SuffixDrafter()]))
    assert tracker.slots == SLOTS
    request = make_request("a", [1, 2, 3, 1, 2])
    (row,) = tracker.features([span_of(request)])
    first = dict(zip(tracker.names, row.tolist(), strict=True))
    assert math.isnan(first["target.top"]), "nothing was said yet"
    assert (first["request.greedy"], first["request.temperature"]) == (1.0, 0.0)
    assert (first["model.hit_fast"], first["suffix.match"]) == (0.5, math.log2(3)), "two tokens stand here once more"
    # Guesses 3 and 1 came true, the next 9 did not; the lookup would have said 3, 1, 2.
    tree = TokenTree((2, 3, 1, 9), (-1, 0, 1, 2), tuple(Draw(node, "scripted", None, 0.8) for node in (1, 2, 3)))
    logits = torch.zeros(4, 10)
    logits[2, 5] = 3.0
    request.token_ids += [3, 1, 5]
    tracker.on_tokens(request, tree, Acceptance((1, 2), 5), logits, 3)
    (row,) = tracker.features([span_of(request)])
    then = dict(zip(tracker.names, row.tolist(), strict=True))
    distribution = torch.softmax(logits[2], -1)
    assert then["target.top"] == pytest.approx(float(distribution[5])) == then["target.said"]
    assert then["target.margin"] == pytest.approx(float(distribution[5] - distribution[0]))
    assert then["target.entropy"] == pytest.approx(float(-(distribution * distribution.log()).sum()), rel=1e-5)
    hits = 0.5
    for hit in (1, 1, 0):
        hits = 0.75 * hits + 0.25 * hit
    assert then["model.hit_fast"] == then["suffix.hit_fast"] == pytest.approx(hits)
    assert then["model.streak"] == then["suffix.streak"] == 0
    assert then["model.sure"] == pytest.approx(0.8 - 0.3 * 0.75**3)
    assert then["suffix.reach"] == 0, "5 was never said before"


def test_a_lookup_that_is_not_asked_is_judged_all_the_same() -> None:
    tracker = FeatureTracker(SuffixDrafter())
    request = make_request("a", [1, 2, 3, 4] * 4)
    for token in (1, 2, 3, 4, 1, 2):
        tracker.features([span_of(request)])
        root = TokenTree.root(request.token_ids[-1])
        request.token_ids.append(token)
        tracker.on_tokens(request, root, Acceptance((), token), torch.zeros(1, 10), 1)
    (row,) = tracker.features([span_of(request)])
    known = dict(zip(tracker.names, row.tolist(), strict=True))
    assert known["suffix.hit_fast"] > 0.9
    assert known["suffix.streak"] == pytest.approx(math.log2(7))


def test_requests_that_are_gone_are_forgotten() -> None:
    tracker = FeatureTracker(SuffixDrafter())
    for i in range(500):
        request = make_request(str(i), [1, 2, 3])
        tracker.features([span_of(request)])
        request.finish(FinishReason.ABORT)
    assert len(tracker._states) < 100


# ------------------------------------------------------------------------------------------ the choice


def test_the_menu_begins_with_plain_decoding_and_names_only_present_drafters() -> None:
    for slots in (("suffix",), ("model",), SLOTS, ("ngram", "model", "suffix", "model-2")):
        menu = make_configurations(slots)
        assert menu[0] == Configuration()
        assert len(set(menu)) == len(menu) <= 24
        assert {slot for one in menu for slot in one.slots} == set(slots)
    asked = {one.slots for one in make_configurations(("ngram", "model", "suffix"))}
    assert asked == {(), ("ngram", "suffix"), ("model",), ("ngram", "model", "suffix")}


def _drafter() -> MergedDrafter:
    return MergedDrafter([Scripted(), SuffixDrafter()])


def test_budgets_ask_the_drafters_with_the_highest_expected_yield() -> None:
    menu = make_configurations(SLOTS)
    for wanted in (0, 4, menu.index(Configuration(("model",), 7, 6, 0.02)), len(menu) - 1):
        gains = [30.0 if i == wanted else 0.01 for i in range(len(menu))]
        policy = LearnedChoice(predictor(gains=gains), costs(), _drafter())
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
        policy = LearnedChoice(predictor(gains=gains), costs(read_token), _drafter())
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
    policy = LearnedChoice(predictor(gains=gains), costs(), _drafter())
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
    policy = LearnedChoice(predictor(gains=gains), costs(), _drafter())
    request = make_request("a", range(9), SamplingParams(temperature=0.0, max_tokens=10**6))
    for _ in range(40):
        (budget,) = policy.budgets([span_of(request)])
        assert budget.max_nodes == 7
        _tell(policy, request, 2)


def test_it_falls_back_with_a_reason_when_predictions_fail() -> None:
    menu = make_configurations(SLOTS)
    policy = LearnedChoice(predictor(gains=[0.0, *[20.0] * (len(menu) - 1)]), costs(), _drafter())
    for i in range(400):  # many requests: what is learned of one must not hide it
        request = make_request(str(i), range(9), SamplingParams(temperature=0.0, max_tokens=10**6))
        policy.budgets([span_of(request)])
        _tell(policy, request, 0)
        if policy.num_fallen_back["error"]:
            break
    assert policy.num_fallen_back["error"] == 1
    assert math.log(3) > _BOUND


def test_it_falls_back_for_what_it_does_not_know() -> None:
    fitting = predictor(gains=[0.0, *[5.0] * (len(make_configurations(SLOTS)) - 1)])
    spans = [span_of(make_request(str(i), range(9))) for i in range(3)]
    by_rank = AutoPolicy(costs()).budgets(spans[:1])
    others = LearnedChoice(fitting, costs(), SuffixDrafter())
    assert AutoPolicy(costs(), network=others).budgets(spans[:1]) == by_rank
    assert dict(others.num_fallen_back) == {"drafters": 1}
    hot = fitting.names.index("request.temperature")
    cold = replace(fitting, high=np.where(np.arange(len(fitting.names)) == hot, 0.0, fitting.high))
    cold = replace(cold, low=np.where(np.arange(len(fitting.names)) == hot, 0.0, cold.low))
    warm = span_of(make_request("warm", range(9), SamplingParams(temperature=1.0)))
    predicted = span_of(make_request("predicted", range(9), prediction_ids=(1, 2)))
    choice = LearnedChoice(cold, costs(), _drafter())
    budgets = AutoPolicy(costs(), network=choice).budgets([spans[0], warm, predicted, spans[1]])
    assert dict(choice.num_fallen_back) == {"range": 1, "prediction": 1}
    assert choice.num_decided == 2
    assert budgets[0].drafters
    assert budgets[3].drafters
    assert budgets[1].drafters is budgets[2].drafters is None, "chosen by the acceptance of ranks"


# --------------------------------------------------------------------------------------------- the file


def test_a_predictor_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    made = predictor(seed=3)
    made.save(tmp_path / "it.safetensors")
    back = PolicyNetwork.load(tmp_path / "it.safetensors")
    assert (back.slots, back.names, back.configurations, back.about) == (
        made.slots,
        made.names,
        made.configurations,
        made.about,
    )
    features = np.random.default_rng(0).normal(size=(4, len(made.names)))
    features[1, 2] = math.nan
    assert np.allclose(back.expect(features).tokens, made.expect(features).tokens, rtol=1e-5)
    expected = made.expect(features)
    assert (expected.tokens[:, 0] == 1).all(), "off yields one token"
    assert (expected.nodes[:, 0] == 0).all()
    assert np.isfinite(expected.tokens).all()
    depths = np.asarray([one.max_depth for one in made.configurations])
    assert (expected.tokens <= 1 + depths).all()


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    whole = tmp_path / "it.safetensors"
    predictor().save(whole)
    data = whole.read_bytes()
    bad = {
        "empty": b"",
        "cut": data[:-40],
        "text": b"hello" * 100,
        "menu": data.replace(b'max_nodes\\": 31', b'max_nodes\\": -1'),
        "version": data.replace(b'version\\": 2', b'version\\": 7'),
    }
    for name, content in bad.items():
        assert content != data
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ModelError, match=f"speculation_policy: .*{name} is damaged"):
            PolicyNetwork.load(path)
    wrong = predictor()
    wrong.layers[0][1][0] = math.nan
    wrong.save(tmp_path / "nan")
    with pytest.raises(ModelError, match="not finite"):
        PolicyNetwork.load(tmp_path / "nan")
    with pytest.raises(ModelError, match="specinfer tune --policy"):
        PolicyNetwork.load(tmp_path / "missing")
    with pytest.raises(ValueError, match="trained with drafters model, suffix, not suffix"):
        load_policy_network(str(whole), SuffixDrafter())


# -------------------------------------------------------------------------------------------- exactness


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
    choice = LearnedChoice(predictor(seed=5), costs(), drafter)
    policy = AutoPolicy(costs(), network=choice)
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
    policy = Recorded(AutoPolicy(costs(), network=LearnedChoice(predictor(seed=5, spread=0.4), costs(), drafter)))
    params = SamplingParams(temperature=1.0, max_tokens=30, seed=3)
    (prompt,) = random_prompts((6,))
    run(make_engine(target, drafter, policy, verification="multi-step"), [make_request("a", prompt * 3, params)])
    again = LearnedChoice(predictor(seed=5, spread=0.4), costs(), MergedDrafter([Scripted(), SuffixDrafter()]))
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
    predictor(seed=2).save(path)
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
    policy = LearnedChoice(predictor(), costs(), _drafter())
    policy.budgets([span_of(make_request("a", range(9), SamplingParams(temperature=0.0, max_tokens=10**6)))])
    policy._pace = np.ones(len(predictor().configurations))
    policy._pace[3] = 0.5
    for other, factor, chosen in ((5, 1.1, 3), (5, 1.2, 5), (0, 1.1, 0)):  # what plain decoding yields is known
        rates = np.full(len(policy._pace), 0.5)
        rates[3], rates[other] = 1.0, factor
        assert policy._usual_unless_clearly_better(rates) == chosen
