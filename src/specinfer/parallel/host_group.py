"""Groups of ranks whose tensors go through the memory of the machine."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specinfer.parallel.links import Links

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
