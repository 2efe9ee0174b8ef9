"""The check of bodies: what is outside of texts is found as a plain search finds it, and other threads do not wait."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Request

from native_calls import longest_native_call
from serving import serve
from specinfer.llm import LLM
from specinfer.server import json_body, middleware
from specinfer.server.errors import ApiError
from specinfer.server.json_body import outside_strings, read_body
from specinfer.server.state import ServerState

_STRING = re.compile(rb'(?s)"(?:[^"\\]|\\.)*+"?')


@pytest.fixture(scope="module")
def llm(model_folder: Callable[..., Path]) -> LLM:
    return LLM(model_folder(tokenizer=True), max_num_seqs=4)


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
        read_body(body % (b"a" * start, b"9" * 40, b"9" * 19))
        with pytest.raises(ApiError, match="64 bits"):
            read_body(body % (b"a" * start, b"9" * 40, b"9" * 20))


@pytest.mark.parametrize("text", ["a, b ", "12345 ", "[{", "漢字", "a" * 99 + "\n"], ids=range(5))
def test_a_large_text_keeps_no_other_thread_waiting(text: str) -> None:
    body = json.dumps({"prompt": text * (4_000_000 // len(text.encode()))}, ensure_ascii=False).encode()
    read_body(body)
    assert longest_native_call(lambda: read_body(body)) < 0.025


def test_a_body_is_parsed_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop would be busy for as long as the thread was that parsed it before."""
    bodies = []
    monkeypatch.setattr(middleware, "read_body", lambda body: bodies.append(body) or read_body(body))
    monkeypatch.setattr(Request, "json", lambda _: pytest.fail("a body was parsed again"))
    asked: dict[str, dict[str, Any]] = {
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [5]},
        "/v1/completions": {"prompt": "a", "max_tokens": 1},
        "/v1/chat/completions": {"messages": []},
        "/v1/responses": {"input": "a"},
        "/v1/embeddings": {"input": "a"},
        "/v1/messages": {"messages": []},
        "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "b"},
        "/api/generate": {"prompt": "a"},
        "/api/chat": {"messages": []},
        "/api/show": {"model": "a"},
    }

    async def ask(client: httpx.AsyncClient, _: ServerState) -> list[int]:
        return [(await client.post(path, json=body)).status_code for path, body in asked.items()]

    statuses = serve(llm, ask)
    assert len(bodies) == len(asked)
    assert 500 not in statuses
    assert statuses[:3] == [200, 200, 200]
