"""The requested format of a response as a grammar: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from collections.abc import Mapping
from typing import Any

from specinfer.core.errors import RequestError
from specinfer.core.grammar.schema_values import TYPES
from specinfer.core.structured_outputs import StructuredOutputsParams
from specinfer.server.schemas import lenient, read_schema

_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_OPTIONS = ("disable_any_whitespace", "whitespace_pattern", "disable_additional_properties", "disable_fallback")
_MAX_CHOICES = 2_000
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
