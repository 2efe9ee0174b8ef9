"""A record of what clients send to a server, and of what it answers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from serving import served_on_port
from specinfer import LLM


@dataclass(slots=True)
class Exchange:
    """A request and its answer.

    Attributes:
        headers: Headers of the request, in lower case.
        body: The request's JSON, or None if it has none.
        answer: The answer's text.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: Any = None
    status: int = 0
    answer_headers: dict[str, str] = field(default_factory=dict)
    answer: str = ""

    @property
    def events(self) -> list[Any]:
        """What a stream has sent: the JSON of server-sent events, or of the lines of Ollama's streams."""
        lines = [line.removeprefix("data: ") for line in self.answer.splitlines()]
        return [json.loads(line) for line in lines if line.startswith("{")]


@contextmanager
def recorded(llm: LLM, **settings: Any) -> Iterator[tuple[str, list[Exchange]]]:
    """The address of a real server in a thread, and the exchanges so far."""
    exchanges: list[Exchange] = []

    def wrap(app: Any) -> Any:
        async def recording(scope: Any, receive: Any, send: Any) -> None:
            await (
                _record(app, exchanges, scope, receive, send) if scope["type"] == "http" else app(scope, receive, send)
            )

        return recording

    with served_on_port(llm, wrap=wrap, **settings) as url:
        yield url, exchanges


async def _record(app: Any, exchanges: list[Exchange], scope: Any, receive: Any, send: Any) -> None:
    given, sent = bytearray(), bytearray()
    exchange = Exchange(scope["method"], scope["path"], _texts(scope["headers"]))
    exchanges.append(exchange)

    async def heard() -> Any:
        message = await receive()
        given.extend(message.get("body", b""))
        if message["type"] == "http.request" and not message.get("more_body"):
            exchange.body = json.loads(given) if given.strip().startswith(b"{") else None
        return message

    async def answered(message: Any) -> None:
        if message["type"] == "http.response.start":
            exchange.status, exchange.answer_headers = message["status"], _texts(message["headers"])
        sent.extend(message.get("body", b""))
        await send(message)

    try:
        await app(scope, heard, answered)
    finally:
        exchange.answer = sent.decode()


def _texts(headers: Any) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
