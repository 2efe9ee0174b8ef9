"""Endpoints for operators: models and LoRA adapters, health, load, version and metrics; and those that are refused."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict

import specinfer
from specinfer.core.lora import LoRARequest
from specinfer.server.auth import has_role
from specinfer.server.errors import ApiError
from specinfer.server.json_body import ParsedRoute
from specinfer.server.state import ServerState, state_of

router = APIRouter(route_class=ParsedRoute)


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """List the names that the model is served under, and its adapters."""
    state = state_of(request)
    return {"object": "list", "data": [_model(request, state, name) for name in state.model_names]}


@router.get("/v1/models/{name:path}")
async def show_model(request: Request, name: str) -> dict[str, Any]:
    """Describe the model by one of its names."""
    state = state_of(request)
    state.check_model(name)
    return _model(request, state, name)


def _model(request: Request, state: ServerState, name: str) -> dict[str, Any]:
    adapter = state.adapters.get(name)
    root = state.root if adapter is None else adapter.lora_path
    return {
        "id": name,
        "object": "model",
        "created": int(state.started),
        "owned_by": "specinfer",
        "root": root if has_role(request, state.config, "admin") else name,  # it may be a path of this machine
        "parent": None if adapter is None else state.names[0],
        "max_model_len": state.engine.llm.max_model_len,
    }


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """Report whether the engine works, also during shutdown, and the compute path of each model."""
    engine = state_of(request).engine
    await engine.check_health()
    target, *drafters = engine.llm.compute_paths.values()  # without the names of models, as this needs no key
    return JSONResponse(
        {
            "status": "ok",
            "reading_seconds": round(engine.reading_seconds, 3),
            "compute_paths": {"target": target, "drafters": drafters},
        }
    )


@router.get("/health/ready")
async def ready(request: Request) -> JSONResponse:
    """Report whether the server takes new work."""
    state_of(request).check_ready()
    return JSONResponse({"status": "ok"})


@router.get("/ping")
@router.post("/ping")
async def ping(request: Request) -> JSONResponse:
    """Report health like /health, under the path that SageMaker uses."""
    await state_of(request).engine.check_health()
    return JSONResponse({"status": "ok"})


@router.get("/load")
async def load(request: Request) -> dict[str, int]:
    """Report the numbers of all, running and waiting outputs."""
    return state_of(request).load()


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": specinfer.__version__}


@router.get("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus format."""
    scrape = state_of(request).scrape
    if scrape is None:
        raise ApiError("not_found", "metrics are not served")
    return Response(scrape(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.post("/v1/embeddings")
@router.post("/api/embed")
@router.post("/api/embeddings")
async def embed(request: Request) -> None:
    """Refuse to embed a text."""
    message = f"{request.url.path}: the served model returns no embeddings; use a server for embedding models"
    raise ApiError("unsupported_parameter", message, param="model")


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
