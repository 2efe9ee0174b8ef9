"""A model's weights as the tensors of a GGUF file: undoes what `GgufSource.read` does."""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from specinfer.core.errors import ModelError
from specinfer.model.gguf.families.parts import Family, Fields
from specinfer.model.gguf.weights import Weight, in_pairs
from specinfer.model.stacked_source import EXPERT, expert_kind, rows_of, stack_name

MTP_COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # tensors of MTP layers that are the target's, too
_MTP = re.compile(r"(model\.)?mtp[._]|(?P<layer>model\.layers\.\d+)\.")
_NAMES = ("token_embd_norm.weight",)  # of norms that families have under several names: the one of new files


class StoredTensors:
    """The tensors of a file, by name: their shapes, and their numbers, read one at a time.

    Args:
        fields: Fields of config.json.
        weights: The model's weights by name, with `read`, or as tensors.

    Attributes:
        num_mtp_layers: 1 if the first MTP layer is among the tensors: its weights are there, and have names.
    """

    def __init__(self, family: Family, fields: Fields, weights: Mapping[str, Any]) -> None:
        self._weights, self._is_transposed = weights, family.transposes_experts
        self._parts: dict[str, list[Weight]] = defaultdict(list)
        pieces: dict[str, list[str]] = defaultdict(list)
        plan, mtp = list(family.plan(fields, _NAMES)), list(family.mtp(fields)) if family.mtp else []
        matches = [match for _, one in plan + mtp if (match := EXPERT.fullmatch(one.name))]
        self._gated = {match["layer"] for match in matches if expert_kind(match) == "gate"}
        self.num_mtp_layers = int(bool(mtp) and all(self._has(one.name) for _, one in mtp))
        for stored, one in plan + mtp * self.num_mtp_layers:
            self._parts[stored].append(one)
            pieces[one.name].append(stored)
        self._pieces = {name: found for name, found in pieces.items() if len(found) > 1}
        self.shapes = {stored: parts[0].stored_shape for stored, parts in self._parts.items()}

    def missing(self) -> list[str]:
        """Return the names of weights that the model does not have."""
        names = (one.name for parts in self._parts.values() for one in parts)
        return sorted(name for name in names if not self._has(name))

    def others(self) -> list[str]:
        """Return the names of the model's weights that have no tensor."""
        names = {one.name for parts in self._parts.values() for one in parts}
        return sorted(set(self._weights) - names - {self._stack_of(name) for name in names})

    def other_mtp(self) -> set[str]:
        """Return the names of those that are of MTP layers."""
        return mtp_names(self._weights) & set(self.others())

    def read(self, stored: str) -> Tensor:
        """Return a tensor's numbers in float32.

        Raises:
            ModelError: A weight has another shape than the configuration says.
        """
        parts = self._parts[stored]
        result = torch.empty(self.shapes[stored])
        for one, target in zip(parts, result if parts[0].expert is not None else [result] * len(parts), strict=True):
            _store(self._numbers(one, stored), one, target)
        return result

    def _numbers(self, weight: Weight, stored: str) -> Tensor:
        name = weight.name
        found = self._whole(name) if name in self._weights else self._of_stack(name)
        size = found.numel()
        if name in self._pieces:
            pieces = self._pieces[name]
            rows = [self._parts[one][0].shape[-2] for one in pieces]
            parts = found.view(*weight.shape[:-2], sum(rows), weight.shape[-1]).split(rows, dim=-2)
            found = parts[pieces.index(stored)]
        if found.numel() != torch.Size(weight.shape).numel():
            raise ModelError(f"model: weight {name} has {size} numbers, which are not those of {list(weight.shape)}")
        return found.reshape(weight.shape).float()

    def _whole(self, name: str) -> Tensor:
        found = self._weights[name]
        tensor: Tensor = found if isinstance(found, Tensor) else found.read()
        return tensor

    def _has(self, name: str) -> bool:
        return name in self._weights or self._stack_of(name) in self._weights

    def _stack_of(self, name: str) -> str:
        """Return the name of the stack that has an expert's weight, or the name itself."""
        if (match := EXPERT.fullmatch(name)) is None:
            return name
        return stack_name(match, has_gates=match["layer"] in self._gated)

    def _of_stack(self, name: str) -> Tensor:
        match, stack = EXPERT.fullmatch(name), self._stack_of(name)
        assert match is not None
        found = self._whole(stack)[int(match["number"])]
        if self._is_transposed:
            found = found.mT if match["end"] == "weight" else found
        if "gate_up" not in stack:
            return found
        return found[rows_of(len(found), 2, is_transposed=self._is_transposed)[expert_kind(match) == "up"]]


def mtp_names(weights: Collection[str]) -> set[str]:
    """Return the names of all MTP layers' weights."""
    matches = [match for name in weights if (match := _MTP.match(name))]
    return {one.string for one in matches if one["layer"] is None or f"{one['layer']}.eh_proj.weight" in weights}


def _store(numbers: Tensor, weight: Weight, target: Tensor) -> None:
    """Write a weight's numbers to its places in a tensor of the file."""
    numbers = -numbers.exp() if weight.is_log else numbers + weight.less
    if weight.inputs:
        columns = torch.tensor([column for part in weight.inputs for column in part])
        numbers = torch.empty_like(numbers).index_copy_(1, columns, numbers)
    if weight.order is None:
        target.copy_((in_pairs(numbers, weight.heads) if weight.heads else numbers).view(target.shape))
        return
    rows = target.view(-1) if target.ndim > 2 else target  # some orders move numbers within a matrix of each head
    shape = target.shape if target.ndim > 2 else (len(target), 1)
    places = weight.order(torch.arange(len(rows)).view(shape)).flatten()
    rows[places] = numbers.reshape(len(places), *rows.shape[1:])
