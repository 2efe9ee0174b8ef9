"""ShardRunner: one rank's computation in a pass, and the exchange of hidden states between stages."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specinfer.core.progress import ProgressCallback
from specinfer.model.batch import Piece
from specinfer.model.graphs.capture import Graphs
from specinfer.model.graphs.check import capture_usual_sizes, make_graph_runner
from specinfer.model.graphs.graph_runner import GraphRunner
from specinfer.model.invariance import check_order
from specinfer.model.kv_cache import Slots
from specinfer.model.kv_tensors import KVTensors, TapShape, put_rows
from specinfer.model.load import LoadedModel
from specinfer.model.recurrent.layers import kept_states
from specinfer.model.runner import compute
from specinfer.model.sharding.stage import received
from specinfer.ops.triton import on_device
from specinfer.parallel.group import Group

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def describe_shard(models: Sequence[LoadedModel], num_slots: int) -> Tensor:
    """Return [1 + models] int64, which a rank sends to the others after loading: its slots and types of hidden states.

    The first is the number of slots that fit into its memory, the others, of its shard and the shard's copies, indices
    into `_TYPES`. Native layers, which one rank may find faster than another, keep hidden states in float32.
    """
    taken = [received(one.model, 1, one.dtype, one.device).dtype for one in models]
    return torch.tensor([num_slots, *map(_TYPES.index, taken)])


def next_dtypes(descriptions: Sequence[Tensor], rank: int, width: int) -> list[torch.dtype]:
    """Return the types of hidden states that the next stage takes, for its shard and the shard's copies.

    Args:
        descriptions: The descriptions of all ranks.
        width: Number of ranks per stage.
    """
    return [_TYPES[int(number)] for number in descriptions[max(rank - width, 0)][1:]]


class ShardRunner:
    """The computation of one rank's shard; passes run in the order in which all ranks run them.

    Args:
        stages: The ranks that pass hidden states on to each other, from the last stage to the first.
        next_dtypes: Types that the next stage takes, see `next_dtypes`.
        taps: Hidden states to store, by layers of the whole target, or None. Each stage hands on those up to its end.
        num_states: Number of states of recurrent layers to keep. Ranks may keep different ones.
        copies: The shard's copies that draft, which compute in its cache.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        num_slots: int,
        stages: Group,
        next_dtypes: Sequence[torch.dtype],
        taps: TapShape | None = None,
        num_states: int = 0,
        copies: Sequence[LoadedModel] = (),
    ) -> None:
        self.loaded, self._stages, self._models, self._next_dtypes = loaded, stages, (loaded, *copies), next_dtypes
        layers, self._received = range(0), tuple[int, ...]()
        if taps is not None:  # what later stages compute is not stored here
            layers = loaded.layers
            taps = TapShape(tuple(i for i in taps.layers if i <= layers.stop), taps.width)
            self._received = tuple(i for i in taps.layers if i <= layers.start and not loaded.shard.is_first)
        self.tensors = KVTensors(
            loaded.layer_shapes, num_slots, loaded.dtype, loaded.device, taps,
            kept_states(loaded.model, num_states, num_slots, loaded.device), loaded.kv_dtype,
        )  # fmt: skip
        # A pass counts the layers of its stage only.
        self.taps = self.tensors.taps
        self.tensors.taps = {i - layers.start: rows for i, rows in self.taps.items() if i not in self._received}
        self._graphs: Graphs | None = None
        self._padded: GraphRunner | None = None
        self._why_unpadded: str | None = "capturing is off"

    @property
    def why_not_captured(self) -> str | None:
        return self._why_unpadded if self._padded is None else self._padded.why_not_captured

    @property
    def num_programs(self) -> int:
        return 0 if self._graphs is None else self._graphs.num_programs

    def capture(self, graphs: Graphs | None, max_requests: int = 32, progress: ProgressCallback | None = None) -> None:
        """Capture the usual sizes of passes before the first one; all ranks with the same layers call this together.

        Args:
            graphs: Captured graphs, which nothing else may use, or None to run passes unpadded.
            max_requests: Usual largest number of requests at a time, the same on all ranks.
            progress: Callback for the progress of the captures.
        """
        self._graphs, group = graphs, self.loaded.shard.tensor
        made: GraphRunner | str = "capturing is off"
        with on_device(self.loaded.device):
            if graphs is not None:
                made = make_graph_runner(self.loaded, self.tensors, graphs, max_requests)
            why = made if isinstance(made, str) else capture_usual_sizes(made, progress)
        # Ranks that add up results pad alike, or not at all. Not all may have fused layers: each checks its own.
        can_pad = group.all_gather(torch.tensor([why is None], device=self.loaded.device))
        self._why_unpadded = why or (None if all(map(bool, can_pad)) else "another rank cannot pad its passes")
        self._padded = made if self._why_unpadded is None and not isinstance(made, str) else None
        if self._padded is None:
            check_order(self.loaded.model, self._why_unpadded)

    @torch.inference_mode()
    def run(self, pieces: Sequence[Piece], model: int = 0) -> Tensor:
        """Run this rank's shard for one pass.

        Args:
            model: 0 for the shard itself, or the number of its copy, from 1.

        The last stage's first rank returns [rows, vocab] float32 logits. The results of other ranks are not used.
        """
        loaded, stages = self._models[model], self._stages
        hidden = None
        if not loaded.shard.is_first:
            num_tokens = sum(len(piece.tokens) for piece in pieces)
            hidden = received(loaded.model, num_tokens, loaded.dtype, loaded.device)
            stages.recv(hidden, stages.rank + 1)
            if self._received:
                self._receive_taps(self._slots_of(pieces))
        with on_device(loaded.device):
            if self._padded is not None and model == 0:
                # The next pass overwrites the result, which may not have been sent or read by then.
                out = self._padded.forward(pieces, hidden).clone()
            else:
                out = compute(loaded, self.tensors, pieces, hidden)
        if not loaded.shard.is_last:
            stages.send(out.to(self._next_dtypes[model]), stages.rank - 1)
            if self.taps:
                slots = self._slots_of(pieces)
                stages.send(
                    torch.cat([rows.index_select(0, slots) for rows in self.taps.values()], dim=-1), stages.rank - 1
                )
        return out

    def _slots_of(self, pieces: Sequence[Piece]) -> Tensor:
        return torch.from_numpy(np.concatenate([piece.slots for piece in pieces])).to(self.loaded.device)

    def _receive_taps(self, slots: Tensor) -> None:
        count, like = len(self._received), self.taps[self._received[0]]
        taken = like.new_empty(len(slots), count * like.shape[1])
        self._stages.recv(taken, self._stages.rank + 1)
        for layer, rows in zip(self._received, taken.chunk(count, dim=-1), strict=True):
            put_rows(self.taps[layer], slots, rows)

    def read_taps(self, layers: Sequence[int], slots: Slots) -> list[Tensor]:
        """Return the [tokens, width] hidden states after each of these layers for the tokens in these slots."""
        index = torch.from_numpy(slots).to(self.loaded.device)
        return [self.taps[layer].index_select(0, index) for layer in layers]
