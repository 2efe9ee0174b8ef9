"""DeviceRows: the rows of requests on a device, the programs that use them, and the data exchanged with the host."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.core.draws import Floats
from specinfer.core.noise import derive_seed, draws_of
from specinfer.core.progress import ProgressCallback
from specinfer.core.request import DRAWS_EACH, Request
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TreeBudget
from specinfer.drafters.small_model import SmallModelDrafter
from specinfer.engine.device.captured_sizes import CapturedSizes
from specinfer.engine.device.draft_loop import DeviceDrafter
from specinfer.engine.device.draft_shape import PLAIN, RECOMPUTED, DraftShape, holds, shape_of, shape_of_guesses
from specinfer.engine.device.launch import Answers, Launch
from specinfer.engine.device.launch_size import LaunchSize
from specinfer.engine.device.logprobs import Asked
from specinfer.engine.device.masks import TokenMasks
from specinfer.engine.device.processing import Processing, ReservedAdjustments, write_adjustments, write_truncation
from specinfer.engine.device.state import DeviceState
from specinfer.engine.device.step_programs import StepPrograms
from specinfer.engine.timer import Marks
from specinfer.model.graphs.capture import Graphs, Program
from specinfer.model.graphs.sizes import REQUESTS, at_least, max_rows
from specinfer.model.kv_cache import Slots
from specinfer.model.recurrent.states import Loan
from specinfer.model.runner import ModelRunner
from specinfer.ops.cpu.transfers import send
from specinfer.ops.logits import Adjustments
from specinfer.ops.triton import on_device

_ROW = 128  # slots


class DeviceRows:
    """Rows on a device, and launches of programs over the first of them. Only `Marks.wait` waits for the device.

    Args:
        target: The runner of the target.
        drafters: The drafters; none without speculation.
        num_rows: Number of rows.
        max_context: Longest request, in tokens.
    """

    def __init__(
        self, target: ModelRunner, drafters: Sequence[SmallModelDrafter], num_rows: int, max_context: int
    ) -> None:
        self._target, self._drafters = target, drafters
        self._place = target.loaded.device
        self._graphs = target.graphs or Graphs(self._place, captures=False)
        # Rounded to whole rows, because kernels are compiled once for all lengths that are multiples of a power of two.
        context = -(-max_context // _ROW) * _ROW
        self.state = DeviceState.empty(num_rows, context, self._place, [drafter.kind for drafter in drafters])
        runners = [target, *(drafter.runner for drafter in drafters)]
        self.sizes = CapturedSizes[StepPrograms](self._graphs, runners, "whole steps")
        self._adjustments = ReservedAdjustments(num_rows, target.loaded.vocab_size, self._place)
        assert target.padded is not None
        self._masks = TokenMasks(target.padded.results)  # the logits of other passes have been read by then

    @property
    def num_rows(self) -> int:
        """Maximum number of requests at a time."""
        return len(self.state.known)

    @property
    def max_rows(self) -> int:
        """Most rows of a step of the target."""
        return max_rows(has_states=bool(self._target.tensors.states.pools))

    def num_recomputed(self, least: int) -> int:
        """Return the number of places before the root that hold this many tokens; 0 without recurrent layers."""
        places = at_least(RECOMPUTED, least) if self._target.tensors.states.pools else 0
        assert places is not None
        return places

    @property
    def takes_adapters(self) -> bool:
        """True if requests may have adapters."""
        return self._target.padded is not None and self._target.padded.adapter_slots is not None

    # --------------------------------------------------------------------------------------------- rows

    def _sent(self, values: npt.NDArray[Any]) -> Tensor:
        return send(values, self._place)

    def write(self, row: int, request: Request, slots: Slots, *, loan: Loan, is_drawn: bool = False) -> None:
        """Write a request to a row; its known tokens but the last have these slots.

        Args:
            loan: Rows for the states of recurrent layers.
            is_drawn: Whether its draft tokens are drawn, for the multi-step or the traversal rule.
        """
        state = self.state
        state.scanned[row].fill_(loan.num_known)
        for place, state_row in enumerate(loan.rows):
            state.states[row, place].fill_(state_row)
        if loan.source != loan.rows[0]:
            for pool in self._target.tensors.states.pools.values():
                pool[loan.rows[0]].copy_(pool[loan.source])
        state.slots[row, : len(slots)].copy_(self._sent(slots.astype(np.int32)))
        state.known[row].fill_(len(slots))
        state.roots[row].fill_(request.token_ids[-1])
        state.num_left[row].fill_(request.max_new_tokens)
        state.seeds[row].fill_(request.seed)
        state.is_drawn[row].fill_(is_drawn)
        state.uniforms[row].fill_(request.uniforms.state - (request.uniforms.state >> 63 << 64))
        for drafter, drafts in zip(self._drafters, state.drafts, strict=True):
            drafts.has_two[row].fill_(False)
            drafts.streams[row].fill_(derive_seed(request.seed, draws_of(drafter.name)))
            drafts.first_draw[row].fill_(
                (request.drafting.num_draws.get(drafter.name, 0) // DRAWS_EACH + 1) * DRAWS_EACH
            )
        if request.params.scored_tokens:
            named = np.asarray(request.params.scored_tokens, dtype=np.int64)
            state.named[row, : len(named)].copy_(self._sent(named))
        write_truncation(state.truncation, row, request.params, self._target.loaded.vocab_size)
        if Processing.from_request(request) >= Processing.ADJUSTMENT:
            assert self._adjustments.rows is not None
            write_adjustments(self._adjustments.rows, row, request, self._sent)
        elif self._adjustments.rows is not None:
            self._adjustments.rows.is_adjusted[row].fill_(0)

    def write_drafter(self, number: int, row: int, slots: Slots) -> None:
        """Note that a drafter has computed all that it can of the known tokens but the last, in these slots."""
        drafted = self.state.drafts[number]
        drafted.slots[row, : len(slots)].copy_(self._sent(slots.astype(np.int32)))
        drafted.known[row].fill_(len(slots))
        drafted.has_two[row].fill_(False)

    def move(self, source: int, row: int) -> None:
        self.state.move(source, row)
        if self._adjustments.rows is not None:
            self._adjustments.rows.move(source, row)

    def can_adjust(self) -> bool:
        """Return whether there is memory for biases and penalties, which is reserved when they are first needed."""
        return self._adjustments.are_there()

    def write_acceptance(self, tables: Sequence[Sequence[tuple[Floats, Floats]]]) -> None:
        """Update each drafter's acceptance probabilities: heights and slopes of the lines of each table."""
        for drafted, lines in zip(self.state.drafts, tables, strict=True):
            for i, (heights, slopes) in enumerate(lines):
                drafted.chances.heights[i].copy_(self._sent(heights.astype(np.float32)))
                drafted.chances.slopes[i].copy_(self._sent(slopes.astype(np.float32)))

    # ------------------------------------------------------------------------------------------- launch

    @torch.inference_mode()
    def launch(self, launch: Launch) -> None:
        """Run the programs for the first rows; `launch.answers` receives the results."""
        with on_device(self._place):
            self._launch(launch)

    def size_for(self, wanted: LaunchSize, most_nodes: int, *, may_cut: bool = False) -> LaunchSize | None:
        """Return the size to run a step in, as `SizeChoice.choose` does."""
        num_captures = 2 if wanted.shape.num_nodes else 1
        return self.sizes.choose(wanted, most_nodes, num_captures=num_captures, may_cut=may_cut)

    @torch.inference_mode()
    def prepare(
        self,
        budgets: Sequence[TreeBudget],
        sampling_defaults: Mapping[str, Any],
        rule: str | None,
        progress: ProgressCallback | None,
        *,
        has_lookups: bool,
    ) -> None:
        """Capture plain steps and those with trees of these budgets, so that the first requests do not wait for them.

        Args:
            sampling_defaults: The model's own sampling parameters, whose processing of logits the steps have.
            rule: Verification rule of requests whose tokens are drawn, or None if there are none.
            has_lookups: Whether lookups propose tokens, too.
        """
        processing = Processing.from_params(SamplingParams(**sampling_defaults))
        if processing >= Processing.ADJUSTMENT and not self.can_adjust():
            processing = Processing.TRUNCATION
        kinds, sizes = [drafter.kind for drafter in self._drafters], list[LaunchSize]()
        for count in [count for count in REQUESTS if count <= self.num_rows][::-1]:
            most, shapes = self.max_rows // count, list[DraftShape]()
            for budget in filter(holds, budgets[::-1] if kinds or has_lookups else ()):
                guess_depth = budget.max_depth if has_lookups else 0
                shapes.append(
                    shape_of([budget], most - 1, most, guess_depth, kinds)
                    if kinds
                    else shape_of_guesses(min(budget.max_nodes, most - 1), budget.max_depth, most - 1)
                )
            recomputed = self.num_recomputed(max([1, *(shape.max_depth for shape in shapes)]))
            sizes += dict.fromkeys(
                LaunchSize(count, shape, processing, rule=rule, num_recomputed=recomputed) for shape in (*shapes, PLAIN)
            )
        largest = next((size for size in sizes if size.shape.num_nodes), sizes[0])
        rarer = replace(
            largest, processing=Processing.ADJUSTMENT, asked=Asked(1, 1), adapts=self.takes_adapters, is_masked=True
        )
        with on_device(self._place):
            self.sizes.prepare(sizes, self._made, progress, [rarer])

    def _launch(self, launch: Launch) -> None:
        captured = self.sizes.of(launch.size, self._made)
        programs, marks = captured.programs, Marks(self._place)
        draft, score, verify = captured.runs
        assert verify is not None
        turn = programs.inputs.turn()
        drafters = [drafter.name for drafter in self._drafters] if launch.size.shape.num_models else []
        inputs = programs.inputs.on_host(turn)
        launch.write(inputs, drafters)
        if launch.size.adapts:
            self._place_adapters(inputs["lora_indices"], launch)
        marks.mark()
        launch.clock.mark("rest")
        programs.inputs.send(turn)
        back = programs.results.turn()
        if draft is not None:
            if launch.size.is_masked:
                self._masks.send_roots(launch.requests, launch.size.num_nodes)
            draft()
        marks.mark()
        launch.clock.mark("draft")
        if score is not None:
            programs.results.fetch(back)
            self._mask(launch, programs.results.on_host(back), score)
        verify()
        programs.results.fetch(back)
        marks.mark()
        launch.clock.mark("target")
        launch.clock.launched()
        launch.answers = Answers(marks, programs.results.on_host(back), launch.size.shape.num_models)

    def _mask(self, launch: Launch, results: dict[str, npt.NDArray[Any]], score: Program) -> None:
        """Run the target's pass, and meanwhile send the masks of all nodes whose masks were not sent yet.

        Args:
            results: Results of the step, with the trees, which are on their way here.
        """
        drafted, nodes = Marks(self._place), launch.size.num_nodes
        drafted.mark()
        score()
        if not launch.size.shape.num_nodes:
            self._masks.send_roots(launch.requests, nodes)
            return
        drafted.wait()
        answers = Answers(drafted, results, launch.size.shape.num_models)
        self._masks.send(launch.requests, [answers.tree(row) for row in range(len(launch.requests))], nodes)

    def _place_adapters(self, lora_indices: npt.NDArray[Any], launch: Launch) -> None:
        """Write the slot of each request's adapter. Steps in flight have read the slots before they change there."""
        padded, adapters = self._target.padded, [served.request.adapter for served in launch.device_requests]
        assert padded is not None
        assert padded.adapter_slots is not None
        slots = padded.adapter_slots.place([None if adapter is None else adapter.table for adapter in adapters])
        assert slots is not None, "the scheduler runs requests with as many adapters as there are slots"
        lora_indices[:] = 0
        lora_indices[: len(slots)] = slots

    def wait(self) -> None:
        """Wait until everything that was launched is done, also in part."""
        marks = Marks(self._place)
        with on_device(self._place):
            marks.mark()
        marks.wait()

    def _made(self, size: LaunchSize) -> StepPrograms:
        """Return programs without requests, as captures run them."""
        drafters = [
            DeviceDrafter(drafter.runner, drafter.kind, drafter.vocabulary.to_target) for drafter in self._drafters
        ]
        adjustments = self._adjustments.rows
        if adjustments is None and size.processing >= Processing.ADJUSTMENT:  # to compile kernels for later requests
            adjustments = Adjustments.empty(size.num_rows, self._target.loaded.vocab_size, self._place)
        programs = StepPrograms(size, self.state, self._target, drafters, adjustments, self._masks)
        programs.inputs.clear()
        return programs
