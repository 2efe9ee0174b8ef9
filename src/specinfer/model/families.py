"""Families whose definition in transformers bypasses the attention interface and adds ALiBi: BLOOM, Falcon and MPT.

The loaded submodules and their weights are kept. Only the loop over layers and the attention call are replaced. ALiBi
is passed as a bias by key position.
"""

import math
from types import SimpleNamespace
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from specinfer.model.attention import tree_attention
from specinfer.model.batch import ForwardBatch
from specinfer.model.context_length import max_position_of
from specinfer.model.sharding.placeholder import End, Placeholder, StageEnd

_Rotary: TypeAlias = tuple[Tensor, Tensor] | None  # the cosines and sines of a pass, if it has any


class _Layer(nn.Module):
    """The attributes of an attention module that the attention function reads."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx


class _Replacement(nn.Module):
    """A loaded definition whose blocks call tree attention. A stage has placeholders in the place of some blocks.

    Args:
        model: The definition.
        key_bias: [heads, positions] bias of attention, or None.
    """

    names: ClassVar[tuple[str, str, str]]  # of the embedding, the blocks and the last norm in the definition's trunk

    def __init__(self, model: Any, key_bias: Tensor | None) -> None:
        super().__init__()
        self.config = model.config
        self.trunk, self.lm_head = model.transformer, model.lm_head
        self.layers = nn.ModuleList(_Layer(i) for i in range(len(getattr(self.trunk, self.names[1]))))
        self.key_bias: Tensor | None
        self.register_buffer("key_bias", key_bias, persistent=False)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, forward_batch: ForwardBatch, **_: Any
    ) -> SimpleNamespace:
        embedding, blocks, norm = (getattr(self.trunk, name) for name in self.names)
        hidden = self._embedded(embedding(input_ids)) if forward_batch.hidden is None else forward_batch.hidden
        rotary = self._rotary(hidden, position_ids)
        for layer, block in zip(self.layers, blocks, strict=True):
            if isinstance(block, End):
                raise StageEnd(hidden)
            if not isinstance(block, Placeholder):
                # The block is transformers' own; only its attention submodule is replaced.
                hidden = self._block(layer, block, hidden, rotary, forward_batch)
        return SimpleNamespace(logits=self.lm_head(norm(hidden)[:, logits_to_keep]))

    def _embedded(self, hidden: Tensor) -> Tensor:
        return hidden

    def _rotary(self, hidden: Tensor, position_ids: Tensor) -> _Rotary:
        """Return the cosines and sines of a pass, or None if positions are in the bias alone."""
        del hidden, position_ids
        return None

    def _block(
        self, layer: nn.Module, block: Any, hidden: Tensor, rotary: _Rotary, forward_batch: ForwardBatch
    ) -> Tensor:
        raise NotImplementedError

    def _attend(
        self, layer: nn.Module, qkv: tuple[Tensor, Tensor, Tensor], scaling: float, forward_batch: ForwardBatch
    ) -> Tensor:
        """Return the result of attention, [1, tokens, heads * dim]."""
        out, _weights = tree_attention(
            layer,
            *qkv,
            None,
            forward_batch=forward_batch,
            scaling=scaling,
            key_bias=self.key_bias,
        )
        return out.flatten(2)


class Falcon(_Replacement):
    """A loaded `FalconForCausalLM`, with tree attention."""

    names = ("word_embeddings", "h", "ln_f")

    def __init__(self, model: Any) -> None:
        super().__init__(model, _falcon_key_bias(model.config) if model.config.alibi else None)

    def _rotary(self, hidden: Tensor, position_ids: Tensor) -> _Rotary:
        if self.config.alibi:
            return None
        rotary: tuple[Tensor, Tensor] = self.trunk.rotary_emb(hidden, position_ids=position_ids)
        return rotary

    def _block(
        self, layer: nn.Module, block: Any, hidden: Tensor, rotary: _Rotary, forward_batch: ForwardBatch
    ) -> Tensor:
        config = self.config
        if config.new_decoder_architecture and config.num_ln_in_parallel_attn == 2:
            attention_in, mlp_in = block.ln_attn(hidden), block.ln_mlp(hidden)
        else:
            attention_in = mlp_in = block.input_layernorm(hidden)
        attended = self._attention(layer, block.self_attention, attention_in, rotary, forward_batch)
        if not config.new_decoder_architecture and not config.parallel_attn:
            hidden = hidden + attended
            out: Tensor = hidden + block.mlp(block.post_attention_layernorm(hidden))
        else:
            out = hidden + attended + block.mlp(mlp_in)
        return out

    def _attention(
        self,
        layer: nn.Module,
        attention: Any,
        hidden: Tensor,
        rotary: _Rotary,
        forward_batch: ForwardBatch,
    ) -> Tensor:
        q, k, v = _split_falcon(attention, attention.query_key_value(hidden))
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        out = self._attend(layer, (q, k, v), attention.inv_norm_factor, forward_batch)
        return attention.dense(out)  # type: ignore[no-any-return]


def _split_falcon(attention: Any, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value, each [1, heads, tokens, dim]; the fused layout depends on Falcon's generation."""
    if attention.new_decoder_architecture:
        per_group = attention.num_heads // attention.num_kv_heads
        fused = fused.unflatten(2, (attention.num_kv_heads, per_group + 2, attention.head_dim))
        q, k, v = fused[..., :-2, :].flatten(2, 3), fused[..., -2, :], fused[..., -1, :]
    elif attention.multi_query:
        fused = fused.unflatten(2, (attention.num_heads + 2, attention.head_dim))
        q, k, v = fused[:, :, :-2], fused[:, :, -2:-1], fused[:, :, -1:]
    else:
        fused = fused.unflatten(2, (attention.num_heads, 3, attention.head_dim))
        q, k, v = fused[..., 0, :], fused[..., 1, :], fused[..., 2, :]
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [1, heads, tokens, dim] in halves by [1, tokens, dim] cosines and sines."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def _alibi_slopes(heads: int) -> list[float]:
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 / power * (i + 1)) for i in range(power)]
    return slopes + [2 ** (-4 / power * (2 * i + 1)) for i in range(heads - power)]


def _falcon_key_bias(config: Any) -> Tensor:
    """Return the [heads, positions] ALiBi bias, rounded to bfloat16 as in Falcon's training, scaled like its scores."""
    heads = config.num_attention_heads
    positions = torch.arange(config.max_position_embeddings)
    bias = torch.tensor(_alibi_slopes(heads)).bfloat16().unsqueeze(1) * positions
    return bias.float() / math.sqrt(config.hidden_size // heads)


class Mpt(_Replacement):
    """A loaded `MptForCausalLM`, with tree attention."""

    names = ("wte", "blocks", "norm_f")

    def __init__(self, model: Any) -> None:
        last = model.transformer.build_mpt_alibi_tensor(model.config.n_heads, 2).squeeze(1)  # slope * (-1, 0)
        super().__init__(model, -last[:, :1] * torch.arange(model.config.max_seq_len))

    def _block(
        self, layer: nn.Module, block: Any, hidden: Tensor, rotary: _Rotary, forward_batch: ForwardBatch
    ) -> Tensor:
        del rotary
        attention = block.attn
        mixed = attention.Wqkv(block.norm_1(hidden))
        if attention.clip_qkv:
            mixed = mixed.clamp(-attention.clip_qkv, attention.clip_qkv)
        q, k, v = mixed.unflatten(2, (3, attention.n_heads, -1)).permute(2, 0, 3, 1, 4)
        hidden = hidden + attention.out_proj(self._attend(layer, (q, k, v), attention.softmax_scale, forward_batch))
        return block.ffn(block.norm_2(hidden), hidden)  # type: ignore[no-any-return]


class Bloom(_Replacement):
    """A loaded `BloomForCausalLM`, with tree attention."""

    names = ("word_embeddings", "h", "ln_f")

    def __init__(self, model: Any) -> None:
        slopes = torch.tensor(_alibi_slopes(model.config.n_head))
        super().__init__(model, slopes.unsqueeze(1) * torch.arange(max_position_of(model.config)))

    def _embedded(self, hidden: Tensor) -> Tensor:
        return self.trunk.word_embeddings_layernorm(hidden)  # type: ignore[no-any-return]

    def _block(
        self, layer: nn.Module, block: Any, hidden: Tensor, rotary: _Rotary, forward_batch: ForwardBatch
    ) -> Tensor:
        del rotary
        attention, adds_normed = block.self_attention, self.config.apply_residual_connection_post_layernorm
        normed = block.input_layernorm(hidden)
        q, k, v = attention.query_key_value(normed).unflatten(2, (-1, 3, attention.head_dim)).permute(3, 0, 2, 1, 4)
        out = self._attend(layer, (q, k, v), attention.inv_norm_factor, forward_batch)
        hidden = attention.dense(out) + (normed if adds_normed else hidden)
        normed = block.post_attention_layernorm(hidden)
        return block.mlp(normed, normed if adds_normed else hidden)  # type: ignore[no-any-return]


REPLACED: dict[str, type[nn.Module]] = {"bloom": Bloom, "falcon": Falcon, "mpt": Mpt}
