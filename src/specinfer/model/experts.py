"""Routed experts that compute with the codes that a file stores."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from specinfer.kernels import GATES, Ending, LinearCall, Panels, QuantizedWeight
from specinfer.model.cut import Cut
from specinfer.model.offload.checkpoint import Checkpoint
from specinfer.model.offload.meta_weights import MetaWeight, origin_of
from specinfer.model.packing import together

# Families whose checkpoints name each expert's matrices as `EXPERT` does, and whose definition stacks them.
_SEPARATE = frozenset(
    {"qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "glm4_moe", "deepseek_v3", "ernie4_5_moe"}
)
# Families whose checkpoints, or GGUF files as they are read, have stacks, too, see `StackedSource`.
_STACKED = frozenset(
    {"gpt_oss", "granitemoe", "granitemoeshared", "granitemoehybrid", "lfm2_moe", "nemotron_h", "jamba", "kimi_linear"}
)
FAMILIES = _SEPARATE | _STACKED
_MATRICES = ("gate_up_proj", "up_proj", "down_proj")
EXPERT = "{layer}.{number}.{kind}_proj.weight"
_Weight = QuantizedWeight | Tensor
_Gated = Callable[[Tensor], Tensor]  # from inputs to the inputs of the output matrix
# Of an expert its gated values, the calls that compute these, the call of its output matrix, and the ending of the
# first call with which fused layers compute the same, or None.
_Expert = tuple[_Gated, Sequence[LinearCall], LinearCall, Ending | None]
_LANES = 16  # gates and values alternate in blocks of so many


class QuantizedExperts(nn.Module):
    """A replacement for transformers' stacked experts, with a native call for each matrix; only routed ones are read.

    Attributes:
        pairs: The first and the last call of each expert.
        ending: The ending of the first calls, of which each expert has one, or None. STORE: values have no gates.
    """

    def __init__(self, experts: Iterable[_Expert]) -> None:
        super().__init__()
        parts = list(experts)
        self._gated, self._down = [gated for gated, _, _, _ in parts], [down for _, _, down, _ in parts]
        self.calls = [call for _, calls, down, _ in parts for call in (*calls, down)]
        self.pairs = [(calls[0], down) for _, calls, down, _ in parts]
        endings = {ending for _, _, _, ending in parts}
        self.ending = endings.pop() if len(endings) == 1 else None

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
    for name, module in list(model.named_modules()):
        stacks = {one: module._parameters.get(one) for one in _MATRICES}
        if any(
            stack is not None and stack.is_meta and checkpoint.keeps(module, f"{name}.{one}", stack)
            for one, stack in stacks.items()
        ):
            read = _Reader(checkpoint, is_read, kinds)
            is_stacked = f"{name}.down_proj" in checkpoint.shards.sources
            parts = _of_stacks(name, module, read) if is_stacked else _of_matrices(name, module, read)
            model.set_submodule(name, QuantizedExperts(parts))
    return kinds


@dataclass(frozen=True, slots=True)
class _Reader:
    """The experts' weights in a checkpoint; arguments as for `place_experts`."""

    checkpoint: Checkpoint
    is_read: Callable[[str], bool]
    kinds: set[str]

    def matrix(self, name: str, cut: Cut | None) -> _Weight:
        """Return an expert's weight by its name, as codes or, if it has none, as numbers."""
        checkpoint = self.checkpoint
        if checkpoint.has_codes(name, cut):
            return self._codes(name, cut, None)
        source = checkpoint.shards.sources[name]
        whole = MetaWeight.of(name, source.shape, source.dtype)
        part = whole if cut is None else whole.part(cut)
        return checkpoint.read(name, part) if self.is_read(name) else part

    def of_stack(self, experts: Any, name: str, expert: int) -> _Weight:
        """Return an expert's weight [out, in] of a parameter that stands for a stack, or is one."""
        stack: Tensor = getattr(experts, name)
        origin = origin_of(stack)
        if stack.is_meta and origin is not None and self.checkpoint.has_codes(*origin):
            return self._codes(*origin, expert)
        return (stack[expert].T if experts.is_transposed else stack[expert]).contiguous()

    def _codes(self, name: str, cut: Cut | None, expert: int | None) -> QuantizedWeight:
        kind, weight = self.checkpoint.codes(name, cut, reads=self.is_read(name), expert=expert)
        self.kinds.add(kind)
        return weight


def _call(weight: _Weight, bias: Tensor | None = None) -> LinearCall:
    return LinearCall(Panels.of(weight, bias) if isinstance(weight, Tensor) else Panels.of_codes(weight, bias))


def _of_matrices(name: str, experts: Any, read: _Reader) -> Iterator[_Expert]:
    """Yield the parts of experts whose gates, values and output matrices are stored apart."""
    cut_rows, cut_inputs = (getattr(one, "cut", None) for one in (experts.gate_up_proj, experts.down_proj))
    rows = None if cut_rows is None else Cut(0, cut_rows.ranges[:1])  # those of gates come before those of values
    inputs = None if cut_inputs is None else Cut(1, cut_inputs.ranges)
    for i in range(experts.num_experts):
        of = partial(EXPERT.format, layer=name, number=i)
        gate, up = (read.matrix(of(kind=kind), rows) for kind in ("gate", "up"))
        yield _parts(experts, gate, up, read.matrix(of(kind="down"), inputs))


def _parts(experts: Any, gate: _Weight, up: _Weight, down: _Weight) -> _Expert:
    """Return the parts of an expert with gates."""
    assert experts.is_concatenated
    assert not experts.is_transposed
    assert not experts.has_bias
    ending = GATES[getattr(experts.config, "hidden_act", "silu")]  # LFM2 has no other
    if (
        not (isinstance(gate, Tensor) or isinstance(up, Tensor))
        and gate.format == up.format
        and gate.out_features % _LANES == 0
    ):
        both = _call(QuantizedWeight.joined([gate, up], partial(together, interleaved=True)))
        return partial(_gated_at_once, both, ending), [both], _call(down), ending
    gates, values = _call(gate), _call(up)
    return partial(_gated, gates, values, experts.act_fn), [gates, values], _call(down), None


def _gated_at_once(both: LinearCall, ending: Ending, x: Tensor) -> Tensor:
    return both(x, None, ending)


def _gated(gates: LinearCall, values: LinearCall, act_fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return act_fn(gates(x)) * values(x)


def _of_stacks(name: str, experts: Any, read: _Reader) -> Iterator[_Expert]:
    """Yield the parts of experts whose matrices are stacks: with gates before values or beside them, or without."""
    for i in range(experts.num_experts):
        down = read.of_stack(experts, "down_proj", i)
        if not getattr(experts, "has_gate", True):
            values = _call(read.of_stack(experts, "up_proj", i))
            yield partial(_activated, values, experts.act_fn), [values], _call(down), Ending.STORE
        elif not experts.is_transposed:
            both = read.of_stack(experts, "gate_up_proj", i)
            half = both.shape[0] // 2 if isinstance(both, Tensor) else both.out_features // 2
            halves = slice(half), slice(half, None)
            gate, up = (both[one] if isinstance(both, Tensor) else both.part(one) for one in halves)
            yield _parts(experts, gate, up, down)
        else:
            assert experts.has_bias
            apply_gate = partial(type(experts)._apply_gate, SimpleNamespace(alpha=experts.alpha, limit=experts.limit))
            mixed = _call(read.of_stack(experts, "gate_up_proj", i), experts.gate_up_proj_bias[i])
            yield partial(_gated_by, mixed, apply_gate), [mixed], _call(down, experts.down_proj_bias[i]), None


def _activated(values: LinearCall, act_fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return act_fn(values(x))


def _gated_by(both: LinearCall, apply_gate: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return apply_gate(both(x)).contiguous()
