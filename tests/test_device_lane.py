"""Steps on the device: the same tokens as plain decoding, whatever comes and goes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from laned import lane_of, load_plain, make_lane_engine
from specinfer import SamplingParams
from specinfer.model.load import LoadedModel
from specinfer.request import Request
from specinfer.tree import TreeBudget
from tiny import make_engine, make_request, random_prompts, resized, run

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


def _requests() -> list[Request]:
    return [make_request(str(i), p, q, seed=i) for i, (p, q) in enumerate(zip(PROMPTS, PARAMS, strict=True))]


@pytest.fixture(scope="module")
def pair(model_folder: Folder) -> tuple[LoadedModel, LoadedModel]:
    return load_plain(model_folder("llama")), load_plain(model_folder("llama", 0, 0.05))


@pytest.fixture(scope="module")
def plain(pair: tuple[LoadedModel, LoadedModel]) -> list[list[int]]:
    return run(make_lane_engine(pair[0], has_lane=False), _requests())


@pytest.mark.parametrize("tree", TREES)
def test_the_same_tokens(tree: str, pair: tuple[LoadedModel, LoadedModel], plain: list[list[int]]) -> None:
    engine = make_lane_engine(pair[0], pair[1] if TREES[tree] else None, TREES[tree])
    requests = _requests()
    assert run(engine, requests) == plain
    assert not engine.has_work
    assert engine.target.cache.num_held == 0
    if TREES[tree]:
        assert sum(request.speculation.num_accepted_draft_tokens for request in requests) > 20
