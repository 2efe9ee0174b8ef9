"""Block heads in training: DSpark (arXiv 2607.05147), and DFlash and JetSpec heads that exist already.

Blocks begin at random tokens of the target's output. All blocks of a text are computed in one pass: a row sees the
features of the tokens before its block, and the rows of its block. The pairwise head is given the true token before.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specinfer.core.errors import ModelError
from specinfer.learning.batches import Batch
from specinfer.learning.distillation import HeadLogits
from specinfer.learning.heads.head import TrainableHead, by_heads
from specinfer.model.families import rotate
from specinfer.model.heads.block import BlockHead
from specinfer.model.heads.checkpoint import HeadCheckpoint
from specinfer.model.heads.head import Block, FeatureHead

_TOKENS_PER_BLOCK = 4  # in training; each block costs as many rows as it is long
_BLOCKS = 64  # of a text in a pass that predicts all of its tokens


class TrainableBlock(TrainableHead):
    """A block head in training."""

    renamed: Mapping[str, str] = {
        **TrainableHead.renamed,
        "pairs.0": "markov_head.markov_w1.weight",
        "pairs.1": "markov_head.markov_w2.weight",
        "confidence.": "confidence_head.proj.",
    }

    def __init__(self, head: FeatureHead, checkpoint: HeadCheckpoint, target: Path) -> None:
        super().__init__(head, checkpoint, target)
        if any(getattr(layer.self_attn, "sliding_window", None) is not None for layer in self.model.layers):
            raise ModelError(
                f"drafter: {checkpoint.folder} has sliding windows, which cannot be trained; take new:dspark"
            )

    @property
    def block(self) -> Block:
        """The rows of a pass."""
        block: Block = self.model.block
        return block

    def forward(self, batch: Batch) -> Tensor | HeadLogits:
        """Return the logits of random blocks; outside of training [outputs, draft vocabulary] of first tokens."""
        context = self.features(batch)
        counts = torch.bincount(batch.rows, minlength=len(batch.tokens))
        most = int(counts.max())
        if self.training:
            # On the CPU, whose random numbers are the same on every device.
            order = torch.rand(len(counts), most).masked_fill(torch.arange(most) >= counts.cpu()[:, None], -1.0)
            places = order.topk(-(-most // _TOKENS_PER_BLOCK)).indices.to(counts.device)
            wanted = counts.div(_TOKENS_PER_BLOCK).ceil()
            is_wanted = torch.arange(places.shape[1], device=counts.device) < wanted[:, None]
            return self._draft(batch, context, counts, places, is_wanted, self.block.max_depth)
        parts = []
        for start in range(0, most, _BLOCKS):
            places = torch.arange(start, min(start + _BLOCKS, most), device=counts.device).expand(len(counts), -1)
            parts.append(self._draft(batch, context, counts, places, places < counts[:, None], 1))
        logits = torch.cat([part.logits for part in parts])
        return logits[torch.cat([part.outputs for part in parts]).argsort()]

    def _draft(
        self, batch: Batch, context: Tensor, counts: Tensor, places: Tensor, is_wanted: Tensor, depth: int
    ) -> HeadLogits:
        """Return the logits of the first tokens of blocks that begin before outputs of each row.

        Args:
            context: [rows, tokens, width] features of all tokens.
            counts: [rows] number of outputs.
            places: [rows, blocks] the first output of each block, counted in its row.
            is_wanted: [rows, blocks] False for blocks to skip.
            depth: Number of tokens of a block.
        """
        head: BlockHead = self.model
        ends = counts.cumsum(0)
        firsts = (ends - counts)[:, None] + places
        anchors = batch.places[firsts.clamp(max=len(batch.places) - 1)]
        distances = torch.arange(depth, device=places.device)
        outputs = firsts[..., None] + distances
        is_real = is_wanted[..., None] & (outputs < ends[:, None, None])
        skipped = self.block.size - self.block.max_depth
        hidden = self._rows(context, batch.tokens, anchors)[:, :, skipped : skipped + depth][is_real]
        levels, outputs = distances.expand_as(outputs)[is_real], outputs[is_real]
        logits, accepted = head.logits(hidden), None
        if head.is_pairwise:
            before = batch.tokens[batch.rows[outputs], batch.places[outputs]]
            logits, accepted = head.conditional(logits, hidden, before)
        return HeadLogits(logits, outputs, levels, accepted)

    def _rows(self, context: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
        """Return the [rows, blocks, block size, width] rows of blocks whose first tokens are at [rows, blocks]."""
        head, size = self.model, self.block.size
        ids = torch.full((*anchors.shape, size), self.block.mask_token, device=tokens.device)
        ids[..., 0] = tokens.gather(1, anchors)
        hidden = head.embedded(ids.flatten()).to(context.dtype).unflatten(0, (len(tokens), -1))
        positions = (anchors[..., None] + torch.arange(size, device=anchors.device)).flatten(1)
        every = torch.arange(tokens.shape[1], device=anchors.device)
        rotations = head.rotary(hidden, positions), head.rotary(context, every[None])
        is_later = (every >= anchors[..., None].expand(-1, -1, size).flatten(1)[..., None]).unsqueeze(1)
        for layer in head.layers:
            inputs = layer.input_layernorm(hidden)
            hidden = hidden + self._attend(layer.self_attn, inputs, context, rotations, is_later)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        rows: Tensor = head.norm(hidden).unflatten(1, (-1, size))
        return rows

    def _attend(
        self,
        attention: Any,
        x: Tensor,
        context: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        is_later: Tensor,
    ) -> Tensor:
        """Return the attention of the rows of all blocks, of which each sees its own and the tokens before it.

        Args:
            x: [rows, blocks * size, width].
            rotations: Those of the blocks' rows, and of all tokens.
            is_later: [rows, 1, blocks * size, tokens] True where a token is not before the block.
        """
        size, num_tokens = self.block.size, context.shape[1]
        query = rotate(by_heads(attention, "q", x), *rotations[0])
        block_key, key = (
            rotate(by_heads(attention, "k", rows), *rotation)
            for rows, rotation in zip((x, context), rotations, strict=True)
        )
        block_value, value = (by_heads(attention, "v", rows) for rows in (x, context))
        block_scores = query.unflatten(2, (-1, size)) @ block_key.unflatten(2, (-1, size)).transpose(-1, -2)
        if self.block.is_causal:
            block_scores = block_scores.masked_fill(torch.ones_like(block_scores, dtype=torch.bool).triu(1), -torch.inf)
        scores = (query @ key.transpose(-1, -2)).masked_fill(is_later, -torch.inf)
        scores = torch.cat([scores, block_scores.flatten(2, 3)], dim=-1).float() * attention.scaling
        probs = scores.softmax(-1).to(value.dtype)
        block_probs = probs[..., num_tokens:].unflatten(2, (-1, size))
        out = probs[..., :num_tokens] @ value + (block_probs @ block_value.unflatten(2, (-1, size))).flatten(2, 3)
        result: Tensor = attention.o_proj(out.transpose(1, 2).flatten(2))
        return result
