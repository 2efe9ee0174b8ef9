"""What the clients of a server under pressure share."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

Body = dict[str, Any]


async def events_of(response: httpx.Response) -> AsyncIterator[Body]:
    """The events of a stream that must end with [DONE] and without an error."""
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            yield event
    raise AssertionError("a stream ended without [DONE]")
