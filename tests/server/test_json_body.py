"""The check of bodies: what is outside of texts is found as a plain search finds it, and other threads do not wait."""

import json
import random
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from specinfer.server import json_body
from specinfer.server.errors import ApiError
from specinfer.server.json_body import check_body, outside_strings

_STRING = re.compile(rb'(?s)"(?:[^"\\]|\\.)*+"?')


@pytest.mark.parametrize("size", [2, 3, 7, 64])
def test_what_is_outside_of_strings_is_found_piece_by_piece(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(json_body, "_PIECE_BYTES", size)
    source = random.Random(size)
    for _ in range(500):
        texts = ["".join(source.choices('ab\\"[{,\n1é', k=source.randrange(12))) for _ in range(source.randrange(6))]
        value = source.choice([texts, {text: [1234567, texts] for text in texts}, {"a": {"b": texts}}])
        body = json.dumps(value, ensure_ascii=source.random() < 0.5).encode()
        assert b"".join(outside_strings(body)) == _STRING.sub(b"", body)


@pytest.mark.parametrize("size", [2, 5, 19, 64])
def test_long_numbers_are_found_wherever_pieces_end(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(json_body, "_PIECE_BYTES", size)
    for start in range(size):
        body = b'{"%s": [1, "%s", %s]}'
        check_body(body % (b"a" * start, b"9" * 40, b"9" * 19))
        with pytest.raises(ApiError, match="64 bits"):
            check_body(body % (b"a" * start, b"9" * 40, b"9" * 20))


def _longest_native_call(action: Callable[[], Any]) -> float:
    """Processor time of the longest call of native code, in which no other thread can run."""
    began: list[float] = []
    longest = 0.0

    def watch(_: Any, event: str, __: Any) -> None:
        nonlocal longest
        if event == "c_call":
            began.append(time.thread_time())
        elif event in ("c_return", "c_exception") and began:
            longest = max(longest, time.thread_time() - began.pop())

    sys.setprofile(watch)
    try:
        action()
    finally:
        sys.setprofile(None)
    return longest


@pytest.mark.parametrize("text", ["a, b ", "12345 ", "[{", "漢字", "a" * 99 + "\n"], ids=range(5))
def test_a_large_text_keeps_no_other_thread_waiting(text: str) -> None:
    body = json.dumps({"prompt": text * (4_000_000 // len(text.encode()))}, ensure_ascii=False).encode()
    check_body(body)
    assert _longest_native_call(lambda: check_body(body)) < 0.025
