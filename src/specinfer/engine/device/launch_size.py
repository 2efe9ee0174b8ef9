"""LaunchSize: the fixed sizes of a step on a device, and of the inputs and results that it exchanges with the host."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy.typing as npt
import torch

from specinfer.core.tree import TreeBudget
from specinfer.engine.device.draft_shape import DraftShape
from specinfer.engine.device.logprobs import Asked, result_shapes
from specinfer.engine.device.processing import Processing
from specinfer.engine.device.state import Exchange


class TreeNames(NamedTuple):
    """Names of a drafter's trees among the results of a step."""

    tokens: str
    parents: str
    sizes: str
    confidence: str  # of the drafter; negative for what it has not drafted

    @classmethod
    def from_number(cls, number: int, num_models: int) -> "TreeNames":
        """Return those of a drafter. The last one's trees are those of all, and walked."""
        which = "" if number + 1 == num_models else f"_{number}"
        return cls(f"tokens{which}", f"parents{which}", f"sizes{which}", f"confidence{which}_float32")


@dataclass(frozen=True, slots=True)
class LaunchSize:
    """The fixed sizes of a step: rows of requests, and the shape of their trees.

    Attributes:
        processing: What is done with logits; a step may do more than its requests need.
        asked: Log-probabilities that are returned, or None.
        rule: Verification rule of requests whose tokens are drawn, or None if there are none.
        adapts: Whether requests may have adapters.
        num_recomputed: Places before each root for tokens that recurrent layers recompute.
        is_masked: Whether the texts of some requests mask tokens, as by a grammar.
        is_traced: Whether probabilities of the nodes are returned.
    """

    num_rows: int
    shape: DraftShape
    processing: Processing = Processing.NONE
    asked: Asked | None = None
    rule: str | None = None
    adapts: bool = False
    num_recomputed: int = 0
    is_masked: bool = False
    is_traced: bool = False

    @property
    def num_nodes(self) -> int:
        """Nodes of a tree, with the root."""
        return 1 + self.shape.num_nodes

    @property
    def max_depth(self) -> int:
        """Length of the longest path; 1 in plain decoding."""
        return max(self.shape.max_depth, 1)

    def holds(self, other: "LaunchSize") -> bool:
        """Return whether a step of the other size can run in this one, with the same trees."""
        if self.num_rows < other.num_rows or self.processing < other.processing or self.adapts < other.adapts:
            return False
        if self.is_traced < other.is_traced:
            return False
        if self.num_recomputed < other.num_recomputed or self.is_masked != other.is_masked:
            return False
        if other.rule is not None and self.rule != other.rule:
            return False
        if other.asked is not None and (self.asked is None or not self.asked.holds(other.asked)):
            return False
        return self.shape.holds(other.shape)

    def draft_inputs(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the inputs of draft loops."""
        rows, models = self.num_rows, self.shape.num_models
        return {
            "num": (1,),
            "draft_slots": (models, rows, self.shape.num_columns),
            "drafts": (models, rows),  # 1 if the drafter has read the request
            "max_nodes": (models, rows),  # 0 if the drafter is not asked
            "max_depth": (rows,),
            "widths": (rows, self.shape.num_levels),
            "least_float32": (rows,),
        }

    def inputs(self, device: torch.device) -> Exchange:
        rows = self.num_rows
        guesses = (rows, self.shape.num_guesses)
        return Exchange(
            {
                **self.draft_inputs(),
                "slots": (rows, self.num_nodes),
                "lora_indices": (rows if self.adapts else 0,),  # of the adapters of requests
                "guess_tokens": guesses,
                "guess_parents": guesses,
                "guess_float32": guesses,  # path probabilities; -1 where there is no guess
            },
            device,
        )

    def results(self, device: torch.device) -> Exchange:
        rows, levels, models = self.num_rows, self.shape.num_levels, self.shape.num_models
        return Exchange(
            {
                "lengths": (rows,),  # lengths of paths; -1 if no token was emitted
                "next": (rows,),
                "path": (rows, self.max_depth),
                "uniforms": (rows if self.rule else 0, 2),  # states, in halves
                "draft_lengths": (models, rows),  # number of columns that the drafter keeps, without the first
                "draft_path": (models, rows, self.max_depth + 1),
                "node_logprob_float32": (rows if self.is_traced else 0, self.num_nodes),
                **self._trees(),
                "path_prob_float32": (rows, levels),
                **result_shapes(rows, min(self.num_nodes, self.max_depth + 1), self.asked),
            },
            device,
        )

    def _trees(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the trees of each drafter; without drafters, those of the roots alone."""
        rows, shapes, num_trees = self.num_rows, dict[str, tuple[int, ...]](), max(self.shape.num_models, 1)
        for number in range(num_trees):
            nodes, names = 1 + self.shape.of_model(number).num_nodes, TreeNames.from_number(number, num_trees)
            shapes |= zip(names, ((rows, nodes), (rows, nodes), (rows,), (rows, nodes)), strict=True)
        return shapes


def write_budget(inputs: Mapping[str, npt.NDArray[Any]], row: int, budget: TreeBudget) -> None:
    """Write the limits of a request's tree, but for its nodes, to the inputs of draft loops."""
    inputs["max_depth"][row], inputs["least_float32"][row] = budget.max_depth, budget.min_path_prob
    widths = inputs["widths"][row]
    widths[:] = 0
    used = budget.widths[: len(widths)]
    widths[: len(used)] = used
