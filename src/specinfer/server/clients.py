"""The open connections of a port, bounded in all and by address: whoever has kept the server waiting longest makes way.

asyncio has no hook before a TLS handshake, and accepts a whole backlog at once, so the listening socket itself counts.
"""

import ipaddress
import os
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from specinfer.core.systems import max_descriptors
from specinfer.server.config import ServerConfig

_SPARE = 2  # connections per request that may be served at once
_OWN_DESCRIPTORS = 128  # kept for files, pipes and sockets of the server itself


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

    def add(self, client: socket.socket, address: Any) -> None:
        """Count an accepted connection; at a limit the one that has kept the server waiting longest is closed."""
        self._clients = {number: one for number, one in self._clients.items() if one.socket.fileno() == number}
        added = _Client(client, network_of(address), time.monotonic())
        self._clients[client.fileno()] = added
        if added.network:
            self._bound([one for one in self._clients.values() if one.network == added.network], self._most_of_one)
        self._bound(self._clients.values(), most_connections(self._config))

    def begin(self, number: int, protocol: Waiting) -> None:
        """Note that the handshake of the connection with this descriptor is complete."""
        if number in self._clients:
            self._clients[number].protocol = protocol

    @property
    def _most_of_one(self) -> int:
        """Largest number of connections from one address."""
        return self._config.max_connections_per_address or max(most_connections(self._config) // 2, 1)

    def _bound(self, clients: Collection[_Client], most: int) -> None:
        if len(clients) > most:
            waiting = [(one.waiting_since, one) for one in clients]
            # The one that was just accepted is among them.
            longest = min((pair for pair in waiting if pair[0] is not None), key=lambda pair: pair[0] or 0.0)[1]
            del self._clients[longest.socket.fileno()]
            longest.close()


class Listener(socket.socket):
    """A listening socket that reports what it accepts."""

    def __init__(self, listener: socket.socket, clients: Clients) -> None:
        super().__init__(fileno=os.dup(listener.fileno()))
        self.setblocking(False)
        self._counted = clients

    def listen(self, backlog: int = 0, /) -> None:
        """Leave the backlog as it is: asyncio would set it to the number that it accepts at once."""

    def accept(self) -> tuple[socket.socket, Any]:
        client, address = super().accept()
        self._counted.add(client, address)
        return client, address


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
