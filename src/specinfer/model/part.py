"""Part: what one rank computes of a pass, and what it hands on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specinfer.model.batch import Piece
from specinfer.model.kv_cache import KVTensors
from specinfer.model.load import LoadedModel
from specinfer.model.runner import compute
from specinfer.model.stage import received
from specinfer.parallel.group import Group


class Part:
    """Runs a rank's share of passes, in the order in which all ranks run them.

    Args:
        stages: The ranks that hand hidden states on to each other, from the last stage to the first.
    """

    def __init__(self, loaded: LoadedModel, num_slots: int, stages: Group) -> None:
        self._loaded, self._stages = loaded, stages
        self._tensors = KVTensors(loaded.layer_shapes, num_slots, loaded.dtype, loaded.device)

    @torch.inference_mode()
    def run(self, pieces: Sequence[Piece]) -> Tensor:
        """What the last stage's first rank returns is [rows, vocab] float32 logits; nobody needs that of others."""
        loaded, stages = self._loaded, self._stages
        hidden = None
        if not loaded.share.is_first:
            num_tokens = sum(len(piece.tokens) for piece in pieces)
            hidden = received(loaded.model, num_tokens, loaded.dtype, loaded.device)
            stages.recv(hidden, stages.rank + 1)
        out = compute(loaded, self._tensors, pieces, hidden)
        if not loaded.share.is_last:
            stages.send(out, stages.rank - 1)
        return out
