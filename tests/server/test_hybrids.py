"""Models with layers without attention, each family through the server, its page and `bench latency`."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from reference import greedy
from serving import serve, served_on_port
from specinfer import LLM
from specinfer.bench.latency import run_latency
from specinfer.bench.options import LatencyConfig
from specinfer.server.state import ServerState
from tests.server.browser import Browser
from tests.server.page_api import NEEDS_CHROMIUM, ask_tiny
from tiny import HYBRIDS, KINDS_OF_HYBRIDS, make_model, quick

Folders = Callable[..., Path]
PROMPT = [5, 17, 3, 60, 22, 9, 41]
# A quick run meets each kind of layer in one of both ways.
SERVED, MEASURED = (quick(HYBRIDS, *KINDS_OF_HYBRIDS[first::2]) for first in (0, 1))


def _loaded(family: str, model_folder: Folders) -> LLM:
    drafter = str(model_folder(family, noise=0.15, tokenizer=True))
    return LLM(model_folder(family, tokenizer=True), drafters=[drafter], tree="2,1", dtype="float32")


@pytest.mark.parametrize("family", SERVED)
def test_the_server_answers_with_the_tokens_of_transformers(family: str, model_folder: Folders) -> None:
    """Two requests at a time, the text of one streamed, and the page with them."""
    llm = _loaded(family, model_folder)
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True}

    async def ask(client: httpx.AsyncClient, state: ServerState) -> list[httpx.Response]:
        posts = [client.post("/v1/completions", json=body | more) for more in ({}, {"stream": True})]
        answers = await asyncio.gather(*posts)
        return [*answers, await client.get("/")]

    answer, stream, front = serve(llm, ask)
    wanted = llm.tokenizer.decode(greedy(make_model(family), PROMPT, 12), skip_special_tokens=True)
    assert answer.json()["choices"][0]["text"] == wanted
    assert stream.text.endswith("data: [DONE]\n\n")
    assert "<!doctype html>" in front.text.lower()


@pytest.mark.parametrize("family", MEASURED)
def test_bench_latency_measures_trees_that_change_no_token(family: str, model_folder: Folders) -> None:
    folders = [str(model_folder(family, noise=noise, tokenizer=True)) for noise in (0.0, 0.15)]
    report = run_latency(
        LatencyConfig(
            model=folders[0], drafters=(folders[1],), trees=("2,1",), device="cpu", prompts=(tuple(PROMPT),),
            max_tokens=12, repeats=2, dtype="float32",
        )
    )  # fmt: skip
    (arm,) = report.measured.result.trees
    assert [run.token_ids for run in arm.runs] == [run.token_ids for run in report.measured.result.plain.runs]
    assert report.measured.result.partings(arm) == []
    assert list(arm.runs[0].token_ids) == greedy(make_model(family), PROMPT, 12)


@NEEDS_CHROMIUM
@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRIDS)
def test_the_page_shows_an_answer(family: str, chromium: Browser, model_folder: Folders) -> None:
    with served_on_port(_loaded(family, model_folder)) as url:
        ask_tiny(chromium, url)
        assert chromium.complaints == []
