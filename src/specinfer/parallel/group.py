"""Groups of ranks: sums and messages through the memory of the machine, and the shard of a target that a rank has."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from specinfer.parallel.links import Links


class Group(Protocol):
    """Interface of ranks that compute together. All of them call the same methods in the same order."""

    @property
    def rank(self) -> int:
        """Number of this process in the group."""
        ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks, added in the order of ranks: the same bits everywhere, whatever the batch."""
        ...

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return each rank's tensor, in the order of ranks; all have the same shape."""
        ...

    def send(self, tensor: Tensor, to: int) -> None:
        """Start sending a tensor and return before it has arrived; it must not be changed any more."""
        ...

    def recv(self, tensor: Tensor, source: int) -> None:
        """Receive the next tensor that `source` sends into this one."""
        ...


class Alone:
    """The group of one process."""

    rank, size = 0, 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def send(self, tensor: Tensor, to: int) -> None:
        raise AssertionError("a group of one sends nothing")

    def recv(self, tensor: Tensor, source: int) -> None:
        raise AssertionError("a group of one sends nothing")


_SUM_TAG, _SEND_TAG, TAGS_EACH = 0, 1, 2  # tags of each group


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


class HostGroup:
    """A group of some ranks, in the order given.

    Args:
        links: Connections to all ranks.
        ranks: World ranks of the group, with this process's own.
        own: World rank of this process.
        number: Number of the group; groups that share ranks need different ones.
    """

    def __init__(
        self, links: Links, ranks: Sequence[int], own: int, number: int, traffic: Traffic | None = None
    ) -> None:
        self._links = links
        self._ranks = list(ranks)
        self.rank, self.size = self._ranks.index(own), len(self._ranks)
        self._first_tag = number * TAGS_EACH
        self.traffic = traffic or Traffic()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return sum_in_order(self.all_gather(tensor))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        own = tensor.detach().contiguous().cpu()
        tag = self._first_tag + _SUM_TAG
        for i, rank in enumerate(self._ranks):
            if i != self.rank:
                self._links.send(own, rank, tag)
        parts = [
            tensor if i == self.rank else self._links.receive(rank, tag, torch.empty_like(own)).to(tensor.device)
            for i, rank in enumerate(self._ranks)
        ]
        self.traffic.sent(own, self.size - 1)
        self.traffic.received(own, self.size - 1)
        return parts

    def send(self, tensor: Tensor, to: int) -> None:
        own = tensor.detach().contiguous().cpu()
        self._links.send(own, self._ranks[to], self._first_tag + _SEND_TAG)
        self.traffic.sent(own)

    def recv(self, tensor: Tensor, source: int) -> None:
        is_direct = tensor.device.type == "cpu" and tensor.is_contiguous()
        place = tensor if is_direct else torch.empty(tensor.shape, dtype=tensor.dtype)
        self._links.receive(self._ranks[source], self._first_tag + _SEND_TAG, place)
        self.traffic.received(place)
        if not is_direct:
            tensor.copy_(place)


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of each rank's part, in the order of ranks; half types are added in fp32 and rounded once."""
    first, *others = parts
    is_half = first.dtype in (torch.bfloat16, torch.float16)
    total = first.to(torch.float32 if is_half else first.dtype, copy=True)
    for part in others:
        total += part
    return total.to(first.dtype)


class Channel:
    """Messages between rank 0 and each of the others, both ways; those of one pair arrive in order.

    Args:
        links: Connections to all ranks.
        others: Ranks it exchanges messages with: for rank 0 any others, for those rank 0.
        number: Number that determines the tag of its messages; other than those of groups.
    """

    def __init__(self, links: Links, others: Sequence[int], number: int, traffic: Traffic | None = None) -> None:
        self._links, self._others, self._tag = links, others, number * TAGS_EACH
        self._traffic = traffic or Traffic()

    def send(self, numbers: Tensor, to: int) -> None:
        """Send [count] int32; returns before it has arrived."""
        self._links.send(numbers, to, self._tag)
        self._traffic.sent(numbers)

    def send_all(self, numbers: Tensor) -> None:
        """Send a message to all others."""
        for rank in self._others:
            self.send(numbers, rank)

    def receive(self, source: int) -> Tensor:
        """Return the next message from a rank: [count] int32."""
        return self._links.receive(source, self._tag).view(torch.int32)


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """A rank's place among the ranks of a target.

    The engine is on rank 0, which is in the *last* stage, so that logits are where they are verified: ranks count
    through the tensor group first, then through the stages from the last to the first.

    Attributes:
        tensor: Ranks that have the same layers, each a slice of them.
        stage: Number of the stage; 0 embeds tokens, the last one has the head.
        num_stages: Number of stages.
    """

    tensor: Group = field(default_factory=Alone)
    stage: int = 0
    num_stages: int = 1

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def has_head(self) -> bool:
        """True if logits are computed here: on one rank of the last stage."""
        return self.is_last and self.tensor.rank == 0

    @property
    def is_whole(self) -> bool:
        """True if the target is not split."""
        return self.num_stages == self.tensor.size == 1

    def layers(self, num_layers: int) -> range:
        """Return the layers of this stage. Earlier stages get the remainder, because the last one has the head."""
        each, more = divmod(num_layers, self.num_stages)
        start = self.stage * each + min(self.stage, more)
        return range(start, start + each + (self.stage < more))
