"""Mamba-2 layers on token trees: a short convolution, then a linear recurrence with a decay for each head.

The inputs of the convolution and one number for each head are stored by slot; states are kept as in `states`.

Source: Transformers are SSMs (Dao and Gu, arXiv 2405.21060).
"""

from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from specinfer.core.errors import ModelError
from specinfer.model.batch import ForwardBatch
from specinfer.model.recurrent.definitions import adopt
from specinfer.model.recurrent.recurrence import recur
from specinfer.model.recurrent.short_conv import store_inputs
from specinfer.model.recurrent.split import EVENLY, Block, Blocks
from specinfer.ops.cpu.recurrence import ConvolutionCall, HeadSizes, RecurrenceCall
from specinfer.ops.cpu.recurrent_layer import RecurrentParts


class Mamba2(nn.Module):
    """A loaded Mamba-2 layer, on token trees.

    Args:
        num_before: Number of layers that store before the first such layer; they are numbered together.
    """

    conv1d: nn.Conv1d
    in_proj: nn.Linear
    norm: Any
    out_proj: nn.Linear

    def __init__(self, layer: Any, num_before: int = 0) -> None:
        super().__init__()
        if layer.activation != "silu":
            raise ModelError(f"model: the activation {layer.activation!r} of Mamba-2 layers is not supported")
        self.layer_idx: int = layer.layer_idx
        self.num_heads, self.head_dim, self.num_groups = layer.num_heads, layer.head_dim, layer.n_groups
        self.state_size, self.step_limits = layer.ssm_state_size, layer.time_step_limit
        adopt(self, layer)
        self.dt_bias, self.A_log, self.D = layer.dt_bias, layer.A_log, layer.D
        # Falcon-H1: factors, a norm that may be left out, and attention in the same layer, which stores in its place.
        self.in_factor: float = getattr(layer, "ssm_in_multiplier", 1.0)
        factors = getattr(layer, "mup_vector", None)
        self.factors: Tensor | None
        self.register_buffer("factors", None if factors is None else factors.view(-1), persistent=False)
        self.has_norm: bool = getattr(layer, "mamba_rms_norm", True)
        self.layer_idx += num_before

    @property
    def can_fuse(self) -> bool:
        """True if `parts` describes it; a norm over the heads of several ranks is not described."""
        return not self.has_norm or hasattr(self.norm, "variance_epsilon")

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.num_heads, self.state_size, self.head_dim)

    @property
    def counts(self) -> tuple[str, ...]:
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
        store_inputs(forward_batch, self.layer_idx, inputs, steps)
        out = recur(forward_batch, self.layer_idx, *self._calls)
        out = out.flatten(1)
        out = self.norm(out, gate) if self.has_norm else out * functional.silu(gate.float())
        mixed: Tensor = self.out_proj(out.to(inputs.dtype))
        return mixed.unsqueeze(0)

    def parts(self) -> RecurrentParts:
        """Return the layer between its linear layers, for fused layers."""
        width = self.num_heads * self.head_dim
        convolution, recurrence = self._calls
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
    def _calls(self) -> tuple[ConvolutionCall, RecurrenceCall]:
        width, groups = self.num_heads * self.head_dim, self.num_groups * self.state_size
        sizes = HeadSizes(
            self.num_heads, self.num_groups, self.state_size, self.head_dim, width + 2 * groups,
            query=width + groups, key=width, value=0,
        )  # fmt: skip
        convolution = ConvolutionCall(self.conv1d.weight, self.conv1d.bias, activates=True)
        decay = -self.A_log.float().exp()
        return convolution, RecurrenceCall(sizes, self.dt_bias, decay, self.D, self.step_limits)
