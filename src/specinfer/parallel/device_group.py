"""Groups whose tensors stay on their devices: NCCL between GPUs, if each rank has its own.

For a sum all parts are gathered and added on every rank in the order of ranks, as in a `HostGroup`. So the bits are the
same everywhere, however the library would have added. Messages, commands and heartbeats never use it.
"""

import contextlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specinfer.core.parallel_config import Place
from specinfer.parallel.group import Group, Traffic, sum_in_order

_MAX_PENDING = 8  # messages to one rank that may be in transfer


@dataclass(slots=True)
class _Outbox:
    """Messages in transfer to one rank: a tensor must live until it has been sent."""

    pending: deque[tuple[Any, Tensor]] = field(default_factory=deque)

    def add(self, work: Any, tensor: Tensor) -> None:
        self.pending.append((work, tensor))
        if len(self.pending) > _MAX_PENDING:
            self.pending.popleft()[0].wait()


class DeviceGroup:
    """A group of ranks over a torch.distributed backend that connects only these.

    Nothing here waits for a GPU: work is queued on its streams, and the reader of a result waits. NCCL does not notice
    that a rank has ended; `abort` ends what waits for it.

    Args:
        backend: Backend made by `Rendezvous.connect_devices`.
    """

    def __init__(self, backend: Any, rank: int, size: int, traffic: Traffic | None = None) -> None:
        self._backend = backend
        self.rank, self.size = rank, size
        self.traffic = traffic or Traffic()
        self._outboxes = [_Outbox() for _ in range(size)]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return sum_in_order(self.all_gather(tensor))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        own = tensor.detach().contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._backend.allgather([parts], [own]).wait()
        self.traffic.sent(own, self.size - 1)
        self.traffic.received(own, self.size - 1)
        return parts

    def send(self, tensor: Tensor, to: int) -> None:
        own = tensor.detach().contiguous()
        self._outboxes[to].add(self._backend.send([own], to, 0), own)
        self.traffic.sent(own)

    def recv(self, tensor: Tensor, source: int) -> None:
        place = tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self._backend.recv([place], source, 0).wait()
        self.traffic.received(place)
        if place is not tensor:
            tensor.copy_(place)

    def abort(self) -> None:
        """End all work in progress, from any thread. The group cannot be used any more."""
        backend = self._backend
        if backend is not None:
            backend.abort()

    def close(self) -> None:
        """Close the connections. The group cannot be used any more."""
        self._outboxes.clear()
        with contextlib.suppress(RuntimeError):
            self.abort()
        self._backend = None


def each_has_a_gpu(world: Group, place: Place, device: torch.device, *, is_available: bool) -> bool:
    """Return whether all ranks compute on GPUs, no two on the same one. All ranks call this and get the same result.

    Args:
        is_available: True if this rank's PyTorch has NCCL.
    """
    can = device.type == "cuda" and is_available
    machine = place.rank - place.local_rank  # number of the machine's first rank
    offers = world.all_gather(torch.tensor([can, machine, device.index or 0]))
    found = [tuple(offer.tolist()) for offer in offers]
    return all(offer[0] for offer in found) and len(set(found)) == len(found)
