"""Routed experts that compute with the codes that a file stores."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from specinfer.model.layers.packing import together
from specinfer.model.offload.checkpoint import Checkpoint
from specinfer.model.offload.meta_weights import Cut, MetaWeight, origin_of
from specinfer.model.quantized_experts import (
    Expert,
    QuantizedExperts,
    Weight,
    first_of,
    matrix_of,
    opened,
    opening_of,
    routed,
)
from specinfer.model.stacked_source import STACKED, rows_of
from specinfer.ops import GATES, Ending, LinearCall, QuantizedWeight

# Families whose checkpoints name each expert's matrices as `EXPERT` does, and whose definition stacks them.
_SEPARATE = frozenset(
    {
        "bailing_hybrid", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "flex_olmo", "glm4_moe",
        "hy_v3", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text",
    }
)  # fmt: skip
FAMILIES = _SEPARATE | STACKED
_MATRICES = ("gate_up_proj", "up_proj", "down_proj")
EXPERT = "{layer}.{number}.{kind}_proj.weight"
_BLOCK = 16  # size of the blocks in which gates and values alternate


def place_experts(
    model: nn.Module, checkpoint: Checkpoint, is_read: Callable[[str], bool], *, native: bool = True
) -> set[str]:
    """Replace stacked experts that are stored as codes by ones that compute with them; return the types of the codes.

    Args:
        is_read: Function of a name, whether codes are read. The others are on the meta device.
        native: False for the kernels of GPUs.
    """
    kinds: set[str] = set()
    for name, module in list(model.named_modules()):
        stacks = {one: module._parameters.get(one) for one in _MATRICES}
        if any(
            stack is not None and stack.is_meta and checkpoint.keeps(module, f"{name}.{one}", stack)
            for one, stack in stacks.items()
        ):
            read = _Reader(checkpoint, is_read, kinds)
            is_stacked = all(origin_of(stack) for stack in stacks.values() if stack is not None and stack.is_meta)
            matrices = _of_stacks(module, read) if is_stacked else _of_matrices(name, module, read)
            model.set_submodule(
                name, QuantizedExperts(_parts(module, matrices)) if native else routed(module, matrices, merges=True)
            )
    return kinds


@dataclass(frozen=True, slots=True)
class _Reader:
    """The experts' weights in a checkpoint; arguments as for `place_experts`."""

    checkpoint: Checkpoint
    is_read: Callable[[str], bool]
    kinds: set[str]

    def matrix(self, name: str, cut: Cut | None) -> Weight:
        """Return an expert's weight by its name, as codes or, if it has none, as numbers."""
        checkpoint = self.checkpoint
        if checkpoint.has_codes(name, cut):
            return self._codes(name, cut, None)
        source = checkpoint.shards.sources[name]
        whole = MetaWeight.from_source(name, source.shape, source.dtype)
        part = whole if cut is None else whole.part(cut)
        return checkpoint.read(name, part) if self.is_read(name) else part

    def of_stack(self, experts: Any, name: str, expert: int) -> Weight:
        """Return an expert's weight [out, in] of a parameter that stands for a stack, or is one."""
        stack: Tensor = getattr(experts, name)
        origin = origin_of(stack)
        if stack.is_meta and origin is not None and self.checkpoint.has_codes(*origin):
            return self._codes(*origin, expert)
        return matrix_of(experts, name, expert)

    def _codes(self, name: str, cut: Cut | None, expert: int | None) -> QuantizedWeight:
        kind, weight = self.checkpoint.codes(name, cut, reads=self.is_read(name), expert=expert)
        self.kinds.add(kind)
        return weight


def _of_matrices(name: str, experts: Any, read: _Reader) -> Iterator[list[Weight]]:
    """Yield the matrices of experts whose gates, values and output matrices are stored apart."""
    cut_rows, cut_inputs = (getattr(one, "cut", None) for one in (experts.gate_up_proj, experts.down_proj))
    rows = None if cut_rows is None else Cut(0, cut_rows.ranges[:1])  # those of gates come before those of values
    inputs = None if cut_inputs is None else Cut(1, cut_inputs.ranges)
    for i in range(experts.num_experts):
        of = partial(EXPERT.format, layer=name, number=i)
        yield [read.matrix(of(kind=kind), inputs if kind == "down" else rows) for kind in ("gate", "up", "down")]


def _of_stacks(experts: Any, read: _Reader) -> Iterator[list[Weight]]:
    """Yield the matrices of experts that are stacks: with gates before values or next to them, or without."""
    for i in range(experts.num_experts):
        yield [read.of_stack(experts, name, i) for name in (first_of(experts), "down_proj")]


def _parts(experts: Any, matrices: Iterable[list[Weight]]) -> Iterator[Expert]:
    """Yield the parts of experts for the native kernels."""
    for i, (*first, down) in enumerate(matrices):
        if not getattr(experts, "has_gate", True):
            values = LinearCall.from_weight(first[0])
            yield partial(opened, values, experts.act_fn), [values], LinearCall.from_weight(down), Ending.STORE
        elif experts.is_transposed:
            assert experts.has_bias
            mixed = LinearCall.from_weight(first[0], experts.gate_up_proj_bias[i])
            last = LinearCall.from_weight(down, experts.down_proj_bias[i])
            yield partial(opened, mixed, opening_of(experts)), [mixed], last, None
        else:
            gate, up = first if len(first) > 1 else _halves(first[0])
            yield _gated_parts(experts, gate, up, down)


def _halves(both: Weight) -> list[Weight]:
    halves = rows_of(both.shape[0] if isinstance(both, Tensor) else both.out_features, 2, is_transposed=False)
    return [both[rows] if isinstance(both, Tensor) else both.part(rows) for rows in halves]


def _gated_parts(experts: Any, gate: Weight, up: Weight, down: Weight) -> Expert:
    """Return the parts of an expert with gates."""
    assert experts.is_concatenated
    assert not experts.is_transposed
    assert not experts.has_bias
    names = (getattr(experts.config, name, None) for name in ("hidden_act", "hidden_activation"))
    ending = GATES.get(next(filter(None, names), "silu"))  # LFM2 has no other
    if (
        ending is not None
        and not (isinstance(gate, Tensor) or isinstance(up, Tensor))
        and gate.format == up.format
        and gate.out_features % _BLOCK == 0
    ):
        both = LinearCall.from_weight(QuantizedWeight.joined([gate, up], partial(together, interleaved=True)))
        return partial(_gated_at_once, both, ending), [both], LinearCall.from_weight(down), ending
    gates, values = LinearCall.from_weight(gate), LinearCall.from_weight(up)
    return partial(_gated, gates, values, experts.act_fn), [gates, values], LinearCall.from_weight(down), None


def _gated_at_once(both: LinearCall, ending: Ending, x: Tensor) -> Tensor:
    return both(x, None, ending)


def _gated(gates: LinearCall, values: LinearCall, act_fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return act_fn(gates(x)) * values(x)
