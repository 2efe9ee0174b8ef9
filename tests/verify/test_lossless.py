"""The promise: whatever is guessed, by whom, in which tree, batch, chunk or pool, the tokens are the same.

Greedy output is transformers' own. Sampled output is that of a plain loop with the same seed, which is
also what the engine says without speculation.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import reference
from specinfer.core.noise import derive_seed
from specinfer.core.request import FinishReason, Request
from specinfer.core.rules import RULES
from specinfer.core.sampling import SamplingParams
from specinfer.core.thought import Reasoning, Thought
from specinfer.core.tree import TreeBudget
from specinfer.drafters import Drafter, MergedDrafter, NGramDrafter, SmallModelDrafter, SuffixDrafter, make_drafter
from specinfer.drafters.growth.draft_sampling import CHOSEN
from specinfer.drafters.merge.selection import Selection
from specinfer.engine.engine import Engine
from specinfer.model.runner import ModelRunner
from tiny import (
    FAMILIES,
    HYBRIDS,
    VOCAB,
    make_engine,
    make_model,
    make_request,
    random_prompts,
    requests_of,
    resized,
    run,
)

Runners = Callable[..., ModelRunner]

# ------------------------------------------------------------------------------- greedy, every family

LENGTHS = (3, 17, 60, 1, 33)
OUTPUTS = (8, 6, 9, 3, 1)  # they leave one by one, and others join
greedy_requests = requests_of(
    random_prompts(LENGTHS), [SamplingParams(temperature=0.0, max_tokens=count) for count in OUTPUTS]
)


@pytest.fixture(scope="module")
def greedy_outputs() -> Callable[[str], list[list[int]]]:
    made: dict[str, list[list[int]]] = {}

    def outputs(family: str) -> list[list[int]]:
        if family not in made:
            model = make_model(family)
            prompts = random_prompts(LENGTHS)
            made[family] = [reference.greedy(model, p, n) for p, n in zip(prompts, OUTPUTS, strict=True)]
        return made[family]

    return outputs


def _small(
    runners: Runners, family: str, noise: float, num_slots: int = 1024, drawing: str = "shared-noise", **more: bool
) -> SmallModelDrafter:
    runner = resized(runners(family, 0, noise), num_slots)
    return SmallModelDrafter(runner, VOCAB, f"draft {noise}", drawing, **more)


def _drafter(kind: str, runners: Runners, family: str) -> tuple[Drafter | None, tuple[int, ...]]:
    match kind:
        case "plain":
            return None, ()
        case "ngram":
            return NGramDrafter(), (1, 1, 1, 1)
        case "tree":
            return _small(runners, family, 0.15), (2, 2, 1)
        case _:
            raise AssertionError(kind)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *product(FAMILIES, ["plain", "tree"]),
        *product(["llama", "gemma2", "mpt"], ["ngram"]),
        *product(HYBRIDS, ["tree"]),
    ],
)
def test_greedy_is_transformers_generate(
    family: str, kind: str, runner_of: Runners, greedy_outputs: Callable[[str], list[list[int]]]
) -> None:
    drafter, widths = _drafter(kind, runner_of, family)
    engine = make_engine(runner_of(family), drafter, widths, max_num_seqs=3, max_num_batched_tokens=16)
    requests = greedy_requests()
    assert run(engine, requests) == greedy_outputs(family)
    if kind == "tree":
        kept = sum(request.speculation.num_accepted_draft_tokens for request in requests)
        assert 0 < kept < sum(request.speculation.num_draft_tokens for request in requests), "it agrees partly"


def test_one_after_the_other_is_as_all_at_once(
    runner_of: Runners, greedy_outputs: Callable[[str], list[list[int]]]
) -> None:
    """Requests that come while others are under way."""
    engine = make_engine(runner_of("mistral"), _small(runner_of, "mistral", 0.15), (2, 1), max_num_batched_tokens=16)
    requests = greedy_requests()
    waiting = list(requests)
    while waiting or engine.has_work:
        if waiting:
            engine.add(waiting.pop(0))
        engine.step()
        engine.step()
    assert [request.output_ids for request in requests] == greedy_outputs("mistral")


# ------------------------------------------------------------------------------------------ sampled

EOS = (1,)
MIXED = [
    SamplingParams(temperature=0.0, max_tokens=14),
    SamplingParams(temperature=0.8, max_tokens=18),
    SamplingParams(temperature=1.2, top_p=0.9, max_tokens=12),
    SamplingParams(temperature=1.0, top_k=7, min_p=0.02, max_tokens=16),
    SamplingParams(temperature=0.7, presence_penalty=0.6, frequency_penalty=0.4, max_tokens=15),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, max_tokens=15),
    SamplingParams(
        temperature=1.0, logit_bias={5: 3.0, 9: -100.0, 40: 2.0}, allowed_token_ids=range(60), max_tokens=13
    ),
    SamplingParams(temperature=1.5, min_tokens=6, stop_token_ids=range(50, 90), logit_bias={1: -100.0}, max_tokens=17),
    SamplingParams(temperature=0.9, ignore_eos=True, logit_bias={1: 6.0}, max_tokens=10),
    SamplingParams(temperature=0.9, logit_bias={1: 4.0}, min_tokens=3, max_tokens=20),
    SamplingParams(temperature=1.0, repetition_penalty=1.3, top_p=0.8, top_k=30, max_tokens=1),
    SamplingParams(temperature=0.0, thinking_token_budget=6, max_tokens=14),
    SamplingParams(temperature=0.9, thinking_token_budget=0, allowed_token_ids=range(60), min_tokens=9, max_tokens=12),
    SamplingParams(temperature=1.0, top_p=0.9, logit_bias={61: -100.0}, thinking_token_budget=3, max_tokens=12),
]
THINKING = [i for i, params in enumerate(MIXED) if params.thinking_token_budget is not None]
END, END_IDS = "zz", (70, 61, 61, 70)  # 61 is a z
PROMPTS = random_prompts([3, 26, 12, 40, 1, 9, 31, 18, 5, 22, 14, 4, 8, 17], seed=5)
JOBS = list(range(len(MIXED)))
MAX_LENGTH = 40 + 20
NOISES = (0.0, 0.15, 0.6, 3.0)


def _request(i: int, seed: int | None = None, name: str = "") -> Request:
    seed = derive_seed(7, i) if seed is None else seed
    request = make_request(f"{i}{name}", PROMPTS[i], MIXED[i], seed, eos_token_ids=EOS)
    if i in THINKING:
        request.thought = Thought(Reasoning("", END, END_IDS, is_open=True), _text, MIXED[i].thinking_token_budget)
    return request


def _text(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("z") + token - 61) for token in tokens)


def _forced(i: int, output: Sequence[int]) -> int | None:
    budget = MIXED[i].thinking_token_budget
    return None if budget is None else reference.forced_token(output, budget, END, END_IDS, _text)


@pytest.fixture(scope="module")
def plain_loop() -> Callable[[str, int], list[int]]:
    """Output of job i by the plain loop, worked out once."""
    made: dict[tuple[str, int], list[int]] = {}
    models: dict[str, Any] = {}

    def output(family: str, i: int) -> list[int]:
        if (family, i) not in made:
            model = models.setdefault(family, make_model(family))
            seed, forced = derive_seed(7, i), functools.partial(_forced, i)
            made[family, i] = reference.generate(model, PROMPTS[i], MIXED[i], seed, EOS, forced)
        return made[family, i]

    return output


SLOW_FAMILIES = [pytest.param(family, marks=pytest.mark.slow) for family in ("gemma2", "mpt")]
SAMPLED_FAMILIES = ["llama", "qwen3_moe", *SLOW_FAMILIES]


@pytest.mark.covering(1)
@pytest.mark.parametrize("i", JOBS)
@pytest.mark.parametrize("family", SAMPLED_FAMILIES)
def test_one_sampled_request(
    family: str, i: int, runner_of: Runners, plain_loop: Callable[[str, int], list[int]]
) -> None:
    """Batch of one: plain decoding, and three ways to speculate, against the loop."""
    drafters: list[tuple[Drafter | None, tuple[int, ...]]] = [
        (None, ()),
        (NGramDrafter(), (1, 1, 1)),
        (_small(runner_of, family, 0.15), (3, 2, 1)),
        (MergedDrafter([_small(runner_of, family, 3.0), NGramDrafter()]), (2, 2)),
    ]
    for drafter, widths in drafters:
        (tokens,) = run(make_engine(runner_of(family), drafter, widths), [_request(i)])
        assert tokens == plain_loop(family, i), (drafter, widths)


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["llama", "gemma2", "mpt", "qwen3_moe"])
def test_a_mixed_batch(family: str, runner_of: Runners, plain_loop: Callable[[str, int], list[int]]) -> None:
    for noise, widths in ((0.0, ()), (0.0, (1, 1, 1, 1)), (0.15, (3, 1, 2))):
        drafter = _small(runner_of, family, noise) if widths else None
        requests = [_request(i) for i in JOBS]
        engine = make_engine(runner_of(family), drafter, widths, max_num_seqs=8)
        assert run(engine, requests) == [plain_loop(family, i) for i in JOBS]


def test_the_mixed_jobs_end_in_every_way(plain_loop: Callable[[str, int], list[int]]) -> None:
    """Guards the tests around this one: the jobs do meet stops, ends of text and lengths."""
    ways = set()
    for i in JOBS:
        tokens, params = plain_loop("llama", i), MIXED[i]
        ends = {"stop": params.stop_token_ids, "eos": () if params.ignore_eos else EOS}
        ways |= {way for way, ids in ends.items() if tokens[-1] in ids} or {"length"}
    assert ways == {"stop", "eos", "length"}
    assert EOS[0] in plain_loop("llama", 8)[:-1], "said and passed over"
    for i in THINKING:
        tokens, budget = plain_loop("llama", i), MIXED[i].thinking_token_budget
        assert tuple(tokens[budget : budget + 4]) == END_IDS
        assert len(tokens) > budget + 4


BEST_FIRST = st.tuples(
    st.integers(1, 30), st.integers(1, 6), st.just(()), st.just(1), st.sampled_from([0.0, 0.05, 0.3])
)


@st.composite
def settings_of_an_engine(draw: st.DrawFn) -> dict[str, Any]:
    widths = draw(st.lists(st.integers(1, 4), max_size=4).map(tuple).filter(lambda w: _size(w) <= 30))
    rule = draw(st.sampled_from(["coupled", "target-only"]))
    return {
        "tree": draw(st.sampled_from([widths, TreeBudget(*draw(BEST_FIRST)), TreeBudget(0, 0)])),
        "drafters": draw(st.lists(st.sampled_from([*NOISES, "ngram", "suffix"]), min_size=1, max_size=3, unique=True)),
        "rule": rule,
        "drawing": draw(st.sampled_from(RULES[rule].draft_samplings)),
        "jobs": draw(st.lists(st.sampled_from(JOBS), min_size=1, max_size=8, unique=True)),
        "max_num_seqs": draw(st.integers(1, 8)),
        "max_num_batched_tokens": draw(st.integers(1, 64)),
        "num_slots": draw(st.sampled_from([MAX_LENGTH, 75, 120, 600])),
        "drafter_slots": draw(st.sampled_from([40, 130, 700])),
        "num_asked": draw(st.sampled_from([None, 1, 2])),
    }


def _size(widths: Sequence[int]) -> int:
    total, level = 0, 1
    for width in widths:
        level *= width
        total += level
    return total


@settings(max_examples=20)
@given(settings_of_an_engine())
@example(
    {"tree": (2, 2), "rule": "coupled", "drawing": "shared-noise", "drafters": [0.0], "jobs": JOBS[:8],
     "max_num_seqs": 8, "max_num_batched_tokens": 16, "num_slots": MAX_LENGTH, "drafter_slots": 700, "num_asked": None}
)  # fmt: skip
@example(
    {"tree": TreeBudget(9, 4), "rule": "coupled", "drawing": "shared-noise", "drafters": [0.6, 0.0, "suffix"],
     "jobs": JOBS[:8], "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_slots": 600, "drafter_slots": 700,
     "num_asked": 1}
)  # fmt: skip
def test_any_engine_generates_the_same_tokens(
    runner_of: Runners, plain_loop: Callable[[str, int], list[int]], chosen: dict[str, Any]
) -> None:
    _generates_the_same_tokens(runner_of, plain_loop, chosen)


@pytest.mark.slow
@settings(max_examples=300)
@given(settings_of_an_engine())
def test_any_of_many_engines_generates_the_same_tokens(
    runner_of: Runners, plain_loop: Callable[[str, int], list[int]], chosen: dict[str, Any]
) -> None:
    _generates_the_same_tokens(runner_of, plain_loop, chosen)


def _generates_the_same_tokens(
    runner_of: Runners, plain_loop: Callable[[str, int], list[int]], chosen: dict[str, Any]
) -> None:
    lookups = {"ngram": NGramDrafter, "suffix": SuffixDrafter}
    drafters = [
        lookups[kind]()
        if kind in lookups
        else _small(
            runner_of, "mistral", kind, chosen["drafter_slots"], chosen["drawing"], is_scored=bool(chosen["num_asked"])
        )
        for kind in chosen["drafters"]
    ]
    models = [drafter.name for drafter in drafters if isinstance(drafter, SmallModelDrafter)]
    others = [drafter.name for drafter in drafters if drafter.name not in models]
    selection = Selection(models, others, chosen["num_asked"]) if chosen["num_asked"] and models else None
    engine = make_engine(
        resized(runner_of("mistral"), chosen["num_slots"]),
        MergedDrafter(drafters, may_choose=chosen["drawing"] in CHOSEN, selection=selection),
        chosen["tree"],
        verification=chosen["rule"],
        max_num_seqs=chosen["max_num_seqs"],
        max_num_batched_tokens=chosen["max_num_batched_tokens"],
    )
    requests = [_request(i) for i in chosen["jobs"]]
    try:
        assert run(engine, requests) == [plain_loop("mistral", i) for i in chosen["jobs"]]
        assert engine.metrics.num_draft_failures == 0
    finally:
        for request in requests:
            engine.abort(request)


TREES = {"expansion": (3, 2, 1), "best first": TreeBudget(14, 5), "with a floor": TreeBudget(14, 5, (), 1, 0.05, 0.3)}
PAIRS = [(name, drawing) for name, rule in RULES.items() for drawing in rule.draft_samplings]


def _guessing(runner_of: Runners, rule: str, drawing: str, tree: str, noise: float = 0.15, **limits: int) -> Engine:
    """A small model and two drafters that look guesses up."""
    small = resized(runner_of("mistral", 0, noise), 1500)
    drafter = make_drafter([small, "ngram", "suffix"], VOCAB, ["small", "ngram", "suffix"], drawing)
    target = resized(runner_of("mistral"), 1500)
    return make_engine(target, drafter, TREES[tree], verification=rule, **limits)


@pytest.mark.covering(1)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("drawing", [drawing for rule, drawing in PAIRS if rule == "target-only"])
def test_target_only_generates_what_plain_decoding_does(
    drawing: str, tree: str, runner_of: Runners, plain_loop: Callable[[str, int], list[int]]
) -> None:
    """However its guesses were drawn, as long as they know nothing of the noise; coupled verification minds nothing."""
    for rule in ("target-only", "coupled"):
        requests = [_request(i) for i in JOBS]
        assert run(_guessing(runner_of, rule, drawing, tree), requests) == [plain_loop("mistral", i) for i in JOBS]
        assert sum(request.speculation.num_accepted_draft_tokens for request in requests) > 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("tree", ["expansion", "best first", pytest.param("with a floor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("rule", "drawing"), PAIRS)
def test_greedy_under_every_rule_is_plain_decoding(
    rule: str, drawing: str, tree: str, runner_of: Runners, greedy_outputs: Callable[[str], list[list[int]]]
) -> None:
    """Sampled requests in the same batch change nothing of it."""
    requests = greedy_requests()
    others = [_request(i, name="other") for i in (1, 2, 4, 7, *THINKING)]
    outputs = run(_guessing(runner_of, rule, drawing, tree, max_num_batched_tokens=40), [*others, *requests])
    assert outputs[len(others) :] == greedy_outputs("mistral")
    assert all(request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for request in others)
    for i, tokens in zip(THINKING, outputs[4:], strict=False):
        budget = MIXED[i].thinking_token_budget
        assert tuple(tokens[budget : budget + 4]) == END_IDS


@pytest.mark.covering(1)
@pytest.mark.parametrize(("rule", "drawing"), PAIRS)
def test_a_choice_of_drafters_changes_nothing(
    rule: str, drawing: str, runner_of: Runners, plain_loop: Callable[[str, int], list[int]]
) -> None:
    """One of three models guesses; of the rules that use random numbers only what is greedy is told token by token."""
    small = [resized(runner_of("mistral", 0, noise), 1500) for noise in (0.6, 3.0, 0.15)]
    names = ["fair", "poor", "good", "suffix"]
    drafter = make_drafter([*small, "suffix"], VOCAB, names, drawing, max_asked=1)
    target = resized(runner_of("mistral"), 1500)
    engine = make_engine(target, drafter, TreeBudget(12, 4), verification=rule, max_num_batched_tokens=64)
    requests = [_request(i) for i in JOBS]
    said = run(engine, requests)
    exact = [i for i in JOBS if rule in ("coupled", "target-only") or MIXED[i].temperature == 0]
    assert [said[i] for i in exact] == [plain_loop("mistral", i) for i in exact]
    assert engine.metrics.num_draft_failures == 0
    assert drafter is not None
    assert not drafter.num_failures
    assert drafter.selection is not None
    weights = drafter.selection.weights
    assert weights["good"] > weights["poor"]
    origins = [name for request in requests for name in request.origins]
    assert "good" in origins


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_other_seeds(seed: int, runner_of: Runners) -> None:
    model, runner = make_model("llama"), runner_of("llama")
    for i in (1, 2, 4, 7):
        wanted = reference.generate(model, PROMPTS[i], MIXED[i], seed, EOS)
        engine = make_engine(runner, _small(runner_of, "llama", 0.15), (2, 2))
        assert run(engine, [_request(i, seed)]) == [wanted]


def test_seeds_matter_and_positions_matter(runner_of: Runners) -> None:
    """The tests above would pass with no noise at all: outputs differ from greedy and among seeds."""
    params = SamplingParams(temperature=1.0, max_tokens=20)
    greedy = replace(params, temperature=0.0)
    prompts = [PROMPTS[0]] * 6
    outputs = run(
        make_engine(runner_of("llama")),
        [make_request(str(i), p, greedy if i == 5 else params, seed=i) for i, p in enumerate(prompts)],
    )
    assert len({tuple(output) for output in outputs}) == 6


# --------------------------------------------------------------------------------------- small pools


@pytest.mark.parametrize("kind", ["plain", "tree", "ngram"])
def test_preempted_requests_generate_the_same_tokens(
    kind: str, runner_of: Runners, plain_loop: Callable[[str, int], list[int]]
) -> None:
    """Room for hardly more than one request: others are put back again and again, some of them mid-output."""
    drafter, widths = _drafter(kind, runner_of, "mistral")
    engine = make_engine(resized(runner_of("mistral"), 80), drafter, widths, max_num_seqs=8, max_num_batched_tokens=16)
    requests = [_request(i, name=name) for name in "abc" for i in JOBS]
    seen_mid_output = 0
    schedule = engine.scheduler.schedule

    def watched(num_groups: int) -> Any:
        nonlocal seen_mid_output
        result = schedule(num_groups)
        seen_mid_output += sum(request.num_output > 0 for request in result.preempted)
        return result

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    assert run(engine, requests) == [plain_loop("mistral", i) for i in JOBS] * 3
    assert engine.metrics.num_preempted >= seen_mid_output >= 3


def test_a_pool_of_exactly_one_request(runner_of: Runners, plain_loop: Callable[[str, int], list[int]]) -> None:
    for i in JOBS:
        length = len(PROMPTS[i]) + (MIXED[i].max_tokens or 0)
        engine = make_engine(resized(runner_of("llama"), length), _small(runner_of, "llama", 0.0), (2, 2, 1))
        assert run(engine, [_request(i)]) == [plain_loop("llama", i)]


# ------------------------------------------------------------------------------------------ distribution


def test_first_two_tokens_follow_the_models_distribution(runner_of: Runners) -> None:
    """Through the whole engine, speculating: counts of (first, second) token against the exact joint distribution."""
    family, draws = "llama", 2500
    model, prompt = make_model(family), [5, 9, 2]
    allowed = (3, 21, 40, 77)
    params = SamplingParams(temperature=2.0, allowed_token_ids=allowed, max_tokens=2)

    def distribution(tokens: Sequence[int]) -> dict[int, float]:
        row = reference.process(reference.last_logits(model, tokens).tolist(), params, prompt, tokens[3:])
        return dict(zip(range(VOCAB), reference.probabilities(row), strict=True))

    first = distribution(prompt)
    joint = {(a, b): first[a] * p for a in allowed for b, p in distribution([*prompt, a]).items() if b in allowed}
    target, drafter = resized(runner_of(family), 4096), _small(runner_of, family, 0.15, 4096)
    engine = make_engine(target, drafter, (1,), max_num_seqs=256, max_num_batched_tokens=4096)
    requests = [make_request(str(i), prompt, params, derive_seed(3, i)) for i in range(draws)]
    said = [tuple(tokens) for tokens in run(engine, requests)]
    kept = sum(request.speculation.num_accepted_draft_tokens for request in requests)
    assert 0 < kept < draws

    def deviate(pairs: Sequence[tuple[int, ...]]) -> float:
        observed = torch.tensor([sum(pair == kind for pair in pairs) for kind in joint]).double()
        expected = torch.tensor(list(joint.values())).double() * len(pairs)
        assert bool((expected >= 5).all())
        free = len(joint) - 1
        ratio = float(((observed - expected) ** 2 / expected).sum()) / free
        return (ratio ** (1 / 3) - (1 - 2 / (9 * free))) / (2 / (9 * free)) ** 0.5

    assert abs(deviate(said)) < 4
    # The bad arm: the second token drawn without regard to the first is told apart.
    assert deviate([(a, b) for (a, _), (_, b) in zip(said, said[1:] + said[:1], strict=True)]) > 4


def _ended(engine: Engine, requests: Sequence[Request]) -> set[FinishReason | None]:
    run(engine, requests)
    return {request.finish_reason for request in requests}


def test_reasons_are_the_same_too(runner_of: Runners) -> None:
    plain = [_request(i) for i in JOBS]
    _ended(make_engine(runner_of("llama")), plain)
    guessed = [_request(i) for i in JOBS]
    assert _ended(make_engine(runner_of("llama"), _small(runner_of, "llama", 0.0), (1, 1, 1)), guessed) == {
        FinishReason.STOP,
        FinishReason.LENGTH,
    }
    for a, b in zip(plain, guessed, strict=True):
        assert (a.output_ids, a.finish_reason, a.stop_reason) == (b.output_ids, b.finish_reason, b.stop_reason)
