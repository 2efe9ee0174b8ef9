"""What a request begins with, as digests: requests that begin alike go where that beginning is cached already."""

import hashlib
import json

LENGTHS = (256, 1024, 4096, 16384)  # characters of the beginning, one digest each


def prefix_digests(body: bytes, tenant: str) -> list[str]:
    """Digests of the beginnings of a request's text, the longest first; none for a text that is short.

    Args:
        body: A sound JSON object.
        tenant: Whose cached prefixes may be used.
    """
    fields = json.loads(body) if body else {}
    said = fields.get("messages") or fields.get("prompt") or fields.get("input")
    if not said:
        return []
    text = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)
    salt = json.dumps([tenant, fields.get("cache_salt"), fields.get("tools"), fields.get("instructions")])
    return [_digest(salt, text[:length]) for length in reversed(LENGTHS) if len(text) >= length]


def _digest(salt: str, text: str) -> str:
    return hashlib.blake2b(f"{salt}\0{text}".encode(errors="surrogatepass"), digest_size=16).hexdigest()
