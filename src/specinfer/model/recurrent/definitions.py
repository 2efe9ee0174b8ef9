"""Parts of transformers' definitions that do not hand keywords on to the layers that are replaced."""

from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from specinfer.model.batch import ForwardBatch


class JambaMambaLayer(nn.Module):
    """A loaded decoder layer of Jamba without attention."""

    mamba: nn.Module
    feed_forward: nn.Module
    input_layernorm: nn.Module
    pre_ff_layernorm: nn.Module

    def __init__(self, layer: Any) -> None:
        super().__init__()
        for name, module in layer.named_children():
            self.add_module(name, module)

    def forward(self, hidden_states: Tensor, forward_batch: ForwardBatch, **_: Any) -> Tensor:
        mixed = self.mamba(self.input_layernorm(hidden_states), forward_batch=forward_batch)
        hidden = hidden_states + mixed
        out: Tensor = hidden + self.feed_forward(self.pre_ff_layernorm(hidden))
        return out


class Mamba2Model(nn.Module):
    """A loaded `Mamba2ForCausalLM`."""

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
