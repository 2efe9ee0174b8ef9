"""Routed experts that compute with the codes that a file stores."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from specinfer.kernels import GATES, LinearCall, Panels, QuantizedWeight
from specinfer.model.cut import Cut
from specinfer.model.fused_layer import together
from specinfer.model.offload.checkpoint import Checkpoint
from specinfer.model.offload.meta_weights import MetaWeight

# Families whose checkpoints name each expert's matrices as `EXPERT` does, and whose definition stacks them.
FAMILIES = frozenset({"qwen2_moe", "qwen3_moe"})
EXPERT = "{layer}.{number}.{kind}_proj.weight"
_Weight = QuantizedWeight | Tensor
_LANES = 16  # gates and values alternate in blocks of so many


class QuantizedExperts(nn.Module):
    """A replacement for transformers' stacked experts, with a native call for each matrix; only routed ones are read.

    Args:
        experts: Gates, values and output matrices of each expert, as codes or, if a file has no codes, as numbers.
        activation: transformers' name of the activation of gates, one of `GATES`.
        act_fn: The activation itself.
    """

    def __init__(
        self, experts: Iterator[tuple[_Weight, _Weight, _Weight]], activation: str, act_fn: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.calls: list[LinearCall] = []
        self._gated: list[Callable[[Tensor], Tensor]] = []
        self._down: list[LinearCall] = []
        for gate, up, down in experts:
            self._gated.append(self._gate(gate, up, activation, act_fn))
            self._down.append(self._call(down))

    def _gate(
        self, gate: _Weight, up: _Weight, activation: str, act_fn: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor], Tensor]:
        ending = GATES[activation]
        if (
            not (isinstance(gate, Tensor) or isinstance(up, Tensor))
            and gate.format == up.format
            and gate.out_features % _LANES == 0
        ):
            both = self._call(QuantizedWeight.joined([gate, up], partial(together, interleaved=True)))
            return lambda x: both(x, None, ending)
        gates, values = self._call(gate), self._call(up)
        return lambda x: act_fn(gates(x)) * values(x)

    def _call(self, weight: _Weight) -> LinearCall:
        call = LinearCall(Panels.of(weight) if isinstance(weight, Tensor) else Panels.of_codes(weight))
        self.calls.append(call)
        return call

    @property
    def num_bytes(self) -> int:
        return sum(call.num_bytes for call in self.calls)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return [tokens, width], the weighted sum of each token's experts, in the order of the experts.

        Args:
            hidden_states: [tokens, width].
            top_k_index: [tokens, experts of each].
            top_k_weights: [tokens, experts of each].
        """
        x, weights = hidden_states.float(), top_k_weights.float().flatten()
        result = torch.zeros_like(x)
        order = top_k_index.flatten().argsort(stable=True)
        numbers, counts = top_k_index.flatten()[order].unique_consecutive(return_counts=True)
        for number, places in zip(numbers.tolist(), order.split(counts.tolist()), strict=True):
            tokens = places // top_k_index.shape[1]
            added = self._down[number](self._gated[number](x[tokens]))
            result.index_add_(0, tokens, added * weights[places].unsqueeze(1))
        return result.to(hidden_states.dtype)


def place_experts(model: nn.Module, checkpoint: Checkpoint, is_read: Callable[[str], bool]) -> set[str]:
    """Replace stacked experts that are stored as codes by ones that compute with them; return the types of the codes.

    Args:
        is_read: Function of a name, whether codes are read. The others are on the meta device.
    """
    kinds: set[str] = set()

    def read(layer: str, number: int, kind: str, cut: Cut | None) -> _Weight:
        name = EXPERT.format(layer=layer, number=number, kind=kind)
        if checkpoint.has_codes(name, cut):
            stored, weight = checkpoint.codes(name, cut, reads=is_read(name))
            kinds.add(stored)
            return weight
        source = checkpoint.shards.sources[name]
        whole = MetaWeight.of(name, source.shape, source.dtype)
        part = whole if cut is None else whole.part(cut)
        return checkpoint.read(name, part) if is_read(name) else part

    for name, module in list(model.named_modules()):
        experts: Any = module
        stack, down = (module._parameters.get(one) for one in ("gate_up_proj", "down_proj"))
        if stack is None or down is None or not checkpoint.keeps(module, f"{name}.down_proj", down):
            continue
        assert experts.is_concatenated
        assert not experts.is_transposed
        assert not experts.has_bias
        gates, inputs = _cut_of_gates(stack), _cut_of_inputs(down)
        parts = (
            (read(name, i, "gate", gates), read(name, i, "up", gates), read(name, i, "down", inputs))
            for i in range(experts.num_experts)
        )
        model.set_submodule(name, QuantizedExperts(parts, experts.config.hidden_act, experts.act_fn))
    return kinds


def _cut_of_gates(stack: Tensor) -> Cut | None:
    """Return the rows of each expert's gates, and of its values, that belong to a rank, or None for all."""
    cut: Cut | None = getattr(stack, "cut", None)
    return None if cut is None else Cut(0, cut.ranges[:1])  # gates come first


def _cut_of_inputs(stack: Tensor) -> Cut | None:
    """Return the inputs of each expert's output matrix that belong to a rank, or None for all."""
    cut: Cut | None = getattr(stack, "cut", None)
    return None if cut is None else Cut(1, cut.ranges)
