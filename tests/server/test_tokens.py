"""/tokenize and /detokenize."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving import error_of, serve
from specinfer.llm import LLM
from specinfer.server.state import ServerState
from tiny import VOCAB, save_model, save_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}so {% endif %}"
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(save_tokenizer(save_model(tmp_path_factory.mktemp("chat")), TEMPLATE), tree="off")


def ask(llm: LLM, path: str, **asked: Any) -> httpx.Response:
    async def body(client: httpx.AsyncClient, state: ServerState) -> httpx.Response:
        return await client.post(path, json=asked)

    return serve(llm, body)


def test_text_becomes_tokens_and_text_again(llm: LLM) -> None:
    text = "the thing, and\nthe end \u20ac"
    answer = ask(llm, "/tokenize", prompt=text).json()
    assert answer["tokens"] == llm.tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == llm.max_model_len
    assert answer["token_strs"] is None
    assert ask(llm, "/detokenize", tokens=answer["tokens"]).json() == {"prompt": text}
    assert ask(llm, "/detokenize", tokens=[]).json() == {"prompt": ""}
    assert ask(llm, "/tokenize", prompt="").json()["count"] == 0


def test_tokens_have_names(llm: LLM) -> None:
    answer = ask(llm, "/tokenize", prompt="the end", return_token_strs=True).json()
    assert answer["token_strs"] == llm.tokenizer.convert_ids_to_tokens(answer["tokens"])
    assert len(answer["token_strs"]) == answer["count"] > 1


def test_a_conversation_becomes_the_tokens_that_chat_would_read(llm: LLM) -> None:
    messages = [{"role": "user", "content": "the end"}]
    answer = ask(llm, "/tokenize", messages=messages).json()
    assert answer["tokens"] == llm.chat_prompt(messages)
    assert llm.tokenizer.decode(answer["tokens"]) == "user the end\nso "


@pytest.mark.parametrize(
    ("path", "asked", "param"),
    [
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "unknown": 1}, "unknown"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, VOCAB]}, "tokens"),
        ("/detokenize", {"tokens": [1, 2**31]}, "tokens[1]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["5"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [[1]]}, "tokens[0]"),
        ("/detokenize", {"tokens": "1"}, "tokens"),
    ],
)
def test_what_cannot_be_read_is_named(llm: LLM, path: str, asked: dict[str, Any], param: str) -> None:
    answer = ask(llm, path, **asked)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


def test_another_model_is_not_here(llm: LLM) -> None:
    for path, asked in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        answer = ask(llm, path, model="gpt-4", **asked)
        assert answer.status_code == 404
        assert error_of(answer)["code"] == "model_not_found"
        assert ask(llm, path, model="tiny", **asked).status_code == 200


def test_a_model_without_a_tokenizer_is_reported(model_folder: Callable[..., Path]) -> None:
    answer = ask(LLM(model_folder(), tree="off"), "/tokenize", prompt="a")
    assert answer.status_code == 400
    assert "no tokenizer" in error_of(answer)["message"]
