"""What the routes share."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from fastapi import Request

from specinfer.async_llm import AsyncLLM
from specinfer.server.config import ServerConfig
from specinfer.server.errors import ApiError


class Serving(Protocol):
    """What the checks around all routes know of what is served."""

    config: ServerConfig
    is_stopping: bool
    count_refusal: Callable[[str], None] | None

    def check_ready(self) -> None:
        """Raises what a request for new work is answered with while none is taken."""


class ServerState:
    """One engine and the settings it is served with; at `app.state.server`.

    Args:
        engine: None while the model is being loaded; `put_engine` brings it.
        names: What clients may call the model; the first is shown.
        root: What the model was loaded from.

    Attributes:
        is_stopping: Whether no new work is taken since the server is going down.
        scrape: The metrics in Prometheus' format, if they are served.
        count_refusal: Told the code of every request that is refused.
    """

    def __init__(self, engine: AsyncLLM | None, config: ServerConfig, names: Sequence[str], root: str = "") -> None:
        self.config = config
        self._engine: AsyncLLM | None = None
        if engine is not None:
            self.put_engine(engine)
        self.names = tuple(names)
        self.root = root or self.names[0]
        self.started = time.time()
        self.is_stopping = False
        self.scrape: Callable[[], bytes] | None = None
        self.count_refusal: Callable[[str], None] | None = None

    def put_engine(self, engine: AsyncLLM) -> None:
        """Serves this from now on.

        Raises:
            ValueError: The operator's chat template cannot be used with it.
        """
        if self.config.chat_template is not None:
            engine.llm.reader.chat_template = self.config.chat_template
        self._engine = engine

    @property
    def engine(self) -> AsyncLLM:
        """The engine.

        Raises:
            ApiError: The model is still being loaded.
        """
        if self._engine is None:
            raise loading()
        return self._engine

    @property
    def takes_work(self) -> bool:
        return not (self.is_stopping or (self._engine is not None and self._engine.is_draining))

    def check_ready(self) -> None:
        """Raises what a request for new work is answered with while the server cannot take any."""
        engine = self.engine
        if not self.takes_work:
            raise shutting_down()
        engine.check_health()

    def check_model(self, name: str | None) -> None:
        """Raises what a request for a model that is not here is answered with; None asks for whichever is."""
        if name is not None and name not in self.names:
            known = ", ".join(self.names)
            message = f"model: {name!r:.80} is not served here; use {known}"
            raise ApiError(404, message, param="model", code="model_not_found")


def loading() -> ApiError:
    """What is answered while there is no engine yet."""
    message = "the model is being loaded; try again in a moment"
    return ApiError(503, message, kind="server_error", code="loading", headers={"Retry-After": "5"})


def shutting_down() -> ApiError:
    """What new work is answered with at the end."""
    message = "the server is shutting down; send the request to another, or later"
    return ApiError(503, message, kind="server_error", code="shutting_down", headers={"Retry-After": "5"})


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state
