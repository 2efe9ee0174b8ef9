"""GraphRunner: passes of one model at padded sizes, each size captured once and replayed from then on."""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from specinfer.model.batch import KVStore, Piece
from specinfer.model.forward import forward
from specinfer.model.graphs.buffers import Buffers
from specinfer.model.graphs.capture import CaptureError, Graphs, Program
from specinfer.model.graphs.sizes import REQUESTS, Size, at_least, loaded_sizes
from specinfer.model.graphs.slot_table import SlotTable
from specinfer.progress import CAPTURING, ProgressCallback

logger = logging.getLogger(__name__)

MAX_ROWS = 256  # whose logits a captured pass writes; what wants more is not captured
_ROW = 64
_MAX_SIZES = 128  # captured at once; the one not used for longest makes room


@dataclass(frozen=True, slots=True)
class _Captured:
    """A pass of some size, and its inputs."""

    buffers: Buffers
    run: Program


class GraphRunner:
    """Runs passes over static buffers; one that is larger than all sizes gets buffers of its own and is not captured.

    Args:
        name: Of the model, for the log.
        vocab_size: Logits of a token.
        store: Keys and values, which stay where they are.
        max_context: Longest prefix.
        max_requests: As many as run at once, usually.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        vocab_size: int,
        store: KVStore,
        graphs: Graphs,
        device: torch.device,
        max_context: int,
        max_requests: int,
    ) -> None:
        self._model, self._name, self._store, self._graphs, self._device = model, name, store, graphs, device
        rows = at_least(REQUESTS, max_requests) or REQUESTS[-1]
        self._max_requests = rows
        # Not made in inference mode, in which passes run: what is made there may be written to only there.
        with torch.inference_mode(mode=False):
            self._table = SlotTable(rows, _whole(max_context), device)
            self._logits = torch.empty((MAX_ROWS, vocab_size), dtype=torch.float32, device=device)
        self._captured: OrderedDict[Size, _Captured] = OrderedDict()
        self._is_capturable = True

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Those that are ready."""
        return tuple(self._captured)

    @property
    def num_bytes(self) -> int:
        """Of all buffers on the device."""
        buffers = sum(captured.buffers.num_bytes for captured in self._captured.values())
        return buffers + int(self._table.cells.nbytes + self._logits.nbytes)

    def prepare(self, tell: ProgressCallback | None = None) -> None:
        """Captures the usual sizes, largest first; others are captured when they come."""
        sizes, graphs = loaded_sizes(self._max_requests), self._graphs
        before = graphs.num_captured, graphs.seconds, graphs.held_bytes()
        for done, size in enumerate(sizes):
            if not self._is_capturable:
                return
            if tell is not None:
                tell(f"{CAPTURING} of {self._name}", done, len(sizes))
            with torch.inference_mode():
                self._ready(size)
        if tell is not None:
            tell(f"{CAPTURING} of {self._name}", len(sizes), len(sizes))
        after = graphs.num_captured, graphs.seconds, graphs.held_bytes()
        count, seconds, num_bytes = (now - then for now, then in zip(after, before, strict=True))
        logger.info(
            "%s: %d sizes of passes captured in %.1f s, %.1f MiB beside %.1f MiB of buffers",
            self._name, count, seconds, num_bytes / 2**20, self.num_bytes / 2**20,
        )  # fmt: skip

    @torch.inference_mode()
    def forward(self, pieces: Sequence[Piece]) -> Tensor:
        """[rows, vocab] float32 logits as `ModelRunner.forward`; overwritten by the next pass of this runner."""
        exact = Size.of(pieces)
        size = exact.padded()
        if size is None or size.rows > MAX_ROWS or not self._table_holds(pieces) or not self._is_at_hand(size):
            return self._run_once(exact, pieces)
        captured = self._ready(size)
        try:
            captured.buffers.fill(pieces)
            captured.run()
        except BaseException:  # an interrupt too: what was to be written to the table may not stand there
            self._table.forget()
            raise
        return self._logits[: exact.rows]

    def _table_holds(self, pieces: Sequence[Piece]) -> bool:
        longest = max(len(piece.prefix_slots) for piece in pieces)
        return len(pieces) <= self._table.requests and longest <= self._table.context

    def _is_at_hand(self, size: Size) -> bool:
        """Whether it is ready or can be made so; after a capture that failed no other is tried."""
        return self._is_capturable or size in self._captured

    def _ready(self, size: Size) -> _Captured:
        """The pass of this size, captured now if it is the first."""
        if size in self._captured:
            self._captured.move_to_end(size)
            return self._captured[size]
        if len(self._captured) >= _MAX_SIZES:
            self._graphs.wait()  # it may still run
            self._captured.popitem(last=False)
        with torch.inference_mode(mode=False):
            buffers = Buffers(size, self._table, self._device)
        program = self._program(buffers)
        try:
            run = self._graphs.captured(program)
        except (CaptureError, torch.OutOfMemoryError) as error:
            self._is_capturable, run = False, program
            logger.warning("passes of %s are launched kernel by kernel, since they cannot be captured: %s",
                           self._name, str(error).partition("\n")[0])  # fmt: skip
        captured = self._captured[size] = _Captured(buffers, run)
        return captured

    def _program(self, buffers: Buffers) -> Program:
        batch, logits = buffers.batch(self._store), self._logits[: buffers.size.rows]

        def program() -> None:
            buffers.update_table()
            logits.copy_(forward(self._model, batch))

        return program

    def _run_once(self, exact: Size, pieces: Sequence[Piece]) -> Tensor:
        """A pass without padding, in buffers of its own."""
        longest = max(len(piece.prefix_slots) for piece in pieces)
        table = SlotTable(exact.requests, _whole(longest), self._device)
        buffers = Buffers(replace(exact, nodes=_whole(exact.nodes)), table, self._device)
        buffers.fill(pieces)
        buffers.update_table()
        return forward(self._model, buffers.batch(self._store))


def _whole(count: int) -> int:
    """Kernels are compiled once for all lengths of rows that are multiples of a power of two."""
    return max(-(-count // _ROW), 1) * _ROW
