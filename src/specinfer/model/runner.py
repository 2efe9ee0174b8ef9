"""ModelRunner: one model and its cache, on one device."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from specinfer.core.progress import ProgressCallback
from specinfer.model.batch import Piece, pack
from specinfer.model.forward import forward
from specinfer.model.graphs.capture import Graphs
from specinfer.model.graphs.check import capture_usual_sizes, make_graph_runner
from specinfer.model.graphs.graph_runner import GraphRunner
from specinfer.model.invariance import check_order
from specinfer.model.kv_cache import KVCache
from specinfer.model.kv_tensors import KVTensors
from specinfer.model.load import LoadedModel
from specinfer.model.offload.budget import PassCapacity
from specinfer.model.recurrent.layers import kept_states
from specinfer.model.recurrent.states import ROWS_PER_REQUEST
from specinfer.ops import AdapterRows
from specinfer.ops.triton import on_device


class Pass(Protocol):
    """A forward pass that has begun."""

    def wait(self) -> Tensor:
        """Return [rows, vocab] float32 logits, as `ModelRunner.forward` does. Call it once.

        Raises:
            Exception: Any error of the pass.
        """
        ...


class TargetRunner(Protocol):
    """The interface that runs passes of a target, on one rank or on several.

    Attributes:
        capacity: Memory limit of a pass, or None if only the cache's slots limit it.
    """

    loaded: LoadedModel
    cache: KVCache
    capacity: PassCapacity | None

    @property
    def compute_path(self) -> str:
        """Description of the code that computes the passes."""
        ...

    @property
    def why_not_captured(self) -> str | None:
        """Reason why passes are not captured, or None if they are."""
        ...

    @property
    def num_programs(self) -> int:
        """Number of passes so far that took longer than later ones of their sizes will, see `Graphs`."""
        ...

    @property
    def max_in_flight(self) -> int:
        """Number of passes that may begin before the first is waited for; they end in the order in which they began."""
        ...

    def begin(self, pieces: Sequence[Piece]) -> Pass: ...

    def forward(self, pieces: Sequence[Piece]) -> Tensor: ...

    @property
    def taps(self) -> Mapping[int, Tensor]:
        """Stored hidden states of all tokens, [slots, width], by the layer after which they are."""
        ...

    def read_taps(self, layers: Sequence[int], request_id: str, start: int, end: int) -> list[Tensor]:
        """Return [end - start, width] hidden states of these tokens of a request after each of these layers."""
        ...

    def keep_taps(self, layers: Collection[int]) -> None:
        """Store hidden states after no other layers from now on."""
        ...


class ModelRunner:
    """A runner of passes of one model: the target, or a small drafter.

    Args:
        capacity: Memory limit of a pass, or None if only the cache's slots limit it.
        graphs: Captured graphs, to whose sizes passes are padded if the model allows it. None to run passes unpadded.
        max_requests: Largest number of requests at a time in captured passes.
        num_states: Number of states of recurrent layers to keep, or None for as many as the requests need.
    """

    max_in_flight = 1

    def __init__(
        self,
        loaded: LoadedModel,
        num_slots: int,
        *,
        keeps_prefixes: bool = False,
        capacity: PassCapacity | None = None,
        graphs: Graphs | None = None,
        max_requests: int = 32,
        num_states: int | None = None,
    ) -> None:
        self.loaded, self.capacity = loaded, capacity
        self.cache = KVCache(num_slots, keeps_prefixes=keeps_prefixes)
        num_states = ROWS_PER_REQUEST * max_requests if num_states is None else num_states
        states = kept_states(loaded.model, num_states, num_slots, loaded.device)
        self.tensors = KVTensors(
            loaded.layer_shapes, num_slots, loaded.dtype, loaded.device, loaded.taps, states, loaded.kv_dtype
        )
        self.graphs, self.num_replaced = graphs, 0
        self.max_requests = max_requests
        self._why_unpadded: str | None = None
        self.padded = self._make_padded()
        self._check_order()

    @property
    def compute_path(self) -> str:
        return self.loaded.compute_path + (", captured passes" if self.padded is not None else "")

    def replace(self, loaded: LoadedModel) -> None:
        """Run other weights of the same model from now on, and empty the cache, computed with the old weights."""
        assert (loaded.layer_shapes, loaded.num_logits) == (self.loaded.layer_shapes, self.loaded.num_logits)
        assert (loaded.dtype, loaded.kv_dtype) == (self.loaded.dtype, self.loaded.kv_dtype)
        assert loaded.device == self.loaded.device
        self.loaded = loaded
        self.cache = KVCache(self.cache.num_slots, keeps_prefixes=self.cache.keeps_prefixes)
        self.tensors.states.clear()
        self.num_replaced += 1  # captured graphs read the old weights
        if self.graphs is not None:
            self.graphs.wait()  # a graph may still be running
        self.padded = self._make_padded()

    def _make_padded(self) -> GraphRunner | None:
        if self.graphs is None:
            return None
        with on_device(self.loaded.device):
            made = make_graph_runner(self.loaded, self.tensors, self.graphs, self.max_requests)
        self._why_unpadded = made if isinstance(made, str) else None
        return None if isinstance(made, str) else made

    def _check_order(self) -> None:
        if self.padded is None:
            check_order(self.loaded.model, self.why_not_captured)

    @property
    def why_not_captured(self) -> str | None:
        if self.padded is not None:
            return self.padded.why_not_captured
        return self._why_unpadded or "capturing is off"

    @property
    def num_programs(self) -> int:
        return 0 if self.graphs is None else self.graphs.num_programs

    def prepare(self, progress: ProgressCallback | None = None) -> None:
        """Capture the usual pass sizes now, so that requests wait for few captures.

        If a padded pass fails, later passes run without padding and graphs.
        """
        if self.padded is None:
            return
        with on_device(self.loaded.device):
            self._why_unpadded = capture_usual_sizes(self.padded, progress)
        if self._why_unpadded is not None:
            self.padded = None
            self._check_order()

    def adapter_rows(self, lora_indices: Tensor | None, width: int) -> AdapterRows | None:
        """Return the adapters of the rows of a pass of fixed shapes, or None if it has none.

        Args:
            lora_indices: [requests] int32 slots of their adapters, or None.
            width: Rows of each request.
        """
        if lora_indices is None or self.padded is None or self.padded.adapter_slots is None:
            return None
        return AdapterRows(self.padded.adapter_slots, lora_indices.repeat_interleave(width))

    @property
    def taps(self) -> Mapping[int, Tensor]:
        return self.tensors.taps

    def keep_taps(self, layers: Collection[int]) -> None:
        self.tensors.keep_taps(layers)

    def read_taps(self, layers: Sequence[int], request_id: str, start: int, end: int) -> list[Tensor]:
        return self.tensors.read_taps(layers, self.cache.slots(request_id)[start:end])

    def begin(self, pieces: Sequence[Piece]) -> Pass:
        """Return a pass that is computed in `wait`; one process has nothing else to do in the meantime."""
        return DeferredPass(partial(self.forward, pieces))

    @torch.inference_mode()
    def forward(self, pieces: Sequence[Piece]) -> Tensor:
        """Return [rows, vocab] float32 logits, piece by piece, for the last `num_logits` tokens of each.

        The next pass of this runner may overwrite the result: copy it to keep it longer.
        """
        with on_device(self.loaded.device):
            if self.padded is not None:
                return self.padded.forward(pieces)
            return compute(self.loaded, self.tensors, pieces)


def compute(loaded: LoadedModel, tensors: KVTensors, pieces: Sequence[Piece], hidden: Tensor | None = None) -> Tensor:
    """Run one pass over these pieces, and return what `forward` returns for the model or for this rank's stage."""
    # The shape of a pass changes the last bit of PyTorch's attention sums. Where activations are then rounded to 8
    # bits, one bit may become a whole step. Sums in double, rounded to the model's type, do not differ.
    check_order(loaded.model, "this pass has no fixed shapes")
    in_double = loaded.is_quantized and loaded.device.type == "cpu"
    batch = pack(pieces, tensors, loaded.device, native=loaded.native, in_double=in_double)
    return forward(loaded.model, batch, hidden)


@dataclass(frozen=True, slots=True)
class DeferredPass:
    """A pass in this process, computed when it is waited for."""

    compute: Callable[[], Tensor]

    def wait(self) -> Tensor:
        return self.compute()
