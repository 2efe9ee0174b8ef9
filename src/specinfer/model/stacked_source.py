"""StackedSource: matrices of experts, each stored for itself, as the one weight that definitions have them in."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specinfer.core.errors import ModelError
from specinfer.ops import QuantizedWeight

EXPERT = re.compile(
    r"(?P<layer>.*\.experts)\.(?P<number>\d+)\.(?P<kind>gate_proj|up_proj|down_proj|w[123])\.(?P<end>weight|bias)"
)
_KINDS = {"w1": "gate", "w2": "down", "w3": "up"}
# Families whose definitions have stacks of experts under other names than those that `EXPERT` fits, or transposed.
STACKED = frozenset(
    {
        "gemma4_text", "gpt_oss", "granitemoe", "granitemoeshared", "granitemoehybrid", "jamba", "kimi_linear",
        "lfm2_moe", "minimax", "minimax_m2", "mixtral", "nemotron_h", "phimoe",
    }
)  # fmt: skip
TRANSPOSED = frozenset({"gpt_oss"})


@dataclass(frozen=True, slots=True)
class StackedSource:
    """The matrices of all experts, or their biases, as one weight.

    Attributes:
        experts: Of each expert the sources of one matrix [out, in] or of several.
        is_transposed: Whether the weight is [experts, in, out] and the outputs of several matrices alternate, as in
            gpt-oss. Otherwise it is [experts, out, in] and they follow one another.
    """

    experts: Sequence[Sequence[Any]]
    is_transposed: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        outputs, *inputs = self.experts[0][0].shape
        whole = outputs * len(self.experts[0])
        return (len(self.experts), *inputs, whole) if self.is_transposed else (len(self.experts), whole, *inputs)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.experts[0][0].dtype
        return dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def read(self) -> Tensor:
        """Read and decode the whole weight, an expert at a time."""
        result = torch.empty(self.shape, dtype=self.dtype)
        for expert, sources in zip(result, self.experts, strict=True):
            found = self._join([source.read() for source in sources])
            expert.copy_(found.T if found.ndim > 1 and self.is_transposed else found)
        return result

    @property
    def has_codes(self) -> bool:
        """True if our kernels take the codes of each expert's matrix as they are, and all experts are stored alike."""
        parts = [one for parts in self.experts for one in parts]
        is_alike = len({id(getattr(one, "format", None)) for one in parts}) == 1
        if not is_alike or not all(one.has_codes for one in parts):
            return False
        return len({one.outline()[1].format for one in self.experts[0]}) == 1

    def codes(self, expert: int = 0) -> tuple[str, QuantizedWeight]:
        """Read an expert's matrix [out, in] as it is stored, and return its type's name, too."""
        return self._joined([source.codes() for source in self.experts[expert]])

    def outline(self) -> tuple[str, QuantizedWeight]:
        """Return what `codes` does, on the meta device."""
        return self._joined([source.outline() for source in self.experts[0]])

    def _joined(self, stored: Sequence[tuple[str, QuantizedWeight]]) -> tuple[str, QuantizedWeight]:
        return stored[0][0], QuantizedWeight.joined([weight for _, weight in stored], self._join)

    @property
    def _join(self) -> Callable[[list[Tensor]], Tensor]:
        return _alternating if self.is_transposed else torch.cat


def rows_of(outputs: int, count: int, *, is_transposed: bool) -> list[slice]:
    """Return the outputs of each of this many matrices that a stack has as one; those of transposed ones alternate."""
    if is_transposed:
        return [slice(i, None, count) for i in range(count)]
    step = outputs // count
    return [slice(i * step, (i + 1) * step) for i in range(count)]


def _alternating(tensors: Sequence[Tensor]) -> Tensor:
    """Return the first rows of all tensors, then the second ones, and so on."""
    return torch.stack(list(tensors), dim=1).flatten(0, 1)


def stacked(sources: Mapping[str, Any], *, is_transposed: bool) -> dict[str, Any]:
    """Return the sources with one for the matrices of all experts, and for their biases.

    Args:
        is_transposed: Whether stacks are transposed, and have gates next to values; or gates before values.

    Raises:
        ModelError: An expert's matrix is missing, or of another shape.
    """
    result: dict[str, Any] = {}
    matches = {name: EXPERT.fullmatch(name) for name in sources}
    has_gates = any(expert_kind(match) == "gate" for match in matches.values() if match)
    stacks: dict[str, dict[int, dict[str, Any]]] = {}
    written: dict[str, dict[str, re.Match[str]]] = {}  # a name of each kind of matrix
    for name, source in sources.items():
        if (match := matches[name]) is None:
            result[name] = source
        else:
            stack = stack_name(match, has_gates=has_gates)
            stacks.setdefault(stack, {}).setdefault(int(match["number"]), {})[expert_kind(match)] = source
            written.setdefault(stack, {})[expert_kind(match)] = match
    for name, experts in stacks.items():
        kinds = sorted(written[name])  # gates before values
        last = min(max(experts), len(experts))  # a missing one comes before it
        for number, kind in itertools.product(range(1 + last), kinds):
            if kind not in experts.get(number, {}):
                match = written[name][kind]
                missing = f"{match['layer']}.{number}.{match['kind']}.{match['end']}"
                raise ModelError(f"model: tensor {missing} is missing; fetch the model again")
        each = [[experts[number][kind] for kind in kinds] for number in range(len(experts))]
        if len({source.shape for parts in each for source in parts}) > 1:
            raise ModelError(f"model: matrices of {name} are of several shapes; fetch the model again")
        result[name] = StackedSource(each, is_transposed)
    return result


def expert_kind(expert: re.Match[str]) -> str:
    """Return "gate", "up" or "down"."""
    return _KINDS.get(expert["kind"], expert["kind"].removesuffix("_proj"))


def stack_name(expert: re.Match[str], *, has_gates: bool) -> str:
    """Return the name of the weight that an expert's matrix, or its bias, is a part of in definitions."""
    kind = "gate_up" if has_gates and expert_kind(expert) != "down" else expert_kind(expert)
    return f"{expert['layer']}.{kind}_proj{'_bias' if expert['end'] == 'bias' else ''}"
