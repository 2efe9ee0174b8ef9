"""State of the requests on a device, and the buffers exchanged with the host in a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.core.sampling import MAX_LOGPROB_TOKEN_IDS
from specinfer.drafters.growth.calibration import MIDDLE, RANKS
from specinfer.drafters.kind import DraftKind
from specinfer.ops.logits import Truncation
from specinfer.ops.trees import ChanceTable

Ints = npt.NDArray[np.int32]
_ALIGNED = 4  # 32-bit numbers


def empty_table(device: torch.device) -> ChanceTable:
    """Return the tables of a calibration that has seen nothing; all chances are 0."""
    points = torch.from_numpy(MIDDLE).float().to(device)
    lines = torch.zeros(2, 3, RANKS * (len(points) + 1), device=device)
    return ChanceTable(points, lines[0], lines[1])


@dataclass(frozen=True, slots=True)
class DraftState:
    """The tokens that one drafter has computed of each request, with a row for each.

    Of n known tokens before the root a small model has computed n, or n - 1 if `has_two`: then it computes `before`,
    the last of them, together with the root. A head has computed pairs of a token and the next one, and lacks those of
    the last path.
    """

    slots: Tensor  # [rows, context] int32 slots in the drafter's cache
    known: Tensor  # [rows] int32
    before: Tensor  # [rows] int64
    has_two: Tensor  # [rows] bool
    streams: Tensor  # [rows] int64 seeds of the noise of draws
    first_draw: Tensor  # [rows] int64 number of the next tree's first draw
    following: Tensor  # [rows, context] int32 the token after each one of a head's last paths; [rows, 0] for others
    chances: ChanceTable

    @classmethod
    def empty(cls, num_rows: int, context: int, device: torch.device, *, reads_paths: bool = False) -> "DraftState":
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            zeros(num_rows, context, dtype=torch.int32),
            zeros(num_rows, dtype=torch.int32),
            zeros(num_rows, dtype=torch.int64),
            zeros(num_rows, dtype=torch.bool),
            zeros(num_rows, dtype=torch.int64),
            zeros(num_rows, dtype=torch.int64),
            zeros(num_rows, context if reads_paths else 0, dtype=torch.int32),
            empty_table(device),
        )

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """All that has a row for each request."""
        return self.slots, self.known, self.before, self.has_two, self.streams, self.first_draw, self.following


@dataclass(frozen=True, slots=True)
class DeviceState:
    """State tensors with a row for each request; a launch uses the first rows. Steps update it in launch order.

    For a request with tokens t0 ... tn, of which tn is the root, `known` is n.
    """

    slots: Tensor  # [rows, context] int32 slots in the target's cache of the known tokens before the root
    known: Tensor  # [rows] int32 number of these tokens
    roots: Tensor  # [rows] int64 the last known token
    num_left: Tensor  # [rows] int64 tokens that may still be emitted; at 0 the row is idle
    seeds: Tensor  # [rows] int64
    is_drawn: Tensor  # [rows] bool, True for requests whose draft tokens are drawn
    uniforms: Tensor  # [rows] int64 states of their random numbers
    scanned: Tensor  # [rows] int32 tokens that the state of recurrent layers covers
    states: Tensor  # [rows, 2] int64 rows of the states that the next step reads and writes, -1 for none
    truncation: Truncation  # with the temperatures
    named: Tensor  # [rows, n] int64 tokens of `logprob_token_ids`
    drafts: tuple[DraftState, ...]  # of each drafter

    @classmethod
    def empty(
        cls, num_rows: int, context: int, device: torch.device, kinds: Sequence[DraftKind] = (DraftKind(),)
    ) -> "DeviceState":
        """Make rows without requests; `kinds` are those of the drafters."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # Not made in inference mode, in which steps run: inference tensors can be written to only there.
        with torch.inference_mode(mode=False):
            slots, known = zeros(num_rows, context, dtype=torch.int32), zeros(num_rows, dtype=torch.int32)
            drafts = [
                DraftState.empty(num_rows, 0 if kind.shares_cache else context, device, reads_paths=kind.reads_paths)
                for kind in kinds
            ]
            return cls(
                slots=slots,
                known=known,
                roots=zeros(num_rows),
                num_left=zeros(num_rows),
                seeds=zeros(num_rows),
                is_drawn=zeros(num_rows, dtype=torch.bool),
                uniforms=zeros(num_rows),
                scanned=zeros(num_rows, dtype=torch.int32),
                states=torch.full((num_rows, 2), -1, dtype=torch.int64, device=device),
                truncation=Truncation(
                    zeros(num_rows, dtype=torch.float32),
                    torch.full((num_rows,), -torch.inf, device=device),
                    zeros(num_rows, dtype=torch.int32),
                    torch.ones(num_rows, dtype=torch.float64, device=device),
                ),
                named=zeros(num_rows, MAX_LOGPROB_TOKEN_IDS),
                drafts=tuple(
                    replace(drafted, slots=slots, known=known) if kind.shares_cache else drafted
                    for drafted, kind in zip(drafts, kinds, strict=True)
                ),
            )

    @property
    def temperatures(self) -> Tensor:
        """[rows] float32; 0 is greedy."""
        return self.truncation.temperatures

    def move(self, source: int, row: int) -> None:
        """Copy one row to another."""
        limits = self.truncation
        for column in (self.slots, self.known, self.roots, self.num_left, self.seeds, self.is_drawn, self.uniforms,
                       self.scanned, self.states,
                       limits.temperatures, limits.log_min_p, limits.top_k, limits.top_p, self.named,
                       *(column for drafts in self.drafts for column in drafts.columns)):  # fmt: skip
            column[row].copy_(column[source])


class Exchange:
    """Named numbers that are copied between host and device in one transfer.

    The host has two buffers in turns: one can be in transfer while the other is written or read.

    Args:
        shapes: Shape of each named array of 32-bit integers; names that end in "float32" have the bits of float32.
        device: The device.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
        # Each begins at a multiple of 16 bytes, so that kernels are compiled once for all, and may have 64-bit numbers.
        rooms = {name: -(-size // _ALIGNED) * _ALIGNED for name, size in sizes.items()}
        total, start = sum(rooms.values()), 0
        pins = device.type == "cuda"
        with torch.inference_mode(mode=False):
            self._device = torch.zeros(total, dtype=torch.int32, device=device)
            self._hosts = [torch.zeros(total, dtype=torch.int32, pin_memory=pins) for _ in range(2)]
        self.on_device: dict[str, Tensor] = {}
        self._host_views: list[dict[str, npt.NDArray[np.generic]]] = [{}, {}]
        for name, shape in shapes.items():
            part = slice(start, start + sizes[name])
            is_float = name.endswith("float32")
            numbers = self._device[part]
            self.on_device[name] = (numbers.view(torch.float32) if is_float else numbers).view(shape)
            for host, views in zip(self._hosts, self._host_views, strict=True):
                values = host.numpy()[part]
                views[name] = (values.view(np.float32) if is_float else values).reshape(shape)
            start += rooms[name]
        self._turn = 0

    def turn(self) -> int:
        """Return the index of the host's next buffer."""
        self._turn ^= 1
        return self._turn

    def on_host(self, turn: int) -> dict[str, npt.NDArray[np.generic]]:
        """Return the views of one of the host's buffers."""
        return self._host_views[turn]

    def send(self, turn: int) -> None:
        self._device.copy_(self._hosts[turn], non_blocking=True)

    def fetch(self, turn: int) -> None:
        """Start the copy to the host. It is complete when an event recorded after this call is reached."""
        self._hosts[turn].copy_(self._device, non_blocking=True)

    def clear(self) -> None:
        """Set all numbers on the device to zero."""
        self._device.zero_()
