"""JSON schemas as they are compiled: objects are closed, and keywords that no grammar can enforce are left out.

Null is as missing. An object that names properties has no others unless the schema says so. Schemas that describe one
object together (`allOf`, or `$ref` and `anyOf` next to `properties`) stay open, and the object is closed around the
properties of all of them. Definitions are numbered anew, so that one may have an open and a closed form.
"""

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import unquote

TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_EXCLUSIVE = {"exclusiveMinimum": ("minimum", 1), "exclusiveMaximum": ("maximum", -1)}
_NUMBERS = ("minimum", "maximum", "multipleOf", *_EXCLUSIVE)
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
_READ = {
    *_COUNTS,
    *_NUMBERS,
    *_MAPS,
    *_LISTS,
    *_SCHEMAS,
    "$ref",
    "enum",
    "format",
    "pattern",
    "required",
    "type",
    "const",
    *_NOT_ENFORCED,
}
_STEP = 1e-16  # from an exclusive limit to the nearest number; without it, "0.000..." above 0 would have no end
_LARGEST = 1e18  # limit of a number that llguidance can enforce
_MAX_STEPS, _MAX_DECIMALS = 100_000, 9  # of a multipleOf


class LeftOut(NamedTuple):
    """A keyword that no grammar can enforce: its place in the schema, and the reason."""

    place: str
    reason: str


def prepare(schema: dict[str, Any], pattern_error: Callable[[str], str | None]) -> tuple[dict[str, Any], list[LeftOut]]:
    """Return a schema as it is compiled, and what was left out of it.

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
    return prepared | ({"$defs": definitions} if definitions else {}), work.left_out


class _Preparation:
    """The work on one schema.

    Attributes:
        left_out: What was left out so far.
        waiting: Definitions that have a name and are not prepared yet: name, place, schema, `is_part`.
    """

    def __init__(self, root: dict[str, Any], pattern_error: Callable[[str], str | None]) -> None:
        self._root, self._pattern_error = root, pattern_error
        self._definitions: dict[tuple[int, bool], str] = {}
        self.left_out: list[LeftOut] = []
        self.waiting: list[tuple[str, str, Any, bool]] = []

    def prepared(self, node: Any, place: str, *, is_part: bool) -> dict[str, Any] | bool:
        """Return one schema as it is compiled.

        Args:
            is_part: Others describe the same object, which is closed around the properties of all of them.
        """
        if node is None or isinstance(node, bool):
            return node is not False
        if not isinstance(node, dict):
            self._leave_out(place, f"must be a schema, not {node!r:.40}")
            return True
        given = {key: value for key, value in node.items() if key in _READ and (value is not None or key == "const")}
        if given.get("properties") == []:
            given["properties"] = {}  # an empty object of PHP
        if "pattern" in given or "patternProperties" in given:
            self._leave_out_patterns(given, place)
        is_mixed = _is_mixed(given)
        made: dict[str, Any] = {}
        for key, value in given.items():
            self._add(made, given, key, value, f"{place}.{key}" if place else key, is_part or is_mixed)
        if not made.keys().isdisjoint(_EXCLUSIVE):
            _include_limits(made)
        if not is_part:
            self._close(given, made, is_mixed)
        return made

    def _add(
        self, made: dict[str, Any], given: dict[str, Any], key: str, value: Any, place: str, is_part: bool
    ) -> None:
        """Add a keyword to a schema, unless it is unknown or cannot be enforced."""
        if key == "type":
            self._add_type(made, value, place)
        elif key == "$ref" and isinstance(value, str):
            if (target := self._target(value)) is None:
                self._leave_out(place, f"{value!r:.60} is not in this schema")
            else:
                made[key] = f"#/$defs/{self._definition(target, value, is_part)}"
        elif key in _MAPS and isinstance(value, dict):
            made[key] = {name: self.prepared(each, f"{place}.{name}", is_part=False) for name, each in value.items()}
        elif key in _LISTS and isinstance(value, list):
            within, kept = is_part and key in _IN_PLACE, [each for each in value if each is not None]
            made[key] = [self.prepared(each, f"{place}[{i}]", is_part=within) for i, each in enumerate(kept)]
        elif key in _SCHEMAS and isinstance(value, (dict, bool)):
            made[key] = self.prepared(value, place, is_part=False)
        elif key == "format" and isinstance(value, str) and value not in _FORMATS:
            if "string" in str(given.get("type", "string")).lower():  # formats of numbers are their sizes
                self._leave_out(place, f"{value!r:.40} is none of {', '.join(_FORMATS)}")
        elif key in _NOT_ENFORCED:
            if value not in _NO_EFFECT.get(key, ()):
                self._leave_out(place, "no grammar can enforce it")
        elif (known := _plain_value(key, value)) is not None or key == "const":
            made[key] = known
        elif not _is_harmless(key, value):
            reason = "takes too much work" if key == "multipleOf" else "cannot be"
            self._leave_out(place, f"{reason}: {value!r:.40}")

    def _add_type(self, made: dict[str, Any], value: Any, place: str) -> None:
        names = ["null" if each is None else str(each).lower() for each in _as_list(value)]
        if unknown := [name for name in names if name not in TYPES]:
            self._leave_out(place, f"{unknown[0]!r:.40} is none of {', '.join(TYPES)}")
        if known := [name for name in names if name in TYPES]:
            made["type"] = known if isinstance(value, list) else known[0]

    def _leave_out_patterns(self, given: dict[str, Any], place: str) -> None:
        """Leave out the regular expressions of a schema that cannot be enforced."""
        patterns = {"pattern": given.get("pattern")}
        if isinstance(given.get("patternProperties"), dict):
            patterns |= {f"patternProperties.{pattern}": pattern for pattern in given["patternProperties"]}
        for key, pattern in patterns.items():
            error = self._pattern_error(pattern) if isinstance(pattern, str) else None
            if error is not None:
                self._leave_out(f"{place}.{key}" if place else key, error)
                if key == "pattern":
                    del given["pattern"]
                else:
                    others = {each: value for each, value in given["patternProperties"].items() if each != pattern}
                    given |= {"patternProperties": others, "additionalProperties": True}

    def _leave_out(self, place: str, reason: str) -> None:
        self.left_out.append(LeftOut(place, reason))

    # ---------------------------------------------------------------------------------- references

    @cached_property
    def _named(self) -> dict[str, Any]:
        return dict(_named_schemas(self._root))

    def _target(self, reference: str) -> dict[str, Any] | bool | None:
        """Return the schema that a reference names, or None."""
        base, _, fragment = reference.partition("#")
        found: Any = self._named.get(base) if base else self._root
        if fragment and not fragment.startswith("/"):
            found = self._named.get(f"#{fragment}")
        for step in fragment.split("/")[1:] if fragment != "/" else ():
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = found[int(step)] if step.isdecimal() and len(step) < 6 and int(step) < len(found) else None
            else:
                found = found.get(step) if isinstance(found, dict) else None
        found = self._named.get(reference) if found is None else found
        return found if isinstance(found, (dict, bool)) else None

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
        names = [name for part in parts for key in ("properties", "required") for name in _texts(part.get(key))]
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
                waiting += _as_list(part.get(key))
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
    within = [key for key in ("anyOf", "oneOf", "$ref") if key in given] + _as_list(given.get("allOf"))
    is_object = any(key in given for key in (*_MAPS, "required", "additionalProperties"))
    has_conditions = any(key in given for key in (*_CONDITIONS, "dependentSchemas"))
    return len(within) + is_object > 1 or (is_object and has_conditions)


def _is_open(part: dict[str, Any]) -> bool:
    """Return whether a schema says which other properties an object may have."""
    return part.get("propertyNames") is not None or any(
        part.get(key) not in (None, False) for key in ("additionalProperties", "unevaluatedProperties")
    )


def _include_limits(made: dict[str, Any]) -> None:
    """Replace exclusive limits of numbers by the nearest inclusive ones; digits of other numbers have an end."""
    if made.get("type") == "integer" or "multipleOf" in made:
        return
    for key, (bound, sign) in _EXCLUSIVE.items():
        limit, other = made.pop(key, False), made.get(bound)
        if limit is True:  # as in draft 4, where it is about the other limit
            limit, other = other if other is not None else False, None
        if limit is not False:
            nearest = limit + sign * max(math.ulp(limit), _STEP)
            made[bound] = nearest if other is None else sign * max(sign * nearest, sign * other)


def _plain_value(key: str, value: Any) -> Any:
    """Return the value of a keyword that holds no schemas, or None if it is of the wrong type."""
    if key == "const" or (key == "enum" and isinstance(value, list)):
        return value
    if key == "required" and isinstance(value, list):
        return _texts(value)
    if key in ("pattern", "format") and isinstance(value, str):
        return value
    if key in _EXCLUSIVE and isinstance(value, bool):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _LARGEST:
        return None
    if key in _NUMBERS:
        return value if key != "multipleOf" or has_few_steps(value) else None
    return int(value) if key in _COUNTS and 0 <= value == int(value) else None


def _is_harmless(key: str, value: Any) -> bool:
    """Return whether a value that cannot be used changes nothing: as in draft 3, or a limit far away."""
    if isinstance(value, bool):
        return key == "required"
    if not isinstance(value, (int, float)):
        return False
    return (
        value >= _LARGEST if key.lower().endswith("maximum") else value <= -_LARGEST and key.lower().endswith("minimum")
    )


def has_few_steps(multiple: float) -> bool:
    """Return whether the automaton for a `multipleOf` is small: it has a state for each step, of 1 or of a decimal."""
    steps, num_decimals = abs(multiple), 0
    while steps != int(steps) and num_decimals < _MAX_DECIMALS:
        steps, num_decimals = steps * 10, num_decimals + 1
    return steps == int(steps) and 0 < steps <= _MAX_STEPS


def _texts(given: Any) -> list[str]:
    return [each for each in given if isinstance(each, str)] if isinstance(given, (list, dict)) else []


def _as_list(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [] if given is None else [given]
