"""What those who run a server ask it."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

import specinfer
from serving import Server, error_of, serve, served_on_port
from specinfer.llm import LLM
from specinfer.server.state import ServerState


@pytest.fixture(scope="module")
def llm(model_folder: Callable[..., Path]) -> LLM:
    return LLM(model_folder(tokenizer=True), tree="off")


def test_the_model_is_listed_under_all_its_names(llm: LLM) -> None:
    with Server(llm, names=("tiny", "Some/Model-1B")) as server:
        answer = server.get("/v1/models").json()
        assert answer["object"] == "list"
        assert [model["id"] for model in answer["data"]] == ["tiny", "Some/Model-1B"]
        for model in answer["data"]:
            assert model["max_model_len"] == llm.max_model_len
            assert server.get(f"/v1/models/{model['id']}").json() == model
        missing = server.get("/v1/models/gpt-4")
        assert missing.status_code == 404
        assert error_of(missing)["code"] == "model_not_found"


def test_the_sdk_reads_the_list(llm: LLM) -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        async with AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="unused", http_client=client) as sdk:
            (model,) = [model async for model in sdk.models.list()]
            assert model.id == "tiny"
            assert model.created == int(state.started)
            assert (await sdk.models.retrieve("tiny")).id == "tiny"

    serve(llm, body)


@pytest.mark.parametrize("key", [None, "a-key-of-some-length"])
def test_what_can_be_read_has_a_head(llm: LLM, key: str | None) -> None:
    """Over a real port, where an answer to HEAD must have no body."""
    paths = ["/", "/health", "/health/ready", "/ping", "/load", "/version", "/v1/models", "/v1/models/tiny"]
    paths += ["/api/version", "/api/tags", "/api/ps", "/tokenizer_info", "/openapi.json", "/nothing"]
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with served_on_port(llm, api_keys=() if key is None else (key,)) as url, httpx.Client(base_url=url) as client:
        for path in paths:
            read, head = client.get(path, headers=headers), client.head(path, headers=headers)
            assert (head.status_code, head.content) == (read.status_code, b""), path
            assert head.headers["content-type"] == read.headers["content-type"]
            assert int(head.headers["content-length"]) == len(read.content), path
        assert client.head("/v1/completions", headers=headers).status_code == 405
        if key is not None:
            assert client.head("/v1/models").status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/responses/compact", 404), ("PATCH", "/v1/responses/x", 404), ("POST", "/v1/models/tiny", 404),
        ("GET", "/v1/responses", 405), ("DELETE", "/v1/models", 405), ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/chat/completions/render", 404), ("DELETE", "/v1/responses/x", 404),
    ],
)  # fmt: skip
def test_a_path_under_another_one_is_not_found(llm: LLM, method: str, path: str, status: int) -> None:
    with Server(llm) as server:
        answer = server.request(method, path, json={} if method in ("POST", "PATCH") else None)
        assert (answer.status_code, error_of(answer)["type"]) == (status, "invalid_request_error")


def test_health_and_version(llm: LLM) -> None:
    with Server(llm) as server:
        for answer in (
            server.get("/health"),
            server.request("HEAD", "/health"),
            server.get("/health/ready"),
            server.request("HEAD", "/health/ready"),
            server.get("/ping"),
            server.post("/ping"),
        ):
            assert answer.status_code == 200
        paths = server.get("/health").json()["compute_paths"]
        assert paths["target"] in ("native fused layers", "PyTorch")
        assert paths["drafters"] == []
        assert server.get("/version").json() == {"version": specinfer.__version__}


def test_load_counts_what_is_being_made(llm: LLM) -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        assert (await client.get("/load")).json()["server_load"] == 0
        generation = await state.engine.submit([1, 2, 3])
        assert (await client.get("/load")).json()["server_load"] == 1
        generation.close()
        while state.engine.num_live:  # it ends between two steps
            await asyncio.sleep(0.001)
        assert (await client.get("/load")).json()["server_load"] == 0

    serve(llm, body)
