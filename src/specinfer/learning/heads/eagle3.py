"""EAGLE-3 heads in training.

Training-time test (EAGLE-3, arXiv 2503.01840, section 3.2): each pair of a text is computed at several levels. At level
0 its feature is made of the target's hidden states; at level j it is the head's own output of level j - 1 for the pair
before, and attention sees at the last j places what those levels computed. So a head learns to draft from its drafts.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specinfer.core.errors import ModelError
from specinfer.learning.batches import Batch
from specinfer.learning.distillation import HeadLogits
from specinfer.learning.heads.head import TrainableHead, by_heads
from specinfer.model.families import rotate
from specinfer.model.heads.checkpoint import HeadCheckpoint
from specinfer.model.heads.eagle3 import Eagle3Head
from specinfer.model.heads.head import FeatureHead

NUM_LEVELS = 4  # levels of training-time test; each costs a pass
Keys = list[tuple[Tensor, Tensor]]  # keys and values of each level, [rows, heads, pairs, dim]


class TrainableEagle3(TrainableHead):
    """An EAGLE-3 head in training."""

    def __init__(self, head: FeatureHead, checkpoint: HeadCheckpoint, target: Path) -> None:
        super().__init__(head, checkpoint, target)
        if head.block is not None:
            raise ModelError(f"drafter: {checkpoint.folder} is a P-EAGLE head, which cannot be trained")
        first = "midlayer." if "midlayer.hidden_norm.weight" in checkpoint else "layers.0."
        self.renamed = {**self.renamed, "hidden_norm.": f"{first}hidden_norm.", "layers.0.": first}

    def forward(self, batch: Batch) -> Tensor | HeadLogits:
        """Return the logits of all levels; outside of training [outputs, draft vocabulary] of the first.

        The second token of a text has no pair to be predicted from: there are none, or the logits of the third.
        """
        head: Eagle3Head = self.model
        features = self.features(batch)[:, :-1]
        tokens = batch.tokens[:, 1:]
        embedded = head.embedded(tokens.flatten()).unflatten(0, tokens.shape).to(features.dtype)
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        rotation = head.rotary(features, positions)
        memory: list[Keys] = [[] for _ in head.layers]

        def attend(layer: int, inputs: Tensor) -> Tensor:
            return _attend(head.layers[layer].self_attn, inputs, rotation, memory[layer])

        if not self.training:
            last, _ = head.compute(features, embedded, attend)
            return head.logits(last[batch.rows, (batch.places - 1).clamp_min(0)])
        outputs = (batch.places > 0).nonzero()[:, 0]
        rows, pairs = batch.rows[outputs], batch.places[outputs] - 1
        all_logits, level_features = [], features
        for _ in range(NUM_LEVELS):
            last, output = head.compute(level_features, embedded, attend)
            all_logits.append(head.logits(last[rows, pairs]))
            level_features = torch.cat([features[:, :1], output[:, :-1]], dim=1)
        levels = torch.arange(NUM_LEVELS, device=outputs.device)
        return HeadLogits(
            torch.cat(all_logits), outputs.repeat(NUM_LEVELS), levels.repeat_interleave(len(outputs)), accepted=None
        )


def _attend(attention: Any, x: Tensor, rotation: tuple[Tensor, Tensor], memory: Keys) -> Tensor:
    """Return the attention of the next level, and append its keys and values.

    A pair sees the true pairs up to j places before it, and then one pair of each later level, up to itself.
    """
    query, key = (rotate(by_heads(attention, name, x), *rotation) for name in "qk")
    value = by_heads(attention, "v", x)
    memory.append((key, value))
    level, pairs = len(memory) - 1, x.shape[1]
    true_key, true_value = memory[0]
    seen = torch.ones(pairs, pairs, dtype=torch.bool, device=x.device).tril(-level)
    scores = [(query @ true_key.transpose(-1, -2)).masked_fill(~seen, -torch.inf)]
    values = []
    for i in range(1, level + 1):
        key, value = (_later(part, level - i) for part in memory[i])
        score = (query * key).sum(-1, keepdim=True)
        missing = torch.arange(pairs, device=x.device)[:, None] < level - i
        scores.append(score.masked_fill(missing, -torch.inf))
        values.append(value)
    probs = (torch.cat(scores, dim=-1).float() * attention.scaling).softmax(-1).to(true_value.dtype)
    out = probs[..., :pairs] @ true_value
    for i, value in enumerate(values):
        out = out + probs[..., pairs + i : pairs + i + 1] * value
    result: Tensor = attention.o_proj(out.transpose(1, 2).flatten(2))
    return result


def _later(x: Tensor, count: int) -> Tensor:
    """Return [rows, heads, pairs, dim] moved later by this many pairs."""
    return x if not count else nn.functional.pad(x, (0, 0, count, 0))[:, :, : x.shape[2]]
