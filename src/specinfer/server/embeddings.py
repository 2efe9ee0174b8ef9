"""POST /v1/embeddings, and Ollama's /api/embed and /api/embeddings: refused, as targets generate text."""

from fastapi import APIRouter, Request

from specinfer.server.errors import ApiError
from specinfer.server.parsed_request import ParsedRoute

router = APIRouter(route_class=ParsedRoute)


@router.post("/v1/embeddings")
@router.post("/api/embed")
@router.post("/api/embeddings")
async def embed(request: Request) -> None:
    """Refuse to embed a text."""
    message = f"{request.url.path}: the served model returns no embeddings; use a server for embedding models"
    raise ApiError(400, message, param="model", code="unsupported_parameter")
