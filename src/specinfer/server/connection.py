"""The server of a port, and a client's connection: uvicorn's, with timeouts, and with errors in our format.

uvicorn waits without limit for a request to begin, its head to be complete or its response to be read. A few thousand
idle connections would keep all other clients out.
"""

import asyncio
import contextlib
import itertools
import json
import re
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from specinfer.server.config import ServerConfig
from specinfer.server.errors import ApiError
from specinfer.server.listening import Clients
from specinfer.server.middleware import head_too_large
from specinfer.server.stream import cancel

_END_OF_HEAD = re.compile(rb"\n\r?\n")
# What other servers may read otherwise: RFC 9112, sections 2.2, 5.2 and 6.3. Clients choose what is searched, so each
# search takes a time that is linear in its length.
_AMBIGUOUS = {
    "a line ends without a carriage return.": re.compile(rb"(?<!\r)\n"),
    "a header is folded over several lines.": re.compile(rb"\n[ \t]"),
}
_LENGTHS = re.compile(rb"(?i)\n(content-length|transfer-encoding)[ \t]*:")
# A chunk takes as long to read as some kilobytes: bodies may have 1,024, and one more for each 256 bytes.
_MAX_CHUNKS, _CHUNK_BYTES = 1024, 256
_FLUSH_SECONDS = 5  # time for the last events of streams whose requests have all ended
_TICK = 0.1
_AT_ONCE = 16  # connections accepted between two rounds of the loop


class _Reader(h11.Connection):
    """h11's side of a connection; bodies in very many chunks are refused, which would occupy the event loop."""

    _num_chunks = _num_bytes = 0  # of the body that is being read

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > _MAX_CHUNKS + self._num_bytes // _CHUNK_BYTES:
                message = f"body: {self._num_chunks} chunks with {self._num_bytes} bytes; send fewer, larger ones"
                raise h11.RemoteProtocolError(message, error_status_hint=413)
        return event


class Connection(H11Protocol):
    """uvicorn's protocol with timeouts; a subclass, because uvicorn takes a protocol class and has no other hook."""

    def __init__(self, *args: Any, limits: ServerConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Reader(h11.SERVER, limits.max_header_bytes)
        self._limits = limits
        self._idle_since = 0.0  # when it was made, or its last response was complete
        self._paused_at: float | None = None  # since when its response is not read fast enough
        self._patience: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None  # checks whether the client still reads

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._idle_since = time.monotonic()
        self._await_head()

    @property
    def waiting_since(self) -> float | None:
        """The time since which the client has not completed its request or read its response; None if it has."""
        if self._paused_at is not None:
            return self._paused_at
        is_served = self.cycle is not None and not self.cycle.response_complete
        return None if is_served and self.conn.their_state is not h11.SEND_BODY else self._idle_since

    def abort(self) -> None:
        self.transport.abort()

    def on_response_complete(self) -> None:
        self._idle_since = time.monotonic()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_looking()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._paused_at = time.monotonic()
        self._look_later()

    def resume_writing(self) -> None:
        self._stop_looking()
        self._paused_at = None
        super().resume_writing()

    def handle_events(self) -> None:
        # h11 accepts heads that a proxy in front may read as other requests.
        if self.conn.their_state is h11.IDLE and (wrong := _ambiguity(self.conn.trailing_data[0])):
            self.send_400_response(wrong)
        else:
            super().handle_events()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Wait for the rest of a head, or of a body that is no longer needed.
        if self.conn.their_state is h11.IDLE or self.conn.our_state is h11.DONE:
            self._await_head()
        else:
            self._stop_waiting()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # a response has been sent or begun
            return
        if self.cycle is not None:
            self.cycle.disconnected = True  # a request whose body is malformed gets this response, not its own
            self.cycle.message_event.set()
        exception = sys.exception()
        hint = getattr(exception, "error_status_hint", 400)
        if hint == 431:
            error = head_too_large(self._limits)
        elif hint == 413:
            error = ApiError("request_too_large", str(exception))
        else:
            error = ApiError("invalid_request", f"{msg} It is not valid HTTP/1.1")
        body = json.dumps(error.body()).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        headers.append(("x-request-id", uuid.uuid4().hex))
        for event in (h11.Response(status_code=error.status, headers=headers), h11.Data(body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _await_head(self) -> None:
        if self._patience is None:
            self._patience = self.loop.call_later(self._limits.body_timeout, self._give_up)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        self._patience = None
        if not self.transport.is_closing():
            self.transport.close()

    def _look_later(self) -> None:
        size = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(self._limits.body_timeout, self._look_whether_read, size)

    def _look_whether_read(self, size_before: int) -> None:
        if self.transport.get_write_buffer_size() < size_before:
            self._look_later()
        else:
            self.transport.abort()

    def _stop_looking(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None


def _ambiguity(data: bytes) -> str | None:
    """Return what is ambiguous in the head of a request, or None if nothing is, or if the head is not complete."""
    end = _END_OF_HEAD.search(data)
    if end is None:
        return None  # it would be searched again for each byte that comes
    head = data[: end.end()]
    if len({name.lower() for name in _LENGTHS.findall(head)}) > 1:
        return "Content-Length and Transfer-Encoding exclude one another."
    return next((wrong for wrong, pattern in _AMBIGUOUS.items() if pattern.search(head)), None)


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which accepts connections itself.

    Signals are handled by the process. asyncio would accept a whole backlog at once, before any of its connections can
    be counted, and keep a client that never begins its TLS handshake for a minute.
    """

    def __init__(self, config: uvicorn.Config, limits: ServerConfig) -> None:
        super().__init__(config)
        self._limits, self._clients = limits, Clients(limits)
        self._tasks: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self._accepting = [asyncio.create_task(self._accept(each)) for each in sockets or ()]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await cancel(*self._accepting)
        await super().shutdown(sockets)
        await cancel(*self._tasks)

    async def _accept(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        for count in itertools.count():
            seconds = self._clients.seconds_until_free()
            if seconds or count % _AT_ONCE == 0:
                await asyncio.sleep(seconds)  # closes connections, and serves the others
            try:
                client, address = await loop.sock_accept(listener)
            except OSError:  # no descriptor is left, or the client has gone
                await asyncio.sleep(_TICK)
                continue
            self._clients.add(client, address)
            task = asyncio.create_task(self._begin(client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _begin(self, client: socket.socket) -> None:
        """Shake hands with a client and hand it over to a `Connection`."""
        timeout = {"ssl_handshake_timeout": self._limits.body_timeout} if self.config.is_ssl else {}
        with contextlib.suppress(OSError, EOFError):  # of the client's making, ssl's among them
            if client.family != getattr(socket, "AF_UNIX", None):
                # Otherwise an event waits until the client has confirmed the one before, which may take it 40 ms.
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _, connection = await asyncio.get_running_loop().connect_accepted_socket(
                partial(
                    Connection,
                    config=self.config,
                    server_state=self.server_state,
                    app_state=self.lifespan.state,
                    limits=self._limits,
                ),
                client,
                ssl=self.config.ssl,
                **timeout,
            )
            self._clients.begin(client, connection)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(config: ServerConfig, app: ASGIApp) -> uvicorn.Server:
    """Return a uvicorn server for an application, with the configured limits and without signal handlers.

    Raises:
        OSError: The certificate or its key cannot be used.
    """
    settings = uvicorn.Config(
        app,
        http="h11",  # httptools, uvicorn's default, accepts heads of megabytes
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=config.max_header_bytes,
        timeout_keep_alive=max(round(config.keep_alive_timeout), 1),
        timeout_graceful_shutdown=_FLUSH_SECONDS,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
    )
    try:
        settings.load()
    except OSError as error:  # includes errors of the ssl module
        raise OSError(f"ssl_certfile, ssl_keyfile: they cannot be used: {error.strerror or error}") from error
    return _Server(settings, config)
