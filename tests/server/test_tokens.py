"""/tokenize and /detokenize."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving import Caller, app_of, error_of, post, serve
from specinfer import AsyncLLM
from specinfer.llm import LLM
from specinfer.server.field_checks import IGNORED_HEADER
from specinfer.server.state import ServerState
from tiny import VOCAB, save_model, save_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}so {% endif %}"
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(save_tokenizer(save_model(tmp_path_factory.mktemp("chat")), TEMPLATE), tree="off")


def ask(llm: LLM, path: str, **asked: Any) -> httpx.Response:
    (answer,) = post(llm, path, asked)
    return answer


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


def test_texts_of_a_client_that_leaves_are_not_read(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    began, gate, read = threading.Event(), threading.Event(), []

    def encode(text: str, **_: Any) -> list[int]:
        began.set()
        assert gate.wait(10)
        read.append(text)
        return [1]

    async def run() -> None:
        async with AsyncLLM(llm) as engine:
            app = app_of(engine)
            callers = [Caller(app, "/tokenize", {"prompt": f"text {i}"}) for i in range(12)]
            await asyncio.to_thread(began.wait, 10)
            for caller in callers:
                await caller.leave()
            gate.set()

    monkeypatch.setattr(llm.tokenizer, "encode", encode)
    asyncio.run(run())
    assert len(read) <= 2, "only what was being read already"


def test_large_texts_of_one_key_do_not_delay_another(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    plain = llm.tokenizer.encode
    monkeypatch.setattr(
        llm.tokenizer, "encode", lambda text, **given: plain(text, **given) if text != "large" or gate.wait(10) else []
    )

    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        hostile, honest = ({"authorization": f"Bearer {name}-key"} for name in ("hostile", "honest"))
        large = [
            asyncio.ensure_future(client.post("/tokenize", json={"prompt": "large"}, headers=hostile)) for _ in range(8)
        ]
        await asyncio.sleep(0.01)
        answer = await asyncio.wait_for(client.post("/tokenize", json={"prompt": "a"}, headers=honest), 10)
        assert answer.status_code == 200
        assert not any(task.done() for task in large)
        gate.set()
        await asyncio.gather(*large)

    serve(llm, body, api_keys=("hostile-key", "honest-key"))


def test_prompts_that_can_never_wait_together_are_refused_before_they_are_read(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.tokenizer, "encode", lambda *_, **__: pytest.fail("a prompt was read"))
    answer = ask(llm, "/v1/completions", prompt=["the"] * 1000)
    assert answer.status_code == 400
    assert "1000 outputs are more than the" in error_of(answer)["message"]


def test_fields_that_are_not_known_are_ignored_and_named(llm: LLM) -> None:
    asked = {"messages": [{"role": "user", "content": "a"}], "mm_processor_kwargs": {}, "padding": None}
    answer = ask(llm, "/tokenize", **asked, chat_template_kwargs={"thinking": True}, add_generation_prompt=None)
    assert answer.json()["tokens"] == llm.chat_prompt(asked["messages"])
    assert answer.headers[IGNORED_HEADER] == "mm_processor_kwargs, chat_template_kwargs.thinking"
    assert ask(llm, "/detokenize", tokens=[5], foo=1).headers[IGNORED_HEADER] == "foo"
    refused = ask(llm, "/tokenize", **asked, chat_template="{{ 1 }}")
    assert (refused.status_code, error_of(refused)["param"]) == (400, "chat_template")


def test_the_tokenizer_is_described_as_vllm_does(llm: LLM, tmp_path: Path) -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> dict[str, Any]:
        found: dict[str, Any] = (await client.get("/tokenizer_info")).json()
        return found

    told = serve(llm, body)
    assert (told["tokenizer_class"], told["chat_template"]) == (type(llm.tokenizer).__name__, TEMPLATE)
    assert (told["bos_token"], told["eos_token"]) == ("<s>", "</s>")
    assert str(tmp_path.parent.parent) not in str(told), "no paths of this machine"
