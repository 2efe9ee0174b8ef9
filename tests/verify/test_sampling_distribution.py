"""Sampled text has the target's distribution: counts from the public API against the distribution the model's logits
give.

Each arm is one way to speculate. The joint distribution of the first three tokens is compared by a G-test; with `-m
slow` the same arms are run often enough to see a total variation of about one in thirty (441,000 runs in 6 minutes of
one core).
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import reference
from levels import Node, draw
from on_device import load_plain, make_device_engine, run_on_device
from reference import draft as reference_draft
from reference.draft import path_probs
from specinfer import LLM, SamplingParams
from specinfer.core.noise import derive_seed
from specinfer.core.request import Span
from specinfer.core.tree import OFF, TreeBudget
from specinfer.model.load import LoadedModel
from specinfer.ops import tree_ops, trees
from specinfer.policy.base import FixedPolicy
from specinfer.verify import Probs, SeededSource, algorithms, batch
from tiny import make_model, make_request

Joint = Mapping[tuple[int, ...], float]
VOCAB = 8
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
PROMPT = [3, 1]
LENGTH = 3  # tokens whose joint distribution is tested; one more is said, so that trees may be as deep
COUNT = 128  # outputs of one prompt
WARM = SamplingParams(n=COUNT, max_tokens=LENGTH + 1)
COOL = replace(WARM, temperature=0.7, top_p=0.9, top_k=6)
LEVEL = 1e-3


@dataclass(frozen=True)
class Arm:
    """A way to speculate."""

    verification: str
    drawing: str
    tree: str
    num_drafters: int = 1
    params: SamplingParams = WARM
    select: str = "all"

    def __str__(self) -> str:
        cool = " cool" if self.params is COOL else ""
        return f"{self.verification} {self.drawing} {self.tree} {self.num_drafters} {self.select}{cool}"


ARMS = [
    Arm("coupled", "auto", "off"),
    Arm("coupled", "shared-noise", "2,2,1"),
    Arm("coupled", "iid", "best-first:8", 2),
    Arm("target-only", "top-k", "2,2,1"),
    Arm("target-only", "top-k", "best-first:8", 2),
    Arm("multi-step", "iid", "1,1,1"),
    Arm("multi-step", "iid", "2,2,1"),
    Arm("multi-step", "without-replacement", "2,2,1"),
    Arm("multi-step", "hybrid", "2,2,1"),
    Arm("multi-step", "top-k", "best-first:8"),
    Arm("multi-step", "without-replacement", "best-first:8"),
    Arm("multi-step", "without-replacement", "2,1", 2),
    Arm("multi-step", "hybrid", "best-first:8", 2),
    Arm("multi-step", "without-replacement", "2,2,1", 1, COOL),
    Arm("traversal", "iid", "1,1,1"),
    Arm("traversal", "iid", "2,2,1"),
    Arm("traversal", "without-replacement", "2,2,1"),
    Arm("traversal", "hybrid", "2,2,1"),
    Arm("traversal", "hybrid", "best-first:8"),
    Arm("traversal", "without-replacement", "best-first:8", 2),
    Arm("traversal", "iid", "2,1", 2),
    Arm("traversal", "hybrid", "best-first:8", 1, COOL),
    Arm("multi-step", "without-replacement", "2,1", 2, select="hedge:1"),
    Arm("multi-step", "hybrid", "best-first:8", 2, COOL, select="hedge:1"),
    Arm("traversal", "iid", "best-first:8", 2, select="hedge:1"),
    Arm("auto", "auto", "best-first:8", 2),
]


def p_value(counts: Mapping[tuple[int, ...], int], joint: Joint) -> float:
    """Of a G-test with Williams' correction; what is expected less than five times is counted together."""
    assert all(joint.get(tokens, 0) > 0 for tokens in counts), "something impossible was said"
    total = sum(counts.values())
    bins = [(counts.get(tokens, 0), p * total) for tokens, p in joint.items() if p * total >= 5]
    rest = total - sum(seen for seen, _ in bins), total - sum(expected for _, expected in bins)
    if rest[1] >= 5:
        bins.append(rest)
    free = len(bins) - 1
    statistic = 2 * sum(seen * math.log(seen / expected) for seen, expected in bins if seen)
    statistic -= 2 * sum(seen - expected for seen, expected in bins)  # 0 but for rare bins left out
    statistic /= 1 + (sum(total / expected for _, expected in bins) - 1) / (6 * total * free)
    return float(torch.special.gammaincc(torch.tensor(free / 2).double(), torch.tensor(statistic / 2).double()))


@pytest.fixture(scope="module")
def joint_of() -> Callable[[SamplingParams], Joint]:
    """The distribution itself, from whole passes of transformers' own model."""
    model = make_model("llama", **SMALL)
    made: dict[float, Joint] = {}

    def joint(params: SamplingParams) -> Joint:
        if params.temperature not in made:
            distributions: dict[tuple[int, ...], float] = {(): 1.0}
            for _ in range(LENGTH):
                longer = {}
                for tokens, mass in distributions.items():
                    logits = reference.last_logits(model, [*PROMPT, *tokens]).tolist()
                    distribution = reference.probabilities(reference.process(logits, params, PROMPT, tokens))
                    longer |= {(*tokens, token): mass * p for token, p in enumerate(distribution) if p}
                distributions = longer
            made[params.temperature] = distributions
        return made[params.temperature]

    return joint


@pytest.fixture(scope="module")
def counts_of(model_folder: Callable[..., Path]) -> Callable[..., Counter[tuple[int, ...]]]:
    folder = model_folder(**SMALL)
    drafters = [model_folder(noise=noise, **SMALL) for noise in (0.6, 1.5)]

    def counts(arm: Arm, num_runs: int, seed: int = 0) -> Counter[tuple[int, ...]]:
        llm = LLM(
            folder,
            drafters=[str(drafter) for drafter in drafters[: arm.num_drafters]],
            tree=arm.tree,
            verification=arm.verification,
            draft_sampling=arm.drawing,
            select=arm.select,
            max_num_seqs=1024,
            max_num_batched_tokens=4096,
            kv_cache_memory_bytes=2**25,
            seed=seed,
        )
        outputs = llm.generate([PROMPT] * -(-num_runs // COUNT), arm.params, use_tqdm=False)
        said = [completion.token_ids for output in outputs for completion in output.outputs]
        assert llm.engine.metrics.num_draft_failures == 0
        accepted = sum(isinstance(name, str) for o in outputs for c in o.outputs for name in c.token_origins)
        assert (accepted > 0) == (arm.tree != "off"), "guesses are accepted"
        return Counter(tuple(tokens[:LENGTH]) for tokens in said)

    return counts


def _check(arm: Arm, num_runs: int, counts_of: Any, joint_of: Any) -> None:
    value = p_value(counts_of(arm, num_runs, seed=ARMS.index(arm)), joint_of(arm.params))
    print(f"{arm}: {num_runs} runs, p = {value:.3g}")
    assert value > LEVEL / len(ARMS)


# Each rule and way to draw, and several drafters; test_exactness has the others, in fractions.
QUICK = [
    Arm("coupled", "shared-noise", "2,2,1"),
    Arm("target-only", "top-k", "best-first:8", 2),
    Arm("multi-step", "without-replacement", "2,2,1"),
    Arm("multi-step", "hybrid", "best-first:8", 2, COOL, select="hedge:1"),
    Arm("traversal", "iid", "best-first:8", 2, select="hedge:1"),
]


def test_the_quick_arms_have_every_rule_way_to_draw_and_number_of_drafters() -> None:
    for name in ("verification", "drawing", "num_drafters", "params", "select"):
        quick, every = ({str(getattr(arm, name)) for arm in arms} for arms in (QUICK, ARMS))
        assert every - quick <= {"auto"}


@pytest.mark.parametrize("arm", QUICK, ids=str)
def test_quick_arms(arm: Arm, counts_of: Any, joint_of: Any) -> None:
    _check(arm, 1024, counts_of, joint_of)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_every_arm_often(arm: Arm, counts_of: Any, joint_of: Any) -> None:
    # Coupled output is compared token by token elsewhere, and its noise is tested by itself.
    _check(arm, 8 * 1024 if arm.verification in ("coupled", "target-only") else 23 * 1024, counts_of, joint_of)


class AfterTheFirst(FixedPolicy):
    """Wants no tree for the first token, which a host step generates."""

    def budgets(self, spans: Sequence[Span], reading: Sequence[Span] = ()) -> list[TreeBudget]:
        budgets = zip(spans, super().budgets(spans), strict=True)
        return [budget if span.request.num_output else OFF for span, budget in budgets]


def _p_value_on_a_device(
    rule: str, params: SamplingParams, tree: TreeBudget, num_runs: int, pair: Sequence[LoadedModel], joint: Joint
) -> float:
    engine = make_device_engine(*pair, AfterTheFirst(tree), num_slots=2048, max_num_seqs=32, verification=rule)
    one = replace(params, n=1, ignore_eos=True)
    requests = [make_request(str(i), PROMPT, one, seed=derive_seed(num_runs, i)) for i in range(num_runs)]
    assert run_on_device(engine, requests) == set(requests)
    assert sum(request.speculation.num_accepted_draft_tokens for request in requests) > num_runs // 2
    value = p_value(Counter(tuple(request.output_ids[:LENGTH]) for request in requests), joint)
    print(f"{rule} on a device: {num_runs} runs, p = {value:.3g}")
    return value


@pytest.fixture(scope="module")
def pair(model_folder: Callable[..., Path]) -> list[LoadedModel]:
    return [load_plain(model_folder(noise=noise, **SMALL)) for noise in (0.0, 0.6)]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_runs", [2048, pytest.param(23 * 1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("params", "tree"), [(WARM, TreeBudget(2, 2)), (COOL, TreeBudget(5, 3))], ids=["warm", "cool"])
@pytest.mark.parametrize("rule", ["multi-step", "traversal"])
def test_best_first_trees_on_a_device(
    rule: str, params: SamplingParams, tree: TreeBudget, num_runs: int, pair: Sequence[LoadedModel], joint_of: Any
) -> None:
    """All tokens but the first come from trees whose nodes are chosen after all draws."""
    assert _p_value_on_a_device(rule, params, tree, num_runs, pair, joint_of(params)) > LEVEL / len(ARMS)


def _draw_telling(*given: Any) -> None:
    """Draw as a device does, and rank the candidates by the probability of the drawn token itself."""
    reference_draft.draw_candidates(*given)
    drawn, frontier, first, width, table, limits, candidates, out = given[3:11]
    requests, nodes = frontier.tokens.shape
    of_level = slice(first, first + nodes * width)
    ids, whole = (found[:, of_level].view(requests, nodes, width, -1)[:, :, :1] for found in (out.tokens, out.probs))
    is_own = ids == candidates.tokens[:, of_level].view(requests, nodes, width, 1)
    chance = reference_draft.chance(
        table, torch.full_like(drawn.streams, trees.DRAWN), (is_own * whole).sum(dim=3).float()
    )
    ranked = path_probs(candidates.path_prob[:, of_level].view_as(chance) >= 0, chance, frontier, limits)
    candidates.path_prob[:, of_level] = ranked.flatten(1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rule", ["multi-step", "traversal"])
def test_a_device_that_ranks_draws_by_their_own_probability_fails(
    rule: str, pair: Sequence[LoadedModel], joint_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_ops, "draw_candidates", _draw_telling)
    value = _p_value_on_a_device(rule, WARM, TreeBudget(2, 2), 12 * 1024, pair, joint_of(WARM))
    assert value < LEVEL / len(ARMS)


def test_null_arm(joint_of: Any) -> None:
    """Exact draws pass, and as often as they should."""
    joint, generator = joint_of(WARM), torch.Generator().manual_seed(0)
    distribution, values = torch.tensor(list(joint.values())).double(), []
    for _ in range(100):
        drawn = torch.multinomial(distribution, 2048, replacement=True, generator=generator).tolist()
        values.append(p_value(Counter(list(joint)[i] for i in drawn), joint))
    assert min(values) > LEVEL / len(ARMS)
    assert 1 <= sum(value < 0.05 for value in values) <= 12


# ------------------------------------------------------------------------------------- known to be bad


def _nothing_taken_out(left: Probs, *_: Any) -> Probs:
    return left.copy()


def _accepts_by_p_alone(self: SeededSource, p: float, q: float) -> bool:
    return self._uniforms.next_uniform() < p


BAD: dict[str, tuple[Any, str, Any]] = {
    "residual not updated": (algorithms, "residual", _nothing_taken_out),
    "wrong coin": (SeededSource, "accepts", _accepts_by_p_alone),
}


@pytest.mark.parametrize(
    ("name", "rule"),
    [  # traversal's coins have no draft's distribution in them
        ("residual not updated", "multi-step"),
        pytest.param("residual not updated", "traversal", marks=pytest.mark.slow),
        pytest.param("wrong coin", "multi-step", marks=pytest.mark.slow),
    ],
)
def test_known_bad_arms_fail(
    name: str, rule: str, counts_of: Any, joint_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "_is_plain", lambda *_: False)  # the parts are Python's
    monkeypatch.setattr(*BAD[name])
    value = p_value(counts_of(Arm(rule, "without-replacement", "2,2,1"), 2048), joint_of(WARM))
    print(f"{rule}, {name}: p = {value:.3g}")
    assert value < LEVEL / len(ARMS)


# ---------------------------------------------------------------------------------- draws by themselves

Q = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
NUM_DRAWS = 4_000


@functools.cache
def _pairs(drawing: str) -> Counter[tuple[int, ...]]:
    """First and second sibling, of requests with seeds in a row, some of which have drawn before."""
    nodes = []
    for seed in range(NUM_DRAWS):
        request = make_request(str(seed), [1], SamplingParams(), seed)
        request.drafting.num_draws[""] = seed % 3
        nodes.append(Node(request, (), 2))
    return Counter(map(tuple, draw(drawing, Q.log().expand(NUM_DRAWS, -1), nodes).tokens.tolist()))


def _pair_distribution(drawing: str) -> Joint:
    q = Q.double().tolist()
    best = [1 if token == 0 else 0 for token in range(len(q))]  # chosen beside the draw, unless it was drawn itself
    distributions = {
        "iid": lambda a, b: q[a] * q[b],
        "without-replacement": lambda a, b: q[a] * q[b] / (1 - q[a]) * (a != b),
        "hybrid": lambda a, b: q[a] * (b == best[a]),
    }
    return {(a, b): p for a, b in product(range(len(q)), repeat=2) if (p := distributions[drawing](a, b))}


DRAWN: Sequence[str] = ("iid", "without-replacement", "hybrid")


@pytest.mark.parametrize("drawing", DRAWN)
def test_draws_follow_their_distributions(drawing: str) -> None:
    assert p_value(_pairs(drawing), _pair_distribution(drawing)) > LEVEL


def test_draws_from_other_distributions_are_detected() -> None:
    """Without replacement is not far from i.i.d. draws that happen to differ: near enough to be mistaken for them."""
    pairs = Counter({pair: seen for pair, seen in _pairs("iid").items() if pair[0] != pair[1]})
    assert p_value(pairs, _pair_distribution("without-replacement")) < 1e-9
    swapped = Counter({pair[::-1]: seen for pair, seen in _pairs("without-replacement").items()})
    assert p_value(swapped, _pair_distribution("without-replacement")) < 1e-9
