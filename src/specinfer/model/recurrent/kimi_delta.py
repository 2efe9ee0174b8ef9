"""Delta rule layers with a decay for each key channel (Kimi Linear, Bailing Hybrid) on token trees.

As `gated_delta`, but a token stores one number for the decay of each channel of each head.

Source: Kimi Linear (Kimi Team, arXiv 2510.26692).
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


class KimiDelta(nn.Module):
    """A loaded delta rule layer with a decay for each channel, on token trees."""

    counts = ("num_heads",)

    conv1d: nn.Conv1d
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    b_proj: nn.Linear
    g_a_proj: nn.Linear
    g_b_proj: nn.Linear
    g_proj: nn.Linear
    forget_gate: nn.Module
    o_norm: nn.Module
    o_proj: nn.Linear

    def __init__(self, layer: Any) -> None:
        super().__init__()
        if layer.activation != "silu":
            raise ModelError(f"model: hidden_act {layer.activation!r} of layers with a delta rule is not supported")
        self.layer_idx: int = layer.layer_idx
        self.num_heads, self.head_dim = layer.num_heads, layer.head_dim
        gate = layer.forget_gate
        # Bailing: the logarithm of what is kept is limited by a sigmoid instead of growing as a softplus does.
        self.least_decay: float | None = gate.lower_bound if getattr(gate, "safe_gate", False) else None
        adopt(self, layer)

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.num_heads, self.head_dim, self.head_dim)

    @property
    def blocks(self) -> Blocks:
        evenly = ("q_proj", "k_proj", "v_proj", "b_proj", "forget_gate.dt_bias")
        gates = ("g_proj", "forget_gate.f_proj") if hasattr(self, "g_proj") else ("g_b_proj", "forget_gate.f_b_proj")
        rest = {"conv1d": (Block(self.num_heads * self.head_dim),) * 3, "forget_gate.A_log": (Block(self.num_heads),)}
        return {**dict.fromkeys((*evenly, *gates), EVENLY), **rest, "o_proj": None}

    @property
    def _gate(self) -> Any:
        return self.forget_gate

    def forward(self, hidden_states: Tensor, forward_batch: ForwardBatch, **_: Any) -> Tensor:
        hidden: Tensor = hidden_states[0]
        inputs, forget = torch.cat([one(hidden) for one in (self.q_proj, self.k_proj, self.v_proj)], dim=-1), self._gate
        if hasattr(self, "g_proj"):
            gate, decay = self.g_proj(hidden), forget.f_proj(hidden)
        else:
            gate, decay = self.g_b_proj(self.g_a_proj(hidden)), forget.f_b_proj(forget.f_a_proj(hidden))
        store_inputs(forward_batch, self.layer_idx, inputs, torch.cat([self.b_proj(hidden), decay], dim=-1))
        out = recur(forward_batch, self.layer_idx, *self._calls)
        out = out.to(inputs.dtype)
        normed = self.o_norm(out.flatten(0, 1), gate.reshape(-1, self.head_dim))
        mixed: Tensor = self.o_proj(normed.view(len(out), -1))
        return mixed.unsqueeze(0)

    @cached_property
    def _calls(self) -> tuple[ConvolutionCall, RecurrenceCall]:
        heads, dim, gate = self.num_heads, self.head_dim, self._gate
        width = heads * dim
        sizes = HeadSizes(heads, heads, dim, dim, 3 * width, query=0, key=width, value=2 * width)
        decay, limits = -gate.A_log.float().exp().flatten(), (self.least_decay or 0.0, 1.0)
        recurrence = RecurrenceCall(sizes, gate.dt_bias, decay, limits=limits, is_delta=True, decays="key")
        return ConvolutionCall(self.conv1d.weight, self.conv1d.bias, activates=True), recurrence
