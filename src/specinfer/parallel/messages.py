"""Messages between rank 0 and the others: arrays of 32-bit integers of any length, in order."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specinfer.parallel.torch_group import LARGE_TAG, SMALL_BYTES, SMALL_TAG, TAGS_EACH, Backend, Inbox, Outbox, Traffic

_SMALL_NUMBERS = SMALL_BYTES // 4


class _Sender:
    """A sender to one rank. A message begins with its length; what exceeds a small message follows in a second part."""

    def __init__(self, backend: Backend, to: int, number: int, traffic: Traffic) -> None:
        self._backend, self._to, self._tag, self._traffic = backend, to, number * TAGS_EACH, traffic
        self._outbox = Outbox()

    def send(self, message: Tensor) -> None:
        for part, tag in ((message[:_SMALL_NUMBERS], SMALL_TAG), (message[_SMALL_NUMBERS:], LARGE_TAG)):
            if part.numel():
                self._outbox.add(self._backend.send([part], self._to, self._tag + tag), part)
                self._traffic.sent(part)


class _Receiver:
    """A receiver of messages from one rank."""

    def __init__(self, backend: Backend, source: int, number: int) -> None:
        self._backend, self._source, self._tag = backend, source, number * TAGS_EACH
        self._inbox = Inbox(backend, source, self._tag + SMALL_TAG)

    def receive(self) -> Tensor:
        buffer = self._inbox.receive()
        numbers = buffer.view(torch.int32)
        count = int(numbers[0])
        first = numbers[1 : 1 + count].clone()
        self._inbox.post(buffer)
        if len(first) == count:
            return first
        rest = torch.empty(count - len(first), dtype=torch.int32)
        self._backend.recv([rest], self._source, self._tag + LARGE_TAG).wait()
        return torch.cat([first, rest])


def _framed(numbers: Tensor) -> Tensor:
    return torch.cat([torch.tensor([len(numbers)], dtype=torch.int32), numbers])


class Broadcast:
    """Messages from rank 0 to all others, in order."""

    def __init__(self, backend: Backend, own: int, size: int, number: int, traffic: Traffic | None = None) -> None:
        traffic = traffic or Traffic()
        self._senders = [_Sender(backend, rank, number, traffic) for rank in range(1, size)] if own == 0 else []
        self._receiver = None if own == 0 else _Receiver(backend, 0, number)

    def send(self, numbers: Tensor) -> None:
        """Send [count] int32; returns before it has arrived."""
        message = _framed(numbers)
        for sender in self._senders:
            sender.send(message)

    def receive(self) -> Tensor:
        """Return the next message: [count] int32."""
        assert self._receiver is not None
        return self._receiver.receive()

    def close(self) -> None:
        """Drop the connections, as `Group` implementations do."""
        self._senders, self._receiver = [], None


class Channel:
    """Messages between rank 0 and each of the others, both ways; those of one pair arrive in order.

    Args:
        backend: Backend that connects all ranks.
        own: World rank of this process.
        others: Ranks it exchanges messages with: for rank 0 any others, for those rank 0.
        number: Number that determines the tags of its messages.
    """

    def __init__(
        self, backend: Backend, own: int, others: Sequence[int], number: int, traffic: Traffic | None = None
    ) -> None:
        assert all((rank == 0) != (own == 0) for rank in others)
        traffic = traffic or Traffic()
        self._senders = {rank: _Sender(backend, rank, number, traffic) for rank in others}
        self._receivers: dict[int, Any] = {rank: _Receiver(backend, rank, number) for rank in others}

    def send(self, numbers: Tensor, to: int) -> None:
        """Send [count] int32; returns before it has arrived."""
        self._senders[to].send(_framed(numbers))

    def send_all(self, numbers: Tensor) -> None:
        """Send a message to all others."""
        for rank in self._senders:
            self.send(numbers, rank)

    def receive(self, source: int) -> Tensor:
        """Return the next message from a rank: [count] int32."""
        found: Tensor = self._receivers[source].receive()
        return found

    def close(self) -> None:
        """Drop the connections, as `Group` implementations do."""
        self._senders.clear()
        self._receivers.clear()
