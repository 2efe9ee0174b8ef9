"""Mamba layers on token trees: a short convolution, then a recurrence.

Sources: Mamba (Gu and Dao, arXiv 2312.00752): Mamba, Falcon-Mamba, Jamba; Transformers are SSMs (Dao and Gu, arXiv
2405.21060): Mamba-2.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specinfer.model.batch import ForwardBatch
from specinfer.model.recurrent.mixer import (
    EVENLY,
    Block,
    Blocks,
    Mixer,
    check_activation,
    convolve,
    store_inputs,
    store_more,
)
from specinfer.ops.cpu.recurrence import ConvolutionCall, HeadSizes, RecurrenceCall
from specinfer.ops.cpu.recurrent_layer import RecurrentParts


class Mamba(Mixer):
    """A Mamba layer: a recurrence with a decay by channel. What is projected from its inputs is stored, too."""

    counts = ("width",)

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        check_activation(layer.activation, "Mamba layers")
        self.rank, self.state_size, self.width = layer.time_step_rank, layer.ssm_state_size, layer.intermediate_size
        self.A_log, self.D = layer.A_log, layer.D

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.state_size, self.width)

    @property
    def blocks(self) -> Blocks:
        evenly = dict.fromkeys(("conv1d", "dt_proj", "A_log", "D"), EVENLY)
        return {**evenly, "in_proj": (Block(self.width),) * 2, "x_proj": None, "out_proj": None}

    def forward(self, hidden_states: Tensor, forward_batch: ForwardBatch, **_: Any) -> Tensor:
        batch, layer = forward_batch, self.layer_idx
        inputs, gate = self.in_proj(hidden_states[0]).chunk(2, dim=-1)
        store_inputs(batch, layer, inputs, inputs.new_empty(len(inputs), self.rank + 2 * self.state_size))
        mixed = convolve(batch, layer, self.calls[0])
        widths = [self.rank, self.state_size, self.state_size]
        parts = self.x_proj(mixed[batch.scan.new].to(inputs.dtype)).split(widths, dim=-1)
        if hasattr(self, "dt_layernorm"):  # Mamba's first models have no norms
            norms = (self.dt_layernorm, self.b_layernorm, self.c_layernorm)
            parts = [norm(part) for norm, part in zip(norms, parts, strict=True)]
        projected = torch.cat(parts, dim=-1)
        store_more(batch, layer, projected)
        out = self._recur(batch, mixed) * functional.silu(gate.float())
        result: Tensor = self.out_proj(out.to(inputs.dtype))
        return result.unsqueeze(0)

    @cached_property
    def calls(self) -> tuple[ConvolutionCall, RecurrenceCall]:
        states, width = self.state_size, self.width
        sizes = HeadSizes(1, 1, states, width, 2 * states + width, query=states, key=0, value=2 * states)
        recurrence = RecurrenceCall(sizes, None, -self.A_log.float().exp().T, decays="column")
        return ConvolutionCall(self.conv1d.weight, self.conv1d.bias, activates=True), recurrence

    def _recur(self, batch: ForwardBatch, x: Tensor) -> Tensor:
        """Return the [tokens, width] float32 results of the recurrence; x: [scanned, width] its inputs."""
        stored = batch.store.values[self.layer_idx][batch.scan.paths(1)[:, 0], 0]
        low, ends = stored.split([self.rank, 2 * self.state_size], dim=-1)
        steps: Tensor = functional.softplus(self.dt_proj(low).float())
        rest: Tensor = self.D.float() * x[batch.scan.new]
        return rest + self.recur_channels(batch, torch.cat([ends.float(), steps * x], dim=-1), steps)


class Mamba2(Mixer):
    """A Mamba-2 layer: a linear recurrence with a decay for each head, of which one number is stored.

    Args:
        num_before: Number of layers that store before the first such layer; they are numbered together.
    """

    def __init__(self, layer: Any, num_before: int = 0) -> None:
        super().__init__(layer, layer.layer_idx + num_before)
        check_activation(layer.activation, "Mamba-2 layers")
        self.num_heads, self.head_dim, self.num_groups = layer.num_heads, layer.head_dim, layer.n_groups
        self.state_size, self.step_limits = layer.ssm_state_size, layer.time_step_limit
        self.dt_bias, self.A_log, self.D = layer.dt_bias, layer.A_log, layer.D
        # Falcon-H1: factors, a norm that may be left out, and attention in the same layer, which stores in its place.
        self.in_factor: float = getattr(layer, "ssm_in_multiplier", 1.0)
        factors = getattr(layer, "mup_vector", None)
        self.factors: Tensor | None
        self.register_buffer("factors", None if factors is None else factors.view(-1), persistent=False)
        self.has_norm: bool = getattr(layer, "mamba_rms_norm", True)

    @property
    def can_fuse(self) -> bool:  # type: ignore[override]
        """True if `parts` describes it; a norm over the heads of several ranks is not described."""
        return not self.has_norm or hasattr(self.norm, "variance_epsilon")

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.num_heads, self.state_size, self.head_dim)

    @property
    def counts(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("num_heads",) if self.num_groups == 1 else ("num_heads", "num_groups")

    @property
    def blocks(self) -> Blocks:
        heads, values = Block(self.num_heads), Block(self.num_heads * self.head_dim)
        ends = (Block(self.num_groups * self.state_size, is_split=self.num_groups > 1),) * 2
        projected = (values, values, *ends, heads)
        norm = ("norm",) if self.has_norm else ()  # over all heads
        evenly = dict.fromkeys(("A_log", "D", "dt_bias", *norm), EVENLY)
        factors = {} if self.factors is None else {"factors": projected}
        return {**evenly, **factors, "in_proj": projected, "conv1d": (values, *ends), "out_proj": None}

    def forward(self, hidden_states: Tensor, forward_batch: ForwardBatch, **_: Any) -> Tensor:
        width, groups = self.num_heads * self.head_dim, self.num_groups * self.state_size
        projected = self.in_proj(hidden_states[0] * self.in_factor)
        projected = projected if self.factors is None else projected * self.factors.to(projected.dtype)
        gate, inputs, steps = projected.split([width, width + 2 * groups, self.num_heads], dim=-1)
        out = self.recur(forward_batch, inputs, steps).flatten(1)
        out = self.norm(out, gate) if self.has_norm else out * functional.silu(gate.float())
        mixed: Tensor = self.out_proj(out.to(inputs.dtype))
        return mixed.unsqueeze(0)

    def parts(self) -> RecurrentParts:
        """Return the layer between its linear layers, for fused layers."""
        width = self.num_heads * self.head_dim
        convolution, recurrence = self.calls
        parts = RecurrentParts(
            convolution, recurrence, inputs=width, gates=0, steps=width + recurrence.sizes.num_channels,
            opens_first=True,
        )  # fmt: skip
        if not self.has_norm:
            return parts
        norm, weight = self.norm, self.norm.weight.detach().float()
        # Before transformers 5.21 some families have one norm over all heads.
        whole = len(weight) // getattr(norm, "n_groups", 1)
        group = getattr(norm, "group_size", whole)
        opens_first = not getattr(norm, "norm_before_gate", False)
        return replace(parts, norm=weight, group=group, eps=norm.variance_epsilon, opens_first=opens_first)

    @cached_property
    def calls(self) -> tuple[ConvolutionCall, RecurrenceCall]:
        width, groups = self.num_heads * self.head_dim, self.num_groups * self.state_size
        sizes = HeadSizes(
            self.num_heads, self.num_groups, self.state_size, self.head_dim, width + 2 * groups,
            query=width + groups, key=width, value=0,
        )  # fmt: skip
        convolution = ConvolutionCall(self.conv1d.weight, self.conv1d.bias, activates=True)
        decay = -self.A_log.float().exp()
        return convolution, RecurrenceCall(sizes, self.dt_bias, decay, self.D, self.step_limits)
