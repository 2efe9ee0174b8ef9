"""What the device knows of the requests that it serves by itself, and what goes to it and comes back in a step."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.drafters.device_growth import ChanceTable

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DeviceState:
    """A row for each request; those of a launch are the first ones. Steps read and write it, in the order of launches.

    Of a request with tokens t0 ... tn, of which tn is the root, `known` is n. Its drafter has computed n of them, too,
    or n - 1 if `has_two`: then it computes `before`, which is tn-1, with the root.
    """

    slots: Tensor  # [rows, context] int32 of the known tokens before the root, in the target's cache
    known: Tensor  # [rows] int32 how many they are
    roots: Tensor  # [rows] int64 the last known token
    room: Tensor  # [rows] int64 tokens that may still be said; 0: nothing happens in this row
    seeds: Tensor  # [rows] int64
    temperatures: Tensor  # [rows] float32; 0 is greedy
    draft_slots: Tensor  # [rows, context] int32 in the drafter's cache
    draft_known: Tensor  # [rows] int32
    before: Tensor  # [rows] int64
    has_two: Tensor  # [rows] bool
    chances: ChanceTable

    @classmethod
    def empty(cls, num_rows: int, context: int, device: torch.device) -> "DeviceState":
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # Not made in inference mode, in which steps run: what is made there may be written to only there.
        with torch.inference_mode(mode=False):
            return cls(
                slots=zeros(num_rows, context, dtype=torch.int32),
                known=zeros(num_rows, dtype=torch.int32),
                roots=zeros(num_rows),
                room=zeros(num_rows),
                seeds=zeros(num_rows),
                temperatures=zeros(num_rows, dtype=torch.float32),
                draft_slots=zeros(num_rows, context, dtype=torch.int32),
                draft_known=zeros(num_rows, dtype=torch.int32),
                before=zeros(num_rows),
                has_two=zeros(num_rows, dtype=torch.bool),
                chances=ChanceTable.empty(device),
            )

    def move(self, source: int, row: int) -> None:
        """What stands in one row stands in another one now, too."""
        for column in (self.slots, self.known, self.roots, self.room, self.seeds, self.temperatures,
                       self.draft_slots, self.draft_known, self.before, self.has_two):  # fmt: skip
            column[row].copy_(column[source])


class Exchange:
    """Numbers that are copied between host and device as one, under names.

    The host has two copies in turns: one may be on its way while the other is written or read.

    Args:
        shapes: Of what goes by each name; whole numbers of 32 bits, or the bits of a float32 where the name ends so.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
        total, start = sum(sizes.values()), 0
        pins = device.type == "cuda"
        with torch.inference_mode(mode=False):
            self._device = torch.zeros(total, dtype=torch.int32, device=device)
            self._hosts = [torch.zeros(total, dtype=torch.int32, pin_memory=pins) for _ in range(2)]
        self.there: dict[str, Tensor] = {}
        self._here: list[dict[str, npt.NDArray[np.generic]]] = [{}, {}]
        for name, shape in shapes.items():
            part = slice(start, start + sizes[name])
            is_float = name.endswith("float32")
            on_device = self._device[part]
            self.there[name] = (on_device.view(torch.float32) if is_float else on_device).view(shape)
            for host, views in zip(self._hosts, self._here, strict=True):
                numbers = host.numpy()[part]
                views[name] = (numbers.view(np.float32) if is_float else numbers).reshape(shape)
            start = part.stop
        self._turn = 0

    def turn(self) -> int:
        """The number of the host's copy that is next."""
        self._turn ^= 1
        return self._turn

    def here(self, turn: int) -> dict[str, npt.NDArray[np.generic]]:
        """The views of one of the host's copies."""
        return self._here[turn]

    def send(self, turn: int) -> None:
        self._device.copy_(self._hosts[turn], non_blocking=True)

    def fetch(self, turn: int) -> None:
        """It is here when an event that is recorded after this has come."""
        self._hosts[turn].copy_(self._device, non_blocking=True)

    def clear(self) -> None:
        """Nothing is asked for, on the device."""
        self._device.zero_()
