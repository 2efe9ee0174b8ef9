"""Requests and responses as bytes between the router and a replica: a head in JSON, then the body."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

_LENGTH = 4  # bytes of the length before a response's head
Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The beginning of a response, and the replica that gives it."""

    status: int
    headers: list[tuple[bytes, bytes]]
    replica: str


def pack_request(scope: Scope) -> bytes:
    """Return the head of a checked request, with its id in the log as its X-Request-Id."""
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"x-request-id"]
    headers.append((b"x-request-id", scope["state"]["request_id"].encode("latin-1")))
    server = scope.get("server")
    head = {
        "method": scope["method"],
        "path": scope["path"],
        "raw_path": (scope.get("raw_path") or b"").decode("latin-1"),
        "query_string": scope.get("query_string", b"").decode("latin-1"),
        "scheme": scope.get("scheme", "http"),
        "http_version": scope.get("http_version", "1.1"),
        "client": list(scope.get("client") or ("-", 0)),
        "server": None if server is None else list(server),
        "headers": _as_text(headers),
    }
    return json.dumps(head).encode()


def unpack_request(head: bytes) -> Scope:
    """Return the ASGI scope of a request."""
    head_fields: dict[str, Any] = json.loads(head)
    server = head_fields["server"]
    return head_fields | {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "root_path": "",
        "raw_path": head_fields["raw_path"].encode("latin-1"),
        "query_string": head_fields["query_string"].encode("latin-1"),
        "client": tuple(head_fields["client"]),
        "server": None if server is None else tuple(server),
        "headers": _as_bytes(head_fields["headers"]),
    }


def pack_response(start: Mapping[str, Any], replica: str) -> bytes:
    """Return the head of a response, which goes before the first bytes of its body."""
    head_fields = {"status": start["status"], "headers": _as_text(start.get("headers", ())), "replica": replica}
    head = json.dumps(head_fields).encode()
    return len(head).to_bytes(_LENGTH, "big") + head


def unpack_response(first: bytes) -> tuple[ResponseHead, bytes]:
    """Return the head of a response, and the part of its body that came with it."""
    end = _LENGTH + int.from_bytes(first[:_LENGTH], "big")
    head_fields = json.loads(first[_LENGTH:end])
    return ResponseHead(head_fields["status"], _as_bytes(head_fields["headers"]), head_fields["replica"]), first[end:]


def _as_text(headers: Headers) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


def _as_bytes(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
