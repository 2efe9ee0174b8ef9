"""Delta rule layers on token trees: a short convolution, then a recurrence.

A head's state is a matrix. A token lets it decay, and moves what it returns for the token's key towards the token's
value by the share beta. What a token adds is small next to a state: the inputs of its convolution and some numbers are
stored by slot.

Sources: Gated Delta Networks (Yang et al., arXiv 2412.06464): Qwen3-Next, Qwen3.5, OLMo Hybrid; Kimi Linear (Kimi Team,
arXiv 2510.26692): Kimi Linear, Bailing Hybrid.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from specinfer.model.batch import ForwardBatch
from specinfer.model.recurrent.mixer import EVENLY, Block, Blocks, Mixer, check_activation
from specinfer.ops.cpu.recurrence import ConvolutionCall, HeadSizes, RecurrenceCall
from specinfer.ops.cpu.recurrent_layer import RecurrentParts


class GatedDelta(Mixer):
    """A gated delta rule layer. Submodules keep the names of transformers, some of which only one family has."""

    counts = ("num_k_heads", "num_v_heads")
    can_fuse = True

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        check_activation(layer.activation, "layers with a delta rule")
        self.num_k_heads, self.num_v_heads = layer.num_k_heads, layer.num_v_heads
        self.head_k_dim, self.head_v_dim = layer.head_k_dim, layer.head_v_dim
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
        out = self.recur(forward_batch, inputs, rates).to(inputs.dtype)
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
            rates = torch.cat([self.in_proj_b(hidden), self.in_proj_a(hidden)], dim=-1)
            return self.in_proj_qkv(hidden), self.in_proj_z(hidden), rates
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
        """Return the layer between its linear layers, for native layers: it reads inputs, gates, betas and steps."""
        convolution, recurrence = self.calls
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
    def calls(self) -> tuple[ConvolutionCall, RecurrenceCall]:
        heads, keys = (self.num_v_heads, self.num_k_heads), self.num_k_heads * self.head_k_dim
        width = 2 * keys + self.num_v_heads * self.head_v_dim
        sizes = HeadSizes(*heads, self.head_k_dim, self.head_v_dim, width, query=0, key=keys, value=2 * keys)
        convolution = ConvolutionCall(self.conv1d.weight, self.conv1d.bias, activates=True)
        decay, limits = -self.A_log.float().exp(), (0.0, self.max_beta)
        return convolution, RecurrenceCall(sizes, self.dt_bias, decay, limits=limits, is_delta=True)


class KimiDelta(Mixer):
    """A delta rule layer with a decay for each channel: a token stores one number for that of each head."""

    counts = ("num_heads",)

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        check_activation(layer.activation, "layers with a delta rule")
        self.num_heads, self.head_dim = layer.num_heads, layer.head_dim
        gate = layer.forget_gate
        # Bailing: the logarithm of what is kept is limited by a sigmoid instead of growing as a softplus does.
        self.least_decay: float | None = gate.lower_bound if getattr(gate, "safe_gate", False) else None

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.num_heads, self.head_dim, self.head_dim)

    @property
    def blocks(self) -> Blocks:
        evenly = ("q_proj", "k_proj", "v_proj", "b_proj", "forget_gate.dt_bias")
        gates = ("g_proj", "forget_gate.f_proj") if hasattr(self, "g_proj") else ("g_b_proj", "forget_gate.f_b_proj")
        rest = {"conv1d": (Block(self.num_heads * self.head_dim),) * 3, "forget_gate.A_log": (Block(self.num_heads),)}
        return {**dict.fromkeys((*evenly, *gates), EVENLY), **rest, "o_proj": None}

    def forward(self, hidden_states: Tensor, forward_batch: ForwardBatch, **_: Any) -> Tensor:
        hidden: Tensor = hidden_states[0]
        forget = self.forget_gate
        inputs = torch.cat([one(hidden) for one in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)
        if hasattr(self, "g_proj"):
            gate, decay = self.g_proj(hidden), forget.f_proj(hidden)
        else:
            gate, decay = self.g_b_proj(self.g_a_proj(hidden)), forget.f_b_proj(forget.f_a_proj(hidden))
        rates = torch.cat([self.b_proj(hidden), decay], dim=-1)
        out = self.recur(forward_batch, inputs, rates).to(inputs.dtype)
        normed = self.o_norm(out.flatten(0, 1), gate.reshape(-1, self.head_dim))
        mixed: Tensor = self.o_proj(normed.view(len(out), -1))
        return mixed.unsqueeze(0)

    @cached_property
    def calls(self) -> tuple[ConvolutionCall, RecurrenceCall]:
        heads, dim, gate = self.num_heads, self.head_dim, self.forget_gate
        width = heads * dim
        sizes = HeadSizes(heads, heads, dim, dim, 3 * width, query=0, key=width, value=2 * width)
        decay, limits = -gate.A_log.float().exp().flatten(), (self.least_decay or 0.0, 1.0)
        recurrence = RecurrenceCall(sizes, gate.dt_bias, decay, limits=limits, is_delta=True, decays="key")
        return ConvolutionCall(self.conv1d.weight, self.conv1d.bias, activates=True), recurrence
