"""Rendezvous of ranks: a torch.distributed store on rank 0, the check of equal settings, and the connections.

Rank 0 listens on one address only, for the store and for the ranks' own connections alike. There are no keys and no
encryption: everyone who can reach these ports is trusted.
"""

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed

from specinfer.core.errors import RanksError
from specinfer.core.parallel_config import Place

logger = logging.getLogger(__name__)
_dist: Any = torch.distributed  # torch.distributed is only partly annotated
RENDEZVOUS_SECONDS = 300.0  # limit until all ranks have connected
_FOREVER = timedelta(days=3650)  # an idle rank waits for the next pass
_BACKLOG = 256
_RETRY_SECONDS = 0.25
_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The store that all ranks of one start share.

    Attributes:
        place: Place of this rank, with the port that was chosen.
        store: Store of torch.distributed, with small values by name.
    """

    place: Place
    store: Any

    def another(self) -> Any:
        """Return one more connection to the store, for another thread: a waiting call blocks its connection."""
        return _as_client(self.place, RENDEZVOUS_SECONDS)

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
        end = time.monotonic() + RENDEZVOUS_SECONDS
        if rank >= self.place.local_size and not self.store.check([key]):
            logger.info("waiting for rank %d, which another machine is to start", rank)
        while not self.store.check([key]):
            look()
            if time.monotonic() > end:
                raise RanksError(
                    f"rank {rank} of {self.place.world_size} did not connect within {RENDEZVOUS_SECONDS:.0f} seconds; "
                    "start it with the same command, and see its log"
                )
            time.sleep(_LOOK_SECONDS)
        value: bytes = self.store.get(key)
        return value.decode()

    def connect(self) -> Any:
        """Return a gloo backend with connections to all other ranks.

        Raises:
            RanksError: Some cannot be reached.
        """
        gloo = _dist.ProcessGroupGloo
        options = gloo._Options()
        # Bound to the address by which this machine reaches rank 0, not to all of its addresses.
        options._devices = [gloo.create_device(hostname=own_address(self.place))]
        options._threads = 1
        options._timeout = timedelta(seconds=RENDEZVOUS_SECONDS)
        place = self.place
        try:
            backend = gloo(_dist.PrefixStore("gloo", self.store), place.rank, place.world_size, options)
        except RuntimeError as error:
            raise RanksError(f"rank {place.rank} cannot reach all others: {_first_line(error)}") from error
        backend._set_default_timeout(_FOREVER)
        return backend

    def connect_devices(self, name: str, rank: int, size: int) -> Any:
        """Return an NCCL backend for the GPUs of a group of ranks, which connects when it is first used.

        Args:
            name: Unique name of the group.
        """
        # Heartbeats find ranks that hang or have ended; PyTorch's own watchdog would end this process.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = _FOREVER
        store = _dist.PrefixStore(f"nccl/{name}", self.another())
        return _dist.ProcessGroupNCCL(store, rank, size, options)


def has_nccl() -> bool:
    """Return whether this PyTorch can connect GPUs."""
    return bool(_dist.is_available() and _dist.is_nccl_available())


def join_rendezvous(
    place: Place, seconds: float = RENDEZVOUS_SECONDS, listener: socket.socket | None = None
) -> Rendezvous:
    """Open the store on rank 0, or connect to it.

    Args:
        seconds: Time limit.
        listener: Socket of rank 0 if it is bound already, see `listen`.

    Raises:
        ValueError: The address cannot be listened on, or rank 0 cannot be reached in time.
    """
    if place.rank > 0 or place.is_hosted:
        return Rendezvous(place, _as_client(place, seconds))
    with contextlib.ExitStack() as undo:
        if listener is None:
            listener = listen(place)
            undo.callback(listener.close)
        place = replace(place, port=listener.getsockname()[1])
        store = _dist.TCPStore(
            place.host, place.port, None, True, timedelta(seconds=seconds),
            wait_for_workers=False, master_listen_fd=listener.detach(),
        )  # fmt: skip
        return Rendezvous(place, store)


def listen(place: Place) -> socket.socket:
    """Return a socket for the store, on one address.

    Raises:
        ValueError: The address cannot be listened on.
    """
    try:
        family, *_, address = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((str(address[0]), place.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ValueError(
            f"master_addr, master_port: {place.host}:{place.port} cannot be listened on: {error.strerror or error}; "
            "name an address of this machine and a free port"
        ) from error


def _as_client(place: Place, seconds: float) -> Any:
    _await_listener(place, seconds)  # torch.distributed's own waiting fills the log with traces
    try:
        store = _dist.TCPStore(place.host, place.port, None, False, timedelta(seconds=seconds), wait_for_workers=False)
    except RuntimeError as error:
        raise ValueError(_unreached(place, seconds, _first_line(error))) from error
    # torchrun keeps one store over all its restarts, with its own values in it.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return _dist.PrefixStore(f"specinfer/{start}", store) if place.is_hosted else store


def _await_listener(place: Place, seconds: float) -> None:
    end, is_logged = time.monotonic() + seconds, False
    while True:
        try:
            with socket.create_connection((place.host, place.port), timeout=max(end - time.monotonic(), 0.1)):
                return
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS > end:
                raise ValueError(_unreached(place, seconds, error.strerror or str(error))) from error
            if not is_logged:
                logger.info("rank 0 is not at %s:%d yet (%s); waiting for it", place.host, place.port, error.strerror)
            is_logged = True
        time.sleep(_RETRY_SECONDS)


def _unreached(place: Place, seconds: float, reason: str) -> str:
    return (
        f"master_addr, master_port: rank 0 was not reached at {place.host}:{place.port} within {seconds:.0f} seconds "
        f"({reason}); check both, that machine 0 runs, and what firewalls let through"
    )


def own_address(place: Place) -> str:
    """Return the address of this machine, as others reach it."""
    if place.rank == 0:
        return place.host
    family, *_, address = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
