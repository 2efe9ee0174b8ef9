"""Groups of ranks over torch.distributed's gloo.

gloo sends a message only after the receiver has posted a buffer for it, which adds a delay. So buffers for small
messages of a known kind are posted in advance: a sum over ranks then takes one network delay, not two.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

SMALL_BYTES = 256 * 1024  # messages up to this size find a buffer that was posted in advance
SMALL_TAG, LARGE_TAG, _SEND_TAG, TAGS_EACH = 0, 1, 2, 3  # tags of each group
_MAX_PENDING = 8  # messages to one rank that may be in transfer


class Backend(Protocol):
    """The part of torch.distributed's backend that is used here; ranks are those of the whole world."""

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any: ...

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any: ...


@dataclass(slots=True)
class Traffic:
    """Counters of what this process has sent to others, and received."""

    num_bytes: int = 0
    num_messages: int = 0
    num_bytes_received: int = 0
    num_messages_received: int = 0

    def sent(self, tensor: Tensor, times: int = 1) -> None:
        self.num_bytes += tensor.nbytes * times
        self.num_messages += times

    def received(self, tensor: Tensor, times: int = 1) -> None:
        self.num_bytes_received += tensor.nbytes * times
        self.num_messages_received += times


@dataclass(slots=True)
class Outbox:
    """Messages in transfer to one rank: a tensor must live until it has been sent."""

    pending: deque[tuple[Any, Tensor]] = field(default_factory=deque)

    def add(self, work: Any, tensor: Tensor) -> None:
        self.pending.append((work, tensor))
        if len(self.pending) > _MAX_PENDING:
            self.pending.popleft()[0].wait()


class Inbox:
    """Buffers for the next messages from one rank, posted in advance; a message may be shorter than its buffer.

    Args:
        backend: Backend that connects the ranks.
        depth: Number of messages that may arrive before the first is received, without waiting for a buffer.
    """

    def __init__(self, backend: Backend, source: int, tag: int, depth: int = 2) -> None:
        self._backend, self._source, self._tag = backend, source, tag
        self._buffers: deque[tuple[Any, Tensor]] = deque()
        for _ in range(depth):
            self.post(torch.empty(SMALL_BYTES, dtype=torch.uint8))

    def receive(self) -> Tensor:
        """Return the next message, [SMALL_BYTES] uint8, followed by old contents. The caller has to `post` it again."""
        work, buffer = self._buffers.popleft()
        work.wait()
        return buffer

    def post(self, buffer: Tensor) -> None:
        self._buffers.append((self._backend.recv([buffer], self._source, self._tag), buffer))


class TorchGroup:
    """A group of some ranks of a gloo world, in the order given.

    Args:
        backend: Backend that connects the world.
        ranks: World ranks of the group, with this process's own.
        own: World rank of this process.
        number: Number of the group; groups that share ranks need different ones.
    """

    def __init__(
        self, backend: Backend, ranks: Sequence[int], own: int, number: int, traffic: Traffic | None = None
    ) -> None:
        self._backend: Any = backend
        self._ranks = list(ranks)
        self.rank, self.size = self._ranks.index(own), len(self._ranks)
        self._first_tag = number * TAGS_EACH
        self.traffic = traffic or Traffic()
        self._outboxes = [Outbox() for _ in self._ranks]
        self._inboxes = {
            i: Inbox(backend, rank, self._first_tag + SMALL_TAG) for i, rank in enumerate(self._ranks) if i != self.rank
        }

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return sum_in_order(self.all_gather(tensor))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        own = tensor.detach().contiguous().cpu()
        is_small = own.nbytes <= SMALL_BYTES
        tag = self._first_tag + (SMALL_TAG if is_small else LARGE_TAG)
        others = [i for i in range(self.size) if i != self.rank]
        large = {} if is_small else {i: torch.empty_like(own) for i in others}
        works = {i: self._backend.recv([part], self._ranks[i], tag) for i, part in large.items()}
        for i in others:
            self._post(own, i, tag)
        parts: list[Tensor] = []
        for i in range(self.size):
            if i == self.rank:
                parts.append(tensor)
            elif is_small:
                buffer = self._inboxes[i].receive()
                parts.append(buffer[: own.nbytes].clone().view(own.dtype).view(own.shape).to(tensor.device))
                self._inboxes[i].post(buffer)
            else:
                works[i].wait()
                parts.append(large[i].to(tensor.device))
        self.traffic.received(own, len(others))
        return parts

    def send(self, tensor: Tensor, to: int) -> None:
        self._post(tensor.detach().contiguous().cpu(), to, self._first_tag + _SEND_TAG)

    def recv(self, tensor: Tensor, source: int) -> None:
        is_direct = tensor.device.type == "cpu" and tensor.is_contiguous()
        place = tensor if is_direct else torch.empty(tensor.shape, dtype=tensor.dtype)
        self._backend.recv([place], self._ranks[source], self._first_tag + _SEND_TAG).wait()
        self.traffic.received(place)
        if not is_direct:
            tensor.copy_(place)

    def close(self) -> None:
        """Close the connections. The group cannot be used any more."""
        self._inboxes.clear()
        self._outboxes.clear()
        self._backend = None

    def _post(self, tensor: Tensor, to: int, tag: int) -> None:
        self._outboxes[to].add(self._backend.send([tensor], self._ranks[to], tag), tensor)
        self.traffic.sent(tensor)


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of each rank's part, in the order of ranks; half types are added in fp32 and rounded once."""
    first, *others = parts
    is_half = first.dtype in (torch.bfloat16, torch.float16)
    total = first.to(torch.float32 if is_half else first.dtype, copy=True)
    for part in others:
        total += part
    return total.to(first.dtype)
