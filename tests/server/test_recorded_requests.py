"""Requests that clients of other projects have sent, cut short, each with what the model generates for it.

`test_client_programs.py` has the clients, and records them.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serving import post
from specinfer import LLM
from tests.server.dialects import OLLAMA_CHAT, RESPONSES, read
from tests.server.recorded_requests import FOLDER
from tests.server.scripted_target import TEMPLATES, scripted

REQUESTS = {
    f"{file.stem}-{number}": request
    for file in sorted(FOLDER.glob("*.json"))
    for number, request in enumerate(json.loads(file.read_text(encoding="utf-8")))
}


class Model:
    """Models that generate what the request at hand says, with a template of each kind."""

    def __init__(self, llms: dict[bool, LLM], texts: list[str]) -> None:
        self._llms, self._texts = llms, texts

    def answer(self, request: Any) -> httpx.Response:
        self._texts[:] = [request["generates"]]
        llm = self._llms["<think>" in request["generates"]]
        (answer,) = post(llm, request["path"], request["body"], headers=request["headers"])
        return answer


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    texts: list[str] = []
    plain = scripted(lambda _: texts[0], drafters=["ngram"], max_len=8192)
    thinking = scripted(lambda _: texts[0], drafters=["ngram"], max_len=8192, template=TEMPLATES["thinking"])
    with plain as one, thinking as other:
        yield Model({False: one, True: other}, texts)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_recorded_request_is_served(name: str, model: Model) -> None:
    request = REQUESTS[name]
    answer = model.answer(request)
    assert answer.headers["x-request-id"]
    is_stream = request["body"].get("stream", request["path"] == OLLAMA_CHAT)
    kind = "text/event-stream" if request["path"] != OLLAMA_CHAT else "application/x-ndjson"
    assert answer.headers["content-type"].startswith(kind if is_stream else "application/json")
    found, generated = read(answer), request["generates"]
    assert request["path"] != RESPONSES or found.reason == "completed"
    if "<think>" in generated and "</think>" in generated:
        wanted, generated = generated.removeprefix("<think>").split("</think>")
        assert found.thought.strip() in (wanted.strip(), "")  # some clients do not ask for it
    if "<tool_call>" in generated:
        made = json.loads(generated.split("<tool_call>")[1].split("</tool_call>")[0])
        assert found.read_calls == [(made["name"], made["arguments"])]
    else:
        assert found.text.strip() == generated.strip()
        assert not found.calls
