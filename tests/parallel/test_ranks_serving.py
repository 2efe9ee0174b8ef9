"""What one process does for its callers is done with ranks, too: they leave, are late, take turns for slots; drafters
learn.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serving import Caller, app_of, events_of, serve, slow_steps
from specinfer import LLM, QueueLimits, SamplingParams
from specinfer.learning.adapt.adaptation import Adaptation
from specinfer.learning.adapt.settings import AdaptationConfig
from specinfer.server.state import ServerState
from tiny import random_prompts, save_model, save_tokenizer
from worlds import SETTINGS, is_alive, sizes_of, tokens_of, workers

pytestmark = pytest.mark.distributed

_PATH = "/v1/completions"
_BODY = {"prompt": [5, 9, 2], "max_tokens": 60, "temperature": 0.8, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target, and a drafter that agrees with it partly."""
    root = tmp_path_factory.mktemp("pair")
    target = save_tokenizer(save_model(root / "target", "llama", num_hidden_layers=3))
    return str(target), str(save_tokenizer(save_model(root / "drafter", "llama", noise=0.4, num_hidden_layers=3)))


@pytest.fixture(scope="module")
def ranked(folders: tuple[str, str]) -> Iterator[LLM]:
    """Two stages: two passes are under way at a time."""
    with LLM(folders[0], **SETTINGS, pipeline_parallel_size=2) as llm:
        yield llm


def _said(llm: LLM, params: SamplingParams, count: int = 6) -> list[list[int]]:
    prompts = [{"prompt_token_ids": ids} for ids in random_prompts([40] * count)]
    return tokens_of(llm, prompts, params)


def _check_idle(llm: LLM) -> None:
    assert llm.failure is None
    assert all(map(is_alive, workers(llm)))
    assert not llm.engine.has_work
    assert llm.target.cache.is_balanced()
    assert llm.target.cache.num_owned == 0


def _text(answer: httpx.Response) -> str:
    return "".join(choice["text"] for event in events_of(answer.text) for choice in event["choices"])


def test_clients_that_leave_end_their_requests_and_no_other(ranked: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(monkeypatch)

    async def work(client: httpx.AsyncClient, state: ServerState) -> None:
        engine = state.engine
        body = _BODY | {"seed": 1, "stream": True}
        alone = _text(await client.post(_PATH, json=body))
        neighbour = asyncio.ensure_future(client.post(_PATH, json=body))
        app = app_of(engine)
        callers = [Caller(app, _PATH, _BODY | {"seed": seed, "stream": seed % 2 == 0}) for seed in range(2, 6)]
        while engine.num_running < 5:
            await asyncio.sleep(0.01)
        for caller in callers:
            await caller.leave()
        assert not neighbour.done()
        while engine.num_live > 1:
            assert not neighbour.done()
            await asyncio.sleep(0.01)
        assert _text(await neighbour) == alone

    serve(ranked, work)
    _check_idle(ranked)


def test_a_request_that_takes_too_long_ends_with_an_error(ranked: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = _said(ranked, SamplingParams(max_tokens=8, seed=3), 2)
    with monkeypatch.context() as patch:
        slow_steps(patch, 0.1)

        async def work(client: httpx.AsyncClient, state: ServerState) -> None:
            whole, stream = await asyncio.gather(
                client.post(_PATH, json=_BODY), client.post(_PATH, json=_BODY | {"stream": True})
            )
            assert (whole.status_code, whole.json()["error"]["code"]) == (504, "timeout")
            assert events_of(stream.text)[-1]["error"]["code"] == "timeout"

        serve(ranked, work, limits=QueueLimits(request_timeout=0.5))
    _check_idle(ranked)
    assert _said(ranked, SamplingParams(max_tokens=8, seed=3), 2) == wanted


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["tp2", "pp2"])
def test_requests_that_take_slots_from_each_other_generate_the_same_tokens(
    folders: tuple[str, str], sizes: tuple[int, int]
) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=3)
    settings = SETTINGS | {"drafters": [folders[1], "ngram"], "max_model_len": 96}
    with LLM(folders[0], **settings) as llm:
        expected = _said(llm, params)
        assert not llm.engine.metrics.num_preempted
    with LLM(folders[0], **settings, **sizes_of(sizes), kv_cache_memory_bytes=128_000) as llm:
        assert 96 < llm.target.cache.num_slots < 300 < 6 * 80
        assert _said(llm, params) == expected
        assert llm.engine.metrics.num_preempted
        _check_idle(llm)


def test_drafters_learn_while_ranks_serve(folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    quick = AdaptationConfig(
        learning_rate=3e-3, window=64, steps_between=16, eval_tokens=512, min_eval_tokens=64, max_tokens=20_000
    )

    def make(engine: Any, drafters: Any, folder: Any) -> Adaptation:
        return Adaptation(engine, drafters, folder, quick)

    monkeypatch.setattr("specinfer.llm.Adaptation", make)
    params = SamplingParams(max_tokens=40, temperature=0.0)
    settings = SETTINGS | {"drafters": [folders[1]], "tree": "2,1,1"}
    with LLM(folders[0], **settings, pipeline_parallel_size=2, adapt_drafters=True) as llm:
        before = _said(llm, params, 32)
        llm.adapt(120)
        assert llm.adaptation is not None
        (stats,) = llm.adaptation.stats.values()
        assert stats.num_swaps >= 1
        assert stats.hit_rate > stats.original_hit_rate
        assert _said(llm, params, 32) == before
        _check_idle(llm)
