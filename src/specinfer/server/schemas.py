"""JSON schemas that clients send: checks of their size before any work is done with them."""

import json
from typing import Any

from specinfer.core.errors import RequestError

MAX_CHARACTERS = 100_000
_MAX_DEPTH = 100  # nested braces and brackets; llguidance's parser stops soon after
_MAX_NODES = 10_000
_MAX_CHOICES = 2_000  # entries of one enum, anyOf, ...
_BRANCHES = ("enum", "anyOf", "oneOf", "allOf", "prefixItems")


def read_schema(field: str, schema: object) -> dict[str, Any]:
    """Return a schema after checking its size and depth; `field` names it in error messages.

    Raises:
        RequestError: The schema is not an object, or is too large.
    """
    if not isinstance(schema, dict):
        raise RequestError(f"{field}: must be a JSON schema, an object such as {{...}}, not {schema!r:.60}")
    num_nodes = 0
    level: list[Any] = [schema]
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for node in level:
            for name in _BRANCHES if isinstance(node, dict) else ():
                if isinstance(node.get(name), list) and len(node[name]) > _MAX_CHOICES:
                    raise RequestError(f"{field}: {name} has {len(node[name])} entries; use at most {_MAX_CHOICES}")
            below += node.values() if isinstance(node, dict) else node
        num_nodes += len(below)
        if num_nodes > _MAX_NODES:
            raise RequestError(f"{field}: more than {_MAX_NODES} values; make the schema smaller")
        level = [node for node in below if isinstance(node, (dict, list))]
        if not level:
            break
    else:
        raise RequestError(f"{field}: nested too deeply; have at most {_MAX_DEPTH} braces and brackets in one another")
    try:
        length = len(json.dumps(schema, ensure_ascii=False, allow_nan=False).encode())
    except ValueError as error:  # includes text that is not valid Unicode
        raise RequestError(f"{field}: cannot be written as JSON: {error}") from error
    if length > MAX_CHARACTERS:
        raise RequestError(f"{field}: {length} characters; make the schema shorter, at most {MAX_CHARACTERS}")
    return schema


def lenient(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema from which a grammar leaves out what it cannot enforce; it is refused otherwise."""
    options = schema.get("x-guidance")
    return schema | {"x-guidance": (options if isinstance(options, dict) else {}) | {"lenient": True}}
