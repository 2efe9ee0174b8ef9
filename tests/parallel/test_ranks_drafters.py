"""Drafters spread over processes: the same text and the same trees as with all of them on the engine's rank."""

import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from specinfer import LLM, EngineDeadError, SamplingParams
from specinfer.core.config import SpeculativeConfig
from specinfer.core.request import Span
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters import RemoteDrafter, SmallModelDrafter, loading
from specinfer.model.graphs.capture import Graphs
from specinfer.model.load import load_model
from specinfer.model.runner import ModelRunner
from specinfer.setup import assembly
from tiny import as_values, random_prompts, save_model, save_tokenizer
from worlds import SETTINGS, await_that, is_alive, sizes_of, tokens_of, workers

pytestmark = pytest.mark.distributed

_PROMPTS = [{"prompt_token_ids": ids} for ids in random_prompts([3, 50, 17, 1])]
_PARAMS = [
    SamplingParams(max_tokens=16, temperature=0.0),
    SamplingParams(max_tokens=16, temperature=0.8, seed=5, n=2, logit_bias={7: 1.5}),
    SamplingParams(max_tokens=16, temperature=0.9, seed=7, tree="2,2,1"),
    SamplingParams(max_tokens=16, temperature=0.9, seed=8, structured_outputs={"regex": "[a-e ]{4,20}"}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("models")
    target = save_tokenizer(save_model(place / "target", "llama", num_hidden_layers=3))
    small = [save_model(place / f"small-{i}", "llama", noise=0.1 * i, num_hidden_layers=1) for i in (1, 2, 3)]
    return {"model": str(target), "drafters": [*map(str, small), "ngram"]}


def _load(models: dict[str, Any], **settings: Any) -> LLM:
    return LLM(**(SETTINGS | models | settings))


def _say(llm: LLM) -> tuple[list[list[int]], list[Any]]:
    """The generated tokens, and all trees in the order in which they were drafted."""
    assert llm.drafter is not None
    drawn: list[Any] = []
    draft = llm.drafter.draft

    def noted(spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        found = draft(spans, budgets)
        drawn.extend(map(as_values, found))
        return found

    llm.drafter.draft = noted  # type: ignore[method-assign]
    try:
        return tokens_of(llm, _PROMPTS, _PARAMS), drawn
    finally:
        llm.drafter.draft = draft  # type: ignore[method-assign]


def test_on_the_first_rank_their_passes_are_captured_and_the_text_is_the_same(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, padded as for captures."""
    monkeypatch.setattr(loading, "load_model", partial(load_model, native=False))
    texts, settings = [], {"tensor_parallel_size": 2, "tree": "2,1,1", "drafters": models["drafters"][:1]}
    for graphs in (None, Graphs(torch.device("cpu"))):
        monkeypatch.setattr(assembly, "make_graphs", lambda *_, graphs=graphs, **__: graphs)
        with _load(models | settings) as llm:
            assert llm.drafter is not None
            small = llm.drafter.drafters[-1]
            assert isinstance(small, SmallModelDrafter)
            assert (small.runner.padded is not None) == (graphs is not None)
            assert not isinstance(llm.engine.target, ModelRunner)
            texts.append(_say(llm)[0])
    assert texts[0] == texts[1]


def _remote(llm: LLM) -> list[str]:
    assert llm.drafter is not None
    return [drafter.name for drafter in llm.drafter.drafters if isinstance(drafter, RemoteDrafter)]


@pytest.mark.parametrize(
    ("sizes", "remote"),
    [((2, 1), ["small-2"]), ((1, 2), ["small-2"]), ((2, 2), ["small-2", "small-3"])],
    ids=["tp2", "pp2", "tp2-pp2"],
)
def test_spread_over_processes_they_guess_what_they_would_have(
    sizes: tuple[int, int], remote: list[str], models: dict[str, Any]
) -> None:
    settings = sizes_of(sizes)
    with _load(models, **settings, drafter_placement="first") as llm:
        assert not _remote(llm)
        expected = [_say(llm), _say(llm)]
        llm.speculate(SpeculativeConfig(tree="2,1,1", verification="multi-step"))
        expected.append(_say(llm))
    with _load(models, **settings, drafter_placement="spread") as llm:
        assert _remote(llm) == remote
        assert [_say(llm), _say(llm)] == expected[:2]
        with pytest.raises(ValueError, match=r"select: .*drafter_placement"):
            llm.speculate(SpeculativeConfig(tree="2,1,1", select="hedge"))
        llm.speculate(SpeculativeConfig(tree="2,1,1", verification="multi-step"))
        assert _say(llm) == expected[2]
        ids = workers(llm)
    assert not any(map(is_alive, ids))


def test_another_rank_drafts_while_this_one_does(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trees are there before this rank has begun its own."""
    with _load(models, tensor_parallel_size=2, drafter_placement="spread") as llm:
        expected = _say(llm)[0]
        ranks = llm._parts.ranks
        assert ranks is not None
        messages: list[Future[Any]] = []
        await_message, draft = ranks.await_message, SmallModelDrafter.draft

        def noted(rank: int) -> Any:
            messages.append(await_message(rank))
            return messages[-1]

        def late(*args: Any) -> list[TokenTree]:
            assert not wait(messages, 30).not_done
            return draft(*args)

        monkeypatch.setattr(ranks, "await_message", noted)
        monkeypatch.setattr(SmallModelDrafter, "draft", late)
        assert _say(llm)[0] == expected
        assert len(messages) > 5


def test_a_rank_that_dies_while_it_drafts_ends_the_requests(models: dict[str, Any]) -> None:
    llm = _load(models, tensor_parallel_size=2, drafter_placement="spread")
    (drafter,) = (one for one in llm.drafter.drafters if isinstance(one, RemoteDrafter))  # type: ignore[union-attr]
    ids, link, started, count = workers(llm), drafter._model.link, [0.0], 0
    ask = link.request

    def asked(message: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            os.kill(ids[0], signal.SIGSTOP)
            started[0] = time.monotonic()
        return ask(message)

    link.request = asked  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError, match="rank 1"):
        _say(llm)
    assert time.monotonic() - started[0] < 6
    cache = llm.target.cache
    llm.shutdown()
    await_that(lambda: not any(map(is_alive, ids)), 6)
    assert cache.is_balanced()


def test_a_drafter_that_another_rank_cannot_load_is_named(models: dict[str, Any], tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", "llama", num_hidden_layers=1, vocab_size=8)
    (other / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes()[:-4] + b"\xff\xff\xff\x7f")
    with pytest.raises((EngineDeadError, ValueError), match="drafters"):
        _load(
            models | {"drafters": [models["drafters"][0], str(other)]},
            tensor_parallel_size=2,
            drafter_placement="spread",
        )
