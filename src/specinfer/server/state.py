"""The state that all routes share."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from fastapi import Request

from specinfer.async_llm import AsyncLLM
from specinfer.quotas import Quotas
from specinfer.server.config import ServerConfig
from specinfer.server.errors import ApiError
from specinfer.server.unavailable import loading_message


class Serving(Protocol):
    """The part of the server's state that the middleware uses."""

    config: ServerConfig
    quotas: Quotas
    is_stopping: bool
    count_refusal: Callable[[str], None] | None

    def check_ready(self) -> None:
        """Raise the error that answers a request for new work while the server takes none."""


class ServerState:
    """One engine and the settings it is served with, stored at `app.state.server`.

    Args:
        engine: The engine, or None while the model is being loaded; `put_engine` then sets it.
        names: The names by which clients may call the model; answers show the first.
        root: The path or name that the model was loaded from.
        last_end: How the engine before this one ended, such as "ended by SIGSEGV", or "" for the first one.
        ready_at: When the engine will probably be ready, by `time.monotonic`, or None if that is not known.

    Attributes:
        adapters: LoRA adapters by the names of models that clients choose them by.
        adapter_ids: Numbers for further adapters.
        loading_adapters: Names of adapters that are being loaded.
        is_stopping: True when the server is shutting down and takes no new work.
        scrape: Returns the metrics in Prometheus format; None if metrics are not served.
        count_refusal: Called with the error code of every refused request.
    """

    def __init__(
        self,
        engine: AsyncLLM | None,
        config: ServerConfig,
        names: Sequence[str],
        root: str = "",
        last_end: str = "",
        ready_at: float | None = None,
    ) -> None:
        self.config, self.quotas = config, quotas_of(config)
        self._last_end, self._ready_at = last_end, ready_at
        self.adapters = dict(config.lora_modules)
        self.adapter_ids = itertools.count(len(self.adapters) + 1)
        self.loading_adapters: set[str] = set()
        self._engine: AsyncLLM | None = None
        if engine is not None:
            self.put_engine(engine)
        self.names = tuple(names)
        if taken := sorted(config.lora_modules.keys() & set(names)):
            raise ValueError(f"lora_modules: {taken[0]!r:.80} is a name of the model; give the adapter another")
        self.root = root or self.names[0]
        self.started = time.time()
        self.is_stopping = False
        self.scrape: Callable[[], bytes] | None = None
        self.count_refusal: Callable[[str], None] | None = None

    def put_engine(self, engine: AsyncLLM) -> None:
        """Serve this engine from now on.

        Raises:
            ModelError: An adapter cannot be used with this model.
            ValueError: The operator's chat template cannot be used with this model.
        """
        for adapter in self.adapters.values():
            assert engine.llm.adapters is not None, "--lora-modules without --enable-lora"
            engine.llm.adapters.find(adapter)
        if self.config.chat_template is not None:
            engine.llm.reader.chat_template = self.config.chat_template
        engine.put_quotas(self.quotas)
        self._engine = engine

    @property
    def engine(self) -> AsyncLLM:
        """The engine.

        Raises:
            ApiError: The model is still being loaded.
        """
        if self._engine is None:
            raise loading(self._last_end, self._ready_at)
        return self._engine

    @property
    def takes_work(self) -> bool:
        return not (self.is_stopping or (self._engine is not None and self._engine.is_draining))

    def check_ready(self) -> None:
        """Raise the error that answers a request for new work while the server cannot take any."""
        engine = self.engine
        if not self.takes_work:
            raise shutting_down()
        engine.check_working()

    def load(self) -> dict[str, int]:
        """Return the numbers of all, running and waiting outputs."""
        engine = self.engine
        return {"server_load": engine.num_live, "num_running": engine.num_running, "num_waiting": engine.num_waiting}

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that clients may ask for: those of the model, and of its adapters."""
        return (*self.names, *self.adapters)

    def check_model(self, name: str | None) -> None:
        """Raise the error for a model that is not served here; None accepts the served model."""
        if name is not None and name not in self.model_names:
            known = ", ".join(self.model_names)
            message = f"model: {name!r:.80} is not served here; use {known}"
            raise ApiError("model_not_found", message, param="model")


def quotas_of(config: ServerConfig) -> Quotas:
    """Return the limits of each key, and nothing counted yet."""
    return Quotas({name: each.limits for name, each in config.tenants.items()})


def loading(last_end: str = "", ready_at: float | None = None) -> ApiError:
    """Return the error for requests that arrive before the engine is ready; see `loading_message`."""
    message, seconds = loading_message(last_end, ready_at)
    return ApiError("loading", message, headers={"Retry-After": str(seconds)})


def shutting_down() -> ApiError:
    """Return the error for new work while the server shuts down."""
    message = "the server is shutting down; send the request to another, or later"
    return ApiError("shutting_down", message)


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state
