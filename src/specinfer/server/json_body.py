"""Strict parsing of request bodies: one JSON object that means the same to every parser.

Python's parser accepts NaN, repeated names and lone surrogates, and fails on deep nesting and long numbers with errors
of its own. Each of these is refused here with a clear message. A search of a whole body would keep all other threads
waiting, so bodies are searched piece by piece. Routes take what the middleware has parsed (`ParsedRoute`).
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NoReturn

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from specinfer.inputs.formats.arguments import MAX_DEPTH, is_deep
from specinfer.server.errors import ApiError


class ParsedRequest(Request):
    """A request that returns the object that `Bodies` has read."""

    async def json(self) -> Any:
        return self.scope["state"]["fields"]


class ParsedRoute(APIRoute):
    """A route that takes its fields from a `ParsedRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_parsed(request: Request) -> Response:
            return await handle(ParsedRequest(request.scope, request.receive))

        return handle_parsed


MAX_NAMES = 20_000  # of one object: each unknown one may become an error of its own
MAX_HOLDERS = 100_000  # lists and objects: Python's parser would keep all threads waiting for seconds for a million
MAX_VALUES = 1 << 18  # numbers, texts and the like: a million keep all threads waiting for 0.2 s
_PIECE_BYTES = 1 << 15
_NUM_LONG = 19  # digits that may be too many for 64 bits
_LONG_NUMBER = re.compile(rb"\d{%d}" % _NUM_LONG)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_body(body: bytes) -> dict[str, Any]:
    """Return the JSON object that a body is.

    Raises:
        ApiError: The body is not; the message says what to change.
    """
    has_long_number = _search(body)
    try:
        value = _parse(body, has_long_number)
    except UnicodeDecodeError:
        raise _refused("not UTF-8; encode it so") from None
    except RecursionError:
        raise _refused(f"nested deeper than {MAX_DEPTH} levels; flatten it") from None
    except ValueError as error:
        raise _refused(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise _refused("must be a JSON object, {...}")
    if is_deep(value):
        raise _refused(f"nested deeper than {MAX_DEPTH} levels; flatten it")
    if _SURROGATE.search(body):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise _refused("a text is not valid Unicode (a lone surrogate); mend its encoding") from None
    return value


def read_generated(text: str) -> Any:
    """Return the value of JSON that a model generated, or None if it was cut off or is nested too deeply."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return None if is_deep(value) else value


def outside_strings(body: bytes) -> Iterator[bytes]:
    """Yield what is outside of strings in each piece of a body, as far as the body is JSON."""
    start, is_inside = 0, False
    while start < len(body):
        piece = body[start : start + _PIECE_BYTES]
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        if num_backslashes % 2 and start + len(piece) < len(body):
            piece = piece[:-1]  # an escape is in one piece
        start += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0


def _search(body: bytes) -> bool:
    """Count what a body has outside of strings, and return whether there is a long number."""
    num_holders = num_commas = 0
    has_long_number, last = False, b""
    for text in outside_strings(body):
        num_holders += text.count(b"[") + text.count(b"{")
        num_commas += text.count(b",")
        if num_holders > MAX_HOLDERS:
            raise _refused(f"more than {MAX_HOLDERS} lists and objects; send fewer")
        if num_commas >= MAX_VALUES:
            raise _refused(f"more than {MAX_VALUES} values; send fewer")
        has_long_number = has_long_number or _LONG_NUMBER.search(last + text) is not None
        last = (last + text)[1 - _NUM_LONG :]
    return has_long_number


def _parse(body: bytes, has_long_number: bool) -> Any:
    return json.loads(
        body.decode(),
        object_pairs_hook=_object,
        parse_constant=_refuse_constant,
        parse_float=_float,
        parse_int=_int if has_long_number else None,  # it is called for every number
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
    raise ValueError(f"{word} is not a JSON number; leave it out")


def _float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {digits:.20} is too large")
    return number


def _int(digits: str) -> int:
    if len(digits.lstrip("-")) > 19:
        raise ValueError(f"the number {digits:.20}... has more than 64 bits")
    return int(digits)


def _refused(reason: str) -> ApiError:
    return ApiError("invalid_json", f"body: {reason}")
