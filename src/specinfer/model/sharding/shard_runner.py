"""ShardRunner: one rank's computation in a pass, and the exchange of hidden states between stages."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specinfer.model.batch import Piece
from specinfer.model.kv_cache import KVTensors
from specinfer.model.load import LoadedModel
from specinfer.model.runner import compute
from specinfer.model.sharding.stage import received
from specinfer.parallel.group import Group

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def describe_shard(loaded: LoadedModel, num_slots: int) -> Tensor:
    """Return [2] int64, which a rank sends to the others after loading: its slots and its type of hidden states.

    The first is the number of slots that fit into its memory, the second an index into `_TYPES`. Native layers, which
    one rank may find faster than another, keep hidden states in float32.
    """
    taken = received(loaded.model, 1, loaded.dtype, loaded.device).dtype
    return torch.tensor([num_slots, _TYPES.index(taken)])


def next_dtype(descriptions: Sequence[Tensor], rank: int, width: int) -> torch.dtype:
    """Return the type of hidden states that the next stage takes.

    Args:
        descriptions: The descriptions of all ranks.
        width: Number of ranks per stage.
    """
    return _TYPES[int(descriptions[max(rank - width, 0)][1])]


class ShardRunner:
    """The computation of one rank's shard; passes run in the order in which all ranks run them.

    Args:
        stages: The ranks that pass hidden states on to each other, from the last stage to the first.
        next_dtype: Type that the next stage takes, see `next_dtype`.
    """

    def __init__(self, loaded: LoadedModel, num_slots: int, stages: Group, next_dtype: torch.dtype) -> None:
        self._loaded, self._stages, self._next_dtype = loaded, stages, next_dtype
        self.tensors = KVTensors(loaded.layer_shapes, num_slots, loaded.dtype, loaded.device, loaded.taps)

    @torch.inference_mode()
    def run(self, pieces: Sequence[Piece]) -> Tensor:
        """Run this rank's shard for one pass.

        The last stage's first rank returns [rows, vocab] float32 logits. The results of other ranks are not used.
        """
        loaded, stages = self._loaded, self._stages
        hidden = None
        if not loaded.shard.is_first:
            num_tokens = sum(len(piece.tokens) for piece in pieces)
            hidden = received(loaded.model, num_tokens, loaded.dtype, loaded.device)
            stages.recv(hidden, stages.rank + 1)
        out = compute(loaded, self.tensors, pieces, hidden)
        if not loaded.shard.is_last:
            stages.send(out.to(self._next_dtype), stages.rank - 1)
        return out
