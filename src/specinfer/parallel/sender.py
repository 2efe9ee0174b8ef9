"""Sending over a connection without waiting: what the system does not take at once is sent by a thread."""

import contextlib
import select
import socket
import ssl
import threading
from collections import deque
from typing import TypeVar

_MAX_PENDING = 8  # messages to one rank that may be in transfer
_JOINED_BYTES = 64 * 1024  # messages up to this size are sent in one piece with their length

Buffer = TypeVar("Buffer", bytearray, memoryview)


class LinkError(RuntimeError):
    """A connection to another rank is broken."""


class Sender:
    """Messages over one connection, in order, from one thread."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._rest: deque[memoryview] = deque()  # begins with the rest of the message that is in transfer
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._broken: str | None = None

    def send(self, head: bytes, data: memoryview) -> None:
        """Send a message of two parts; waits only if many are in transfer.

        Raises:
            LinkError: The connection is broken.
        """
        parts = [memoryview(head + data)] if len(data) <= _JOINED_BYTES else [memoryview(head), data]
        with self._changed:
            self._changed.wait_for(lambda: len(self._rest) < _MAX_PENDING or self._broken is not None)
            for part in parts:
                if rest := part if self._rest else self._push(part):
                    self._rest.append(rest)
            if self._broken is not None:
                raise LinkError(self._broken)
            if self._rest and self._thread is None:
                self._thread = threading.Thread(target=self._send_rest, name="specinfer-send", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._broken = self._broken or "it was closed"
            self._changed.notify_all()
        shut(self._connection)

    def _push(self, part: memoryview) -> memoryview:
        """Send what the system takes at once, and return the rest."""
        try:
            while part:
                part = part[self._connection.send(part) :]
        except (BlockingIOError, ssl.SSLWantWriteError):
            pass
        except OSError as error:
            self._broken = str(error)
        return part

    def _send_rest(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._rest or self._broken is not None)
                if self._broken is not None:
                    return
                part = self._rest[0]
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                writable = select.poll()
                writable.register(self._connection, select.POLLOUT)
                writable.poll()
            rest = self._push(part)
            with self._changed:
                if rest:
                    self._rest[0] = rest
                else:
                    self._rest.popleft()
                self._changed.notify_all()


def read_exactly(connection: socket.socket, into: Buffer) -> Buffer:
    """Fill the buffer from a connection and return it.

    Raises:
        LinkError: The connection was closed.
        OSError: It is broken.
    """
    view = memoryview(into)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise LinkError("its connection was closed")
        view = view[count:]
    return into


def shut(connection: socket.socket) -> None:
    """End a connection or a listener, also for threads that wait for it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    connection.close()
