"""A stream that is late: what is launched on it runs in order, but only when somebody waits for it.

Host memory that is written or read too early is found by the tokens that come out, on a CPU.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specinfer.core.request import Request
from specinfer.engine.device.masks import TokenMasks
from specinfer.engine.device.rows import DeviceRows
from specinfer.engine.device.state import Exchange
from specinfer.engine.timer import Marks
from specinfer.model.graphs.buffers import InputBlock
from specinfer.model.graphs.capture import Graphs, Program
from specinfer.model.graphs.graph_runner import GraphRunner
from specinfer.model.graphs.sizes import Size
from specinfer.model.graphs.slot_table import SlotTable
from specinfer.model.kv_tensors import KVTensors
from specinfer.ops import AdapterSlots


class LateStream:
    """Launched work, oldest first.

    Attributes:
        longest: Most launches that waited at the same time.
        num_waits: How often an event was waited for.
    """

    def __init__(self) -> None:
        self._queue: deque[Callable[[], object]] = deque()
        self.num_waits = 0
        self.longest = 0

    def launch(self, work: Callable[[], object]) -> None:
        self._queue.append(work)
        self.longest = max(self.longest, len(self._queue))

    @torch.inference_mode()
    def run_until(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            self._queue.popleft()()

    def finish(self) -> None:
        self.run_until(lambda: not self._queue)


class LateEvent:
    """An event on the stream; what was never recorded need not be waited for, as with CUDA's."""

    def __init__(self, stream: LateStream) -> None:
        self._stream, self._num_left = stream, 0

    def record(self) -> None:
        self._num_left += 1
        self._stream.launch(self._reach)

    def _reach(self) -> None:
        self._num_left -= 1

    def synchronize(self) -> None:
        self._stream.num_waits += 1
        self._stream.run_until(lambda: self._num_left == 0)


def make_captures_late(stream: LateStream, patch: pytest.MonkeyPatch) -> None:
    """Captured programs are launched, and run once when they are captured."""

    def captured(graphs: Graphs, program: Program, *_: Any) -> Program:
        graphs.num_programs += 1
        stream.finish()
        with torch.inference_mode():
            program()
        return lambda: stream.launch(program)

    patch.setattr(Graphs, "captured", captured)


def make_buffers_late(stream: LateStream, patch: pytest.MonkeyPatch) -> None:
    """Copies of the inputs of padded passes are late, and so are changes of the slot table."""
    make = InputBlock.__init__

    def make_late(block: Any, *args: Any, **options: Any) -> None:
        make(block, *args, **options)
        block._copied = LateEvent(stream)

    def send(block: Any, num_bytes: int) -> None:
        stream.launch(lambda: block.on_device[:num_bytes].copy_(block.host[:num_bytes]))
        block._copied.record()

    patch.setattr(InputBlock, "__init__", make_late)
    patch.setattr(InputBlock, "send", send)
    launch_later(stream, patch, SlotTable, "write")


def make_executor_late(stream: LateStream, patch: pytest.MonkeyPatch) -> None:
    """Steps on the device are late: their programs, exchanges and writes to rows. Ordinary passes come in order."""
    make_captures_late(stream, patch)
    for name in ("send", "fetch"):
        launch_later(stream, patch, Exchange, name)
    for name in ("write", "write_drafter", "write_acceptance", "move"):
        launch_later(stream, patch, DeviceRows, name)
    launch_later(stream, patch, AdapterSlots, "_write")
    launch_later(stream, patch, TokenMasks, "_copy")
    events: dict[Marks, list[LateEvent]] = {}
    mark, forward, lora_indices = Marks.mark, GraphRunner.forward, GraphRunner._lora_indices
    read_taps = KVTensors.read_taps

    def mark_late(marks: Marks) -> None:
        mark(marks)
        event = LateEvent(stream)
        event.record()
        events[marks] = [event]

    def lora_indices_now(runner: GraphRunner, pieces: Any, size: Size) -> list[int] | None:
        found = lora_indices(runner, pieces, size)
        stream.finish()
        return found

    def forward_now(runner: GraphRunner, *args: Any) -> Tensor:
        result = forward(runner, *args)
        stream.finish()
        return result

    def read_taps_now(tensors: KVTensors, *args: Any) -> list[Tensor]:
        stream.finish()
        return read_taps(tensors, *args)

    patch.setattr(KVTensors, "read_taps", read_taps_now)
    patch.setattr(Marks, "mark", mark_late)
    patch.setattr(Marks, "wait", lambda marks: events[marks][0].synchronize())
    patch.setattr(GraphRunner, "forward", forward_now)
    patch.setattr(GraphRunner, "_lora_indices", lora_indices_now)


def launch_later(stream: LateStream, patch: pytest.MonkeyPatch, kind: type, name: str) -> None:
    """Launch calls of this method, with the numbers that their arguments had at the call."""
    method = getattr(kind, name)

    def late(self: Any, *args: Any, **options: bool) -> None:
        taken = [_taken(one) for one in args]
        stream.launch(lambda: method(self, *taken, **options))

    patch.setattr(kind, name, late)


def _taken(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, list | tuple):
        return [_taken(one) for one in value]
    if isinstance(value, Request):
        tokens = [*value.prompt_ids, *value.output_ids]
        taken = Request(value.request_id, value.prompt_ids, value.params, value.seed, cache_salt=None)
        taken.token_ids, taken.eos_token_ids = tokens, value.eos_token_ids
        taken.uniforms.state, taken.drafting.num_draws = value.uniforms.state, dict(value.drafting.num_draws)
        return taken
    return value
