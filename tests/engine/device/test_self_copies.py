"""Copies of the target that draft on the device: the tokens of plain decoding, and the trees of host steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from adapters import save_adapter
from on_device import (
    CPU,
    MIXED_PARAMS,
    WAYS,
    Pair,
    as_on_a_gpu,
    check_left,
    check_same_tokens,
    come_and_go,
    executor_of,
    in_each_way,
    load_plain,
    make_device_engine,
    plain_tokens,
    repeating_requests,
    run_on_device,
)
from specinfer.core.config import OffloadConfig
from specinfer.core.lora import LoRAConfig, LoRARequest
from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import TreeBudget
from specinfer.drafters import MergedDrafter, SelfDrafter, SelfRunner, sparse_context
from specinfer.model.adapters.registry import Adapters
from specinfer.model.graphs.capture import Graphs
from specinfer.model.load import load_model
from specinfer.model.runner import ModelRunner
from specinfer.model.self_copy import load_self
from specinfer.ops import QuantizedLinear
from specinfer.ops.cpu import low_rank
from specinfer.policy.base import FixedPolicy
from tests.engine.device.late_stream import LateStream, make_executor_late
from tiny import make_request, random_prompts, run

TREES = {
    "1,1,1": TreeBudget.expansion((1, 1, 1)),
    "3,2,1": TreeBudget.expansion((3, 2, 1)),
    "best-first": TreeBudget(max_nodes=12, max_depth=4),
    "deep": TreeBudget(max_nodes=9, max_depth=9),
}


def _with_copy(folder: Path, name: str = "self:int4", dtype: str = "float32") -> Pair:
    with pytest.MonkeyPatch.context() as patch, as_on_a_gpu(patch):
        target = load_model(folder, dtype, CPU)
        return target, load_self(name, target, OffloadConfig())


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def pair(request: pytest.FixtureRequest, model_folder: Callable[..., Path]) -> Pair:
    """A target whose layers are fused, or those of transformers with windows, and its copy in 4 bits."""
    return _with_copy(model_folder(request.param))


def _requests() -> list[Request]:
    return repeating_requests(MIXED_PARAMS)


@pytest.mark.covering(1)
@pytest.mark.parametrize("lookups", [(), ("suffix",)])
@pytest.mark.parametrize("tree", TREES)
def test_the_tokens_are_those_of_plain_decoding(tree: str, lookups: tuple[str, ...], pair: Pair) -> None:
    _, requests = check_same_tokens(pair, TREES[tree], _requests, all_on_device=True, lookups=lookups)
    accepted = sum(request.speculation.num_accepted_draft_tokens for request in requests)
    assert accepted > 0.5 * sum(request.num_output for request in requests)


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", ["coupled", "multi-step", "traversal"])
@pytest.mark.parametrize("tree", ["1,1,1", "3,2,1"])
def test_fixed_trees_are_those_of_host_steps(tree: str, rule: str, pair: Pair, trees: dict[str, list[Any]]) -> None:
    found = []
    for _, requests in in_each_way(pair, TREES[tree], _requests, verification=rule):
        found.append((dict(trees), [(one.output_ids, one.uniforms.state) for one in requests]))
        trees.clear()
    assert found[0] == found[1] == found[2]
    assert sum(map(len, found[0][0].values())) > 20


def test_a_copy_drafts_next_to_other_drafters(pair: Pair, model_folder: Callable[..., Path]) -> None:
    """One after the other: a weak small model, and copies that draft in the same slots of a step."""
    weak, other = load_plain(model_folder("llama", 0, 0.3)), _with_copy(pair[0].folder, "self:int8")[1]
    for drafters, copies in (([pair[1], weak], {"small"}), ([weak, pair[1], other], {"small-2", "small-3"})):
        _, requests = check_same_tokens(
            (pair[0], drafters), TREES["best-first"], _requests, all_on_device=True, lookups=["suffix"]
        )
        assert copies & {origin for request in requests for origin in request.origins}


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_slots", [90, 130, 200])
def test_few_slots_cost_drafts_and_no_tokens(num_slots: int, pair: Pair) -> None:
    """Drafts borrow more slots than their tree has nodes; requests wait, or are preempted, and all end."""
    check_same_tokens(pair, TREES["best-first"], _requests, num_slots=num_slots)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("num_slots", "most"), [(240, 18), (300, 16), (3000, 15)])
def test_with_few_slots_smaller_trees_are_drafted(num_slots: int, most: int, pair: Pair) -> None:
    """Not none at all: host steps, whose trees borrow no slots for levels that they do not compute, take 11."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    engine = make_device_engine(*pair, TreeBudget(16, 12), num_slots=num_slots, max_num_seqs=4)
    requests = [make_request(str(i), prompt, params) for i, prompt in enumerate(random_prompts([8] * 4))]
    assert run_on_device(engine, requests) == set(requests)
    assert executor_of(engine).num_launched <= most


def test_a_copy_reads_no_prompt(pair: Pair) -> None:
    """Otherwise the time of its first draft counted as that of reading the prompt."""

    class Noted(FixedPolicy):
        num_read = 0

        def observe(self, step: StepRecord, outcomes: Any) -> None:
            self.num_read += step.num_read

    found = []
    for drafter in (pair[1], pair[0]):
        policy = Noted(TREES["best-first"])
        run(make_device_engine(pair[0], drafter, policy), _requests())
        found.append(policy.num_read)
    assert found[0] == 0 < found[1]


@pytest.mark.covering(1)
@pytest.mark.parametrize("moment", [3, 5, 8])
def test_aborts_and_failures_leave_no_borrowed_slots(moment: int, pair: Pair) -> None:
    wanted = plain_tokens(pair[0], _requests())
    engine, requests = make_device_engine(*pair, TREES["3,2,1"]), _requests()
    for request in requests:
        engine.add(request)
    for _ in range(moment):
        engine.step()
    assert executor_of(engine).num_in_flight > 0
    engine.abort(requests[1])
    executor_of(engine).abandon()
    while engine.has_work:
        engine.step()
    assert [one.output_ids for i, one in enumerate(requests) if i != 1] == [*wanted[:1], *wanted[2:]]
    check_left(engine)


@pytest.mark.covering(1)
@pytest.mark.parametrize("tree", ["3,2,1", "best-first"])
@pytest.mark.parametrize("stagger", [1, 3])
def test_steps_in_flight_use_no_memory_of_one_another(
    tree: str, stagger: int, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = come_and_go(make_device_engine(pair[0], has_device_executor=False), 3)
    stream = LateStream()
    make_executor_late(stream, monkeypatch)
    engine = make_device_engine(*pair, TREES[tree], keeps_prefixes=True)
    assert come_and_go(engine, stagger) == plain
    assert executor_of(engine).num_launched >= 10
    assert stream.longest >= 6, "two steps were never in flight"
    assert stream.num_waits <= executor_of(engine).num_launched, "a step waits for the device once"


def test_a_copy_drafts_with_the_adapter_of_the_request(
    tmp_path: Path, model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in host steps: the same tokens of it are accepted, and more than without."""
    monkeypatch.setattr(low_rank, "packs", lambda _: False)
    target, _ = _with_copy(model_folder("llama"))
    adapters = Adapters(target, LoRAConfig(1, 8, 4), "base")
    adapter = adapters.find(LoRARequest("a", 1, str(save_adapter(tmp_path, target.folder, 3, r=8, lora_alpha=64))))
    slots, found = adapters._sites.adapter_slots(adapters.config), []
    for way, takes_adapters in (*((way, True) for way in WAYS), (WAYS[-1], False)):
        _, copy = _with_copy(target.folder, "self:int8")
        engine = make_device_engine(target, copy, TREES["1,1,1"], **way, takes_adapters=takes_adapters)
        assert isinstance(engine.drafter, MergedDrafter)
        (drafter,) = [one for one in engine.drafter.drafters if isinstance(one, SelfDrafter)]
        for runner in (engine.target, *([drafter.runner] if takes_adapters else [])):
            assert isinstance(runner, ModelRunner)
            if runner.padded is not None:
                runner.padded.adapter_slots = slots
        requests = [
            make_request(str(i), prompt, MIXED_PARAMS[0], adapter=own, cache_salt="" if own is None else own.salt)
            for i, (prompt, own) in enumerate(zip(random_prompts([9, 4, 12]), (adapter, None, adapter), strict=True))
        ]
        if way["has_device_executor"]:
            assert run_on_device(engine, requests) == set(requests)
        else:
            run(engine, requests)
        found.append([(one.output_ids, one.speculation.as_dict()) for one in requests])
    assert found[0] == found[1] == found[2]
    (_, accepted), (_, without) = found[2][0], found[3][0]
    assert [tokens for tokens, _ in found[2]] == [tokens for tokens, _ in found[3]]
    assert accepted["num_accepted_draft_tokens"] > without["num_accepted_draft_tokens"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", ["coupled", "traversal"])
@pytest.mark.parametrize("name", ["self:sparse", "self:int4-sparse"])
@pytest.mark.parametrize("tree", ["1,1,1", "3,2,1"])
def test_drafts_over_a_part_of_the_context_are_those_of_host_steps(
    tree: str,
    name: str,
    rule: str,
    model_folder: Callable[..., Path],
    trees: dict[str, list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The part changes with every token; prompts are shorter and longer than it."""
    target, copy = _with_copy(model_folder("llama"), name)
    found, drafts = [], []
    for is_small, way in ((False, WAYS[-1]), *((True, way) for way in WAYS)):
        if is_small:
            monkeypatch.setattr(sparse_context, "_LEAST", 12)
            monkeypatch.setattr(sparse_context, "_PAGE", 1)
        engine = make_device_engine(target, copy, TREES[tree], verification=rule, **way, is_sparse=True)
        requests = _requests()
        if way["has_device_executor"]:
            assert run_on_device(engine, requests) == set(requests)
        else:
            run(engine, requests)
        found.append([(one.output_ids, one.uniforms.state) for one in requests])
        drafts.append(dict(trees))
        trees.clear()
        check_left(engine)
    assert found[1] == found[2] == found[3]
    assert drafts[1] == drafts[2] == drafts[3] != drafts[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_passes_of_copies_in_host_steps_are_captured(dtype: str, model_folder: Callable[..., Path]) -> None:
    """They have no cache of their own whose sizes a check could take; in half precision it computes in another one."""
    target, copy = _with_copy(model_folder("llama"), dtype=dtype)
    runner = ModelRunner(target, 200, graphs=Graphs(CPU))
    assert SelfRunner(copy, runner).why_not_captured is None
    assert SelfRunner(copy, runner, is_sparse=True).why_not_captured is None
    assert SelfRunner(copy, ModelRunner(target, 200)).why_not_captured == "capturing is off"


@pytest.mark.parametrize("family", ["gemma3_text", "mistral"])
def test_passes_that_leave_out_tokens_are_not_captured_where_layers_have_windows(
    family: str, model_folder: Callable[..., Path]
) -> None:
    """Windows need true positions, which captured passes take from the order of the tokens."""
    target, copy = _with_copy(model_folder(family))
    sparse = SelfRunner(copy, ModelRunner(target, 200, graphs=Graphs(CPU)), is_sparse=True)
    assert sparse.padded is None
    assert sparse.why_not_captured == "they leave out tokens, and layers have windows or are not fused"


def test_a_copy_looks_tokens_up_in_the_tables_of_its_target(pair: Pair) -> None:
    target, copy = pair
    tables = [[one for one in model.model.modules() if isinstance(one, nn.Embedding)] for model in pair]
    assert tables[0] == tables[1] != []
    own = sum(one.num_bytes for one in copy.model.modules() if isinstance(one, QuantizedLinear))
    assert own <= copy.num_bytes < target.num_bytes - tables[0][0].weight.nbytes
