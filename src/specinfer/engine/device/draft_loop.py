"""DraftLoop: one drafter's part of a step on a device, with the trees of the drafters before it merged into its own.

The loops of several drafters run one after the other. The tree of each is a proposal to the next, merged there by the
tokens of its paths as the guesses of lookups are, so the last one's tree is that of all. What an earlier drafter has
computed of an accepted path is found by following the path in its own tree.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specinfer.core.request import DRAWS_EACH
from specinfer.drafters.assistant_drafter import AssistantRunner
from specinfer.drafters.feature_drafter import HeadRunner
from specinfer.drafters.kind import DraftKind
from specinfer.engine.device.draft_shape import DraftShape
from specinfer.engine.device.growth import Drawing, grow
from specinfer.engine.device.known_tokens import (
    DraftInputs,
    FirstPass,
    Kept,
    KnownFeature,
    KnownPair,
    KnownPath,
    KnownRoot,
    KnownTokens,
)
from specinfer.engine.device.launch_size import LaunchSize
from specinfer.engine.device.passes import BlockPass, DraftColumns, LevelPasses, Passes, PassInputs
from specinfer.engine.device.processing import LogitProcessor
from specinfer.engine.device.state import DeviceState, DraftState
from specinfer.model.batch import ForwardBatch, KVStore
from specinfer.model.forward import forward
from specinfer.model.runner import ModelRunner
from specinfer.ops import tree_ops
from specinfer.ops.logits import Paths
from specinfer.ops.trees import Candidates, DeviceDraws, DeviceTrees, Frontier, Guesses, Limits, Sampling, Walk


class DeviceDrafter(NamedTuple):
    """A drafter of steps on a device."""

    runner: ModelRunner
    kind: DraftKind
    to_target: Callable[[Tensor], Tensor]  # maps its logits [rows, drafter_vocab] to the target's vocabulary

    def known_tokens(
        self,
        shape: DraftShape,
        state: DeviceState,
        drafted: DraftState,
        inputs: DraftInputs,
        kept: Kept,
        store: KVStore,
    ) -> KnownTokens:
        """Return what it reads first in loops of this shape; arguments as for `DraftLoop`, and its store."""
        if isinstance(self.runner, HeadRunner):
            if self.kind.reads_paths:
                return KnownPath(self.runner, shape, state, drafted, inputs, kept)
            return KnownFeature(self.runner, shape, state, kept, store.taps[0])
        if self.kind.shares_cache:
            return KnownRoot(state, kept, is_sparse=self.kind.is_sparse)
        return KnownPair(state, drafted, inputs, kept)

    def store(self, shape: DraftShape, num_rows: int) -> KVStore:
        """Return what its passes read and write in loops of this shape."""
        if isinstance(self.runner, AssistantRunner):
            return self.runner.store_of(num_rows * max(shape.frontiers))
        return self.runner.tensors

    def passes(self, shape: DraftShape, known: KnownTokens, inputs: DraftInputs) -> Passes:
        """Return its passes in loops of this shape."""
        num_rows, device = len(inputs.reads), self.runner.loaded.device
        if isinstance(self.runner, HeadRunner) and self.kind.block:
            return BlockPass(self.runner, shape, inputs, num_rows, device)
        return LevelPasses(known, shape, num_rows, device)


class Proposals(NamedTuple):
    """The trees of the drafters so far, as proposals to the next one."""

    guesses: Guesses
    max_nodes: Tensor  # [rows]


class DraftLoop:
    """The draft loop of one drafter, over static buffers.

    Args:
        shape: Its trees, with those that are merged into them.
        drafted: What it has computed of each request.
        inputs: What the host sends.
        trees: Its trees, written to.
        kept: Columns that it keeps, and their number, written to.
        target_vocab: Number of tokens of the target.
        draws: The draws of its trees, written to, or None if all tokens are chosen.
    """

    def __init__(
        self,
        drafter: DeviceDrafter,
        shape: DraftShape,
        state: DeviceState,
        drafted: DraftState,
        inputs: DraftInputs,
        trees: DeviceTrees,
        kept: Kept,
        target_vocab: int,
        draws: DeviceDraws | None = None,
    ) -> None:
        self._drafter, self._shape, self._state, self._drafted = drafter, shape, state, drafted
        self._inputs, self.trees, self._draws = inputs, trees, draws
        rows, device = len(inputs.reads), drafter.runner.loaded.device
        self._clamps = drafter.runner.loaded.vocab_size < target_vocab
        self._store = drafter.store(shape, rows)
        self._known = drafter.known_tokens(shape, state, drafted, inputs, kept, self._store)
        self._passes = drafter.passes(shape, self._known, inputs)
        self._columns = DraftColumns(shape, rows, device)
        with torch.inference_mode(mode=False):
            self._numbers = torch.arange(rows, dtype=torch.int32, device=device)
            self._nodes = torch.arange(1 + shape.num_nodes, device=device)

    def grow(
        self,
        num: Tensor,
        limits: Limits,
        process: LogitProcessor,
        lookups: Guesses | None,
        before: Proposals | None,
        *,
        is_last: bool,
    ) -> Proposals | None:
        """Grow the trees. The drafter reads the root first, and what it lacks before it.

        Args:
            num: [1] int32 number of requests.
            limits: Limits of the trees of all drafters, but for their nodes.
            process: The processing of logits.
            lookups: What lookups propose, for the first drafter.
            before: The trees of the drafters before, for the others.
            is_last: Whether no drafter comes after it; otherwise its trees are returned for the next one.
        """
        state, drafted, rows = self._state, self._drafted, len(self._inputs.reads)
        roots, first = state.roots[:rows], self._known.read()
        reads = (self._numbers < num) & (state.num_left[:rows] > 0) & (self._inputs.reads > 0)
        last = self._drafter.runner.loaded.max_position - 1
        end = last + self._shape.kinds[0].block.stop  # tokens of a block see later ones, also beyond the last position
        slot_table, known = first.prefix or (drafted.slots[:rows], drafted.known[:rows])
        layouts = self._columns.lay_out(self._inputs.slots, reads, known, first.root_positions, num, end)
        score_level = self._passes.begin(first, roots, partial(self._compute, layouts, slot_table))

        def score(frontier: Frontier, candidates: Candidates) -> tuple[Tensor, Tensor | None, Tensor | None]:
            logits, accepted = score_level(frontier, candidates)
            logits = self._drafter.to_target(logits)
            paths = Paths(frontier.numbers, candidates.tokens, candidates.parents, 0, frontier.level)
            return logits, process(logits, paths), accepted

        drafts = reads if first.is_whole is None else reads & first.is_whole
        mine = replace(
            limits,
            max_nodes=torch.where(drafts, self._inputs.max_nodes, 0),
            max_depth=torch.minimum(limits.max_depth, last - first.root_positions),
        )
        most = mine.max_nodes if before is None else torch.maximum(mine.max_nodes, before.max_nodes)
        drawing = None
        if self._draws is not None:
            numbers, truncation = (drafted.streams[:rows], drafted.first_draw[:rows]), state.truncation.first(rows)
            num_candidates = self._shape.num_candidates
            drawing = Drawing(state.is_drawn[:rows], *numbers, truncation, num_candidates, self._draws)
        candidates = grow(
            self._shape, roots, first.root_columns, score,
            Sampling(state.seeds[:rows], state.temperatures[:rows], state.known[:rows]),
            drafted.chances, mine, self.trees, lookups if before is None else before.guesses, most, drawing,
        )  # fmt: skip
        if drawing is not None:
            drafted.first_draw[:rows].add_((mine.max_nodes > 0) * DRAWS_EACH)
        return None if is_last else self._proposed(candidates, first, replace(mine, max_nodes=most))

    def _compute(
        self,
        layouts: Sequence[PassInputs],
        slot_table: Tensor,
        number: int,
        tokens: Tensor,
        visible: Tensor | None,
        logit_rows: Tensor,
        features: Tensor | None,
    ) -> Tensor:
        """Run one pass over tokens whose prefixes have the slots of a table; other arguments as for `Compute`."""
        loaded = self._drafter.runner.loaded
        if self._clamps:
            tokens = tokens.clamp(max=loaded.vocab_size - 1)
        layout, positions, slots = layouts[number]
        batch = ForwardBatch(
            token_ids=tokens.flatten(),
            positions=positions,
            slots=slots,
            logit_rows=logit_rows,
            pieces=(),
            store=self._store,
            allows_native=False,
            layout=layout.over(slot_table, visible),
            features=features,
            adapter_rows=self._drafter.runner.adapter_rows(self._inputs.lora_indices, tokens.shape[1]),
        )
        return forward(loaded.model, batch)

    def _proposed(self, candidates: Candidates, first: FirstPass, limits: Limits) -> Proposals:
        """Return the trees as proposals to the next drafter, with the path probability of each node."""
        trees, roots = self.trees, self._state.roots[: len(self._inputs.reads)]
        by_path_prob = replace(trees, confidence=torch.empty_like(trees.confidence))
        valued = replace(candidates, confidence=candidates.path_prob)
        tree_ops.best_tree(candidates.path_prob, valued, roots, first.root_columns, limits, by_path_prob)
        in_use = self._nodes < trees.sizes.unsqueeze(1)
        path_prob = torch.where(in_use, by_path_prob.confidence, -1.0)[:, 1:].contiguous()
        guesses = Guesses(trees.tokens[:, 1:].contiguous(), trees.parents[:, 1:] - 1, path_prob)
        return Proposals(guesses, limits.max_nodes)

    def keep(self, walked: Walk, merged: DeviceTrees) -> None:
        """Keep what the drafter computed of the accepted paths, which are in the merged trees of all drafters."""
        self._known.keep(walked, self.trees, merged)


class DraftLoops:
    """The draft loops of a launch, which run one after the other; the last one's trees are those of all drafters.

    Args:
        size: Rows and tree shape of the launch.
        drafters: The drafters.
        state: Rows of the requests.
        inputs: What the host sends, by the names of `LaunchSize.draft_inputs`.
        trees: The trees of each drafter, written to.
        kept: Columns that each drafter keeps, and their number, written to.
        target_vocab: Number of tokens of the target.
        draws: The draws of the trees, written to, or None if all tokens are chosen.
        lora_indices: [rows] int32 slots of adapters, or None in steps without.
    """

    def __init__(
        self,
        size: LaunchSize,
        drafters: Sequence[DeviceDrafter],
        state: DeviceState,
        inputs: Mapping[str, Tensor],
        trees: Sequence[DeviceTrees],
        kept: Sequence[Kept],
        target_vocab: int,
        draws: DeviceDraws | None = None,
        lora_indices: Tensor | None = None,
    ) -> None:
        self._state, self._inputs, self._trees, self._loops = state, inputs, trees, list[DraftLoop]()
        for number, drafter in enumerate(drafters):
            shape = size.shape.of_model(number)
            slots = inputs["draft_slots"][number, :, : shape.num_columns]
            of_host = DraftInputs(slots, inputs["drafts"][number], inputs["max_nodes"][number], lora_indices)
            loop = DraftLoop(
                drafter, shape, state, state.drafts[number], of_host, trees[number], kept[number], target_vocab, draws
            )
            self._loops.append(loop)

    def grow(self, process: LogitProcessor, guesses: Guesses | None = None) -> None:
        """Grow the trees of all drafters, and merge them.

        Args:
            process: The processing of logits.
            guesses: What lookups propose, or None for nothing.
        """
        inputs, rows = self._inputs, len(self._inputs["max_depth"])
        # The token after the path needs no draft token.
        max_depth = torch.minimum(inputs["max_depth"], self._state.num_left[:rows] - 1)
        limits = Limits(inputs["max_nodes"][0], max_depth, inputs["least_float32"], inputs["widths"])
        before = None
        for loop in self._loops:
            before = loop.grow(inputs["num"], limits, process, guesses, before, is_last=loop is self._loops[-1])
        last = self._trees[-1]
        for trees in self._trees[:-1]:
            torch.maximum(last.path_prob, trees.path_prob, out=last.path_prob)

    def keep(self, walked: Walk) -> None:
        """Keep what the drafters computed of the accepted paths."""
        for loop in self._loops:
            loop.keep(walked, self._trees[-1])
