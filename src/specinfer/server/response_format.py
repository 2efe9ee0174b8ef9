"""The requested format of a response as a grammar: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from collections.abc import Mapping
from typing import Any

from specinfer.core.errors import RequestError
from specinfer.core.structured_outputs import StructuredOutputsParams
from specinfer.server.schemas import read_schema

_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_MAX_CHOICES = 2_000


def structured_outputs_of(response_format: Any, structured_outputs: Any = None) -> StructuredOutputsParams | None:
    """Return the constraints on a response, or None if none were requested.

    Raises:
        RequestError: The format cannot be served, or there are two; the message names the field.
    """
    of_format, of_field = _of_response_format(response_format), _of_structured_outputs(structured_outputs)
    if of_format is not None and of_field is not None:
        raise RequestError("structured_outputs: a response has one format; leave this or response_format out")
    return of_format or of_field


def _of_response_format(given: Any) -> StructuredOutputsParams | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise RequestError(f'response_format: must be an object such as {{"type": "text"}}, not {given!r:.60}')
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True, field="response_format")
    if kind != "json_schema":
        raise RequestError(f"response_format: type must be text, json_object or json_schema, not {kind!r:.60}")
    asked = given.get("json_schema")
    if not isinstance(asked, Mapping):
        raise RequestError("response_format: json_schema is missing; give an object with name and schema")
    return json_schema_params("response_format", asked)


def json_schema_params(field: str, asked: Mapping[str, Any]) -> StructuredOutputsParams:
    """Return the constraints of an object with `name`, `schema` and `strict`, as the SDKs send it.

    Raises:
        RequestError: The schema is missing, or cannot be served.
    """
    name, strict = asked.get("name"), asked.get("strict")
    if name is not None and not isinstance(name, str):
        raise RequestError(f"{field}: name must be text, not {name!r:.60}")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"{field}: strict must be true or false, not {strict!r:.60}")
    if asked.get("schema") is None:
        raise RequestError(f"{field}: schema is missing; give a JSON schema, or use json_object")
    schema = read_schema(f"{field}: schema", asked["schema"])
    # Without `strict`, keywords that a grammar cannot enforce are left to the model.
    options = {} if strict else {"x-guidance": {"lenient": True}}
    return StructuredOutputsParams(json=schema | options, field=field)


def _of_structured_outputs(given: Any) -> StructuredOutputsParams | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise RequestError(f"structured_outputs: must be an object with one of {', '.join(_KINDS)}")
    if unknown := sorted(set(map(str, given)) - set(_KINDS)):
        raise RequestError(f"structured_outputs: {unknown[0]:.60} is not known; use one of {', '.join(_KINDS)}")
    asked = {name: value for name, value in given.items() if value is not None}
    if isinstance(asked.get("json"), dict):
        read_schema("structured_outputs: json", asked["json"])
    choice = asked.get("choice")
    if isinstance(choice, list) and len(choice) > _MAX_CHOICES:
        raise RequestError(f"structured_outputs: choice has {len(choice)} entries; use at most {_MAX_CHOICES}")
    try:
        return StructuredOutputsParams(**asked)
    except ValueError as error:
        raise RequestError(str(error)) from error
