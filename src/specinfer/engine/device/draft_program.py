"""DraftProgram: the draft loop of one drafter for host steps, in one size, and what it exchanges with the host.

Rows of steps on a device keep the state of their requests from step to step. In a host step the host knows it, and
sends it. Slots and tokens of long texts are in tables, of which only changes are sent.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.core.draws import Distribution, Draws
from specinfer.core.noise import derive_seed, draws_of
from specinfer.core.request import Request
from specinfer.core.tree import TokenTree, TreeArrays, TreeBudget, depths_of
from specinfer.drafters.growth.calibration import MIDDLE, RANKS
from specinfer.drafters.kind import DraftKind
from specinfer.engine.device.draft_loop import DeviceDrafter, DraftLoops
from specinfer.engine.device.launch_size import LaunchSize, write_budget
from specinfer.engine.device.masks import write_masks
from specinfer.engine.device.processing import AdjustedRows, LogitProcessor, Processing
from specinfer.engine.device.state import DeviceState, DraftState, Exchange
from specinfer.model.graphs.capture import Program
from specinfer.model.graphs.slot_table import Change, SlotTable
from specinfer.model.kv_cache import Slots
from specinfer.ops.cpu.choice import SUPPORT
from specinfer.ops.logits import Truncation
from specinfer.ops.tree_layout import num_words
from specinfer.ops.trees import DeviceDraws, DeviceTrees
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
    def from_kind(cls, kind: DraftKind, num_rows: int, context: int, device: torch.device) -> "Tables":
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
        tables = {"own": self.own, "target": self.target, "following": self.following}
        return {name: table for name, table in tables.items() if table is not None}

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
            "known": len(request.token_ids) - 1,
            "computed": self.num_computed,
            "has_two": self.num_unread == 2,
            "is_drawn": self.is_drawn,
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
        write_budget(inputs, row, budget)
        inputs["drafts"][0, row], inputs["max_nodes"][0, row] = 1, budget.max_nodes
        if len(self.slots):
            inputs["draft_slots"][0, row] = self.slots


def input_shapes(size: LaunchSize, tables: Tables, vocab: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a program's inputs, those of 64 bits first."""
    rows = size.num_rows
    wide = dict.fromkeys(("roots", "before", "seeds", "streams", "first_draw", "top_p"), (rows, 2))
    of_tables = dict.fromkeys(
        [f"{name}_{what}" for name in tables.by_name for what in ("cells", "values")], (rows * _UPDATES,)
    )
    names = ("known", "computed", "has_two", "is_drawn", "top_k", "is_masked")
    return {
        **wide,
        **size.draft_inputs(),
        **dict.fromkeys((*names, "temperatures_float32", "log_min_p_float32"), (rows,)),
        "lines_float32": (2, 3, RANKS * (len(MIDDLE) + 1)),
        "adjusted_rows": (rows if size.processing >= Processing.ADJUSTMENT else 0,),
        "allowed": (rows if size.is_masked else 0, num_words(vocab)),  # a bit for each token
        **of_tables,
    }


_TREES = ("tokens", "parents", "sizes", "confidence_float32", "columns")
_MANY = 2**30  # tokens that may still be emitted: budgets are cut to them before


class DraftProgram:
    """A draft loop over static inputs and results.

    Args:
        size: Rows, the tree shape of one model, the processing of logits, and whether tokens are drawn or masked.
        target_vocab: Number of tokens of the target.
        adjusted: Biases and penalties, for sizes that apply them.
    """

    def __init__(
        self,
        size: LaunchSize,
        drafter: DeviceDrafter,
        tables: Tables,
        target_vocab: int,
        adjusted: AdjustedRows,
    ) -> None:
        self.size, self.shape, self._tables = size, size.shape.of_model(0), tables
        self._adjusted = adjusted
        rows, device = size.num_rows, drafter.runner.loaded.device
        support = min(SUPPORT, target_vocab) if size.rule else 0
        self.inputs = Exchange(input_shapes(size, tables, target_vocab), device)
        self.results = Exchange(_result_shapes(size, support), device)
        given, results = self.inputs.on_device, self.results.on_device
        for name, table in tables.by_name.items():
            given[f"{name}_cells"].fill_(table.no_cell)  # a capture runs the program without requests
        self._state = self._made_state(rows, device)
        with torch.inference_mode(mode=False):
            draws = None
            if support:
                probs = _wide(results["draw_probs"], torch.float64)
                draws = DeviceDraws(results["draw_nodes"], results["draw_tokens"], probs)
            kept = torch.zeros((rows, size.max_depth + 1), dtype=torch.int32, device=device)
            trees = DeviceTrees(*(results[name] for name in (*_TREES, "path_prob_float32")))
            self._loops = DraftLoops(
                size, [drafter], self._state, given, [trees], [(kept, kept[:, 0].contiguous())], target_vocab, draws
            )

    def _made_state(self, rows: int, device: torch.device) -> DeviceState:
        """Return the state of the requests: views of the inputs and the tables."""
        given, tables = self.inputs.on_device, self._tables
        with torch.inference_mode(mode=False):
            state, drafted = DeviceState.empty(rows, 0, device, ()), DraftState.empty(rows, 0, device)
            state.num_left.fill_(_MANY)
            table = tables.own or tables.target
            assert table is not None
            lines = given["lines_float32"]
            drafted = replace(
                drafted,
                slots=table.rows,
                known=given["known" if tables.own is None else "computed"],
                before=_wide(given["before"]),
                streams=_wide(given["streams"]),
                first_draw=_wide(given["first_draw"]),
                following=drafted.following if tables.following is None else tables.following.rows,
                chances=replace(drafted.chances, heights=lines[0], slopes=lines[1]),
            )
            truncation = Truncation(
                given["temperatures_float32"], given["log_min_p_float32"], given["top_k"],
                _wide(given["top_p"], torch.float64),
            )  # fmt: skip
            return replace(
                state,
                slots=state.slots if tables.target is None else tables.target.rows,
                known=given["known"],
                roots=_wide(given["roots"]),
                seeds=_wide(given["seeds"]),
                truncation=truncation,
                drafts=(drafted,),
            )

    @property
    def parts(self) -> tuple[Program]:
        return (self,)

    def __call__(self) -> None:
        """Grow the trees of all requests that were written."""
        given, state = self.inputs.on_device, self._state
        for name, table in self._tables.by_name.items():
            table.cells.index_copy_(0, given[f"{name}_cells"].long(), given[f"{name}_values"])
        torch.gt(given["has_two"], 0, out=state.drafts[0].has_two)
        torch.gt(given["is_drawn"], 0, out=state.is_drawn)
        processing, adjustments = self.size.processing, None
        if processing >= Processing.ADJUSTMENT:
            adjustments = self._adjusted.of(given["adjusted_rows"].long())
        masks = (given["allowed"], given["is_masked"])
        process = LogitProcessor(
            state.truncation if processing else None, adjustments, (lambda: masks) if self.size.is_masked else None
        )
        self._loops.grow(process)

    def tree(self, results: Numbers, row: int, drafter: str, *, is_drawn: bool) -> tuple[TokenTree, list[int]]:
        """Return the tree of a request, and the column of each node; -1 for nodes that the drafter has not computed.

        Args:
            results: Results, which may be overwritten later.
            drafter: The drafter's name.
            is_drawn: Whether its tokens are drawn.
        """
        nodes = slice(int(results["sizes"][row]))
        parents = results["parents"][row, nodes].astype(np.int64)
        parents[0] = -1
        depths = np.array(depths_of(parents.tolist()), dtype=np.int64)
        draws = Draws.chosen(results["confidence_float32"][row, nodes][1:].astype(np.float64), drafter)
        if is_drawn:
            drawn = slice(nodes.stop - 1)
            tokens, probs = results["draw_tokens"][row, drawn], results["draw_probs"].view(np.float64)[row, drawn, :, 0]
            pool = list(map(Distribution, tokens.astype(np.int64), probs.copy()))
            draws = draws._replace(numbers=np.arange(len(pool)), pools=(pool,))
        tokens = results["tokens"][row, nodes].astype(np.int64)
        tree = TokenTree.from_arrays(TreeArrays(tokens, parents, depths, draws))
        return tree, results["columns"][row, nodes].tolist()


def _wide(pairs: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return pairs of 32-bit numbers as numbers of 64 bits."""
    return pairs.view(dtype).squeeze(-1)


def _result_shapes(size: LaunchSize, support: int) -> dict[str, tuple[int, ...]]:
    rows, nodes, draws = size.num_rows, size.num_nodes, size.num_nodes - 1 if support else 0
    return {
        "draw_probs": (rows, draws, support, 2),
        **dict.fromkeys(("tokens", "parents", "columns", "confidence_float32"), (rows, nodes)),
        "sizes": (rows,),
        "path_prob_float32": (rows, size.shape.num_levels),
        "draw_nodes": (rows, draws),
        "draw_tokens": (rows, draws, support),
    }
