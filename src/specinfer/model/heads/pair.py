"""Heads that join a token's embedding with a feature before ordinary decoder layers: EAGLE-1, EAGLE-2, MTP layers.

    u = join([embedding of the token; feature of the token before])      each after a norm in MTP layers
    h = layers(u)       m = output_norm(h)       logits = the target's head(m)

A feature is the target's hidden state after its last norm; at later levels it is m. EAGLE-2 is a way to grow trees
with EAGLE-1's checkpoints.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specinfer.core.errors import ModelError
from specinfer.model.batch import ForwardBatch
from specinfer.model.definition import make_trunk, precise_names
from specinfer.model.heads.checkpoint import HeadCheckpoint
from specinfer.model.heads.head import FeatureHead, TargetEnds, TargetShape
from specinfer.model.kv_tensors import KVTensors
from specinfer.ops.cpu.draft import FeatureParts
from specinfer.ops.layer_ops import sum_parts


class Normed(NamedTuple):
    """The choice of features: hidden states before or after a norm, the target's last one or the head's own."""

    is_normed: bool

    def __str__(self) -> str:
        return f"hidden states {'after' if self.is_normed else 'before'} the last norm"


class PairHead(FeatureHead):
    """A head whose layers read one joined vector for each pair of a token and a feature."""

    dialects: Sequence[Normed] = (Normed(True),)
    embedding_norm: nn.Module
    feature_norm: nn.Module
    output_norm: nn.Module
    join: nn.Module
    feature_is_first = False  # in what is joined
    blanks_first = False  # the embedding at position 0, of the second token, is zero
    norms_input = True  # before the first attention
    precise: re.Pattern[str]  # names in the layers that are float32, whatever the type of others

    def __init__(
        self, checkpoint: HeadCheckpoint, target: TargetShape, ends: TargetEnds, fields: dict[str, Any]
    ) -> None:
        super().__init__()
        if ends.norm is None:
            raise ModelError(
                f"drafters: {checkpoint.folder} reads what the target's last norm computes, which is not known for its "
                "family; name a small model"
            )
        self.last_norm, self.reads, self.dtype = ends.norm, (target.num_layers,), checkpoint.dtype
        self.speak(self.dialects[0])
        trunk = make_trunk(fields)
        self.precise = precise_names(trunk, self.dtype)
        self.take_layers(trunk)
        if self.width != target.width:  # a feature is a hidden state of either
            raise ModelError(
                f"drafters: hidden size {self.width} of {checkpoint.folder} is not its target's {target.width}; take a "
                "drafter that was trained for this target"
            )

    def native_inputs(self, store: KVTensors) -> tuple[FeatureParts, Tensor | None] | None:
        join, norms = getattr(self.join, "call", None), (self.embedding_norm, self.feature_norm, self.output_norm)
        if join is None or any(type(norm) not in (self.norm_class, nn.Identity) for norm in norms):
            return None
        names = ("embedding_norm", "feature_norm", "output_norm")
        embedding_norm, feature_norm, output_norm = map(self.norm_weights.get, names)
        features = FeatureParts(
            store.taps[0], embedding_norm, feature_norm, self.dialect.is_normed, join,
            feature_is_first=self.feature_is_first, blanks_first=self.blanks_first, norms_joined=self.norms_input,
        )  # fmt: skip
        return features, output_norm

    def take_join(self, checkpoint: HeadCheckpoint, name: str) -> nn.Linear:
        """Take the linear layer that joins embedding and feature."""
        bias = f"{name}.bias" in checkpoint
        join = nn.Linear(2 * self.width, self.width, bias=bias, device="meta")
        checkpoint.fill(join, f"{name}.")
        return join

    def speak(self, dialect: Normed) -> None:
        self.dialect = dialect

    def project(self, taps: Sequence[Tensor]) -> Tensor:
        (hidden,) = taps
        return self.last_norm(hidden) if self.dialect.is_normed else hidden

    def forward(self, batch: ForwardBatch) -> Tensor:
        assert batch.features is not None
        embedded = self.embedded(batch.token_ids).to(self.dtype)
        if self.blanks_first:
            embedded = embedded.masked_fill((batch.positions == 0).unsqueeze(1), 0.0)
        pair = [self.embedding_norm(embedded), self.feature_norm(batch.features.to(self.dtype))]
        joined = torch.cat(pair[::-1] if self.feature_is_first else pair, dim=-1)
        hidden = self._decoded(batch, self.join(joined))
        last = self.output_norm(hidden)
        self.store(batch, last if self.dialect.is_normed else hidden)
        return self.asked_logits(batch, last)

    def _decoded(self, batch: ForwardBatch, joined: Tensor) -> Tensor:
        """Return the [tokens, width] output of the layers."""
        if self.fused is not None:
            hidden = joined.float()
            decoded: Tensor = self.fused(batch, hidden, None if self.norms_input else hidden)
            return decoded.to(joined.dtype)
        if self.on_device is not None:
            added = self.on_device(batch, joined, None if self.norms_input else joined)
            return joined.add_(sum_parts(added, joined.dtype))
        return self.definition(batch, joined)


class EagleHead(PairHead):
    """A head of EAGLE-1 or EAGLE-2: without norms of its inputs and output, nor one before its first attention."""

    norms_input = False

    def __init__(self, checkpoint: HeadCheckpoint, target: TargetShape, ends: TargetEnds) -> None:
        super().__init__(checkpoint, target, ends, checkpoint.layer_fields())
        self.embedding_norm, self.feature_norm, self.output_norm = (nn.Identity() for _ in range(3))
        self.join = self.take_join(checkpoint, "fc")
        self.layers[0].input_layernorm = nn.Identity()
        for i, layer in enumerate(self.layers):
            checkpoint.fill(layer, f"layers.{i}.")
        self.take_ends(checkpoint, target, ends)
