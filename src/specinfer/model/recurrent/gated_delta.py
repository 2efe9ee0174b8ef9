"""Gated delta rule layers (Qwen3-Next, Qwen3.5, OLMo Hybrid) on token trees: a short convolution, then a recurrence.

A head's state is a matrix. A token lets it decay, and moves what it returns for the token's key towards the token's
value by the share beta. What a token adds is small next to a state: the inputs of its convolution and two numbers
for each head are stored by slot. States are kept only after known tokens (`states`).

Source: Gated Delta Networks (Yang et al., arXiv 2412.06464).
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from specinfer.core.errors import ModelError
from specinfer.model.batch import ForwardBatch
from specinfer.model.recurrent.definitions import adopt
from specinfer.model.recurrent.recurrence import recur
from specinfer.model.recurrent.short_conv import store_inputs
from specinfer.model.recurrent.split import EVENLY, Block, Blocks
from specinfer.ops.cpu.recurrence import ConvolutionCall, HeadSizes, RecurrenceCall
from specinfer.ops.cpu.recurrent_layer import RecurrentParts


class GatedDelta(nn.Module):
    """A loaded gated delta rule layer, on token trees."""

    counts = ("num_k_heads", "num_v_heads")
    can_fuse = True

    # Submodules keep the names of transformers, some of which only one family has.
    in_proj_qkvz: nn.Linear
    in_proj_ba: nn.Linear
    in_proj_qkv: nn.Linear
    in_proj_z: nn.Linear
    in_proj_b: nn.Linear
    in_proj_a: nn.Linear
    conv1d: nn.Conv1d
    norm: Any
    out_proj: nn.Linear
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    a_proj: nn.Linear
    b_proj: nn.Linear
    g_proj: nn.Linear
    o_norm: nn.Module
    o_proj: nn.Linear

    def __init__(self, layer: Any) -> None:
        super().__init__()
        if layer.activation != "silu":
            raise ModelError(f"model: hidden_act {layer.activation!r} of layers with a delta rule is not supported")
        self.layer_idx: int = layer.layer_idx
        self.num_k_heads, self.num_v_heads = layer.num_k_heads, layer.num_v_heads
        self.head_k_dim, self.head_v_dim = layer.head_k_dim, layer.head_v_dim
        adopt(self, layer)
        self.dt_bias, self.A_log = layer.dt_bias, layer.A_log
        self.max_beta = 2.0 if getattr(layer, "allow_neg_eigval", False) else 1.0

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.num_v_heads, self.head_k_dim, self.head_v_dim)

    @property
    def blocks(self) -> Blocks:
        keys, values = Block(self.num_k_heads * self.head_k_dim), Block(self.num_v_heads * self.head_v_dim)
        linear = {name for name, child in self.named_children() if isinstance(child, nn.Linear)}
        special = dict.fromkeys({"in_proj_qkv"} & linear | {"conv1d"}, (keys, keys, values))
        last = dict.fromkeys({"out_proj", "o_proj"} & linear)
        return dict.fromkeys((*linear, "A_log", "dt_bias"), EVENLY) | special | last

    def forward(self, hidden_states: Tensor, forward_batch: ForwardBatch, **_: Any) -> Tensor:
        inputs, gate, rates = self._project(hidden_states[0])
        store_inputs(forward_batch, self.layer_idx, inputs, rates)
        out = recur(forward_batch, self.layer_idx, *self._calls)
        out = out.to(inputs.dtype)
        norm, project = (self.o_norm, self.o_proj) if hasattr(self, "o_proj") else (self.norm, self.out_proj)
        normed = norm(out.flatten(0, 1), gate.reshape(-1, self.head_v_dim))
        mixed: Tensor = project(normed.view(len(out), -1))
        return mixed.unsqueeze(0)

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of the convolution, the gate of the output, and beta and decay before activation."""
        if hasattr(self, "q_proj"):  # OLMo
            inputs, rates = (
                torch.cat([project(hidden) for project in parts], dim=-1)
                for parts in ((self.q_proj, self.k_proj, self.v_proj), (self.b_proj, self.a_proj))
            )
            return inputs, self.g_proj(hidden), rates
        if not hasattr(self, "in_proj_qkvz"):
            return self.in_proj_qkv(hidden), self.in_proj_z(hidden), torch.cat(
                [self.in_proj_b(hidden), self.in_proj_a(hidden)], dim=-1
            )  # fmt: skip
        return self._by_kind(self.in_proj_qkvz(hidden), self.in_proj_ba(hidden))

    def _by_kind(self, mixed: Tensor, rates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs of Qwen3-Next, which has those of a key head together, as `_project` returns them."""
        values = self.num_v_heads // self.num_k_heads * self.head_v_dim
        mixed = mixed.unflatten(-1, (self.num_k_heads, -1))
        *qkv, gate = mixed.split([self.head_k_dim, self.head_k_dim, values, values], dim=-1)
        beta, decay = rates.unflatten(-1, (self.num_k_heads, -1)).chunk(2, dim=-1)
        inputs = torch.cat([one.flatten(1) for one in qkv], dim=-1)
        return inputs, gate.flatten(1), torch.cat([beta.flatten(1), decay.flatten(1)], dim=-1)

    def parts(self) -> RecurrentParts:
        """Return the layer between its linear layers, for fused layers: it reads inputs, gates, betas and steps."""
        convolution, recurrence = self._calls
        channels = recurrence.sizes.num_channels
        norm: Any = self.o_norm if hasattr(self, "o_norm") else self.norm
        weight = norm.weight.detach().float().repeat(self.num_v_heads)
        return RecurrentParts(
            convolution, recurrence, inputs=0, gates=channels, steps=channels + len(weight),
            norm=weight, group=self.head_v_dim, eps=norm.variance_epsilon, order=self._order(),
        )  # fmt: skip

    def _order(self) -> Tensor | None:
        """Return [columns] the output that each column comes from, or None if they are in order."""
        if not hasattr(self, "in_proj_qkvz"):
            return None
        sizes = [self.in_proj_qkvz.out_features, self.in_proj_ba.out_features]
        columns = torch.arange(sum(sizes), device="cpu").unsqueeze(0).split(sizes, dim=1)
        return torch.cat(self._by_kind(columns[0], columns[1]), dim=1)[0].contiguous()

    @cached_property
    def _calls(self) -> tuple[ConvolutionCall, RecurrenceCall]:
        heads, keys = (self.num_v_heads, self.num_k_heads), self.num_k_heads * self.head_k_dim
        width = 2 * keys + self.num_v_heads * self.head_v_dim
        sizes = HeadSizes(*heads, self.head_k_dim, self.head_v_dim, width, query=0, key=keys, value=2 * keys)
        convolution = ConvolutionCall(self.conv1d.weight, self.conv1d.bias, activates=True)
        decay, limits = -self.A_log.float().exp(), (0.0, self.max_beta)
        return convolution, RecurrenceCall(sizes, self.dt_bias, decay, limits=limits, is_delta=True)
