"""Rendezvous of ranks: their connections, the store on rank 0, and the check of equal settings."""

import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed

from specinfer.core.errors import RanksError
from specinfer.core.parallel_config import Place
from specinfer.parallel.links import CONNECT_SECONDS, STORE_TAG, Address, Links
from specinfer.parallel.sender import LinkError, read_exactly, shut

logger = logging.getLogger(__name__)
_dist: Any = torch.distributed  # torch.distributed is only partly annotated
_FOREVER = timedelta(days=3650)  # an idle rank waits for the next pass
_LOOK_SECONDS = 0.05
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


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The connections and the store that all ranks of one start share.

    Attributes:
        place: Place of this rank, with the folder or port that was chosen.
        links: Connections to the other ranks.
        store: Small values by name.
        kept: The stores of NCCL backends, which do not keep what is Python's of them.
    """

    place: Place
    links: Links
    store: Store
    kept: list[Any] = field(default_factory=list)

    def another(self) -> Store:
        """Return one more connection to the store, for another thread."""
        return self.store if self.place.rank == 0 else RemoteStore(self.links, CONNECT_SECONDS)

    def check_settings(self, wanted: Mapping[str, str], look: Callable[[], None] = lambda: None) -> None:
        """Check that every rank has the same settings as rank 0.

        Args:
            wanted: Settings of this rank, by name.
            look: Function called while waiting for others; it may raise to end the waiting.

        Raises:
            ValueError: The settings of a rank differ; the message names the first one that does.
            RanksError: Some ranks did not connect in time.
        """
        place = self.place
        self.store.set(f"wanted/{place.rank}", json.dumps(dict(wanted)))
        others = range(1, place.world_size) if place.rank == 0 else (0,)
        for other in others:
            theirs = json.loads(self._awaited(f"wanted/{other}", other, look))
            for name in sorted(theirs.keys() | wanted.keys()):
                if theirs.get(name) != wanted.get(name):
                    raise ValueError(
                        f"{name}: {wanted.get(name)} on rank {place.rank} and {theirs.get(name)} on rank {other}; "
                        "start all ranks with the same model and options"
                    )

    def _awaited(self, key: str, rank: int, look: Callable[[], None]) -> str:
        end = time.monotonic() + CONNECT_SECONDS
        if rank >= self.place.local_size and self.store.get(key) is None:
            logger.info("waiting for rank %d, which another machine is to start", rank)
        while (value := self.store.get(key)) is None:
            look()
            if time.monotonic() > end:
                raise RanksError(
                    f"rank {rank} of {self.place.world_size} did not connect within {CONNECT_SECONDS:.0f} seconds; "
                    "start it with the same command, and see its log"
                )
            time.sleep(_LOOK_SECONDS)
        return value

    def connect_devices(self, name: str, rank: int, size: int) -> Any:
        """Return an NCCL backend for the GPUs of a group of ranks, which connects when it is first used.

        Args:
            name: Unique name of the group.
        """
        # Heartbeats find ranks that hang or have ended; PyTorch's own watchdog would end this process.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = _FOREVER
        store = as_torch_store(self.another(), f"nccl/{name}/")
        self.kept.append(store)
        return _dist.ProcessGroupNCCL(store, rank, size, options)


def has_nccl() -> bool:
    """Return whether this PyTorch can connect GPUs."""
    return bool(_dist.is_available() and _dist.is_nccl_available())


def join_rendezvous(place: Place, seconds: float = CONNECT_SECONDS) -> Rendezvous:
    """Open the store on rank 0, or connect to it.

    Args:
        seconds: Time limit.

    Raises:
        ValueError: The address cannot be listened on, or rank 0 cannot be reached in time.
    """
    hosted = _Torchrun(place, seconds) if place.is_hosted and not place.is_on_one_machine else None
    if place.rank == 0:
        store = LocalStore()
        links = Links(place if hosted is None else replace(place, port=0), _finder(store), store.serve)
        if hosted is not None:
            hosted.set_port(links.address)
        return Rendezvous(links.place, links, store)
    if hosted is not None:
        place = replace(place, port=hosted.port())
    found: list[Store] = []
    links = Links(place, lambda rank: _finder(found[0])(rank))
    try:
        found.append(RemoteStore(links, seconds))
    except LinkError as error:
        links.close()
        raise ValueError(
            f"master_addr, master_port: rank 0 was not reached at {place.host}:{place.port} within {seconds:.0f} "
            f"seconds ({error}); check both, that machine 0 runs, and what firewalls let through"
        ) from error
    except ValueError:
        links.close()
        raise
    if not place.is_on_one_machine:
        found[0].set(_address_key(place.rank), json.dumps(links.address))
    return Rendezvous(links.place, links, found[0])


def _address_key(rank: int) -> str:
    return f"address/{rank}"


def _finder(store: Store) -> Callable[[int], Address]:
    def find(rank: int) -> Address:
        host, port = json.loads(await_value(store, _address_key(rank)))
        return host, port

    return find


class _Torchrun:
    """The store of torchrun, from which ranks on several machines learn the port of rank 0, and nothing else."""

    def __init__(self, place: Place, seconds: float) -> None:
        try:
            store = _dist.TCPStore(
                place.host, place.port, None, False, timedelta(seconds=seconds), wait_for_workers=False
            )
        except RuntimeError as error:
            raise ValueError(f"MASTER_ADDR, MASTER_PORT: torchrun's store cannot be reached: {error}") from error
        # torchrun keeps one store over all its restarts, with its own values in it.
        self._store = _dist.PrefixStore(f"specinfer/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def set_port(self, address: Address) -> None:
        self._store.set("port", str(address[1]))

    def port(self) -> int:
        return int(self._store.get("port"))
