"""Parts of transformers' definitions that do not hand keywords on to the layers that are replaced, in some versions."""

from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from specinfer.model.batch import ForwardBatch
from specinfer.model.recurrent.mixer import Adopted


class Lfm2Layer(Adopted):
    """A loaded decoder layer of LFM2, with attention or a short convolution."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.is_attention_layer: bool = layer.is_attention_layer

    def forward(self, hidden_states: Tensor, forward_batch: ForwardBatch, **more: Any) -> Tensor:
        normed = self.operator_norm(hidden_states)
        if self.is_attention_layer:
            mixed = self.self_attn(hidden_states=normed, forward_batch=forward_batch, **more)[0]
        else:
            mixed = self.conv(normed, forward_batch=forward_batch)
        hidden = hidden_states + mixed
        out: Tensor = hidden + self.feed_forward(self.ffn_norm(hidden))
        return out


class MixerLayer(Adopted):
    """A loaded decoder layer with one norm and one mixer: of Nemotron-H, Mamba, Falcon-Mamba or Mamba-2."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        # Nemotron-H's blocks may also be attention, an MLP or experts.
        self.block_type = getattr(layer, "block_type", "linear_attention")
        self.residual_in_fp32 = not hasattr(layer, "block_type") and bool(layer.residual_in_fp32)

    def forward(self, hidden_states: Tensor, forward_batch: ForwardBatch, **more: Any) -> Tensor:
        weight = self.norm.weight
        assert isinstance(weight, Tensor)
        normed = self.norm(hidden_states.to(weight.dtype))
        if self.block_type == "full_attention":
            mixed = self.mixer(hidden_states=normed, forward_batch=forward_batch, **more)[0]
        elif self.block_type == "linear_attention":
            mixed = self.mixer(normed, forward_batch=forward_batch)
        else:
            mixed = self.mixer(normed)
        out: Tensor = (hidden_states.float() if self.residual_in_fp32 else hidden_states) + mixed
        return out


class JambaMambaLayer(Adopted):
    """A loaded decoder layer of Jamba without attention."""

    def forward(self, hidden_states: Tensor, forward_batch: ForwardBatch, **_: Any) -> Tensor:
        mixed = self.mamba(self.input_layernorm(hidden_states), forward_batch=forward_batch)
        hidden = hidden_states + mixed
        out: Tensor = hidden + self.feed_forward(self.pre_ff_layernorm(hidden))
        return out


class FalconH1Layer(Adopted):
    """A loaded decoder layer of Falcon-H1, with attention and a Mamba-2 layer side by side."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.in_factor: float = layer.attention_in_multiplier
        self.out_factor: float = layer.attn_out_multiplier
        self.recurrent_factor: float = layer.ssm_out_multiplier

    def forward(self, hidden_states: Tensor, forward_batch: ForwardBatch, **positions: Any) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        mixed = self.mamba(normed, forward_batch=forward_batch) * self.recurrent_factor
        attended, _ = self.self_attn(
            hidden_states=normed * self.in_factor, attention_mask=None, forward_batch=forward_batch, **positions
        )
        hidden = hidden_states + (mixed + attended * self.out_factor)
        out: Tensor = hidden + self.feed_forward(self.pre_ff_layernorm(hidden))
        return out


class FalconH1Model(nn.Module):
    """A loaded `FalconH1ForCausalLM`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config, self.model, self.lm_head = model.config, model.model, model.lm_head

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, forward_batch: ForwardBatch, **_: Any
    ) -> SimpleNamespace:
        hidden = self.model.embed_tokens(input_ids) * self.model.embedding_multiplier
        rotary = self.model.rotary_emb(hidden, position_ids=position_ids)
        for layer in self.model.layers:
            hidden = layer(hidden, forward_batch=forward_batch, position_ids=position_ids, position_embeddings=rotary)
        hidden = self.model.final_layernorm(hidden)[:, logits_to_keep]
        return SimpleNamespace(logits=self.lm_head(hidden) * self.model.lm_head_multiplier)


class MambaModel(nn.Module):
    """A loaded model of Mamba, Falcon-Mamba or Mamba-2 layers alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config, self.backbone, self.lm_head = model.config, model.backbone, model.lm_head

    def forward(
        self, input_ids: Tensor, logits_to_keep: Tensor, forward_batch: ForwardBatch, **_: Any
    ) -> SimpleNamespace:
        hidden = embedded = self.backbone.embeddings(input_ids)
        for block in self.backbone.layers:
            hidden = block(hidden, forward_batch=forward_batch)
        hidden = self.backbone.norm_f(hidden)[:, logits_to_keep]
        return SimpleNamespace(logits=self.lm_head(hidden.to(embedded.dtype)))
