"""Messages about LoRA adapters between rank 0, which reads them, and the other ranks, which add slices of them."""

import itertools
import json
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import partial

import torch
from safetensors.torch import load, save
from torch import Tensor

from specinfer.model.adapters.peft_folder import Pair, Shape
from specinfer.model.adapters.sites import AdapterSites
from specinfer.model.load import LoadedModel
from specinfer.ops import AdapterTable
from specinfer.parallel.group import Channel
from specinfer.parallel.ranks import Ranks

_WORD = 4  # bytes of a number in a message


class _Kind(IntEnum):
    """Kind of a message of rank 0; numbers follow it."""

    LINEARS = 1  # wants the names and sizes of linear layers
    MATRICES = 2  # number of an adapter, bytes that follow, and a file of its matrices
    DROP = 3  # number of an adapter


class SharedAdapters:
    """Rank 0's side, an `AdapterRanks`.

    Args:
        send: Function that sends numbers to all other ranks, in the order of passes; any thread may call it.
    """

    def __init__(self, ranks: Ranks, send: Callable[[Tensor], None]) -> None:
        self._ranks, self._send = ranks, send
        self._numbers = itertools.count(1)
        self._dropped: deque[int] = deque()
        self._lock = threading.Lock()

    def linears(self) -> dict[str, Shape]:
        """Prepare the other ranks for adapters, and return their linear layers by name."""
        self._send(torch.tensor([_Kind.LINEARS], dtype=torch.int32))
        commands, found = self._ranks.connections.commands, dict[str, Shape]()
        for rank in range(1, self._ranks.config.world_size):
            answer = self._ranks.call(partial(commands.receive, rank))
            found |= {name: Shape(*shape) for name, shape in json.loads(_bytes_of(answer)).items()}
        return found

    def share(self, table: AdapterTable, pairs: Mapping[str, Pair]) -> None:
        """Send an adapter's matrices, and give its table a number; the other ranks drop them after the table is freed.

        Raises:
            RanksError: A rank is gone.
        """
        self._ranks.check()
        self.send_dropped()
        table.number = number = next(self._numbers)
        tensors = {f"{name}.{part}": one for name, pair in pairs.items() for part, one in pair._asdict().items()}
        data = save({name: one.contiguous() for name, one in tensors.items()})
        head = torch.tensor([_Kind.MATRICES, number, len(data)], dtype=torch.int32)
        self._send(torch.cat([head, _numbers_of(data)]))
        # Any thread may free a table, in the middle of sending too, so that its number is only noted.
        weakref.finalize(table, self._dropped.append, number).atexit = False

    def send_dropped(self) -> None:
        """Let the other ranks drop the adapters whose tables were freed."""
        while self._dropped:
            with self._lock:
                if self._dropped:
                    self._send(torch.tensor([_Kind.DROP, self._dropped.popleft()], dtype=torch.int32))


class ReceivedAdapters:
    """Another rank's side.

    Attributes:
        tables: What this rank adds for each adapter, by number.
    """

    def __init__(self, loaded: LoadedModel, commands: Channel) -> None:
        self._loaded, self._commands = loaded, commands
        self._sites: AdapterSites | None = None
        self.tables: dict[int, AdapterTable] = {}

    def receive(self, message: Tensor) -> None:
        """Act on a message of rank 0."""
        kind, numbers = int(message[0]), message[1:]
        if kind == _Kind.LINEARS:
            self._sites = AdapterSites(self._loaded)
            self._commands.send(_numbers_of(json.dumps(self._sites.linears).encode()), 0)
        elif kind == _Kind.MATRICES:
            assert self._sites is not None
            tensors = load(_bytes_of(numbers[2:])[: int(numbers[1])])
            names = {name.rpartition(".")[0] for name in tensors}
            pairs = {name: Pair(tensors[f"{name}.down"], tensors[f"{name}.up"]) for name in names}
            self.tables[int(numbers[0])] = self._sites.table(pairs)
        else:
            assert kind == _Kind.DROP
            del self.tables[int(numbers[0])]


def _numbers_of(data: bytes) -> Tensor:
    """Return bytes, with spaces up to whole words, as int32."""
    return torch.frombuffer(bytearray(data.ljust(-(-len(data) // _WORD) * _WORD)), dtype=torch.int32)


def _bytes_of(numbers: Tensor) -> bytes:
    return numbers.numpy().tobytes()
