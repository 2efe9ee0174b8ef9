"""Limits of single keys: what exceeds them is refused, other keys do not notice, and the metrics show both."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving import error_of, serve, slow_steps
from specinfer import QueueLimits
from specinfer.core.errors import QuotaError
from specinfer.core.limits import TenantLimits
from specinfer.llm import LLM
from specinfer.quotas import Quotas
from specinfer.server.keys import KeySettings
from specinfer.server.observation import Observation
from specinfer.server.state import ServerState

GREEDY, HONEST = ({"authorization": f"Bearer {name}-key"} for name in ("greedy", "honest"))
TEXT = "/v1/completions"
LONG = {"prompt": "the", "max_tokens": 60, "ignore_eos": True}
SHORT = {"prompt": "the", "max_tokens": 2}
Work = Callable[[httpx.AsyncClient, ServerState], Awaitable[Any]]


@pytest.fixture(scope="module")
def llm(model_folder: Callable[..., Path]) -> LLM:
    return LLM(model_folder(tokenizer=True), tree="off", max_num_seqs=4)


def limited(llm: LLM, work: Work, limits: QueueLimits | None = None, **config: Any) -> Any:
    """Serve a greedy key with these limits, and an honest one without limits."""
    ours = {name: config.pop(name) for name in list(config) if name in TenantLimits.__dataclass_fields__}
    settings = {"greedy-key": KeySettings(name="greedy", limits=TenantLimits(**ours))}
    return serve(llm, work, limits=limits, api_keys=("greedy-key", "honest-key"), key_settings=settings, **config)


async def started(count: int, client: httpx.AsyncClient, state: ServerState, **body: Any) -> list[Any]:
    """Begin requests of the greedy key, which are live when this returns."""
    before = state.engine.num_live
    tasks = [asyncio.ensure_future(client.post(TEXT, json={**LONG, **body}, headers=GREEDY)) for _ in range(count)]
    while state.engine.num_live < before + count:
        await asyncio.sleep(0.001)
    return tasks


def test_a_key_has_no_more_outputs_than_may_run_and_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(monkeypatch)

    async def work(client: httpx.AsyncClient, state: ServerState) -> None:
        tasks = await started(3, client, state)
        refused = await client.post(TEXT, json=SHORT, headers=GREEDY)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert error_of(refused)["code"] == "rate_limit_exceeded"
        assert "max_num_queued_reqs of this API key: 3 outputs running or waiting" in error_of(refused)["message"]
        never = await client.post(TEXT, json=SHORT | {"n": 4}, headers=GREEDY)
        assert never.status_code == 429
        assert (await client.post(TEXT, json=SHORT | {"n": 4}, headers=HONEST)).status_code == 200
        assert state.engine.num_running_by_tenant()["greedy"] <= 2
        assert [task.result().status_code for task in tasks if await task] == [200] * 3
        never = await client.post(TEXT, json=SHORT | {"n": 4}, headers=GREEDY)
        assert "n: 4 outputs are more than the 3 that may wait" in error_of(never)["message"]

    limited(llm, work, max_num_seqs=2, max_num_queued_reqs=1)


def test_a_key_without_an_output_gets_one_in_a_full_queue(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(monkeypatch)

    async def work(client: httpx.AsyncClient, state: ServerState) -> None:
        tasks = await started(5, client, state)
        assert (await client.post(TEXT, json=SHORT, headers=GREEDY)).status_code == 429
        answer = await client.post(TEXT, json=SHORT, headers=HONEST)
        assert answer.status_code == 200
        assert not any(task.done() for task in tasks), "and a running slot at once"
        assert [task.result().status_code for task in tasks if await task] == [200] * 5

    limited(llm, work, QueueLimits(max_num_queued_reqs=1))


def test_tokens_of_a_minute_are_counted_and_come_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("specinfer.quotas.time.monotonic", lambda: now[0])

    async def work(client: httpx.AsyncClient, state: ServerState) -> None:
        answer = await client.post(TEXT, json=LONG, headers=GREEDY)
        used = answer.json()["usage"]["total_tokens"]
        assert used > 60
        assert answer.headers["x-ratelimit-limit-tokens"] == "60"
        left = (await client.get("/v1/models", headers=GREEDY)).headers
        assert left["x-ratelimit-remaining-tokens"] == "0"
        assert left["x-ratelimit-reset-tokens"] == f"1m{used - 60}s"
        monkeypatch.setattr(llm.tokenizer, "encode", lambda *_, **__: pytest.fail("a refused prompt was read"))
        refused = await client.post(TEXT, json=SHORT, headers=GREEDY)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, str(used - 60 + 1))
        assert "max_tokens_per_minute of this API key: 60 tokens a minute are used up" in error_of(refused)["message"]
        monkeypatch.undo()
        monkeypatch.setattr("specinfer.quotas.time.monotonic", lambda: now[0])
        honest = await client.post(TEXT, json=SHORT, headers=HONEST)
        assert honest.status_code == 200
        assert "x-ratelimit-limit-tokens" not in honest.headers
        now[0] += used - 60 + 1
        assert (await client.post(TEXT, json=SHORT, headers=GREEDY)).status_code == 200
        usage = state.quotas.usage["greedy"]
        assert usage.num_prompt_tokens + usage.num_generated_tokens >= used + 2

    limited(llm, work, max_tokens_per_minute=60)


def test_a_key_has_no_more_requests_at_once_than_it_may(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(monkeypatch)

    async def work(client: httpx.AsyncClient, state: ServerState) -> None:
        tasks = await started(2, client, state)
        refused = await client.post("/tokenize", json={"prompt": "the"}, headers=GREEDY)
        assert refused.status_code == 429
        assert "max_connections of this API key: 2 requests being served" in error_of(refused)["message"]
        assert (await client.post("/tokenize", json={"prompt": "the"}, headers=HONEST)).status_code == 200
        await asyncio.gather(*tasks)
        assert (await client.post("/tokenize", json={"prompt": "the"}, headers=GREEDY)).status_code == 200

    limited(llm, work, max_connections=2)


def test_a_key_that_takes_all_connections_leaves_one_to_the_others(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(monkeypatch)

    async def work(client: httpx.AsyncClient, state: ServerState) -> None:
        tasks = await started(2, client, state)
        refused = await client.post("/tokenize", json={"prompt": "the"}, headers=GREEDY)
        assert (refused.status_code, error_of(refused)["code"]) == (503, "too_many_connections")
        assert (await client.post("/tokenize", json={"prompt": "the"}, headers=HONEST)).status_code == 200
        await asyncio.gather(*tasks)

    serve(llm, work, api_keys=("greedy-key", "honest-key"), max_connections=2)


def test_bodies_of_a_key_are_limited_together(llm: LLM) -> None:
    async def work(client: httpx.AsyncClient, state: ServerState) -> None:
        gate, text = asyncio.Event(), b"a" * 600

        async def slowly(headers: dict[str, str]) -> httpx.Response:
            async def parts() -> Any:
                yield b'{"prompt": "' + text
                await gate.wait()
                yield text + b'"}'

            headers = headers | {"content-type": "application/json"}
            return await client.post("/tokenize", content=parts(), headers=headers)

        first, honest = asyncio.ensure_future(slowly(GREEDY)), [asyncio.ensure_future(slowly(HONEST)) for _ in "abc"]
        while state.quotas.num_incoming_bytes < 4 * 600:
            await asyncio.sleep(0.001)
        refused = await client.post("/tokenize", json={"prompt": "a" * 600}, headers=GREEDY)
        assert (refused.status_code, refused.headers["connection"]) == (429, "close")
        assert "max_incoming_bytes of this API key: more than 1000 bytes" in error_of(refused)["message"]
        gate.set()
        assert (await first).status_code == 429
        assert [answer.status_code for answer in await asyncio.gather(*honest)] == [200] * 3
        assert state.quotas.num_incoming_bytes == 0

    limited(llm, work, max_incoming_bytes=1000)


def test_each_key_has_an_even_part_of_the_bytes_that_are_read_at_once() -> None:
    quotas = Quotas(dict.fromkeys(("greedy", "honest"), TenantLimits()))
    assert quotas.add_bytes("greedy", 99, 100)
    assert not quotas.add_bytes("greedy", 2, 100)
    assert quotas.add_bytes("honest", 50, 100)
    assert not quotas.add_bytes("honest", 1, 100)
    assert not quotas.add_bytes("stranger", 1, 100)


def test_each_key_has_an_even_part_of_the_responses_that_are_not_read() -> None:
    quotas = Quotas({"greedy": TenantLimits(), "honest": TenantLimits(), "narrow": TenantLimits(max_outgoing_bytes=10)})
    with quotas.response("greedy") as large, quotas.response("narrow") as small:
        assert quotas.check_outgoing("greedy", 500, 90)  # its only one
        large.num_bytes = 80
        assert quotas.check_outgoing("greedy", 10, 90)
        assert not quotas.check_outgoing("greedy", 11, 90)
        assert quotas.check_outgoing("honest", 500, 90)
        small.num_bytes = 9
        assert quotas.check_outgoing("narrow", 1, 90)
        with pytest.raises(QuotaError, match="more than 10 bytes of responses are not read"):
            quotas.check_outgoing("narrow", 2, 90)
        large.num_bytes -= 60
        assert quotas.usage["greedy"].num_outgoing_bytes == 20
        assert quotas.num_outgoing_bytes == 29
    assert quotas.num_outgoing_bytes == quotas.usage["greedy"].num_outgoing_bytes == 0


PROMPT = {"prompt": [5] * 40, "prompt_logprobs": 20, "n": 4, "max_tokens": 1, "ignore_eos": True}  # about 250 KB


def test_responses_that_are_not_read_keep_further_ones_of_their_key_away(llm: LLM) -> None:
    async def work(client: httpx.AsyncClient, state: ServerState) -> None:
        stalled, read_on = asyncio.Event(), asyncio.Event()

        async def unread(message: Any) -> None:
            if len(message.get("body", b"")) > 2**15:
                stalled.set()
                await read_on.wait()

        task = asyncio.ensure_future(posted(client, unread))
        await asyncio.wait_for(stalled.wait(), 30)
        assert state.quotas.num_outgoing_bytes > 2**17
        refused = await client.post(TEXT, json=PROMPT, headers=GREEDY)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "--max-outgoing-bytes" in error_of(refused)["message"]
        assert (await client.post(TEXT, json=SHORT, headers=HONEST)).status_code == 200
        assert (await client.post(TEXT, json=PROMPT, headers=HONEST)).status_code == 200
        read_on.set()
        await task
        assert state.quotas.num_outgoing_bytes == 0
        assert (await client.post(TEXT, json=PROMPT, headers=GREEDY)).status_code == 200

    serve(llm, work, api_keys=("greedy-key", "honest-key"), max_outgoing_bytes=2**16)


async def posted(client: httpx.AsyncClient, send: Callable[[Any], Awaitable[None]]) -> None:
    """Post `PROMPT` with the greedy key by a client that has read a piece when `send` returns."""
    body = json.dumps(PROMPT).encode()
    headers = GREEDY | {"content-type": "application/json", "host": "localhost"}
    is_sent, never = False, asyncio.Event()

    async def receive() -> dict[str, Any]:
        nonlocal is_sent
        if is_sent:
            await never.wait()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {
        "type": "http", "method": "POST", "path": TEXT, "raw_path": TEXT.encode(), "query_string": b"",
        "scheme": "http",
        "root_path": "", "http_version": "1.1", "client": ("127.0.0.1", 1), "server": ("localhost", 80),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }  # fmt: skip
    await client._transport.app(scope, receive, send)  # type: ignore[attr-defined]


def test_metrics_show_what_each_key_uses_and_may_use(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(monkeypatch)

    async def work(client: httpx.AsyncClient, state: ServerState) -> dict[str, float]:
        async with Observation(state.engine, state):
            tasks = await started(2, client, state)
            while state.engine.num_running < 1:
                await asyncio.sleep(0.001)
            await client.post(TEXT, json=SHORT, headers=GREEDY)
            await client.post(TEXT, json=SHORT, headers=HONEST)
            shown = (await client.get("/metrics", headers=HONEST)).text
            await asyncio.gather(*tasks)
        assert "greedy-key" not in shown
        found = re.findall(
            r'^specinfer:(key_\w+)\{key="([\w-]+)",(?:limit="(\w+)",)?model_name="tiny"\} (\S+)', shown, re.M
        )
        return {":".join(filter(None, parts)): float(value) for *parts, value in found}

    shown = limited(llm, work, max_num_seqs=1, max_num_queued_reqs=1)
    assert shown["key_requests_running:greedy"] == shown["key_requests_waiting:greedy"] == 1
    assert shown["key_connections:greedy"] == 2
    assert shown["key_refused_total:greedy:max_num_queued_reqs"] == 1
    assert shown["key_limit:greedy:max_num_seqs"] == 1
    assert shown["key_prompt_tokens_total:key-2"] > 0
    assert shown["key_generation_tokens_total:key-2"] == 2
    assert shown["key_incoming_bytes:key-2"] == 0
