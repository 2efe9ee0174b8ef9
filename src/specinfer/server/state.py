"""What the routes share."""

import time
from dataclasses import dataclass, field

from fastapi import Request

from specinfer.async_llm import AsyncLLM
from specinfer.server.config import ServerConfig


@dataclass(slots=True)
class ServerState:
    """One engine and the settings it is served with; at `app.state.server`.

    Attributes:
        names: What clients may call the model; the first is shown.
    """

    engine: AsyncLLM
    config: ServerConfig
    names: tuple[str, ...]
    started: float = field(default_factory=time.time)


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state
