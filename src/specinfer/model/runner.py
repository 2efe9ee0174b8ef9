"""ModelRunner: one model and its cache, on one device."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specinfer.errors import first_line
from specinfer.model.batch import Piece, pack
from specinfer.model.device import on_device
from specinfer.model.forward import forward
from specinfer.model.graphs.capture import Graphs
from specinfer.model.graphs.check import make_graph_runner
from specinfer.model.graphs.graph_runner import GraphRunner
from specinfer.model.kv_cache import KVCache, KVTensors
from specinfer.model.load import LoadedModel
from specinfer.model.offload.budget import PassRoom
from specinfer.progress import ProgressCallback

logger = logging.getLogger(__name__)


class Pass(Protocol):
    """A pass that was begun."""

    def wait(self) -> Tensor:
        """[rows, vocab] float32 logits, as `ModelRunner.forward` returns them; called once.

        Raises:
            Exception: Whatever went wrong in it.
        """
        ...


class TargetRunner(Protocol):
    """Runs passes of a target, wherever its parts lie.

    Attributes:
        room: What a pass may take; None: what the cache has slots for.
    """

    loaded: LoadedModel
    cache: KVCache
    room: PassRoom | None

    @property
    def compute_path(self) -> str:
        """What computes its passes, in words."""
        ...

    @property
    def max_in_flight(self) -> int:
        """Passes that may be begun before the first of them is waited for; they end in the order they began in."""
        ...

    def begin(self, pieces: Sequence[Piece]) -> Pass: ...

    def forward(self, pieces: Sequence[Piece]) -> Tensor: ...


class ModelRunner:
    """Runs passes of a model; the target and every small drafter are each one of these.

    Args:
        room: What a pass may take; None: what the cache has slots for.
        graphs: Passes are padded to sizes that these capture, if the model allows it; None: they run as they come.
        max_requests: At once, in passes that are captured.
    """

    max_in_flight = 1

    def __init__(
        self,
        loaded: LoadedModel,
        num_slots: int,
        *,
        keeps_prefixes: bool = False,
        room: PassRoom | None = None,
        graphs: Graphs | None = None,
        max_requests: int = 32,
    ) -> None:
        self.loaded, self.room = loaded, room
        self.cache = KVCache(num_slots, keeps_prefixes=keeps_prefixes)
        self.tensors = KVTensors(loaded.layer_shapes, num_slots, loaded.dtype, loaded.device)
        self.graphs, self.num_replaced = graphs, 0
        self._max_requests = max_requests
        self.padded = self._make_padded()

    @property
    def compute_path(self) -> str:
        return self.loaded.compute_path + (", captured passes" if self.padded is not None else "")

    def replace(self, loaded: LoadedModel) -> None:
        """Runs other weights of the same model from now on, with an empty cache: what it held was the old weights'."""
        assert (loaded.layer_shapes, loaded.num_logits) == (self.loaded.layer_shapes, self.loaded.num_logits)
        assert (loaded.dtype, loaded.device) == (self.loaded.dtype, self.loaded.device)
        self.loaded = loaded
        self.cache = KVCache(self.cache.num_slots, keeps_prefixes=self.cache.keeps_prefixes)
        self.num_replaced += 1  # what was captured reads the old weights
        if self.graphs is not None:
            self.graphs.wait()  # it may still run
        self.padded = self._make_padded()

    def _make_padded(self) -> GraphRunner | None:
        if self.graphs is None:
            return None
        with on_device(self.loaded.device):
            return make_graph_runner(self.loaded, self.tensors, self.graphs, self._max_requests)

    def prepare(self, progress: ProgressCallback | None = None) -> None:
        """Captures the usual sizes of passes now; else the first of each waits for it.

        A size that cannot even be run has passes run as they come.
        """
        if self.padded is None:
            return
        try:
            with on_device(self.loaded.device):
                self.padded.prepare(progress)
        except Exception as error:  # such as a kernel that takes more of a multiprocessor than it has
            logger.debug("a padded pass failed", exc_info=True)
            logger.warning("passes of %s are not captured: %s", self.loaded.folder, first_line(error))
            self.padded = None

    def begin(self, pieces: Sequence[Piece]) -> Pass:
        """A pass that is computed when it is waited for: one process has nothing to do meanwhile."""
        return _Deferred(self, pieces)

    @torch.inference_mode()
    def forward(self, pieces: Sequence[Piece]) -> Tensor:
        """[rows, vocab] float32 logits, piece after piece, of the last `num_logits` tokens of each.

        The next pass of this runner may overwrite them: what is kept longer is copied.
        """
        with on_device(self.loaded.device):
            if self.padded is not None:
                return self.padded.forward(pieces)
            return compute(self.loaded, self.tensors, pieces)


def compute(loaded: LoadedModel, tensors: KVTensors, pieces: Sequence[Piece], hidden: Tensor | None = None) -> Tensor:
    """What `forward` returns of a model, or of the stage that a rank holds, for these pieces."""
    # The shape of a pass shows in the last bit of the sums of PyTorch's attention, and where activations are then
    # rounded to 8 bits, a bit may be a whole step. Rounded from double to the model's type, the sums do not differ.
    in_double = loaded.quantization is not None and loaded.device.type == "cpu"
    batch = pack(pieces, tensors, loaded.device, native=loaded.native, in_double=in_double)
    return forward(loaded.model, batch, hidden)


@dataclass(frozen=True, slots=True)
class _Deferred:
    """A pass in this process."""

    runner: ModelRunner
    pieces: Sequence[Piece]

    def wait(self) -> Tensor:
        return self.runner.forward(self.pieces)
