"""What clients of Ollama's API send: options, thoughts, results of tools, and conversations beyond the context."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ollama
import pytest

from serving import served_on_port
from specinfer.core.outputs import TextChunk
from specinfer.inputs.formats.parser import OutputDelta
from specinfer.server.blocks import Blocks
from specinfer.server.field_checks import IGNORED_HEADER
from specinfer.server.ollama_pieces import Pieces
from tests.server.dialects import OLLAMA_CHAT, USER
from tests.server.scripted_target import TEMPLATES, Talk, scripted, talking_to
from tiny import make_request

CALLS = [{"function": {"name": name, "arguments": {"city": name}}} for name in ("time", "weather")]


@pytest.fixture(scope="module")
def talk() -> Iterator[Talk]:
    with talking_to(OLLAMA_CHAT, ["Fine."], template=TEMPLATES["thinking"], max_len=512) as made:
        yield made


# ------------------------------------------------------------------------------------------- models


def test_clients_that_compare_versions_find_a_release_of_ollama(talk: Talk) -> None:
    version = talk.server.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)


@pytest.mark.parametrize("path", ["/api/version", "/api/tags", "/api/ps", "/v1/models", "/version", "/health", "/"])
def test_whatever_can_be_read_has_headers(talk: Talk, path: str) -> None:
    answer, whole = talk.server.request("HEAD", path), talk.server.get(path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"] == whole.headers["content-type"]
    assert talk.server.request("HEAD", "/api/chat").status_code == 405


def test_a_model_is_described_by_the_keys_that_clients_read(talk: Talk) -> None:
    shown = talk.server.post("/api/show", {"model": "tiny:latest"}).json()
    info = shown["model_info"]
    family = info["general.architecture"]
    assert info["general.basename"] == "tiny"
    assert info[f"{family}.context_length"] == 512
    assert (info[f"{family}.embedding_length"], info[f"{family}.block_count"]) == (16, 1)
    assert (info[f"{family}.attention.head_count"], info[f"{family}.attention.head_count_kv"]) == (2, 1)
    assert {"completion", "tools"} <= {*shown["capabilities"]}
    assert "insert" not in shown["capabilities"]
    (listed,) = talk.server.get("/api/tags").json()["models"]
    assert listed["capabilities"] == shown["capabilities"]


def test_a_model_with_tokens_for_it_can_fill_in_the_middle() -> None:
    marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    with talking_to(OLLAMA_CHAT, ["b"], added_tokens=marks) as talk:
        assert "insert" in talk.server.post("/api/show", {"model": "tiny"}).json()["capabilities"]


_ZERO = (0, "0", "0s", 0.0, "0m0s")


@pytest.mark.parametrize("keep_alive", [*_ZERO, "5m", -1, None])
def test_a_model_stays_loaded_whatever_it_is_asked(talk: Talk, keep_alive: Any) -> None:
    for path in ("/api/chat", "/api/generate"):
        answer = talk.server.post(path, {"model": "tiny", "keep_alive": keep_alive})
        assert answer.status_code == 200
        assert (answer.json()["done"], answer.json()["done_reason"]) == (
            True,
            "unload" if keep_alive in _ZERO else "load",
        )
    assert talk.post(keep_alive=keep_alive).json()["message"]["content"] == "Fine."


# ------------------------------------------------------------------------------------------ options


def test_options_that_are_not_known_are_named(talk: Talk) -> None:
    options = {
        "temperatures": 1,
        "mirostat": 1,
        "tfs_z": 0.5,
        "num_ctx": 131072.0,
        "num_gpu": 1,
        "top_k": 5.0,
        "odd": None,
    }
    answer = talk.post(options=options)
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED_HEADER] == "options.mirostat, options.temperatures, options.tfs_z"


# ----------------------------------------------------------------------------------------- messages


def test_results_belong_to_the_call_with_their_name_or_id() -> None:
    def results_of(*results: dict[str, Any]) -> str:
        turns = [USER, {"role": "assistant", "content": "", "tool_calls": CALLS}]
        return talk.prompt(messages=[*turns, *({"role": "tool"} | result for result in results)])

    shown = "{{ message.name }} {{ message.tool_call_id }};"
    template = TEMPLATES["hermes"].replace("<tool_response>\n{{ message.content }}\n</tool_response>", shown)
    with talking_to(OLLAMA_CHAT, ["a"], template=template) as talk:
        assert "time call_0;" in results_of({"content": "noon"}, {"content": "sunny"}).split("weather call_1;")[0]
        by_name = {"tool_name": "weather", "content": "sunny"}, {"tool_name": "time", "content": "noon"}
        assert "weather call_1;" in results_of(*by_name).split("time call_0;")[0]
        by_id = {"tool_call_id": "call_1", "content": "sunny"}, {"content": "noon"}
        assert "weather call_1;" in results_of(*by_id).split("time call_0;")[0]
        assert "other call_0;" in results_of({"tool_name": "other", "content": "a"})


def test_images_of_the_history_are_a_note(talk: Talk) -> None:
    image = USER | {"images": ["iVBORw0KGgo="]}
    assert "Hi.\n[image: not shown, this model reads text only]<|im_end|>" in talk.prompt(messages=[image, USER])


def _long(count: int, size: int = 40) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": f"{i}: " + "a, b. " * size} for i in range(count)]


def test_the_oldest_messages_of_a_long_conversation_are_cut(talk: Talk) -> None:
    system, turns = {"role": "system", "content": "Be brief."}, _long(9)
    prompt = talk.prompt(messages=[system, *turns])
    assert "system\nBe brief.<|im_end|>" in prompt
    assert "user\n8: a" in prompt
    assert "user\n0: a" not in prompt
    assert len(talk.llm.tokenizer.encode(prompt)) <= 512 - 512 // 8
    refused = talk.post(messages=[system, *turns], truncate=False)
    assert (refused.status_code, refused.json()["code"]) == (400, "context_length_exceeded")
    assert talk.post(messages=_long(1, 400)).status_code == 400  # the last message alone is too long
    assert talk.post(messages=[*_long(39, 400), USER]).status_code == 200  # too long to be encoded


def test_a_result_is_not_cut_off_from_its_call(talk: Talk) -> None:
    rounds = [
        [
            {"role": "assistant", "content": "", "tool_calls": CALLS[:1]},
            {"role": "tool", "content": f"{i}: " + "a, b. " * 40},
        ]
        for i in range(6)
    ]
    prompt = talk.prompt(messages=[USER, *(message for pair in rounds for message in pair)])
    assert prompt.startswith("<|im_start|>assistant\n<tool_call>")
    assert "5: a" in prompt


# ----------------------------------------------------------------------------------------- thoughts


def test_the_official_client_gets_thoughts_and_the_answer() -> None:
    with (
        scripted(["<think>\nHm.\n</think>\n\nYes."], template=TEMPLATES["thinking"], max_len=512) as llm,
        served_on_port(llm) as url,
        ollama.Client(url) as client,
    ):
        assert "thinking" in client.show("tiny").capabilities
        message = client.chat("tiny", [USER], think=True).message
        pieces = list(client.chat("tiny", [USER], stream=True))
        answer = client.generate("tiny", "Hi.", think=True)
    assert (message.thinking, message.content) == ("Hm.", "Yes.")
    assert "".join(piece.message.thinking or "" for piece in pieces) == "Hm."
    assert "".join(piece.message.content or "" for piece in pieces) == "Yes."
    assert (answer.thinking, answer.response) == ("Hm.", "Yes.")


@pytest.mark.parametrize("kind", ["message", "response"])
def test_thoughts_are_told_from_the_answer(kind: str) -> None:
    generation: Any = SimpleNamespace(requests=[make_request("a", [1, 2, 3])])
    deltas = [OutputDelta("Yes."), OutputDelta(reasoning="Hm.")]
    parser: Any = SimpleNamespace(push=lambda text: [deltas.pop()] if text else [], finish=list)
    pieces = Pieces("tiny", kind, generation, Blocks(parser), None, 0)
    (first,) = pieces.write(TextChunk("Hm.", [], []))
    (second,) = pieces.write(TextChunk("Yes.", [], []))
    (last,) = pieces.write(TextChunk("", [], [], finish_reason="stop"))
    whole = pieces.answer()
    if kind == "message":
        assert first["message"] == {"role": "assistant", "content": "", "thinking": "Hm."}
        assert second["message"] == {"role": "assistant", "content": "Yes."}
        assert whole["message"] == {"role": "assistant", "content": "Yes.", "thinking": "Hm."}
    else:
        assert (first["response"], first["thinking"]) == ("", "Hm.")
        assert (whole["response"], whole["thinking"]) == ("Yes.", "Hm.")
        assert "thinking" not in second
    assert last["done"]
    assert json.dumps(pieces.wait()[0])
