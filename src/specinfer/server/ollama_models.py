"""The paths of Ollama's API about models: there is one, which can be listed and described but not changed."""

import hashlib
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict

from specinfer.hub.files import read_object
from specinfer.llm import LLM
from specinfer.model.gguf.folder import weights_file
from specinfer.server.completions import can_infill
from specinfer.server.errors import unsupported
from specinfer.server.json_body import ParsedRoute
from specinfer.server.ollama import served_name
from specinfer.server.ollama_pieces import formatted
from specinfer.server.state import ServerState, state_of

router = APIRouter(route_class=ParsedRoute)
# The release of Ollama whose API this is: clients refuse older ones.
_VERSION = "0.14.0"
_NEVER = "9999-12-31T23:59:59Z"
_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_hidden_layers": "block_count",
    "num_key_value_heads": "attention.head_count_kv",
}
_UNITS = (("B", 1e9), ("M", 1e6), ("K", 1e3))


class ShowFields(BaseModel):
    """The body of a request to /api/show."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    model: str | None = None
    name: str | None = None  # the older name of `model`


@router.get("/api/version")
async def version() -> dict[str, str]:
    return {"version": _VERSION}


@router.get("/api/tags")
async def tags(request: Request) -> dict[str, Any]:
    """List the names that the model is served under."""
    state = state_of(request)
    return {"models": [_entry(state, name) for name in state.model_names]}


@router.get("/api/ps")
async def running(request: Request) -> dict[str, Any]:
    """List the same names as loaded: the model stays loaded as long as the server runs."""
    state = state_of(request)
    loaded = state.engine.llm.target.loaded
    more = {
        "expires_at": _NEVER,
        "size_vram": 0 if loaded.device.type == "cpu" else loaded.num_bytes,
        "context_length": state.engine.llm.max_model_len,
    }
    return {"models": [_entry(state, name) | more for name in state.model_names]}


@router.post("/api/show")
async def show(fields: ShowFields, request: Request) -> dict[str, Any]:
    """Describe the model."""
    name = served_name(request, fields.model or fields.name)
    state = state_of(request)
    llm = state.engine.llm
    details, template = _details(state), llm.reader.chat_template
    defaults = llm.target.loaded.sampling_defaults
    return {
        "modelfile": f"FROM {name or state.names[0]}\n",
        "parameters": "\n".join(f"{key} {value}" for key, value in defaults.items()),
        "template": template or "",
        "details": details,
        "model_info": _model_info(llm, details["family"], name or state.names[0]),
        "capabilities": _capabilities(llm),
        "modified_at": formatted(state.started),
    }


@router.post("/api/pull")
@router.post("/api/push")
@router.post("/api/create")
@router.post("/api/copy")
@router.delete("/api/delete")
@router.head("/api/blobs/{digest}", include_in_schema=False)
@router.post("/api/blobs/{digest}")
async def change(request: Request) -> None:
    """Refuse to fetch, make or remove models."""
    raise unsupported(request.url.path.rstrip("/"), "the one model is chosen at the start (specinfer serve MODEL)")


def _entry(state: ServerState, name: str) -> dict[str, Any]:
    loaded = state.engine.llm.target.loaded
    return {
        "name": name,
        "model": name,
        "modified_at": formatted(state.started),
        "size": loaded.num_bytes,
        "digest": hashlib.sha256(f"{state.root}\0{loaded.weights_type}".encode()).hexdigest(),
        "details": _details(state),
        "capabilities": _capabilities(state.engine.llm),
    }


def _details(state: ServerState) -> dict[str, Any]:
    loaded = state.engine.llm.target.loaded
    config = read_object(loaded.folder / "config.json") or {}
    family = str(config.get("model_type", "unknown"))
    letter, unit = next((pair for pair in _UNITS if loaded.num_parameters >= pair[1]), ("", 1.0))
    return {
        "parent_model": "",
        "format": "safetensors" if weights_file(loaded.folder) is None else "gguf",
        "family": family,
        "families": [family],
        "parameter_size": f"{loaded.num_parameters / unit:.3g}{letter}",
        "quantization_level": loaded.weights_type.upper(),
    }


def _model_info(llm: LLM, family: str, name: str) -> dict[str, Any]:
    """Return the facts about a model under the names that they have in GGUF files."""
    loaded = llm.target.loaded
    config = read_object(loaded.folder / "config.json") or {}
    sizes = {of: config[key] for key, of in _SIZES.items() if isinstance(config.get(key), int)}
    sizes |= {"context_length": llm.max_model_len, "vocab_size": loaded.vocab_size}
    return {
        "general.architecture": family,
        "general.basename": name.rpartition("/")[2],
        "general.parameter_count": loaded.num_parameters,
        **{f"{family}.{of}": size for of, size in sizes.items()},
    }


def _capabilities(llm: LLM) -> list[str]:
    reader = llm.reader
    capabilities = {
        "completion": True,
        "tools": bool(reader.chat_template),
        "insert": can_infill(reader.special_tokens),
        "thinking": reader.reasoning_format is not None,
    }
    return [name for name, has_it in capabilities.items() if has_it]
