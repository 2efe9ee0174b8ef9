"""The programs of a step on a device: draft loop, and verification with walk and commit, over static buffers.

Rows are those of `DeviceState`. All shapes are fixed: a request's tree has a slot for each node. Unused nodes see their
ancestors but are seen by none, and their slots are freed. Requests beyond `num` have slots -1 and lengths 0, and
nothing is written for them, so that a program can be run, and captured, without any request.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specinfer.engine.device.draft_loop import DeviceDrafter, DraftLoops
from specinfer.engine.device.launch_size import LaunchSize, TreeNames
from specinfer.engine.device.logprobs import write_logprobs, write_node_logprobs
from specinfer.engine.device.masks import TokenMasks
from specinfer.engine.device.processing import LogitProcessor, Processing
from specinfer.engine.device.scan import DeviceScan
from specinfer.engine.device.state import DeviceState
from specinfer.model.batch import ForwardBatch
from specinfer.model.forward import forward
from specinfer.model.graphs.capture import Program
from specinfer.model.recurrent.layers import is_hybrid
from specinfer.model.runner import ModelRunner
from specinfer.ops import AdapterRows, tree_ops
from specinfer.ops.cpu.choice import SUPPORT
from specinfer.ops.logits import Adjustments, Paths
from specinfer.ops.tree_layout import TreeLayout
from specinfer.ops.trees import DeviceDraws, DeviceTrees, Guesses, WalkInputs


class _Nodes(NamedTuple):
    """The nodes of all trees, as the target's pass and the walk take them."""

    is_row: Tensor  # [rows] True for rows that have a request
    is_live: Tensor  # [rows] True for those that need a token
    slots: Tensor  # [rows, nodes] -1 for rows without a request
    starts: Tensor  # [rows + 1]
    positions: Tensor  # [rows, nodes]
    visible: Tensor


class StepPrograms:
    """The programs of one size, and their inputs and results: `draft` and `verify`, which may run in two parts.

    Args:
        size: Rows and tree shape of the step.
        state: Rows of the requests.
        target: The runner of the target.
        drafters: The drafters, as many as a size with trees has, unless lookups alone propose these.
        adjustments: Rows of biases and penalties; None only with a size that applies none.
        masks: Masks of tokens, for sizes that are masked.
    """

    def __init__(
        self,
        size: LaunchSize,
        state: DeviceState,
        target: ModelRunner,
        drafters: Sequence[DeviceDrafter] = (),
        adjustments: Adjustments | None = None,
        masks: TokenMasks | None = None,
    ) -> None:
        assert size.shape.num_models in (0, len(drafters))
        assert adjustments is not None or size.processing < Processing.ADJUSTMENT
        self.size = size
        device = target.loaded.device
        self.inputs, self.results = size.inputs(device), size.results(device)
        self._state, self._target = state, target
        self._lora_indices = self.inputs.on_device["lora_indices"] if size.adapts else None
        self._numbers = torch.arange(size.num_rows + 1, dtype=torch.int32, device=device)
        self._logit_rows = torch.arange(size.num_rows * size.num_nodes, device=device)
        self._nodes = torch.arange(size.num_nodes, dtype=torch.int32, device=device).repeat(size.num_rows, 1)
        self._adjustments = None
        if adjustments is not None and size.processing >= Processing.ADJUSTMENT:
            self._adjustments = adjustments.first(size.num_rows)
        self._masks = masks if size.is_masked else None
        self._process = LogitProcessor(
            state.truncation.first(size.num_rows) if size.processing else None, self._adjustments,
            None if self._masks is None else partial(self._masks.of_roots, size.num_rows, size.num_nodes),
        )  # fmt: skip
        with torch.inference_mode(mode=False):
            support = min(SUPPORT, target.loaded.vocab_size)
            self._draws = DeviceDraws.empty(size.num_rows, size.num_nodes - 1, support, device) if size.rule else None
        self._scan = DeviceScan(size, state, target) if is_hybrid(target.loaded.model) else None
        # In what is sent to the host, from the first program to the second.
        num_trees = max(size.shape.num_models, 1)
        names = [TreeNames.from_number(number, num_trees) for number in range(num_trees)]
        trees = [self._grown(each, is_last=each is names[-1]) for each in names]
        self._trees, self._loops = trees[-1], None
        if size.shape.num_models:
            kept = zip(self.results.on_device["draft_path"], self.results.on_device["draft_lengths"], strict=True)
            self._loops = DraftLoops(
                size, drafters, state, self.inputs.on_device, trees, list(kept), target.loaded.vocab_size,
                self._draws, self._lora_indices,
            )  # fmt: skip

    def _grown(self, names: TreeNames, *, is_last: bool) -> DeviceTrees:
        """Return the trees of these results."""
        tokens, parents, sizes, confidence = (self.results.on_device[name] for name in names)
        path_prob = self.results.on_device["path_prob_float32"]
        with torch.inference_mode(mode=False):
            path_prob = path_prob if is_last else torch.zeros_like(path_prob)
            return DeviceTrees(tokens, parents, sizes, confidence, torch.zeros_like(tokens), path_prob)

    @property
    def parts(self) -> tuple[Program | None, Program | None, Program]:
        """In order: of steps with trees the draft loop, of those with masks the target's pass, and the rest."""
        draft = self.draft if self.size.shape.num_nodes else None
        return (draft, self.score, self.walk) if self.size.is_masked else (draft, None, self.verify)

    def draft(self) -> None:
        """Grow the trees of all drafters, one after the other, and merge them, or take those of lookups alone."""
        inputs = self.inputs.on_device
        guesses = Guesses(inputs["guess_tokens"], inputs["guess_parents"], inputs["guess_float32"])
        if self._loops is None:
            self._take(guesses)
        else:
            self._loops.grow(self._process, guesses if self.size.shape.num_guesses else None)

    def _take(self, guesses: Guesses) -> None:
        """Make the trees of guesses alone, which the host has cut to what they may have."""
        trees = self._trees
        trees.tokens[:, 0], trees.parents[:, 0] = self._state.roots[: self.size.num_rows], 0
        trees.tokens[:, 1:] = guesses.tokens
        torch.add(guesses.parents, 1, out=trees.parents[:, 1:])
        trees.confidence.fill_(-1.0)
        torch.add((guesses.path_prob >= 0).sum(dim=1, dtype=torch.int32), 1, out=trees.sizes)

    # ----------------------------------------------------------------------------------- verification

    def verify(self) -> None:
        """Run one target pass over all trees, walk down each, and list the slots of accepted tokens."""
        nodes = self._lay_out()
        self._walk(nodes, self._score(nodes))

    def score(self) -> None:
        """Run one target pass over all trees; `walk` does the rest of `verify` when there are masks."""
        assert self._masks is not None
        self._masks.logits[: len(self._logit_rows)].copy_(self._score(self._lay_out()))

    def walk(self) -> None:
        """Walk down the trees by the logits of `score`, and list the slots of accepted tokens."""
        assert self._masks is not None
        self._walk(self._lay_out(), self._masks.logits[: len(self._logit_rows)])

    def _lay_out(self) -> _Nodes:
        state, rows, trees, inputs = self._state, self.size.num_rows, self._trees, self.inputs.on_device
        is_row = self._numbers[:-1] < inputs["num"]
        is_live = is_row & (state.num_left[:rows] > 0)
        is_plain = not self.size.shape.num_nodes
        if is_plain:
            trees.tokens[:, 0] = state.roots[:rows]
        trees.sizes.copy_(torch.where(is_live, 1 if is_plain else trees.sizes, 0))
        visible, positions = tree_ops.mark_ancestors(
            trees.parents, state.known[:rows],
            max_depth=self.size.max_depth, last=self._target.loaded.max_position - 1,
        )  # fmt: skip
        slots = torch.where(is_row.unsqueeze(1), inputs["slots"], -1)
        starts = torch.minimum(self._numbers, inputs["num"]) * self.size.num_nodes
        return _Nodes(is_row, is_live, slots, starts, positions, visible)

    def _score(self, nodes: _Nodes) -> Tensor:
        """Return the logits of all nodes: [requests * nodes, vocab] float32."""
        state, rows, trees = self._state, self.size.num_rows, self._trees
        layout = TreeLayout(
            slot_table=state.slots[:rows],
            prefix_lens=state.known[:rows],
            starts=nodes.starts,
            node_slots=nodes.slots.clamp(min=0),
            node_positions=nodes.positions,
            node_lens=nodes.is_row.int() * self.size.num_nodes,
            visible=nodes.visible,
            positions=nodes.positions.flatten(),
            max_new=self.size.num_nodes,
            is_chain=self.size.num_nodes == 1,
        )
        batch = ForwardBatch(
            token_ids=trees.tokens.flatten(),
            positions=nodes.positions.flatten().long(),
            slots=nodes.slots.flatten().long(),
            logit_rows=self._logit_rows,
            pieces=(),
            store=self._target.tensors,
            allows_native=False,
            layout=layout,
            adapter_rows=self._adapter_rows(),
            padded_scan=None if self._scan is None else self._scan.of_step(trees, nodes.slots, nodes.is_live),
        )
        logits = forward(self._target.loaded.model, batch)
        if self._scan is not None:
            self._scan.advance(nodes.is_live)
        return logits

    def _walk(self, nodes: _Nodes, logits: Tensor) -> None:
        state, rows, trees, results = self._state, self.size.num_rows, self._trees, self.results.on_device
        is_live, num_left, unprocessed = nodes.is_live, state.num_left[:rows], logits
        is_scored = self.size.asked is not None or self.size.is_traced
        if is_scored and (self._adjustments is not None or self._masks is not None):
            unprocessed = logits.clone()
        if self._masks is not None:
            tree_ops.mask_logits(logits, *self._masks.of_nodes(len(logits)))
        least = self._process(logits, Paths(self._nodes, trees.tokens, trees.parents, 1, self.size.max_depth))
        choices = tree_ops.choose(
            logits,
            state.seeds[:rows].repeat_interleave(self.size.num_nodes),
            nodes.positions.flatten() + 1,
            state.temperatures[:rows].repeat_interleave(self.size.num_nodes),
            least,
        )
        walked = tree_ops.walk(
            choices, nodes.starts[:-1], trees.tokens, trees.parents, trees.sizes, max_depth=self.size.max_depth
        )
        if self._draws is not None and self.size.rule is not None:
            draws, sizes = self._draws, torch.where(state.is_drawn[:rows], trees.sizes, 0)
            inputs = WalkInputs(
                logits, nodes.starts[:-1], state.temperatures[:rows], trees.tokens, trees.parents, sizes,
                draws.nodes, draws.tokens, draws.probs, state.uniforms[:rows], least,
            )  # fmt: skip
            tree_ops.walk_of(self.size.rule)(inputs, out=walked)
            results["uniforms"].copy_(state.uniforms[:rows].view(torch.int32).view(rows, 2))
        path, lengths, following = walked
        tree_ops.commit(state.slots[:rows], state.known[:rows], nodes.slots, path, lengths)
        if self._adjustments is not None:
            self._count(self._adjustments, *walked)
        roots, named = self._logit_rows[:: self.size.num_nodes], state.named[:rows]
        if self.size.is_traced:
            write_node_logprobs(unprocessed, roots, trees, walked, results)
        if self.size.asked is not None:
            write_logprobs(unprocessed, roots, walked, self._drafted(path), named, results)
        for name, values in (("path", path), ("lengths", lengths), ("next", following)):
            results[name].copy_(values)
        if self._loops is not None:
            self._loops.keep(walked)
        state.roots[:rows].copy_(torch.where(is_live, following.clamp(min=0), state.roots[:rows]))
        left = torch.where(following < 0, 0, num_left - lengths - 1)  # a request with invalid logits ends here
        state.num_left[:rows].copy_(torch.where(is_live, left, num_left))

    def _adapter_rows(self) -> AdapterRows | None:
        """Return the adapter of each node, which is that of its request, or None in a step without adapters."""
        rows = self._target.adapter_rows(self._lora_indices, self.size.num_nodes)
        assert (rows is not None) == self.size.adapts
        return rows

    def _drafted(self, path: Tensor) -> Tensor:
        """Return the tokens of the paths, [rows, depth] int64."""
        return self._trees.tokens.long().gather(1, path.clamp(min=0).long())

    def _count(self, adjustments: Adjustments, path: Tensor, lengths: Tensor, following: Tensor) -> None:
        """Count the emitted tokens, for the penalties of later steps and the first end that is not too early."""
        tokens = torch.cat([self._drafted(path), following.clamp(min=0).unsqueeze(1)], dim=1)
        is_new = torch.cat([path >= 0, (following.unsqueeze(1) >= 0) & (lengths.unsqueeze(1) >= 0)], dim=1)
        adjustments.seen.scatter_add_(1, tokens, 2 * is_new.int())
        adjustments.num_early.sub_(lengths + 1)
