"""Messages between rank 0 and the others: arrays of 32-bit integers of any length, in order."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specinfer.parallel.host_group import TAGS_EACH, Traffic
from specinfer.parallel.links import Links


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
