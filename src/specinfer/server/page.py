"""The web page at `/`: static files of the package, and the facts about the model that the page needs.

The headers (`_HEADERS`) let the browser run only these files. The page shows model output as text, never as markup.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

import specinfer
from specinfer.server.errors import ApiError
from specinfer.server.state import state_of

router = APIRouter(include_in_schema=False)

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",  # stored but revalidated: the files change with the package
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One static file as it is sent."""

    body: bytes
    media_type: str
    etag: str


@cache
def assets() -> dict[str, Asset]:
    """Return the page's files by name."""
    by_name = {}
    for file in files("specinfer.server").joinpath("static").iterdir():
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            body = file.read_bytes()
            by_name[file.name] = Asset(body, kind, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return by_name


@router.api_route("/", methods=["GET", "HEAD"])
async def page(request: Request) -> Response:
    return _respond(request, "index.html")


@router.api_route("/static/{name}", methods=["GET", "HEAD"])
async def static(request: Request, name: str) -> Response:
    return _respond(request, name)


@router.get("/page.json")
async def about(request: Request) -> JSONResponse:
    """Return the facts about the model that the page shows before the first request."""
    state = state_of(request)
    _check_served(request)
    llm = state.engine.llm
    settings: dict[str, Any] = {
        "model": state.names[0],
        "version": specinfer.__version__,
        "max_model_len": llm.max_model_len,
        "drafters": llm.drafter_choice,
        "has_text": llm.tokenizer is not None,
        "has_chat": llm.reader.chat_template is not None,
    }
    return JSONResponse(settings, headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"})


def _check_served(request: Request) -> None:
    if not state_of(request).config.page:
        raise ApiError("not_found", f"{request.url.path}: this server has no page")


def _respond(request: Request, name: str) -> Response:
    _check_served(request)
    asset = assets().get(name)
    if asset is None:
        raise ApiError("not_found", f"{request.url.path}: there is no such file")
    headers = _HEADERS | {"ETag": asset.etag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if asset.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(asset.body, media_type=asset.media_type, headers=headers)
