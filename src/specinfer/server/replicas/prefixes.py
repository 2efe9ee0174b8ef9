"""Digests of a request's prefixes: requests with the same prefix go to the replica that has it in its cache.

The routers that use them (`routing.py`) are listed here, because Ray pickles their class by value.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

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
