"""EAGLE-3 heads (arXiv 2503.01840), in the original format and in that of the speculators library.

A head reads the target's hidden states after some layers ("taps"), and at later levels its own output:

    g = fc(taps), or the output for the parent     e = embedding of the token
    h = r + attention([input_layernorm(e); hidden_norm(g)])     r = g, or hidden_norm(g)
    h = h + mlp(post_attention_layernorm(h)),   logits = lm_head(norm(h))

Its vocabulary may be a part of the target's; `d2t` then has the difference from each of its ids to the target's.
P-EAGLE heads draft a whole tree in one pass: rows after the first have the feature `mask_hidden` and a mask token.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specinfer.core.errors import ModelError
from specinfer.model.batch import ForwardBatch
from specinfer.model.definition import make_trunk
from specinfer.model.heads.checkpoint import HeadCheckpoint
from specinfer.model.heads.head import MAX_BLOCK, Block, FeatureHead, TargetEnds, TargetShape
from specinfer.model.kv_tensors import KVTensors
from specinfer.model.layers.device import DeviceLayers
from specinfer.model.layers.native import NativeLayers
from specinfer.ops import norm
from specinfer.ops.cpu.draft import FeatureParts
from specinfer.ops.layer_ops import add_norm

_USUAL_BLOCK = 8  # rows of a P-EAGLE head whose configuration proposes none


class Dialect(NamedTuple):
    """One reading of what checkpoints of this format do not state in one way.

    Attributes:
        reads: Layers of the target after which hidden states are read.
        norm_output: True if later levels read the output after the last norm.
        norm_before_residual: True if the residual stream starts after `hidden_norm`.
    """

    reads: tuple[int, ...]
    norm_output: bool
    norm_before_residual: bool

    def __str__(self) -> str:
        flags = [name for name in ("norm_output", "norm_before_residual") if getattr(self, name)]
        return ", ".join([f"hidden states after layers {', '.join(map(str, self.reads))}", *flags])


class Eagle3Head(FeatureHead):
    """A head of one or more layers, of which the first reads embedding and feature side by side."""

    def __init__(self, checkpoint: HeadCheckpoint, target: TargetShape, ends: TargetEnds) -> None:
        super().__init__()
        fields = checkpoint.fields
        is_speculators = fields.get("speculators_model_type") == "eagle3"
        self.dialects = _dialects(checkpoint, target.num_layers, is_speculators=is_speculators)
        self.speak(self.dialects[0])
        trunk = make_trunk(checkpoint.layer_fields())
        self.take_layers(trunk)
        width, num_taps = self.width, len(self.reads)
        self.fc = nn.Linear(num_taps * target.width, width, bias="fc.bias" in checkpoint, device="meta")
        checkpoint.fill(self.fc, "fc.")
        self.input_norm = checkpoint.get("input_norm.weight", num_taps * target.width)
        has_norms = "fc_norm.0.weight" in checkpoint
        self.fc_norms = [checkpoint.take(f"fc_norm.{i}.weight", target.width) for i in range(num_taps) if has_norms]
        self.norm = trunk.norm
        self.hidden_norm = type(trunk.norm)(width, eps=self.eps)
        self._widen(self.layers[0].self_attn, 2 * width)
        first = "midlayer." if "midlayer.hidden_norm.weight" in checkpoint else "layers.0."
        checkpoint.fill(self.hidden_norm, f"{first}hidden_norm.")
        for i, layer in enumerate(self.layers):
            checkpoint.fill(layer, f"layers.{i}." if i else first)
        checkpoint.fill(self.norm, "norm.")
        self.take_ends(checkpoint, target, ends)
        self.mask_hidden = checkpoint.get("mask_hidden", 1, 1, num_taps * target.width)
        if self.mask_hidden is not None:  # P-EAGLE
            size = _proposed(checkpoint.fields)
            mask = "mask_token_id" if "mask_token_id" in checkpoint.fields else "pard_token"
            self.block = Block(size, checkpoint.number(mask, 0, target.vocab_size - 1))

    @staticmethod
    def _widen(attention: Any, width: int) -> None:
        for name in ("q_proj", "k_proj", "v_proj"):
            layer = getattr(attention, name)
            setattr(attention, name, nn.Linear(width, layer.out_features, layer.bias is not None, device="meta"))

    def speak(self, dialect: Dialect) -> None:
        """Compute as this dialect means."""
        self.dialect, self.reads = dialect, dialect.reads

    @property
    def may_read(self) -> frozenset[int]:
        return frozenset(layer for dialect in self.dialects for layer in dialect.reads)

    def project(self, taps: Sequence[Tensor]) -> Tensor:
        kind = self.hidden_norm.weight.dtype  # not of fc, whose weight is computed at each access if quantized
        parts = [tap.to(kind) for tap in taps]
        if self.fc_norms:
            parts = [_norm(part, weight, self.eps) for part, weight in zip(parts, self.fc_norms, strict=True)]
        joined = torch.cat(parts, dim=-1)
        if self.input_norm is not None:
            joined = _norm(joined, self.input_norm, self.eps)
        features: Tensor = self.fc(joined)
        return features

    @property
    def mask_features(self) -> Tensor | None:
        return None if self.mask_hidden is None else self.fc(self.mask_hidden[0])

    def forward(self, batch: ForwardBatch) -> Tensor:
        assert batch.features is not None
        if self.fused is not None:
            return self._forward_fused(self.fused, batch, batch.features)
        if self.on_device is not None:
            return self._forward_on_device(self.on_device, batch, batch.features)
        features = batch.features.unsqueeze(0)
        embedded = self.embedded(batch.token_ids).to(features.dtype).unsqueeze(0)
        rotation = self.rotary(features, batch.positions.unsqueeze(0))

        def attend(layer: int, inputs: Tensor) -> Tensor:
            attended: Tensor = self.layers[layer].self_attn(
                hidden_states=inputs, position_embeddings=rotation, attention_mask=None, forward_batch=batch
            )[0]
            return attended

        last, output = self.compute(features, embedded, attend)
        self.store(batch, output[0])
        return self.asked_logits(batch, last[0])

    def _forward_fused(self, fused: NativeLayers, batch: ForwardBatch, features: Tensor) -> Tensor:
        """Return what `forward` does; all numbers between products are float32."""
        hidden_norm, last_norm = self.norm_weights["hidden_norm"], self.norm_weights["norm"]
        hidden = features.to(torch.float32, copy=True)  # becomes the output
        normed = norm(hidden, hidden_norm, self.eps)
        embedded = self.embedded(batch.token_ids).float()
        embedding_norm = fused.layers[0].call.parts[0].norm
        assert embedding_norm is not None
        inputs = torch.cat([norm(embedded, embedding_norm, self.eps), normed], dim=-1)
        hidden = fused(batch, normed if self.dialect.norm_before_residual else hidden, inputs)
        return self._finished(batch, hidden, norm(hidden, last_norm, self.eps))

    def native_inputs(self, store: KVTensors) -> tuple[FeatureParts, Tensor | None] | None:
        embedding_norm = None if self.fused is None else self.fused.layers[0].call.parts[0].norm
        if embedding_norm is None or self.block is not None:
            return None
        hidden_norm, dialect = self.norm_weights["hidden_norm"], self.dialect
        features = FeatureParts(
            store.taps[0], embedding_norm, hidden_norm, dialect.norm_output, adds_to_normed=dialect.norm_before_residual
        )
        return features, self.norm_weights["norm"]

    def _forward_on_device(self, layers: DeviceLayers, batch: ForwardBatch, features: Tensor) -> Tensor:
        """Return what `forward` does; `features` may be overwritten."""
        width, kind = self.width, self.hidden_norm.weight.dtype
        hidden, embedded = features.to(kind), self.embedded(batch.token_ids).to(kind)
        inputs = hidden.new_empty(len(hidden), 2 * width)
        add_norm(embedded, None, layers.first_norm, self.eps, inputs[:, :width])
        normed = add_norm(hidden, None, self.hidden_norm.weight, self.eps, inputs[:, width:])
        if self.dialect.norm_before_residual:
            hidden = normed.contiguous()
        added = layers(batch, hidden, inputs)
        return self._finished(batch, hidden, add_norm(hidden, added, self.norm.weight, self.eps))

    def _finished(self, batch: ForwardBatch, hidden: Tensor, last: Tensor) -> Tensor:
        """Store what the next level reads, and return the logits; both [tokens, width], before and after the norm."""
        self.store(batch, last if self.dialect.norm_output else hidden)
        return self.asked_logits(batch, last)

    def compute(
        self, features: Tensor, embedded: Tensor, attend: Callable[[int, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return [rows, pairs, width] outputs after the last norm, and those that the next level reads.

        Args:
            features, embedded: [rows, pairs, width].
            attend: Function of a layer's number and its [rows, pairs, inputs] that returns [rows, pairs, width].
        """
        normed = self.hidden_norm(features)
        inputs = torch.cat([self.layers[0].input_layernorm(embedded), normed], dim=-1)
        hidden = normed if self.dialect.norm_before_residual else features
        for i, layer in enumerate(self.layers):
            hidden = hidden + attend(i, layer.input_layernorm(hidden) if i else inputs)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        last = self.norm(hidden)
        return last, last if self.dialect.norm_output else hidden


def _norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    return nn.functional.rms_norm(hidden, (hidden.shape[-1],), weight.to(hidden.dtype), eps)


def _proposed(fields: Mapping[str, Any]) -> int:
    """Return the number of tokens that a configuration proposes to draft at once."""
    methods = (fields.get("speculators_config") or {}).get("proposal_methods") or [{}]
    count = methods[0].get("speculative_tokens") or fields.get("num_speculative_tokens")
    return count if isinstance(count, int) and 1 <= count <= MAX_BLOCK else _USUAL_BLOCK


def usual_reads(num_layers: int) -> tuple[int, ...]:
    """Return the layers of a target after which hidden states are read where a configuration names none."""
    return 2, num_layers // 2, num_layers - 3


def _dialects(checkpoint: HeadCheckpoint, num_layers: int, *, is_speculators: bool) -> list[Dialect]:
    """Return all readings of a configuration, the most likely one first.

    vLLM takes an id of `eagle_config` as the number of layers before, SGLang as the layer itself, one more. The
    trainers of heads disagree about `norm_output` too.
    """
    fields = checkpoint.fields
    nested = fields.get("eagle_config") or {}
    ids = fields.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        reads = [usual_reads(num_layers)]
    elif not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ModelError(f"drafters: eagle_aux_hidden_state_layer_ids of {checkpoint.folder} is {ids!r}, not a list")
    else:
        as_written, one_more = tuple(sorted(ids)), tuple(sorted(i + 1 for i in ids))
        reads = [as_written] if is_speculators else [one_more, as_written]
    fitting = [one for one in reads if one[0] >= 0 and one[-1] <= num_layers]
    if not fitting:
        raise checkpoint.wrong_layers(reads[0], num_layers)
    output = bool(fields.get("norm_output", nested.get("norm_output", False)))
    outputs = [output] if is_speculators or not output else [True, False]
    if "norm_before_residual" in fields or not is_speculators:
        residuals = [bool(fields.get("norm_before_residual", False))]
    else:
        residuals = [True, False]
    return [Dialect(*one) for one in itertools.product(fitting, outputs, residuals)]
