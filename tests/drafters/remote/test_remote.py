"""Drafters on other ranks grow the trees that they would have grown here, to the last bit of every distribution.

Ranks are objects here, and letters go from hand to hand; `parallel/test_ranks_drafters.py` has processes.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specinfer.core.config import SpeculativeConfig
from specinfer.core.draws import CHOSEN, POOL, DrawnFrom, Draws
from specinfer.core.errors import RanksError
from specinfer.core.grammar.compiler import GrammarCompiler
from specinfer.core.parallel_config import ParallelConfig
from specinfer.core.request import Request, Span
from specinfer.core.rules import RULES
from specinfer.core.sampling import SamplingParams
from specinfer.core.thought import Reasoning, Thought
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters import MergedDrafter, RemoteDrafter, SmallModelDrafter, make_drafter
from specinfer.drafters.merge.guarded import MAX_FAILURES
from specinfer.drafters.remote.drafter import RemoteModel
from specinfer.drafters.remote.host import Host, HostedDrafter, answer
from specinfer.drafters.remote.placement import DrafterPlacement, PlacedDrafter, place_drafters
from specinfer.drafters.remote.wire import (
    CalibrationState,
    DraftRequest,
    RequestUpdate,
    TreeRequest,
    read_draft_request,
    read_trees,
    unpack,
    write_draft_request,
    write_failure,
    write_trees,
)
from specinfer.drafters.vocabulary.token_map import SharedVocabulary
from specinfer.engine_args import EngineArgs
from specinfer.model.capacity import bytes_per_state
from specinfer.model.load import load_model
from specinfer.model.runner import ModelRunner
from specinfer.setup.drafter_setup import Speculator
from specinfer.setup.model_plan import plan_models
from tiny import VOCAB, as_values, make_engine, make_request, make_tokenizer, random_prompts, resized, run, trees

Runners = Callable[..., ModelRunner]
NAMES = ["one", "two", "ngram"]


class Hand:
    """A link to a rank of this thread. Answers are made when they are asked for, or when they are waited for."""

    def __init__(self, *runners: ModelRunner, is_late: bool = False) -> None:
        self._compiler = GrammarCompiler(make_tokenizer(), VOCAB, ())
        self.hosted = {
            i: HostedDrafter(runner, SharedVocabulary(VOCAB, VOCAB), VOCAB, self._compiler, make_tokenizer().decode)
            for i, runner in enumerate(runners)
        }
        self.log: list[str] = []
        self.num_numbers: list[int] = []
        self._is_late = is_late

    def send(self, message: Tensor) -> None:
        assert answer(self.hosted, message.clone()) is None

    def request(self, message: Tensor) -> Callable[[], Tensor]:
        self.log.append("asked")
        self.num_numbers.append(len(message))
        said = None if self._is_late else answer(self.hosted, message.clone())

        def wait() -> Tensor:
            self.log.append("awaited")
            found = answer(self.hosted, message.clone()) if said is None else said
            assert found is not None
            return found

        return wait


@dataclass
class World:
    """One engine whose second model is here or elsewhere, and all trees that were drafted for it."""

    drafter: MergedDrafter
    runners: list[ModelRunner]
    hand: Hand
    trees: list[TokenTree] = field(default_factory=list)

    def close(self) -> None:
        """What ended is heard of with the next message, which nobody writes any more."""
        for number in self.hand.hosted:
            RemoteDrafter(RemoteModel(self.hand, number), "none", "top-k", self.drafter.calibration)


def make_world(runner_of: Runners, drawing: str, *, is_remote: bool, num_slots: int = 600, **hand: Any) -> World:
    runners = [resized(runner_of("llama", 0, noise), num_slots, keeps_prefixes=True) for noise in (0.15, 0.3)]
    link = Hand(runners[1], **hand)
    second = RemoteModel(link, 0) if is_remote else runners[1]
    drafter = make_drafter([runners[0], second, "ngram"], VOCAB, NAMES, drawing)
    assert drafter is not None
    world = World(drafter, runners, link)
    draft = drafter.draft

    def noted(spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        found = draft(spans, budgets)
        world.trees += found
        return found

    drafter.draft = noted  # type: ignore[method-assign]
    return world


def requests() -> list[Request]:
    grammar = SamplingParams(temperature=0.9, max_tokens=10, structured_outputs={"regex": "[a-e ]{6,12}"}, seed=1)
    asked = [
        SamplingParams(temperature=0.0, max_tokens=10),
        SamplingParams(temperature=0.8, max_tokens=10),
        SamplingParams(temperature=1.0, max_tokens=8, top_p=0.9, top_k=20, min_p=0.01),
        SamplingParams(temperature=0.7, max_tokens=9, repetition_penalty=1.3, presence_penalty=0.5, min_tokens=5),
        SamplingParams(temperature=0.9, max_tokens=9, logit_bias={3: 2.5, 5: -4.0}, allowed_token_ids=range(40)),
        grammar,
        SamplingParams(temperature=1.0, max_tokens=10),
        SamplingParams(temperature=0.9, max_tokens=12),
    ]
    prompts = random_prompts([5, 17, 30, 3, 9, 2, 30, 8])
    prompts[6] = prompts[2]  # its prefix is there already
    made = [make_request(str(i), prompts[i], params, 11 * i) for i, params in enumerate(asked)]
    made[3].bad_words_ids = ((4, 5), (7,))
    made[6].cache_salt = None
    made[7].thought = Thought(Reasoning("", "!?", (34, 31, 32), is_open=True), make_tokenizer().decode, 4)
    compiler = GrammarCompiler(make_tokenizer(), VOCAB, ())
    assert grammar.structured_outputs is not None
    made[5].grammar = compiler.compile(grammar.structured_outputs)  # type: ignore[arg-type]
    return made


_BEST_FIRST, _EXPANSION = TreeBudget(12, 4), (2, 1, 2)
_CASES = [
    *(("coupled", drawing, _BEST_FIRST) for drawing in RULES["coupled"].draft_samplings),
    *(("multi-step", drawing, _EXPANSION) for drawing in RULES["multi-step"].draft_samplings),
    ("traversal", "without-replacement", _BEST_FIRST),
    ("target-only", "top-k", _EXPANSION),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("rule", "drawing", "budget"), _CASES, ids=[f"{rule}-{way}" for rule, way, _ in _CASES])
def test_trees_do_not_depend_on_where_they_are_grown(
    rule: str, drawing: str, budget: TreeBudget | tuple[int, ...], runner_of: Runners
) -> None:
    found = []
    for is_remote in (False, True):
        world = make_world(runner_of, drawing, is_remote=is_remote)
        target = resized(runner_of("llama"), 300, keeps_prefixes=True)
        engine = make_engine(
            target, world.drafter, budget, verification=rule, max_num_seqs=4, max_num_batched_tokens=24
        )
        said = run(engine, requests())
        assert engine.metrics.num_draft_failures == 0
        found.append((said, list(map(as_values, world.trees))))
        assert any(draw.drafter == "two" for tree in world.trees for draw in tree.draws)
        world.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("num_slots", [90, 150])
def test_requests_that_are_put_back_and_caches_that_run_out(num_slots: int, runner_of: Runners) -> None:
    """Few slots for the target, then for the drafters: what is forgotten here is forgotten there."""
    found = []
    for is_remote in (False, True):
        world = make_world(runner_of, "without-replacement", is_remote=is_remote, num_slots=num_slots)
        engine = make_engine(
            resized(runner_of("llama"), 110), world.drafter, TreeBudget(10, 4), verification="multi-step"
        )
        said = run(engine, requests())
        assert engine.metrics.num_preempted
        found.append((said, list(map(as_values, world.trees))))
        world.close()
    assert found[0] == found[1]


def test_others_are_asked_before_this_rank_drafts_and_awaited_after(
    runner_of: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(runner_of, "shared-noise", is_remote=True, is_late=True)
    draft = SmallModelDrafter.draft

    def noted(self: SmallModelDrafter, *args: Any) -> Any:
        if self.runner is world.runners[0]:
            world.hand.log.append("drafts")
        return draft(self, *args)

    monkeypatch.setattr(SmallModelDrafter, "draft", noted)
    request = make_request("0", [3, 1, 4])
    (tree,) = world.drafter.draft([Span(request, 0, 3)], [TreeBudget(8, 3)])
    assert tree.num_guessed
    assert world.hand.log[0] == "asked"
    assert world.hand.log[-1] == "awaited"
    assert set(world.hand.log[1:-1]) == {"drafts"}
    world.drafter.forget("0")
    world.close()


def test_a_step_is_one_letter_that_does_not_grow_with_the_text(runner_of: Runners) -> None:
    world = make_world(runner_of, "shared-noise", is_remote=True)
    engine = make_engine(resized(runner_of("llama"), 300), world.drafter, (1, 1))
    run(engine, [make_request("0", random_prompts([100])[0], SamplingParams(temperature=0.0, max_tokens=60))])
    assert len(world.hand.num_numbers) <= engine.metrics.num_steps
    first, *others = world.hand.num_numbers
    assert max(others) < 600 < first + 600, "tables of chances, and some tokens"
    assert abs(others[-1] - others[1]) < 20
    world.close()


def test_a_remote_drafter_that_fails_costs_its_drafts_only(
    runner_of: Runners, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (plain,) = run(make_engine(runner_of("llama")), [_long_request("0")])
    world = make_world(runner_of, "shared-noise", is_remote=True)
    engine = make_engine(resized(runner_of("llama"), 300), world.drafter, (2, 1))
    draft, is_broken = SmallModelDrafter.draft, True

    def broken(self: SmallModelDrafter, *args: Any) -> Any:
        if is_broken and self.runner is world.runners[1]:
            raise RuntimeError("broken on purpose")
        return draft(self, *args)

    monkeypatch.setattr(SmallModelDrafter, "draft", broken)
    request = _long_request("1")
    engine.add(request)
    with caplog.at_level(logging.ERROR, logger="specinfer"):
        for _ in range(MAX_FAILURES - 1):
            engine.step()
    assert "RuntimeError: broken on purpose" in caplog.text
    assert {draw.drafter for tree in world.trees for draw in tree.draws} <= {"one", "ngram"}
    is_broken = False
    assert run(engine, []) == []
    while not request.is_finished:
        engine.step()
    assert request.output_ids == plain
    assert "two" in {draw.drafter for tree in world.trees for draw in tree.draws}, "it is asked again"
    assert engine.metrics.num_draft_failures == 0
    world.close()


def test_a_drafter_that_cannot_begin_there_answers_nevertheless(
    runner_of: Runners, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise MemoryError("broken on purpose")

    monkeypatch.setattr("specinfer.drafters.remote.host.SmallModelDrafter", broken)
    with caplog.at_level(logging.ERROR, logger="specinfer"):
        world = make_world(runner_of, "shared-noise", is_remote=True)
        (tree,) = world.drafter.draft([Span(make_request("0", [3, 1, 4]), 0, 3)], [TreeBudget(8, 3)])
    assert {draw.drafter for draw in tree.draws} == {"one"}
    assert "broken on purpose" in caplog.text
    world.drafter.forget("0")


def test_an_interrupt_between_question_and_answer_loses_nothing(
    runner_of: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plain,) = run(make_engine(runner_of("llama")), [_long_request("0")])
    world = make_world(runner_of, "shared-noise", is_remote=True)
    engine = make_engine(resized(runner_of("llama"), 300), world.drafter, (2, 1))
    draft, num_drafts = SmallModelDrafter.draft, 0

    def interrupted(self: SmallModelDrafter, *args: Any) -> Any:
        nonlocal num_drafts
        num_drafts += self.runner is world.runners[0]
        if self.runner is world.runners[0] and num_drafts == 3:
            raise KeyboardInterrupt
        return draft(self, *args)

    monkeypatch.setattr(SmallModelDrafter, "draft", interrupted)
    request = _long_request("1")
    with pytest.raises(KeyboardInterrupt):
        run(engine, [request])
    while not request.is_finished:
        engine.step()
    assert request.output_ids == plain
    assert engine.metrics.num_draft_failures == 0
    world.close()


def test_a_rank_that_is_gone_ends_the_drafting_and_no_drafter_is_blamed(
    runner_of: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(runner_of, "shared-noise", is_remote=True)

    def gone(message: Tensor) -> Tensor:
        raise RanksError("rank 1 is gone")

    monkeypatch.setattr(world.hand, "request", gone)
    for _ in range(MAX_FAILURES + 1):
        with pytest.raises(RanksError, match="rank 1 is gone"):
            world.drafter.draft([Span(make_request("0", [3, 1, 4]), 0, 3)], [TreeBudget(8, 3)])
    world.drafter.forget("0")
    world.close()


def test_a_grammar_that_cannot_be_sent_gets_no_drafts_from_remote_drafters(runner_of: Runners) -> None:
    world = make_world(runner_of, "shared-noise", is_remote=True)
    request = requests()[5]
    request.params = SamplingParams(temperature=0.9)
    tree, other = world.drafter.draft(
        [Span(request, 0, 2), Span(make_request("b", [3, 1, 4]), 0, 3)], [TreeBudget(8, 3)] * 2
    )
    assert {draw.drafter for draw in tree.draws} <= {"one", "ngram", "grammar"}
    assert "two" in {draw.drafter for draw in other.draws}
    for name in ("b", request.request_id):
        world.drafter.forget(name)
    world.close()


def _long_request(name: str) -> Request:
    return make_request(name, [3, 1, 4, 1, 5], SamplingParams(temperature=0.0, max_tokens=40))


# ---------------------------------------------------------------------------------------------- letters

_INT = st.integers(-(2**31), 2**31 - 1)
_FLOAT = st.floats(allow_nan=False)


@st.composite
def budgets(draw: st.DrawFn) -> TreeBudget:
    widths = draw(st.lists(st.integers(1, 4), max_size=4).map(tuple))
    numbers = [draw(st.integers(0, 1024)) for _ in range(3)]
    return TreeBudget(numbers[0], numbers[1], widths, numbers[2], draw(_FLOAT), draw(_FLOAT))


NEWS = st.builds(RequestUpdate, st.integers(0, 2**31 - 1), st.none() | st.lists(_INT))
WISHES = st.builds(
    TreeRequest, st.integers(0, 2**31 - 1), st.text(), st.lists(_INT), st.integers(0, 2**62), budgets()
)  # fmt: skip


@given(st.lists(NEWS), st.lists(st.tuples(st.booleans(), st.lists(_FLOAT))), st.lists(WISHES))
def test_any_question_comes_through(
    updates: list[RequestUpdate], learned: list[tuple[bool, list[float]]], tree_requests: list[TreeRequest]
) -> None:
    draft_request = DraftRequest(
        updates,
        [CalibrationState(kind, np.asarray(numbers, dtype=np.float64)) for kind, numbers in learned],
        tree_requests,
    )
    header, arrays = unpack(write_draft_request(5, draft_request))
    assert header["drafter"] == 5
    found = read_draft_request(header["draft"], arrays)
    assert found.updates == draft_request.updates
    assert found.tree_requests == draft_request.tree_requests
    assert [(one.is_sampled, one.state.tolist()) for one in found.learned] == learned


@st.composite
def _pools(draw: st.DrawFn, num_nodes: int) -> DrawnFrom:
    """What the children of nodes were drawn from, with any support."""
    support, most = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=num_nodes * support, max_size=num_nodes * support))
    probs = draw(st.lists(_FLOAT, min_size=len(ids), max_size=len(ids)))
    places = draw(st.lists(st.integers(0, support - 1), min_size=num_nodes * most, max_size=num_nodes * most))
    return DrawnFrom(
        np.array(ids, dtype=np.int64).reshape(num_nodes, -1), np.array(probs).reshape(num_nodes, -1),
        np.array(places, dtype=np.int64).reshape(num_nodes, -1), is_replaced=draw(st.booleans()),
    )  # fmt: skip


@given(st.data())
def test_any_trees_come_through(data: st.DataObject) -> None:
    """Drawn and chosen guesses side by side, draws on record twice, from what several trees share."""
    sent = []
    shared = data.draw(_pools(13))
    for tree in data.draw(st.lists(trees(name="x", max_nodes=12), max_size=4)):
        pools = [shared, data.draw(_pools(len(tree)))]
        nodes = data.draw(st.lists(st.integers(1, len(tree) - 1), max_size=9)) if len(tree) > 1 else []
        numbers = []
        for node in nodes:
            pool, parent = data.draw(st.sampled_from([-1, 0, 1])), tree.parents[node]
            rank = data.draw(st.integers(0, pools[pool].places.shape[1] - 1))
            number = int(pools[pool].numbers(np.array([parent]), np.array([rank]))[0])
            numbers.append(CHOSEN if pool < 0 else pool << POOL | number)
        confidence = data.draw(st.lists(_FLOAT, min_size=len(nodes), max_size=len(nodes)))
        draws = Draws(np.array(nodes, np.int64), np.zeros(len(nodes), np.int64), np.array(confidence), ("x",))
        if any(number >= 0 for number in numbers):
            draws = draws._replace(numbers=np.array(numbers), pools=tuple(pools))
        sent.append(TokenTree.from_arrays(tree.arrays._replace(draws=draws)))
    received = read_trees(write_trees(sent), "x")
    assert list(map(as_values, received)) == list(map(as_values, sent))


def test_a_failure_is_no_tree() -> None:
    with pytest.raises(RuntimeError, match="ValueError: \u20ac 3"):
        read_trees(write_failure("ValueError: \u20ac 3"), "x")


# ------------------------------------------------------------------------------------------------ places


def _place(count: int, must_be_here: bool = False, **sizes: Any) -> list[int]:
    models = {f"m{i}": Path(f"/models/m{i}") for i in range(count)}
    placement = place_drafters(models, ParallelConfig(**sizes), None, keeps_prefixes=True, must_be_here=must_be_here)
    elsewhere = {one.name: one.rank for one in placement.placed}
    return [elsewhere.get(name, 0) for name in models]


def test_each_rank_gets_a_drafter_in_turn_the_engines_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert _place(3, tensor_parallel_size=2) == [0, 1, 0]
    assert _place(3, tensor_parallel_size=2, pipeline_parallel_size=2) == [0, 1, 2]
    assert _place(1, tensor_parallel_size=2) == [0]
    assert _place(3) == [0, 0, 0]
    assert _place(3, tensor_parallel_size=2, drafter_placement="first") == [0, 0, 0]
    assert _place(3, must_be_here=True, tensor_parallel_size=2) == [0, 0, 0]
    assert _place(3, tensor_parallel_size=8) == [0, 0, 0], "they would take each other's cores"
    assert _place(3, tensor_parallel_size=8, drafter_placement="spread") == [0, 1, 2]
    two = {"pipeline_parallel_size": 2, "nnodes": 2, "master_addr": "a", "insecure_cluster": True}
    assert _place(2, **two) == [0, 0], "another machine may not have them"
    assert _place(2, **two, drafter_placement="spread") == [0, 1]


@pytest.mark.parametrize(
    ("count", "must_be_here", "sizes"),
    [(2, False, {}), (1, False, {"tensor_parallel_size": 2}), (2, True, {"tensor_parallel_size": 2})],
)
def test_what_cannot_be_spread_is_refused_by_name(count: int, must_be_here: bool, sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"^drafter_placement: .*leave"):
        _place(count, must_be_here, **sizes, drafter_placement="spread")


@pytest.mark.parametrize(("setting", "value", "is_spread"), [("max_loras", 4, True), ("verification", "auto", False)])
def test_drafters_stay_with_the_engine_that_chooses_their_rule(
    setting: str, value: Any, is_spread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "drafters": ["demo", "demo-2"], setting: value}
    assert bool(plan_models(EngineArgs("demo", **settings)).placement.placed) == is_spread


def test_a_rule_chosen_by_measurement_is_refused_for_drafters_on_other_ranks(runner_of: Runners) -> None:
    remote = RemoteModel(Hand(runner_of("llama", 0, 0.15)), 0)
    speculator = Speculator(runner_of("llama"), {"small": remote}, {})
    with pytest.raises(ValueError, match=r"^verification: .* name coupled or traversal .* drafter_placement=\"first\""):
        speculator.configure(SpeculativeConfig(tree="2,1", verification="auto"))
    speculator.configure(SpeculativeConfig(tree="2,1", verification="traversal"))
    assert speculator.drafter is not None


def test_a_placement_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="drafter_placement must be one of auto, first, spread, not 'everywhere'"):
        ParallelConfig(drafter_placement="everywhere")


def test_where_drafters_lodge_comes_through_a_job() -> None:
    placement = DrafterPlacement(
        (PlacedDrafter("a", "/x/a", 1), PlacedDrafter("b", "/x/b", 3), PlacedDrafter("c", "/x/c", 1)), "int8"
    )
    assert DrafterPlacement.from_json(placement.as_json()) == placement
    assert [list(placement.of(rank)) for rank in range(4)] == [[], [0, 2], [], [1]]


def test_a_drafter_on_another_rank_keeps_the_states_that_its_memory_was_planned_for(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder("qwen3_5_text", tokenizer=True)
    host = Host({0: PlacedDrafter("small", str(folder), 1)}, None, keeps_prefixes=True)
    (loaded,) = host.load(load_model(folder, torch.float32, torch.device("cpu")))
    assert bytes_per_state([loaded])
    runners, make = list[ModelRunner](), ModelRunner.__init__

    def note(runner: ModelRunner, *args: Any, **options: Any) -> None:
        make(runner, *args, **options)
        runners.append(runner)

    monkeypatch.setattr(ModelRunner, "__init__", note)
    host.serve(40, 5, Mock(receive=lambda _: ()))
    host.end()
    (runner,) = runners
    assert {len(pool) for pool in runner.tensors.states.pools.values()} == {5}
