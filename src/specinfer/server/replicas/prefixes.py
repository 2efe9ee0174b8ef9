"""Digests of a request's prefixes: requests with the same prefix go to the replica that has it in its cache."""

import hashlib
import json

LENGTHS = (256, 1024, 4096, 16384)  # characters of the prefixes; there is one digest for each length


def prefix_digests(body: bytes, tenant: str) -> list[str]:
    """Return digests of the prefixes of a request's text, the longest first; none for a short text.

    Args:
        body: A valid JSON object.
        tenant: The tenant whose cached prefixes may be used.
    """
    fields = json.loads(body) if body else {}
    prompt = fields.get("messages") or fields.get("prompt") or fields.get("input")
    if not prompt:
        return []
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
    salt = json.dumps([tenant, fields.get("cache_salt"), fields.get("tools"), fields.get("instructions")])
    return [_digest(salt, text[:length]) for length in reversed(LENGTHS) if len(text) >= length]


def _digest(salt: str, text: str) -> str:
    return hashlib.blake2b(f"{salt}\0{text}".encode(errors="surrogatepass"), digest_size=16).hexdigest()
