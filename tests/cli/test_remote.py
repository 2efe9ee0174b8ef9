"""chat and complete with a server: what is sent, what is shown, and what is said when the server refuses."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from fake_server import FakeServer, serving
from specinfer.bench.serve_process import running_server
from specinfer.cli.app import app
from specinfer.cli.remote import fields_of, stretches_of
from specinfer.cli.screen import Screen
from specinfer.client import EventDecoder, error_text, open_client, server_url
from specinfer.core.sampling import SamplingParams

ANSI = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPECINFER_API_KEY", "OPENAI_API_KEY", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving(FakeServer()) as fake:
        yield fake


def run(*words: str, stdin: str | None = None, code: int = 0, env: dict[str, str | None] | None = None) -> Any:
    result = CliRunner().invoke(app, list(words), input=stdin, env=env)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


# ------------------------------------------------------------------------------------ what is shown and sent


def test_complete_streams_from_a_server(server: FakeServer) -> None:
    result = run("complete", "--url", server.url, stdin="first\nsecond\n")
    assert result.stdout == "one two three\none two three\n"
    assert result.stderr == ""
    first, second = server.asked
    assert first == {
        "path": "/v1/completions", "model": "tiny", "prompt": "first", "stream": True,
        "temperature": 1.0, "top_p": 1.0, "max_tokens": 128,
    }  # fmt: skip
    assert second["prompt"] == "second"


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "ALL_PROXY", "https_proxy"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_on_this_machine_is_reached_past_proxies(server: FakeServer, variable: str, host: str) -> None:
    environment = {"no_proxy": None, "NO_PROXY": None, variable: "http://127.0.0.1:9"}
    url = server.url.replace("127.0.0.1", host)
    assert run("complete", "--url", url, "-q", "hi", env=environment).stdout == "one two three\n"


def test_a_server_elsewhere_is_reached_through_the_proxy(server: FakeServer) -> None:
    environment = {"no_proxy": None, "NO_PROXY": None, "http_proxy": server.url}
    result = run("complete", "--url", "http://far.example", "-q", "hi", env=environment, code=2)
    assert "no route http://far.example/v1/models" in result.stderr  # as a proxy is asked


@pytest.mark.parametrize(
    ("url", "expected"),
    [("http://[::1]:8000", True), ("http://0.0.0.0:1", True), ("http://a.localhost", True), ("http://127.1.2.3", True),
     ("http://localhost.example", False), ("http://10.0.0.1:8000", False), ("https://[fe80::1]", False)],
)  # fmt: skip
def test_addresses_of_this_machine(url: str, expected: bool) -> None:
    with open_client(url, None) as client:
        assert any(transport is None for transport in client._mounts.values()) == expected


def test_chat_sends_the_conversation(server: FakeServer) -> None:
    result = run("chat", "--url", server.url + "/v1/", "--system-prompt", "brief", stdin="hello\n/clear\nagain\nmore\n")
    assert result.stdout == "one two three\n" * 3
    assert [request["path"] for request in server.asked] == ["/v1/chat/completions"] * 3
    assert [message["content"] for message in server.asked[2]["messages"]] == [
        "brief", "again", "one two three", "more"
    ]  # fmt: skip
    assert "max_tokens" not in server.asked[0]


def test_every_option_of_a_request_is_sent(server: FakeServer) -> None:
    run(
        "complete", "tiny", "--url", server.url, "-q", "hi", "--max-tokens", "9", "--temperature", "0", "--top-k", "3",
        "--stop", "x", "--stop-token-ids", "2,5", "--logit-bias", '{"7": -1}', "--regex", "a+", "--prediction", "p q",
        "--tree", "off", "--seed", "7",
    )  # fmt: skip
    assert server.asked[0] == {
        "path": "/v1/completions", "model": "tiny", "prompt": "hi", "stream": True, "max_tokens": 9,
        "temperature": 0.0, "top_p": 1.0, "top_k": 3, "stop": ["x"], "stop_token_ids": [2, 5],
        "logit_bias": {"7": -1.0}, "structured_outputs": {"regex": "a+"},
        "prediction": {"type": "content", "content": "p q"}, "speculative": {"tree": "off"}, "seed": 7,
    }  # fmt: skip


def test_fields_hold_nothing_that_was_not_asked_for() -> None:
    assert fields_of(SamplingParams(max_tokens=None)) == {"temperature": 1.0, "top_p": 1.0}
    json.dumps(fields_of(SamplingParams(stop="a", stop_token_ids=(1,), bad_words=("b",), allowed_token_ids=(3,))))


def test_numbers_are_shown_if_asked_for(server: FakeServer) -> None:
    shown = run("complete", "--url", server.url, "-q", "hi", "--stats").stderr
    assert re.fullmatch(r"3 tokens · \d+\.\d\d s · \d+\.\d tokens/s\n", shown)
    stats = {
        "num_accepted_draft_tokens": 1, "num_draft_tokens": 4, "num_target_passes": 2, "tokens_per_pass": 1.5,
    }  # fmt: skip
    usage = {"choices": [], "usage": {"completion_tokens": 3}, "metrics": {"speculative_decoding": stats}}
    server.events = [{"choices": [{"text": "a"}]}, usage]
    shown = run("complete", "--url", server.url, "-q", "hi", "--stats").stderr
    assert "3 tokens in 2 target passes: 1.50 a pass · 1 of 4 draft tokens accepted (25%)" in shown
    talk = run("chat", "--url", server.url, stdin="hi\n/stats\n")
    assert "1.50 a pass" in talk.stderr


def test_text_is_coloured_by_its_drafter(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"text": "de", "accepted": True}, {"text": "no", "accepted": False}, {"text": "f x", "accepted": True}]
    steps = [{"nodes": nodes, "path": [1, 3], "next": {"text": "()", "token": 3}}]
    server.events = [
        {"choices": [{"text": "def x"}], "specinfer": {"steps": steps, "origins": ["ngram", "demo"]}},
        {"choices": [{"text": "()"}], "specinfer": {"steps": [], "origins": [None]}},  # it was held back
        {"choices": [{"text": ":"}]},
    ]
    cut: list[Any] = []
    monkeypatch.setattr(Screen, "write", lambda self, stretches: cut.append(list(stretches)))
    run("complete", "--url", server.url, "-q", "hi")
    assert cut == [[("de", "ngram"), ("f x", "demo")], [("()", None)], [(":", None)]]
    assert "trace" not in server.asked[0]


@pytest.mark.parametrize(
    ("text", "texts", "origins", "cut"),
    [
        ("ab", ["a", "b"], ["x", None], [("a", "x"), ("b", None)]),
        (
            "a\u00e9b",
            ["a", "\ufffd", "\ufffd", "b"],
            [None, "x", "y", None],
            [("a", None), ("\u00e9", "y"), ("b", None)],
        ),
        ("ab", ["a", "b", "</s>"], ["x", None, None], [("a", "x"), ("b", None)]),
        ("ab", [], [], [("ab", None)]),
        ("a", ["ab"], ["x"], [("a", "x")]),  # the rest is a stop string's
        ("\ufffd", ["\ufffd"], ["x"], [("\ufffd", "x")]),
    ],
)
def test_text_is_cut_by_its_tokens(text: str, texts: list[str], origins: list[str | None], cut: list[Any]) -> None:
    assert stretches_of(text, texts, origins) == cut


def test_trees_are_asked_for_on_a_coloured_terminal_only(server: FakeServer) -> None:
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "NO_COLOR": None}
    result = run("complete", "--url", server.url, "-q", "hi", "--stats", env=terminal)
    assert server.asked[0]["trace"] is True
    assert ANSI.search(result.stdout)
    assert ANSI.sub("", result.stdout).startswith("one two three")


def test_text_may_hold_any_line_separator(server: FakeServer) -> None:
    server.events = [{"choices": [{"text": "a\u2028b\u0085c"}]}]
    assert run("complete", "--url", server.url, "-q", "hi").stdout == "a\u2028b\u0085c\n"


# ---------------------------------------------------------------------------------------- refusals


def test_a_refusal_is_one_line_and_the_next_line_is_answered(server: FakeServer) -> None:
    server.refusal = (400, {"error": {"message": "prompt: too long", "code": "context_length_exceeded"}})
    result = run("complete", "--url", server.url, "-q", "hi", code=2)
    assert result.stderr == "specinfer: error: the server answers 400: prompt: too long\n"
    result = run("chat", "--url", server.url, stdin="hi\nmore\n", code=1)
    assert result.stderr.count("prompt: too long (/clear forgets the conversation)") == 2
    assert [len(request["messages"]) for request in server.asked[1:]] == [1, 1]


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ([{"choices": [{"text": "a"}]}, {"error": {"message": "the engine failed"}}], "the engine failed"),
        ([b"{no json"], "not JSON"),
        ([b"[1]"], "not an object"),
    ],
)
def test_a_failure_in_mid_stream_is_reported(server: FakeServer, events: list[Any], told: str) -> None:
    server.events = events
    assert told in run("complete", "--url", server.url, "-q", "hi", code=2).stderr


def test_a_stream_that_was_cut_off_is_reported(server: FakeServer) -> None:
    server.broken = True
    assert "before it was whole" in run("complete", "--url", server.url, "-q", "hi", code=2).stderr


def test_a_missing_server_is_reported() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    result = run("complete", "--url", url, "-q", "hi", code=2)
    assert f"no server answers at {url}" in result.stderr
    assert "specinfer serve" in result.stderr


def test_a_key_is_sent_and_a_missing_one_is_reported(server: FakeServer) -> None:
    server.key = "secret"
    words = ("complete", "--url", server.url, "-q", "hi")
    assert (
        "401: the key is wrong; give a key with --api-key"
        in run(*words, code=2, env={"OPENAI_API_KEY": "secret"}).stderr
    )
    assert run(*words, "--api-key", "secret").stdout == "one two three\n"
    assert run(*words, env={"SPECINFER_API_KEY": "secret"}).stdout == "one two three\n"
    assert "--api-key" in run(*words, "--api-key", "a\nb", code=2).stderr


def test_a_model_the_server_does_not_have_is_refused(server: FakeServer) -> None:
    assert "the server has tiny, not large" in run("chat", "large", "--url", server.url, code=2).stderr
    server.models = []
    assert "the server has none" in run("chat", "--url", server.url, code=2).stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--dtype", "float32"), "dtype: it was chosen when the server was started"),
        (("--drafter", "ngram"), "drafter: it was chosen"),
        (("tiny", "--model", "tiny"), "model: named twice"),
        (("--temperature", "-1"), "temperature"),
    ],
)
def test_options_of_the_engine_are_refused_together_with_an_address(
    server: FakeServer, words: tuple[str, ...], told: str
) -> None:
    assert told in run("complete", "--url", server.url, *words, code=2).stderr
    assert server.asked == []


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:no", "http://x?a=1", "http://k@x"])
def test_what_is_no_address_is_refused(url: str) -> None:
    assert "not the address of a server" in run("chat", "--url", url, code=2).stderr


def test_an_address_may_end_in_v1() -> None:
    assert {server_url(f"http://h:1/p{end}") for end in ("", "/", "/v1", "/v1/")} == {"http://h:1/p"}


# ---------------------------------------------------------------------------------------- the pieces


def test_an_interrupt_ends_one_answer_and_its_connection(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.words, server.delay = ["w "] * 200, 0.01
    write, left = Screen.write, [3]

    def interrupted(self: Screen, stretches: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        write(self, stretches)

    monkeypatch.setattr(Screen, "write", interrupted)
    monkeypatch.setattr("specinfer.cli.chat.is_interactive", lambda: True)
    result = run("complete", "--url", server.url, stdin="a\n")
    assert result.stdout.endswith("w w \n")
    run("complete", "--url", server.url, "-q", "a", "--max-tokens", "1")  # the server is free again
    assert server.num_disconnects == 1


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_are_read_however_they_are_cut(size: int) -> None:
    data = 'data: {"a": "\u00e9"}\r\n\r\n: ping\n\nevent: x\ndata:{"b": 2}\n\ndata: [DONE]\n\n'.encode()
    decoder = EventDecoder()
    events = [event for i in range(0, len(data), size) for event in decoder.push(data[i : i + size])]
    assert events == [{"a": "\u00e9"}, {"b": 2}]
    assert decoder.is_done


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"error": {"message": "no\\nroom"}}', "no room"),
        (b'{"detail": "not found"}', "not found"),
        (b'{"error": "plain"}', "plain"),
        (b"<html>", "<html>"),
        (b"", "without an explanation"),
    ],
)
def test_refusals_are_words_in_any_shape(body: bytes, told: str) -> None:
    assert error_text(400, body) == f"the server answers 400: {told}"


def test_asking_a_server_needs_no_torch(server: FakeServer) -> None:
    program = (
        "import sys; from specinfer.cli.app import app\n"
        "try: app()\nexcept SystemExit: pass\nprint('torch' in sys.modules, file=sys.stderr)"
    )
    words = [sys.executable, "-c", program, "complete", "--url", server.url, "-q", "hi"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("one two three\n", "False\n")


@pytest.mark.slow
def test_a_servers_model_generates_what_it_does_in_process() -> None:
    words = ("--temperature", "0", "--max-tokens", "40", "-q", "import os\nimport ", "--stats")
    engine = ("--tree", "2,1,1", "--dtype", "float32")
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "NO_COLOR": None}
    with running_server("demo", engine) as address:
        there = ("--url", address.url, "--api-key", str(address.api_key))
        for command in ("complete", "chat"):
            local = run(command, "demo", *engine, *words, env=terminal)
            remote = run(command, *there, *words, env=terminal)
            assert len(ANSI.findall(local.stdout)) > 20
            assert remote.stdout == local.stdout  # with the same colours in the same places
            counted = [ANSI.sub("", result.stderr).split(" \u00b7 ")[:2] for result in (local, remote)]
            assert counted[0][-1] == counted[1][-1]
        assert "--max-tokens:" in run("complete", *there, "-q", "the", "--max-tokens", "9999", code=2).stderr
