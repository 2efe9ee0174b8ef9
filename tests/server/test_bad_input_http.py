"""Connections, heads and clients that misbehave, against a server on a port of its own as `process.run` makes it."""

import gc
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hostile import TEXT, check_refusal
from specinfer import LLM
from specinfer.core.systems import max_descriptors
from specinfer.server import connection
from specinfer.server.config import ServerConfig
from specinfer.server.connection import _ambiguity
from specinfer.server.listening import most_connections, network_of
from tests.server.attacked_port import BODY, Port, read_all, request, statuses
from worlds import await_that

LONG = BODY | {"max_tokens": 900, "ignore_eos": True}
CONFIG = ServerConfig(
    port=0, body_timeout=0.25, keep_alive_timeout=0.5, shutdown_timeout=1.0, max_connections=40,
    max_connections_per_address=80, max_body_bytes=100_000, access_log=False, log_stats_interval=0,
)  # fmt: skip


@pytest.fixture(scope="module")
def port() -> Iterator[Port]:
    with Port(LLM("demo", tree="2,2,1"), CONFIG) as served:
        yield served


# 33
@pytest.mark.parametrize(
    "lines",
    [
        [f"X-A: {'a' * 2_000_000}"],
        [f"X-A: {'a' * 17_000}"],
        [f"X-{i}: a" for i in range(10_000)],
        [f"X-{i}: a" for i in range(101)],
        ["a" * 60_000],
    ],
    ids=["2 MB", "17 kB", "10k headers", "101 headers", "no colon"],
)
def test_33_heads_that_are_too_large(port: Port, lines: list[str]) -> None:
    with port.well():
        said = port.say(request(BODY, *lines, "Connection: close"))
        assert not said or statuses(said)[0] in (400, 431)
        long_path = port.say(request(path="/health?" + "a" * 60_000, method="GET"))
        assert not long_path or statuses(long_path)[0] in (400, 414, 431)


_GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"NONSENSE\r\n\r\n", 400, "invalid_request"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "invalid_request"),  # no Host
        (_GET + b"X-Long: " + b"a" * 40_000 + b"\r\n\r\n", 431, "headers_too_large"),
        (_GET + b"".join(b"X-%d: a\r\n" % i for i in range(200)) + b"\r\n", 431, "headers_too_large"),
    ],
    ids=["no request", "no host", "a long header", "many headers"],
)
def test_what_is_no_http_or_too_large_is_answered_with_an_openai_error(
    port: Port, sent: bytes, status: int, code: str
) -> None:
    said = port.say(sent)
    assert statuses(said) == [status]
    assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["code"] == code


def test_bodies_that_are_too_large_are_refused(port: Port) -> None:
    whole = port.client.post("/tokenize", content=b" " * 300_000, headers={"content-type": "application/json"})
    chunked = port.client.post("/tokenize", content=(b" " * 1000 for _ in range(300)))
    assert (whole.status_code, chunked.status_code) == (413, 413)
    assert port.client.get("/health").status_code == 200


def test_clients_that_keep_the_server_waiting_are_ended(port: Port) -> None:
    for sent in (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: "):
        begun = time.monotonic()
        assert port.say(sent) == b""
        assert 0.2 < time.monotonic() - begun < 5
    assert statuses(port.say(request(BODY, length="5000"))) == [408]
    said = port.say(request(path="/health", method="GET"))  # and then the idle connection is closed
    assert statuses(said) == [200]


def test_events_do_not_wait_until_the_client_has_confirmed_the_ones_before(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    made = connection.Connection.connection_made

    def noted(self: connection.Connection, transport: Any) -> None:
        found.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(self, transport)

    monkeypatch.setattr(connection.Connection, "connection_made", noted)
    port.say(request(None, "Connection: close", path="/ping", method="GET"))
    assert found
    assert all(found)


# 33, 39: what is no request, or two things at once
NO_REQUESTS = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x8c\x02os",
    b"\r\n" * 100 + b"\x00\x00\x00",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /health\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: gzip\r\n\r\n{}",
    b"GET /health HTTP/1.1\r\nHost : 127.0.0.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: a\x00b\r\n\r\n",
    b"GET /he\x00alth HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /health HTTP/1.1\nHost: 127.0.0.1\n\n",
    b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\nX-A: b\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: b\r\n c\r\n\r\n",
    b"POST /ping HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /ping HTTP/1.1\r\nHost: a\r\ntransfer-encoding: chunked\r\nX: y\r\ncontent-length:4\r\n\r\n0\r\n\r\n",
]


def test_33_bytes_that_are_no_request(port: Port) -> None:
    with port.well():
        for data in NO_REQUESTS:
            said = port.say(data)
            assert not said or 400 <= statuses(said)[0] < 500, (data, said)
            if said:
                body = said.partition(b"\r\n\r\n")[2].partition(b"HTTP/1.1 4")[0]
                assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}, data


# 33: a request hidden in another's body
def test_33_bytes_that_are_no_body_after_the_answer(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    with port.well(), port.connect() as connection:
        head = b"Host: 127.0.0.1\r\nTransfer-Encoding: chunked"
        connection.sendall(b"POST /ping HTTP/1.1\r\n" + head + b"\r\n\r\n2\r\n{}\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        connection.sendall(b"no chunk\r\n")
        assert b"HTTP/1.1" not in read_all(connection)
    assert not [record for record in caplog.records if record.exc_info]


def test_33_smuggled_requests_are_not_served(port: Port) -> None:
    hidden = request(None, path="/smuggled", method="GET")
    both = (
        f"POST {TEXT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    )
    with port.well():
        said = port.say(both.encode() + hidden)
        assert b"/smuggled" not in said
        assert statuses(said)[0] == 400 or len(statuses(said)) <= 2


def test_an_ambiguous_head_after_another_request_is_refused_too(port: Port) -> None:
    with port.well():
        said = port.say(request(None, path="/ping", method="GET") + b"GET /ping HTTP/1.1\nHost: 127.0.0.1\n\n")
        assert statuses(said) == [200, 400]


def test_a_head_full_of_lengths_takes_as_long_to_check_as_any_other() -> None:
    def seconds(line: bytes) -> float:
        head = b"GET /ping HTTP/1.1\r\n" + line * (16_000 // len(line)) + b"\r\n"
        times = []
        for _ in range(5):
            start = time.process_time()
            assert _ambiguity(head) is None
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(b"content-length:1\r\n") < 10 * seconds(b"contents-color:1\r\n")


def test_a_body_in_very_many_chunks_is_refused_and_one_in_many_is_read(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    head = request(path="/ping").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked\r\nConnection: close")
    with port.well():
        for target in (b"/ping", TEXT.encode()):  # one answers at once, the other reads the body first
            said = port.say(head.replace(b"/ping", target) + b"1\r\n \r\n" * 2000 + b"0\r\n\r\n")
            assert statuses(said) in ([413], [200]), said
        assert statuses(said) == [413]
        assert b"chunks with" in said
        body = b"".join(b"1\r\n%c\r\n" % byte for byte in json.dumps(BODY).encode())
        assert statuses(port.say(head.replace(b"/ping", TEXT.encode()) + body + b"0\r\n\r\n")) == [200]
    assert not [record for record in caplog.records if record.exc_info]


def test_a_head_that_comes_byte_by_byte_is_read(port: Port) -> None:
    with port.well(), port.connect() as connection:
        for byte in b"GET /ping HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n":
            connection.sendall(bytes([byte]))
        assert statuses(read_all(connection)) == [200]


def test_what_was_loaded_is_not_searched_for_garbage_while_requests_are_served(port: Port) -> None:
    with port.well():
        assert all(one is not port.llm for one in gc.get_objects())


# 38
@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"}, {"host": "evil.example:8000"}, {"host": "127.0.0.1.evil.example"}, {"host": ""},
        {"host": "localhost.evil.example"}, {"origin": "http://evil.example"}, {"origin": "null"}, {"origin": "file://"},
        {"origin": "http://127.0.0.1.evil.example"}, {"origin": "https://evil.example", "host": "evil.example"},
    ],
)  # fmt: skip
def test_38_pages_of_others_reach_nothing(port: Port, headers: dict[str, str]) -> None:
    for method, path in (("POST", TEXT), ("GET", "/v1/models"), ("OPTIONS", TEXT), ("GET", "/")):
        answer = port.client.request(method, path, json=BODY, headers=headers)
        assert answer.status_code in (400, 403), (method, path, answer.text)
        assert check_refusal(answer)["code"] in ("invalid_host", "invalid_origin")
        assert "access-control-allow-origin" not in answer.headers


# 39: bytes that come one by one, or end half way
def test_39_slow_and_half_open_clients(port: Port) -> None:
    before = port.num_connections
    with port.well(), ExitStack() as stack:
        ends = [b"", b"P", b"POST /v1", request(BODY)[:60], request(BODY)[:-5], request(LONG, length="5000")]
        slow = [stack.enter_context(port.connect()) for _ in ends]
        for connection, end in zip(slow, ends, strict=True):
            connection.sendall(end)
        halves = [stack.enter_context(port.connect()) for _ in range(3)]
        for connection in halves:
            connection.sendall(request(LONG | {"stream": True})[:-3])
            connection.shutdown(socket.SHUT_WR)
        for connection in [*slow, *halves]:
            said = read_all(connection)
            assert not said or statuses(said)[0] in (400, 408), said
    await_that(lambda: port.num_connections <= before + 1, 20)


# 39: many connections that say nothing
def test_39_idle_connections(port: Port) -> None:
    with port.well(), ExitStack() as stack:
        idle = [stack.enter_context(port.connect()) for _ in range(70)]
        assert port.client.get("/health").status_code == 200
        for connection in idle:
            assert not read_all(connection)


def test_idle_clients_at_the_limit_make_room_for_others(port: Port) -> None:
    with port.well(), ExitStack() as stack:
        for _ in range(3 * most_connections(port.config)):
            stack.enter_context(port.connect())
        with port.connect() as connection:
            connection.sendall(request(None, "Connection: close", path="/health", method="GET"))
            assert statuses(read_all(connection)) == [200]
        assert port.num_connections <= most_connections(port.config)


def test_a_request_being_served_does_not_make_room_for_idle_clients(port: Port) -> None:
    with port.well(), ExitStack() as stack, port.connect() as busy:
        busy.sendall(request(LONG | {"max_tokens": 300}, "Connection: close"))
        await_that(lambda: not port.is_idle, 20)
        for _ in range(2 * most_connections(port.config)):
            stack.enter_context(port.connect())
        assert statuses(read_all(busy)) == [200]


def test_the_limit_on_connections_is_below_that_on_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ServerConfig(max_connections=1024)
    assert most_connections(limits) == min(2048, max_descriptors() - 128)
    monkeypatch.setattr("specinfer.server.listening.max_descriptors", lambda: 256)
    assert most_connections(limits) == 128
    monkeypatch.setattr("specinfer.server.listening.max_descriptors", lambda: 64)
    assert most_connections(limits) == 16


def test_one_address_cannot_have_all_connections(port: Port) -> None:
    with Port(port.llm, replace(CONFIG, max_connections_per_address=8)) as limited, ExitStack() as stack:
        first = [stack.enter_context(limited.connect()) for _ in range(8)]
        assert not read_all(stack.enter_context(limited.connect())), "all others have only just come"
        time.sleep(0.3)
        for _ in range(8):
            stack.enter_context(limited.connect())
        for connection in first:
            assert not read_all(connection), "the longest silent ones were closed"
        neighbour = stack.enter_context(socket.create_connection(limited.place, 20, ("127.0.0.2", 0)))
        await_that(lambda: limited.num_connections == 9, 20)
        neighbour.sendall(request(None, "Connection: close", path="/health", method="GET"))
        assert statuses(read_all(neighbour)) == [200]


@pytest.mark.parametrize(
    ("address", "network"),
    [
        (("192.0.2.1", 1), "192.0.2.1"),
        (("::ffff:192.0.2.1", 1, 0, 0), "192.0.2.1"),
        (("2001:db8:1:2:3::4", 1, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 1, 0, 2), "fe80::/64"),
        ("", ""),
    ],
)
def test_an_ipv6_network_counts_as_one_address(address: object, network: str) -> None:
    assert network_of(address) == network


def test_bodies_that_do_not_come_make_way_for_others(port: Port) -> None:
    with ExitStack() as stack:
        for _ in range(2 * most_connections(port.config)):
            stack.enter_context(port.connect()).sendall(request(BODY, length="5000"))
        with port.connect() as connection:
            connection.sendall(request(None, "Connection: close", path="/health", method="GET"))
            assert statuses(read_all(connection)) == [200]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="a certificate cannot be made")
def test_a_tls_handshake_that_never_begins_is_ended(port: Port, tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    words = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost")
    subprocess.run([*words, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    with Port(port.llm, replace(CONFIG, ssl_certfile=certificate, ssl_keyfile=key)) as secure:
        start = time.monotonic()
        with secure.connect() as silent:
            assert not read_all(silent)
        assert time.monotonic() - start < 10, "not the minute that asyncio waits"
        secure.client.close()
        await_that(lambda: not secure.num_connections, 20)


# 39: several requests in one go
def test_39_pipelining(port: Port) -> None:
    with port.well():
        said = port.say(request(BODY) * 5 + request(BODY, "Connection: close"))
        assert statuses(said) == [200] * 6
        texts = [
            json.loads(part.partition(b"\r\n\r\n")[2])["choices"][0]["text"] for part in said.split(b"HTTP/1.1 ")[1:]
        ]
        assert len(set(texts)) == 1
        mixed = port.say(request(BODY) + request({"prompt": []}) + b"garbage\r\n\r\n")
        assert statuses(mixed)[:2] == [200, 400]


# 39: one who never reads does not keep its place
def test_39_a_client_that_does_not_read(port: Port) -> None:
    body = LONG | {"stream": True, "logprobs": 100, "n": 16, "max_tokens": 400}
    with port.well(), socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(port.place)
        before = port.num_connections
        deaf.sendall(request(body))
        await_that(lambda: port.num_connections < before, 60)


# 40
@pytest.mark.parametrize("phase", ["head", "body", "reading", "waiting", "running", "streaming"])
def test_40_clients_that_leave_at_every_phase(port: Port, phase: str) -> None:
    heavy = {"structured_outputs": {"regex": "(" + "|".join(f"a{i}b{{1,50}}" for i in range(500)) + ")"}}
    with port.well():
        for body in (LONG, LONG | {"stream": True}):
            connection = port.connect()
            data = request(body | heavy if phase == "reading" else body | {"n": 16} if phase == "waiting" else body)
            connection.sendall(data[: {"head": 30, "body": len(data) - 5}.get(phase, len(data))])
            if phase in ("waiting", "running"):
                await_that(lambda: port._process._state.engine.num_running > 1, 20)
            if phase == "streaming" and "stream" in body:
                assert connection.recv(4096)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
            connection.close()


# 44: what listens is this machine's alone, and bytes of any kind are only ever HTTP
def test_44_only_loopback_listens(port: Port) -> None:
    assert port.place[0] == "127.0.0.1"
    listening = set()
    with open("/proc/self/net/tcp") as table:
        own = {f"{port.place[1]:04X}"}
        for line in list(table)[1:]:
            address, state = line.split()[1], line.split()[3]
            if state == "0A" and address.split(":")[1] in own:
                listening.add(address.split(":")[0])
    assert listening == {"0100007F"}
