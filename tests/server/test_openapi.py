"""Whatever the schema allows to be sent, and what it forbids: no answer is a fault, and each has the promised shape."""

import asyncio
import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from hostile import CHAT, DETOKENIZE, TEXT, TOKENIZE, Attacked, check_refusal
from specinfer import LLM, QueueLimits
from specinfer.server.app import create_app
from specinfer.server.config import ServerConfig
from specinfer.server.state import ServerState

pytestmark = pytest.mark.usefixtures("small_demo")
SCHEMA: dict[str, Any] = create_app(ServerState(None, ServerConfig(), ("demo",))).openapi()
RESPONSES = "/v1/responses"
OTHERS = ["/v1/messages", "/v1/messages/count_tokens", "/api/generate", "/api/chat"]  # Anthropic's and Ollama's
PATHS = [TEXT, CHAT, RESPONSES, TOKENIZE, DETOKENIZE, *OTHERS]
MODES = list(GenerationMode)
# What schemas cannot say, so that nothing random gets through to the model.
SENSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "model": st.just("demo"),
    "prompt": st.text(min_size=1, max_size=20) | st.lists(st.integers(0, 2047), min_size=1, max_size=20),
    "messages": st.lists(
        st.fixed_dictionaries({"role": st.just("user"), "content": st.text()}), min_size=1, max_size=3
    ),
    "tokens": st.lists(st.integers(0, 2047), max_size=20),
    "max_tokens": st.integers(1, 8),
    "n": st.integers(1, 3),
    "temperature": st.floats(0, 2),
    "input": st.text(min_size=1, max_size=20),
    "max_output_tokens": st.integers(1, 16),
    "options": st.builds(dict, num_predict=st.integers(1, 8), temperature=st.floats(0, 2)),
    "tools": st.none(),
    "functions": st.none(),
    "modalities": st.none(),
    "response_format": st.none() | st.just({"type": "json_object"}),
    "structured_outputs": st.none() | st.just({"regex": "[a-z ]{3,9}"}),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Attacked]:
    with Attacked(LLM("demo", tree="2,1", max_model_len=256), QueueLimits(request_timeout=20)) as attacked:
        yield attacked


def send(server: Attacked, case: schemathesis.Case) -> httpx.Response:
    """The answer to a generated request; its body may be no JSON at all."""
    asked = case.as_transport_kwargs(base_url="http://127.0.0.1")
    content = asked.get("data") if asked.get("json") is None else json.dumps(asked["json"]).encode()
    if not isinstance(content, (str, bytes, type(None))):
        content = json.dumps(content).encode()
    headers = {name: value for name, value in dict(asked["headers"]).items() if name.lower() != "content-length"}
    if content is not None:
        headers = {"Content-Type": "application/json"} | headers
    request = server.client.build_request(
        asked["method"], asked["url"], params=asked.get("params"), headers=headers, content=content
    )
    return server.run(server.client.send(request))


def check(answer: httpx.Response) -> None:
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        check_refusal(answer)


def operation(path: str, method: str = "post") -> Any:
    return schemathesis.openapi.from_dict(copy.deepcopy(SCHEMA))[path][method.upper()]


def examples(count: int) -> Any:
    return settings(max_examples=count, suppress_health_check=list(HealthCheck), deadline=None)


@pytest.mark.parametrize("mode", MODES, ids=[mode.value for mode in MODES])
@pytest.mark.parametrize("path", PATHS)
def test_bodies_by_the_schema_and_against_it(server: Attacked, path: str, mode: GenerationMode) -> None:
    @examples(3 if path == RESPONSES else 6 if path in OTHERS else 8)  # making the largest takes long
    @given(operation(path).as_strategy(generation_mode=mode))
    def run(case: schemathesis.Case) -> None:
        check(send(server, case))

    run()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=[mode.value for mode in MODES])
@pytest.mark.parametrize("path", PATHS)
def test_many_bodies_by_the_schema_and_against_it(server: Attacked, path: str, mode: GenerationMode) -> None:
    @examples(600)
    @given(operation(path).as_strategy(generation_mode=mode))
    def run(case: schemathesis.Case) -> None:
        check(send(server, case))

    run()


@pytest.mark.parametrize("path", PATHS)
def test_bodies_that_mean_something(server: Attacked, path: str) -> None:
    """As the schema has it, but with prompts and limits that are served; so that fields meet each other."""
    served = []

    @examples(8 if path in OTHERS else 16)
    @given(operation(path).as_strategy(), st.data())
    def run(case: schemathesis.Case, data: st.DataObject) -> None:
        if not isinstance(case.body, dict):
            return
        names = SCHEMA["components"]["schemas"][_model_of(path)]["properties"].keys()
        few = data.draw(st.sets(st.sampled_from(sorted(names)), max_size=4))
        sensible = {name: data.draw(SENSIBLE[name]) for name in SENSIBLE if name in names}
        if path == RESPONSES:
            sensible = {name: sensible[name] for name in ("model", "input", "max_output_tokens", "temperature")}
        body = {name: value for name, value in case.body.items() if name in few}
        body |= {name: value for name, value in sensible.items() if value is not None}
        if path == TOKENIZE:  # it takes one or the other
            del body[data.draw(st.sampled_from(["prompt", "messages"]))]
        answer = server.run(server.client.post(path, json=body))
        check(answer)
        served.append(answer.status_code == 200)

    run()
    assert sum(served) >= 4, "nothing gets through to the model"


def test_paths_that_are_only_asked(server: Attacked) -> None:
    for path, methods in SCHEMA["paths"].items():
        if "get" in methods:
            for name in ("demo", "a/b", "%00", "..", "%2e%2e%2f", "\u20ac"):
                check(server.run(server.client.get(path.replace("{name}", name))))


def test_the_schema_has_refusals_as_they_are() -> None:
    for methods in SCHEMA["paths"].values():
        for described in methods.values():
            assert "422" not in described["responses"]
            told = described["responses"]["4XX"]["content"]["application/json"]["schema"]
            for _ in ("body", "error"):  # either may be named or written out
                told = SCHEMA["components"]["schemas"][told["$ref"].rpartition("/")[2]] if "$ref" in told else told
                told = told["properties"].get("error", told)
            told = SCHEMA["components"]["schemas"][told["$ref"].rpartition("/")[2]] if "$ref" in told else told
            assert set(told["properties"]) == {"message", "type", "param", "code"}


def _model_of(path: str) -> str:
    schema = SCHEMA["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return str(schema["$ref"].rpartition("/")[2])


def test_two_hundred_clients_are_all_answered() -> None:
    """Each is served or told that the queue is full; none hangs, and nothing stays behind."""
    limits = QueueLimits(max_num_queued_reqs=40)
    with Attacked(LLM("demo", tree="2,1", max_num_seqs=16), limits) as server:

        async def ask(i: int) -> httpx.Response:
            body = {"prompt": f"def f{i}(", "max_tokens": 4, "seed": i, "stream": bool(i % 2), "n": 1 + i % 3}
            return await server.client.post(TEXT, json=body)

        async def ask_all() -> list[httpx.Response]:
            return list(await asyncio.gather(*map(ask, range(200))))

        answers = server.run(ask_all())
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 429}
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert check_refusal(refused)["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        server.run(server.check_well())
