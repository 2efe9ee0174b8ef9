"""The answer to all requests while the parent waits for a child that accepts connections: 503 and when to try again.

It runs in the parent's only thread, so it waits for no client, and it imports nothing heavy.
"""

import contextlib
import json
import math
import socket
import time
from collections.abc import Collection

_RETRY_SECONDS = 5  # where the time to load is not known
_MOST = 64  # connections at once; a further one ends the oldest
_SECONDS = 2.0  # for a client to send its request and read the answer


def loading_message(last_end: str = "", ready_at: float | None = None) -> tuple[str, int]:
    """Return the reason why requests are not served yet, and the seconds after which they should be sent again.

    Args:
        last_end: How the engine before this one ended, or "" for the first one.
        ready_at: When requests will probably be served, by `time.monotonic`, or None if that is not known.
    """
    reason = f"the engine {last_end} and is being loaded again" if last_end else "the model is being loaded"
    if ready_at is None:
        return f"{reason}; try again in a moment", _RETRY_SECONDS
    seconds = max(math.ceil(ready_at - time.monotonic()), 1)
    return f"{reason}; try again in {seconds} s", seconds


class UnavailableResponder:
    """A responder to a listener's connections; `sockets` are to be watched, and readable ones to be served."""

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._ends: dict[socket.socket, float] = {}  # deadlines of the clients that are connected
        self.is_open = False  # whether it accepts connections

    @property
    def sockets(self) -> list[socket.socket]:
        return [*([self._listener] if self.is_open else ()), *self._ends]

    def serve(self, readable: Collection[object], last_end: str, ready_at: float | None) -> None:
        """Accept, answer and end connections, without waiting for any of them; see `loading_message`."""
        if self._listener in readable:
            with contextlib.suppress(OSError):  # the client has gone, or no descriptor is left
                client, _ = self._listener.accept()
                client.setblocking(False)
                self._ends[client] = time.monotonic() + _SECONDS
                if len(self._ends) > _MOST:
                    self._close(next(iter(self._ends)))
        for client, end in list(self._ends.items()):
            if (client in readable and not _is_open_after(client, last_end, ready_at)) or time.monotonic() > end:
                self._close(client)

    def close(self) -> None:
        """End all connections."""
        self.is_open = False
        for client in list(self._ends):
            self._close(client)

    def _close(self, client: socket.socket) -> None:
        del self._ends[client]
        client.close()


def _is_open_after(client: socket.socket, last_end: str, ready_at: float | None) -> bool:
    """Answer what a client has sent; return False once it has closed the connection."""
    try:
        if not client.recv(65536):
            return False
        client.sendall(_answer(*loading_message(last_end, ready_at)))  # each socket has room for it
        # What the client still sends is read until it ends: closing before that would take the answer from it.
        client.shutdown(socket.SHUT_WR)
    except (BlockingIOError, BrokenPipeError):  # nothing has come, or the answer was sent before
        return True
    except OSError:
        return False
    return True


def _answer(message: str, seconds: int) -> bytes:
    error = {"message": message, "type": "server_error", "param": None, "code": "loading"}
    body = json.dumps({"error": error})
    return (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: {seconds}\r\n"
        f"Connection: close\r\n\r\n{body}"
    ).encode()
