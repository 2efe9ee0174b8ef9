"""The application: what every answer has in common, and that nothing which is sent leads to more than a refusal."""

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from serving import Server, error_of, serve, slow_steps
from specinfer.async_llm import AsyncLLM
from specinfer.core.limits import QueueLimits
from specinfer.llm import LLM
from specinfer.server.app import create_app
from specinfer.server.config import ServerConfig
from specinfer.server.field_checks import IGNORED_HEADER
from specinfer.server.json_body import read_body
from specinfer.server.state import ServerState

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def llm(model_folder: Callable[..., Path]) -> LLM:
    return LLM(model_folder(tokenizer=True), drafters=["ngram"], tree="1,1", max_num_seqs=4)


def post(
    llm: LLM, content: Any, path: str = "/tokenize", headers: dict[str, str] = JSON, **config: Any
) -> httpx.Response:
    with Server(llm, **config) as server:
        return server.post(path, content=content, headers=headers)


# ------------------------------------------------------------------------------------------- bodies


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"[1, 2]", "JSON object"),
        (b"7", "JSON object"),
        (b"null", "JSON object"),
        (b'"text"', "JSON object"),
        (b"{", "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        ('{"prompt": "a"}'.encode("utf-16"), "UTF-8"),
        (b"[" * 100_000 + b"]" * 100_000, "nested deeper"),
        (b'{"prompt":[' + b"[1]," * 100_000 + b"[1]]}", "more than 100000 lists and objects"),
        (b'{"prompt":"' + b'[\\"' * 1_000_000, "not valid JSON"),  # quadratic time would be hours
        (b'{"tokens":[' + b"5," * 1_000_000 + b"5]}", "more than 262144 values"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested deeper"),
        (b'{"a":' + b"[" * 100 + b"]" * 100 + b"}", "nested deeper"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "64 bits"),
        (b'{"prompt": "a", "seed": -99999999999999999999}', "64 bits"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN"),
        (b'{"prompt": "a", "temperature": -Infinity}', "Infinity"),
        (b'{"prompt": "a", "temperature": 1e400}', "too large"),
        (b'{"prompt": "a", "prompt": "b"}', "repeated"),
        (b'{"x": [{"y": 1, "y": 2}]}', "repeated"),
        (b"{" + b",".join(b'"%d": 1' % i for i in range(100_000)) + b', "99999": 2}', "repeated"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
    ],
)
def test_a_body_that_is_no_sound_object_is_refused(llm: LLM, content: bytes, part: str) -> None:
    answer = post(llm, content)
    assert answer.status_code == 400
    error = error_of(answer)
    assert part in error["message"]
    assert error["code"] == "invalid_json"


def test_brackets_in_a_text_are_no_lists() -> None:
    read_body(b'{"prompt":"' + b'[{\\"' * 100_000 + b'"}')
    read_body(b'{"prompt":"' + b"a," * 1_000_000 + b'"}')
    read_body(b'{"prompt":[' + b"5," * 200_000 + b"5]}")


def test_a_sound_body_passes(llm: LLM) -> None:
    deep = b"[" * 90 + b"]" * 90
    assert post(llm, b'{"prompt": "a", "tools": null, "model": "tiny"}').status_code == 200
    # A pair of surrogates is one character, and long digits in a text are no number.
    assert post(llm, b'{"prompt": "\\ud83d\\ude42 12345678901234567890"}').status_code == 200
    assert post(llm, b'{"prompt": "a", "deep": ' + deep + b"}").headers[IGNORED_HEADER] == "deep"


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (b'{"prompt": 5}', "prompt"),
        (b'{"prompt": "a", "return_token_strs": "yes"}', "return_token_strs"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": [5]}', "messages[0]"),
        (b"{}", "prompt"),
    ],
)
def test_a_field_that_cannot_be_used_is_named(llm: LLM, content: bytes, param: str) -> None:
    answer = post(llm, content)
    assert answer.status_code == 400
    error = error_of(answer)
    assert error["param"] == param
    assert error["message"].startswith(param)


def test_an_empty_body_is_explained_and_an_unknown_field_is_ignored(llm: LLM) -> None:
    empty = post(llm, b"")
    assert empty.status_code == 400
    assert error_of(empty)["message"] == "body: is empty; send a JSON object, {...}"
    extra = post(llm, b'{"prompt": "a", "prompt_": 1}')
    assert (extra.status_code, extra.headers[IGNORED_HEADER]) == (200, "prompt_")


def test_a_body_that_is_too_large_is_refused_whole_and_in_chunks(llm: LLM) -> None:
    fitting = json.dumps({"prompt": "a" * 970}).encode()

    async def chunks(size: int) -> AsyncIterator[bytes]:
        for _ in range(size // 100):
            yield b" " * 100

    assert post(llm, fitting, max_body_bytes=len(fitting)).status_code == 200
    for content in (fitting, chunks(1500), chunks(5000), b" " * 100_000):
        answer = post(llm, content, max_body_bytes=len(fitting) - 1)
        assert answer.status_code == 413
        assert error_of(answer)["code"] == "request_too_large"


def test_nothing_is_read_of_bodies_that_need_no_key(llm: LLM) -> None:
    taken = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal taken
        for _ in range(20):
            taken += 1
            yield b" " * 100

    for path, status in (("/ping", 200), ("/health", 405)):
        assert post(llm, chunks(), path, api_keys=("a-long-key",)).status_code == status
    assert not taken


def test_bodies_together_take_only_so_much(llm: LLM) -> None:
    """Many clients that send slowly: what has arrived of all of them is bounded, and the last are sent away."""
    begun, released = 0, asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        nonlocal begun
        yield b" " * 1000
        begun += 1
        await released.wait()
        yield b"{}"

    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        sending = [asyncio.create_task(client.post("/v1/completions", content=slow(), headers=JSON)) for _ in range(63)]
        while begun < 63:
            await asyncio.sleep(0.001)
        refused = await client.post("/v1/completions", content=b" " * 1500, headers=JSON)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        released.set()
        assert {(await task).status_code for task in sending} == {413}
        assert (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})).status_code == 200

    serve(llm, body, max_body_bytes=1000)


def test_a_length_that_is_no_number_is_refused(llm: LLM) -> None:
    answer = post(llm, b"{}", headers=JSON | {"content-length": "many"})
    assert answer.status_code == 400


def test_a_body_that_does_not_come_is_not_waited_for(llm: LLM) -> None:
    async def never() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    answer = post(llm, never(), body_timeout=0.05)
    assert answer.status_code == 408
    assert error_of(answer)["code"] == "request_timeout"
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "json", ""])
def test_only_json_is_read(llm: LLM, kind: str) -> None:
    answer = post(llm, b'{"prompt": "a"}', headers={"content-type": kind})
    assert answer.status_code == 415
    assert error_of(answer)["code"] == "unsupported_media_type"


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.api+json"])
def test_json_has_several_names(llm: LLM, kind: str) -> None:
    assert post(llm, b'{"prompt": "a"}', headers={"content-type": kind}).status_code == 200


def test_heads_that_are_too_large_are_refused(llm: LLM) -> None:
    for headers in ({"x-long": "a" * 20_000}, {f"x-{i}": "a" for i in range(101)}):
        answer = post(llm, b'{"prompt": "a"}', headers=JSON | headers)
        assert answer.status_code == 431
        assert error_of(answer)["code"] == "headers_too_large"


# ------------------------------------------------------------------------------------------ answers


def test_answers_carry_an_id_that_may_be_the_clients(llm: LLM) -> None:
    with Server(llm) as server:
        named = server.get("/version", headers={"x-request-id": "run-7.a:b_c"})
        assert named.headers["x-request-id"] == "run-7.a:b_c"
        for unsound in ("a b", "x" * 65, "a/b", "", "\u00e9"):
            answer = server.get("/version", headers={"x-request-id": unsound.encode("latin-1")})
            assert answer.headers["x-request-id"] != unsound
            assert len(answer.headers["x-request-id"]) == 32
        refused = server.get("/nothing")
        assert len(refused.headers["x-request-id"]) == 32


def test_unknown_paths_and_methods_have_the_shape_of_errors(llm: LLM) -> None:
    with Server(llm) as server:
        for path in ("/v1/audio/speech", "/v1/../secret", "/%00", "/v1/models/other"):
            answer = server.get(path)
            assert answer.status_code == 404
            error_of(answer)
        assert server.post("/v1/audio/speech", json={}).status_code == 404
        for path in ("/chat/completions", "/v1/v1/chat/completions"):
            near = error_of(server.post(path, json={}))
            assert near["message"].endswith("; did you mean /v1/chat/completions?"), near
        wrong = server.request("PUT", "/tokenize", json={})
        assert wrong.status_code == 405
        assert wrong.headers["allow"] == "POST"
        assert error_of(wrong)["code"] == "method_not_allowed"


def test_an_unexpected_error_is_reported_by_its_id_alone(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> httpx.Response:
        app = create_app(ServerState(AsyncLLM(llm), ServerConfig(), ("tiny",)))

        @app.post("/fault")
        async def fault(request: Request) -> None:
            raise KeyError("a secret")

        @app.post("/half")
        async def half(request: Request) -> StreamingResponse:
            async def lines() -> AsyncIterator[bytes]:
                yield b"one"
                raise KeyError("a secret")

            return StreamingResponse(lines())

        transport = httpx.ASGITransport(app)  # an exception that passes the application fails the test
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            answer = await client.post("/fault")
            with pytest.raises(AssertionError, match=r"^$"):  # the transport's own: the answer has no end
                await client.post("/half")
            return answer

    with caplog.at_level(logging.ERROR):
        whole = asyncio.run(run())
    assert whole.status_code == 500
    error = error_of(whole)
    assert error["code"] == "internal_error"
    assert "secret" not in whole.text
    assert whole.headers["x-should-retry"] == "false"
    assert len(whole.headers["x-request-id"]) == 32
    assert [record.exc_info is not None for record in caplog.records] == [True, True]


def test_requests_are_logged_with_their_ids_but_not_those_that_only_look(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        await client.get("/health")
        await client.get("/metrics")
        await client.get("/x%0aINFO forged?key=secret", headers={"x-request-id": "abc"})

    with caplog.at_level(logging.INFO, "specinfer.access"):
        serve(llm, body)
    (record,) = [record for record in caplog.records if record.name == "specinfer.access"]
    assert "\n" not in record.getMessage()
    assert "404" in record.getMessage()
    assert "secret" not in record.getMessage()
    caplog.clear()
    with caplog.at_level(logging.INFO, "specinfer.access"):
        serve(llm, body, access_log=False)
    assert not [record for record in caplog.records if record.name == "specinfer.access"]


def test_the_schema_is_served_unless_turned_off(llm: LLM) -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> tuple[int, int]:
        return (await client.get("/openapi.json")).status_code, (await client.get("/docs")).status_code

    async def schema(client: httpx.AsyncClient, state: ServerState) -> Any:
        return (await client.get("/openapi.json")).json()

    for path in serve(llm, schema)["paths"].values():
        for operation in path.values():
            assert set(operation["responses"]) == {"200", "4XX", "5XX"}  # and no 422, which is never answered
    assert serve(llm, body) == (200, 404)
    assert serve(llm, body, docs=False) == (404, 404)


def test_the_schema_is_made_outside_of_the_event_loop(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made, threads = FastAPI.openapi, []

    def openapi(self: FastAPI) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return made(self)

    async def body(client: httpx.AsyncClient, state: ServerState) -> Any:
        return (await client.get("/llm/openapi.json")).json()["servers"]

    monkeypatch.setattr(FastAPI, "openapi", openapi)
    assert serve(llm, body, root_path="/llm") == [{"url": "/llm"}]
    assert threads
    assert threading.current_thread() not in threads


def test_a_prefix_that_a_proxy_strips_or_leaves(llm: LLM) -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> list[int]:
        paths = ("/llm/version", "/version", "/llm/health", "/other/version")
        return [(await client.get(path)).status_code for path in paths]

    assert serve(llm, body, root_path="/llm") == [200, 200, 200, 404]
    assert serve(llm, body, root_path="/llm", api_keys=("a-long-key",)) == [401, 401, 200, 401]


# -------------------------------------------------------------------------------------- taking work


def test_while_the_model_loads_work_is_to_come_later() -> None:
    with Server(None) as server:
        for answer in (
            server.get("/health"),
            server.get("/health/ready"),
            server.get("/ping"),
            server.get("/v1/models"),
            server.get("/load"),
            server.post("/v1/completions", json={"prompt": "a"}),
            server.post("/tokenize", json={"prompt": "a"}),
        ):
            assert answer.status_code == 503
            assert error_of(answer)["code"] == "loading"
            assert answer.headers["retry-after"] == "5"


def test_a_server_that_ends_is_alive_but_not_ready(llm: LLM) -> None:
    with Server(llm) as server:
        server.state.is_stopping = True
        assert server.get("/health").status_code == 200
        for answer in (server.get("/health/ready"), server.post("/v1/completions", json={"prompt": "a"})):
            assert answer.status_code == 503
            assert error_of(answer)["code"] == "shutting_down"
            assert answer.headers["retry-after"] == "5"


def test_a_dead_engine_is_reported_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        def fail() -> None:
            raise MemoryError("no more")

        monkeypatch.setattr(llm.engine, "step", fail)
        answer = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4})
        assert answer.status_code in (500, 503)
        assert state.engine.has_failed
        for looked in (await client.get("/health"), await client.get("/health/ready")):
            assert looked.status_code == 503
            assert error_of(looked)["code"] == "engine_unavailable"
        later = await client.post("/v1/completions", json={"prompt": "a"})
        assert later.status_code == 503
        assert later.headers["retry-after"] == "5"

    serve(llm, body)


def test_more_requests_than_allowed_at_once_are_refused(llm: LLM) -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        asked = {"prompt": "a", "max_tokens": 40}
        answers = await asyncio.gather(*(client.post("/v1/completions", json=asked) for _ in range(5)))
        codes = sorted(answer.status_code for answer in answers)
        assert codes == [200, 200, 503, 503, 503]
        (refused, *_) = [answer for answer in answers if answer.status_code == 503]
        assert error_of(refused)["code"] == "too_many_connections"
        assert refused.headers["retry-after"] == "1"
        assert (await client.post("/v1/completions", json=asked)).status_code == 200

    serve(llm, body, max_connections=2)


def test_a_full_queue_is_answered_with_429(llm: LLM) -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        asked = {"prompt": "a", "max_tokens": 40, "ignore_eos": True}
        answers = await asyncio.gather(*(client.post("/v1/completions", json=asked) for _ in range(9)))
        refused = [answer for answer in answers if answer.status_code != 200]
        assert len(refused) == 3
        for answer in refused:
            assert answer.status_code == 429
            assert error_of(answer)["code"] == "queue_full"
            assert answer.headers["retry-after"] == "1"

    serve(llm, body, limits=QueueLimits(max_num_queued_reqs=2))


def test_a_request_that_waits_too_long_for_its_start_is_ended(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(monkeypatch, 0.02)

    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        asked = {"prompt": "a", "max_tokens": 200, "ignore_eos": True}
        running = [asyncio.create_task(client.post("/v1/completions", json=asked)) for _ in range(4)]
        while state.engine.num_running < 4:
            await asyncio.sleep(0.001)
        late = await client.post("/v1/completions", json=asked)
        assert late.status_code == 429
        assert error_of(late)["code"] == "queue_timeout"
        assert late.headers["retry-after"] == "1"
        assert "waited longer" in error_of(late)["message"]
        assert [(await task).status_code for task in running] == [200] * 4

    serve(llm, body, limits=QueueLimits(queue_timeout=0.6))


# ------------------------------------------------------------------------------------------ browsers


def test_pages_of_other_sites_are_allowed_one_by_one(llm: LLM) -> None:
    site = "https://chat.example.org"
    ask = {"origin": site, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}

    async def body(client: httpx.AsyncClient, state: ServerState) -> tuple[httpx.Response, httpx.Response]:
        return (
            await client.options("/v1/completions", headers=ask),
            await client.get("/v1/models", headers={"origin": site, "authorization": "Bearer wrong"}),
        )

    key = ("a-long-key",)
    preflight, answer = serve(llm, body, api_keys=key, allowed_origins=(site,))
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == site
    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == site  # or the page could not read why
    for config in ({}, {"allowed_origins": ("https://other.example.org",)}):
        preflight, answer = serve(llm, body, api_keys=key, **config)
        assert "access-control-allow-origin" not in {**preflight.headers, **answer.headers}


def test_no_websocket_is_opened(llm: LLM) -> None:
    async def run() -> list[dict[str, Any]]:
        app, sent = create_app(ServerState(AsyncLLM(llm), ServerConfig(), ("tiny",))), []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        scope = {"type": "websocket", "path": "/v1/completions", "headers": [], "query_string": b"", "subprotocols": []}
        await app(scope, receive, send)
        return sent

    assert [message["type"] for message in asyncio.run(run())] == ["websocket.close"]
