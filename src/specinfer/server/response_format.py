"""The requested format of a response as a grammar: OpenAI's `response_format` and vLLM's `structured_outputs`."""

import json
from collections.abc import Mapping
from typing import Any

from specinfer.core.errors import RequestError
from specinfer.core.grammar.schema_values import TYPES
from specinfer.core.structured_outputs import StructuredOutputsParams

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


_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_OPTIONS = ("disable_any_whitespace", "whitespace_pattern", "disable_additional_properties", "disable_fallback")
_KEYS = {"type", "schema", "json_schema", "name", "description", "strict"}
_OF_SCHEMAS = {"properties", "items", "$ref", "anyOf", "oneOf", "allOf", "enum"}  # a schema has one of them, or a type


def structured_outputs_of(
    response_format: Any, structured_outputs: Any = None, field: str = "response_format"
) -> StructuredOutputsParams | None:
    """Return the constraints on a response, or None if none were requested.

    Args:
        field: Name of the format's field in messages.
    """
    of_format, of_field = _of_response_format(field, response_format), _of_structured_outputs(structured_outputs)
    if of_format is not None and of_field is not None:
        raise RequestError(f"structured_outputs: a response has one format; leave this or {field} out")
    return of_format or of_field


def ignored_keys(field: str, response_format: Any) -> list[str]:
    """Return the keys of a format that are ignored."""
    if not isinstance(response_format, Mapping):
        return []
    used = {"type"} if response_format.get("type") == "text" else _KEYS
    nested = response_format.get("json_schema") if "json_schema" in used else None
    names = [str(name) for name, value in response_format.items() if name not in used and value is not None]
    if isinstance(nested, Mapping) and nested.get("schema") is not None:
        names += [f"json_schema.{name}" for name in nested if name not in _KEYS]
    return [f"{field}.{name}" for name in names]


def _of_response_format(field: str, given: Any) -> StructuredOutputsParams | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise RequestError(f'{field}: must be an object such as {{"type": "text"}}, not {given!r:.60}')
    kind = given.get("type")
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise RequestError(f"{field}: type must be text, json_object or json_schema, not {kind!r:.60}")
    nested = given.get("json_schema")
    asked = nested if isinstance(nested, Mapping) else given
    schema = asked.get("schema", given.get("schema"))
    if schema is None and asked is nested and (asked.get("type") in TYPES or not _OF_SCHEMAS.isdisjoint(asked)):
        schema, asked = asked, given
    if schema is None and kind == "json_object":
        return StructuredOutputsParams(json_object=True, field=field)
    name, strict = asked.get("name"), asked.get("strict")
    if name is not None and not isinstance(name, str):
        raise RequestError(f"{field}: name must be text, not {name!r:.60}")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"{field}: strict must be true or false, not {strict!r:.60}")
    if schema is None:
        raise RequestError(f"{field}: schema is missing; give json_schema with name and schema, or use json_object")
    field = f"{field}.schema"
    schema = read_schema(field, schema)
    return StructuredOutputsParams(json=schema if strict else lenient(schema), field=field)


def _of_structured_outputs(given: Any) -> StructuredOutputsParams | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise RequestError(f"structured_outputs: must be an object with one of {', '.join(_KINDS)}")
    asked = {name: value for name, value in given.items() if value is not None}
    if unknown := sorted(set(map(str, asked)) - {*_KINDS, *_OPTIONS}):
        raise RequestError(f"structured_outputs: {unknown[0]:.60} is not known; use one of {', '.join(_KINDS)}")
    if isinstance(asked.get("json"), dict):
        read_schema("structured_outputs: json", asked["json"])
    choice = asked.get("choice")
    if isinstance(choice, list) and len(choice) > _MAX_CHOICES:
        raise RequestError(f"structured_outputs: choice has {len(choice)} entries; use at most {_MAX_CHOICES}")
    try:
        return StructuredOutputsParams(**asked)
    except ValueError as error:
        raise RequestError(str(error)) from error
