"""Values of keywords of JSON schemas: those that llguidance can enforce, and limits of numbers that have an end."""

from typing import Any

TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
EXCLUSIVE = {"exclusiveMinimum": ("minimum", 1), "exclusiveMaximum": ("maximum", -1)}
NUMBERS = ("minimum", "maximum", "multipleOf", *EXCLUSIVE)
_PART, _STEP = 1e-12, 1e-16  # from an exclusive limit to the nearest number: a part of the limit, and the least step
_LARGEST = 1e18  # limit of a number that llguidance can enforce
_MAX_STEPS, _MAX_DECIMALS = 100_000, 15  # of a multipleOf


def bound_digits(made: dict[str, Any]) -> None:
    """Write the limits of numbers so that each number has an end; those with a multiple have one.

    llguidance's numbers above 0, and those from below 0 to above it, may have any count of zeros after the point.
    """
    if made.get("type") == "integer" or "multipleOf" in made:
        return
    for key, (bound, sign) in EXCLUSIVE.items():
        limit, inclusive = made.pop(key, False), made.get(bound)
        if limit is True:  # as in draft 4, where it is about the other limit
            limit, inclusive = inclusive if inclusive is not None else False, None
        if limit is not False:
            nearest = limit + sign * max(abs(limit) * _PART, _STEP)
            made[bound] = nearest if inclusive is None else sign * max(sign * nearest, sign * inclusive)
    types = as_list(made.get("type"))
    has_negative, has_zero = made.get("minimum", -1) < 0, made.get("maximum", 0) >= 0
    if "number" in types and has_negative and has_zero and not made.keys().isdisjoint(("minimum", "maximum")):
        below = {"type": "number", **_popped(made, "minimum"), "maximum": -_STEP}
        above = {"type": "number", "minimum": 0, **_popped(made, "maximum")}
        rest = [{"type": [name for name in types if name != "number"]}] if len(types) > 1 else []
        made["allOf"] = [*made.get("allOf", ()), {"anyOf": [below, above, *rest]}]


def _popped(made: dict[str, Any], key: str) -> dict[str, Any]:
    return {key: made.pop(key)} if key in made else {}


def plain_value(key: str, value: Any) -> Any:
    """Return the value of a keyword that holds no schemas, or None if it is of the wrong type."""
    if key == "const" or (key == "enum" and isinstance(value, list)):
        return value
    if key == "required" and isinstance(value, list):
        return texts_of(value)
    if key in ("pattern", "format") and isinstance(value, str):
        return value
    if key in EXCLUSIVE and isinstance(value, bool):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _LARGEST:
        return None
    if key in NUMBERS:
        return value if key != "multipleOf" or has_few_steps(value) else None
    return int(value) if key in _COUNTS and 0 <= value == int(value) else None


def is_harmless(key: str, value: Any) -> bool:
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


def type_names(value: Any) -> list[str]:
    return ["null" if each is None else str(each).lower() for each in as_list(value)]


def texts_of(given: Any) -> list[str]:
    return [each for each in given if isinstance(each, str)] if isinstance(given, (list, dict)) else []


def as_list(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [] if given is None else [given]
