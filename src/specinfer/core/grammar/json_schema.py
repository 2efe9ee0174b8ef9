"""JSON schemas as they are compiled: objects are closed, and keywords that no grammar can enforce are ignored.

Null is as missing. An object that names properties has no others unless the schema says so. Schemas that describe one
object together (`allOf`, or `$ref` and `anyOf` next to `properties`) stay open, and the object is closed around the
properties of all of them. Definitions are numbered anew, so that one may have an open and a closed form.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import unquote

from specinfer.core.grammar.schema_values import (
    NUMBERS,
    TYPES,
    as_list,
    bound_digits,
    is_harmless,
    plain_value,
    texts_of,
    type_names,
)

_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_CONDITIONS = ("if", "then", "else")
_MAPS = ("properties", "patternProperties")
_IN_PLACE = ("allOf", "anyOf", "oneOf")  # lists of schemas of the same value
_LISTS = (*_IN_PLACE, "prefixItems", "items")
_SCHEMAS = ("items", "additionalItems", "additionalProperties")
_NOT_ENFORCED = (
    "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if",
    "maxContains", "minContains", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
    "uniqueItems",
)  # fmt: skip
_NO_EFFECT: dict[str, tuple[Any, ...]] = {  # values of these that change nothing, or that closing enforces
    "dependencies": ({},), "dependentRequired": ({},), "dependentSchemas": ({},), "minContains": (0,), "not": (False,),
    "propertyNames": ({}, True), "unevaluatedItems": ({}, True, False), "unevaluatedProperties": ({}, True, False),
    "uniqueItems": (False,),
}  # fmt: skip
_ONLY_FOR = {  # keywords that say nothing about values of other types
    key: frozenset(types)
    for types, keys in (
        (("string",), ("pattern", "format", "minLength", "maxLength")),
        (("number", "integer"), NUMBERS),
        (("array",), ("prefixItems", "items", "additionalItems", "minItems", "maxItems", "contains", "uniqueItems")),
        (("object",), (*_MAPS, "additionalProperties", "required", "minProperties", "maxProperties", "propertyNames")),
    )
    for key in keys
}
_READ = {*_ONLY_FOR, *_IN_PLACE, *_NOT_ENFORCED, "$ref", "const", "enum", "type"}
_ALL = frozenset(TYPES)


class Ignored(NamedTuple):
    """A keyword that no grammar can enforce: its place in the schema, and the reason."""

    place: str
    reason: str


def prepare(schema: dict[str, Any], pattern_error: Callable[[str], str | None]) -> tuple[dict[str, Any], list[Ignored]]:
    """Return a schema as it is compiled, and what was ignored of it.

    Args:
        pattern_error: Returns why a regular expression cannot be enforced, or None if it can.
    """
    work = _Preparation(schema, pattern_error)
    prepared = work.prepared(schema, "", is_part=False)
    definitions: dict[str, Any] = {}
    while work.waiting:  # a loop, as definitions can refer to one another in a long chain
        name, place, target, is_part = work.waiting.pop()
        definitions[name] = work.prepared(target, place, is_part=is_part)
    assert isinstance(prepared, dict)
    return prepared | ({"$defs": definitions} if definitions else {}), work.ignored


class _Preparation:
    """The work on one schema.

    Attributes:
        ignored: What was ignored so far.
        waiting: Definitions that have a name and are not prepared yet: name, place, schema, `is_part`.
    """

    def __init__(self, root: dict[str, Any], pattern_error: Callable[[str], str | None]) -> None:
        self._root, self._pattern_error = root, pattern_error
        self._definitions: dict[tuple[int, bool], str] = {}
        self.ignored: list[Ignored] = []
        self.waiting: list[tuple[str, str, Any, bool]] = []

    def prepared(self, node: Any, place: str, *, is_part: bool) -> dict[str, Any] | bool:
        """Return one schema as it is compiled.

        Args:
            is_part: Others describe the same object, which is closed around the properties of all of them.
        """
        if node is None or isinstance(node, bool):
            return node is not False
        if not isinstance(node, dict):
            self._ignore(place, f"must be a schema, not {node!r:.40}")
            return True
        types = {name for name in type_names(node.get("type")) if name in TYPES} or TYPES
        given = {
            key: value
            for key, value in node.items()
            if key in _READ and (value is not None or key == "const") and not _ONLY_FOR.get(key, _ALL).isdisjoint(types)
        }
        if given.get("properties") == []:
            given["properties"] = {}  # an empty object of PHP
        if not isinstance(given.get("items"), list):
            given.pop("additionalItems", None)  # it has no meaning then
        if "pattern" in given or "patternProperties" in given:
            self._ignore_patterns(given, place)
        is_mixed = _is_mixed(given)
        made: dict[str, Any] = {}
        for key, value in given.items():
            self._add(made, key, value, f"{place}.{key}" if place else key, is_part or is_mixed)
        if not made.keys().isdisjoint(NUMBERS):
            bound_digits(made)
        if not is_part:
            self._close(given, made, is_mixed)
        return made

    def _add(self, made: dict[str, Any], key: str, value: Any, place: str, is_part: bool) -> None:
        """Add a keyword to a schema, unless it is unknown or cannot be enforced."""
        if key == "type":
            self._add_type(made, value, place)
        elif key == "$ref" and isinstance(value, str):
            if (target := self._target(value)) is None:
                self._ignore(place, f"{value!r:.60} is not in this schema")
            else:
                made[key] = f"#/$defs/{self._definition(target, value, is_part)}"
        elif key in _MAPS and isinstance(value, dict):
            made[key] = {name: self.prepared(each, f"{place}.{name}", is_part=False) for name, each in value.items()}
        elif key in _LISTS and isinstance(value, list):
            within, schemas = is_part and key in _IN_PLACE, [each for each in value if each is not None]
            made[key] = [self.prepared(each, f"{place}[{i}]", is_part=within) for i, each in enumerate(schemas)]
        elif key in _SCHEMAS and isinstance(value, (dict, bool)):
            made[key] = self.prepared(value, place, is_part=False)
        elif key == "format" and isinstance(value, str) and value not in _FORMATS:
            self._ignore(place, f"{value!r:.40} is none of {', '.join(_FORMATS)}")
        elif key in _NOT_ENFORCED:
            if value not in _NO_EFFECT.get(key, ()):
                self._ignore(place, "no grammar can enforce it")
        elif (known := plain_value(key, value)) is not None or key == "const":
            made[key] = known
        elif not is_harmless(key, value):
            reason = "takes too much work" if key == "multipleOf" else "cannot be"
            self._ignore(place, f"{reason}: {value!r:.40}")

    def _add_type(self, made: dict[str, Any], value: Any, place: str) -> None:
        names = type_names(value)
        if unknown := [name for name in names if name not in TYPES]:
            self._ignore(place, f"{unknown[0]!r:.40} is none of {', '.join(TYPES)}")
        if known := [name for name in names if name in TYPES]:
            made["type"] = known if isinstance(value, list) else known[0]

    def _ignore_patterns(self, given: dict[str, Any], place: str) -> None:
        """Ignore the regular expressions of a schema that cannot be enforced."""
        patterns = {"pattern": given.get("pattern")}
        if isinstance(given.get("patternProperties"), dict):
            patterns |= {f"patternProperties.{pattern}": pattern for pattern in given["patternProperties"]}
        for key, pattern in patterns.items():
            error = self._pattern_error(pattern) if isinstance(pattern, str) else None
            if error is not None:
                self._ignore(f"{place}.{key}" if place else key, error)
                if key == "pattern":
                    del given["pattern"]
                else:
                    others = {each: value for each, value in given["patternProperties"].items() if each != pattern}
                    given |= {"patternProperties": others, "additionalProperties": True}

    def _ignore(self, place: str, reason: str) -> None:
        self.ignored.append(Ignored(place, reason))

    # ---------------------------------------------------------------------------------- references

    @cached_property
    def _named(self) -> dict[str, Any]:
        return dict(_named_schemas(self._root))

    def _target(self, reference: str) -> dict[str, Any] | bool | None:
        """Return the schema that a reference names, or None."""
        base, _, fragment = reference.partition("#")
        node: Any = self._named.get(base) if base else self._root
        if fragment and not fragment.startswith("/"):
            node = self._named.get(f"#{fragment}")
        for step in fragment.split("/")[1:] if fragment != "/" else ():
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(node, list):
                node = node[int(step)] if step.isdecimal() and len(step) < 6 and int(step) < len(node) else None
            else:
                node = node.get(step) if isinstance(node, dict) else None
        node = self._named.get(reference) if node is None else node
        return node if isinstance(node, (dict, bool)) else None

    def _definition(self, target: dict[str, Any] | bool, reference: str, is_part: bool) -> str:
        """Return the name of a definition, which is prepared later."""
        key = (id(target), is_part)
        if key not in self._definitions:
            self._definitions[key] = name = str(len(self._definitions))
            self.waiting.append((name, reference, target, is_part))
        return self._definitions[key]

    # -------------------------------------------------------------------------------------- closing

    def _close(self, given: dict[str, Any], made: dict[str, Any], is_mixed: bool) -> None:
        """Close an object around its properties, and a tuple around its items, unless the schema says otherwise."""
        prefix, rest = ("items", "additionalItems") if isinstance(made.get("items"), list) else ("prefixItems", "items")
        if prefix in made and made.get("minItems", 0) <= len(made[prefix]):
            made.setdefault(rest, False)
        parts = list(self._parts(given)) if is_mixed else [given]
        has_any = any(isinstance(part.get(key), dict) for part in parts for key in _MAPS)
        if "additionalProperties" in made or not has_any or any(map(_is_open, parts)):
            return
        names = [name for part in parts for key in ("properties", "required") for name in texts_of(part.get(key))]
        more = {name: True for name in names if name not in made.get("properties", ())}
        if any("patternProperties" in part for part in parts):
            if is_mixed or more:  # which of them match a pattern is not known here
                return
        elif made.get("minProperties", 0) > len(set(names)):
            return
        if more:
            made["properties"] = made.get("properties", {}) | more
        made["additionalProperties"] = False

    def _parts(self, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield all schemas that describe the same object as this one, which is the first."""
        waiting: list[Any] = [given]
        seen = set()
        while waiting:
            part = waiting.pop()
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen.add(id(part))
            yield part
            for key in _IN_PLACE:
                waiting += as_list(part.get(key))
            waiting += [part.get(key) for key in _CONDITIONS]
            if isinstance(part.get("dependentSchemas"), dict):
                waiting += part["dependentSchemas"].values()
            if isinstance(part.get("$ref"), str):
                # What is not known may have any properties.
                waiting.append(self._target(part["$ref"]) or {"additionalProperties": True})


def _named_schemas(root: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what references may name apart from places in the schema: ids, anchors and definitions anywhere."""
    waiting: list[Any] = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            waiting += node.values()
            for key in ("$id", "id"):
                if isinstance(node.get(key), str):
                    yield node[key].rstrip("#"), node
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(node.get(key), str):
                    yield f"#{node[key]}", node
            for key in ("$defs", "definitions"):
                if isinstance(node.get(key), dict):
                    yield from ((f"#/{key}/{name}", each) for name, each in node[key].items())


def _is_mixed(given: dict[str, Any]) -> bool:
    """Return whether several schemas describe an object of this schema."""
    within = [key for key in ("anyOf", "oneOf", "$ref") if key in given] + as_list(given.get("allOf"))
    is_object = any(key in given for key in (*_MAPS, "required", "additionalProperties"))
    has_conditions = any(key in given for key in (*_CONDITIONS, "dependentSchemas"))
    return len(within) + is_object > 1 or (is_object and has_conditions)


def _is_open(part: dict[str, Any]) -> bool:
    """Return whether a schema says which other properties an object may have."""
    return part.get("propertyNames") is not None or any(
        part.get(key) not in (None, False) for key in ("additionalProperties", "unevaluatedProperties")
    )
