"""GraphRunner: passes of one model at padded sizes. Usual sizes are captured at load, others when they recur.

A capture takes as long as some passes that are launched kernel by kernel. So a size is captured once its passes have
taken as long, which loses at most twice the time of the best choice in hindsight, as in `SizeChoice`.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from specinfer.core.errors import first_line
from specinfer.core.progress import CAPTURING, COMPILING, ProgressCallback, progress_of
from specinfer.model.batch import Piece, pack, runs_of
from specinfer.model.fixed_passes import has_fixed_order
from specinfer.model.forward import forward
from specinfer.model.graphs.buffers import Buffers, InputBlock
from specinfer.model.graphs.capture import CaptureError, Graphs, Program
from specinfer.model.graphs.sizes import MAX_ROWS, REQUESTS, TOKENS, Size, at_least, loaded_sizes, power_of_two
from specinfer.model.graphs.slot_table import SlotTable
from specinfer.model.kv_cache import Slots
from specinfer.model.kv_tensors import KVTensors
from specinfer.model.load import LoadedModel
from specinfer.model.recurrent.layers import num_taps
from specinfer.model.recurrent.scan import Scan
from specinfer.model.sharding.stage import received
from specinfer.ops import AdapterSlots
from specinfer.parallel.rank_sums import RankSums

logger = logging.getLogger(__name__)

_ROW = 64
_PROMPT_TOKENS = (512, 2048)  # of few programs for one request's attention, and of more than there are multiprocessors
_MAX_SIZES = 128  # captured at a time; the least recently used one is dropped


@dataclass(slots=True)
class _Pass:
    """A pass of one size, and its inputs.

    Attributes:
        replay: The captured program, or the program itself if it cannot be captured; None before that is tried.
        times: Seconds that the launches of the program took so far.
    """

    buffers: Buffers
    program: Program
    replay: Program | None = None
    times: list[float] = field(default_factory=list)


class GraphRunner:
    """A runner of passes over static buffers, of a model or of a pipeline stage.

    Passes that are larger than all sizes, or have more adapters than slots, are not captured. Their buffers are made
    for each, in memory that is kept.

    Args:
        store: Keys and values, whose addresses must not change.
        max_requests: Usual largest number of requests at a time.
    """

    def __init__(self, loaded: LoadedModel, store: KVTensors, graphs: Graphs, max_requests: int) -> None:
        self._model, self.folder, self._device = loaded.model, loaded.folder, loaded.device
        self._store, self._graphs = store, graphs
        self._taps, self._recurs = num_taps(loaded.model), bool(store.states.pools)
        rows = at_least(REQUESTS, max_requests) or REQUESTS[-1]
        self._max_requests = rows
        max_context = min(loaded.max_position, store.num_slots)
        # Not in inference mode, in which passes run: tensors made there could be modified only there.
        with torch.inference_mode(mode=False):
            self._table = SlotTable(rows, _whole(max_context), self._device)
            self._larger_table = SlotTable(1, _ROW, self._device)  # for more requests than usual
            self._kept_block = InputBlock(1, self._device)
            self._received, self._results = _ends(loaded)
            self.sums = sums_of(loaded.model)
        self._gives_logits = loaded.shard.has_head
        self._passes: OrderedDict[Size, _Pass] = OrderedDict()
        self._is_capturable = True
        self.why_not_captured: str | None = None  # set when a capture has failed
        self.adapter_slots: AdapterSlots | None = None  # set where requests may have adapters

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Sizes that have buffers, captured or not yet."""
        return tuple(self._passes)

    @property
    def results(self) -> Tensor:
        """Memory whose first rows passes return: [`MAX_ROWS`, vocab] logits if the model has a head."""
        return self._results

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers on the device."""
        tensors = [self._table.cells, self._results, *([] if self._received is None else [self._received])]
        tensors += [self._larger_table.cells, self._kept_block.on_device]
        buffers = sum(each.buffers.num_bytes for each in self._passes.values())
        return buffers + sum(int(tensor.nbytes) for tensor in tensors)

    def prepare(self, progress: ProgressCallback | None = None) -> None:
        """Compile and capture the usual sizes, largest first; others are captured when their passes took as long."""
        graphs, sizes = self._graphs, loaded_sizes(self._max_requests)
        if self._taps:
            # Plain decoding computes each token once. After a tree the accepted ones are computed once more.
            scanning = [size.scanning(size.tokens + (size.new > 1 and self._recurs)) for size in sizes]
            sizes = [size for size in scanning if size is not None]
        passes = [self._pass_of(size) for size in sizes]
        report = progress_of(progress, f"{COMPILING} of {self.folder.name}")
        programs = (each.program for each in passes)
        graphs.compile(chain(programs, self._prompt_programs()), self.sums, report)
        before = graphs.num_captured, sum(graphs.times), graphs.reserved_bytes()
        report = progress_of(progress, f"{CAPTURING} of {self.folder.name}")
        for done, each in enumerate(passes):
            if not self._is_capturable:
                for size in [size for size in sizes if self._passes[size].replay is None]:
                    del self._passes[size]
                return
            report(done, len(passes))
            with torch.inference_mode():
                self._capture(each)
        report(len(passes), len(passes))
        after = graphs.num_captured, sum(graphs.times), graphs.reserved_bytes()
        count, seconds, num_bytes = (now - then for now, then in zip(after, before, strict=True))
        logger.info(
            "%s: %d sizes of passes captured in %.1f s, %.1f MiB and %.1f MiB of buffers",
            self.folder.name, count, seconds, num_bytes / 2**20, self.num_bytes / 2**20,
        )  # fmt: skip

    @torch.inference_mode()
    def forward(self, pieces: Sequence[Piece], hidden: Tensor | None = None) -> Tensor:
        """Return what `model.forward.forward` returns; the runner's next pass overwrites it.

        Args:
            hidden: [tokens, width] output of the previous stage.
        """
        scan = Scan(pieces, self._store.states, self._device, recomputes=self._recurs) if self._taps else None
        exact = Size.from_pieces(pieces, scan.num_tokens if scan is not None else 0)
        size = exact.padded()
        if (
            size is None
            or size.rows > MAX_ROWS
            or not self._table.holds([piece.prefix_slots for piece in pieces])
            or not self._is_at_hand(size)
            or (lora_indices := self._lora_indices(pieces, size)) is None
        ):
            return self._run_once(exact, pieces, hidden)
        ready = self._pass_of(size)
        if self._is_worth_capturing(ready):
            self._capture(ready)
        try:
            ready.buffers.fill(pieces, lora_indices, scan)
            if hidden is not None and self._received is not None:
                self._received[: exact.tokens] = hidden
                self._received[exact.tokens : size.tokens] = 0  # a pass adds to its padding, too
            self._run(ready)
        except BaseException:  # an interrupt too: changes of the table may not have been written
            self._table.forget()
            raise
        self._store.states.finish()
        return self._results[: self._num_results(exact)]

    def _lora_indices(self, pieces: Sequence[Piece], size: Size) -> list[int] | None:
        """Return the slot of each piece's adapter, empty if no piece has one; None if there are too few slots."""
        if not size.adapts:
            return []
        return None if self.adapter_slots is None else self.adapter_slots.place([piece.adapter for piece in pieces])

    def _is_at_hand(self, size: Size) -> bool:
        """Return whether the size has buffers or may get some; after a failed capture no other is tried.

        Ranks that add up results must pad alike, whether their captures fail or not.
        """
        return self._is_capturable or size in self._passes or self.sums is not None

    def _pass_of(self, size: Size) -> _Pass:
        if size in self._passes:
            self._passes.move_to_end(size)
            return self._passes[size]
        if len(self._passes) >= _MAX_SIZES:
            self._graphs.wait()  # it may still be running
            self._passes.popitem(last=False)
        with torch.inference_mode(mode=False):
            buffers = Buffers(size, self._table, self._device, self._taps)
        ready = self._passes[size] = _Pass(buffers, self._program(buffers))
        return ready

    def _is_worth_capturing(self, ready: _Pass) -> bool:
        lost = sum(ready.times[1:])  # the first launch also compiles
        return ready.replay is None and self._is_capturable and lost >= self._graphs.median_seconds

    def _capture(self, ready: _Pass) -> None:
        ready.buffers.empty()  # a capture runs the program, and what its last pass wrote may belong to others by now
        try:
            ready.replay = self._graphs.captured(ready.program, self.sums)
        except torch.OutOfMemoryError as error:  # smaller sizes may still be captured
            ready.replay = ready.program
            logger.warning("passes of %d tokens of %s are launched kernel by kernel: %s",
                           ready.buffers.size.tokens, self.folder.name, first_line(error))  # fmt: skip
        except CaptureError as error:
            self._is_capturable, ready.replay = False, ready.program
            self.why_not_captured = f"they cannot be captured: {first_line(error)}"
            logger.warning("passes of %s are launched kernel by kernel, since they cannot be captured: %s",
                           self.folder.name, first_line(error))  # fmt: skip

    def _run(self, ready: _Pass) -> None:
        if ready.replay is not None:
            ready.replay()
            return
        self._graphs.num_programs += 1
        started = time.perf_counter()
        ready.program()
        ready.times.append(time.perf_counter() - started)

    def _program(self, buffers: Buffers) -> Program:
        batch, size = buffers.batch(self._store, self.adapter_slots), buffers.size
        hidden = None if self._received is None else self._received[: size.tokens]
        results, model = self._results[: self._num_results(size)], self._model

        def program() -> None:  # without the runner: as a cycle they would keep cache and weights on the device
            buffers.update_table()
            results.copy_(forward(model, batch, hidden))

        return program

    def _prompt_programs(self) -> Iterator[Callable[[], object]]:
        """Yield passes over prompts that are not captured, but launch kernels that no captured pass does."""
        if self._taps or self._received is not None or self.sums is not None:
            return  # their buffers are smaller
        for count in _PROMPT_TOKENS:
            with torch.inference_mode(mode=False):
                buffers = Buffers(Size(count, 1, count, count, 1, is_chain=True), self._table, self._device)
            yield partial(forward, self._model, buffers.batch(self._store))

    def _num_results(self, size: Size) -> int:
        return size.rows if self._gives_logits else size.tokens

    def _run_once(self, exact: Size, pieces: Sequence[Piece], hidden: Tensor | None) -> Tensor:
        """Run a pass without padding."""
        if self._taps:  # the number of states that it needs at a time is known, and may be small
            return forward(self._model, pack(pieces, self._store, self._device, native=False), hidden)
        prefixes = [piece.prefix_slots for piece in pieces]
        table = self._table_for(prefixes)
        # Runs of rows with the same adapter are faster for many rows, but their sums depend on the number of rows.
        lora_indices = self._lora_indices(pieces, exact) if has_fixed_order(self._model) else None
        try:
            changes = list(table.changes(prefixes))
            buffers = Buffers(
                replace(exact, nodes=_whole(exact.nodes)), table, self._device,
                num_updates=sum(len(new) for _, new in changes), make_block=self._block_of,
            )  # fmt: skip
            buffers.fill(pieces, lora_indices or (), changes=changes)
            buffers.update_table()
            batch = buffers.batch(self._store, self.adapter_slots if lora_indices else None)
            batch = batch if lora_indices else replace(batch, adapters=runs_of(pieces))
            return forward(self._model, batch, hidden)
        except BaseException:  # as in `forward`
            table.forget()
            raise

    def _table_for(self, prefixes: Sequence[Slots]) -> SlotTable:
        """Return the table of the padded passes, or one for more requests, which is kept."""
        if self._table.holds(prefixes):
            return self._table
        if not self._larger_table.holds(prefixes):
            requests = max(power_of_two(len(prefixes)), self._larger_table.requests)
            context = max(power_of_two(max(map(len, prefixes))), self._larger_table.context)
            with torch.inference_mode(mode=False):
                self._larger_table = SlotTable(requests, context, self._device)
        return self._larger_table

    def _block_of(self, num_bytes: int) -> InputBlock:
        """Return the memory for inputs of passes without padding, which is made anew only where it is too small."""
        if num_bytes > len(self._kept_block.host):
            with torch.inference_mode(mode=False):
                self._kept_block = InputBlock(power_of_two(num_bytes), self._device)
        return self._kept_block


def _ends(loaded: LoadedModel) -> tuple[Tensor | None, Tensor]:
    """Return static hidden states that passes begin with, or None for the first stage, and static results of passes."""
    first = None if loaded.shard.is_first else _hidden(loaded)
    if not loaded.shard.has_head:
        return first, _hidden(loaded)
    return first, torch.empty((MAX_ROWS, loaded.num_logits), dtype=torch.float32, device=loaded.device)


def _hidden(loaded: LoadedModel) -> Tensor:
    return received(loaded.model, TOKENS[-1], loaded.dtype, loaded.device).zero_()


def sums_of(model: nn.Module) -> RankSums | None:
    """Return the sums over ranks in a model's passes, or None if there are none."""
    sums: RankSums | None = getattr(model, "rank_sums", None)
    return sums


def _whole(count: int) -> int:
    """Round up to a multiple of `_ROW`, so that kernels are compiled once for all row lengths."""
    return max(-(-count // _ROW), 1) * _ROW
