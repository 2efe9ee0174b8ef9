"""Block heads, which score all tokens of a block in one pass: DFlash, JetSpec and DSpark (arXiv 2607.05147).

    C[t]   = hidden_norm(fc(hidden states of token t))        features of the tokens before the anchor
    block  = embeddings of the anchor (the last known token) and of mask tokens, at consecutive positions
    layers : ordinary ones over the block; keys and values are those of the block and, made of C, of all tokens before
    row j  = norm(block)[j]; softmax(lm_head(row j)) is the distribution of the j-th token after the anchor

In DFlash a row sees the whole block, in JetSpec the rows before it. DSpark adds W2 W1[y] to the logits of a token
after y, which makes rows of a block conditional on the path, and predicts how likely that token is accepted.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specinfer.core.errors import ModelError
from specinfer.model.batch import ForwardBatch
from specinfer.model.definition import make_trunk
from specinfer.model.heads.checkpoint import HeadCheckpoint
from specinfer.model.heads.head import MAX_BLOCK, Block, FeatureHead, TargetEnds, TargetShape
from specinfer.ops import WIDTH, norm
from specinfer.ops.layer_ops import add_norm
from specinfer.ops.tree_layout import pack_bits

_PAIRS = "markov_head.markov_w1.weight"


class BlockHead(FeatureHead):
    """A head of one pass for each tree."""

    reads_pairs = False

    def __init__(self, checkpoint: HeadCheckpoint, target: TargetShape, ends: TargetEnds) -> None:
        super().__init__()
        fields = checkpoint.fields
        nested = fields.get("dflash_config") or fields.get("dspark_config") or {}
        fields = {**fields, **nested}
        self.is_pairwise = _PAIRS in checkpoint
        self.block = Block(
            checkpoint.number("block_size", 1, MAX_BLOCK, fields),
            checkpoint.number("mask_token_id", 0, target.vocab_size - 1, fields),
            from_anchor=bool(fields.get("sample_from_anchor", self.is_pairwise)),
            is_causal=bool(fields.get("causal_head", False)),
        )
        trunk = make_trunk(checkpoint.layer_fields())
        self.take_layers(trunk)
        width = self.width
        self.reads = _reads(checkpoint, fields, target.num_layers, len(trunk.layers))
        self.fc = nn.Linear(len(self.reads) * target.width, width, bias=False, device="meta")
        self.hidden_norm, self.norm = type(trunk.norm)(width, eps=self.eps), trunk.norm
        for name in ("fc", "hidden_norm", "layers", "norm"):
            checkpoint.fill(getattr(self, name), f"{name}.")
        has_windows = any(getattr(layer.self_attn, "sliding_window", None) is not None for layer in trunk.layers)
        self._sliding_is_causal = has_windows and not bool(fields.get("sliding_window_non_causal", True))
        self.take_ends(checkpoint, target, ends)
        self._take_pairs(checkpoint, target, fields)

    def _take_pairs(self, checkpoint: HeadCheckpoint, target: TargetShape, fields: dict[str, Any]) -> None:
        """Take DSpark's matrices: [vocab, rank] of tokens before, [draft vocab, rank], and [width (+ rank)]."""
        if not self.is_pairwise:
            return
        kind = fields.get("markov_head_type", "vanilla")
        if kind != "vanilla":
            raise ModelError(f"drafters: {checkpoint.folder} has a markov head of type {kind!r}, not vanilla")
        before = checkpoint.take(_PAIRS, target.vocab_size, None)
        size = target.vocab_size if self.token_map is None else len(self.token_map)
        after = checkpoint.take("markov_head.markov_w2.weight", size, before.shape[1])
        self.pairs = nn.ParameterList([nn.Parameter(one, requires_grad=False) for one in (before, after)])
        with_pairs = bool(fields.get("confidence_head_with_markov", False))
        width = self.width + (before.shape[1] if with_pairs else 0)
        weight = checkpoint.get("confidence_head.proj.weight", 1, width)
        bias = checkpoint.get("confidence_head.proj.bias", 1)
        self.confidence = None if weight is None else nn.Linear(width, 1, bias=bias is not None, device="meta")
        if self.confidence is not None:
            checkpoint.fill(self.confidence, "confidence_head.proj.")

    def fuse(self, quantization: str | None) -> None:
        if all(layer.self_attn.q_proj.out_features % WIDTH == 0 for layer in self.layers):  # keys begin a panel
            super().fuse(quantization)

    def project(self, taps: Sequence[Tensor]) -> Tensor:
        kind = self.hidden_norm.weight.dtype  # not of fc, whose weight is computed at each access if quantized
        features: Tensor = self.hidden_norm(self.fc(torch.cat([tap.to(kind) for tap in taps], dim=-1)))
        return features

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return the logits of the rows of blocks; for tokens with features store their keys and values only."""
        if batch.features is not None:
            return self._read(batch, batch.features)
        last = self._decoded(batch, self.embedded(batch.token_ids))
        self.store(batch, last)
        return self.asked_logits(batch, last)

    def _decoded(self, batch: ForwardBatch, embedded: Tensor) -> Tensor:
        """Return the [tokens, width] output of the layers after the last norm."""
        kind = self.hidden_norm.weight.dtype
        causal = _causal(batch) if self._sliding_is_causal else batch
        if self.fused is not None:
            decoded = self.fused(batch, embedded.to(torch.float32, copy=True), windowed=causal)
            return norm(decoded, self.norm_weights["norm"], self.eps).to(kind)
        if self.on_device is not None:
            hidden = embedded.to(kind)
            added = self.on_device(batch, hidden, windowed=causal)
            return add_norm(hidden, added, self.norm.weight, self.eps)
        last: Tensor = self.norm(self.definition(batch, embedded.to(kind), causal))
        return last

    def _read(self, batch: ForwardBatch, features: Tensor) -> Tensor:
        if self.fused is not None:
            self.fused.read(batch, features.float().contiguous())
        else:
            (self.on_device or self.definition).read(batch, features)
        return features.new_empty(0, 0)

    def conditional(self, logits: Tensor, rows: Tensor, before: Tensor) -> tuple[Tensor, Tensor | None]:
        first, second = self.pairs
        pair = first.index_select(0, before)
        shifted = logits + (pair @ second.T).float()
        if self.confidence is None:
            return shifted, None
        inputs = rows if self.confidence.in_features == self.width else torch.cat([rows, pair.to(rows.dtype)], dim=-1)
        return shifted, self.confidence(inputs)[:, 0].float().sigmoid()


def _reads(checkpoint: HeadCheckpoint, fields: dict[str, Any], num_layers: int, num_own: int) -> tuple[int, ...]:
    """Return the layers of the target after which hidden states are read.

    The format of the speculators library counts layers before, the others number the layers themselves, from 0.
    """
    own = fields.get("aux_hidden_state_layer_ids") if checkpoint.is_speculators else None
    ids = own or [i + 1 for i in fields.get("target_layer_ids") or ()] or usual_reads(num_layers, num_own)
    if min(ids) < 0 or max(ids) > num_layers:
        raise checkpoint.wrong_layers(ids, num_layers)
    return tuple(ids)


def usual_reads(num_layers: int, num_own: int) -> list[int]:
    """Return the layers of a target after which heads with this number of layers read where they name none."""
    step = (num_layers - 4) / max(num_own - 1, 1)
    return [num_layers // 2 + 1] if num_own == 1 else [round(1 + j * step) + 1 for j in range(num_own)]


def _causal(batch: ForwardBatch) -> ForwardBatch:
    if (layout := batch.layout) is not None:  # the columns of a request's new tokens are the last ones
        nodes, width = layout.node_slots.shape[1], layout.max_new
        sees = torch.ones(width, nodes, dtype=torch.bool, device=layout.visible.device).tril(nodes - width)
        visible = layout.visible.unflatten(0, (-1, width)) & pack_bits(sees, layout.visible.shape[1])
        return replace(batch, layout=replace(layout, visible=visible.flatten(0, 1)), windows={})
    return replace(
        batch, pieces=tuple(replace(piece, visible=np.tril(piece.visible)) for piece in batch.pieces), windows={}
    )
