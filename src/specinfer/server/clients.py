"""The open connections of a port, bounded in all and by address: whoever has kept the server waiting longest makes way.

Everyone may keep the server waiting for a moment, so that a flood of new connections does not end those before their
first request. Meanwhile further clients wait to be accepted.
"""

import ipaddress
import math
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from specinfer.core.systems import max_descriptors
from specinfer.server.config import ServerConfig

_SPARE = 2  # connections per request that may be served at once
_MOMENT = 0.25  # seconds
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

    def seconds_until_free(self) -> float:
        """Return the seconds until one more connection may be accepted: 0 if there is a place, or somebody to close."""
        self._sweep()
        if len(self._clients) < most_connections(self._config):
            return 0.0
        longest = min(one.waiting_since or math.inf for one in self._clients.values())
        return min(max(longest + _MOMENT - time.monotonic(), 0.0), _MOMENT)

    def add(self, client: socket.socket, address: Any) -> None:
        """Count an accepted connection; at a limit the one that has kept the server waiting longest is closed."""
        self._sweep()
        added = _Client(client, network_of(address), time.monotonic())
        self._clients[client.fileno()] = added
        rivals = [one for one in self._clients.values() if one.network == added.network]
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
