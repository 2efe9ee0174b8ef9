"""The inputs of a draft program: numbers of each request, and tables of slots and tokens of long texts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from specinfer.core.noise import derive_seed, draws_of
from specinfer.core.request import Request
from specinfer.core.tree import TreeBudget
from specinfer.drafters.growth.calibration import MIDDLE, RANKS
from specinfer.drafters.kind import DraftKind
from specinfer.engine.device.launch_size import LaunchSize
from specinfer.engine.device.masks import write_masks
from specinfer.engine.device.processing import Processing
from specinfer.model.graphs.slot_table import Change, SlotTable
from specinfer.model.kv_cache import Slots
from specinfer.ops.tree_layout import num_words
from specinfer.verify.logits import log_min_p, temperature_of, top_k_of

_UPDATES = 16  # cells of a table that a program may change per request without separate copies
_ROW = 64  # table lengths are multiples of it, so that kernels are compiled once for all

Numbers = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Tables:
    """Tables of what a drafter reads of long texts, with a row for each request; none of them changes its address.

    Attributes:
        own: Slots in its own cache, if it has one.
        target: Slots in the target's cache, if it reads anything there.
        following: The token after each one, if it computes known tokens with features of the token before.
    """

    own: SlotTable | None
    target: SlotTable | None
    following: SlotTable | None

    @classmethod
    def of(cls, kind: DraftKind, num_rows: int, context: int, device: torch.device) -> "Tables":
        def made(*, is_read: bool) -> SlotTable | None:
            return SlotTable(num_rows, -(-context // _ROW) * _ROW, device) if is_read else None

        with torch.inference_mode(mode=False):
            return cls(
                made(is_read=not kind.shares_cache),
                made(is_read=kind.shares_cache or kind.reads_paths),
                made(is_read=kind.reads_paths),
            )

    @property
    def by_name(self) -> dict[str, SlotTable]:
        found = {"own": self.own, "target": self.target, "following": self.following}
        return {name: table for name, table in found.items() if table is not None}

    def write(self, changes: Mapping[str, Iterable[Change]], inputs: Numbers) -> None:
        """Write the changes of each table to the inputs."""
        for name, table in self.by_name.items():
            cells = inputs[f"{name}_cells"]
            cells[:] = table.no_cell
            table.list_changes(changes[name], cells, inputs[f"{name}_values"])

    def forget(self) -> None:
        """Discard what is known of the contents, which may not have been written."""
        for table in self.by_name.values():
            table.forget()


class DraftRow(NamedTuple):
    """A request, as a program gets it."""

    request: Request
    budget: TreeBudget
    drafter: str  # name
    is_drawn: bool  # whether tokens are drawn, not chosen
    num_computed: int  # tokens in the drafter's cache
    num_unread: int  # known tokens that it has to compute
    slots: Slots  # [columns] for what it computes; none where nothing is stored

    def write(self, inputs: Numbers, row: int, target_vocab: int) -> None:
        """Write the inputs of a row."""
        request, budget, params = self.request, self.budget, self.request.params
        numbers = {
            "reads": 1,
            "known": len(request.token_ids) - 1,
            "computed": self.num_computed,
            "has_two": self.num_unread == 2,
            "is_drawn": self.is_drawn,
            "max_nodes": budget.max_nodes,
            "max_depth": budget.max_depth,
            "least_float32": budget.min_path_prob,
            "temperatures_float32": temperature_of(params),
            "log_min_p_float32": log_min_p(params),
            "top_k": top_k_of(params, target_vocab),
        }
        wide = {
            "roots": request.token_ids[-1],
            "before": request.token_ids[-2] if self.num_unread > 1 else 0,
            "seeds": request.seed,
            "streams": derive_seed(request.seed, draws_of(self.drafter)),
            "first_draw": request.drafting.num_draws[self.drafter],
        }
        for name, value in numbers.items():
            inputs[name][row] = value
        for name, value in wide.items():
            inputs[name].view(np.int64)[row] = value
        inputs["top_p"].view(np.float64)[row] = params.top_p
        inputs["is_masked"][row] = is_masked = request.restricts_tokens(0)
        if is_masked:
            write_masks(inputs["allowed"].view(np.uint8)[row : row + 1, : -(-target_vocab // 8)], request, [()])
        inputs["widths"][row] = 0
        inputs["widths"][row, : len(budget.widths)] = budget.widths
        if len(self.slots):
            inputs["slots"][row] = self.slots


def input_shapes(size: LaunchSize, tables: Tables, vocab: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a program's inputs, those of 64 bits first."""
    assert size.shape is not None
    rows, shape = size.num_rows, size.shape
    wide = dict.fromkeys(("roots", "before", "seeds", "streams", "first_draw", "top_p"), (rows, 2))
    of_tables = dict.fromkeys(
        [f"{name}_{what}" for name in tables.by_name for what in ("cells", "values")], (rows * _UPDATES,)
    )
    names = ("known", "computed", "has_two", "is_drawn", "reads", "max_nodes", "max_depth", "top_k")
    return {
        **wide,
        "num": (1,),
        **dict.fromkeys((*names, "least_float32", "temperatures_float32", "log_min_p_float32"), (rows,)),
        "slots": (rows, shape.num_columns),
        "widths": (rows, shape.num_levels),
        "lines_float32": (2, 3, RANKS * (len(MIDDLE) + 1)),
        "adjusted_rows": (rows if size.processing >= Processing.ADJUSTMENT else 0,),
        "is_masked": (rows,),
        "allowed": (rows if size.is_masked else 0, num_words(vocab)),  # a bit for each token
        **of_tables,
    }
