"""A server with OpenAI's interface that says what a test tells it to: for the programs that ask servers."""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class FakeServer:
    """What it answers, and what it was asked.

    Attributes:
        words: Said by each answer, one an event.
        refusal: Status and body in place of an answer.
        events: Sent in place of the words, if given.
        delay: Seconds before each word.
        most: Requests it had at once.
        broken: Ends streams before they are whole.
    """

    words: list[str] = field(default_factory=lambda: ["one", " two", " three"])
    refusal: tuple[int, Any] | None = None
    events: list[Any] | None = None
    delay: float = 0.0
    key: str | None = None
    models: list[str] = field(default_factory=lambda: ["tiny"])
    broken: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)
    most: int = 0
    url: str = ""
    num_disconnects: int = 0
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, path: str, body: Mapping[str, Any]) -> Iterator[Any]:
        if self.events is not None:
            yield from self.events
            return
        is_chat = path.endswith("/chat/completions")
        for i, word in enumerate(self.words):
            time.sleep(self.delay)
            choice = {"index": 0, "finish_reason": "length" if i == len(self.words) - 1 else None}
            yield {"choices": [choice | ({"delta": {"content": word}} if is_chat else {"text": word})], "usage": None}
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": 5, "completion_tokens": len(self.words), "total_tokens": 5 + len(self.words)}
            yield {"choices": [], "usage": usage}


@contextmanager
def serving(server: FakeServer) -> Iterator[FakeServer]:
    """The server, on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:  # the name the library calls
            if self._is_refused():
                return
            if self.path == "/v1/models":
                self._send(200, {"object": "list", "data": [{"id": name} for name in server.models]})
            else:
                self._send(404, {"error": {"message": f"no route {self.path}", "code": "not_found"}})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self._is_refused():
                return
            with server._lock:
                server.asked.append({"path": self.path, **body})
                server._now += 1
                server.most = max(server.most, server._now)
            try:
                self._answer(body)
            except ConnectionError:
                server.num_disconnects += 1
            finally:
                with server._lock:
                    server._now -= 1

        def _answer(self, body: Mapping[str, Any]) -> None:
            if server.refusal is not None:
                self._send(*server.refusal)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            self.wfile.write(b": a comment\n\n")
            for event in server.answer(self.path, body):
                data = event if isinstance(event, bytes) else json.dumps(event, ensure_ascii=False).encode()
                self.wfile.write(b"data: " + data + b"\n\n")
                self.wfile.flush()
            if not server.broken:
                self.wfile.write(b"data: [DONE]\n\n")

        def _is_refused(self) -> bool:
            if server.key is None or self.headers.get("Authorization") == f"Bearer {server.key}":
                return False
            self._send(401, {"error": {"message": "the key is wrong", "code": "invalid_api_key"}})
            return True

        def _send(self, status: int, body: Any) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_: object) -> None:
            pass  # a client that leaves early is what some tests are about

    http = Quiet(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_address[1]}"
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
