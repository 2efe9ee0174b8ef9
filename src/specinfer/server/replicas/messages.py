"""Requests and responses between the router and a replica; a response is bytes: a head in JSON, then the body.

Digests of a request's prefixes go with it, so that requests with the same prefix reach the replica that has it in its
cache. The routers of Ray that use them (`routing.py`) are listed here, because Ray pickles their class by value.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from starlette.types import Scope

_LENGTH = 4  # bytes of the length before a response's head
Headers = Iterable[tuple[bytes, bytes]]
_SAME = ("method", "path", "raw_path", "query_string", "scheme", "http_version", "client", "server")


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The beginning of a response, and the replica that gives it."""

    status: int
    headers: list[tuple[bytes, bytes]]
    replica: str


def replica_scope(scope: Scope) -> Scope:
    """Return the scope in which a replica serves a checked request, with its id in the log as its X-Request-Id."""
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"x-request-id"]
    headers.append((b"x-request-id", scope["state"]["request_id"].encode("latin-1")))
    same = {name: scope[name] for name in _SAME if name in scope}
    return {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}} | same | {"headers": headers}


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


LENGTHS = (256, 1024, 4096, 16384)  # characters of the prefixes; there is one digest for each length
routers: "WeakSet[Any]" = WeakSet()


def may_ask() -> bool:
    """Return whether there is a replica to ask; also True if no router exists yet."""
    return not routers or any(router.curr_replicas for router in routers)


def prefix_digests(fields: Mapping[str, Any], tenant: str) -> list[str]:
    """Return digests of the prefixes of a request's text, the longest first; none for a short text.

    Args:
        fields: Fields of its body.
        tenant: The tenant whose cached prefixes may be used.
    """
    prompt = fields.get("messages") or fields.get("prompt") or fields.get("input")
    if not prompt:
        return []
    text = prompt if isinstance(prompt, str) else _beginning(prompt)
    salt = json.dumps([tenant, fields.get("cache_salt"), fields.get("tools"), fields.get("instructions")])
    return [_digest(salt, text[:length]) for length in reversed(LENGTHS) if len(text) >= length]


def _beginning(prompt: Any) -> str:
    """Return the JSON of a prompt, without the items beyond the longest prefix."""
    if not isinstance(prompt, list):
        return json.dumps(prompt, ensure_ascii=False)
    items: list[str] = []
    num_left = LENGTHS[-1]
    for item in prompt:
        items.append(json.dumps(item, ensure_ascii=False))
        num_left -= len(items[-1])
        if num_left < 0:
            return "[" + ", ".join(items)
    return "[" + ", ".join(items) + "]"


def _digest(salt: str, text: str) -> str:
    return hashlib.blake2b(f"{salt}\0{text}".encode(errors="surrogatepass"), digest_size=16).hexdigest()
