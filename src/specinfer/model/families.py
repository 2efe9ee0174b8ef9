"""Families whose definition in transformers bypasses the attention interface and adds ALiBi: BLOOM, Falcon and MPT.

The loaded submodules and their weights are kept. Only the loop over layers and the
attention call are replaced. ALiBi is passed as a bias by key position.
"""

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from specinfer.model.attention import tree_attention
from specinfer.model.batch import ForwardBatch
from specinfer.model.context_length import max_position_of
from specinfer.model.sharding.placeholder import End, Placeholder, StageEnd


class _Layer(nn.Module):
    """The attributes of an attention module that the attention function reads."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx


class Falcon(nn.Module):
    """A loaded `FalconForCausalLM`, with tree attention."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config = model.config
        self.trunk, self.lm_head = model.transformer, model.lm_head
        self.layers = nn.ModuleList(_Layer(i) for i in range(len(self.trunk.h)))
        bias = _falcon_key_bias(self.config) if self.config.alibi else None
        self.key_bias: Tensor | None
        self.register_buffer("key_bias", bias, persistent=False)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, forward_batch: ForwardBatch, **_: Any
    ) -> SimpleNamespace:
        hidden = self.trunk.word_embeddings(input_ids) if forward_batch.hidden is None else forward_batch.hidden
        rotary = None if self.config.alibi else self.trunk.rotary_emb(hidden, position_ids=position_ids)
        for layer, block in zip(self.layers, self.trunk.h, strict=True):
            if not isinstance(block, Placeholder):
                # The block is transformers' own; only its attention submodule is replaced.
                hidden = self._block(layer, block, hidden, rotary, forward_batch)
            elif isinstance(block, End):
                raise StageEnd(hidden)
        hidden = self.trunk.ln_f(hidden)
        return SimpleNamespace(logits=self.lm_head(hidden[:, logits_to_keep]))

    def _block(
        self,
        layer: nn.Module,
        block: Any,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        forward_batch: ForwardBatch,
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
        rotary: tuple[Tensor, Tensor] | None,
        forward_batch: ForwardBatch,
    ) -> Tensor:
        q, k, v = _split_falcon(attention, attention.query_key_value(hidden))
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        out, _weights = tree_attention(
            layer, q, k, v, None, forward_batch=forward_batch,
            scaling=attention.inv_norm_factor, key_bias=self.key_bias,
        )  # fmt: skip
        return attention.dense(out.flatten(2))  # type: ignore[no-any-return]


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


class Mpt(nn.Module):
    """A loaded `MptForCausalLM`, with tree attention."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config = model.config
        self.trunk, self.lm_head = model.transformer, model.lm_head
        self.layers = nn.ModuleList(_Layer(i) for i in range(len(self.trunk.blocks)))
        last = self.trunk.build_mpt_alibi_tensor(self.config.n_heads, 2).squeeze(1)  # slope * (-1, 0)
        positions = torch.arange(self.config.max_seq_len)
        self.key_bias: Tensor
        self.register_buffer("key_bias", -last[:, :1] * positions, persistent=False)  # [heads, positions]

    def forward(
        self, input_ids: Tensor, logits_to_keep: Tensor, forward_batch: ForwardBatch, **_: Any
    ) -> SimpleNamespace:
        hidden = self.trunk.wte(input_ids) if forward_batch.hidden is None else forward_batch.hidden
        for layer, block in zip(self.layers, self.trunk.blocks, strict=True):
            if isinstance(block, End):
                raise StageEnd(hidden)
            if isinstance(block, Placeholder):
                continue
            attention = block.attn
            mixed = attention.Wqkv(block.norm_1(hidden))
            if attention.clip_qkv:
                mixed = mixed.clamp(-attention.clip_qkv, attention.clip_qkv)
            q, k, v = mixed.unflatten(2, (3, attention.n_heads, -1)).permute(2, 0, 3, 1, 4)
            out, _weights = tree_attention(
                layer, q, k, v, None, forward_batch=forward_batch,
                scaling=attention.softmax_scale, key_bias=self.key_bias,
            )  # fmt: skip
            hidden = hidden + attention.out_proj(out.flatten(2))
            hidden = block.ffn(block.norm_2(hidden), hidden)
        return SimpleNamespace(logits=self.lm_head(self.trunk.norm_f(hidden)[:, logits_to_keep]))


class Bloom(nn.Module):
    """A loaded `BloomForCausalLM`, with tree attention."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config = model.config
        self.trunk, self.lm_head = model.transformer, model.lm_head
        self.layers = nn.ModuleList(_Layer(i) for i in range(len(self.trunk.h)))
        slopes = torch.tensor(_alibi_slopes(self.config.n_head))
        self.key_bias: Tensor
        bias = slopes.unsqueeze(1) * torch.arange(max_position_of(self.config))
        self.register_buffer("key_bias", bias, persistent=False)  # [heads, positions]

    def forward(
        self, input_ids: Tensor, logits_to_keep: Tensor, forward_batch: ForwardBatch, **_: Any
    ) -> SimpleNamespace:
        hidden = forward_batch.hidden
        if hidden is None:
            hidden = self.trunk.word_embeddings_layernorm(self.trunk.word_embeddings(input_ids))
        for layer, block in zip(self.layers, self.trunk.h, strict=True):
            if isinstance(block, End):
                raise StageEnd(hidden)
            if isinstance(block, Placeholder):
                continue
            attention, adds_normed = block.self_attention, self.config.apply_residual_connection_post_layernorm
            normed = block.input_layernorm(hidden)
            q, k, v = attention.query_key_value(normed).unflatten(2, (-1, 3, attention.head_dim)).permute(3, 0, 2, 1, 4)
            out, _weights = tree_attention(
                layer, q, k, v, None, forward_batch=forward_batch,
                scaling=attention.inv_norm_factor, key_bias=self.key_bias,
            )  # fmt: skip
            hidden = attention.dense(out.flatten(2)) + (normed if adds_normed else hidden)
            normed = block.post_attention_layernorm(hidden)
            hidden = block.mlp(normed, normed if adds_normed else hidden)
        return SimpleNamespace(logits=self.lm_head(self.trunk.ln_f(hidden)[:, logits_to_keep]))


REPLACED: dict[str, type[nn.Module]] = {"bloom": Bloom, "falcon": Falcon, "mpt": Mpt}
