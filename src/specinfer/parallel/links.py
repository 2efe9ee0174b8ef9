"""Connections between ranks: Unix sockets in a private folder on one machine, TLS between machines.

Each connection carries the messages of one tag in one direction. The thread that waits for them reads them itself, so
no other thread has to wake up. Between machines both sides must have the key of `cluster_cert`, and every message is
encrypted and authenticated by it.
"""

import contextlib
import logging
import shutil
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from specinfer.core.files import TemporaryFolder, is_private
from specinfer.core.parallel_config import Place, make_tls
from specinfer.parallel.sender import LinkError, Sender, read_exactly, shut

Address = str | tuple[str, int]
logger = logging.getLogger(__name__)
STORE_TAG = -1  # of connections to the store on rank 0
CONNECT_SECONDS = 300.0  # limit until a rank is reached
_HELLO = struct.Struct("<ii")  # rank of the sender, and the tag of its messages
_LENGTH = struct.Struct("<Q")
_WELCOME = b"\x06"
_GREETING_SECONDS = 5.0
_MAX_GREETING = 128  # connections that have not named their rank yet; the oldest makes way for a new one
_RETRY_SECONDS = 0.1
_BACKLOG = 256
_WRONG_KEY = ("CERTIFICATE_VERIFY_FAILED", "UNKNOWN_CA", "WRONG_VERSION_NUMBER", "DECRYPT_ERROR")  # reasons of OpenSSL


class Links:
    """The connections of one rank, made when they are first used.

    Args:
        place: Place of this rank.
        find_address: Function that returns the address of a rank other than 0 on another machine.
        serve_store: Function that answers a connection to the store; only rank 0 has one.

    Attributes:
        place: The place, with the folder that was created.

    Raises:
        ValueError: The address or folder cannot be used.
    """

    def __init__(
        self,
        place: Place,
        find_address: Callable[[int], Address],
        serve_store: Callable[[socket.socket], None] | None = None,
    ) -> None:
        self._temporary: TemporaryFolder | None = None
        if place.is_on_one_machine and not place.folder:
            self._temporary = TemporaryFolder("ranks")
            place = replace(place, folder=str(self._temporary.path))
        elif place.is_on_one_machine:
            _make_private(Path(place.folder))
        self.place = place
        self._find_address, self._serve_store = find_address, serve_store
        is_secret = not place.is_on_one_machine and place.cluster_cert is not None
        self._tls = make_tls(str(place.cluster_cert)) if is_secret else None
        self._senders: dict[tuple[int, int], Sender] = {}
        self._received: dict[tuple[int, int], socket.socket] = {}
        self._changed = threading.Condition()
        self._greeting: deque[socket.socket] = deque()
        self._others: list[socket.socket] = []
        self._is_closed = self._is_warned = False
        self._listener = _listen(place)
        threading.Thread(target=self._accept_all, name="specinfer-accept", daemon=True).start()

    @property
    def address(self) -> Address:
        """Address that this rank listens on."""
        found = self._listener.getsockname()
        return found if isinstance(found, str) else (found[0], found[1])

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Send a tensor of the CPU, which must not be changed any more; returns before it has arrived.

        Raises:
            LinkError: The rank is gone.
        """
        sender = self._senders.get((to, tag))
        if sender is None:
            sender = self._senders[to, tag] = Sender(self.dial(to, tag))
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        sender.send(_LENGTH.pack(len(data)), data)

    def receive(self, source: int, tag: int, into: Tensor | None = None) -> Tensor:
        """Return the next message of a rank with this tag.

        Args:
            into: Contiguous tensor of the CPU for the message. Without it the result is [bytes] uint8.

        Raises:
            LinkError: The rank is gone.
        """
        connection = self._received.get((source, tag)) or self._await(source, tag)
        try:
            (count,) = _LENGTH.unpack(read_exactly(connection, bytearray(_LENGTH.size)))
            found = torch.empty(count, dtype=torch.uint8) if into is None else into
            if found.nbytes != count:
                raise LinkError(f"{count} bytes came where {found.nbytes} were expected")
            read_exactly(connection, found.view(-1).view(torch.uint8).numpy().data)
        except (OSError, LinkError) as error:
            raise LinkError(f"the connection from rank {source} is broken: {error}") from error
        return found

    def dial(self, rank: int, tag: int, seconds: float = CONNECT_SECONDS) -> socket.socket:
        """Return a new connection to a rank.

        Raises:
            LinkError: It cannot be reached in time.
            ValueError: One of both has another `cluster_cert`, or none.
        """
        end, is_logged = time.monotonic() + seconds, False
        while True:
            try:
                connection = self._dial_once(rank, tag)
                if tag == STORE_TAG:
                    self._others.append(connection)
                return connection
            except (OSError, LinkError) as error:
                if isinstance(error, ssl.SSLError) and any(kind in str(error) for kind in _WRONG_KEY):
                    raise ValueError(
                        f"cluster_cert: rank {rank} has another one, or none ({error.reason}); give all the same"
                    ) from error
                if self._is_closed or time.monotonic() > end:
                    raise LinkError(f"rank {rank} cannot be reached: {error}") from error
                if not is_logged and rank == 0 and not self.place.is_on_one_machine:
                    where = f"{self.place.host}:{self.place.port}"
                    logger.info("rank 0 is not at %s yet (%s); waiting for it", where, error)
                is_logged = True
            time.sleep(_RETRY_SECONDS)

    def close(self) -> None:
        """Close all connections, from any thread; whoever waits for a message gets a `LinkError`."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        for sender in list(self._senders.values()):
            sender.close()
        for connection in (*self._received.values(), *self._greeting, *self._others, self._listener):
            shut(connection)
        if self._temporary is not None:
            self._temporary.close()
        elif self.place.is_on_one_machine and self.place.rank == 0:
            shutil.rmtree(self.place.folder, ignore_errors=True)

    def _dial_once(self, rank: int, tag: int) -> socket.socket:
        place = self.place
        if place.is_on_one_machine:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(_GREETING_SECONDS)
            try:
                connection.connect(_socket_path(place, rank))
            except BaseException:
                connection.close()
                raise
        else:
            address = (place.host, place.port) if rank == 0 else self._find_address(rank)
            assert not isinstance(address, str)
            connection = socket.create_connection(address, _GREETING_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            if self._tls is not None:
                connection = self._tls[1].wrap_socket(connection)
            connection.sendall(_HELLO.pack(place.rank, tag))
            read_exactly(connection, bytearray(len(_WELCOME)))
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise
        return connection

    def _await(self, source: int, tag: int) -> socket.socket:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or (source, tag) in self._received)
            if self._is_closed:
                raise LinkError("the connections of this rank are closed")
            return self._received[source, tag]

    # ----------------------------------------------------------------------- in threads of their own

    def _accept_all(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
                connection.settimeout(_GREETING_SECONDS)
                if self._tls is not None:
                    connection = self._tls[0].wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            except OSError:  # closed, or too many open files
                time.sleep(_RETRY_SECONDS)
                continue
            with self._changed:
                self._greeting.append(connection)
                oldest = self._greeting.popleft() if len(self._greeting) > _MAX_GREETING else None
            if oldest is not None:
                # Its own thread closes it: as long as that reads, another connection must not get its file descriptor.
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(oldest, socket.SHUT_RDWR)
            threading.Thread(target=self._greet, args=(connection,), name="specinfer-greet", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        """Read who has connected, and keep the connection of a rank."""
        try:
            if isinstance(connection, ssl.SSLSocket):
                connection.do_handshake()
            elif isinstance(self.address, tuple):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            rank, tag = _HELLO.unpack(read_exactly(connection, bytearray(_HELLO.size)))
            with self._changed:
                self._greeting.remove(connection)
                is_taken = self._is_closed or (tag != STORE_TAG and (rank, tag) in self._received)
                if is_taken or (tag == STORE_TAG and self._serve_store is None):
                    raise LinkError(f"rank {rank} has connected already")
                connection.settimeout(None)
                connection.sendall(_WELCOME)
                if tag == STORE_TAG:
                    self._others.append(connection)
                else:
                    self._received[rank, tag] = connection
                    self._changed.notify_all()
        except (OSError, LinkError, ValueError) as error:  # ValueError: it made way for others
            if isinstance(error, ssl.SSLError) and not self._is_warned:
                self._is_warned = True
                logger.warning("a connection without the key of cluster_cert was refused (%s)", error.reason)
            with self._changed, contextlib.suppress(ValueError):
                self._greeting.remove(connection)
            shut(connection)
            return
        if tag == STORE_TAG:
            assert self._serve_store is not None
            self._serve_store(connection)


def own_address(place: Place) -> str:
    """Return the address of this machine, as others reach it."""
    if place.rank == 0:
        return place.host
    family, *_, address = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _socket_path(place: Place, rank: int) -> str:
    return str(Path(place.folder) / str(rank))


def _make_private(folder: Path) -> None:
    """Create a folder that only this user can enter, if it is not there."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_private(folder.lstat()):
        raise ValueError(f"TMPDIR: {folder} does not belong to this user alone; remove it, or set another folder")


def _listen(place: Place) -> socket.socket:
    """Return the socket that this rank listens on.

    Raises:
        ValueError: The address cannot be listened on.
    """
    if place.is_on_one_machine:
        path = _socket_path(place, place.rank)
        listener = socket.socket(socket.AF_UNIX)
        try:
            Path(path).unlink(missing_ok=True)  # of a process that was killed
            listener.bind(path)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise ValueError(f"TMPDIR: no socket can be created at {path} ({error}); set a shorter one") from error
        return listener
    port = place.port if place.rank == 0 else 0
    host = own_address(place)
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((str(address[0]), port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ValueError(
            f"master_addr, master_port: {host}:{port} cannot be listened on: {error.strerror or error}; "
            "name an address of this machine and a free port"
        ) from error
