"""The socket that the server listens on, a port or a file, and its open connections, bounded in all and by address.

Everyone may keep the server waiting for a moment, so that a flood of new connections does not end those before their
first request. At a limit, whoever has kept the server waiting longest makes way.
"""

import contextlib
import errno
import ipaddress
import math
import os
import socket
import stat
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from specinfer.core.systems import max_descriptors
from specinfer.server.config import ServerConfig

_SPARE = 2  # connections per request that may be served at once
_MOMENT = 0.25  # seconds
_OWN_DESCRIPTORS = 128  # for files, pipes and sockets of the server itself


class Waiting(Protocol):
    """The protocol of a connection whose TLS handshake, if it has one, is complete."""

    @property
    def waiting_since(self) -> float | None:
        """The time of `time.monotonic` since which the client keeps the server waiting, or None if it does not."""
        ...

    def abort(self) -> None:
        """Close the connection at once."""
        ...


@dataclass(slots=True, eq=False)
class _Client:
    socket: socket.socket
    network: str
    since: float
    protocol: Waiting | None = None  # None during the handshake

    @property
    def waiting_since(self) -> float | None:
        return self.since if self.protocol is None else self.protocol.waiting_since

    def close(self) -> None:
        if self.protocol is not None:
            self.protocol.abort()
        else:  # its transport finds the end of the handshake
            self.socket.shutdown(socket.SHUT_RDWR)


class Clients:
    """All open connections, also those whose handshake is not complete."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._clients: dict[int, _Client] = {}  # by descriptor

    def __len__(self) -> int:
        return len(self._clients)

    def seconds_until_free(self) -> float:
        """Return the seconds until one more connection may be accepted: 0 if there is a place, or somebody to close."""
        self._sweep()
        if len(self._clients) < most_connections(self._config):
            return 0.0
        longest = min(client.waiting_since or math.inf for client in self._clients.values())
        return min(max(longest + _MOMENT - time.monotonic(), 0.0), _MOMENT)

    def add(self, client: socket.socket, address: Any) -> None:
        """Count an accepted connection; at a limit the one that has kept the server waiting longest is closed."""
        self._sweep()
        added = _Client(client, network_of(address), time.monotonic())
        self._clients[client.fileno()] = added
        rivals = [client for client in self._clients.values() if client.network == added.network]
        if added.network and len(rivals) > self._most_of_one:
            self._close_one(rivals, added)
        elif len(self._clients) > most_connections(self._config):
            self._close_one(self._clients.values(), added)

    def begin(self, client: socket.socket, protocol: Waiting) -> None:
        """Note that the handshake of a connection is complete."""
        counted = self._clients.get(client.fileno())
        if counted is not None and counted.socket is client:
            counted.protocol = protocol

    def _sweep(self) -> None:
        """Forget the connections that are closed."""
        self._clients = {number: one for number, one in self._clients.items() if one.socket.fileno() == number}

    @property
    def _most_of_one(self) -> int:
        """Largest number of connections from one address."""
        return self._config.max_connections_per_address or max(most_connections(self._config) // 2, 1)

    def _close_one(self, clients: Collection[_Client], added: _Client) -> None:
        longest = min(clients, key=lambda one: one.waiting_since or math.inf)
        if (longest.waiting_since or math.inf) > added.since - _MOMENT:
            longest = added
        del self._clients[longest.socket.fileno()]
        longest.close()


def most_connections(limits: ServerConfig) -> int:
    """Return the number of connections that may be open at once: what is configured, or what the system allows."""
    return min(_SPARE * limits.max_connections, max(max_descriptors() - _OWN_DESCRIPTORS, 16))


def network_of(address: Any) -> str:
    """Return the address of a client, or its network with IPv6, where one client has many; "" on a Unix socket."""
    if not isinstance(address, tuple):
        return ""
    host = ipaddress.ip_address(str(address[0]).partition("%")[0])
    if isinstance(host, ipaddress.IPv4Address):
        return str(host)
    return str(host.ipv4_mapped or ipaddress.ip_network((host, 64), strict=False))


_BACKLOG = 2048  # connections that wait while no engine accepts them


@contextlib.contextmanager
def listening(config: ServerConfig) -> Iterator[socket.socket]:
    """Yield a socket that listens; an address in use is reported before a model is loaded.

    Raises:
        OSError: The address cannot be used; the message names it.
    """
    try:
        listener = _unix_socket(config.uds) if config.uds is not None else _tcp_socket(config.host, config.port)
    except OSError as error:
        raise OSError(_refusal(config, error)) from error
    owner = os.getpid()
    try:
        yield listener
    finally:
        listener.close()
        if config.uds is not None and os.getpid() == owner:  # and not in a process that was forked meanwhile
            with contextlib.suppress(OSError):
                os.unlink(config.uds)


def _refusal(config: ServerConfig, error: OSError) -> str:
    # Python adds the address to the words of some errors, but not to those of others.
    reason = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror or error
    if config.uds is not None:
        return f"uds: cannot listen on {config.uds}: {reason}; choose another"
    place = f"cannot listen on {config.host}:{config.port}: {reason}"
    if error.errno in (errno.EADDRINUSE, errno.EACCES):
        return f"port: {place}; choose another, or 0 for a free one"
    return f"host: {place}; name an address of this machine"


def _tcp_socket(host: str, port: int) -> socket.socket:
    family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    # The IPv6 wildcard address covers both families.
    is_both = place[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((str(place[0]), port), family=family, backlog=_BACKLOG, dualstack_ipv6=is_both)


def _unix_socket(path: str) -> socket.socket:
    if not hasattr(socket, "AF_UNIX"):
        raise OSError("this system has no Unix sockets")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(path).st_mode) and not _is_answered(path):
                os.unlink(path)  # left by a process that was killed
        listener.bind(path)
        os.chmod(path, 0o660)  # a client that may write to the socket needs no key
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _is_answered(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


def address(config: ServerConfig, listener: socket.socket) -> str:
    """Return the URL of the server."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://{host}:{listener.getsockname()[1]}{config.root_path}"
