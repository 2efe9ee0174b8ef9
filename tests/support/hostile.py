"""Hostile requests, a server that receives them in a thread of its own, and a neighbour that must not notice.

The neighbour is a seeded request with speculation. It runs while the attack is served and has to say what it says
alone; afterwards the server is healthy and serves the same again.
"""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from serving import PATIENCE, Server
from specinfer import LLM, QueueLimits
from specinfer.server.dialects import ANTHROPIC, OLLAMA, dialect_of

T = TypeVar("T")
CHAT, TEXT, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
PROMPT = {"prompt": "def f", "max_tokens": 4}
MESSAGES = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
# Schemas that are costly to compile.
BOMBS = {
    "patterns of one string": {"allOf": [{"type": "string", "pattern": f"a{{{i},}}.*b"} for i in range(1, 201)]},
    "3,000 optional properties": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}},
    "references in a circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "repeats of repeats": {"type": "string", "pattern": "((((a{1,50}b?){1,50}c?){1,50}d?){1,50}e?){1,50}f"},
    "contradictions": {"allOf": [{"type": "string", "pattern": f"^(a|b)*a(a|b){{{i}}}$"} for i in range(20, 40)]},
}
# Bytes that are no request.
MALFORMED = (b"\0" * 5000, b"GET / HTTP/9\r\n\r\n", b"POST / HTTP/1.1\nA: b\n\n", b"X-A: a\r\n" * 5000)
_LONG = {"prompt": "def read(self, size):", "seed": 7, "temperature": 0.8, "max_tokens": 50, "ignore_eos": True}
_SHORT = {"prompt": "import ", "seed": 8, "temperature": 0.8, "max_tokens": 5, "return_token_ids": True}


@dataclass(frozen=True)
class Attack:
    """One request, and how it must end.

    Attributes:
        body: Sent as JSON; bytes are sent as they are.
        status: One, or several that are all right.
        names: What the refusal's message must hold, such as the field's name: a regular expression.
    """

    body: Any
    status: int | tuple[int, ...] = 400
    names: str = ""
    path: str = TEXT
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "POST"

    def check(self, answer: httpx.Response) -> None:
        """Whether it ended so, in OpenAI's shape."""
        allowed = (self.status,) if isinstance(self.status, int) else self.status
        told = f"{str(self.body)[:300]} -> {answer.status_code} {answer.text[:500]}"
        assert answer.status_code in allowed, told
        assert answer.headers["x-request-id"], told
        if answer.status_code >= 400:
            error = check_refusal(answer)
            assert re.search(self.names, error["message"]), told


def check_refusal(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, which must have the shape of its path's API: OpenAI's, Anthropic's or Ollama's."""
    told: dict[str, Any] = answer.json()
    dialect = dialect_of(answer.request.url.path)
    if dialect is OLLAMA:
        assert set(told) == {"error", "code"}, told
        error: dict[str, Any] = {"message": told["error"], "code": told["code"]}
    else:
        assert told.pop("type", None) == ("error" if dialect is ANTHROPIC else None), told
        assert set(told) == {"error"}, told
        error = told["error"]
        assert set(error) == {"message", "type", "code"} | (set() if dialect is ANTHROPIC else {"param"}), error
    assert all(isinstance(value, str) and value for name, value in error.items() if name != "param"), error
    assert error.get("param") is None or isinstance(error["param"], str), error
    assert len(error["message"]) <= 1000
    assert "Traceback" not in error["message"]
    return error


class Attacked(Server):
    """A server that is attacked beside a neighbour."""

    def __init__(self, llm: LLM, limits: QueueLimits | None = None, **config: Any) -> None:
        super().__init__(llm, limits, ("demo",), access_log=False, **config)
        self._alone: dict[str, list[int]] = {}

    def send(self, attack: Attack) -> httpx.Response:
        """The answer to one request, with nobody beside it."""
        return self.run(self.deliver(attack))

    async def deliver(self, attack: Attack) -> httpx.Response:
        """The answer to one request."""
        headers = {"content-type": "application/json", **attack.headers}
        content = attack.body if isinstance(attack.body, bytes) else json.dumps(attack.body).encode()
        return await self.client.request(attack.method, attack.path, content=content, headers=headers)

    def beside(self, *attacks: Attack) -> list[httpx.Response]:
        """The answers to these, sent while the neighbour runs; it and the server must be well."""
        answers = self.run(self._beside(lambda: self._send_all(attacks)))
        for attack, answer in zip(attacks, answers, strict=True):
            attack.check(answer)
        return answers

    def beside_work(self, work: Callable[[], Awaitable[T]]) -> T:
        """What this brings, in the server's loop and beside the neighbour."""
        return self.run(self._beside(work))

    async def _send_all(self, attacks: Sequence[Attack]) -> list[httpx.Response]:
        return list(await asyncio.gather(*map(self.deliver, attacks)))

    async def _beside(self, work: Callable[[], Awaitable[T]]) -> T:
        alone = await self._neighbour("long")
        for _ in range(5):  # on a busy machine it may end before this loop looks
            neighbour = asyncio.ensure_future(self._say(_LONG))
            await self.until(lambda: self.engine.num_running > 0 or neighbour.done())  # noqa: B023 awaited here
            if not neighbour.done():
                break
        assert not neighbour.done(), "the neighbour has ended before the attack"
        result = await work()
        assert await neighbour == alone, "the neighbour says something else"
        await self.check_well()
        return result

    async def check_well(self) -> None:
        """Nothing is left behind, and the server serves as before."""
        await self.until(lambda: self.engine.num_live == 0 and not self.llm.engine.has_work)
        health = await self.client.get("/health")
        assert health.status_code == 200, health.text
        assert await self._say(_SHORT) == await self._neighbour("short")
        await self.until(lambda: not self.llm.engine.has_work)

    async def _neighbour(self, name: str) -> list[int]:
        """What it says alone."""
        if name not in self._alone:
            body = _LONG if name == "long" else _SHORT
            self._alone[name] = await self._say(body | {"speculative": {"tree": "off"}})
        return self._alone[name]

    async def _say(self, body: Mapping[str, Any]) -> list[int]:
        answer = await self.client.post(TEXT, json={**body, "return_token_ids": True})
        assert answer.status_code == 200, answer.text
        ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return ids

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for something that must happen soon."""
        end = time.monotonic() + PATIENCE / 2
        while not condition():
            assert time.monotonic() < end, "what should happen does not"
            await asyncio.sleep(0.002)
