"""What clients of Ollama's API send: options, thoughts, results of tools, and conversations beyond the context."""

import json
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import httpx
import ollama
import pytest

from serving import served_on_port
from specinfer import LLM
from specinfer.core.outputs import TextChunk
from specinfer.inputs.formats.parser import OutputDelta
from specinfer.server.blocks import Blocks
from specinfer.server.field_checks import IGNORED_HEADER
from specinfer.server.ollama_pieces import Pieces
from tests.server.scripted_target import TEMPLATES, scripted
from tiny import make_request

USER = {"role": "user", "content": "Hi."}
CALLS = [{"function": {"name": name, "arguments": {"city": name}}} for name in ("time", "weather")]


class Server:
    """A server whose answers are written beforehand."""

    def __init__(self, llm: LLM, url: str) -> None:
        self.llm, self.client = llm, httpx.Client(base_url=url, timeout=60)

    def close(self) -> None:
        self.client.close()

    def chat(self, **body: Any) -> httpx.Response:
        given = {"model": "tiny", "messages": [USER], "stream": False, **body}
        return self.client.post("/api/chat", json=given)

    def prompt(self, **body: Any) -> str:
        """The prompt of a request, which is served."""
        answer = self.chat(**body)
        assert answer.status_code == 200, answer.text
        return str(self.llm.script.prompts[-1])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with (
        scripted(["Fine."], template=TEMPLATES["thinking"], max_len=512) as llm,
        served_on_port(llm) as url,
        closing(Server(llm, url)) as made,
    ):
        yield made


# ------------------------------------------------------------------------------------------- models


def test_clients_that_compare_versions_find_a_release_of_ollama(server: Server) -> None:
    version = server.client.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)


@pytest.mark.parametrize("path", ["/api/version", "/api/tags", "/api/ps", "/v1/models", "/version", "/health", "/"])
def test_whatever_can_be_read_has_headers(server: Server, path: str) -> None:
    answer, whole = server.client.head(path), server.client.get(path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"] == whole.headers["content-type"]
    assert server.client.head("/api/chat").status_code == 405


def test_a_model_is_described_by_the_keys_that_clients_read(server: Server) -> None:
    shown = server.client.post("/api/show", json={"model": "tiny:latest"}).json()
    info = shown["model_info"]
    family = info["general.architecture"]
    assert info["general.basename"] == "tiny"
    assert info[f"{family}.context_length"] == 512
    assert (info[f"{family}.embedding_length"], info[f"{family}.block_count"]) == (16, 1)
    assert (info[f"{family}.attention.head_count"], info[f"{family}.attention.head_count_kv"]) == (2, 1)
    assert {"completion", "tools"} <= {*shown["capabilities"]}
    assert "insert" not in shown["capabilities"]
    (listed,) = server.client.get("/api/tags").json()["models"]
    assert listed["capabilities"] == shown["capabilities"]


def test_a_model_with_tokens_for_it_can_fill_in_the_middle() -> None:
    marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    with scripted(["b"], added_tokens=marks) as llm, served_on_port(llm) as url:
        assert "insert" in httpx.post(f"{url}/api/show", json={"model": "tiny"}).json()["capabilities"]


_ZERO = (0, "0", "0s", 0.0, "0m0s")


@pytest.mark.parametrize("keep_alive", [*_ZERO, "5m", -1, None])
def test_a_model_stays_loaded_whatever_it_is_asked(server: Server, keep_alive: Any) -> None:
    for path in ("/api/chat", "/api/generate"):
        answer = server.client.post(path, json={"model": "tiny", "keep_alive": keep_alive})
        assert answer.status_code == 200
        assert (answer.json()["done"], answer.json()["done_reason"]) == (
            True,
            "unload" if keep_alive in _ZERO else "load",
        )
    assert server.chat(keep_alive=keep_alive).json()["message"]["content"] == "Fine."


# ------------------------------------------------------------------------------------------ options


def test_options_that_are_not_known_are_named(server: Server) -> None:
    options = {
        "temperatures": 1,
        "mirostat": 1,
        "tfs_z": 0.5,
        "num_ctx": 131072.0,
        "num_gpu": 1,
        "top_k": 5.0,
        "odd": None,
    }
    answer = server.chat(options=options)
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED_HEADER] == "options.mirostat, options.temperatures, options.tfs_z"
    assert server.chat(options={"top_k": 5.5}).status_code == 400


# ----------------------------------------------------------------------------------------- messages


def test_results_belong_to_the_call_with_their_name_or_id() -> None:
    def results_of(*results: dict[str, Any]) -> str:
        turns = [USER, {"role": "assistant", "content": "", "tool_calls": CALLS}]
        return server.prompt(messages=[*turns, *({"role": "tool"} | result for result in results)])

    shown = "{{ message.name }} {{ message.tool_call_id }};"
    template = TEMPLATES["hermes"].replace("<tool_response>\n{{ message.content }}\n</tool_response>", shown)
    with scripted(["a"], template=template) as llm, served_on_port(llm) as url, closing(Server(llm, url)) as server:
        assert "time call_0;" in results_of({"content": "noon"}, {"content": "sunny"}).split("weather call_1;")[0]
        by_name = {"tool_name": "weather", "content": "sunny"}, {"tool_name": "time", "content": "noon"}
        assert "weather call_1;" in results_of(*by_name).split("time call_0;")[0]
        by_id = {"tool_call_id": "call_1", "content": "sunny"}, {"content": "noon"}
        assert "weather call_1;" in results_of(*by_id).split("time call_0;")[0]
        assert "other call_0;" in results_of({"tool_name": "other", "content": "a"})


def test_images_of_the_history_are_a_note(server: Server) -> None:
    image = USER | {"images": ["iVBORw0KGgo="]}
    assert "Hi.\n[image: not shown, this model reads text only]<|im_end|>" in server.prompt(messages=[image, USER])
    refused = server.chat(messages=[USER, image])
    assert refused.status_code == 400
    assert "messages[1].images" in refused.json()["error"]


def _long(count: int, size: int = 40) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": f"{i}: " + "a, b. " * size} for i in range(count)]


def test_the_oldest_messages_of_a_long_conversation_are_cut(server: Server) -> None:
    system, turns = {"role": "system", "content": "Be brief."}, _long(9)
    prompt = server.prompt(messages=[system, *turns])
    assert "system\nBe brief.<|im_end|>" in prompt
    assert "user\n8: a" in prompt
    assert "user\n0: a" not in prompt
    assert len(server.llm.tokenizer.encode(prompt)) <= 512 - 512 // 8
    refused = server.chat(messages=[system, *turns], truncate=False)
    assert (refused.status_code, refused.json()["code"]) == (400, "context_length_exceeded")
    assert server.chat(messages=_long(1, 400)).status_code == 400  # the last message alone is too long
    assert server.chat(messages=[*_long(39, 400), USER]).status_code == 200  # too long to be encoded


def test_a_result_is_not_cut_off_from_its_call(server: Server) -> None:
    rounds = [
        [
            {"role": "assistant", "content": "", "tool_calls": CALLS[:1]},
            {"role": "tool", "content": f"{i}: " + "a, b. " * 40},
        ]
        for i in range(6)
    ]
    prompt = server.prompt(messages=[USER, *(message for pair in rounds for message in pair)])
    assert prompt.startswith("<|im_start|>assistant\n<tool_call>")
    assert "5: a" in prompt


# ----------------------------------------------------------------------------------------- thoughts


@pytest.mark.parametrize(("think", "is_off"), [(True, False), (False, True), ("low", False), (None, False)])
def test_think_turns_thoughts_on_and_off_where_the_template_can(server: Server, think: Any, is_off: bool) -> None:
    assert server.prompt(think=think).endswith("assistant\n<think>\n\n</think>\n\n" if is_off else "assistant\n")
    body = {"model": "tiny", "prompt": "Hi.", "think": think, "stream": False}
    assert server.client.post("/api/generate", json=body).status_code == 200
    assert server.llm.script.prompts[-1] == server.prompt(think=think)


def test_a_thought_that_is_sent_back_goes_to_the_template(server: Server) -> None:
    answer = {"role": "assistant", "content": "", "thinking": "Look it up.", "tool_calls": CALLS[:1]}
    prompt = server.prompt(messages=[USER, answer, {"role": "tool", "content": "noon"}])
    assert "<think>\nLook it up.\n</think>" in prompt


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
