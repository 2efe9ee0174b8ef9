"""The store of all ranks: small texts and counts by name, in the memory of rank 0."""

import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from specinfer.parallel.links import STORE_TAG, Links
from specinfer.parallel.sender import LinkError, read_exactly, shut

_LENGTH = struct.Struct("<I")
_POLL_SECONDS = 0.05


class Store(Protocol):
    """The values as every rank sees them."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> str | None: ...

    def add(self, key: str, amount: int) -> int:
        """Add to a count, 0 if it is new, and return the sum."""
        ...


class LocalStore:
    """The values themselves, on rank 0."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self._values[key] = value

    def get(self, key: str) -> str | None:
        return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            total = int(self._values.get(key, "0")) + amount
            self._values[key] = str(total)
        return total

    def serve(self, connection: socket.socket) -> None:
        """Answer another rank until it has gone."""
        methods: dict[str, Callable[..., object]] = {"set": self.set, "get": self.get, "add": self.add}
        try:
            while True:
                name, *arguments = _read(connection)
                _write(connection, methods[name](*arguments))
        except (OSError, LinkError):
            shut(connection)


class RemoteStore:
    """The values as another rank reaches them, over a connection of its own; its methods raise `LinkError`."""

    def __init__(self, links: Links, seconds: float) -> None:
        self._connection = links.dial(0, STORE_TAG, seconds)
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> str | None:
        found: str | None = self._ask("get", key)
        return found

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def _ask(self, *question: object) -> Any:
        try:
            with self._lock:
                _write(self._connection, question)
                return _read(self._connection)
        except OSError as error:
            raise LinkError(str(error)) from error


def await_value(store: Store, key: str) -> str:
    """Wait for another rank to set a value, and return it."""
    while (value := store.get(key)) is None:
        time.sleep(_POLL_SECONDS)
    return value


def as_torch_store(store: Store, prefix: str) -> Any:
    """Return the values as a store of torch.distributed, which NCCL needs to connect GPUs."""
    import torch.distributed

    dist: Any = torch.distributed  # only partly annotated

    class TorchStore(dist.Store):  # type: ignore[misc]
        def set(self, key: str, value: bytes | str) -> None:
            store.set(prefix + key, value if isinstance(value, str) else value.decode("latin-1"))

        def get(self, key: str) -> bytes:
            return await_value(store, prefix + key).encode("latin-1")

        def add(self, key: str, amount: int) -> int:
            return store.add(prefix + key, amount)

        def check(self, keys: list[str]) -> bool:
            return all(store.get(prefix + key) is not None for key in keys)

        def wait(self, keys: list[str], timeout: object = None) -> None:
            for key in keys:
                await_value(store, prefix + key)

    return TorchStore()


def _read(connection: socket.socket) -> Any:
    (length,) = _LENGTH.unpack(read_exactly(connection, bytearray(_LENGTH.size)))
    return json.loads(read_exactly(connection, bytearray(length)))


def _write(connection: socket.socket, value: object) -> None:
    data = json.dumps(value).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)
