"""Steps on the device: the same tokens as plain decoding, whatever comes and goes."""

import gc
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from heads import save_tiny_block, save_tiny_head
from on_device import (
    WAYS,
    Pair,
    check_left,
    check_same_tokens,
    executor_of,
    in_each_way,
    load_plain,
    make_device_engine,
    plain_tokens,
    run_on_device,
)
from specinfer import LLM, SamplingParams
from specinfer.core.request import FinishReason, Request, Span
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import OFF, TokenTree, TreeBudget
from specinfer.demo.pair import demo_folders
from specinfer.drafters import MergedDrafter, SmallModelDrafter
from specinfer.drafters.growth.calibration import Calibration
from specinfer.engine.device.budgets import DeviceBudgets
from specinfer.engine.device.executor import DeviceExecutor
from specinfer.engine.device.launch import Answers, Launch
from specinfer.engine.device.launch_size import LaunchSize
from specinfer.engine.device.processing import Processing
from specinfer.engine.device.rows import DeviceRows
from specinfer.engine.device.served_requests import ServedRequests
from specinfer.engine.device.step_programs import StepPrograms
from specinfer.engine.executor import StepResult
from specinfer.engine.host_executor import HostExecutor
from specinfer.engine.timer import Marks
from specinfer.model.graphs.capture import CaptureError, Graphs, Program
from specinfer.model.heads.load import load_head
from specinfer.model.runner import ModelRunner
from specinfer.ops import kernels as registry
from specinfer.ops import tree_ops
from specinfer.ops.logits import Adjustments
from specinfer.policy.base import FixedPolicy
from specinfer.policy.request_policy import RequestPolicy
from tiny import FAMILIES, VOCAB, make_request, quick, random_prompts, requests_of, run

Folder = Callable[..., Path]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
PROMPTS = random_prompts([3, 26, 12, 40, 7], seed=4)
PARAMS = [
    GREEDY,
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=17, temperature=0.6),
    SamplingParams(max_tokens=9, temperature=1.4),
    GREEDY,
]
TREES = {
    "off": None,
    "chain": TreeBudget.expansion((1, 1, 1)),
    "2,2,1": TreeBudget.expansion((2, 2, 1)),
    "best-first": TreeBudget(max_nodes=12, max_depth=4),
}


_requests = requests_of(PROMPTS, PARAMS)
BOTH = pytest.mark.parametrize("pair", ["small model", "head"], indirect=True)
ALL = pytest.mark.parametrize("pair", ["small model", "head", "block head"], indirect=True)


@pytest.fixture(scope="module")
def pair(model_folder: Folder, request: pytest.FixtureRequest) -> Pair:
    """Return a target with a small model that is often right, or with a head that seldom is; of llama, or a family."""
    kind, folder = getattr(request, "param", "small model"), model_folder("llama").parent
    if kind in FAMILIES:
        return load_plain(model_folder(kind)), load_plain(model_folder(kind, 0, 0.05))
    target = load_plain(model_folder("llama"))
    if kind == "head":
        return target, load_head(save_tiny_head(folder / "head"), target)
    if kind == "block head":
        return target, load_head(save_tiny_block(folder / "block"), target)
    return target, load_plain(model_folder("llama", 0, 0.05))


@pytest.fixture(scope="module")
def plain(pair: Pair) -> list[list[int]]:
    return plain_tokens(pair[0], _requests())


# -------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("tree", TREES)
def test_the_same_tokens(tree: str, pair: Pair, plain: list[list[int]]) -> None:
    engine, requests = check_same_tokens(pair, TREES[tree], _requests, plain)
    assert executor_of(engine).num_launched >= 4
    assert all(request.finish_reason is FinishReason.LENGTH for request in requests)


@pytest.mark.parametrize("tree", ["chain", "2,2,1"])
def test_fixed_trees_are_those_of_host_steps(tree: str, pair: Pair) -> None:
    """The same guesses, so the same path is kept in each step."""
    told = [
        [request.speculation.as_dict() for request in requests]
        for _, requests in in_each_way(pair, TREES[tree], _requests, WAYS[::2])
    ]
    assert told[0] == told[1]
    assert sum(one["num_accepted_draft_tokens"] for one in told[0]) > 20


def test_acceptance_is_learned_as_in_host_steps(pair: Pair) -> None:
    tables = [
        [engine.drafter.calibration.lines(name) for name in ("small", "small sampled")]
        for engine, _ in in_each_way(pair, TREES["2,2,1"], _requests, WAYS[::2])
    ]
    np.testing.assert_allclose(tables[0], tables[1], rtol=1e-5)


@ALL
def test_requests_that_come_and_go(pair: Pair) -> None:
    prompts = random_prompts([3 + 7 * i % 41 for i in range(14)], seed=9)
    params = [SamplingParams(temperature=[0.0, 1.0, 0.7][i % 3], max_tokens=2 + 5 * i % 23) for i in range(14)]
    requests = requests_of(prompts, params)
    wanted = plain_tokens(pair[0], requests())
    engine = make_device_engine(*pair, TREES["best-first"], max_num_seqs=5, max_num_batched_tokens=24)
    coming, served = requests(), list[Request]()
    while coming or engine.has_work:
        if coming and (not engine.has_work or len(served) < 1 + engine.metrics.num_steps // 3):
            served.append(coming.pop(0))
            engine.add(served[-1])
        engine.step()
    assert [request.output_ids for request in served] == wanted
    assert executor_of(engine).num_launched > 30
    check_left(engine)


@pytest.mark.covering(1)
@BOTH
@pytest.mark.parametrize("keeps_prefixes", [False, True])
@pytest.mark.parametrize("tree", ["off", "2,2,1"])
def test_few_slots(tree: str, keeps_prefixes: bool, pair: Pair, plain: list[list[int]]) -> None:
    """Requests are put back and go on; the device executor steps aside for it."""
    num_preempted = num_launched = 0
    for num_slots in (56, 150):
        engine, _ = check_same_tokens(
            pair, TREES[tree], _requests, plain,
            num_slots=num_slots, keeps_prefixes=keeps_prefixes, max_num_batched_tokens=24,
        )  # fmt: skip
        num_preempted += engine.metrics.num_preempted
        num_launched += executor_of(engine).num_launched
    assert num_preempted > 0
    assert num_launched > 10


def test_temperatures_that_count_as_greedy(pair: Pair) -> None:
    """They are 0 on the device, too, and what would be dropped of improbable tokens does not matter."""
    params = [
        SamplingParams(temperature=1e-6, max_tokens=20),
        SamplingParams(temperature=1e-44, max_tokens=20),
        SamplingParams(temperature=0.0, top_p=0.5, top_k=3, max_tokens=20),
    ]
    requests = requests_of(PROMPTS, params)
    wanted = plain_tokens(pair[0], requests())
    engine, served = make_device_engine(*pair, TREES["2,2,1"]), requests()
    for request in served:
        engine.add(request)
    for _ in range(3):
        engine.step()
    assert set(executor_of(engine).requests) == set(served)
    while engine.has_work:
        engine.step()
    assert [request.output_ids for request in served] == wanted


@BOTH
@pytest.mark.parametrize("num_draft_slots", [20, 60, 100])
def test_few_slots_of_the_drafter(num_draft_slots: int, pair: Pair, plain: list[list[int]]) -> None:
    check_same_tokens(pair, TREES["2,2,1"], _requests, plain, num_draft_slots=num_draft_slots)


@BOTH
def test_prefixes_are_shared(pair: Pair) -> None:
    start = random_prompts([40], seed=2)[0]
    prompts = [start + tail for tail in random_prompts([3, 5, 1, 8], seed=3)]
    requests = requests_of(prompts, PARAMS)
    wanted = plain_tokens(pair[0], requests())
    engine, _ = check_same_tokens(pair, TREES["2,2,1"], requests, wanted, keeps_prefixes=True)
    again = requests()
    assert run(engine, again) == wanted, "from what the device executor has computed and left in the cache"
    assert all(request.num_cached >= len(request.prompt_ids) - 1 for request in again)

    def longer() -> list[Request]:
        both = zip(prompts, wanted, strict=True)
        return [make_request(f"{i} on", prompt + said, GREEDY) for i, (prompt, said) in enumerate(both)]

    followed = longer()
    assert run(engine, followed) == plain_tokens(pair[0], longer())
    assert all(request.num_cached > len(prompt) for request, prompt in zip(followed, prompts, strict=True))
    check_left(engine)


PROCESSED = [
    SamplingParams(max_tokens=20, top_k=5, top_p=0.8),
    SamplingParams(max_tokens=18, min_p=0.3, temperature=1.2),
    SamplingParams(temperature=0.0, max_tokens=24, repetition_penalty=1.4, frequency_penalty=0.2),
    SamplingParams(max_tokens=20, allowed_token_ids=list(range(40)), top_p=0.9, min_tokens=3),
    SamplingParams(max_tokens=22, logit_bias={5: 3.0, 9: -2.0}, presence_penalty=0.9, temperature=0.7),
]


@pytest.mark.covering(1)
@ALL
@pytest.mark.parametrize("tree", ["off", "2,2,1", "best-first"])
def test_tokens_of_processed_logits_are_those_of_host_steps(tree: str, pair: Pair) -> None:
    """Truncation, penalties and biases; the same trees too, as these decide what is drafted."""
    for params in (PROCESSED[:2], [*PARAMS[:2], *PROCESSED]):
        requests, small = requests_of(PROMPTS * 2, params), pair[1] if TREES[tree] else None
        wanted, found = requests(), requests()
        plain = run(make_device_engine(pair[0], small, TREES[tree], has_device_executor=False), wanted)
        engine = make_device_engine(pair[0], small, TREES[tree], max_num_seqs=6)
        served = run_on_device(engine, found)
        assert [request.output_ids for request in found] == plain
        assert served == set(found)
        if tree == "2,2,1":
            assert [r.speculation.as_dict() for r in found] == [r.speculation.as_dict() for r in wanted]
        check_left(engine)


def test_penalties_for_which_no_memory_is_left(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lacking(*_: Any) -> Adjustments:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Adjustments, "empty", lacking)
    wanted = plain_tokens(pair[0], [make_request("0", PROMPTS[0], PROCESSED[2])])
    requests = [make_request("0", PROMPTS[0], PROCESSED[2]), make_request("1", PROMPTS[0], GREEDY)]
    engine = make_device_engine(*pair, TREES["2,2,1"])
    assert run(engine, requests)[0] == wanted[0]
    assert executor_of(engine).num_launched > 4
    assert len([r for r in caplog.records if "host steps apply them" in r.message]) == 1


@pytest.mark.parametrize("tree", ["2,2,1", "best-first"])
def test_device_requests_run_next_to_requests_with_host_steps(
    tree: str, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    def requests() -> list[Request]:
        found = _requests()
        for request in found[::2]:
            request.prediction_ids = tuple(PROMPTS[1])
        return found

    wanted = plain_tokens(pair[0], requests())
    engine, found = make_device_engine(*pair, TREES[tree], max_num_batched_tokens=16), requests()
    with caplog.at_level(logging.INFO):
        assert run_on_device(engine, found) == set(found[1::2])
    reasons = [record.message for record in caplog.records if "host steps" in record.message]
    assert len(reasons) == 1, "each reason is logged once"
    assert reasons[0].endswith("a prediction, without a lookup among the drafters")
    assert [request.output_ids for request in found] == wanted
    assert executor_of(engine).num_launched > 3
    metrics = engine.metrics
    assert 3 < metrics.num_device_steps == sum(step.is_on_device for step in metrics.recent) < metrics.num_steps
    check_left(engine)


def test_greedy_requests_take_steps_on_the_device_where_sampled_ones_do_not(pair: Pair, plain: list[list[int]]) -> None:
    """Sampled ones take host steps next to them, with the tokens that they have without others."""
    found, engine = _requests(), make_device_engine(*pair, TREES["2,2,1"], verification="target-only")
    served = run_on_device(engine, found)
    assert served == {request for request in found if request.params.is_greedy}
    assert all(request.output_ids == tokens for request, tokens in zip(found, plain, strict=True) if request in served)
    assert sum(request.speculation.num_accepted_draft_tokens for request in served) > 5
    alone = _requests()
    run(make_device_engine(*pair, TREES["2,2,1"], verification="target-only", has_device_executor=False), alone)
    assert [request.output_ids for request in found] == [request.output_ids for request in alone]
    check_left(engine)


def test_the_device_is_told_the_acceptance_of_requests_whose_rule_is_chosen(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, tables = make_device_engine(*pair, TREES["2,2,1"], verification="auto"), list[Any]()
    monkeypatch.setattr(DeviceRows, "write_acceptance", lambda _, chances: tables.append(chances))
    served = set[Request]()
    for seed in range(3):
        requests = [make_request(str(i), p, q, seed=seed) for i, (p, q) in enumerate(zip(PROMPTS, PARAMS, strict=True))]
        served |= run_on_device(engine, requests)
    assert {"coupled", None} <= {request.verification for request in served}
    fresh = Calibration().lines("small")
    assert len(tables) > 1
    for number, line in enumerate(tables[-1][0]):
        assert not np.array_equal(line[0], fresh[0]), f"nothing is known of kind {number}"


def test_plain_decoding_takes_steps_on_the_device_under_every_rule(pair: Pair, plain: list[list[int]]) -> None:
    engine, _ = check_same_tokens(pair, None, _requests, plain, verification="multi-step")
    assert executor_of(engine).num_launched > 4


def test_requests_with_trees_of_their_own(pair: Pair) -> None:
    trees = [None, "off", "1,1", "best-first:5:3", "3,1,2"]
    requests = requests_of(PROMPTS, [replace(one, tree=tree) for one, tree in zip(PARAMS, trees, strict=True)])
    policy = RequestPolicy(FixedPolicy(TREES["2,2,1"]), lambda: FixedPolicy())
    _, served = check_same_tokens(pair, policy, requests)
    said = [request.speculation for request in served]
    assert [one.max_depth for one in said] == [3, 0, 2, 3, 3]
    assert said[1].num_draft_tokens == 0
    assert said[2].num_draft_tokens <= 2 * said[2].num_spec_steps


class Wavering(FixedPolicy):
    """Guesses in turns, and not for everybody."""

    def __init__(self, budget: TreeBudget) -> None:
        super().__init__(budget)
        self._step = 0

    def budgets(self, spans: Sequence[Span], reading: Sequence[Span] = ()) -> list[TreeBudget]:
        self._step += 1
        found = super().budgets(spans)
        return [b if self._step % 5 < 3 and (i + self._step) % 3 else OFF for i, b in enumerate(found)]


def test_levels_that_do_not_pay_are_left_out(
    pair: Pair, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the levels that a policy allows, as many as are expected to yield what they cost."""
    depths: list[int] = []
    launch = DeviceRows.launch

    def launched(self: DeviceRows, one: Launch) -> None:
        depths.append(one.size.max_depth)
        launch(self, one)

    monkeypatch.setattr(DeviceRows, "launch", launched)
    found = {}
    for min_gain in (0.0, 0.3, 9.0):
        depths.clear()
        check_same_tokens(pair, TreeBudget(max_nodes=16, max_depth=8, min_gain=min_gain), _requests, plain)
        assert depths[:2] == [8, 8], "nothing is known before the first step is read"
        found[min_gain] = max(depths[2:])
    assert found[0.0] == 8
    assert found[0.0] >= found[0.3] > found[9.0] == 1


def test_fixed_expansions_tell_nothing_about_levels(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are drafted whole, so their nodes count as certain there."""
    found: list[Any] = []
    monkeypatch.setattr(DeviceBudgets, "observe", lambda _, path_prob: found.append(path_prob.copy()))
    policy = RequestPolicy(FixedPolicy(TREES["best-first"]), lambda: FixedPolicy())
    params = [SamplingParams(temperature=0.0, max_tokens=24, tree=tree) for tree in ("3,2,1", None)]
    run(make_device_engine(*pair, policy), [make_request(str(i), PROMPTS[i], one) for i, one in enumerate(params)])
    path_prob = np.concatenate([one[:, :3] for one in found])
    assert len(path_prob) > 3
    assert (path_prob[:, 1:] <= 1).all()


class Probing(FixedPolicy):
    """Asks for guesses in every tenth step only."""

    num_asked = 0

    def budgets(self, spans: Sequence[Span], reading: Sequence[Span] = ()) -> list[TreeBudget]:
        self.num_asked += 1
        return super().budgets(spans) if self.num_asked % 10 == 0 else [OFF] * len(spans)


def test_a_step_that_has_to_wait_for_a_drafter_is_not_forgotten(pair: Pair) -> None:
    """Policies that guess no more see now and then whether it would pay again."""
    policy = Probing(TREES["chain"])
    engine = make_device_engine(*pair, policy)
    request = make_request("0", PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=60))
    run(engine, [request])
    assert policy.num_asked > 40
    assert request.speculation.num_spec_steps == policy.num_asked // 10
    check_left(engine)


def test_sizes_that_are_captured_before_any_request_comes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graphs, "median_seconds", 30.0)
    engine = make_device_engine(*pair, TREES["2,2,1"], max_num_seqs=4)
    executor, told = executor_of(engine), list[tuple[int, int]]()
    executor.prepare([TREES["2,2,1"]], lambda _, done, count: told.append((done, count)))
    assert told == [(i, 6) for i in range(7)], "1, 2 and 4 requests, with guesses and without"
    ready = set(executor._device.sizes.found)
    run(engine, _requests())
    assert executor.num_launched > 4
    assert set(executor._device.sizes.found) == ready, "at the end of a request, too, steps are as large"


def test_the_sizes_captured_first_process_logits_as_the_model_recommends(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that need less are served in the same sizes."""
    monkeypatch.setattr(Graphs, "median_seconds", 30.0)
    target = replace(pair[0], sampling_defaults={"top_k": 20, "repetition_penalty": 1.1})
    engine = make_device_engine(target, pair[1], TREES["2,2,1"], max_num_seqs=4)
    executor = executor_of(engine)
    executor.prepare([TREES["2,2,1"]])
    ready = set(executor._device.sizes.found)
    assert {size.processing for size in ready} == {Processing.ADJUSTMENT}
    params = SamplingParams(max_tokens=8, top_k=20, repetition_penalty=1.1)
    requests = [make_request("0", PROMPTS[0], params), make_request("1", PROMPTS[1], replace(GREEDY, max_tokens=8))]
    run(engine, requests)
    assert executor.num_launched > 1
    assert set(executor._device.sizes.found) == ready


def test_kernels_that_few_requests_need_are_compiled_at_the_start(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = list[str]()
    monkeypatch.setattr(Graphs, "compile", lambda _, programs, **__: compiled.extend(one.__name__ for one in programs))
    engine = make_device_engine(*pair, TREES["2,2,1"], max_num_seqs=2)
    executor_of(engine).prepare([TREES["2,2,1"]])
    assert compiled == ["draft", "verify", "verify"] * 2 + ["draft", "score", "walk"]
    [programs] = [executor_of(engine)._device._made(size) for size in executor_of(engine)._device.sizes.found][:1]
    assert programs._adjustments is None, "memory for them is reserved when a request has some"


def test_sizes_are_captured_when_larger_ones_have_cost_as_much(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then their steps run in larger ones that are ready."""
    engine = make_device_engine(*pair, TREES["2,2,1"])
    executor, sizes, launch = executor_of(engine), list[tuple[int, int]](), DeviceRows.launch
    executor.prepare([TreeBudget(max_nodes=15, max_depth=6)])
    monkeypatch.setattr(Graphs, "median_seconds", 0.0035)
    monkeypatch.setattr(Answers, "wait", lambda self: (0.001, 0.003))

    def launched(self: DeviceRows, one: Launch) -> None:
        sizes.append((one.size.max_depth, one.size.num_nodes))
        launch(self, one)

    monkeypatch.setattr(DeviceRows, "launch", launched)
    request = make_request("0", PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=40))
    wanted = plain_tokens(pair[0], [make_request("0", PROMPTS[0], request.params)])
    assert run(engine, [request]) == wanted
    assert sizes[:5] == [(6, 16)] * 3 + [(3, 11)] * 2
    assert request.speculation.max_depth == 3
    check_left(engine)


def test_step_costs_are_reported_as_measured(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """All levels of a shape are drafted, whatever is taken of them; captures are no part of any step."""
    captured = Graphs.captured

    def slowly(self: Graphs, program: Program, *_: Any) -> Program:
        time.sleep(0.3)
        return captured(self, program)

    monkeypatch.setattr(Graphs, "captured", slowly)
    engine = make_device_engine(*pair, TreeBudget(max_nodes=8, max_depth=4, min_path_prob=0.6))
    for request in _requests():
        engine.add(request)
    ordinary = 0
    while engine.has_work:
        before = executor_of(engine).num_launched
        engine.step()
        ordinary += not before
    steps = list(engine.metrics.recent)[ordinary:]
    drafted = [step for step in steps if step.draft_time]
    assert len(drafted) > 4
    assert {step.num_model_levels for step in drafted} == {4}
    assert min(step.num_levels for step in drafted) < 4
    assert max(step.rest_time for step in steps) < 0.25


def test_drafters_that_are_asked_now_and_then(pair: Pair, plain: list[list[int]]) -> None:
    _, requests = check_same_tokens(pair, Wavering(TREES["2,2,1"]), _requests, plain)
    assert sum(request.speculation.num_accepted_draft_tokens for request in requests) > 5


def test_a_drafter_with_a_shorter_context_and_fewer_tokens(pair: Pair, model_folder: Folder) -> None:
    """Beyond them nothing is guessed, and nothing is read where there is no position or row for it."""
    small = load_plain(model_folder("gpt2", 1, vocab_size=60, n_positions=32))
    requests = requests_of(random_prompts([4, 9, 20, 29, 40], seed=1, vocab=60), PARAMS)
    _, served = check_same_tokens((pair[0], small), TREES["2,2,1"], requests)
    assert max(max(request.output_ids) for request in served) >= 60
    assert any(request.speculation.num_draft_tokens for request in served)


@pytest.mark.parametrize("pair", ["opt", "gemma2", "mistral", "gpt_oss", "falcon"], indirect=True)
def test_families(pair: Pair) -> None:
    engine, _ = check_same_tokens(pair, TREES["2,2,1"], _requests)
    assert executor_of(engine).num_launched > 4


# ---------------------------------------------------------------------------------------------- ends


@BOTH
def test_the_ends_of_requests(pair: Pair, plain: list[list[int]]) -> None:
    """Stop tokens inside accepted paths, limits of tokens and of the context; nobody is told anything twice."""
    for stop in range(3, 9):
        params = [replace(one, stop_token_ids=[tokens[stop]]) for one, tokens in zip(PARAMS, plain, strict=True)]

        def requests(params: Sequence[SamplingParams] = params) -> list[Request]:
            return [
                make_request(str(i), p, q, seed=i, max_model_len=len(p) + 7 + i)
                for i, (p, q) in enumerate(zip(PROMPTS, params, strict=True))
            ]

        wanted = requests()
        tokens = plain_tokens(pair[0], wanted)
        _, found = check_same_tokens(pair, TREES["2,2,1"], requests, tokens)
        assert [r.finish_reason for r in found] == [r.finish_reason for r in wanted]
        assert [r.speculation.num_generated for r in found] == [len(t) for t in tokens]


@pytest.mark.parametrize("tree", ["off", "2,2,1", "best-first"])
def test_outputs_do_not_end_before_their_fewest_tokens(
    tree: str, pair: Pair, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends are held back inside paths, too, and only so long; requests with many are served when they may end."""
    params = [
        replace(one, stop_token_ids=tokens[2:9:3], min_tokens=fewest)
        for one, tokens, fewest in zip(PARAMS, plain, (5, 1, 8, 3, 6), strict=True)
    ]
    params[3] = replace(params[3], stop_token_ids=[*range(0, 96, 4)], min_tokens=7)
    joined, write = list[tuple[str, int]](), DeviceRows.write

    def written(self: DeviceRows, row: int, request: Request, *args: Any, **options: Any) -> None:
        joined.append((request.request_id, request.num_output))
        write(self, row, request, *args, **options)

    monkeypatch.setattr(DeviceRows, "write", written)
    _, found = check_same_tokens(pair, TREES[tree], requests_of(PROMPTS, params))
    assert [request.finish_reason for request in found].count(FinishReason.STOP) == 4
    assert dict(joined)["0"] < 5
    assert dict(joined)["2"] < 8
    assert all(num_output >= 7 for request_id, num_output in joined if request_id == "3"), "it has too many ends"


def test_at_the_end_of_the_context(model_folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    """Learned positions end where the model's do: nothing is looked up beyond them."""
    target, small = load_plain(model_folder("gpt2")), load_plain(model_folder("gpt2", 0, 0.05))
    prompts = random_prompts([240, 236], seed=1)

    def requests() -> list[Request]:
        params = SamplingParams(temperature=0.0, max_tokens=None)
        return [make_request(str(i), p, params, max_model_len=256) for i, p in enumerate(prompts)]

    _, served = check_same_tokens((target, small), TREES["2,2,1"], requests)
    assert [request.num_output for request in served] == [16, 20]
    assert "failed" not in caplog.text, "on a GPU no step would come after one that looks there"


def test_texts_with_stop_strings_next_to_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ["Once upon a time", "def main(", "# numbers\n", "The "]
    params = [
        SamplingParams(max_tokens=24, seed=1, n=2, stop=["e ", "s."]),
        SamplingParams(max_tokens=24, temperature=0.0, stop=["\n"]),
        SamplingParams(max_tokens=16, seed=2, structured_outputs={"regex": "[0-9]{3}( [0-9]{3}){2}"}),
        SamplingParams(max_tokens=24, temperature=0.0),
    ]
    pair = demo_folders()
    target, small = load_plain(pair.target), load_plain(pair.drafters["demo"])
    with LLM("demo", tree="off") as llm:
        monkeypatch.setattr(llm, "engine", make_device_engine(target, has_device_executor=False))
        wanted = llm.generate(prompts, params)
        engine = make_device_engine(target, small, TREES["best-first"])
        monkeypatch.setattr(llm, "engine", engine)
        found = llm.generate(prompts, params)
        for output, want in zip(found, wanted, strict=True):
            assert [one.token_ids for one in output.outputs] == [one.token_ids for one in want.outputs]
            assert [one.text for one in output.outputs] == [one.text for one in want.outputs]
            assert [one.finish_reason for one in output.outputs] == [one.finish_reason for one in want.outputs]
        assert executor_of(engine).num_launched > 5
        check_left(engine)
    assert "stop" in {one.finish_reason for output in wanted for one in output.outputs}


@ALL
def test_an_abort_at_any_moment(pair: Pair, plain: list[list[int]]) -> None:
    for steps, error in zip(range(0, 20, 4), [None, "told to"] * 3, strict=False):
        engine = make_device_engine(*pair, TREES["2,2,1"], max_num_seqs=4, max_num_batched_tokens=24)
        requests = _requests()
        for request in requests:
            engine.add(request)
        for _ in range(steps):
            engine.step()
        victim = requests[steps % len(requests)]
        was_finished, said = victim.is_finished, victim.output_ids
        engine.abort(victim, error)
        again = make_request(victim.request_id, PROMPTS[0], GREEDY)
        engine.add(again)  # under the same name, while steps of the first may be in flight
        while engine.has_work:
            engine.step()
        for request, tokens in zip(requests, plain, strict=True):
            assert request.output_ids == (tokens if request is not victim or was_finished else said)
        assert again.output_ids == plain[0]
        check_left(engine)


def test_when_all_are_aborted_nothing_is_in_flight(pair: Pair) -> None:
    engine = make_device_engine(*pair, TREES["2,2,1"])
    requests = _requests()
    for request in requests:
        engine.add(request)
    for _ in range(4):
        engine.step()
    assert executor_of(engine).num_in_flight
    for request in requests:
        engine.abort(request)
    check_left(engine)


# --------------------------------------------------------------------------------- waiting and overlap


def test_a_step_is_launched_before_the_one_before_is_read(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    launch, finish = DeviceRows.launch, DeviceExecutor.verify

    def launched(self: DeviceRows, *args: Any) -> None:
        log.append("launch")
        launch(self, *args)

    def finished(self: DeviceExecutor) -> StepResult:
        log.append("read")
        return finish(self)

    monkeypatch.setattr(DeviceRows, "launch", launched)
    monkeypatch.setattr(DeviceExecutor, "verify", finished)
    engine = make_device_engine(*pair, TREES["2,2,1"])
    engine.add(make_request("0", PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=30)))
    while engine.has_work:
        engine.step()
    # The drafter has read the prompt for the first step, and knows all from then on.
    assert log[:6] == ["launch", "launch", "read", "launch", "read", "launch"]
    assert log.count("launch") - log.count("read") in (0, 1), "one at most was launched for nobody"


@BOTH
def test_one_event_a_step_is_waited_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tensors are on a GPU, each of these would wait for it, or cannot be captured."""
    engine = make_device_engine(*pair, TREES["best-first"])
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=i % 2, max_tokens=80, logprobs=(None, 3)[i % 2])
        engine.add(make_request(str(i), prompt, params, seed=i))
    for _ in range(6):
        engine.step()
    waits: list[str] = []
    for name in ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__", "numpy"):
        original = getattr(torch.Tensor, name)

        def counted(self: Tensor, *args: Any, _name: str = name, _original: Any = original, **options: Any) -> Any:
            waits.append(_name)
            return _original(self, *args, **options)

        monkeypatch.setattr(torch.Tensor, name, counted)
    wait = Marks.wait

    def waited(self: Marks) -> None:
        waits.append("event")
        wait(self)

    monkeypatch.setattr(Marks, "wait", waited)
    before = executor_of(engine).num_launched
    for _ in range(2):
        engine.step()
    assert executor_of(engine).num_launched == before + 2
    assert waits == ["event", "event"]


class Watch(TorchDispatchMode):
    """Notes what would wait for a device, or bring numbers to it from the host: neither can be captured."""

    NAMES = frozenset({"_local_scalar_dense", "item", "nonzero", "_unique2", "masked_select", "equal", "lift_fresh"})

    def __init__(self) -> None:
        super().__init__()
        self.num_calls, self.found = 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.num_calls += 1
        if name in self.NAMES or (name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])):
            self.found.add(name)
        with self:  # in inference mode an operation that is made of others comes as a whole
            found = func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if found is NotImplemented else found


@pytest.mark.parametrize("pair", ["llama", "gemma2", "gpt2", "head"], indirect=True)
def test_programs_can_be_captured(pair: Pair) -> None:
    engine = make_device_engine(*pair, TREES["best-first"])
    for request in [*_requests(), make_request("5", PROMPTS[0], replace(PROCESSED[2], logprobs=2))]:
        engine.add(request)
    for _ in range(3):
        engine.step()
    watch = Watch()
    for ready in executor_of(engine)._device.sizes.found.values():
        ready.programs.inputs.clear()
        with torch.inference_mode(), watch:
            ready.programs.draft()
            ready.programs.verify()
    assert watch.num_calls > 500
    assert not watch.found
    engine._abandon()


# StepPrograms of a head have no kernels that the others have not, and the interpreter takes seconds.
@pytest.mark.parametrize(
    "pair", quick(["small model", "head", "block head"], "small model", "block head"), indirect=True
)
def test_kernels_take_what_programs_give_them(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's, in its interpreter: types, strides and what is padding are what they expect."""
    kernels = pytest.importorskip("triton.runtime.interpreter")
    params = [
        SamplingParams(temperature=0.0, max_tokens=5),
        SamplingParams(temperature=0.7, max_tokens=4, top_k=9, repetition_penalty=1.2),
    ]
    requests = requests_of([PROMPTS[0]] * 2, params)
    wanted = plain_tokens(pair[0], requests())
    engine = make_device_engine(*pair, TreeBudget.expansion((2, 1)))
    calls: list[str] = []
    run_interpreted = kernels.GridExecutor.__call__

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(self.fn.__name__)
        return run_interpreted(self, *args, **options)

    monkeypatch.setattr(kernels.GridExecutor, "__call__", counted)
    monkeypatch.setattr(registry, "back_end", registry.kernel)
    assert run(engine, requests()) == wanted
    assert executor_of(engine).num_launched >= 2
    of_draft = {"chunk_program", "candidates_program", "frontier_program", "tree_program"}
    if not any(kind.reads_paths for kind in executor_of(engine)._drafts.kinds):
        of_draft.add("kept_program")
    of_passes = {"attend_program", "store_program", "choose_program", "walk_program", "commit_program"}
    of_logits = {"adjust_program", "listing_program", "limits_program"}
    assert of_draft | of_passes | of_logits | {"ancestors_program"} <= set(calls)


@ALL
def test_programs_touch_nothing_when_no_request_is_there(pair: Pair) -> None:
    """So they may be captured while others are served: that runs them."""
    engine = make_device_engine(*pair, TREES["2,2,1"])
    for request in [*_requests(), make_request("5", PROMPTS[0], replace(GREEDY, logprobs=2))]:
        engine.add(request)
    for _ in range(5):
        engine.step()
    rows = executor_of(engine)._device
    everything = [getattr(rows.state, field.name) for field in fields(rows.state)]
    state = [value for value in everything if isinstance(value, Tensor)]
    state += rows.state.drafts[0].columns
    pools = [engine.target.tensors, rows._drafters[0].runner.tensors]
    kept = [tensor for pool in pools for tensor in (*pool.keys, *pool.values)]
    kept += [tensor[:-1] for pool in pools for tensor in pool.taps.values()]  # padding has the last row
    before = [tensor.clone() for tensor in (*state, *kept)]
    for ready in rows.sizes.found.values():
        ready.programs.inputs.clear()
        with torch.inference_mode():
            for part in ready.runs:
                part and part()
    for tensor, was in zip((*state, *kept), before, strict=True):
        assert torch.equal(tensor, was) or (tensor.isnan() == was.isnan()).all()
    while engine.has_work:
        engine.step()


# -------------------------------------------------------------------------------------------- faults


@BOTH
def test_steps_that_fail_cost_time_only(pair: Pair, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("draft", "verify"):
        original, calls = getattr(StepPrograms, place), []

        def failing(self: StepPrograms, original: Any = original, calls: list[int] = calls) -> None:
            calls.append(1)
            if len(calls) in (3, 7):
                raise RuntimeError("out of something")
            original(self)

        with monkeypatch.context() as patch:
            patch.setattr(StepPrograms, place, failing)
            engine, _ = check_same_tokens(pair, TREES["2,2,1"], _requests, plain)
        assert len(engine.executors) == 2
        assert len(calls) >= 7


def test_after_failures_in_a_row_all_steps_are_ordinary(
    pair: Pair, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(self: StepPrograms) -> None:
        raise RuntimeError("out of something")

    monkeypatch.setattr(StepPrograms, "verify", failing)
    engine, _ = check_same_tokens(pair, TREES["2,2,1"], _requests, plain)
    assert engine.executors == [engine.host]
    assert "no more steps are taken on the device" in caplog.text


def test_what_cannot_be_captured_is_tried_once(
    pair: Pair, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> Program:
        raise CaptureError("it waits for the device")

    monkeypatch.setattr(Graphs, "captured", refused)
    engine, _ = check_same_tokens(pair, TREES["2,2,1"], _requests, plain)
    assert engine.executors == [engine.host]


@pytest.mark.parametrize("most_rows", [1, 4, 0])
def test_steps_that_there_is_no_memory_to_capture_are_ordinary(
    most_rows: int, pair: Pair, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those of fewer requests are taken on the device all the same."""
    make, launched, failed = DeviceRows._made, list[int](), list[int]()

    def made(self: DeviceRows, size: LaunchSize) -> Any:
        if size.num_rows > most_rows:
            failed.append(size.num_rows)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make(self, size)

    monkeypatch.setattr(DeviceRows, "_made", made)
    launch = DeviceRows.launch

    def counted(self: DeviceRows, one: Launch) -> None:
        launch(self, one)
        launched.append(one.size.num_rows)

    monkeypatch.setattr(DeviceRows, "launch", counted)
    engine, _ = check_same_tokens(pair, TREES["best-first"], _requests, plain)
    assert len(failed) <= 3
    assert len(engine.executors) == 1 + bool(most_rows)
    assert max(launched, default=0) == most_rows


@BOTH
def test_an_interrupt_anywhere_leaves_nothing_behind(pair: Pair, plain: list[list[int]], monkeypatch: Any) -> None:
    for owner, name in (
        (StepPrograms, "draft"),
        (StepPrograms, "verify"),
        (DeviceExecutor, "verify"),
        (ServedRequests, "join"),
    ):
        for at in (1, 4):
            original, calls = getattr(owner, name), []

            def interrupted(self: Any, *args: Any, original: Any = original, calls: Any = calls, at: int = at) -> Any:
                calls.append(1)
                if len(calls) == at:
                    raise KeyboardInterrupt
                return original(self, *args)

            with monkeypatch.context() as patch:
                patch.setattr(owner, name, interrupted)
                engine = make_device_engine(*pair, TREES["2,2,1"])
                requests = _requests()
                with pytest.raises(KeyboardInterrupt):
                    run(engine, requests)
                assert not engine.scheduler.turns.in_flight
                while engine.has_work:
                    engine.step()
            assert [request.output_ids for request in requests] == plain
            check_left(engine)


@pytest.mark.parametrize("at", [2, 5])
def test_an_interrupt_between_requests_loses_no_output(
    at: int, pair: Pair, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a step that was read, some have their tokens and others not: these compute them again."""
    engine, requests, calls = make_device_engine(*pair, TREES["2,2,1"]), _requests(), list[int]()
    taken = DeviceExecutor.verify

    def finished(self: DeviceExecutor) -> StepResult:
        step = taken(self)
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return step

    monkeypatch.setattr(DeviceExecutor, "verify", finished)
    with pytest.raises(KeyboardInterrupt):
        run(engine, requests)
    while engine.has_work:
        engine.step()
    assert [request.output_ids for request in requests] == plain
    check_left(engine)


@pytest.mark.parametrize("when", [1, 4])
def test_nan_ends_only_the_request_it_belongs_to(
    when: int, pair: Pair, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host step finds out what is the matter."""
    engine = make_device_engine(*pair, TREES["2,2,1"])
    requests = _requests()
    victim, choose, calls = requests[1], tree_ops.choose, []

    def spoiled(logits: Tensor, seeds: Tensor, *rest: Any) -> Tensor:
        calls.append(1)
        if len(calls) >= when:
            logits = torch.where((seeds == victim.seed).unsqueeze(1), torch.nan, logits)
        return choose(logits, seeds, *rest)

    verified: list[str] = []
    verify = HostExecutor._verify

    def ordinary(self: HostExecutor, saying: Any, logits: Any) -> Any:
        verified.extend(span.request.request_id for span, _ in saying)
        return verify(self, saying, logits)

    monkeypatch.setattr(tree_ops, "choose", spoiled)
    monkeypatch.setattr(HostExecutor, "_verify", ordinary)
    assert run(engine, requests) == plain, "host steps compute numbers"
    assert verified.count(victim.request_id) > 2
    assert {verified.count(request.request_id) for request in requests if request is not victim} == {1}
    check_left(engine)


def test_requests_that_need_logits_get_host_steps(pair: Pair, plain: list[list[int]]) -> None:
    class Reader:
        reads_logits = True

        def __init__(self) -> None:
            self.rows = 0

        def on_tokens(
            self, request: Request, tree: TokenTree, acceptance: Any, logits: Tensor, num_generated: int
        ) -> None:
            assert logits.shape == (len(tree), VOCAB)
            self.rows += len(logits)

        def on_step(self, record: StepRecord) -> None:
            pass

    engine = make_device_engine(*pair, TREES["2,2,1"])
    requests, reader = _requests(), Reader()
    for request in requests:
        engine.add(request)
    for _ in range(3):
        engine.step()
    assert executor_of(engine).num_launched
    engine.observers.append(reader)
    before = executor_of(engine).num_launched
    while engine.has_work:
        engine.step()
    assert [request.output_ids for request in requests] == plain
    assert executor_of(engine).num_launched == before
    assert reader.rows > 0
    check_left(engine)


@ALL
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_caches_are_freed_with_the_engine_and_not_when_cycles_are_searched_for(
    pair: Pair, way: dict[str, bool]
) -> None:
    """On a GPU the next engine gets what is free when it is loaded."""
    engine = make_device_engine(*pair, TREES["2,2,1"], **way)
    run(engine, _requests())
    assert isinstance(engine.drafter, MergedDrafter)
    drafters = [one.runner for one in engine.drafter.drafters if isinstance(one, SmallModelDrafter)]
    kept = [weakref.ref(runner.tensors) for runner in (engine.target, *drafters) if isinstance(runner, ModelRunner)]
    assert len(kept) == 2
    gc.collect()
    gc.disable()
    try:
        del engine, drafters
        assert [ref() for ref in kept] == [None, None]
    finally:
        gc.enable()
