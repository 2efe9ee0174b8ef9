"""Guesses of lookups on a device: the same tokens, and the trees of host steps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from on_device import (
    WAYS,
    Pair,
    check_same_tokens,
    executor_of,
    in_each_way,
    make_device_engine,
    plain_tokens,
    repeating_requests,
    run_on_device,
)
from specinfer.core.lookups import drafter_of
from specinfer.core.request import Request, Span
from specinfer.core.rules import random_rules
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import OFF, TreeBudget
from specinfer.drafters import MergedDrafter
from specinfer.drafters.lookup.suffix import EARLIER, PROMPT, SIBLING, SuffixDrafter
from specinfer.engine.device.launch import Launch
from specinfer.engine.timer import Marks
from specinfer.policy.base import FixedPolicy
from tiny import make_request, requests_of, run

TREES = {
    "2,1,1": TreeBudget.expansion((2, 1, 1), num_drafters=3),
    "best-first": TreeBudget(max_nodes=12, max_depth=6),
    "gain": TreeBudget(max_nodes=12, max_depth=8, min_gain=9.0),
}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40),
    SamplingParams(max_tokens=24),
    SamplingParams(temperature=0.5, top_k=3, max_tokens=30),
    SamplingParams(temperature=0.0, max_tokens=40, prediction=list(range(30, 60))),
]


def _requests() -> list[Request]:
    return repeating_requests(PARAMS)


@pytest.fixture(scope="module")
def plain(pair: Pair) -> list[list[int]]:
    return plain_tokens(pair[0], _requests())


@pytest.mark.parametrize("tree", TREES)
def test_the_tokens_are_those_of_plain_decoding(tree: str, pair: Pair, plain: list[list[int]]) -> None:
    engine, requests = check_same_tokens(
        pair, TREES[tree], _requests, plain, all_on_device=True, lookups=["suffix", "ngram"]
    )
    origins = {origin for request in requests for origin in request.origins}
    assert {"suffix", "ngram"} & origins
    if tree == "gain":
        assert executor_of(engine)._budgets._level_probs.cut([TREES[tree]], 1.0)[0].max_depth == 1
        assert max(request.speculation.max_depth for request in requests) > 1, "lookups go deeper than the model"


@pytest.mark.parametrize("has_model", [False, True])
@pytest.mark.parametrize("tree", TREES)
def test_lookups_draft_alone_where_no_model_is_asked(
    tree: str, has_model: bool, pair: Pair, plain: list[list[int]]
) -> None:
    """The tokens are those of plain decoding, and the trees those of host steps."""
    budget, counts, tables = replace(TREES[tree], drafters=frozenset({"suffix"})), [], []
    drafters = [pair[1]] if has_model else []
    for engine, requests in in_each_way((pair[0], drafters), budget, _requests, WAYS[::2], lookups=["suffix"]):
        assert [request.output_ids for request in requests] == plain
        assert {origin and drafter_of(origin) for request in requests for origin in request.origins} == {"suffix", None}
        counts.append([request.speculation.as_dict() for request in requests])
        assert isinstance(engine.drafter, MergedDrafter)
        tables.append(engine.drafter.calibration.by_rank("suffix").tolist())
    assert counts[0] == counts[1]
    assert tables[0] == tables[1]


class Turns(FixedPolicy):
    """Asks the model and lookups, lookups alone and nobody in turn."""

    BUDGETS = (TREES["best-first"], replace(TREES["best-first"], drafters=frozenset({"suffix"})), OFF)

    def __init__(self) -> None:
        super().__init__()
        self._num_steps = 0

    def budgets(self, spans: Sequence[Span], reading: Sequence[Span] = ()) -> list[TreeBudget]:
        self._num_steps += 1
        return [self.BUDGETS[self._num_steps % 3]] * len(spans)


def test_a_model_reads_what_steps_of_lookups_alone_emitted(pair: Pair, plain: list[list[int]]) -> None:
    _, requests = check_same_tokens(pair, Turns(), _requests, plain, all_on_device=True, lookups=["suffix"])
    assert {"small", "suffix"} <= {origin for request in requests for origin in request.origins}


def _requests_of_sources() -> list[Request]:
    """Return samples of one prompt, and a request that repeats its prompt with changes."""
    samples = [
        make_request(f"s{i}", [5, 6, 7], SamplingParams(seed=i, max_tokens=30, allowed_token_ids=[5, 6, 7, 8]), seed=i)
        for i in range(5)
    ]
    copy = SamplingParams(temperature=0.0, max_tokens=40, allowed_token_ids=[9])
    return [*samples, make_request("copy", [9] * 20 + [4], copy)]


@pytest.mark.parametrize("has_device_executor", [False, True])
def test_every_source_of_a_lookup_leaves_the_tokens_as_they_are(
    has_device_executor: bool, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, names = plain_tokens(pair[0], _requests_of_sources()), set[str]()
    monkeypatch.setattr(SuffixDrafter, "observe", lambda _, __, tree, ___: names.update(tree.arrays.draws.names))
    engine = make_device_engine(
        pair[0], None, TREES["best-first"], lookups=["suffix"], has_device_executor=has_device_executor
    )
    for _ in range(2):  # in the second round there are earlier answers
        requests = _requests_of_sources()
        if has_device_executor:
            assert run_on_device(engine, requests) == set(requests)
            assert [request.output_ids for request in requests] == plain
        else:
            assert run(engine, requests) == plain
    assert names == {"suffix", PROMPT, SIBLING, EARLIER}


def test_two_steps_are_in_flight_while_lookups_are_not_asked(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, counts = make_device_engine(pair[0], lookups=["suffix"]), list[int]()
    executor = executor_of(engine)
    score = executor.score

    def begun(launch: Launch) -> None:
        score(launch)
        counts.append(executor.num_in_flight)

    monkeypatch.setattr(executor, "score", begun)
    run(engine, _requests()[:3])
    assert max(counts) == 2


@pytest.mark.parametrize("rule", random_rules())
def test_lookups_guess_for_greedy_requests_under_every_rule(rule: str, pair: Pair) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40)
    requests = requests_of([[5, 6, 7] * 4], [params])
    _, [request] = check_same_tokens(
        pair, TREES["best-first"], requests, all_on_device=True, lookups=["ngram"], verification=rule
    )
    assert "ngram" in request.origins


def test_fixed_trees_are_those_of_host_steps(pair: Pair) -> None:
    """Merged node for node, so the same path is kept in each step, and drafters learn the same."""
    counts, tables = [], []
    for has_device_executor in (False, True):
        engine = make_device_engine(
            *pair, TREES["2,1,1"], lookups=["suffix"], has_device_executor=has_device_executor
        )  # fmt: skip
        requests = _requests()[:3]
        run(engine, requests)
        counts.append([request.speculation.as_dict() for request in requests])
        assert isinstance(engine.drafter, MergedDrafter)
        tables.append(engine.drafter.calibration.by_rank("suffix").tolist())
    assert counts[0] == counts[1]
    assert tables[0] == tables[1]


def test_a_drafter_reads_what_lookups_proposed(pair: Pair, plain: list[list[int]]) -> None:
    """Of long accepted paths it has computed nothing; it goes on after them."""
    prediction, request = plain[0], _requests()[0]
    request.prediction_ids = tuple(prediction)
    engine = make_device_engine(*pair, TREES["best-first"], lookups=["ngram"])
    assert run(engine, [request]) == [prediction]
    assert request.speculation.tokens_per_pass > 5
    assert request.origins.count("prediction") > 20


@pytest.mark.parametrize("has_model", [False, True])
def test_a_prediction_drafts_where_no_other_drafter_is_asked(
    has_model: bool, pair: Pair, plain: list[list[int]]
) -> None:
    """No budget leaves it out, and it leaves out what others would draft; chains of 8 tokens are all accepted."""

    def predicted() -> list[Request]:
        request = _requests()[0]
        request.prediction_ids = tuple(plain[0])
        return [request]

    budget, drafters = TreeBudget(8, 8, drafters=frozenset({"prediction"})), [pair[1]] if has_model else []
    for _, [request] in in_each_way((pair[0], drafters), budget, predicted, WAYS[::2], lookups=["ngram"]):
        assert request.output_ids == plain[0]
        assert set(request.origins) == {None, "prediction"}
        assert request.speculation.tokens_per_pass > 6


def test_one_event_a_step_is_waited_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    wait = Marks.wait

    def waited(self: Any) -> None:
        waits.append("event")
        wait(self)

    monkeypatch.setattr(Marks, "wait", waited)
    engine = make_device_engine(*pair, TREES["best-first"], lookups=["suffix"])
    run(engine, _requests()[:2])
    assert len(waits) == executor_of(engine).num_launched > 4
