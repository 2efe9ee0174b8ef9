"""Engines that take steps as on a device, on the CPU: the same programs, which run as they are written."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from specinfer.core import rules
from specinfer.core.request import Request
from specinfer.core.rules import AUTO, RULES, Rule
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters import HeadRunner, MergedDrafter, SelfRunner, SmallModelDrafter, make_drafter
from specinfer.drafters.assistant_drafter import AssistantRunner
from specinfer.drafters.feature_drafter import NextTokens
from specinfer.engine.device.draft_programs import use_draft_programs
from specinfer.engine.device.executor import DeviceExecutor
from specinfer.engine.engine import Engine
from specinfer.engine.scheduler import Scheduler
from specinfer.model import load, load_config
from specinfer.model.graphs.capture import Graphs
from specinfer.model.heads import load as heads_load
from specinfer.model.heads.assistant import AssistantHead
from specinfer.model.heads.head import FeatureHead
from specinfer.model.heads.load import load_head, taps_of
from specinfer.model.layers.device import can_fuse_on_device
from specinfer.model.load import LoadedModel, load_model
from specinfer.model.runner import ModelRunner
from specinfer.policy.base import FixedPolicy, SpeculationPolicy
from specinfer.verify import Acceptance, Probs, RandomSource
from tiny import make_request, random_prompts, run

CPU = torch.device("cpu")
Pair = tuple[LoadedModel, LoadedModel]  # a target and a drafter
# Host steps whose trees grow level by level, such with a program for all levels, and steps on the device.
WAYS: tuple[dict[str, bool], ...] = (
    {"has_device_executor": False},
    {"has_device_executor": False, "has_draft_programs": True},
    {"has_device_executor": True},
)
# Greedy and sampled requests, one of them truncated, one with a penalty.
MIXED_PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=30),
    SamplingParams(max_tokens=24),
    SamplingParams(temperature=0.6, top_k=9, max_tokens=20),
    SamplingParams(temperature=0.0, max_tokens=25, repetition_penalty=1.2),
)


def load_plain(folder: Path) -> LoadedModel:
    """Without native code, whose passes have no fixed shapes."""
    return load_model(folder, torch.float32, CPU, native=False)


@contextmanager
def as_on_a_gpu(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models are loaded on the CPU by the path of GPUs, with the plain twins of their kernels."""
    with patch.context() as patched:
        patched.setattr(load_config, "can_fuse", lambda _: False)
        patched.setattr(load, "pack_linears", lambda _: 0)
        patched.setattr(load, "can_fuse_on_device", lambda model, _: can_fuse_on_device(model, torch.device("cuda")))
        right = load.quantize_linears
        patched.setattr(load, "quantize_linears", lambda *args, **_: right(*args, native=False))
        yield


def load_device_head(folder: Path, target: LoadedModel) -> LoadedModel:
    """A head whose layers are those of GPUs, with the plain twins of their kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads_load, "pack_linears", lambda _: 0)
        loaded = load_head(folder, target)
    assert isinstance(loaded.model, FeatureHead)
    loaded.model.fuse_on_device(loaded.max_position)
    assert loaded.model.on_device is not None
    return loaded


def make_device_engine(
    target: LoadedModel,
    small: LoadedModel | Sequence[LoadedModel] | None = None,
    tree: TreeBudget | SpeculationPolicy | None = None,
    *,
    num_slots: int = 1200,
    num_draft_slots: int | None = None,
    keeps_prefixes: bool = False,
    max_num_seqs: int = 32,
    max_num_batched_tokens: int = 512,
    has_device_executor: bool = True,
    lookups: Sequence[str] = (),
    verification: str = "coupled",
    max_loras: int = 1,
    takes_adapters: bool = False,
    is_sparse: bool = False,
    num_states: int | None = None,
    has_draft_programs: bool = False,
) -> Engine:
    """An engine with a device executor, or one without it that is alike in all else.

    Args:
        has_draft_programs: Whether a program grows all trees of a host step.
        small: Drafters. Those that store no keys and values are copies of the target.
        takes_adapters: Whether copies draft with the adapters of requests.
        is_sparse: Whether copies attend to a part of the context.
        num_states: Number of states of recurrent layers, or None for as many as requests need.
    """
    graphs = Graphs(CPU) if has_device_executor or has_draft_programs else None
    several = [] if small is None else [small] if isinstance(small, LoadedModel) else small
    target = replace(target, taps=taps_of(target, several))
    runner = ModelRunner(target, num_slots, keeps_prefixes=keeps_prefixes, graphs=graphs, num_states=num_states)
    drafter: MergedDrafter | None = None
    if several or lookups:
        num_draft_slots = num_draft_slots or num_slots
        runners = [
            AssistantRunner(one, runner, graphs=graphs)
            if isinstance(one.model, AssistantHead)
            else HeadRunner(one, runner, num_draft_slots, keeps_prefixes=keeps_prefixes, graphs=graphs)
            if isinstance(one.model, FeatureHead)
            else ModelRunner(one, num_draft_slots, keeps_prefixes=keeps_prefixes, graphs=graphs)
            if one.layer_shapes
            else SelfRunner(one, runner, takes_adapters=takes_adapters, is_sparse=is_sparse)
            for one in several
        ]
        vocabularies = [
            NextTokens(target.vocab_size, target.vocab_size, one.token_map)
            if isinstance(one.model, FeatureHead) and one.model.reads_pairs
            else None
            for one in several
        ]
        names = ["small", *(f"small-{i}" for i in range(2, 1 + len(several)))]
        draft_sampling = AUTO if verification == AUTO else RULES[verification].draft_samplings[0]
        drafter = make_drafter(
            [*runners, *lookups], target.vocab_size, [*names, *lookups], draft_sampling,
            [*vocabularies, *[None for _ in lookups]],
        )  # fmt: skip
        if graphs is not None and has_draft_programs:
            graphs.captures = True
            use_draft_programs(drafter, target.vocab_size)
            graphs.captures = False
    policy = FixedPolicy(tree) if isinstance(tree, TreeBudget) else tree or FixedPolicy()
    scheduler = Scheduler(runner.cache, max_num_seqs, max_num_batched_tokens, max_loras=max_loras)
    executor = DeviceExecutor.from_drafter(runner, drafter, scheduler, verification) if has_device_executor else None
    assert (executor is not None) == has_device_executor
    return Engine(runner, drafter, policy, scheduler, verification, executor)


def plain_tokens(target: LoadedModel, requests: Sequence[Request]) -> list[list[int]]:
    """Return the tokens of plain decoding in host steps."""
    return run(make_device_engine(target, has_device_executor=False), requests)


def check_same_tokens(
    pair: tuple[LoadedModel, LoadedModel | Sequence[LoadedModel]],
    tree: TreeBudget | SpeculationPolicy | None,
    requests: Callable[[], list[Request]],
    plain: list[list[int]] | None = None,
    *,
    all_on_device: bool = False,
    **settings: Any,
) -> tuple[Engine, list[Request]]:
    """Check that requests have the tokens of plain decoding, and leave nothing; return them and their engine.

    Args:
        tree: The trees, or None to take steps without the drafter.
        requests: Function that makes the requests.
        plain: Their tokens in plain decoding, if they are known.
        all_on_device: Whether all of them must take steps on the device.
        settings: Further arguments of `make_device_engine`.
    """
    plain = plain_tokens(pair[0], requests()) if plain is None else plain
    engine = make_device_engine(pair[0], None if tree is None else pair[1], tree, **settings)
    served = requests()
    if all_on_device:
        assert run_on_device(engine, served) == set(served)
    else:
        run(engine, served)
    assert [request.output_ids for request in served] == plain
    check_left(engine)
    return engine, served


def in_each_way(
    pair: tuple[LoadedModel, LoadedModel | Sequence[LoadedModel]],
    tree: TreeBudget | SpeculationPolicy,
    requests: Callable[[], list[Request]],
    ways: Sequence[dict[str, bool]] = WAYS,
    **settings: Any,
) -> Iterator[tuple[Engine, list[Request]]]:
    """Serve the same requests in each way to take steps; yield the engine and the requests of each.

    All must take steps on the device where these are taken, and nothing is left.
    """
    for way in ways:
        engine, served = make_device_engine(*pair, tree, **settings, **way), requests()
        if way["has_device_executor"]:
            assert run_on_device(engine, served) == set(served)
        else:
            run(engine, served)
        check_left(engine)
        yield engine, served


def repeating_requests(params: Sequence[SamplingParams], lengths: Sequence[int] = (6, 9, 5, 7)) -> list[Request]:
    """Return requests whose prompts repeat themselves; greedy outputs of small models do too."""
    starts = random_prompts(list(lengths), seed=8)
    requests = [make_request(str(i), s * 3, p, seed=i) for i, (s, p) in enumerate(zip(starts, params, strict=True))]
    for request in requests:
        request.prediction_ids = tuple(request.params.prediction or ())
    return requests


def add_rejecting_rule(patch: pytest.MonkeyPatch) -> list[int]:
    """Add the rule "reject-all", which accepts nothing and has no walk; return the sizes of the trees that it gets."""
    calls = list[int]()

    def reject_all(tree: TokenTree, probs_at: Callable[[int], Probs | None], source: RandomSource) -> Acceptance:
        calls.append(tree.num_guessed)
        probs = probs_at(0)
        assert probs is not None
        return Acceptance((), source.sample(probs))

    module = ModuleType("specinfer_rejecting")
    module.reject_all = reject_all  # type: ignore[attr-defined]
    patch.setitem(sys.modules, module.__name__, module)
    rules._imported.cache_clear()
    patch.setitem(RULES, "reject-all", Rule(("without-replacement",), "specinfer_rejecting:reject_all"))
    return calls


def executor_of(engine: Engine) -> DeviceExecutor:
    executor: Any = engine.executors[0]
    assert isinstance(executor, DeviceExecutor)
    return executor


def check_left(engine: Engine) -> None:
    """Nothing is in flight and nothing is held any more, by the target or its drafter."""
    assert not engine.has_work
    assert not engine.scheduler.turns.in_flight
    caches = [engine.target.cache]
    if engine.drafter is not None:
        caches += [one.runner.cache for one in engine.drafter.drafters if isinstance(one, SmallModelDrafter)]
    for cache in caches:
        assert cache.is_balanced()
        assert cache.num_owned == 0
    assert not engine.target.tensors.states._lent  # type: ignore[attr-defined]


def run_on_device(engine: Engine, requests: Sequence[Request]) -> set[Request]:
    """Run the requests to their ends, and return those that took steps on the device."""
    for request in requests:
        engine.add(request)
    served = set[Request]()
    while engine.has_work:
        engine.step()
        served |= set(executor_of(engine).requests)
    return served


def come_and_go(engine: Engine, stagger: int) -> list[list[int]]:
    """Serve seven requests, of which three begin at once and the others some steps later.

    Returns:
        Their tokens and, for those that ask for log-probabilities, also the most probable ones at each place.
    """
    lengths = np.random.default_rng(1).integers(5, 28, 7).tolist()
    waiting: list[Request] = []
    for i, (prompt, length) in enumerate(zip(random_prompts([3, 26, 12, 40, 7, 31, 18], seed=1), lengths, strict=True)):
        asked = (None, None, 3)[i % 3]
        params = SamplingParams(temperature=(0.0, 0.8)[i % 2], max_tokens=length, ignore_eos=True, logprobs=asked)
        waiting.append(make_request(str(i), prompt, params, seed=i))
    requests = list(waiting)
    for _ in range(3):
        engine.add(waiting.pop(0))
    for step in range(1, 400):
        if waiting and (step % stagger == 0 or not engine.has_work):
            engine.add(waiting.pop(0))
        if not (engine.has_work or waiting):
            break
        engine.step()
    return [[*request.output_ids, *(i for known in request.logprobs for i in known)] for request in requests]
