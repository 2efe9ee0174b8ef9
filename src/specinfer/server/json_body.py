"""Strict parsing of request bodies: one JSON object that means the same to every parser.

Python's parser accepts NaN, repeated names and lone surrogates, and fails on deep nesting and long numbers with errors
of its own. Each of these is refused here with a clear message.
"""

import json
import math
import re
from collections import Counter
from typing import Any, NoReturn

from specinfer.server.errors import ApiError

MAX_DEPTH = 100
MAX_NAMES = 20_000  # of one object: each unknown one may become an error of its own
MAX_HOLDERS = 100_000  # lists and objects: Python's parser would keep all threads waiting for seconds for a million
MAX_VALUES = 1 << 18  # numbers, texts and the like: a million keep all threads waiting for 0.2 s
_STRING = re.compile(rb'(?s)"(?:[^"\\]|\\.)*+"?')
_LONG_NUMBER = re.compile(rb"\d{19}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def check_body(body: bytes) -> None:
    """Check that a body is a valid JSON object.

    Raises:
        ApiError: The body is not; the message says what to change.
    """
    if _excess(body) and (wrong := _excess(_STRING.sub(b"", body))):
        raise _refused(f"more than {wrong}; send fewer")
    try:
        value = _parse(body)
    except UnicodeDecodeError:
        raise _refused("not UTF-8; encode it so") from None
    except RecursionError:
        raise _refused(f"nested deeper than {MAX_DEPTH} levels; flatten it") from None
    except ValueError as error:
        raise _refused(f"no JSON that can be read: {error}") from None
    if not isinstance(value, dict):
        raise _refused("must be a JSON object, {...}")
    if _is_deep(value):
        raise _refused(f"nested deeper than {MAX_DEPTH} levels; flatten it")
    if _SURROGATE.search(body):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise _refused("a text is not valid Unicode (a lone surrogate); mend its encoding") from None


def read_generated(text: str) -> Any:
    """Return the value of JSON that a model generated, or None if it was cut off or is nested too deeply."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return None if _is_deep(value) else value


def _parse(body: bytes) -> Any:
    return json.loads(
        body.decode(),
        object_pairs_hook=_object,
        parse_constant=_refuse_constant,
        parse_float=_float,
        # This is called for every number, so it is only used if the body has a long one.
        parse_int=_int if _LONG_NUMBER.search(body) else None,
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        (repeated, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {repeated!r:.60} is repeated; give it once")
    if len(fields) > MAX_NAMES:
        raise ValueError(f"{len(fields)} names in one object; send at most {MAX_NAMES}")
    return fields


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number; leave it out")


def _float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {digits:.20} is too large")
    return number


def _int(digits: str) -> int:
    if len(digits.lstrip("-")) > 19:
        raise ValueError(f"the number {digits:.20}... has more than 64 bits")
    return int(digits)


def _excess(text: bytes) -> str | None:
    """Return what there is too much of in a text without strings, which have no meaning here, or None."""
    if text.count(b"[") + text.count(b"{") > MAX_HOLDERS:
        return f"{MAX_HOLDERS} lists and objects"
    return f"{MAX_VALUES} values" if text.count(b",") >= MAX_VALUES else None


def _is_deep(value: Any) -> bool:
    level, depth = [value] if isinstance(value, (dict, list)) else [], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            return True
        inner = (item for holder in level for item in (holder.values() if isinstance(holder, dict) else holder))
        level = [item for item in inner if isinstance(item, (dict, list))]
    return False


def _refused(reason: str) -> ApiError:
    return ApiError(400, f"body: {reason}", code="invalid_json")
