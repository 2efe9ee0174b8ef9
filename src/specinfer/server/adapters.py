"""LoRA adapters that clients choose by the name of a model: those of the start, and those loaded or unloaded later."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict

from specinfer.core.lora import LoRARequest
from specinfer.server.errors import ApiError
from specinfer.server.json_body import ParsedRoute
from specinfer.server.state import ServerState, state_of

router = APIRouter(route_class=ParsedRoute)


class LoadFields(BaseModel):
    """The body of a request to /v1/load_lora_adapter."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    lora_name: str
    lora_path: str


class UnloadFields(BaseModel):
    """The body of a request to /v1/unload_lora_adapter."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    lora_name: str
    lora_int_id: int | None = None  # no effect: names are unique


@router.post("/v1/load_lora_adapter")
async def load_adapter(fields: LoadFields, request: Request) -> PlainTextResponse:
    """Load an adapter, which later requests choose by its name."""
    state = _updatable(request)
    if fields.lora_name in state.model_names:
        message = f"lora_name: {fields.lora_name!r:.80} is served already; unload it first, or choose another name"
        raise ApiError("invalid_value", message, param="lora_name")
    if fields.lora_name in state.loading_adapters:
        message = f"lora_name: {fields.lora_name!r:.80} is being loaded already; wait for it, or choose another name"
        raise ApiError("invalid_value", message, param="lora_name")
    state.loading_adapters.add(fields.lora_name)
    try:
        adapter = LoRARequest(fields.lora_name, next(state.adapter_ids), fields.lora_path)
        await state.engine.read(lambda: _registry(state).find(adapter))
    except ValueError as error:
        raise ApiError("invalid_value", str(error), param=str(error).partition(":")[0]) from error
    finally:
        state.loading_adapters.discard(fields.lora_name)
    state.adapters[fields.lora_name] = adapter
    return PlainTextResponse(f"Success: LoRA adapter '{fields.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload_adapter(fields: UnloadFields, request: Request) -> PlainTextResponse:
    """Unload an adapter; requests that chose it before are completed with it."""
    state = _updatable(request)
    adapter = state.adapters.pop(fields.lora_name, None)
    if adapter is None:
        message = f"lora_name: there is no adapter {fields.lora_name!r:.80}; see /v1/models"
        raise ApiError("model_not_found", message, param="lora_name")
    _registry(state).drop(adapter.lora_int_id)
    return PlainTextResponse(f"Success: LoRA adapter '{fields.lora_name}' removed successfully.")


def _updatable(request: Request) -> ServerState:
    """Return the server's state if its adapters may be changed."""
    state = state_of(request)
    if not state.config.allow_runtime_lora_updating:
        message = "adapters may not be changed while the server runs; start it with --allow-runtime-lora-updating"
        raise ApiError("lora_updating_disabled", message)
    return state


def _registry(state: ServerState) -> Any:
    registry = state.engine.llm.adapters
    if registry is None:
        raise ApiError("lora_disabled", "no adapters are served here; start the server with --enable-lora")
    return registry
