"""DraftPrograms: the TreeGrower of one model in host steps on a device, where one program grows the trees of a step.

`small_model.py` grows trees level by level: the host waits for the logits of each level and chooses its nodes. Here the
draft loop of steps on a device does all that, captured, and the host waits once, for the trees. What the drafter has
computed of each request is noted in its cache on the host, as in all host steps.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from specinfer.core.draws import Floats
from specinfer.core.progress import ProgressCallback
from specinfer.core.request import Request
from specinfer.core.rules import MULTI_STEP
from specinfer.core.tree import TreeBudget
from specinfer.core.tree_shape import MAX_TREE_NODES
from specinfer.drafters import Drafter, HeadRunner, MergedDrafter, SmallModelDrafter
from specinfer.drafters.growth.calibration import Calibration, source
from specinfer.drafters.growth.draft_sampling import sampling_of
from specinfer.drafters.self_drafter import BorrowedCache
from specinfer.drafters.tree_grower import GrownTree, Wanted
from specinfer.engine.device.budgets import LevelProbs, chance_lines
from specinfer.engine.device.captured_sizes import CapturedSizes
from specinfer.engine.device.draft_loop import DeviceDrafter
from specinfer.engine.device.draft_program import DraftProgram, DraftRow, Numbers, Tables
from specinfer.engine.device.draft_shape import NODES, DraftShape, holds, holds_expansion, shape_of
from specinfer.engine.device.launch_size import LaunchSize
from specinfer.engine.device.processing import AdjustedRows, Processing, can_adjust
from specinfer.engine.timer import Marks
from specinfer.model.graphs.capture import Graphs, Program
from specinfer.model.graphs.sizes import MAX_ROWS, REQUESTS, at_least
from specinfer.model.graphs.slot_table import Change
from specinfer.model.kv_cache import NO_SLOTS, KVCache, Slots
from specinfer.model.recurrent.layers import is_hybrid
from specinfer.ops.triton import on_device

logger = logging.getLogger(__name__)


def use_draft_programs(drafter: Drafter | None, target_vocab: int) -> list["DraftPrograms"]:
    """Let the drafters grow their trees by programs, where passes are captured; return the programs of each."""
    made = list[DraftPrograms]()
    if isinstance(drafter, MergedDrafter) and drafter.selection is None:
        for model in drafter.models:
            graphs = _graphs_of(model)
            if graphs is not None and graphs.captures:
                made.append(DraftPrograms(model, target_vocab, graphs, drafter.calibration))
                model.grow_with(made[-1])
    return made


def _graphs_of(drafter: SmallModelDrafter) -> Graphs | None:
    """Return the graphs that draft loops of this drafter can be captured with, or None if they cannot."""
    runner = drafter.runner
    if not drafter.shares_vocabulary or is_hybrid(runner.loaded.model):
        return None
    if isinstance(runner, HeadRunner):
        return runner.loop_graphs
    return runner.graphs if runner.padded is not None else None


class DraftPrograms:
    """The draft programs of one drafter, by size.

    Args:
        target_vocab: Number of tokens of the target.
        graphs: Captured graphs.
        calibration: The acceptance probabilities of draft tokens.
    """

    def __init__(self, drafter: SmallModelDrafter, target_vocab: int, graphs: Graphs, calibration: Calibration) -> None:
        # Not the drafter, which refers to these programs: memory would be free only after a search for such cycles.
        self.runner, self._cache, self._name = drafter.runner, drafter.cache, drafter.name
        self._vocabulary, self._draft_sampling = drafter.vocabulary, drafter.draft_sampling
        self._target_vocab, self._graphs, self._calibration = target_vocab, graphs, calibration
        runner = drafter.runner
        self._place, self._kind = runner.loaded.device, drafter.kind
        reader = runner.target if isinstance(runner, HeadRunner) else runner
        self._reader = reader  # whose cache has the whole text of each request
        self._num_rows = at_least(REQUESTS, runner.max_requests) or REQUESTS[-1]
        context = min(reader.loaded.max_position, reader.cache.num_slots)
        self._tables = Tables.from_kind(self._kind, self._num_rows, context, self._place)
        self._sizes = CapturedSizes[DraftProgram](graphs, [runner], f"the draft loop of {self._name}")
        self._level_probs = LevelProbs()
        self._adjusted = AdjustedRows(self._num_rows, target_vocab, self._place)

    @property
    def _own_cache(self) -> KVCache:
        """The drafter's cache, another one after a change of its weights; the target's, if it has none."""
        return self.runner.cache

    # ------------------------------------------------------------------------------------------ what is drafted

    def fitting(self, wanted: Sequence[Wanted]) -> list[Wanted]:
        """Return those whose trees a program can grow."""
        return [pair for pair in wanted if self._sizes.is_capturable and self._can_draft(*pair)][: self._num_rows]

    def _can_draft(self, request: Request, budget: TreeBudget) -> bool:
        if not holds(budget) or (request.adapter is not None and self._kind.shares_cache) or not can_adjust(request):
            return False
        if Processing.from_request(request) >= Processing.ADJUSTMENT and not self._adjusted.can_adjust():
            return False
        sampling = sampling_of(self._draft_sampling, request)
        if request.params.is_greedy or sampling == "shared-noise":  # a program adds noise for all sampled requests
            return True
        # Draws are masked at every level, where they grow level by level.
        is_masked = request.restricts_tokens(budget.max_depth)
        return self._draws(request) and not is_masked and self._is_whole(self._shape_of([budget], 1), budget)

    @staticmethod
    def _is_whole(shape: DraftShape, budget: TreeBudget) -> bool:
        """Return whether a drawn tree is whole, which a fixed expansion has to be: it is cut before it is drawn."""
        return not budget.widths or holds_expansion(shape, budget)

    def _draws(self, request: Request) -> bool:
        """Return whether tokens for a request are drawn without replacement."""
        sampling = sampling_of(self._draft_sampling, request)
        return sampling == "without-replacement" and not request.params.is_greedy

    def draft(self, wanted: Sequence[Wanted]) -> list[GrownTree] | None:
        """Return the tree of each request, or None if they cannot be grown together now."""
        requests = [request for request, _ in wanted]
        chance = max(self._calibration.by_rank(source(self._name, request))[0] for request in requests)
        budgets = self._level_probs.cut([budget for _, budget in wanted], float(chance))
        size = self._size_of(requests, budgets)
        if size is None:
            return None
        with on_device(self._place), torch.inference_mode():
            captured = self._sizes.try_of(size, self._made, ", so host steps wait for each level", compiles=True)
        if captured is None:
            return None
        program, (run,) = captured.programs, captured.runs
        assert run is not None
        for request in requests:
            if self._num_unread(request) > program.shape.num_known:
                self._cache.read_known(request)
        with on_device(self._place), torch.inference_mode():
            results = self._run(program, run, requests, budgets)
        best_first = [row for row, budget in enumerate(budgets) if not budget.widths]
        self._level_probs.observe(results["path_prob_float32"][best_first])
        return [self._grown(request, results, row, program) for row, request in enumerate(requests)]

    def _num_unread(self, request: Request) -> int:
        """Return the number of known tokens that the drafter has not computed and has to."""
        if self._kind.shares_cache:
            return 0
        num_tokens = len(request.token_ids) - (1 if self._kind.reads_paths else 0)
        return num_tokens - len(self._own_cache.slots(request.request_id))

    def _has_room(self, requests: Sequence[Request], size: LaunchSize) -> bool:
        """Return whether there are slots for what the drafter reads and drafts."""
        if not self._kind.stores_drafts:
            return True
        num_new = sum(map(self._num_unread, requests)) + len(requests) * size.shape.num_columns
        return num_new <= self._own_cache.num_available

    # ------------------------------------------------------------------------------------------------- sizes

    def _shape_of(self, budgets: Sequence[TreeBudget], rows: int) -> DraftShape:
        return shape_of(budgets, NODES[-1], max(MAX_ROWS // rows, 1), kinds=(self._kind,))

    def _size_of(self, requests: Sequence[Request], budgets: Sequence[TreeBudget]) -> LaunchSize | None:
        """Return the size to draft in, or None if none has slots enough and holds all drawn expansions whole."""
        rows = at_least(REQUESTS, len(requests))
        assert rows is not None
        shape = self._shape_of(budgets, rows)
        drawn = list(map(self._draws, requests))
        if not all(self._is_whole(shape, one) for one, is_drawn in zip(budgets, drawn, strict=True) if is_drawn):
            return None
        rule = MULTI_STEP if any(drawn) else None  # draws are the same for all rules with random numbers
        processing = max(map(Processing.from_request, requests))
        is_masked = any(request.restricts_tokens(0) for request in requests)
        wanted = LaunchSize(rows, shape, processing, rule=rule, is_masked=is_masked)
        chosen = self._sizes.choose(wanted, MAX_TREE_NODES, num_captures=1)
        sizes = filter(self._sizes.has_memory, (chosen or wanted, wanted))
        return next((size for size in sizes if self._has_room(requests, size)), None)

    def _made(self, size: LaunchSize) -> DraftProgram:
        """Return a program without requests, as captures run it."""
        drafter = DeviceDrafter(self.runner, self._kind, self._vocabulary.to_target)
        return DraftProgram(size, drafter, self._tables, self._target_vocab, self._adjusted)

    def prepare(self, budgets: Sequence[TreeBudget], processing: Processing, progress: ProgressCallback | None) -> None:
        """Capture the programs of these budgets now, with this processing; else the first drafts wait for that."""
        if processing >= Processing.ADJUSTMENT and not self._adjusted.can_adjust():
            processing = Processing.TRUNCATION
        counts = [count for count in REQUESTS if count <= self._num_rows][::-1]
        shapes = [(count, self._shape_of([one], count)) for count in counts for one in filter(holds, budgets[::-1])]
        sizes = list(dict.fromkeys(LaunchSize(count, shape, processing) for count, shape in shapes if shape.num_nodes))
        with on_device(self._place), torch.inference_mode():
            self._sizes.prepare(sizes, self._made, progress)

    # ---------------------------------------------------------------------------------------------- a draft

    def _run(
        self, program: DraftProgram, run: Program, requests: Sequence[Request], budgets: Sequence[TreeBudget]
    ) -> Numbers:
        """Return the results for these requests, which are valid until the second next call."""
        turn, back, marks = program.inputs.turn(), program.results.turn(), Marks(self._place)
        try:
            self._write(program.inputs.on_host(turn), program.shape, requests, budgets)
            marks.mark()
            program.inputs.send(turn)
            run()
        except BaseException:  # an interrupt too
            self._tables.forget()
            self._adjusted.forget()
            raise
        program.results.fetch(back)
        marks.mark()
        marks.wait()
        self._sizes.observe(program.size, *marks.seconds())
        return program.results.on_host(back)

    def _write(
        self, inputs: Numbers, shape: DraftShape, requests: Sequence[Request], budgets: Sequence[TreeBudget]
    ) -> None:
        """Reserve slots, and write the inputs for these requests."""
        inputs["num"][0], inputs["lines_float32"][:] = len(requests), self._lines(requests)
        for row, (request, budget) in enumerate(zip(requests, budgets, strict=True)):
            num_computed, num_unread = len(self._own_cache.slots(request.request_id)), self._num_unread(request)
            slots = self._reserve(request, shape.num_columns)
            values = DraftRow(request, budget, self._name, self._draws(request), num_computed, num_unread, slots)
            values.write(inputs, row, self._target_vocab)
        if len(inputs["adjusted_rows"]):
            inputs["adjusted_rows"][: len(requests)] = self._adjusted.update(requests)
        self._tables.write(dict(self._changes(requests)), inputs)

    def _changes(self, requests: Sequence[Request]) -> Iterator[tuple[str, Iterable[Change]]]:
        """Yield the changes of each table, by its name."""
        tables, slots_of = self._tables, [self._own_cache.slots(request.request_id) for request in requests]
        if tables.own is not None:
            yield "own", tables.own.changes(slots_of)
        if tables.target is not None:
            yield (
                "target",
                tables.target.changes([self._reader.cache.slots(request.request_id) for request in requests]),
            )
        if tables.following is not None:  # of the tokens that a head computes now
            unread = [
                (len(slots), request.token_ids[len(slots) + 1 :])
                for slots, request in zip(slots_of, requests, strict=True)
            ]
            context = tables.following.context
            yield (
                "following",
                [(row * context + first, np.asarray(tokens)) for row, (first, tokens) in enumerate(unread)],
            )

    def _lines(self, requests: Sequence[Request]) -> list[tuple[Floats, ...]]:
        """Return lines of acceptance probabilities for the tables of a `ChanceTable`: [heights, slopes][3, lines].

        The rule of one request stands for that of all whose tokens are chosen, or drawn.
        """
        sampled = [request for request in requests if not request.params.is_greedy]
        chosen, drawn = (
            next((request.verification for request in sampled if self._draws(request) == is_drawn), None)
            for is_drawn in (False, True)
        )
        return list(zip(*chance_lines(self._calibration, self._name, (chosen, drawn)), strict=True))

    def _reserve(self, request: Request, count: int) -> Slots:
        """Reserve the slots of what the drafter computes for a request."""
        if isinstance(self._cache, BorrowedCache):
            return self._cache.reserve(request, count)
        return self._own_cache.reserve(request.request_id, count) if self._kind.stores_drafts else NO_SLOTS

    def _grown(self, request: Request, results: Numbers, row: int, program: DraftProgram) -> GrownTree:
        """Return the tree of a request, and note what the drafter has computed of it."""
        tree, columns = program.tree(results, row, self._name, is_drawn=self._draws(request))
        num_known, num_columns = program.shape.num_known, program.shape.num_columns
        if not self._kind.shares_cache:
            self._cache.note_read(request, self._num_unread(request), of=num_known)
        if self._kind.shares_cache or self._kind.reads_paths:  # nothing of their drafts is kept
            return GrownTree(request, tree, ())
        nodes = {column: node for node, column in enumerate(columns)}
        return GrownTree(request, tree, [nodes.get(column, -1) for column in range(num_known, num_columns)])
