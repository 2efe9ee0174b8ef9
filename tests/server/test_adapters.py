"""Adapters over HTTP: chosen by the name of a model, listed, loaded and unloaded while requests run."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from adapters import save_adapter
from serving import Server, ask, serve
from specinfer import LLM, AsyncLLM, LoRARequest, SamplingParams
from specinfer.core.lora import parse_modules
from specinfer.server.keys import KeySettings
from specinfer.server.state import ServerState

UPDATING = {"allow_runtime_lora_updating": True}
BODY = {"prompt": "the cat is in", "max_tokens": 24, "temperature": 0}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def base(model_folder: Callable[..., Path]) -> Path:
    return model_folder("llama", tokenizer=True)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [save_adapter(tmp_path_factory.mktemp("adapter") / f"a{i}", base, i) for i in range(3)]


@pytest.fixture(scope="module")
def llm(base: Path) -> LLM:
    return LLM(base, device="cpu", drafters=["suffix"], tree="best-first:4", enable_lora=True)


@pytest.fixture(scope="module")
def texts(llm: LLM, adapters: Sequence[Path]) -> list[str]:
    """What the model says alone and with each adapter, from 101 on."""
    named = [None, *(LoRARequest(f"alone{i}", 101 + i, str(folder)) for i, folder in enumerate(adapters))]
    params = SamplingParams(temperature=0, max_tokens=24)
    found = [llm.generate(BODY["prompt"], params, lora_request=one)[0].outputs[0].text for one in named]
    assert len(set(found)) == 4
    return found


def modules(adapters: Sequence[Path]) -> dict[str, LoRARequest]:
    return parse_modules([f"one={adapters[0]}", f'{{"name": "two", "path": "{adapters[1]}"}}'])


async def _ask(client: httpx.AsyncClient, model: str) -> str:
    response = await client.post("/v1/completions", json=BODY | {"model": model})
    assert response.status_code == 200, response.text
    assert response.json()["model"] == model
    return str(response.json()["choices"][0]["text"])


def test_the_model_of_a_request_chooses_the_adapter(llm: LLM, adapters: list[Path], texts: list[str]) -> None:
    async def run(client: httpx.AsyncClient, state: ServerState) -> None:
        found = await asyncio.gather(*(_ask(client, name) for name in ("tiny", "one", "two", "one")))
        assert found == [texts[0], texts[1], texts[2], texts[1]]
        listed = {each["id"]: each for each in (await client.get("/v1/models")).json()["data"]}
        assert list(listed) == ["tiny", "one", "two"]
        assert (listed["one"]["parent"], listed["one"]["root"]) == ("tiny", str(adapters[0]))
        assert (await client.get("/v1/models/two")).json()["parent"] == "tiny"
        assert [one["name"] for one in (await client.get("/api/tags")).json()["models"]] == [*listed]
        refused = await client.post("/v1/completions", json=BODY | {"model": "three"})
        assert refused.status_code == 404
        assert "use tiny, one, two" in refused.text

    serve(llm, run, lora_modules=modules(adapters))


def test_adapters_are_loaded_and_unloaded_while_requests_run_and_none_is_lost(
    llm: LLM, adapters: list[Path], texts: list[str]
) -> None:
    def running(engine: AsyncLLM) -> list[str]:
        return [one.adapter.name for one in tuple(engine.llm.engine.scheduler.running) if one.adapter is not None]

    async def change(client: httpx.AsyncClient, engine: AsyncLLM, stop: asyncio.Event) -> int:
        """Load and unload the third adapter over and over, each time with a request that outlives it."""
        rounds = 0
        while not stop.is_set():
            body = {"lora_name": "mine", "lora_path": str(adapters[2])}
            assert (await client.post(LOAD, json=body)).status_code == 200
            asked = [asyncio.create_task(_ask(client, "mine")) for _ in range(2)]
            while running(engine).count("mine") + sum(task.done() for task in asked) < 2:
                await asyncio.sleep(0)  # both hold the adapter before it goes
            assert (await client.post(UNLOAD, json={"lora_name": "mine"})).status_code == 200
            assert await asyncio.gather(*asked) == [texts[3]] * 2
            assert "mine" not in (await client.get("/v1/models")).text
            rounds += 1
        return rounds

    async def ask(client: httpx.AsyncClient) -> None:
        for _ in range(4):
            found = await asyncio.gather(*(_ask(client, name) for name in ("tiny", "one", "tiny", "one")))
            assert found == [texts[0], texts[1]] * 2

    async def run(client: httpx.AsyncClient, state: ServerState) -> int:
        stop = asyncio.Event()
        changing = asyncio.create_task(change(client, state.engine, stop))
        await ask(client)
        stop.set()
        return await changing

    assert serve(llm, run, lora_modules=modules(adapters), **UPDATING) >= 1


def test_an_adapter_that_cannot_be_used_is_refused_and_the_server_goes_on(
    llm: LLM, base: Path, adapters: list[Path], texts: list[str], tmp_path: Path
) -> None:
    wide = save_adapter(tmp_path / "wide", base, r=65, target_modules=["q_proj"])
    bodies: list[tuple[str, dict[str, Any], int, str]] = [
        (LOAD, {"lora_name": "x", "lora_path": str(tmp_path / "no")}, 400, "lora_path: no folder"),
        (LOAD, {"lora_name": "x", "lora_path": str(wide)}, 400, "more than max_lora_rank 64"),
        (LOAD, {"lora_name": "tiny", "lora_path": str(adapters[0])}, 400, "served already"),
        (LOAD, {"lora_name": "one", "lora_path": str(adapters[0])}, 400, "served already"),
        (LOAD, {"lora_name": "", "lora_path": str(adapters[0])}, 400, "lora_name: give text"),
        (LOAD, {"lora_name": "x"}, 400, "lora_path"),
        (UNLOAD, {"lora_name": "x"}, 404, "no adapter 'x'"),
        (UNLOAD, {"lora_name": "tiny"}, 404, "no adapter 'tiny'"),
    ]

    async def run(client: httpx.AsyncClient, state: ServerState) -> None:
        for path, body, status, message in bodies:
            response = await client.post(path, json=body)
            assert (response.status_code, message in response.text) == (status, True), response.text
        assert await _ask(client, "one") == texts[1]

    serve(llm, run, lora_modules=modules(adapters), **UPDATING)


def test_adapters_are_changed_only_where_the_operator_allows_it_and_by_keys_for_it(
    llm: LLM, adapters: list[Path]
) -> None:
    body = {"lora_name": "new", "lora_path": str(adapters[2])}
    keys = {"user-key-1": KeySettings(roles=["generate"]), "admin-key": KeySettings(roles=["admin"])}

    def statuses(key: str, **config: Any) -> list[int]:
        """Those of loading an adapter and of unloading it."""
        headers = {"Authorization": f"Bearer {key}"}
        answers = ask(llm, (LOAD, body), (UNLOAD, body), headers=headers, lora_modules=modules(adapters), **config)
        return [answer.status_code for answer in answers]

    assert statuses("none")[0] == 403
    allowed = UPDATING | {"api_keys": tuple(keys), "key_settings": keys}
    assert [statuses(key, **allowed) for key in ("none", *keys)] == [[401] * 2, [403] * 2, [200] * 2]


def test_of_two_loads_of_one_name_at_once_the_second_is_refused(llm: LLM, adapters: list[Path]) -> None:
    async def run(client: httpx.AsyncClient, state: ServerState) -> None:
        bodies = [{"lora_name": "both", "lora_path": str(adapters[i])} for i in (0, 1)]
        first, second = await asyncio.gather(*(client.post(LOAD, json=body) for body in bodies))
        assert (first.status_code, second.status_code) == (200, 400)
        assert "lora_name: 'both' is being loaded" in second.text
        assert (await client.get("/v1/models/both")).json()["root"] == str(adapters[0])
        assert (await client.post(UNLOAD, json={"lora_name": "both"})).status_code == 200
        failing = {"lora_name": "both", "lora_path": str(adapters[0] / "no")}
        assert (await client.post(LOAD, json=failing)).status_code == 400
        assert (await client.post(LOAD, json=bodies[1])).status_code == 200, "a failure leaves the name free"
        assert (await client.post(UNLOAD, json={"lora_name": "both"})).status_code == 200

    serve(llm, run, lora_modules=modules(adapters), **UPDATING)


def test_paths_of_this_machine_are_shown_to_keys_with_the_role_admin_only(llm: LLM, adapters: list[Path]) -> None:
    keys = {"user-key-1": KeySettings(roles=["generate"]), "admin-key": KeySettings(roles=["generate", "admin"])}

    def roots(key: str, **config: Any) -> list[str]:
        with Server(llm, lora_modules=modules(adapters), **config) as server:
            headers = {"Authorization": f"Bearer {key}"}
            listed = server.get("/v1/models", headers=headers).json()["data"]
            assert [server.get(f"/v1/models/{one['id']}", headers=headers).json() for one in listed] == listed
            return [one["root"] for one in listed[1:]]

    with_keys = {"api_keys": tuple(keys), "key_settings": keys}
    assert roots("user-key-1", **with_keys) == ["one", "two"]
    paths = [str(folder) for folder in adapters[:2]]
    assert roots("admin-key", **with_keys) == roots("none") == paths


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a"], "write NAME=PATH"),
        (["=b"], "write NAME=PATH"),
        (['{"name": "a"}'], "write {"),
        (["{"], "write {"),
        (['{"name": 3, "path": "b"}'], "lora_name: give text"),
        (["a=b", "a=c"], "named twice"),
    ],
)
def test_lora_modules_that_cannot_be_read_are_refused(given: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_modules(given)


def test_lora_modules_are_pairs_or_json() -> None:
    found = parse_modules(["a=b=c", '[{"name": "d", "path": "e", "base_model_name": "f"}]'])
    assert list(found.values()) == [LoRARequest("a", 1, "b=c"), LoRARequest("d", 2, "e")]
