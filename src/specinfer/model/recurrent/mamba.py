"""Mamba layers (Mamba, Falcon-Mamba, Jamba) on token trees: a convolution, then a recurrence with a decay by channel.

The inputs of the convolution are stored by slot, with what is projected from its results; states are kept as in
`states`.

Source: Mamba (Gu and Dao, arXiv 2312.00752).
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from specinfer.core.errors import ModelError
from specinfer.model.batch import ForwardBatch
from specinfer.model.recurrent.definitions import adopt
from specinfer.model.recurrent.recurrence import convolve, recur_channels
from specinfer.model.recurrent.short_conv import store_inputs, store_more
from specinfer.model.recurrent.split import EVENLY, Block, Blocks
from specinfer.ops.cpu.recurrence import ConvolutionCall, HeadSizes, RecurrenceCall


class Mamba(nn.Module):
    """A loaded Mamba layer, on token trees."""

    counts = ("width",)

    conv1d: nn.Conv1d
    in_proj: nn.Linear
    x_proj: nn.Linear
    dt_proj: nn.Linear
    out_proj: nn.Linear
    dt_layernorm: nn.Module
    b_layernorm: nn.Module
    c_layernorm: nn.Module

    def __init__(self, layer: Any) -> None:
        super().__init__()
        if layer.activation != "silu":
            raise ModelError(f"model: the activation {layer.activation!r} of Mamba layers is not supported")
        self.layer_idx: int = layer.layer_idx
        self.rank, self.state_size, self.width = layer.time_step_rank, layer.ssm_state_size, layer.intermediate_size
        adopt(self, layer)
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
        convolution, recurrence = self._calls
        mixed = convolve(batch, batch.store.keys[layer], batch.scan.paths(convolution.num_taps), convolution)
        widths = [self.rank, self.state_size, self.state_size]
        parts = self.x_proj(mixed[batch.scan.new].to(inputs.dtype)).split(widths, dim=-1)
        if hasattr(self, "dt_layernorm"):  # Mamba's first models have no norms
            norms = (self.dt_layernorm, self.b_layernorm, self.c_layernorm)
            parts = [norm(part) for norm, part in zip(norms, parts, strict=True)]
        projected = torch.cat(parts, dim=-1)
        store_more(batch, layer, projected)
        out = self._recur(batch, recurrence, mixed) * functional.silu(gate.float())
        result: Tensor = self.out_proj(out.to(inputs.dtype))
        return result.unsqueeze(0)

    @cached_property
    def _calls(self) -> tuple[ConvolutionCall, RecurrenceCall]:
        states, width = self.state_size, self.width
        sizes = HeadSizes(1, 1, states, width, 2 * states + width, query=states, key=0, value=2 * states)
        recurrence = RecurrenceCall(sizes, None, -self.A_log.float().exp().T, decays="column")
        return ConvolutionCall(self.conv1d.weight, self.conv1d.bias, activates=True), recurrence

    def _recur(self, batch: ForwardBatch, call: RecurrenceCall, x: Tensor) -> Tensor:
        """Return the [tokens, width] float32 results of the recurrence; x: [scanned, width] its inputs."""
        stored = batch.store.values[self.layer_idx][batch.scan.paths(1)[:, 0], 0]
        low, ends = stored.split([self.rank, 2 * self.state_size], dim=-1)
        steps: Tensor = functional.softplus(self.dt_proj(low).float())
        rest: Tensor = self.D.float() * x[batch.scan.new]
        return rest + recur_channels(batch, self.layer_idx, call, torch.cat([ends.float(), steps * x], dim=-1), steps)
