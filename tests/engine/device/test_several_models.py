"""Several drafters that are models in one step on the device: the same tokens, and the trees of host steps."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from interpreter import interpreted
from on_device import (
    check_same_tokens,
    in_each_way,
    load_plain,
    make_device_engine,
    repeating_requests,
)
from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TreeBudget
from specinfer.drafters import MergedDrafter
from specinfer.model.load import LoadedModel
from specinfer.ops import tree_ops
from specinfer.ops.triton import draft
from specinfer.ops.triton.walk import walk
from tiny import run

Models = tuple[LoadedModel, list[LoadedModel]]
TREES = {
    "2,1,1": TreeBudget.expansion((2, 1, 1), num_drafters=4),
    "best-first": TreeBudget(max_nodes=12, max_depth=4),
}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=30),
    SamplingParams(max_tokens=24),
    SamplingParams(temperature=0.5, top_k=3, max_tokens=20),
    SamplingParams(temperature=0.0, max_tokens=25, repetition_penalty=1.2),
]


@pytest.fixture(scope="module")
def models(model_folder: Callable[..., Path]) -> Models:
    """A target and three drafters: a weak one, another model altogether, and a better one."""
    near = [load_plain(model_folder("llama", 0, noise)) for noise in (0.3, 0.05)]
    return load_plain(model_folder("llama")), [near[0], load_plain(model_folder("llama", 7)), near[1]]


def _requests() -> list[Request]:
    return repeating_requests(PARAMS)


@pytest.mark.covering(1)
@pytest.mark.parametrize("lookups", [(), ("suffix",)])
@pytest.mark.parametrize("tree", TREES)
def test_the_tokens_are_those_of_plain_decoding(tree: str, lookups: tuple[str, ...], models: Models) -> None:
    check_same_tokens(models, TREES[tree], _requests, all_on_device=True, lookups=lookups)


@pytest.mark.parametrize("lookups", [pytest.param((), marks=pytest.mark.slow), ("suffix",)])
def test_fixed_trees_are_those_of_host_steps(lookups: tuple[str, ...], models: Models) -> None:
    """Merged node for node, so the same path is kept in each step, and what is learned of each drafter is the same."""
    counts, tables = [], []
    for engine, requests in in_each_way(models, TREES["2,1,1"], _requests, lookups=lookups):
        counts.append([request.speculation.as_dict() for request in requests])
        accepted = {origin for request in requests for origin in request.origins}
        assert isinstance(engine.drafter, MergedDrafter)
        names = [one.name for one in engine.drafter.drafters]
        tables.append([engine.drafter.calibration.by_rank(name).tolist() for name in names])
    assert counts[0] == counts[1] == counts[2]
    assert tables[1:] == [[pytest.approx(of, rel=1e-5) for of in tables[0]]] * 2
    assert {"small", "small-3", *lookups} <= accepted


@interpreted
def test_the_kernels_merge_as_their_counterparts(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter merges the trees, and finds what each model has computed of the accepted paths."""
    counts = []
    for has_kernels in (False, True):
        if has_kernels:
            for name in ("merge_guesses", "best_tree", "mark_ancestors", "keep_drafted"):
                monkeypatch.setattr(tree_ops, name, getattr(draft, name))
            monkeypatch.setattr(tree_ops, "walk", walk)
        request = _requests()[0]
        request.params = replace(request.params, max_tokens=12)
        engine = make_device_engine(*models, TREES["2,1,1"], lookups=["suffix"])
        run(engine, [request])
        counts.append((request.output_ids, request.speculation.as_dict(), request.origins))
    assert counts[0] == counts[1]
