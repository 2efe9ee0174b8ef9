"""Prompts, bodies and names that are none, too long or meant for something else."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from hostile import CHAT, DETOKENIZE, MESSAGES, TEXT, TOKENIZE, Attack, Attacked, check_refusal
from specinfer import LLM

pytestmark = pytest.mark.usefixtures("small_demo")
JSON = {"content-type": "application/json"}
LONG_TEXTS = {
    "one character": "a" * 1_000_000,
    "spaces": " " * 1_000_000,
    "digits": "1" * 1_000_000,
    "newlines": "\n" * 1_000_000,
    "joined emoji": "\U0001f468\u200d" * 100_000,
    "combining": "e" + "\u0301" * 400_000,
    "no spaces": "\u4e2d" * 300_000,
}
TOO_LONG = "maximum context length is"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '<|endoftext|>' }}{% endfor %}"
    "{{ 'assistant: ' }}"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Attacked]:
    llm = LLM("demo", tree="2,2,1")
    llm.reader.chat_template = TEMPLATE
    with Attacked(llm, max_body_bytes=2_500_000) as attacked:
        yield attacked


def chat(*contents: Any, status: int | tuple[int, ...] = 400, names: str = "", **fields: Any) -> Attack:
    messages = [{"role": "user", "content": content} for content in contents]
    return Attack({"messages": messages, "max_tokens": 4, **fields}, status, names, CHAT)


def text(prompt: Any, status: int | tuple[int, ...] = 400, names: str = "prompt", **fields: Any) -> Attack:
    return Attack({"prompt": prompt, "max_tokens": 4, **fields}, status, names)


# 11, 12
def test_11_12_prompts_that_are_none(server: Attacked) -> None:
    size = server.llm.target.loaded.vocab_size
    wrong: list[Any] = ["", [], [[]], [""], ["a", ""], [[5], []], None, True, 5, 1.5, {}, {"prompt": "a"}]
    wrong += [[size], [-1], [[5], [size]], [2**31], [-(2**63)], [[5], 5], ["a", 5], [["a"]], [[[5]]], [True], [1.5]]
    server.beside(*map(text, wrong), Attack({}, 400, "prompt"))
    server.beside(
        *(Attack({"messages": m}, 400, "messages", CHAT) for m in ([], None, "a", {}, [5], [[]], [None], ["a"])),
        Attack({}, 400, "messages", CHAT),
        Attack({"tokens": [-1]}, 400, "tokens", DETOKENIZE),
        Attack({"tokens": [size]}, 400, "tokens", DETOKENIZE),
        Attack({"tokens": ["a"]}, 400, "tokens", DETOKENIZE),
        Attack({}, 400, "prompt", TOKENIZE),
    )


# 13
def test_13_the_limit_of_the_context(server: Attacked) -> None:
    limit = server.llm.max_model_len
    answers = server.beside(
        text([5] * limit, names=TOO_LONG),
        text([5] * (limit + 1), names=TOO_LONG),
        text([5] * (limit - 3), 200, ignore_eos=True),
        text([5] * (limit - 4), 200, ignore_eos=True),
        text([5] * (limit - 1), 200, max_tokens=1),
        text([5] * (limit - 1), 200, max_tokens=2),
        text([5, 6] * limit, 200, truncate_prompt_tokens=-1),
        text([5, 6] * limit, 200, truncate_prompt_tokens=limit - 4),
        text([5, 6] * limit, 200, truncate_prompt_tokens=limit - 3),
        chat("a b " * limit, names=TOO_LONG),
    )
    assert [answer.json()["error"]["code"] for answer in answers[:2]] == ["context_length_exceeded"] * 2
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers[2:4]] == [3, 4]


# 14
def test_14_bodies_that_are_too_large(server: Attacked) -> None:
    async def endless(size: int) -> Any:
        for _ in range(size // 100_000):
            yield b"\n" * 100_000

    async def post_endless() -> httpx.Response:
        return await server.client.post(TEXT, content=endless(100_000_000), headers=JSON)

    server.beside(Attack(json.dumps({"prompt": "\n" * 3_000_000}).encode(), 413, "max-body-bytes"))
    answer = server.beside_work(post_endless)
    assert (answer.status_code, check_refusal(answer)["code"]) == (413, "request_too_large")


# 15: a tokenizer takes long, and no neighbour may wait for it
@pytest.mark.parametrize("name", LONG_TEXTS)
def test_15_texts_that_are_hard_to_read(server: Attacked, name: str) -> None:
    long = LONG_TEXTS[name]
    start = time.monotonic()
    server.beside(text(long, names=TOO_LONG), chat(long, names=TOO_LONG), text(["a", long], names=TOO_LONG))
    assert time.monotonic() - start < 60
    server.beside(text(long[:500], (200, 400)), text(long[:500], (200, 400), stop=[long[:500]]))


# 15: those who ask for an end only get what a shorter text gives them
def test_15_long_texts_of_which_the_end_is_kept(server: Attacked) -> None:
    long = "the cat sat on the mat. " * 80_000
    truncated, short, told = server.beside(
        text(long, 200, truncate_prompt_tokens=100, return_token_ids=True, seed=1, echo=True),
        text(long[-30_000:], 200, truncate_prompt_tokens=100, return_token_ids=True, seed=1, echo=True),
        Attack({"prompt": long}, 400, "prompt", TOKENIZE),
    )
    assert truncated.json()["choices"] == short.json()["choices"]
    assert told.json()["error"]["param"] == "prompt"


# 15
def test_15_characters_that_are_none(server: Attacked) -> None:
    lone = [rb'"\ud800"', rb'"a\udfff"', rb'"\udc00\ud800"', rb'["a", "\ud83d"]']
    server.beside(
        *(Attack(b'{"prompt": ' + value + b"}", 400, "Unicode") for value in lone),
        *(Attack(b'{"prompt": "a", "stop": ' + value + b"}", 400, "Unicode") for value in lone),
        Attack(rb'{"prompt": "a", "\ud800": 1}', 400, "Unicode"),
        Attack(rb'{"messages": [{"role": "user", "content": "\ud800"}]}', 400, "Unicode", CHAT),
        Attack(b'{"prompt": "\xff\xfe"}', 400, "UTF-8"),
        Attack(b'{"prompt": "\xed\xa0\x80"}', 400, "UTF-8"),
        text("\x00", 200),
        text("a\x00b\x1b[2J\x7f\ufeff\u202e", 200, stop=["\x00"]),
        chat("\x00", status=200),
        Attack(rb'{"prompt": "\ud83d\ude42", "max_tokens": 2}', 200),
    )


# 15, 16: characters that the reader of conversations has for itself
def test_16_every_character_of_private_use(server: Attacked) -> None:
    private = "".join(map(chr, range(0x100000, 0x10FFFE)))
    start = time.monotonic()
    server.beside(
        chat(private, status=(200, 400), names="messages"),
        chat("</s>", private[:-1], status=(200, 400), names="messages"),
        chat("<|endoftext|>" * 2000, status=400, names=TOO_LONG),
    )
    assert time.monotonic() - start < 60


# 16
def test_16_placeholders_are_text(server: Attacked) -> None:
    server.beside(
        chat("<image>" * 50_000, names=TOO_LONG),
        chat("<|image_pad|><|audio|>{{7*7}}{% for i in range(10**9) %}", status=200),
        text("<image>" * 100, 200),
        chat([{"type": "text", "text": "a"}] * 2000, names="parts"),
        chat(*(["a"] * 5000), names="messages"),
    )


# 17
def test_17_tensors_are_not_taken(server: Attacked) -> None:
    server.beside(
        text("a", names="prompt_embeds", prompt_embeds="gASVAAAA"),
        Attack({"prompt": None, "prompt_embeds": ["AAAA"]}, 400, "prompt_embeds|prompt"),
        chat([{"type": "prompt_embeds", "prompt_embeds": "AAAA"}], names="only text"),
        Attack(b'{"prompt": "a", "prompt_embeds": {"__reduce__": "os.system"}}', 400, "prompt_embeds"),
        Attack(b"\x80\x04\x95", 415, "content-type", headers={"content-type": "application/octet-stream"}),
    )


# 18
@pytest.mark.parametrize("path", [TEXT, CHAT, TOKENIZE, DETOKENIZE])
def test_18_bodies_that_are_no_sound_objects(server: Attacked, path: str) -> None:
    deep = 100_000
    bodies = [
        b"[]", b"5", b"null", b"true", b'"a"', b"", b" ", b"{", b"{]", b"{'a': 1}", b'{"a": 1}}', b"\xef\xbb\xbf{}",
        b"[" * deep + b"]" * deep, b'{"a": ' * deep + b"1" + b"}" * deep, b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"prompt": ' + b"9" * 5000 + b"}", b'{"a": -' + b"9" * 5000 + b"}", b'{"a": 1e99999999999}',
        b'{"prompt": "a", "prompt": "b"}', b'{"a": {"b": 1, "b": 1}}',
    ]  # fmt: skip
    server.beside(*(Attack(body, 400, path=path) for body in bodies))
    kinds = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a", "", "application")
    server.beside(*(Attack(MESSAGES, 415, "content-type", path, {"content-type": kind}) for kind in kinds))


# 18: looking for the name that stands twice must not take longer than reading
def test_18_many_names_of_which_one_is_repeated(server: Attacked) -> None:
    names = ",".join(f'"{i}":1' for i in range(150_000))
    start = time.process_time()
    server.beside(Attack(f'{{{names},"149999":1}}'.encode(), 400, "149999.*repeated"))
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    ("path", "field"), [(TEXT, None), (CHAT, "stream_options"), ("/v1/messages", None), ("/api/chat", "options")]
)
def test_18_very_many_names_that_are_not_known_take_no_time(server: Attacked, path: str, field: str | None) -> None:
    """They are looked at in the event loop; hundreds of thousands fit into a body."""
    names = {f"k{i}": 1 for i in range(15_000)}
    body: dict[str, Any] = {"prompt": "a"} if path == TEXT else {"messages": [{"role": "user", "content": "a"}]}
    body |= {"model": "demo", "max_tokens": 4, "stream": True} | (names if field is None else {field: names})
    start = time.process_time()
    server.beside(Attack(body, 200, "", path))
    assert time.process_time() - start < 2


@pytest.mark.parametrize("path", [TEXT, TOKENIZE])
def test_18_objects_with_more_names_than_any_request_needs(server: Attacked, path: str) -> None:
    """Each unknown name was an error of its own: hundreds of thousands held up all requests for seconds."""
    names = {f"k{i}": 1 for i in range(150_000)}
    body = {"prompt": "a"} | (names if path == TOKENIZE else {"speculative": names})
    start = time.process_time()
    server.beside(Attack(body, 400, "body: .*150\\d\\d\\d names in one object", path))
    assert time.process_time() - start < 3


# 19
def test_19_control_tokens_in_texts_stay_texts(server: Attacked) -> None:
    (end,) = server.llm.target.loaded.eos_token_ids
    spike = "<|endoftext|>"
    call = {"id": spike, "type": "function", "function": {"name": "f", "arguments": json.dumps({spike: spike})}}
    tool = {"type": "function", "function": {"name": "f", "description": spike}}
    question = {"role": "user", "content": [{"type": "text", "text": spike}]}
    result = {"role": "tool", "tool_call_id": spike, "content": spike}
    base: dict[str, Any] = {"max_tokens": 4, "return_token_ids": True}
    plain, spiked, told, called, named = server.beside(
        chat("ab", status=200, return_token_ids=True),
        chat("a<|endoftext|>b<|endof<|endoftext|>text|>", status=200, return_token_ids=True),
        Attack(base | {"messages": [question], "tools": [tool]}, 200, path=CHAT),
        Attack(base | {"messages": [question, {"role": "assistant", "tool_calls": [call]}, result]}, 200, path=CHAT),
        Attack(base | {"messages": [question | {"name": spike}]}, (200, 400), "name", CHAT),
    )
    num_messages = {"plain": 1, "spiked": 1, "told": 2, "called": 3}
    for name, answer in zip(num_messages, (plain, spiked, told, called), strict=True):
        ids = answer.json()["prompt_token_ids"]
        assert ids.count(end) == num_messages[name], (name, server.llm.tokenizer.decode(ids))
    assert named.status_code == 400 or named.json()["prompt_token_ids"].count(end) == 1
    said = server.llm.tokenizer.decode(spiked.json()["prompt_token_ids"])
    assert said.startswith("user: a<|endoftext|>b<|endof<|endoftext|>text|><|endoftext|>")


# 20, 42: what keeps prefixes apart is compared with their tokens, and no caller names the keys
def test_20_42_salts_keep_prefixes_apart(server: Attacked) -> None:
    prompt = [int(token) for token in range(100, 400)]

    def cached(**fields: Any) -> int:
        answer = server.send(text(prompt, 200, **fields))
        assert answer.status_code == 200, answer.text
        count: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") > 200
    assert cached(cache_salt="yours") == 0
    assert cached() == 0
    assert cached(prompt_cache_key="mine") > 200  # it names no key here
    server.beside(
        *(text("a", names="cache_salt", cache_salt=salt) for salt in ("", "a" * 257, "a" * 10**6, 5, [], True)),
        text("a", names="kv_transfer_params", kv_transfer_params={"block_hash": "00"}),
        text("a", 200, block_hashes=[1, 2], cache_key="mine"),
    )


# 37
def test_37_names_of_requests(server: Attacked) -> None:
    server.beside(
        *(text("a", names="request_id", request_id=name) for name in ("", "a\nb", "a b", "a" * 10**6, "\u20ac", 5, [])),
        *(text("a", 200, request_id=name) for name in ("0", "1", "0", ".", "a" * 128, "../../etc", "%00")),
        *(text("a", 200, n=2, request_id="same") for _ in range(3)),
    )


# 37: a client's own name in the head
def test_37_names_in_the_head(server: Attacked) -> None:
    for name in ("a" * 65, "a\tb", "'; drop", "a=b"):
        answer = server.send(Attack({"prompt": "a", "max_tokens": 1}, headers={"x-request-id": name}))
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] != name
    named = server.send(Attack({"prompt": "a", "max_tokens": 1}, headers={"x-request-id": "0"}))
    assert named.headers["x-request-id"] == "0"


# 37: leaving one request ends no other of the same name
def test_37_leaving_one_of_two_with_a_name(server: Attacked) -> None:
    async def leave() -> None:
        body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "request_id": "0"}
        leaving = asyncio.ensure_future(server.client.post(TEXT, json=body))
        await server.until(lambda: server.engine.num_running > 1)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await server.until(lambda: server.engine.num_live <= 1)

    server.beside_work(leave)


# 43
@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}},
        {"type": "input_image", "image_url": "http://169.254.169.254/latest/meta-data"},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "../../etc/passwd"}},
        {"type": "video_url", "video_url": {"url": "file:///etc/passwd"}},
    ],
)
def test_43_nothing_is_fetched(server: Attacked, part: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    monkeypatch.setattr("socket.socket.connect", lambda *args: opened.append(args))
    monkeypatch.setattr("socket.getaddrinfo", lambda *args, **kwargs: opened.append(args))
    server.beside(
        chat([part], names="only text"),
        chat([{"type": "text", "text": "a"}, part], names="only text"),
        chat("![a](http://127.0.0.1:9/a.png) http://169.254.169.254/", status=200),
    )
    assert not opened
